"""torch: forward and backward as operators. torch.compile, torch.export and dispatch modes see each
as one node. schemas.py describes them.

A request goes through an operator in three steps, which all operators share:

    call_forward, call_backward           the request as the arguments that the schema names
    forward_request, backward_request     these arguments as a request again
    route.forward, route.backward         the call itself; for fake tensors its shapes and dtypes

This file has those of a plain norm, which are differentiable twice. fused_operators.py and
functor_operators.py have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Options,
    SecondGradient,
    makes_sum,
)
from ..norm.results import Backward, FusedBackward, FusedForward, Gradients
from ..plan.functors import Functors, bind_all, from_text
from ..plan.problem import Tile
from . import decompositions, formulas
from .dtypes import name_of
from .schemas import (
    arguments_of,
    refuse_second_derivatives,
    register,
    save_nothing,
    torch_dtype,
)

NormForward = arguments_of(torch.ops.cupynorm.norm_forward.default)
_NormBackward = arguments_of(torch.ops.cupynorm.norm_backward.default)
_RecomputingNormBackward = arguments_of(torch.ops.cupynorm.recomputing_norm_backward.default)
_NO_SECOND = SecondGradient(None)


# Calls by the operators.


def norm_forward(request: ForwardRequest) -> FusedForward:
    """As route.forward."""
    return call_forward(NormForward, request)


def norm_backward(request: BackwardRequest) -> Gradients:
    """dx, dweight, dbias; None where not wanted."""
    return Gradients(*call_backward(_NormBackward, request, Backward._fields))


def recomputing_norm_backward(request: BackwardRequest) -> Gradients:
    """dx, dweight, dbias, None where not wanted, and y in dy's dtype; not differentiable."""
    *gradients, y = call_backward(_RecomputingNormBackward, request, Backward._fields)
    return Gradients(*gradients, None, y)


# From a request to the arguments of an operator. torch.compile traces this.


def call_forward(signature: Any, request: ForwardRequest) -> FusedForward:
    """As route.forward, by an operator. signature: arguments_of it.

    The seed is drawn before the operator, so that torch sees who draws.
    """
    operands, options = request
    launch = options.launch
    kind = "forward" if torch.is_grad_enabled() else "inference"
    given = dict(zip(ForwardOperands._fields, operands))
    given.update(zip(ForwardOptions._fields, options))
    given.update(
        dropout_seed=_seed_tensor(operands.input, operands.dropout_seed, options.dropout_p),
        normalized_shape=options.extents,
        zero_centered_weight=bool(options.zero_centered_weight),
        out_dtype=torch_dtype(options.out_dtype, "out_dtype"),
        residual_dtype=torch_dtype(options.residual_dtype, "residual_dtype"),
        sm_margin=launch.of(kind).sm_margin,
        strategy=launch.strategy,
        statistics=launch.statistics,
        tile=None if launch.tile is None else launch.tile.as_ints(),
        backward_sm_margin=launch.of("backward").sm_margin,
    )
    functors = operands.functors
    if functors is not None:
        given.update(
            arrays=list(functors.arrays()),
            load=None if functors.load is None else functors.load.functor.text,
            store=None if functors.store is None else functors.store.functor.text,
            numbers=list(functors.numbers()),
        )
    y, mean, rstd, added, *y1 = signature.operator(*[given[name] for name in signature._fields])
    has_second = operands.weight1 is not None or operands.bias1 is not None
    return FusedForward(
        y,
        mean if options.centered else None,
        rstd,
        added if has_sum(request) else operands.input,
        y1[0] if has_second else None,
        given["dropout_seed"],
    )


def call_backward(
    signature: Any,
    request: BackwardRequest,
    names: tuple[str, ...],
    second: SecondGradient = _NO_SECOND,
) -> list[Tensor | None]:
    """The results of a backward operator; None for a gradient that is not wanted.

    signature: arguments_of it. names: of its gradients, in the order of its results.
    """
    operands, options = request
    wanted = [name in options.gradients for name in names]
    given = dict(zip(BackwardOperands._fields, operands))
    given.update(zip(BackwardOptions._fields, options))
    given.update(
        dy1=second.dy,
        weight1=second.weight,
        bias=operands.y_bias if options.x_is_y else operands.bias,
        dropout_seed=_seed_tensor(operands.x, operands.dropout_seed, options.dropout_p),
        normalized_shape=options.extents,
        wanted=wanted,
        zero_centered_weight=bool(options.zero_centered_weight),
        memory_efficient=options.x_is_y,
        dbias_dtype=torch_dtype(options.dbias_dtype, "dbias_dtype"),
        dbias1_dtype=torch_dtype(second.dbias_dtype, "dbias1_dtype"),
        dx_dtype=torch_dtype(options.dx_dtype, "dx_dtype"),
        dresidual_dtype=torch_dtype(options.dresidual_dtype, "dresidual_dtype"),
        sm_margin=options.launch.of("backward").sm_margin,
        strategy=options.launch.strategy,
    )
    results = signature.operator(*[given[name] for name in signature._fields])
    gradients = [each if is_wanted else None for each, is_wanted in zip(results, wanted)]
    return gradients + list(results[len(names) :])


