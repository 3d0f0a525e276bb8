"""torch: forward and backward as operators, which the compiler, export and dispatch modes of torch see as one node each.

    cupynorm::norm_forward  -> y, mean, rstd, input + residual    an empty mean for rms_norm, an empty sum without a residual
    cupynorm::norm_backward -> dx, dweight, dbias                 empty where not wanted

    cupynorm::fused_norm_forward  -> y, mean, rstd, sum             with residual_dtype, row_scale, dropout_p: an empty sum where
                                                                    it is the input itself
    cupynorm::fused_norm_backward -> dx, dweight, dbias, dresidual  empty where not wanted

Arguments as those of cupynorm.layer_norm_forward and layer_norm_backward; tile has the fields of a cupynorm.Tile in their order,
a backward without a mean is that of rms_norm. All are differentiable but fused_norm_backward, and known for tensors without memory
and any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import formulas, fused, norm
from .calls import NO_EXTRAS, Extras, Options
from .strategies import Tile

_library = torch.library.Library("cupynorm", "DEF")
for _schema in (
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, SymInt[] normalized_shape, float? eps, "
    "bool centered, bool zero_centered_weight, ScalarType? out_dtype, int sm_margin, str? strategy, str? statistics, int[]? tile, "
    "int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)",
    "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? dsum, SymInt[] normalized_shape, "
    "bool[3] wanted, bool zero_centered_weight, ScalarType? dbias_dtype, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    "fused_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? row_scale, Tensor? dropout_seed, "
    "SymInt[] normalized_shape, float? eps, bool centered, bool zero_centered_weight, ScalarType? out_dtype, "
    "ScalarType? residual_dtype, float dropout_p, int sm_margin, str? strategy, str? statistics, int[]? tile, "
    "int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)",
    "fused_norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? dsum, Tensor? row_scale, "
    "Tensor? dropout_seed, SymInt[] normalized_shape, bool[4] wanted, bool zero_centered_weight, ScalarType? dbias_dtype, "
    "ScalarType? dx_dtype, ScalarType? dresidual_dtype, float dropout_p, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_norm_forward, _norm_backward = torch.ops.cupynorm.norm_forward.default, torch.ops.cupynorm.norm_backward.default
_fused_norm_forward = torch.ops.cupynorm.fused_norm_forward.default
_fused_norm_backward = torch.ops.cupynorm.fused_norm_backward.default


def forward(
    centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, mean, rstd, input + residual by the operator."""
    return _norm_forward(
        input, weight, bias, residual, extents, eps, centered, bool(zero_centered_weight), _dtype(out_dtype, "out_dtype"),
        *_plain(options),
    )  # fmt: skip


def _dtype(dtype: object, name: str) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, norm.check_dtype_name(dtype, name))


def _plain(options: Options) -> tuple:
    """As a forward operator takes them."""
    tile = None if options.tile is None else [getattr(options.tile, name) for name in norm.TILE_FIELDS]
    margin = options.of("forward" if torch.is_grad_enabled() else "inference").sm_margin
    return margin, options.strategy, options.statistics, tile, options.of("backward").sm_margin


def gradients(dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, *arguments) -> list[Tensor | None]:
    """dx, dweight, dbias by the operator, None where not wanted."""
    made = _norm_backward(dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, *arguments)
    return [gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted)]


