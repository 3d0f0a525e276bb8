"""What one reading of a matrix on a GPU tells of it: the sums over its rows, or its largest magnitude (cuda_src/survey.cu)."""

from __future__ import annotations

from . import arrays, launch, norm
from .calls import SurveyCall
from .dtypes import compute_dtype
from .norm import Array


def sum_rows(x: Array, dtype: str) -> Array:
    """[num_cols]: sums over the rows of x [num_rows, num_cols], of a dtype by name.

    They are made in float32 (of float64 in that), in one order, and rounded once.
    """
    return _prepared(x, dtype).run(x)


def amax(x: Array) -> Array:
    """[1], float32: the largest |x| of a matrix; NaN if there is one, 0 of nothing."""
    return _prepared(x, None).run(x)


def _prepared(x: Array, sums: str | None) -> _PreparedSurvey:
    key = ("survey", arrays.library(x).lie(x), sums)
    prepared = norm.quantizations.get(key)
    if prepared is None:
        prepared = _PreparedSurvey(x, sums)
        norm.keep(norm.quantizations, key, prepared)
    return prepared


class _PreparedSurvey:
    """A survey that is planned and compiled."""

    def __init__(self, x: Array, sums: str | None) -> None:
        view = norm._view(x)
        self.device_index, self.sums_up = view.device, sums is not None
        self.library = library = arrays.library(x)(view.device)
        rows, copied = norm._rows(x, 1)
        self.copies = norm._copies(copied)
        self.call = SurveyCall(launch.device(view.device), rows, sums)
        launches = self.call.launches if rows.num_rows and rows.num_cols else ()
        self.kernels = [launch.load(each, view.device) for each in launches]
        self.new_found = norm._new(library, *((view.shape[1:], sums) if sums else ((1,), "float32")))
        partials_dtype = compute_dtype(rows.dtype).name if self.sums_up else None
        self.new_partials = norm._new(library, self.call.partials_shape, partials_dtype)

    def run(self, x: Array) -> Array:
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            if self.copies:
                (x,) = norm._contiguous(library, self.copies, (x,))
            found = self.new_found()
            if not (self.kernels and self.sums_up):
                norm._fill((found,), 0)
            if self.kernels:
                address, stream, partials = library.address, library.stream(), self.new_partials()
                results = (address(partials), address(found)) if self.sums_up else (0, 0, address(found))
                for kernel, words in zip(self.kernels, self.call.words(address(x), *results)):
                    kernel.enqueue(stream, words)
            return found
        finally:
            if former != self.device_index:
                library.exchange_device(former)
