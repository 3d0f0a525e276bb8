"""torch: one call of a linear layer: what LayerNormLinear and Linear share.

inside fp8_autocast       fp8_layer.py
outside                   the layer's own _project
fuse_wgrad_accumulation,
delay_wgrad_compute       the same with a sink: gradient_layer.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gpu.arrays import type_in_words
from ..nn import autocast, modes
from ..nn.modes import product_dtype
from ..norm.quantized import QuantizedTensor
from .call import Operands
from .fp8 import RegionCall
from .fp8_layer import Fp8Layer
from .weight_gradients import WeightGradientSink


class LinearLayer(Fp8Layer):
    """A layer of the operands that the subclass gives to _call."""

    def _project(
        self,
        operands: Operands,
        is_first_microbatch: bool | None,
        sink: WeightGradientSink | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """y, and normalized if requested, in the dtype of the call. sink: as for function.py."""
        raise NotImplementedError

    def _runs_untraced(self) -> bool:
        """Whether torch.compile must call the layer as it is.

        The whole of it: torch 2.11 fails where the graph breaks further inside, beside tuples that
        the traced part has made.
        """
        if not modes.is_compiling():
            return False
        # What a checkpoint runs again needs the region of its first run, which no graph keeps.
        return autocast.is_inside() or bool(autocast.runs) or self._has_sink()

    def _call(
        self,
        operands: Operands,
        region: autocast.Region | None,
        is_first_microbatch: bool | None,
        *,
        fp8_output: bool,
        fp8_grad: bool,
        quantized: QuantizedTensor | None = None,
    ) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        """y and normalized (None unless requested). quantized: the input where it came in 8 bits.

        region: of _region(), which must be asked once in each call.
        """
        self._begin_forward()
        if region is not None:
            autocast.check_checkpoint(region)
            options = self.linear_options(product_dtype(operands.input))
            call = RegionCall(region, options, fp8_grad, is_first_microbatch, False, quantized)
            results = self._project_in_fp8(call, operands, fp8_output)
        elif fp8_output or fp8_grad:
            name = "fp8_output" if fp8_output else "fp8_grad"
            raise ValueError(
                f"{name} is True outside of fp8_autocast; expected False, or the call inside of it"
            )
        else:
            self._calibrate(operands)
            project = self._project
            if self._has_sink():
                project = modes.run_untraced(self._project_to_sink)
            results = project(operands, is_first_microbatch)
        self._end_forward(is_first_microbatch)  # last: a call that is refused changes nothing
        return results

    def _project_to_sink(
        self, operands: Operands, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        if modes.is_recorded():  # the graph's own backward gives the gradients to autograd
            return self._project(operands, is_first_microbatch)
        sink = self._make_sink(is_first_microbatch)
        results = self._project(operands, is_first_microbatch, sink)
        self._take_step(sink)
        return results

    def _check_input(self, input: object) -> None:
        """Raises NotImplementedError, TypeError or ValueError for what the layer cannot take."""
        if input.__class__ is torch.fx.Proxy:
            raise NotImplementedError(
                f"torch.fx was asked to trace into a cupynorm.{type(self).__name__}; expected a "
                "Tracer whose is_leaf_module returns True for it"
            )
        if not isinstance(input, Tensor):
            raise TypeError(f"input is {type_in_words(input)}; expected a torch tensor")
        # torch.jit.trace warns of every shape that is looked at; there the operator checks.
        checks_shape = modes.is_compiling() or not modes.is_jit_traced()
        if checks_shape and (not input.ndim or input.size(-1) != self.in_features):
            raise ValueError(
                f"input has shape {tuple(input.shape)}; expected (..., {self.in_features}), "
                "in_features of this layer"
            )
