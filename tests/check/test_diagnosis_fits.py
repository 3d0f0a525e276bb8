"""Mistakes whose numbers must be fitted: divisors, lost columns, other rows, wrong indices."""

from __future__ import annotations

import numpy as np
import pytest
from wrong_norms import (
    SHAPE,
    backward_of,
    diagnoses,
    dx_of,
    forward_of,
    layer_norm,
    mean_of,
    rounded,
    x_hat,
)

from cupynorm.check.places import moves

ROWS, COLS = SHAPE
EVERY = np.arange(COLS)


def with_statistics(change):
    """A forward whose mean and variance are `change(x, mean, var)`."""

    def forward(x, w, b, eps):
        mean = mean_of(x)
        mean, var = change(x, mean, mean_of((x - mean) ** 2))
        return (x - mean) / np.sqrt(var + eps) * w + b

    return forward


def sums_of(x, divisor):
    """Mean and variance from sums over x [num_rows, any number of columns]."""
    mean = x.sum(1, keepdims=True) / divisor
    return mean, ((x - mean) ** 2).sum(1, keepdims=True) / divisor


def own_of_32(x, w, b, eps):
    parts = x.reshape(ROWS, -1, 32)
    centered = parts - parts.mean(2, keepdims=True)
    var = (centered**2).mean(2, keepdims=True)
    return (centered / np.sqrt(var + eps)).reshape(x.shape) * w + b


def odd_and_even_lanes(x, w, b, eps):
    y = layer_norm(x, w, b, eps)
    for lane in (0, 1):
        at = EVERY // 4 % 2 == lane
        mean, var = sums_of(x[:, at], COLS)
        y[:, at] = (x[:, at] - mean) / np.sqrt(var + eps) * w[at] + b[at]
    return y


def by_approximate_rsqrt(x, w, b, eps):
    """One step of Newton's method from the constant of Quake III."""
    centered = x - mean_of(x)
    var = (mean_of(centered**2) + eps).astype(np.float32)
    r = (0x5F3759DF - (var.view(np.int32) >> 1)).view(np.float32)
    return centered * r * (1.5 - 0.5 * var * r * r) * w + b


