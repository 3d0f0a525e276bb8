"""torch: cupynorm.fp8_autocast, and the region of code that runs inside of it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from ..gpu.arrays import type_in_words
from . import amaxes, private
from .amaxes import UsedScales
from .modes import is_inside_backward, is_recomputed
from .recipes import RECIPES, DelayedScaling, Recipe
from .second_names import either


@dataclass(eq=False)
class Region:
    """The inside of a fp8_autocast.

    recipe: None where the region is disabled.
    group: the torch.distributed group of DelayedScaling's amaxes.
    used: the scales of each module, updated when the outermost region ends.
    groups: those over which it then reduces amaxes.
    records: whether gradients were recorded where it began.
    calibration: the recipe of a disabled region that records amaxes.
    """

    recipe: Recipe | None
    group: Any
    used: dict[tuple[int, int], UsedScales]
    groups: list[Any]
    records: bool
    calibration: DelayedScaling | None = None


# What torch.distributed.new_group gives a rank that is not in the group.
_OUTSIDE_OF_GROUP = getattr(
    getattr(torch.distributed, "GroupMember", None), "NON_GROUP_MEMBER", None
)

# Of the whole process: a backward in a thread of its own sees them too.
_regions: list[Region] = []


def active() -> Region | None:
    """The innermost region. None where there is none, or where it is disabled."""
    return _regions[-1] if _regions and _regions[-1].recipe is not None else None


def is_inside() -> bool:
    """Whether the innermost region quantises or records."""
    return active() is not None or calibration() is not None


def calibration() -> Region | None:
    """The innermost region, if it is disabled and records amaxes."""
    return _regions[-1] if _regions and _regions[-1].calibration is not None else None


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    recipe: Recipe | None = None,
    group: Any = None,
    *,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> Iterator[None]:
    """A context manager or decorator inside which LayerNormLinear multiplies in 8-bit floats.

    LayerNorm and RMSNorm write 8-bit floats inside of it where they are called with
    fp8_output=True.

    Examples:
        >>> norm, x = cupynorm.RMSNorm(2), torch.tensor([[3.0, 4.0]])
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.CurrentScaling()):
        ...     y = norm(x, fp8_output=True)
        >>> y.data.dtype, y.dequantize().detach().numpy().round(3)
        (torch.float8_e4m3fn, array([[0.808, 1.131]], dtype=float32))

    enabled: False switches an outer region off.
    recipe: DelayedScaling (the default), CurrentScaling or BlockScaling.
    group: the torch.distributed group over which DelayedScaling takes the largest amax.
    calibrating: with enabled=False, layers compute in their own dtype and record the amaxes of
        their input (normalised, behind a norm) and weight. When the region ends their delayed
        scales are updated, also in eval mode and under torch.no_grad(). Other recipes keep no
        scales, so that there is nothing to record. No effect with enabled=True.
    fp8_recipe, fp8_group: TransformerEngine's names of recipe and group.

    When the outermost region ends and gradients are recorded, the delayed scales of the layers that
    ran in it are updated for the next step. So are scales of gradients, from the backwards since
    the region before, or inside of this one. Amaxes of all layers are then reduced at once: every
    rank of the group must enter a region, but need not use the same layers.

    A forward under torch.no_grad() changes no state. Nor does a region that an exception leaves.

    Around a checkpoint, and inside of a checkpointed function with DelayedScaling, give the
    checkpoint context_fn=cupynorm.fp8_checkpoint_contexts.

    torch.compile breaks the graph where a region begins, and at each of our layers inside of it.
    Regions belong to the process: those of several threads are nested in the order in which they
    began.

    Raises TypeError for a recipe or group of another kind, an enabled or calibrating that is not a
    bool, or where both names of one argument are given.
    """
    if torch.compiler.is_dynamo_compiling():
        private.graph_break()  # the region must be active while a graph runs
    recipe = either(recipe=recipe, fp8_recipe=fp8_recipe)
    group = either(group=group, fp8_group=fp8_group)
    _check(enabled, calibrating, recipe, group)
    used, groups = (_regions[0].used, _regions[0].groups) if _regions else ({}, [])
    recipe = recipe or DelayedScaling()
    is_recorded = isinstance(recipe, DelayedScaling) and (enabled or calibrating)
    region = Region(
        recipe if enabled else None,
        group,
        used,
        groups,
        torch.is_grad_enabled(),
        recipe if is_recorded and not enabled else None,
    )
    if is_recorded and recipe.reduce_amax and not any(each is group for each in groups):
        groups.append(group)
    is_complete = False
    try:  # an interrupt may come after each call, also of append
        _regions.append(region)
        yield
        is_complete = True
    finally:
        _regions.remove(region)  # another thread's may have begun after it
        if not _regions and (torch.is_grad_enabled() or region.calibration is not None):
            if not is_complete:
                amaxes.forget(used)
            elif used or not is_inside_backward():  # a checkpoint's second run is no step
                amaxes.end_step(used, groups)


# Checkpoints of activations.


class _Run:
    """The first run of what a checkpoint runs, or a run that repeats it, as a context manager.

    values: what layers keep in the first run, in order. A repetition may end early.
    """

    def __init__(self, values: list[Any], *, repeats: bool) -> None:
        self.values, self.repeats = values, repeats

    def __enter__(self) -> None:
        self.thread, self.left = threading.get_ident(), iter(self.values)
        runs.append(self)

    def __exit__(self, *error: object) -> None:
        runs.remove(self)

    def next_value(self) -> Any:
        """Of the first run."""
        for value in self.left:
            return value
        raise RuntimeError(
            "a checkpoint runs more layers again than it ran at first; expected a function that "
            "calls the same layers in each run"
        )


# Of all threads, the innermost last. A list, because torch.compile guards its length cheaply.
runs: list[_Run] = []
_T = TypeVar("_T")


def fp8_checkpoint_contexts() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """For torch.utils.checkpoint: layers are run again by the recipe and scales of their forward.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> layer, x = cupynorm.Linear(64, 64), torch.randn(8, 64, requires_grad=True)
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.DelayedScaling()):
        ...     y = checkpoint(
        ...         layer,
        ...         x,
        ...         use_reentrant=False,
        ...         context_fn=cupynorm.fp8_checkpoint_contexts,
        ...     )
        >>> y.sum().backward()
        >>> x.grad.shape
        torch.Size([8, 64])

    The second run records no amaxes. Results and gradients are those without a checkpoint, to the
    bit. Also needed with DelayedScaling where fp8_autocast is inside of the checkpointed function.

    Returns two context managers, around the first run and around each later one.

    Raises nothing itself. Without it layers raise NotImplementedError in reentrant checkpoints with
    fp8_autocast around, and with DelayedScaling where others run them again. With other recipes
    these run them again in the region that is around backward.
    """
    values: list[Any] = []
    return _Run(values, repeats=False), _Run(values, repeats=True)


def kept(make: Callable[[], _T]) -> _T:
    """make(), or what it made in the first run of what a checkpoint runs again."""
    firsts = []
    for run in reversed(_own_runs()):
        if run.repeats:
            value = run.next_value()
            break
        firsts.append(run)
    else:
        value = make()
    for run in firsts:
        run.values.append(value)
    return value


def runs_again() -> bool:
    """Whether a checkpoint with fp8_checkpoint_contexts runs again what runs now."""
    return any(run.repeats for run in _own_runs())


def _own_runs() -> list[_Run]:
    return [run for run in runs if run.thread == threading.get_ident()] if runs else []


def check_checkpoint(region: Region) -> None:
    """Raises NotImplementedError in a checkpoint that runs a call again by other scales."""
    is_wrong = isinstance(region.recipe, DelayedScaling) and is_recomputed() and not runs_again()
    if region.records and not torch.is_grad_enabled():  # perhaps a reentrant one inside the region
        frame, code = sys._getframe(1), CheckpointFunction.forward.__code__
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        is_wrong = is_wrong or frame is not None
    if is_wrong:
        raise NotImplementedError(
            "a checkpoint runs a layer again without the scales of its forward; expected "
            "checkpoint(..., use_reentrant=False, context_fn=cupynorm.fp8_checkpoint_contexts)"
        )


def _check(enabled: object, calibrating: object, recipe: object, group: object) -> None:
    if not isinstance(enabled, bool):
        raise TypeError(
            f"enabled is {type_in_words(enabled)}; expected True or False, and a recipe as recipe="
        )
    if isinstance(recipe, bool):
        raise TypeError(
            f"recipe is {recipe}; expected a recipe: TransformerEngine's second argument is "
            f"given here as calibrating={recipe}"
        )
    if not isinstance(calibrating, bool):
        raise TypeError(f"calibrating is {calibrating!r}; expected True or False")
    if recipe is not None and not isinstance(recipe, RECIPES):
        raise TypeError(
            f"recipe is {type_in_words(recipe)}; expected DelayedScaling, CurrentScaling "
            "or BlockScaling"
        )
    is_group = callable(getattr(group, "size", None)) and not isinstance(group, torch.Tensor)
    if not (is_group or group is None or group is _OUTSIDE_OF_GROUP):
        raise TypeError(f"group is {type_in_words(group)}; expected a group of torch.distributed")
