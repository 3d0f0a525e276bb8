"""From the tensors of one rank, which has some columns of each row, to kernels and arguments.

The arguments are the structs of cuda_src/split_*.cu, as in cupynorm.norm.arguments.
"""

from __future__ import annotations

from typing import NamedTuple

from ..dtypes import DTYPES
from ..plan.devices import Device
from ..plan.problem import Layout, ceil_div
from ..plan.split_rows import (
    Part,
    gradients_launches,
    normalize_launch,
    statistics_launch,
    sums_launch,
)
from .arguments import Address, Call, RowsByName, Words


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


def _part(norm: SplitNorm, tensors: RowsByName) -> Part:
    """tensors: of one kernel: x, y or dy, dx, weight, bias."""
    x, other = tensors["x"], tensors.get("y", tensors.get("dy"))
    layout = Layout.of(x.num_cols, [each.layout() for each in tensors.values()])
    weight, bias = (tensors[name].dtype if name in tensors else None for name in ("weight", "bias"))
    return Part(
        x.num_rows,
        x.num_cols,
        layout.pack_limit,
        norm.centered,
        x.dtype,
        other.dtype if other else None,
        weight,
        bias,
        norm.zero_centered_weight,
    )


def _rows(tensors: RowsByName, name: str) -> Words:
    """Address and row stride."""
    return [Address(name), tensors[name].row_stride if name in tensors else 0]


def statistics_call(norm: SplitNorm, tensors: RowsByName) -> Call:
    """Of one rank: x -> part."""
    x = tensors["x"]
    words = [*_rows(tensors, "x"), Address("part"), x.num_rows, x.num_cols]
    return Call((statistics_launch(_part(norm, tensors)),), (words,))


def normalize_call(norm: SplitNorm, tensors: RowsByName, *, combines: bool) -> Call:
    """x, weight, bias -> y. combines: parts -> statistics too; else statistics are read."""
    x = tensors["x"]
    words = [*_rows(tensors, "x"), *_rows(tensors, "y"), Address("weight"), Address("bias")]
    words += [Address("parts"), Address("statistics"), x.num_rows, x.num_cols]
    words += [norm.cols_of_row, norm.cols_of_rank, norm.num_ranks, float(norm.eps)]
    return Call((normalize_launch(_part(norm, tensors), combines=combines),), (words,))


def _backward_words(tensors: RowsByName) -> Words:
    return [*_rows(tensors, "x"), *_rows(tensors, "dy"), Address("weight")]


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
    words = [*_backward_words(tensors), *_rows(tensors, "dx"), 0, 0]
    words += [Address("statistics"), Address("sums"), of_dweight, of_dbias]
    words += [x.num_rows, x.num_cols, slabs.num_rows, norm.cols_of_row]
    if len(launches) == 1:
        return Call(launches, (words,))
    partials_shape = (bool(dweight) + bool(dbias), slabs.count, x.num_cols)
    last = [of_dweight, of_dbias, x.num_cols, Address("dweight"), Address("dbias")]
    return Call(launches, (words, [*last, *partials_shape[1:]]), None, partials_shape)
