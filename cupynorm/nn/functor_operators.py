"""torch: norms with a user's own functors, as operators. schemas.py describes them.

A call whose gradients are recorded, or that torch traces, is one operator. Compiled code outlives
the process, so an operator gets the functors' lines and names as text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..norm import route
from ..norm.functors import check_differentiable
from ..norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardRequest,
    Options,
)
from ..plan.functors import Functors, bind_all, from_text
from .fused_operators import fused_request, has_sum, outputs_without_memory, seed_tensor
from .modes import wants_gradient
from .operators import or_empty
from .schemas import (
    arguments_of,
    launch_of,
    refuse_second_derivatives,
    register,
    save_nothing,
    torch_dtype,
)

_GRADIENTS = ("dx", "dweight", "dbias", "dresidual")
_functor_norm_forward = torch.ops.cupynorm.functor_norm_forward.default
_functor_norm_backward = torch.ops.cupynorm.functor_norm_backward.default


def functor_norm_forward(request: ForwardRequest) -> tuple[Tensor, None, Tensor]:
    """y, no second output, and what was normalised, or the input where that is not stored."""
    operands, options = request
    functors, seed = operands.functors, operands.dropout_seed
    tensors = (operands.input, operands.weight, operands.bias, operands.residual)
    if torch.is_grad_enabled() and wants_gradient(*tensors, *functors.arrays()):
        check_differentiable(functors)
    seed = seed_tensor(operands.input, seed, options.dropout_p)
    y, _, _, added = _functor_norm_forward(
        *tensors,
        operands.row_scale,
        seed,
        list(functors.arrays()),
        None if functors.load is None else functors.load.functor.text,
        None if functors.store is None else functors.store.functor.text,
        list(functors.numbers()),
        options.extents,
        options.eps,
        options.centered,
        bool(options.zero_centered_weight),
        torch_dtype(options.out_dtype, "out_dtype"),
        torch_dtype(options.residual_dtype, "residual_dtype"),
        options.dropout_p,
        *launch_of(options.launch),
    )
    return y, None, added if has_sum(request) else operands.input


# Implementations.

_Forward = arguments_of(_functor_norm_forward)
_Backward = arguments_of(_functor_norm_backward)


def _functors(call: Any) -> Functors:
    return bind_all(from_text(call.load, call.store), call.arrays, call.numbers)


def _request(call: Any) -> ForwardRequest:
    return fused_request(call, {"functors": _functors(call)}, {})


def _forward(*arguments):
    call = _Forward(*arguments)
    request = _request(call)
    y, mean, rstd, added, _, _ = route.forward(request)
    # An operator returns tensors, and none that it was given.
    mean = mean if call.centered else rstd.new_empty(0)
    return y, mean, rstd, added if has_sum(request) else call.input.new_empty(0)


def _forward_without_memory(*arguments):
    call = _Forward(*arguments)
    return outputs_without_memory(call, _request(call))


def _save_forward(ctx, inputs, output):
    call = _Forward(*inputs)
    functors = _functors(call)
    check_differentiable(functors)
    _, mean, rstd, added = output
    is_stored = has_sum(_request(call))
    ctx.mark_non_differentiable(mean, rstd, *(() if is_stored else (added,)))
    raw = call.input if is_stored and functors.load is not None else None
    x = added if is_stored else call.input
    mean = mean if call.centered else None
    parameters = (call.weight, call.bias, call.row_scale, call.dropout_seed)
    ctx.save_for_backward(raw, x, mean, rstd, *parameters, *call.arrays)
    ctx.set_materialize_grads(False)
    ctx.call = call._replace(
        input=call.input.dtype,
        residual=None if call.residual is None else call.residual.dtype,
        **dict.fromkeys(("weight", "bias", "row_scale", "dropout_seed", "arrays")),
    )


def _differentiate_forward(ctx, dy, _dmean, _drstd, dsum):
    """One gradient for each input of the operator. A list of tensors has a list of them, and torch
    takes an empty list of numbers for one of tensors."""
    wants = ctx.needs_input_grad
    wanted_arrays = list(wants[6])
    nothing = (*(None for _ in wants[:6]), [None for _ in wanted_arrays])
    rest = (None, None, None if ctx.call.numbers else [], *(None for _ in wants[10:]))
    if dy is None and dsum is None:
        return *nothing, *rest
    raw, x, mean, rstd, weight, bias, row_scale, seed, *arrays = ctx.saved_tensors
    call = ctx.call
    if dy is None:
        dy = torch.zeros_like(x)
    *of_tensors, of_arrays = _functor_norm_backward(
        dy,
        raw,
        x,
        mean,
        rstd,
        weight,
        bias,
        dsum,
        row_scale,
        seed,
        arrays,
        call.load,
        call.store,
        call.numbers,
        call.normalized_shape,
        list(wants[:4]),
        wanted_arrays,
        call.centered,
        call.zero_centered_weight,
        call.input,
        call.residual,
        call.dropout_p,
        call.backward_sm_margin,
        call.strategy,
    )
    gradients = tuple(each if is_wanted else None for each, is_wanted in zip(of_tensors, wants))
    of_arrays = [each if wanted else None for each, wanted in zip(of_arrays, wanted_arrays)]
    return *gradients, None, None, of_arrays, *rest


def _names(functors: Functors, wanted: list[bool]) -> tuple[str, ...]:
    return tuple(name for name, is_wanted in zip(functors.names(), wanted) if is_wanted)


def _backward(*arguments):
    call = _Backward(*arguments)
    functors = _functors(call)
    names = [name for name, wanted in zip(_GRADIENTS, call.wanted) if wanted]
    options = BackwardOptions(
        call.centered,
        tuple(call.normalized_shape),
        call.zero_centered_weight,
        # The kernel that writes dx also writes the gradients of the arrays.
        tuple(dict.fromkeys(["dx", *names])),
        call.dx_dtype,
        None,
        None if call.bias is None else call.bias.dtype,
        call.dresidual_dtype,
        call.dropout_p,
        functor_gradients=_names(functors, call.wanted_arrays),
        launch=Options(call.strategy, sm_margin=call.sm_margin),
    )
    operands = BackwardOperands(
        call.dy,
        call.x,
        call.mean,
        call.rstd,
        call.weight,
        call.dsum,
        call.bias,
        call.row_scale,
        call.dropout_seed,
        input=call.input,
        functors=functors,
    )
    results = route.backward(BackwardRequest(operands, options))
    dx, dweight, dbias, dresidual = results[:4]
    if dresidual is not None and dresidual is dx:
        dresidual = dx.clone()  # an operator returns no tensor twice
    gradients = or_empty(call.x, (dx if call.wanted[0] else None, dweight, dbias, dresidual))
    of_arrays = iter(results.functors)
    empty = call.x.new_empty
    return *gradients, [next(of_arrays) if wanted else empty(0) for wanted in call.wanted_arrays]


def _backward_without_memory(*arguments):
    call = _Backward(*arguments)
    x, extents, empty = call.x, call.normalized_shape, call.x.new_empty
    of_weight = x.dtype if call.weight is None else call.weight.dtype
    shapes = (x.shape, extents, extents, x.shape)
    of_bias = of_weight if call.bias is None else call.bias.dtype
    dtypes = (call.dx_dtype, of_weight, of_bias, call.dresidual_dtype or x.dtype)
    gradients = [
        empty(shape, dtype=dtype) if wanted else empty(0)
        for shape, dtype, wanted in zip(shapes, dtypes, call.wanted)
    ]
    of_arrays = [
        torch.empty_like(each, memory_format=torch.contiguous_format) if wanted else empty(0)
        for each, wanted in zip(call.arrays, call.wanted_arrays)
    ]
    return *gradients, of_arrays


def _refuse_decomposition(*arguments):
    raise NotImplementedError(
        "load or store was given where a norm is decomposed into torch operations, as "
        "torch.onnx.export does; expected neither"
    )


register(
    "functor_norm_forward",
    _forward,
    _forward_without_memory,
    (_save_forward, _differentiate_forward),
    _refuse_decomposition,
)
register(
    "functor_norm_backward",
    _backward,
    _backward_without_memory,
    (save_nothing, refuse_second_derivatives),
)
