"""torch: forward and backward as operators. torch.compile, torch.export and dispatch modes see each
as one node.

    cupynorm::norm_forward  -> y, mean, rstd, input + residual
        an empty mean for rms_norm, an empty sum without a residual
    cupynorm::norm_backward -> dx, dweight, dbias
        empty where not wanted
    cupynorm::recomputing_norm_backward -> dx, dweight, dbias, y
        the same, and y again
    cupynorm::fused_norm_forward -> y, mean, rstd, sum, y1
        with fused options; an empty sum where it is the input itself
    cupynorm::fused_norm_backward -> dx, dweight, dbias, dresidual, dweight1, dbias1

Arguments are those of cupynorm.layer_norm_forward and layer_norm_backward. tile has the fields of a
cupynorm.Tile in their order. A norm_backward without a mean is that of rms_norm. All are
differentiable but fused_norm_backward and recomputing_norm_backward, and known for tensors without
memory and any number of rows.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from ..norm import route
from ..norm.checks import check_forward
from ..norm.options import complete, dtype_name
from ..norm.prepared import SEED_LIMIT
from ..norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Options,
    SecondGradient,
)
from ..norm.results import Backward, FusedBackward, Gradients
from ..plan.problem import Tile
from . import formulas

# In the order of fused_norm_forward's first tensors.
GRADIENTS = ("dx", "dweight", "dbias", "dresidual", "dweight1", "dbias1")

_library = torch.library.Library("cupynorm", "DEF")
for _schema in (
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
    "SymInt[] normalized_shape, float? eps, bool centered, bool zero_centered_weight, "
    "ScalarType? out_dtype, int sm_margin, str? strategy, str? statistics, int[]? tile, "
    "int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)",
    "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? dsum, "
    "SymInt[] normalized_shape, bool[3] wanted, bool zero_centered_weight, "
    "ScalarType? dbias_dtype, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    "recomputing_norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, Tensor? dsum, SymInt[] normalized_shape, bool[3] wanted, "
    "bool zero_centered_weight, int sm_margin) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y)",
    "fused_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
    "Tensor? weight1, Tensor? bias1, Tensor? row_scale, Tensor? dropout_seed, "
    "SymInt[] normalized_shape, float? eps, bool centered, bool zero_centered_weight, "
    "ScalarType? out_dtype, ScalarType? residual_dtype, float dropout_p, bool round_x_hat, "
    "bool memory_efficient, int sm_margin, str? strategy, str? statistics, int[]? tile, "
    "int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum, Tensor y1)",
    "fused_norm_backward(Tensor? dy, Tensor? dy1, Tensor x, Tensor? mean, Tensor rstd, "
    "Tensor? weight, Tensor? weight1, Tensor? dsum, Tensor? row_scale, Tensor? dropout_seed, "
    "Tensor? bias, SymInt[] normalized_shape, bool[6] wanted, bool centered, "
    "bool zero_centered_weight, bool memory_efficient, ScalarType? dbias_dtype, "
    "ScalarType? dbias1_dtype, ScalarType? dx_dtype, ScalarType? dresidual_dtype, "
    "float dropout_p, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dweight1, "
    "Tensor dbias1)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_norm_forward = torch.ops.cupynorm.norm_forward.default
_norm_backward = torch.ops.cupynorm.norm_backward.default
_recomputing_norm_backward = torch.ops.cupynorm.recomputing_norm_backward.default
_fused_norm_forward = torch.ops.cupynorm.fused_norm_forward.default
_fused_norm_backward = torch.ops.cupynorm.fused_norm_backward.default


def arguments_of(operator: Any) -> type:
    """A NamedTuple class of the arguments of an operator, as its schema names them."""
    arguments = operator._schema.arguments
    defaults = [each.default_value for each in arguments if each.has_default_value()]
    return namedtuple("Arguments", [each.name for each in arguments], defaults=defaults)


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
        _torch_dtype(options.out_dtype, "out_dtype"),
        *_launch(options.launch),
    )


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
        _seed_tensor(operands.input, operands.dropout_seed, options.dropout_p),
        options.extents,
        options.eps,
        options.centered,
        bool(options.zero_centered_weight),
        _torch_dtype(options.out_dtype, "out_dtype"),
        _torch_dtype(options.residual_dtype, "residual_dtype"),
        options.dropout_p,
        options.round_x_hat,
        options.memory_efficient,
        *_launch(options.launch),
    )
    has_second = operands.weight1 is not None or operands.bias1 is not None
    makes_sum = _makes_sum(operands, options.residual_dtype, options.dropout_p)
    return y, y1 if has_second else None, added if makes_sum else operands.input


def norm_backward(request: BackwardRequest) -> Gradients:
    """dx, dweight, dbias; None where not wanted."""
    operands, options = request
    wanted = [name in options.gradients for name in Backward._fields]
    made = _norm_backward(
        operands.dy,
        operands.x,
        operands.mean,
        operands.rstd,
        operands.weight,
        operands.dsum,
        options.extents,
        wanted,
        bool(options.zero_centered_weight),
        _torch_dtype(options.dbias_dtype, "dbias_dtype"),
        options.launch.of("backward").sm_margin,
        options.launch.strategy,
    )
    return Gradients(*(each if is_wanted else None for each, is_wanted in zip(made, wanted)))


def recomputing_norm_backward(request: BackwardRequest) -> Gradients:
    """dx, dweight, dbias, None where not wanted, and y in dy's dtype; not differentiable."""
    operands, options = request
    wanted = [name in options.gradients for name in Backward._fields]
    *made, y = _recomputing_norm_backward(
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
    gradients = (each if is_wanted else None for each, is_wanted in zip(made, wanted))
    return Gradients(*gradients, None, y)


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
        _seed_tensor(operands.x, operands.dropout_seed, options.dropout_p),
        operands.y_bias,
        options.extents,
        wanted,
        options.centered,
        bool(options.zero_centered_weight),
        options.x_is_y,
        _torch_dtype(options.dbias_dtype, "dbias_dtype"),
        _torch_dtype(second.dbias_dtype, "dbias1_dtype"),
        _torch_dtype(options.dx_dtype, "dx_dtype"),
        _torch_dtype(options.dresidual_dtype, "dresidual_dtype"),
        options.dropout_p,
        options.launch.of("backward").sm_margin,
        options.launch.strategy,
    )
    return FusedBackward(*(each if is_wanted else None for each, is_wanted in zip(made, wanted)))


