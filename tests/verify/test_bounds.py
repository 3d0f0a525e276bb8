"""bounds.py at rows whose mean is far above their spread: what kernels may do, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.dtypes import decode, encode
from cupynorm.verify.bounds import expect
from cupynorm.verify.cases import Case, Problem, random_problem
from cupynorm.verify.kernels import CpuMachine, run_kernels, uses_welford
from cupynorm.verify.results import judge_all


def neighbours(case: Case, mean: float, share: float) -> Problem:
    """Rows of two neighbouring numbers. share: of the larger one."""
    problem = random_problem(case)
    is_larger = np.random.default_rng(0).random(problem.x.shape) < share
    unit = np.spacing(np.float32(mean)) if case.x == "float32" else np.spacing(mean)
    problem.x = decode(encode(mean + unit * is_larger, case.x), case.x)
    return problem


def off(problem: Problem, change=None) -> set[str]:
    """The tensors that are off. change: of the results of the kernels."""
    where = CpuMachine()
    results = run_kernels(problem, where)
    if change is not None:
        change(results)
    welford = uses_welford(problem.case, where.device)
    findings = judge_all(problem, results, rounded_mean=welford)
    return {found.tensor for found in findings if not found.ok}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.5])
@pytest.mark.parametrize("statistics", ["two_pass", "welford"])
@pytest.mark.parametrize(
    "strategy, num_cols", [("warp", 33), ("block", 1000), ("cluster", 4096), ("uncached", 1000)]
)
def test_rows_of_neighbouring_numbers_are_within_what_is_allowed(
    strategy, num_cols, statistics, share
):
    """The mean before correction is off by more than their spread. dweight adds up roundings of the
    means, which are all as large as roundings can be.
    """
    options = {"strategy": strategy, "statistics": statistics}
    for dtype, mean in (("float32", 1e4), ("float32", 1e9), ("float32", 1e12), ("float64", 1e9)):
        case = Case("layer_norm", 16, num_cols, dtype, **options)
        assert off(neighbours(case, mean, share)) == set(), (dtype, mean)


CLUSTER = Case("layer_norm", 16, 4096, "float32", strategy="cluster", statistics="two_pass")


def test_an_error_that_is_allowed_there_is_found_elsewhere():
    """Of rstd, and of y with it: what is beyond the bound of usual rows, six times g."""

    def spoil(results):
        results["rstd"] *= 1 + size
        results["y"] += (results["y"] - bias) * size

    bias = 0.0
    size = 6 * 2.0**-24 * (4 + np.sqrt(CLUSTER.num_cols))
    problem = neighbours(CLUSTER, 1e9, 0.02)
    bias = problem.bias
    assert off(problem, spoil) == set()
    spreads = {}
    for mean, spread in ((0.0, 1.0), (1e3, 1.0), (1e9, 1e7)):
        problem = random_problem(CLUSTER)
        bias = problem.bias
        x = mean + spread * np.random.default_rng(1).standard_normal(problem.x.shape)
        problem.x = decode(encode(x, "float32"), "float32")
        spreads[mean] = off(problem), off(problem, spoil)
    assert spreads == dict.fromkeys(spreads, (set(), {"rstd", "y"}))


def test_equal_rows_are_off_by_the_same():
    """The rounding of their mean moves x_hat of all of them by as much: dweight has the sum."""
    problem = neighbours(Case("layer_norm", 400, 11, "float32"), 2.0**29, 0.5)
    problem.x[:], problem.dy[:] = problem.x[0], problem.dy[0]
    assert not off(problem)

    def spoil(results):
        results["dweight"] *= 4

    assert off(problem, spoil) == {"dweight"}


@pytest.mark.parametrize("norm, dtype", [("layer_norm", "float32"), ("rms_norm", "float64")])
def test_rows_that_are_nearly_equal_are_off_by_about_the_same(norm, dtype):
    """So dweight adds their errors, if dy is equal too."""
    for mean in np.random.default_rng(0).uniform(1, 2, 40):
        problem = neighbours(Case(norm, 512, 4, dtype), mean, 0.05)
        problem.dy[:] = problem.dy[0]
        assert not off(problem), mean
    of_equal = expect(problem)["dweight"][1]
    problem.dy = np.random.default_rng(1).standard_normal(problem.dy.shape)

    def spoil(results):
        results["dweight"] += 0.7 * of_equal

    assert "dweight" in off(problem, spoil)


def test_errors_of_equal_squares_add_up():
    """A thread that adds equal squares to their sum rounds each time in the same direction."""
    case = Case("rms_norm", 20000, 50, "float32", eps=0.0)
    problem = random_problem(case)
    problem.x[:] = np.linspace(0.5, 0.6, len(problem.x))[:, None]
    problem.x[:, :6] = 3.7
    problem.x = decode(encode(problem.x, "float32"), "float32")
    squares = (problem.x.astype(np.float32) ** 2).cumsum(axis=1, dtype=np.float32)[:, -1]
    rstd = 1 / np.sqrt(squares.astype(np.float64) / 50)
    expected, allowed = expect(problem)["rstd"]
    off_by = np.abs(rstd / expected - 1)
    assert (off_by <= allowed / expected).all()
    problem.x = np.random.default_rng(0).standard_normal(problem.x.shape)
    expected, allowed = expect(problem)["rstd"]
    assert (allowed / expected < off_by.max()).all()


def test_welford_means_are_off_by_more_where_the_first_value_is_far_from_them():
    options = {"residual": "float32", "statistics": "welford"}
    problem = random_problem(Case("layer_norm", 20000, 8, "float16", **options))
    problem.x[:] = 0.0
    problem.residual[:, 0] = np.linspace(-3, -6, len(problem.x))
    problem.residual = decode(encode(problem.residual, "float32"), "float32")
    assert not off(problem)

    def spoil(results):
        results["mean"] += 12 * 2.0**-24 * problem.residual.std(axis=1)

    assert off(problem, spoil) == {"mean"}


@pytest.mark.parametrize("mean", [3.0, 1e9 / 3])
def test_nothing_more_is_allowed_of_constant_rows(mean):
    problem = neighbours(CLUSTER, mean, 0.0)
    expected = expect(problem)
    y, allowed = expected["y"]
    np.testing.assert_array_equal(y, np.broadcast_to(problem.bias, y.shape))
    assert (allowed <= 1e-3 * (1 + np.abs(y))).all()
    rstd, allowed = expected["rstd"]
    assert (allowed <= 1e-5 * rstd).all()

    def spoil(results):
        results["y"] += 1e-2 * problem.weight

    assert off(problem) == set() and off(problem, spoil) == {"y"}


def test_a_mean_that_is_rounded_too_far_is_found_in_dweight():
    """By two bits: each row's x_hat is off by up to four times the rounding of its mean."""
    problem = neighbours(CLUSTER, 1e4, 0.5)
    rstd = expect(problem)["rstd"][0]
    rounding = 4 * 2.0**-24 * 1e4 * rstd

    def spoil(results):
        results["dweight"] += (problem.dy * rounding[:, None]).sum(axis=0)

    assert off(problem, spoil) == {"dweight"}


