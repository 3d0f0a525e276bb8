"""8-bit floats of the reference, byte for byte against ml_dtypes and torch, and their scales."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from cupynorm.reference import fp8

FORMATS = tuple(fp8.FORMATS)
FLOATS = tuple(name for name in FORMATS if name != "int8")
LARGEST = {name: each.largest for name, each in fp8.FORMATS.items()}


def every_float16() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def tricky(name: str) -> np.ndarray:
    """The format's values, their midpoints, the float32 neighbours of both, NaN and infinity."""
    exact = np.unique(finite(name))
    middle = (exact[1:] + exact[:-1]) / 2
    beyond = LARGEST[name] * np.array([1 + 2.0**-5, 1 + 2.0**-4, 17 / 16, 18 / 16, 2.0, 2.0**20])
    some = np.concatenate([exact, middle, beyond, -beyond]).astype(np.float32)
    near = [np.nextafter(some, np.float32(to)) for to in (-np.inf, np.inf)]
    other = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38],
        np.float32,
    )
    signalling = np.array([0x7F800001, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([some, *near, other, signalling])


def finite(name: str) -> np.ndarray:
    values = fp8.decode(np.arange(256, dtype=np.uint8), name)
    return values[np.isfinite(values)]


def others(values: np.ndarray, name: str) -> dict[str, np.ndarray]:
    """The bytes by the casts of ml_dtypes and torch."""
    with np.errstate(invalid="ignore"):
        made = {"ml_dtypes": values.astype(getattr(ml_dtypes, name)).view(np.uint8)}
    torch = pytest.importorskip("torch")
    made["torch"] = torch.from_numpy(values).to(getattr(torch, name)).view(torch.uint8).numpy()
    return made


@pytest.mark.parametrize("name", FLOATS)
def test_decode_is_that_of_ml_dtypes(name):
    raw = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        fp8.decode(raw, name), raw.view(getattr(ml_dtypes, name)).astype(np.float64)
    )
    assert (
        np.nanmax(np.where(np.isinf(fp8.decode(raw, name)), 0, fp8.decode(raw, name)))
        == LARGEST[name]
    )
    assert np.signbit(fp8.decode(np.uint8(0x80), name))


@pytest.mark.parametrize("name", FLOATS)
def test_encode_is_the_cast_of_other_libraries_up_to_the_largest_value(name):
    for values in (every_float16(), tricky(name)):
        got = fp8.encode(values, name)
        inside = np.abs(values) <= LARGEST[name]
        assert inside.sum() > 500
        for library, expected in others(values, name).items():
            np.testing.assert_array_equal(got[inside], expected[inside], err_msg=library)
        # Larger values saturate. Other casts give NaN or infinity.
        beyond = np.abs(values) > LARGEST[name]
        assert beyond.sum() > 10
        largest = fp8.encode(np.float32(LARGEST[name]), name)
        np.testing.assert_array_equal(
            got[beyond], np.where(np.signbit(values[beyond]), largest | 0x80, largest)
        )
        assert (got[np.isnan(values)] == 0x7F).all() and np.isnan(values).any()


@pytest.mark.parametrize("name", FLOATS)
def test_float64_is_rounded_once(name):
    """A value just above a midpoint would be a tie if it were rounded to float32 first."""
    exact = np.sort(finite(name))
    exact = exact[exact > 0]
    middle = (exact[1:] + exact[:-1]) / 2
    for factor, expected in ((1 + 2.0**-50, exact[1:]), (1 - 2.0**-50, exact[:-1])):
        np.testing.assert_array_equal(fp8.decode(fp8.encode(middle * factor, name), name), expected)
    ties = fp8.encode(middle, name)
    assert (ties % 2 == 0).all()


@pytest.mark.parametrize("name", FLOATS)
def test_every_byte_is_decoded_and_encoded_again(name):
    raw = np.arange(256, dtype=np.uint8)
    values = fp8.decode(raw, name)
    number = np.isfinite(values)
    np.testing.assert_array_equal(fp8.encode(values, name)[number], raw[number])
    assert (fp8.encode(values, name)[np.isnan(values)] == 0x7F).all()


def test_int8_is_rounded_half_to_even_and_saturated():
    values = np.array([0.5, 1.5, -2.5, 127.5, -127.5, -128.5, 1e9, -1e9, np.inf, np.nan])
    wanted = [0, 2, -2, 127, -128, -128, 127, -128, 127, 0]
    assert fp8.encode(values, "int8").tolist() == wanted
    raw = np.arange(256, dtype=np.uint8)
    assert np.array_equal(fp8.encode(fp8.decode(raw, "int8"), "int8").view(np.uint8), raw)


# Scales.

AMAXES = [0.0, 1.0, 3.0, 448.0, 1e-3, 1.2e-38, 1e-45, 3e38, np.inf, np.nan, 1e-38]
AMAXES = np.array(AMAXES, np.float32)


def scale_by_hand(amax: float, largest: float) -> float:
    """One scale in exact arithmetic, rounded once to float32."""
    if amax < 2.0**-126 or not math.isfinite(amax):
        return 1.0
    exact = Fraction(largest) / Fraction(amax)
    top = Fraction(float(np.finfo(np.float32).max))
    return float(np.float32(float(min(exact, top))))


@pytest.mark.parametrize("name", FORMATS)
def test_scale_of_an_amax_is_largest_by_amax(name):
    scale = fp8.scale_of(AMAXES, name)
    assert scale.dtype == np.float32
    assert scale.tolist() == [scale_by_hand(float(each), LARGEST[name]) for each in AMAXES]
    assert fp8.scale_of(AMAXES, name, margin=3)[1] == np.float32(LARGEST[name] / 8)
    floored = fp8.scale_of(AMAXES, name, smallest_amax=2.0)
    assert (
        floored[0] == floored[1] == floored[4] == np.float32(LARGEST[name] / 2)
        and floored[2] == scale[2]
    )
    assert floored[8] == floored[9] == 1.0
    bounded = fp8.scale_of(AMAXES, name, upper_bound=2.0)
    assert bounded[2] == bounded[3] == bounded[8] == np.float32(LARGEST[name] / 2)
    assert bounded[1] == scale[1] and bounded[9] == 1.0  # NaN
    powers = fp8.scale_of(AMAXES, name, power_of_two=True)
    mantissa, _ = np.frexp(powers)
    assert (
        (mantissa == 0.5).all()
        and (powers <= scale).all()
        and (2 * powers.astype(np.float64) > scale).all()
    )


def draw(shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values * np.float32(10.0) ** np.random.default_rng(seed + 1).integers(
        -3, 4, shape[:-1] + (1,)
    ).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_one_scale_multiplies_in_the_dtype_of_the_values(name):
    values = draw((5, 33))
    quantized = fp8.quantize(values, name, 3.7)
    assert quantized.amax == np.abs(values).max() and quantized.scale_inv == np.float32(
        1
    ) / np.float32(3.7)
    np.testing.assert_array_equal(quantized.data, fp8.encode(values * np.float32(3.7), name))
    # float64 values are multiplied in float64.
    np.testing.assert_array_equal(
        fp8.quantize(values.astype(np.float64), name, 3.7).data,
        fp8.encode(values.astype(np.float64) * float(np.float32(3.7)), name),
    )


@pytest.mark.parametrize("power_of_two", (False, True))
@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_rows_and_blocks_are_of_their_amaxes(name, power_of_two):
    values = draw((6, 300))
    values[3, 7], values[4] = np.nan, 0.0
    half_ulp = 2.0 ** -(fp8.FORMATS[name].mantissa + 1)
    for quantized, parts in (
        (
            fp8.quantize_rows(values, name, power_of_two=power_of_two),
            [np.s_[row : row + 1, :] for row in range(6)],
        ),
        (
            fp8.quantize_blocks(values, name, power_of_two=power_of_two),
            [
                np.s_[row : row + 1, first : first + 128]
                for row in range(6)
                for first in (0, 128, 256)
            ],
        ),
        (
            fp8.quantize_blocks(values, name, block_rows=4, power_of_two=power_of_two),
            [
                np.s_[row : row + 4, first : first + 128]
                for row in (0, 4)
                for first in (0, 128, 256)
            ],
        ),
    ):
        rows = 4 if quantized.scale_inv.shape == (2, 3) else 1
        back = fp8.dequantize(quantized, name, block_rows=rows)
        assert quantized.scale_inv.size == len(parts)
        for part, scale_inv, amax in zip(
            parts, quantized.scale_inv.ravel(), quantized.amax.ravel()
        ):
            piece = values[part]
            np.testing.assert_array_equal(amax, np.abs(piece).max())
            scale = fp8.scale_of(np.abs(piece).max(), name, power_of_two=power_of_two)
            assert scale_inv == np.float32(1) / scale
            np.testing.assert_array_equal(quantized.data[part], fp8.encode(piece * scale, name))
            if not np.isnan(piece).any():
                # Half a unit in the last place, or half the smallest denormal. scale and scale_inv
                # err by 2^-24 each.
                smallest = fp8.decode(np.uint8(1), name) * scale_inv
                allowed = np.abs(piece) * (half_ulp + 2.0**-22) + smallest / 2
                assert (np.abs(back[part] - piece) <= allowed).all()
