"""The options of a call, checked as far as they need no array."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from ..dtypes import DTYPES
from ..gpu import arrays
from ..plan.problem import PATHS, Tile
from ..plan.strategies import check_choice
from ..plan.tile_checks import check_path
from .request import (
    DEFAULTS,
    Array,
    ForwardRequest,
    Margins,
    Options,
    replaced,
)
from .results import FusedBackward

TILE_FIELDS = tuple(Tile.__annotations__)

# Keywords of earlier versions, and what to write instead.
REMOVED_KEYWORDS = {
    "weight1": "a second call with that weight",
    "bias1": "a second call with that bias",
    "dy1": "a second call with that dy, whose dx is the dsum of the first",
    "dbias1_dtype": "a second call with that dbias_dtype",
    "scale": "out_dtype=cupynorm.Quantize(dtype, scale)",
    "amax": "out_dtype=cupynorm.Quantize(dtype, amax=amax)",
    "power_of_two": "out_dtype=cupynorm.Quantize(dtype, scale, power_of_two=True)",
    "transpose": "out_dtype=cupynorm.Quantize(dtype, transpose=True)",
    "memory_efficient": "the module LayerNorm or RMSNorm with memory_efficient=True",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def names_what_was_removed(function: _Function) -> _Function:
    """The function. Its TypeError for a keyword of REMOVED_KEYWORDS says what to write instead."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except TypeError:
            for name in filter(REMOVED_KEYWORDS.__contains__, options):
                raise TypeError(
                    f"{function.__name__} has no {name} any more; expected {REMOVED_KEYWORDS[name]}"
                ) from None
            raise

    return call


def launch_options(
    strategy: str | None, tile: object, statistics: str | None, sm_margin: object
) -> Options:
    """The launch options of a call. Raises TypeError or ValueError for a wrong one."""
    if strategy is None and tile is None and statistics is None:
        if sm_margin.__class__ is int and sm_margin == 0:
            return DEFAULTS
    check_choice(strategy, statistics)
    tile = _tile(tile)
    if tile is not None and tile.path is not None and strategy is not None:
        # Now: tiles are compared without their path, so a prepared call does not know it.
        check_path(strategy, tile)
    return Options(strategy, tile, statistics, _margins(sm_margin))


def _tile(tile: object) -> Tile | None:
    if tile is None:
        return None
    if not isinstance(tile, Tile):
        if not isinstance(tile, Mapping):
            raise TypeError(
                f"tile is {arrays.type_in_words(tile)}; "
                "expected a cupynorm.Tile or a dict of its fields"
            )
        try:
            tile = Tile(**tile)
        except TypeError as error:
            names, (first, second, *others) = ", ".join(map(str, tile)), TILE_FIELDS
            raise ValueError(
                f"tile has fields {names}; "
                f"expected {first}, {second} and some of {', '.join(others)}"
            ) from error
    for name in TILE_FIELDS:
        value = getattr(tile, name)
        if name == "path":
            if value is not None and value not in PATHS:
                paths = ", ".join(PATHS)
                raise ValueError(f"tile has path {value!r}; expected one of {paths}, or None")
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"tile has {name} {value!r}; expected an int")
    return tile


def _margins(sm_margin: object) -> int | Margins:
    if not isinstance(sm_margin, Mapping):
        return _margin(sm_margin)
    if not set(sm_margin) <= set(Margins._fields):
        values = ", ".join(map(str, sm_margin))
        raise ValueError(f"sm_margin has {values}; expected some of {', '.join(Margins._fields)}")
    return Margins(**{kind: _margin(margin) for kind, margin in sm_margin.items()})


def _margin(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(f"sm_margin is {value!r}; expected a number of multiprocessors, 0 or more")
    return int(value)


def check_sm_margin(sm_margin: object) -> None:
    """Raises as launch_options for a wrong sm_margin."""
    _margins(sm_margin)


def check_dropout_p(dropout_p: object) -> float:
    """dropout_p as a float. Raises ValueError unless it is a number from 0 to 1."""
    is_real = isinstance(dropout_p, numbers.Real) and not isinstance(dropout_p, bool)
    if not is_real or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p!r}; expected a probability, from 0 to 1")
    return float(dropout_p)


def dropout_seed_of(seed: object, p: float) -> object:
    """The seed, converted: None without dropout, an int as a signed one of 64 bits."""
    if not p:
        return None
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"dropout_seed is {seed}; expected an int of 64 bits")
        return (int(seed) + 2**63) % 2**64 - 2**63
    if isinstance(seed, (str, numbers.Number, np.generic)):
        raise TypeError(f"dropout_seed is {seed!r}; expected an int or one element of int64")
    return seed


def with_checked_options(request: ForwardRequest) -> ForwardRequest:
    """The request with its options checked as far as they need no other argument."""
    operands, options = request
    # type(): old compilers do not know the __class__ of a float.
    if (
        type(options.dropout_p) is float
        and options.dropout_p == 0.0
        and operands.dropout_seed is None
        and options.residual_dtype is None
        and options.round_x_hat is False
        and options.quantization is None
    ):
        return request
    dropout_p = check_dropout_p(options.dropout_p)
    residual_dtype = options.residual_dtype
    if residual_dtype is not None:
        residual_dtype = dtype_name(residual_dtype, "residual_dtype")
    options = replaced(
        options,
        dropout_p=dropout_p,
        residual_dtype=residual_dtype,
        round_x_hat=bool(options.round_x_hat),
    )
    seed = dropout_seed_of(operands.dropout_seed, dropout_p)
    operands = replaced(operands, dropout_seed=seed)
    return ForwardRequest(operands, options)


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


def default_extents(
    x: Array, weight: Array | None, bias: Array | None, normalized_shape: object
) -> tuple[int, ...]:
    """normalized_shape, or else the shape of weight or bias, or else the last dimension of x."""
    if normalized_shape is not None:
        return extents_of(normalized_shape)
    for parameter in (weight, bias):
        shape = getattr(parameter, "shape", None)
        if shape is not None:
            return tuple(shape)
    shape = arrays.take(x, "x").shape
    if not shape:
        raise ValueError(
            "x has no dimension to normalise over; expected at least one, or normalized_shape"
        )
    return tuple(shape)[-1:]


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
