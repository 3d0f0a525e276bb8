"""torch: what LayerNormLinear does inside cupynorm.fp8_autocast. Its three products are of 8-bit floats:

    y            quantised normalized   x  quantised weight
    d normalized quantised dy           x  quantised weight, transposed
    dweight      quantised dy, transposed  x  quantised normalized, transposed

The normalised tensor is quantised from float32, never rounded to 16 bits before. As elsewhere x, mean and rstd wait for
backward, where it is made and quantised again, by the same scale; save_normalized keeps its transposed 8-bit copy, 1 byte an
element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arrays, fp8, fused, norm, quantized
from .calls import NOTHING_FUSED, Options, Quantization
from .fp8 import BlockScaling, CurrentScaling, DelayedScaling, QuantizedTensor, Scales

PRODUCTS = (torch.bfloat16, torch.float16, torch.float32)
# Tensors that have a scale, in the order of TransformerEngine's.
FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")


class Scale(NamedTuple):
    """Of one tensor in one step, float32 of one element each. value: of DelayedScaling what the layer keeps, and changes at the
    end of the step. amax: where the tensor's amax is still to be recorded, by a kernel; or None."""

    value: Tensor
    amax: Tensor | None = None


class Quantizers:
    """How one layer quantises in a region. states: "forward" and "backward", kept by the layer, for DelayedScaling."""

    def __init__(self, recipe: fp8.Recipe, states: dict[str, Scales], is_recorded: bool) -> None:
        self.recipe, self.states, self.is_recorded = recipe, states, is_recorded

    def dtype(self, name: str) -> torch.dtype:
        return self.recipe.fp8_format.value[name in BACKWARD]

    def delayed_scale(self, name: str) -> Scale | None:
        """That of DelayedScaling, which needs no look at the tensor."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        names = BACKWARD if name in BACKWARD else FORWARD
        state, at = self.states["backward" if name in BACKWARD else "forward"], names.index(name)
        return Scale(state.scale[at : at + 1], state.amax(at) if self.is_recorded else None)

    def scale(self, name: str, x: Tensor) -> Scale | None:
        """The scale of this step, a tensor of its own; None for blocks."""
        if isinstance(self.recipe, CurrentScaling):
            amax = fp8.amax_of(x).reshape(1)
            return Scale(fp8.scale_of(
                amax, self.dtype(name), power_of_two=self.recipe.power_of_two, smallest_amax=self.recipe.amax_epsilon
            ))  # fmt: skip
        if name == "output" and isinstance(self.recipe, DelayedScaling):
            # It is asked for where nothing is recorded: no step has left an amax of it.
            return Scale(fp8.scale_of(fp8.amax_of(x).reshape(1), self.dtype(name)))
        return self.delayed_scale(name)

    @property
    def is_exact(self) -> bool:
        """Whether bfloat16 holds the values of blocks: their scales are powers of two."""
        return not isinstance(self.recipe, BlockScaling) or self.recipe.power_of_two

    def quantize(self, name: str, x: Tensor, scale: Scale | None, *, transpose: bool = False) -> QuantizedTensor:
        """A matrix. scale: what `scale` gave, whose amax is recorded."""
        if scale is None:
            block_rows = fp8.BLOCK_SIZE if name == "weight" else 1
            return fp8.quantize_blocks(
                x, self.dtype(name), block_rows=block_rows, power_of_two=self.recipe.power_of_two, transpose=transpose
            )
        return fp8.quantize(x, scale.value, self.dtype(name), amax=scale.amax, transpose=transpose)

    def quantize_gradient(self, dy: Tensor, sum_dtype: torch.dtype | None) -> tuple[QuantizedTensor, Tensor | None]:
        """dy and its transposed copy; and its sums over rows in sum_dtype, where it is given and one reading makes both."""
        scale = self.scale("grad_output", dy)
        if scale is None or sum_dtype is None:
            return self.quantize("grad_output", dy, scale, transpose=True), None
        return fp8.quantize_and_sum(dy, scale.value, self.dtype("grad_output"), sum_dtype, amax=scale.amax)


def states_of(kept: dict[str, Scales], recipe: fp8.Recipe, device: torch.device) -> dict[str, Scales]:
    """A layer's states for a recipe, on a device: made where there are none, as long as the recipe says."""
    if not isinstance(recipe, DelayedScaling):
        return kept
    for name, tensors, dtype in zip(("forward", "backward"), (FORWARD, BACKWARD), recipe.fp8_format.value):
        kept[name] = fp8.scales_for(kept.get(name), (dtype,) * len(tensors), recipe, device)
    return kept


