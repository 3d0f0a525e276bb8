"""torch.distributed: what ranks must agree on before a call, and how they compare it.

A kind of call is compared once, in its first call. Each rank writes its call, in JSON, to a key of
its own in the group's store, reads those of the others, and deletes its key at the next comparison.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import time
from typing import Any

import torch
from torch import distributed

from ..linear.operands import Operands
from ..nn import modes, scales
from ..nn.modes import product_dtype
from ..nn.private import is_any_autocast_enabled
from ..recipes import DelayedScaling, Recipe

_LONGEST_PAUSE = 0.05  # seconds between two looks at the store
_NUM_SAID = 7  # entries of a call, as far as its recipe, that a message about a timeout has


def kind_of(
    operands: Operands, region: scales.Region | None, training: bool, fp8_grad: bool
) -> tuple:
    """What ranks must agree on in each call, cheap to look up: see `describe`."""
    input, _, norm_weight, norm_bias, weights, _ = operands
    recorded = None
    if torch.is_grad_enabled():
        recorded = (
            input.requires_grad,
            norm_weight.requires_grad,
            norm_bias is not None and norm_bias.requires_grad,
            weights[0].requires_grad or (len(weights) > 1 and modes.wants_gradient(*weights)),
        )
    cast = product_dtype(input) if is_any_autocast_enabled() else input.dtype
    of_region = _kind_of_region(region, fp8_grad)
    return input.shape, input.dtype, cast, training, recorded, of_region


def _kind_of_region(region: scales.Region | None, fp8_grad: bool) -> tuple | None:
    if region is None:
        return None
    recipe, algorithms = region.recipe, ("amax_compute_algo", "scaling_factor_compute_algo")
    if any(callable(getattr(recipe, name, None)) for name in algorithms):
        recipe = _recipe_in_words(recipe)  # a program may make them anew in each step
    return recipe, region.group, fp8_grad


def describe(kind: tuple, region: scales.Region | None, *, shares_scales: bool) -> dict[str, Any]:
    """A kind by names. shares_scales: whether ranks share an 8-bit tensor."""
    shape, dtype, dtype_of_products, training, recorded, of_region = kind
    names = ("input", "layer_norm_weight", "layer_norm_bias", "weight")
    recorded = [name for name, is_recorded in zip(names, recorded or ()) if is_recorded]
    found = {
        "the shape of the input": tuple(shape),
        "the dtype of the input": dtype,
        "the dtype of products, which torch.autocast sets,": dtype_of_products,
        "training": training,
        "what gradients are recorded for": ", ".join(recorded) or "nothing",
        "the recipe of fp8_autocast": "none",
    }
    if region is None:
        return found
    recipe = region.recipe
    found |= {"the recipe of fp8_autocast": _recipe_in_words(recipe), "fp8_grad": of_region[-1]}
    if shares_scales and isinstance(recipe, DelayedScaling) and recipe.reduce_amax:
        found["the group of fp8_autocast"] = _group_in_words(region.group)
    return found


def _recipe_in_words(recipe: Recipe) -> str:
    """Its class and fields, callables by name."""
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    for name, value in values.items():
        if isinstance(value, enum.Enum):
            values[name] = value.name
        elif callable(value):
            values[name] = getattr(value, "__qualname__", type(value).__qualname__)
    fields = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{type(recipe).__name__}({fields})"


def _group_in_words(group: Any) -> str:
    """Another group of the same ranks has another name."""
    group = group or distributed.group.WORLD
    try:
        return f"{group.group_name!r} of ranks {distributed.get_process_group_ranks(group)}"
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return "one without this rank"


def exchange(store: Any, number: int, rank: int, size: int, call: dict) -> list[dict[str, str]]:
    """The calls of all ranks, as text.

    store: of the group. number: of the exchange in the group.
    Raises RuntimeError if another rank does not come until the timeout of the store.
    """
    call = {name: str(value) for name, value in call.items()}
    keys = [f"cupynorm/{number}/{each}" for each in range(size)]
    store.set(keys[rank], json.dumps(call))
    end, pause, unseen = time.monotonic() + store.timeout.total_seconds(), 0.001, range(size)
    while not store.check(keys):
        unseen = [each for each in unseen if not store.check([keys[each]])]
        if time.monotonic() > end:
            store.delete_key(keys[rank])
            absent = ", ".join(map(str, unseen))
            said = ", ".join(f"{name} {value}" for name, value in [*call.items()][:_NUM_SAID])
            raise RuntimeError(
                f"rank {rank} of tp_group has a call unlike all before, and rank {absent} has "
                f"none; expected the same calls on all ranks. It has {said}"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    calls = [json.loads(store.get(key)) for key in keys]
    store.delete_key(f"cupynorm/{number - 1}/{rank}")  # all ranks have read it
    return calls


def check_same(calls: list[dict[str, str]]) -> None:
    """Raises ValueError, the same on all ranks, if their calls differ."""
    for rank, other in enumerate(calls):
        for name, value in calls[0].items():
            if other.get(name) != value:
                raise ValueError(
                    f"{name} is {other.get(name)} on rank {rank} of tp_group and {value} on "
                    "rank 0; expected the same on all ranks"
                )
