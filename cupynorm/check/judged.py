"""A tensor that is off, and whether the values of a mistake explain it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..dtypes import compute_dtype
from .allowed import half_ulp

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