# What underflows: float64 arithmetic rounds below 2^-1022 to multiples of 2^-1074, float32
# arithmetic may flush below 2^-126.
TINY = {"float64": (2.0**-560, 2.0**-1040, 2.0**-1074), "float32": (2.0**-124, 2.0**-132)}


def tiny_gradients(case: Case, size: float, sign: float = 1.0) -> Problem:
    """dy of about this size, both signs; rows of different spreads."""
    problem = random_problem(case)
    dy = np.rint(8 * problem.dy) / 8 if size > 2.0**-1074 else np.rint(2 * problem.dy)
    problem.dy = decode(encode(dy * size, case.dtype("dy")), case.dtype("dy"))
    return problem


@pytest.mark.parametrize("size", TINY["float64"])
@pytest.mark.parametrize("strategy, num_cols", [("warp", 33), ("block", 200), ("uncached", 64)])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_tiny_float64_gradients_are_within_what_is_allowed(name, strategy, num_cols, size):
    case = Case(name, 40, num_cols, "float64", strategy=strategy, zero_centered_weight=True)
    assert off(tiny_gradients(case, size)) == set()


@pytest.mark.parametrize("weight", ["same", "float64"])
@pytest.mark.parametrize("size", TINY["float32"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_tiny_float32_gradients_are_within_what_is_allowed(name, size, weight):
    """As a GPU flushes them: dy, and products of dy, below 2^-126 count as 0."""
    case = Case(name, 40, 200, "float32", weight=weight, bias=weight)
    problem = tiny_gradients(case, size)
    assert off(problem) == set()
    flushed = problem.dy * (np.abs(problem.dy) >= 2.0**-126)
    assert (flushed != problem.dy).any()

    def flush(results):
        x_hat = (problem.x - results.get("mean", np.zeros(40))[:, None]) * results["rstd"][:, None]
        products = flushed * x_hat
        results["dweight"] = (products * (np.abs(products) >= 2.0**-126)).sum(axis=0)
        results["dbias"] = flushed.sum(axis=0)

    assert off(problem, flush) == set()


@pytest.mark.parametrize("name", ["dx", "dweight", "dbias"])
@pytest.mark.parametrize(
    "dtype, size, error",
    [
        ("float64", 2.0**-560, 2.0**-600),
        ("float64", 2.0**-1074, 2.0**-1066),
        ("float32", 2.0**-100, 2.0**-111),
        ("float32", 2.0**-124, 2.0**-116),
    ],
)
def test_an_error_above_what_underflows_is_found(dtype, size, error, name):
    problem = tiny_gradients(Case("layer_norm", 40, 200, dtype), size)

    def change(results):
        results[name][(2,) * results[name].ndim] += error

    assert off(problem, change) == {name}
