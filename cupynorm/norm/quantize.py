"""Matrices on a GPU in 8-bit floats, and the scales of delayed scaling."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..gpu import arrays, launch
from ..plan.grids import quantize_launch, update_scales_launch
from .arguments import (
    Address,
    Call,
    RowsByName,
    Words,
    dtype_of,
    layout_of,
    row_words,
    scale_rule_words,
)
from .cache import keep, matrices
from .on_gpu import PreparedMatrixCall, fill, layouts_of, rows_of
from .request import Array, Quantization


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

    x: [num_rows, num_cols]; the device of a CuPy array is the current one. dtype: the 8-bit one by
    name. scale: one float32, None: 1.
    amax: one float32, raised to the largest |x|. of_norm: quantise that norm's y of x.
    sums: the dtype of sums of x over rows, which are computed in float32 (float64 for float64), in
    a fixed order, and rounded once.
    rule: (smallest_amax, power_of_two): the scale is that of amax, x's own, which is read.
    """
    library = arrays.library(x)
    of_key, centered, zero_centered = None, None, False
    norm: tuple[Array | None, ...] = (None,) * 4
    if of_norm is not None:
        centered, zero_centered = of_norm.centered, of_norm.zero_centered
        norm = of_norm.weight, of_norm.bias, of_norm.mean, of_norm.rstd
        of_key = *map(library.layout_key, norm), centered, zero_centered
    operands = _Operands(x, *norm, scale, amax)
    key = (library.layout_key(x), dtype, of_key, wants_data, transpose, sums, rule)
    # amax may be written to, so it is never copied. It is one element that we made.
    key += None if scale is None else library.layout_key(scale), amax is None
    prepared = matrices.get(key)
    if prepared is None:
        options = QuantizeOptions(dtype, centered, zero_centered, sums, rule)
        prepared = _prepare(operands, options, wants_data, transpose)
        keep(matrices, key, prepared)
    quantized = QuantizedMatrix(*prepared.run(operands))
    if not prepared.steps:
        fill((quantized.scale_inv,), 1.0 if scale is None else 1.0 / scale)
    return quantized


class _Operands(NamedTuple):
    x: Array
    weight: Array | None
    bias: Array | None
    mean: Array | None
    rstd: Array | None
    scale: Array | None
    amax: Array | None


def _prepare(
    operands: _Operands, options: QuantizeOptions, wants_data: bool, transpose: bool
) -> PreparedMatrixCall:
    x, dtype = operands.x, options.dtype
    rows, copied = rows_of(x, 1)
    is_scaled = rows.dtype not in (dtype, "uint8")
    if not is_scaled:
        rows = rows._replace(dtype=dtype)
    names = ("weight", "bias", "mean", "rstd", "scale")
    layouts = {"x": (rows, copied), **layouts_of(operands, names, (), 1)}
    outputs = {
        "data": ((rows.num_rows, rows.num_cols), dtype if wants_data else None),
        "scale_inv": ((1,), "float32" if is_scaled else None),
        "transposed": ((rows.num_cols, rows.num_rows), dtype if transpose else None),
        "sums": ((rows.num_cols,), options.sums),
    }
    call = None
    if rows.num_rows and rows.num_cols:
        of_plan = [name for name in ("x", "weight", "bias") if name in layouts]
        call = quantize_call({name: layouts[name][0] for name in of_plan}, options)
    return PreparedMatrixCall(operands, layouts, outputs, call)


class QuantizeOptions(NamedTuple):
    """How a matrix, or a norm's y of it, becomes 8-bit floats of a dtype.

    centered: None for the matrix itself, else whether its norm is layer_norm. sums: the dtype of
    sums of x over rows, or None.
    rule: (smallest_amax, power_of_two) where the scale comes from a known amax, None where it is
    given.
    """

    dtype: str
    centered: bool | None = None
    zero_centered: bool = False
    sums: str | None = None
    rule: tuple[float, bool] | None = None


def quantize_call(tensors: RowsByName, options: QuantizeOptions) -> Call:
    """tensors: x, weight, bias. x of the 8-bit dtype itself is only transposed."""
    x = tensors["x"]
    launches = quantize_launch(
        x.num_rows,
        x.num_cols,
        x.dtype,
        options.dtype,
        layout_of(x.num_cols, tensors).pack_limit,
        centered=options.centered,
        weight=dtype_of(tensors, "weight"),
        bias=dtype_of(tensors, "bias"),
        zero_centered=options.zero_centered,
        sums=options.sums,
        scaling="tensor" if options.rule else "given",
    )
    words = [*row_words(tensors, "x")]
    if x.dtype != options.dtype:
        smallest_amax, power_of_two = options.rule or (0.0, False)
        how = Quantization(options.dtype, power_of_two=power_of_two, smallest_amax=smallest_amax)
        rule = scale_rule_words(how)
        words += [Address("scale"), Address("scale_inv"), Address("amax"), *rule]
    if options.centered is not None:
        words += [Address("weight"), Address("bias"), Address("mean"), Address("rstd")]
    words += [Address("data"), x.num_cols, Address("transposed"), x.num_rows, x.num_cols]
    arguments, partials_shape = [[*words, Address("partials")]], None
    if options.sums:
        partials_shape = (-(-x.num_rows // 128), x.num_cols)  # one row for each 128 rows
        arguments.append(sum_words(partials_shape))
    return Call(launches, tuple(arguments), None, partials_shape)


def sum_words(partials_shape: tuple[int, int]) -> Words:
    """struct Parameters of backward_parameters.cu, of one kind of sums."""
    num_cols = partials_shape[1]
    return [0, Address("partials"), num_cols, 0, Address("sums"), *partials_shape]


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
