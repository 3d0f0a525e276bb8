"""torch: layer_norm_linear and rms_norm_linear, a norm and the linear layer after it.

Eager calls of plain tensors are ours: products.py, recorded by `Projected` where a gradient is
wanted. All others, and the gradients of gradients, are a norm by nn/by_torch.py and a product of
torch, so that torch sees both.

Derivation: cupynorm.reference.layer_norm_linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu.arrays import type_in_words
from ..nn import autograd, by_torch, modes
from ..nn.modes import name_of, product_dtype
from ..norm.quantized import QuantizedTensor
from ..options import check_flags
from .operands import (
    LinearOptions,
    Operands,
    as_result,
    check,
    check_fused,
    concatenate,
    fits,
    is_fused,
    launch_of,
    without_memory,
)
from .products import Incoming, Products, Saved, forward_request
from .weight_gradients import WeightGradientSink, asked_for

_is_compiling = modes.is_compiling
_present_tracer = modes.present_tracer


def layer_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    return_normalized: bool = False,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    save_normalized: bool = False,
    fused: str | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Any:
    """linear(layer_norm(input), weight, bias): layer normalisation, then a linear layer.

    Examples:
        >>> x, weight = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0], [2.0, 3.0]])
        >>> cupynorm.layer_norm_linear(x, None, None, weight, eps=0.0)
        tensor([[-1.,  1.]])

    input: shape (..., in_features), float16, bfloat16, float32 or float64; normalised over the last
        dimension. All arguments are torch tensors. For other arrays call cupynorm.layer_norm, and
        multiply by weight.T with @.
    norm_weight, norm_bias: shape (in_features,), each optional, of any of the four dtypes.
    weight: shape (out_features, in_features), as torch.nn.Linear has it.
    bias: shape (out_features,), optional. weight and bias have input's dtype, except under
        torch.autocast, which casts them.
    residual, zero_centered_weight, eps, sm_margin: as for cupynorm.layer_norm.
    return_normalized: also return the normalised tensor.
    return_residual: also return input + residual (the input itself without a residual).
    save_normalized: keep the normalised tensor for the gradient of weight. By default backward
        recomputes it, equal but for the last bits of its mean: in bfloat16 2 bytes an element are
        kept instead of 4.
    fused: None takes one kernel for the norm and the product where it is measured to be faster and
        as exact (cupynorm.dispatch.product_plan.choose), "plain" a norm and a product after it.
        "kernel" names the kernel, in 16 bits on a GPU of compute capability 9.0, within the limits
        of cupynorm.dispatch.product_plan.why_not and why_not_few; other calls take the plain path.

    Returns y of shape (..., out_features), of input's dtype, or (y, normalized, sum) with those
    that were requested. It is differentiable in every tensor, any number of times. Under
    torch.autocast y and normalized have the autocast dtype. On the CPU the norm is computed in
    float64, the products by torch.

    Raises ValueError or TypeError, before anything is launched, for shapes, dtypes, devices or
    options that do not fit.
    """
    operands = _operands("layer_norm", input, residual, norm_weight, norm_bias, weight, bias)
    options = zero_centered_weight, return_normalized, save_normalized, fused, sm_margin
    return _call(True, operands, eps, options, return_residual)


def rms_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    norm_bias: Tensor | None = None,
    residual: Tensor | None = None,
    return_normalized: bool = False,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    save_normalized: bool = False,
    fused: str | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Any:
    """linear(rms_norm(input), weight, bias).

    Examples:
        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])
        >>> cupynorm.rms_norm_linear(x, None, weight).round(decimals=2)
        tensor([[1.9800]])

    eps: as for cupynorm.rms_norm; all other arguments, with their shapes and dtypes, as for
        layer_norm_linear.

    Returns y [..., out_features], or a tuple that begins with it, as layer_norm_linear, and raises
    as it.
    """
    operands = _operands("rms_norm", input, residual, norm_weight, norm_bias, weight, bias)
    options = zero_centered_weight, return_normalized, save_normalized, fused, sm_margin
    return _call(False, operands, eps, options, return_residual)


def _operands(norm: str, input: Any, *others: Tensor | None) -> Operands:
    """norm: the function's name. others: residual, norm_weight, norm_bias, weight, bias."""
    if not isinstance(input, Tensor):
        raise TypeError(
            f"input is {type_in_words(input)}; expected a torch tensor. For other arrays call "
            f"{norm}, and multiply by weight.T with @"
        )
    *others, weight, bias = others
    return Operands(input, *others, (weight,), () if bias is None else (bias,))


