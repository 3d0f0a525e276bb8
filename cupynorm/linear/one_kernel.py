"""torch: the norm and the product in one kernel (cuda_src/norm_linear.cu).

y = rstd * (x folded^T - mean * sums) + bias, where tensor cores multiply x itself by the weight
with the norm's weight folded into it, while other warps compute the statistics. With fused="kernel"
it computes what it can, by default what plan.product_choice chooses, with a fold in each call.
Other calls take the plain path.

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
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu import arrays, launch
from ..gpu.tensor_maps import tensor_map
from ..nn.modes import name_of
from ..norm.request import margin_of
from ..plan import product_choice, products
from ..plan.products import NormLinearProblem
from . import few_rows
from .call import LinearCall, check_eps
from .matrices import as_rows, join


def why_not(call: LinearCall) -> str | None:
    """Why a call takes the plain path, as a sentence, or None if the kernel computes it."""
    (x, residual, *norm, weights, biases), options = call
    if not x.is_cuda:
        return "the kernel is for tensors on a GPU"
    if x.dtype != options.dtype or any(each.dtype != x.dtype for each in weights):
        return "the kernel needs an input and a weight of the dtype of the product"
    if residual is not None and (residual.shape, residual.dtype, residual.device) != (
        x.shape,
        x.dtype,
        x.device,
    ):
        return "the kernel needs a residual of the shape and dtype of the input"
    in_features, out_features = x.shape[-1], sum(len(each) for each in weights)
    sizes = x.numel() // max(in_features, 1), in_features, out_features
    reason = products.why_not(launch.device(x.get_device()), name_of(x.dtype), sizes)
    if reason is not None:
        return reason
    given = [each for each in (x, residual, *norm, *weights) if each is not None]
    tensors = (*given, *biases)
    if not all(map(Tensor.is_contiguous, tensors)):
        return "the kernel needs contiguous tensors"
    if any(map(arrays.is_lazy, tensors)):
        return "the kernel needs tensors that neither negate their memory nor have none"
    if any(each.data_ptr() % 16 for each in given):
        return "the kernel needs tensors aligned to 16 bytes"
    return None


def has_ranks() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def why_not_by_default(call: LinearCall) -> str | None:
    """Why a call with fused=None takes the plain path, as a sentence, or None."""
    (x, residual, norm_weight, norm_bias, weights, _), options = call
    num_cols, fewest = x.shape[-1], product_choice.FEWEST_ROWS
    if not x.is_cuda or x.numel() < max(fewest * num_cols, 1):
        return f"the kernel is the default on a GPU, with {fewest} rows or more"
    if not options.has_norm:
        return "there is no norm"
    if options.return_normalized or options.save_normalized:
        return "the call asks for the normalised tensor, which the kernel does not make"
    if has_ranks():
        return (
            "the collectives of several ranks may occupy multiprocessors, and the kernel needs all"
        )
    problem = NormLinearProblem(
        x.numel() // num_cols,
        num_cols,
        sum(len(each) for each in weights),
        *(None if each is None else name_of(each.dtype) for each in (x, norm_weight, norm_bias)),
        options.centered,
        options.zero_centered_weight,
    )
    device, has_residual = launch.device(x.get_device()), residual is not None
    sm_margin = max(margin_of(options.launch, kind) for kind in ("forward", "inference"))
    choice = product_choice.choose(device, problem, residual=has_residual, sm_margin=sm_margin)
    return why_not(call) if choice.takes_kernel else choice.reason


def computes(call: LinearCall) -> bool:
    """Whether the kernel computes a call, for which few_rows has no kernel."""
    fused = call.options.fused
    if fused is None:
        return why_not_by_default(call) is None
    return fused == "kernel" and why_not(call) is None


@lru_cache(maxsize=1024)
def _prepared(
    device_index: int, num_rows: int, out_features: int, dtype: str, centered: bool
) -> tuple[Callable[[int, tuple], None], int]:
    """The loaded kernel's launch, and its strips_at_a_time."""
    device = launch.device(device_index)
    plan = products.product_launch(device, num_rows, out_features, dtype, centered=centered)
    return launch.load(plan.launch, device_index).enqueue, plan.strips_at_a_time


