"""torch.distributed: the ranks that share one layer, and their collectives.

Each collective returns a Pending: the result after wait(). What runs between the two overlaps with
the communication. NCCL communicates on a stream of its own, and wait() orders the present stream
after it; gloo communicates in a thread, and wait() blocks.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from ..gpu.arrays import type_in_words


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
    known: shapes and dtypes of inputs that the layer has compared.
    shares_memory: whether each rank's GPU reaches the memory of the others. has_multicast: whether
    torch reduces over NVLink multicast. Both are known after `agree`.
    """

    def __init__(self, size: int, group: Any = None) -> None:
        self.size, self.group = size, None
        self.known: set[tuple[torch.Size, torch.dtype]] = set()
        self.shares_memory = self.has_multicast = False
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
        self.group, self.known = group, set()

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

    def agree(self, call: dict[str, Any], input: Tensor) -> None:
        """Compares a call on all ranks where its input has another shape or dtype than all before.

        The layer's first call is compared by the group. Later ones are compared by the group's
        store, because other ranks may be in a collective. Calls like a former one are not compared.

        call: what must be the same, by name.
        Raises ValueError if it is not the same; RuntimeError if the store waits for another rank
        until its timeout.
        """
        if self.size == 1:
            return
        if not self.known:
            _check_same(self._gather_objects(call))
            device = input.device
            if device.type == "cuda" and distributed.get_backend(self.group) == "nccl":
                places = self._gather_objects((socket.gethostname(), device.index))
                found = self._gather_objects((_reaches(places, self.rank), _has_multicast(device)))
                self.shares_memory, self.has_multicast = map(all, zip(*found))
        else:
            _check_same(self._gather_by_store(call))
        self.known.add((input.shape, input.dtype))

    def _gather_objects(self, own: Any) -> list[Any]:
        """An object of each rank."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, own, self.group)
        return found

    def _gather_by_store(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """The calls of all ranks by the store of the group, without a collective."""
        store = distributed.distributed_c10d._get_process_group_store(self.group)
        name, own = self.group.group_name, self.rank
        number = _numbers[name] = _numbers.get(name, 0) + 1
        store.set(f"cupynorm/{number}/{own}", pickle.dumps(call))
        calls = []
        for rank in range(self.size):
            try:
                calls.append(pickle.loads(store.get(f"cupynorm/{number}/{rank}")))
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {own} of tp_group has a call unlike all before, "
                    + ", ".join(f"{name} {value}" for name, value in call.items())
                    + f", and rank {rank} has none; expected the same on all ranks"
                ) from error
        store.delete_key(f"cupynorm/{number - 1}/{own}")  # all ranks have read it
        return calls

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


_numbers: dict[str, int] = {}  # of calls compared by a group's store, by the group's name


def _check_same(calls: list[dict[str, Any]]) -> None:
    for rank, other in enumerate(calls):
        for name, value in calls[0].items():
            if other.get(name) != value:
                raise ValueError(
                    f"{name} is {other.get(name)} on rank {rank} of tp_group and {value} on "
                    "rank 0; expected the same on all ranks"
                )


def _reaches(places: list[tuple[str, int]], rank: int) -> bool:
    """Whether a rank's GPU reaches the memory of the others. places: of all ranks."""
    host, own = places[rank]
    others = [index for at, (_, index) in enumerate(places) if at != rank]
    try:
        import torch.distributed._symmetric_memory  # noqa: F401  (defines the operators)
    except ImportError:
        return False
    return all(each[0] == host for each in places) and all(
        index != own and torch.cuda.can_device_access_peer(own, index) for index in others
    )


def _has_multicast(device: torch.device) -> bool:
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)
    except (ImportError, AttributeError):
        return False


def group_size(group: Any) -> int:
    """Raises TypeError for what is no group of torch.distributed."""
    if not callable(getattr(group, "size", None)):
        raise TypeError(
            f"tp_group is {type_in_words(group)}; expected a group of torch.distributed"
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
