"""torch: fused="fold": the norm's weight and bias folded into those of the linear layer.

y = rstd * (x folded^T - mean * sums) + bias
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..gpu import arrays
from ..nn import formulas
from ..nn.dtypes import outside_autocast
from ..nn.modes import stream_of
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


class KeptFold:
    """A fold that later calls use as long as it fits them.

    Noticed are other tensors in the places of the parameters, what torch writes to them
    (load_state_dict, optimizers: their versions), data at another address or of another layout,
    other options, and another CUDA stream, which would have to wait for the fold. Not noticed is
    what is written to `tensor.data`, or by foreign kernels.
    """

    def __init__(self, call: LinearCall, make: Callable[[LinearCall], Folded]) -> None:
        self._state = _state_of(call)
        self._parameters = [
            None if each is None else weakref.ref(each) for each in _parameters_of(call)
        ]
        self.folded = make(call)

    def fits(self, call: LinearCall) -> bool:
        """Whether it is the fold of a call."""
        pairs = zip(self._parameters, _parameters_of(call), strict=True)
        return self._state == _state_of(call) and all(
            each is (None if kept is None else kept()) for kept, each in pairs
        )


def _parameters_of(call: LinearCall) -> tuple[Tensor | None, ...]:
    return call.operands.all[2:]


def _state_of(call: LinearCall) -> tuple:
    """What a fold depends on besides which tensors the parameters are."""
    operands, options = call
    layout_key = arrays.TorchLibrary.layout_key
    return (
        options.fused,
        options.centered,
        options.zero_centered_weight,
        options.dtype,
        len(operands.weights),
        stream_of(operands.weights[0]),
        *(
            # An inference tensor has no version.
            None
            if each is None
            else (layout_key(each), each.data_ptr(), each.is_inference() or each._version)
            for each in _parameters_of(call)
        ),
    )


_cache = WeakIdKeyDictionary()  # first weight -> KeptFold


def cached_fold(call: LinearCall, make: Callable[[LinearCall], Folded] = fold_call) -> Folded:
    """The fold of a call without gradients, which `make` makes, cached as long as the weight lives.

    It is made again where it does not fit, and after a recorded call or a step of an optimizer
    (torch.optim.Optimizer). Not noticed is what is written to `tensor.data`, by foreign kernels or
    by replays of a CUDA graph, without a recorded call in between.

    Nothing is cached while a CUDA graph is captured, whose replays must see new parameters, nor
    for inference tensors, which have no version.
    """
    first = call.operands.weights[0]
    _, is_captured = stream_of(first) or (None, False)
    if is_captured or any(
        each is not None and each.is_inference() for each in _parameters_of(call)
    ):
        return make(call)
    kept = _cache.get(first)
    if kept is None or not kept.fits(call):
        _cache[first] = kept = KeptFold(call, make)
    return kept.folded


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
