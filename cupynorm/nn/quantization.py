"""torch: tensors in 8-bit floats, and products that are added in float32.

    data = float8(x * scale)    multiplied in float32, saturated, rounded once
    x    ~ data * scale_inv

All of it runs on the device and waits for no value, so that a CUDA graph can capture a step.
For float32 values the results are those of cupynorm.reference.fp8 to the bit (NaN may keep its
sign). On a GPU torch's scaled_mm multiplies 8-bit factors; elsewhere their values are multiplied
in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_with_zeros

from ..gpu import arrays
from ..norm import quantized as matrix_kernels
from ..norm.quantized import QuantizedTensor
from ..norm.request import Quantization
from ..recipes import (
    BLOCK_SIZE,
    LARGEST,
    LARGEST_FLOAT32,
    CurrentScaling,
    DelayedScaling,
    Recipe,
)
from . import private
from .modes import arithmetic, name_of, outside_autocast

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class Rule(NamedTuple):
    """How a current scale follows from an amax: see `scale_of`."""

    smallest_amax: float = 0.0
    power_of_two: bool = False


def quantization_of(recipe: Recipe, *, transpose: bool) -> Quantization:
    """How the norm's kernel quantises y. transpose: also make the transposed copy, where y has one
    scale."""
    dtype = name_of(recipe.fp8_format.value[0])
    if isinstance(recipe, DelayedScaling):
        return Quantization(dtype, transpose=transpose)
    if isinstance(recipe, CurrentScaling):
        power_of_two, smallest_amax = recipe.power_of_two, recipe.amax_epsilon
        return Quantization(dtype, "tensor", power_of_two, transpose, smallest_amax)
    return Quantization(dtype, "block", recipe.power_of_two)


def amax_of(x: Tensor, *dims: int) -> Tensor:
    """max |x| in float32, over dims or over all; 0 of an empty tensor, NaN if x has a NaN."""
    if not dims and x.ndim == 2 and not arrays.on_host(x):
        return matrix_kernels.amax(x).reshape(())
    if not x.numel():
        kept = [extent for at, extent in enumerate(x.shape) if dims and at not in dims]
        return x.new_zeros(kept, dtype=torch.float32)
    return torch.linalg.vector_norm(x, float("inf"), dims or None).float()


def scale_of(
    amax: Tensor,
    dtype: torch.dtype,
    *,
    power_of_two: bool = False,
    smallest_amax: float = 0.0,
    upper_bound: float = math.inf,
) -> Tensor:
    """Current scales in float32: largest / amax, and 1 where amax is below 2^-126, infinite or NaN.

    power_of_two: round scales down. smallest_amax, upper_bound: the limits of amax.
    """
    if smallest_amax:
        amax = torch.where(amax < smallest_amax, smallest_amax, amax)
    if upper_bound < math.inf:
        amax = amax.clamp(max=float(np.float32(upper_bound)))
    # A number divided by a tensor would be the rounded reciprocal times the number.
    scale = (torch.full_like(amax, LARGEST[dtype]) / amax).clamp(max=LARGEST_FLOAT32)
    scale = torch.where(torch.isfinite(amax) & (amax >= _SMALLEST_NORMAL), scale, 1.0)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return scale


def encode(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x * scale in float32, saturated and rounded once to 8 bits."""
    largest = LARGEST[dtype]
    x = x.float() if x.dtype == torch.float64 else x
    if isinstance(scale, Tensor) and not scale.ndim:
        # With a scale of one dimension torch multiplies 16-bit x in float32 in one pass.
        scale = scale.reshape(1)
    product = x * scale if isinstance(scale, Tensor) else x.float() * scale
    if dtype == torch.int8:
        return product.nan_to_num(0.0).clamp_(-128, 127).round_().to(dtype)
    return product.clamp_(-largest, largest).to(dtype)