def _seed_tensor(x: Tensor, seed: object, dropout_p: float) -> Tensor | None:
    """The seed as a tensor on x's device, drawn if there is none; None without dropout."""
    if dropout_p == 0 or isinstance(seed, Tensor):
        return seed
    if seed is None:
        return draw_seed(x)
    return torch.full((1,), seed, dtype=torch.int64, device=x.device)


def draw_seed(x: Tensor) -> Tensor:
    """As norm.prepared.draw_seed, which Dynamo cannot trace."""
    return torch.randint(0, SEED_LIMIT, (1,), dtype=torch.int64, device=x.device)


def has_sum(request: ForwardRequest) -> bool:
    """Whether the normalised row is not the input itself."""
    return makes_sum(request, name_of(request.operands.input.dtype))


# From the arguments of an operator to a request.


def forward_request(call: Any) -> ForwardRequest:
    """call: the arguments of a forward operator."""
    operands = ForwardOperands(
        call.input,
        call.weight,
        call.bias,
        call.residual,
        None,
        call.row_scale,
        call.dropout_seed,
        call.weight1,
        call.bias1,
        None,
        None,
        _functors_of(call),
    )
    tile = None if call.tile is None else Tile.from_ints(call.tile)
    options = ForwardOptions(
        call.centered,
        tuple(call.normalized_shape),
        call.eps,
        call.zero_centered_weight,
        call.out_dtype,
        call.residual_dtype,
        call.dropout_p,
        call.round_x_hat,
        call.memory_efficient,
        None,
        Options(call.strategy, tile, call.statistics, call.sm_margin),
    )
    request = ForwardRequest(operands, options)
    return with_checked_options(request) if call.has_fused_options else request


def names_of(names: Iterable[str], wanted: Iterable[bool]) -> tuple[str, ...]:
    """The names of what is wanted."""
    return tuple(name for name, is_wanted in zip(names, wanted) if is_wanted)


def backward_request(call: Any, *, recompute: bool = False) -> BackwardRequest:
    """call: the arguments of a backward operator. recompute: also make y."""
    functors, functor_gradients = _functors_of(call), ()
    gradients = names_of(FusedBackward._fields, call.wanted)
    if functors is not None:
        functor_gradients = names_of(functors.names(), call.wanted_arrays)
        # The kernel that writes dx also writes the gradients of the arrays.
        gradients = gradients if "dx" in gradients else ("dx", *gradients)
    options = BackwardOptions(
        call.centered or call.mean is not None,
        tuple(call.normalized_shape),
        call.zero_centered_weight,
        gradients,
        call.dx_dtype,
        None,
        call.dbias_dtype,
        call.dresidual_dtype,
        call.dropout_p,
        call.memory_efficient,
        recompute,
        False,
        functor_gradients,
        Options(call.strategy, None, None, call.sm_margin),
    )
    operands = BackwardOperands(
        call.dy,
        call.x,
        call.mean,
        call.rstd,
        call.weight,
        call.dsum,
        None if call.memory_efficient else call.bias,
        call.row_scale,
        call.dropout_seed,
        call.weight if call.memory_efficient else None,
        call.bias if call.memory_efficient else None,
        call.input,
        functors,
    )
    return BackwardRequest(operands, options)


def _functors_of(call: Any) -> Functors | None:
    if call.load is None and call.store is None:
        return None
    return bind_all(from_text(call.load, call.store), call.arrays, call.numbers)


# Results of operators. An operator returns tensors, no tensor twice and none that it was given: an
# empty one stands for each that is absent.


def register_forward(
    signature: Any,
    autograd: tuple[Callable, Callable],
    by_torch: Callable[[ForwardRequest], FusedForward],
) -> None:
    """signature: arguments_of the operator. autograd: as for `register`. by_torch: the same call by
    torch operations."""

    def implementation(compute: Callable[[ForwardRequest], FusedForward]) -> Callable:
        def run(*arguments):
            call = signature(*arguments)
            y, mean, rstd, added, y1, _ = compute(forward_request(call))
            empty = call.input.new_empty
            results = (
                y,
                mean if call.centered else rstd.new_empty(0),
                rstd,
                empty(0) if added is call.input else added,
            )
            if not signature.returns_y1:
                return results
            return *results, empty(0) if y1 is None else y1

        return run

    register(
        signature,
        implementation(lambda request: route.forward(request)),
        implementation(forward_without_memory),
        autograd,
        implementation(by_torch),
    )


