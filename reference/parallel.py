"""A norm and the linear layer after it on several ranks, in float64.

Each list has one array for each rank, so no rank communicates: what ranks would gather or reduce is
concatenated or summed here. The unsharded layer is that of layer_norm_linear.py.

column    A rank has some rows of weight and of bias, and so some columns of y.
          x is the same on each rank. With sequence_parallel a rank has some rows of x; the rows
          of normalized are gathered before the product.

              y_k           = gather(normalized) weight_k^T + bias_k
              d normalized  = sum over ranks of dy_k weight_k; a rank takes its rows of the sum

          A gradient of the gathered normalized is summed over ranks too: each rank's copy is a
          tensor of its own.

row       A rank has some columns of x and of weight, and those elements of norm_weight and
          norm_bias. bias is the same on each rank. With sequence_parallel a rank takes some rows
          of y.

              y = sum over ranks of normalized_k weight_k^T, plus bias

          The statistics of a row are combined from those of its parts (Chan, Golub, LeVeque
          1983), with count_k columns, their mean_k, and M2_k = sum (x - mean_k)^2:

              mean = sum_k count_k mean_k / count
              M2   = sum_k M2_k + count_k (mean_k - mean)^2         var = M2 / count

          dx needs two sums of a row, of wdy and of wdy * x_hat, each summed over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .layer_norm import affine, layer_norm_backward, scale
from .layer_norm_linear import Projected, ProjectedGradients, norm_linear
from .rms_norm import rms_norm_backward


class Shards(NamedTuple):
    """The parameters of each rank. None: there is no such parameter.

    column: norm_weight and norm_bias are the same on each rank; row: bias is.
    """

    norm_weight: Sequence[np.ndarray | None]
    norm_bias: Sequence[np.ndarray | None]
    weight: Sequence[np.ndarray]
    bias: Sequence[np.ndarray | None]


def column_linear(
    x: Sequence[np.ndarray],
    shards: Shards,
    eps: float = 1e-5,
    *,
    centered: bool = True,
    zero_centered_weight: bool = False,
    sequence_parallel: bool = False,
) -> list[Projected]:
    """What each rank returns. normalized, mean, rstd and sum are those of the rank's rows.

    x: [num_rows, in_features] of each rank.
    """
    options = {"centered": centered, "zero_centered_weight": zero_centered_weight}
    own = [norm_linear(*each, None, eps, **options) for each in zip(x, *shards[:3])]
    made = []
    for projected, weight, bias in zip(own, shards.weight, shards.bias):
        rows = [each.normalized for each in own] if sequence_parallel else [projected.normalized]
        y = np.concatenate(rows) @ weight.T + (0.0 if bias is None else bias)
        made.append(projected._replace(y=y))
    return made


def column_linear_backward(
    dy: Sequence[np.ndarray],
    made: Sequence[Projected],
    shards: Shards,
    *,
    zero_centered_weight: bool = False,
    sequence_parallel: bool = False,
    dgathered: Sequence[np.ndarray] | None = None,
) -> list[ProjectedGradients]:
    """The gradients on each rank.

    dy: [num_rows of all ranks, columns of the rank]. made: what column_linear returned.
    dgathered: gradients of each rank's gathered normalized, with sequence_parallel.
    With sequence_parallel those of norm_weight and norm_bias are of the rank's rows; their sum over
    ranks is the gradient.
    """
    total = sum(each @ weight for each, weight in zip(dy, shards.weight))
    if dgathered is not None:
        total = total + sum(dgathered)
    everyone = [each.normalized for each in made]
    gradients, first = [], 0
    for rank, own in enumerate(made):
        last = first + len(own.sum)
        reaches = total[first:last] if sequence_parallel else total
        first = last
        options = {"zero_centered_weight": zero_centered_weight}
        weight = shards.norm_weight[rank]
        if own.mean is None:
            of_norm = rms_norm_backward(reaches, own.sum, own.rstd, weight, **options)
        else:
            of_norm = layer_norm_backward(reaches, own.sum, own.mean, own.rstd, weight, **options)
        rows = np.concatenate(everyone) if sequence_parallel else own.normalized
        gradients.append(ProjectedGradients(*of_norm, dy[rank].T @ rows, dy[rank].sum(axis=0)))
    return gradients


def combine(
    counts: Sequence[int], means: Sequence[np.ndarray], squares: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """mean and var [num_rows] of rows from those of their parts.

    counts: columns of each part. means, squares: mean and M2 of each part, [num_rows].
    """
    count = sum(counts)
    mean = sum(n * each for n, each in zip(counts, means)) / count
    of_means = (n * (each - mean) ** 2 for n, each in zip(counts, means))
    return mean, (sum(squares) + sum(of_means)) / count


def row_linear(
    x: Sequence[np.ndarray],
    shards: Shards,
    eps: float = 1e-5,
    *,
    centered: bool = True,
    zero_centered_weight: bool = False,
    sequence_parallel: bool = False,
) -> list[Projected]:
    """What each rank returns: mean and rstd are of the whole rows, normalized and sum its columns.

    x: [num_rows, columns of the rank] of each rank.
    """
    counts = [each.shape[1] for each in x]
    if centered:
        own = [each.mean(axis=1) for each in x]
        squares = [((each - m[:, None]) ** 2).sum(axis=1) for each, m in zip(x, own)]
        mean, var = combine(counts, own, squares)
    else:
        mean, var = None, sum((each**2).sum(axis=1) for each in x) / sum(counts)
    rstd = 1.0 / np.sqrt(var + eps)
    parts = []
    for each, norm_weight, norm_bias in zip(x, shards.norm_weight, shards.norm_bias):
        x_hat = (each if mean is None else each - mean[:, None]) * rstd[:, None]
        parts.append(affine(x_hat, norm_weight, norm_bias, zero_centered_weight))
    y = sum(part @ weight.T for part, weight in zip(parts, shards.weight))
    ys = np.split(y, len(x)) if sequence_parallel else [y] * len(x)
    ys = [each if bias is None else each + bias for each, bias in zip(ys, shards.bias)]
    return [Projected(*each, mean, rstd, own) for *each, own in zip(ys, parts, x)]


def row_linear_backward(
    dy: Sequence[np.ndarray],
    made: Sequence[Projected],
    shards: Shards,
    *,
    zero_centered_weight: bool = False,
    sequence_parallel: bool = False,
    dnormalized: Sequence[np.ndarray] | None = None,
) -> list[ProjectedGradients]:
    """The gradients on each rank.

    dy: the gradient of the rank's y: the same on each rank, or its rows with sequence_parallel,
        which are gathered; so dbias is the whole sum on each rank.
    made: what row_linear returned. dnormalized: gradients of each rank's normalized.
    """
    num_cols = sum(each.sum.shape[1] for each in made)
    whole = np.concatenate(dy) if sequence_parallel else dy[0]
    x_hats, reaching, weighted = [], [], []
    for rank, own in enumerate(made):
        x = own.sum if own.mean is None else own.sum - own.mean[:, None]
        x_hats.append(x * own.rstd[:, None])
        elsewhere = 0.0 if dnormalized is None else dnormalized[rank]
        reaching.append(whole @ shards.weight[rank] + elsewhere)
        weighted.append(reaching[rank] * scale(shards.norm_weight[rank], zero_centered_weight))
    mean_wdy = sum(each.sum(axis=1, keepdims=True) for each in weighted) / num_cols
    products = (wdy * x_hat for wdy, x_hat in zip(weighted, x_hats))
    mean_product = sum(each.sum(axis=1, keepdims=True) for each in products) / num_cols
    gradients = []
    for rank, own in enumerate(made):
        rest = weighted[rank] - x_hats[rank] * mean_product
        dx = own.rstd[:, None] * (rest if own.mean is None else rest - mean_wdy)
        dnorm_weight = (reaching[rank] * x_hats[rank]).sum(axis=0)
        dnorm_bias = reaching[rank].sum(axis=0)
        dweight = whole.T @ own.normalized
        dbias = whole.sum(axis=0)
        gradients.append(ProjectedGradients(dx, dnorm_weight, dnorm_bias, dweight, dbias))
    return gradients
