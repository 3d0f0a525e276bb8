"""Why a tensor is off: which elements, by how many ulp, and the mistake that explains the numbers.

A mistake explains a tensor if its values, computed in float64, are within twice what is allowed for
95% of all elements and 95% of those that are off; the rest must be near, too. Of several, the one
with the smallest rest is taken. Two mistakes have no formula, because their errors are those of
roundings. Each has a bound, and what is beyond it is not explained:

    a rounded mean      rows of large mean are off by a shift of the size of its rounding error
    E[x^2] - E[x]^2     rows are off by a factor, and that of the variance is at most the rounding
                        error of mean^2
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, compute_dtype, decode, encode
from ..reference.layer_norm import scale
from .bounds import half_ulp
from .cases import Problem

Named = tuple[str, np.ndarray]

UNKNOWN = "no mistake that is tried explains the numbers"
_MOST_ELEMENTS = 2**17
_OF_ELEMENTS = ("got", "expected", "allowed", "off")
_SHARE = 0.95  # of elements that a mistake must explain
_FAR = 64.0  # times what is allowed of a mistake's values: no element may be beyond
_MEAN = "the rounding error of the mean is left in x - mean: subtract the mean of x - mean too"
_ONE_PASS = (
    "the variance is off by the rounding of mean^2, as in E[x^2] - E[x]^2: subtract the mean first"
)

_NARROW = ("float16", "bfloat16")
_MOST_STEPS = 4096  # of a sum in 16 bits, one after the other
_OTHER_EPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12)


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
        return unwritten or UNKNOWN
    rows = Rows(problem)
    fitted = _fit(rows, judged)
    return (
        best_of(judged, _every_candidate(rows, judged, fitted), _counted(rows, judged))
        or unwritten
        or _nearly_right(judged)
        or _of_roundings(rows, judged, fitted)
        or UNKNOWN
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
    rows = {name: values[at] for name, values in named.items() if values is not None}
    problem = replace(problem, case=replace(problem.case, num_rows=most), **rows)
    return problem, judged._replace(**{name: getattr(judged, name)[at] for name in _OF_ELEMENTS})


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
        name = "the last row" if row == len(terms) - 1 else f"row {row}"
        words = f"{name} counts {count:g} times" if count else f"{name} is not summed"
        yield Candidate(words, judged.expected + (count - 1) * terms[row])
    for sentence, rearranged in rearrangements(judged.got.shape):
        yield Candidate(sentence, rearranged(judged.expected), rearranged(judged.allowed))


# What has no formula.


def _spread_nan(problem: Problem, judged: Judged) -> str:
    """A NaN of x in results of other rows, or missing in those of its own."""
    if judged.got.shape[:1] != problem.x.shape[:1] or judged.tensor in ("dweight", "dbias"):
        return ""
    source = np.flatnonzero(~np.isfinite(problem.x).all(axis=1))
    if not source.size:
        return ""
    axes = tuple(range(1, judged.got.ndim))
    got, expected = np.isnan(judged.got), np.isnan(judged.expected)
    reached = (got & ~expected).all(axis=axes)
    if reached.any() and got[judged.off].mean() >= _SHARE:
        rows = _of_line(reached, "row").rpartition(" ")[0]
        return f"a NaN or infinity of row {source[0]} spreads to {rows}"
    if (~got & expected).all(axis=axes)[source].any():
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
    is_near = (_rest_of(judged, judged.expected) <= 1).all()
    return "errors are below twice what is allowed, as by one rounding too many" if is_near else ""


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


# Usual mistakes: what a tensor would be if one were made, as formulas in float64.


class Rows:
    """The float64 values of a problem: x, dy, w, bias, mean, var, rstd, x_hat, wdy.

    Statistics are columns [num_rows, 1]; mean is that of x in RMSNorm, too.
    """

    def __init__(self, problem: Problem) -> None:
        case = problem.case
        self.problem, self.case, self.centered = problem, case, case.norm == "layer_norm"
        x = problem.x if problem.residual is None else problem.x + problem.residual
        self.x = decode(encode(x, case.sum), case.sum)
        self.n = max(1, case.num_cols)
        self.mean = self.x.mean(axis=1, keepdims=True)
        self.var = ((self.x - self.mean) ** 2).mean(axis=1, keepdims=True)
        self.square = (self.x**2).mean(axis=1, keepdims=True)
        self.spread = self.var if self.centered else self.square
        self.center = self.mean if self.centered else np.zeros_like(self.mean)
        self.rstd = 1 / np.sqrt(self.spread + case.eps)
        self.x_hat = (self.x - self.center) * self.rstd
        self.dy, self.weight = problem.dy, problem.weight
        self.w = np.broadcast_to(scale(problem.weight, case.zero_centered_weight), (self.n,))
        self.bias = np.zeros(self.n) if problem.bias is None else problem.bias
        self.wdy = self.dy * self.w
        self.dsum = 0.0 if problem.dsum is None else problem.dsum


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """values rounded once to a dtype, as float64."""
    return decode(encode(values, dtype), dtype)


def summed_in(terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sums over rows that are rounded after each addition."""
    total = np.zeros(terms.shape[1:])
    for each in terms:
        total = round_to(total + each, dtype)
    return total


