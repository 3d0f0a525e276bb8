"""torch: the norm and the product of one or two rows in one kernel (cuda_src/norm_linear_few.cu).

It normalises the rows, or their sums with a residual, in shared memory, and reads the weight once.
With fused="kernel" it computes what it can, by default what it is measured to be faster at: calls
without gradients that plan.product_choice chooses. Other calls take the plain path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from ..gpu import arrays, launch
from ..nn.modes import name_of
from ..norm.calls import FOR_Y
from ..plan import few_products, product_choice
from ..plan.products import NormLinearProblem
from .call import LinearCall, check_eps


class FewRowsLaunch(NamedTuple):
    """A loaded kernel. words: its argument struct, from the addresses of weight and rows_words."""

    enqueue: Callable[[int, tuple], None]
    words: Callable[[int, tuple[int, ...]], tuple[int | float, ...]]


@lru_cache(maxsize=1024)
def _prepared(
    device_index: int,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype | None, ...],
    flags: tuple[bool, bool],
    eps: float,
    *,
    if_faster: bool,
) -> FewRowsLaunch | None:
    """None where the kernel does not fit. sizes: num_rows, in_features, out_features.

    dtypes: of the product, norm_weight and norm_bias. flags: centered, zero_centered_weight.
    if_faster: None also where the plain path is as fast.
    """
    device = launch.device(device_index)
    names = [None if each is None else name_of(each) for each in dtypes]
    problem = NormLinearProblem(*sizes, *names, *flags)
    if if_faster and not product_choice.choose(device, problem).takes_kernel:
        return None
    if few_products.why_not(device, problem.dtype, sizes) is not None:
        return None
    plan = few_products.few_launch(device, problem)
    words = partial(few_products.few_words, problem=problem, plan=plan, eps=eps)
    return FewRowsLaunch(launch.load(plan.launch, device_index).enqueue, words)


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
    if {each.dtype for each in given} != {options.dtype}:
        return False
    aligned = [each for each in (*given, norm_weight, norm_bias) if each is not None]
    if reduce(or_, map(Tensor.data_ptr, aligned)) % 16:
        return False
    tensors = (*aligned, *biases)
    # Elements that are not those in memory (arrays.is_lazy) are left to torch.
    if any(map(Tensor.is_neg, tensors)) or any(map(Tensor._is_zerotensor, tensors)):
        return False
    return all(map(Tensor.is_contiguous, tensors))


def find(call: LinearCall, *, if_faster: bool = False) -> FewRowsLaunch | None:
    """The launch that can compute a call, or None.

    if_faster: None also where the plain path is as fast.
    """
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
        if_faster=if_faster,
    )


def choose(call: LinearCall, purpose: str) -> FewRowsLaunch | None:
    """The launch that computes a call, or None. purpose: of the norm, cupynorm.norm.FOR_*."""
    options = call.options
    if options.fused == "kernel":
        return find(call)
    if options.fused is not None or purpose != FOR_Y or options.return_normalized:
        return None
    return find(call, if_faster=True)


def forward(
    call: LinearCall, found: FewRowsLaunch, weight: Tensor, bias: Tensor | None, purpose: str
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """y, mean, rstd, input + residual. With FOR_Y there are no statistics; RMSNorm has no mean.

    weight, bias: the joined parts of the linear layer.
    """
    (x, residual, norm_weight, norm_bias, *_), options = call
    device_index, leading = x.get_device(), x.shape[:-1]
    y = torch.empty(*leading, len(weight), dtype=x.dtype, device=x.device)
    added = None if residual is None else torch.empty_like(x)
    mean = rstd = None
    if purpose != FOR_Y:
        rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if options.centered else None
    tensors = (x, residual, added, bias, norm_weight, norm_bias, y, mean, rstd)
    addresses = tuple(0 if each is None else each.data_ptr() for each in tensors)
    words = found.words(weight.data_ptr(), addresses)
    library = arrays.library(x)(device_index)
    former = library.exchange_device(device_index)
    try:
        found.enqueue(library.stream(), words)
    finally:
        if former != device_index:
            library.exchange_device(former)
    return y, mean, rstd, x if residual is None else added
