"""torch: norms with a user's own functors, as operators.

A call whose gradients are recorded, or that torch traces, is one operator. Compiled code outlives
the process, so an operator gets the functors' lines and names as text.
"""

from __future__ import annotations

import torch

from ..norm import route
from ..norm.functors import check_differentiable
from ..norm.request import ForwardRequest
from ..norm.results import FusedForward
from .modes import wants_gradient
from .operators import (
    backward_request,
    call_forward,
    dtype_of,
    forward_request,
    gradients_without_memory,
    has_sum,
    or_empty,
    register_forward,
    save_rows,
)
from .schemas import arguments_of, refuse_second_derivatives, register, save_nothing

_Forward = arguments_of(torch.ops.cupynorm.functor_norm_forward.default)
_Backward = arguments_of(torch.ops.cupynorm.functor_norm_backward.default)


def functor_norm_forward(request: ForwardRequest) -> FusedForward:
    """As route.forward, by the operator."""
    operands = request.operands
    tensors = (operands.input, operands.weight, operands.bias, operands.residual)
    if torch.is_grad_enabled() and wants_gradient(*tensors, *operands.functors.arrays()):
        check_differentiable(operands.functors)
    return call_forward(_Forward, request)


def _save_forward(ctx, inputs, output):
    call = _Forward(*inputs)
    request = forward_request(call)
    check_differentiable(request.operands.functors)
    raw = call.input if call.load is not None and has_sum(request) else None
    rows = save_rows(ctx, call, output)
    parameters = (call.weight, call.bias, call.row_scale, call.dropout_seed)
    ctx.save_for_backward(raw, *rows, *parameters, *call.arrays)
    own = ("weight", "bias", "row_scale", "dropout_seed", "arrays")
    dtypes = {"dx_dtype": call.input.dtype, "dresidual_dtype": dtype_of(call.residual)}
    # What backward has besides tensors, by the names of its schema.
    ctx.given = call._asdict() | dict.fromkeys(own) | dtypes
    ctx.given["sm_margin"] = ctx.given.pop("backward_sm_margin")


def _differentiate_forward(ctx, dy, _dmean, _drstd, dsum):
    """One gradient for each input of the operator. A list of tensors has a list of them, and torch
    takes an empty list of numbers for one of tensors."""
    wants = ctx.needs_input_grad
    wanted_arrays = list(wants[6])
    nothing = (*(None for _ in wants[:6]), [None for _ in wanted_arrays])
    rest = (None, None, None if ctx.given["numbers"] else [], *(None for _ in wants[10:]))
    if dy is None and dsum is None:
        return *nothing, *rest
    raw, x, mean, rstd, weight, bias, row_scale, seed, *arrays = ctx.saved_tensors
    given = ctx.given | {
        "dy": torch.zeros_like(x) if dy is None else dy,
        "input": raw,
        "x": x,
        "mean": mean,
        "rstd": rstd,
        "weight": weight,
        "bias": bias,
        "dsum": dsum,
        "row_scale": row_scale,
        "dropout_seed": seed,
        "arrays": arrays,
        "wanted": list(wants[:4]),
        "wanted_arrays": wanted_arrays,
    }
    *gradients, of_arrays = _Backward.operator(*[given[name] for name in _Backward._fields])
    gradients = (each if is_wanted else None for each, is_wanted in zip(gradients, wants))
    of_arrays = [each if wanted else None for each, wanted in zip(of_arrays, wanted_arrays)]
    return *gradients, None, None, of_arrays, *rest


def _backward(*arguments):
    call = _Backward(*arguments)
    results = route.backward(backward_request(call))
    dx, dweight, dbias, dresidual = results[:4]
    if dresidual is not None and dresidual is dx:
        dresidual = dx.clone()
    gradients = or_empty(call.x, (dx if call.wanted[0] else None, dweight, dbias, dresidual))
    of_arrays = iter(results.functors)
    empty = call.x.new_empty
    return *gradients, [next(of_arrays) if wanted else empty(0) for wanted in call.wanted_arrays]


def _backward_without_memory(*arguments):
    call = _Backward(*arguments)
    of_arrays = [
        torch.empty_like(each, memory_format=torch.contiguous_format)
        if wanted
        else call.x.new_empty(0)
        for each, wanted in zip(call.arrays, call.wanted_arrays)
    ]
    return *gradients_without_memory(call), of_arrays


def _refuse_decomposition(request: ForwardRequest):
    raise NotImplementedError(
        "load or store was given where a norm is decomposed into torch operations, as "
        "torch.onnx.export does; expected neither"
    )


register_forward(_Forward, (_save_forward, _differentiate_forward), _refuse_decomposition)
register(
    _Backward,
    _backward,
    _backward_without_memory,
    (save_nothing, refuse_second_derivatives),
)
