"""A wrong result is diagnosed: which elements are off, and the mistake that explains them."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm.dtypes import decode, encode
from cupynorm.explore.experiment import changed_sources
from cupynorm.gpu import on_cpu
from cupynorm.verify.cases import Case
from cupynorm.verify.diagnosis import pattern_of
from cupynorm.verify.kernels import CpuMachine, run_kernels
from cupynorm.verify.traps import Trial, default_problem

SHAPE = (16, 96)


def mean_of(values):
    return values.mean(1, keepdims=True)


def x_hat(x, eps):
    centered = x - mean_of(x)
    return centered / np.sqrt(mean_of(centered**2) + eps)


def layer_norm(x, w, b, eps):
    return x_hat(x, eps) * w + b


def by_std(x, w, b, std):
    return (x - mean_of(x)) / std * w + b


def std_of(x, ddof=0):
    return x.std(1, keepdims=True, ddof=ddof)


def rounded(values, dtype):
    return decode(encode(values.astype(np.float64), dtype), dtype).astype(values.dtype)


def without_last_columns(y):
    return np.concatenate([y[:, :-3], 0 * y[:, :3]], axis=1)


def dx_of(wdy, h, rstd):
    return rstd * (wdy - mean_of(wdy) - h * mean_of(wdy * h))


def dweight_of(dy, h):
    return (dy * h).sum(0)


def sum_in_half(terms):
    total = np.zeros(terms.shape[1], np.float16)
    for row in terms.astype(np.float16):
        total = total + row
    return total.astype(np.float32)


def forward_of(change):
    def forward(x, weight, bias, eps):
        wide = np.result_type(x.dtype, np.float32)
        with np.errstate(all="ignore"):
            y = change(*(each.astype(wide) for each in (x, weight, bias)), eps)
        return y.astype(x.dtype)

    return forward


def backward_of(tensor, change):
    def backward(dy, x, mean, rstd, weight):
        dtype = x.dtype
        dy, x, weight = (each.astype(mean.dtype) for each in (dy, x, weight))
        h = (x - mean[:, None]) * rstd[:, None]
        made = {
            "dx": dx_of(dy * weight, h, rstd[:, None]),
            "dweight": dweight_of(dy, h),
            "dbias": dy.sum(0),
        }
        if change is not None:
            made[tensor] = change(dy, x, h, weight, rstd[:, None])
        return tuple(each.astype(dtype) for each in made.values())

    return backward


def diagnoses(forward=None, backward=None, **options) -> list[str]:
    options = {"shapes": [SHAPE], "library": "numpy"} | options
    return cupynorm.check_function((forward, backward), **options).diagnoses


# Mistake -> (forward of x, weight, bias, eps in the arithmetic's dtype, what the diagnosis says).
FORWARD = {
    "no mean": (
        lambda x, w, b, eps: x / np.sqrt(x.var(1, keepdims=True) + eps) * w + b,
        "the mean is not subtracted from x",
    ),
    "RMSNorm": (
        lambda x, w, b, eps: x / np.sqrt(mean_of(x**2) + eps) * w + b,
        "the mean is not subtracted: this is RMSNorm",
    ),
    "one pass": (
        lambda x, w, b, eps: by_std(
            x, w, b, np.sqrt(mean_of(x * x) - mean_of(x) ** 2 + x.dtype.type(eps))
        ),
        "as in E[x^2] - E[x]^2",
    ),
    "unbiased": (
        lambda x, w, b, eps: by_std(x, w, b, np.sqrt(std_of(x, 1) ** 2 + eps)),
        "the variance is divided by num_cols - 1",
    ),
    "zeros beyond the row": (
        lambda x, w, b, eps: by_std(
            x, w, b, np.sqrt(std_of(x) ** 2 + mean_of(x) ** 2 * 32 / 96 + eps)
        ),
        "the variance counts 32 elements beyond the row as (0 - mean)^2: mask x - mean",
    ),
    "eps missing": (lambda x, w, b, eps: by_std(x, w, b, std_of(x)), "eps is missing"),
    "eps outside": (
        lambda x, w, b, eps: by_std(x, w, b, std_of(x) + eps),
        "eps is added outside the square root",
    ),
    "eps 1e-6": (lambda x, w, b, eps: layer_norm(x, w, b, 1e-6), "eps is 1e-06, not 1e-05"),
    "eps 3e-4": (lambda x, w, b, eps: layer_norm(x, w, b, 3e-4), "eps is about 0.0003, not 1e-05"),
    "no square root": (
        lambda x, w, b, eps: by_std(x, w, b, std_of(x) ** 2 + eps),
        "the square root of the variance is missing",
    ),
    "no weight": (lambda x, w, b, eps: x_hat(x, eps) + b, "the weight is missing"),
    "no bias": (lambda x, w, b, eps: x_hat(x, eps) * w, "the bias is missing"),
    "1 + weight": (
        lambda x, w, b, eps: layer_norm(x, 1 + w, b, eps),
        "1 is added to a weight that is not zero-centred",
    ),
    "next column": (
        lambda x, w, b, eps: np.roll(layer_norm(x, w, b, eps), 1, 1),
        "each column has the values of the column before it: an index is off by one",
    ),
    "next row": (
        lambda x, w, b, eps: np.roll(layer_norm(x, w, b, eps), -1, 0),
        "each row has the values of the row after it: an index is off by one",
    ),
    "transposed": (
        lambda x, w, b, eps: layer_norm(x, w, b, eps).T.reshape(x.shape),
        "it is transposed",
    ),
    "tail": (
        lambda x, w, b, eps: without_last_columns(layer_norm(x, w, b, eps)),
        "the last 3 columns are off by up to .* ulp; they are 0: not written",
    ),
    "bfloat16 result": (
        lambda x, w, b, eps: rounded(layer_norm(x, w, b, eps), "bfloat16"),
        "the result is rounded to bfloat16",
    ),
    "bfloat16 statistics": (
        lambda x, w, b, eps: (
            (x - rounded(mean_of(x), "bfloat16"))
            * rounded(1 / np.sqrt(std_of(x) ** 2 + eps), "bfloat16")
            * w
            + b
        ),
        "mean and rstd are rounded to bfloat16",
    ),
    "NaN": (
        lambda x, w, b, eps: layer_norm(x, w, b, eps) + 0 * mean_of(np.roll(x, 1, 0)),
        "NaN in row 8: row 9 is off; a NaN or infinity of row 8 spreads to row 9",
    ),
}


# Mistake -> (the tensor that is wrong, from dy, x, x_hat, weight, rstd, and what is said of it).
BACKWARD = {
    "no mean(wdy)": (
        "dx",
        lambda dy, x, h, w, rstd: rstd * (dy * w - h * mean_of(dy * w * h)),
        "the term mean(wdy) is missing",
    ),
    "no mean(wdy * x_hat)": (
        "dx",
        lambda dy, x, h, w, rstd: rstd * (dy * w - mean_of(dy * w)),
        "the term x_hat * mean(wdy * x_hat) is missing",
    ),
    "no weight": (
        "dx",
        lambda dy, x, h, w, rstd: dx_of(dy, h, rstd),
        "dy is not multiplied by the weight",
    ),
    "no 1 / n": (
        "dx",
        lambda dy, x, h, w, rstd: (
            rstd * (dy * w - 96 * mean_of(dy * w) - 96 * h * mean_of(dy * w * h))
        ),
        "the sums are not divided by num_cols",
    ),
    "sign": ("dx", lambda dy, x, h, w, rstd: -dx_of(dy * w, h, rstd), "its sign is wrong"),
    "one pass": ("dx", lambda dy, x, h, w, rstd: with_one_pass(dy, x, w), "as in E[x^2] - E[x]^2"),
    "x for x_hat": (
        "dweight",
        lambda dy, x, h, w, rstd: dweight_of(dy, x * rstd),
        "the mean is not subtracted from x",
    ),
    "last row": (
        "dweight",
        lambda dy, x, h, w, rstd: dweight_of(dy[:-1], h[:-1]),
        "the last row is not summed",
    ),
    "row 5": (
        "dweight",
        lambda dy, x, h, w, rstd: dweight_of(dy, h) - dy[5] * h[5],
        "row 5 is not summed",
    ),
    "swapped": ("dweight", lambda dy, x, h, w, rstd: dy.sum(0), "it is dbias: the sum of dy"),
    "float16 sums": (
        "dweight",
        lambda dy, x, h, w, rstd: sum_in_half(dy * h),
        "it is accumulated in float16",
    ),
    "mean": ("dbias", lambda dy, x, h, w, rstd: dy.mean(0), "it is divided by num_rows"),
    "wdy": ("dbias", lambda dy, x, h, w, rstd: (dy * w).sum(0), "dy is multiplied by the weight"),
}


def with_one_pass(dy, x, w):
    variance = mean_of(x * x) - mean_of(x) ** 2
    rstd = 1 / np.sqrt(variance + x.dtype.type(1e-5))
    return dx_of(dy * w, (x - mean_of(x)) * rstd, rstd)


@pytest.mark.parametrize("name", FORWARD)
def test_a_wrong_forward_is_named(name):
    change, words = FORWARD[name]
    (sentence,) = diagnoses(forward=forward_of(change))
    assert sentence.startswith("y of layer_norm 16 x 96 float32")
    assert words in sentence or _matches(words, sentence)
    assert len(sentence) < 210


def _matches(pattern: str, sentence: str) -> bool:
    first, _, last = pattern.partition(".*")
    return first in sentence and last in sentence and bool(last)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("name", ["no mean", "one pass", "eps 1e-6", "unbiased", "next column"])
def test_a_wrong_forward_is_named_in_other_dtypes(name, dtype):
    change, words = FORWARD[name]
    (sentence,) = diagnoses(forward=forward_of(change), dtypes=[dtype])
    assert words in sentence


@pytest.mark.parametrize("name", BACKWARD)
def test_a_wrong_backward_is_named(name):
    tensor, change, words = BACKWARD[name]
    (sentence,) = diagnoses(backward=backward_of(tensor, change))
    assert sentence.startswith(f"{tensor} of layer_norm") and words in sentence


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x, w, b, eps: x_hat(x, eps) * w, "the mean is subtracted: this is LayerNorm"),
        (
            lambda x, w, b, eps: x / np.sqrt(std_of(x) ** 2 + eps) * w,
            "the variance stands for the mean square",
        ),
        (lambda x, w, b, eps: x / np.sqrt(mean_of(x**2)) * w, "eps is missing"),
    ],
)
def test_a_wrong_rms_norm_is_named(change, words):
    forward = forward_of(change)
    given = lambda x, weight, eps: forward(x, weight, weight, eps)  # noqa: E731
    (sentence,) = diagnoses(forward=given, norm="rms_norm")
    assert words in sentence


def test_wrong_statistics_are_named():
    def swapped(x, weight, bias, eps):
        mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + np.float32(eps))
        return layer_norm(x, weight, bias, np.float32(eps)), rstd, mean

    def inverse(x, weight, bias, eps):
        y, rstd, mean = swapped(x, weight, bias, eps)
        return y, mean, 1 / rstd

    rstd, mean = diagnoses(forward=swapped)
    assert mean.startswith("mean of") and "it is rstd: mean and rstd are swapped" in mean
    assert rstd.startswith("rstd of") and "it is the mean: mean and rstd are swapped" in rstd
    (rstd,) = diagnoses(forward=inverse)
    assert "rstd is the standard deviation, not its reciprocal" in rstd


def test_sums_over_the_wrong_axis_are_named():
    wrong = backward_of("dbias", lambda dy, x, h, w, rstd: dy.sum(1))
    (sentence,) = diagnoses(backward=wrong, shapes=[(48, 48)])
    assert "it is summed over columns, not over rows" in sentence


def test_right_functions_have_no_diagnosis():
    for dtype in ("float16", "float32", "float64"):
        given = forward_of(layer_norm), backward_of("", None)
        result = cupynorm.check_function(given, shapes=[SHAPE], library="numpy", dtypes=[dtype])
        assert result.ok and not result.diagnoses and "explains" not in str(result)


def test_numbers_that_nothing_explains_are_said_to_be_so():
    noise = np.random.default_rng(0).standard_normal(SHAPE)
    forward = forward_of(lambda x, w, b, eps: layer_norm(x, w, b, eps) * (1 + 0.05 * noise))
    (sentence,) = diagnoses(forward=forward)
    assert sentence.endswith("no mistake that is tried explains the numbers (and in 1 more case)")


@pytest.mark.parametrize(
    "off, words",
    [
        (np.s_[:], "all elements are"),
        (np.s_[2, 3], "the element [2, 3] is"),
        (np.s_[5], "row 5 is"),
        (np.s_[[3, 7]], "rows 3 and 7 are"),
        (np.s_[2:5], "rows 2 to 4 are"),
        (np.s_[1::3], "every 3rd row, from row 1, is"),
        (np.s_[:, 4], "column 4 is"),
        (np.s_[:, -2:], "the last 2 columns are"),
        (np.s_[:, ::4], "every 4th column, from column 0, is"),
        (np.s_[2:4, 3:9], "a block of rows 2 to 3, columns 3 to 8 is"),
        (np.s_[[1, 5, 7], [2, 9, 4]], "3 of 120 elements, scattered, are"),
    ],
)
def test_patterns(off, words):
    made = np.zeros((10, 12), bool)
    made[off] = True
    assert pattern_of(made) == words


# Kernels.


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, old, new, words",
    [
        (
            "statistics.cuh",
            "centered_values[at] = values[at] - first;",
            "centered_values[at] = values[at];",
            "y of layer_norm 4 x 256 bfloat16 warp: .*; the mean is not subtracted in the variance",
        ),
        (
            "store.cuh",
            "* weights[at] + biases[at];",
            "* weights[at];",
            "y of layer_norm 4 x 256 bfloat16 warp: .*; the bias is missing",
        ),
        (
            "backward.cuh",
            "((wdy - mean_wdy) - x_hat * mean_wdy_x_hat)",
            "(wdy - x_hat * mean_wdy_x_hat)",
            "dx of layer_norm 4 x 256 bfloat16 warp: .*; the term mean(wdy) is missing",
        ),
    ],
)
def test_a_wrong_kernel_is_named(file, old, new, words):
    problem = default_problem(Case("layer_norm", 4, 256, "bfloat16", strategy="warp"))
    folder = changed_sources({file: [(old, new)]})
    try:
        got = run_kernels(problem, CpuMachine(folder=folder))
    except on_cpu.NoCompilerError as error:
        pytest.skip(str(error))
    found = cupynorm.types.CheckResult(Trial(problem).judged(got)).diagnoses
    assert any(_matches(words, sentence) for sentence in found), found


def test_a_mean_that_is_rounded_is_told_from_a_variance_that_is():
    """Both show in rows of large mean. Kernels subtract the rounding error of the mean too."""
    problem = default_problem(Case("layer_norm", 16, 128, "float32"))
    x = problem.x.astype(np.float32)
    mean = (np.cumsum(x, axis=1)[:, -1:] / np.float32(128)).astype(np.float32)
    centered = (x - mean).astype(np.float32)
    causes = {}
    for name, variance in (
        ("mean", mean_of(centered**2)),
        ("variance", mean_of(x * x) - mean * mean),
    ):
        rstd = 1 / np.sqrt(variance + np.float32(problem.case.eps))
        y = (centered * rstd * problem.weight + problem.bias).astype(np.float32)
        (found,) = Trial(problem).judged({"y": y.astype(np.float64)})
        causes[name] = found.diagnosis.cause
    assert causes["mean"].startswith("the rounding error of the mean is left in x - mean")
    assert causes["variance"].startswith("the variance is off by the rounding of mean^2")
