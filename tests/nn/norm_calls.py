"""Calls of cupynorm's and torch's norms with the same arguments, in float64 by default."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import cupynorm  # noqa: E402

NORMS = ("layer_norm", "rms_norm")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 0.1  # large enough to matter; rstd is 1 / sqrt(EPS) at most


def random(*shape: int, dtype=torch.float64, device="cpu", seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def leaves(*shapes: tuple[int, ...], dtype=torch.float64, device="cpu") -> list[torch.Tensor]:
    return [
        random(*shape, dtype=dtype, device=device, seed=seed).requires_grad_()
        for seed, shape in enumerate(shapes)
    ]


def ours(norm_name: str, extents=(5,), **options):
    def call(x, weight=None, bias=None):
        return getattr(cupynorm, norm_name)(x, extents, weight, bias=bias, eps=EPS, **options)

    return call


def theirs(norm_name: str, extents=(5,)):
    """torch's norm, with a bias for rms_norm too."""

    def call(x, weight=None, bias=None):
        if norm_name == "layer_norm":
            return functional.layer_norm(x, extents, weight, bias, EPS)
        y = functional.rms_norm(x, extents, weight, EPS)
        return y if bias is None else y + bias

    return call


def assert_few_roundings(got, expected, num: int = 8, between: torch.dtype | None = None) -> None:
    """Compares what torch's operations computed with what our kernels computed, pair by pair.

    Both round x_hat, its product and its sum, and each result once: num units of the largest
    result cover that, its gradients, and sums of fewer than 20 rows, at rstd near 1.
    between: the dtype of tensors between norms, which inductor does not round. Each such rounding
        is half a unit, and the next norm and its weight multiply it by at most 4.
    """
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        largest = other.detach().abs().max().item() if other.numel() else 1.0
        unit = num * torch.finfo(other.dtype).eps
        if between is not None:
            unit = max(unit, 4 * torch.finfo(between).eps)
        allowed = unit * max(1.0, largest)
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)


def assert_close(got, expected) -> None:
    """Compares float64 results of one formula whose operations differ in order.

    Allows 2^10 roundings of terms of at most 2^4 times the largest result. That covers rows of 15
    columns or fewer, rstd of at most 1 / sqrt(EPS), and derivatives up to third order.
    """
    for one, other in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (got, expected)), strict=True
    ):
        assert one.dtype == other.dtype == torch.float64
        allowed = 2.0**-53 * 2**10 * 2**4 * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)
