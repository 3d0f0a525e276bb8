"""Reductions of a matrix on a GPU: the sums over its rows, or its largest magnitude."""

from __future__ import annotations

from ..dtypes import compute_dtype
from ..gpu import arrays, launch
from .cache import keep, matrices
from .matrix_calls import reduce_matrix_call
from .on_gpu import OnGpu, allocator, fill, rows_of
from .request import Array


def sum_rows(x: Array, dtype: str) -> Array:
    """[num_cols]: sums over the rows of x [num_rows, num_cols], of a dtype by name.

    They are computed in float32 (float64 for float64), in a fixed order, and rounded once.
    """
    return _prepared(x, dtype).run(x)


def amax(x: Array) -> Array:
    """[1], float32: the largest |x| of a matrix; NaN if there is one, 0 of nothing."""
    return _prepared(x, None).run(x)


def _prepared(x: Array, sums: str | None) -> _PreparedReduction:
    key = ("reduce_matrix", arrays.library(x).layout_key(x), sums)
    prepared = matrices.get(key)
    if prepared is None:
        prepared = _PreparedReduction(x, sums)
        keep(matrices, key, prepared)
    return prepared


class _PreparedReduction(OnGpu):
    """A reduction that is planned and compiled."""

    def __init__(self, x: Array, sums: str | None) -> None:
        super().__init__(x, ["x"], ("x",))
        rows, copied = rows_of(x, 1)
        self.copies = (copied,) if copied else ()
        self.has_sums = sums is not None
        call = reduce_matrix_call(launch.device(self.device_index), rows, sums)
        if rows.num_rows and rows.num_cols:
            self.compile(call, ["x", "partials", "sums" if sums else "amax"])
        shape, dtype = ((rows.num_cols,), sums) if sums else ((1,), "float32")
        self.new_result = allocator(self.library, shape, dtype)
        partials_dtype = compute_dtype(rows.dtype).name if sums else None
        self.new_partials = allocator(self.library, call.partials_shape, partials_dtype)

    def run(self, x: Array) -> Array:
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            inputs = self.contiguous((x,)) if self.copies else (x,)
            result = self.new_result()
            if not (self.steps and self.has_sums):
                fill((result,), 0)
            if self.steps:
                tensors = (*inputs, self.new_partials(), result)
                address = library.address
                self.enqueue(tuple(0 if each is None else address(each) for each in tensors), None)
            return result
        finally:
            if former != self.device_index:
                library.exchange_device(former)
