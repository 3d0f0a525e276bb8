"""torch: the end of a step of DelayedScaling: amaxes of all ranks, then new scales.

All amaxes of a group are reduced at once. Each has a place of its own in what is reduced, by the
slot of its layer. Slots count layers in the order in which they were made, which all ranks share.
A layer that a rank has not used is zero there, so ranks need not use the same layers.
"""

from __future__ import annotations

import itertools
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


_slots = itertools.count()


def new_slot() -> int:
    """For a layer that is made."""
    return next(_slots)


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
    size = _SLOTS_AT_ONCE * SLOT_SIZE
    length = (max(rows, default=0) // size + 1) * size
    zeros = torch.zeros(length, device=_device(rows.values(), group))
    parts, end = [], 0
    for place, row in rows.items():
        parts += [zeros[end:place], row.to(zeros.device)]
        end = place + len(row)
    amaxes = torch.cat([*parts, zeros[end:]])
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group)
    for place, row in rows.items():
        row.copy_(amaxes[place : place + len(row)])


def _device(rows: Any, group: Any) -> torch.device | str:
    """Where a group reduces: gloo on the CPU, others where the amaxes are, or on the GPU."""
    if torch.distributed.get_backend(group) == "gloo":
        return "cpu"
    first: Tensor | None = next(iter(rows), None)
    if first is not None:
        return first.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
