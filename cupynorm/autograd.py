"""torch: layer_norm and rms_norm as autograd functions, on CUDA through the kernels and on the CPU through the reference."""

from __future__ import annotations

import torch

from . import norm
from .arrays import TorchLibrary


def wants_gradient(*tensors: object) -> bool:
    """Whether torch would record an operation on these; None and arrays of other libraries count as constants."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):
                return True
    return False


def record(prepared, input, weight, bias, residual):
    """(y, input + residual) of a prepared forward, differentiable in input, weight, bias and residual."""
    if torch._C._are_functorch_transforms_active():
        return _Norm.apply(input, weight, bias, residual, prepared)  # torch says why not
    result = _apply(input, weight, bias, residual, prepared)
    return (result, input) if residual is None else result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, residual, prepared):
        y, mean, rstd, added = prepared.run(input, weight, bias, residual, None)
        # Backward needs no row but the normalised one: the input itself, or the sum that is returned anyway.
        ctx.save_for_backward(added, weight, mean, rstd)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, added)

    @staticmethod
    def backward(ctx, dy, dsum=None):
        wants_input, _, _, wants_residual, _ = ctx.needs_input_grad
        if dy is None:
            dx, dweight, dbias = dsum, None, None
        elif torch.is_grad_enabled():  # create_graph=True: second derivatives may follow
            dx, dweight, dbias = _Gradients.apply(ctx, dy, dsum, *ctx.saved_tensors)
        else:
            dx, dweight, dbias = _gradients(ctx, dy, dsum, *ctx.saved_tensors)
        return dx if wants_input else None, dweight, dbias, dx if wants_residual else None, None


# _Norm.apply less what it does for functorch's transforms (vmap, grad, jvp): a third of its 9 microseconds.
_apply = super(torch.autograd.Function, _Norm).apply

_lie = TorchLibrary.lie


def _gradients(ctx, dy, dsum, x, weight, mean, rstd):
    """dx, dweight, dbias: those that ctx asks for."""
    forward = ctx.prepared
    # What was saved may lie otherwise now: torch lets hooks pack and unpack it.
    key = (
        _lie(dy), _lie(dsum), _lie(x), _lie(weight), mean is None or mean.is_contiguous(), rstd.is_contiguous(),
        ctx.needs_input_grad,
    )  # fmt: skip
    prepared = forward.backwards.get(key)
    if prepared is None:
        wants_input, wants_weight, wants_bias, wants_residual, _ = ctx.needs_input_grad
        wanted = {"dx": wants_input or wants_residual, "dweight": wants_weight, "dbias": wants_bias}
        prepared, _ = norm.prepare_backward(
            forward.centered, dy, x, mean, rstd, forward.extents, weight, forward.zero_centered_weight, dsum,
            [name for name, is_wanted in wanted.items() if is_wanted], None, forward.bias_dtype, forward.backward_options,
        )  # fmt: skip
        norm.keep(forward.backwards, key, prepared)
    return prepared.run(dy, x, mean, rstd, weight, dsum)


class _Gradients(torch.autograd.Function):
    """The gradients as tensors that know what they depend on, and refuse to be differentiated."""

    @staticmethod
    def forward(_, *arguments):
        return _gradients(*arguments)

    @staticmethod
    def backward(_, *gradients):
        raise RuntimeError(
            "cupynorm has no second derivatives, and a gradient of layer_norm or rms_norm was differentiated; where "
            "create_graph=True is meant, use torch.nn.functional"
        )
