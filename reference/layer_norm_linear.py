"""A norm and the linear layer after it, forward and backward, in float64.

Forward, with x [num_rows, in_features], weight [out_features, in_features], bias [out_features],
and norm either LayerNorm or RMSNorm:

    s          = x + residual, or x
    normalized = norm(s) * norm_weight + norm_bias    as in layer_norm.py and rms_norm.py
    y          = normalized weight^T + bias           y_ro = sum_c normalized_rc weight_oc + bias_o

Backward. y, normalized and s may all be returned. Their gradients are dy, dnormalized and dsum:

    dweight_oc        = sum_r dy_ro normalized_rc          dweight = dy^T normalized
    dbias_o           = sum_r dy_ro
    d normalized_rc   = sum_o dy_ro weight_oc              dy weight, plus dnormalized
    dx, dnorm_weight, dnorm_bias                           those of the norm, with d normalized as
                                                           its dy; dsum is added to dx

Only the norm's own gradients depend on s. So normalized is either saved for dweight or computed
again from s.

Folding avoids the normalised tensor. With w = norm_weight or 1 + norm_weight, mean = 0 for RMSNorm,
and weight_w = weight * w:

    y_ro = rstd_r sum_c (s_rc - mean_r) weight_w_oc + (weight norm_bias + bias)_o

    For any number a_o, sum_c (s_rc - mean_r) a_o = 0. So each row o of weight_w may be centred:
    folded_oc = weight_w_oc - mean_c weight_w_oc, which sums to zero over c, and then

    y_ro = rstd_r sum_c s_rc folded_oc + folded_bias_o     LayerNorm; for RMSNorm folded = weight_w
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .layer_norm import layer_norm, layer_norm_backward, scale
from .rms_norm import rms_norm, rms_norm_backward


class Projected(NamedTuple):
    """What norm_linear returns.

    y: [num_rows, out_features]. normalized, sum: as x.
    mean, rstd: [num_rows] (mean is None for RMSNorm).
    """

    y: np.ndarray
    normalized: np.ndarray
    mean: np.ndarray | None
    rstd: np.ndarray
    sum: np.ndarray


class ProjectedGradients(NamedTuple):
    """dx: the gradient of the sum. Each gradient has the shape of its tensor."""

    dx: np.ndarray
    dnorm_weight: np.ndarray
    dnorm_bias: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray


class Folded(NamedTuple):
    """weight: [out_features, in_features]. bias: [out_features]."""

    weight: np.ndarray
    bias: np.ndarray


@np.errstate(all="ignore")
def norm_linear(
    x: np.ndarray,
    norm_weight: np.ndarray | None,
    norm_bias: np.ndarray | None,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    eps: float = 1e-5,
    *,
    centered: bool = True,
    residual: np.ndarray | None = None,
    zero_centered_weight: bool = False,
) -> Projected:
    """LayerNorm (centered) or RMSNorm and the linear layer after it, in float64.

    x: [num_rows, in_features]. norm_weight, norm_bias: [in_features].
    weight: [out_features, in_features]. bias: [out_features]. residual: as x.
    """
    norm = layer_norm if centered else rms_norm
    normalized, mean, rstd, added = norm(
        x, norm_weight, norm_bias, eps, residual=residual, zero_centered_weight=zero_centered_weight
    )
    y = normalized @ weight.T + (0.0 if bias is None else bias)
    return Projected(y, normalized, mean, rstd, added)


@np.errstate(all="ignore")
def norm_linear_backward(
    dy: np.ndarray,
    x: np.ndarray,
    mean: np.ndarray | None,
    rstd: np.ndarray,
    norm_weight: np.ndarray | None,
    norm_bias: np.ndarray | None,
    *,
    weight: np.ndarray,
    zero_centered_weight: bool = False,
    dnormalized: np.ndarray | None = None,
    dsum: np.ndarray | None = None,
) -> ProjectedGradients:
    """The gradients of norm_linear for dy [num_rows, out_features].

    x: the `sum` that norm_linear returned. mean (None: RMSNorm), rstd: as it returned them.
    dnormalized, dsum: the gradients of the other results, as x.
    """
    x_hat = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    normalized = x_hat * scale(norm_weight, zero_centered_weight) + (
        0.0 if norm_bias is None else norm_bias
    )
    reaches_norm = dy @ weight + (0.0 if dnormalized is None else dnormalized)
    options = {"zero_centered_weight": zero_centered_weight, "dsum": dsum}
    if mean is None:
        of_norm = rms_norm_backward(reaches_norm, x, rstd, norm_weight, **options)
    else:
        of_norm = layer_norm_backward(reaches_norm, x, mean, rstd, norm_weight, **options)
    return ProjectedGradients(*of_norm, dy.T @ normalized, dy.sum(axis=0))


def fold(
    norm_weight: np.ndarray | None,
    norm_bias: np.ndarray | None,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    centered: bool = True,
    zero_centered_weight: bool = False,
) -> Folded:
    """The folded weight and bias, with which y = rstd * (x weight^T) + bias."""
    folded = weight * scale(norm_weight, zero_centered_weight)
    if centered:
        folded = folded - folded.mean(axis=1, keepdims=True)
    of_norm = 0.0 if norm_bias is None else weight @ norm_bias
    return Folded(folded, np.zeros(len(weight)) + of_norm + (0.0 if bias is None else bias))
