"""torch: what a linear layer computes inside cupynorm.fp8_autocast: products of 8-bit floats.

    y            quantised normalized    x  quantised weight
    dnormalized  quantised dy            x  quantised weight, transposed
    dweight      quantised dy, transposed  x  quantised normalized, transposed

The normalised tensor is quantised from float32, without a rounding to 16 bits. As elsewhere x, mean
and rstd are saved for backward, which recomputes and quantises it by the same scale.
save_normalized keeps its transposed 8-bit copy, 1 byte an element. So does a layer without a norm,
which does not keep its input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu import arrays
from ..nn import modes, private, quantization
from ..nn.autocast import Region
from ..nn.modes import name_of
from ..nn.products import Factor, multiply
from ..nn.recipes import BlockScaling, DelayedScaling
from ..norm.quantized import QuantizedTensor
from . import kernels
from .call import LinearOptions, Operands
from .kernels import SavedNorm
from .matrices import as_result, as_rows, join, split_like, without_memory
from .quantizers import Quantizers, transposed_factor
from .weight_gradients import WeightGradientSink, WeightProduct, asked_for

_PRODUCT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RegionCall(NamedTuple):
    """A layer's call in a region.

    recorded: whether this call has a backward. input: as in QuantizedCall.
    """

    region: Region
    options: LinearOptions
    quantize_gradient: bool
    is_first_microbatch: bool | None
    recorded: bool
    input: QuantizedTensor | None = None


class QuantizedCall(NamedTuple):
    """What a call depends on besides its tensors.

    quantize_gradient: whether the gradient of the normalised tensor is rounded to 8 bits too.
    input: of a layer without a norm, where it was given in 8 bits.
    """

    options: LinearOptions
    quantizers: Quantizers
    quantize_gradient: bool
    input: QuantizedTensor | None = None


class Saved(NamedTuple):
    """What a forward saves besides operands.

    scale: of the normalised tensor, where backward recomputes it.
    kept: otherwise its transposed 8-bit copy. weight: transposed, in 8 bits.
    """

    mean: Tensor | None
    rstd: Tensor
    scale: Tensor | None
    kept: Tensor | None
    kept_scale_inv: Tensor | None
    weight: Tensor
    weight_scale_inv: Tensor


# Forward.


def forward(
    call: QuantizedCall, weight: QuantizedTensor, operands: Operands, *, recorded: bool
) -> tuple[Tensor, Tensor | None, Saved]:
    """y, normalized (None unless requested), and what is saved if there is a backward (recorded).

    weight: the layer's, quantised. operands: the biases are used, the weights are not.
    """
    options, quantizers = call.options, call.quantizers
    rows, normalized, mean, rstd = _normalize(call, operands, recorded=recorded)
    bias = join(operands.biases)
    bias = None if bias is None else bias.to(options.dtype)
    # The scales of an input that was given in 8 bits may be no powers of two.
    is_exact = call.input is None and quantizers.is_exact
    y = multiply(rows, weight, options.dtype, bias=bias, fast=True, is_exact=is_exact)
    y = y.reshape(*operands.input.shape[:-1], y.shape[-1])
    scale, kept, kept_scale_inv = None, None, None
    if options.save_normalized:
        kept, kept_scale_inv, *_ = transposed_factor(rows)
    elif recorded:
        scale = quantizers.scale_to_keep(rows)
    transposed, scale_inv, *_ = transposed_factor(weight)
    saved = Saved(mean, rstd, scale, kept, kept_scale_inv, transposed, scale_inv)
    return y, normalized.to(options.dtype) if options.return_normalized else None, saved


class _Normalized(NamedTuple):
    """rows: the normalised tensor in 8 bits, as a matrix. values: in float32, or None."""

    rows: QuantizedTensor
    values: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def _normalize(call: QuantizedCall, operands: Operands, *, recorded: bool) -> _Normalized:
    """One kernel makes it where there is one scale and no other dtype is requested."""
    options, quantizers, input = call.options, call.quantizers, operands.input
    if not options.has_norm:
        if call.input is None:
            rows = quantizers.quantize("input", as_rows(input), transpose=recorded)
        else:
            rows = quantizers.with_transposed(call.input) if recorded else call.input
        return _Normalized(rows, None, None, None)
    in_blocks = isinstance(quantizers.recipe, BlockScaling)
    transpose = options.save_normalized
    if arrays.on_host(input) or in_blocks or options.return_normalized:
        values, mean, rstd, _ = kernels.forward(options, operands, torch.float32)
        rows = quantizers.quantize("input", as_rows(values), transpose=transpose)
        return _Normalized(rows, values, mean, rstd)
    quantization, scale, amax = quantizers.of_normalized(transpose=transpose)
    rows, mean, rstd = kernels.forward_quantized(options, operands, quantization, scale, amax)
    return _Normalized(rows, None, mean, rstd)


# Backward.


def backward(
    call: QuantizedCall,
    saved: Saved,
    operands: Operands,
    incoming: tuple[Tensor | None, Tensor | None],
    wanted: Sequence[bool],
    sink: WeightGradientSink | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of input, norm_weight, norm_bias, *weights, *biases.

    incoming: the gradients of y and of the normalised tensor. wanted: which gradients to compute;
    the others are None. sink: takes the gradients of weights and biases instead.
    """
    quantizers, (dy, dnormalized) = call.quantizers, incoming
    weights, biases = operands.weights, operands.biases
    wants_norm, wants_parts = wanted[:3], wanted[3:]
    wants_weights, wants_biases = wants_parts[: len(weights)], wants_parts[len(weights) :]
    rows = None if dy is None else as_rows(dy)
    sums_rows = bool(biases) and sink is None and any(wants_biases)
    # Each tensor is freed before the next one is made, so that few exist at a time.
    data = transposed = dbias = None
    if rows is not None:
        (data, transposed), dbias = quantizers.quantize_gradient(
            rows, biases[0].dtype if sums_rows else None
        )
    if rows is not None and any(wants_norm):
        dnormalized = _dnormalized(call, saved, data, operands.input, dnormalized)
    data, norm_gradients = None, (None, None, None)
    norm = SavedNorm(
        operands.input, saved.mean, saved.rstd, operands.norm_weight, operands.norm_bias
    )
    if dnormalized is not None and any(wants_norm):
        norm_gradients = kernels.backward(
            call.options,
            dnormalized,
            norm,
            None,
            wanted=wants_norm,
            overwrite_dy=rows is not None,
        )[:3]
    dnormalized = None

    dweights, dbiases = [None] * len(weights), [None] * len(biases)
    if sink is not None and rows is None:
        sink.take_nothing()
    elif rows is not None:
        is_delayed = sink is not None and sink.delays and any(wants_weights)
        make_dweight = _dweight_maker(call, saved, norm, transposed, is_delayed=is_delayed)
        if sink is not None:
            product = WeightProduct(rows, make_dweight=make_dweight)
            dweights, dbiases = sink.take(product, wants_parts)
        elif any(wants_weights):
            dweights = split_like(make_dweight(weights[0].dtype), weights)
        if sums_rows:
            dbiases = split_like(dbias, biases)
    gradients = (*norm_gradients, *dweights, *dbiases)
    return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted))


