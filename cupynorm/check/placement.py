"""The memory of the tensors of a check: layouts of inputs, and guards around everything.

A guard is filled with bytes of 0xFF, which no kernel may change; read as a float it is NaN, so a
kernel that reads it spoils its result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LAYOUTS = ("contiguous", "gap", "misaligned", "broadcast", "reversed", "transposed")
GUARD_BYTES = 256  # what new arrays are aligned to
_GAP = 16  # elements between two rows
_FILL = 0xFF


class WrongWrite(RuntimeError):
    """A kernel has written outside its outputs, or to an input."""


class Placed(NamedTuple):
    """A tensor in memory of its own.

    memory: one dimension, guards included. first: the index of the first element. strides: of each
    dimension, in elements.
    """

    memory: np.ndarray
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def offset(self) -> int:
        """Of the first element, in bytes."""
        return self.first * self.memory.itemsize

    def view(self) -> np.ndarray:
        """The tensor in its memory."""
        itemsize = self.memory.itemsize
        strides = tuple(stride * itemsize for stride in self.strides)
        return np.ndarray(self.shape, self.memory.dtype, self.memory, self.offset, strides)

    def taken_from(self, memory: np.ndarray) -> np.ndarray:
        """The tensor in a copy of its memory, after checking that the rest is untouched.

        Not of layout broadcast, whose rows share memory. Raises WrongWrite.
        """
        values = np.ascontiguousarray(self._replace(memory=memory).view())
        num_bytes = _num_written(memory) - _num_written(values)
        if num_bytes:
            raise WrongWrite(f"{num_bytes} bytes outside it were written to")
        return values


def _num_written(array: np.ndarray) -> int:
    """Bytes that are not those of a guard."""
    return np.count_nonzero(array.view(np.uint8) != _FILL)


def place(values: np.ndarray, layout: str = "contiguous") -> Placed:
    """values, [num_rows, num_cols] or [n], in memory of that layout.

    broadcast: every row is the first one. misaligned: by one element.
    """
    placed = _empty(values.shape, values.dtype, layout)
    if layout == "broadcast":
        values = values[:1]
        placed._replace(shape=values.shape).view()[...] = values
    else:
        placed.view()[...] = values
    return placed


def empty(shape: tuple[int, ...], dtype: np.dtype, layout: str = "contiguous") -> Placed:
    """An output of a layout that is not broadcast."""
    return _empty(shape, dtype, layout)


def _empty(shape: tuple[int, ...], dtype: np.dtype, layout: str) -> Placed:
    dtype = np.dtype(dtype)
    guard = GUARD_BYTES // dtype.itemsize
    num_cols = shape[-1] if shape else 1
    num_rows = shape[0] if len(shape) == 2 else 1
    row_stride, col_stride = num_cols, 1
    first = guard
    num_lines = num_rows
    if layout == "gap":
        row_stride += _GAP
    elif layout == "misaligned":
        first += 1
    elif layout == "broadcast":
        row_stride, num_lines = 0, 1
    elif layout == "reversed":
        first += max(0, num_rows - 1) * num_cols
        row_stride = -num_cols
    elif layout == "transposed":
        row_stride, col_stride = 1, num_rows
    size = guard + 1 + num_lines * (num_cols + _GAP) + guard
    memory = np.full(size * dtype.itemsize, _FILL, np.uint8).view(dtype)
    strides = (row_stride, col_stride)[2 - len(shape) :] if shape else ()
    return Placed(memory, first, shape, strides)
