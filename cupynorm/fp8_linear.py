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

from . import fp8
from .fp8 import BlockScaling, CurrentScaling, DelayedScaling, QuantizedTensor, Scales

PRODUCTS = (torch.bfloat16, torch.float16, torch.float32)
# Tensors that have a scale, in the order of TransformerEngine's.
FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")


class Quantizers:
    """How one layer quantises in a region. states: "forward" and "backward", kept by the layer, for DelayedScaling."""

    def __init__(self, recipe: fp8.Recipe, states: dict[str, Scales], is_recorded: bool) -> None:
        self.recipe, self.states, self.is_recorded = recipe, states, is_recorded

    def dtype(self, name: str) -> torch.dtype:
        return self.recipe.fp8_format.value[name in BACKWARD]

    def scale(self, name: str, x: Tensor) -> Tensor | None:
        """The scale of this step, a tensor of its own; None for blocks. Delayed: x's amax is recorded."""
        if isinstance(self.recipe, BlockScaling):
            return None
        if isinstance(self.recipe, CurrentScaling):
            return fp8.scale_of(
                fp8.amax_of(x), self.dtype(name), power_of_two=self.recipe.power_of_two, smallest_amax=self.recipe.amax_epsilon
            )
        names = BACKWARD if name in BACKWARD else FORWARD
        state, at = self.states["backward" if name in BACKWARD else "forward"], names.index(name)
        if self.is_recorded:
            state.record(at, x)
        return state.scale[at].clone()

    def quantize(self, name: str, x: Tensor, scale: Tensor | None, *, transpose: bool = False) -> QuantizedTensor:
        """A matrix. scale: what `scale` gave."""
        if scale is None:
            block_rows = fp8.BLOCK_SIZE if name == "weight" else 1
            return fp8.quantize_blocks(
                x, self.dtype(name), block_rows=block_rows, power_of_two=self.recipe.power_of_two, transpose=transpose
            )
        return fp8.quantize(x, scale, self.dtype(name), transpose=transpose)


def states_of(kept: dict[str, Scales], recipe: fp8.Recipe, device: torch.device) -> dict[str, Scales]:
    """A layer's states for a recipe, on a device: made where there are none, as long as the recipe says."""
    if not isinstance(recipe, DelayedScaling):
        return kept
    for name, tensors, dtype in zip(("forward", "backward"), (FORWARD, BACKWARD), recipe.fp8_format.value):
        if name not in kept:
            kept[name] = Scales((dtype,) * len(tensors), recipe.amax_history_len, device)
        state = kept[name].to(device)
        if len(state.amax_history) != recipe.amax_history_len:
            state.resize(recipe.amax_history_len)
        state.largest.fill_(fp8.LARGEST[dtype])
    return kept


def states_from(loaded: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Scales]:
    """The states of cupynorm.fp8.unpack. ValueError if they are not those of a linear layer."""
    states = {}
    for name, (scale, amax_history) in loaded.items():
        tensors = {"forward": FORWARD, "backward": BACKWARD}.get(name)
        if tensors is None or len(scale) != len(tensors):
            raise ValueError(
                f"the fp8 state has {name} of {len(scale)} tensors; expected forward of {len(FORWARD)} and backward of "
                f"{len(BACKWARD)}"
            )
        states[name] = state = Scales((fp8.E4M3,) * len(tensors), len(amax_history), scale.device)
        state.scale, state.amax_history = scale, amax_history
    return states


class Call(NamedTuple):
    """What a call depends on besides its tensors. normalize, of_norm: the norm and its gradients, of cupynorm.linear."""

    normalize: Callable[..., tuple]
    of_norm: Callable[..., Sequence[Tensor | None]]
    dtype: torch.dtype
    return_normalized: bool
    save_normalized: bool
    quantizers: Quantizers
    quantize_gradient: bool
    group: Any


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor [..., num_cols] as [num_rows, num_cols], even where one of them is 0."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def project(
    call: Call, normalized: Tensor, weight: QuantizedTensor, bias: Tensor | None
) -> tuple[Tensor, QuantizedTensor, Any]:
    """y as a matrix, the quantised normalised tensor and its scale. normalized: float32."""
    rows = as_rows(normalized)
    scale = call.quantizers.scale("input", rows)
    quantized = call.quantizers.quantize("input", rows, scale, transpose=call.save_normalized)
    y = fp8.multiply(
        quantized.data, quantized.scale_inv, weight.data, weight.scale_inv, call.dtype, bias=bias,
        a_block_rows=quantized.block_rows, b_block_rows=weight.block_rows, fast=True,
    )  # fmt: skip
    return y, quantized, scale


