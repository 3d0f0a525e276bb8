"""dtypes.py: decode is exact, and encode rounds once, to nearest even."""

from __future__ import annotations

import warnings

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


@pytest.mark.parametrize("name", SHORT)
def test_all_bit_patterns(name):
    """All 65536 patterns: decode is the IEEE formula, encode its inverse. NaN keeps its sign."""
    with np.errstate(invalid="ignore"):  # test_no_value_warns is about that
        values = decode(stored(ALL_BITS, name), name)
    np.testing.assert_array_equal(values, by_fields(ALL_BITS, name))
    assert values.dtype == np.float64
    back = encode(values, name)
    assert back.dtype == DTYPES[name].storage and back.shape == values.shape
    is_nan = np.isnan(values)
    assert is_nan.sum() == 2 * ((1 << (DTYPES[name].digits - 1)) - 1)
    np.testing.assert_array_equal(bits_of(back)[~is_nan], ALL_BITS[~is_nan])  # the sign of zero too
    assert np.isnan(decode(back, name)[is_nan]).all()


@pytest.mark.parametrize("name", SHORT)
def test_no_value_warns(name):
    """NaN, signalling NaN, infinity and overflow raise no RuntimeWarning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = decode(stored(ALL_BITS, name), name)
        raw = encode(np.concatenate([values, [1e308, -1e308, 5e-324, np.nan]]), name)
    assert np.isinf(decode(raw[-4:-2], name)).all() and decode(raw[-2:-1], name)[0] == 0


def float32_values(name: str, kind: str) -> np.ndarray:
    generator = np.random.default_rng(7)
    dtype = DTYPES[name]
    if kind == "random":  # every exponent of float32
        values = generator.integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
        return values[~np.isnan(values)]
    neighbours = by_fields(ALL_BITS, name)
    neighbours = np.unique(neighbours[np.isfinite(neighbours)])
    if kind == "ties":  # halfway between every two neighbours, and the float32 on either side of it
        ties = ((neighbours[1:] + neighbours[:-1]) / 2).astype(np.float32)
        return np.concatenate(
            [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
        )
    if kind == "subnormals":
        below = dtype.smallest * 2.0 ** (dtype.digits - 1)
        values = np.concatenate(
            [
                generator.uniform(-2 * below, 2 * below, 200_000),
                [dtype.smallest, dtype.smallest / 2, -0.0],
            ]
        )
        return values.astype(np.float32)
    if kind == "overflow":
        # Half a unit above the largest value is a tie, which is rounded to infinity.
        half_unit = dtype.largest * 2.0**-(dtype.digits) / (2 - 2.0 ** (1 - dtype.digits)) * 2
        edge = np.float32(min(dtype.largest + half_unit, float(np.finfo(np.float32).max)))
        near = [
            edge,
            np.nextafter(edge, np.float32(0)),
            np.float32(dtype.largest),
            np.finfo(np.float32).max,
        ]
        return np.array([*near, *(-value for value in near)], np.float32)
    return np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0], np.float32)


@pytest.mark.parametrize("kind", ("random", "ties", "subnormals", "overflow", "special"))
@pytest.mark.parametrize("name", SHORT)
def test_encode_agrees_with_torch(name, kind):
    """From float32, because torch rounds once from there."""
    torch = pytest.importorskip("torch")
    values = float32_values(name, kind)
    got = encode(values, name)
    expected = (
        torch.from_numpy(values).to(getattr(torch, name)).view(torch.int16).numpy().view(np.uint16)
    )
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(bits_of(got)[~is_nan], expected[~is_nan])
    assert np.isnan(decode(got[is_nan], name)).all()
    if kind == "overflow":
        assert np.isinf(decode(got, name)).any() and np.isfinite(decode(got, name)).any()


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
