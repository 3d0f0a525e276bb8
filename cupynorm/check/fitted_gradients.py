"""Gradients as sums: which term of dx is wrong, and which rows dweight and dbias lack.

dx has three terms.

    dx = rstd * (wdy - mean(wdy) - x_hat * mean(wdy * x_hat))

The factors of wdy, 1 and x_hat are fitted to each row. A term is right if the row is explained with
its factor as it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from .judged import Candidate, Judged, best_of, explains, of_line, rest_of
from .mistakes import Rows
from .places import moves, nearest

Maker = Callable[[str, dict], Candidate]  # of a sentence and changed factors

_FEWEST_COLS = 12
_MOST_ROWS, _MOST_COLS = 512, 2048  # of sums to which counts of rows are fitted
_OF_16_BITS = 2.0**-7  # of the size of wdy: what 16-bit sums are off by
_NAMES = ("wdy", "mean(wdy)", "x_hat * mean(wdy * x_hat)")


class _Terms:
    """The terms of dx: bases [num_rows, num_cols] and their right factors [num_rows, 1]."""

    def __init__(self, rows: Rows) -> None:
        of_mean = rows.wdy.mean(axis=1, keepdims=True)
        of_x_hat = (rows.wdy * rows.x_hat).mean(axis=1, keepdims=True)
        bases = (rows.wdy, np.ones_like(rows.wdy), rows.x_hat)
        factors = (rows.rstd, -rows.rstd * of_mean * rows.centered, -rows.rstd * of_x_hat)
        self.names = [name for name in _NAMES if rows.centered or name != _NAMES[1]]
        self.bases = dict(zip(_NAMES, bases))
        self.factors = {name: each for name, each in zip(_NAMES, factors) if name in self.names}
        self.dsum = np.broadcast_to(rows.dsum, rows.wdy.shape)

    def made(self, changed: Mapping[str, np.ndarray | float]) -> np.ndarray:
        """dx with other factors, relative to the right ones."""
        total = self.dsum
        for name in self.names:
            total = total + changed.get(name, 1.0) * self.factors[name] * self.bases[name]
        return total

    def fitted(self, judged: Judged, wrong: Sequence[str]) -> dict[str, np.ndarray]:
        """The factors of some terms, relative to the right ones, when the others are right."""
        left = judged.got - self.made(dict.fromkeys(wrong, 0.0))
        bases = np.stack([self.factors[name] * self.bases[name] for name in wrong], axis=-1)
        usable = np.isfinite(left).all(axis=1) & np.isfinite(bases).all(axis=(1, 2))
        factors = np.full((len(left), len(wrong)), np.nan)
        factors[usable] = np.einsum(
            "rkc,rc->rk", np.linalg.pinv(bases[usable]), left[usable], optimize=True
        )
        return {name: factors[:, at : at + 1] for at, name in enumerate(wrong)}


def of_terms(rows: Rows, judged: Judged, counted: np.ndarray) -> str:
    """Which term of dx is wrong, or "" if dx is no sum of the terms."""
    if judged.tensor != "dx" or rows.n < _FEWEST_COLS:
        return ""
    terms = _Terms(rows)
    for count in range(1, len(terms.names) + 1):
        for wrong in combinations(terms.names, count):
            factors = terms.fitted(judged, wrong)
            if explains(judged, terms.made(factors), counted):
                tried = _explanations(rows, terms, judged, factors)
                return best_of(judged, tried, counted) or _which(rows, terms, factors)
    return ""


def _which(rows: Rows, terms: _Terms, factors: dict[str, np.ndarray]) -> str:
    """The names of the wrong terms and of the right ones."""
    if len(factors) == len(terms.names):
        return "all terms are wrong: are rstd and the means those of this row?"
    right = [name for name in terms.names if name not in factors]
    if _NAMES[0] in factors:
        return f"the term {' and '.join(factors)} is wrong; {' and '.join(right)} is right"
    size = np.sqrt((rows.wdy**2).mean(axis=1, keepdims=True)) * rows.rstd
    error = [np.abs(terms.factors[name] * (each - 1)) / size for name, each in factors.items()]
    if np.nanmedian(error) < _OF_16_BITS:
        words = "is nearly right, as a sum in 16 bits: accumulate it in float32"
        if len(factors) > 1:
            words = "are nearly right, as sums in 16 bits: accumulate them in float32"
    else:
        words = "is wrong, the others are right" if len(factors) == 1 else "are wrong"
    return f"{_terms(list(factors))} {words}"


def _explanations(
    rows: Rows, terms: _Terms, judged: Judged, factors: dict[str, np.ndarray]
) -> Iterator[Candidate]:
    def of(sentence: str, changed: dict[str, np.ndarray]) -> Candidate:
        return Candidate(sentence, terms.made(changed))

    if len(factors) == len(terms.names):
        yield from _of_rstd(rows, of, factors)
    elif _NAMES[0] not in factors:
        yield from _of_means(rows, terms, of, factors)


def _of_rstd(rows: Rows, of: Maker, factors: dict[str, np.ndarray]) -> Iterator[Candidate]:
    """All terms have the same wrong factor in a row."""
    common = factors[_NAMES[0]]
    nearest_rows = nearest(np.log(np.abs(common * rows.rstd)).T, np.log(rows.rstd).T)
    for words, source in moves(nearest_rows, "row", "rstd"):
        yield of(words, dict.fromkeys(factors, rows.rstd[source] / rows.rstd))
    low, high = np.nanmin(common), np.nanmax(common)
    same = dict.fromkeys(factors, common)
    yield of(f"rstd is wrong, by a factor of {low:.4g} to {high:.4g}; the means are right", same)


def _of_means(
    rows: Rows, terms: _Terms, of: Maker, factors: dict[str, np.ndarray]
) -> Iterator[Candidate]:
    """The means, or one of them, are wrong."""
    names, n = list(factors), rows.n
    has_all = len(names) == len(terms.names) - 1
    factor = _median(factors, terms)
    if factor > 0:
        count = float(np.rint(n / factor))
        if count > 0:
            words = f"{_sums(names)} {_are(names)} divided by {count:g}, not by {n} columns"
            yield of(words, dict.fromkeys(names, n / count))
    words = f"{_terms(names)} {_are(names)} {factor:.3g} times what {_they(names)} should be"
    yield of(words, dict.fromkeys(names, factor))
    one = f"rstd does not multiply {_terms(names)}"
    yield of(
        "rstd multiplies wdy alone, not the means" if has_all else one,
        dict.fromkeys(names, 1 / rows.rstd),
    )
    yield of(f"rstd multiplies {_terms(names)} twice", dict.fromkeys(names, rows.rstd))
    # Sums over the first or the last columns, divided by all, or by those that they have.
    products = {_NAMES[1]: rows.wdy, _NAMES[2]: rows.wdy * rows.x_hat}
    for step, which in ((1, "first"), (-1, "last")):
        sums = {name: np.cumsum(products[name][:, ::step], axis=1) for name in names}
        for divided, scale in ((False, 1.0), (True, n / np.arange(1, n + 1))):
            far = sum(
                np.nan_to_num(np.abs(each * scale - factors[name] * each[:, -1:])).mean(axis=0)
                for name, each in sums.items()
            )
            at = int(np.argmin(far))
            changed = {
                name: (each * scale)[:, at : at + 1] / each[:, -1:] for name, each in sums.items()
            }
            has = "has" if len(names) == 1 else "have"
            words = f"{_sums(names)} {has} only the {which} {at + 1} of {n} columns"
            words += f", and {_are(names)} divided by {at + 1 if divided else n}"
            if at + 1 < n:
                yield of(words, changed)


def _median(factors: dict[str, np.ndarray], terms: _Terms) -> float:
    """The median factor over rows. Rows in which a term is large count more."""
    values = np.concatenate(list(factors.values()))[:, 0]
    weights = np.abs(np.concatenate([terms.factors[name] for name in factors]))[:, 0]
    usable = np.isfinite(values) & np.isfinite(weights)
    if not usable.any():
        return 1.0
    order = np.argsort(values[usable])
    total = np.cumsum(weights[usable][order])
    return float(values[usable][order][np.searchsorted(total, total[-1] / 2)])


# Words.


def _terms(names: list[str]) -> str:
    return f"the term{'s' * (len(names) > 1)} {' and '.join(names)}"


def _sums(names: list[str]) -> str:
    inner = [name.removeprefix("x_hat * ")[len("mean(") : -1] for name in names]
    return f"the sum{'s' * (len(names) > 1)} of {' and '.join(inner)}"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _they(names: list[str]) -> str:
    return "it" if len(names) == 1 else "they"


# Sums over rows.


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