class Projected(torch.autograd.Function):
    """y, normalized (None unless asked for); weights and biases are parts of one linear layer."""

    @staticmethod
    def forward(ctx, call, weight, take, num_parts, input, norm_weight, norm_bias, *parts):
        biases = parts[num_parts:]
        normalized, mean, rstd, _ = call.normalize(input, norm_weight, norm_bias)
        bias = torch.cat([each.detach() for each in biases]).to(call.dtype) if biases else None
        y, quantized, scale = project(call, normalized, weight, bias)
        kept = (quantized.transposed, quantized.transposed_scale_inv) if call.save_normalized else (None, None)
        scale_inv = weight.scale_inv if weight.transposed_scale_inv is None else weight.transposed_scale_inv
        ctx.save_for_backward(
            input, mean, rstd, norm_weight, norm_bias, scale, quantized.scale_inv, *kept, weight.transposed, scale_inv, *parts
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
        (
            input,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            scale,
            scale_inv,
            kept,
            kept_scale_inv,
            weight,
            weight_scale_inv,
            *parts,
        ) = ctx.saved_tensors
        weights, biases = parts[: ctx.num_parts], parts[ctx.num_parts :]
        _, _, _, _, wants_input, wants_norm_weight, wants_norm_bias, *wants_parts = ctx.needs_input_grad
        wants_norm = (wants_input, wants_norm_weight, wants_norm_bias)
        rows = None if dy is None else as_rows(dy)
        quantized = None
        if rows is not None:
            quantized = quantizers.quantize("grad_output", rows, quantizers.scale("grad_output", rows), transpose=True)
        reaches = dnormalized
        if rows is not None and any(wants_norm):
            reaches = fp8.multiply(
                quantized.data, quantized.scale_inv, weight, weight_scale_inv, call.dtype, a_block_rows=quantized.block_rows,
                b_block_rows=ctx.weight_block_rows,
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
            transposed, of_transposed = kept, scale_inv if kept_scale_inv is None else kept_scale_inv
            if transposed is None:
                normalized = as_rows(call.normalize(input, norm_weight, norm_bias)[0])
                made = quantizers.quantize("input", normalized, scale, transpose=True)
                transposed, of_transposed = made.transposed, _scale_inv_of_transposed(made)
            return fp8.multiply(
                quantized.transposed, _scale_inv_of_transposed(quantized), transposed, of_transposed,
                dtype if dtype in PRODUCTS else torch.float32, a_block_rows=quantized.block_rows,
                b_block_rows=quantized.block_rows,
            )  # fmt: skip

        dweights, dbiases = [None] * len(weights), [None] * len(biases)
        if rows is not None and ctx.take is not None:
            dweights, dbiases = ctx.take(rows, None, wants_parts, make_dweight)
        elif rows is not None:
            if any(wants_parts[: len(weights)]):
                split = make_dweight(weights[0].dtype).split([len(each) for each in weights])
                dweights = [part.to(each.dtype) for part, each in zip(split, weights)]
            if biases and any(wants_parts[len(weights) :]):
                dbiases = rows.sum(0, dtype=biases[0].dtype).split([len(each) for each in biases])
        if isinstance(quantizers.recipe, DelayedScaling):
            quantizers.states["backward"].update(quantizers.recipe, call.group)
        made = (*of_norm, *dweights, *dbiases)
        wanted = (*wants_norm, *wants_parts)
        return None, None, None, None, *(gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted))


def _scale_inv_of_transposed(quantized: QuantizedTensor) -> Tensor:
    return quantized.scale_inv if quantized.transposed_scale_inv is None else quantized.transposed_scale_inv
