"""LayerNorm (Ba, Kiros, Hinton 2016) of the rows of x, forward and backward, in float64.

Forward, for each row of num_cols values:

    mean  = sum(x) / num_cols
    var   = sum((x - mean)^2) / num_cols
    rstd  = 1 / sqrt(var + eps)
    x_hat = (x - mean) * rstd
    y     = x_hat * w + bias                       with w = weight, or 1 + weight if zero-centred

Backward. wdy = dy * w is the gradient of x_hat. y depends on x through x - mean and rstd:

    d mean / d x_k  = 1 / num_cols
    d rstd / d x_k  = -rstd^3 * (x_k - mean) / num_cols = -rstd^2 * x_hat_k / num_cols

    dx_k = sum_c wdy_c * d x_hat_c / d x_k
         = sum_c wdy_c * ((delta_ck - 1 / num_cols) * rstd + (x_c - mean) * d rstd / d x_k)
         = rstd * (wdy_k - sum_c wdy_c / num_cols - x_hat_k * sum_c wdy_c * x_hat_c / num_cols)

    dweight = sum over rows of dy * x_hat,         dbias = sum over rows of dy

A residual is added first, s = x + residual, and s is normalised in place of x. Both addends have
the gradient ds = dx + dsum. dsum is the gradient of other uses of s, as in a pre-norm block that
also returns s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Normalized(NamedTuple):
    """What a forward function returns.

    y: [num_rows, num_cols]. mean, rstd: [num_rows] (mean is None for RMSNorm).
    sum: [num_rows, num_cols], the normalised rows: x + residual.
    """

    y: np.ndarray
    mean: np.ndarray | None
    rstd: np.ndarray
    sum: np.ndarray


class Gradients(NamedTuple):
    """dx: [num_rows, num_cols], the gradient of the sum. dweight, dbias: [num_cols]."""

    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray


def affine(
    x_hat: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    zero_centered_weight: bool,
) -> np.ndarray:
    """x_hat * weight + bias. A weight of None is 1, a bias of None is 0."""
    return x_hat * scale(weight, zero_centered_weight) + (0.0 if bias is None else bias)


def scale(weight: np.ndarray | None, zero_centered_weight: bool) -> np.ndarray | float:
    """What x_hat is multiplied by: weight, 1 + weight, or 1 without a weight."""
    if weight is None:
        return 1.0
    return 1.0 + weight if zero_centered_weight else weight


@np.errstate(all="ignore")
def layer_norm(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    eps: float = 1e-5,
    *,
    residual: np.ndarray | None = None,
    zero_centered_weight: bool = False,
    round_x_hat: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Normalized:
    """Normalises each row of x in float64.

    x, residual: [num_rows, num_cols]. weight, bias: [num_cols].
    round_x_hat: a function that rounds x_hat before it is multiplied by weight.
    """
    x = np.asarray(x, dtype=np.float64)
    added = x if residual is None else x + residual
    mean = added.mean(axis=1)
    # The mean is rounded, so the mean of the differences is subtracted too.
    centered = added - mean[:, None]
    rest = centered.mean(axis=1)
    centered = centered - rest[:, None]
    rstd = 1.0 / np.sqrt((centered**2).mean(axis=1) + eps)
    x_hat = centered * rstd[:, None]
    y = affine(round_x_hat(x_hat) if round_x_hat else x_hat, weight, bias, zero_centered_weight)
    return Normalized(y, mean + rest, rstd, added)


@np.errstate(all="ignore")
def layer_norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    zero_centered_weight: bool = False,
    dsum: np.ndarray | None = None,
) -> Gradients:
    """The gradients of layer_norm for dy [num_rows, num_cols].

    x: the `sum` that layer_norm returned. mean, rstd: as it returned them, or rounded or of other
        rows: x_hat is (x - mean) * rstd.
    dsum: a gradient that is added to dx.
    """
    x_hat = (x - mean[:, None]) * rstd[:, None]
    wdy = dy * scale(weight, zero_centered_weight)
    mean_wdy = wdy.mean(axis=1, keepdims=True)
    mean_wdy_x_hat = (wdy * x_hat).mean(axis=1, keepdims=True)
    dx = rstd[:, None] * (wdy - mean_wdy - x_hat * mean_wdy_x_hat)
    if dsum is not None:
        dx = dx + dsum
    return Gradients(dx, (dy * x_hat).sum(axis=0), dy.sum(axis=0))
