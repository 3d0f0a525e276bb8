"""torch: the norm and the product in one kernel.

norm_linear_few.cu  one or two rows. They are normalised in shared memory; the weight is read once.
norm_linear.cu      many rows: y = rstd * (x folded^T - mean * sums) + bias, where tensor cores
                    multiply x itself by the weight with the norm's weight folded into it, while
                    other warps compute the statistics. Each call folds (fold_weight.cu).

fused="kernel" names them. By default dispatch/product_plan.py chooses: one or two rows without
gradients, and many rows where a fold in each call is measured to be faster. Other calls take the
plain path.

The fold is rounded once, to the dtype of the weight. Its rows are centered, so that in exact
arithmetic sums would be 0 and the mean would cancel. Rounding leaves non-zero sums, which are
subtracted again, so that a large mean does not multiply the rounding errors of weights. The
remaining error of y is

    rstd * sum |x - mean| |folded| * half_ulp(weight's dtype)     rounding of the folded weights
    + rstd * sum |x| |folded| * in_features * 2^-24               additions of the product

The first term is no larger than the one from rounding the normalised tensor without a fold. The
second sees x instead of x - mean, so it grows with |mean| * rstd, as it does not without a fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import product_plan
from ..gpu import arrays, launch
from ..gpu.launch import tensor_map
from ..nn.modes import name_of
from ..norm.calls import FOR_Y
from ..norm.checks import check_eps
from ..norm.request import margin_of
from .operands import LinearOptions, Operands, as_rows


class Found(NamedTuple):
    """A loaded kernel that computes a call. plan: ProductPlan, or FewRowsPlan where is_few."""

    enqueue: Callable[[int, tuple], None]
    plan: Any
    problem: product_plan.NormLinearProblem
    is_few: bool


def find(operands: Operands, options: LinearOptions, purpose: str) -> Found | None:
    """The kernel that computes a call, or None for the plain path.

    purpose: of the norm, one of cupynorm.norm.FOR_*.
    """
    (x, residual, norm_weight, norm_bias, weights, _), fused = operands, options.fused
    num_elements, num_cols = x.numel(), x.shape[-1]
    if not x.is_cuda or not num_elements or not options.has_norm or fused == "plain":
        return None
    num_rows, is_named = num_elements // num_cols, fused == "kernel"
    if not is_named:
        if options.return_normalized:
            return None
        if num_rows <= product_plan.MOST_ROWS:
            if purpose != FOR_Y:
                return None
        elif num_rows < product_plan.FEWEST_ROWS or options.save_normalized or has_ranks():
            return None
    if not _fits(operands, options.dtype):
        return None
    return _loaded(
        x.get_device(),
        (num_rows, num_cols, sum(len(each) for each in weights)),
        (x.dtype, *(None if each is None else each.dtype for each in (norm_weight, norm_bias))),
        (options.centered, options.zero_centered_weight),
        is_named,
        residual is not None,
        sm_margin=max(margin_of(options.launch, kind) for kind in ("forward", "inference")),
    )


def has_ranks() -> bool:
    """Whether collectives of several ranks may occupy multiprocessors; norm_linear.cu needs all."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _fits(operands: Operands, dtype: torch.dtype) -> bool:
    """Whether the kernels take tensors of these dtypes and layouts.

    They load 16 bytes at once of all but the linear bias. Elements that are not those in memory
    (arrays.is_lazy) are left to torch.
    """
    x, residual, norm_weight, norm_bias, weights, biases = operands
    if residual is not None and (residual.shape, residual.device) != (x.shape, x.device):
        return False
    given = [each for each in (x, residual, *weights) if each is not None]
    if {each.dtype for each in given} != {dtype}:
        return False
    aligned = [each for each in (*given, norm_weight, norm_bias) if each is not None]
    if reduce(or_, map(Tensor.data_ptr, aligned)) % 16:
        return False
    tensors = (*aligned, *biases)
    return all(map(Tensor.is_contiguous, tensors)) and not any(map(arrays.is_lazy, tensors))


