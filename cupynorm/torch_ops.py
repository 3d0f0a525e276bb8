"""torch: forward and backward as operators, which the compiler, export and dispatch modes of torch see as one node each.

    cupynorm::norm_forward  -> y, mean, rstd, input + residual    an empty mean for rms_norm, an empty sum without a residual
    cupynorm::norm_backward -> dx, dweight, dbias                 empty where not wanted
    cupynorm::recomputing_norm_backward -> dx, dweight, dbias, y   the same, and y again

    cupynorm::fused_norm_forward  -> y, mean, rstd, sum, y1   with fused options: an empty sum where it is the input itself
    cupynorm::fused_norm_backward -> dx, dweight, dbias, dresidual, dweight1, dbias1

Arguments as those of cupynorm.layer_norm_forward and layer_norm_backward; tile has the fields of a cupynorm.Tile in their
order, a backward without a mean is that of rms_norm. All are differentiable but fused_norm_backward and
recomputing_norm_backward, and known for tensors without memory and any number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import formulas, fused, norm
from .calls import NOTHING_FUSED, FusedOptions, Options
from .problem import Tile

GRADIENTS = ("dx", "dweight", "dbias", "dresidual", "dweight1", "dbias1")  # in the order of fused_norm_forward's first tensors

_library = torch.library.Library("cupynorm", "DEF")
for _schema in (
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, SymInt[] normalized_shape, float? eps, "
    "bool centered, bool zero_centered_weight, ScalarType? out_dtype, int sm_margin, str? strategy, str? statistics, "
    "int[]? tile, int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)",
    "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? dsum, SymInt[] normalized_shape, "
    "bool[3] wanted, bool zero_centered_weight, ScalarType? dbias_dtype, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    "recomputing_norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? dsum, "
    "SymInt[] normalized_shape, bool[3] wanted, bool zero_centered_weight, int sm_margin) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y)",
    "fused_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? weight1, Tensor? bias1, "
    "Tensor? row_scale, Tensor? dropout_seed, SymInt[] normalized_shape, float? eps, bool centered, bool zero_centered_weight, "
    "ScalarType? out_dtype, ScalarType? residual_dtype, float dropout_p, bool round_x_hat, bool memory_efficient, "
    "int sm_margin, str? strategy, str? statistics, int[]? tile, int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum, Tensor y1)",
    "fused_norm_backward(Tensor? dy, Tensor? dy1, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? weight1, "
    "Tensor? dsum, Tensor? row_scale, Tensor? dropout_seed, Tensor? bias, SymInt[] normalized_shape, bool[6] wanted, "
    "bool centered, bool zero_centered_weight, bool memory_efficient, "
    "ScalarType? dbias_dtype, ScalarType? dbias1_dtype, ScalarType? dx_dtype, ScalarType? dresidual_dtype, float dropout_p, "
    "int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dweight1, Tensor dbias1)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_norm_forward, _norm_backward = torch.ops.cupynorm.norm_forward.default, torch.ops.cupynorm.norm_backward.default
_recomputing_norm_backward = torch.ops.cupynorm.recomputing_norm_backward.default
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


def gradients_and_y(dy, x, mean, rstd, weight, bias, dsum, normalized_shape, wanted, *arguments) -> list[Tensor | None]:
    """dx, dweight, dbias, None where not wanted, and y in dy's dtype by the operator, which is not differentiable."""
    made = _recomputing_norm_backward(dy, x, mean, rstd, weight, bias, dsum, normalized_shape, wanted, *arguments)
    return [made_one if is_wanted else None for made_one, is_wanted in zip(made, (*wanted, True))]


