"""Types of command-line arguments. Each raises argparse.ArgumentTypeError with a clear sentence."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Appended(argparse.Action):
    """An option of a list: given again it adds to the list. The default counts if it is not given.

    Repeated values count once.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        given = [] if before is self.default else before
        setattr(namespace, self.dest, list(dict.fromkeys([*given, *values])))


class Commands(Protocol):
    """What argparse's add_subparsers returns."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser: ...


def number(text: str) -> int:
    """A whole number of 0 or more, or a power such as 2**28 or 2^28."""
    base, power, exponent = text.replace("^", "**").partition("**")
    try:
        if power and not 0 <= int(exponent) <= 64:
            raise ValueError
        value = int(base) ** int(exponent) if power else int(base)
    except ValueError as error:
        sentence = f"{text!r} is not a whole number, or a power such as 2**28"
        raise argparse.ArgumentTypeError(sentence) from error
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative; expected 0 or more")
    return value


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too few; expected 1 or more")
    return value


def positives(text: str) -> list[int]:
    """Whole numbers of 1 or more, separated by commas. Repeated ones count once."""
    return list(dict.fromkeys(positive(each) for each in text.split(",")))


def finite(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def several(names: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is some of these names, separated by commas, or "all"."""

    def parse(text: str) -> list[str]:
        chosen = list(names) if text == "all" else text.split(",")
        for name in chosen:
            if name not in names:
                known = ",".join(names)
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; expected some of {known}")
        return list(dict.fromkeys(chosen))

    return parse


def linear_shapes(text: str) -> list[tuple[int, ...]]:
    """Extents of linear layers, separated by commas."""
    made = [tuple(map(positive, each.split("x"))) for each in text.lower().split(",")]
    for each in made:
        if len(each) != 3:
            expected = "rows x in_features x out_features, such as 8192x4096x12288"
            raise argparse.ArgumentTypeError(f"{text!r} is no shape; expected {expected}")
    return made


def check_folders(*paths: str | Path | None) -> None:
    """Raises ValueError for an output file that is a folder, or whose folder does not exist.

    Commands call it first, so that a long run does not fail at its end.
    """
    for path in filter(None, paths):
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise ValueError(f"{path}: there is no folder {folder}")
        if Path(path).is_dir():
            raise ValueError(f"{path}: this is a folder; expected a file")
