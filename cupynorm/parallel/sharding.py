"""torch: how the ranks share one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear import products
from ..linear.operands import Operands
from ..linear.products import OneRank, Pending
from ..nn import by_torch, modes
from . import row
from .ranks import Ranks


class Sharding(OneRank):
    """How the ranks share a layer. Attributes: linear.products.OneRank.

    reduces_norm: whether the gradients of the norm's parameters are summed over ranks here.
    """

    def __init__(
        self,
        ranks: Ranks,
        mode: str,
        *,
        sequence_parallel: bool,
        gathered: bool,
        reduces_norm: bool,
    ) -> None:
        self.ranks, self.mode, self.size = ranks, mode, ranks.size
        self.sequence_parallel = sequence_parallel
        self.gathers_input = sequence_parallel and mode == "column"
        self.gathered = gathered and self.gathers_input
        self.reduces_norm = reduces_norm and self.gathers_input
        self.shares_rows = mode == "row" or sequence_parallel
        self.all_reduce = ranks.all_reduce
        self.forward = row.forward if mode == "row" else products.forward
        self.backward = row.backward if mode == "row" else products.backward

    def gather_input(self, tensor: Tensor) -> Pending:
        return self.ranks.gather(tensor) if self.gathers_input else Pending(tensor)

    def reduce(self, tensor: Tensor) -> Pending:
        if self.sequence_parallel:
            return self.ranks.reduce_scatter(tensor)
        return self.ranks.all_reduce(tensor)

    def reduce_norm(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """dx and the gradients of the norm's parameters, these summed by one collective in the
        wider of their dtypes, where reduces_norm."""
        own = [each for each in gradients[1:] if each is not None] if self.reduces_norm else []
        if not own:
            return gradients
        dtype = torch.promote_types(own[0].dtype, own[-1].dtype)
        total = self.ranks.all_reduce(torch.cat([each.to(dtype) for each in own])).wait()
        sums = iter(total.split([len(each) for each in own]))
        return [
            gradients[0],
            *(None if each is None else next(sums).to(each.dtype) for each in gradients[1:]),
        ]

    def with_all_rows(self, shape: torch.Size) -> torch.Size:
        """The shape of a tensor with the rows of all ranks, from that of one rank's."""
        return torch.Size((shape[0] * self.size, *shape[1:]))

    def check_plain(self, operands: Operands) -> None:
        """Raises NotImplementedError for what torch would transform, and for DTensors."""
        if modes.is_transformed():
            raise NotImplementedError(
                "torch.func or forward mode was asked to transform a layer with tp_size of 2 or "
                "more; expected it outside of them"
            )
        if by_torch.is_any_dtensor(*operands.all()):
            raise NotImplementedError(
                "a DTensor was given to a layer with tp_size of 2 or more; expected plain tensors, "
                "to_local()"
            )
