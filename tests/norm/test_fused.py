"""Fused options of the public calls: values and gradients against float64."""

from __future__ import annotations

import pytest

import cupynorm
from cupynorm.dtypes import DTYPES

torch = pytest.importorskip("torch")

from float8_bytes import random  # noqa: E402  (imports torch)


@pytest.fixture
def device(anywhere: str) -> str:
    """The device of the tensors, for each of three ways through the library."""
    return anywhere


@pytest.mark.slow
@pytest.mark.parametrize("residual_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_has_the_dtype_of_the_residual(dtype, residual_dtype, device):
    dtype, residual_dtype = getattr(torch, dtype), getattr(torch, residual_dtype)
    x = random(5, 40, dtype=dtype).to(device).requires_grad_()
    residual = random(5, 40, dtype=residual_dtype, seed=1).to(device).requires_grad_()
    y, added = cupynorm.layer_norm(x, 40, residual=residual, return_residual=True)
    assert (y.dtype, added.dtype) == (dtype, residual_dtype)
    exact = (x.double() + residual.double()).to(residual_dtype)
    assert torch.equal(added, exact)
    forward = cupynorm.layer_norm_forward(x.detach(), 40, residual=residual.detach())
    assert torch.equal(forward.y, y) and torch.equal(forward.sum, added)
    wide = torch.promote_types(residual_dtype, torch.float32)
    assert forward.mean.dtype == forward.rstd.dtype == wide
    (y.sum().double() + added.sum().double()).backward()
    assert (x.grad.dtype, residual.grad.dtype) == (dtype, residual_dtype)
    torch.compiler.reset()
    compiled = torch.compile(cupynorm.layer_norm, backend="eager", fullgraph=True)
    others = compiled(x, 40, residual=residual, return_residual=True)
    assert others[0].dtype == dtype and torch.equal(others[1], exact)


def test_both_gradients_come_from_one_kernel(kernels):
    x, residual = (
        random(300, 64, dtype=torch.bfloat16).requires_grad_(),
        random(300, 64, dtype=torch.float32).requires_grad_(),
    )
    y, added = cupynorm.layer_norm(x, 64, residual=residual, return_residual=True)
    assert [each.kernel.source for each in kernels] == ["forward_warp.cu"]
    (y.sum() + added.sum()).backward()
    assert [each.kernel.source for each in kernels[1:]] == ["backward_warp.cu"]
    assert x.grad.dtype == torch.bfloat16 and torch.equal(x.grad, residual.grad.bfloat16())


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_x_hat_is_rounded_to_the_input_s_dtype(device, is_compiled):
    """As in Hugging Face's Llama: weight * x_hat.to(input's dtype).

    One element in about 10,000 differs, where x_hat is at a rounding boundary.
    """
    x, weight = (random(*shape, dtype=torch.bfloat16).to(device) for shape in ((500, 40), (40,)))
    x_hat = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    call = cupynorm.rms_norm
    if is_compiled:
        call = torch.compile(call, backend="eager", fullgraph=True)
    for given in (weight, weight.float()):
        y = call(x, 40, given, 1e-6, round_x_hat=True)
        assert y.dtype == torch.bfloat16
        assert (y != (given * x_hat.bfloat16()).bfloat16()).double().mean() < 1e-3
        assert (y != cupynorm.rms_norm(x, 40, given, 1e-6)).double().mean() > 0.1
