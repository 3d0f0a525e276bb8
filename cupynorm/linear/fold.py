"""torch: fused="fold": the norm's weight and bias folded into those of the linear layer.

y = rstd * (x folded^T - mean * sums) + bias
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..nn import formulas
from ..nn.dtypes import outside_autocast
from ..nn.products import wide_product
from .call import LinearCall
from .matrices import as_rows, join


class Folded(NamedTuple):
    """weight: [out_features, in_features]. bias: [out_features].

    sums: [out_features], of the weight's rows after rounding; None for RMSNorm.
    """

    weight: Tensor
    sums: Tensor | None
    bias: Tensor


def fold(
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    centered: bool = True,
    zero_centered_weight: bool = False,
    dtype: torch.dtype | None = None,
) -> Folded:
    """The folded parameters, formed in float32 (float64 for float64).

    folded.weight is rounded once, to dtype (by default weight's). Its rows are centered, so that in
    exact arithmetic sums would be 0 and the mean would cancel. Rounding leaves non-zero sums, which
    are subtracted again, so that a large mean does not multiply the rounding errors of weights.
    The remaining error of y is

        rstd * sum |x - mean| |folded| * half_ulp(weight's dtype)     rounding of the folded weights
        + rstd * sum |x| |folded| * in_features * 2^-24               additions of the product

    The first term is no larger than the one from rounding the normalised tensor without a fold. The
    second sees x instead of x - mean, so it grows with |mean| * rstd, as it does not without a
    fold. Under autocast so does the rounding of a float32 x to dtype.
    """
    compute = formulas.arithmetic(weight)
    wide = weight.to(compute)
    folded = wide * formulas.scale(norm_weight, zero_centered_weight, compute)
    if centered:
        folded = folded - folded.mean(1, keepdim=True)
    rounded = folded.to(dtype or weight.dtype)
    folded_bias = wide.new_zeros(len(wide)) if bias is None else bias.to(compute)
    if norm_bias is not None:
        folded_bias = torch.addmv(folded_bias, wide, norm_bias.to(compute))
    sums = rounded.sum(1, dtype=compute) if centered else None
    return Folded(rounded, sums, folded_bias)


def fold_call(call: LinearCall) -> Folded:
    """The folded parameters of a call, outside autograd."""
    operands, options = call
    with torch.no_grad(), outside_autocast(operands.weights[0]):
        return fold(
            operands.norm_weight,
            operands.norm_bias,
            join(operands.weights),
            join(operands.biases),
            centered=options.centered,
            zero_centered_weight=options.zero_centered_weight,
            dtype=options.dtype,
        )


_cache = WeakIdKeyDictionary()  # first weight -> (state of the parameters, the others, the fold)


def cached_fold(call: LinearCall, make: Callable[[LinearCall], Folded] = fold_call) -> Folded:
    """The fold of a call without gradients, which `make` makes, cached as long as the weight lives.

    It is made again after a change of the parameters. Noticed are other tensors in their places,
    what torch writes to a tensor (load_state_dict: its version), steps of torch.optim.Optimizer,
    and data at another address. A recorded call drops the fold too. Not noticed is what is written
    to `tensor.data`, by foreign kernels or by replays of a CUDA graph, without a recorded call in
    between.

    Nothing is cached while a CUDA graph is captured, whose replays must see new parameters, nor
    for inference tensors, which have no version.
    """
    operands, options = call
    first = operands.weights[0]
    others = (operands.norm_weight, operands.norm_bias, *operands.weights[1:], *operands.biases)
    parameters = [each for each in (first, *others) if each is not None]
    stream, caches = None, True
    if first.is_cuda:
        stream = torch._C._cuda_getCurrentRawStream(first.get_device())
        caches = not torch.cuda.is_current_stream_capturing()
    if not caches or any(each.is_inference() for each in parameters):
        return make(call)
    state = (
        options.fused,
        options.centered,
        options.zero_centered_weight,
        options.dtype,
        stream,
        *((each._version, each.data_ptr()) for each in parameters),
    )
    cached = _cache.get(first)
    if cached is not None and cached[0] == state:
        if all(one is other for one, other in zip(cached[1], others)):
            return cached[2]
    folded = make(call)
    _cache[first] = (state, others, folded)
    return folded


def _forget_all(*_: Any) -> None:
    """Drops all folds after a step of an optimizer: fused ones do not change versions."""
    _cache.clear()


register_optimizer_step_post_hook(_forget_all)


def forget(weight: Tensor) -> None:
    """Drops the cached fold of a layer with this first weight."""
    _cache.pop(weight, None)


def project_folded(x: Tensor, mean: Tensor | None, rstd: Tensor, folded: Folded) -> Tensor:
    """y [..., out_features] of x [..., in_features] and its statistics.

    x is cast to the dtype of folded.weight, which y has too.
    """
    dtype = folded.weight.dtype
    y = wide_product(as_rows(x.to(dtype)), folded.weight.t())
    if folded.sums is not None:
        y.addr_(mean.reshape(-1), folded.sums, alpha=-1)
    # Scaled, shifted and rounded in one pass over y: torch rounds as it writes.
    rounded = torch.empty_like(y, dtype=dtype)
    torch.addcmul(folded.bias, y, rstd.reshape(-1, 1), out=rounded)
    return rounded.reshape(*x.shape[:-1], len(folded.weight))