@lru_cache(maxsize=1024)
def _prepared_fold(device_index: int, *given: Any) -> Callable[[int, tuple], None]:
    *types, centered, zero_centered = given
    planned = products.fold_launch(*types, centered=centered, zero_centered=zero_centered)
    return launch.load(planned, device_index).enqueue


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if each is None else each.data_ptr() for each in tensors)


class Folded(NamedTuple):
    """The folded parameters as the kernel reads them.

    weight: [products.folded_rows(out_features), in_features], in the order of fold_weight.cu.
    terms: as many rows of 16 bfloat16, the sums and the folded bias in three parts each
    (cuda_src/product/column_terms.cuh).
    """

    weight: Tensor
    terms: Tensor


def fold(call: LinearCall) -> Folded:
    """The folded parameters of a call, by one kernel (cuda_src/fold_weight.cu).

    They take as much memory as the weight, and 32 bytes for each of its rows.
    """
    operands, options = call
    weight, bias = join(operands.weights), join(operands.biases)
    types = [
        None if each is None else name_of(each.dtype)
        for each in (operands.norm_weight, operands.norm_bias)
    ]
    device_index, (out_features, in_features) = weight.get_device(), weight.shape
    enqueue = _prepared_fold(
        device_index,
        (out_features, in_features),
        name_of(weight.dtype),
        *types,
        options.centered,
        options.zero_centered_weight,
    )
    with launch.on_device(device_index):
        num_rows = products.folded_rows(out_features)
        folded = weight.new_empty(num_rows, in_features)
        terms = weight.new_empty(num_rows, products.TERM_COLS, dtype=torch.bfloat16)
        given = (weight, bias, operands.norm_weight, operands.norm_bias, folded, terms)
        stream = arrays.library(weight)(device_index).stream()
        enqueue(stream, (*_addresses(given), in_features))
    return Folded(folded, terms)


def keeps_fold(call: LinearCall) -> bool:
    """Whether a call uses folded parameters that may be kept for later ones."""
    if call.options.fused != "kernel" or few_rows.find(call) is not None:
        return False
    return why_not(call) is None


def forward(
    call: LinearCall, folded: Folded | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """y, mean (None for RMSNorm), rstd and input + residual of a call that why_not accepts.

    folded: the parameters already folded, by `fold`.
    """
    operands, options = call
    folded = folded or fold(call)
    added = operands.input
    if operands.residual is not None:  # the copy engine can load their sum only
        added = added.detach() + operands.residual.detach()
    x = as_rows(added.detach())
    num_rows, in_features = x.shape
    out_features = sum(len(each) for each in operands.weights)
    dtype, device_index = name_of(x.dtype), x.get_device()
    leading = operands.input.shape[:-1]
    enqueue, strips_at_a_time = _prepared(
        device_index, num_rows, out_features, dtype, options.centered
    )
    with launch.on_device(device_index):
        y = torch.empty(*leading, out_features, dtype=x.dtype, device=x.device)
        mean = torch.empty(leading, dtype=torch.float32, device=x.device)
        rstd = torch.empty_like(mean)
        known = torch.zeros(num_rows + 1, dtype=torch.int64, device=x.device)
        maps = tuple(
            tensor_map(each.data_ptr(), *each.shape, each.shape[1] * 2, name_of(each.dtype), tile)
            for each, tile in (
                (x, products.LOADED),
                (folded.weight, products.LOADED),
                (folded.terms, products.LOADED_TERMS),
            )
        )
        words = products.product_words(
            maps,
            _addresses((x, y, mean, rstd, known)),
            (num_rows, in_features, out_features),
            strips_at_a_time,
            check_eps(options.eps, dtype, centered=options.centered),
        )
        enqueue(arrays.library(x)(device_index).stream(), words)
    return y, mean if options.centered else None, rstd, added
