"""Checks of 8-bit floats on several ranks."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import torch
from layer_cases import (
    CHECKS,
    DEVICE,
    IN,
    NORMS,
    ROWS,
    WIDTH,
    Case,
    Shares,
    check,
    counted,
    for_main,
    gathered,
    inputs,
    make_layer,
    problem_of,
)
from linear_bounds import draw
from torch import distributed
from torch.nn import functional

import cupynorm
from cupynorm import fp8_autocast
from cupynorm.linear.products import Products
from cupynorm.nn import quantization
from cupynorm.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
)

RECIPES = {
    "DelayedScaling": DelayedScaling(amax_history_len=2),
    "CurrentScaling": CurrentScaling(),
    "BlockScaling": BlockScaling(),
}
WIDE = 256


def assert_same_products(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Two float32 results of products of the same 8-bit floats of WIDE terms.

    The order of float32 sums differs: (n + 2) 2^-24 of the magnitudes of n terms, up to 3 * 3. A
    GPU's 8-bit products keep 14 bits of a sum, and its norms round some values halfway between two
    8-bit floats the other way: allowed is what a GPU's results may differ from a CPU's.
    """
    if DEVICE == "cpu":
        atol = 2.0**-24 * (WIDE + 2) * 2 * expected.abs().max().item()
        torch.testing.assert_close(
            got, expected, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}"
        )
    else:
        relative = ((got - expected).norm() / expected.norm()).item()
        assert relative < 2.0**-7, f"{name}: {relative}"


def in_fp8(case: Case, recipe, rank: int, **options) -> None:
    """Three steps against the unsharded layer in this process.

    Each rank's part of weight and dy has the same amax, so scales are the same on all ranks.
    """
    without = ["norm_bias"] if case.norm == "rms_norm" else []
    problem = draw(case.norm, "float32", ROWS * WIDTH, WIDE, WIDE, without=without)
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
            assert_same_products(f"{name} of step {step}", got, expected)
        layer.zero_grad()
        single.zero_grad()
    if isinstance(recipe, DelayedScaling):
        for name, state in layer._fp8.scales.items():
            assert not (state.scale[:2] == 1).all()
            others = gathered(state.scale.tolist())
            assert all(each == others[0] for each in others), (name, others)


for _mode, _rows, _norm in itertools.product(("column", "row"), (False, True), NORMS):
    for _name, _recipe in RECIPES.items():
        _case = Case(_mode, _rows, _norm, "float32")
        CHECKS[f"{_case.name}-{_name}"] = partial(in_fp8, _case, _recipe)


@check
def a_kernel_of_the_norm_that_writes_8_bits(rank):
    """As on a GPU. Its values are not rounded to float32 before, which few bytes notice."""
    before = Products.fuses_norm
    Products.fuses_norm = lambda self, input: not (self.is_alone or self.options.return_normalized)
    try:
        for rows in (False, True):
            case = Case("column", rows, "layer_norm", "float32")
            for options in ({}, {"save_normalized": True}):
                in_fp8(case, RECIPES["DelayedScaling"], rank, **options)
    finally:
        Products.fuses_norm = before


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
def inputs_in_8_bits(case, rank):
    """An input that is a QuantizedTensor."""
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    narrow = torch.randn(4, WIDTH, layer.in_features, device=DEVICE).to(torch.float8_e4m3fn)
    one = torch.ones(1, device=DEVICE)
    given = cupynorm.types.QuantizedTensor(narrow, one, torch.float32)
    assert layer(given).shape == layer(narrow.float()).shape


@for_main
def the_gradient_of_normalized_in_8_bits(case, rank):
    """fp8_grad: dx is that of rounded values. A rank has a scale of its own for its part."""
    problem, own = problem_of(case), Shares(case, rank)
    recipe, seen, before = CurrentScaling(), [], Products.round
    layer = make_layer(case, problem, own)
    x, dy = inputs(problem, own)

    def round(self, given):
        seen.append((given, before(self, given)))
        return seen[-1][1]

    Products.round = round
    try:
        with fp8_autocast(recipe=recipe):
            y = layer(x, fp8_grad=True)
        y.backward(dy)
    finally:
        Products.round = before
    ((given, made),) = seen
    right = quantization.quantize(given, quantization.Rule(), torch.float8_e5m2).dequantize(
        torch.float32
    )
    assert torch.equal(made, right) and not torch.equal(made, given)
    # The gradient of the norm of whole rows, in float64.
    parts = [gathered(each.detach().double().cpu()) for each in (x, made.reshape(x.shape))]
    dim = -1 if case.mode == "row" else 0
    is_split = case.mode == "row" or case.sequence_parallel
    whole, dwhole = (torch.cat(each, dim) if is_split else each[rank] for each in parts)
    weight = torch.as_tensor(problem.norm_weight)
    whole.requires_grad_()
    functional.layer_norm(whole, weight.shape, weight, None, problem.eps).backward(dwhole)
    dx = whole.grad[np.ix_(own.x_rows, range(WIDTH), own.ins)]
    # Some 2 * IN float32 operations in a row's sums.
    atol = 2.0**-23 * IN * dx.abs().max().item()
    torch.testing.assert_close(x.grad.double().cpu(), dx, rtol=0, atol=atol)
