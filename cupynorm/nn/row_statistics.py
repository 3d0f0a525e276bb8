"""torch: the statistics of rows whose columns are on several ranks.

Each rank computes its part's mean and M2 = sum (x - mean)^2 of each row. They are combined by Chan,
Golub and LeVeque's formula (1983) in the order of ranks, so every rank has the same bits. No square
of a mean is subtracted from a mean of squares, which would cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .formulas import arithmetic


class RowStatistics(NamedTuple):
    """mean = pivot + shift, to more digits than one number holds; both None for RMSNorm.

    Each of shape [num_rows], in the dtype of arithmetic.
    """

    pivot: Tensor | None
    shift: Tensor | None
    rstd: Tensor

    def x_hat(self, rows: Tensor) -> Tensor:
        """Of the columns of one rank, [num_rows, num_cols], in the dtype of arithmetic."""
        if self.pivot is None:
            return rows * self.rstd[:, None]
        # Near the mean the first difference is exact.
        rows = rows - self.pivot[:, None]
        return rows.sub_(self.shift[:, None]).mul_(self.rstd[:, None])


def of_part(rows: Tensor, *, centered: bool) -> Tensor:
    """What a rank sends of its columns, [num_rows, num_cols]: mean, the rest of it, and M2.

    Returns [3, num_rows], or for RMSNorm the sums of squares, [1, num_rows].
    """
    dtype, num_cols = arithmetic(rows), max(1, rows.shape[1])
    if not centered:
        return _squares(rows, dtype)[None]
    mean = rows.sum(1, dtype=dtype) / num_cols
    rows = rows - mean[:, None]
    rest = rows.sum(1) / num_cols  # the mean is rounded
    return torch.stack((mean, rest, _squares(rows.sub_(rest[:, None]), dtype)))


def _squares(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each row's squares. The squares themselves are not written to memory."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype).square()


def combined(parts: Tensor, counts: Sequence[int], eps: float, *, centered: bool) -> RowStatistics:
    """parts: what `of_part` returned on each rank, stacked. counts: columns of each rank."""
    num_cols = sum(counts)
    if not centered:
        var = parts[:, 0].sum(0) / num_cols
        return RowStatistics(None, None, 1.0 / torch.sqrt(var + eps))
    means, rests, squares = parts.unbind(1)
    if len(set(counts)) == 1:
        weights: float | Tensor = float(counts[0])  # a copy to the GPU could not be captured
    else:
        weights = means.new_tensor(counts)[:, None]
    pivot = means[0]
    offsets = means - pivot + rests
    shift = (weights * offsets).sum(0) / num_cols
    between = weights * (offsets - shift).square()
    var = (squares + between).sum(0) / num_cols
    return RowStatistics(pivot, shift, 1.0 / torch.sqrt(var + eps))
