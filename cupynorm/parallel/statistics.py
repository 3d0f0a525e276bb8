"""torch: the statistics of rows whose columns are on several ranks.

Each rank sends its part's mean and M2 = sum (x - mean)^2 of each row; they are combined by Chan,
Golub and LeVeque's formula (1983) in the order of ranks, so every rank has the same bits. No square
of a mean is subtracted from a mean of squares, which would cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.formulas import arithmetic
from .ranks import Ranks


class RowStatistics(NamedTuple):
    """mean = pivot + shift, exact to more digits than one number holds; both None for RMSNorm.

    Each of shape [num_rows], in the dtype of arithmetic.
    """

    pivot: Tensor | None
    shift: Tensor | None
    rstd: Tensor

    def x_hat(self, rows: Tensor) -> Tensor:
        """Of the columns of one rank, [num_rows, num_cols]."""
        rows = rows.to(self.rstd.dtype)
        if self.pivot is not None:
            # Near the mean the first difference is exact.
            rows = rows - self.pivot[:, None] - self.shift[:, None]
        return rows * self.rstd[:, None]


def statistics(rows: Tensor, eps: float, *, centered: bool, ranks: Ranks) -> RowStatistics:
    """rows: this rank's columns, [num_rows, num_cols], as many as on each other rank."""
    rows, num_cols = rows.to(arithmetic(rows)), rows.shape[1]
    if not centered:
        (squares,) = _of_ranks([(rows * rows).sum(1)], ranks)
        var = squares.sum(0) / (num_cols * ranks.size)
        return RowStatistics(None, None, 1.0 / torch.sqrt(var + eps))
    mean = rows.mean(1)
    rows = rows - mean[:, None]
    rest = rows.mean(1)  # the mean is rounded
    rows = rows - rest[:, None]
    means, rests, squares = _of_ranks([mean, rest, (rows * rows).sum(1)], ranks)
    pivot = means[0]
    offsets = means - pivot + rests
    shift = offsets.mean(0)
    between = (offsets - shift).square().sum(0)
    var = squares.sum(0) / (num_cols * ranks.size) + between / ranks.size
    return RowStatistics(pivot, shift, 1.0 / torch.sqrt(var + eps))


def _of_ranks(numbers: list[Tensor], ranks: Ranks) -> Tensor:
    """[len(numbers), ranks, num_rows] from numbers of each row, by one collective."""
    own = torch.stack(numbers)
    return ranks.gather(own[None]).wait().transpose(0, 1)
