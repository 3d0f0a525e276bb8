"""Matrices on a GPU in 8-bit floats, and the scales of delayed scaling."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..dtypes import compute_dtype
from ..gpu import arrays, launch
from ..plan.matrices import update_scales_launch
from .cache import keep, matrices
from .matrix_calls import QuantizeOptions, quantize_call
from .on_gpu import OnGpu, allocator, fill, parameter_of, rows_of
from .request import Array


class OfNorm(NamedTuple):
    """A norm whose y is quantised in place of the matrix itself, and its statistics."""

    centered: bool
    weight: Array | None
    bias: Array | None
    zero_centered: bool
    mean: Array | None
    rstd: Array


class QuantizedMatrix(NamedTuple):
    """data: [num_rows, num_cols]. transposed: [num_cols, num_rows]. sums: over rows, [num_cols].

    None: not wanted.
    """

    data: Array | None
    scale_inv: Array | None
    transposed: Array | None
    sums: Array | None = None


def quantize(
    x: Array,
    dtype: str,
    scale: Array | None = None,
    amax: Array | None = None,
    *,
    wants_data: bool = True,
    transpose: bool = False,
    of_norm: OfNorm | None = None,
    sums: str | None = None,
    rule: tuple[float, bool] | None = None,
) -> QuantizedMatrix:
    """A matrix on a GPU in 8-bit floats, read once; one of 8-bit floats is only transposed.

    x: [num_rows, num_cols]. dtype: the 8-bit one by name. scale: one float32, None: 1.
    amax: one float32, raised to the largest |x|. of_norm: quantise that norm's y of x.
    sums: the dtype of sums of x over rows, which are computed in float32 (float64 for float64), in
    a fixed order, and rounded once.
    rule: (smallest_amax, power_of_two): the scale is that of amax, x's own, which is read.
    """
    is_scaled = arrays.dtype_name(x) not in (dtype, "uint8")
    layout_key = arrays.library(x).layout_key
    of_key, centered, zero_centered = None, None, False
    if of_norm is not None:
        centered, zero_centered = of_norm.centered, of_norm.zero_centered
        of_key = layout_key(of_norm.weight), layout_key(of_norm.bias), centered, zero_centered
    key = (layout_key(x), dtype, of_key, wants_data, transpose, sums, rule)
    prepared = matrices.get(key)
    if prepared is None:
        options = QuantizeOptions(dtype, centered, zero_centered, sums, rule)
        prepared = _PreparedQuantize(x, of_norm, options, is_scaled)
        prepared.make_allocators(wants_data, transpose)
        keep(matrices, key, prepared)
    norm = (None,) * 4 if of_norm is None else (of_norm.weight, of_norm.bias, *of_norm[4:])
    return prepared.run(_Operands(x, *norm, scale, amax))


class _Operands(NamedTuple):
    x: Array
    weight: Array | None
    bias: Array | None
    mean: Array | None
    rstd: Array | None
    scale: Array | None
    amax: Array | None


class _PreparedQuantize(OnGpu):
    """A quantisation that is planned and compiled."""

    def __init__(
        self, x: Array, of_norm: OfNorm | None, options: QuantizeOptions, is_scaled: bool
    ) -> None:
        rows, copy_x = rows_of(x, 1)
        if not is_scaled:
            rows = rows._replace(dtype=options.dtype)
        super().__init__(x, list(_Operands._fields), _Operands._fields)
        tensors, copied = {"x": rows}, [copy_x, False, False]
        for at, name in enumerate(("weight", "bias"), 1):
            array = getattr(of_norm, name, None)
            if array is not None:
                tensors[name], copied[at] = parameter_of(array)
        self.copies = (*copied, *(False,) * 4) if any(copied) else ()
        self.shape, self.dtype, self.is_scaled = (
            (rows.num_rows, rows.num_cols),
            options.dtype,
            is_scaled,
        )
        call = quantize_call(tensors, options)
        if rows.num_rows and rows.num_cols:
            order = [*_Operands._fields, "data", "scale_inv", "transposed", "sums", "partials"]
            self.compile(call, order)
        self.new_sums = allocator(self.library, (rows.num_cols,), options.sums)
        partials_dtype = compute_dtype(rows.dtype).name if options.sums else None
        self.new_partials = allocator(self.library, call.partials_shape, partials_dtype)

    def make_allocators(self, wants_data: bool, transpose: bool) -> None:
        library, dtype = self.library, self.dtype
        self.new_data = allocator(library, self.shape, dtype if wants_data else None)
        self.new_transposed = allocator(library, self.shape[::-1], dtype if transpose else None)
        self.new_scale_inv = allocator(library, (1,), "float32" if self.is_scaled else None)

    def run(self, operands: _Operands) -> QuantizedMatrix:
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            inputs = self.contiguous(operands) if self.copies else operands
            quantized = QuantizedMatrix(
                self.new_data(), self.new_scale_inv(), self.new_transposed(), self.new_sums()
            )
            if self.steps:
                tensors = (*inputs, *quantized, self.new_partials())
                address = library.address
                self.enqueue(tuple(0 if each is None else address(each) for each in tensors), None)
            else:
                scale = operands.scale
                fill((quantized.scale_inv,), 1.0 if scale is None else 1.0 / scale)
                fill((quantized.sums,), 0)
            return quantized
        finally:
            if former != self.device_index:
                library.exchange_device(former)


def update_scales(
    scale: Array, history: Array, largest: Array, factor: float, *, most_recent: bool
) -> None:
    """The end of a step of delayed scaling, in place, by one launch: what cupynorm.nn.fp8.updated
    gives.

    scale, largest: [num_tensors]; history: [num_steps, num_tensors]; all float32, contiguous, on a
    GPU. factor: what largest is multiplied by. most_recent: this step's amax counts, and not the
    largest of all steps.
    """
    view = arrays.view(history)
    key = ("update_scales", view.device, *view.shape)
    kernel = matrices.get(key)
    if kernel is None:
        kernel = launch.load(update_scales_launch(view.shape[1]), view.device)
        keep(matrices, key, kernel)
    library = arrays.library(history)(view.device)
    former = library.exchange_device(view.device)
    try:
        pointers = (library.address(each) for each in (scale, history, largest))
        with np.errstate(over="ignore"):  # beyond float32, as the scales are then
            factor = float(np.float32(factor))
        kernel.enqueue(library.stream(), (*pointers, factor, int(most_recent), *view.shape))
    finally:
        if former != view.device:
            library.exchange_device(former)