def fused_forward(
    centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options, extras
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the sum by the operator; the seed is drawn before it, so that torch sees who draws."""
    y, _, _, added = _fused_norm_forward(
        input, weight, bias, residual, extras.row_scale, _seed_tensor(input, extras), extents, eps, centered,
        bool(zero_centered_weight), _dtype(out_dtype, "out_dtype"), _dtype(extras.residual_dtype, "residual_dtype"),
        extras.dropout_p, *_plain(options),
    )  # fmt: skip
    makes_sum = _makes_sum(input, residual, extras.row_scale, extras.residual_dtype, extras.dropout_p)
    return y, added if makes_sum else input


def _seed_tensor(x: Tensor, extras: Extras) -> Tensor | None:
    seed = extras.dropout_seed
    if extras.dropout_p == 0 or isinstance(seed, Tensor):
        return seed
    if seed is None:
        return fused.draw_seed(x)
    return torch.full((1,), seed, dtype=torch.int64, device=x.device)


def _makes_sum(input, residual, row_scale, residual_dtype, dropout_p) -> bool:
    own = residual_dtype is not None and _dtype(residual_dtype, "residual_dtype") != input.dtype
    return residual is not None or row_scale is not None or dropout_p > 0 or own


def fused_gradients(
    dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, zero_centered_weight, dbias_dtype, dx_dtype, dresidual_dtype, extras,
    *options,
) -> list[Tensor | None]:  # fmt: skip
    """dx, dweight, dbias, dresidual by the operator, None where not wanted."""
    dtypes = (_dtype(dtype, "dtype") for dtype in (dbias_dtype, dx_dtype, dresidual_dtype))
    made = _fused_norm_backward(
        dy, x, mean, rstd, weight, dsum, extras.row_scale, _seed_tensor(x, extras), normalized_shape, wanted, zero_centered_weight,
        *dtypes, extras.dropout_p, *options,
    )  # fmt: skip
    return [gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted)]


# Forward.


def _forward(
    input, weight, bias, residual, normalized_shape, eps, centered, zero_centered_weight, out_dtype, sm_margin, strategy, statistics,
    tile, _=0,
):  # fmt: skip
    options = Options(strategy, None if tile is None else Tile(*tile), statistics, sm_margin)
    prepared, given = norm.prepare_forward(
        centered, input, tuple(normalized_shape), weight, bias, eps, residual, zero_centered_weight, out_dtype, None, options
    )
    y, mean, rstd, added = prepared.run(*given)
    # An operator returns tensors, and none that it was given.
    return y, mean if centered else rstd.new_empty(0), rstd, input.new_empty(0) if residual is None else added


def _forward_without_memory(
    input, weight, bias, residual, normalized_shape, eps, centered, zero_centered_weight, out_dtype, *options
):  # fmt: skip
    *_, y_dtype = norm.check_forward(centered, input, tuple(normalized_shape), weight, bias, eps, residual, out_dtype)
    leading, dtype = input.shape[: -len(normalized_shape)], formulas.arithmetic(input)
    return (
        input.new_empty(input.shape, dtype=getattr(torch, y_dtype)),
        input.new_empty(leading if centered else 0, dtype=dtype),
        input.new_empty(leading, dtype=dtype),
        input.new_empty(0 if residual is None else input.shape),
    )


def _save_forward(ctx, inputs, output):
    input, weight, bias, residual, normalized_shape, _, centered, zero_centered_weight, _, _, strategy, _, _, sm_margin = inputs
    _, mean, rstd, added = output
    if residual is None:
        ctx.mark_non_differentiable(mean, rstd, added)
    else:
        ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(input if residual is None else added, mean if centered else None, rstd, weight)
    ctx.set_materialize_grads(False)
    ctx.normalized_shape = normalized_shape
    ctx.arguments = (zero_centered_weight, None if bias is None else bias.dtype, sm_margin, strategy)


def _differentiate_forward(ctx, dy, _dmean, _drstd, dsum):
    wants_input, wants_weight, wants_bias, wants_residual, *rest = ctx.needs_input_grad
    if dy is None:
        dx, dweight, dbias = dsum, None, None
    else:
        wanted = (wants_input or wants_residual, wants_weight, wants_bias)
        dx, dweight, dbias = gradients(dy, *ctx.saved_tensors, dsum, ctx.normalized_shape, wanted, *ctx.arguments)
    return dx if wants_input else None, dweight, dbias, dx if wants_residual else None, *(None for _ in rest)


# Backward.


def _backward(
    dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, zero_centered_weight, dbias_dtype, sm_margin, strategy
):  # fmt: skip
    names = [name for name, is_wanted in zip(norm.Backward._fields, wanted) if is_wanted]
    prepared, given = norm.prepare_backward(
        mean is not None, dy, x, mean, rstd, tuple(normalized_shape), weight, zero_centered_weight, dsum, names, None, dbias_dtype,
        Options(strategy, sm_margin=sm_margin),
    )  # fmt: skip
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in prepared.run(*given))


def _backward_without_memory(
    dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, zero_centered_weight, dbias_dtype, *options
):  # fmt: skip
    own = x.dtype if weight is None else weight.dtype
    shapes, dtypes = (x.shape, normalized_shape, normalized_shape), (x.dtype, own, dbias_dtype or own)
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(shapes, dtypes, wanted)
    )


def _save_backward(ctx, inputs, output):
    dy, x, mean, rstd, weight, _, normalized_shape, wanted, zero_centered_weight, *_ = inputs
    ctx.mark_non_differentiable(*(made for made, is_wanted in zip(output, wanted) if not is_wanted))
    ctx.save_for_backward(dy, x, mean, rstd, weight)
    ctx.set_materialize_grads(False)
    ctx.arguments = normalized_shape, zero_centered_weight


def _differentiate_backward(ctx, ddx, ddweight, ddbias):
    # mean and rstd are functions of x: what depends on them is in the gradient of x.
    for_dy, for_x, for_weight = formulas.second_derivatives(ddx, ddweight, ddbias, *ctx.saved_tensors, *ctx.arguments)
    wants = ctx.needs_input_grad
    return tuple(
        gradient if wanted else None
        for gradient, wanted in zip((for_dy, for_x, None, None, for_weight, ddx, *(None for _ in wants[6:])), wants)
    )


# With fused options.


def _fused_forward(
    input, weight, bias, residual, row_scale, dropout_seed, normalized_shape, eps, centered, zero_centered_weight, out_dtype,
    residual_dtype, dropout_p, sm_margin, strategy, statistics, tile, _=0,
):  # fmt: skip
    options = Options(strategy, None if tile is None else Tile(*tile), statistics, sm_margin)
    extras = norm._extras(residual_dtype, row_scale, dropout_p, dropout_seed) or NO_EXTRAS
    prepared, given = fused.prepare_forward(
        centered, input, tuple(normalized_shape), weight, bias, eps, residual, zero_centered_weight, out_dtype, None, options,
        extras, norm.FOR_STATISTICS,
    )  # fmt: skip
    y, mean, rstd, added, _ = prepared.run(*given)
    return y, mean if centered else rstd.new_empty(0), rstd, added if prepared.makes_sum else input.new_empty(0)


def _fused_forward_without_memory(
    input, weight, bias, residual, row_scale, dropout_seed, normalized_shape, eps, centered, zero_centered_weight, out_dtype,
    residual_dtype, dropout_p, *options,
):  # fmt: skip
    extras = norm._extras(residual_dtype, row_scale, dropout_p, dropout_seed) or NO_EXTRAS
    *_, y_dtype, sum_dtype, _ = fused.check_forward(
        centered, input, tuple(normalized_shape), weight, bias, eps, residual, out_dtype, extras
    )
    leading, sum_dtype = input.shape[: -len(normalized_shape)], getattr(torch, sum_dtype)
    dtype = torch.promote_types(sum_dtype, torch.float32)
    made = _makes_sum(input, residual, row_scale, residual_dtype, dropout_p)
    return (
        input.new_empty(input.shape, dtype=getattr(torch, y_dtype)),
        input.new_empty(leading if centered else 0, dtype=dtype),
        input.new_empty(leading, dtype=dtype),
        input.new_empty(input.shape, dtype=sum_dtype) if made else input.new_empty(0),
    )


def _save_fused_forward(ctx, inputs, output):
    input, weight, bias, residual, row_scale, seed, normalized_shape, _, centered, zero_centered_weight, *rest = inputs
    _, residual_dtype, dropout_p, _, strategy, _, _, sm_margin = rest
    _, mean, rstd, added = output
    makes_sum = _makes_sum(input, residual, row_scale, residual_dtype, dropout_p)
    ctx.mark_non_differentiable(*((mean, rstd) if makes_sum else (mean, rstd, added)))
    ctx.save_for_backward(added if makes_sum else input, mean if centered else None, rstd, weight, row_scale, seed)
    ctx.set_materialize_grads(False)
    ctx.normalized_shape, ctx.dropout_p = normalized_shape, dropout_p
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (bias, input, residual))
    ctx.arguments, ctx.options = (zero_centered_weight, *dtypes), (sm_margin, strategy)


def _differentiate_fused_forward(ctx, dy, _dmean, _drstd, dsum):
    wants_dx, wants_dweight, wants_dbias, wants_dresidual, wants_row_scale, *rest = ctx.needs_input_grad
    x, mean, rstd, weight, row_scale, seed = ctx.saved_tensors
    wanted = (wants_dx, wants_dweight, wants_dbias, wants_dresidual)
    extras = Extras(None, row_scale, ctx.dropout_p, seed)
    made = fused_gradients(
        torch.zeros_like(x) if dy is None else dy, x, mean, rstd, weight, dsum, ctx.normalized_shape, wanted, *ctx.arguments, extras,
        *ctx.options,
    )  # fmt: skip
    return *made, None, *(None for _ in rest)


def _fused_backward(
    dy, x, mean, rstd, weight, dsum, row_scale, dropout_seed, normalized_shape, wanted, zero_centered_weight, dbias_dtype, dx_dtype,
    dresidual_dtype, dropout_p, sm_margin, strategy,
):  # fmt: skip
    names = tuple(name for name, is_wanted in zip(norm.FusedBackward._fields, wanted) if is_wanted)
    prepared, given = fused.prepare_backward(
        mean is not None, dy, x, mean, rstd, tuple(normalized_shape), weight, zero_centered_weight, dsum, names, None, dbias_dtype,
        Options(strategy, sm_margin=sm_margin), dx_dtype, dresidual_dtype, Extras(None, row_scale, dropout_p, dropout_seed),
    )  # fmt: skip
    dx, dweight, dbias, dresidual = prepared.run(*given)
    if dresidual is not None and dresidual is dx:  # an operator returns no tensor twice
        dresidual = dx.clone()
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in (dx, dweight, dbias, dresidual))


def _fused_backward_without_memory(
    dy, x, mean, rstd, weight, dsum, row_scale, dropout_seed, normalized_shape, wanted, zero_centered_weight, dbias_dtype, dx_dtype,
    dresidual_dtype, *options,
):  # fmt: skip
    own = x.dtype if weight is None else weight.dtype
    shapes = (x.shape, normalized_shape, normalized_shape, x.shape)
    dtypes = (dx_dtype or x.dtype, own, dbias_dtype or own, dresidual_dtype or x.dtype)
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(shapes, dtypes, wanted)
    )


def _save_nothing(ctx, inputs, output):
    ctx.set_materialize_grads(False)


def _refuse_second_derivatives(ctx, *gradients):
    raise NotImplementedError(
        "the second derivative of a norm with residual_dtype, row_scale or dropout_p was asked for; it has first derivatives only"
    )


for _name, _impl, _fake, _save, _differentiate in (
    ("norm_forward", _forward, _forward_without_memory, _save_forward, _differentiate_forward),
    ("norm_backward", _backward, _backward_without_memory, _save_backward, _differentiate_backward),
    (
        "fused_norm_forward",
        _fused_forward,
        _fused_forward_without_memory,
        _save_fused_forward,
        _differentiate_fused_forward,
    ),
    ("fused_norm_backward", _fused_backward, _fused_backward_without_memory, _save_nothing, _refuse_second_derivatives),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _device)
    torch.library.register_fake(f"cupynorm::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"cupynorm::{_name}", _differentiate, setup_context=_save, lib=_library)
