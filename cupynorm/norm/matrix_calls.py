"""From a matrix to the kernels and arguments that quantise it, transpose it or reduce it.

The arguments are the structs of cuda_src/quantize.cu, reduce_matrix.cu and backward_parameters.cu,
as in cupynorm.norm.arguments.
"""

from __future__ import annotations

from typing import NamedTuple

from ..gpu.arrays import Rows
from ..plan.devices import Device
from ..plan.matrices import quantize_launch, reduce_matrix_launch
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
        rule = scale_rule_words(*(options.rule or (0.0, False)))
        words += [Address("scale"), Address("scale_inv"), Address("amax"), *rule]
    if options.centered is not None:
        words += [Address("weight"), Address("bias"), Address("mean"), Address("rstd")]
    words += [Address("data"), x.num_cols, Address("transposed"), x.num_rows, x.num_cols]
    arguments, partials_shape = [[*words, Address("partials")]], None
    if options.sums:
        partials_shape = (-(-x.num_rows // 128), x.num_cols)  # one row for each 128 rows
        arguments.append(_sum_words(partials_shape))
    return Call(launches, tuple(arguments), None, partials_shape)


def _sum_words(partials_shape: tuple[int, int]) -> Words:
    """struct Parameters of backward_parameters.cu, of one kind of sums."""
    num_cols = partials_shape[1]
    return [0, Address("partials"), num_cols, 0, Address("sums"), *partials_shape]


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
        arguments.append(_sum_words(partials_shape))
    return Call(launches, tuple(arguments), None, partials_shape)
