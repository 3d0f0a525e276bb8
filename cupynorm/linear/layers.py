"""torch: Linear, for products of 8-bit floats, and what it shares with LayerNormLinear
(parallel/module.py).

layer_norm_linear.py  a call, differentiable
products.py           its values and gradients
fp8_products.py       what a layer keeps inside cupynorm.fp8_autocast
weight_gradients.py   what it keeps for fuse_wgrad_accumulation and delay_wgrad_compute
parameters.py         the parts of its parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu import arrays
from ..nn import by_torch, modes, scales
from ..nn.modes import product_dtype
from ..norm.quantized import QuantizedTensor
from ..options import check_flags, check_int
from ..recipes import DelayedScaling
from . import parameters
from .fp8_products import LinearState, as_matrix, fits
from .layer_norm_linear import check_call, normalize_and_project
from .operands import LinearOptions, Operands, as_rows, is_fused
from .products import ONE_RANK, OneRank, Products
from .weight_gradients import WeightGradients, WeightGradientSink


class LinearLayer(scales.KeepsScales):
    """A layer of the operands that the subclass gives to _call.

    The subclass sets the attributes below, in_features, out_features and use_bias, and calls
    begin_state.
    """

    fuse_wgrad_accumulation = delay_wgrad_compute = return_bias = False
    fused: str | None = None
    weight_names: Sequence[str] = ("weight",)
    bias_names: Sequence[str] = ("bias",)
    sharding: OneRank = ONE_RANK

    def begin_state(self, kept: dict[str, scales.Scales] | None = None) -> None:
        kind = f"{type(self).__qualname__}({self.in_features}, {self.out_features})"
        self._fp8, self._gradients = LinearState(kind, kept), WeightGradients()
        self.__dict__.setdefault("wgrad_accumulation_and_reduce_hooks", [])

    def weights(self) -> list[Tensor]:
        """The parts of the weight that the layer holds now."""
        return [getattr(self, name) for name in self.weight_names]

    def biases(self) -> list[Tensor]:
        """The parts of the bias; none without a bias."""
        return [getattr(self, name) for name in self.bias_names] if self.use_bias else []

    def linear_options(self, dtype: torch.dtype) -> LinearOptions:
        """The layer's options for products of a dtype."""
        raise NotImplementedError

    # Calls.

    def _runs_untraced(self) -> bool:
        """Whether torch.compile must call the layer as it is.

        The whole of it: torch 2.11 fails where the graph breaks further inside, beside tuples that
        the traced part has made.
        """
        if not modes.is_compiling():
            return False
        # What a checkpoint runs again needs the region of its first run, which no graph keeps.
        return scales.active() is not None or bool(scales.runs) or self._gradients.has_sink(self)

    def _region(self) -> scales.Region | None:
        """The region of a call: of the first run of a call that a checkpoint runs again."""
        return scales.active() if modes.is_compiling() else scales.kept(scales.active)

    def _call(
        self,
        operands: Operands,
        region: scales.Region | None,
        is_first_microbatch: bool | None,
        *,
        fp8_output: bool,
        fp8_grad: bool,
        quantized: QuantizedTensor | None = None,
    ) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        """y and normalized (None unless requested). quantized: the input where it came in 8 bits.

        region: of _region(), which must be asked once in each call.
        """
        if not (fp8_output is fp8_grad is False or modes.is_jit_traced()):
            check_flags(fp8_output=fp8_output, fp8_grad=fp8_grad)
        if is_first_microbatch is not None:
            check_flags(is_first_microbatch=is_first_microbatch)
        self._gradients.begin(self)
        if region is not None:
            scales.check_checkpoint(region)
            results = self._project_in_fp8(
                operands, region, is_first_microbatch, fp8_output, fp8_grad, quantized=quantized
            )
        elif fp8_output or fp8_grad:
            name = "fp8_output" if fp8_output else "fp8_grad"
            raise ValueError(
                f"{name} is True outside of fp8_autocast; expected False, or the call inside of it"
            )
        else:
            if self._gradients.has_sink(self):
                run = modes.run_untraced(self._project_to_sink)
                results = run(operands, is_first_microbatch)
            else:
                results = self._project(operands)
        # Last: a call that is refused changes nothing.
        self._gradients.end(self, is_first_microbatch)
        return results

    def _project(
        self, operands: Operands, sink: WeightGradientSink | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """y and normalized, in the dtype of the call."""
        options = self.linear_options(product_dtype(operands.input))
        return normalize_and_project(Products(options, self.sharding), operands, sink)[:2]

    def _project_to_sink(
        self, operands: Operands, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        if modes.is_recorded():  # the graph's own backward gives the gradients to autograd
            return self._project(operands)
        sink = self._gradients.make_sink(self, is_first_microbatch)
        results = self._project(operands, sink)
        self._gradients.take_step(sink)
        return results

    def _project_in_fp8(
        self,
        operands: Operands,
        region: scales.Region,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
        *,
        quantized: QuantizedTensor | None,
    ) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        """y (quantised with fp8_output) and normalized."""
        options = self.linear_options(product_dtype(operands.input))
        self._check_in_fp8(operands, options)
        recorded = torch.is_grad_enabled() and modes.wants_gradient(*operands.all())
        if recorded and fp8_output:
            raise ValueError(
                "fp8_output is True where gradients are recorded; "
                "expected False, or torch.no_grad()"
            )
        sink = None
        if recorded and self._gradients.has_sink(self):
            sink = self._gradients.make_sink(self, is_first_microbatch)
        if isinstance(region.recipe, DelayedScaling):
            scales.check_is_no_replica(self)
        quantizers = self._fp8.begin(region, region.recipe, operands.input.device)
        weight = self._fp8.quantized_weight(
            quantizers, operands.weights, options.dtype, is_first_microbatch, recorded=recorded
        )
        products = Products(options, self.sharding, quantizers, fp8_grad=fp8_grad)
        y, normalized, _ = normalize_and_project(products, operands, sink, weight, quantized)
        self._gradients.take_step(sink)
        if fp8_output:
            y = quantizers.quantize("output", as_rows(y))
        return y, normalized

    def _check_in_fp8(self, operands: Operands, options: LinearOptions) -> None:
        """Raises for a call that cannot be in 8 bits, before it changes any scale."""
        tensors = operands.all()
        for what, is_asked in (
            ("torch.jit.trace was asked to record", modes.is_jit_traced()),
            ("torch.export or make_fx was asked to record", modes.is_recorded()),
            (
                "torch.func or forward mode was asked to transform",
                modes.has_functorch_transforms() or modes.have_tangents(tensors),
            ),
        ):
            if is_asked:
                raise NotImplementedError(
                    f"{what} a layer inside fp8_autocast; expected it outside"
                )
        for what, is_given, expected in (
            ("a DTensor", by_torch.is_any_dtensor(*tensors), "to_local()"),
            ("a nested tensor", operands.input.is_nested, "input.values(), its rows"),
        ):
            if is_given:
                raise NotImplementedError(
                    f"{what} was given to a linear layer inside fp8_autocast; expected {expected}"
                )
        arrays.check_addresses(input=operands.input)  # also refuses sparse ones
        if is_fused(self.fused):
            raise ValueError(f"fused is {self.fused!r} inside fp8_autocast; expected None")
        if operands.input.dtype == torch.float64:
            raise TypeError(
                "input is of dtype float64 inside fp8_autocast; "
                "expected float16, bfloat16 or float32"
            )
        check_call(operands, options)

    def _check_input(self, input: object) -> None:
        """Raises NotImplementedError, TypeError or ValueError for what the layer cannot take."""
        if input.__class__ is torch.fx.Proxy:
            raise NotImplementedError(
                f"torch.fx was asked to trace into a cupynorm.{type(self).__name__}; expected a "
                "Tracer whose is_leaf_module returns True for it"
            )
        if not isinstance(input, Tensor):
            raise TypeError(f"input is {arrays.type_in_words(input)}; expected a torch tensor")
        # torch.jit.trace warns of every shape that is looked at; there the operator checks.
        checks_shape = modes.is_compiling() or not modes.is_jit_traced()
        if checks_shape and (not input.ndim or input.size(-1) != self.in_features):
            raise ValueError(
                f"input has shape {tuple(input.shape)}; expected (..., {self.in_features}), "
                "in_features of this layer"
            )

    # Weight gradients.

    def backward_dw(self) -> None:
        """Makes the gradients of weights and biases that the oldest backward left.

        It adds them to .grad (or main_grad) and runs the hooks. Call it once for each backward; any
        number may be left before a step. Does nothing without delay_wgrad_compute.

        Raises RuntimeError if no backward has left anything, or if a tensor that it reads was
        written to: the gradient of y and the normalised tensor (in 8 bits copies of its own), or,
        where that was not made, the input and the norm's parameters.
        """
        if self.need_backward_dw():
            self._gradients.run_delayed(self.weights()[0])
            for hook in self.wgrad_accumulation_and_reduce_hooks:
                hook()

    def need_backward_dw(self) -> bool:
        """Whether this layer leaves its weight gradients to backward_dw()."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """hook() runs at the end of each backward_dw()."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    # State.

    def mark_parameters(self) -> None:
        """Sets the attributes that Megatron reads."""
        if self.delay_wgrad_compute:  # backward leaves no gradient of these
            for parameter in (*self.weights(), *self.biases()):
                parameter.skip_backward_post_hook = True

    def _apply(self, function: Callable, recurse: bool = True) -> LinearLayer:
        super()._apply(function, recurse)
        parameters.join_parts(self)
        return self

    def __getstate__(self) -> dict:
        """Without what belongs to a step of this layer alone."""
        return super().__getstate__() | {"_gradients": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        parameters.join_parts(self)


class Linear(LinearLayer, torch.nn.Linear):
    """torch.nn.Linear, which multiplies in 8-bit floats inside of cupynorm.fp8_autocast.

    It has the same arguments in the same order, the same parameters and the same state dict.
    Outside of fp8_autocast it computes what torch.nn.Linear computes.

    Examples:
        >>> norm, layer = cupynorm.RMSNorm(64), cupynorm.Linear(64, 192)
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.recipes.CurrentScaling()):
        ...     layer(norm(torch.randn(8, 64), fp8_output=True)).shape
        torch.Size([8, 192])

    in_features, out_features, bias, device, dtype: as torch's.

    By keyword only:
    fuse_wgrad_accumulation, delay_wgrad_compute: as for cupynorm.LayerNormLinear.
    fp8_state: True puts `_extra_state` into the state dict from the start, empty without scales.

    Called with input (..., in_features) of the parameters' dtype, or of any under torch.autocast,
    it returns (..., out_features). is_first_microbatch, fp8_output and fp8_grad are those of
    cupynorm.LayerNormLinear; fp8_grad rounds the gradient of the input.

    input may also be a cupynorm.types.QuantizedTensor, such as the y of cupynorm.LayerNorm with
    fp8_output=True. Its 8-bit numbers are multiplied as they are if they have the recipe's format
    and one scale, or the recipe's blocks. Otherwise they are dequantised, and quantised again.

    For backward the layer keeps a transposed 8-bit copy of the input, and not the input. With
    DelayedScaling the state dict also has scales, as bytes without pickle, under the name
    _extra_state (torch.nn loads such a state dict with strict=False). One without it is loaded.

    Raises ValueError or TypeError for invalid arguments.
    """

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
        check_flags(
            bias=bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            fp8_state=fp8_state,
        )
        modes.check_placement(device, dtype)
        in_features = check_int("in_features", in_features)
        out_features = check_int("out_features", out_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.fp8_state = fp8_state
        self.begin_state()
        self.mark_parameters()

    @property
    def use_bias(self) -> bool:
        return self.bias is not None

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
        operands = Operands(input, None, None, None, self.weights(), self.biases())
        is_plain = fp8_output is fp8_grad is False and is_first_microbatch is None
        if is_plain and region is None and not self._gradients.has_sink(self):
            try:
                return functional.linear(input, self.weight, self.bias)
            except RuntimeError:
                check_call(operands, self.linear_options(input.dtype))
                raise
        y, _ = self._call(
            operands,
            region,
            is_first_microbatch,
            fp8_output=fp8_output,
            fp8_grad=fp8_grad,
            quantized=quantized,
        )
        return y

    def _project(
        self, operands: Operands, sink: WeightGradientSink | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if sink is None:
            return functional.linear(operands.input, operands.weights[0], self.bias), None
        return super()._project(operands, sink)


def _unpacked(
    input: QuantizedTensor, region: scales.Region | None
) -> tuple[QuantizedTensor | None, Tensor]:
    """An input as a matrix in 8 bits, or None where it must be quantised again; and as a tensor.

    The tensor has no values where the matrix is used.
    """
    if region is None or not fits(input, region.recipe):
        return None, input.dequantize()
    return as_matrix(input), input.without_values()
