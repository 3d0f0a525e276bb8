"""What a tensor would be if a usual mistake were made: wrong formulas in float64.

A sentence and the values of each. They are compared with a wrong result in diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, decode, encode
from ..reference.layer_norm import scale
from .bounds import half_ulp
from .cases import Problem

Named = tuple[str, np.ndarray]

_NARROW = ("float16", "bfloat16", "float32")
_MOST_STEPS = 4096  # of a sum in 16 bits, one after the other
_OTHER_EPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12)


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


class Statistics(NamedTuple):
    """A wrong mean and rstd, as columns."""

    sentence: str
    mean: np.ndarray
    rstd: np.ndarray


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """values rounded once to a dtype, as float64."""
    return decode(encode(values, dtype), dtype)


def cut_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded toward 0."""
    rounded = round_to(values, dtype)
    step = 2 * half_ulp(2.0 ** np.floor(np.log2(np.abs(values))), dtype)
    return np.where(np.abs(rounded) > np.abs(values), rounded - np.sign(values) * step, rounded)


def summed_in(values: np.ndarray, dtype: str, axis: int) -> np.ndarray:
    """Sums that are rounded after each addition, kept as an axis of extent 1."""
    values = np.moveaxis(values, axis, 0)
    total = np.zeros(values.shape[1:])
    for each in values:
        total = round_to(total + each, dtype)
    return np.expand_dims(total, axis)


def statistics(rows: Rows) -> Iterator[Statistics]:
    """Wrong statistics of the rows."""
    eps, spread, center, n = rows.case.eps, rows.spread, rows.center, rows.n
    none = np.zeros_like(center)
    if rows.centered:
        yield Statistics("the mean is not subtracted from x", none, rows.rstd)
        rms = 1 / np.sqrt(rows.square + eps)
        yield Statistics("the mean is not subtracted in the variance", center, rms)
        yield Statistics("the mean is not subtracted: this is RMSNorm", none, rms)
    else:
        of_var = 1 / np.sqrt(rows.var + eps)
        yield Statistics("the mean is subtracted: this is LayerNorm", rows.mean, of_var)
        yield Statistics("the variance stands for the mean square", none, of_var)

    def of(sentence: str, rstd: np.ndarray) -> Statistics:
        return Statistics(sentence, center, rstd)

    yield of("eps is missing", 1 / np.sqrt(spread))
    yield of("eps is added outside the square root", 1 / (np.sqrt(spread) + eps))
    for other in _OTHER_EPS:
        if not np.isclose(other, eps, rtol=1e-3, atol=0):
            yield of(f"eps is {other:g}, not {eps:g}", 1 / np.sqrt(spread + other))
    yield of("eps is squared", 1 / np.sqrt(spread + eps**2))
    yield of("eps is subtracted", 1 / np.sqrt(spread - eps))
    yield of("eps is added to 1 / sqrt(var), outside the square root", 1 / np.sqrt(spread) + eps)
    larger = 1 / np.sqrt(np.maximum(spread, eps))
    yield of("the larger of var and eps is taken, not var + eps", larger)
    if n > 1:
        unbiased = 1 / np.sqrt(spread * (n / (n - 1)) + eps)
        yield of("the variance is divided by num_cols - 1", unbiased)
    padded = 1 << (n - 1).bit_length()
    if padded > n:
        words = f"the sum of squares is divided by {padded}, not by {n} columns"
        yield of(words, 1 / np.sqrt(spread * n / padded + eps))
    if padded > n and rows.centered:
        beyond = 1 / np.sqrt(spread + rows.mean**2 * (padded - n) / n + eps)
        words = f"the variance counts {padded - n} elements beyond the row as (0 - mean)^2: mask "
        yield of(words + "x - mean, not x alone", beyond)
    yield of("the sum of squares is not divided by num_cols", 1 / np.sqrt(spread * n + eps))
    yield of("the square root of the variance is missing: rstd is 1 / var", rows.rstd**2)
    yield of("rstd is the standard deviation, not its reciprocal", 1 / rows.rstd)
    yield of("rstd is 1: x is not divided by the standard deviation", np.ones_like(center))
    if rows.centered:
        yield Statistics("mean and rstd are swapped", rows.rstd, rows.mean)
        absolute = np.abs(rows.x - rows.mean).mean(axis=1, keepdims=True)
        words = "the mean of |x - mean| stands for the standard deviation"
        yield of(words, 1 / (absolute + eps))
        rest = np.sqrt(np.maximum(rows.square - rows.mean, 0) + eps)
        yield of("the mean is not squared in E[x^2] - E[x]^2", 1 / rest)
    for dtype in _NARROW[:2]:
        if DTYPES[dtype].digits <= DTYPES[rows.case.x].digits and n <= _MOST_STEPS:
            yield from _narrow_statistics(rows, dtype)


