"""torch: the calls of a layer that a checkpoint may run again in backward.

Kept are the calls inside of a checkpoint alone, as long as its graph exists:

    use_reentrant=False   torch's hook of saved tensors is active around the call. The calls were
                          recorded, and the node that runs in backward is one of theirs or of what
                          followed in the checkpointed function. torch numbers the nodes in the
                          order in which a thread makes them: the call is the latest before it.
    use_reentrant=True    the call was not recorded, inside of the forward of an autograd function.
                          The node that runs in backward is that function's. So it is in a graph
                          that torch.compile made.

What a checkpoint runs again makes its calls in the order of the forward.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autocast import Region
from .modes import is_inside_backward, top_hooks

# Calls inside of another library's hooks, which do not say how long their graph exists.
_MOST_WITHOUT_OWNER = 4096


class PastCall(NamedTuple):
    """One call.

    number: the number of nodes that there were.
    is_hooked: whether it was recorded inside of hooks of saved tensors.
    owners: what lives as long as the call may run again; empty where that is unknown.
    region: None for a call outside of fp8_autocast.
    has_amaxes: whether its amaxes were recorded. scale: of the forward's tensors, for
    DelayedScaling.
    is_inside: whether the region began inside of what runs the call again, and so begins again.
    """

    number: int
    is_hooked: bool
    owners: tuple[weakref.ref, ...]
    region: Region | None
    has_amaxes: bool
    scale: Tensor | None
    is_inside: bool

    def is_owned_by(self, owner: object) -> bool:
        return any(each() is owner for each in self.owners)


class PastCalls:
    """The calls of one layer.

    is_empty: an attribute, because torch.compile guards one more cheaply than a length.
    """

    def __init__(self) -> None:
        self._calls: list[PastCall] = []
        self._has_dropped = False
        self._rerun: tuple[weakref.ref | None, int] = None, 0  # what is run again, and its calls
        self.is_empty = True

    def add(
        self,
        region: Region | None,
        *,
        is_recorded: bool,
        has_amaxes: bool = False,
        scale: Tensor | None = None,
    ) -> PastCall | None:
        """Keeps the call that runs now, and a copy of its scale, if it may be run again."""
        functions = [] if torch.is_grad_enabled() else _functions_around()
        hooks = top_hooks(False)
        frame = None if hooks is None else _frame_of(hooks[0])
        is_hooked = hooks is not None and not _is_rerun(hooks[0])
        if functions or is_recorded or not runs_again_by_hooks():
            self._count_call_of_rerun()
        is_hooked = is_hooked and is_recorded
        if not functions and not is_hooked:
            return None
        owners = [*functions, *(() if frame is None else (frame,))]
        number = torch.autograd._get_sequence_nr()
        scale = None if scale is None else scale.clone()
        refs = tuple(weakref.ref(each, self._forget) for each in owners)
        is_inside = region is not None and (
            region.number > functions[0]._sequence_nr()
            if functions
            else frame is not None and region.hook == id(hooks[0])
        )
        call = PastCall(number, is_hooked, refs, region, has_amaxes, scale, is_inside)
        self._calls.append(call)
        self.is_empty = False
        if not owners:
            self._drop_oldest()
        return call

    def discard(self, call: PastCall | None) -> None:
        """Drops a call that `add` returned, because it was refused."""
        self._calls = [each for each in self._calls if each is not call]
        self.is_empty = self.is_empty or not self._calls

    def _forget(self, _: weakref.ref) -> None:
        """Drops the calls whose owners are gone."""
        self._calls = [
            each for each in self._calls if not each.owners or any(ref() for ref in each.owners)
        ]
        self.is_empty = self.is_empty or not self._calls

    def _drop_oldest(self) -> None:
        unowned = [each for each in self._calls if not each.owners]
        if len(unowned) > _MOST_WITHOUT_OWNER:
            self._calls.remove(unowned[0])
            self._has_dropped = True

    def run_again(self) -> PastCall | None:
        """The call that is run again; None for any other call.

        Raises RuntimeError where it may be one that was not kept.
        """
        if not self._calls or not is_inside_backward():
            return None
        owner, rerun = _what_runs_again()
        owned = [each for each in self._calls if each.is_owned_by(owner)]
        if owned:
            return owned[self._num_calls_of(rerun) % len(owned)]
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        before = [each for each in self._calls if each.is_hooked and each.number <= number]
        if not before and self._has_dropped:
            raise RuntimeError(
                f"a checkpoint runs a layer again after {_MOST_WITHOUT_OWNER} later calls inside "
                "of hooks of saved tensors; expected its backward before"
            )
        return max(before, key=lambda call: call.number, default=None)

    def _num_calls_of(self, rerun: object) -> int:
        of, number = self._rerun
        return number if of is not None and of() is rerun else 0

    def _count_call_of_rerun(self) -> None:
        if self._calls and is_inside_backward():
            _, rerun = _what_runs_again()
            number = self._num_calls_of(rerun) + 1
            self._rerun = None if rerun is None else weakref.ref(rerun), number


def _what_runs_again() -> tuple[object, object]:
    """The owner of the calls that a checkpoint runs again, and an object of this run alone."""
    hooks = top_hooks(False)
    if hooks is not None and _is_rerun(hooks[0]):
        reference = _variables_of(hooks[0]).get("target_frame_ref")
        return None if reference is None else reference(), hooks[0]
    node = torch._C._current_autograd_node()
    return node, node


def runs_again_by_hooks() -> bool:
    """Whether a checkpoint with use_reentrant=False runs again what runs now."""
    hooks = top_hooks(False)
    return hooks is not None and _is_rerun(hooks[0])


def _is_rerun(pack: object) -> bool:
    return getattr(pack, "__qualname__", "").startswith("_recomputation_hook.")


def _frame_of(pack: object) -> object | None:
    """What torch keeps of a checkpoint as long as its graph exists."""
    if not getattr(pack, "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    return _variables_of(pack).get("frame")


def _variables_of(pack: Any) -> dict[str, Any]:
    """The variables of torch's that one of its hooks uses."""
    pack = inspect.unwrap(pack)
    code, cells = getattr(pack, "__code__", None), getattr(pack, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells)}


def _functions_around() -> list[object]:
    """The nodes of the autograd functions whose forward runs now, the innermost first."""
    functions, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.autograd.function.BackwardCFunction):
                functions.append(first)
        frame = frame.f_back
    return functions
