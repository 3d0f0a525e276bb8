"""torch: the end of a step of DelayedScaling: amaxes of all ranks, then new scales.

All amaxes of a group are reduced at once. Each has a place of its own in what is reduced, by the
slot of its layer. Slots count layers in the order in which they were made, which all ranks share.
A layer that a rank has not used is zero there, so ranks need not use the same layers.

Ranks that made different layers would mix up their amaxes. So in the steps 1, 2, 4, 8 and so on of
a group the ranks first compare the kinds of the layers that they have made. Layers that a rank has
beyond those of the others are no difference, and an exchange of two of one kind is not seen.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fp8 import Scales
from .recipes import DelayedScaling

# The tensors of a layer, and where those of its backward begin.
SLOT_SIZE, OF_BACKWARD = 5, 3
# What is reduced is as long as a multiple of this, so that ranks agree that use different layers.
_SLOTS_AT_ONCE = 2048


class UsedScales(NamedTuple):
    """Scales that a region has used, and how they are updated."""

    scales: Scales
    recipe: DelayedScaling
    group: Any


# A number for each slot: of the kinds of this layer and of all that were made before it.
_digests: list[int] = []
_lock = threading.Lock()
# The steps of each group; a group is forgotten with its last reference.
_num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def new_slot(kind: str) -> int:
    """For a layer that is made. kind: what it shares with its twins on other ranks."""
    with _lock:
        before = _digests[-1] if _digests else 0
        # 24 bits, which float32 holds.
        _digests.append(zlib.crc32(kind.encode(), before) & 0xFFFFFF)
        return len(_digests) - 1


def end_step(used: Mapping[tuple[int, int], UsedScales], groups: Sequence[Any]) -> None:
    """Computes new scales from the amaxes of all ranks.

    used: by the layer's slot and the place in it. groups: of torch.distributed, each reduced once.
    """
    for group in groups:
        if _has_other_ranks(group):
            _reduce(used, group)
    for _, each in sorted(used.items()):
        each.scales.update(each.recipe)


def forget(used: Mapping[tuple[int, int], UsedScales]) -> None:
    """Drops the amaxes of a forward that did not end. Those of earlier backwards remain."""
    for (_, at), each in used.items():
        if at < OF_BACKWARD:
            each.scales.forget()


def _has_other_ranks(group: Any) -> bool:
    distributed = torch.distributed
    is_running = distributed.is_available() and distributed.is_initialized()
    return is_running and distributed.get_world_size(group) > 1


def _reduce(used: Mapping[tuple[int, int], UsedScales], group: Any) -> None:
    rows = {
        slot * SLOT_SIZE + at: each.scales.amax_history[0]
        for (slot, at), each in sorted(used.items())
        if each.recipe.reduce_amax and each.group is group
    }
    most = max(len(_digests), max(rows, default=0) // SLOT_SIZE + 1)
    num_slots = (most + _SLOTS_AT_ONCE - 1) // _SLOTS_AT_ONCE * _SLOTS_AT_ONCE
    device = _device(rows.values(), group)
    if _is_compared(group):
        _compare(num_slots, group, device)
    length = num_slots * SLOT_SIZE
    zeros = torch.zeros(length, dtype=torch.float32, device=device)
    parts, end = [], 0
    for place, row in rows.items():
        parts += [zeros[end:place], row.to(zeros.device)]
        end = place + len(row)
    amaxes = torch.cat([*parts, zeros[end:]])
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group)
    for place, row in rows.items():
        row.copy_(amaxes[place : place + len(row)])


def _is_compared(group: Any) -> bool:
    """Whether the ranks compare their layers in this step of the group."""
    key = torch.distributed.group.WORLD if group is None else group
    _num_steps[key] = num_steps = _num_steps.get(key, 0) + 1
    return num_steps & (num_steps - 1) == 0


def _compare(num_slots: int, group: Any, device: torch.device | str) -> None:
    """Raises RuntimeError on all ranks unless all have made the same layers in the same order.

    num_slots: those of what is reduced.
    """

    def spread(values: Tensor) -> bool:
        """Whether ranks that have a value have different ones. Those without one have -inf."""
        both = torch.cat([values, torch.where(values.isinf(), values, -values)])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group)
        largest, smallest = both.chunk(2)
        return bool(((largest != -smallest) & largest.isfinite()).any())

    is_different = spread(torch.tensor([num_slots], dtype=torch.float32, device=device))
    if not is_different:
        digests = torch.full((num_slots,), -torch.inf, dtype=torch.float32)
        digests[: len(_digests)] = torch.tensor(_digests, dtype=torch.float32)
        is_different = spread(digests.to(device))
    if is_different:
        raise RuntimeError(
            f"the ranks of the group of fp8_autocast have made different layers ({len(_digests)} "
            "on this rank), so that their amaxes do not fit together; expected layers with 8-bit "
            "scales to be made on all ranks in one order, or a group of the ranks that share them"
        )


def _device(rows: Any, group: Any) -> torch.device | str:
    """Where a group reduces: gloo on the CPU, others where the amaxes are, or on the GPU."""
    if torch.distributed.get_backend(group) == "gloo":
        return "cpu"
    first: Tensor | None = next(iter(rows), None)
    if first is not None:
        return first.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
