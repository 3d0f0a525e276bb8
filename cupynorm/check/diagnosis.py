"""Why a tensor is off: which elements, by how many ulp, and the mistake that explains the numbers.

A mistake explains a tensor if its values, computed in float64, are within what is allowed for 95%
of all elements and 95% of those that are off. Of several, the one with the smallest rest is taken.
Four mistakes have no formula, because their errors are those of roundings:

    a rounded mean      rows of large mean are off by a shift of the size of its rounding error
    E[x^2] - E[x]^2     rows are off by a factor, and that of the variance is at most the rounding
                        error of mean^2
    16-bit statistics   rows are off by a factor and a shift of the size of a 16-bit rounding
    narrow arithmetic   the errors have the size of the roundings of a narrower dtype
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, compute_dtype
from . import fitted_gradients, fitted_outputs, places
from .bounds import half_ulp
from .cases import Problem
from .judged import SHARE, Candidate, Judged, best_of, of_line, pattern_of, rest_of
from .mistakes import Rows, candidates, cut_to, of_statistics, rearrangements, round_to

_MOST_ELEMENTS = 2**17
UNKNOWN = "no mistake that is tried explains the numbers"


class Diagnosis(NamedTuple):
    """pattern: which elements are off. ulps: the largest error, in ulp of the output's dtype.

    cause: the mistake that explains the numbers, or that none does.
    """

    pattern: str
    ulps: float
    cause: str

    def __str__(self) -> str:
        size = f" by up to {self.ulps:.3g} ulp" if np.isfinite(self.ulps) else ""
        return f"{self.pattern} off{size}; {self.cause}"


def diagnose(problem: Problem, judged: Judged) -> Diagnosis:
    """The pattern, size and likely cause of what is off. judged.off has at least one element."""
    with np.errstate(all="ignore"):
        return described(judged, _cause(problem, judged))


def described(judged: Judged, cause: str) -> Diagnosis:
    """With the pattern and the size of what is off."""
    # In ulp of the larger number: those of a result near 0 say nothing.
    larger = np.fmax(np.abs(judged.expected), np.abs(judged.got))
    error = np.abs(judged.got - judged.expected) / (2 * half_ulp(larger, judged.dtype))
    finite = error[np.isfinite(error) & judged.off]
    ulps = float(finite.max()) if finite.size else float("inf")
    return Diagnosis(pattern_of(judged.off), ulps, cause)


def _fewer_rows(problem: Problem, judged: Judged) -> tuple[Problem, Judged]:
    """The rows around the first that is off, where there are more than a cause needs."""
    num_rows = problem.case.num_rows
    most = max(16, _MOST_ELEMENTS // max(1, problem.case.num_cols))
    if num_rows <= most or judged.tensor not in ("y", "dx", "mean", "rstd"):
        return problem, judged
    first = int(np.argmax(judged.off.reshape(num_rows, -1).any(axis=1)))
    start = min(max(0, first - most // 4), num_rows - most)
    at = slice(start, start + most)
    named = {name: getattr(problem, name) for name in ("x", "dy", "residual", "dsum")}
    named = {name: values[at] for name, values in named.items() if values is not None}
    case = replace(problem.case, num_rows=most)
    arrays = {name: getattr(judged, name)[at] for name in ("got", "expected", "allowed", "off")}
    return replace(problem, case=case, **named), judged._replace(**arrays)


def _cause(problem: Problem, judged: Judged) -> str:
    unwritten = _spread_nan(problem, judged) or _unwritten(judged)
    problem, judged = _fewer_rows(problem, judged)
    case = problem.case
    if case.round_x_hat:
        return unwritten or _narrow(judged)
    rows = Rows(problem)
    counted = _counted(rows, judged)
    return (
        best_of(judged, _every_candidate(rows, judged), counted)
        or unwritten
        or _nearly_right(judged)
        or fitted_gradients.of_sums(rows, judged)
        or fitted_outputs.of_roundings(rows, judged)
        or best_of(judged, places.moved(judged), counted)
        or fitted_outputs.of_rows(rows, judged, counted)
        or fitted_gradients.of_terms(rows, judged, counted)
        or fitted_outputs.of_columns(rows, judged, counted)
        or fitted_outputs.of_groups(rows, judged, counted)
        or _narrow(judged)
    )


def _counted(rows: Rows, judged: Judged) -> np.ndarray:
    """All elements but those of rows with a mean far above their spread, if most rows are left.

    A mistake that is harmless elsewhere may amplify roundings there beyond what is allowed.
    """
    counted = np.ones(judged.got.shape, bool)
    is_plain = (rows.mean**2 <= 100 * rows.var)[:, 0]
    is_of_rows = len(counted) == len(is_plain) and judged.tensor not in ("dweight", "dbias")
    if is_of_rows and is_plain.mean() >= 0.5:
        counted[~is_plain] = False
    return counted


def _spread_nan(problem: Problem, judged: Judged) -> str:
    """A NaN of x in results of other rows, or missing in those of its own."""
    if judged.got.shape[:1] != problem.x.shape[:1] or judged.tensor in ("dweight", "dbias"):
        return ""
    has_nan = ~np.isfinite(problem.x).all(axis=1)
    axes = tuple(range(1, judged.got.ndim))
    got, expected = np.isnan(judged.got), np.isnan(judged.expected)
    got_nan, lost = (got & ~expected).all(axis=axes), (~got & expected).all(axis=axes)
    source = np.flatnonzero(has_nan)
    if not source.size:
        return ""
    if got_nan.any() and np.isnan(judged.got)[judged.off].mean() >= SHARE:
        reached = of_line(got_nan, "row").rpartition(" ")[0]
        return f"a NaN or infinity of row {source[0]} spreads to {reached}"
    if lost[source].any():
        return f"row {source[0]} has a NaN or infinity in x, and its result should be NaN"
    return ""


def _unwritten(judged: Judged) -> str:
    """Elements that are off are all NaN, or all 0."""
    got = judged.got[judged.off]
    if np.isnan(got).all():
        return "they are NaN: not written, or made by an invalid operation"
    if (got == 0).all() and not judged.off.all():
        return "they are 0: not written"
    return ""


def _nearly_right(judged: Judged) -> str:
    if (rest_of(judged, judged.expected) <= 1).all():
        return "errors are below twice what is allowed, as by one rounding too many"
    return ""


def _every_candidate(rows: Rows, judged: Judged) -> Iterator[Candidate]:
    yield from itertools.starmap(Candidate, candidates(rows, judged.tensor, judged.expected))
    for dtype in ("float16", "bfloat16", "float32"):
        narrow, own = DTYPES[dtype].digits, DTYPES[judged.dtype].digits
        if narrow < own:
            yield Candidate(f"the result is rounded to {dtype}", round_to(judged.expected, dtype))
        if narrow <= own and dtype != "float32":
            words = f"the result is cut to {dtype}, not rounded"
            yield Candidate(words, cut_to(judged.expected, dtype))
    eps = _fitted_eps(rows, judged)
    if eps is not None:
        rstd = 1 / np.sqrt(rows.spread + eps)
        values = of_statistics(rows, judged.tensor, rows.center, rstd)
        yield Candidate(f"eps is about {eps:.3g}, not {rows.case.eps:g}", values)
    if judged.tensor == "dbias":
        x_hat = rows.x_hat
        size = rows.n**0.5 * (1 + np.abs(x_hat)) + np.abs(rows.mean) * rows.rstd
        allowed = judged.allowed + half_ulp(size, "float32").sum(axis=0)
        yield Candidate("it is the sum of x_hat, not of dy", x_hat.sum(axis=0), allowed)
    for sentence, rearranged in rearrangements(judged.got.shape):
        yield Candidate(sentence, rearranged(judged.expected), rearranged(judged.allowed))


def _fitted_eps(rows: Rows, judged: Judged) -> float | None:
    """The eps that explains the row with the smallest variance."""
    fitted = fitted_outputs.fit(rows, judged)
    if fitted is None:
        return None
    row = int(np.nanargmin(np.where(rows.spread[:, 0] > 0, rows.spread[:, 0], np.inf)))
    eps = 1 / (fitted.factor[row] * rows.rstd[row, 0]) ** 2 - rows.spread[row, 0]
    is_other = np.isfinite(eps) and eps >= 0 and not np.isclose(eps, rows.case.eps, 0.01, 0)
    return float(eps) if is_other else None


def _narrow(judged: Judged) -> str:
    """Errors of the size of a narrower dtype's roundings, or the words for no cause."""
    error = np.abs(judged.got - judged.expected)
    squares = np.where(np.isfinite(judged.expected), judged.expected**2, 0.0)
    size = np.sqrt(squares.mean(axis=-1, keepdims=True))
    relative = (error / size)[judged.off & np.isfinite(error)]
    if judged.off.mean() < 0.1 or not relative.size:
        return UNKNOWN
    digits = -np.log2(np.median(relative))
    for dtype in ("bfloat16", "float16", "float32"):
        narrow = DTYPES[dtype].digits
        wide = compute_dtype(judged.dtype).digits
        if narrow < wide and abs(digits - narrow - 1) < (1.5 if narrow < 20 else 4):
            return f"the errors have the size of roundings to {dtype}"
    return UNKNOWN