def _torch_dtype(dtype: object, name: str) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype_name(dtype, name))


def _launch(options: Options) -> tuple:
    """As a forward operator takes them."""
    tile = options.tile
    fields = None if tile is None else tile.as_ints()
    margin = options.of("forward" if torch.is_grad_enabled() else "inference").sm_margin
    backward_margin = options.of("backward").sm_margin
    return margin, options.strategy, options.statistics, fields, backward_margin


def _seed_tensor(x: Tensor, seed: object, dropout_p: float) -> Tensor | None:
    if dropout_p == 0 or isinstance(seed, Tensor):
        return seed
    if seed is None:  # not draw_seed, which Dynamo cannot trace
        return torch.randint(0, SEED_LIMIT, (1,), dtype=torch.int64, device=x.device)
    return torch.full((1,), seed, dtype=torch.int64, device=x.device)


def _makes_sum(operands: Any, residual_dtype: object, dropout_p: float) -> bool:
    """operands: anything with input, residual and row_scale."""
    dtype = _torch_dtype(residual_dtype, "residual_dtype")
    is_scaled = operands.row_scale is not None or dropout_p > 0
    return operands.residual is not None or is_scaled or dtype not in (None, operands.input.dtype)


# norm_forward.

_NormForward = arguments_of(_norm_forward)


def _forward_request(given: Any) -> ForwardRequest:
    """given: the arguments of norm_forward, or all of these of fused_norm_forward."""
    tile = None if given.tile is None else Tile.from_ints(given.tile)
    options = ForwardOptions(
        given.centered,
        tuple(given.normalized_shape),
        given.eps,
        given.zero_centered_weight,
        given.out_dtype,
        launch=Options(given.strategy, tile, given.statistics, given.sm_margin),
    )
    operands = ForwardOperands(given.input, given.weight, given.bias, given.residual)
    return ForwardRequest(operands, options)


def _forward(*arguments):
    given = _NormForward(*arguments)
    y, mean, rstd, added, *_ = route.forward(_forward_request(given))
    # An operator returns tensors, and none that it was given.
    mean = mean if given.centered else rstd.new_empty(0)
    return y, mean, rstd, given.input.new_empty(0) if given.residual is None else added


