"""torch: cupynorm.fp8_autocast, and the region of code that runs inside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..gpu.arrays import type_in_words
from . import amaxes
from .amaxes import UsedScales
from .modes import is_inside_backward, top_hooks
from .recipes import DelayedScaling, Recipe
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
    in_backward: whether it began in a backward, inside of what a checkpoint runs again.
    number: the number of autograd's nodes when it began.
    hook: id of the innermost hook of saved tensors, such as a checkpoint's, where it began.
    """

    recipe: Recipe | None
    group: Any
    used: dict[tuple[int, int], UsedScales]
    groups: list[Any]
    records: bool
    calibration: DelayedScaling | None = None
    in_backward: bool = False
    number: int = 0
    hook: int | None = None


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


def began_in_backward() -> bool:
    """Whether what a checkpoint runs again is in a region of its own, enabled or not."""
    return bool(_regions) and _regions[-1].in_backward


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

    A forward under torch.no_grad() changes no state if the region began under it too, or if the
    layer is in eval mode. Nor does a region that an exception leaves.

    A region may be around a checkpoint or inside of the checkpointed function. Layers are run again
    by the recipe and the scales of their forward.

    torch.compile breaks the graph where a region begins, and at each of our layers inside of it.
    Regions belong to the process: those of several threads are nested in the order in which they
    began.

    Raises TypeError for a recipe or group of another kind, an enabled or calibrating that is not a
    bool, or where both names of one argument are given.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()  # the region must be active while a graph runs
    recipe = either(recipe=recipe, fp8_recipe=fp8_recipe)
    group = either(group=group, fp8_group=fp8_group)
    _check(enabled, calibrating, recipe, group)
    used, groups = (_regions[0].used, _regions[0].groups) if _regions else ({}, [])
    recipe = recipe or DelayedScaling()
    is_recorded = isinstance(recipe, DelayedScaling) and (enabled or calibrating)
    hooks = top_hooks(False)
    region = Region(
        recipe if enabled else None,
        group,
        used,
        groups,
        torch.is_grad_enabled(),
        recipe if is_recorded and not enabled else None,
        is_inside_backward(),
        torch.autograd._get_sequence_nr(),
        None if hooks is None else id(hooks[0]),
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
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is {type_in_words(recipe)}; expected DelayedScaling, CurrentScaling "
            "or BlockScaling"
        )
    is_group = callable(getattr(group, "size", None)) and not isinstance(group, torch.Tensor)
    if not (is_group or group is None or group is _OUTSIDE_OF_GROUP):
        raise TypeError(f"group is {type_in_words(group)}; expected a group of torch.distributed")