def fused_forward(
    centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options, fused_options
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """y, y1 and the sum by the operator; the seed is drawn before it, so that torch sees who draws."""
    y, _, _, added, y1 = _fused_norm_forward(
        input, weight, bias, residual, fused_options.weight1, fused_options.bias1, fused_options.row_scale,
        _seed_tensor(input, fused_options), extents, eps, centered, bool(zero_centered_weight), _dtype(out_dtype, "out_dtype"),
        _dtype(fused_options.residual_dtype, "residual_dtype"), fused_options.dropout_p, fused_options.round_x_hat,
        fused_options.memory_efficient, *_plain(options),
    )  # fmt: skip
    makes_sum = _makes_sum(input, residual, fused_options.row_scale, fused_options.residual_dtype, fused_options.dropout_p)
    has_second = fused_options.weight1 is not None or fused_options.bias1 is not None
    return y, y1 if has_second else None, added if makes_sum else input


def _seed_tensor(x: Tensor, fused_options: FusedOptions) -> Tensor | None:
    seed = fused_options.dropout_seed
    if fused_options.dropout_p == 0 or isinstance(seed, Tensor):
        return seed
    if seed is None:
        return fused.draw_seed(x)
    return torch.full((1,), seed, dtype=torch.int64, device=x.device)


def _makes_sum(input, residual, row_scale, residual_dtype, dropout_p) -> bool:
    own = residual_dtype is not None and _dtype(residual_dtype, "residual_dtype") != input.dtype
    return residual is not None or row_scale is not None or dropout_p > 0 or own


def fused_gradients(
    centered, dy, dy1, x, mean, rstd, extents, weight, zero_centered_weight, dsum, gradients, _, dbias_dtype, options, dx_dtype,
    dresidual_dtype, fused_options, dbias1_dtype, of_y,
) -> norm.FusedBackward:  # fmt: skip
    """As fused.backward, by the operator."""
    wanted = [name in gradients for name in norm.FusedBackward._fields]
    dtypes = (_dtype(dtype, "dtype") for dtype in (dbias_dtype, dbias1_dtype, dx_dtype, dresidual_dtype))
    made = _fused_norm_backward(
        dy, dy1, x, mean, rstd, weight, fused_options.weight1, dsum, fused_options.row_scale, _seed_tensor(x, fused_options),
        None if of_y is None else of_y[1], extents, wanted, centered, zero_centered_weight, of_y is not None, *dtypes,
        fused_options.dropout_p, options.of("backward").sm_margin, options.strategy,
    )  # fmt: skip
    return norm.FusedBackward(*(gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted)))


# Forward.