def states_from(loaded: dict[str, tuple[Tensor, Tensor]], kept: dict[str, Scales]) -> dict[str, Scales]:
    """The states of cupynorm.fp8.unpack, in place of those that a layer has kept. ValueError if they are not those of a linear
    layer."""
    for name, (scale, _) in loaded.items():
        tensors = {"forward": FORWARD, "backward": BACKWARD}.get(name)
        if tensors is None or len(scale) != len(tensors):
            raise ValueError(
                f"the fp8 state has {name} of {len(scale)} tensors; expected forward of {len(FORWARD)} and "
                f"backward of {len(BACKWARD)}"
            )
    states = {}
    for name, (scale, amax_history) in loaded.items():
        states[name] = kept.get(name) or Scales((fp8.E4M3,) * len(scale), len(amax_history), scale.device)
        states[name].load(scale, amax_history)
    return states


class Call(NamedTuple):
    """What a call depends on besides its tensors. normalize, of_norm: the norm in float32 and its gradients,
    of cupynorm.linear."""

    normalize: Callable[..., tuple]
    of_norm: Callable[..., Sequence[Tensor | None]]
    centered: bool
    eps: float | None
    zero_centered_weight: bool
    options: Options
    dtype: torch.dtype
    return_normalized: bool
    save_normalized: bool
    quantizers: Quantizers
    quantize_gradient: bool
    group: Any


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor [..., num_cols] as [num_rows, num_cols], even where one of them is 0."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


class Normalized(NamedTuple):
    """The normalised tensor. rows: in 8 bits, as a matrix. values: in float32, None where nobody asked for them.
    scale: its value."""

    rows: QuantizedTensor
    values: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    scale: Tensor | None


