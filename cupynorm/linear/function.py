"""torch: layer_norm_linear of tensors, differentiable.

Eager calls of plain tensors are ours: compute.py, recorded by `Projected` where a gradient is
wanted. All others, and the gradients of gradients, are a norm by nn/by_torch.py and a product of
torch, so that torch sees both. One kernel is an operator for torch.compile: compiled.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu.arrays import type_in_words
from ..nn import autograd, by_torch, modes
from ..nn.modes import name_of
from ..norm.calls import FOR_STATISTICS, FOR_Y
from . import compute, fold, one_kernel
from .call import (
    LinearCall,
    Operands,
    all_of,
    check,
    check_fused,
    fits,
    has_no_normalized,
    is_fused,
)
from .kernels import SavedNorm, forward_request
from .matrices import as_result, concatenate, join
from .weight_gradients import WeightGradientSink, asked_for

_is_compiling = modes.is_compiling
_present_tracer = modes.present_tracer


def normalize_and_project(
    call: LinearCall,
    sink: WeightGradientSink | None = None,
    folded: one_kernel.Folded | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, normalized (None unless requested), input + residual.

    sink: takes the gradients of weights and biases, which autograd then does not get.
    folded: the folded parameters, where they were made before. Without them a call without
        gradients takes them from fold.cached_fold. Traced calls do not fold.
    """
    if not _is_compiling() and _present_tracer():  # it would trace what reads memory
        return torch.compiler.disable(normalize_and_project)(call, sink, folded)
    operands, options = call
    if operands.input.is_nested:
        return _normalize_and_project_nested(call, sink, folded)
    check_call(call)
    if sink is not None and not modes.are_plain(all_of(operands)):
        tensors = tuple(map(_without_subclass, all_of(operands)))
        operands = Operands.split(tensors, len(operands.weights))
        call = LinearCall(operands, options)
    tensors = all_of(operands)
    if by_torch.takes(*tensors):
        return _by_torch(call, sink)
    if torch.is_grad_enabled() and modes.wants_gradient(*tensors):
        if is_fused(options.fused):
            fold.forget(operands.weights[0])  # an optimizer may step without telling torch
        y, normalized, added = _apply(call, sink, folded, *tensors)
    else:
        if folded is None and one_kernel.keeps_fold(call):
            folded = fold.cached_fold(call)
        weight, bias = join(operands.weights), join(operands.biases)
        y, normalized, _, _, added = compute.forward(call, weight, bias, FOR_Y, folded)
    return (
        y,
        normalized if options.return_normalized else None,
        operands.input if operands.residual is None else added,
    )


def _without_subclass(tensor: Tensor | None) -> Tensor | None:
    """As a torch.Tensor, unless its class has a __torch_dispatch__ of its own."""
    if tensor.__class__ in modes.PLAIN:
        return tensor
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor.as_subclass(Tensor)


