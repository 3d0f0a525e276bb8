"""Layers of several ranks, and their results against float64.

Results of all ranks are joined and compared with float64, within the bounds of linear_bounds.py.
Besides, partial sums are rounded to the dtype before and while they are added over ranks: with P
ranks each of them by half a unit in the last place, and each of P sums, no larger than the sum of
magnitudes, by another.
"""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from linear_bounds import LinearProblem, assert_right, draw, half_ulp
from start_ranks import DEVICE, Checks
from torch import distributed

import cupynorm
from cupynorm import LayerNormLinear

CHECKS = Checks()
check = CHECKS.add
NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
ROWS, WIDTH, IN, OUT = 8, 2, 24, 16  # input is [ROWS, WIDTH, IN]


class Case(NamedTuple):
    mode: str
    sequence_parallel: bool
    norm: str
    dtype: str

    @property
    def name(self) -> str:
        rows = "-sequence" if self.sequence_parallel else ""
        return f"{self.mode}{rows}-{self.norm}-{self.dtype}"


class Shares:
    """Which elements of a whole problem a rank has."""

    def __init__(self, case: Case, rank: int, in_features=IN, out_features=OUT, split=None):
        size = distributed.get_world_size()
        column = case.mode == "column"
        outs, ins = np.arange(out_features), np.arange(in_features)
        if column:
            ends = np.cumsum(list((split or {"": out_features}).values()))[:-1]
            parts = [np.split(part, size)[rank] for part in np.split(outs, ends)]
            outs = np.concatenate(parts)
        else:
            ins = np.split(ins, size)[rank]
        self.outs, self.ins = outs, ins
        self.rows = np.split(np.arange(ROWS), size)[rank]
        self.x_rows = self.rows if column and case.sequence_parallel else np.arange(ROWS)
        self.y_rows = self.rows if not column and case.sequence_parallel else np.arange(ROWS)


def tensor(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype), device=DEVICE)


def make_layer(case: Case, problem: LinearProblem, own: Shares, **options) -> LayerNormLinear:
    out_features, in_features = problem.weight.shape
    layer = LayerNormLinear(
        in_features,
        out_features,
        problem.eps,
        normalization=NORMS[problem.norm],
        params_dtype=getattr(torch, problem.dtype),
        bias=problem.bias is not None,
        zero_centered_gamma=problem.zero_centered_weight,
        device=DEVICE,
        parallel_mode=case.mode,
        sequence_parallel=case.sequence_parallel,
        **{"tp_group": distributed.group.WORLD} | options,
    )
    with torch.no_grad():
        layer.layer_norm_weight.copy_(tensor(problem.norm_weight[own.ins], problem.dtype))
        if layer.layer_norm_bias is not None:
            layer.layer_norm_bias.copy_(tensor(problem.norm_bias[own.ins], problem.dtype))
        sizes = layer.parameter_split_sizes
        weight = tensor(problem.weight[np.ix_(own.outs, own.ins)], problem.dtype)
        for parameter, part in zip(layer.weights(), weight.split(sizes)):
            parameter.copy_(part)
        if problem.bias is not None:
            bias = tensor(problem.bias[own.outs], problem.dtype)
            for parameter, part in zip(layer.biases(), bias.split(sizes)):
                parameter.copy_(part)
    return layer


