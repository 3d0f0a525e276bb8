"""torch: the calls of a layer that a checkpoint may run again in backward.

torch numbers the nodes of autograd in the order in which a thread makes them. The node that runs in
backward therefore tells which call is run again:

    use_reentrant=False   the checkpointed calls were recorded, and the node is one of theirs or of
                          what followed in the checkpointed function: the call is before the node
    use_reentrant=True    the node stands for the checkpointed function, whose calls were not
                          recorded: the call is after the node. So it is in a compiled graph.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.autocast import Region
from ..nn.modes import is_inside_backward

# More calls than a layer makes before the backward of the first of them.
_MOST = 256


class PastCall(NamedTuple):
    """One call.

    number: the number of nodes that there were. is_recorded: whether autograd recorded it.
    is_rerun: whether it ran inside of backward, where a checkpoint in a checkpoint may need it.
    region: None for a call outside of fp8_autocast.
    has_amaxes: whether its amaxes were recorded. scale: of the forward's tensors, for
    DelayedScaling.
    """

    number: int
    is_recorded: bool
    is_rerun: bool
    region: Region | None
    has_amaxes: bool = False
    scale: Tensor | None = None

    def distance(self, number: int) -> float:
        """From a node; infinite where it cannot be the call that the node runs again."""
        is_possible = self.number <= number if self.is_recorded else self.number > number
        return abs(self.number - number) if is_possible else float("inf")


class PastCalls:
    """The latest calls of one layer."""

    def __init__(self) -> None:
        self._calls: deque[PastCall] = deque(maxlen=_MOST)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(
        self, region: Region | None, *, has_amaxes: bool = False, scale: Tensor | None = None
    ) -> None:
        number, is_recorded = torch.autograd._get_sequence_nr(), torch.is_grad_enabled()
        is_rerun = is_inside_backward()
        while not is_rerun and self._calls and self._calls[-1].is_rerun:
            self._calls.pop()
        self._calls.append(PastCall(number, is_recorded, is_rerun, region, has_amaxes, scale))

    def run_again(self) -> PastCall | None:
        """The call that is run again; None for a call that is not inside of backward."""
        node = torch._C._current_autograd_node() if is_inside_backward() else None
        if node is None or not self._calls:
            return None
        number = node._sequence_nr()
        nearest = min(self._calls, key=lambda call: call.distance(number))
        return nearest if nearest.distance(number) < float("inf") else None
