"""torch: cupynorm.fp8_model_init, inside which layers are made with weights in 8-bit floats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.arrays import type_in_words
from ..nn.recipes import DelayedScaling, Recipe
from .quantized_weight import QuantizedWeight


class _Initialization(NamedTuple):
    recipe: Recipe | None
    preserves: bool


_initializations: list[_Initialization] = []


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """A context manager inside which LayerNormLinear and Linear are made with 8-bit weights.

    Examples:
        >>> with cupynorm.fp8_model_init(recipe=cupynorm.CurrentScaling()):
        ...     layer = cupynorm.Linear(64, 192)
        >>> layer.weight.quantized.data.dtype, layer.state_dict()["weight"].dtype
        (torch.float8_e4m3fn, torch.float32)

    Such a layer keeps its weight in 8-bit floats alone. Inside fp8_autocast it multiplies them
    without quantising. Outside it multiplies the dequantised values. The name is
    TransformerEngine's.

    The weight is a parameter of the layer's dtype. An optimizer reads its dequantised values, and
    what it writes is quantised by a scale of the new values' own amax: small steps are lost in the
    rounding. weight.dequantize(torch.float32) starts a master copy, and weight.copy_(master) writes
    it back. The state dict has the dequantised values as a plain tensor. The parameter itself
    can be saved and loaded too, in 8 bits.

    enabled: False makes plain weights, also inside of another fp8_model_init.
    recipe: which scales the weights have; that of fp8_autocast must have the same.
        DelayedScaling (the default) and CurrentScaling: one scale. BlockScaling: one for each
        128 x 128.
    preserve_high_precision_init_val: keep the first values as they were before quantising, on the
        CPU, for weight.get_high_precision_init_val().

    Raises TypeError for a recipe of another kind, or an argument that is not a bool; layers raise
    NotImplementedError for parameters_split, and TypeError for float64.
    """
    switches = {
        "enabled": enabled,
        "preserve_high_precision_init_val": preserve_high_precision_init_val,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; expected True or False")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is {type_in_words(recipe)}; expected DelayedScaling, CurrentScaling "
            "or BlockScaling"
        )
    recipe = (recipe or DelayedScaling()) if enabled else None
    own = _Initialization(recipe, preserve_high_precision_init_val)
    _initializations.append(own)
    try:
        yield
    finally:  # another thread may have begun its own since
        _initializations[:] = [each for each in _initializations if each is not own]


def begin_weights(layer: torch.nn.Module, names: Sequence[str]) -> None:
    """Inside fp8_model_init, replaces a new layer's weights, which have their first values."""
    recipe, preserves = _initializations[-1] if _initializations else (None, False)
    if recipe is None:
        return
    if len(names) > 1:
        raise NotImplementedError(
            "parameters_split is given inside fp8_model_init, where a weight has scales of its "
            "own; expected None"
        )
    for name in names:
        plain = getattr(layer, name)
        if plain.dtype == torch.float64:
            raise TypeError(
                f"{name} is of dtype float64 inside fp8_model_init; "
                "expected float16, bfloat16 or float32"
            )
        weight = torch.nn.Parameter(QuantizedWeight.of(plain, recipe), plain.requires_grad)
        if preserves and not plain.is_meta:
            weight.keep_initial(plain.detach().cpu())
        layer.register_parameter(name, weight)


def fill(weight: Tensor, initialize: Callable[[Tensor], Any]) -> None:
    """Fills a weight in place."""
    if not isinstance(weight, QuantizedWeight):
        initialize(weight)
        return
    values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    initialize(values)
    weight.copy_(values)