def _by_torch(
    call: LinearCall, sink: WeightGradientSink | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """By operations that torch knows. Only meta tensors, which have no values, may have a sink."""
    operands, options = call
    if sink is not None and operands.input.is_meta:
        return _normalize_then_project(call, sink)
    if sink is not None:
        raise NotImplementedError(
            "a layer with fuse_wgrad_accumulation or delay_wgrad_compute was called with tensors "
            "of a class of their own, or in a call that torch traces or transforms; expected plain "
            "tensors in an eager call, or torch.no_grad()"
        )
    _check_tensors(operands)
    if _is_compiling():
        from . import compiled  # it imports the compiler, which takes a second

        if compiled.takes(call):
            return compiled.normalize_and_project(call)
    normalized, added = normalize_and_add(call)
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


def _normalize_then_project(call: LinearCall, sink: WeightGradientSink) -> tuple:
    """By two calls: a norm's, and one of a linear layer alone, which torch's product computes."""
    operands, options = call
    normalized, added = normalize_and_add(call)
    operands = Operands(normalized, None, None, None, operands.weights, operands.biases)
    alone = options._replace(centered=False, save_normalized=True, fused=None, has_norm=False)
    y, _, _ = _apply(LinearCall(operands, alone), sink, None, *all_of(operands))
    return y, normalized if options.return_normalized else None, added


def normalize_and_add(call: LinearCall) -> tuple[Tensor, Tensor]:
    """The normalised tensor and input + residual, differentiable as a norm's call is."""
    operands, options = call
    if not options.has_norm:
        return operands.input.to(options.dtype), operands.input
    request = forward_request(options, operands, name_of(options.dtype))
    y, added = autograd.normalize(request)
    return y, added


def _normalize_and_project_nested(call: LinearCall, sink, folded) -> tuple:
    """Of a jagged input: its rows are one dense tensor."""
    operands = call.operands
    packing = by_torch.Packing(operands.input, 1)
    packed = {"input": packing.values(operands.input, "input")}
    if operands.residual is not None:
        packed["residual"] = packing.values(operands.residual, "residual")
    call = call._replace(operands=operands._replace(**packed))
    return packing.nested(normalize_and_project(call, sink, folded))


def _check_tensors(operands: Operands) -> None:
    """Raises for operands that torch's operations cannot take."""
    names = ("input", "residual", "norm_weight", "norm_bias")
    names += ("weight",) * len(operands.weights) + ("bias",) * len(operands.biases)
    for name, each in zip(names, all_of(operands)):
        if each is not None and not isinstance(each, Tensor):
            raise TypeError(
                f"{name} is {type_in_words(each)}; expected a torch tensor, as input is"
            )


def check_call(call: LinearCall) -> None:
    """Raises ValueError or TypeError for parameters and options that do not fit the input."""
    operands, options = call
    check_fused(options.fused)
    if is_fused(options.fused) and options.return_normalized:
        raise ValueError(has_no_normalized("return_normalized", options.fused))
    if _is_compiling() or modes.is_jit_traced():
        return  # torch's operations check shapes, and the tracer warns of each look at one
    if not fits(operands):
        check(operands, is_cast=modes.in_autocast(operands.input))


class Projected(torch.autograd.Function):
    """y, normalized (None unless requested), input + residual (None without a residual)."""

    @staticmethod
    def forward(ctx, call, sink, folded, *_tensors):
        operands, options = call
        weight, bias = join(operands.weights), join(operands.biases)
        cast = weight.to(options.dtype)
        y, normalized, mean, rstd, added = compute.forward(call, cast, bias, FOR_STATISTICS, folded)
        y, normalized = as_result(y), as_result(normalized)
        ctx.save_for_backward(
            added,
            mean,
            rstd,
            operands.norm_weight,
            operands.norm_bias,
            normalized if options.save_normalized else None,
            None if cast is weight else cast,
            *operands.weights,
            *operands.biases,
        )
        # Without the operands, which would stay in memory.
        ctx.options, ctx.sink, ctx.num_weights = options, sink, len(operands.weights)
        ctx.set_materialize_grads(False)
        return (
            y,
            normalized if options.return_normalized else None,
            None if operands.residual is None else added,
        )

    @staticmethod
    def backward(ctx, dy, dnormalized, dsum):
        added, mean, rstd, norm_weight, norm_bias, normalized, cast, *parts = ctx.saved_tensors
        norm = SavedNorm(added, mean, rstd, norm_weight, norm_bias)
        weights, biases = parts[: ctx.num_weights], parts[ctx.num_weights :]
        incoming = compute.Incoming(dy, dnormalized, dsum)
        differentiated = by_torch.is_differentiated(
            *(each for each in incoming if each is not None and not each.is_meta)
        )
        if differentiated and ctx.sink is None:
            return None, None, None, *_differentiable(ctx, norm, weights, biases, incoming)
        if differentiated and not (_is_compiling() or _present_tracer()):  # by compiled autograd
            raise RuntimeError(
                "create_graph is True for a layer with fuse_wgrad_accumulation or "
                "delay_wgrad_compute; expected create_graph=False"
            )
        with modes.outside_autocast(norm.x):  # backward() may be called inside of it
            weight = join(weights) if cast is None else cast
            saved = compute.Saved(norm, normalized, weight, weights, biases)
            wanted, sink = asked_for(ctx, ctx.needs_input_grad[3:], ctx.sink)
            run = compute.gradients if ctx.sink is None else modes.run_untraced(compute.gradients)
            gradients = run(ctx.options, saved, incoming, wanted, sink)
        return None, None, None, *gradients


# Projected.apply without what it does for functorch's transforms, which do not come here.
_apply = super(torch.autograd.Function, Projected).apply


def _differentiable(ctx, norm: SavedNorm, weights, biases, incoming) -> list[Tensor | None]:
    """The gradients of all operands, by torch, which can differentiate them."""
    options, dy, dnormalized, dsum = ctx.options, *incoming

    def run() -> tuple[Tensor, Tensor]:
        normalized = norm.x.to(options.dtype)
        if options.has_norm:
            of_norm = forward_request(options, norm.operands, None).options
            normalized = by_torch.normalized(
                norm.x,
                norm.norm_weight,
                norm.norm_bias,
                of_norm,
                options.dtype,
                differentiably=True,
            )
        weight, bias = concatenate(weights, options.dtype), concatenate(biases, options.dtype)
        return functional.linear(normalized, weight, bias), normalized

    with modes.outside_autocast(norm.x):
        tensors = (norm.x, norm.norm_weight, norm.norm_bias, *weights, *biases)
        dx, *others = by_torch.pull_back(run, (dy, dnormalized), tensors)
    dx = dsum if dx is None else dx if dsum is None else dx + dsum
    return [
        each if is_wanted else None
        for each, is_wanted in zip((dx, dx, *others), ctx.needs_input_grad[3:])
    ]