def quantize(
    x: Tensor,
    scale: Tensor | Rule,
    dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
    transpose: bool = False,
) -> QuantizedTensor:
    """A matrix by a given scale, or by that of its own amax. On a GPU one kernel makes it, or two.

    amax: beside a given scale, float32 of one element, raised in place to the largest |x|.
    transpose: also make the transposed copy.
    """
    return quantize_and_sum(x, scale, dtype, None, amax=amax, transpose=transpose)[0]


def quantize_and_sum(
    x: Tensor,
    scale: Tensor | Rule,
    dtype: torch.dtype,
    sum_dtype: torch.dtype | None,
    *,
    amax: Tensor | None = None,
    transpose: bool = True,
) -> tuple[QuantizedTensor, Tensor | None]:
    """As `quantize`, and the sums over rows in sum_dtype, [num_cols], by the same kernel."""
    rule = scale if isinstance(scale, Rule) else None
    if arrays.on_host(x):
        if rule is not None:
            scale = scale_of(amax_of(x).reshape(1), dtype, **rule._asdict())
        elif amax is not None:
            torch.maximum(amax, amax_of(x).reshape(1), out=amax)
        data = encode(x, scale, dtype).contiguous()
        transposed = transpose_data(data) if transpose else None
        made = QuantizedTensor(data, 1.0 / scale, x.dtype, transposed=transposed)
        return made, None if sum_dtype is None else sum_rows(x, sum_dtype)
    if rule is not None:
        scale, amax = None, matrix_kernels.amax(x)
    sums = None if sum_dtype is None else name_of(sum_dtype)
    data, scale_inv, transposed, sums = matrix_kernels.quantize(
        x, name_of(dtype), scale, amax, transpose=transpose, sums=sums, rule=rule
    )
    return QuantizedTensor(data, scale_inv, x.dtype, transposed=transposed), sums


def transpose_data(data: Tensor) -> Tensor:
    """The transpose of a matrix of 8-bit floats, contiguous."""
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block_rows: int = 1,
    power_of_two: bool = True,
    transpose: bool = False,
    block_cols: int = BLOCK_SIZE,
    upper_bound: float = math.inf,
) -> QuantizedTensor:
    """A matrix by a scale for each block of block_rows x block_cols.

    transpose: also quantise the transposed matrix, by blocks of its own (the same blocks where
        they are square).
    """
    rule = {"power_of_two": power_of_two, "upper_bound": upper_bound}
    data, scale_inv = _quantize_blocks(x, dtype, block_rows, block_cols, **rule)
    transposed = transposed_scale_inv = None
    if transpose and block_rows == BLOCK_SIZE:
        transposed, transposed_scale_inv = transpose_data(data), scale_inv.t().contiguous()
    elif transpose:
        transposed, transposed_scale_inv = _quantize_blocks(
            x.t(), dtype, block_rows, block_cols, **rule
        )
    return QuantizedTensor(
        data,
        scale_inv,
        x.dtype,
        transposed=transposed,
        transposed_scale_inv=transposed_scale_inv,
        block_rows=block_rows,
        block_cols=block_cols,
    )


