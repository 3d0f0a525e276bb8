"""Tensor maps: descriptions of matrices by which the copy engine of sm_90 moves tiles of them."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

_DATA_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_NO_INTERLEAVE, _L2_PROMOTION_256_BYTES, _ZEROS_OUTSIDE = 0, 3, 0
_SWIZZLES = {32: 1, 128: 3}  # by the bytes of a row of a tile
_NUM_WORDS, _ALIGNMENT = 16, 64  # of a CUtensorMap, in 8-byte words and in bytes


@cache
def _encode():
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint32
    encode.argtypes = (pointer, ctypes.c_int, unsigned, *[pointer] * 5, *[ctypes.c_int] * 4)
    return encode


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    num_rows: int,
    num_cols: int,
    row_bytes: int,
    dtype: str,
    tile: tuple[int, int],
) -> tuple[int, ...]:
    """The 16 words of a CUtensorMap of a matrix.

    address: a multiple of 16, as row_bytes is, from one row to the next. dtype: "float16" or
    "bfloat16". tile: rows and columns of what one copy moves; 32 or 128 bytes of a row, which are
    swizzled in shared memory.
    It depends on its arguments alone. Raises ValueError where the driver refuses them.
    """
    raw = ctypes.create_string_buffer(_NUM_WORDS * 8 + _ALIGNMENT)
    start = ctypes.addressof(raw) + -ctypes.addressof(raw) % _ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(num_cols, num_rows)
    strides = (ctypes.c_uint64 * 1)(row_bytes)
    box = (ctypes.c_uint32 * 2)(tile[1], tile[0])
    steps = (ctypes.c_uint32 * 2)(1, 1)
    failed = _encode()(
        start,
        _DATA_TYPES[dtype],
        2,
        address,
        sizes,
        strides,
        box,
        steps,
        _NO_INTERLEAVE,
        _SWIZZLES[tile[1] * 2],
        _L2_PROMOTION_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    if failed:
        raise ValueError(
            f"the driver makes no tensor map (error {failed}) of {num_rows} x {num_cols} elements "
            f"of {dtype} at {address:#x}, rows {row_bytes} bytes apart"
        )
    return tuple((ctypes.c_int64 * _NUM_WORDS).from_address(start))
