"""RMSNorm (Zhang, Sennrich 2019) of the rows of x, forward and backward, in float64.

LayerNorm without its mean:

    rstd  = 1 / sqrt(sum(x^2) / num_cols + eps)
    x_hat = x * rstd
    y     = x_hat * w + bias                       with w = weight, or 1 + weight if zero-centred

    d rstd / d x_k = -rstd^3 * x_k / num_cols = -rstd^2 * x_hat_k / num_cols, and with wdy = dy * w

    dx_k = rstd * (wdy_k - x_hat_k * sum_c wdy_c * x_hat_c / num_cols)
    dweight = sum over rows of dy * x_hat,         dbias = sum over rows of dy
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .layer_norm import Gradients, Normalized, affine, scale


@np.errstate(all="ignore")
def rms_norm(
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
    rstd = 1.0 / np.sqrt((added**2).mean(axis=1) + eps)
    x_hat = added * rstd[:, None]
    y = affine(round_x_hat(x_hat) if round_x_hat else x_hat, weight, bias, zero_centered_weight)
    return Normalized(y, None, rstd, added)


@np.errstate(all="ignore")
def rms_norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    rstd: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    zero_centered_weight: bool = False,
    dsum: np.ndarray | None = None,
) -> Gradients:
    """The gradients of rms_norm for dy [num_rows, num_cols].

    x: the `sum` that rms_norm returned. rstd: as it returned it. dsum: a gradient added to dx.
    """
    x_hat = x * rstd[:, None]
    wdy = dy * scale(weight, zero_centered_weight)
    mean_wdy_x_hat = (wdy * x_hat).mean(axis=1, keepdims=True)
    dx = rstd[:, None] * (wdy - x_hat * mean_wdy_x_hat)
    if dsum is not None:
        dx = dx + dsum
    return Gradients(dx, (dy * x_hat).sum(axis=0), dy.sum(axis=0))
