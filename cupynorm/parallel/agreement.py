"""torch.distributed: what ranks must agree on before a call, and how they compare it.

A kind of call is compared once, in its first call. Ranks meet at one key of the group's store,
whose value is one state in JSON:

    number    of the meeting
    brought   what each rank that is here has brought
    left      the ranks that have read what all have brought

A rank changes the state by compare_set alone. So the meeting has taken place for all ranks or for
none, and a rank that waits in vain takes back what it brought. No counter of a rank can slip, and
the store holds no more than this key.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import numbers
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from ..linear.operands import Operands
from ..nn import modes, scales
from ..nn.modes import product_dtype
from ..nn.private import is_any_autocast_enabled
from ..recipes import DelayedScaling, Recipe

_KEY = "cupynorm"
_LONGEST_PAUSE = 0.05  # seconds between two looks at the store
_NUM_SAID = 7  # names of a call, as far as its recipe, that a message about a timeout has

# Kinds of calls.


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
    recipe = region.recipe
    # Callables, which a program may make anew in each step, count by their names.
    if callable(getattr(recipe, "amax_compute_algo", None)) or getattr(
        recipe, "scaling_factor_compute_algo", None
    ):
        recipe = str(_in_words(recipe))
    return recipe, region.group, fp8_grad


def describe(kind: tuple, region: scales.Region | None, *, shares_scales: bool) -> dict[str, Any]:
    """A kind by names. shares_scales: whether ranks share an 8-bit tensor."""
    shape, dtype, dtype_of_products, training, recorded, of_region = kind
    names = ("input", "layer_norm_weight", "layer_norm_bias", "weight")
    found = {
        "the shape of the input": tuple(shape),
        "the dtype of the input": dtype,
        "the dtype of products, which torch.autocast sets,": dtype_of_products,
        "training": training,
        "what gradients are recorded for": ", ".join(
            name for name, is_recorded in zip(names, recorded or ()) if is_recorded
        )
        or "nothing",
    }
    if region is None or of_region is None:
        return found | {"the recipe of fp8_autocast": "none"}
    recipe = region.recipe
    found |= _in_words(recipe) | {"fp8_grad": of_region[-1]}
    if shares_scales and isinstance(recipe, DelayedScaling) and recipe.reduce_amax:
        found["the group of fp8_autocast"] = _group_in_words(region.group)
    return found


def _in_words(recipe: Recipe) -> dict[str, Any]:
    """The recipe's class and fields. A callable, which a program may make anew, has its name."""
    found: dict[str, Any] = {"the recipe of fp8_autocast": type(recipe).__name__}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if isinstance(value, enum.Enum):
            value = value.name
        elif isinstance(value, numbers.Real) and not isinstance(value, bool):
            value = int(value) if value == int(value) else float(value)
        elif callable(value):
            value = getattr(value, "__qualname__", type(value).__qualname__)
        found[f"{field.name} of the recipe"] = value
    return found


def _group_in_words(group: Any) -> str:
    """Another group of the same ranks has another name."""
    group = group or distributed.group.WORLD
    try:
        return f"{group.group_name!r} of ranks {distributed.get_process_group_ranks(group)}"
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return "one without this rank"


# Comparing.


def compare(store: Any, rank: int, size: int, call: dict) -> int:
    """The number of the meeting in which all ranks had this call.

    store: of the group. call: compared as text.
    Raises ValueError on all ranks if their calls differ; RuntimeError if another rank does not
    come until the timeout of the store.
    """
    call = {name: str(value) for name, value in call.items()}
    digest = hashlib.sha256(json.dumps(call).encode()).hexdigest()[:24]
    try:
        number, brought = _meet(store, rank, size, [digest, {}])
        if any(other != digest for other, _ in brought):
            _, brought = _meet(store, rank, size, ["", call])
            raise ValueError(_difference([each for _, each in brought]))
    except TimeoutError as error:
        said = ", ".join(f"{name} {value}" for name, value in list(call.items())[:_NUM_SAID])
        raise RuntimeError(
            f"rank {rank} of tp_group has a call unlike all before, and {error} has none; expected "
            f"the same calls on all ranks. It has {said}"
        ) from None
    return number


def _difference(calls: list[dict[str, str]]) -> str:
    for rank, other in enumerate(calls):
        for name, value in calls[0].items():
            if (found := other.get(name)) != value:
                return (
                    f"{name} is {found} on rank {rank} of tp_group and {value} on rank 0; "
                    "expected the same on all ranks"
                )
    return "the ranks of tp_group have different calls; expected the same on all ranks"


def _meet(store: Any, rank: int, size: int, own: Any) -> tuple[int, list[Any]]:
    """The number of the meeting, and what each rank has brought.

    Raises TimeoutError that names a rank which does not come.
    """
    name, names = str(rank), [str(each) for each in range(size)]
    end, pause = time.monotonic() + store.timeout.total_seconds(), 0.001
    seen = {name}

    def is_on(state: dict[str, Any]) -> bool:
        return len(state["brought"]) == len(names)

    def arrive(state: dict[str, Any]) -> None:
        if not is_on(state):  # otherwise others have not left the meeting before
            state["brought"][name] = own

    def leave(state: dict[str, Any]) -> None:
        if not is_on(state):
            state["brought"].pop(name, None)
        elif name not in state["left"]:
            state["left"].append(name)
        if len(state["left"]) == len(names):
            state.update(number=state["number"] + 1, brought={}, left=[])

    def withdraw(state: dict[str, Any]) -> None:
        if not is_on(state):
            leave(state)

    try:
        while True:
            is_late = time.monotonic() > end
            state = _change(store, withdraw if is_late else arrive)
            if is_on(state) and name not in state["left"]:
                return state["number"], [state["brought"][each] for each in names]
            if is_late:
                absent = [each for each in names if each not in seen]
                raise TimeoutError(f"rank {', '.join(absent)}")
            seen.update(state["left"] if is_on(state) else state["brought"])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    finally:
        _change(store, leave)


def _change(store: Any, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Changes the state of the group, and returns it. `change` may run several times."""
    text = store.compare_set(_KEY, "", "")  # reads it, and does not wait for it
    while True:
        state = json.loads(text) if text else {"number": 0, "brought": {}, "left": []}
        change(state)
        wanted = json.dumps(state)
        found = store.compare_set(_KEY, text.decode(), wanted)
        if found == wanted.encode():
            return state
        text = found
