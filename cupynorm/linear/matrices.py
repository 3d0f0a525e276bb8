"""torch: tensors as matrices of rows: flattened, summed over rows, and joined from parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..gpu import arrays
from ..nn import products
from ..nn.modes import name_of, outside_autocast
from ..norm import quantized


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor [..., num_cols] as [num_rows, num_cols], even where one of them is 0."""
    # torch.Size.numel would make a number of a symbol, so that each num_rows is compiled anew.
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device that has one element in memory."""
    return tensor.new_empty(1).expand(tensor.shape)


def as_result(tensor: Tensor | None) -> Tensor | None:
    """A tensor in the same memory that is no view to autograd.

    A result of an autograd.Function that is a view cannot be written to in place.
    """
    return tensor.data if tensor is not None and tensor._is_view() else tensor


def sum_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums over rows of a matrix, [num_cols], rounded once.

    On a GPU a kernel makes them with little scratch memory.
    """
    if rows.is_meta or arrays.on_host(rows) or rows.stride(-1) != 1:
        return products.sum_rows(rows, dtype)
    return quantized.sum_rows(rows, name_of(dtype))


def concatenate(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Parts concatenated along rows, in dtype, differentiable; None of no parts.

    They are cast first: torch.autocast has no cat of the 16-bit dtype that it does not use.
    """
    parts = [part.to(dtype) for part in parts]
    if len(parts) > 1:
        return torch.cat(parts)
    return parts[0] if parts else None


def join(parts: Sequence[Tensor]) -> Tensor | None:
    """Parts concatenated along rows, detached; None of no parts.

    Parts that follow each other in one storage are not copied.
    """
    if len(parts) < 2:
        return parts[0].detach() if parts else None
    first, at = parts[0], parts[0].data_ptr()
    storage, dtype = first.untyped_storage().data_ptr(), first.dtype
    is_neg, num_rows = first.is_neg(), 0
    for part in parts:
        follows = part.data_ptr() == at and part.untyped_storage().data_ptr() == storage
        is_like = part.dtype == dtype and part.is_neg() == is_neg
        if not follows or not is_like or not part.is_contiguous():
            with outside_autocast(first):
                return torch.cat([part.detach() for part in parts])
        at += part.numel() * dtype.itemsize
        num_rows += part.shape[0]
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())


def split_like(joined: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """A tensor cut along rows into the sizes of parts, each in its part's dtype."""
    cut = joined.split([len(part) for part in parts])
    return [each.to(part.dtype) for each, part in zip(cut, parts)]