def _narrow_statistics(rows: Rows, dtype: str) -> Iterator[Statistics]:
    eps, n = rows.case.eps, rows.n
    mean, rstd = round_to(rows.center, dtype), round_to(rows.rstd, dtype)
    yield Statistics(f"mean and rstd are rounded to {dtype}", mean, rstd)
    mean = rows.center
    if rows.centered:
        mean = round_to(summed_in(round_to(rows.x, dtype), dtype, 1) / n, dtype)
    square = round_to(summed_in(round_to((rows.x - mean) ** 2, dtype), dtype, 1) / n, dtype)
    yield Statistics(f"the statistics are accumulated in {dtype}", mean, 1 / np.sqrt(square + eps))


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
    makers = {"y": _of_y, "dx": _of_dx, "dweight": _of_dweight, "dbias": _of_dbias}
    if tensor in makers:
        yield from makers[tensor](rows)
    if tensor == "mean":
        yield "it is rstd: mean and rstd are swapped", rows.rstd[:, 0]
        yield "it is the sum: not divided by num_cols", rows.x.sum(axis=1)
    if tensor == "rstd" and rows.centered:
        yield "it is the mean: mean and rstd are swapped", rows.mean[:, 0]
    if tensor == "rstd":
        yield "it is the variance", rows.spread[:, 0]
    if tensor in ("y", "dx", "dweight", "mean", "rstd"):
        of_other_axes = _wrong_axes(rows) if tensor == "y" else ()
        for sentence, mean, rstd in (*statistics(rows), *of_other_axes):
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
        yield f"the {name}s are in reverse order", partial(np.flip, axis=axis)
        even = shape[axis] // 2 * 2
        order = np.arange(shape[axis])
        order[:even] = order[:even].reshape(-1, 2)[:, ::-1].reshape(-1)
        yield f"neighbouring {name}s are swapped", partial(np.take, indices=order, axis=axis)
    if len(shape) == 2 and 1 not in shape:
        yield "it is transposed", lambda values: values.T.reshape(shape)


def _of_y(rows: Rows) -> Iterator[Named]:
    x_hat, w, bias = rows.x_hat, rows.w, rows.bias
    if rows.problem.weight is not None:
        yield "the weight is missing", x_hat + bias
        words, other = _other_centre(rows)
        yield words, x_hat * other + bias
        yield "the weight multiplies twice", x_hat * w**2 + bias
        yield "the weight divides", x_hat / w + bias
        yield "the weight is that of the row, weight[row]", x_hat * _by_row(rows, w) + bias
    if rows.problem.bias is not None:
        yield "the bias is missing", x_hat * w
        yield "the bias is subtracted", x_hat * w - bias
        yield "the bias is added twice", x_hat * w + 2 * bias
        yield "the bias is added before the weight multiplies", (x_hat + bias) * w
        if rows.problem.weight is not None:
            yield "weight and bias are missing", x_hat
            yield "weight and bias are swapped", x_hat * bias + rows.weight
            of_row = x_hat * _by_row(rows, w) + _by_row(rows, bias)
            yield "weight and bias are those of the row, weight[row] and bias[row]", of_row
    for shift, where in ((1, "before"), (-1, "after")):
        other_w, other_bias = np.roll(w, shift), np.roll(bias, shift)
        if rows.problem.weight is not None:
            yield f"the weight is that of the column {where}", x_hat * other_w + bias
        if rows.problem.bias is not None:
            yield f"the bias is that of the column {where}", x_hat * w + other_bias
        if rows.problem.weight is not None and rows.problem.bias is not None:
            both = x_hat * other_w + other_bias
            yield f"weight and bias are those of the column {where}", both
    if rows.centered:
        yield (
            "x * rstd - mean stands for (x - mean) * rstd",
            (rows.x * rows.rstd - rows.mean) * w + bias,
        )
    right = x_hat * w + bias
    yield "negative values are 0, as after a ReLU", np.maximum(right, 0)
    for dtype in _NARROW[:2]:
        if DTYPES[dtype].digits <= DTYPES[rows.case.dtype("y")].digits:
            yield f"x_hat is rounded to {dtype}", round_to(x_hat, dtype) * w + bias


