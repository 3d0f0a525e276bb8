"""torch: folded parameters that later calls with fused="kernel" use: one_kernel.fold."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..nn.modes import stream_of
from ..nn.private import TensorGuards
from . import one_kernel
from .call import LinearCall


class KeptFold:
    """A fold that later calls use as long as it fits them.

    Noticed are other tensors in the places of the parameters, what torch writes to them
    (load_state_dict, optimizers: their versions), data at another address or of another layout,
    other options, and another CUDA stream, which would have to wait for the fold. Not noticed is
    what is written to `tensor.data`, or by foreign kernels.
    """

    def __init__(self, call: LinearCall) -> None:
        parameters = _parameters_of(call)
        self._options, self._versions = _options_of(call), _versions_of(parameters)
        self._addresses = [each.data_ptr() for each in parameters]
        self._parameters = [weakref.ref(each) for each in parameters]
        self._have_same_layouts = TensorGuards(
            *parameters, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        self.folded = one_kernel.fold(call)

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


def cached_fold(call: LinearCall) -> one_kernel.Folded:
    """The fold of a call without gradients, cached as long as the weight lives.

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
        return one_kernel.fold(call)
    _cache[first] = kept = KeptFold(call)
    return kept.folded


def _forget_all(*_: Any) -> None:
    """Drops all folds after a step of an optimizer: fused ones do not change versions."""
    _cache.clear()


register_optimizer_step_post_hook(_forget_all)


def forget(weight: Tensor) -> None:
    """Drops the cached fold of a layer with this first weight."""
    _cache.pop(weight, None)
