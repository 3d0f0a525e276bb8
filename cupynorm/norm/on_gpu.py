"""What prepared calls have in common: the arrays that kernels read, new arrays, and launches."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from ..gpu import arrays, launch
from ..gpu.arrays import Rows
from .arguments import Call, Template
from .request import Array


def rows_of(array: Array, num_dims: int) -> tuple[Rows, bool]:
    """An array's rows, and whether they are those of a contiguous copy that each run makes.

    A copy is aligned wherever it will be.
    """
    view = arrays.view(array)
    found = arrays.rows(view, num_dims)
    if found is not None:
        return found, False
    return arrays.contiguous_rows(view.shape, num_dims, view.dtype), True


def parameter_of(array: Array) -> tuple[Rows, bool]:
    """A weight, bias, row_scale or statistic as one row, and whether a run must copy it."""
    view = arrays.view(array)
    copied = arrays.rows(view, len(view.shape)) is None
    num_cols = arrays.product(view.shape)
    return Rows(0 if copied else view.pointer, 1, num_cols, num_cols, view.dtype), copied


def allocator(library: Any, shape: tuple[int, ...], dtype: str | None) -> Callable[[], Any]:
    """Makes new arrays on the current device, or None where there is no dtype."""
    return library.allocator(shape, library.dtype(dtype)) if dtype else lambda: None


def fill(some: tuple[Array | None, ...], value: float) -> None:
    for array in some:
        if array is not None:
            array[...] = value


class OnGpu:
    """The arrays that a kernel reads, in order, and its launches."""

    def __init__(self, like: Array, names: list[str], fields: tuple[str, ...]) -> None:
        """names: of the operands that are read, out of fields."""
        self.device_index = arrays.view(like).device
        self.library = arrays.library(like)(self.device_index)
        indices = [fields.index(name) for name in names]
        if len(indices) > 1:
            self.read = itemgetter(*indices)
        else:
            self.read = lambda operands: (operands[indices[0]],)
        self.copies: tuple[bool, ...] = ()
        self.steps: list[tuple[Any, Template]] = []

    def compile(self, call: Call, order: list[str]) -> None:
        """order: names of the tensors in the order in which a run has their addresses."""
        self.steps = [
            (launch.load(each, self.device_index), template)
            for each, template in zip(call.launches, call.templates(order))
        ]

    def contiguous(self, given: tuple) -> tuple:
        return tuple(
            self.library.contiguous(array) if copied else array
            for array, copied in zip(given, self.copies)
        )

    def enqueue(self, tensors: tuple, seed: object) -> None:
        address, stream = self.library.address, self.library.stream()
        addresses = [0 if tensor is None else address(tensor) for tensor in tensors]
        seed = seed if seed.__class__ is int else 0
        for kernel, template in self.steps:
            kernel.enqueue(stream, template.fill(addresses, seed))
