"""torch: the norm and the product of one or two rows in one kernel (cuda_src/norm_linear_few.cu).

A block normalises the rows, or their sums with a residual, and multiplies them by its rows of the
weight, which are read once. With fused="kernel" it computes what it can, by default what it is
measured to be faster at: calls without gradients of plan.few_products.is_faster. Other calls take
the plain path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..gpu import arrays, launch
from ..nn.dtypes import name_of
from ..norm.prepared import FOR_Y
from ..plan import few_products
from ..plan.few_products import FewRowsProblem
from .call import LinearCall, check_eps


class FewRowsLaunch(NamedTuple):
    """A loaded kernel, and what of its arguments follows from shapes, dtypes and options."""

    enqueue: Callable[[int, tuple], None]
    last_words: tuple[int | float, ...]
    is_faster: bool


@lru_cache(maxsize=1024)
def _prepared(
    device_index: int,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype | None, ...],
    flags: tuple[bool, bool],
    eps: float,
) -> FewRowsLaunch | None:
    """None where the kernel does not fit. sizes: num_rows, in_features, out_features.

    dtypes: of the product, norm_weight and norm_bias. flags: centered, zero_centered_weight.
    """
    device = launch.device(device_index)
    names = [None if each is None else name_of(each) for each in dtypes]
    dtype = name_of(dtypes[0])
    if few_products.why_not(device, dtype, sizes) is not None:
        return None
    plan = few_products.few_launch(device, FewRowsProblem(*sizes, *names, *flags))
    return FewRowsLaunch(
        launch.load(plan.launch, device_index).enqueue,
        (*sizes[1:], plan.outputs_of_block, eps),
        few_products.is_faster(device, sizes),
    )


def fits(call: LinearCall) -> bool:
    """Whether the kernel takes tensors of these numbers of rows, dtypes and layouts.

    It loads 16 bytes at once of all but the linear bias.
    """
    (x, residual, norm_weight, norm_bias, weights, biases), options = call
    if not 0 < x.numel() <= few_products.MOST_ROWS * x.shape[-1]:
        return False
    if residual is not None and (residual.shape, residual.device) != (x.shape, x.device):
        return False
    given = [each for each in (x, residual, *weights) if each is not None]
    if any(each.dtype != options.dtype for each in given):
        return False
    aligned = [each for each in (*given, norm_weight, norm_bias) if each is not None]
    if any(each.data_ptr() % 16 for each in aligned):
        return False
    return all(each.is_contiguous() for each in (*aligned, *biases))


def find(call: LinearCall) -> FewRowsLaunch | None:
    """The launch that can compute a call, or None."""
    (x, _, *norm, weights, _), options = call
    if not x.is_cuda or not fits(call):
        return None
    num_cols = x.shape[-1]
    return _prepared(
        x.get_device(),
        (x.numel() // num_cols, num_cols, sum(len(each) for each in weights)),
        (x.dtype, *(None if each is None else each.dtype for each in norm)),
        (options.centered, options.zero_centered_weight),
        check_eps(options.eps, name_of(x.dtype), centered=options.centered),
    )


def choose(call: LinearCall, purpose: str) -> FewRowsLaunch | None:
    """The launch that computes a call, or None. purpose: of the norm, cupynorm.norm.FOR_*."""
    options = call.options
    if options.fused == "kernel":
        return find(call)
    if options.fused is not None or purpose != FOR_Y or options.return_normalized:
        return None
    found = find(call)
    return found if found is not None and found.is_faster else None


def forward(
    call: LinearCall, found: FewRowsLaunch, weight: Tensor, bias: Tensor | None, purpose: str
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """y, mean, rstd, input + residual. With FOR_Y there are no statistics; RMSNorm has no mean.

    weight, bias: the joined parts of the linear layer.
    """
    (x, residual, norm_weight, norm_bias, *_), options = call
    device_index, leading = x.get_device(), x.shape[:-1]
    with launch.on_device(device_index):
        y = torch.empty(*leading, len(weight), dtype=x.dtype, device=x.device)
        added = None if residual is None else torch.empty_like(x)
        mean = rstd = None
        if purpose != FOR_Y:
            rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
            mean = torch.empty_like(rstd) if options.centered else None
        tensors = (x, residual, added, weight, bias, norm_weight, norm_bias, y, mean, rstd)
        addresses = (0 if each is None else each.data_ptr() for each in tensors)
        found.enqueue(arrays.library(x)(device_index).stream(), (*addresses, *found.last_words))
    return y, mean, rstd, x if residual is None else added
