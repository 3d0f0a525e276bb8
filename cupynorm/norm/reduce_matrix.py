"""Reductions of a matrix on a GPU: the sums over its rows, or its largest magnitude."""

from __future__ import annotations

from typing import NamedTuple

from ..gpu import arrays, launch
from ..gpu.arrays import Rows
from ..plan.devices import Device
from ..plan.grids import reduce_matrix_launch
from .arguments import Address, Call, layout_of, row_words
from .cache import keep, matrices
from .on_gpu import PreparedMatrixCall, rows_of
from .quantize import sum_words
from .request import Array


class _Operands(NamedTuple):
    x: Array


def sum_rows(x: Array, dtype: str) -> Array:
    """[num_cols]: sums over the rows of x [num_rows, num_cols], of a dtype by name.

    They are computed in float32 (float64 for float64), in a fixed order, and rounded once.
    """
    return _prepared(x, dtype).run((x,))


def amax(x: Array) -> Array:
    """[1], float32: the largest |x| of a matrix; NaN if there is one, 0 of nothing."""
    return _prepared(x, None).run((x,))


def _prepared(x: Array, sums: str | None) -> PreparedMatrixCall:
    key = ("reduce_matrix", arrays.library(x).layout_key(x), sums)
    prepared = matrices.get(key)
    if prepared is None:
        rows, copied = rows_of(x, 1)
        call = None
        if rows.num_rows and rows.num_cols:
            call = reduce_matrix_call(launch.device(arrays.view(x).device), rows, sums)
        outputs = {"sums": ((rows.num_cols,), sums)} if sums else {"amax": ((1,), "float32")}
        layouts = {"x": (rows, copied)}
        # The kernel raises amax, and writes sums.
        prepared = PreparedMatrixCall(_Operands(x), layouts, outputs, call, zeroed=sums is None)
        keep(matrices, key, prepared)
    return prepared


def reduce_matrix_call(device: Device, x: Rows, sums: str | None) -> Call:
    """A reading of a matrix for its largest magnitude, or for sums over its rows, of dtype sums."""
    limit = layout_of(x.num_cols, {"x": x}).pack_limit
    launches, num_slabs, rows_of_slab = reduce_matrix_launch(
        device, x.num_rows, x.num_cols, x.dtype, limit, sums
    )
    words = [*row_words({"x": x}, "x"), x.num_rows, x.num_cols, rows_of_slab]
    arguments, partials_shape = [[*words, Address("partials"), Address("amax")]], None
    if sums:
        partials_shape = (num_slabs, x.num_cols)
        arguments.append(sum_words(partials_shape))
    return Call(launches, tuple(arguments), None, partials_shape)
