"""Tensors of a kernel in layouts of their own, between guards of NaN that no kernel may change."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.verify.kernels import Tensors

LAYOUTS = ("contiguous", "gap", "misaligned", "broadcast", "reversed")
_GUARD, _GAP, _FILL = 256, 16, 0xFF  # bytes, elements, and the byte of a guard


class _Placed(NamedTuple):
    """memory: before the kernels run. there: the same where they run."""

    memory: np.ndarray
    there: object
    view: np.ndarray
    dtype: str
    is_input: bool
    is_result: bool


class GuardedTensors(Tensors):
    """layouts: of tensors by name, from LAYOUTS; contiguous without one."""

    def __init__(self, where, layouts: dict[str, str]) -> None:
        super().__init__(where)
        self.layouts = layouts
        self.placed: dict[str, _Placed] = {}

    def _place(self, name: str, values: np.ndarray, dtype: str, is_input: bool, is_result: bool):
        """values in memory of the layout. broadcast: every row is the first one."""
        layout = self.layouts.get(name, "contiguous")
        num_cols = values.shape[-1]
        num_rows = values.shape[0] if values.ndim == 2 else 1
        first = _GUARD // values.itemsize + (layout == "misaligned")
        row_stride = {"gap": num_cols + _GAP, "broadcast": 0, "reversed": -num_cols}.get(
            layout, num_cols
        )
        first += num_cols * (num_rows - 1) if layout == "reversed" else 0
        size = num_rows * (num_cols + _GAP) + 2 * _GUARD // values.itemsize + 1
        memory = np.full(size * values.itemsize, _FILL, np.uint8).view(values.dtype)
        strides = (row_stride * values.itemsize, values.itemsize)[2 - values.ndim :]
        offset = first * values.itemsize
        view = np.ndarray(values.shape, values.dtype, memory, offset, strides)
        if is_input and layout == "broadcast":
            view[:1] = values[:1]
        elif is_input:
            view[...] = values
        there, pointer = self.where.put(memory.copy())
        self.placed[name] = _Placed(memory, there, view, dtype, is_input, is_result)
        self.rows[name] = Rows(pointer + offset, num_rows, num_cols, row_stride, dtype)

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        if values is not None and dtype is not None:
            self._place(name, encode(values, dtype), dtype, True, False)

    def make(self, name: str, shape: tuple[int, ...], dtype: str, is_result: bool = True) -> None:
        if len(shape) > 2:  # partial sums
            shape = (math.prod(shape[:-1]), shape[-1])
        self._place(name, np.empty(shape, DTYPES[dtype].storage), dtype, False, is_result)

    def write(self, name: str, initial: np.ndarray) -> None:
        self._place(name, initial, initial.dtype.name, True, True)

    def raw(self) -> dict[str, np.ndarray]:
        """All outputs. Raises AssertionError if anything but outputs was written to."""
        results = {}
        for name, placed in self.placed.items():
            after = np.ascontiguousarray(self.where.get(placed.there))
            found = np.ndarray(
                placed.view.shape,
                placed.view.dtype,
                after,
                placed.view.ctypes.data - placed.memory.ctypes.data,
                placed.view.strides,
            )
            if placed.is_result:
                results[name] = found.copy()
            if not placed.is_input or placed.is_result:
                found[...] = placed.view
            stray = np.count_nonzero(after.view(np.uint8) != placed.memory.view(np.uint8))
            assert not stray, f"{stray} bytes around {name}, or of it, were written to"
        return results

    def results(self) -> dict[str, np.ndarray]:
        return {name: decode(each, self.placed[name].dtype) for name, each in self.raw().items()}