def _forward(
    input, weight, bias, residual, normalized_shape, eps, centered, zero_centered_weight, out_dtype, sm_margin, strategy,
    statistics, tile, _=0,
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
        mean is not None, dy, x, mean, rstd, tuple(normalized_shape), weight, zero_centered_weight, dsum, names, None,
        dbias_dtype, Options(strategy, sm_margin=sm_margin),
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


def _recomputing_backward(
    dy, x, mean, rstd, weight, bias, dsum, normalized_shape, wanted, zero_centered_weight, sm_margin
):  # fmt: skip
    names = tuple(name for name, is_wanted in zip(norm.Backward._fields, wanted) if is_wanted)
    prepared, given = fused.prepare_backward(
        mean is not None, dy, x, mean, rstd, tuple(normalized_shape), weight, zero_centered_weight, dsum, names, None,
        None if bias is None else bias.dtype, Options(sm_margin=sm_margin), None, None, None, recomputed=(bias,),
    )  # fmt: skip
    dx, dweight, dbias, _, y = prepared.run(*given)
    return *(x.new_empty(0) if gradient is None else gradient for gradient in (dx, dweight, dbias)), y


def _recomputing_backward_without_memory(
    dy, x, mean, rstd, weight, bias, dsum, normalized_shape, wanted, zero_centered_weight, _
):  # fmt: skip
    bias_dtype = None if bias is None else bias.dtype
    gradients = _backward_without_memory(
        dy, x, mean, rstd, weight, dsum, normalized_shape, wanted, zero_centered_weight, bias_dtype
    )
    return *gradients, x.new_empty(x.shape, dtype=dy.dtype)


# With fused options.


def _fused_forward(
    input, weight, bias, residual, weight1, bias1, row_scale, dropout_seed, normalized_shape, eps, centered,
    zero_centered_weight, out_dtype, residual_dtype, dropout_p, round_x_hat, memory_efficient, sm_margin, strategy, statistics,
    tile, _=0,
):  # fmt: skip
    options = Options(strategy, None if tile is None else Tile(*tile), statistics, sm_margin)
    fused_options = norm._fused_options(
        residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1, round_x_hat, memory_efficient
    )
    fused_options = fused_options or NOTHING_FUSED
    prepared, given = fused.prepare_forward(
        centered, input, tuple(normalized_shape), weight, bias, eps, residual, zero_centered_weight, out_dtype, None, options,
        fused_options, norm.FOR_STATISTICS,
    )  # fmt: skip
    y, mean, rstd, added, y1, _ = prepared.run(*given)
    empty = input.new_empty
    return (
        y,
        mean if centered else rstd.new_empty(0),
        rstd,
        added if prepared.makes_sum else empty(0),
        empty(0) if y1 is None else y1,
    )


def _fused_forward_without_memory(
    input, weight, bias, residual, weight1, bias1, row_scale, dropout_seed, normalized_shape, eps, centered,
    zero_centered_weight, out_dtype, residual_dtype, dropout_p, round_x_hat, memory_efficient, *options,
):  # fmt: skip
    fused_options = norm._fused_options(
        residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1, round_x_hat, memory_efficient
    )
    fused_options = fused_options or NOTHING_FUSED
    *_, y_dtype, sum_dtype, _ = fused.check_forward(
        centered, input, tuple(normalized_shape), weight, bias, eps, residual, out_dtype, fused_options
    )
    leading, y_dtype, sum_dtype = input.shape[: -len(normalized_shape)], getattr(torch, y_dtype), getattr(torch, sum_dtype)
    dtype = torch.promote_types(sum_dtype, torch.float32)
    made = _makes_sum(input, residual, row_scale, residual_dtype, dropout_p)
    return (
        input.new_empty(input.shape, dtype=y_dtype),
        input.new_empty(leading if centered else 0, dtype=dtype),
        input.new_empty(leading, dtype=dtype),
        input.new_empty(input.shape, dtype=sum_dtype) if made else input.new_empty(0),
        input.new_empty(input.shape, dtype=y_dtype) if fused_options.has_second else input.new_empty(0),
    )


def _save_fused_forward(ctx, inputs, output):
    (
        input,
        weight,
        bias,
        residual,
        weight1,
        bias1,
        row_scale,
        seed,
        normalized_shape,
        _,
        centered,
        zero_centered_weight,
        *rest,
    ) = inputs
    _, residual_dtype, dropout_p, _, memory_efficient, _, strategy, _, _, sm_margin = rest
    y, mean, rstd, added, y1 = output
    makes_sum = _makes_sum(input, residual, row_scale, residual_dtype, dropout_p)
    has_second = weight1 is not None or bias1 is not None
    ctx.mark_non_differentiable(mean, rstd, *(() if makes_sum else (added,)), *(() if has_second else (y1,)))
    kept = (added if makes_sum else input, mean if centered else None)
    if memory_efficient:
        kept = (y, None)
    ctx.save_for_backward(*kept, rstd, weight, weight1, row_scale, seed, bias if memory_efficient else None)
    ctx.memory_efficient = memory_efficient
    ctx.set_materialize_grads(False)
    ctx.extents, ctx.dropout_p = normalized_shape, dropout_p
    ctx.centered, ctx.zero_centered_weight = centered, zero_centered_weight
    ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (bias, input, residual, bias1))
    ctx.options = Options(strategy, sm_margin=sm_margin)


