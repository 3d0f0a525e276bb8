"""What y, mean and rstd are right for, and what is wrong with that: of rows, columns, and groups.

Of rows. y = (factor * x_hat + shift) * weight + bias is fitted to each. The row is then right for

    rstd' = factor * rstd        mean' = mean - shift / rstd'        var' = 1 / rstd'^2 - eps

Of columns, the weight and bias are fitted; of groups of columns, a factor and a shift for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, compute_dtype
from .judged import SHARE, Candidate, Judged, best_of, explains, rest_of
from .mistakes import Rows, of_statistics, summed_in
from .places import moves, nearest

Maker = Callable[[str, np.ndarray, np.ndarray], Candidate]  # of a sentence, mean and variance

_MEAN = "the rounding error of the mean is left in x - mean: subtract the mean of x - mean too"
_ONE_PASS = (
    "the variance is off by the rounding of mean^2, as in E[x^2] - E[x]^2: subtract the mean first"
)
_MOST_COLS = 4096  # of rows whose parts are tried
_MOST_ROWS = 2048  # between which the statistics of another are sought
_FEWEST_ROWS, _MOST_FITTED_COLS = 6, 2048  # of columns whose weight and bias are fitted
_FEWEST_IN_GROUP = 4  # columns


def _line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factor and shift of the straight line y = factor * x + shift through each row, as columns."""
    middle = x.mean(axis=1, keepdims=True)
    lever = x - middle
    factor = (y * lever).sum(axis=1, keepdims=True) / (lever**2).sum(axis=1, keepdims=True)
    return factor, y.mean(axis=1, keepdims=True) - factor * middle