def _forward_without_memory(*arguments):
    given = _NormForward(*arguments)
    options = check_forward(_forward_request(given)).options
    x = given.input
    leading, dtype = x.shape[: -len(given.normalized_shape)], formulas.arithmetic(x)
    return (
        x.new_empty(x.shape, dtype=getattr(torch, options.out_dtype)),
        x.new_empty(leading if given.centered else 0, dtype=dtype),
        x.new_empty(leading, dtype=dtype),
        x.new_empty(0 if given.residual is None else x.shape),
    )


def _save_forward(ctx, inputs, output):
    given = _NormForward(*inputs)
    _, mean, rstd, added = output
    if given.residual is None:
        ctx.mark_non_differentiable(mean, rstd, added)
    else:
        ctx.mark_non_differentiable(mean, rstd)
    x = given.input if given.residual is None else added
    ctx.save_for_backward(x, mean if given.centered else None, rstd, given.weight)
    ctx.set_materialize_grads(False)
    ctx.options = BackwardOptions(
        given.centered,
        tuple(given.normalized_shape),
        given.zero_centered_weight,
        dbias_dtype=None if given.bias is None else given.bias.dtype,
        launch=Options(given.strategy, sm_margin=given.backward_sm_margin),
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


def _backward_request(given: Any) -> BackwardRequest:
    """given: the arguments of norm_backward or recomputing_norm_backward."""
    recompute = hasattr(given, "bias")
    dbias_dtype = getattr(given, "dbias_dtype", None)
    if recompute:
        dbias_dtype = None if given.bias is None else given.bias.dtype
    options = BackwardOptions(
        given.mean is not None,
        tuple(given.normalized_shape),
        given.zero_centered_weight,
        tuple(name for name, is_wanted in zip(Backward._fields, given.wanted) if is_wanted),
        dbias_dtype=dbias_dtype,
        recompute=recompute,
        launch=Options(getattr(given, "strategy", None), sm_margin=given.sm_margin),
    )
    operands = BackwardOperands(given.dy, given.x, given.mean, given.rstd, given.weight, given.dsum)
    if recompute:
        operands = operands._replace(bias=given.bias)
    return BackwardRequest(operands, options)


def _or_empty(like: Tensor, gradients: tuple) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if each is None else each for each in gradients)


def _backward(*arguments):
    given = _NormBackward(*arguments)
    return _or_empty(given.x, route.backward(_backward_request(given))[:3])


def _backward_without_memory(*arguments):
    given = _NormBackward(*arguments)
    return _empty_gradients(given, given.dbias_dtype)


def _empty_gradients(given: Any, dbias_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    x, extents = given.x, given.normalized_shape
    own = x.dtype if given.weight is None else given.weight.dtype
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(
            (x.shape, extents, extents), (x.dtype, own, dbias_dtype or own), given.wanted
        )
    )


def _save_backward(ctx, inputs, output):
    given = _NormBackward(*inputs)
    unwanted = (made for made, is_wanted in zip(output, given.wanted) if not is_wanted)
    ctx.mark_non_differentiable(*unwanted)
    ctx.save_for_backward(given.dy, given.x, given.mean, given.rstd, given.weight)
    ctx.set_materialize_grads(False)
    ctx.extents, ctx.zero_centered_weight = given.normalized_shape, given.zero_centered_weight


def _differentiate_backward(ctx, ddx, ddweight, ddbias):
    # mean and rstd are functions of x: what depends on them is in the gradient of x.
    dy, x, mean, rstd, weight = ctx.saved_tensors
    saved = formulas.Saved(x, mean, rstd, weight, ctx.extents, ctx.zero_centered_weight)
    for_dy, for_x, for_weight = formulas.second_derivatives(ddx, ddweight, ddbias, dy, saved)
    wants = ctx.needs_input_grad
    gradients = (for_dy, for_x, None, None, for_weight, ddx, *(None for _ in wants[6:]))
    return tuple(each if is_wanted else None for each, is_wanted in zip(gradients, wants))


def _recomputing_backward(*arguments):
    given = _RecomputingNormBackward(*arguments)
    made = route.backward(_backward_request(given))
    return *_or_empty(given.x, made[:3]), made.y


