"""Derivatives of first to third order are numerical ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from norm_calls import DEVICES, EPS, NORMS, assert_few_roundings, leaves, ours  # noqa: E402
from torch.autograd.gradcheck import GradcheckError  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.nn import by_torch  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("zero_centered_weight", [False, True])
@pytest.mark.parametrize(
    "given", ["", "weight", "bias", "weight bias", "residual", "weight bias residual"]
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_first_and_second_derivatives_are_numerical_ones(
    norm_name, device, given, zero_centered_weight
):
    shapes = {"x": (2, 3, 5), "weight": (5,), "bias": (5,), "residual": (2, 3, 5)}
    names = ["x", *given.split()]
    options = {
        "eps": EPS,
        "zero_centered_weight": zero_centered_weight,
        "return_residual": "residual" in names,
    }

    def call(*tensors):
        named = dict(zip(names, tensors))
        return getattr(cupynorm, norm_name)(named.pop("x"), 5, **named, **options)

    tensors = leaves(*(shapes[name] for name in names), device=device)
    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("norm_name", NORMS)
def test_derivatives_over_several_dimensions_and_of_one_row(norm_name):
    for shape, extents in (((2, 3, 5), (3, 5)), ((5,), (5,)), ((3, 5), (3, 5)), ((4, 1), (1,))):
        tensors = leaves(shape, extents, extents)
        assert torch.autograd.gradgradcheck(ours(norm_name, extents), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("norm_name", NORMS)
def test_derivatives_in_batches_and_in_forward_mode(norm_name):
    call, tensors = ours(norm_name), leaves((2, 3, 5), (5,), (5,))
    assert torch.autograd.gradcheck(call, tensors, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradcheck(
        call, tensors, check_batched_forward_grad=True, check_forward_ad=True
    )
    assert torch.autograd.gradgradcheck(
        call, tensors, check_batched_grad=True, check_fwd_over_rev=True
    )


@pytest.mark.parametrize("norm_name", NORMS)
def test_third_derivatives_are_numerical_ones(norm_name):
    call, tensors = ours(norm_name), leaves((2, 5), (5,))

    def gradients(x, weight):
        return torch.autograd.grad((call(x, weight) ** 3).sum(), (x, weight), create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, tensors)


def test_gradgradcheck_fails_for_a_wrong_second_derivative(monkeypatch):
    right = by_torch.pull_back

    def wrong(*arguments):
        of_x, *others = right(*arguments)
        return 1.01 * of_x - 0.01 * of_x.detach(), *others

    monkeypatch.setattr(by_torch, "pull_back", wrong)
    with pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(ours("layer_norm"), leaves((2, 3, 5), (5,)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_gradients_of_a_graph_are_those_of_the_kernels(norm_name, device):
    """With create_graph=True torch's operations compute them."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, residual = leaves((4, 40), (4, 40), dtype=dtype, device=device)
        weight, bias = leaves((40,), (40,), dtype=torch.float32, device=device)
        y, added = getattr(cupynorm, norm_name)(
            x, 40, weight, bias=bias, residual=residual, return_residual=True
        )
        for of in (y.sum(), (y * added).sum()):
            made = [
                torch.autograd.grad(
                    of, (x, weight, bias, residual), retain_graph=True, create_graph=create_graph
                )
                for create_graph in (False, True)
            ]
            assert_few_roundings(*made)