def _dnormalized(
    call: QuantizedCall, saved: Saved, dy: Factor, input: Tensor, dnormalized: Tensor | None
) -> Tensor:
    """The gradient of the normalised tensor: dy weight, and what comes from elsewhere."""
    dtype, quantizers = call.options.dtype, call.quantizers
    weight = quantizers.transposed_weight(saved.weight, saved.weight_scale_inv)
    total = multiply(dy, weight, dtype, is_exact=quantizers.is_exact)
    if call.quantize_gradient:
        total = quantizers.quantize("grad_input", total).dequantize(dtype)
    total = total.reshape(input.shape)
    return total if dnormalized is None else total + dnormalized


def _dweight_maker(
    call: QuantizedCall,
    saved: Saved,
    norm: SavedNorm,
    transposed_dy: Factor,
    *,
    is_delayed: bool,
) -> Callable[[torch.dtype], Tensor]:
    """Makes dweight, [out_features, in_features], rounded once to a dtype.

    It is float32 where products do not come in that dtype. transposed_dy: dy, quantised along its
    columns. is_delayed: quantise the normalised tensor now, because norm.x may change before.
    """
    kept, is_exact = None, call.quantizers.is_exact
    if saved.kept is not None:
        kept = saved.kept, saved.kept_scale_inv
    elif is_delayed:
        kept = _quantize_again(call, saved.scale, norm)
    make_again = None if kept else partial(_quantize_again, call, saved.scale, norm)

    def make(dtype: torch.dtype) -> Tensor:
        data, scale_inv = kept or make_again()
        normalized = transposed_dy._replace(data=data, scale_inv=scale_inv)
        dtype = dtype if dtype in _PRODUCT_DTYPES else torch.float32
        return multiply(transposed_dy, normalized, dtype, is_exact=is_exact)

    return make


