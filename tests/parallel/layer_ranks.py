"""Checks of LayerNormLinear on several ranks, by processes on the CPU: see start_ranks.py.

Results of all ranks are joined and compared with float64, within the bounds of linear_bounds.py.
Besides, partial sums are rounded to the dtype before and while they are added over ranks: with P
ranks each of them by half a unit in the last place, and each of P sums, no larger than the sum of
magnitudes, by another.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import os
import pickle
import tempfile
import warnings
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from linear_bounds import LinearProblem, assert_right, draw, half_ulp
from start_ranks import main
from torch import distributed
from torch.distributed import checkpoint as checkpoint_files
from torch.utils.checkpoint import checkpoint

import cupynorm
from cupynorm import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    LayerNormLinear,
    MXFP8BlockScaling,
    fp8_autocast,
    fp8_model_init,
)
from cupynorm.parallel.checkpoints import distributed_state_dict, load_distributed_state_dict
from cupynorm.parallel.products import QuantizedProducts

CHECKS = {}
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")
NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
ROWS, WIDTH, IN, OUT = 8, 2, 24, 16  # input is [ROWS, WIDTH, IN]


def check(function):
    CHECKS[function.__name__] = function
    return function


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
        for parameter, part in zip(layer._weights(), weight.split(sizes)):
            parameter.copy_(part)
        if problem.bias is not None:
            bias = tensor(problem.bias[own.outs], problem.dtype)
            for parameter, part in zip(layer._biases(), bias.split(sizes)):
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
    found["dweight"] = joined(weight.grad for weight in layer._weights())
    if layer.use_bias:
        found["dbias"] = joined(bias.grad for bias in layer._biases())
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
    y = (call or layer.__call__)(x) if call is None else call(layer, x)
    y.backward(dy)
    if options.get("delay_wgrad_compute"):
        assert layer._weights()[0].grad is None
        layer.backward_dw()
    results = gathered(results_of(layer, y, x))
    found = whole(case, all_own, results, bool(options.get("reduce_norm_gradients")))
    assert_right(
        problem,
        found,
        without=("sum", "normalized"),
        **allowed_besides(case, problem, all_own),
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


# Options.


def for_main(function):
    """Makes a check of each mode, with sequence_parallel and without."""
    for case in MAIN:
        CHECKS[f"{function.__name__}-{case.name}"] = partial(function, case)
    return function


@for_main
def kept_normalized_and_zero_centered_weight_without_bias(case, rank):
    problem = problem_of(case, zero_centered_weight=True, without=("bias",))
    run(case, rank, problem, save_normalized=True)


@for_main
def parts_of_the_weight(case, rank):
    layer = run(case, rank, problem_of(case), parameters_split={"q": 8, "k": 4, "v": 4})
    share = 2 if case.mode == "row" else 2 * distributed.get_world_size()
    assert len(layer.q_weight) == 16 // share


@for_main
def float64_input(case, rank):
    run(case._replace(dtype="float64"), rank, problem_of(case._replace(dtype="float64")))


@for_main
def a_checkpoint_runs_the_layer_again(case, rank):
    run(
        case,
        rank,
        problem_of(case),
        lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    )


@for_main
def compiled_code_breaks_the_graph(case, rank):
    def call(layer, x):
        torch._dynamo.reset()
        return torch.compile(lambda x: layer(x) * 1.0, backend="eager")(x)

    run(case, rank, problem_of(case), call)


@for_main
def delayed_weight_gradients(case, rank):
    run(case, rank, problem_of(case), delay_wgrad_compute=True)


@for_main
def weight_gradients_in_main_grad(case, rank):
    """With a delay and without, of two microbatches."""
    problem, own = problem_of(case), Shares(case, rank)
    right = make_layer(case, problem, own)
    for _ in range(2):
        x, dy = inputs(problem, own)
        right(x).backward(dy)
    for delay in (False, True):
        layer = make_layer(
            case, problem, own, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
        )
        layer.weight.main_grad = torch.full_like(layer.weight, float("nan"))
        for is_first in (True, False):
            x, dy = inputs(problem, own)
            layer(x, is_first).backward(dy)
        for _ in range(2):
            layer.backward_dw()
        # Both add two float32 products; here the second is added by the product itself.
        torch.testing.assert_close(
            layer.weight.main_grad, right.weight.grad, rtol=2.0**-20, atol=2.0**-18
        )
        for name in ("layer_norm_weight", "layer_norm_bias"):
            assert torch.equal(getattr(layer, name).grad, getattr(right, name).grad)


@for_main
def the_normalised_tensor_and_its_gradient(case, rank):
    """Of this rank's rows or columns, with a gradient of its own."""
    problem = problem_of(case, dnormalized=True)
    size = distributed.get_world_size()
    all_own = [Shares(case, each) for each in range(size)]
    own = all_own[rank]
    layer = make_layer(case, problem, own, return_layernorm_output=True)
    x, dy = inputs(problem, own)
    y, normalized = layer(x)
    given = problem.dnormalized.reshape(ROWS, WIDTH, IN)
    given = given[np.ix_(own.x_rows, range(WIDTH), own.ins)]
    torch.autograd.backward((y, normalized), (dy, tensor(given, case.dtype)))
    found = results_of(layer, y, x) | {"normalized": float64(normalized)}
    found = whole(case, all_own, gathered(found), False)
    errors = allowed_besides(case, problem, all_own)
    if "reach_error" in errors:  # the addition of the other gradient
        reach = np.abs(problem.dy) @ np.abs(problem.weight) + np.abs(problem.dnormalized)
        errors["reach_error"] = errors["reach_error"] + half_ulp(reach, case.dtype)
    assert_right(problem, found, without=("sum",), **errors)