def _call(centered: bool, operands: Operands, eps: Any, given: tuple, return_residual: bool) -> Any:
    zero_centered_weight, return_normalized, save_normalized, fused, sm_margin = given
    check_flags(
        zero_centered_weight=zero_centered_weight,
        return_normalized=return_normalized,
        save_normalized=save_normalized,
        return_residual=return_residual,
    )
    options = LinearOptions(
        centered,
        eps,
        bool(zero_centered_weight),
        return_normalized,
        save_normalized and not is_fused(fused),
        fused,
        launch_of(sm_margin),
        product_dtype(operands.input),
    )
    y, normalized, added = normalize_and_project(Products(options), operands)
    if not return_normalized and not return_residual:
        return y
    results = (normalized,) if return_normalized else ()
    return y, *results, *((added,) if return_residual else ())


# Differentiable.


def normalize_and_project(
    products: Products,
    operands: Operands,
    sink: WeightGradientSink | None = None,
    weight: QuantizedTensor | None = None,
    given: QuantizedTensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, normalized (None unless requested), input + residual.

    sink: takes the gradients of weights and biases, which autograd then does not get.
    weight, given: in 8 bits, as for products.forward.
    """
    if not _is_compiling() and _present_tracer():  # it would trace what reads memory
        run = torch.compiler.disable(normalize_and_project)
        return run(products, operands, sink, weight, given)
    options, sharding = products.options, products.sharding
    check_call(operands, options)
    if not products.is_alone:
        sharding.check_plain(operands)
    tensors = operands.all()
    if products.is_plain and by_torch.takes(*tensors):
        return _by_torch(options, operands, sink)
    if torch.is_grad_enabled() and modes.wants_gradient(*tensors):
        in_8_bits = weight, given
        y, normalized, added = _apply(products, sink, in_8_bits, len(operands.weights), *tensors)
    else:
        with modes.outside_autocast(operands.input):
            y, normalized, added, _ = sharding.forward(
                products, operands, weight, given, recorded=False
            )
        y, normalized = as_result(y), as_result(normalized)
    return y, normalized, operands.input if operands.residual is None else added


def check_call(operands: Operands, options: LinearOptions) -> None:
    """Raises ValueError or TypeError for parameters and options that do not fit the input."""
    check_fused(options.fused, return_normalized=options.return_normalized)
    if _is_compiling() or modes.is_jit_traced():
        return  # torch's operations check shapes, and the tracer warns of each look at one
    if not fits(operands):
        check(operands, is_cast=modes.in_autocast(operands.input))


def _by_torch(
    options: LinearOptions, operands: Operands, sink: WeightGradientSink | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """By operations that torch knows."""
    if sink is not None:
        raise NotImplementedError(
            "a layer with fuse_wgrad_accumulation or delay_wgrad_compute was called with tensors "
            "of a class of their own or on meta, or in a call that torch traces or transforms; "
            "expected plain tensors in an eager call, or torch.no_grad()"
        )
    normalized, added = operands.input.to(options.dtype), operands.input
    if options.has_norm:
        request = forward_request(options, operands, name_of(options.dtype))
        normalized, added = autograd.normalize(request)
    parts = operands.weights, operands.biases
    if by_torch.is_any_dtensor(normalized):
        parts = ([by_torch.on_every_rank(each, normalized) for each in part] for part in parts)
    elif by_torch.is_any_dtensor(*operands.weights, *operands.biases):
        raise TypeError(
            "a weight or bias is a DTensor and input is a Tensor; expected input to be a DTensor"
        )
    weight, bias = (concatenate(part, options.dtype) for part in parts)
    y = functional.linear(normalized, weight, bias)
    return y, normalized if options.return_normalized else None, added


class Projected(torch.autograd.Function):
    """y, normalized (None unless requested), input + residual (None without a residual)."""

    @staticmethod
    def forward(ctx, products, sink, in_8_bits, num_weights, *tensors):
        operands = Operands.split(tensors, num_weights)
        with modes.outside_autocast(operands.input):
            y, normalized, added, saved = products.sharding.forward(
                products, operands, *in_8_bits, recorded=True
            )
        if products.quantizers is not None and not products.options.has_norm:
            saved = saved._replace(x=without_memory(saved.x))  # it keeps x in 8 bits instead
        ctx.save_for_backward(*saved, *operands.weights, *operands.biases)
        # Without the operands, which would stay in memory.
        ctx.products, ctx.sink, ctx.num_weights = products, sink, num_weights
        ctx.set_materialize_grads(False)
        added = None if operands.residual is None else added
        return as_result(y), as_result(normalized), added

    @staticmethod
    def backward(ctx, *incoming):
        incoming, products = Incoming(*incoming), ctx.products
        is_plain = products.is_plain and ctx.sink is None
        if products.is_plain:
            differentiated = by_torch.is_differentiated(
                *(each for each in incoming if each is not None)
            )
            if differentiated and is_plain:
                return None, None, None, None, *_differentiable(ctx, incoming)
        # Otherwise compiled autograd would trace it.
        run = _gradients if is_plain else modes.run_untraced(_gradients)
        return None, None, None, None, *run(ctx, incoming)


# Projected.apply without what it does for functorch's transforms, which do not come here.
_apply = super(torch.autograd.Function, Projected).apply
_NUM_SAVED = len(Saved._fields)


def _gradients(ctx: Any, incoming: Incoming) -> tuple[Tensor | None, ...]:
    """The gradients of all operands."""
    products, tensors = ctx.products, ctx.saved_tensors
    if not products.is_plain or ctx.sink is not None:
        what = "fuse_wgrad_accumulation or delay_wgrad_compute"
        what = f"with {what}" if products.is_alone else "with tp_size of 2 or more"
        what = "inside fp8_autocast" if products.is_alone and products.quantizers else what
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph is True for a layer {what}; expected create_graph=False"
            )
        if any(each is not None and modes.is_mapped(each) for each in incoming):
            raise NotImplementedError(
                f"a batch of gradients was given to a layer {what}; expected one gradient at a time"
            )
    saved, parts = Saved(*tensors[:_NUM_SAVED]), tensors[_NUM_SAVED:]
    parts = parts[: ctx.num_weights], parts[ctx.num_weights :]
    with modes.outside_autocast(saved.x):  # backward() may be called inside of it
        wanted, sink = asked_for(ctx, ctx.needs_input_grad[4:], ctx.sink)
        return products.sharding.backward(products, saved, parts, incoming, wanted, sink)


def _differentiable(ctx: Any, incoming: Incoming) -> list[Tensor | None]:
    """The gradients of all operands, by torch, which can differentiate them."""
    options, (dy, dnormalized, dsum) = ctx.products.options, incoming
    saved, parts = Saved(*ctx.saved_tensors[:_NUM_SAVED]), ctx.saved_tensors[_NUM_SAVED:]
    weights, biases = parts[: ctx.num_weights], parts[ctx.num_weights :]

    def run() -> tuple[Tensor, Tensor]:
        normalized = saved.x.to(options.dtype)
        if options.has_norm:
            normalized = by_torch.normalized(
                saved.x,
                saved.norm_weight,
                saved.norm_bias,
                forward_request(options, saved.operands, None).options,
                options.dtype,
                differentiably=True,
            )
        weight, bias = concatenate(weights, options.dtype), concatenate(biases, options.dtype)
        return functional.linear(normalized, weight, bias), normalized

    with modes.outside_autocast(saved.x):
        tensors = (saved.x, saved.norm_weight, saved.norm_bias, *weights, *biases)
        dx, *others = by_torch.pull_back(run, (dy, dnormalized), tensors)
    dx = dsum if dx is None else dx if dsum is None else dx + dsum
    return [
        each if is_wanted else None
        for each, is_wanted in zip((dx, dx, *others), ctx.needs_input_grad[4:])
    ]
