"""Checks of the options of LayerNormLinear on several ranks."""

from __future__ import annotations

import contextlib
import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from layer_cases import (
    CHECKS,
    DEVICE,
    IN,
    MAIN,
    ROWS,
    WIDTH,
    Case,
    Shares,
    allowed_besides,
    check,
    float64,
    for_main,
    gathered,
    inputs,
    make_layer,
    problem_of,
    refused,
    results_of,
    run,
    tensor,
    whole,
)
from linear_bounds import assert_right, half_ulp
from torch import distributed
from torch.utils.checkpoint import checkpoint

from cupynorm.linear.products import Pending, Products
from cupynorm.parallel import ranks as ranks_module
from cupynorm.parallel import row


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
def a_checkpoint_runs_the_layer_again(case, rank):
    run(case, rank, problem_of(case), lambda layer, x: checkpoint(layer, x, use_reentrant=False))


@check
def compiled_autograd(rank):
    """torch.compile traces the backward of an eager call."""
    from torch._dynamo import compiled_autograd

    with compiled_autograd._enable(torch.compile(backend="eager")):
        run(MAIN[0], rank, problem_of(MAIN[0]))


@for_main
def a_compiled_layer(case, rank):
    """The graph breaks there, so the results have the bits of the eager layer."""
    problem, own, made = problem_of(case), Shares(case, rank), []
    for compiles in (False, True):
        torch._dynamo.reset()
        layer = make_layer(case, problem, own, parameters_split=("q", "k"), return_bias=True)
        x, dy = inputs(problem, own)
        y, bias = (torch.compile(layer, backend="aot_eager") if compiles else layer)(x)
        y.backward(dy)
        made.append([y, bias, x.grad, *(each.grad for each in layer.weights())])
    assert made[0][0].abs().max() > 0 and all(map(torch.equal, *made))


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
def a_backward_of_the_input_alone(case, rank):
    """It leaves main_grad and backward_dw() alone."""
    problem, own = problem_of(case), Shares(case, rank)
    x, dy = inputs(problem, own)
    make_layer(case, problem, own)(x).backward(dy)
    for delay in (False, True):
        layer = make_layer(
            case, problem, own, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
        )
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        (dx,) = torch.autograd.grad(layer(x), x, dy)
        assert torch.equal(dx, x.grad)
        assert not layer.weight.main_grad.any() and not layer._gradients.queue


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
def a_group_that_is_set_later_and_copies(case, rank):
    """A pickled layer needs its group again."""
    problem, own, group = problem_of(case), Shares(case, rank), distributed.group.WORLD
    layer = make_layer(case, problem, own, tp_group=None, tp_size=distributed.get_world_size())
    layer.set_tensor_parallel_group(group)
    pickled = pickle.loads(pickle.dumps(layer))
    x, _ = inputs(problem, own)
    refused(RuntimeError, "the layer has no tp_group; expected set_tensor_p", lambda: pickled(x))
    pickled.set_tensor_parallel_group(group)
    right = make_layer(case, problem, own)(x)
    for each in (layer, copy.deepcopy(layer), pickled):
        assert torch.equal(each(x), right)
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


# What runs beside what.

ORDERS = {  # of forward and backward
    "column": ("gather wait", "gather dnormalized scatter wait dweight wait"),
    "row": (
        "gather wait normalize scatter wait",
        "gather normalize wait dnormalized all_reduce dweight wait",
    ),
}


@contextlib.contextmanager
def launched():
    """The products, collectives and waits inside, in the order in which they are launched."""
    patch, seen = pytest.MonkeyPatch(), []

    def tell(owner, name, text, tells=lambda *_: True):
        before = getattr(owner, name)

        def call(*arguments, **options):
            if tells(*arguments):
                seen.append(text)
            return before(*arguments, **options)

        patch.setattr(owner, name, call)

    tell(ranks_module, "_gather", "gather")
    tell(ranks_module, "_scatter", "scatter")
    tell(distributed, "all_reduce", "all_reduce")
    tell(Pending, "wait", "wait", lambda pending: pending._work is not None)
    tell(row, "normalize", "normalize")
    for name in ("dnormalized", "dweight"):
        tell(Products, name, name)
    try:
        yield seen
    finally:
        patch.undo()


def the_order_of_launches(case, rank):
    """A collective runs beside what is launched between it and the wait for it."""
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    layer(inputs(problem, own)[0])  # compares first calls
    x, dy = inputs(problem, own)
    with launched() as seen:
        y = layer(x)
        in_forward, seen[:] = " ".join(seen), []
        y.backward(dy)
    assert (in_forward, " ".join(seen)) == ORDERS[case.mode]


for _case in MAIN:
    if _case.sequence_parallel:
        CHECKS[f"the_order_of_launches-{_case.mode}"] = partial(the_order_of_launches, _case)
