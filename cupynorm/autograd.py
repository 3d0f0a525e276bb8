"""torch: layer_norm and rms_norm of tensors, on CUDA by the kernels and on the CPU by the reference,
in the way that torch asks for:

- eager: called directly, and recorded by `_Norm` where a gradient is wanted.
- traced, by torch.compile, torch.export, a dispatch mode or a tensor subclass: by the operators of torch_ops.
- transformed, by torch.func, vmap or forward mode: by formulas of torch, around the kernels where that can be.

The gradients are made by the kernels, and differentiated in turn by the formulas.
"""

from __future__ import annotations

from types import NoneType

import torch
from torch.autograd import forward_ad

from . import formulas, fused, norm, parallel, torch_ops
from .arrays import TorchLibrary
from .calls import FusedOptions

# Classes of what the kernels read where it lies. Not those of torch's wrappers (DTensor, FakeTensor), whose address is none.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, NoneType})
_is_grad_enabled = torch.is_grad_enabled
_is_cuda_autocast = torch.is_autocast_enabled  # with "cuda" as its argument it takes twice the time
_is_compiling = torch.compiler.is_dynamo_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_transformed = torch._C._are_functorch_transforms_active
# Whether the compiler knows the answer to that: torch 2.4's does not, and then takes a transform inside what it compiles for
# none.
_compiler_sees_transforms = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
_is_mapped = torch._C._functorch.is_legacy_batchedtensor  # by is_grads_batched=True


def normalize(
    centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(y, input + residual), differentiable in input, weight, bias and residual.

    Under torch.autocast the dtype of y is what torch.nn.functional gives, unless out_dtype or out is given:

        autocast of   input               y         the sum
        "cuda"        float16, bfloat16   float32   input's dtype: torch does not autocast an addition
        "cuda"        float32, float64    input's   input's
        "cpu"         any                 input's   input's

    since layer_norm and rms_norm are in the float32 list of CUDA's autocast (rms_norm in recent versions; here in all of them)
    and in none of the CPU's. No tensor is cast for that: the arithmetic is float32 anyway, only the last rounding is left out,
    and every gradient has the dtype of its tensor.
    """
    if out_dtype is None and out is None and _is_cuda_autocast() and input.is_cuda:
        out_dtype = formulas.arithmetic(input)
    compiling = _is_compiling()
    if (_compiler_sees_transforms or not compiling) and (_is_transformed() or forward_ad._current_level >= 0):
        make = _transformed
    elif (
        compiling
        or _num_dispatch_modes()
        or not (
            input.__class__ in _PLAIN
            and weight.__class__ in _PLAIN
            and bias.__class__ in _PLAIN
            and residual.__class__ in _PLAIN
        )
        and _is_wrapped(input, weight, bias, residual)
    ):
        make = _traced
    else:
        recorded = _is_grad_enabled() and _wants_gradient(input, weight, bias, residual)
        prepared, given = norm.prepare_forward(
            centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options,
            norm.FOR_GRADIENTS if recorded else norm.FOR_Y,
        )  # fmt: skip
        if not recorded:
            y, _, _, added = prepared.run(*given)
            return y, added
        result = _apply(input, weight, bias, residual, prepared)
        return (result, input) if residual is None else result
    if out is not None:
        raise ValueError("out was given to a call that torch traces or transforms; expected out=None")
    return make(centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options)


def _is_wrapped(*tensors: object) -> bool:
    """Whether one is of a subclass. Arrays of other libraries are none: checks find words for them."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.__class__ not in _PLAIN:
            return True
    return False


def _wants_gradient(*tensors: object) -> bool:
    """None and arrays of other libraries count as constants."""
    for tensor in tensors:
        if getattr(tensor, "requires_grad", False):
            return True
    return False


def _traced(centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options):
    """By the operator, which torch sees as one node."""
    if _is_wrapped(input, weight, bias, residual):
        weight, bias = parallel.of_one_kind(input, weight, bias, residual)
    if not _is_compiling():  # there, what knows the operator's shapes checks the same
        norm.check_forward(centered, input, extents, weight, bias, eps, residual, out_dtype)
    y, _, _, added = torch_ops.forward(
        centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options
    )
    return y, input if residual is None else added


def _transformed(centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, options):
    """x_hat by the kernels, the affine part and all derivatives by torch; in forward mode and compiled all of it by torch.

    torch.func.vmap is one launch over more rows, whatever it maps over. All is computed in float32 (float64 for float64) as in
    the kernels but in another order: y may differ by float32's rounding, before that to its own dtype. torch follows no
    autograd function through two nested tangents or the compiler, and gives wrong second derivatives or none, so there x_hat is
    torch's too.
    """
    input, weight, bias, residual, eps, y_dtype = norm.check_forward(
        centered, input, extents, weight, bias, eps, residual, out_dtype
    )
    dtype = formulas.arithmetic(input)

    def compute(x):
        x_hat, _, rstd, _ = torch_ops.forward(centered, x, extents, None, None, eps, None, False, dtype, options)
        return x_hat, rstd

    added = input if residual is None else input + residual
    if _is_compiling() or forward_ad._current_level >= 0:
        x_hat = formulas.x_hat(added, len(extents), centered, eps)
    else:
        x_hat, _ = formulas.Normalized.apply(added, len(extents), centered, compute)
    y = x_hat * formulas.scale(weight, zero_centered_weight, dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(TorchLibrary.dtype(y_dtype)), added


# Eager.


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, residual, prepared):
        y, mean, rstd, added = prepared.run(input, weight, bias, residual, None)
        # Backward needs no row but the normalised one: the input itself, or the sum that is returned anyway.
        ctx.save_for_backward(added, mean, rstd, weight)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, added)

    @staticmethod
    def backward(ctx, dy, dsum=None):
        wants_input, _, _, wants_residual, _ = ctx.needs_input_grad
        if dy is None:
            dx, dweight, dbias = dsum, None, None
        elif _is_transformed() or _is_mapped(dy) or forward_ad._current_level >= 0:
            dx, dweight, dbias = _transformed_gradients(ctx, dy, dsum)
        elif torch.is_grad_enabled():  # create_graph=True
            dx, dweight, dbias = _differentiable_gradients(ctx, dy, dsum)
        else:
            dx, dweight, dbias = _gradients(ctx, dy, dsum, *ctx.saved_tensors)
        return dx if wants_input else None, dweight, dbias, dx if wants_residual else None, None


