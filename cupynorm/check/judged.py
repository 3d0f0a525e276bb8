"""A tensor that is off: which elements are, in words, and whether a mistake explains them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..dtypes import compute_dtype
from .bounds import half_ulp

SHARE = 0.95  # of elements that a mistake must explain


class Judged(NamedTuple):
    """One tensor that is off.

    got, expected, allowed: float64 of one shape. off: which elements are. dtype: of the output.
    """

    tensor: str
    dtype: str
    got: np.ndarray
    expected: np.ndarray
    allowed: np.ndarray
    off: np.ndarray


class Candidate(NamedTuple):
    """What a tensor would be by a mistake. allowed: of it, None for that of the right values."""

    sentence: str
    values: np.ndarray
    allowed: np.ndarray | None = None


def rest_of(judged: Judged, values: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
    """|got - values| in units of twice what is allowed; infinite where only one of them is NaN."""
    u = compute_dtype(judged.dtype).half_ulp
    allowed = judged.allowed if allowed is None else allowed
    allowed = 2 * (allowed + half_ulp(values, judged.dtype))
    allowed = np.where(np.isfinite(allowed), allowed, 0) + 16 * u * np.abs(values)
    rest = np.abs(judged.got - values) / (allowed + np.finfo(np.float64).tiny)
    same = (np.isnan(judged.got) & np.isnan(values)) | (judged.got == values)
    rest = np.where(same, 0.0, rest)
    return np.where(np.isnan(rest), np.inf, rest)


def explains(judged: Judged, values: np.ndarray, counted: np.ndarray, most: float = 1.0) -> bool:
    """Whether the rest is small for most elements, and for most of those that are off.

    counted: which elements are compared. most: the largest rest of those that are explained.
    """
    within = rest_of(judged, values)[counted] <= most
    off = judged.off[counted]
    return bool(off.any() and min(within.mean(), within[off].mean()) >= SHARE)


def best_of(
    judged: Judged, tried: Iterable[Candidate], counted: np.ndarray | slice = slice(None)
) -> str:
    """The mistake with the smallest rest among those that explain the numbers, or "".

    counted: which elements are compared.
    """
    off = judged.off[counted]
    if not off.any():
        return ""
    right = rest_of(judged, judged.expected)[counted]
    best, smallest = "", float(np.minimum(right, 100).mean()) / 2
    for sentence, values, allowed in tried:
        rest = rest_of(judged, values, allowed)[counted]
        within = rest <= 1
        if within.mean() < SHARE or within[off].mean() < SHARE:
            continue
        size = float(np.minimum(rest, 100).mean())
        if size < 0.9 * smallest:
            best, smallest = sentence, size
    return best


# Which elements are off.


def pattern_of(off: np.ndarray) -> str:
    """Which elements are off: "all elements are", "row 3 is", "every 4th column is", ..."""
    if off.all():
        return "all elements are"
    if off.sum() == 1:
        where = ", ".join(str(each[0]) for each in np.nonzero(off))
        return f"the element [{where}] is"
    if off.ndim == 1:
        return of_line(off, "element") or f"{off.sum()} of {off.size} elements are"
    in_row, in_col = off.any(axis=1), off.any(axis=0)
    # Elements near 0 may be right in a row that is wrong.
    of_rows = off[in_row].mean() > 0.5 and in_col.mean() > 0.5
    of_cols = off[:, in_col].mean() > 0.5 and in_row.mean() > 0.5
    if of_rows and of_cols and in_row.all() and in_col.all():
        share = off.mean()
        words = f"{share:.0%} of all elements" if share < 0.99 else "nearly all elements"
        return f"{words}, in all rows and columns, are"
    names = []
    if of_cols and not in_col.all():
        names.append(of_line(in_col, "column"))
    if of_rows and not in_row.all():
        names.append(of_line(in_row, "row"))
    if any(names):
        return next(filter(None, names))
    rows, cols = np.flatnonzero(in_row), np.flatnonzero(in_col)
    box = off[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    if box.mean() > 0.5 and box.size < off.size:
        return f"a block of rows {rows[0]} to {rows[-1]}, columns {cols[0]} to {cols[-1]} is"
    return f"{off.sum()} of {off.size} elements, scattered, are"


def of_line(off: np.ndarray, name: str) -> str:
    """Which rows, columns or elements of one dimension, or "" if all or in no order."""
    at = np.flatnonzero(off)
    steps = np.diff(at)
    if len(at) == 1:
        return f"{name} {at[0]} is"
    if (steps == 1).all():
        if at[-1] == len(off) - 1:
            return f"the last {len(at)} {name}s are"
        return f"{name}s {at[0]} to {at[-1]} are"
    if len(at) > 2 and len(set(steps)) == 1:
        last = 0 if steps[0] % 100 in (11, 12, 13) else steps[0] % 10
        ending = {1: "st", 2: "nd", 3: "rd"}.get(last, "th")
        return f"every {steps[0]}{ending} {name}, from {name} {at[0]}, is"
    if len(at) <= 4:
        return f"{name}s {', '.join(map(str, at[:-1]))} and {at[-1]} are"
    return f"{len(at)} of {len(off)} {name}s are"
