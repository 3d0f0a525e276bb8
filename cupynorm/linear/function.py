"""torch: layer_norm_linear of tensors, differentiable.

`normalize_and_project` chooses how a call runs:

    plain tensors                                compute.py, recorded by `Projected` where a
                                                 gradient is wanted
    torch.compile, torch.jit.trace,
    dispatch modes, subclasses, meta tensors     the operator of operator.py
    torch.func, forward mode                     torch functions that they can transform
    DTensors                                     dtensors.py
    nested tensors                               one of these, on their values
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from ..gpu.arrays import type_in_words
from ..nn import dtypes, modes, nested
from ..norm.prepared import FOR_STATISTICS, FOR_Y
from . import compute, dtensors, fold, one_kernel
from .call import LinearCall, Operands, check, has_no_normalized, is_fused
from .kernels import SavedNorm
from .matrices import as_result, concatenate, join
from .norms import FORMULAS, KERNELS, OPERATORS, normalize_and_add
from .operator import by_operator, fits
from .weight_gradients import WeightGradientSink, asked_for

_is_compiling = modes.is_compiling
_has_functorch_transforms = modes.has_functorch_transforms
_present_tracer = modes.present_tracer


def normalize_and_project(
    call: LinearCall, sink: WeightGradientSink | None = None, folded: fold.Folded | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, normalized (None unless requested), input + residual.

    sink: takes the gradients of weights and biases, which autograd then does not get.
    folded: the folded parameters, where they were made before. Without them a call without
        gradients takes them from fold.cached_fold. Traced calls fold anew.
    """
    compiling = _is_compiling()
    if not compiling and _present_tracer():  # it would trace what reads memory
        return torch.compiler.disable(normalize_and_project)(call, sink, folded)
    operands, options = call
    if operands.input.is_nested:
        return _normalize_and_project_nested(call, sink, folded)
    check_call(call)
    tensors = operands.all
    is_plain = not compiling and modes.are_plain(tensors)
    if not is_plain and dtensors.has_dtensors(operands):
        if sink is not None or is_fused(options.fused):
            where = "with fuse_wgrad_accumulation, delay_wgrad_compute or fused"
            dtensors.refuse(operands, where)
        return dtensors.normalize_and_project(call)
    if sink is not None and not compiling and not is_plain:
        # The operator cannot use a sink. Subclasses that torch need not ask are dropped.
        tensors = tuple(map(_without_subclass, tensors))
        is_plain = modes.are_plain(tensors)
        if not is_plain and not modes.has_functorch_transforms():
            raise NotImplementedError(
                "a layer with fuse_wgrad_accumulation or delay_wgrad_compute was called with "
                "tensors of a class of their own; expected plain tensors"
            )
        operands = Operands.split(tensors, len(operands.weights))
        call = LinearCall(operands, options)
    if modes.compiler_sees_transforms or not compiling:
        if _has_functorch_transforms() or forward_ad._current_level >= 0:
            return _normalize_and_project_transformed(call)
    if sink is not None and not compiling and modes.is_jit_traced():
        raise NotImplementedError(
            "torch.jit.trace was asked to record a layer with fuse_wgrad_accumulation or "
            "delay_wgrad_compute; expected torch.no_grad()"
        )
    # A call with a sink is hidden from a dispatch mode, because the operator would lose the sink.
    has_mode = not compiling and sink is None and modes.num_dispatch_modes()
    # Without a norm torch's product knows meta tensors. No other such call comes here: linear.py.
    is_meta = operands.input.is_meta and options.has_norm
    if is_meta and sink is not None:
        return _normalize_then_project(call, sink)
    if has_mode or not is_plain or modes.is_jit_traced() or is_meta:
        if not compiling:
            _check_tensors(operands)
        y, normalized, _, _, added = by_operator(call)
    elif torch.is_grad_enabled() and modes.wants_gradient(*tensors):
        if is_fused(options.fused):
            fold.forget(operands.weights[0])  # an optimizer may step without telling torch
        y, normalized, added = _apply(call, sink, folded, *tensors)
    else:
        make = one_kernel.folds(call) if is_fused(options.fused) and not folded else None
        if make is not None:
            folded = fold.cached_fold(call, make)
        weight, bias = join(operands.weights), join(operands.biases)
        y, normalized, _, _, added = compute.forward(call, weight, bias, FOR_Y, folded)
    return (
        y,
        normalized if options.return_normalized else None,
        operands.input if operands.residual is None else added,
    )


