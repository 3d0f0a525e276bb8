"""torch: forward and backward with fused options as operators. schemas.py describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..norm import route
from ..norm.checked_forward import SEED_LIMIT
from ..norm.checks import check_forward
from ..norm.options import with_checked_options
from ..norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardRequest,
    Options,
    SecondGradient,
    makes_sum,
)
from ..norm.results import FusedBackward
from . import decompositions
from .operators import forward_request, or_empty
from .schemas import (
    arguments_of,
    launch_of,
    refuse_second_derivatives,
    register,
    save_nothing,
    torch_dtype,
)

# In the order of fused_norm_forward's first tensors.
GRADIENTS = ("dx", "dweight", "dbias", "dresidual", "dweight1", "dbias1")

_fused_norm_forward = torch.ops.cupynorm.fused_norm_forward.default
_fused_norm_backward = torch.ops.cupynorm.fused_norm_backward.default


# Calls by the operators.


def fused_norm_forward(request: ForwardRequest) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, y1 and the sum. The seed is drawn before the operator, so that torch sees who draws."""
    operands, options = request
    y, _, _, added, y1 = _fused_norm_forward(
        operands.input,
        operands.weight,
        operands.bias,
        operands.residual,
        operands.weight1,
        operands.bias1,
        operands.row_scale,
        seed_tensor(operands.input, operands.dropout_seed, options.dropout_p),
        options.extents,
        options.eps,
        options.centered,
        bool(options.zero_centered_weight),
        torch_dtype(options.out_dtype, "out_dtype"),
        torch_dtype(options.residual_dtype, "residual_dtype"),
        options.dropout_p,
        options.round_x_hat,
        options.memory_efficient,
        *launch_of(options.launch),
    )
    has_second = operands.weight1 is not None or operands.bias1 is not None
    return y, y1 if has_second else None, added if has_sum(request) else operands.input


def fused_norm_backward(request: BackwardRequest, second: SecondGradient) -> FusedBackward:
    """As route.backward_of_two, by the operator."""
    operands, options = request
    wanted = [name in options.gradients for name in FusedBackward._fields]
    gradients = _fused_norm_backward(
        operands.dy,
        second.dy,
        operands.x,
        operands.mean,
        operands.rstd,
        operands.weight,
        second.weight,
        operands.dsum,
        operands.row_scale,
        seed_tensor(operands.x, operands.dropout_seed, options.dropout_p),
        operands.y_bias,
        options.extents,
        wanted,
        options.centered,
        bool(options.zero_centered_weight),
        options.x_is_y,
        torch_dtype(options.dbias_dtype, "dbias_dtype"),
        torch_dtype(second.dbias_dtype, "dbias1_dtype"),
        torch_dtype(options.dx_dtype, "dx_dtype"),
        torch_dtype(options.dresidual_dtype, "dresidual_dtype"),
        options.dropout_p,
        options.launch.of("backward").sm_margin,
        options.launch.strategy,
    )
    return FusedBackward(
        *(each if is_wanted else None for each, is_wanted in zip(gradients, wanted))
    )


def seed_tensor(x: Tensor, seed: object, dropout_p: float) -> Tensor | None:
    """The seed as a tensor on x's device, drawn if there is none; None without dropout."""
    if dropout_p == 0 or isinstance(seed, Tensor):
        return seed
    if seed is None:  # not draw_seed, which Dynamo cannot trace
        return torch.randint(0, SEED_LIMIT, (1,), dtype=torch.int64, device=x.device)
    return torch.full((1,), seed, dtype=torch.int64, device=x.device)


def has_sum(request: ForwardRequest) -> bool:
    """Whether the normalised row is not the input itself."""
    return makes_sum(request, str(request.operands.input.dtype).removeprefix("torch."))


# Implementations.

FusedNormForward = arguments_of(_fused_norm_forward)
_FusedNormBackward = arguments_of(_fused_norm_backward)


