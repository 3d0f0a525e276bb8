"""8-bit floats of torch, byte for byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cupynorm.reference import fp8 as reference

torch = pytest.importorskip("torch")
from norm_calls import DEVICES  # noqa: E402

from cupynorm import recipes  # noqa: E402
from cupynorm.nn import quantization  # noqa: E402

NAMES = {"float8_e4m3fn": recipes.E4M3, "float8_e5m2": recipes.E5M2}


def draw(shape=(130, 300), seed=0) -> np.ndarray:
    """Rows of scales from 1e-3 to 1e3, with a row of zeros, an infinity and a row of denormals."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape) * 10.0 ** generator.integers(-3, 4, (shape[0], 1))
    values[3], values[5, 7], values[8] = 0.0, np.inf, 1e-44
    return values.astype(np.float32)


def raw(data: torch.Tensor) -> np.ndarray:
    return data.view(torch.uint8).cpu().numpy()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_those_of_the_reference(device, name):
    values, dtype = draw(), NAMES[name]
    x = torch.from_numpy(values).to(device)
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(
        raw(quantization.encode(torch.from_numpy(every[~np.isnan(every)]).to(device), 1.0, dtype)),
        reference.encode(every[~np.isnan(every)], name),
    )
    nans = raw(quantization.encode(torch.tensor([math.nan, -math.nan], device=device), 1.0, dtype))
    assert np.isnan(reference.decode(nans, name)).all()
    scale = torch.tensor(3.7, device=device)
    made, expected = (
        quantization.quantize(x, scale, dtype, transpose=True),
        reference.quantize(values, name, 3.7),
    )
    np.testing.assert_array_equal(raw(made.data), expected.data)
    np.testing.assert_array_equal(raw(made.transposed), expected.data.T)
    assert made.scale_inv.item() == expected.scale_inv and made.transposed.is_contiguous()
    assert quantization.amax_of(x).item() == expected.amax
    for power_of_two in (False, True):
        for block_rows in (1, 128):
            options = {"block_rows": block_rows, "power_of_two": power_of_two}
            made = quantization.quantize_blocks(x, dtype, transpose=True, **options)
            for got, of_got, expected in (
                (made.data, made.scale_inv, reference.quantize_blocks(values, name, **options)),
                (
                    made.transposed,
                    made.transposed_scale_inv,
                    reference.quantize_blocks(values.T.copy(), name, **options),
                ),
            ):
                np.testing.assert_array_equal(raw(got), expected.data)
                np.testing.assert_array_equal(of_got.cpu().numpy(), expected.scale_inv)
            truth = reference.dequantize(
                reference.quantize_blocks(values, name, **options), name, block_rows=block_rows
            )
            # One float32 product of numbers whose product is exact in float64.
            np.testing.assert_allclose(
                made.dequantize(torch.float64).cpu().numpy(), truth, rtol=2.0**-24, atol=2.0**-149
            )


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_the_product_of_16_bit_values_and_a_scale_is_float32(dtype):
    """A product rounded to 16 bits first would give other 8-bit floats."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((200, 300))).to(dtype)
    scale = torch.tensor(3.7)
    expected = reference.quantize(x.float().numpy(), "float8_e4m3fn", scale.numpy()).data
    np.testing.assert_array_equal(raw(quantization.encode(x, scale, recipes.E4M3)), expected)
    assert (raw((x * scale).to(recipes.E4M3)) != expected).any()


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_those_of_the_reference(name):
    amaxes = np.concatenate(
        [
            np.array([0.0, 1.0, 3.0, 448.0, 1e-3, 1e-38, 1e-45, 3e38, np.inf, np.nan], np.float32),
            np.abs(np.random.default_rng(0).standard_normal(1000)).astype(np.float32),
        ]
    )
    for options in ({}, {"power_of_two": True}, {"smallest_amax": 0.5}):
        got = quantization.scale_of(torch.from_numpy(amaxes), NAMES[name], **options)
        np.testing.assert_array_equal(got.numpy(), reference.scale_of(amaxes, name, **options))


@pytest.mark.parametrize("shape", [(256, 128), (130, 128), (300, 8), (128, 256), (257, 384)])
@pytest.mark.parametrize("block_rows", [1, 128])
def test_blocks_as_wide_as_a_row_and_wider(block_rows, shape):
    values = draw(shape)
    made = quantization.quantize_blocks(
        torch.from_numpy(values), recipes.E4M3, block_rows=block_rows
    )
    expected = reference.quantize_blocks(values, "float8_e4m3fn", block_rows=block_rows)
    truth = reference.dequantize(expected, "float8_e4m3fn", block_rows=block_rows)
    np.testing.assert_allclose(
        made.dequantize(torch.float64).numpy(), truth, rtol=2.0**-24, atol=2.0**-149
    )


@pytest.mark.parametrize(
    "rule",
    (
        quantization.Rule(),
        quantization.Rule(power_of_two=True),
        quantization.Rule(smallest_amax=7.0),
    ),
    ids=str,
)
@pytest.mark.parametrize("largest", (3.0, 0.0, 3e-39, float("inf"), float("nan")))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_matrix_by_the_scale_of_its_own_amax(dtype, largest, rule, anywhere):
    """Bytes and scale are those of the reference, with and without sums over rows."""
    values = np.clip(np.random.default_rng(0).standard_normal((130, 40)), -2.5, 2.5)
    x = torch.from_numpy(values * (largest / 3 if largest < 3 else 1)).to(dtype)
    x[5, 7] = largest
    values, name = x.float().numpy(), "float8_e4m3fn"
    options = {"smallest_amax": rule.smallest_amax, "power_of_two": rule.power_of_two}
    truth = reference.quantize(
        values, name, reference.scale_of(reference.amax(values), name, **options)
    )
    x = x.to(anywhere)
    beside, sums = quantization.quantize_and_sum(x, rule, recipes.E4M3, torch.float32)
    for made in (quantization.quantize(x, rule, recipes.E4M3, transpose=True), beside):
        # The byte of a NaN is not compared, because its sign may differ.
        same = np.arange(values.size).reshape(values.shape) != (
            5 * 40 + 7 if np.isnan(largest) else -1
        )
        np.testing.assert_array_equal(raw(made.data)[same], truth.data[same])
        np.testing.assert_array_equal(raw(made.transposed).T[same], truth.data[same])
        assert made.scale_inv.cpu().numpy() == np.float32(truth.scale_inv)
    if np.isfinite(largest):
        wide = values.astype(np.float64)
        # Each addition rounds, and a GPU flushes its denormal operands and results.
        allowed = len(wide) * (2.0**-24 * abs(wide).sum(0) + 2.0**-125)
        assert (abs(sums.cpu().numpy() - wide.sum(0)) <= allowed).all()
