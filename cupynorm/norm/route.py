"""Where a call is computed: by torch's autograd for tensors, else directly.

Reading order: api -> here -> prepared (GPU) or host (CPU). docs/design.md lists all steps.
"""

from __future__ import annotations

from typing import Any

from ..gpu import arrays
from . import autograd_loader
from .eight_bits import parts_of
from .functors import bind_functors, check_differentiable, check_seeds_given
from .launch_choice import checked_launch
from .options import extents_of, pair_of
from .prepared import FOR_STATISTICS, FOR_Y, prepare_backward, prepare_forward
from .request import (
    Array,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    is_plain,
)
from .results import Backward, Forward, FusedBackward, Gradients

_PLAIN_GRADIENTS = frozenset(Backward._fields)
_autograd: Any = None  # set at the first tensor: an import statement takes a microsecond each time


def torch_part() -> Any:
    """The module cupynorm.nn.autograd, which is imported when the first tensor comes."""
    global _autograd
    if _autograd is None:
        autograd = autograd_loader.load()
        _autograd = autograd
        return autograd  # old compilers do not see yet what was just assigned
    return _autograd


def is_tensor(array: object) -> bool:
    """Whether it is a torch tensor.

    arrays.is_torch is called only until the first tensor, because torch.compile would inspect
    sys.modules for it.
    """
    if _autograd is None:
        return arrays.is_torch(array)
    return isinstance(array, _autograd.torch.Tensor)


def call(
    centered: bool,
    normalized_shape: object,
    arrays: tuple,
    options: tuple,
    returns: bool | type[Forward],
) -> Any:
    """What layer_norm and rms_norm return, or their explicit forwards.

    arrays: input, weight, bias, residual. options: eps, zero_centered_weight, round_x_hat, out,
    out_dtype, fuse, launch, and memory_efficient, which is a module's.
    returns: whether the sum is returned beside y; or Forward, for that, outside any autograd.
    """
    input, weight, bias, residual = arrays
    eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, memory_efficient = options
    scale = amax = quantization = functors = out_sum = None
    if out_dtype is not None:
        out_dtype, scale, amax, quantization = parts_of(out_dtype)
    if fuse.__class__ is not tuple or fuse:
        functors = bind_functors(fuse, returns and returns is not Forward, residual)
    if out is not None and isinstance(out, tuple):
        out, out_sum = pair_of(out)
    if launch is not None:
        launch = checked_launch(launch)
    # The fields of ForwardOperands and ForwardOptions. torch tensors in a call like the last one
    # of its kind need no request: making one takes a microsecond.
    operands = (input, weight, bias, residual, out, out_sum, scale, amax, functors)
    options = (
        centered,
        extents_of(normalized_shape),
        eps,
        zero_centered_weight,
        out_dtype,
        round_x_hat,
        quantization,
        launch,
        memory_efficient,
    )
    if returns is not Forward and is_tensor(input):
        autograd = torch_part() if _autograd is None else _autograd
        repeated = autograd.repeat(operands, options)
        if repeated is not None:
            return repeated if returns else repeated[0]
    request = ForwardRequest(ForwardOperands(*operands), ForwardOptions(*options))
    return _explicit_forward(request) if returns is Forward else normalize(request, returns)


def normalize(request: ForwardRequest, return_residual: bool) -> Array | tuple[Array, ...]:
    """What layer_norm and rms_norm return: y, or y and the sum with return_residual."""
    operands = request.operands
    if is_tensor(operands.input):
        y, added = torch_part().normalize(request)
    else:
        prepared, operands = prepare_forward(request, FOR_Y)
        y, _, _, added = prepared.run(operands)
    return (y, added) if return_residual else y


def _explicit_forward(request: ForwardRequest) -> Forward:
    """What layer_norm_forward and rms_norm_forward return."""
    input = request.operands.input
    if is_tensor(input) and input.is_meta and is_plain(request):
        return Forward(*torch_part().forward_of_meta(request))
    _refuse_jit_trace(input)
    if request.operands.functors is not None:
        check_seeds_given(request.operands.functors)
    prepared, operands = prepare_forward(request, FOR_STATISTICS)
    return Forward(*prepared.run(operands))


def _refuse_jit_trace(array: object) -> None:
    """Raises NotImplementedError where torch.jit.trace would record the result as a constant."""
    if not is_tensor(array):
        return
    if (_autograd or torch_part()).is_recorded_by_jit():
        raise NotImplementedError(
            "torch.jit.trace was asked to record an explicit forward or backward; expected "
            "layer_norm, rms_norm, layer_norm_linear or rms_norm_linear"
        )


def explicit_backward(request: BackwardRequest) -> Backward | FusedBackward:
    """What layer_norm_backward and rms_norm_backward return."""
    _refuse_jit_trace(request.operands.x)
    operands, options = request
    if operands.functors is not None:
        return _backward_with_functors(request)
    is_fused = (
        options.dx_dtype is not None
        or options.dresidual_dtype is not None
        or not (
            options.gradients == Backward._fields or _PLAIN_GRADIENTS.issuperset(options.gradients)
        )
    )
    if is_fused:
        return FusedBackward(*backward(request)[:4])
    prepared, operands = prepare_backward(request)
    return Backward(*prepared.run(operands)[:3])


def _backward_with_functors(request: BackwardRequest) -> FusedBackward:
    operands, options = request
    functors, wanted = operands.functors, options.gradients
    check_differentiable(functors)
    check_seeds_given(functors)
    named = functors.named_arrays() if "functors" in wanted else ()
    options = options._replace(
        gradients=wanted if "dx" in wanted else ("dx", *wanted),
        functor_gradients=tuple(name for name, _, _ in named),
    )
    made = backward(BackwardRequest(operands, options))
    dx = made.dx if "dx" in wanted else None
    return FusedBackward(dx, *made[1:4], made.functors)


def forward(request: ForwardRequest, purpose: str = FOR_STATISTICS) -> Forward:
    """y, statistics and sum, outside any autograd."""
    _refuse_jit_trace(request.operands.input)
    prepared, operands = prepare_forward(request, purpose)
    return Forward(*prepared.run(operands))


def backward(request: BackwardRequest) -> Gradients:
    """The gradients of one output, outside any autograd."""
    prepared, operands = prepare_backward(request)
    return Gradients(*prepared.run(operands))
