"""torch: cupynorm.fp8_autocast, and the region of code that runs inside of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import amaxes
from .amaxes import UsedScales
from .modes import is_inside_backward
from .recipes import DelayedScaling, Recipe


@dataclass
class Region:
    """The inside of a fp8_autocast.

    recipe: None where the region is disabled.
    group: the torch.distributed group of DelayedScaling's amaxes.
    used: the scales of each module, updated when the outermost region ends.
    groups: those over which it then reduces amaxes.
    text: the recipe as text, which torch.compile can trace; empty where there is none.
    records: whether gradients were recorded where it began.
    """

    recipe: Recipe | None
    group: Any
    used: dict[tuple[int, int], UsedScales]
    groups: list[Any]
    text: str
    records: bool


# Of the whole process: a backward in a thread of its own sees them too.
_regions: list[Region] = []
_recipes: dict[str, Recipe] = {}  # by their texts; a program has few


def active() -> Region | None:
    """The innermost region. None where there is none, or where it is disabled."""
    return _regions[-1] if _regions and _regions[-1].recipe is not None else None


def recipe_of(text: str) -> Recipe:
    """The recipe of a Region's text."""
    return _recipes[text]


def _text_of(recipe: Recipe | None) -> str:
    """The whole recipe as text, or "" where it has none.

    torch keeps compiled code for other processes, in which a number could mean another recipe.
    A recipe with callables has no text, because a program may make ever new ones: torch.compile
    does not trace its calls.
    """
    if recipe is None:
        return ""
    if isinstance(recipe, DelayedScaling):
        if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo:
            return ""
    return _register(recipe)


@functools.cache
def _register(recipe: Recipe) -> str:
    text = repr(recipe)
    _recipes[text] = recipe
    return text


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, recipe: Recipe | None = None, group: Any = None
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

    When the outermost region ends and gradients are recorded, the delayed scales of the layers that
    ran in it are updated for the next step. So are scales of gradients, from the backwards since
    the region before, or inside of this one. Amaxes of all layers are then reduced at once: every
    rank of the group must enter a region, but need not use the same layers.

    A forward under torch.no_grad() changes no state if the region began under it too, or if the
    layer is in eval mode. Nor does a region that an exception leaves.

    A region may be around a checkpoint or inside of the checkpointed function. LayerNormLinear is
    run again by the recipe and the scales of its forward. torch.compile compiles what is called;
    a function that enters a region has a graph break. Regions belong to the process: those of
    several threads are nested in the order in which they began.

    Raises TypeError for a recipe of another kind, or an enabled that is not a bool.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()  # the region must be active while a graph runs
    if not isinstance(enabled, bool):
        raise TypeError(
            f"enabled is a {type(enabled).__name__}; "
            "expected True or False, and a recipe as recipe="
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is a {type(recipe).__name__}; expected DelayedScaling, CurrentScaling or "
            "BlockScaling"
        )
    used, groups = (_regions[0].used, _regions[0].groups) if _regions else ({}, [])
    recipe = (recipe or DelayedScaling()) if enabled else None
    region = Region(recipe, group, used, groups, _text_of(recipe), torch.is_grad_enabled())
    if isinstance(recipe, DelayedScaling) and recipe.reduce_amax:
        if not any(each is group for each in groups):
            groups.append(group)
    _regions.append(region)
    is_complete = False
    try:
        yield
        is_complete = True
    finally:
        # Another thread's region may have begun after this one.
        _regions[:] = [each for each in _regions if each is not region]
        if not _regions and torch.is_grad_enabled():
            if not is_complete:
                amaxes.forget(used)
            elif used or not is_inside_backward():  # a checkpoint's second run is no step
                amaxes.end_step(used, groups)
