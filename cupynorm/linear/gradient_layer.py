"""torch: what a linear layer keeps for fuse_wgrad_accumulation and delay_wgrad_compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ..nn.modes import (
    is_compiling,
    is_inside_backward,
    learns_shapes,
    outside_autocast,
    wants_gradient,
)
from .weight_gradients import (
    Step,
    WeightGradientSink,
    check_is_leaf,
    check_main_grad,
    check_reducers,
)


class GradientLayer(torch.nn.Module):
    """The part of a layer whose weight gradients do not go to autograd.

    The subclass sets fuse_wgrad_accumulation, delay_wgrad_compute, weight_names, bias_names and
    return_bias, and has the lists _weights() and _biases().
    """

    def _begin_state(self) -> None:
        """Must run in the constructor."""
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self._step, self._begins_later = Step(False), False
        self._delayed: deque[Callable[[], None]] = deque()

    def _parts(self) -> list[Tensor]:
        """The weights and biases that the layer holds now."""
        return [*self._weights(), *self._biases()]

    def _begin_forward(self) -> None:
        """Refuses reducers of torch; also before a checkpoint, which records the call later."""
        if not (self.training or torch.is_grad_enabled()) or is_compiling():
            return
        if self.delay_wgrad_compute:
            check_reducers("delay_wgrad_compute", self._parts())
        elif self.fuse_wgrad_accumulation:
            check_reducers("fuse_wgrad_accumulation", self._weights())

    def _end_forward(self, is_first_microbatch: bool | None) -> None:
        """Notes a forward that is not recorded: a checkpoint may record it later."""
        if self.fuse_wgrad_accumulation and is_first_microbatch and self.training:
            self._begins_later = self._begins_later or not torch.is_grad_enabled()

    def _has_sink(self) -> bool:
        """Whether a WeightGradientSink takes the weight gradients of a call now."""
        if not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
            return False
        if not torch.is_grad_enabled() or not wants_gradient(*self._parts()):
            return False
        return is_compiling() or not learns_shapes()

    def _make_sink(self, is_first_microbatch: bool | None) -> WeightGradientSink:
        """What takes the weight gradients of a call. Changes nothing before _take_step."""
        weights, step = self._weights(), None
        if self.fuse_wgrad_accumulation:
            for name, weight in zip(self.weight_names, weights):
                check_main_grad(name, weight)
            # The first forward begins a step, unless a step that has begun was not yet written to.
            # A forward that a checkpoint recomputes inside of backward does not begin one, unless
            # its first run recorded nothing (use_reentrant=True).
            begins = self._begins_later if is_inside_backward() else is_first_microbatch
            step = Step(True) if begins and not self._step.is_stale else self._step
        biases = [] if self.return_bias else self._biases()
        if not self.delay_wgrad_compute:
            return WeightGradientSink(weights, biases, step, None)
        for name, parameter in zip((*self.weight_names, *self.bias_names), (*weights, *biases)):
            check_is_leaf(name, parameter)
        return WeightGradientSink(weights, biases, step, self._delayed)

    def _take_step(self, sink: WeightGradientSink | None) -> None:
        """After a forward that was not refused: its step is that of the forwards that follow."""
        if sink is not None and sink.step is not None:
            self._step, self._begins_later = sink.step, False

    def backward_dw(self) -> None:
        """Makes the gradients of weights and biases that the oldest backward left.

        It adds them to .grad (or main_grad) and runs the hooks. Call it once for each backward; any
        number may be left before a step. Does nothing without delay_wgrad_compute.

        Raises RuntimeError if no backward has left anything, or if a tensor that it reads was
        written to: the gradient of y and the normalised tensor (in 8 bits copies of its own), or,
        where that was not made, the input and the norm's parameters.
        """
        if not self.need_backward_dw():
            return
        if not self._delayed:
            raise RuntimeError(
                "backward_dw() was called and no backward has left a weight gradient; "
                "expected one call for each backward"
            )
        with torch.no_grad(), outside_autocast(self._weights()[0]):
            self._delayed.popleft()()
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def need_backward_dw(self) -> bool:
        """Whether this layer leaves its weight gradients to backward_dw()."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """hook() runs at the end of each backward_dw()."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    # Parameters.

    def _mark_parameters(self) -> None:
        """Sets the attributes that Megatron reads."""
        if self.delay_wgrad_compute:  # backward leaves no gradient of these
            for parameter in self._parts():
                parameter.skip_backward_post_hook = True

    def _apply(self, function: Callable, recurse: bool = True) -> GradientLayer:
        super()._apply(function, recurse)
        self._mark_parameters()
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._mark_parameters()  # load_state_dict(assign=True) replaces the parameters

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_parameters()  # a deep copy of a parameter loses its attributes

    def __getstate__(self) -> dict:
        """Without what belongs to a step of this module alone."""
        return self.__dict__ | {
            "_delayed": deque(),
            "_step": Step(False),
            "_begins_later": False,
        }
