"""The options of a call, checked as far as they need no array."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..dtypes import DTYPES
from ..gpu import arrays
from .results import FusedBackward

# Keywords of earlier versions, and what to write instead.
REMOVED_KEYWORDS = {
    "load": "fuse=functor, whose lines say whether they act on x or on y",
    "store": "fuse=functor, whose lines say whether they act on x or on y",
    "weight1": "a second call with that weight",
    "bias1": "a second call with that bias",
    "dy1": "a second call with that dy, whose dx is the dsum of the first",
    "dbias1_dtype": "a second call with that dbias_dtype",
    "row_scale": "fuse=cupynorm.functors.row_scale(scale)",
    "dropout_p": "fuse=cupynorm.functors.dropout(p, seed)",
    "dropout_seed": "fuse=cupynorm.functors.dropout(p, seed)",
    "residual_dtype": "a residual of that dtype, which is the sum's",
    "scale": "out_dtype=cupynorm.Quantize(dtype, scale)",
    "amax": "out_dtype=cupynorm.Quantize(dtype, amax=amax)",
    "power_of_two": "out_dtype=cupynorm.Quantize(dtype, scale, power_of_two=True)",
    "transpose": "out_dtype=cupynorm.Quantize(dtype, transpose=True)",
    "memory_efficient": "the module LayerNorm or RMSNorm with memory_efficient=True",
    "strategy": "launch=cupynorm.Launch(strategy=...)",
    "tile": "launch=cupynorm.Launch(strategy, tile)",
    "statistics": "launch=cupynorm.Launch(statistics=...)",
    "sm_margin": "launch=cupynorm.Launch(sm_margin=...)",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def names_what_was_removed(function: _Function) -> _Function:
    """The function. Its TypeError for a keyword of REMOVED_KEYWORDS says what to write instead.

    So does that for an array where normalized_shape belongs: the order of the arguments.
    """
    name = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters.values()
    order = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    gone = REMOVED_KEYWORDS.keys() - {each.name for each in parameters}

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except TypeError:
            if named := {key: options[key] for key in options if key in gone}:
                refuse_keywords(name, named)
            given = dict(zip(order, arguments)).get("normalized_shape")
            if hasattr(given, "__dlpack__"):
                raise TypeError(
                    f"normalized_shape is {arrays.type_in_words(given)}; expected an int or a tuple"
                    f" of ints: the order is {name}({', '.join(order)})"
                ) from None
            raise

    return call


def refuse_keywords(name: str, unknown: Mapping[str, Any]) -> NoReturn:
    """Raises TypeError for keywords that name does not have, or has no more."""
    for key in filter(REMOVED_KEYWORDS.__contains__, unknown):
        raise TypeError(f"{name} has no {key} any more; expected {REMOVED_KEYWORDS[key]}") from None
    raise TypeError(f"{name} got an unexpected keyword argument {next(iter(unknown))!r}")


def extents_of(normalized_shape: object) -> tuple[int, ...]:
    """normalized_shape as a tuple of ints. (40.0,), which equals (40,), is refused."""
    kind = normalized_shape.__class__
    if kind is int:
        return (normalized_shape,)
    if kind is tuple:
        for extent in normalized_shape:
            if extent.__class__ is not int:
                break
        else:
            return normalized_shape
    is_int = isinstance(normalized_shape, numbers.Integral)
    try:
        extents = (normalized_shape,) if is_int else tuple(normalized_shape)
    except TypeError:
        extents = (None,)
    for extent in extents:
        if isinstance(extent, bool) or not isinstance(extent, numbers.Integral):
            raise TypeError(
                f"normalized_shape is {normalized_shape!r}; expected an int or a sequence of ints"
            )
    return tuple(int(extent) for extent in extents)


def pair_of(out: tuple) -> tuple:
    """(y, sum) of an out that is a tuple."""
    if len(out) != 2:
        raise ValueError(f"out has {len(out)} arrays; expected one array, or (y, sum)")
    return out


def dtype_name(dtype: object, name: str, *, also: Sequence[str] = ()) -> str:
    """One of the four dtypes by name, from a name, a NumPy dtype or a torch dtype.

    Raises TypeError for another one. also: further names that its message lists.
    """
    text = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        try:
            text = np.dtype(dtype).name
        except (TypeError, ValueError, SyntaxError):
            pass
    if text not in DTYPES:
        expected = ", ".join((*DTYPES, *also))
        raise TypeError(f"{name} is {dtype!r}; expected one of {expected}")
    return text


def gradient_names(gradients: object) -> tuple[str, ...]:
    """gradients as a tuple, which can be a key; check_gradients checks the names in it."""
    if isinstance(gradients, tuple):
        return gradients
    expected = ", ".join(FusedBackward._fields)
    if isinstance(gradients, str):
        raise ValueError(f"gradients is {gradients!r}; expected some of {expected}, in a tuple")
    try:
        names = tuple(gradients)
        hash(names)
    except TypeError:
        raise TypeError(f"gradients is {gradients!r}; expected some of {expected}") from None
    return names


def check_gradients(gradients: tuple[str, ...]) -> None:
    """Raises ValueError unless gradients are names of gradients."""
    names = FusedBackward._fields
    if any(name not in names for name in gradients):
        raise ValueError(f"gradients is {gradients!r}; expected some of {', '.join(names)}")
