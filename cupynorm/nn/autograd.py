"""torch: layer_norm and rms_norm of tensors, on CUDA by the kernels, on the CPU by the reference.

- eager: called directly, and recorded by `_Norm` where a gradient is wanted.
- traced, by torch.compile, torch.export, torch.jit.trace, a dispatch mode, a tensor subclass or a
  meta tensor: by operators.py and fused_operators.py.
- transformed, by torch.func, vmap or forward mode: by torch operations (formulas.py), around the
  kernels where that is possible.

The kernels compute the gradients; the formulas differentiate them in turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from ..norm import route
from ..norm.cache import repeated
from ..norm.checked_forward import DIFFERENTIABLE
from ..norm.checks import check_forward
from ..norm.prepared import FOR_GRADIENTS, FOR_Y, prepare_backward, prepare_forward
from ..norm.request import (
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    is_plain,
)
from ..norm.results import Backward
from . import dtensor, formulas, functor_operators, fused_operators, nested, operators
from .modes import (
    PLAIN,
    compiler_sees_transforms,
    has_functorch_transforms,
    is_compiling,
    is_jit_traced,
    is_mapped,
    is_recorded,
    is_transformed,
    num_dispatch_modes,
    present_tracer,
    wants_gradient,
)
from .repeated import remember

# Called by these names in each call: an attribute of a module takes longer.
_is_grad_enabled = torch.is_grad_enabled
_is_cuda_autocast = torch.is_autocast_enabled  # with "cuda" as its argument it takes twice the time

# The operands of a backward that a plain norm does not have.
_NO_OPTIONS = (None,) * (len(BackwardOperands._fields) - 6)
_NO_OUT = "out was given to a call that torch traces or transforms; expected out=None"
_FUSED = "residual_dtype, row_scale, dropout_p, weight1, bias1, round_x_hat, memory_efficient, "
_FUSED += "load or store"


def normalize(
    request: ForwardRequest,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, y1, input + residual), differentiable in input, weight, bias, residual, weight1, bias1.

    Under torch.autocast the dtype of y is what torch.nn.functional gives, unless out_dtype or out
    is given:

        autocast of   input               y         the sum
        "cuda"        float16, bfloat16   float32   input's dtype: torch does not autocast an add
        "cuda"        float32, float64    input's   input's
        "cpu"         any                 input's   input's

    since layer_norm and rms_norm are in the float32 list of CUDA's autocast (rms_norm in recent
    versions; here in all of them) and in none of the CPU's. No tensor is cast for that: the
    arithmetic is float32 anyway, only the last rounding is left out, and every gradient has the
    dtype of its tensor.
    """
    operands, options = original = request
    if nested.is_any(operands.input, operands.residual, operands.row_scale):
        return nested.normalize(request, normalize)
    if options.out_dtype is None and operands.out is None and _is_cuda_autocast():
        if operands.input.is_cuda:
            options = options._replace(out_dtype=formulas.arithmetic(operands.input))
            request = ForwardRequest(operands, options)
    compiling = is_compiling()
    if not compiling and present_tracer():  # it would trace what reads memory
        return torch.compiler.disable(normalize)(request)
    if compiler_sees_transforms or not compiling:
        if has_functorch_transforms() or forward_ad._current_level >= 0:
            return _transformed(request)
    if compiling and options.quantization is not None:
        # A QuantizedTensor is not a tensor, so this call breaks the graph.
        return torch.compiler.disable(normalize)(request)
    if operands.functors is not None:
        return _with_functors(request, compiling)
    # An 8-bit y has no operator: a mode that records no graph, as of a selective checkpoint, does
    # not see its call.
    is_hidden = not compiling and options.quantization is not None and not is_recorded()
    if compiling or (num_dispatch_modes() and not is_hidden) or is_jit_traced():
        return _traced(request)
    input, weight, bias, residual, _, row_scale, _, weight1, bias1, *_ = operands
    tensors = (input, weight, bias, residual, weight1, bias1)
    if input.is_meta or _is_wrapped(*tensors, row_scale):
        return _traced(request)
    recorded = _is_grad_enabled() and wants_gradient(*tensors)
    prepared, operands = prepare_forward(request, FOR_GRADIENTS if recorded else FOR_Y)
    remember(repeated, _kind(*original), prepared, operands)
    return _run(prepared, operands, recorded)