def _quantize_blocks(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, **rule: float
) -> tuple[Tensor, Tensor]:
    num_rows, num_cols = x.shape
    padded = pad(x.float(), block_rows, block_cols)
    blocks = padded.unflatten(1, (padded.shape[1] // block_cols, block_cols))
    blocks = blocks.unflatten(0, (len(padded) // block_rows, block_rows))
    scale = scale_of(amax_of(blocks, 1, 3), dtype, **rule)
    data = encode(blocks, scale[:, None, :, None], dtype).reshape(padded.shape)
    return data[:num_rows, :num_cols].contiguous(), 1.0 / scale


def arranged(scale_inv: Tensor, layout: str) -> Tensor:
    """Scales of blocks as they lie in memory: cupynorm.reference.fp8.arranged."""
    num_rows, num_blocks = scale_inv.shape
    if layout == "packed":
        exponents = pad_with_zeros(scale_inv.view(torch.int32) >> 23, (0, -num_blocks % 4))
        scale_inv = exponents.to(torch.uint8).view(torch.int32)
    return pad_with_zeros(scale_inv.t().contiguous(), (0, -num_rows % 4)).contiguous()


# Products.


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32 (float64 for float64)."""
    compute = arithmetic(a)
    if a.dtype == compute:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=compute)
    return a.to(compute) @ b.to(compute)


def sum_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums over the rows of a matrix, of one dtype, rounded once.

    torch.sum(dtype=) would round each element to that dtype first.
    """
    return rows.sum(0, dtype=arithmetic(rows)).to(dtype)


class Factor(NamedTuple):
    """An 8-bit matrix whose values are data * scale_inv.

    block_rows, block_cols: the extents of each block that has a scale; block_rows is None where one
        scale is for all.
    """

    data: Tensor
    scale_inv: Tensor
    block_rows: int | None = None
    block_cols: int = BLOCK_SIZE


def multiply(
    a: Factor | QuantizedTensor,
    b: Factor | QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    is_exact: bool = True,
) -> Tensor:
    """a b^T + bias of a [num_rows, depth] and b [num_cols, depth] in out_dtype, for any extents.

    The product is added in float32. On a GPU torch's scaled_mm makes it, of factors padded with
    zeros to multiples of 16. On the CPU, and for scales of blocks, the values are multiplied.

    fast: let it add in the tensor cores' own precision.
    is_exact: whether bfloat16 holds the values of blocks exactly, so that a GPU can multiply
        them in bfloat16. It does where their scales are powers of two.
    """
    if a.data.is_cuda and a.block_rows is None and a.data.numel() and b.data.numel():
        return multiply_scaled(a, b, out_dtype, bias=bias, fast=fast)
    with outside_autocast(a.data):
        if a.block_rows is None:
            y = (a.data.float() @ b.data.float().t()) * (a.scale_inv * b.scale_inv)
        else:
            values, others = (
                QuantizedTensor(
                    each.data,
                    each.scale_inv,
                    torch.float32,
                    block_rows=each.block_rows,
                    block_cols=each.block_cols,
                ).dequantize()
                for each in (a, b)
            )
            if is_exact and values.is_cuda:
                narrow = values.bfloat16(), others.bfloat16().t()
                y = torch.mm(*narrow, out_dtype=torch.float32)
            else:
                y = values @ others.t()
    return (y if bias is None else y + bias).to(out_dtype)


def multiply_scaled(
    a: Factor | QuantizedTensor,
    b: Factor | QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None,
    fast: bool,
) -> Tensor:
    """`multiply` by torch's scaled_mm, of factors with one scale each."""
    num_cols = len(b.data)
    a_data, b_data = pad(a.data, 1, 16), pad(b.data, 16, 16)
    # It adds a 16-bit bias to a 16-bit result. Any other bias is added here.
    is_inside = bias is not None and bias.dtype == out_dtype != torch.float32
    is_inside = is_inside and len(b_data) == num_cols
    y = private.scaled_mm(
        a_data,
        b_data.t(),
        scale_a=a.scale_inv,
        scale_b=b.scale_inv,
        bias=bias if is_inside else None,
        out_dtype=out_dtype if bias is None or is_inside else torch.float32,
        use_fast_accum=fast,
    )
    y = y[:, :num_cols].contiguous()
    return y if bias is None or is_inside else (y + bias).to(out_dtype)


def pad(data: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """data with zero rows and columns appended, up to multiples of num_rows and num_cols."""
    below, behind = -data.shape[0] % num_rows, -data.shape[1] % num_cols
    if not below and not behind:
        return data
    bits = data.view(torch.uint8) if data.element_size() == 1 else data
    padded = bits.new_zeros((data.shape[0] + below, data.shape[1] + behind))
    padded[: data.shape[0], : data.shape[1]] = bits
    return padded.view(data.dtype)
