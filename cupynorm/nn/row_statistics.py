"""torch: what one rank computes of rows whose columns are on several ranks.

On a GPU kernels compute it (cupynorm.norm.split_rows). Here are the same functions for tensors on
the CPU, by torch operators: arguments and results are those of the kernels.

Each rank computes its part's mean and M2 = sum (x - mean)^2 of each row. They are combined by Chan,
Golub and LeVeque's formula (1983) in the order of ranks, so every rank has the same bits. No square
of a mean is subtracted from a mean of squares, which would cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gpu import arrays
from ..norm import split_rows
from ..norm.split_rows import OfPart, SplitNorm, Wanted
from .dtypes import arithmetic, name_of


def statistics_of_part(of_part: OfPart, norm: SplitNorm) -> Tensor:
    """As cupynorm.norm.split_rows.statistics_of_part."""
    if not arrays.on_host(of_part.x):
        return split_rows.statistics_of_part(of_part, norm)
    rows = of_part.x.to(arithmetic(of_part.x))
    num_cols = max(1, rows.shape[1])
    if not norm.centered:
        return (rows * rows).sum(1)[None]
    mean = rows.sum(1) / num_cols
    rows = rows - mean[:, None]
    rest = rows.sum(1) / num_cols  # the mean is rounded
    rows = rows - rest[:, None]
    return torch.stack((mean, rest, (rows * rows).sum(1)))


def normalize(of_part: OfPart, norm: SplitNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As cupynorm.norm.split_rows.normalize."""
    if not arrays.on_host(of_part.x):
        return split_rows.normalize(of_part, norm, name_of(dtype))
    statistics = of_part.statistics
    if of_part.parts is not None:
        statistics = _combined(of_part.parts, norm)
    y = _x_hat(of_part.x, statistics)
    y = (
        y
        if of_part.weight is None
        else y * (of_part.weight.to(y.dtype) + norm.zero_centered_weight)
    )
    y = y if of_part.bias is None else y + of_part.bias.to(y.dtype)
    return y.to(dtype), statistics


def sums_of_part(of_part: OfPart, norm: SplitNorm) -> Tensor:
    """As cupynorm.norm.split_rows.sums_of_part."""
    if not arrays.on_host(of_part.x):
        return split_rows.sums_of_part(of_part, norm)
    wdy, x_hat = _weighted(of_part, norm), _x_hat(of_part.x, of_part.statistics)
    return torch.stack([(wdy * x_hat).sum(1), *([wdy.sum(1)] if norm.centered else [])])


def gradients(of_part: OfPart, norm: SplitNorm, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """As cupynorm.norm.split_rows.gradients."""
    if not arrays.on_host(of_part.x):
        return split_rows.gradients(of_part, norm, wanted)
    x_hat, dx, dweight, dbias = _x_hat(of_part.x, of_part.statistics), None, None, None
    dy = of_part.dy.to(x_hat.dtype)
    if wanted.dx:
        of_row = of_part.sums / norm.cols_of_row
        dx = _weighted(of_part, norm) - x_hat * of_row[0][:, None]
        dx = dx - of_row[1][:, None] if norm.centered else dx
        dx = (dx * of_part.statistics[-1][:, None]).to(of_part.x.dtype)
    if wanted.dweight:
        dweight = (dy * x_hat).sum(0).to(getattr(torch, wanted.dweight))
    if wanted.dbias:
        dbias = dy.sum(0).to(getattr(torch, wanted.dbias))
    return dx, dweight, dbias


def _combined(parts: Tensor, norm: SplitNorm) -> Tensor:
    """The statistics of whole rows. parts: [num_ranks, numbers of a row, num_rows]."""
    num_cols = norm.cols_of_row
    if not norm.centered:
        return 1.0 / torch.sqrt(parts.sum(0) / num_cols + norm.eps)
    means, rests, squares = parts.unbind(1)
    weights = parts.new_tensor(norm.counts)[:, None]
    origin = means[0]
    offsets = means - origin + rests
    shift = (weights * offsets).sum(0) / num_cols
    between = weights * (offsets - shift).square()
    var = (squares + between).sum(0) / num_cols
    # origin + shift, rounded, and its rounding error (Knuth's two-sum).
    mean = origin + shift
    added = mean - origin
    rest = (origin - (mean - added)) + (shift - added)
    return torch.stack((mean, rest, 1.0 / torch.sqrt(var + norm.eps)))


def _x_hat(rows: Tensor, statistics: Tensor) -> Tensor:
    rows = rows.to(statistics.dtype)
    if len(statistics) > 1:
        mean, rest, _ = statistics
        # Near the mean the first difference is exact.
        rows = rows - mean[:, None] - rest[:, None]
    return rows * statistics[-1][:, None]


def _weighted(of_part: OfPart, norm: SplitNorm) -> Tensor:
    """dy * weight, in the dtype of the arithmetic."""
    dy = of_part.dy.to(of_part.statistics.dtype)
    if of_part.weight is None:
        return dy
    return dy * (of_part.weight.to(dy.dtype) + norm.zero_centered_weight)