def _recomputing_backward_without_memory(*arguments):
    given = _RecomputingNormBackward(*arguments)
    bias_dtype = None if given.bias is None else given.bias.dtype
    y = given.x.new_empty(given.x.shape, dtype=given.dy.dtype)
    return *_empty_gradients(given, bias_dtype), y


# With fused options.

_FusedNormForward = arguments_of(_fused_norm_forward)
_FusedNormBackward = arguments_of(_fused_norm_backward)


def _fused_request(given: Any) -> ForwardRequest:
    operands, options = _forward_request(given)
    operands = operands._replace(
        row_scale=given.row_scale,
        dropout_seed=given.dropout_seed,
        weight1=given.weight1,
        bias1=given.bias1,
    )
    options = options._replace(
        residual_dtype=given.residual_dtype,
        dropout_p=given.dropout_p,
        round_x_hat=given.round_x_hat,
        memory_efficient=given.memory_efficient,
    )
    return complete(ForwardRequest(operands, options))


def _fused_forward(*arguments):
    given = _FusedNormForward(*arguments)
    y, mean, rstd, added, y1, _ = route.forward(_fused_request(given))
    empty = given.input.new_empty
    makes_sum = _makes_sum(given, given.residual_dtype, given.dropout_p)
    return (
        y,
        mean if given.centered else rstd.new_empty(0),
        rstd,
        added if makes_sum else empty(0),
        empty(0) if y1 is None else y1,
    )


def _fused_forward_without_memory(*arguments):
    given = _FusedNormForward(*arguments)
    options = check_forward(_fused_request(given)).options
    x = given.input
    leading = x.shape[: -len(given.normalized_shape)]
    y_dtype, sum_dtype = (
        getattr(torch, name) for name in (options.out_dtype, options.residual_dtype)
    )
    dtype = torch.promote_types(sum_dtype, torch.float32)
    makes_sum = _makes_sum(given, given.residual_dtype, given.dropout_p)
    has_second = given.weight1 is not None or given.bias1 is not None
    return (
        x.new_empty(x.shape, dtype=y_dtype),
        x.new_empty(leading if given.centered else 0, dtype=dtype),
        x.new_empty(leading, dtype=dtype),
        x.new_empty(x.shape, dtype=sum_dtype) if makes_sum else x.new_empty(0),
        x.new_empty(x.shape, dtype=y_dtype) if has_second else x.new_empty(0),
    )


def _save_fused_forward(ctx, inputs, output):
    given = _FusedNormForward(*inputs)
    y, mean, rstd, added, y1 = output
    makes_sum = _makes_sum(given, given.residual_dtype, given.dropout_p)
    has_second = given.weight1 is not None or given.bias1 is not None
    unused = (*(() if makes_sum else (added,)), *(() if has_second else (y1,)))
    ctx.mark_non_differentiable(mean, rstd, *unused)
    kept = (added if makes_sum else given.input, mean if given.centered else None)
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
    return _or_empty(given.x, made)


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


def _save_nothing(ctx, inputs, output):
    ctx.set_materialize_grads(False)


def _refuse_second_derivatives(ctx, *gradients):
    raise NotImplementedError(
        "the second derivative of a norm with residual_dtype, row_scale, dropout_p, weight1, "
        "bias1, round_x_hat or memory_efficient, or of recomputing_norm_backward, was asked for; "
        "it has first derivatives only"
    )


for _name, _functions in {
    "norm_forward": (_forward, _forward_without_memory, _save_forward, _differentiate_forward),
    "norm_backward": (
        _backward,
        _backward_without_memory,
        _save_backward,
        _differentiate_backward,
    ),
    "recomputing_norm_backward": (
        _recomputing_backward,
        _recomputing_backward_without_memory,
        _save_nothing,
        _refuse_second_derivatives,
    ),
    "fused_norm_forward": (
        _fused_forward,
        _fused_forward_without_memory,
        _save_fused_forward,
        _differentiate_fused_forward,
    ),
    "fused_norm_backward": (
        _fused_backward,
        _fused_backward_without_memory,
        _save_nothing,
        _refuse_second_derivatives,
    ),
}.items():
    _implementation, _fake, _save, _differentiate = _functions
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _device)
    torch.library.register_fake(f"cupynorm::{_name}", _fake, lib=_library)
    torch.library.register_autograd(
        f"cupynorm::{_name}", _differentiate, setup_context=_save, lib=_library
    )