# _Norm.apply less what it does for functorch's transforms (vmap, grad, jvp): a third of its 9 microseconds.
_apply = super(torch.autograd.Function, _Norm).apply

_lie = TorchLibrary.lie


def _wanted(ctx) -> tuple[bool, bool, bool]:
    """Of dx, dweight, dbias."""
    wants_input, wants_weight, wants_bias, wants_residual, _ = ctx.needs_input_grad
    return wants_input or wants_residual, wants_weight, wants_bias


def _gradients(ctx, dy, dsum, x, mean, rstd, weight):
    """dx, dweight, dbias: those that ctx asks for."""
    forward = ctx.prepared
    # What was saved may lie otherwise now: torch lets hooks pack and unpack it.
    try:
        key = (
            _lie(dy), _lie(dsum), _lie(x), _lie(weight), mean is None or mean.is_contiguous(), rstd.is_contiguous(),
            ctx.needs_input_grad,
        )  # fmt: skip
        prepared = forward.backwards.get(key)
    except RuntimeError:  # a sparse dy: the checks find words for it
        key = prepared = None
    if prepared is None:
        prepared, _ = norm.prepare_backward(
            forward.centered, dy, x, mean, rstd, forward.extents, weight, forward.zero_centered_weight, dsum,
            [name for name, is_wanted in zip(norm.Backward._fields, _wanted(ctx)) if is_wanted], None, forward.bias_dtype,
            forward.backward_options,
        )  # fmt: skip
        norm.keep(forward.backwards, key, prepared)
    return prepared.run(dy, x, mean, rstd, weight, dsum)


def _differentiable_gradients(ctx, dy, dsum):
    """The same by the operator, which knows the derivatives of the gradients."""
    forward = ctx.prepared
    dbias_dtype = None if forward.bias_dtype is None else TorchLibrary.dtype(forward.bias_dtype)
    return torch_ops.gradients(
        dy, *ctx.saved_tensors, dsum, forward.extents, _wanted(ctx), forward.zero_centered_weight, dbias_dtype,
        forward.backward_options.of("backward").sm_margin, forward.backward_options.strategy,
    )  # fmt: skip


def _transformed_gradients(ctx, dy, dsum):
    """The same where dy has no address, because torch maps over it, or has a tangent."""
    forward = ctx.prepared
    made = formulas.gradients(dy, *ctx.saved_tensors, dsum, forward.extents, forward.zero_centered_weight)
    return [gradient if is_wanted else None for gradient, is_wanted in zip(made, _wanted(ctx))]


# With fused options.


