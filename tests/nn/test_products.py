"""Products of 8-bit matrices."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from norm_calls import DEVICES  # noqa: E402

from cupynorm import recipes  # noqa: E402
from cupynorm.nn import private, quantization  # noqa: E402
from cupynorm.nn.quantization import Factor  # noqa: E402


@pytest.mark.parametrize(
    "shape", ((5, 7, 3), (16, 32, 48), (17, 200, 33), (1, 1, 1), (300, 260, 130)), ids=str
)
@pytest.mark.parametrize(
    "kinds", ((recipes.E4M3, recipes.E4M3), (recipes.E5M2, recipes.E4M3)), ids=str
)
@pytest.mark.parametrize("blocks", (False, True), ids=("tensors", "blocks"))
@pytest.mark.parametrize("device", DEVICES)
def test_products_of_any_extents_are_within_bounds(device, blocks, kinds, shape):
    """Products of 8-bit values are exact. float32 sums and the last rounding err."""
    num_rows, depth, num_cols = shape
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(rows, depth, generator=generator).to(device) for rows in (num_rows, num_cols)
    )
    bias = torch.randn(num_cols, generator=generator).to(device)
    if blocks:
        a, b = (
            quantization.quantize_blocks(a, kinds[0]),
            quantization.quantize_blocks(b, kinds[1], block_rows=128),
        )
    else:
        a, b = (
            quantization.quantize(x, quantization.scale_of(quantization.amax_of(x), kind), kind)
            for x, kind in zip((a, b), kinds)
        )
    wide = [each.dequantize(torch.float64).cpu().numpy() for each in (a, b)]
    for out_dtype, half_ulp in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
        for added in (None, bias.to(out_dtype)):
            y = quantization.multiply(a, b, out_dtype, bias=added)
            assert y.dtype == out_dtype and y.shape == (num_rows, num_cols)
            truth = wide[0] @ wide[1].T + (0.0 if added is None else added.double().cpu().numpy())
            sizes = np.abs(wide[0]) @ np.abs(wide[1]).T + (
                0.0 if added is None else added.abs().double().cpu().numpy()
            )
            # Tensor cores truncate where others round: an ulp per addition.
            ulps = 1 if device == "cuda" else 0.5
            allowed = (depth + 6) * ulps * 2.0**-23 * sizes + 2 * half_ulp * np.abs(truth)
            if device == "cuda" and not blocks:
                # Hopper's tensor cores keep 13 bits below the largest term of each step. Slow
                # accumulation adds up every 128 terms in float32.
                allowed = allowed + 2.0**-13 * sizes
            assert (np.abs(y.double().cpu().numpy() - truth) <= allowed).all()


@pytest.mark.parametrize("shape", ((5, 7, 3), (16, 32, 48), (17, 200, 33), (1, 1, 1)), ids=str)
def test_operands_of_torch_s_product(monkeypatch, shape):
    """The code for a GPU, run on the CPU, pads to multiples of 16 and gives the same products."""
    num_rows, depth, num_cols = shape
    plain, seen = private.scaled_mm, []

    def scaled_mm(a, b, *, scale_a, scale_b, use_fast_accum, **options):
        assert a.shape[1] % 16 == 0 and b.shape[0] == a.shape[1] and b.shape[1] % 16 == 0
        assert (
            a.is_contiguous() and b.t().is_contiguous() and scale_a.numel() == scale_b.numel() == 1
        )
        assert (
            options["bias"] is None
            or options["bias"].dtype == options["out_dtype"] != torch.float32
        )
        seen.append((use_fast_accum, options["bias"] is not None))
        try:
            return plain(a, b, scale_a=scale_a, scale_b=scale_b, **options)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"this torch multiplies no 8-bit floats on the CPU: {error}")

    monkeypatch.setattr(private, "scaled_mm", scaled_mm)
    generator = torch.Generator().manual_seed(0)
    a, b = (
        quantization.quantize(
            torch.randn(rows, depth, generator=generator), torch.tensor(50.0), recipes.E4M3
        )
        for rows in (num_rows, num_cols)
    )
    bias = torch.randn(num_cols, generator=generator)
    for out_dtype, half_ulp in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
        for added in (None, bias.to(out_dtype)):
            y = quantization.multiply_scaled(a, b, out_dtype, bias=added, fast=True)
            expected = quantization.multiply(a, b, torch.float32, bias=added)
            assert y.shape == expected.shape and y.dtype == out_dtype and y.is_contiguous()
            sizes = a.dequantize().abs() @ b.dequantize().abs().t()
            assert (
                (y.float() - expected).abs()
                <= 2 * half_ulp * expected.abs()
                + (depth + 6) * 2.0**-23 * (sizes + bias.abs())
                + half_ulp * bias.abs()
            ).all()
    assert seen == [(True, False), (True, num_cols % 16 == 0), (True, False), (True, False)]


def test_an_empty_product_is_zero():
    empty = torch.empty(0, 4).to(recipes.E4M3)
    other, one = torch.ones(3, 4).to(recipes.E4M3), torch.tensor(1.0)
    assert quantization.multiply(Factor(empty, one), Factor(other, one), torch.float32).shape == (
        0,
        3,
    )
    of_nothing = Factor(other.t()[:0].t(), one), Factor(torch.empty(2, 0).to(recipes.E4M3), one)
    nothing = quantization.multiply(*of_nothing, torch.float32)
    assert nothing.shape == (3, 2) and not nothing.any()
