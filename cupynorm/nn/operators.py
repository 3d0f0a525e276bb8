"""torch: forward and backward as operators. torch.compile, torch.export and dispatch modes see each
as one node. schemas.py describes them; fused_operators.py has those with fused options.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..norm import route
from ..norm.checks import check_forward
from ..norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Options,
)
from ..norm.results import Backward, Gradients
from ..plan.problem import Tile
from . import decompositions, formulas
from .schemas import (
    arguments_of,
    launch_of,
    refuse_second_derivatives,
    register,
    save_nothing,
    torch_dtype,
)

_norm_forward = torch.ops.cupynorm.norm_forward.default
_norm_backward = torch.ops.cupynorm.norm_backward.default
_recomputing_norm_backward = torch.ops.cupynorm.recomputing_norm_backward.default

# Calls by the operators.


def norm_forward(request: ForwardRequest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, mean, rstd, input + residual."""
    operands, options = request
    return _norm_forward(
        operands.input,
        operands.weight,
        operands.bias,
        operands.residual,
        options.extents,
        options.eps,
        options.centered,
        bool(options.zero_centered_weight),
        torch_dtype(options.out_dtype, "out_dtype"),
        *launch_of(options.launch),
    )


def norm_backward(request: BackwardRequest) -> Gradients:
    """dx, dweight, dbias; None where not wanted."""
    operands, options = request
    wanted = [name in options.gradients for name in Backward._fields]
    gradients = _norm_backward(
        operands.dy,
        operands.x,
        operands.mean,
        operands.rstd,
        operands.weight,
        operands.dsum,
        options.extents,
        wanted,
        bool(options.zero_centered_weight),
        torch_dtype(options.dbias_dtype, "dbias_dtype"),
        options.launch.of("backward").sm_margin,
        options.launch.strategy,
    )
    return Gradients(*(each if is_wanted else None for each, is_wanted in zip(gradients, wanted)))


def recomputing_norm_backward(request: BackwardRequest) -> Gradients:
    """dx, dweight, dbias, None where not wanted, and y in dy's dtype; not differentiable."""
    operands, options = request
    wanted = [name in options.gradients for name in Backward._fields]
    *of_tensors, y = _recomputing_norm_backward(
        operands.dy,
        operands.x,
        operands.mean,
        operands.rstd,
        operands.weight,
        operands.bias,
        operands.dsum,
        options.extents,
        wanted,
        bool(options.zero_centered_weight),
        options.launch.of("backward").sm_margin,
    )
    gradients = (each if is_wanted else None for each, is_wanted in zip(of_tensors, wanted))
    return Gradients(*gradients, None, y)


# norm_forward.

NormForward = arguments_of(_norm_forward)


def forward_request(call: Any) -> ForwardRequest:
    """call: the arguments of norm_forward, or those of them that another operator has."""
    tile = None if call.tile is None else Tile.from_ints(call.tile)
    options = ForwardOptions(
        call.centered,
        tuple(call.normalized_shape),
        call.eps,
        call.zero_centered_weight,
        call.out_dtype,
        launch=Options(call.strategy, tile, call.statistics, call.sm_margin),
    )
    operands = ForwardOperands(call.input, call.weight, call.bias, call.residual)
    return ForwardRequest(operands, options)


def _forward(*arguments):
    call = NormForward(*arguments)
    y, mean, rstd, added, *_ = route.forward(forward_request(call))
    # An operator returns tensors, and none that it was given.
    mean = mean if call.centered else rstd.new_empty(0)
    return y, mean, rstd, call.input.new_empty(0) if call.residual is None else added


def _forward_without_memory(*arguments):
    call = NormForward(*arguments)
    options = check_forward(forward_request(call)).options
    x = call.input
    leading, dtype = x.shape[: -len(call.normalized_shape)], formulas.arithmetic(x)
    return (
        x.new_empty(x.shape, dtype=getattr(torch, options.out_dtype)),
        x.new_empty(leading if call.centered else 0, dtype=dtype),
        x.new_empty(leading, dtype=dtype),
        x.new_empty(0 if call.residual is None else x.shape),
    )


def _forward_of_torch_operations(*arguments):
    call = NormForward(*arguments)
    results = decompositions.forward(forward_request(call))
    empty = call.input.new_empty
    return (
        results.y,
        results.mean if call.centered else results.rstd.new_empty(0),
        results.rstd,
        empty(0) if call.residual is None else results.sum,
    )


def _save_forward(ctx, inputs, output):
    call = NormForward(*inputs)
    _, mean, rstd, added = output
    if call.residual is None:
        ctx.mark_non_differentiable(mean, rstd, added)
    else:
        ctx.mark_non_differentiable(mean, rstd)
    x = call.input if call.residual is None else added
    ctx.save_for_backward(x, mean if call.centered else None, rstd, call.weight)
    ctx.set_materialize_grads(False)
    ctx.options = BackwardOptions(
        call.centered,
        tuple(call.normalized_shape),
        call.zero_centered_weight,
        dbias_dtype=None if call.bias is None else call.bias.dtype,
        launch=Options(call.strategy, sm_margin=call.backward_sm_margin),
    )


