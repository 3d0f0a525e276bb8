"""torch.distributed: the ranks that share one layer, and their collectives.

Each collective returns a Pending: the result after wait(). What runs between the two overlaps with
the communication. NCCL communicates on a stream of its own, and wait() orders the present stream
after it; gloo communicates in a thread, and wait() blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed


def _function(*names: str) -> Any:
    """The first that this torch has, of one collective's newer and older names."""
    return next((getattr(distributed, name) for name in names if hasattr(distributed, name)), None)


_gather = _function("all_gather_single", "all_gather_into_tensor")
_scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")


class Pending:
    """A collective that may still run.

    work: of torch.distributed, or None where there is nothing to wait for.
    keeps: the tensors that it reads.
    """

    def __init__(self, result: Tensor, work: Any = None, keeps: Tensor | None = None) -> None:
        self._result, self._work, self._keeps = result, work, keeps

    def wait(self) -> Tensor:
        """The result, on the present stream."""
        if self._work is not None:
            self._work.wait()
        self._work = self._keeps = None
        return self._result


class Ranks:
    """The group of tensor parallelism of one layer.

    size: of the group. group: of torch.distributed; None until it is set.
    """

    def __init__(self, size: int, group: Any = None) -> None:
        self.size, self.group, self._agreed = size, None, False
        if group is not None:
            self.set_group(group)

    def set_group(self, group: Any) -> None:
        """Raises ValueError for a group of another size."""
        size = group_size(group)
        if size != self.size:
            raise ValueError(
                f"tp_group has {size} rank{'s' * (size > 1)} and tp_size is {self.size}; "
                "expected the same number"
            )
        self.group, self._agreed = group, False

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.group)

    def check_group(self) -> None:
        """Raises RuntimeError where no group is set."""
        if self.size > 1 and self.group is None:
            raise RuntimeError(
                f"tp_size is {self.size} and the layer has no tp_group; "
                "expected set_tensor_parallel_group(group) before its first call"
            )

    def agree(self, call: dict[str, Any]) -> None:
        """Compares the layer's first call on all ranks, because later ones cannot be compared
        without a wait.

        call: what must be the same, by name. Raises ValueError on every rank if it is not.
        """
        if self._agreed or self.size == 1:
            return
        calls: list[Any] = [None] * self.size
        distributed.all_gather_object(calls, call, self.group)
        for rank, other in enumerate(calls):
            for name, value in calls[0].items():
                if other.get(name) != value:
                    raise ValueError(
                        f"{name} is {other.get(name)} on rank {rank} of tp_group and {value} on "
                        "rank 0; expected the same on all ranks"
                    )
        self._agreed = True

    # Collectives.

    def gather(self, tensor: Tensor) -> Pending:
        """The tensors of all ranks, concatenated along the first dimension."""
        if self.size == 1:
            return Pending(tensor)
        bits = _bits(tensor).contiguous()
        whole = bits.new_empty((self.size * len(bits), *bits.shape[1:]))
        work = _gather(whole, bits, group=self.group, async_op=True)
        return Pending(whole.view(tensor.dtype), work, bits)

    def reduce_scatter(self, tensor: Tensor) -> Pending:
        """This rank's part, along the first dimension, of the sum over ranks."""
        if self.size == 1:
            return Pending(tensor)
        tensor = tensor.contiguous()
        own = tensor.new_empty((len(tensor) // self.size, *tensor.shape[1:]))
        work = _scatter(own, tensor, group=self.group, async_op=True)
        return Pending(own, work, tensor)

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> Pending:
        """The sum over ranks, or the largest value; the tensor may be overwritten."""
        if self.size == 1:
            return Pending(tensor)
        tensor = tensor.contiguous()
        kind = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
        return Pending(tensor, distributed.all_reduce(tensor, kind, self.group, async_op=True))

    # Copies.

    def __deepcopy__(self, memo: dict) -> Ranks:
        return Ranks(self.size, self.group)

    def __getstate__(self) -> dict:
        """Without the group, which belongs to a process."""
        return {"size": self.size, "group": None, "_agreed": False}


class Split(NamedTuple):
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


def group_size(group: Any) -> int:
    """Raises TypeError for what is no group of torch.distributed."""
    if not callable(getattr(group, "size", None)):
        raise TypeError(
            f"tp_group is a {type(group).__name__}; expected a group of torch.distributed"
        )
    return group.size()


def together(tensors: list[Tensor], reduce: Callable[[Tensor], Pending]) -> list[Tensor]:
    """Tensors of any shapes, reduced by one collective in the widest of their dtypes."""
    dtype = tensors[0].dtype
    for each in tensors:
        dtype = torch.promote_types(dtype, each.dtype)
    joined = reduce(torch.cat([each.reshape(-1).to(dtype) for each in tensors])).wait()
    parts = joined.split([each.numel() for each in tensors])
    return [part.reshape(each.shape).to(each.dtype) for part, each in zip(parts, tensors)]


def _bits(tensor: Tensor) -> Tensor:
    """8-bit floats as uint8: gloo knows no others."""
    is_narrow = tensor.element_size() == 1 and tensor.is_floating_point()
    return tensor.view(torch.uint8) if is_narrow else tensor
