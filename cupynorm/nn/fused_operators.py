"""torch: forward and backward with fused options as operators. They have first derivatives only."""

from __future__ import annotations

import torch

from ..norm import route
from ..norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardRequest,
    SecondGradient,
)
from ..norm.results import FusedBackward, FusedForward
from . import decompositions
from .operators import (
    backward_options,
    backward_request,
    call_backward,
    call_forward,
    dtype_of,
    gradients_without_memory,
    names_of,
    or_empty,
    register_forward,
    save_rows,
)
from .schemas import arguments_of, refuse_second_derivatives, register, save_nothing

FusedNormForward = arguments_of(torch.ops.cupynorm.fused_norm_forward.default)
_FusedNormBackward = arguments_of(torch.ops.cupynorm.fused_norm_backward.default)


def fused_norm_forward(request: ForwardRequest) -> FusedForward:
    """As route.forward, by the operator."""
    return call_forward(FusedNormForward, request)


def fused_norm_backward(request: BackwardRequest, second: SecondGradient) -> FusedBackward:
    """As route.backward_of_two, by the operator."""
    names = FusedBackward._fields
    return FusedBackward(*call_backward(_FusedNormBackward, request, names, second))


def fused_gradients(
    options: BackwardOptions, saved: tuple, upstream: tuple, dbias1_dtype: object, wants: tuple
) -> tuple[BackwardRequest, SecondGradient] | None:
    """The request of a backward with fused options.

    saved: x (or y), mean, rstd, weight, weight1, row_scale, dropout_seed, bias. upstream: the
    gradients of y, y1 and the sum. wants: which of FusedBackward's gradients, which are in the
    order of fused_norm_forward's first tensors. None where no gradient came.
    """
    x, mean, rstd, weight, weight1, row_scale, seed, bias = saved
    dy, dy1, dsum = upstream
    if dy is None and dy1 is None:
        if dsum is None:
            return None
        dy = torch.zeros_like(x)
    absent = {"dweight", "dbias"} if dy is None else set()
    absent |= {"dweight1", "dbias1"} if dy1 is None else set()
    names = names_of(FusedBackward._fields, wants)
    names = tuple(name for name in names if name not in absent)
    operands = BackwardOperands(dy, x, mean, rstd, weight, dsum, None, row_scale, seed)
    if options.x_is_y:
        operands = operands._replace(y_weight=weight, y_bias=bias)
    request = BackwardRequest(operands, options._replace(gradients=names))
    return request, SecondGradient(dy1, weight1, dbias1_dtype)


def _save_forward(ctx, inputs, output):
    call = FusedNormForward(*inputs)
    x, mean, rstd = save_rows(ctx, call, output)
    bias = None
    if call.memory_efficient:
        x, mean, bias = output[0], None, call.bias
    parameters = (call.weight, call.weight1, call.row_scale, call.dropout_seed, bias)
    ctx.save_for_backward(x, mean, rstd, *parameters)
    ctx.dbias1_dtype = dtype_of(call.bias1)
    ctx.options = backward_options(call)


def _differentiate_forward(ctx, dy, _dmean, _drstd, dsum, dy1):
    wants = ctx.needs_input_grad
    backward = fused_gradients(
        ctx.options, ctx.saved_tensors, (dy, dy1, dsum), ctx.dbias1_dtype, wants
    )
    if backward is None:
        return tuple(None for _ in wants)
    gradients = fused_norm_backward(*backward)
    return *gradients, *(None for _ in wants[len(gradients) :])


def _backward(*arguments):
    call = _FusedNormBackward(*arguments)
    second = SecondGradient(call.dy1, call.weight1, call.dbias1_dtype)
    gradients = route.backward_of_two(backward_request(call), second)
    if gradients.dresidual is not None and gradients.dresidual is gradients.dx:
        gradients = gradients._replace(dresidual=gradients.dx.clone())
    return or_empty(call.x, gradients)


def _backward_without_memory(*arguments):
    return gradients_without_memory(_FusedNormBackward(*arguments))


register_forward(FusedNormForward, (_save_forward, _differentiate_forward), decompositions.forward)
register(
    _FusedNormBackward,
    _backward,
    _backward_without_memory,
    (save_nothing, refuse_second_derivatives),
)
