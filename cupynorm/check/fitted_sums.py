"""dweight and dbias as sums over some of the rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .judged import Candidate, Judged, best_of, rest_of
from .mistakes import Rows
from .patterns import of_line

_MOST_ROWS, _MOST_COLS = 512, 2048


def of_sums(rows: Rows, judged: Judged) -> str:
    """Which rows are missing in a sum over rows, or count more than once; "" if that is not it."""
    if judged.tensor not in ("dweight", "dbias") or len(rows.dy) < 2:
        return ""
    terms = rows.dy * (rows.x_hat if judged.tensor == "dweight" else 1.0)
    if not np.isfinite(terms).all() or not np.isfinite(judged.got).all():
        return ""
    return best_of(judged, _of_rows(terms, judged)) or _lost_updates(terms, judged)


def _of_rows(terms: np.ndarray, judged: Judged) -> Iterator[Candidate]:
    num_rows, num_cols = terms.shape
    if num_rows <= 4096:
        yield from _one_row(terms, judged)
    # The first or last rows alone.
    sums = np.cumsum(terms, axis=0)
    for part in (sums, sums[-1] - sums):
        far = np.abs(judged.got - part).mean(axis=1)
        count = int(np.argmin(far)) + 1
        if 0 < count < num_rows:
            counts = np.zeros(num_rows) if part is not sums else np.ones(num_rows)
            counts[count:] = 1 - counts[0]
            yield _counting(counts, terms, judged)
    for step in (2, 3, 4, 8, 16, 32, 64, 128):
        for first in range(min(step, 4)):
            counts = (np.arange(num_rows) % step == first).astype(np.float64)
            yield _counting(counts, terms, judged)
    if num_rows <= _MOST_ROWS and num_cols >= 1.25 * num_rows:
        yield _counting(_fitted_counts(terms, judged), terms, judged)


def _one_row(terms: np.ndarray, judged: Judged) -> Iterator[Candidate]:
    squares = (terms**2).sum(axis=1)
    products = terms @ (judged.got - judged.expected)
    products /= np.maximum(squares, np.finfo(np.float64).tiny)
    row = int(np.argmax(np.abs(products) * np.sqrt(squares)))
    counts = np.ones(len(terms))
    counts[row] += np.rint(products[row])
    yield _counting(counts, terms, judged)


def _fitted_counts(terms: np.ndarray, judged: Judged) -> np.ndarray:
    """How often each row is counted. Rows whose terms are too small to tell are as those before."""
    terms, left = terms[:, :_MOST_COLS], judged.got[:_MOST_COLS].copy()
    size = np.sqrt((terms**2).mean(axis=1))
    is_large = size > 0.05 * np.median(size)
    counts = np.zeros(len(terms))
    for rows in (is_large, ~is_large):
        if rows.any():
            found, *_ = np.linalg.lstsq(terms[rows].T, left, rcond=None)
            counts[rows] = np.where(np.abs(found - np.rint(found)) < 0.2, np.rint(found), np.nan)
            left -= np.nan_to_num(counts[rows]) @ terms[rows]
    for row in np.flatnonzero(np.isnan(counts)):
        counts[row] = counts[row - 1] if row else 1.0
    return counts


def _counting(counts: np.ndarray, terms: np.ndarray, judged: Judged) -> Candidate:
    missing = counts == 0
    is_few = 2 * missing.sum() < len(missing)
    words = ""
    if missing.any() and not missing.all():
        which, _, verb = of_line(missing if is_few else ~missing, "row").rpartition(" ")
        words = f"{which} {verb} not summed" if is_few else f"only {which} {verb} summed"
    several = np.flatnonzero(~missing & (counts != 1))
    if several.size:
        words = f"row {several[0]} counts {counts[several[0]]:g} times"
        if several.size > 1:
            words += f", and {several.size - 1} more count wrongly"
    return Candidate(words, counts @ terms)


def _lost_updates(terms: np.ndarray, judged: Judged) -> str:
    """Some columns lack the term of one row each, as in a race."""
    off = np.flatnonzero(judged.off)
    if not 0 < len(off) < judged.off.size / 2:
        return ""
    left = np.abs((judged.got - judged.expected)[off] + terms[:, off])
    row = np.argmin(left, axis=0)
    fitted = judged.expected.copy()
    fitted[off] -= terms[row, off]
    rest = rest_of(judged, fitted)[off]
    # By chance, one of so many terms may be as near.
    chance = len(terms) * judged.allowed[off] / np.sqrt((terms[:, off] ** 2).mean(axis=0))
    if (rest > 1).any() or chance.max() > 0.02:
        return ""
    return (
        "each of these lacks the term of one row, as when two threads update one sum at once: "
        f"element {off[0]} lacks row {row[0]}"
    )
