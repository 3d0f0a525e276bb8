"""torch: LayerNorm and RMSNorm with fp8_output=True, and the scale that they keep for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..gpu import arrays
from ..norm.options import launch_options, with_checked_options
from ..norm.request import ForwardOperands, ForwardOptions, ForwardRequest, Quantization
from ..norm.route import normalize
from . import amaxes, autocast, dtensor, fp8
from .dtypes import name_of
from .modes import wants_gradient
from .past_calls import PastCall, PastCalls
from .recipes import E4M3, BlockScaling, CurrentScaling, DelayedScaling, MXFP8BlockScaling

_EXTRA_STATE = "_extra_state"


class Fp8Norm(torch.nn.Module):
    """The part of a norm that runs inside cupynorm.fp8_autocast.

    _fp8_scales: of y with DelayedScaling, from the first such call on. _fp8_slot: for amaxes.py.
    _past_calls: which a checkpoint may run again.
    """

    normalized_shape: tuple[int, ...]
    eps: float | None
    zero_centered_gamma: bool
    round_x_hat: bool
    memory_efficient: bool
    fp8_state: bool = False
    sm_margin: int | Mapping[str, int]
    _fp8_scales: fp8.Scales | None = None
    _past_calls: PastCalls

    def _begin_fp8(self) -> None:
        """Must run in the constructor."""
        self._fp8_slot = amaxes.new_slot(type(self).__qualname__)
        self._past_calls = PastCalls()

    def _held(self, name: str) -> torch.Tensor | None:
        """weight or bias."""
        raise NotImplementedError

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_past_calls"}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._begin_fp8()

    def _apply(self, function: Callable, recurse: bool = True) -> Fp8Norm:
        super()._apply(function, recurse)
        if self._fp8_scales is not None:
            self._fp8_scales = fp8.moved(self._fp8_scales, function)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = {} if self._fp8_scales is None else {"y": self._fp8_scales}
        if scales or self.fp8_state:  # otherwise the state dict is torch.nn's
            destination[f"{prefix}{_EXTRA_STATE}"] = fp8.pack(scales)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        key = f"{prefix}{_EXTRA_STATE}"
        # TransformerEngine's modules save an fp8 state that norms do not use. It is ignored.
        extra = state_dict.get(key)
        self._load_scales(fp8.unpack(extra) if fp8.is_packed(extra) else {})
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(others, prefix, *arguments)

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
        centered: bool,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        return_residual: bool,
        options: dict[str, Any],
    ) -> Any:
        """The call with fp8_output. options: residual_dtype to bias1 of the call, functors."""
        region, past = autocast.active(), self._past_calls.run_again()
        if region is None and past is not None:
            region = past.region
        if region is None:
            raise ValueError(
                "fp8_output is True outside of fp8_autocast; "
                "expected False, or the call inside of it"
            )
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input is {arrays.type_in_words(input)}; expected a torch tensor")
        is_sharded = dtensor.is_any(input)
        if not is_sharded:
            arrays.check_addresses(input=input)  # before scales are moved to its device
        bias = self._held("bias") if centered else None
        # A checkpoint may run its layers without recording them, and again in backward.
        keeps_amaxes = torch.is_grad_enabled() or (
            region.records and self.training and wants_gradient(input, residual, *self.parameters())
        )
        quantization, scale, amax = self._quantization(region, past, input.device, keeps_amaxes)
        if is_sharded:  # no linear layer takes it in 8 bits
            quantization = quantization._replace(transpose=False)
        operands = ForwardOperands(
            input,
            self._held("weight"),
            bias,
            residual,
            row_scale=options["row_scale"],
            dropout_seed=options["dropout_seed"],
            weight1=options["weight1"],
            bias1=options["bias1"],
            scale=scale,
            amax=amax,
            functors=options["functors"],
        )
        norm_options = ForwardOptions(
            centered,
            self.normalized_shape,
            self.eps,
            self.zero_centered_gamma,
            quantization.dtype,
            options["residual_dtype"],
            options["dropout_p"],
            self.round_x_hat,
            self.memory_efficient,
            quantization,
            launch_options(None, None, None, self.sm_margin),
        )
        return normalize(
            with_checked_options(ForwardRequest(operands, norm_options)), return_residual
        )

    def _quantization(
        self,
        region: autocast.Region,
        past: PastCall | None,
        device: torch.device,
        keeps_amaxes: bool,
    ) -> tuple[Quantization, torch.Tensor | None, torch.Tensor | None]:
        """How y is quantised, by the region's recipe, and its scale and amax if they are given.

        past: the first run of the call, where a checkpoint runs it again. keeps_amaxes: whether the
        region's step counts. Where gradients are recorded and there is one scale, the transposed
        copy is made too: the next layer may need it for its weight's gradient.
        """
        recipe, recorded = region.recipe, torch.is_grad_enabled()
        dtype = recipe.fp8_format.value[0]
        quantization = Quantization(name_of(dtype), transpose=recorded)
        is_delayed = isinstance(recipe, DelayedScaling)
        has_amaxes = past is not None and past.has_amaxes
        keeps_amaxes = (
            keeps_amaxes and is_delayed and not has_amaxes and autocast.active() is not None
        )
        scale = None
        if is_delayed:
            self._fp8_scales = scales = fp8.scales_for(
                self._fp8_scales, (dtype,), recipe, device, keeps_amaxes=keeps_amaxes
            )
            scale = scales.scale if past is None or past.scale is None else past.scale
            if keeps_amaxes:
                used = autocast.UsedScales(scales, recipe, region.group)
                region.used[self._fp8_slot, 0] = used
        self._past_calls.add(
            region, is_recorded=recorded, has_amaxes=keeps_amaxes or has_amaxes, scale=scale
        )
        if isinstance(recipe, CurrentScaling):
            quantization = quantization._replace(
                scaling="tensor",
                power_of_two=recipe.power_of_two,
                smallest_amax=recipe.amax_epsilon,
            )
            return quantization, None, None
        if isinstance(recipe, MXFP8BlockScaling):
            return quantization._replace(scaling="mx", transpose=False), None, None
        if isinstance(recipe, BlockScaling):
            power_of_two = recipe.power_of_two
            quantization = quantization._replace(
                scaling="block", power_of_two=power_of_two, transpose=False
            )
            return quantization, None, None
        return quantization, scale, scales.amax(0) if keeps_amaxes else None
