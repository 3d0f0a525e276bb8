"""torch: fused="fold": the norm's weight and bias folded into those of the linear layer.

y = rstd * (x folded^T - mean * sums) + bias
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..nn.dtypes import arithmetic, outside_autocast
from ..nn.modes import stream_of
from ..nn.products import wide_product
from .call import LinearCall
from .matrices import as_rows, join

# Private: see nn/repeated.py. It compares the layouts of several tensors in one call.
_TensorGuards = torch._C._dynamo.guards.TensorGuards


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
    compute = arithmetic(weight)
    folded = wide = weight.to(compute)
    if norm_weight is not None:
        factor = norm_weight.to(compute)
        folded = wide * (1.0 + factor if zero_centered_weight else factor)
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
        parameters = _parameters_of(call)
        self._options, self._versions = _options_of(call), _versions_of(parameters)
        self._addresses = [each.data_ptr() for each in parameters]
        self._parameters = [weakref.ref(each) for each in parameters]
        self._have_same_layouts = _TensorGuards(
            *parameters, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        self.folded = make(call)

    def fits(self, call: LinearCall) -> bool:
        """Whether it is the fold of a call."""
        parameters = _parameters_of(call)
        return (
            self._options == _options_of(call)
            and self._versions == _versions_of(parameters)
            and self._addresses == [each.data_ptr() for each in parameters]
            and all(map(is_, parameters, [kept() for kept in self._parameters]))
            and self._have_same_layouts(*parameters)
        )


def _parameters_of(call: LinearCall) -> list[Tensor]:
    _, _, *norm, weights, biases = call.operands
    return [each for each in (*weights, *norm, *biases) if each is not None]


def _options_of(call: LinearCall) -> tuple:
    """What a fold depends on besides its parameters."""
    (_, _, norm_weight, norm_bias, weights, _), options = call
    return (
        options.fused,
        options.centered,
        options.zero_centered_weight,
        options.dtype,
        norm_weight is None,
        norm_bias is None,
        len(weights),
        stream_of(weights[0]),
    )


def _versions_of(parameters: list[Tensor]) -> list[int] | None:
    """None where one is an inference tensor, which has no version."""
    try:
        return [each._version for each in parameters]
    except RuntimeError:
        return None


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
    kept = _cache.get(first)
    if kept is not None and kept.fits(call):
        return kept.folded
    _, is_captured = stream_of(first) or (None, False)
    if is_captured or _versions_of(_parameters_of(call)) is None:
        return make(call)
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