def repeat(operands: tuple, options: tuple) -> tuple[torch.Tensor, torch.Tensor] | None:
    """y and the sum, if the call is like the last one of its kind; else None.

    operands, options: the fields of ForwardOperands and ForwardOptions.
    """
    if (
        is_compiling()
        or has_functorch_transforms()
        or forward_ad._current_level >= 0
        or num_dispatch_modes()
        or is_jit_traced()
    ):
        return None
    try:
        known = repeated.get(_kind(operands, options))
    except (TypeError, RuntimeError):  # no tensor, or an option that cannot be a key: checked later
        return None
    if known is None or (results := known.run(operands)) is None:
        return None
    prepared = known.prepared
    if not prepared.records:
        return results[0], results[3]
    if prepared.is_plain:
        return _recorded(prepared, operands, results)
    y, _, added = _recorded_with_options(prepared, operands, results)
    return y, added


def _run(prepared: Any, operands: tuple, recorded: bool) -> tuple:
    """What normalize returns."""
    results = prepared.run(operands)
    if not recorded:
        y, _, _, added, y1, _ = results
        return y, y1, added
    if prepared.is_plain:
        y, added = _recorded(prepared, operands, results)
        return y, None, added
    return _recorded_with_options(prepared, operands, results)


def _recorded(prepared: Any, operands: tuple, results: tuple) -> tuple:
    """y and the sum of what a prepared forward has made, with their derivatives."""
    y, mean, rstd, added, *_ = results
    # Backward needs no row but the normalised one: the input, or the sum that is returned.
    saved = added, mean, rstd, operands[1]
    tensors = prepared.read_differentiable(operands)
    if prepared.makes_sum:
        return _apply((prepared, saved, (y, added)), *tensors)
    (y,) = _apply((prepared, saved, (y,)), *tensors)
    return y, added


def _recorded_with_options(prepared: Any, operands: tuple, results: tuple) -> tuple:
    """y, y1 and the sum, as _recorded, of a call with any option."""
    outputs = _apply_with_options(
        (prepared, operands, results), *prepared.read_differentiable(operands)
    )
    y, y1, added = prepared.split_outputs(outputs)
    if prepared.options.quantization is not None:
        results[0].attach(partial(_PassingGradients.apply, y))
        y = results[0]
    return y, y1, operands[0] if added is None else added


def _kind(operands: tuple, options: tuple) -> tuple | None:
    """What a forward's prepared call depends on besides the layouts of its input, weight, bias and
    residual. None: on more."""
    input, weight, bias, residual, out, row_scale, seed, weight1, bias1, scale, amax, own = operands
    _, _, eps, _, _, _, dropout_p, _, _, quantization, *_ = options
    has_no_more = out is row_scale is seed is weight1 is bias1 is scale is amax is own is None
    if not has_no_more or quantization is not None:
        return None
    return (
        options,
        eps.__class__,  # True equals 1.0 and is refused
        dropout_p.__class__,
        weight is None,
        bias is None,
        residual is None,
        _is_grad_enabled(),
        _is_cuda_autocast(),  # decides the dtype of y
        input.numel(),  # so that calls with rows of other numbers keep their own
    )


def _with_functors(request: ForwardRequest, compiling: bool) -> tuple:
    """One operator, or directly where nothing is recorded or traced."""
    operands = request.operands
    tensors = (operands.input, operands.weight, operands.bias, operands.residual)
    own = operands.functors
    if _is_wrapped(*tensors, *own.arrays()):
        named = operands._replace(functors=None)._asdict()
        dtensor.refuse("load or store", **named, **dict(zip(own.names(), own.arrays())))
    tensors = (*tensors, *own.arrays())
    traced = compiling or num_dispatch_modes() or is_jit_traced() or _is_wrapped(*tensors)
    traced = traced or operands.input.is_meta
    if not traced and not (_is_grad_enabled() and wants_gradient(*tensors)):
        prepared, operands = prepare_forward(request, FOR_Y)
        y, _, _, added, _, _ = prepared.run(operands)
        return y, None, added
    if operands.out is not None:
        raise ValueError(
            "out was given with load or store to a call that torch records or traces; "
            "expected out=None"
        )
    if not compiling:
        check_forward(request)
    made = functor_operators.functor_norm_forward(request)
    return made.y, None, made.sum


