"""torch: Linear, a linear layer without a norm before it, for products of 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..nn import autocast, fp8, modes
from ..nn.modes import product_dtype
from ..norm.quantized import QuantizedTensor
from .call import LinearCall, LinearOptions, Operands
from .function import normalize_and_project
from .layer import LinearLayer
from .quantizers import as_matrix, fits
from .weight_gradients import WeightGradientSink


class Linear(LinearLayer, torch.nn.Linear):
    """torch.nn.Linear, which multiplies in 8-bit floats inside of cupynorm.fp8_autocast.

    It has the same arguments in the same order, the same parameters and the same state dict.
    Outside of fp8_autocast it computes what torch.nn.Linear computes.

    Examples:
        >>> norm, layer = cupynorm.RMSNorm(64), cupynorm.Linear(64, 192)
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.CurrentScaling()):
        ...     layer(norm(torch.randn(8, 64), fp8_output=True)).shape
        torch.Size([8, 192])

    in_features, out_features, bias, device, dtype: as torch's.

    By keyword only:
    fuse_wgrad_accumulation, delay_wgrad_compute: as for cupynorm.LayerNormLinear.
    fp8_state: True puts `_extra_state` into the state dict from the start, empty without scales.

    Called with input (..., in_features) of the parameters' dtype, or of any under torch.autocast,
    it returns (..., out_features). is_first_microbatch, fp8_output and fp8_grad are those of
    cupynorm.LayerNormLinear; fp8_grad rounds the gradient of the input.

    input may also be a cupynorm.QuantizedTensor, such as the y of cupynorm.LayerNorm with
    fp8_output=True. Its 8-bit numbers are multiplied as they are if they have the recipe's format
    and one scale, or the recipe's blocks. Otherwise they are dequantised, and quantised again. The
    gradient of the weight reads a transposed copy in 8 bits. With scales of blocks that copy is
    made of the dequantised values. DelayedScaling records no amax of such an input.

    For backward the layer keeps a transposed 8-bit copy of the input, and not the input.

    With DelayedScaling the state dict also has scales, as bytes without pickle, under the name
    _extra_state (torch.nn loads such a state dict with strict=False). One without it is loaded.
    torch.distributed.checkpoint loads only what the new layer has in its own state dict: give
    fp8_state=True to load scales there.

    Raises ValueError or TypeError for invalid arguments.
    """

    fused, return_bias, fp8_state = None, False, False
    weight_names, bias_names = ["weight"], ["bias"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        fp8_state: bool = False,
    ) -> None:
        if not isinstance(bias, bool):
            raise TypeError(f"bias is {bias!r}; expected True or False: the arguments are torch's")
        if isinstance(device, bool):
            raise TypeError(
                f"device is {device}; the order of the arguments is torch.nn's: in_features, "
                "out_features, bias, device, dtype. Give TransformerEngine's others by keyword"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.fp8_state = fp8_state
        self._begin_state()
        self._mark_parameters()

    @property
    def use_bias(self) -> bool:
        return self.bias is not None

    def _weights(self) -> list[Tensor]:
        return [self.weight]

    def _biases(self) -> list[Tensor]:
        return [] if self.bias is None else [self.bias]

    def linear_options(self, dtype: torch.dtype) -> LinearOptions:
        """The layer's options for products of a dtype."""
        return LinearOptions(
            centered=False,
            eps=0.0,
            zero_centered_weight=False,
            return_normalized=False,
            save_normalized=True,
            fused=None,
            launch=None,
            dtype=dtype,
            has_norm=False,
        )

    # Calls.

    def forward(
        self,
        input: Tensor | QuantizedTensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor | QuantizedTensor:
        if self._runs_untraced():
            arguments = input, is_first_microbatch, fp8_output, fp8_grad
            return modes.run_untraced(self.forward)(*arguments)
        region, quantized = self._region(), None
        if isinstance(input, QuantizedTensor):
            quantized, input = _unpacked(input, region)
        self._check_input(input)
        is_torchs = region is None and not (
            fp8_output
            or fp8_grad
            or self.fuse_wgrad_accumulation
            or self.delay_wgrad_compute
            or autocast.calibration() is not None
        )
        if is_torchs:
            return functional.linear(input, self.weight, self.bias)
        y, _ = self._call(
            Operands(input, None, None, None, self._weights(), self._biases()),
            region,
            is_first_microbatch,
            fp8_output=fp8_output,
            fp8_grad=fp8_grad,
            quantized=quantized,
        )
        return y

    def _project(
        self,
        operands: Operands,
        is_first_microbatch: bool | None,
        sink: WeightGradientSink | None = None,
    ) -> tuple[Tensor, None]:
        if sink is None:
            return functional.linear(operands.input, operands.weights[0], self.bias), None
        call = LinearCall(operands, self.linear_options(product_dtype(operands.input)))
        return normalize_and_project(call, sink)[0], None

    def _project_to_sink(
        self, operands: Operands, is_first_microbatch: bool | None
    ) -> tuple[Tensor, None]:
        if modes.is_transformed() and not modes.is_recorded():
            raise NotImplementedError(
                "a layer with fuse_wgrad_accumulation or delay_wgrad_compute was called in a "
                "transform of torch.func or in forward mode; expected it outside"
            )
        return super()._project_to_sink(operands, is_first_microbatch)

    # State.

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (self._fp8_states or self.fp8_state):  # the state dict is then torch.nn's
            del destination[f"{prefix}{fp8.EXTRA_STATE}"]


def _unpacked(
    input: QuantizedTensor, region: autocast.Region | None
) -> tuple[QuantizedTensor | None, Tensor]:
    """An input as a matrix in 8 bits, or None where it must be quantised again; and as a tensor.

    The tensor has no values where the matrix is used.
    """
    if region is None or not fits(input, region.recipe):
        return None, input.dequantize()
    return as_matrix(input), input.without_values()
