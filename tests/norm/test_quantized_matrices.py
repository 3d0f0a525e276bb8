"""Matrices in 8-bit floats: bytes, their transposed copy, sums over rows, and statistics given."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference import fp8

import cupynorm
from cupynorm.norm import quantized as quantized

torch = pytest.importorskip("torch")
from float8_bytes import assert_sums, numpy, random, same_bytes, where_off  # noqa: E402  (imports torch)


@pytest.mark.parametrize("shape", [(1, 1), (16, 128), (130, 257), (132, 40), (48, 200), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bytes_of_a_matrix_and_its_transposed_copy(shape, dtype, device):
    x = random(*shape, dtype=dtype, device=device) * 3
    scale, amax = torch.tensor([21.0], device=device), torch.tensor([0.5], device=device)
    data, scale_inv, transposed, _ = quantized.quantize(
        x, "float8_e5m2", scale, amax, transpose=True
    )
    truth = fp8.quantize(
        numpy(x.double() if dtype == torch.float64 else x.float()), "float8_e5m2", np.float32(21)
    )
    assert same_bytes(numpy(data), truth.data) and same_bytes(numpy(transposed), truth.data.T)
    assert same_bytes(numpy(scale_inv), truth.scale_inv.reshape(1)) and numpy(amax)[0] == max(
        truth.amax, np.float32(0.5)
    )
    data, _, transposed, _ = quantized.quantize(
        data, "float8_e5m2", wants_data=False, transpose=True
    )
    assert data is None and same_bytes(numpy(transposed), truth.data.T)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 128), (130, 257), (1000, 72), (300, 34), (0, 8), (5, 0)]
)
@pytest.mark.parametrize(
    "dtype, sums",
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_sums_over_rows_are_within_bounds_and_leave_the_bytes(dtype, sums, shape, device):
    """The bytes are those without sums. Sums repeat and err by additions and one rounding."""
    x = random(*shape, dtype=getattr(torch, dtype), device=device) + 0.25
    scale = torch.tensor([21.0], device=device)
    plain = quantized.quantize(x, "float8_e5m2", scale, transpose=True)
    made = quantized.quantize(x, "float8_e5m2", scale, transpose=True, sums=sums)
    again = quantized.quantize(x, "float8_e5m2", scale, transpose=True, sums=sums)
    for each in ("data", "scale_inv", "transposed"):
        assert same_bytes(numpy(getattr(made, each)), numpy(getattr(plain, each)))
    assert (
        plain.sums is None
        and made.sums.dtype == getattr(torch, sums)
        and tuple(made.sums.shape) == shape[1:]
    )
    assert torch.equal(made.sums, again.sums)
    assert_sums(x, made.sums, 128 + -(-shape[0] // 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_matrix_of_denormal_numbers(dtype, device):
    """The kernels flush denormals where they compare or multiply floats."""
    x = (random(40, 136, dtype=torch.float64) * 2e-39).to(dtype)
    scale, amax = torch.tensor([3e38], device=device), torch.zeros(1, device=device)
    data, _, transposed, _ = quantized.quantize(
        x.to(device), "float8_e4m3fn", scale, amax, transpose=True
    )
    truth = fp8.quantize(numpy(x.float()), "float8_e4m3fn", np.float32(3e38))
    assert 0 < truth.amax < 2.0**-126 and len(np.unique(truth.data)) > 50
    assert same_bytes(numpy(data), truth.data), where_off(numpy(data), truth.data)
    assert same_bytes(numpy(transposed), truth.data.T) and numpy(amax)[0] == truth.amax


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_bytes_of_a_norm_with_given_statistics(norm, device):
    """Nearly forward's bytes: forward's mean is more accurate than the saved, rounded one."""
    x = random(40, 136, dtype=torch.bfloat16, device=device)
    weight, bias = (random(136, dtype=torch.bfloat16, seed=seed, device=device) for seed in (1, 2))
    bias = bias if norm == "layer_norm" else None
    options = {"bias": bias, "zero_centered_weight": True}
    forward = getattr(cupynorm, f"{norm}_forward")(x, 136, weight, **options)
    of_norm = quantized.OfNorm(norm == "layer_norm", weight, bias, True, forward.mean, forward.rstd)
    data, _, transposed, _ = quantized.quantize(x, "float8_e4m3fn", transpose=True, of_norm=of_norm)
    assert same_bytes(numpy(transposed), numpy(data).T)
    y = (
        numpy(x.float() if forward.mean is None else x.float() - forward.mean[:, None])
        * numpy(forward.rstd)[:, None]
    )
    y = y * (1 + numpy(weight.float())) + (0 if bias is None else numpy(bias.float()))
    got, want = (
        fp8.decode(numpy(data), "float8_e4m3fn"),
        fp8.decode(fp8.encode(y, "float8_e4m3fn"), "float8_e4m3fn"),
    )
    assert (np.abs(got - want) <= np.abs(want) / 8 + 2**-9).all() and (got != want).mean() < 1e-3
