"""torch: Linear, a linear layer without a norm before it, for products of 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu.arrays import type_in_words
from ..nn import autocast, modes
from ..nn.dtypes import product_dtype
from ..norm.quantized_tensor import QuantizedTensor
from .call import LinearCall, LinearOptions, Operands, launch_options
from .fp8 import RegionCall
from .fp8_layer import Fp8Layer
from .function import normalize_and_project
from .gradient_layer import GradientLayer
from .model_init import begin_weights, plain_weights
from .parameters import mark_delayed
from .quantizers import as_matrix, fits

_EXTRA_STATE, _LAUNCH = "_extra_state", launch_options(0)


class Linear(GradientLayer, Fp8Layer, torch.nn.Linear):
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
        super().__init__(in_features, out_features, bias, device, dtype)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.fp8_state = fp8_state
        self._begin_gradients()
        self._begin_state()
        begin_weights(self, self.weight_names)
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
            launch=_LAUNCH,
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
        if modes.is_compiling() and (
            self._has_8_bit_weights() or self._needs_eager() or self._hands_gradients_on()
        ):
            arguments = input, is_first_microbatch, fp8_output, fp8_grad
            return modes.run_untraced(self.forward)(*arguments)
        region, quantized = self._region(), None
        if isinstance(input, QuantizedTensor):
            quantized, input = _unpacked(input, region)
        self._check_input(input)
        hands_on = self._begin_forward(is_first_microbatch)
        hands_on = hands_on and modes.wants_gradient(self.weight, self.bias)
        if region is not None:
            operands = Operands(input, None, None, None, self._weights(), self._biases())
            keeps_amaxes = torch.is_grad_enabled() or (
                region.records and self.training and modes.wants_gradient(*operands.all)
            )
            options = self.linear_options(product_dtype(input))
            call = RegionCall(
                region, options, fp8_grad, is_first_microbatch, keeps_amaxes, False, quantized
            )
            make_sink = partial(self._make_sink, is_first_microbatch) if hands_on else None
            return self._project_in_fp8(call, operands, fp8_output, make_sink)[0]
        if fp8_output or fp8_grad:
            name = "fp8_output" if fp8_output else "fp8_grad"
            raise ValueError(
                f"{name} is True outside of fp8_autocast; expected False, or the call inside of it"
            )
        (weight,) = plain_weights(self._weights())
        hands_on = hands_on and torch.is_grad_enabled()
        if hands_on or autocast.calibration() is not None:
            operands = Operands(input, None, None, None, [weight], self._biases())
            call = LinearCall(operands, self.linear_options(product_dtype(input)))
            self._calibrate(call)
            if hands_on:
                return modes.run_untraced(self._project_to_sink)(call, is_first_microbatch)
        return functional.linear(input, weight, self.bias)

    def _check_input(self, input: object) -> None:
        if input.__class__ is torch.fx.Proxy:
            raise NotImplementedError(
                "torch.fx was asked to trace into a cupynorm.Linear; expected a Tracer whose "
                "is_leaf_module returns True for it"
            )
        if not isinstance(input, Tensor):
            raise TypeError(f"input is {type_in_words(input)}; expected a torch tensor")
        # torch.jit.trace warns of every shape that is looked at; there the product itself checks.
        is_traced = not modes.is_compiling() and modes.is_jit_traced()
        if not is_traced and input.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"input has shape {tuple(input.shape)}; expected (..., {self.in_features}), "
                "in_features of this layer"
            )

    def _project_to_sink(self, call: LinearCall, is_first_microbatch: bool | None) -> Tensor:
        if modes.is_transformed() or not modes.are_plain(call.operands.all):
            raise NotImplementedError(
                "a layer with fuse_wgrad_accumulation or delay_wgrad_compute was called with "
                "tensors of a class of their own or in a transform of torch.func; expected plain "
                "tensors"
            )
        return normalize_and_project(call, self._make_sink(is_first_microbatch))[0]

    # State.

    def _mark_parameters(self) -> None:
        if self.delay_wgrad_compute:
            mark_delayed((*self._weights(), *self._biases()))

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_parameters()  # a deep copy of a parameter loses its attributes

    def _apply(self, function: Callable, recurse: bool = True) -> Linear:
        super()._apply(function, recurse)
        self._mark_parameters()
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (self._fp8_states or self.fp8_state):  # the state dict is then torch.nn's
            del destination[f"{prefix}{_EXTRA_STATE}"]

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._mark_parameters()  # load_state_dict(assign=True) replaces the parameters


def _unpacked(
    input: QuantizedTensor, region: autocast.Region | None
) -> tuple[QuantizedTensor | None, Tensor]:
    """An input as a matrix in 8 bits, or None where it must be quantised again; and as a tensor.

    The tensor has no values where the matrix is used.
    """
    if region is None or not fits(input, region.recipe):
        return None, input.dequantize()
    return as_matrix(input), input.without_values()