def _other_centre(rows: Rows) -> Named:
    """The weight centred at 1 in the place of 0, or the reverse."""
    if rows.case.zero_centered_weight:
        return "1 is not added to the zero-centred weight", rows.weight
    return "1 is added to a weight that is not zero-centred", 1 + rows.weight


def _by_row(rows: Rows, values: np.ndarray) -> np.ndarray:
    """A parameter that is indexed by the row, as a column."""
    return values[np.arange(len(rows.x)) % rows.n][:, None]


def _wrong_axes(rows: Rows) -> Iterator[Statistics]:
    """Statistics of columns, or of all of x."""
    for axis, words in ((0, "each column, over the rows"), (None, "the whole tensor, not of rows")):
        mean = rows.x.mean(axis=axis, keepdims=True) * rows.centered
        square = ((rows.x - mean) ** 2).mean(axis=axis, keepdims=True)
        what = "mean and rstd are" if rows.centered else "rstd is"
        yield Statistics(f"{what} of {words}", mean, 1 / np.sqrt(square + rows.case.eps))


def _gradient(wdy: np.ndarray, x_hat: np.ndarray, rstd: np.ndarray, centered: bool) -> np.ndarray:
    of_x_hat = x_hat * (wdy * x_hat).mean(axis=1, keepdims=True)
    return rstd * (wdy - centered * wdy.mean(axis=1, keepdims=True) - of_x_hat)


def _of_dx(rows: Rows) -> Iterator[Named]:
    for sentence, dx in _of_plain_dx(rows):
        yield sentence, dx + rows.dsum
    if rows.problem.dsum is not None:
        yield "dsum is not added", _gradient(rows.wdy, rows.x_hat, rows.rstd, rows.centered)