def _normalize_then_project(call: LinearCall, sink: WeightGradientSink) -> tuple:
    """By two calls: a norm's, and one of a linear layer alone, which needs no operator."""
    operands, options = call
    normalized, added = normalize_and_add(call)
    operands = Operands(normalized, None, None, None, operands.weights, operands.biases)
    alone = options._replace(centered=False, save_normalized=True, fused=None, has_norm=False)
    y = normalize_and_project(LinearCall(operands, alone), sink)[0]
    return y, normalized if options.return_normalized else None, added


def _normalize_and_project_nested(call: LinearCall, sink, folded) -> tuple:
    """Of a jagged input: its rows are one dense tensor."""
    operands = call.operands
    packing = nested.Packing(operands.input, 1)
    packed = {"input": packing.values(operands.input, "input")}
    if operands.residual is not None:
        packed["residual"] = packing.values(operands.residual, "residual")
    call = call._replace(operands=operands._replace(**packed))
    return packing.nested(normalize_and_project(call, sink, folded))


def _without_subclass(tensor: Tensor | None) -> Tensor | None:
    """As a torch.Tensor, unless its class has a __torch_dispatch__ of its own."""
    if tensor.__class__ in modes.PLAIN:
        return tensor
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor.as_subclass(Tensor)


def _check_tensors(operands: Operands) -> None:
    """Raises for operands that the operator cannot take."""
    names = ("input", "residual", "norm_weight", "norm_bias")
    names += ("weight",) * len(operands.weights) + ("bias",) * len(operands.biases)
    for name, each in zip(names, operands.all):
        if each is not None and not isinstance(each, Tensor):
            raise TypeError(
                f"{name} is {type_in_words(each)}; expected a torch tensor, as input is"
            )


def check_call(call: LinearCall) -> None:
    """Raises ValueError or TypeError for parameters and options that do not fit the input."""
    operands, options = call
    input = operands.input
    in_autocast = dtypes.in_autocast(input)
    if _is_compiling():  # the operator's shape function checks the shapes
        for part in () if in_autocast else (*operands.weights, *operands.biases):
            if part.dtype != input.dtype:
                raise TypeError(
                    f"weight or bias is of dtype {part.dtype}, input of {input.dtype}; "
                    "expected both the same"
                )
    elif modes.is_jit_traced():
        pass  # torch warns of every shape that is looked at; the operator itself checks
    elif is_fused(options.fused) or not fits(operands):
        check(operands, options.fused, is_cast=in_autocast)
    if is_fused(options.fused) and options.return_normalized:
        raise ValueError(has_no_normalized("return_normalized", options.fused))


def _normalize_and_project_transformed(
    call: LinearCall,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """By functions that torch's transforms and forward mode know."""
    normalized, added = normalize_and_add(call)
    operands, dtype = call.operands, call.options.dtype
    weight, bias = concatenate(operands.weights, dtype), concatenate(operands.biases, dtype)
    y = functional.linear(normalized, weight, bias)
    return y, normalized if call.options.return_normalized else None, added


class Projected(torch.autograd.Function):
    """y, normalized (None unless requested), input + residual (None without a residual)."""

    @staticmethod
    def forward(ctx, call, sink, folded, *_tensors):
        operands, options = call
        weight = join(operands.weights)
        cast = weight.to(options.dtype)
        y, normalized, mean, rstd, added = compute.forward(
            call,
            weight if is_fused(options.fused) else cast,
            join(operands.biases),
            FOR_STATISTICS,
            folded,
        )
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
        arrived = [each for each in incoming if each is not None]
        compiling = _is_compiling()  # by compiled autograd
        if not compiling and (any(map(modes.is_mapped, arrived)) or modes.is_transformed()):
            norms, normalized, weight = FORMULAS, None, None
        elif torch.is_grad_enabled() or (compiling and ctx.sink is None):  # create_graph=True
            norms, normalized, weight = OPERATORS, None, None
        else:
            norms, weight = KERNELS, join(weights) if cast is None else cast
        if norms is not KERNELS and ctx.sink is not None:
            raise RuntimeError(
                "create_graph is True for a layer with fuse_wgrad_accumulation or "
                "delay_wgrad_compute; expected create_graph=False"
            )
        with dtypes.outside_autocast(norm.x):  # backward() may be called inside of it
            if weight is None:
                weight = concatenate(weights, ctx.options.dtype)
            saved = compute.Saved(norm, normalized, weight, weights, biases)
            wanted, sink = asked_for(ctx, ctx.needs_input_grad[3:], ctx.sink)
            run = compute.gradients if ctx.sink is None else modes.run_untraced(compute.gradients)
            gradients = run(norms, ctx.options, saved, incoming, wanted, sink)
        return None, None, None, *gradients


# Projected.apply without what it does for functorch's transforms, which do not come here.
_apply = super(torch.autograd.Function, Projected).apply