def fused_request(call: Any, operands: Mapping, options: Mapping) -> ForwardRequest:
    """call: the arguments of an operator. operands, options: those that it alone has."""
    own_operands, own_options = forward_request(call)
    row_scale, seed = call.row_scale, call.dropout_seed
    own_operands = own_operands._replace(row_scale=row_scale, dropout_seed=seed, **operands)
    dtype, dropout_p = call.residual_dtype, call.dropout_p
    own_options = own_options._replace(residual_dtype=dtype, dropout_p=dropout_p, **options)
    return with_checked_options(ForwardRequest(own_operands, own_options))


def outputs_without_memory(call: Any, request: ForwardRequest) -> tuple[Tensor, ...]:
    """y, mean, rstd and the sum of an operator's arguments, as their shapes and dtypes."""
    options, x = check_forward(request).options, call.input
    leading = x.shape[: -len(call.normalized_shape)]
    y_dtype, sum_dtype = (
        getattr(torch, name) for name in (options.out_dtype, options.residual_dtype)
    )
    dtype = torch.promote_types(sum_dtype, torch.float32)
    return (
        x.new_empty(x.shape, dtype=y_dtype),
        x.new_empty(leading if call.centered else 0, dtype=dtype),
        x.new_empty(leading, dtype=dtype),
        x.new_empty(x.shape, dtype=sum_dtype) if has_sum(request) else x.new_empty(0),
    )


def _request(call: Any) -> ForwardRequest:
    second = {"weight1": call.weight1, "bias1": call.bias1}
    flags = {"round_x_hat": call.round_x_hat, "memory_efficient": call.memory_efficient}
    return fused_request(call, second, flags)


def _fused_forward(*arguments):
    call = FusedNormForward(*arguments)
    request = _request(call)
    y, mean, rstd, added, y1, _ = route.forward(request)
    empty = call.input.new_empty
    return (
        y,
        mean if call.centered else rstd.new_empty(0),
        rstd,
        added if has_sum(request) else empty(0),
        empty(0) if y1 is None else y1,
    )


def _fused_forward_without_memory(*arguments):
    call = FusedNormForward(*arguments)
    y, *others = outputs_without_memory(call, _request(call))
    has_second = call.weight1 is not None or call.bias1 is not None
    return y, *others, torch.empty_like(y) if has_second else call.input.new_empty(0)


def _fused_forward_of_torch_operations(*arguments):
    call = FusedNormForward(*arguments)
    request = _request(call)
    results = decompositions.forward(request)
    empty = call.input.new_empty
    return (
        results.y,
        results.mean if call.centered else results.rstd.new_empty(0),
        results.rstd,
        results.sum if has_sum(request) else empty(0),
        empty(0) if results.y1 is None else results.y1,
    )


def _save_fused_forward(ctx, inputs, output):
    call = FusedNormForward(*inputs)
    y, mean, rstd, added, y1 = output
    is_stored = has_sum(_request(call))
    has_second = call.weight1 is not None or call.bias1 is not None
    unused = (*(() if is_stored else (added,)), *(() if has_second else (y1,)))
    ctx.mark_non_differentiable(mean, rstd, *unused)
    kept = (added if is_stored else call.input, mean if call.centered else None)
    if call.memory_efficient:
        kept = (y, None)
    bias = call.bias if call.memory_efficient else None
    ctx.save_for_backward(
        *kept, rstd, call.weight, call.weight1, call.row_scale, call.dropout_seed, bias
    )
    ctx.set_materialize_grads(False)

    def dtype_of(tensor):
        return None if tensor is None else tensor.dtype

    ctx.dbias1_dtype = dtype_of(call.bias1)
    ctx.options = BackwardOptions(
        call.centered,
        tuple(call.normalized_shape),
        call.zero_centered_weight,
        dx_dtype=call.input.dtype,
        dbias_dtype=dtype_of(call.bias),
        dresidual_dtype=dtype_of(call.residual),
        dropout_p=call.dropout_p,
        x_is_y=call.memory_efficient,
        launch=Options(call.strategy, sm_margin=call.backward_sm_margin),
    )