def normalize_fused(
    centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, fused_options
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """As normalize: (y, y1, the sum), differentiable once in all but row_scale and the seed."""
    if out_dtype is None and out is None and _is_cuda_autocast() and input.is_cuda:
        out_dtype = formulas.arithmetic(input)
    compiling = _is_compiling()
    if (_compiler_sees_transforms or not compiling) and (_is_transformed() or forward_ad._current_level >= 0):
        asked = _OPTIONS if fused_options.quantization is None else f"out_dtype {fused_options.quantization.dtype}"
        raise NotImplementedError(
            f"{asked} was given to a call that torch.func or forward mode transforms; expected none of them"
        )
    tensors = (input, weight, bias, residual, fused_options.row_scale, fused_options.weight1, fused_options.bias1)
    arguments = (centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype)
    if fused_options.quantization is not None and not compiling and (_num_dispatch_modes() or _is_wrapped(*tensors)):
        raise NotImplementedError(
            f"out_dtype is {fused_options.quantization.dtype} in a call that torch traces or of tensors of a class of their "
            "own; expected plain tensors"
        )
    if fused_options.quantization is not None and compiling:
        # A QuantizedTensor is no tensor: the compiler calls what makes it, and does not look inside.
        return torch.compiler.disable(normalize_fused)(*arguments, out, options, fused_options)
    if compiling or _num_dispatch_modes() or _is_wrapped(*tensors):
        if _is_wrapped(*tensors):
            parallel.refuse(
                _OPTIONS, input=input, weight=weight, bias=bias, residual=residual, row_scale=fused_options.row_scale,
                weight1=fused_options.weight1, bias1=fused_options.bias1,
            )  # fmt: skip
        if out is not None:
            raise ValueError("out was given to a call that torch traces or transforms; expected out=None")
        if not compiling:
            fused.check_forward(centered, input, extents, weight, bias, eps, residual, out_dtype, fused_options)
        return torch_ops.fused_forward(*arguments, options, fused_options)
    recorded = _is_grad_enabled() and _wants_gradient(input, weight, bias, residual, fused_options.weight1, fused_options.bias1)
    prepared, given = fused.prepare_forward(
        *arguments, out, options, fused_options, norm.FOR_GRADIENTS if recorded else norm.FOR_Y
    )
    if not recorded:
        y, _, _, added, y1, _ = prepared.run(*given)
        return y, y1, added
    *tensors, _, fused_options = given
    quantized = []
    y, y1, added = _FusedNorm.apply(*tensors, fused_options.weight1, fused_options.bias1, prepared, fused_options, quantized)
    for made in quantized:
        made._carrier, y = y, made
    return y, y1, input if added is None else added


class _PassingGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, carrier):
        ctx.dtype = carrier.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx, dy):
        return None, dy.to(ctx.dtype)


def passing_gradients(values: torch.Tensor, carrier: torch.Tensor) -> torch.Tensor:
    """values, whose gradient is carrier's."""
    return _PassingGradients.apply(values, carrier)


_OPTIONS = "residual_dtype, row_scale, dropout_p, weight1, bias1, round_x_hat or memory_efficient"


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, residual, weight1, bias1, prepared, fused_options, quantized):
        y, mean, rstd, added, y1, seed = prepared.run(input, weight, bias, residual, None, fused_options)
        of_seed = seed if isinstance(seed, torch.Tensor) else None
        kept = (y, None) if fused_options.memory_efficient else (added, mean)
        ctx.save_for_backward(
            *kept, rstd, weight, weight1, fused_options.row_scale, of_seed, bias if fused_options.memory_efficient else None
        )
        ctx.prepared, ctx.dropout = prepared, (fused_options.dropout_p, seed if of_seed is None else None)
        ctx.memory_efficient = fused_options.memory_efficient
        ctx.set_materialize_grads(False)
        if fused_options.quantization is not None:
            # 8-bit floats take no gradient: something of y's shape without its memory takes it.
            quantized.append(y)
            y = added.new_empty(1).expand(added.shape)
        return y, y1, added if prepared.makes_sum else None

    @staticmethod
    def backward(ctx, dy, dy1, dsum):
        forward = ctx.prepared
        x, mean, rstd, weight, weight1, row_scale, seed, bias = ctx.saved_tensors
        given = next((gradient for gradient in (dy, dy1, dsum) if gradient is not None), None)
        if given is None:
            return (None,) * 9
        if _is_transformed() or _is_mapped(given) or forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"the gradient of a call with {_OPTIONS} was asked for in a batch or in forward mode; expected one gradient at "
                "a time"
            )
        if dy is None and dy1 is None:
            dy = torch.zeros_like(x)
        wants = dict(zip(torch_ops.GRADIENTS, ctx.needs_input_grad))
        wants |= {name: False for name in ("dweight", "dbias") if dy is None}
        wants |= {name: False for name in ("dweight1", "dbias1") if dy1 is None}
        p, int_seed = ctx.dropout
        gradients = torch_ops.fused_gradients if torch.is_grad_enabled() else fused.backward  # create_graph=True
        made = gradients(
            forward.centered, dy, dy1, x, mean, rstd, forward.extents, weight, forward.zero_centered_weight, dsum,
            tuple(name for name in norm.FusedBackward._fields if wants[name]), None, forward.bias_dtype,
            forward.backward_options, forward.dtype, forward.residual_dtype,
            FusedOptions(None, row_scale, p, int_seed if seed is None else seed, weight1), forward.bias1_dtype,
            (weight, bias) if ctx.memory_efficient else None,
        )  # fmt: skip
        return *(getattr(made, name) for name in torch_ops.GRADIENTS), None, None, None