def _is_wrapped(*tensors: object) -> bool:
    """Whether one is of a subclass. Arrays of other libraries are none: the checks refuse them."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.__class__ not in PLAIN:
            return True
    return False


def _traced(request: ForwardRequest) -> tuple:
    """By the operator, which torch sees as one node."""
    operands, options = request
    compiling = is_compiling()
    plain = is_plain(request)
    if operands.out is not None:
        raise ValueError(_NO_OUT)
    if dtensor.is_any(*operands):
        if not plain:
            if not compiling:
                check_forward(request)
            from . import dtensor_whole_rows  # imports DTensor, which takes seconds

            return dtensor_whole_rows.normalize(request, normalize)
        weight, bias = dtensor.parameters_like(
            operands.input, operands.weight, operands.bias, operands.residual
        )
        operands = operands._replace(weight=weight, bias=bias)
        request = ForwardRequest(operands, options)
    if options.quantization is not None:
        raise NotImplementedError(
            f"out_dtype is {options.quantization.dtype} in a call that torch traces, of meta "
            "tensors or of tensors of a class of their own; expected plain tensors"
        )
    # Compiled, what computes the operator's shapes checks the same. torch.jit.trace warns of every
    # shape that is looked at; there the operator itself checks.
    if not compiling and not is_jit_traced():
        check_forward(request)
    by_operator = operators.norm_forward if plain else fused_operators.fused_norm_forward
    made = by_operator(request)
    return made.y, made.y1, made.sum


def is_recorded_by_jit() -> bool:
    """Whether torch.jit.trace records what runs now."""
    return not is_compiling() and is_jit_traced() is not None


def forward_of_meta(request: ForwardRequest) -> tuple:
    """y, mean, rstd and the sum of meta tensors: shapes and dtypes without memory."""
    request = check_forward(request)
    if request.operands.out is not None:
        raise ValueError(_NO_OUT)
    return operators.norm_forward(request)[:4]


def _transformed(request: ForwardRequest) -> tuple:
    """x_hat by the kernels, the affine part and all derivatives by torch. In forward mode and
    compiled, all of it by torch.

    torch.func.vmap is one launch over more rows, whatever it maps over. All is computed in float32
    (float64 for float64) as in the kernels, but in another order: y may differ by float32's
    rounding before it is rounded to its own dtype. torch follows no autograd function through two
    nested tangents or the compiler, and gives wrong second derivatives or none; there x_hat is
    computed by torch too.
    """
    if not is_plain(request):
        quantization = request.options.quantization
        option = _FUSED if quantization is None else f"out_dtype {quantization.dtype}"
        raise NotImplementedError(
            f"{option} was given to a call that torch.func or forward mode transforms; "
            "expected none of them"
        )
    if request.operands.out is not None:
        raise ValueError(_NO_OUT)
    operands, options = check_forward(request)
    input, residual = operands.input, operands.residual
    dtype, num_dims, eps = formulas.arithmetic(input), len(options.extents), options.eps
    added = input if residual is None else input + residual
    if is_compiling() or forward_ad._current_level >= 0:
        x_hat = formulas.x_hat(added, num_dims, options.centered, eps)
    else:
        alone = ForwardOptions(
            options.centered, options.extents, eps, out_dtype=dtype, launch=options.launch
        )

        def compute(x):
            made = operators.norm_forward(ForwardRequest(ForwardOperands(x), alone))
            return made.y, made.rstd

        x_hat, _ = formulas.Normalized.apply(added, num_dims, options.centered, compute)
    y = x_hat * formulas.scale(operands.weight, options.zero_centered_weight, dtype)
    if operands.bias is not None:
        y = y + operands.bias.to(dtype)
    return y.to(getattr(torch, options.out_dtype)), None, added


# Eager.


class _Norm(torch.autograd.Function):
    """Records what a plain forward has made.

    Inputs and outputs are the tensors that there are: each one costs host time.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        """call: a prepared forward, what is saved, and y alone or y and the sum."""
        ctx.prepared, saved, outputs = call
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, dy, dsum=None):
        """None for the call, and the gradient of each tensor that was recorded."""
        if dy is None:
            dx, dweight, dbias = dsum, None, None
        elif not is_compiling() and (is_transformed() or is_mapped(dy)):
            # dy has no address, because torch maps over it, or has a tangent.
            options = ctx.prepared.backward
            x, mean, rstd, weight = ctx.saved_tensors
            extents, zero_centered = options.extents, options.zero_centered_weight
            saved = formulas.Saved(x, mean, rstd, weight, extents, zero_centered)
            dx, dweight, dbias = formulas.gradients(dy, dsum, saved)
        else:
            dx, dweight, dbias = _gradients(ctx, (dy, *ctx.saved_tensors, dsum))
        # Autograd drops the gradients of tensors that want none.
        return ctx.prepared.pick_gradients((dx, dweight, dbias, dx, None))


