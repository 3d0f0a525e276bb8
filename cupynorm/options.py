"""Checks of options that every entry point shares: flags, choices, ints, real numbers, names.

Each raises TypeError or ValueError with a sentence that says what was given and what was expected.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np


def type_in_words(value: object) -> str:
    """The type of a value, for error messages: "a list", "an int", "None"."""
    name = type(value).__name__
    article = "an" if name.lower().startswith((*"aeio", "nd")) else "a"  # ndarray: n-d
    return "None" if value is None else f"{article} {name}"


def shown(value: object) -> str:
    """A value as an error shows it: written out if it is short and no array, else its type."""
    if isinstance(value, int) and abs(value) >= 2**128:
        return f"an int of {int(math.log10(abs(value))) + 1} digits"
    text = "" if hasattr(value, "__array__") and not isinstance(value, np.generic) else repr(value)
    return text if 0 < len(text) <= 200 and "\n" not in text else type_in_words(value)


def check_flags(**flags: object) -> None:
    """Raises TypeError for what is neither True nor False. 1 and 0 are."""
    for name, value in flags.items():
        if not isinstance(value, (int, np.bool_)) or value not in (True, False):
            raise TypeError(f"{name} is {shown(value)}; expected True or False")


def check_choice(name: str, value: object, choices: Iterable[str | None], more: str = "") -> None:
    """Raises ValueError for what is none of the choices. more: ends the sentence."""
    choices = tuple(choices)
    if not (value is None or isinstance(value, str)) or value not in choices:
        *others, last = map(repr, choices)
        expected, names = f"{', '.join(others)} or {last}", [each for each in choices if each]
        if len(names) > 3:
            expected = f"one of {', '.join(names)}{', or None' * (None in choices)}"
        raise ValueError(f"{name} is {shown(value)}; expected {expected}{more}")


def is_int(value: object) -> bool:
    """Whether a value is an int, of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int = 0) -> int:
    """An int. Raises TypeError for what is none, ValueError for one out of range."""
    if not is_int(value):
        raise TypeError(f"{name} is {shown(value)}; expected an int of {least} or more")
    if not least <= value < 2**63:
        bound = "2**63 - 1 or less" if value > 0 else f"{least} or more"
        raise ValueError(f"{name} is {shown(value)}; expected an int of {bound}")
    return int(value)


def check_real(name: str, value: Any, expected: str = "a real number") -> float:
    """A float, which may be infinite. Raises TypeError for what is no number, or NaN, and
    ValueError for one that no float holds."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        real = float(value) if is_real else math.nan
    except OverflowError:
        raise ValueError(f"{name} is {shown(value)}; expected one that a float holds") from None
    if math.isnan(real):
        raise TypeError(f"{name} is {shown(value)}; expected {expected}")
    return real


def sequence(name: str, value: Any, expected: str = "a sequence of names") -> tuple:
    """A sequence as a tuple; a string as one of itself. Raises TypeError for what is none."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or hasattr(value, "__array__"):
        raise TypeError(f"{name} is {shown(value)}; expected {expected}")
    return tuple(value)
