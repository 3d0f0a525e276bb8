"""A norm of rows whose columns are on several ranks: what one rank computes on a GPU.

    part of x -> statistics_of_part -> parts of all ranks -> normalize -> y, statistics
    dy -> sums_of_part -> their sums over ranks -> gradients -> dx, dweight, dbias

The statistics are those of whole rows. The caller gathers parts and adds up sums. The formulas are
in cupynorm.reference.parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..dtypes import compute_dtype
from ..gpu import arrays, launch
from ..gpu.arrays import Rows
from .arguments import Call
from .cache import keep, matrices
from .on_gpu import OnGpu, allocator, fill, parameter_of, rows_of
from .request import Array
from .split_calls import SplitNorm, gradients_call, normalize_call, statistics_call, sums_call


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


_ROWS, _PARAMETERS = ("x", "dy"), ("weight", "bias")


def statistics_of_part(of_part: OfPart, norm: SplitNorm) -> Array:
    """[3, num_rows]: mean, what is left of it after rounding, and M2 = sum of (x - mean)^2.

    For RMSNorm the sums of squares, [1, num_rows]. In the dtype of the arithmetic.
    """

    def make(read: Mapping[str, Rows], _: Mapping[str, Any]) -> Call:
        return statistics_call(norm, read)

    shapes = {"part": (3 if norm.centered else 1, len(of_part.x))}
    (part,) = _prepared("part", of_part, norm, (), make, shapes).run(of_part)
    return part


def normalize(of_part: OfPart, norm: SplitNorm, dtype: str) -> tuple[Array, Array]:
    """y of this rank's columns, of a dtype by name, and the statistics of whole rows.

    Statistics are [3, num_rows]: mean, what is left of it after rounding, rstd; RMSNorm: rstd
    alone, [1, num_rows]. They come from parts, or, without parts, are those that were given.
    """
    combines = of_part.parts is not None

    def make(read: Mapping[str, Rows], new: Mapping[str, Rows]) -> Call:
        return normalize_call(norm, {**read, "y": new["y"]}, combines=combines)

    shapes: dict[str, tuple[int, ...]] = {"y": tuple(of_part.x.shape)}
    if combines:
        shapes["statistics"] = (3 if norm.centered else 1, len(of_part.x))
    y, *statistics = _prepared("y", of_part, norm, (dtype,), make, shapes, y=dtype).run(of_part)
    return y, statistics[0] if statistics else of_part.statistics


def sums_of_part(of_part: OfPart, norm: SplitNorm) -> Array:
    """[2, num_rows]: sums of dy * weight * x_hat and of dy * weight; RMSNorm: the first alone.

    In the dtype of the arithmetic.
    """

    def make(read: Mapping[str, Rows], _: Mapping[str, Any]) -> Call:
        return sums_call(norm, read)

    shapes = {"sums": (2 if norm.centered else 1, len(of_part.x))}
    (sums,) = _prepared("sums", of_part, norm, (), make, shapes).run(of_part)
    return sums


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

    def make(read: Mapping[str, Rows], new: Mapping[str, Rows]) -> Call:
        tensors = {**read, "dx": new["dx"]} if wanted.dx else read
        device = launch.device(arrays.view(of_part.x).device)
        dtypes = {"dweight": wanted.dweight, "dbias": wanted.dbias}
        return gradients_call(norm, tensors, device, **dtypes)

    shape = tuple(of_part.x.shape)
    shapes = {"dx": shape, "dweight": shape[1:], "dbias": shape[1:]}
    dtypes = {name: dtype for name, dtype in wanted._asdict().items() if dtype}
    output_shapes = {name: shapes[name] for name in dtypes}
    prepared = _prepared("gradients", of_part, norm, wanted, make, output_shapes, **dtypes)
    by_name = dict(zip(output_shapes, prepared.run(of_part)))
    return by_name.get("dx"), by_name.get("dweight"), by_name.get("dbias")


def _prepared(
    kind: str,
    of_part: OfPart,
    norm: SplitNorm,
    options: tuple,
    make: Callable[[Mapping[str, Rows], Mapping[str, Rows]], Call],
    shapes: Mapping[str, tuple[int, ...]],
    **dtypes: str,
) -> _PreparedPart:
    layout_key = arrays.library(of_part.x).layout_key
    key = (kind, norm, options, *map(layout_key, of_part))
    prepared = matrices.get(key)
    if prepared is None:
        prepared = _PreparedPart(of_part, make, shapes, dtypes)
        keep(matrices, key, prepared)
    return prepared


class _PreparedPart(OnGpu):
    """One of the calls above, planned and compiled."""

    def __init__(
        self,
        of_part: OfPart,
        make: Callable[[Mapping[str, Rows], Mapping[str, Rows]], Call],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
    ) -> None:
        """shapes: those of what is returned. dtypes: of those that have not that of arithmetic."""
        names = [name for name, array in of_part._asdict().items() if array is not None]
        super().__init__(of_part.x, names, OfPart._fields)
        read, copied = {}, []
        for name in names:
            array, copies = getattr(of_part, name), False
            if name in _ROWS:
                read[name], copies = rows_of(array, 1)
            elif name in _PARAMETERS:
                read[name], copies = parameter_of(array)
            copied.append(copies)
        self.copies = tuple(copied) if any(copied) else ()
        compute = compute_dtype(read["x"].dtype).name
        output_dtypes = {name: dtypes.get(name, compute) for name in shapes}
        new = {
            name: arrays.contiguous_rows(shapes[name], 1, output_dtypes[name]) for name in shapes
        }
        self.makers = [
            allocator(self.library, shapes[name], output_dtypes[name]) for name in shapes
        ]
        self.new_partials = lambda: None
        if read["x"].num_rows and read["x"].num_cols:
            call = make(read, new)
            partials_dtype = compute if call.partials_shape else None
            self.new_partials = allocator(self.library, call.partials_shape, partials_dtype)
            self.compile(call, [*names, *shapes, "partials"])

    def run(self, of_part: OfPart) -> tuple[Array, ...]:
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            tensors = self.read(of_part)
            if self.copies:
                tensors = self.contiguous(tensors)
            outputs = tuple([new() for new in self.makers])
            if self.steps:
                partials = self.new_partials()
                address = library.address
                of_partials = 0 if partials is None else address(partials)
                self.enqueue((*map(address, (*tensors, *outputs)), of_partials), None)
            else:  # no rows, or a rank without columns, which adds nothing to sums
                fill(outputs, 0)
            return outputs
        finally:
            if former != self.device_index:
                library.exchange_device(former)
