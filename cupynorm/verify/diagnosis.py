"""Why a tensor is off: which elements, by how many ulp, and the mistake that explains the numbers.

A mistake explains a tensor if its values, computed in float64, are within twice what is allowed for
95% of all elements and 95% of those that are off; the rest must be near, too. Of several, the one
with the smallest rest is taken. Five mistakes have no formula, because their errors are those of
roundings. Each has a bound, and what is beyond it is not explained:

    a rounded mean      rows of large mean are off by a shift of the size of its rounding error
    E[x^2] - E[x]^2     rows are off by a factor, and that of the variance is at most the rounding
                        error of mean^2
    16-bit statistics   rows are off by a factor and a shift of the size of a 16-bit sum's error
    16-bit sums         dweight and dbias are off by at most the error of a 16-bit sum over rows
    narrow arithmetic   the errors have the size of the roundings of a narrower dtype
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, compute_dtype
from .bounds import half_ulp
from .cases import Problem
from .mistakes import Rows, candidates, cut_to, of_statistics, rearrangements, round_to, summed_in

UNKNOWN = "no mistake that is tried explains the numbers"
_MOST_ELEMENTS = 2**17
_SHARE = 0.95  # of elements that a mistake must explain
_FAR = 64.0  # times what is allowed of a mistake's values: no element may be beyond
_MEAN = "the rounding error of the mean is left in x - mean: subtract the mean of x - mean too"
_ONE_PASS = (
    "the variance is off by the rounding of mean^2, as in E[x^2] - E[x]^2: subtract the mean first"
)


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


def best_of(
    judged: Judged, tried: Iterable[Candidate], counted: np.ndarray | slice = slice(None)
) -> str:
    """The mistake with the smallest rest among those that explain the numbers, or "".

    counted: which elements are compared.
    """
    off = judged.off[counted]
    if not off.any():
        return ""
    right = _rest_of(judged, judged.expected)[counted]
    best, smallest = "", float(np.minimum(right, 100).mean()) / 2
    for sentence, values, allowed in tried:
        rest = _rest_of(judged, values, allowed)[counted]
        within = rest <= 1
        if within.mean() < _SHARE or within[off].mean() < _SHARE or rest.max() > _FAR:
            continue
        size = float(np.minimum(rest, 100).mean())
        if size < 0.9 * smallest:
            best, smallest = sentence, size
    return best


def _rest_of(judged: Judged, values: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
    """|got - values| in units of twice what is allowed; infinite where only one of them is NaN."""
    u = compute_dtype(judged.dtype).half_ulp
    allowed = judged.allowed if allowed is None else allowed
    allowed = 2 * (allowed + half_ulp(values, judged.dtype))
    allowed = np.where(np.isfinite(allowed), allowed, 0) + 16 * u * np.abs(values)
    rest = np.abs(judged.got - values) / (allowed + np.finfo(np.float64).tiny)
    same = (np.isnan(judged.got) & np.isnan(values)) | (judged.got == values)
    rest = np.where(same, 0.0, rest)
    return np.where(np.isnan(rest), np.inf, rest)


def _cause(problem: Problem, judged: Judged) -> str:
    unwritten = _spread_nan(problem, judged) or _unwritten(judged)
    problem, judged = _fewer_rows(problem, judged)
    if problem.case.round_x_hat:
        return unwritten or _narrow(judged)
    rows = Rows(problem)
    fitted = _fit(rows, judged)
    return (
        best_of(judged, _every_candidate(rows, judged, fitted), _counted(rows, judged))
        or unwritten
        or _nearly_right(judged)
        or _of_roundings(rows, judged, fitted)
        or _of_16_bit_statistics(rows, judged, fitted)
        or _of_16_bit_sums(rows, judged)
        or _narrow(judged)
    )


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


def _every_candidate(
    rows: Rows, judged: Judged, fitted: tuple[np.ndarray, np.ndarray] | None
) -> Iterator[Candidate]:
    yield from itertools.starmap(Candidate, candidates(rows, judged.tensor, judged.expected))
    for dtype in ("float16", "bfloat16", "float32"):
        narrow, own = DTYPES[dtype].digits, DTYPES[judged.dtype].digits
        if narrow < own:
            yield Candidate(f"the result is rounded to {dtype}", round_to(judged.expected, dtype))
        if narrow <= own and dtype != "float32":
            words = f"the result is cut to {dtype}, not rounded"
            yield Candidate(words, cut_to(judged.expected, dtype))
    if fitted is not None:  # the eps that explains the row with the smallest variance
        row = int(np.nanargmin(np.where(rows.spread[:, 0] > 0, rows.spread[:, 0], np.inf)))
        eps = 1 / (fitted[0][row] * rows.rstd[row, 0]) ** 2 - rows.spread[row, 0]
        if np.isfinite(eps) and eps >= 0 and not np.isclose(eps, rows.case.eps, 0.01, 0):
            rstd = 1 / np.sqrt(rows.spread + eps)
            values = of_statistics(rows, judged.tensor, rows.center, rstd)
            yield Candidate(f"eps is about {eps:.3g}, not {rows.case.eps:g}", values)
    if judged.tensor in ("dweight", "dbias"):
        # The row whose terms are most like the error: missing, or counted several times.
        terms = rows.dy * (rows.x_hat if judged.tensor == "dweight" else 1.0)
        squares = np.maximum((terms**2).sum(axis=1), np.finfo(np.float64).tiny)
        products = terms @ (judged.got - judged.expected)
        row = int(np.argmax(np.nan_to_num(np.abs(products) / np.sqrt(squares))))
        count = 1 + np.rint(products[row] / squares[row])
        words = f"row {row} counts {count:g} times" if count else f"row {row} is not summed"
        yield Candidate(words, judged.expected + (count - 1) * terms[row])
    if judged.tensor == "dbias":
        x_hat = rows.x_hat
        size = rows.n**0.5 * (1 + np.abs(x_hat)) + np.abs(rows.mean) * rows.rstd
        allowed = judged.allowed + half_ulp(size, "float32").sum(axis=0)
        yield Candidate("it is the sum of x_hat, not of dy", x_hat.sum(axis=0), allowed)
    for sentence, rearranged in rearrangements(judged.got.shape):
        yield Candidate(sentence, rearranged(judged.expected), rearranged(judged.allowed))


# What has no formula.


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
    if got_nan.any() and np.isnan(judged.got)[judged.off].mean() >= _SHARE:
        reached = _of_line(got_nan, "row").rpartition(" ")[0]
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
    if (_rest_of(judged, judged.expected) <= 1).all():
        return "errors are below twice what is allowed, as by one rounding too many"
    return ""


def _fit(rows: Rows, judged: Judged) -> tuple[np.ndarray, np.ndarray] | None:
    """Of each row, the factor of rstd and the shift of x_hat by which y, dx or rstd is right.

    None: there are none.
    """
    got, x_hat, shift = judged.got, rows.x_hat, np.zeros(len(judged.got))
    if judged.tensor == "rstd":
        return got / rows.rstd[:, 0], shift
    if judged.tensor == "y":
        use = np.abs(rows.w) > 0.1 * np.median(np.abs(rows.w))
        if not use.any():
            return None
        z, base = ((got - rows.bias) / np.where(use, rows.w, 1))[:, use], x_hat[:, use]
        middle = base.mean(axis=1, keepdims=True) * rows.centered
        lever = base - middle
        factor = (z * lever).sum(axis=1) / (lever**2).sum(axis=1)
        if rows.centered:
            shift = z.mean(axis=1) - factor * middle[:, 0]
        fitted = (factor[:, None] * x_hat + shift[:, None]) * rows.w + rows.bias
    elif judged.tensor == "dx" and rows.problem.dsum is None:
        first = rows.wdy - rows.centered * rows.wdy.mean(axis=1, keepdims=True)
        of_x_hat = (rows.wdy * x_hat).mean(axis=1)
        # got = r * s * (first - s^2 * x_hat * of_x_hat): along x_hat, and across it.
        along = (x_hat**2).sum(axis=1)
        across = first - x_hat * ((first * x_hat).sum(axis=1) / along)[:, None]
        factor = (got * across).sum(axis=1) / (across**2).sum(axis=1) / rows.rstd[:, 0]
        inner = first - (factor**2 * of_x_hat)[:, None] * x_hat
        fitted = (rows.rstd[:, 0] * factor)[:, None] * inner
    else:
        return None
    fits = (_rest_of(judged, fitted) <= 4) | np.isnan(got) | np.isnan(x_hat)
    return (factor, shift) if fits[judged.off].mean() >= _SHARE else None


def _of_roundings(rows: Rows, judged: Judged, fitted: tuple[np.ndarray, np.ndarray] | None) -> str:
    """A rounded mean or E[x^2] - E[x]^2: rows of large mean are off by a shift or a factor."""
    if fitted is None or not rows.centered:
        return ""
    factor, shift = fitted
    off = judged.off if judged.off.ndim == 1 else judged.off.any(axis=1)
    spread, mean = rows.spread[:, 0], rows.mean[:, 0]
    u = 4 * (4 + np.sqrt(rows.n)) * compute_dtype(rows.case.sum).half_ulp
    rounding = u * np.abs(mean) * rows.rstd[:, 0]
    shifted = (np.abs(shift) <= rounding) & (np.abs(factor - 1) < np.abs(shift) / 4)
    if shifted[off].mean() >= _SHARE:
        return _MEAN
    implied = 1 / (factor * rows.rstd[:, 0]) ** 2 - rows.case.eps
    rounding = u * mean**2
    explained = np.where(np.isfinite(implied), np.abs(implied - spread), spread) <= rounding
    explained &= mean**2 > 100 * spread  # it is small in other rows
    return _ONE_PASS if explained[off].mean() >= _SHARE else ""


def _of_16_bit_statistics(
    rows: Rows, judged: Judged, fitted: tuple[np.ndarray, np.ndarray] | None
) -> str:
    """Errors of the size that a sum in 16 bits makes: between one rounding and those of a loop."""
    if fitted is None or rows.n > 4096 or not rows.centered or judged.tensor == "dx":
        return ""
    error = np.maximum(np.abs(fitted[1]), np.abs(fitted[0] - 1))
    for dtype in ("float16", "bfloat16"):
        u = DTYPES[dtype].half_ulp
        loop = np.abs(summed_in(rows.x, dtype, 1) / rows.n - rows.mean)
        largest = 4 * (loop * rows.rstd)[:, 0] + 8 * u * (1 + np.abs(rows.mean) * rows.rstd)[:, 0]
        usable = np.isfinite(error) & np.isfinite(largest)
        within = ((error <= largest) & (error >= u / 64))[usable]
        # Roundings have no sign: neither mean nor rstd is off in one direction alone.
        signs = [np.sign(each)[usable] for each in (fitted[1], fitted[0] - 1)]
        fair = all(abs(each.mean()) < 0.75 for each in signs if np.abs(each).mean() > 0.5)
        if usable.any() and within.mean() >= 0.75 and error[usable].max() <= _FAR * u and fair:
            return (
                "mean or rstd of rows have errors of 16-bit arithmetic: accumulate them in float32"
            )
    return ""


def _of_16_bit_sums(rows: Rows, judged: Judged) -> str:
    """dweight or dbias with the error of a sum over rows that is rounded to 16 bits on its way."""
    if judged.tensor not in ("dweight", "dbias"):
        return ""
    terms = rows.dy * (rows.x_hat if judged.tensor == "dweight" else 1.0)
    error = np.abs(judged.got - judged.expected)
    partial = np.abs(np.cumsum(terms, axis=0))
    for dtype in ("float16", "bfloat16"):
        u = DTYPES[dtype].half_ulp
        if DTYPES[dtype].digits > DTYPES[judged.dtype].digits or not np.isfinite(error).all():
            continue
        # Each addition rounds a partial sum; in another order they are of about the same size.
        most = 6 * u * (np.sqrt((partial**2).sum(axis=0)) + np.abs(terms).max(axis=0))
        typical = u * np.sqrt((terms**2).sum(axis=0))
        if (error <= most).all() and np.median((error / typical)[judged.off]) > 0.25:
            return f"it has the errors of sums over rows in {dtype}: accumulate it in float32"
    return ""


def _narrow(judged: Judged) -> str:
    """Errors of the size of a narrower dtype's roundings, or the words for no cause."""
    error = np.abs(judged.got - judged.expected)
    squares = np.where(np.isfinite(judged.expected), judged.expected**2, 0.0)
    size = np.sqrt(squares.mean(axis=-1, keepdims=True))
    relative = (error / size)[judged.off & np.isfinite(error)]
    if judged.off.mean() < 0.1 or not relative.size:
        return UNKNOWN
    digits = -np.log2(np.median(relative))
    largest = np.max(error / np.maximum(size, np.abs(judged.expected)), where=judged.off, initial=0)
    for dtype in ("bfloat16", "float16", "float32"):
        narrow = DTYPES[dtype].digits
        wide = compute_dtype(judged.dtype).digits
        is_near = narrow < wide and abs(digits - narrow - 1) < (1.5 if narrow < 20 else 4)
        if is_near and largest <= 8 * 2.0**-narrow:
            return f"the errors have the size of roundings to {dtype}"
    return UNKNOWN


# Which elements are off.


def pattern_of(off: np.ndarray) -> str:
    """Which elements are off: "all elements are", "row 3 is", "every 4th column is", ..."""
    if off.all():
        return "all elements are"
    if off.sum() == 1:
        where = ", ".join(str(each[0]) for each in np.nonzero(off))
        return f"the element [{where}] is"
    if off.ndim == 1:
        return _of_line(off, "element") or f"{off.sum()} of {off.size} elements are"
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
        names.append(_of_line(in_col, "column"))
    if of_rows and not in_row.all():
        names.append(_of_line(in_row, "row"))
    if any(names):
        return next(filter(None, names))
    rows, cols = np.flatnonzero(in_row), np.flatnonzero(in_col)
    box = off[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    if box.mean() > 0.5 and box.size < off.size:
        return f"a block of rows {rows[0]} to {rows[-1]}, columns {cols[0]} to {cols[-1]} is"
    return f"{off.sum()} of {off.size} elements, scattered, are"


def _of_line(off: np.ndarray, name: str) -> str:
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
