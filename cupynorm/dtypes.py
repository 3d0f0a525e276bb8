"""The element types of inputs and outputs, and exact conversion to and from float64 on the host.

DTYPES has the types of x, y, weight and bias. EIGHT_BITS has those that y may also have, of which
FLOAT8S are floats. NumPy has no bfloat16, so `encode` and `decode` use uint16 bit patterns for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type.

    name: the name in NumPy and torch. cpp: the name in the kernels.
    compute: the type of its arithmetic and of saved statistics.
    dlpack: (type code, bits).
    digits: bits of the significand, the hidden bit included.
    smallest: the smallest positive value, a subnormal. largest: the largest finite value.
    """

    name: str
    cpp: str
    itemsize: int
    compute: str
    dlpack: tuple[int, int]
    digits: int
    smallest: float
    largest: float

    @property
    def half_ulp(self) -> float:
        """The largest relative error of rounding to nearest: 2**-digits."""
        return 2.0**-self.digits

    @property
    def storage(self) -> np.dtype:
        """The NumPy dtype of arrays that hold this type's bits."""
        return np.dtype(_STORAGE.get(self.name, self.name))


# Types that NumPy lacks.
_STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float16", "__half", 2, "float32", (2, 16), 11, 2.0**-24, 65504.0),
        DType("bfloat16", "__nv_bfloat16", 2, "float32", (4, 16), 8, 2.0**-133, 255 * 2.0**120),
        DType("float32", "float", 4, "float32", (2, 32), 24, 2.0**-149, (2 - 2.0**-23) * 2.0**127),
        DType("float64", "double", 8, "float64", (2, 64), 53, 5e-324, sys.float_info.max),
    )
}


# Only y can have these, with a scale. NumPy and CuPy lack both, so their arrays are uint8.
FLOAT8S = {
    dtype.name: dtype
    for dtype in (
        DType("float8_e4m3fn", "__nv_fp8_e4m3", 1, "float32", (10, 8), 4, 2.0**-9, 448.0),
        DType("float8_e5m2", "__nv_fp8_e5m2", 1, "float32", (12, 8), 3, 2.0**-16, 57344.0),
    )
}
EIGHT_BITS = FLOAT8S | {
    "int8": DType("int8", "signed char", 1, "float32", (0, 8), 8, 1.0, 127.0),
}
ELEMENTS = DTYPES | EIGHT_BITS


def compute_dtype(name: str) -> DType:
    """The type of the arithmetic on rows of dtype `name`: float64 for float64, else float32."""
    return DTYPES[DTYPES[name].compute]


@np.errstate(all="ignore")
def encode(values: np.ndarray, name: str) -> np.ndarray:
    """float64 `values` rounded once, to nearest even, to dtype `name`, in its storage dtype."""
    values = np.asarray(values, dtype=np.float64)
    if name != "bfloat16":
        return values.astype(DTYPES[name].storage)
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    # The upper half of the bits is the bfloat16. Where the lower half is a tie, the rounding to
    # float32 may have made it one: the bits move by one to the side of the value.
    rest = bits & 0xFFFF
    if not rest.any():  # bfloat16 values, which take less time
        return (bits >> 16).astype(np.uint16)
    is_tie = rest == 0x8000
    if is_tie.any():
        side = np.sign(np.abs(values) - np.abs(nearest.astype(np.float64)))
        bits = bits + np.where(is_tie, side, 0).astype(np.int32).view(np.uint32)
    rounded = bits + ((bits >> 16) & 1) + 0x7FFF
    rounded = np.where(np.isnan(nearest), bits, rounded)
    return (rounded >> 16).astype(np.uint16)


@np.errstate(all="ignore")
def decode(raw: np.ndarray, name: str) -> np.ndarray:
    """The float64 values of an array in the storage dtype of `name`."""
    if name == "bfloat16":
        raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float64)
