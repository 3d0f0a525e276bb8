"""The registered operators: what they return, torch's checks of them, and gradients."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from operator_cases import (  # noqa: E402
    BIAS,
    EPS,
    OPS,
    ROWS,
    WEIGHT,
    arguments,
    backward_arguments,
    by_case,
    by_norm,
    call,
    forward_arguments,
    random,
)
from torch.library import opcheck  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.nn import fused_operators, operators  # noqa: E402
from cupynorm.norm.request import ForwardOperands, ForwardOptions, ForwardRequest  # noqa: E402

# What the operators return.


@by_case
def test_no_result_shares_memory_with_an_argument_or_another_result(name, given):
    made = [each for each in call(name, **given) if each.numel()]
    tensors = made + [each for each in given.values() if isinstance(each, torch.Tensor)]
    addresses = [each.untyped_storage().data_ptr() for each in made]
    assert len(set(addresses)) == len(made)
    others = {each.untyped_storage().data_ptr() for each in tensors[len(made) :]}
    assert not others & set(addresses)


def test_dx_and_dresidual_of_the_kernels_are_two_tensors(kernels):
    """The kernel writes them once where they are equal. An operator returns no tensor twice."""
    given = backward_arguments(wanted=[True, False, False, True, False, False], centered=True)
    dx, _, _, dresidual, _, _ = call("fused_norm_backward", **given)
    assert torch.equal(dx, dresidual)
    assert dx.data_ptr() != dresidual.data_ptr()


def test_absent_results_are_empty():
    y, mean, rstd, added = call("norm_forward", **forward_arguments(False))
    assert y.shape == (3, 4, 5) and rstd.shape == (3, 4)
    assert mean.numel() == added.numel() == 0
    y, mean, rstd, added, y1 = call("fused_norm_forward", **forward_arguments(False))
    assert mean.numel() == added.numel() == y1.numel() == 0


@pytest.mark.parametrize(
    "name, given",
    [
        ("norm_backward", {"dsum": ROWS, "wanted": [True] * 3}),
        ("fused_norm_backward", {"dy1": ROWS, "weight1": BIAS, "centered": True}),
    ],
)
def test_a_backward_returns_the_wanted_gradients(name, given):
    given = backward_arguments(num_gradients=6, weight=WEIGHT) | given
    everything = call(name, **given)
    for wanted in itertools.product((False, True), repeat=len(everything)):
        made = call(name, **given | {"wanted": wanted})
        for is_wanted, got, right in zip(wanted, made, everything, strict=True):
            assert torch.equal(got, right) if is_wanted else got.numel() == 0


@by_norm
def test_the_recomputing_backward_recomputes_y(centered):
    forward = forward_arguments(centered, weight=WEIGHT, bias=BIAS)
    given = backward_arguments(centered, weight=WEIGHT, bias=BIAS)
    *made, y = call("recomputing_norm_backward", **given)
    torch.testing.assert_close(y, call("norm_forward", **forward)[0], rtol=0, atol=2.0**-20)
    del given["bias"]
    for each, right in zip(made, call("norm_backward", **given), strict=True):
        assert torch.equal(each, right)


# torch's own checks of operators.


@by_case
def test_operators_pass_opcheck(name, given):
    utils = ["test_schema", "test_faketensor", "test_autograd_registration"]
    opcheck(getattr(OPS, name).default, arguments(name, **given), test_utils=utils)


# Gradients through the operators and of the eager path.


def gradients_of(function, tensors: dict, **options) -> list[torch.Tensor]:
    leaves = {name: each.detach().clone().requires_grad_() for name, each in tensors.items()}
    outputs = [each for each in function(**leaves, **options) if each is not None]
    upstream = [random(*each.shape, dtype=each.dtype, seed=9 + n) for n, each in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, tuple(leaves.values()), upstream)]


def assert_equal(got: list, expected: list) -> None:
    for one, right in zip(got, expected, strict=True):
        assert one.dtype == right.dtype and torch.equal(one, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", ["input", "input weight", "input weight bias residual"])
@by_norm
def test_gradients_through_the_operator_are_the_eager_ones(centered, names, dtype):
    values = {"input": random(3, 4, 5, dtype=dtype), "weight": WEIGHT, "bias": BIAS}
    values["residual"] = ROWS.to(dtype)
    tensors = {name: values[name] for name in names.split()}
    eager = cupynorm.layer_norm if centered else cupynorm.rms_norm

    def by_operator(**given):
        options = ForwardOptions(centered, (5,), EPS)
        made = operators.norm_forward(ForwardRequest(ForwardOperands(**given), options))
        y, added = made.y, made.sum
        return (y, added) if "residual" in given else (y,)

    def by_eager(input, **given):
        made = eager(input, 5, eps=EPS, return_residual="residual" in given, **given)
        return made if isinstance(made, tuple) else (made,)

    assert_equal(gradients_of(by_operator, tensors), gradients_of(by_eager, tensors))


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.5, "dropout_seed": 3},
        {"residual_dtype": "float32"},
        {"round_x_hat": True},
        {"row_scale": random(3, 4, seed=6)},
    ],
    ids=lambda options: next(iter(options)),
)
@by_norm
def test_gradients_through_the_fused_operator_are_the_eager_ones(centered, options):
    tensors = {
        "input": random(3, 4, 5, dtype=torch.bfloat16),
        "weight": WEIGHT,
        "bias": BIAS,
        "residual": ROWS.bfloat16(),
        "weight1": BIAS,
        "bias1": WEIGHT,
    }
    eager = cupynorm.layer_norm if centered else cupynorm.rms_norm

    def by_operator(**given):
        constants = {name: options[name] for name in options if name in ForwardOperands._fields}
        rest = {name: options[name] for name in options if name not in constants}
        request = ForwardRequest(
            ForwardOperands(**given, **constants), ForwardOptions(centered, (5,), EPS, **rest)
        )
        made = fused_operators.fused_norm_forward(request)
        return made.y, made.y1, made.sum

    def by_eager(input, **given):
        return eager(input, 5, eps=EPS, return_residual=True, **given, **options)

    assert_equal(gradients_of(by_operator, tensors), gradients_of(by_eager, tensors))


@by_norm
def test_a_memory_efficient_call_saves_y_and_not_the_input(centered):
    x = random(3, 4, 5).requires_grad_()
    saved = []
    given = forward_arguments(centered, memory_efficient=True, weight=WEIGHT) | {"input": x}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append(each) or each, lambda each: each
    ):
        y = call("fused_norm_forward", **given)[0]
    rows = [each for each in saved if each.shape == x.shape]
    assert len(rows) == 1 and rows[0].data_ptr() == y.data_ptr()


@by_norm
def test_second_derivatives_through_the_operator_are_numerical_ones(centered):
    leaves = [random(2, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in (0, 1)]
    leaves.append(random(5, dtype=torch.float64).requires_grad_())

    def function(x, residual, weight):
        request = ForwardOperands(x, weight, None, residual)
        options = ForwardOptions(centered, (5,), EPS)
        made = operators.norm_forward(ForwardRequest(request, options))
        return made.y, made.sum

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_statistics_take_no_gradient():
    given = forward_arguments(residual=ROWS) | {"input": random(3, 4, 5).requires_grad_()}
    y, mean, rstd, added = call("norm_forward", **given)
    assert y.requires_grad and added.requires_grad
    assert not mean.requires_grad and not rstd.requires_grad


@pytest.mark.parametrize("name", ["fused_norm_backward", "recomputing_norm_backward"])
def test_second_derivatives_of_other_operators_are_refused(name):
    given = backward_arguments(weight=WEIGHT, wanted=[True] * (6 if name[0] == "f" else 3))
    if name == "fused_norm_backward":
        given |= {"centered": True, "wanted": [True] * 4 + [False] * 2}
    given["dy"] = given["dy"].requires_grad_()
    dx = call(name, **given)[0]
    with pytest.raises(NotImplementedError, match="it has first derivatives only"):
        dx.sum().backward()
