"""What a tensor would be if a usual mistake were made: wrong formulas in float64.

A sentence and the values of each. They are compared with a wrong result in diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..dtypes import DTYPES, decode, encode
from ..reference.layer_norm import scale
from .bounds import half_ulp
from .cases import Problem

Named = tuple[str, np.ndarray]

_NARROW = ("float16", "bfloat16")
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


def statistics(rows: Rows) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Wrong statistics of the rows: a sentence, the mean and rstd as columns."""
    eps, spread, center, n = rows.case.eps, rows.spread, rows.center, rows.n
    none, rms = np.zeros_like(center), 1 / np.sqrt(rows.square + eps)
    if rows.centered:
        yield "the mean is not subtracted from x", none, rows.rstd
        yield "the mean is not subtracted in the variance", center, rms
        yield "the mean is not subtracted: this is RMSNorm", none, rms
        yield "mean and rstd are swapped", rows.rstd, rows.mean
    else:
        of_var = 1 / np.sqrt(rows.var + eps)
        yield "the mean is subtracted: this is LayerNorm", rows.mean, of_var
        yield "the variance stands for the mean square", none, of_var
    rstds = {
        "eps is missing": 1 / np.sqrt(spread),
        "eps is added outside the square root": 1 / (np.sqrt(spread) + eps),
        "eps is squared": 1 / np.sqrt(spread + eps**2),
        "eps is subtracted": 1 / np.sqrt(spread - eps),
        "eps is added to 1 / sqrt(var), outside the square root": 1 / np.sqrt(spread) + eps,
        "the larger of var and eps is taken, not var + eps": 1 / np.sqrt(np.maximum(spread, eps)),
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
        words = f"the sum of squares is divided by {padded}, not by {n} columns"
        rstds[words] = 1 / np.sqrt(spread * n / padded + eps)
        words = f"the variance counts {padded - n} elements beyond the row as (0 - mean)^2: mask "
        beyond = spread + rows.mean**2 * (padded - n) / n
        rstds[words + "x - mean, not x alone"] = 1 / np.sqrt(beyond + eps)
    if rows.centered:
        absolute = np.abs(rows.x - rows.mean).mean(axis=1, keepdims=True)
        rstds["the mean of |x - mean| stands for the standard deviation"] = 1 / (absolute + eps)
        rest = np.sqrt(np.maximum(rows.square - rows.mean, 0) + eps)
        rstds["the mean is not squared in E[x^2] - E[x]^2"] = 1 / rest
    for sentence, rstd in rstds.items():
        yield sentence, center, rstd
    for dtype in _NARROW:
        if DTYPES[dtype].digits > DTYPES[rows.case.x].digits or n > _MOST_STEPS:
            continue
        rounded = round_to(center, dtype), round_to(rows.rstd, dtype)
        yield f"mean and rstd are rounded to {dtype}", *rounded
        mean = center
        if rows.centered:
            mean = round_to(summed_in(round_to(rows.x, dtype), dtype, 1) / n, dtype)
        squares = summed_in(round_to((rows.x - mean) ** 2, dtype), dtype, 1)
        rstd = 1 / np.sqrt(round_to(squares / n, dtype) + eps)
        yield f"the statistics are accumulated in {dtype}", mean, rstd


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
        yield from _of_y(rows).items()
        for axis, words in (
            (0, "each column, over the rows"),
            (None, "the whole tensor, not of rows"),
        ):
            mean = rows.x.mean(axis=axis, keepdims=True) * rows.centered
            square = ((rows.x - mean) ** 2).mean(axis=axis, keepdims=True)
            what = "mean and rstd are" if rows.centered else "rstd is"
            rstd = 1 / np.sqrt(square + rows.case.eps)
            yield f"{what} of {words}", of_statistics(rows, tensor, mean, rstd)
    if tensor == "dx":
        for sentence, dx in _of_dx(rows).items():
            yield sentence, dx + rows.dsum
        if rows.problem.dsum is not None:
            yield "dsum is not added", _gradient(rows.wdy, rows.x_hat, rows.rstd, rows.centered)
    if tensor == "dweight":
        yield from _of_dweight(rows).items()
        yield from _sums(rows.dy * rows.x_hat)
    if tensor == "dbias":
        dx = _gradient(rows.wdy, rows.x_hat, rows.rstd, rows.centered)
        yield "it is the sum of dx, not of dy", dx.sum(axis=0)
        yield "it is dweight: the sum of dy * x_hat", (rows.dy * rows.x_hat).sum(axis=0)
        yield "dy is multiplied by the weight", rows.wdy.sum(axis=0)
        if rows.case.num_rows == rows.n:
            yield "it is summed over columns, not over rows", rows.dy.sum(axis=1)
        yield from _sums(rows.dy)
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
        yield f"the {name}s are in reverse order", partial(np.flip, axis=axis)
        even = shape[axis] // 2 * 2
        order = np.arange(shape[axis])
        order[:even] = order[:even].reshape(-1, 2)[:, ::-1].reshape(-1)
        yield f"neighbouring {name}s are swapped", partial(np.take, indices=order, axis=axis)
    if len(shape) == 2 and 1 not in shape:
        yield "it is transposed", lambda values: values.T.reshape(shape)


def _of_y(rows: Rows) -> dict[str, np.ndarray]:
    x_hat, w, bias = rows.x_hat, rows.w, rows.bias
    has_weight, has_bias = rows.problem.weight is not None, rows.problem.bias is not None
    at = np.arange(len(rows.x)) % rows.n
    of_row, bias_of_row = w[at][:, None], bias[at][:, None]
    made = {"negative values are 0, as after a ReLU": np.maximum(x_hat * w + bias, 0)}
    if has_weight:
        words, other = _other_centre(rows)
        made |= {
            "the weight is missing": x_hat + bias,
            words: x_hat * other + bias,
            "the weight multiplies twice": x_hat * w**2 + bias,
            "the weight divides": x_hat / w + bias,
            "the weight is that of the row, weight[row]": x_hat * of_row + bias,
        }
    if has_bias:
        made |= {
            "the bias is missing": x_hat * w,
            "the bias is subtracted": x_hat * w - bias,
            "the bias is added twice": x_hat * w + 2 * bias,
            "the bias is added before the weight multiplies": (x_hat + bias) * w,
        }
    if has_weight and has_bias:
        both = "weight and bias are those of the row, weight[row] and bias[row]"
        made |= {
            "weight and bias are missing": x_hat,
            "weight and bias are swapped": x_hat * bias + rows.weight,
            both: x_hat * of_row + bias_of_row,
        }
    for shift, where in ((1, "before"), (-1, "after")):
        other_w, other_bias = np.roll(w, shift), np.roll(bias, shift)
        if has_weight:
            made[f"the weight is that of the column {where}"] = x_hat * other_w + bias
        if has_bias:
            made[f"the bias is that of the column {where}"] = x_hat * w + other_bias
        if has_weight and has_bias:
            words = f"weight and bias are those of the column {where}"
            made[words] = x_hat * other_w + other_bias
    if rows.centered:
        words = "x * rstd - mean stands for (x - mean) * rstd"
        made[words] = (rows.x * rows.rstd - rows.mean) * w + bias
    for dtype in _NARROW:
        if DTYPES[dtype].digits <= DTYPES[rows.case.dtype("y")].digits:
            made[f"x_hat is rounded to {dtype}"] = round_to(x_hat, dtype) * w + bias
    return made


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
    of_mean, in_x_hat = _mean(wdy) * c, _mean(wdy * x_hat)
    of_x_hat = x_hat * in_x_hat
    right = wdy - of_mean - of_x_hat
    over_rows = c * wdy.mean(axis=0) + x_hat * (wdy * x_hat).mean(axis=0)
    made = {
        "the term x_hat * mean(wdy * x_hat) is missing": rstd * (wdy - of_mean),
        "the sums are not divided by num_cols": rstd * (wdy - n * of_mean - n * of_x_hat),
        "the sum of wdy * x_hat is not divided by num_cols": rstd * (wdy - of_mean - n * of_x_hat),
        "rstd is missing": right,
        "rstd is squared": rstd**2 * right,
        "the mean terms are added, not subtracted": rstd * (wdy + of_mean + of_x_hat),
        "the means are over the rows, not over the columns": rstd * (wdy - over_rows),
        "x stands for x_hat in x_hat * mean(wdy * x_hat)": rstd
        * (wdy - of_mean - rows.x * in_x_hat),
        "x_hat lacks its factor x_hat in x_hat * mean(wdy * x_hat)": rstd
        * (wdy - of_mean - in_x_hat),
    }
    others = {"y": x_hat * w + rows.bias, "x_hat * weight": x_hat * w, "x": rows.x}
    if c:
        others["x - mean"] = rows.x - rows.mean
        made["the term mean(wdy) is missing"] = rstd * (wdy - of_x_hat)
        made["both mean terms are missing"] = rstd * wdy
        words = "the sum of wdy is not divided by num_cols"
        made[words] = rstd * (wdy - n * of_mean - of_x_hat)
    else:
        made["mean(wdy) is subtracted, as in LayerNorm"] = rstd * (wdy - _mean(wdy) - of_x_hat)
    for name, other in others.items():
        made[f"{name} stands for x_hat"] = rstd * (wdy - of_mean - other * _mean(wdy * other))
    if rows.problem.weight is None:
        return made
    made["the weight multiplies twice"] = _gradient(wdy * w, x_hat, rstd, c)
    words = "the weight multiplies mean(dy), in the place of mean(wdy)"
    made[words] = rstd * (wdy - w * _mean(dy) * c - of_x_hat)
    made["dy is not multiplied by the weight"] = _gradient(dy, x_hat, rstd, c)
    means = _mean(dy) * c + x_hat * _mean(dy * x_hat)
    made["the means are those of dy, not of wdy = dy * weight"] = rstd * (wdy - means)
    words, other = _other_centre(rows)
    made[words] = _gradient(dy * other, x_hat, rstd, c)
    for shift, where in ((1, "before"), (-1, "after")):
        words = f"the weight is that of the column {where}"
        made[words] = _gradient(dy * np.roll(w, shift), x_hat, rstd, c)
    # The weight stands twice in the term of the mean, in that of x_hat, or in both.
    for first, second, name in (
        (w, 1, "the term mean(wdy)"),
        (1, w, "the term x_hat * mean(wdy * x_hat)"),
        (w, w, "both mean terms"),
    ):
        words = f"the weight stands twice in {name}: it"
        outside = wdy - first * of_mean - second * of_x_hat
        inside = wdy - c * _mean(wdy * first) - x_hat * _mean(wdy * second * x_hat)
        made[f"{words} multiplies the mean too"] = rstd * outside
        made[f"{words} is squared in the mean"] = rstd * inside
    return made


def _of_dweight(rows: Rows) -> dict[str, np.ndarray]:
    dy, y = rows.dy, rows.x_hat * rows.w + rows.bias
    made = {
        "it is dbias: the sum of dy": dy.sum(axis=0),
        "x stands for x_hat": (dy * rows.x).sum(axis=0),
        "y stands for x_hat": (dy * y).sum(axis=0),
        "dy is multiplied by the weight": (dy * rows.x_hat * rows.w).sum(axis=0),
    }
    if rows.centered:
        made["x is not multiplied by rstd"] = (dy * (rows.x - rows.mean)).sum(axis=0)
    return made


def _sums(terms: np.ndarray) -> Iterator[Named]:
    """Wrong sums over rows."""
    total = terms.sum(axis=0)
    if len(terms) > 1:
        for row in (len(terms) - 1, 0):
            name = "last" if row else "first"
            yield f"the {name} row is not summed", total - terms[row]
        yield "only the first row is summed", terms[0]
        yield "only the last row is summed", terms[-1]
    for dtype in _NARROW if len(terms) <= _MOST_STEPS else ():
        for each in (terms, round_to(terms, dtype)):
            yield f"it is accumulated in {dtype}", summed_in(each, dtype, 0)[0]
