"""torch: three ways to compute a norm and its gradients.

KERNELS     calls the kernels; outside autograd
OPERATORS   calls the operators of nn/operators.py, which torch records and traces
FORMULAS    calls torch operations alone, which torch.func and forward mode can transform
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn import autograd, formulas, operators
from ..nn.dtypes import name_of
from ..norm.prepared import FOR_Y
from . import kernels
from .call import LinearCall, LinearOptions, Operands, check_eps
from .kernels import SavedNorm, backward_request, forward_request
from .matrices import sum_rows


class Norms(NamedTuple):
    """One way.

    normalize(options, operands): the normalised tensor.
    gradients(options, dy, saved, dsum, wanted=, recompute=, overwrite_dy=): as kernels.backward.
    sum_rows(rows, dtype): the sums over rows of a matrix.
    """

    normalize: Callable[[LinearOptions, Operands], Tensor]
    gradients: Callable[..., tuple[Tensor | None, ...]]
    sum_rows: Callable[[Tensor, torch.dtype], Tensor]


def normalize_and_add(call: LinearCall) -> tuple[Tensor, Tensor]:
    """The normalised tensor and input + residual, differentiable as a norm's call is."""
    operands, options = call
    request = forward_request(options, operands, name_of(options.dtype))
    y, _, added = autograd.normalize(request)
    return y, added


def _kernel_normalize(options: LinearOptions, operands: Operands) -> Tensor:
    return kernels.forward(options, operands, options.dtype, FOR_Y)[0]


def _operator_normalize(options: LinearOptions, operands: Operands) -> Tensor:
    return operators.norm_forward(forward_request(options, operands, options.dtype))[0]


def _operator_gradients(
    options, dy, saved: SavedNorm, dsum, *, wanted, recompute=False, overwrite_dy=False
):
    saved = saved._replace(mean=saved.mean if options.centered else None)
    # The recomputing operator is not differentiable.
    recompute = recompute and not torch.is_grad_enabled()
    request = backward_request(options, dy, saved, dsum, wanted=wanted, recompute=recompute)
    backward = operators.recomputing_norm_backward if recompute else operators.norm_backward
    gradients = backward(request)
    return *gradients[:3], gradients.y


def _formula_normalize(options: LinearOptions, operands: Operands) -> Tensor:
    input, norm_bias = operands.input, operands.norm_bias
    eps = check_eps(options.eps, name_of(input.dtype), centered=options.centered)
    x_hat = formulas.x_hat(input, 1, options.centered, eps)
    weight, zero_centered = operands.norm_weight, options.zero_centered_weight
    y = x_hat * formulas.scale(weight, zero_centered, x_hat.dtype)
    return (y if norm_bias is None else y + norm_bias).to(options.dtype)


def _formula_gradients(
    options, dy, saved: SavedNorm, dsum, *, wanted, recompute=False, overwrite_dy=False
):
    x, mean, rstd, norm_weight, _ = saved
    shape, zero_centered = tuple(x.shape[-1:]), options.zero_centered_weight
    point = formulas.Saved(x, mean, rstd, norm_weight, shape, zero_centered)
    gradients = formulas.gradients(dy, dsum, point)
    return *(
        gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted)
    ), None


KERNELS = Norms(_kernel_normalize, kernels.backward, sum_rows)
OPERATORS = Norms(_operator_normalize, _operator_gradients, formulas.sum_rows)
FORMULAS = Norms(_formula_normalize, _formula_gradients, formulas.sum_rows)
