"""Quantize: how y becomes 8 bits, checked when it is made."""

from __future__ import annotations

import math
import numbers
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from ..dtypes import DTYPES, EIGHT_BITS
from .request import Array, Quantization

_COMPUTED = ("tensor", "row", "block")
_LAYOUTS = ("row", "column", "packed")


@dataclass(frozen=True, eq=False)
class Quantize:
    """An out_dtype of 8 bits: data = round(y * scale), or round(y / scale_inv), saturated.

    Examples:
        >>> how = cupynorm.Quantize("float8_e4m3fn", "row")
        >>> cupynorm.rms_norm(np.array([[3.0, 4.0]]), 2, out_dtype=how).scale_inv
        array([[0.00252538]], dtype=float32)

    dtype: "float8_e4m3fn", "float8_e5m2" or "int8", a torch or an ml_dtypes dtype. Their largest
        values are 448, 57344 and 127. int8 takes a given scale or "row", saturates to -128..127,
        and its NaN is 0.
    scale: an array of one float32 on the input's device, which the kernel reads there. None: 1. Or
        "tensor", "row" or "block" (group_size columns of a row): scales are computed from the
        largest magnitude (amax) of each part of y, as largest / amax. They are 1 where amax is 0,
        infinite or NaN. "tensor" reads the input twice; so does "block" where a block is not held
        by neighbouring lanes.
    scale_inv: instead of scale. y is multiplied by 1 / scale_inv, rounded to float32. The
        result's scale_inv has the same bits.
    group_size: 128 or 64.
    amax: with a given scale: an array of one float32, 0 (not -0) or more, on the input's device, in
        memory of its own. It becomes the maximum of itself and all |y| of the call. The scale of a
        later call can be computed from it.
    upper_bound: a positive number: a larger amax counts as this where scales are computed.
    power_of_two: round scales that are computed down to powers of two.
    layout: of scales of blocks. "row": [num_rows, num_blocks], contiguous. "column": the same with
        strides (1, num_rows rounded up to a multiple of 4), as DeepGEMM takes them on Hopper.
        "packed", with power_of_two: exponents (UE8M0), four blocks of a row in an int32, with the
        strides of "column", as DeepGEMM takes them on Blackwell.
    transpose: with one scale for all of y: also return y.transposed, [num_cols, num_rows]. On a GPU
        a second kernel transposes the data.

    A computed scale is at most the largest float32, and an amax below 2^-126 counts as 0.

    Raises TypeError or ValueError for options that do not fit together.
    """

    dtype: Any
    scale: Array | str | None = None
    _: KW_ONLY
    scale_inv: Array | None = None
    group_size: int = 128
    amax: Array | None = None
    upper_bound: float | None = None
    power_of_two: bool = False
    layout: str = "row"
    transpose: bool = False
    parts: tuple[str, Array | None, Array | None, Quantization] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name = name_of_8_bits(self.dtype)
        if name is None:
            raise TypeError(f"dtype is {self.dtype!r}; expected one of {', '.join(EIGHT_BITS)}")
        object.__setattr__(self, "dtype", name)
        self._check_values()
        self._check_together()
        object.__setattr__(self, "parts", self._parts())

    def _check_values(self) -> None:
        """Raises TypeError or ValueError for a value that is wrong by itself."""
        scale, group_size, bound = self.scale, self.group_size, self.upper_bound
        if isinstance(scale, str) and scale not in _COMPUTED:
            names = ", ".join(map(repr, _COMPUTED))
            raise ValueError(
                f"scale is {scale!r}; expected {names}, an array of one float32, or None"
            )
        for name, given in (("scale", scale), ("scale_inv", self.scale_inv)):
            is_text = isinstance(given, str) and name == "scale_inv"
            if isinstance(given, numbers.Number) or is_text:
                raise TypeError(
                    f"{name} is {given!r}; expected an array of one float32 where the input is, so "
                    "that no step waits for its value"
                )
        if group_size.__class__ is not int or group_size not in (64, 128):
            raise ValueError(f"group_size is {group_size!r}; expected 128 or 64")
        for name, value in (("power_of_two", self.power_of_two), ("transpose", self.transpose)):
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{name} is {value!r}; expected True or False")
        if self.layout not in _LAYOUTS:
            names = ", ".join(map(repr, _LAYOUTS))
            raise ValueError(f"layout is {self.layout!r}; expected one of {names}")
        is_real = isinstance(bound, numbers.Real) and not isinstance(bound, bool)
        if bound is not None and not (is_real and bound > 0):
            raise ValueError(f"upper_bound is {bound!r}; expected a positive number")

    def _check_together(self) -> None:
        """Raises ValueError for values that exclude each other."""
        if self.scale is not None and self.scale_inv is not None:
            raise ValueError("scale and scale_inv were given; expected one of them")
        named = self.scale if isinstance(self.scale, str) else None
        computed = " or ".join(map(repr, _COMPUTED))
        in_blocks, is_packed = named == "block", self.layout == "packed"
        for is_wrong, given, expected in (
            (
                self.dtype == "int8" and named in ("tensor", "block"),
                "int8",
                "'row', or one that is given",
            ),
            (self.amax is not None and named, "amax", "one that is given, or none"),
            (self.power_of_two and not named, "power_of_two", computed),
            (self.upper_bound is not None and not named, "upper_bound", computed),
            (self.transpose and named in ("row", "block"), "transpose", "one for all of y"),
            (self.layout != "row" and not in_blocks, f"layout {self.layout!r}", "'block'"),
            (self.group_size != 128 and not in_blocks, "group_size", "'block'"),
        ):
            if is_wrong:
                scale = repr(named) if named else "that is given, or none"
                raise ValueError(f"{given} was given with a scale {scale}; expected {expected}")
        if is_packed and not self.power_of_two:
            raise ValueError("layout is 'packed'; expected power_of_two=True with it")

    def _parts(self) -> tuple:
        """dtype, the given scale or scale_inv, amax, and the rest."""
        named = self.scale if isinstance(self.scale, str) else None
        rest = Quantization(
            self.dtype,
            "block64" if self.group_size == 64 else named or "given",
            bool(self.power_of_two),
            bool(self.transpose),
            upper_bound=math.inf if self.upper_bound is None else float(self.upper_bound),
            divides=self.scale_inv is not None,
            layout=self.layout,
        )
        given = self.scale_inv if named or self.scale is None else self.scale
        return self.dtype, given, self.amax, rest


def name_of_8_bits(dtype: object) -> str | None:
    """The name of an 8-bit dtype, given by name or as torch's or ml_dtypes' dtype; else None."""
    # The first test keeps ordinary calls short, and torch.compile can follow it.
    if dtype is None or (dtype.__class__ is str and dtype in DTYPES):
        return None
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    for each in (name, getattr(dtype, "__name__", None)):
        if each in EIGHT_BITS:
            return each
    return None


def parts_of(out_dtype: Any) -> tuple[Any, Array | None, Array | None, Quantization | None]:
    """out_dtype as one that is hashable, the scale and amax of an 8-bit y, and how it is made."""
    if out_dtype is None:
        return None, None, None, None
    if out_dtype.__class__ is Quantize:
        return out_dtype.parts
    name = name_of_8_bits(out_dtype)
    if name is None:
        return out_dtype, None, None, None
    return name, None, None, Quantization(name)
