"""torch.distributed: the ranks that share one layer, and their collectives.

Each collective returns a Pending: the result after wait(). What runs between the two overlaps with
the communication. NCCL communicates on a stream of its own, and wait() orders the present stream
after it; gloo communicates in a thread, and wait() blocks.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, distributed

from ..gpu.arrays import type_in_words
from ..linear.products import Pending
from . import agreement


def _function(*names: str) -> Any:
    """The first that this torch has, of one collective's newer and older names."""
    return next((getattr(distributed, name) for name in names if hasattr(distributed, name)), None)


_gather = _function("all_gather_single", "all_gather_into_tensor")
_scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")

# Of each group; a group is forgotten with its last reference.
_num_exchanges: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Ranks:
    """The group of tensor parallelism of one layer.

    size: of the group. group: of torch.distributed; None until it is set.
    known: the kinds of calls that the layer has compared: agreement.py.
    number: of the layer in the group, the same on all ranks; None before its first call.
    """

    def __init__(self, size: int, group: Any = None) -> None:
        self.size, self.group = size, None
        self.known: set[tuple] = set()
        self.number: int | None = None
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
        self.group, self.known, self.number = group, set(), None

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
        """Compares a call of a new kind on all ranks.

        By the group's store, because other ranks may be in a collective.

        call: what must be the same, by name.
        Raises ValueError if it is not the same; RuntimeError if another rank does not come until
        the timeout of the store.
        """
        call = {"the layer's number in the order of first calls": self.number} | call
        store = distributed.distributed_c10d._get_process_group_store(self.group)
        number = _num_exchanges.get(self.group, 0)
        calls = agreement.exchange(store, number, self.rank, self.size, call)
        _num_exchanges[self.group] = number + 1
        agreement.check_same(calls)
        if self.number is None:
            self.number = number

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
        return Ranks(self.size).__dict__


def group_size(group: Any) -> int:
    """Raises TypeError for what is no group of torch.distributed."""
    if isinstance(group, Tensor) or not callable(getattr(group, "size", None)):
        raise TypeError(
            f"tp_group is {type_in_words(group)}; expected a group of torch.distributed"
        )
    return group.size()


def _bits(tensor: Tensor) -> Tensor:
    """8-bit floats as uint8: gloo knows no others."""
    is_narrow = tensor.element_size() == 1 and tensor.is_floating_point()
    return tensor.view(torch.uint8) if is_narrow else tensor