def _of_plain_dx(rows: Rows) -> Iterator[Named]:
    wdy, x_hat, rstd, dy, n = rows.wdy, rows.x_hat, rows.rstd, rows.dy, rows.n
    of_mean = wdy.mean(axis=1, keepdims=True) * rows.centered
    sum_x_hat = (wdy * x_hat).mean(axis=1, keepdims=True)
    of_x_hat = x_hat * sum_x_hat
    if rows.centered:
        yield "the term mean(wdy) is missing", rstd * (wdy - of_x_hat)
        yield "both mean terms are missing", rstd * wdy
    else:
        extra = wdy.mean(axis=1, keepdims=True)
        yield "mean(wdy) is subtracted, as in LayerNorm", rstd * (wdy - extra - of_x_hat)
    yield "the term x_hat * mean(wdy * x_hat) is missing", rstd * (wdy - of_mean)
    if rows.problem.weight is not None:
        twice = _gradient(wdy * rows.w, x_hat, rstd, rows.centered)
        yield "the weight multiplies twice", twice
        one = "the weight multiplies mean(dy), in the place of mean(wdy)"
        yield one, rstd * (wdy - rows.w * dy.mean(axis=1, keepdims=True) * rows.centered - of_x_hat)
        yield "dy is not multiplied by the weight", _gradient(dy, x_hat, rstd, rows.centered)
        means = dy.mean(axis=1, keepdims=True) * rows.centered
        means = means + x_hat * (dy * x_hat).mean(axis=1, keepdims=True)
        yield "the means are those of dy, not of wdy = dy * weight", rstd * (wdy - means)
        words, other = _other_centre(rows)
        yield words, _gradient(dy * other, x_hat, rstd, rows.centered)
        for shift, where in ((1, "before"), (-1, "after")):
            shifted = dy * np.roll(rows.w, shift)
            dx = _gradient(shifted, x_hat, rstd, rows.centered)
            yield f"the weight is that of the column {where}", dx
        # The weight stands twice in one of the terms, or in both.
        for factors, name in (
            ((rows.w, 1), "mean(wdy)"),
            ((1, rows.w), "x_hat * mean(wdy * x_hat)"),
            ((rows.w, rows.w), "both mean terms"),
        ):
            if rows.centered or factors[0] is not rows.w:
                outside = rstd * (wdy - factors[0] * of_mean - factors[1] * of_x_hat)
                inner = [(wdy * factor).mean(axis=1, keepdims=True) for factor in factors[:1]]
                inner.append((wdy * factors[1] * x_hat).mean(axis=1, keepdims=True))
                inside = rstd * (wdy - rows.centered * inner[0] - x_hat * inner[1])
                what = name if name.startswith("both") else f"the term {name}"
                yield f"the weight stands twice in {what}: it multiplies the mean too", outside
                yield f"the weight stands twice in {what}: it is squared in the mean", inside
    both = "the sums are not divided by num_cols"
    yield both, rstd * (wdy - n * of_mean - n * of_x_hat)
    one = "the sum of wdy * x_hat is not divided by num_cols"
    yield one, rstd * (wdy - of_mean - n * of_x_hat)
    if rows.centered:
        one = "the sum of wdy is not divided by num_cols"
        yield one, rstd * (wdy - n * of_mean - of_x_hat)
    right = wdy - of_mean - of_x_hat
    yield "rstd is missing", right
    yield "rstd is squared", rstd**2 * right
    yield "the mean terms are added, not subtracted", rstd * (wdy + of_mean + of_x_hat)
    over_rows = rows.centered * wdy.mean(axis=0) + x_hat * (wdy * x_hat).mean(axis=0)
    yield "the means are over the rows, not over the columns", rstd * (wdy - over_rows)
    others = {"y": x_hat * rows.w + rows.bias, "x_hat * weight": x_hat * rows.w, "x": rows.x}
    if rows.centered:
        others["x - mean"] = rows.x - rows.mean
    for name, other in others.items():
        inner = wdy - of_mean - other * (wdy * other).mean(axis=1, keepdims=True)
        yield f"{name} stands for x_hat", rstd * inner
    in_place = "x stands for x_hat in x_hat * mean(wdy * x_hat)"
    yield in_place, rstd * (wdy - of_mean - rows.x * sum_x_hat)
    no_mean = "x_hat lacks its factor x_hat in x_hat * mean(wdy * x_hat)"
    yield no_mean, rstd * (wdy - of_mean - sum_x_hat)


def _of_dweight(rows: Rows) -> Iterator[Named]:
    terms = rows.dy * rows.x_hat
    yield "it is dbias: the sum of dy", rows.dy.sum(axis=0)
    yield "x stands for x_hat", (rows.dy * rows.x).sum(axis=0)
    if rows.centered:
        yield "x is not multiplied by rstd", (rows.dy * (rows.x - rows.mean)).sum(axis=0)
    yield "y stands for x_hat", (rows.dy * (rows.x_hat * rows.w + rows.bias)).sum(axis=0)
    yield "dy is multiplied by the weight", (terms * rows.w).sum(axis=0)
    yield from _sums(terms)


def _of_dbias(rows: Rows) -> Iterator[Named]:
    dx = _gradient(rows.wdy, rows.x_hat, rows.rstd, rows.centered)
    yield "it is the sum of dx, not of dy", dx.sum(axis=0)
    yield "it is dweight: the sum of dy * x_hat", (rows.dy * rows.x_hat).sum(axis=0)
    yield "dy is multiplied by the weight", rows.wdy.sum(axis=0)
    if rows.case.num_rows == rows.n:
        yield "it is summed over columns, not over rows", rows.dy.sum(axis=1)
    yield from _sums(rows.dy)


def _sums(terms: np.ndarray) -> Iterator[Named]:
    """Wrong sums over rows."""
    total = terms.sum(axis=0)
    if len(terms) > 1:
        for row in (len(terms) - 1, 0):
            name = "last" if row else "first"
            yield f"the {name} row is not summed", total - terms[row]
        yield "only the first row is summed", terms[0]
        yield "only the last row is summed", terms[-1]
    for dtype in _NARROW[:2] if len(terms) <= _MOST_STEPS else ():
        for each in (terms, round_to(terms, dtype)):
            yield f"it is accumulated in {dtype}", summed_in(each, dtype, 0)[0]
