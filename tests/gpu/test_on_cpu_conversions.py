"""Kernels on the CPU: conversions to and from half and bfloat16, bit for bit."""

import numpy as np
import pytest
from on_cpu_calls import instance, words


def converted(name, x, dtype):
    x = np.ascontiguousarray(np.resize(x, -(-x.size // 64) * 64))
    y = np.zeros(x.size, dtype)
    instance("convert.cu", f"convert<{name}>").launch(x.size // 64, 64, words(x, y))
    return x, y


def same(actual, expected):
    """Equal values with equal signs, a NaN for a NaN."""
    number = ~np.isnan(expected)
    return (
        np.array_equal(number, ~np.isnan(actual))
        and np.array_equal(actual[number], expected[number])
        and np.array_equal(np.signbit(actual[number]), np.signbit(expected[number]))
    )


def widened(bfloat16_bits):
    return (bfloat16_bits.astype(np.uint32) << 16).view(np.float32)


def rounded_to_bfloat16(x):
    x = x.astype(np.float64)
    _, exponent = np.frexp(x)
    quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    with np.errstate(invalid="ignore", over="ignore"):
        y = (
            np.rint(x / quantum) * quantum
        )  # dividing by a power of two is exact, rint rounds ties to even
    return np.where(np.abs(y) >= 2.0**128, np.copysign(np.inf, x), y).astype(np.float32)


def difficult(dtype, mantissa_bits, least_exponent):
    """Random values, ties and their neighbours, subnormals, overflow, double rounding."""
    random = np.random.default_rng(0)
    scales = np.ldexp(
        random.standard_normal(40000), random.integers(least_exponent - 14, 130, 40000)
    )
    exponents = np.arange(least_exponent - mantissa_bits - 3, least_exponent + 35)
    powers = np.ldexp(1.0, exponents)[:, None]
    ties = powers * (1 + (np.arange(64) + 0.5) * 2.0**-mantissa_bits)
    subnormal_ties = (np.arange(300) + 0.5) * 2.0 ** (least_exponent - mantissa_bits)
    ties = np.concatenate([ties.ravel(), subnormal_ties])
    largest = np.ldexp(2 - 2.0**-mantissa_bits, {10: 15, 7: 127}[mantissa_bits])
    edge = np.ldexp(2 - 2.0 ** -(mantissa_bits + 1), {10: 15, 7: 127}[mantissa_bits])
    special = np.array(
        [0, np.inf, np.nan, largest, edge, np.nextafter(edge, 0), 5e-324, 1e-45, 1e300]
    )
    x = np.concatenate([scales, ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), special])
    with np.errstate(over="ignore"):
        x = np.concatenate([x, -x]).astype(dtype)
        nudged = [np.nextafter(x, dtype(np.inf)), np.nextafter(x, dtype(-np.inf))]
    return np.concatenate([x, *nudged])


def test_every_half_to_float():
    bits, y = converted("HalfToFloat", np.arange(65536, dtype=np.uint16), np.float32)
    assert same(y, bits.view(np.float16).astype(np.float32))


def test_every_bfloat16_to_float():
    bits, y = converted("BfloatToFloat", np.arange(65536, dtype=np.uint16), np.float32)
    assert same(y, widened(bits))


@pytest.mark.parametrize("name, dtype", [("Float", np.float32), ("Double", np.float64)])
def test_to_half(name, dtype):
    x, y = converted(f"{name}ToHalf", difficult(dtype, 10, -14), np.float16)
    with np.errstate(over="ignore"):
        assert same(y, x.astype(np.float16))


@pytest.mark.parametrize("name, dtype", [("Float", np.float32), ("Double", np.float64)])
def test_to_bfloat16(name, dtype):
    x, y = converted(f"{name}ToBfloat", difficult(dtype, 7, -126), np.uint16)
    assert same(widened(y), rounded_to_bfloat16(x))
