"""torch: layer_norm and rms_norm as autograd functions, on CUDA through the kernels and on the CPU through the reference."""

from __future__ import annotations

import torch

from . import norm


def wants_gradient(*tensors: object) -> bool:
    """Whether torch would record an operation on these; None and arrays of other libraries count as constants."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and getattr(tensor, "requires_grad", False):
                return True
    return False


def apply(centered, input, normalized_shape, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options):
    """(y, input + residual), differentiable in input, weight, bias and residual."""
    if out is not None:
        raise ValueError("out was given for tensors that require gradients; expected out=None, or torch.no_grad()")
    # A tile belongs to one kernel; backward takes its own. A strategy is meant for both, and must fit both before either runs.
    norm.check_backward(centered, input, normalized_shape, weight, bias, residual, out_dtype, options)
    arguments = (centered, normalized_shape, eps, zero_centered_weight, out_dtype, options)
    y, added = _Norm.apply(input, weight, bias, residual, arguments)
    return y, input if residual is None else added


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, residual, arguments):
        centered, normalized_shape, eps, zero_centered_weight, out_dtype, options = arguments
        result = norm.forward(
            centered, input, normalized_shape, weight, bias, eps, residual, zero_centered_weight, out_dtype, None, options
        )
        # Backward needs no row but the normalised one: the input itself, or the sum that is returned anyway.
        normalized = input if residual is None else result.sum
        ctx.save_for_backward(normalized, weight, result.mean, result.rstd)
        ctx.arguments = arguments
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return result.y, (None if residual is None else result.sum)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dsum):
        x, weight, mean, rstd = ctx.saved_tensors
        centered, normalized_shape, _, zero_centered_weight, _, options = ctx.arguments
        wants_input, wants_weight, wants_bias, wants_residual, _ = ctx.needs_input_grad
        if dy is None:
            return dsum if wants_input else None, None, None, dsum if wants_residual else None, None
        wanted = {"dx": wants_input or wants_residual, "dweight": wants_weight, "dbias": wants_bias}
        result = norm.backward(
            centered, dy, x, mean, rstd, normalized_shape, weight, zero_centered_weight, dsum,
            [name for name, is_wanted in wanted.items() if is_wanted], None, ctx.bias_dtype,
            options._replace(tile=None),
        )  # fmt: skip
        return (
            result.dx if wants_input else None,
            result.dweight,
            result.dbias,
            result.dx if wants_residual else None,
            None,
        )