@lru_cache(maxsize=1024)
def _loaded(
    device_index: int,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype | None, ...],
    flags: tuple[bool, bool],
    is_named: bool,
    has_residual: bool,
    *,
    sm_margin: int,
) -> Found | None:
    """sizes: num_rows, in_features, out_features. dtypes: of x, norm_weight and norm_bias.

    flags: centered, zero_centered_weight. is_named: whether fused="kernel".
    """
    device = launch.device(device_index)
    names = [None if each is None else name_of(each) for each in dtypes]
    problem = product_plan.NormLinearProblem(*sizes, *names, *flags)
    if not is_named:
        choice = product_plan.choose(device, problem, residual=has_residual, sm_margin=sm_margin)
        if not choice.takes_kernel:
            return None
    if product_plan.why_not_few(device, problem.dtype, sizes) is None:
        plan, is_few = product_plan.few_launch(device, problem), True
    elif product_plan.why_not(device, problem.dtype, sizes) is None:
        plan, is_few = (
            product_plan.product_launch(
                device, sizes[0], sizes[2], problem.dtype, centered=problem.centered
            ),
            False,
        )
    else:
        return None
    return Found(launch.load(plan.launch, device_index).enqueue, plan, problem, is_few)


def forward(
    found: Found,
    operands: Operands,
    options: LinearOptions,
    weight: Tensor,
    bias: Tensor | None,
    *,
    purpose: str,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """y, mean (None for RMSNorm), rstd and input + residual, by what `find` returned.

    weight, bias: the joined parts of the linear layer. Few rows have no statistics with FOR_Y.
    """
    x, residual, norm_weight, norm_bias, *_ = operands
    x, leading, device_index = x.detach(), x.shape[:-1], x.get_device()
    eps = check_eps(options.eps, name_of(x.dtype), has_default=not options.centered)
    library = arrays.library(x)(device_index)
    former = library.exchange_device(device_index)
    try:
        y = torch.empty(*leading, len(weight), dtype=x.dtype, device=x.device)
        mean = rstd = None
        if purpose != FOR_Y or not found.is_few:
            rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
            mean = torch.empty_like(rstd) if options.centered or not found.is_few else None
        if found.is_few:
            added = None if residual is None else torch.empty_like(x)
            addresses = _addresses(
                (x, residual, added, bias, norm_weight, norm_bias, y, mean, rstd)
            )
            words = product_plan.few_words(
                weight.data_ptr(), addresses, found.problem, found.plan, eps
            )
        else:
            # The copy engine can load the sum only.
            added = None if residual is None else x + residual.detach()
            rows = as_rows(x if added is None else added)
            folded, terms = _fold(weight, bias, norm_weight, norm_bias, found.problem)
            known = torch.zeros(len(rows) + 1, dtype=torch.int64, device=x.device)
            maps = tuple(
                tensor_map(
                    each.data_ptr(), *each.shape, each.shape[1] * 2, name_of(each.dtype), tile
                )
                for each, tile in (
                    (rows, product_plan.LOADED),
                    (folded, product_plan.LOADED),
                    (terms, product_plan.LOADED_TERMS),
                )
            )
            words = product_plan.product_words(
                maps,
                _addresses((rows, y, mean, rstd, known)),
                found.problem.sizes,
                found.plan.strips_at_a_time,
                eps,
            )
        found.enqueue(library.stream(), words)
    finally:
        if former != device_index:
            library.exchange_device(former)
    return y, mean if options.centered else None, rstd, operands.input if added is None else added


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if each is None else each.data_ptr() for each in tensors)


@lru_cache(maxsize=1024)
def _loaded_fold(device_index: int, *types: Any, centered: bool, zero_centered: bool) -> Callable:
    planned = product_plan.fold_launch(*types, centered=centered, zero_centered=zero_centered)
    return launch.load(planned, device_index).enqueue


def _fold(
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    problem: product_plan.NormLinearProblem,
) -> tuple[Tensor, Tensor]:
    """The folded weight and its terms, as norm_linear.cu reads them.

    folded: [product_plan.folded_rows(out_features), in_features], in the order of fold_weight.cu.
    terms: as many rows of 16 bfloat16, the sums and the folded bias in three parts each
    (cuda_src/product/column_terms.cuh).
    """
    device_index = weight.get_device()
    enqueue = _loaded_fold(
        device_index,
        tuple(weight.shape),
        *problem[3:6],
        centered=problem.centered,
        zero_centered=problem.zero_centered,
    )
    num_rows = product_plan.folded_rows(problem.out_features)
    folded = weight.new_empty(num_rows, problem.in_features)
    terms = weight.new_empty(num_rows, product_plan.TERM_COLS, dtype=torch.bfloat16)
    words = _addresses((weight, bias, norm_weight, norm_bias, folded, terms))
    enqueue(arrays.library(weight)(device_index).stream(), (*words, problem.in_features))
    return folded, terms