def _quantize_again(
    call: QuantizedCall, scale: Tensor | None, norm: SavedNorm
) -> tuple[Tensor, Tensor]:
    """The transposed 8-bit copy of the normalised tensor and its scale_inv."""
    dtype = call.quantizers.dtype("input")
    if scale is not None and not arrays.on_host(norm.x):
        quantized = kernels.quantize_again(call.options, norm, name_of(dtype), scale)
        return quantized.transposed, quantized.scale_inv
    rows = as_rows(kernels.forward(call.options, norm.operands, torch.float32)[0])
    if scale is None:
        quantized = call.quantizers.quantize("input", rows, transpose=True)
    else:
        quantized = quantization.quantize(rows, scale, dtype, transpose=True)
    return transposed_factor(quantized)[:2]


def call_of_backward(ctx: Any, call: QuantizedCall) -> QuantizedCall:
    """The call of a node's backward, which may run for some gradients now and for others later.

    Where a step has ended in between, the second one has the scale of the first, and records no
    amax again. ctx: of the node, with first_backward, which is None at the beginning.
    """
    quantizers = call.quantizers
    if not isinstance(quantizers.recipe, DelayedScaling):
        return call
    state = quantizers.states["backward"]
    if ctx.first_backward is None:
        if private.keeps_graph():  # this backward may run again
            ctx.first_backward = state.num_steps, state.scale.clone()
        return call
    num_steps, scale = ctx.first_backward
    if num_steps == state.num_steps:
        return call
    quantizers = copy.copy(quantizers)
    quantizers.backward_scale = scale
    return call._replace(quantizers=quantizers)


class Projected(torch.autograd.Function):
    """y, normalized (None unless requested). tensors: all_of(operands)."""

    @staticmethod
    def forward(ctx, call, weight, sink, num_weights, *tensors):
        operands = Operands.split(tensors, num_weights)
        y, normalized, saved = forward(call, weight, operands, recorded=True)
        if not call.options.has_norm:  # its transposed 8-bit copy is saved instead
            tensors = (without_memory(operands.input), *tensors[1:])
        ctx.save_for_backward(*saved, *tensors)
        ctx.call, ctx.sink, ctx.num_weights = call, sink, num_weights
        ctx.first_backward = None
        ctx.set_materialize_grads(False)
        return as_result(y), as_result(normalized)

    @staticmethod
    def backward(ctx, dy, dnormalized):
        # Compiled autograd would trace it.
        return modes.run_untraced(_gradients)(ctx, dy, dnormalized)


def _gradients(ctx: Any, dy: Tensor | None, dnormalized: Tensor | None) -> tuple:
    """What Projected.backward returns."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph is True for a layer inside fp8_autocast; expected create_graph=False"
        )
    if any(each is not None and modes.is_mapped(each) for each in (dy, dnormalized)):
        raise NotImplementedError(
            "a batch of gradients was given to a layer inside fp8_autocast; expected one gradient "
            "at a time"
        )
    num_saved = len(Saved._fields)
    tensors = ctx.saved_tensors
    saved = Saved(*tensors[:num_saved])
    operands = Operands.split(tensors[num_saved:], ctx.num_weights)
    wants_input, _, *wants_others = ctx.needs_input_grad[4:]
    wanted, sink = asked_for(ctx, (wants_input, *wants_others), ctx.sink)
    call = call_of_backward(ctx, ctx.call)
    dx, *others = backward(call, saved, operands, (dy, dnormalized), wanted, sink)
    return None, None, None, None, dx, None, *others
