"""torch: forward and backward with fused options as operators. schemas.py describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..norm import route
from ..norm.checks import check_forward
from ..norm.options import complete
from ..norm.prepared import SEED_LIMIT
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
    made = _fused_norm_backward(
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
    return FusedBackward(*(each if is_wanted else None for each, is_wanted in zip(made, wanted)))


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


def fused_request(given: Any, operands: Mapping, options: Mapping) -> ForwardRequest:
    """given: the arguments of an operator. operands, options: those that it alone has."""
    own_operands, own_options = forward_request(given)
    row_scale, seed = given.row_scale, given.dropout_seed
    own_operands = own_operands._replace(row_scale=row_scale, dropout_seed=seed, **operands)
    dtype, dropout_p = given.residual_dtype, given.dropout_p
    own_options = own_options._replace(residual_dtype=dtype, dropout_p=dropout_p, **options)
    return complete(ForwardRequest(own_operands, own_options))


def outputs_without_memory(given: Any, request: ForwardRequest) -> tuple[Tensor, ...]:
    """y, mean, rstd and the sum of an operator's arguments, as their shapes and dtypes."""
    options, x = check_forward(request).options, given.input
    leading = x.shape[: -len(given.normalized_shape)]
    y_dtype, sum_dtype = (
        getattr(torch, name) for name in (options.out_dtype, options.residual_dtype)
    )
    dtype = torch.promote_types(sum_dtype, torch.float32)
    return (
        x.new_empty(x.shape, dtype=y_dtype),
        x.new_empty(leading if given.centered else 0, dtype=dtype),
        x.new_empty(leading, dtype=dtype),
        x.new_empty(x.shape, dtype=sum_dtype) if has_sum(request) else x.new_empty(0),
    )


def _request(given: Any) -> ForwardRequest:
    second = {"weight1": given.weight1, "bias1": given.bias1}
    flags = {"round_x_hat": given.round_x_hat, "memory_efficient": given.memory_efficient}
    return fused_request(given, second, flags)


def _fused_forward(*arguments):
    given = FusedNormForward(*arguments)
    request = _request(given)
    y, mean, rstd, added, y1, _ = route.forward(request)
    empty = given.input.new_empty
    return (
        y,
        mean if given.centered else rstd.new_empty(0),
        rstd,
        added if has_sum(request) else empty(0),
        empty(0) if y1 is None else y1,
    )


def _fused_forward_without_memory(*arguments):
    given = FusedNormForward(*arguments)
    y, *others = outputs_without_memory(given, _request(given))
    has_second = given.weight1 is not None or given.bias1 is not None
    return y, *others, torch.empty_like(y) if has_second else given.input.new_empty(0)


def _fused_forward_of_torch_operations(*arguments):
    given = FusedNormForward(*arguments)
    request = _request(given)
    made = decompositions.forward(request)
    empty = given.input.new_empty
    return (
        made.y,
        made.mean if given.centered else made.rstd.new_empty(0),
        made.rstd,
        made.sum if has_sum(request) else empty(0),
        empty(0) if made.y1 is None else made.y1,
    )


def _save_fused_forward(ctx, inputs, output):
    given = FusedNormForward(*inputs)
    y, mean, rstd, added, y1 = output
    is_stored = has_sum(_request(given))
    has_second = given.weight1 is not None or given.bias1 is not None
    unused = (*(() if is_stored else (added,)), *(() if has_second else (y1,)))
    ctx.mark_non_differentiable(mean, rstd, *unused)
    kept = (added if is_stored else given.input, mean if given.centered else None)
    if given.memory_efficient:
        kept = (y, None)
    bias = given.bias if given.memory_efficient else None
    ctx.save_for_backward(
        *kept, rstd, given.weight, given.weight1, given.row_scale, given.dropout_seed, bias
    )
    ctx.set_materialize_grads(False)

    def dtype_of(tensor):
        return None if tensor is None else tensor.dtype

    ctx.dbias1_dtype = dtype_of(given.bias1)
    ctx.options = BackwardOptions(
        given.centered,
        tuple(given.normalized_shape),
        given.zero_centered_weight,
        dx_dtype=given.input.dtype,
        dbias_dtype=dtype_of(given.bias),
        dresidual_dtype=dtype_of(given.residual),
        dropout_p=given.dropout_p,
        x_is_y=given.memory_efficient,
        launch=Options(given.strategy, sm_margin=given.backward_sm_margin),
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
    asked = fused_gradients(
        ctx.options, ctx.saved_tensors, (dy, dy1, dsum), ctx.dbias1_dtype, wants
    )
    if asked is None:
        return tuple(None for _ in wants)
    made = fused_norm_backward(*asked)
    none = (None for _ in wants[len(GRADIENTS) :])
    return *(getattr(made, name) for name in GRADIENTS), *none


def _fused_backward(*arguments):
    given = _FusedNormBackward(*arguments)
    options = BackwardOptions(
        given.centered,
        tuple(given.normalized_shape),
        given.zero_centered_weight,
        tuple(name for name, wanted in zip(FusedBackward._fields, given.wanted) if wanted),
        given.dx_dtype,
        None,
        given.dbias_dtype,
        given.dresidual_dtype,
        given.dropout_p,
        given.memory_efficient,
        launch=Options(given.strategy, sm_margin=given.sm_margin),
    )
    operands = BackwardOperands(
        given.dy,
        given.x,
        given.mean,
        given.rstd,
        given.weight,
        given.dsum,
        None,
        given.row_scale,
        given.dropout_seed,
    )
    if given.memory_efficient:
        operands = operands._replace(y_weight=given.weight, y_bias=given.bias)
    second = SecondGradient(given.dy1, given.weight1, given.dbias1_dtype)
    made = route.backward_of_two(BackwardRequest(operands, options), second)
    if made.dresidual is not None and made.dresidual is made.dx:
        made = made._replace(dresidual=made.dx.clone())  # an operator returns no tensor twice
    return or_empty(given.x, made)


def _fused_backward_without_memory(*arguments):
    given = _FusedNormBackward(*arguments)
    x, extents = given.x, given.normalized_shape
    own, own1 = (x.dtype if each is None else each.dtype for each in (given.weight, given.weight1))
    shapes = (x.shape, extents, extents, x.shape, extents, extents)
    dtypes = (given.dx_dtype or x.dtype, own, given.dbias_dtype or own)
    dtypes += (given.dresidual_dtype or x.dtype, own1, given.dbias1_dtype or own1)
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(shapes, dtypes, given.wanted)
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
