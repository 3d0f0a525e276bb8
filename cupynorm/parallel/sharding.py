"""torch: how the ranks share one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .overlap import Overlaps, SymmetricSum, cuts
from .ranks import Pending, Ranks


class Sharding(NamedTuple):
    """How the ranks share a layer.

    mode: "column" or "row". sequence_parallel: whether each rank has rows of its own of the input
    (column) or of y (row). gathered: whether normalized is returned with the rows of all ranks.
    reduces_norm: whether the gradients of the norm's parameters are summed over ranks here.
    overlaps: what overlaps with products. symmetric_sum: replaces the all_reduce of mode "row".
    """

    ranks: Ranks
    mode: str
    sequence_parallel: bool
    gathered: bool
    reduces_norm: bool
    overlaps: Overlaps = Overlaps()
    symmetric_sum: SymmetricSum | None = None

    @property
    def gathers_input(self) -> bool:
        """Whether each rank has rows of its own of the input, which the product needs all."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def shares_rows(self) -> bool:
        """Whether the matrix that a rank multiplies is a part of one that all ranks have."""
        return self.mode == "row" or self.sequence_parallel

    def gather_input(self, tensor: Tensor) -> Pending:
        """The rows of all ranks, where gathers_input."""
        return self.ranks.gather(tensor) if self.gathers_input else Pending(tensor)

    def cuts_gather(self, num_rows: int, weight: Tensor) -> bool:
        """Whether ub_overlap_ag cuts the product of gathered rows. num_rows: of this rank."""
        num_rows *= self.ranks.size
        return self.overlaps.gather and cuts("ub_overlap_ag", num_rows, weight)

    def cuts_scatter(self, num_rows: int, weight: Tensor) -> bool:
        """The same of ub_overlap_rs and ub_overlap_rs_dgrad, and the product before a reduction.

        num_rows: of all ranks.
        """
        name = "ub_overlap_rs" if self.mode == "row" else "ub_overlap_rs_dgrad"
        return self.overlaps.scatter and cuts(name, num_rows, weight)

    def reduce(self, tensor: Tensor) -> Pending:
        """The sum over ranks: this rank's rows of it, or all rows without sequence_parallel."""
        if self.sequence_parallel:
            return self.ranks.reduce_scatter(tensor)
        return self.ranks.all_reduce(tensor)

    def reduce_output(self, part: Tensor) -> Pending:
        """As reduce, of the products of mode "row"."""
        if self.symmetric_sum is not None:
            return self.symmetric_sum(part, self.ranks)
        return self.reduce(part)

    def with_all_rows(self, shape: torch.Size) -> torch.Size:
        """The shape of a tensor with the rows of all ranks, from that of one rank's."""
        return torch.Size((shape[0] * self.ranks.size, *shape[1:]))
