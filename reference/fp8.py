"""8-bit formats and their scales: the exact bits that a kernel must write.

    name             sign exponent mantissa   bias   largest   smallest   infinity   NaN
    float8_e4m3fn      1      4       3         7      448      2^-9       none       7F (FF)
    float8_e5m2        1      5       2        15    57344      2^-16      7C         7F (7D to 7F)

`encode` does what NVIDIA's saturating conversion does:

    any value        rounded to nearest, ties to even, also a denormal; -0 stays -0
    too large        the largest value with its sign, also for an infinity
    NaN              7F

int8 has the integers from -128 to 127, and its largest value is 127. Values are rounded to nearest,
ties to even, and saturated; NaN is 0.

Values are multiplied by a scale in their own dtype and rounded once: y_fp8 = encode(y * scale), and
y is decode(y_fp8) * scale_inv. There is one scale for all values, for each row, or for each block:

    from an amax     scale = largest / amax in float32, and scale_inv = 1 / scale in float32.
                     An amax below 2^-126 counts as 0. scale = 1 for one that is 0, infinite or NaN.
                     scale = the largest float32 if the quotient overflows.
                     An upper bound: a larger amax counts as that.
                     A power of two: scale is rounded down to one.
    a given scale    or a given scale_inv, whose scale = 1 / scale_inv in float32.

Scales of blocks have a layout: `arranged`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """mantissa: bits after the point. bias: of the exponent. largest: the largest finite value."""

    mantissa: int
    bias: int
    largest: float


class Quantized(NamedTuple):
    """What a quantising function returns.

    data: uint8 bit patterns [num_rows, num_cols], or int8.
    scale_inv: (), [num_rows] or [num_rows, num_blocks]; float32.
    amax: float32 as scale_inv's shape, max |values| before scaling; NaN where the values have one.
    """

    data: np.ndarray
    scale_inv: np.ndarray
    amax: np.ndarray


FORMATS = {
    "float8_e4m3fn": Format(3, 7, 448.0),
    "float8_e5m2": Format(2, 15, 57344.0),
    "int8": Format(0, 0, 127.0),
}
NAN = 0x7F
_LARGEST_FLOAT32 = np.finfo(np.float32).max
_SMALLEST_NORMAL = np.finfo(np.float32).tiny


@np.errstate(all="ignore")
def encode(values: np.ndarray, name: str) -> np.ndarray:
    """The uint8 bit patterns of float32 or float64 `values` in format `name`, or int8."""
    if name == "int8":
        return np.rint(np.clip(np.where(np.isnan(values), 0, values), -128, 127)).astype(np.int8)
    mantissa, bias, largest = FORMATS[name]
    values = np.asarray(values, dtype=np.float64)
    size = np.where(np.isnan(values), 0.0, np.minimum(np.abs(values), largest))
    # size = m * 2^exponent with 1 <= m < 2. Denormals have the spacing of the smallest normal.
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, 1 - bias), 1 - bias)
    steps = np.rint(np.ldexp(size, mantissa - exponent))
    # Bit patterns of one sign are consecutive integers, so a carry increments the exponent.
    bits = steps.astype(np.int64) + ((exponent + bias - 1) << mantissa)
    bits |= np.signbit(values).astype(np.int64) << 7
    return np.where(np.isnan(values), NAN, bits).astype(np.uint8)


def decode(raw: np.ndarray, name: str) -> np.ndarray:
    """The float64 values of 8-bit patterns."""
    if name == "int8":
        return np.asarray(raw).astype(np.int8).astype(np.float64)
    return _VALUES[name][np.asarray(raw, dtype=np.uint8)]


def _values(name: str) -> np.ndarray:
    """The values of all 256 bit patterns."""
    mantissa, bias, _ = FORMATS[name]
    raw = np.arange(256, dtype=np.uint8)
    sign = np.where(raw & 0x80, -1.0, 1.0)
    exponent = ((raw & 0x7F) >> mantissa).astype(np.int64)
    fraction = (raw & ((1 << mantissa) - 1)).astype(np.float64)
    normal = np.ldexp(fraction + (1 << mantissa), exponent - bias - mantissa)
    values = np.where(exponent == 0, np.ldexp(fraction, 1 - bias - mantissa), normal)
    if name == "float8_e5m2":
        values = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), values)
    else:
        values = np.where((raw & 0x7F) == 0x7F, np.nan, values)
    return sign * values


_VALUES = {name: _values(name) for name in FORMATS if name != "int8"}


@np.errstate(all="ignore")
def amax(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """max |values| in float32. It is NaN if there is a NaN, and 0 without values."""
    return np.max(np.abs(values), axis=axis, initial=0.0).astype(np.float32)


@np.errstate(all="ignore")
def scale_of(
    amax: np.ndarray,
    name: str,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    smallest_amax: float = 0.0,
    upper_bound: float = np.inf,
) -> np.ndarray:
    """float32 scales from float32 amaxes.

    margin: amax is mapped to the format's largest value / 2^margin.
    power_of_two: round scales down to powers of two.
    smallest_amax, upper_bound: the limits of amax.
    """
    largest = np.float32(FORMATS[name].largest * 2.0**-margin)
    amax = np.asarray(amax, dtype=np.float32)
    amax = np.where(amax < np.float32(smallest_amax), np.float32(smallest_amax), amax)
    amax = np.minimum(amax, np.float32(upper_bound))
    usable = np.isfinite(amax) & (amax >= _SMALLEST_NORMAL)
    scale = np.divide(largest, amax, dtype=np.float32, where=usable, out=np.ones_like(amax))
    scale = np.minimum(scale, _LARGEST_FLOAT32)
    if power_of_two:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return scale


@np.errstate(all="ignore")
def _times(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The product in the dtype of the values, float32 or float64."""
    return values * np.asarray(scale).astype(values.dtype)


