"""torch: layer_norm, rms_norm and their derivatives as torch operations.

They stand where no kernel can: torch cannot look into a kernel. Differentiating a gradient, pushing
tangents forward and mapping over a dimension need torch's own operations.

With avg(t) = sum(t) / num_cols over a row, x_hat = (x - mean) * rstd has the symmetric Jacobian J
(derived in cupynorm.reference.layer_norm; rms_norm has neither mean nor avg(t)):

    J t     = rstd * (t - avg(t) - x_hat * avg(t * x_hat))
    d rstd  = -rstd^2 * avg(x_hat * dx)

Both lines are functions of x_hat and rstd, so torch differentiates them to any order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    """What a forward saved for its derivatives.

    x: [..., *normalized_shape]. mean, rstd: [...]; mean is None for rms_norm.
    weight: [*normalized_shape] or None.
    """

    x: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    normalized_shape: tuple[int, ...]
    zero_centered_weight: bool

    @property
    def centered(self) -> bool:
        return self.mean is not None


def arithmetic(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic on x and of its statistics: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def sum_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums over the rows of a matrix, of one dtype, rounded once.

    torch.sum(dtype=) would round each element to that dtype first.
    """
    return rows.sum(0, dtype=arithmetic(rows)).to(dtype)


def moments(
    x: Tensor, num_dims: int, centered: bool, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x - mean, mean and rstd, in the dtype of arithmetic; x and None unless centered.

    x is normalised over its last num_dims dimensions, which are 1 in mean and rstd.
    """
    x, mean = x.to(arithmetic(x)), None
    if centered:
        mean = _average(x, num_dims)
        x = x - mean
    return x, mean, torch.rsqrt(_average(x * x, num_dims) + eps)


def x_hat(x: Tensor, num_dims: int, centered: bool, eps: float) -> Tensor:
    """x normalised over its last num_dims dimensions, in the dtype of arithmetic."""
    difference, _, rstd = moments(x, num_dims, centered, eps)
    return difference * rstd


def scale(weight: Tensor | None, zero_centered_weight: bool, dtype: torch.dtype) -> Tensor | float:
    """What x_hat is multiplied by: weight, 1 + weight, or 1 without a weight."""
    if weight is None:
        return 1.0
    return 1.0 + weight.to(dtype) if zero_centered_weight else weight.to(dtype)


class Normalized(torch.autograd.Function):
    """x_hat [..., *normalized_shape] and rstd [...] of x, in the dtype of arithmetic.

    compute(x) returns their values; this function differentiates them.
    """

    @staticmethod
    def forward(x, num_dims, centered, compute):
        return compute(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.num_dims, ctx.centered, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx, dx_hat, drstd):
        dx = _pull_back(dx_hat, drstd, *ctx.saved_tensors, ctx.num_dims, ctx.centered)
        return dx.to(ctx.dtype), None, None, None

    @staticmethod
    def vmap(_, in_dims, x, num_dims, centered, compute):
        """The mapped dimension becomes more rows."""
        rows = x.movedim(in_dims[0], 0)
        return Normalized.apply(rows, num_dims, centered, compute), (0, 0)


def _average(of: Tensor, num_dims: int) -> Tensor:
    return of.mean(tuple(range(-num_dims, 0)), keepdim=True)


def _spread(statistic: Tensor, num_dims: int) -> Tensor:
    """[...] as [..., 1, 1]: one number for each row."""
    return statistic[(..., *(None,) * num_dims)]


def _jacobian(of: Tensor, x_hat: Tensor, rstd: Tensor, num_dims: int, centered: bool) -> Tensor:
    """J of: see the head of this file."""
    result = of - x_hat * _average(of * x_hat, num_dims)
    if centered:
        result = result - _average(of, num_dims)
    return _spread(rstd, num_dims) * result


def _pull_back(
    dx_hat: Tensor, drstd: Tensor, x_hat: Tensor, rstd: Tensor, num_dims: int, centered: bool
) -> Tensor:
    """The gradient of x from those of x_hat and rstd."""
    num_cols = math.prod(x_hat.shape[-num_dims:])
    of_rstd = x_hat * _spread(-(rstd**2) * drstd / max(1, num_cols), num_dims)
    return _jacobian(dx_hat, x_hat, rstd, num_dims, centered) + of_rstd


def _from_statistics(saved: Saved) -> tuple[Tensor, Tensor]:
    """x_hat and rstd from saved statistics, and differentiable in x."""
    num_dims, mean, rstd = len(saved.normalized_shape), saved.mean, saved.rstd

    def compute(x):
        difference = x if mean is None else x - _spread(mean, num_dims)
        return difference * _spread(rstd, num_dims), rstd.clone()

    return Normalized.apply(saved.x, num_dims, saved.centered, compute)


def gradients(dy: Tensor, dsum: Tensor | None, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias as cupynorm.reference derives them, in the dtype of arithmetic.

    dsum: a gradient that is added to dx, or None.
    torch can map over them (is_grads_batched=True) and differentiate them to any order.
    """
    shape, num_dims = saved.normalized_shape, len(saved.normalized_shape)
    x_hat, rstd = _from_statistics(saved)
    dy = dy.to(rstd.dtype)
    wdy = dy * scale(saved.weight, saved.zero_centered_weight, dy.dtype)
    dx = _jacobian(wdy, x_hat, rstd, num_dims, saved.centered)
    if dsum is not None:
        dx = dx + dsum
    return dx, (dy * x_hat).sum_to_size(shape), dy.sum_to_size(shape)


def second_derivatives(
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    dy: Tensor,
    saved: Saved,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of dy, x and weight, from those of dx, dweight and dbias.

    Write g = dy * w with w = weight or 1 + weight, and a, b, c for ddx, ddweight, ddbias.
    Differentiated is <a, dx> + <b, dweight> + <c, dbias> with

        dx = J g
        dweight = sum over rows of dy * x_hat
        dbias = sum over rows of dy

    J is symmetric, so <a, J g> = <J a, g>, and with avg over a row of num_cols

        <a, J g> =
            num_cols * rstd * (avg(a * g) - avg(a) * avg(g) - avg(a * x_hat) * avg(g * x_hat))

    for each row (without avg(a) * avg(g) in rms_norm). Hence the gradient

        of dy      w * J a + b * x_hat + c
        of weight  sum over rows of dy * J a
        of x_hat   b * dy - rstd * (a * avg(g * x_hat) + g * avg(a * x_hat))
        of rstd    <a, J g> / rstd

    and the last two give the gradient of x by the derivatives at the head of this file.
    """
    shape, num_dims, centered = saved.normalized_shape, len(saved.normalized_shape), saved.centered
    x_hat, rstd = _from_statistics(saved)
    dy = dy.to(rstd.dtype)
    factor = scale(saved.weight, saved.zero_centered_weight, dy.dtype)
    wdy = dy * factor
    ddx = torch.zeros_like(x_hat) if ddx is None else ddx.to(rstd.dtype)
    pushed = _jacobian(ddx, x_hat, rstd, num_dims, centered)
    along_ddx, along_wdy = _average(ddx * x_hat, num_dims), _average(wdy * x_hat, num_dims)

    of_dy = factor * pushed
    of_x_hat = -_spread(rstd, num_dims) * (ddx * along_wdy + wdy * along_ddx)
    if ddweight is not None:
        of_dy, of_x_hat = of_dy + ddweight * x_hat, of_x_hat + ddweight * dy
    if ddbias is not None:
        of_dy = of_dy + ddbias
    product = _average(ddx * wdy, num_dims) - along_ddx * along_wdy
    if centered:
        product = product - _average(ddx, num_dims) * _average(wdy, num_dims)
    of_rstd = math.prod(shape) * product.reshape(rstd.shape)
    of_x = _pull_back(of_x_hat, of_rstd, x_hat, rstd, num_dims, centered)
    return of_dy, of_x, (dy * pushed).sum_to_size(shape)
