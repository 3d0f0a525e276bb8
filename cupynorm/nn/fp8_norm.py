"""torch: LayerNorm and RMSNorm with fp8_output=True, and the scale that they keep for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..gpu import arrays
from ..norm.launch_choice import Launch
from ..norm.request import ForwardOperands, ForwardOptions, ForwardRequest, Quantization
from ..norm.route import normalize
from ..plan.functors import Functors
from . import amaxes, autocast, fp8, wrapped
from .dtypes import name_of
from .modes import is_recorded, is_transformed, learns_shapes
from .recipes import E4M3, CurrentScaling, DelayedScaling, Recipe


class _Step(NamedTuple):
    """What DelayedScaling gives a call; None with other recipes.

    scale: of y. amax: where the kernel puts that of y; None where the region's step does not count.
    """

    scales: fp8.Scales | None
    scale: torch.Tensor | None
    amax: torch.Tensor | None


class Fp8Norm(torch.nn.Module):
    """The part of a norm that runs inside cupynorm.fp8_autocast.

    _fp8_scales: of y with DelayedScaling, from the first such call on. _fp8_slot: for amaxes.py.
    """

    _centered: bool
    normalized_shape: tuple[int, ...]
    eps: float | None
    zero_centered_gamma: bool
    round_x_hat: bool
    memory_efficient: bool
    fp8_state: bool = False
    launch: Launch | None = None
    _fp8_scales: fp8.Scales | None = None

    def _begin_fp8(self) -> None:
        """Must run in the constructor."""
        self._fp8_slot = amaxes.new_slot(type(self).__qualname__)

    def _parameter(self, name: str) -> torch.Tensor | None:
        """weight or bias."""
        raise NotImplementedError

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._begin_fp8()
        self._move_scales(lambda tensor: tensor)  # torch.load may have put them on "meta"

    def _apply(self, function: Callable, recurse: bool = True) -> Fp8Norm:
        super()._apply(function, recurse)
        self._move_scales(function)
        return self

    def _move_scales(self, function: Callable) -> None:
        if self._fp8_scales is not None:
            self._fp8_scales = fp8.moved(self._fp8_scales, function)

    def get_extra_state(self) -> torch.Tensor:
        """The scale of y as bytes, without pickle; an empty uint8 tensor where there is none."""
        return fp8.pack({} if self._fp8_scales is None else {"y": self._fp8_scales})

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state returned.

        TransformerEngine's modules save an fp8 state that norms do not use. It is ignored.
        """
        self._load_scales(fp8.unpack(state) if fp8.is_packed(state) else {})

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._fp8_scales is None and not self.fp8_state:  # the state dict is then torch.nn's
            del destination[f"{prefix}{fp8.EXTRA_STATE}"]

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        fp8.complete(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _load_scales(self, states: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Takes what fp8.unpack returned. Without a state, the next step is the first."""
        if not states:
            self._fp8_scales = None
            return
        described = ", ".join(f"{name} of {len(scale)}" for name, (scale, _) in states.items())
        if described != "y of 1":
            raise ValueError(
                f"the fp8 state is of {described} tensors; expected that of a norm, y of 1"
            )
        ((scale, amax_history),) = states.values()
        if self._fp8_scales is None:
            self._fp8_scales = fp8.Scales((E4M3,), len(amax_history), scale.device)
        self._fp8_scales.load(scale, amax_history)

    def _forward_in_fp8(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        return_residual: bool,
        functors: Functors | None,
    ) -> Any:
        """The call with fp8_output."""
        region = autocast.kept(autocast.active)
        if region is None:
            raise ValueError(
                "fp8_output is True outside of fp8_autocast; "
                "expected False, or the call inside of it"
            )
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input is {arrays.type_in_words(input)}; expected a torch tensor")
        if is_recorded():
            raise NotImplementedError(
                "torch.export or make_fx was asked to record a norm with fp8_output=True; expected "
                "fp8_output=False"
            )
        is_sharded = wrapped.is_any_dtensor(input)
        if not (is_sharded or is_transformed()):
            arrays.check_addresses(input=input)  # before scales are moved to its device
        autocast.check_checkpoint(region)
        step = self._begin_step(region.recipe, input.device)
        # The next layer may need the transposed copy for its weight's gradient. No linear layer
        # takes a DTensor in 8 bits.
        transpose = torch.is_grad_enabled() and not is_sharded
        quantization = _quantization_of(region.recipe, transpose)
        norm_operands = ForwardOperands(
            input,
            self._parameter("weight"),
            self._parameter("bias") if self._centered else None,
            residual,
            scale=step.scale,
            amax=step.amax,
            functors=functors,
        )
        norm_options = ForwardOptions(
            self._centered,
            self.normalized_shape,
            self.eps,
            self.zero_centered_gamma,
            quantization.dtype,
            round_x_hat=self.round_x_hat,
            memory_efficient=self.memory_efficient,
            quantization=quantization,
            launch=self.launch,
        )
        results = normalize(ForwardRequest(norm_operands, norm_options), return_residual)
        if step.scales is not None:
            self._fp8_scales = step.scales
        if step.amax is not None:
            used = autocast.UsedScales(step.scales, region.recipe, region.group)
            region.used[self._fp8_slot, 0] = used
        return results

    def _begin_step(self, recipe: Recipe, device: torch.device) -> _Step:
        """Changes nothing yet, because the call may be refused."""
        if not isinstance(recipe, DelayedScaling):
            return _Step(None, None, None)
        fp8.check_is_no_replica(self)
        keeps = torch.is_grad_enabled() and not autocast.runs_again() and not learns_shapes()
        dtypes = recipe.fp8_format.value[:1]
        scales = fp8.scales_for(self._fp8_scales, dtypes, recipe, device, keeps_amaxes=keeps)
        scale = autocast.kept(scales.scale.clone) if autocast.runs else scales.scale
        return _Step(scales, scale, scales.amax(0) if keeps else None)


def _quantization_of(recipe: Recipe, transpose: bool) -> Quantization:
    """How a recipe quantises y. transpose: also make the transposed copy, where y has one scale."""
    dtype = name_of(recipe.fp8_format.value[0])
    if isinstance(recipe, DelayedScaling):
        return Quantization(dtype, transpose=transpose)
    if isinstance(recipe, CurrentScaling):
        power_of_two, smallest_amax = recipe.power_of_two, recipe.amax_epsilon
        return Quantization(dtype, "tensor", power_of_two, transpose, smallest_amax)
    return Quantization(dtype, "block", recipe.power_of_two)
