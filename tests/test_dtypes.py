"""dtypes.py: decode is exact, and encode rounds once, to nearest even."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.dtypes import DTYPES, decode, encode

SHORT = ("float16", "bfloat16")
ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def stored(bits: np.ndarray, name: str) -> np.ndarray:
    """16-bit patterns in the storage dtype of `name`."""
    return bits.astype(np.uint16).view(DTYPES[name].storage)


def bits_of(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.uint16)


def by_fields(bits: np.ndarray, name: str) -> np.ndarray:
    """Values of bit patterns by the IEEE 754 formula, from sign, exponent and fraction."""
    fraction_bits = DTYPES[name].digits - 1
    exponent_bits = 15 - fraction_bits
    sign = np.where(bits >> 15, -1.0, 1.0)
    exponent = ((bits >> fraction_bits) & ((1 << exponent_bits) - 1)).astype(np.int64)
    fraction = (bits & ((1 << fraction_bits) - 1)).astype(np.float64)
    bias = (1 << (exponent_bits - 1)) - 1
    whole = np.where(exponent > 0, 2.0**fraction_bits, 0.0) + fraction
    values = sign * np.ldexp(whole, np.maximum(exponent, 1) - bias - fraction_bits)
    special = exponent == (1 << exponent_bits) - 1
    values[special] = np.where(fraction[special] == 0, sign[special] * np.inf, np.nan)
    return values


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SHORT)
def test_all_bit_patterns(name):
    """All 65536 patterns: decode is the IEEE formula, encode its inverse. None warns."""
    values = decode(stored(ALL_BITS, name), name)
    np.testing.assert_array_equal(values, by_fields(ALL_BITS, name))
    assert values.dtype == np.float64
    back = encode(values, name)
    beyond = decode(encode(np.array([1e308, -1e308, 5e-324]), name), name)
    assert np.isinf(beyond[:2]).all() and beyond[2] == 0
    assert back.dtype == DTYPES[name].storage and back.shape == values.shape
    is_nan = np.isnan(values)
    assert is_nan.sum() == 2 * ((1 << (DTYPES[name].digits - 1)) - 1)
    np.testing.assert_array_equal(bits_of(back)[~is_nan], ALL_BITS[~is_nan])  # the sign of zero too
    assert np.isnan(decode(back, name)[is_nan]).all()


@pytest.mark.parametrize("name", SHORT)
def test_encode_agrees_with_torch(name):
    """From float32, because torch rounds once from there: any exponent, and what lies halfway
    between two values, or beyond half a unit above the largest."""
    torch = pytest.importorskip("torch")
    drawn = np.random.default_rng(7).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    finite = by_fields(ALL_BITS, name)
    finite = np.unique(finite[np.isfinite(finite)])
    ends = [finite[-1] + (finite[-1] - finite[-2]) / 2, np.finfo(np.float32).max, np.inf, 0.0]
    with np.errstate(all="ignore"):
        ties = np.concatenate([(finite[1:] + finite[:-1]) / 2, ends]).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (-1, 1)]
    values = np.concatenate([drawn.view(np.float32), ties, *beside, -ties])
    got, kind = encode(values, name), getattr(torch, name)
    expected = torch.from_numpy(values).to(kind).view(torch.int16).numpy().view(np.uint16)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(bits_of(got)[~is_nan], expected[~is_nan])
    assert is_nan.any() and np.isnan(decode(got[is_nan], name)).all()


@pytest.mark.parametrize(
    ("name", "half_unit"), (("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-24))
)
def test_float64_is_rounded_once(name, half_unit):
    """1 + half a unit + a little is rounded up.

    Rounding to another type first loses the little, and the tie is rounded down to even. For
    float32 no type is in between; there the naive way is to truncate.
    """
    value = np.array([1 + half_unit + 2.0**-45])
    assert decode(encode(value, name), name)[0] == 1 + 2 * half_unit
    if name != "float32":
        assert decode(encode(value.astype(np.float32), name), name)[0] == 1.0
    assert decode(encode(-value, name), name)[0] == -(1 + 2 * half_unit)
    assert decode(encode(np.array([1 + half_unit]), name), name)[0] == 1.0
    assert decode(encode(np.array([1 + 3 * half_unit]), name), name)[0] == 1 + 4 * half_unit
    assert (
        decode(encode(np.array([1 + 3 * half_unit - 2.0**-45]), name), name)[0] == 1 + 2 * half_unit
    )


@pytest.mark.parametrize("name", SHORT)
def test_float64_is_rounded_to_the_nearest_of_all_values(name):
    """Random float64 values: the result is the nearest of all finite values of the type."""
    table = by_fields(ALL_BITS, name)
    table = np.unique(table[np.isfinite(table)])
    generator = np.random.default_rng(3)
    tiny, largest = DTYPES[name].smallest, DTYPES[name].largest
    values = generator.choice([-1.0, 1.0], 100_000) * np.exp(
        generator.uniform(np.log(tiny / 4), np.log(largest), 100_000)
    )
    above = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    nearest = np.where(
        values - low < high - values, low, high
    )  # random float64 do not fall on ties
    assert not (values - low == high - values).any()
    np.testing.assert_array_equal(decode(encode(values, name), name), nearest)


@pytest.mark.parametrize("name", DTYPES)
def test_shapes_are_kept(name):
    """0-dimensional, empty, transposed and read-only arrays convert element by element."""
    values = np.arange(6.0).reshape(2, 3)
    values.setflags(write=False)
    for given in (values, values.T, values[:0], values[1, 2], values[:, ::2]):
        raw = encode(given, name)
        assert raw.shape == given.shape and raw.dtype == DTYPES[name].storage
        np.testing.assert_array_equal(
            decode(np.ascontiguousarray(raw), name).reshape(given.shape), given
        )