@np.errstate(all="ignore")
def _inverse(scale: np.ndarray) -> np.ndarray:
    return (np.float32(1) / scale).astype(np.float32)


def quantize(
    values: np.ndarray,
    name: str,
    scale: np.ndarray | float = 1.0,
    scale_inv: np.ndarray | float | None = None,
) -> Quantized:
    """Quantises all values with one given scale, or scale_inv."""
    scale = np.asarray(scale, dtype=np.float32)
    inverse = _inverse(scale)
    if scale_inv is not None:
        inverse = np.asarray(scale_inv, dtype=np.float32)
        scale = _inverse(inverse)
    return Quantized(encode(_times(values, scale), name), inverse, amax(values))


def quantize_rows(values: np.ndarray, name: str, **rule: float) -> Quantized:
    """Quantises each row of [num_rows, num_cols] with the scale of its own amax.

    rule: options of scale_of.
    """
    largest = amax(values, axis=1)
    scale = scale_of(largest, name, **rule)
    return Quantized(encode(_times(values, scale[:, None]), name), _inverse(scale), largest)


def _blocks(values: np.ndarray, block_size: int) -> np.ndarray:
    """[num_rows, num_blocks, block_size]. The last block of a row is padded with zeros."""
    num_rows, num_cols = values.shape
    padded = np.pad(values, ((0, 0), (0, -num_cols % block_size)))
    return padded.reshape(num_rows, padded.shape[1] // block_size, block_size)


def quantize_blocks(
    values: np.ndarray,
    name: str,
    *,
    block_size: int = 128,
    block_rows: int = 1,
    power_of_two: bool = True,
    upper_bound: float = np.inf,
) -> Quantized:
    """Quantises each block of block_rows x block_size elements with the scale of its own amax.

    scale_inv is [num_rows / block_rows, num_cols / block_size], both rounded up.
    """
    num_rows, num_cols = values.shape
    tall = np.pad(values, ((0, -num_rows % block_rows), (0, 0)))
    blocks = _blocks(tall, block_size)
    num_blocks = blocks.shape[1]
    blocks = blocks.reshape(len(tall) // block_rows, block_rows, num_blocks, block_size)
    largest = amax(blocks, axis=(1, 3))
    scale = scale_of(largest, name, power_of_two=power_of_two, upper_bound=upper_bound)
    data = encode(_times(blocks, scale[:, None, :, None]), name)
    data = data.reshape(len(tall), num_blocks * block_size)[:num_rows, :num_cols]
    return Quantized(data, _inverse(scale), largest)


def quantize_by(
    scaling: str,
    values: np.ndarray,
    name: str,
    *,
    scale: np.ndarray | float = 1.0,
    scale_inv: np.ndarray | float | None = None,
    smallest_amax: float = 0.0,
    **rule: float,
) -> Quantized:
    """Quantises by "given" (scale or scale_inv), "tensor", "row", "block" or "block64".

    smallest_amax: of a tensor. rule: power_of_two and upper_bound of scale_of.
    """
    if scaling == "given":
        return quantize(values, name, scale, scale_inv)
    if scaling == "tensor":
        return quantize(
            values, name, scale_of(amax(values), name, smallest_amax=smallest_amax, **rule)
        )
    if scaling == "row":
        return quantize_rows(values, name, **rule)
    block_size = 64 if scaling == "block64" else 128
    return quantize_blocks(values, name, block_size=block_size, **rule)


def arranged(scale_inv: np.ndarray, layout: str) -> np.ndarray:
    """Scales of blocks, [num_rows, num_blocks], as they lie in memory.

    row: as they are.
    column: [num_blocks, num_rows rounded up to a multiple of 4], 0 beyond the last row.
    packed: the same in int32 of [num_blocks / 4, ...]: exponents in 8 bits, of powers of two, those
        of four blocks in an element, the first one in its lowest byte, 0 beyond the last block.
    """
    if layout == "row":
        return scale_inv
    num_rows, num_blocks = scale_inv.shape
    if layout == "packed":
        exponents = np.zeros((num_rows, num_blocks + -num_blocks % 4), np.uint8)
        exponents[:, :num_blocks] = scale_inv.view(np.uint32) >> 23
        scale_inv = exponents.view(np.int32)
    columns = np.zeros((scale_inv.shape[1], num_rows + -num_rows % 4), scale_inv.dtype)
    columns[:, :num_rows] = scale_inv.T
    return columns


@np.errstate(all="ignore")
def dequantize(
    quantized: Quantized, name: str, block_size: int = 128, block_rows: int = 1
) -> np.ndarray:
    """The float64 values of a Quantized: data times scale_inv.

    block_size, block_rows: those of quantize_blocks.
    """
    data, scale_inv, _ = quantized
    factor = scale_inv.astype(np.float64)
    if factor.ndim == 1:
        factor = factor[:, None]
    elif factor.ndim == 2:
        factor = factor.repeat(block_size, axis=1).repeat(block_rows, axis=0)[
            : data.shape[0], : data.shape[1]
        ]
    return decode(data, name) * factor