def _differentiate_fused_forward(ctx, dy, _dmean, _drstd, dsum, dy1):
    x, mean, rstd, weight, weight1, row_scale, seed, bias = ctx.saved_tensors
    if dy is None and dy1 is None:
        dy = torch.zeros_like(x)
    absent = {"dweight", "dbias"} if dy is None else set()
    absent |= {"dweight1", "dbias1"} if dy1 is None else set()
    names = {name for name, is_wanted in zip(GRADIENTS, ctx.needs_input_grad) if is_wanted} - absent
    bias_dtype, dx_dtype, dresidual_dtype, bias1_dtype = ctx.dtypes
    made = fused_gradients(
        ctx.centered, dy, dy1, x, mean, rstd, ctx.extents, weight, ctx.zero_centered_weight, dsum, names, None, bias_dtype,
        ctx.options, dx_dtype, dresidual_dtype, FusedOptions(None, row_scale, ctx.dropout_p, seed, weight1), bias1_dtype,
        (weight, bias) if ctx.memory_efficient else None,
    )  # fmt: skip
    return *(getattr(made, name) for name in GRADIENTS), *(None for _ in ctx.needs_input_grad[len(GRADIENTS) :])


def _fused_backward(
    dy, dy1, x, mean, rstd, weight, weight1, dsum, row_scale, dropout_seed, bias, normalized_shape, wanted, centered,
    zero_centered_weight, memory_efficient, dbias_dtype, dbias1_dtype, dx_dtype, dresidual_dtype, dropout_p, sm_margin,
    strategy,
):  # fmt: skip
    made = fused.backward(
        centered, dy, dy1, x, mean, rstd, tuple(normalized_shape), weight, zero_centered_weight, dsum,
        tuple(name for name, is_wanted in zip(norm.FusedBackward._fields, wanted) if is_wanted), None, dbias_dtype,
        Options(strategy, sm_margin=sm_margin), dx_dtype, dresidual_dtype,
        FusedOptions(None, row_scale, dropout_p, dropout_seed, weight1), dbias1_dtype,
        (weight, bias) if memory_efficient else None,
    )  # fmt: skip
    if made.dresidual is not None and made.dresidual is made.dx:  # an operator returns no tensor twice
        made = made._replace(dresidual=made.dx.clone())
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in made)


def _fused_backward_without_memory(
    dy, dy1, x, mean, rstd, weight, weight1, dsum, row_scale, dropout_seed, bias, normalized_shape, wanted, centered,
    zero_centered_weight, memory_efficient, dbias_dtype, dbias1_dtype, dx_dtype, dresidual_dtype, *options,
):  # fmt: skip
    own, own1 = (x.dtype if each is None else each.dtype for each in (weight, weight1))
    shapes = (x.shape, normalized_shape, normalized_shape, x.shape, normalized_shape, normalized_shape)
    dtypes = (dx_dtype or x.dtype, own, dbias_dtype or own, dresidual_dtype or x.dtype, own1, dbias1_dtype or own1)
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(shapes, dtypes, wanted)
    )


def _save_nothing(ctx, inputs, output):
    ctx.set_materialize_grads(False)


def _refuse_second_derivatives(ctx, *gradients):
    raise NotImplementedError(
        "the second derivative of a norm with residual_dtype, row_scale, dropout_p, weight1, bias1, round_x_hat or "
        "memory_efficient, or of recomputing_norm_backward, was asked for; it has first derivatives only"
    )


for _name, _impl, _fake, _save, _differentiate in (
    ("norm_forward", _forward, _forward_without_memory, _save_forward, _differentiate_forward),
    ("norm_backward", _backward, _backward_without_memory, _save_backward, _differentiate_backward),
    (
        "recomputing_norm_backward",
        _recomputing_backward,
        _recomputing_backward_without_memory,
        _save_nothing,
        _refuse_second_derivatives,
    ),
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