# _Norm.apply without its work for functorch's transforms (vmap, grad, jvp): a third of its time.
_apply = super(torch.autograd.Function, _Norm).apply


def _gradients(ctx, operands: tuple) -> tuple:
    """dx, dweight, dbias: those that ctx needs. operands: the first of BackwardOperands."""
    operands += _NO_OPTIONS
    forward = ctx.prepared
    # create_graph=True: the operator knows the gradients' derivatives. Compiled autograd traces it.
    if _is_grad_enabled() or is_compiling():
        request = BackwardRequest(BackwardOperands._make(operands), _with_wanted(ctx))
        return operators.norm_backward(request)[:3]
    kind = ctx.needs_input_grad, operands[5] is None
    known = forward.backwards.get(kind)
    # What was saved may have another layout now: torch lets hooks pack and unpack it.
    if known is not None and (results := known.run(operands)) is not None:
        return results[:3]
    request = BackwardRequest(BackwardOperands._make(operands), _with_wanted(ctx))
    prepared, checked = prepare_backward(request)
    remember(forward.backwards, kind, prepared, checked)
    return prepared.run(checked)[:3]


class _NormWithOptions(torch.autograd.Function):
    """Records what a forward with any option has made."""

    @staticmethod
    def forward(ctx, call, *tensors):
        """call: a prepared forward, its operands, and what its run returned."""
        prepared, operands, results = call
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        y, mean, rstd, added, _, seed = results
        operands = ForwardOperands._make(operands)
        options = prepared.options
        kept = (y, None) if options.memory_efficient else (added, mean)
        of_bias = operands.bias if options.memory_efficient else None
        is_tensor = isinstance(seed, torch.Tensor)
        ctx.seed = None if is_tensor else seed
        of_seed = seed if is_tensor else None
        parameters = (operands.weight, operands.weight1, operands.row_scale, of_seed, of_bias)
        ctx.save_for_backward(*kept, rstd, *parameters)
        if options.quantization is not None:
            # 8-bit floats take no gradient: a tensor of y's shape without its memory takes it.
            results = (added.new_empty(1).expand(added.shape), *results[1:])
        return prepared.pick_outputs(results)

    @staticmethod
    def backward(ctx, *upstream):
        return _gradients_with_options(ctx, *ctx.prepared.split_outputs(upstream))


_apply_with_options = super(torch.autograd.Function, _NormWithOptions).apply


def _with_wanted(ctx):
    wants_input, wants_weight, wants_bias, wants_residual, *_ = _wanted(ctx)
    wanted = (wants_input or wants_residual, wants_weight, wants_bias)
    gradients = operators.names_of(Backward._fields, wanted)
    return ctx.prepared.backward._replace(gradients=gradients)


def _wanted(ctx) -> tuple[bool, ...]:
    """Whether each of DIFFERENTIABLE needs its gradient."""
    wants = dict(zip(ctx.prepared.differentiable, ctx.needs_input_grad[1:]))
    return tuple(wants.get(name, False) for name in DIFFERENTIABLE)


def _gradients_with_options(ctx, dy, dy1, dsum) -> tuple:
    """None for the call, and of each tensor that was recorded."""
    first_present = next((each for each in (dy, dy1, dsum) if each is not None), None)
    if first_present is None:
        return (None,) * len(ctx.needs_input_grad)
    compiling = is_compiling()  # by compiled autograd
    if not compiling and (is_transformed() or is_mapped(first_present)):
        raise NotImplementedError(
            f"the gradient of a call with {_FUSED} was asked for in a batch or in forward mode; "
            "expected one gradient at a time"
        )
    forward = ctx.prepared
    saved = ctx.saved_tensors
    if saved[6] is None:
        saved = (*saved[:6], ctx.seed, saved[7])
    backward_request = fused_operators.fused_gradients(
        forward.backward, saved, (dy, dy1, dsum), forward.bias1_dtype, _wanted(ctx)
    )
    if compiling or torch.is_grad_enabled():  # create_graph=True
        gradients = fused_operators.fused_norm_backward(*backward_request)
    else:
        gradients = route.backward_of_two(*backward_request)
    return forward.pick_gradients((*gradients, None))


class _PassingGradients(torch.autograd.Function):
    """values, whose gradient is that of the tensor that stands for an 8-bit y."""

    @staticmethod
    def forward(ctx, carrier, values):
        ctx.dtype = carrier.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx, dy):
        return dy.to(ctx.dtype), None
