"""torch: forward and backward as operators, which the compiler, export and dispatch modes of torch see as one node each.

    cupynorm::norm_forward  -> y, mean, rstd, input + residual    an empty mean for rms_norm, an empty sum without a residual
    cupynorm::norm_backward -> dx, dweight, dbias                 empty where not wanted

Arguments as those of cupynorm.layer_norm_forward and layer_norm_backward; tile has the fields of a cupynorm.Tile in their order,
a backward without a mean is that of rms_norm. Both are differentiable, and known for tensors without memory and any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import formulas, norm
from .calls import Options
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
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_norm_forward, _norm_backward = torch.ops.cupynorm.norm_forward.default, torch.ops.cupynorm.norm_backward.default


def forward(
    centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, mean, rstd, input + residual by the operator."""
    if out_dtype is not None:
        out_dtype = getattr(torch, norm.check_dtype_name(out_dtype, "out_dtype"))
    tile = None if options.tile is None else [getattr(options.tile, name) for name in norm.TILE_FIELDS]
    margin = options.of("forward" if torch.is_grad_enabled() else "inference").sm_margin
    return _norm_forward(
        input, weight, bias, residual, extents, eps, centered, bool(zero_centered_weight), out_dtype, margin,
        options.strategy, options.statistics, tile, options.of("backward").sm_margin,
    )  # fmt: skip


def gradients(dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, *arguments) -> list[Tensor | None]:
    """dx, dweight, dbias by the operator, None where not wanted."""
    made = _norm_backward(dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, *arguments)
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


for _name, _impl, _fake, _save, _differentiate in (
    ("norm_forward", _forward, _forward_without_memory, _save_forward, _differentiate_forward),
    ("norm_backward", _backward, _backward_without_memory, _save_backward, _differentiate_backward),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _device)
    torch.library.register_fake(f"cupynorm::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"cupynorm::{_name}", _differentiate, setup_context=_save, lib=_library)