def _without_affine(rows: Rows, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The x_hat that y would come from, and the columns whose weight is large enough to tell."""
    use = np.abs(rows.w) > 0.1 * np.median(np.abs(rows.w))
    return (y - rows.bias) / np.where(use, rows.w, 1), use


class Fitted(NamedTuple):
    """Of each row: the factor of rstd, and the shift of x_hat."""

    factor: np.ndarray
    shift: np.ndarray


def fit(rows: Rows, judged: Judged) -> Fitted | None:
    """y, dx or rstd fitted row by row. None: they do not fit."""
    got = judged.got
    if judged.tensor == "rstd":
        return Fitted(got / rows.rstd[:, 0], np.zeros(len(got)))
    x_hat, shift = rows.x_hat, np.zeros(len(got))
    if judged.tensor == "y":
        z, use = _without_affine(rows, got)
        if not use.any():
            return None
        z, base = z[:, use], x_hat[:, use]
        if rows.centered:
            factor, shift = (each[:, 0] for each in _line(base, z))
        else:
            factor = (z * base).sum(axis=1) / (base**2).sum(axis=1)
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
    rest = rest_of(judged, fitted)
    fits = (rest <= 4) | np.isnan(got) | np.isnan(x_hat)
    return Fitted(factor, shift) if fits[judged.off].mean() >= SHARE else None


def of_roundings(rows: Rows, judged: Judged) -> str:
    """A rounded mean or E[x^2] - E[x]^2: rows of large mean are off by a shift or a factor."""
    fitted = fit(rows, judged)
    if fitted is None or not rows.centered:
        return ""
    factor, shift = fitted
    off = judged.off if judged.off.ndim == 1 else judged.off.any(axis=1)
    spread, mean = rows.spread[:, 0], rows.mean[:, 0]
    u = 4 * (4 + np.sqrt(rows.n)) * compute_dtype(rows.case.sum).half_ulp
    rounding = u * np.abs(mean) * rows.rstd[:, 0]
    shifted = (np.abs(shift) <= rounding) & (np.abs(factor - 1) < np.abs(shift) / 4)
    if shifted[off].mean() >= SHARE:
        return _MEAN
    implied = 1 / (factor * rows.rstd[:, 0]) ** 2 - rows.case.eps
    rounding = u * mean**2
    explained = np.where(np.isfinite(implied), np.abs(implied - spread), spread) <= rounding
    explained &= mean**2 > 100 * spread  # it is small in other rows
    return _ONE_PASS if explained[off].mean() >= SHARE else ""


def of_rows(rows: Rows, judged: Judged, counted: np.ndarray) -> str:
    """What mean and rstd each row was given, or "" if no mean and rstd explain the numbers."""
    implied = _implied(rows, judged)
    if implied is None:
        return ""
    known = best_of(judged, _explanations(rows, judged, *implied), counted)
    return known or _of_16_bits(rows, *implied) or _which(rows, *implied)


def _implied(rows: Rows, judged: Judged) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and rstd of each row as columns; of mean and rstd themselves, the other one is right."""
    if judged.tensor == "mean":
        return judged.got[:, None], rows.rstd
    fitted = fit(rows, judged) if judged.tensor in ("y", "rstd") else None
    if fitted is None:
        return None
    rstd = fitted.factor[:, None] * rows.rstd
    return rows.center - fitted.shift[:, None] / rstd, rstd


def _explanations(
    rows: Rows, judged: Judged, mean: np.ndarray, rstd: np.ndarray
) -> Iterator[Candidate]:
    """mean, rstd: of each row, by which it is right."""

    def of(sentence: str, wrong_mean: np.ndarray, wrong_spread: np.ndarray) -> Candidate:
        wrong_rstd = 1 / np.sqrt(wrong_spread + rows.case.eps)
        return Candidate(sentence, of_statistics(rows, judged.tensor, wrong_mean, wrong_rstd))

    spread = 1 / rstd**2 - rows.case.eps
    plain = np.isfinite(spread) & (rows.spread > 100 * abs(rows.case.eps))
    plain &= rows.mean**2 <= 100 * rows.var
    if not plain.any():
        return
    yield from _of_divisors(rows, of, mean, spread, plain)
    if len(mean) <= _MOST_ROWS:
        yield from _of_other_rows(rows, of, mean, rstd)
    if 8 <= rows.n <= _MOST_COLS:
        yield from _of_parts(rows, of, mean, spread, plain[:, 0])


def _of_divisors(
    rows: Rows, of: Maker, mean: np.ndarray, spread: np.ndarray, plain: np.ndarray
) -> Iterator[Candidate]:
    """A mean and a variance that are off by one factor, or by elements beyond the row."""
    n, right = rows.n, rows.spread
    ratio = float(np.median((spread / right)[plain]))
    if ratio > 0:
        squares = "squares of x - mean" if rows.centered else "squares"
        count = float(np.rint(n / ratio))
        if count > 0:
            words = f"the sum of {squares} is divided by {count:g}, not by {n} columns"
            yield of(words, rows.center, right * n / count)
        words = f"the variance is {ratio:.3g} times what it should be"
        yield of(words, rows.center, right * ratio)
    far = plain & (rows.mean**2 > 0.1 * rows.var)
    if not (rows.centered and far.any()):
        return
    times = float(np.median((mean / rows.mean)[far]))
    yield of(f"the mean is {times:.3g} times what it should be", rows.mean * times, right)
    count = float(np.rint(n / times)) if times > 0 else 0.0
    if count > 0:
        fitted = rows.mean * n / count
        yield of(f"the sum of x is divided by {count:g}, not by {n} columns", fitted, right)
        squares = right + (rows.mean - fitted) ** 2
        words = f"the sums over the {n} columns are divided by {count:g}"
        yield of(words, fitted, squares * n / count)
    beyond = float(np.rint(np.median(((spread - right) * n / rows.mean**2)[far])))
    if beyond > 0:
        words = f"the variance counts {beyond:g} elements beyond the row as (0 - mean)^2: "
        words += "mask x - mean, not x alone"
        yield of(words, rows.mean, right + beyond / n * rows.mean**2)


def _of_other_rows(
    rows: Rows, of: Maker, mean: np.ndarray, rstd: np.ndarray
) -> Iterator[Candidate]:
    """Statistics of another row."""
    size = np.nanmedian(rows.rstd)  # so that both keys are of size 1
    keys = np.stack([mean[:, 0] * size, np.log(rstd[:, 0])])
    known = np.stack([rows.center[:, 0] * size, np.log(rows.rstd[:, 0])])
    kinds = ("mean and rstd", "mean", "rstd") if rows.centered else ("rstd",)
    for which in ([0, 1], [0], [1]):
        places = nearest(keys[which], known[which])
        for what in kinds:  # one of the keys may be blurred by roundings
            for words, source in moves(places, "row", what):
                of_mean = rows.center if what == "rstd" else rows.center[source]
                of_spread = rows.spread if what == "mean" else rows.spread[source]
                yield of(words, of_mean, of_spread)


def _of_parts(
    rows: Rows, of: Maker, mean: np.ndarray, spread: np.ndarray, plain: np.ndarray
) -> Iterator[Candidate]:
    """Statistics of some of the columns: the first, the last, or every second, 4th or 8th."""
    n, use = rows.n, np.flatnonzero(plain)[:64]
    for step in (1, -1, 2, 4, 8):
        x = (rows.x - rows.mean)[:, ::step]
        counts = np.arange(1, x.shape[1] + 1) if abs(step) == 1 else np.array([x.shape[1]])
        sums, squares = (np.cumsum(each, axis=1)[:, counts - 1] for each in (x, x**2))
        right = np.zeros_like(sums) if rows.centered else np.broadcast_to(-rows.mean, sums.shape)
        of_parts, of_all = sums / counts, (sums + counts * rows.mean) / n - rows.mean
        # Each: the shift of the mean, and the columns in the sum of squares, over its divisor.
        tried = {
            "mean and rstd are those of {}": (of_parts, counts, counts),
            f"the sums have only {{}}, and are divided by {n}": (of_all, counts, n),
            "the sum of squares has only {}": (right, counts, n),
        }
        for sentence, (shift, summed, divisor) in tried.items():
            if not rows.centered:
                shift = right
            fitted = (squares - 2 * shift * sums + summed * shift**2) / divisor
            far = np.abs(np.log(fitted[use] / spread[use]))
            far += np.abs(rows.mean + shift - mean)[use] * rows.rstd[use]
            at = int(np.argmin(np.nan_to_num(far, nan=1e9).mean(axis=0)))
            if counts[at] < n:
                words = sentence.format(_which_columns(step, int(counts[at]), n))
                yield of(words, rows.mean + shift[:, at : at + 1], fitted[:, at : at + 1])
        if abs(step) == 1:  # those that lanes beyond the end of the row read
            whole = rows.spread + squares / n
            far = np.abs(np.log(whole[use] / spread[use])).mean(axis=0)
            at = int(np.argmin(np.nan_to_num(far, nan=1e9)))
            end = "first" if step == 1 else "last"
            words = f"the sum of squares counts the {end} {_columns(at + 1)} twice"
            yield of(words, rows.center, whole[:, at : at + 1])


def _which_columns(step: int, count: int, n: int) -> str:
    if step > 1:
        return f"every {'second' if step == 2 else f'{step}th'} column"
    return f"the {'first' if step == 1 else 'last'} {count} of {n} columns"


def _columns(count: int) -> str:
    return "column" if count == 1 else f"{count} columns"


def _of_16_bits(rows: Rows, mean: np.ndarray, rstd: np.ndarray) -> str:
    """Errors of the size that a sum in 16 bits makes: between one rounding and those of a loop."""
    if rows.n > 4096 or not rows.centered:
        return ""
    u_wide = compute_dtype(rows.case.sum).half_ulp
    off_mean = np.abs(mean - rows.center) * rows.rstd
    off_rstd = np.abs(rstd / rows.rstd - 1)
    error = np.maximum(off_mean, off_rstd)[:, 0]
    for dtype in ("float16", "bfloat16"):
        u = DTYPES[dtype].half_ulp
        if u <= 4 * u_wide:
            continue
        loop = np.abs(summed_in(rows.x, dtype, 1) / rows.n - rows.mean)
        largest = 4 * (loop * rows.rstd)[:, 0] + 8 * u * (1 + np.abs(rows.mean) * rows.rstd)[:, 0]
        usable = np.isfinite(error) & np.isfinite(largest)
        if not usable.any():
            continue
        within = (error <= largest) & (error >= u / 64)
        # Roundings have no sign: neither mean nor rstd is off in one direction alone.
        signs = [np.sign(mean - rows.center)[usable], np.sign(rstd - rows.rstd)[usable]]
        fair = all(abs(each.mean()) < 0.75 for each in signs if np.abs(each).mean() > 0.5)
        if within[usable].mean() >= 0.75 and fair:
            return (
                "mean or rstd of rows have errors of 16-bit arithmetic: accumulate them in float32"
            )
    return ""


def _which(rows: Rows, mean: np.ndarray, rstd: np.ndarray) -> str:
    """Whether the mean, rstd or both are wrong, and by how much."""
    u = compute_dtype(rows.case.sum).half_ulp
    plain = np.isfinite(rstd) & np.isfinite(mean) & (rows.mean**2 <= 100 * rows.var)
    if not plain.any():
        return ""
    factor, shift = (rstd / rows.rstd)[plain], (np.abs(mean - rows.center) * rows.rstd)[plain]
    small = max(64 * u, 2 * DTYPES[rows.case.x].half_ulp / np.sqrt(rows.n))
    if np.median(shift) <= small and np.median(np.abs(factor - 1)) <= small:
        return ""
    of_rstd = f"a factor of {factor.min():.4g} to {factor.max():.4g}"
    of_mean = f"up to {shift.max():.2g} standard deviations"
    if not rows.centered:
        return f"rstd is wrong, by {of_rstd}"
    if np.median(shift) <= small:
        return f"rstd is wrong, by {of_rstd}; the mean is right"
    if np.median(np.abs(factor - 1)) <= small:
        return f"the mean is wrong, by {of_mean}; rstd is right"
    return f"mean and rstd are wrong: the mean by {of_mean}, rstd by {of_rstd}"


def of_columns(rows: Rows, judged: Judged, counted: np.ndarray) -> str:
    """Which weight and bias each column was given, or "" if none explains the numbers."""
    plain = counted.all(axis=1) & np.isfinite(judged.got).all(axis=1) if counted.ndim == 2 else []
    if judged.tensor != "y" or rows.problem.weight is None or np.sum(plain) < _FEWEST_ROWS:
        return ""
    weight, bias = (each[:, 0] for each in _line(rows.x_hat[plain].T, judged.got[plain].T))
    if not explains(judged, rows.x_hat * weight + bias, counted, 2.0):
        return ""
    known = best_of(judged, _moved_columns(rows, judged, weight, bias), counted)
    if known:
        return known
    of_weight, of_bias = rows.x_hat * weight + rows.bias, rows.x_hat * rows.w + bias
    for values, words in ((of_weight, "weight"), (of_bias, "bias")):
        if explains(judged, values, counted):
            return f"each column is right for another {words}: is its index the column?"
    return "each column is right for another weight and bias: are their indices the column?"


def _moved_columns(
    rows: Rows, judged: Judged, weight: np.ndarray, bias: np.ndarray
) -> Iterator[Candidate]:
    if rows.n > _MOST_FITTED_COLS:
        return
    parameters = {"weight": (weight, rows.w), "bias": (bias, rows.bias)}
    has_bias = rows.problem.bias is not None
    for names in (("weight",), ("bias",), ("weight", "bias"))[: 3 if has_bias else 1]:
        fitted, right = (np.stack(each) for each in zip(*(parameters[name] for name in names)))
        for words, source in moves(nearest(fitted, right), "column", " and ".join(names)):
            w = rows.w[source] if "weight" in names else rows.w
            b = rows.bias[source] if "bias" in names else rows.bias
            yield Candidate(words, rows.x_hat * w + b)


def of_groups(rows: Rows, judged: Judged, counted: np.ndarray) -> str:
    """Whether groups of columns have a mean and rstd each, or ""."""
    if judged.tensor != "y":
        return ""
    z, use = _without_affine(rows, judged.got)
    tried = [(np.zeros(rows.n, int), ""), *_groups(rows.n)]
    for group, sentence in sorted(tried, key=lambda each: each[0].max()):
        if np.bincount(group[use], minlength=group.max() + 1).min() < _FEWEST_IN_GROUP:
            continue
        fitted = np.zeros_like(z)
        for at in range(group.max() + 1):
            own, here = group == at, (group == at) & use
            factor, shift = _line(rows.x_hat[:, here], z[:, here])
            fitted[:, own] = factor * rows.x_hat[:, own] + shift
        values = fitted * rows.w + rows.bias
        if not sentence and (rest_of(judged, values)[counted] <= 1).mean() > 0.8:
            return ""  # most rows have one mean and rstd
        if sentence and explains(judged, values, counted):
            return sentence
    return ""


def _groups(n: int) -> Iterator[tuple[np.ndarray, str]]:
    """Groups of columns: the number of each column's group, and the sentence."""
    at = np.arange(n)
    for size in 2 ** np.arange(3, 16):
        if size < n:
            words = f"each {size} columns have a mean and rstd of their own: "
            yield at // size, words + "sums of threads or warps are not added up"
    packs = {1: "columns", 2: "pairs of columns", 4: "packs of 4", 8: "packs of 8"}
    for pack, what in packs.items():
        for count in (2, 4, 8, 16, 32):
            if pack * count < n:
                words = f"{count} neighbouring {what} differ in mean and rstd: "
                yield at // pack % count, words + "a step of the sum over lanes is missing"
