"""torch: what a linear layer keeps and does inside cupynorm.fp8_autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gpu import arrays
from ..nn import amaxes, autocast, by_torch, fp8, modes
from ..nn.modes import outside_autocast, product_dtype
from ..nn.recipes import DelayedScaling, Recipe
from ..norm.quantized import QuantizedTensor
from . import fp8 as fp8_linear
from . import kernels
from .call import LinearCall, LinearOptions, Operands, all_of, is_fused
from .fp8 import RegionCall
from .function import check_call
from .gradient_layer import GradientLayer
from .matrices import as_result, as_rows, join
from .quantizers import Quantizers, states_from, states_of


class Fp8Layer(GradientLayer):
    """The part of a linear layer that runs inside cupynorm.fp8_autocast.

    _fp8_states: of DelayedScaling. _fp8_weight: the quantised weight that is_first_microbatch
    shares, behind its recipe and modes.stream_of. _slot: for amaxes.py.
    """

    in_features: int
    out_features: int
    _fp8_states: dict[str, fp8.Scales]
    _fp8_weight: tuple[Recipe, tuple | None, QuantizedTensor] | None

    def _begin_state(self) -> None:
        super()._begin_state()
        self._fp8_states, self._fp8_weight = {}, None
        self._slot = amaxes.new_slot(self._kind())

    def _kind(self) -> str:
        """What the layer's twins on other ranks share with it."""
        return f"{type(self).__qualname__}({self.in_features}, {self.out_features})"

    def linear_options(self, dtype: torch.dtype) -> LinearOptions:
        """The layer's options for products of a dtype."""
        raise NotImplementedError

    # Calls.

    def _region(self) -> autocast.Region | None:
        """The region of a call: of the first run of a call that a checkpoint runs again."""
        return autocast.active() if modes.is_compiling() else autocast.kept(autocast.active)

    def _project_in_fp8(
        self, call: RegionCall, operands: Operands, fp8_output: bool
    ) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        """y (quantised with fp8_output) and the normalised tensor or None."""
        if operands.input.is_nested:
            if fp8_output:
                raise NotImplementedError(
                    "fp8_output is True and input is nested; expected fp8_output=False"
                )
            packing = by_torch.Packing(operands.input, 1)
            operands = operands._replace(input=packing.values(operands.input, "input"))
            return packing.nested(self._project_in_fp8(call, operands, fp8_output))
        _refuse_transforms(operands)
        if operands.input.is_meta:
            arrays.check_addresses(input=operands.input)  # raises
        call = self._checked(call, operands, fp8_output)
        has_sink = call.recorded and self._has_sink()
        sink = self._make_sink(call.is_first_microbatch) if has_sink else None
        quantized_call, weight = self.begin_in_fp8(call, operands)
        if call.recorded:
            num_weights = len(operands.weights)
            results = fp8_linear.Projected.apply(
                quantized_call, weight, sink, num_weights, *all_of(operands)
            )
            self._take_step(sink)
            return results
        with torch.no_grad():
            y, normalized, _ = fp8_linear.forward(quantized_call, weight, operands, recorded=False)
            if fp8_output:
                return quantized_call.quantizers.quantize("output", as_rows(y)), normalized
            return as_result(y), as_result(normalized)

    def _checked(self, call: RegionCall, operands: Operands, fp8_output: bool) -> RegionCall:
        """The call, with `recorded` as its tensors say. Raises for what does not fit."""
        if modes.is_recorded():
            raise NotImplementedError(
                "torch.export or make_fx was asked to record a layer inside fp8_autocast; expected "
                "it outside"
            )
        if is_fused(self.fused):
            raise ValueError(f"fused is {self.fused!r} inside fp8_autocast; expected None")
        if operands.input.dtype == torch.float64:
            raise TypeError(
                "input is of dtype float64 inside fp8_autocast; "
                "expected float16, bfloat16 or float32"
            )
        if any(hasattr(each, "device_mesh") for each in all_of(operands)):
            raise NotImplementedError(
                "a DTensor was given to a linear layer inside fp8_autocast; expected to_local()"
            )
        check_call(LinearCall(operands, call.options))
        recorded = torch.is_grad_enabled() and modes.wants_gradient(*all_of(operands))
        if recorded and fp8_output:
            raise ValueError(
                "fp8_output is True where gradients are recorded; "
                "expected False, or torch.no_grad()"
            )
        return call._replace(recorded=recorded)

    def begin_in_fp8(
        self, call: RegionCall, operands: Operands
    ) -> tuple[fp8_linear.QuantizedCall, QuantizedTensor]:
        """What fp8_linear.forward needs: the call and the quantised weight."""
        region, recipe = call.region, call.region.recipe
        keeps = torch.is_grad_enabled() and not autocast.runs_again() and not modes.learns_shapes()
        quantizers = self.quantizers(recipe, operands.input.device, keeps_amaxes=keeps)
        if isinstance(recipe, DelayedScaling) and autocast.runs:
            quantizers.forward_scale = autocast.kept(quantizers.states["forward"].scale.clone)
        quantized_call = fp8_linear.QuantizedCall(
            call.options, quantizers, call.quantize_gradient, call.input
        )
        if isinstance(recipe, DelayedScaling) and keeps:
            self._use_scales(region, recipe)
        return quantized_call, self._quantized_weight(call, operands, quantizers)

    def _use_scales(self, region: autocast.Region, recipe: DelayedScaling) -> None:
        """Has the scales updated when the outermost region ends."""
        for name, at in (("forward", 0), ("backward", amaxes.OF_BACKWARD)):
            used = amaxes.UsedScales(self._fp8_states[name], recipe, region.group)
            region.used[self._slot, at] = used

    def _calibrate(self, operands: Operands) -> None:
        """Records the amaxes of a call in its own dtype, in a region that is calibrating."""
        region = autocast.calibration()
        if region is not None and not operands.input.is_meta:
            modes.run_untraced(self._record_amaxes)(operands, region)

    def _record_amaxes(self, operands: Operands, region: autocast.Region) -> None:
        if modes.is_inside_backward() or modes.learns_shapes():
            return  # a checkpoint runs the call again, or a pipeline before the first step
        _refuse_transforms(operands)
        if operands.input.is_nested:
            values = by_torch.Packing(operands.input, 1).values(operands.input, "input")
            operands = operands._replace(input=values)
        check_call(LinearCall(operands, self.linear_options(product_dtype(operands.input))))
        recipe, options = region.calibration, self.linear_options(torch.float32)
        with torch.no_grad(), outside_autocast(operands.input):
            quantizers = self.quantizers(recipe, operands.input.device, keeps_amaxes=True)
            normalized = kernels.forward(options, operands, torch.float32)[0]
            quantizers.record("input", as_rows(normalized))
            quantizers.record("weight", join(operands.weights))
        self._use_scales(region, recipe)

    def quantizers(self, recipe: Recipe, device: torch.device, *, keeps_amaxes: bool) -> Quantizers:
        """Those of a call in an fp8_autocast region with this recipe. keeps_amaxes: whether the
        call adds its amaxes to the history of delayed scaling."""
        if isinstance(recipe, DelayedScaling):
            fp8.check_is_no_replica(self)
        states = states_of(self._fp8_states, recipe, device, keeps_amaxes=keeps_amaxes)
        if isinstance(recipe, DelayedScaling) and modes.learns_shapes():
            states = copy.deepcopy(states)  # which backward changes
        return Quantizers(recipe, states, keeps_amaxes)

    def _quantized_weight(
        self, call: RegionCall, operands: Operands, quantizers: Quantizers
    ) -> QuantizedTensor:
        """The weight, quantised or cached.

        is_first_microbatch True: quantised and cached; False: from the cache, if recipe and stream
        are the same; None: quantised.
        """
        is_first, recorded = call.is_first_microbatch, call.recorded
        stream = None if is_first is None else modes.stream_of(operands.weights[0])
        recipe, cached_on, cached = self._fp8_weight or (None, None, None)
        if is_first is False and recipe == quantizers.recipe and cached_on == stream:
            if cached.transposed is not None or not recorded:
                return cached
        with torch.no_grad():
            quantized = quantizers.quantize("weight", join(operands.weights), transpose=recorded)
            quantized.dtype = call.options.dtype
        if is_first is not None:
            self._fp8_weight = quantizers.recipe, stream, quantized
        return quantized

    # State.

    def get_extra_state(self) -> Tensor:
        """The state of delayed scaling as bytes, without pickle.

        An empty uint8 tensor where there is none.
        """
        return fp8.pack(self._fp8_states)

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state returned.

        An empty state of TransformerEngine is accepted. Its pickle is ignored with a warning.
        """
        self._fp8_states = states_from(fp8.unpack(state), self._fp8_states)

    def _drop_derived(self) -> None:
        """Drops what was made of parameters that have changed."""
        self._fp8_weight = None

    def _apply(self, function: Callable, recurse: bool = True) -> Fp8Layer:
        super()._apply(function, recurse)
        self._move_scales(function)
        self._drop_derived()
        return self

    def _move_scales(self, function: Callable) -> None:
        moved = {name: fp8.moved(state, function) for name, state in self._fp8_states.items()}
        self._fp8_states = {name: state for name, state in moved.items() if state is not None}

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_fp8_weight": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._slot = amaxes.new_slot(self._kind())
        self._move_scales(lambda tensor: tensor)  # torch.load may have put them on "meta"

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        fp8.complete(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._drop_derived()


def _refuse_transforms(operands: Operands) -> None:
    if modes.is_jit_traced():
        raise NotImplementedError(
            "torch.jit.trace was asked to record a layer inside fp8_autocast; expected it outside"
        )
    if modes.has_functorch_transforms() or modes.have_tangents(all_of(operands)):
        raise NotImplementedError(
            "torch.func or forward mode was asked to transform a layer inside fp8_autocast; "
            "expected it outside"
        )
