"""torch: matrix products that are added in float32, of 16-bit and of 8-bit floats.

On a GPU 8-bit factors go to torch's scaled_mm. Elsewhere their values are multiplied in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..norm.quantized import QuantizedTensor
from . import private
from .modes import arithmetic, outside_autocast
from .recipes import BLOCK_SIZE


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
            y = _multiply_values(_values(a), _values(b), is_exact)
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


def _values(a: Factor | QuantizedTensor) -> Tensor:
    """In float32."""
    blocks = {"block_rows": a.block_rows, "block_cols": a.block_cols}
    return QuantizedTensor(a.data, a.scale_inv, torch.float32, **blocks).dequantize()


def _multiply_values(a: Tensor, b: Tensor, is_exact: bool) -> Tensor:
    """a b^T in float32."""
    if is_exact and a.is_cuda:
        return torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()


def pad(data: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """data with zero rows and columns appended, up to multiples of num_rows and num_cols."""
    below, behind = -data.shape[0] % num_rows, -data.shape[1] % num_cols
    if not below and not behind:
        return data
    bits = data.view(torch.uint8) if data.element_size() == 1 else data
    padded = bits.new_zeros((data.shape[0] + below, data.shape[1] + behind))
    padded[: data.shape[0], : data.shape[1]] = bits
    return padded.view(data.dtype)
