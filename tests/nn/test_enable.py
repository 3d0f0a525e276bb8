"""enable(): torch's own norms by our kernels. On the CPU the kernels run behind the key "CPU"."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest

import cupynorm

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from cupynorm.nn import enable as module  # noqa: E402
from cupynorm.norm import prepared  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="enable() needs torch 2.9"
)


@pytest.fixture(autouse=True)
def torchs_own_norms():
    yield
    cupynorm.disable()
    prepared.forget()


@pytest.fixture
def place(device, monkeypatch) -> Iterator[str]:
    """The device of tensors whose norms enable() serves."""
    if device != "cpu":
        yield device
        return
    monkeypatch.setattr(module, "DEVICE", "CPU")
    library = torch.library.Library("aten", "IMPL")  # aten has this one on GPUs alone
    library.impl("_fused_rms_norm_backward", backward_by_torch, "CPU")
    yield device
    cupynorm.disable()
    library._destroy()


def backward_by_torch(dy, x, extents, rstd, weight, output_mask):
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = x * (x * x).mean(-1, keepdim=True).rsqrt() * weight
        return torch.autograd.grad(y, (x, weight), dy)


def tensors(place, dtype, *, of_weight=None, shape=(6, 64), grad=True):
    weight_dtype = of_weight or dtype
    x = torch.randn(shape, device=place).to(dtype).requires_grad_(grad)
    weight = (torch.rand(shape[-1:], device=place) + 0.5).to(weight_dtype).requires_grad_(grad)
    bias = torch.randn(shape[-1:], device=place).to(weight_dtype).requires_grad_(grad)
    return x, weight, bias


def norm(centered, x, weight, bias):
    if centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def gradients(centered, x, weight, bias):
    """y, and the gradients of what requires one, by an upstream gradient that is y's twice."""
    given = [each for each in (x, weight, bias if centered else None) if each is not None]
    y = norm(centered, x, weight, bias)
    return [y, *torch.autograd.grad(y, given, torch.ones_like(y) * 2)]


def wide(values):
    return [None if each is None else each.detach().double().requires_grad_() for each in values]


def assert_near(made, expected, dtype):
    bound = 16 * torch.finfo(dtype).eps
    for at, (one, other) in enumerate(zip(made, expected, strict=True)):
        largest = other.abs().max().clamp(min=1)
        assert (one.double() - other).abs().max() <= bound * largest, at


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_and_gradients(place, centered, affine, dtype):
    given = list(tensors(place, dtype))
    given = [
        given[0],
        given[1] if "weight" in affine else None,
        given[2] if "b" in affine else None,
    ]
    expected = gradients(centered, *wide(given))
    with cupynorm.enabled() as calls:
        for _ in range(2):  # prepared, then repeated
            made = gradients(centered, *given)
            assert_near(made, expected, dtype)
            assert [each.dtype for each in made] == [dtype] * len(made)
            with torch.no_grad():
                assert_near([norm(centered, *given)], expected[:1], dtype)
    assert calls.left == {}
    assert sum(calls.served.values()) == 6
