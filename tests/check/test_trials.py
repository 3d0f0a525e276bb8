"""The default data of the gradient check shows mistakes that plain random rows hide."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.check.libraries import Library

import cupynorm
from cupynorm.check.cases import Case, random_problem
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.traps import default_trials
from cupynorm.dtypes import DTYPES

torch = pytest.importorskip("torch")


def wide(x):
    """In the dtype of the arithmetic."""
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype == torch.float64 else x.float()
    return x.astype("float64" if x.dtype == np.float64 else "float32")


def as_dtype_of(x, values):
    return values.to(x.dtype) if isinstance(values, torch.Tensor) else values.astype(x.dtype)


def two_pass(x):
    mean = x.mean(1)
    return mean, ((x - mean[:, None]) ** 2).mean(1)


def one_pass(x):
    mean = x.mean(1)
    return mean, (x * x).mean(1) - mean * mean


def welford(x):
    mean, squares = x[:, 0] * 0, x[:, 0] * 0
    for count in range(x.shape[1]):
        delta = x[:, count] - mean
        mean = mean + delta / (count + 1)
        squares = squares + delta * (x[:, count] - mean)
    return mean, squares / x.shape[1]


def forward_with(statistics):
    def forward(x, weight, bias, eps):
        values = wide(x)
        mean, variance = statistics(values)
        x_hat = (values - mean[:, None]) / ((variance + eps) ** 0.5)[:, None]
        return as_dtype_of(x, x_hat * wide(weight) + wide(bias))

    return forward


def backward_with(statistics):
    """A backward that computes its own statistics."""

    def backward(dy, x, weight, eps):
        values = wide(x)
        mean, variance = statistics(values)
        rstd = 1 / (variance + eps) ** 0.5
        x_hat = (values - mean[:, None]) * rstd[:, None]
        wdy = wide(dy) * wide(weight)
        of_x_hat = (wdy * x_hat).mean(1)[:, None]
        dx = rstd[:, None] * (wdy - wdy.mean(1)[:, None] - x_hat * of_x_hat)
        dweight = (wide(dy) * x_hat).sum(0)
        return as_dtype_of(x, dx), as_dtype_of(x, dweight), as_dtype_of(x, wide(dy).sum(0))

    return backward


def off(**given) -> set[str]:
    with np.errstate(invalid="ignore"):
        result = cupynorm.check(**given)
    return {found.tensor for found in result.findings if not found.ok}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_one_pass_variance_is_found(library, dtype, seed):
    if dtype == "bfloat16" and library == "numpy":
        pytest.importorskip("ml_dtypes")
    options = {"library": library, "dtypes": [dtype], "seed": seed}
    assert off(forward=forward_with(one_pass), **options) == {"y"}
    assert "dx" in off(backward=backward_with(one_pass), **options)
    for right in (two_pass, welford) if (library, seed) == ("numpy", 0) else (two_pass,):
        assert not off(forward=forward_with(right), backward=backward_with(right), **options)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_plain_random_rows_hide_a_one_pass_variance(dtype):
    """The special rows are needed: without them the wrong formula passes."""
    problem = random_problem(Case("layer_norm", 64, 768, dtype))
    library = Library("torch")
    operands = [library.put(getattr(problem, name), dtype) for name in ("x", "weight", "bias")]
    y = library.get(forward_with(one_pass)(*operands, 1e-5), "y")
    assert CheckResult(judge_all(problem, {"y": y}, rounded_mean=True)).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_that_spreads_is_found(dtype):
    def spreads(x, weight, bias, eps):
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y + 0 * x.roll(1, 0).mean(1, keepdim=True)

    def hides(x, weight, bias, eps):
        return torch.nn.functional.layer_norm(x.nan_to_num(), x.shape[-1:], weight, bias, eps)

    for function, num_off in ((spreads, 100), (hides, 100)):
        result = cupynorm.check(forward=function, shapes=[(8, 100)], dtypes=[dtype])
        (found,) = [found for found in result.findings if not found.ok]
        assert found.case.endswith("NaN in row 4") and found.num_off == num_off


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_eps_is_found(dtype):
    def smaller(x, weight, bias, eps):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 0.5 * eps)

    assert off(forward=smaller, dtypes=[dtype]) == {"y"}


def test_rows_that_are_special():
    case = Case("layer_norm", 64, 768, "float32")
    plain, broken = default_trials(case)
    mean, std = plain.problem.x.mean(1), plain.problem.x.std(1)
    assert (mean / std > 900).sum() == 3 and (std < 0.01).sum() == 1
    assert np.isnan(broken.problem.x).sum() == 1 and broken.name == "NaN in row 32"
    assert (np.abs(plain.problem.dy).max(axis=1) < 0.01).sum() == 4
    assert len(default_trials(Case("layer_norm", 1, 768, "float32"))) == 1
    few = default_trials(Case("layer_norm", 3, 768, "float32"))[0].problem
    assert (few.x.mean(1) / few.x.std(1) > 900).sum() == 1


def test_kernels_pass_on_the_default_data():
    result = cupynorm.check(shapes=[(8, 100)], dtypes=["bfloat16"], on="cpu")
    assert result.ok and len(result.findings) == 6 + 4
    assert sum("NaN in row 4" in found.case for found in result.findings) == 4