@check
def the_gathered_normalised_tensor_and_its_gradient(rank):
    """Each rank's copy has a gradient of its own; they are added."""
    case, size = Case("column", True, "layer_norm", "float32"), distributed.get_world_size()
    problem = problem_of(case, dnormalized=True)
    all_own = [Shares(case, each) for each in range(size)]
    options = {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
    layer = make_layer(case, problem, all_own[rank], **options)
    x, dy = inputs(problem, all_own[rank])
    y, normalized = layer(x)
    assert normalized.shape == (ROWS, WIDTH, IN)
    # Shares that float32 holds exactly and whose sum is the problem's gradient.
    shares = [problem.dnormalized / 2] + [problem.dnormalized / (2 * (size - 1))] * (size - 1)
    given = tensor(shares[rank].reshape(ROWS, WIDTH, IN), case.dtype)
    torch.autograd.backward((y, normalized), (dy, given))
    found = whole(case, all_own, gathered(results_of(layer, y, x)), False)
    found["normalized"] = float64(normalized).reshape(-1, IN)
    errors = allowed_besides(case, problem, all_own)
    errors["reach_error"] = errors["reach_error"] + 2 * size * half_ulp(
        np.abs(problem.dy) @ np.abs(problem.weight) + np.abs(problem.dnormalized), case.dtype
    )
    assert_right(problem, found, without=("sum",), **errors)
    # A gradient of the copies alone.
    x.grad = None
    y, normalized = layer(x)
    normalized.backward(given)
    assert x.grad.abs().max() > 0


@check
def gradients_of_the_norm_that_are_reduced_here(rank):
    case = Case("column", True, "layer_norm", "float32")
    layer = run(case, rank, problem_of(case), reduce_norm_gradients=True)
    assert layer.layer_norm_weight.sequence_parallel is False
    other = run(case, rank, problem_of(case))
    assert other.layer_norm_weight.sequence_parallel is True


@for_main
def a_returned_bias(case, rank):
    problem, own = problem_of(case), Shares(case, rank)
    layer, added = (make_layer(case, problem, own, return_bias=each) for each in (True, False))
    x, _ = inputs(problem, own)
    y, bias = layer(x)
    # Added by one product, or to its rounded result.
    torch.testing.assert_close(y + bias, added(x), rtol=2.0**-20, atol=2.0**-19)
    if case.mode == "row":
        assert layer.bias.sequence_parallel is case.sequence_parallel
        assert added.bias.sequence_parallel is False


@for_main
def a_group_that_is_set_later_and_a_copy(case, rank):
    problem, own = problem_of(case), Shares(case, rank)
    size = distributed.get_world_size()
    layer = make_layer(case, problem, own, tp_group=None, tp_size=size)
    layer.set_tensor_parallel_group(distributed.group.WORLD)
    x, _ = inputs(problem, own)
    right = make_layer(case, problem, own)(x)
    assert torch.equal(layer(x), right) and torch.equal(copy.deepcopy(layer)(x), right)
    with torch.no_grad():
        assert torch.equal(layer(x), right)


@for_main
def no_rows_and_inference_mode(case, rank):
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    for leading in ((0, 3), (0,)):
        x = torch.ones(*leading, layer.in_features, device=DEVICE, requires_grad=True)
        y = make_layer(case, problem, own)(x)
        assert y.shape == (*leading, layer.out_features)
        y.sum().backward()
        assert x.grad.shape == x.shape
    x, _ = inputs(problem, own)
    with torch.inference_mode():
        y = layer(x.detach())
    assert torch.equal(y, layer(x))


@for_main
def a_pickled_layer_needs_its_group_again(case, rank):
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own, **(flags(case) if case.sequence_parallel else {}))
    x, _ = inputs(problem, own)
    right = layer(x)
    copied = pickle.loads(pickle.dumps(layer))
    refused(RuntimeError, "the layer has no tp_group; expected set_tensor_p", lambda: copied(x))
    copied.set_tensor_parallel_group(distributed.group.WORLD)
    assert torch.equal(copied(x), right)