# Mistake -> (forward of x, weight, bias and eps, what the diagnosis says).
FORWARD = {
    "zeros beyond the row": (
        with_statistics(lambda x, mean, var: (mean, var + mean**2 * 32 / COLS)),
        "the variance counts 32 elements beyond the row as (0 - mean)^2: mask x - mean",
    ),
    "padded divisor": (
        with_statistics(lambda x, mean, var: sums_of(x, 128)),
        "the sums over the 96 columns are divided by 128",
    ),
    "padded variance": (
        with_statistics(lambda x, mean, var: (mean, var * COLS / 128)),
        "the sum of squares of x - mean is divided by 128, not by 96 columns",
    ),
    "short loop": (
        with_statistics(lambda x, mean, var: sums_of(x[:, :64], COLS)),
        "the sums have only the first 64 of 96 columns, and are divided by 96",
    ),
    "last column": (
        with_statistics(lambda x, mean, var: sums_of(x[:, :-1], COLS - 1)),
        "mean and rstd are those of the first 95 of 96 columns",
    ),
    "squares of the end twice": (
        with_statistics(
            lambda x, mean, var: (
                mean,
                var + ((x - mean) ** 2)[:, -4:].sum(1, keepdims=True) / COLS,
            )
        ),
        "the sum of squares counts the last 4 columns twice",
    ),
    "row before": (
        with_statistics(lambda x, mean, var: (np.roll(mean, 1, 0), np.roll(var, 1, 0))),
        "each row has the mean and rstd of the row before it: an index is off by one",
    ),
    "rstd of row 0": (
        with_statistics(lambda x, mean, var: (mean, 0 * var + var[0])),
        "all rows have the rstd of row 0",
    ),
    "mean twice": (
        with_statistics(lambda x, mean, var: (2 * mean, var)),
        "the mean is 2 times what it should be",
    ),
    "columns": (
        with_statistics(lambda x, mean, var: (x.mean(0), x.var(0))),
        "mean and rstd are of each column, over the rows",
    ),
    "deviation": (
        with_statistics(
            lambda x, mean, var: (mean, (mean_of(np.abs(x - mean)) + np.float32(1e-5)) ** 2 - 1e-5)
        ),
        "the mean of |x - mean| stands for the standard deviation",
    ),
    "approximate rsqrt": (by_approximate_rsqrt, "rstd is wrong, by a factor of 0.998"),
    "median": (
        with_statistics(lambda x, mean, var: (np.median(x, 1, keepdims=True), var)),
        "rstd is right",
    ),
    "warps": (own_of_32, "each 32 columns have a mean and rstd of their own"),
    "shuffle": (
        odd_and_even_lanes,
        "2 neighbouring packs of 4 differ in mean and rstd: a step of the sum over lanes",
    ),
    "weight twice": (lambda x, w, b, eps: x_hat(x, eps) * w * w + b, "the weight multiplies twice"),
    "bias twice": (lambda x, w, b, eps: x_hat(x, eps) * w + b + b, "the bias is added twice"),
    "weight[row]": (
        lambda x, w, b, eps: x_hat(x, eps) * w[:ROWS, None] + b[:ROWS, None],
        "weight and bias are those of the row, weight[row] and bias[row]",
    ),
    "modulo": (
        lambda x, w, b, eps: x_hat(x, eps) * w[EVERY % 32] + b[EVERY % 32],
        "the weight and bias of the first 32 columns repeat: an index is taken modulo 32",
    ),
    "first of a pack": (
        lambda x, w, b, eps: x_hat(x, eps) * w[EVERY // 4 * 4] + b,
        "each 4 columns have the weight of the first of them",
    ),
    "reversed packs": (
        lambda x, w, b, eps: layer_norm(x, w, b, eps)[:, EVERY // 4 * 4 + 3 - EVERY % 4],
        "each 4 columns are in reverse order",
    ),
    "end of the grid": (
        lambda x, w, b, eps: layer_norm(x[np.arange(ROWS) % (ROWS - 2)], w, b, eps),
        "the last 2 rows have the values of the rows 14 before them",
    ),
    "ReLU": (
        lambda x, w, b, eps: np.maximum(layer_norm(x, w, b, eps), 0),
        "negative values are 0, as after a ReLU",
    ),
    "cut": (
        lambda x, w, b, eps: (
            layer_norm(x, w, b, eps).astype(np.float32).view(np.uint32) & 0xFFFF0000
        ).view(np.float32),
        "the result is cut to bfloat16, not rounded",
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_wrong_forward_is_fitted(name):
    change, words = FORWARD[name]
    for sentence in diagnoses(forward=forward_of(change)):
        assert words in sentence and len(sentence) < 260


def summed(terms, count=COLS, divisor=COLS):
    return terms[:, :count].sum(1, keepdims=True) / divisor


def of_means(change):
    """dx with `change(terms)` for the mean over columns."""
    return lambda dy, x, h, w, rstd: rstd * (dy * w - change(dy * w) - h * change(dy * w * h))


# Mistake -> (the tensor that is wrong, from dy, x, x_hat, weight, rstd, and what is said of it).
BACKWARD = {
    "padded divisor": (
        "dx",
        of_means(lambda terms: summed(terms, divisor=128)),
        "the sums of wdy and wdy * x_hat are divided by 128, not by 96 columns",
    ),
    "short loop": (
        "dx",
        of_means(lambda terms: summed(terms, 64)),
        "the sums of wdy and wdy * x_hat have only the first 64 of 96 columns, and are divided",
    ),
    "one sign": (
        "dx",
        lambda dy, x, h, w, rstd: rstd * (dy * w - mean_of(dy * w) + h * mean_of(dy * w * h)),
        "the term x_hat * mean(wdy * x_hat) is -1 times what it should be",
    ),
    "rstd of wdy alone": (
        "dx",
        lambda dy, x, h, w, rstd: rstd * dy * w - mean_of(dy * w) - h * mean_of(dy * w * h),
        "rstd multiplies wdy alone, not the means",
    ),
    "rstd in one term": (
        "dx",
        lambda dy, x, h, w, rstd: (
            rstd * (dy * w - mean_of(dy * w) - h * rstd * mean_of(dy * w * h))
        ),
        "rstd multiplies the term x_hat * mean(wdy * x_hat) twice",
    ),
    "rstd of the next row": (
        "dx",
        lambda dy, x, h, w, rstd: dx_of(dy * w, h, np.roll(rstd, -1, 0)),
        "each row has the rstd of the row after it: an index is off by one",
    ),
    "over the rows": (
        "dx",
        of_means(lambda terms: terms.mean(0)),
        "the means are over the rows, not over the columns",
    ),
    "weight twice": (
        "dx",
        lambda dy, x, h, w, rstd: dx_of(dy * w * w, h, rstd),
        "the weight multiplies twice",
    ),
    "x - mean": (
        "dx",
        lambda dy, x, h, w, rstd: dx_of(dy * w, h / rstd, rstd),
        "x - mean stands for x_hat",
    ),
    "mean in bfloat16": (
        "dx",
        lambda dy, x, h, w, rstd: (
            rstd * (dy * w - rounded(mean_of(dy * w), "bfloat16") - h * mean_of(dy * w * h))
        ),
        "the term mean(wdy) is nearly right, as a sum in 16 bits",
    ),
    "first half": (
        "dweight",
        lambda dy, x, h, w, rstd: (dy * h)[:8].sum(0),
        "only rows 0 to 7 are summed",
    ),
    "every second row": (
        "dweight",
        lambda dy, x, h, w, rstd: (dy * h)[::2].sum(0),
        "only every 2nd row, from row 0, is summed",
    ),
    "three rows": (
        "dbias",
        lambda dy, x, h, w, rstd: dy.sum(0) - dy[3] - dy[8] - dy[13],
        "every 5th row, from row 3, is not summed",
    ),
    "race": (
        "dweight",
        lambda dy, x, h, w, rstd: (dy * h).sum(0) - np.where(EVERY % 40 == 7, (dy * h)[3], 0),
        "each of these lacks the term of one row, as when two threads update one sum at once",
    ),
    "dx": (
        "dbias",
        lambda dy, x, h, w, rstd: dx_of(dy * w, h, rstd).sum(0),
        "it is the sum of dx, not of dy",
    ),
    "x_hat": ("dbias", lambda dy, x, h, w, rstd: h.sum(0), "it is the sum of x_hat, not of dy"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_wrong_backward_is_fitted(name):
    tensor, change, words = BACKWARD[name]
    for sentence in diagnoses(backward=backward_of(tensor, change)):
        assert sentence.startswith(f"{tensor} of layer_norm") and words in sentence


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("name", ["padded variance", "row before", "weight twice", "shuffle"])
def test_fits_work_in_other_dtypes(name, dtype):
    change, words = FORWARD[name]
    for sentence in diagnoses(forward=forward_of(change), dtypes=[dtype]):
        assert words in sentence


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda mean_square: mean_square * COLS / 128, "is divided by 128, not by 96 columns"),
        (lambda mean_square: np.roll(mean_square, -1, 0), "the rstd of the row after it"),
        (lambda mean_square: 0 * mean_square + 1 - 1e-5, "rstd is 1: x is not divided"),
    ],
)
def test_a_wrong_rms_norm_is_fitted(change, words):
    forward = forward_of(lambda x, w, b, eps: x / np.sqrt(change(mean_of(x**2)) + eps) * w)
    given = lambda x, weight, eps: forward(x, weight, weight, eps)  # noqa: E731
    for sentence in diagnoses(forward=given, norm="rms_norm"):
        assert words in sentence


def test_rows_with_other_errors_are_not_called_16_bits():
    """A factor that is wrong in one direction is no rounding."""
    forward = forward_of(
        with_statistics(lambda x, mean, var: (mean, var * (1 + 0.01 * x[:, :1] ** 2)))
    )
    for sentence in diagnoses(forward=forward):
        assert "16" not in sentence.split("ulp; ")[1] and "rstd is wrong, by a factor" in sentence


@pytest.mark.parametrize(
    "source, words",
    [
        ([1, 2, 3, 4, 5, 6, 7, 0], "each row has the values of the row after it"),
        ([6, 7, 0, 1, 2, 3, 4, 5], "each row has the values of the row 2 before it: an index is"),
        ([0, 0, 2, 2, 4, 4, 6, 6], "each 2 rows have the values of the first of them"),
        ([3, 2, 1, 0, 7, 6, 5, 4], "each 4 rows are in reverse order"),
        ([0, 1, 2, 0, 1, 2, 0, 1], "the values of the first 3 rows repeat"),
        ([0, 2, 4, 6, 1, 3, 5, 7], "neighbouring rows have the values of rows that are 2 apart"),
        ([0, 1, 2, 3, 4, 5, 6, 3], "row 7 has the values of the row 4 before it"),
        ([5, 5, 5, 5, 5, 5, 5, 5], "all rows have the values of row 5"),
        ([1, 2, -1, 4, -1, 6, 7, 0], "each row has the values of the row after it"),
        ([4, 1, 7, 3, 2, 5, 6, 0], "row 0 those of row 4 and row 2 those of row 7"),
        ([0, 1, 2, 3, 4, 5, 6, 7], ""),
    ],
)
def test_maps_of_places_have_words(source, words):
    found = list(moves(np.array(source), "row"))
    assert any(words in moved.words for moved in found) if words else not found
    known = np.array(source) >= 0
    for moved in found:
        assert words not in moved.words or (moved.source == source)[known].all()