def inputs(problem: LinearProblem, own: Shares) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy of a rank."""
    x = problem.x.reshape(ROWS, WIDTH, -1)[np.ix_(own.x_rows, range(WIDTH), own.ins)]
    dy = problem.dy.reshape(ROWS, WIDTH, -1)[np.ix_(own.y_rows, range(WIDTH), own.outs)]
    return tensor(x, problem.dtype).requires_grad_(), tensor(dy, problem.dtype)


def gathered(value) -> list:
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def whole(case: Case, all_own: list[Shares], results: list[dict], reduced: bool) -> dict:
    """The results of the unsharded problem from those of the ranks, as float64 matrices."""
    shapes = {"dnorm_weight": (IN,), "dnorm_bias": (IN,), "dweight": (OUT, IN), "dbias": (OUT,)}
    shapes |= {"y": (ROWS, WIDTH, OUT), "dx": (ROWS, WIDTH, IN), "normalized": (ROWS, WIDTH, IN)}
    joined = {name: np.full(shapes[name], np.nan) for name in results[0]}
    is_summed = case.mode == "column" and case.sequence_parallel and not reduced
    for own, found in zip(all_own, results):
        columns = range(WIDTH)
        places = {
            "y": np.ix_(own.y_rows, columns, own.outs),
            "dx": np.ix_(own.x_rows, columns, own.ins),
            "normalized": np.ix_(own.x_rows, columns, own.ins),
            "dweight": np.ix_(own.outs, own.ins),
            "dbias": own.outs,
            "dnorm_weight": own.ins,
            "dnorm_bias": own.ins,
        }
        for name, value in found.items():
            if is_summed and name in ("dnorm_weight", "dnorm_bias"):
                value = sum(each[name] for each in results)
            before = joined[name][places[name]]
            # What several ranks have is the same on each, to the bit.
            assert np.isnan(before).all() or np.array_equal(before, value), name
            joined[name][places[name]] = value
    return {
        name: each.reshape(-1, each.shape[-1]) if each.ndim == 3 else each
        for name, each in joined.items()
    }


def allowed_besides(case: Case, problem: LinearProblem, all_own: list[Shares]) -> dict:
    """The roundings of partial sums: see the docstring of this module."""
    size, dtype = len(all_own), problem.dtype
    if case.mode == "column":
        parts = [problem.dy[:, own.outs] @ problem.weight[own.outs] for own in all_own]
        name = "reach_error"
    else:
        norm = cupynorm.reference.norm_linear(
            problem.x,
            problem.norm_weight,
            problem.norm_bias,
            problem.weight,
            None,
            problem.eps,
            centered=problem.centered,
            zero_centered_weight=problem.zero_centered_weight,
        ).normalized
        parts = [norm[:, own.ins] @ problem.weight[:, own.ins].T for own in all_own]
        name = "y_error"
    magnitudes = sum(map(np.abs, parts))
    error = sum(half_ulp(part, dtype) for part in parts) + size * half_ulp(magnitudes, dtype)
    if name == "y_error" and problem.bias is not None:
        error = error + half_ulp(magnitudes + np.abs(problem.bias), dtype)
    return {name: error}


def float64(value: torch.Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()


def joined(parts) -> np.ndarray:
    return float64(torch.cat(list(parts)))


def results_of(layer: LayerNormLinear, y: torch.Tensor, x: torch.Tensor) -> dict[str, np.ndarray]:
    found = {"y": float64(y), "dx": float64(x.grad)}
    found["dnorm_weight"] = float64(layer.layer_norm_weight.grad)
    if layer.layer_norm_bias is not None:
        found["dnorm_bias"] = float64(layer.layer_norm_bias.grad)
    found["dweight"] = joined(weight.grad for weight in layer.weights())
    if layer.use_bias:
        found["dbias"] = joined(bias.grad for bias in layer.biases())
    return found


def problem_of(case: Case, **options) -> LinearProblem:
    without = {"norm_bias"} if case.norm == "rms_norm" else set()
    without |= set(options.pop("without", ()))
    return draw(case.norm, case.dtype, ROWS * WIDTH, IN, OUT, without=sorted(without), **options)


def run(case: Case, rank: int, problem: LinearProblem, call=None, **options) -> LayerNormLinear:
    """One forward and backward on all ranks, compared with float64."""
    size = distributed.get_world_size()
    split = options.get("parameters_split")
    all_own = [Shares(case, each, split=split) for each in range(size)]
    own = all_own[rank]
    layer = make_layer(case, problem, own, **options)
    x, dy = inputs(problem, own)
    y = layer(x) if call is None else call(layer, x)
    y.backward(dy)
    if options.get("delay_wgrad_compute"):
        assert layer.weights()[0].grad is None
        layer.backward_dw()
    results = gathered(results_of(layer, y, x))
    found = whole(case, all_own, results, bool(options.get("reduce_norm_gradients")))
    assert_right(
        problem, found, without=("sum", "normalized"), **allowed_besides(case, problem, all_own)
    )
    return layer


def plain(case: Case, rank: int) -> None:
    """Against float64, and a second run has the same bits."""
    problem = problem_of(case)
    grads = []
    for _ in range(2):
        layer = run(case, rank, problem)
        grads.append([parameter.grad for parameter in layer.parameters()])
    for one, other in zip(*grads):
        assert one.abs().max() > 0 and torch.equal(one, other)


DTYPES = ("float32", "bfloat16")
CASES = [Case(*each) for each in itertools.product(("column", "row"), (False, True), NORMS, DTYPES)]
CHECKS |= {case.name: partial(plain, case) for case in CASES}
MAIN = [case for case in CASES if case.norm == "layer_norm" and case.dtype == "float32"]


def for_main(function):
    """Makes a check of each mode, with sequence_parallel and without."""
    for case in MAIN:
        CHECKS[f"{function.__name__}-{case.name}"] = partial(function, case)
    return function


@contextlib.contextmanager
def counted(name: str):
    """The dtype and size of what each rank gives to the gathers or scatters inside."""
    from cupynorm.parallel import ranks

    seen, before = [], getattr(ranks, name)

    def collective(result, own, **options):
        seen.append((own.dtype, own.numel()))
        return before(result, own, **options)

    setattr(ranks, name, collective)
    try:
        yield seen
    finally:
        setattr(ranks, name, before)


def refused(error, sentence: str, call) -> None:
    with pytest.raises(error, match=sentence):
        call()