@for_main
def attributes_that_megatron_reads(case, rank):
    layer = make_layer(case, problem_of(case), Shares(case, rank))
    marks = {
        name: (
            getattr(each, "tensor_model_parallel", False),
            getattr(each, "partition_dim", None),
            getattr(each, "sequence_parallel", False),
        )
        for name, each in layer.named_parameters()
    }
    norm = (True, 0, False) if case.mode == "row" else (False, None, case.sequence_parallel)
    assert marks == {
        "layer_norm_weight": norm,
        "layer_norm_bias": norm,
        "weight": (True, 1 if case.mode == "row" else 0, False),
        "bias": (False, None, False) if case.mode == "row" else (True, 0, False),
    }


# Rows whose mean is far from zero.


@check
def rows_far_from_zero(rank):
    """Means of 2^12 standard deviations, and ranks whose parts differ in mean and spread."""
    case = Case("row", False, "layer_norm", "float32")
    for kind in ("far", "uneven"):
        problem = problem_of(case)
        x = problem.x - 0.5
        x = x + 4096.0 if kind == "far" else x * 2.0 ** (np.arange(IN) // 6) + np.arange(IN) // 3
        problem.x = x.astype(np.float32).astype(np.float64)
        run(case, rank, problem)


# 8-bit floats.

RECIPES = {
    "DelayedScaling": DelayedScaling(amax_history_len=2),
    "CurrentScaling": CurrentScaling(),
    "BlockScaling": BlockScaling(),
    "MXFP8BlockScaling": MXFP8BlockScaling(),
}
WIDE = 256


def in_fp8(case: Case, recipe, rank: int, **options) -> None:
    """Three steps against the unsharded layer in this process.

    Each rank's part of weight and dy has the same amax, so scales are the same on all ranks.
    What remains is the order of float32 sums: of n terms, (n + 2) 2^-24 of their magnitudes.
    """
    problem = draw(case.norm, "float32", ROWS * WIDTH, WIDE, WIDE)
    for matrix in (problem.weight, problem.dy):
        np.clip(matrix, -3.0, 3.0, out=matrix)
        matrix[:, ::32] = 3.0
        matrix[::32] = 3.0
    size = distributed.get_world_size()
    all_own = [Shares(case, each, WIDE, WIDE) for each in range(size)]
    own = all_own[rank]
    layer = make_layer(case, problem, own, **options)
    alone = Case("column", False, case.norm, case.dtype)
    all_of_it = Shares(alone, 0, WIDE, WIDE)
    all_of_it.outs = all_of_it.ins = np.arange(WIDE)
    single = make_layer(alone, problem, all_of_it, tp_group=None)
    for step in range(3):
        (x, dy), (whole_x, whole_dy) = inputs(problem, own), inputs(problem, all_of_it)
        with fp8_autocast(recipe=recipe):
            y, right = layer(x), single(whole_x)
        y.backward(dy)
        right.backward(whole_dy)
        rows, columns = range(ROWS), range(WIDTH)
        y_right = right[np.ix_(own.y_rows, columns, own.outs)]
        dx_right = whole_x.grad[np.ix_(own.x_rows, columns, own.ins)]
        dweight_right = single.weight.grad[np.ix_(own.outs, own.ins)]
        assert y.abs().max() > 1 and len(rows) == ROWS
        of_norm = layer.layer_norm_weight.grad
        if case.mode == "column" and case.sequence_parallel:
            of_norm = of_norm.clone()
            distributed.all_reduce(of_norm)
        pairs = {
            "y": (y, y_right),
            "dx": (x.grad, dx_right),
            "dweight": (layer.weight.grad, dweight_right),
            "dbias": (layer.bias.grad, single.bias.grad[own.outs]),
            "dnorm_weight": (of_norm, single.layer_norm_weight.grad[own.ins]),
        }
        for name, (got, expected) in pairs.items():
            # Terms of up to 3 * 3; 2^-24 (n + 2) of n of them.
            torch.testing.assert_close(
                got,
                expected,
                rtol=0,
                atol=2.0**-24 * (WIDE + 2) * 2 * expected.abs().max().item(),
                msg=lambda text, name=name, step=step: f"{name} of step {step}: {text}",
            )
        layer.zero_grad()
        single.zero_grad()
    if isinstance(recipe, DelayedScaling):
        for name, state in layer._fp8_states.items():
            assert not (state.scale[:2] == 1).all()
            others = gathered(state.scale.tolist())
            assert all(each == others[0] for each in others), (name, others)


for _mode, _rows in itertools.product(("column", "row"), (False, True)):
    for _name, _recipe in RECIPES.items():
        _case = Case(_mode, _rows, "layer_norm", "float32")
        CHECKS[f"{_case.name}-{_name}"] = partial(in_fp8, _case, _recipe)


@check
def a_kernel_of_the_norm_that_writes_8_bits(rank):
    """As on a GPU. Its values are not rounded to float32 before, which few bytes notice."""
    before = QuantizedProducts.fuses_norm
    QuantizedProducts.fuses_norm = lambda self, input: not self.options.return_normalized
    try:
        for rows in (False, True):
            case = Case("column", rows, "layer_norm", "float32")
            for options in ({}, {"save_normalized": True}):
                in_fp8(case, RECIPES["DelayedScaling"], rank, **options)
    finally:
        QuantizedProducts.fuses_norm = before


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


@check
def gathered_8_bit_rows_are_bytes(rank):
    """Of an 8-bit tensor ranks gather one byte an element, in forward and in backward."""
    case = Case("column", True, "layer_norm", "float32")
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    layer(inputs(problem, own)[0])  # compares first calls
    x, dy = inputs(problem, own)
    with counted("_gather") as seen:
        with fp8_autocast(recipe=DelayedScaling()):
            y = layer(x)
        y.backward(dy)
    assert seen == [(torch.uint8, x.numel())] * 2, seen


@for_main
def weights_and_inputs_in_8_bits(case, rank):
    """Weights of fp8_model_init, and an input that is a QuantizedTensor."""
    problem, own = problem_of(case), Shares(case, rank)
    recipe = CurrentScaling()
    x, dy = inputs(problem, own)
    with fp8_model_init(recipe=recipe):
        layer = make_layer(case, problem, own)
    plain = make_layer(case, problem, own)
    results = []
    for each in (layer, plain):
        x.grad = None
        with fp8_autocast(recipe=recipe):
            y = each(x)
        y.backward(dy)
        results.append((y.detach(), x.grad, each.weight.grad, each.bias.grad))
    for got, right in zip(*results):
        assert torch.equal(got, right) and right.abs().max() > 0
    narrow = torch.randn(4, WIDTH, layer.in_features, device=DEVICE).to(torch.float8_e4m3fn)
    one = torch.ones(1, device=DEVICE)
    given = cupynorm.QuantizedTensor(narrow, one, torch.float32)
    again = make_layer(case, problem, own)
    assert again(given).shape == again(narrow.float()).shape


# Overlap.


def flags(case: Case) -> dict[str, bool]:
    if case.mode == "row":
        return {"ub_overlap_rs": True}
    names = ("ub_overlap_ag", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
    return dict.fromkeys(names, True)


for _case in [each for each in CASES if each.sequence_parallel and each.norm == "layer_norm"]:

    def _overlapping(rank, case=_case):
        """In four chunks, where a plain layer has one collective."""
        for options, number in (({}, 1), (flags(case), 4)):
            with counted("_scatter") as scattered, counted("_gather") as gathered:
                run(case, rank, problem_of(case), **options)
            gathers = len(gathered) - 1  # in backward, or of statistics and of dy
            if case.mode == "row":
                assert (len(scattered), gathers) == (number, 1)
            else:
                assert (len(scattered), gathers) == (number, number)

    CHECKS[f"overlapping-{_case.name}"] = _overlapping

for _mode, (_name, _recipe) in itertools.product(("column", "row"), RECIPES.items()):
    _case = Case(_mode, True, "layer_norm", "float32")
    CHECKS[f"overlapping-{_case.name}-{_name}"] = partial(in_fp8, _case, _recipe, **flags(_case))


@check
def a_sum_in_symmetric_memory(rank):
    """Without GPUs that share memory all_reduce is used, and one warning says so."""
    case = Case("row", False, "layer_norm", "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        problem, own = problem_of(case), Shares(case, rank)
        for kind in ("one_shot", "two_shot", "multimem_all_reduce"):
            layer = make_layer(case, problem, own, symmetric_ar_type=kind)
            right = make_layer(case, problem, own)
            x, _ = inputs(problem, own)
            for _ in range(2):
                y, expected = layer(x), right(x)
                # Three ways to add two float32 numbers a rank.
                torch.testing.assert_close(y, expected, rtol=2.0**-20, atol=2.0**-18)
    found = [str(each.message) for each in caught if "symmetric_ar_type" in str(each.message)]
    if DEVICE == "cpu":
        assert len(found) == 3 and len(set(found)) == 3, found
        assert found[0].endswith("the ranks share no GPU memory: all_reduce of the group is used")
    else:
        assert not found, found


# Refusals that need several ranks.


def refused(error, sentence: str, call) -> None:
    with pytest.raises(error, match=sentence):
        call()


@for_main
def another_shape_on_one_rank(case, rank):
    """All ranks raise, and the layer works afterwards."""
    layer = make_layer(case, problem_of(case), Shares(case, rank))
    size = distributed.get_world_size()
    x = torch.ones(size * (2 + rank), WIDTH, layer.in_features, device=DEVICE)
    sentence = "the shape of the input is .* on rank 1 of tp_group and .* on rank 0; expected the "
    refused(ValueError, sentence, lambda: layer(x))
    assert layer(torch.ones(size, WIDTH, layer.in_features, device=DEVICE)).isfinite().all()


@check
def scales_that_would_differ_over_ranks(rank):
    case = Case("column", True, "layer_norm", "float32")
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    x, _ = inputs(problem, own)
    alone = [distributed.new_group([each]) for each in range(distributed.get_world_size())][rank]

    def call(group=None, **options):
        with fp8_autocast(recipe=DelayedScaling(**options), group=group):
            layer(x)

    refused(ValueError, "reduce_amax is False and ranks share a", lambda: call(reduce_amax=False))
    sentence = r"reduces amaxes over the ranks \[\d\], and the ranks \[0, 1\] share this layer"
    refused(ValueError, sentence, lambda: call(alone))


@for_main
def gradients_of_gradients(case, rank):
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    x, _ = inputs(problem, own)
    y = layer(x)
    refused(
        RuntimeError,
        "a differentiable gradient was asked for of a layer with tp_size of 2 or more",
        lambda: torch.autograd.grad(y.sum(), x, create_graph=True),
    )
    refused(
        NotImplementedError,
        "torch.func or forward mode was asked to transform a layer with tp_size of 2 or more",
        lambda: torch.func.vmap(layer)(x),
    )


# State.


def checkpoints_load_at_another_size(case, rank):
    """From two ranks to one and back; also the scales of DelayedScaling."""
    problem, size = problem_of(case), distributed.get_world_size()
    own, split = Shares(case, rank, split={"q": 8, "k": 8}), {"parameters_split": ("q", "k")}
    one = Case("column", False, case.norm, case.dtype)
    everything = Shares(one, rank)
    everything.outs, everything.ins = np.arange(OUT), np.arange(IN)
    folder = gathered(tempfile.mkdtemp())[0]

    def shards():
        return torch.nn.Sequential(make_layer(case, problem, own, **split))

    def whole():
        return torch.nn.Sequential(make_layer(one, problem, everything, tp_group=None, **split))

    def emptied(model):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        return model

    for save, load, right in ((shards, whole, whole), (whole, shards, shards)):
        saved, path = save(), f"{folder}/{load.__name__}"
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=2)):
            x = torch.ones(size, saved[0].in_features, device=DEVICE)
            saved[0](x)
        checkpoint_files.save(distributed_state_dict(saved), checkpoint_id=path)
        loaded = emptied(load())
        state = distributed_state_dict(loaded)
        checkpoint_files.load(state, checkpoint_id=path)
        load_distributed_state_dict(loaded, state)
        for (name, got), expected in zip(loaded.named_parameters(), right().parameters()):
            assert torch.equal(got, expected), name
        extra = [model[0].get_extra_state() for model in (saved, loaded)]
        assert extra[0].numel() and torch.equal(*extra)


if importlib.util.find_spec("torch.distributed.tensor"):  # since torch 2.5
    for_main(checkpoints_load_at_another_size)


@for_main
def first_values_of_shards(case, rank):
    """With a generator for each rank they differ; with the same one they are the same."""

    class Tracker:
        generator_state = torch.Generator().manual_seed(2718 + rank).get_state()

        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            before = torch.get_rng_state()
            torch.set_rng_state(self.generator_state)
            yield
            self.generator_state = torch.get_rng_state()
            torch.set_rng_state(before)

    torch.manual_seed(5)
    tracker = Tracker()
    weights = []
    for get in (lambda: tracker, None):
        layer = LayerNormLinear(
            IN,
            OUT,
            get_rng_state_tracker=get,
            parallel_mode=case.mode,
            tp_group=distributed.group.WORLD,
            device=DEVICE,
        )
        weights.append(layer.weight.detach())
    parts = [gathered(weight) for weight in weights]
    assert not torch.equal(*parts[0][:2]) and torch.equal(*parts[1][:2])


if __name__ == "__main__":
    main(CHECKS)
