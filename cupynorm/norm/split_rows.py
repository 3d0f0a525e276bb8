"""A norm of rows whose columns are on several ranks: what one rank computes on a GPU.

    part of x -> statistics_of_part -> parts of all ranks -> normalize -> y, statistics
    dy -> sums_of_part -> their sums over ranks -> gradients -> dx, dweight, dbias

The statistics are those of whole rows. The caller gathers parts and adds up sums. The formulas are
in cupynorm.reference.parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..dtypes import DTYPES, compute_dtype
from ..gpu import arrays, launch
from ..plan.devices import Device
from ..plan.problem import ceil_div
from ..plan.split_rows import (
    Part,
    gradients_launches,
    normalize_launch,
    statistics_launch,
    sums_launch,
)
from .arguments import Address, Call, RowsByName, Words, dtype_of, layout_of, row_words
from .cache import keep, matrices
from .on_gpu import PreparedMatrixCall, parameter_of, rows_of
from .request import Array


class SplitNorm(NamedTuple):
    """The norm of rows of cols_of_row columns that num_ranks ranks share.

    Rank r has columns [r * cols_of_rank, (r + 1) * cols_of_rank) of them: the last ranks may have
    fewer, or none.
    """

    centered: bool
    eps: float
    zero_centered_weight: bool
    cols_of_row: int
    num_ranks: int

    @property
    def cols_of_rank(self) -> int:
        return ceil_div(self.cols_of_row, self.num_ranks)

    @property
    def counts(self) -> list[int]:
        """The number of columns of each rank."""
        ends = [min(rank * self.cols_of_rank, self.cols_of_row) for rank in range(self.num_ranks)]
        return [end - start for start, end in zip(ends, [*ends[1:], self.cols_of_row])]


class OfPart(NamedTuple):
    """The arrays of one rank; None for what is absent or not needed.

    x, dy: [num_rows, num_cols], this rank's columns. weight, bias: [num_cols].
    parts: of all ranks, what statistics_of_part returned. statistics: what normalize returned.
    sums: what sums_of_part returned, added up over ranks.
    """

    x: Array
    weight: Array | None = None
    bias: Array | None = None
    dy: Array | None = None
    parts: Array | None = None
    statistics: Array | None = None
    sums: Array | None = None


_ARITHMETIC = "arithmetic"  # the dtype of the arithmetic on x


def statistics_of_part(of_part: OfPart, norm: SplitNorm) -> Array:
    """[3, num_rows]: mean, what is left of it after rounding, and M2 = sum of (x - mean)^2.

    For RMSNorm the sums of squares, [1, num_rows]. In the dtype of the arithmetic.
    """
    return _run(of_part, norm, (("part", _ARITHMETIC),), statistics_call)


def normalize(of_part: OfPart, norm: SplitNorm, dtype: str) -> tuple[Array, Array]:
    """y of this rank's columns, of a dtype by name, and the statistics of whole rows.

    Statistics are [3, num_rows]: mean, what is left of it after rounding, rstd; RMSNorm: rstd
    alone, [1, num_rows]. They come from parts, or, without parts, are those that were given.
    """
    combines = of_part.parts is not None
    outputs = ("y", dtype), ("statistics", _ARITHMETIC if combines else None)
    y, statistics = _run(
        of_part, norm, outputs, lambda *call: normalize_call(*call, combines=combines)
    )
    return y, statistics if combines else of_part.statistics


def sums_of_part(of_part: OfPart, norm: SplitNorm) -> Array:
    """[2, num_rows]: sums of dy * weight * x_hat and of dy * weight; RMSNorm: the first alone.

    In the dtype of the arithmetic.
    """
    return _run(of_part, norm, (("sums", _ARITHMETIC),), sums_call)


class Wanted(NamedTuple):
    """dtypes of gradients by name; None for those that are not wanted."""

    dx: str | None
    dweight: str | None
    dbias: str | None


def gradients(
    of_part: OfPart, norm: SplitNorm, wanted: Wanted
) -> tuple[Array | None, Array | None, Array | None]:
    """dx of this rank's columns, dweight and dbias. Sums repeat to the bit.

    wanted: dx has the dtype of x.
    """
    outputs = tuple(zip(Wanted._fields, wanted))

    def plan(norm: SplitNorm, tensors: RowsByName) -> Call:
        device = launch.device(arrays.view(of_part.x).device)
        dtypes = {"dweight": wanted.dweight, "dbias": wanted.dbias}
        return gradients_call(norm, tensors, device, **dtypes)

    return _run(of_part, norm, outputs, plan)


def _run(
    of_part: OfPart,
    norm: SplitNorm,
    outputs: tuple[tuple[str, str | None], ...],
    plan: Callable[[SplitNorm, RowsByName], Call],
) -> Any:
    """Runs one of the calls below. outputs: names and dtypes, None for what is not wanted."""
    key = (outputs, norm, *map(arrays.library(of_part.x).layout_key, of_part))
    prepared = matrices.get(key)
    if prepared is None:
        prepared = _prepare(of_part, norm, outputs, plan)
        keep(matrices, key, prepared)
    return prepared.run(of_part)


def _prepare(
    of_part: OfPart,
    norm: SplitNorm,
    outputs: tuple[tuple[str, str | None], ...],
    plan: Callable[[SplitNorm, RowsByName], Call],
) -> PreparedMatrixCall:
    """The call, planned and compiled; here are the shapes of all that one returns."""
    layouts = {
        name: rows_of(array, 1) if name in ("x", "dy") else parameter_of(array)
        for name in ("x", "dy", "weight", "bias")
        if (array := getattr(of_part, name)) is not None
    }
    x, compute = layouts["x"][0], compute_dtype(layouts["x"][0].dtype).name
    whole, of_cols, values = (x.num_rows, x.num_cols), (x.num_cols,), 3 if norm.centered else 1
    shapes = {"y": whole, "dx": whole, "dweight": of_cols, "dbias": of_cols}
    shapes |= {"part": (values, x.num_rows), "statistics": (values, x.num_rows)}
    shapes["sums"] = (2 if norm.centered else 1, x.num_rows)
    made = {
        name: (shapes[name], compute if dtype is _ARITHMETIC else dtype) for name, dtype in outputs
    }
    tensors = {name: rows for name, (rows, _) in layouts.items()}
    for name in ("y", "dx"):
        if name in made and made[name][1]:
            tensors[name] = arrays.contiguous_rows(whole, 1, made[name][1])
    call = plan(norm, tensors) if x.num_rows and x.num_cols else None
    # Without rows, or on a rank without columns, which adds nothing to sums, outputs are 0.
    return PreparedMatrixCall(of_part, layouts, made, call)


# Kernels and their arguments, the structs of cuda_src/split_*.cu.


def _part(norm: SplitNorm, tensors: RowsByName) -> Part:
    """tensors: of one kernel: x, y or dy, dx, weight, bias."""
    x, other = tensors["x"], tensors.get("y", tensors.get("dy"))
    return Part(
        x.num_rows,
        x.num_cols,
        layout_of(x.num_cols, tensors).pack_limit,
        norm.centered,
        x.dtype,
        other.dtype if other else None,
        dtype_of(tensors, "weight"),
        dtype_of(tensors, "bias"),
        norm.zero_centered_weight,
    )


def statistics_call(norm: SplitNorm, tensors: RowsByName) -> Call:
    """Of one rank: x -> part."""
    x = tensors["x"]
    words = [*row_words(tensors, "x"), Address("part"), x.num_rows, x.num_cols]
    return Call((statistics_launch(_part(norm, tensors)),), (words,))


def normalize_call(norm: SplitNorm, tensors: RowsByName, *, combines: bool) -> Call:
    """x, weight, bias -> y. combines: parts -> statistics too; else statistics are read."""
    x = tensors["x"]
    words = [*row_words(tensors, "x"), *row_words(tensors, "y"), Address("weight"), Address("bias")]
    words += [Address("parts"), Address("statistics"), x.num_rows, x.num_cols]
    words += [norm.cols_of_row, norm.cols_of_rank, norm.num_ranks, float(norm.eps)]
    return Call((normalize_launch(_part(norm, tensors), combines=combines),), (words,))


def _backward_words(tensors: RowsByName) -> Words:
    return [*row_words(tensors, "x"), *row_words(tensors, "dy"), Address("weight")]


def sums_call(norm: SplitNorm, tensors: RowsByName) -> Call:
    """x, dy, weight, statistics -> sums of this rank."""
    x, words = tensors["x"], _backward_words(tensors)
    words += [Address("statistics"), Address("sums"), x.num_rows, x.num_cols]
    return Call((sums_launch(_part(norm, tensors)),), (words,))


def gradients_call(
    norm: SplitNorm, tensors: RowsByName, device: Device, *, dweight: str | None, dbias: str | None
) -> Call:
    """x, dy, weight, statistics, sums -> dx if it is among tensors, dweight and dbias of a dtype.

    sums: over all ranks; needed for dx.
    """
    x, part = tensors["x"], _part(norm, tensors)
    launches, slabs = gradients_launches(
        part, device, dx="dx" in tensors, dweight=dweight, dbias=dbias
    )
    after = slabs.count * x.num_cols * DTYPES[DTYPES[x.dtype].compute].itemsize
    of_dweight = Address("partials") if dweight else 0
    of_dbias = Address("partials", after if dweight else 0) if dbias else 0
    words = [*_backward_words(tensors), *row_words(tensors, "dx"), 0, 0]
    words += [Address("statistics"), Address("sums"), of_dweight, of_dbias]
    words += [x.num_rows, x.num_cols, slabs.num_rows, norm.cols_of_row]
    if len(launches) == 1:
        return Call(launches, (words,))
    partials_shape = (bool(dweight) + bool(dbias), slabs.count, x.num_cols)
    last = [of_dweight, of_dbias, x.num_cols, Address("dweight"), Address("dbias")]
    return Call(launches, (words, [*last, *partials_shape[1:]]), None, partials_shape)