def statistics(rows: Rows) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Wrong statistics of the rows: a sentence, the mean and rstd as columns."""
    eps, spread, center, n = rows.case.eps, rows.spread, rows.center, rows.n
    none, rms = np.zeros_like(center), 1 / np.sqrt(rows.square + eps)
    if rows.centered:
        yield "the mean is not subtracted from x", none, rows.rstd
        yield "the mean is not subtracted in the variance", center, rms
        yield "the mean is not subtracted: this is RMSNorm", none, rms
    else:
        of_var = 1 / np.sqrt(rows.var + eps)
        yield "the mean is subtracted: this is LayerNorm", rows.mean, of_var
        yield "the variance stands for the mean square", none, of_var
    rstds = {
        "eps is missing": 1 / np.sqrt(spread),
        "eps is added outside the square root": 1 / (np.sqrt(spread) + eps),
        "the sum of squares is not divided by num_cols": 1 / np.sqrt(spread * n + eps),
        "the square root of the variance is missing: rstd is 1 / var": rows.rstd**2,
        "rstd is the standard deviation, not its reciprocal": 1 / rows.rstd,
        "rstd is 1: x is not divided by the standard deviation": np.ones_like(center),
    }
    for other in _OTHER_EPS:
        if not np.isclose(other, eps, rtol=1e-3, atol=0):
            rstds[f"eps is {other:g}, not {eps:g}"] = 1 / np.sqrt(spread + other)
    if n > 1:
        unbiased = 1 / np.sqrt(spread * (n / (n - 1)) + eps)
        rstds["the variance is divided by num_cols - 1"] = unbiased
    padded = 1 << (n - 1).bit_length()  # as wide as a row is in a block of a power of two
    if padded > n:
        words = f"the variance counts {padded - n} elements beyond the row as (0 - mean)^2: mask "
        beyond = spread + rows.mean**2 * (padded - n) / n
        rstds[words + "x - mean, not x alone"] = 1 / np.sqrt(beyond + eps)
    for sentence, rstd in rstds.items():
        yield sentence, center, rstd
    for dtype in _NARROW:
        if DTYPES[dtype].digits <= DTYPES[rows.case.x].digits:
            rounded = round_to(center, dtype), round_to(rows.rstd, dtype)
            yield f"mean and rstd are rounded to {dtype}", *rounded


def of_statistics(rows: Rows, tensor: str, mean: np.ndarray, rstd: np.ndarray) -> np.ndarray:
    """A tensor with other statistics, and no other mistake. tensor: but for dbias."""
    x_hat = (rows.x - mean) * rstd
    if tensor == "y":
        return x_hat * rows.w + rows.bias
    if tensor == "dweight":
        return (rows.dy * x_hat).sum(axis=0)
    if tensor == "dx":
        return _gradient(rows.wdy, x_hat, rstd, rows.centered) + rows.dsum
    return (mean if tensor == "mean" else rstd)[:, 0]


def candidates(rows: Rows, tensor: str, expected: np.ndarray) -> Iterator[Named]:
    """Each mistake that is tried for a tensor. expected: its right values."""
    if tensor == "y":
        yield from _of_y(rows)
        mean = rows.x.mean(axis=0) * rows.centered
        rstd = 1 / np.sqrt(((rows.x - mean) ** 2).mean(axis=0) + rows.case.eps)
        words = "the statistics are of each column, over the rows"
        yield words, of_statistics(rows, tensor, mean, rstd)
    if tensor == "dx":
        for sentence, dx in _of_dx(rows).items():
            yield sentence, dx + rows.dsum
        if rows.problem.dsum is not None:
            yield "dsum is not added", _gradient(rows.wdy, rows.x_hat, rows.rstd, rows.centered)
    if tensor == "dweight":
        yield from _of_dweight(rows)
        yield from _narrow_sums(rows.dy * rows.x_hat)
    if tensor == "dbias":
        yield "it is dweight: the sum of dy * x_hat", (rows.dy * rows.x_hat).sum(axis=0)
        yield "dy is multiplied by the weight", rows.wdy.sum(axis=0)
        if rows.case.num_rows == rows.n:
            yield "it is summed over columns, not over rows", rows.dy.sum(axis=1)
        yield from _narrow_sums(rows.dy)
    if tensor == "mean":
        yield "it is rstd: mean and rstd are swapped", rows.rstd[:, 0]
        yield "it is the sum: not divided by num_cols", rows.x.sum(axis=1)
    if tensor == "rstd":
        yield "it is the variance", rows.spread[:, 0]
        yield "it is the mean: mean and rstd are swapped", rows.mean[:, 0]
    if tensor in ("y", "dx", "dweight", "mean", "rstd"):
        for sentence, mean, rstd in statistics(rows):
            yield sentence, of_statistics(rows, tensor, mean, rstd)
    for factor, words in ((0.0, "it is 0: not written"), (-1.0, "its sign is wrong")):
        yield words, factor * expected
    for factor in (2.0, 0.5):
        yield f"it is {factor:g} times what it should be", factor * expected
    for name, count in (("num_cols", rows.n), ("num_rows", max(1, rows.case.num_rows))):
        if count > 2:
            yield f"it is {name} times too large", expected * count
            yield f"it is divided by {name}", expected / count


def rearrangements(shape: tuple[int, ...]) -> Iterator[tuple[str, Callable]]:
    """Wrong places of right values: a sentence, and the function of an array of this shape."""
    last = len(shape) - 1
    for axis, name in ((last, "column"), (0, "row"))[: len(shape)]:
        if shape[axis] < 2:
            continue
        for shift, words in ((1, "before"), (-1, "after")):
            yield (
                f"each {name} has the values of the {name} {words} it: an index is off by one",
                partial(np.roll, shift=shift, axis=axis),
            )
    if len(shape) == 2 and 1 not in shape:
        yield "it is transposed", lambda values: values.T.reshape(shape)


def _of_y(rows: Rows) -> Iterator[Named]:
    x_hat, w, bias = rows.x_hat, rows.w, rows.bias
    if rows.problem.weight is not None:
        words, other = _other_centre(rows)
        yield "the weight is missing", x_hat + bias
        yield words, x_hat * other + bias
        yield "the weight multiplies twice", x_hat * w**2 + bias
    if rows.problem.bias is not None:
        yield "the bias is missing", x_hat * w
        yield "the bias is added before the weight multiplies", (x_hat + bias) * w
    for shift, where in ((1, "before"), (-1, "after")):
        words = f"weight and bias are those of the column {where}"
        yield words, x_hat * np.roll(w, shift) + np.roll(bias, shift)


def _other_centre(rows: Rows) -> Named:
    """The weight centred at 1 in the place of 0, or the reverse."""
    if rows.case.zero_centered_weight:
        return "1 is not added to the zero-centred weight", rows.weight
    return "1 is added to a weight that is not zero-centred", 1 + rows.weight


def _mean(values: np.ndarray) -> np.ndarray:
    return values.mean(axis=1, keepdims=True)


def _gradient(wdy: np.ndarray, x_hat: np.ndarray, rstd: np.ndarray, centered: bool) -> np.ndarray:
    return rstd * (wdy - centered * _mean(wdy) - x_hat * _mean(wdy * x_hat))


def _of_dx(rows: Rows) -> dict[str, np.ndarray]:
    """Without dsum."""
    wdy, x_hat, rstd, dy, n, w = rows.wdy, rows.x_hat, rows.rstd, rows.dy, rows.n, rows.w
    c = rows.centered
    of_mean, of_x_hat = _mean(wdy) * c, x_hat * _mean(wdy * x_hat)
    made = {
        "the term x_hat * mean(wdy * x_hat) is missing": wdy - of_mean,
        "the sums are not divided by num_cols": wdy - n * of_mean - n * of_x_hat,
        "rstd is missing": (wdy - of_mean - of_x_hat) / rstd,
        "the mean terms are added, not subtracted": wdy + of_mean + of_x_hat,
        "x stands for x_hat": wdy - of_mean - rows.x * _mean(wdy * rows.x),
    }
    if c:
        made["the term mean(wdy) is missing"] = wdy - of_x_hat
        made["both mean terms are missing"] = wdy
    else:
        made["mean(wdy) is subtracted, as in LayerNorm"] = wdy - _mean(wdy) - of_x_hat
    if rows.problem.weight is not None:
        means = _mean(dy) * c + x_hat * _mean(dy * x_hat)
        made["dy is not multiplied by the weight"] = dy - means
        made["the means are those of dy, not of wdy = dy * weight"] = wdy - means
        words, other = _other_centre(rows)
        for sentence, g in ((words, dy * other), ("the weight multiplies twice", wdy * w)):
            made[sentence] = _gradient(g, x_hat, rstd, c) / rstd
        for first, second, name in (
            (w, 1, "the term mean(wdy)"),
            (1, w, "the term x_hat * mean(wdy * x_hat)"),
            (w, w, "both mean terms"),
        ):
            sentence = f"the weight stands twice in {name}"
            made[sentence] = wdy - first * of_mean - second * of_x_hat
    return {sentence: rstd * values for sentence, values in made.items()}


def _of_dweight(rows: Rows) -> Iterator[Named]:
    dy = rows.dy
    yield "it is dbias: the sum of dy", dy.sum(axis=0)
    yield "x stands for x_hat", (dy * rows.x).sum(axis=0)
    yield "dy is multiplied by the weight", (rows.wdy * rows.x_hat).sum(axis=0)
    if rows.centered:
        yield "x is not multiplied by rstd", (dy * (rows.x - rows.mean)).sum(axis=0)


def _narrow_sums(terms: np.ndarray) -> Iterator[Named]:
    for dtype in _NARROW if len(terms) <= _MOST_STEPS else ():
        for each in (terms, round_to(terms, dtype)):
            yield f"it is accumulated in {dtype}", summed_in(each, dtype)


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
