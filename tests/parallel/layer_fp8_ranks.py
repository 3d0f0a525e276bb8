"""Checks of 8-bit floats and of overlap on several ranks."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import numpy as np
import torch
from layer_cases import (
    CASES,
    CHECKS,
    DEVICE,
    ROWS,
    WIDTH,
    Case,
    Shares,
    check,
    counted,
    flags,
    for_main,
    gathered,
    inputs,
    make_layer,
    problem_of,
    run,
)
from linear_bounds import draw
from torch import distributed

import cupynorm
from cupynorm import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8BlockScaling,
    fp8_autocast,
    fp8_model_init,
)
from cupynorm.parallel.products import QuantizedProducts

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