def normalize(call: Call, input: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> Normalized:
    """By one kernel where one scale is for all: it writes 8 bits."""
    quantizers = call.quantizers
    if arrays.on_host(input) or isinstance(quantizers.recipe, BlockScaling) or call.return_normalized:
        values, mean, rstd, _ = call.normalize(input, norm_weight, norm_bias)
        rows = as_rows(values)
        scale = quantizers.scale("input", rows)
        made = quantizers.quantize("input", rows, scale, transpose=call.save_normalized)
        return Normalized(made, values, mean, rstd, scale and scale.value)
    how = Quantization(_name(quantizers.dtype("input")), transpose=call.save_normalized)
    scale = quantizers.delayed_scale("input")
    if scale is None:
        recipe = quantizers.recipe
        how = how._replace(scaling="tensor", power_of_two=recipe.power_of_two, smallest_amax=recipe.amax_epsilon)
    else:
        how = how._replace(scale=scale.value, amax=scale.amax)
    prepared, given = fused.prepare_forward(
        call.centered, as_rows(input), tuple(input.shape[-1:]), norm_weight, norm_bias, call.eps, None,
        call.zero_centered_weight, None, None, call.options, NOTHING_FUSED._replace(quantization=how), norm.FOR_STATISTICS,
    )  # fmt: skip
    made, mean, rstd, *_ = prepared.run(*given)
    leading = input.shape[:-1]
    mean, rstd = None if mean is None else mean.reshape(leading), rstd.reshape(leading)
    return Normalized(made, None, mean, rstd, 1.0 / made.scale_inv if scale is None else scale.value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def normalize_again(
    call: Call, input: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    scale: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The transposed 8-bit copy of the normalised tensor and its scale_inv, by the same scale."""
    quantizers = call.quantizers
    if scale is None or arrays.on_host(input):
        rows = as_rows(call.normalize(input, norm_weight, norm_bias)[0])
        made = quantizers.quantize("input", rows, scale and Scale(scale), transpose=True)
        return made.transposed, _scale_inv_of_transposed(made)
    of_norm = quantized.OfNorm(call.centered, norm_weight, norm_bias, call.zero_centered_weight, mean, rstd)
    name = _name(quantizers.dtype("input"))
    made = quantized.quantize(as_rows(input), name, scale, wants_data=False, transpose=True, of_norm=of_norm)
    return made.transposed, made.scale_inv


def project(call: Call, rows: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """y as a matrix, of the quantised normalised tensor."""
    return fp8.multiply(
        rows.data, rows.scale_inv, weight.data, weight.scale_inv, call.dtype, bias=bias, a_block_rows=rows.block_rows,
        b_block_rows=weight.block_rows, fast=True, is_exact=call.quantizers.is_exact,
    )  # fmt: skip


class Projected(torch.autograd.Function):
    """y, normalized (None unless asked for); weights and biases are parts of one linear layer."""

    @staticmethod
    def forward(ctx, call, weight, take, num_parts, input, norm_weight, norm_bias, *parts):
        biases = parts[num_parts:]
        rows, normalized, mean, rstd, scale = normalize(call, input, norm_weight, norm_bias)
        bias = torch.cat([each.detach() for each in biases]).to(call.dtype) if biases else None
        y = project(call, rows, weight, bias)
        kept = (rows.transposed, _scale_inv_of_transposed(rows)) if call.save_normalized else (None, None)
        if call.save_normalized:
            scale = None
        elif scale is not None and isinstance(call.quantizers.recipe, DelayedScaling):
            scale = scale.clone()  # the step's end comes before backward
        ctx.save_for_backward(
            input, mean, rstd, norm_weight, norm_bias, scale, *kept, weight.transposed, _scale_inv_of_transposed(weight), *parts
        )
        ctx.call, ctx.take, ctx.num_parts, ctx.weight_block_rows = call, take, num_parts, weight.block_rows
        ctx.set_materialize_grads(False)
        y = y.reshape(*input.shape[:-1], y.shape[-1])
        return y, normalized.to(call.dtype) if call.return_normalized else None

    @staticmethod
    def backward(ctx, dy, dnormalized):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a differentiable gradient was asked for of a layer inside fp8_autocast; expected create_graph=False"
            )
        call, quantizers = ctx.call, ctx.call.quantizers
        input, mean, rstd, norm_weight, norm_bias, scale, kept, kept_scale_inv, weight, weight_scale_inv, *parts = (
            ctx.saved_tensors
        )
        weights, biases = parts[: ctx.num_parts], parts[ctx.num_parts :]
        _, _, _, _, wants_input, wants_norm_weight, wants_norm_bias, *wants_parts = ctx.needs_input_grad
        wants_norm = (wants_input, wants_norm_weight, wants_norm_bias)
        rows = None if dy is None else as_rows(dy)
        sums_up = biases and ctx.take is None and any(wants_parts[len(weights) :])
        gradient_rows = dbias = None
        if rows is not None:
            gradient_rows, dbias = quantizers.quantize_gradient(rows, biases[0].dtype if sums_up else None)
        reaches = dnormalized
        if rows is not None and any(wants_norm):
            reaches = fp8.multiply(
                gradient_rows.data, gradient_rows.scale_inv, weight, weight_scale_inv, call.dtype,
                a_block_rows=gradient_rows.block_rows, b_block_rows=ctx.weight_block_rows, is_exact=quantizers.is_exact,
            )  # fmt: skip
            if call.quantize_gradient:
                reaches = quantizers.quantize("grad_input", reaches, quantizers.scale("grad_input", reaches)).dequantize(
                    call.dtype
                )
            reaches = reaches.reshape(input.shape)
            if dnormalized is not None:
                reaches = reaches + dnormalized
        of_norm = [None] * 3
        if reaches is not None and any(wants_norm):
            of_norm = call.of_norm(reaches, input, mean, rstd, norm_weight, norm_bias, wants_norm)

        def make_dweight(dtype: torch.dtype) -> Tensor:
            """[out_features, in_features], rounded once to a dtype that products come in; else in float32."""
            transposed, of_transposed = kept, kept_scale_inv
            if transposed is None:
                transposed, of_transposed = normalize_again(call, input, norm_weight, norm_bias, mean, rstd, scale)
            return fp8.multiply(
                gradient_rows.transposed, _scale_inv_of_transposed(gradient_rows), transposed, of_transposed,
                dtype if dtype in PRODUCTS else torch.float32, a_block_rows=gradient_rows.block_rows,
                b_block_rows=gradient_rows.block_rows, is_exact=quantizers.is_exact,
            )  # fmt: skip

        dweights, dbiases = [None] * len(weights), [None] * len(biases)
        if rows is not None and ctx.take is not None:
            dweights, dbiases = ctx.take(rows, None, wants_parts, make_dweight)
        elif rows is not None:
            if any(wants_parts[: len(weights)]):
                split = make_dweight(weights[0].dtype).split([len(each) for each in weights])
                dweights = [part.to(each.dtype) for part, each in zip(split, weights)]
            if sums_up:
                dbias = rows.sum(0, dtype=biases[0].dtype) if dbias is None else dbias
                dbiases = dbias.split([len(each) for each in biases])
        if isinstance(quantizers.recipe, DelayedScaling):
            quantizers.states["backward"].update(quantizers.recipe, call.group)
        made = (*of_norm, *dweights, *dbiases)
        wanted = (*wants_norm, *wants_parts)
        return None, None, None, None, *(gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted))


def _scale_inv_of_transposed(quantized: QuantizedTensor) -> Tensor:
    return quantized.scale_inv if quantized.transposed_scale_inv is None else quantized.transposed_scale_inv