def fused_gradients(
    options: BackwardOptions, saved: tuple, upstream: tuple, dbias1_dtype: object, wants: tuple
) -> tuple[BackwardRequest, SecondGradient] | None:
    """The request of a backward with fused options.

    saved: x (or y), mean, rstd, weight, weight1, row_scale, dropout_seed, bias. upstream: the
    gradients of y, y1 and the sum. wants: which of GRADIENTS. None where no gradient came.
    """
    x, mean, rstd, weight, weight1, row_scale, seed, bias = saved
    dy, dy1, dsum = upstream
    if dy is None and dy1 is None:
        if dsum is None:
            return None
        dy = torch.zeros_like(x)
    absent = {"dweight", "dbias"} if dy is None else set()
    absent |= {"dweight1", "dbias1"} if dy1 is None else set()
    wanted = {name for name, is_wanted in zip(GRADIENTS, wants) if is_wanted} - absent
    operands = BackwardOperands(dy, x, mean, rstd, weight, dsum, None, row_scale, seed)
    if options.x_is_y:
        operands = operands._replace(y_weight=weight, y_bias=bias)
    names = tuple(name for name in FusedBackward._fields if name in wanted)
    request = BackwardRequest(operands, options._replace(gradients=names))
    return request, SecondGradient(dy1, weight1, dbias1_dtype)


def _differentiate_fused_forward(ctx, dy, _dmean, _drstd, dsum, dy1):
    wants = ctx.needs_input_grad
    backward_request = fused_gradients(
        ctx.options, ctx.saved_tensors, (dy, dy1, dsum), ctx.dbias1_dtype, wants
    )
    if backward_request is None:
        return tuple(None for _ in wants)
    gradients = fused_norm_backward(*backward_request)
    none = (None for _ in wants[len(GRADIENTS) :])
    return *(getattr(gradients, name) for name in GRADIENTS), *none


def _fused_backward(*arguments):
    call = _FusedNormBackward(*arguments)
    options = BackwardOptions(
        call.centered,
        tuple(call.normalized_shape),
        call.zero_centered_weight,
        tuple(name for name, wanted in zip(FusedBackward._fields, call.wanted) if wanted),
        call.dx_dtype,
        None,
        call.dbias_dtype,
        call.dresidual_dtype,
        call.dropout_p,
        call.memory_efficient,
        launch=Options(call.strategy, sm_margin=call.sm_margin),
    )
    operands = BackwardOperands(
        call.dy,
        call.x,
        call.mean,
        call.rstd,
        call.weight,
        call.dsum,
        None,
        call.row_scale,
        call.dropout_seed,
    )
    if call.memory_efficient:
        operands = operands._replace(y_weight=call.weight, y_bias=call.bias)
    second = SecondGradient(call.dy1, call.weight1, call.dbias1_dtype)
    gradients = route.backward_of_two(BackwardRequest(operands, options), second)
    if gradients.dresidual is not None and gradients.dresidual is gradients.dx:
        gradients = gradients._replace(
            dresidual=gradients.dx.clone()
        )  # an operator returns no tensor twice
    return or_empty(call.x, gradients)


def _fused_backward_without_memory(*arguments):
    call = _FusedNormBackward(*arguments)
    x, extents = call.x, call.normalized_shape
    own, own1 = (x.dtype if each is None else each.dtype for each in (call.weight, call.weight1))
    shapes = (x.shape, extents, extents, x.shape, extents, extents)
    dtypes = (call.dx_dtype or x.dtype, own, call.dbias_dtype or own)
    dtypes += (call.dresidual_dtype or x.dtype, own1, call.dbias1_dtype or own1)
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(shapes, dtypes, call.wanted)
    )


register(
    "fused_norm_forward",
    _fused_forward,
    _fused_forward_without_memory,
    (_save_fused_forward, _differentiate_fused_forward),
    _fused_forward_of_torch_operations,
)
register(
    "fused_norm_backward",
    _fused_backward,
    _fused_backward_without_memory,
    (save_nothing, refuse_second_derivatives),
)