def _differentiate_forward(ctx, dy, _dmean, _drstd, dsum):
    wants_input, wants_weight, wants_bias, wants_residual, *rest = ctx.needs_input_grad
    if dy is None:
        dx, dweight, dbias = dsum, None, None
    else:
        wanted = (wants_input or wants_residual, wants_weight, wants_bias)
        names = tuple(name for name, is_wanted in zip(Backward._fields, wanted) if is_wanted)
        operands = BackwardOperands(dy, *ctx.saved_tensors, dsum)
        request = BackwardRequest(operands, ctx.options._replace(gradients=names))
        dx, dweight, dbias, *_ = norm_backward(request)
    none = (None for _ in rest)
    return dx if wants_input else None, dweight, dbias, dx if wants_residual else None, *none


# norm_backward.

_NormBackward = arguments_of(_norm_backward)
_RecomputingNormBackward = arguments_of(_recomputing_norm_backward)


def _backward_request(call: Any) -> BackwardRequest:
    """call: the arguments of norm_backward or recomputing_norm_backward."""
    recompute = hasattr(call, "bias")
    dbias_dtype = getattr(call, "dbias_dtype", None)
    if recompute:
        dbias_dtype = None if call.bias is None else call.bias.dtype
    options = BackwardOptions(
        call.mean is not None,
        tuple(call.normalized_shape),
        call.zero_centered_weight,
        tuple(name for name, is_wanted in zip(Backward._fields, call.wanted) if is_wanted),
        dbias_dtype=dbias_dtype,
        recompute=recompute,
        launch=Options(getattr(call, "strategy", None), sm_margin=call.sm_margin),
    )
    operands = BackwardOperands(call.dy, call.x, call.mean, call.rstd, call.weight, call.dsum)
    if recompute:
        operands = operands._replace(bias=call.bias)
    return BackwardRequest(operands, options)


def or_empty(like: Tensor, gradients: tuple) -> tuple[Tensor, ...]:
    """The gradients, with an empty tensor for each None, which an operator cannot return."""
    return tuple(like.new_empty(0) if each is None else each for each in gradients)


def _backward(*arguments):
    call = _NormBackward(*arguments)
    return or_empty(call.x, route.backward(_backward_request(call))[:3])


def _backward_without_memory(*arguments):
    call = _NormBackward(*arguments)
    return _empty_gradients(call, call.dbias_dtype)


def _empty_gradients(call: Any, dbias_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    x, extents = call.x, call.normalized_shape
    own = x.dtype if call.weight is None else call.weight.dtype
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(
            (x.shape, extents, extents), (x.dtype, own, dbias_dtype or own), call.wanted
        )
    )


def _save_backward(ctx, inputs, output):
    call = _NormBackward(*inputs)
    unwanted = (gradient for gradient, is_wanted in zip(output, call.wanted) if not is_wanted)
    ctx.mark_non_differentiable(*unwanted)
    ctx.save_for_backward(call.dy, call.x, call.mean, call.rstd, call.weight)
    ctx.set_materialize_grads(False)
    ctx.extents, ctx.zero_centered_weight = call.normalized_shape, call.zero_centered_weight


def _differentiate_backward(ctx, ddx, ddweight, ddbias):
    # mean and rstd are functions of x: what depends on them is in the gradient of x.
    dy, x, mean, rstd, weight = ctx.saved_tensors
    saved = formulas.Saved(x, mean, rstd, weight, ctx.extents, ctx.zero_centered_weight)
    for_dy, for_x, for_weight = formulas.second_derivatives(ddx, ddweight, ddbias, dy, saved)
    wants = ctx.needs_input_grad
    gradients = (for_dy, for_x, None, None, for_weight, ddx, *(None for _ in wants[6:]))
    return tuple(each if is_wanted else None for each, is_wanted in zip(gradients, wants))


def _recomputing_backward(*arguments):
    call = _RecomputingNormBackward(*arguments)
    gradients = route.backward(_backward_request(call))
    return *or_empty(call.x, gradients[:3]), gradients.y


def _recomputing_backward_without_memory(*arguments):
    call = _RecomputingNormBackward(*arguments)
    bias_dtype = None if call.bias is None else call.bias.dtype
    y = call.x.new_empty(call.x.shape, dtype=call.dy.dtype)
    return *_empty_gradients(call, bias_dtype), y


register(
    "norm_forward",
    _forward,
    _forward_without_memory,
    (_save_forward, _differentiate_forward),
    _forward_of_torch_operations,
)
register(
    "norm_backward",
    _backward,
    _backward_without_memory,
    (_save_backward, _differentiate_backward),
)
register(
    "recomputing_norm_backward",
    _recomputing_backward,
    _recomputing_backward_without_memory,
    (save_nothing, refuse_second_derivatives),
)
