"""torch: how the ranks share one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .ranks import Pending, Ranks


@dataclass(frozen=True)
class Sharding:
    """How the ranks share a layer.

    mode: "column" or "row". sequence_parallel: whether each rank has rows of its own of the input
    (column) or of y (row). gathered: whether normalized is returned with the rows of all ranks.
    reduces_norm: whether the gradients of the norm's parameters are summed over ranks here.
    """

    ranks: Ranks
    mode: str
    sequence_parallel: bool
    gathered: bool
    reduces_norm: bool

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

    def reduce(self, tensor: Tensor) -> Pending:
        """The sum over ranks: this rank's rows of it, or all rows without sequence_parallel."""
        if self.sequence_parallel:
            return self.ranks.reduce_scatter(tensor)
        return self.ranks.all_reduce(tensor)

    def with_all_rows(self, shape: torch.Size) -> torch.Size:
        """The shape of a tensor with the rows of all ranks, from that of one rank's."""
        return torch.Size((shape[0] * self.ranks.size, *shape[1:]))