def forward_without_memory(request: ForwardRequest) -> FusedForward:
    """The shapes and dtypes of a forward's results."""
    operands, options = check_forward(request)
    x, y1_dtype = operands.input, options.y1_dtype
    if operands.weight1 is not None or operands.bias1 is not None:
        y1_dtype = options.out_dtype
    leading = x.shape[: -len(options.extents)]
    y_dtype, sum_dtype = getattr(torch, options.out_dtype), getattr(torch, options.residual_dtype)
    dtype = torch.promote_types(sum_dtype, torch.float32)
    return FusedForward(
        x.new_empty(x.shape, dtype=y_dtype),
        x.new_empty(leading, dtype=dtype) if options.centered else None,
        x.new_empty(leading, dtype=dtype),
        x.new_empty(x.shape, dtype=sum_dtype) if has_sum(request) else x,
        x.new_empty(x.shape, dtype=getattr(torch, y1_dtype)) if y1_dtype else None,
        None,
    )


def or_empty(like: Tensor, gradients: tuple) -> tuple[Tensor, ...]:
    """The gradients, with an empty tensor for each None."""
    return tuple(like.new_empty(0) if each is None else each for each in gradients)


def gradients_without_memory(call: Any) -> tuple[Tensor, ...]:
    """The shapes and dtypes of the gradients of a backward operator, those of `wanted`."""
    x, extents = call.x, call.normalized_shape
    own, own1 = (x.dtype if each is None else each.dtype for each in (call.weight, call.weight1))
    shapes = (x.shape, extents, extents, x.shape, extents, extents)
    dtypes = (call.dx_dtype or x.dtype, own, call.dbias_dtype or own)
    dtypes += (call.dresidual_dtype or x.dtype, own1, call.dbias1_dtype or own1)
    return tuple(
        x.new_empty(shape, dtype=dtype) if is_wanted else x.new_empty(0)
        for shape, dtype, is_wanted in zip(shapes, dtypes, call.wanted)
    )


# What autograd keeps of a forward.


def save_rows(ctx: Any, call: Any, results: tuple) -> tuple[Tensor, Tensor | None, Tensor]:
    """What was normalised, mean (None for rms_norm) and rstd of a forward operator's call.

    Marks the results that have no gradient.
    """
    _, mean, rstd, added, *y1 = results
    is_stored = has_sum(forward_request(call))
    has_second = call.weight1 is not None or call.bias1 is not None
    ctx.mark_non_differentiable(
        mean, rstd, *(() if is_stored else (added,)), *(() if has_second else y1)
    )
    ctx.set_materialize_grads(False)
    return added if is_stored else call.input, mean if call.centered else None, rstd


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def backward_options(call: Any) -> BackwardOptions:
    """The options of the backward of a forward operator's call."""
    return BackwardOptions(
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


# norm_forward.


def _save_forward(ctx, inputs, output):
    call = NormForward(*inputs)
    ctx.save_for_backward(*save_rows(ctx, call, output), call.weight)
    ctx.options = backward_options(call)


def _differentiate_forward(ctx, dy, _dmean, _drstd, dsum):
    wants_input, wants_weight, wants_bias, wants_residual, *rest = ctx.needs_input_grad
    if dy is None:
        dx, dweight, dbias = dsum, None, None
    else:
        wanted = (wants_input or wants_residual, wants_weight, wants_bias)
        names = names_of(Backward._fields, wanted)
        operands = BackwardOperands(dy, *ctx.saved_tensors, dsum)
        request = BackwardRequest(operands, ctx.options._replace(gradients=names))
        dx, dweight, dbias, *_ = norm_backward(request)
    none = (None for _ in rest)
    return dx if wants_input else None, dweight, dbias, dx if wants_residual else None, *none


# norm_backward.


def _backward(*arguments):
    call = _NormBackward(*arguments)
    return or_empty(call.x, route.backward(backward_request(call))[:3])


def _backward_without_memory(*arguments):
    return gradients_without_memory(_NormBackward(*arguments))


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
    gradients = route.backward(backward_request(call, recompute=True))
    return *or_empty(call.x, gradients[:3]), gradients.y


def _recomputing_backward_without_memory(*arguments):
    call = _RecomputingNormBackward(*arguments)
    y = call.x.new_empty(call.x.shape, dtype=call.dy.dtype)
    return *gradients_without_memory(call), y


register_forward(NormForward, (_save_forward, _differentiate_forward), decompositions.forward)
register(
    _NormBackward,
    _backward,
    _backward_without_memory,
    (_save_backward, _differentiate_backward),
)
register(
    _RecomputingNormBackward,
    _recomputing_backward,
    _recomputing_backward_without_memory,
    (save_nothing, refuse_second_derivatives),
)
