"""Traps t01 to t06, t20 and t21: values on which other libraries failed."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from array_libraries import LIBRARIES, api_results, library
from trap_checks import as_dtype, assert_right, check, fits, with_rows

from cupynorm.check.bounds import expect
from cupynorm.check.cases import NORMS, Case, Problem, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.results import judge
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.gpu.source_files import cuda_src
from cupynorm.norm.plans import plan
from cupynorm.plan.strategies import STATISTICS, STRATEGIES


def large_means() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "100 and 0.01": generator.standard_normal((2, 32768)) * 0.01 + 100,
        "2000 and 1": generator.standard_normal((5, 4)) + 2000,
        "40000 to 40003": 40000 + np.arange(4.0)[None],
        "1449 and 1": 1449 + np.where(generator.random((3, 16)) < 0.5, -1.0, 1.0),
        "steps of 0.001": np.array([[0.0], [1e2], [1e3], [1e4]]) + np.arange(16) * 1e-3,
    }


def assert_right_with_rounded_means(problem: Problem, results: dict[str, np.ndarray]) -> None:
    """Judges Welford's results, which err by more because each merged mean is rounded.

    The mean errs by g * |mean|, as gradient_check allows. So x_hat errs by `off` =
    g * |mean| * rstd more. rstd errs by a share of off * (2 + off) more: its variance is about
    such a mean, and two means differ by at most a standard deviation.

    e = off + |x_hat| * more_rstd is the error of x_hat. The gradients follow from their
    definitions: dweight is a sum of dy * x_hat, and
    dx = rstd * (wdy - mean(wdy) - x_hat * mean(wdy * x_hat)).
    """
    bounds = expect(problem, rounded_mean=True)
    mean, rstd = bounds["mean"][0], bounds["rstd"][0]
    off = 2.0**-24 * (4 + np.sqrt(problem.case.num_cols)) * np.abs(mean) * rstd
    x_hat = (problem.x - mean[:, None]) * rstd[:, None]
    more_rstd = off * (2 + off)
    e = off[:, None] + np.abs(x_hat) * more_rstd[:, None]
    wdy = problem.dy * problem.weight
    mean_wdy_x_hat = np.abs((wdy * x_hat).mean(axis=1, keepdims=True))
    mean_wdy_e = (np.abs(wdy) * e).mean(axis=1, keepdims=True)
    of_rows = e * mean_wdy_x_hat + (np.abs(x_hat) + e) * mean_wdy_e
    more_dx = (
        more_rstd[:, None] * np.abs(bounds["dx"][0]) + ((1 + more_rstd) * rstd)[:, None] * of_rows
    )
    # Where `off` is near 1, float32 holds one digit of the row, and bounds mean nothing.
    told = off < 0.25
    assert told.any()
    nothing = np.zeros_like(mean)
    for tensor, more in (
        ("y", np.abs(problem.weight) * e),
        ("mean", nothing),
        ("rstd", rstd * more_rstd),
        ("dx", more_dx),
    ):
        expected, allowed = bounds[tensor]
        found = judge(
            problem.case, tensor, results[tensor][told], expected[told], (allowed + more)[told]
        )
        assert found.ok, found
    for tensor, more in (("dweight", (np.abs(problem.dy) * e).sum(axis=0)), ("dbias", 0.0)):
        expected, allowed = bounds[tensor]
        if told.all() or tensor == "dbias":  # dbias does not know of x
            found = judge(problem.case, tensor, results[tensor], expected, allowed + more)
            assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", large_means())
def test_t01_mean_far_larger_than_spread(rows, strategy, statistics, where):
    """Elsewhere E[x^2] - mean^2 cancelled: rstd was NaN or wrong.

    Here the mean is subtracted before the square. Results agree with float64 and are finite.
    """
    problem = with_rows(
        Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics),
        large_means()[rows],
    )
    if not fits(problem.case, where.device):
        problem = replace(problem, case=replace(problem.case, strategy=None))
    results = run_kernels(problem, where)
    if statistics == "two_pass":
        assert_right(problem, results, where.device)
    else:
        assert_right_with_rounded_means(problem, results)
    assert all(np.isfinite(values).all() for values in results.values())
    assert (results["rstd"] > 0).all()


@pytest.mark.parametrize("rows", large_means())
@pytest.mark.parametrize("name", LIBRARIES)
def test_t01_mean_far_larger_than_spread_in_arrays(name, rows):
    """The rows of t01 in the public functions."""
    problem = with_rows(Case("layer_norm", 0, 0, "float32"), large_means()[rows])
    assert_right(problem, api_results(problem, library(name)))


@pytest.mark.parametrize("num_cols", [4088, 8080])
def test_t01_values_on_both_sides_of_a_power_of_two(num_cols, where):
    """Below the power float16 has one bit more, so float32 rounds the sum of 8080 values.

    A float32 y shows the error of a mean that is off by half a unit in its last place.
    """
    rows = np.random.default_rng(0).standard_normal((16, num_cols)) + 130
    assert (rows < 128).any(axis=1).all()
    check(with_rows(Case("layer_norm", 0, 0, "float16", y="float32", weight=None), rows), where)


def test_welford_means_of_values_that_are_flushed(where):
    """On a GPU: differences from the first value, and their share, may be below 2^-126."""
    rows = np.random.default_rng(0).standard_normal((4000, 8)) * 2.0**-124
    check(with_rows(Case("layer_norm", 0, 0, "bfloat16", statistics="welford"), rows), where)


CONSTANTS = np.array([14.0, 1234.0, 0.0, 0.1, -1 / 3, 1e-3 + 1e4])
# Values whose sums float32 rounds. float16 does not have the first.
ROUNDED_CONSTANTS = np.array([-3507424260.0, 4.388819e-05])


def assert_constant_rows(problem: Problem, results: dict[str, np.ndarray]) -> None:
    assert (results["y"] == problem.bias).all()
    assert (results["mean"] == problem.x[:, 0]).all()
    assert np.isfinite(results["dx"]).all()
    assert (results["dweight"] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_t02_constant_rows(dtype, strategy, statistics, where):
    """Elsewhere the variance of a constant row rounded below zero, and rstd was NaN.

    Here y is the bias, the mean is the value itself and dweight is 0.
    """
    checked = 0
    turn = list(DTYPES).index(dtype) + list(STRATEGIES).index(strategy)
    turn += list(STATISTICS).index(statistics)
    # Half of the widths by turns.
    for num_cols in ((3, 240, 1000), (7, 240, 768, 5000))[turn % 2]:
        case = Case("layer_norm", 0, num_cols, dtype, strategy=strategy, statistics=statistics)
        if fits(case, where.device):
            rounded = ROUNDED_CONSTANTS[dtype == "float16" :]
            rows = np.concatenate([CONSTANTS, rounded])[:, None]
            problem = with_rows(case, np.repeat(rows, num_cols, axis=1))
            assert_constant_rows(problem, run_kernels(problem, where))
            checked += 1
    assert checked >= 2


def wide_constant_rows(case: Case) -> Problem:
    rounded = ROUNDED_CONSTANTS[case.x == "float16" :]
    constants = np.concatenate([CONSTANTS, rounded, [3.14159e-5, 65499.0, -0.7]])
    problem = with_rows(case, np.repeat(constants[:, None], case.num_cols, axis=1))
    problem.bias[::2] = 0.0  # where the last digits of an x_hat that is not 0 would show
    return problem


@pytest.mark.gpu
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", [None, "block", "cluster", "uncached"])
@pytest.mark.parametrize("num_cols", [10007, 33196, 100003, 262144])
@pytest.mark.parametrize("dtype", DTYPES)
def test_t02_wide_constant_rows(dtype, num_cols, strategy, statistics):
    """The sum of a wide row is not exact, so the first mean may not be the value."""
    case = Case("layer_norm", 0, num_cols, dtype, strategy=strategy, statistics=statistics)
    where = GpuCheckMachine()
    if strategy and not fits(case, where.device):
        pytest.skip(f"{strategy} takes no row of {num_cols} columns")
    problem = wide_constant_rows(case)
    assert_constant_rows(problem, run_kernels(problem, where))


def test_t02_constant_rows_in_a_ring(where):
    """Its warps merge their means, and the sum of those is rounded too."""
    options = {"strategy": "cluster", "statistics": "two_pass"}
    assert plan(1000, dtype="float32", device="H200", **options).tile.path == "ring"
    case = Case("layer_norm", 0, 1000, "float32", **options)
    generator = np.random.default_rng(0)
    constants = generator.uniform(-1, 1, 60) * 10 ** generator.uniform(-4, 12, 60)
    problem = with_rows(case, np.repeat(constants[:, None], 1000, axis=1))
    problem.bias[::2] = 0.0
    results = run_kernels(problem, where)
    assert_constant_rows(problem, results)
    np.testing.assert_allclose(results["rstd"], 1e-5**-0.5, rtol=2.0**-22)


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
def test_t02_wide_constant_rows_with_a_fused_multiply_add(residual, tmp_path):
    """On the CPU, with the multiply-add that a GPU's compiler makes of x_hat."""
    folder = tmp_path / "cuda_src"
    shutil.copytree(cuda_src(), folder)
    header = folder / "statistics" / "mean_rstd.cuh"
    plain, fused = "(value - first) * rstd + shift", "fma(value - first, rstd, shift)"
    assert plain in header.read_text()
    header.write_text(header.read_text().replace(plain, fused))
    case = Case("layer_norm", 0, 100_003, "float32", strategy="uncached", statistics="two_pass")
    problem = wide_constant_rows(replace(case, residual=residual))
    if residual:
        problem = replace(problem, residual=as_dtype(0.37 * problem.x, "float32"))
    results = run_kernels(problem, CpuMachine(folder=folder))
    if residual:  # the sum is what is constant
        problem = replace(problem, x=results["sum"])
    assert_constant_rows(problem, results)


@pytest.mark.parametrize("num_cols", [3, 7, 768, 1000, 5000])
@pytest.mark.parametrize("name", LIBRARIES)
def test_t02_constant_rows_in_arrays(name, num_cols):
    """The rows of t02 in the public functions."""
    for dtype in ("float16", "float32", "float64"):
        problem = with_rows(
            Case("layer_norm", 0, 0, dtype), np.repeat(CONSTANTS[:, None], num_cols, axis=1)
        )
        assert_constant_rows(problem, api_results(problem, library(name)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_t03_rows_of_one_to_seven_columns(dtype, strategy, where):
    """Elsewhere merging the statistics of empty threads divided by zero.

    Here a row of one column is a constant row, and rows of 2 to 7 columns agree with float64.
    """
    problem = with_rows(
        Case("layer_norm", 0, 0, dtype, strategy=strategy), np.array([[1e6], [-3.0], [0.1]])
    )
    results = check(problem, where)
    assert_constant_rows(problem, results)
    assert (results["dx"] == 0).all()
    for num_cols in (2, 3, 5, 7):
        check(random_problem(Case("layer_norm", 6, num_cols, dtype, strategy=strategy)), where)


@pytest.mark.parametrize("name", LIBRARIES)
def test_t03_rows_of_one_column_in_arrays(name):
    """The rows of t03 in the public functions."""
    problem = with_rows(Case("layer_norm", 0, 0, "float32"), np.array([[1e6], [-3.0], [0.1]]))
    results = api_results(problem, library(name))
    assert_right(problem, results)
    assert_constant_rows(problem, results)
    assert (results["dx"] == 0).all()


def assert_only_row_2_is_broken(problem: Problem, clean: dict, broken: dict) -> None:
    others = [0, 1, 3, 4]
    for tensor in {"y", "mean", "rstd", "dx"} & set(clean):
        assert np.isfinite(clean[tensor]).all()
        assert broken[tensor][others].tobytes() == clean[tensor][others].tobytes(), tensor
    assert broken["dbias"].tobytes() == clean["dbias"].tobytes()
    assert np.isnan(broken["dx"][2]).all()
    infinite = np.isinf(problem.x[2])
    if problem.case.norm == "rms_norm" and infinite.any():
        # As in float64: rstd is 0, finite values become 0, and the infinite one is 0 * inf.
        assert broken["rstd"][2] == 0
        assert (np.isnan(broken["y"][2]) == infinite).all() and (broken["y"][2] == problem.bias)[
            ~infinite
        ].all()
        assert (np.isnan(broken["dweight"]) == infinite).all()
    else:
        assert np.isnan(broken["y"][2]).all() and np.isnan(broken["rstd"][2])
        assert np.isnan(broken["dweight"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t04_infinity_or_nan_stays_in_its_row(norm_name, strategy, value, where):
    """Elsewhere a NaN reached other rows of the same warp or block.

    Here the other rows keep their bits. dweight is NaN, because it sums over all rows.
    """
    for statistics in STATISTICS:
        for at in (0, 99):
            clean = random_problem(
                Case(norm_name, 5, 100, "float32", strategy=strategy, statistics=statistics)
            )
            broken = replace(clean, x=clean.x.copy())
            broken.x[2, at] = value
            assert_only_row_2_is_broken(broken, check(clean, where), run_kernels(broken, where))


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t04_infinity_or_nan_stays_in_its_row_of_arrays(norm_name, name, value):
    """The rows of t04 in the public functions."""
    clean = random_problem(Case(norm_name, 5, 100, "float16"))
    broken = replace(clean, x=clean.x.copy())
    broken.x[2, 7] = value
    results = [api_results(problem, library(name)) for problem in (clean, broken)]
    assert_only_row_2_is_broken(broken, *results)


def spread(value: float, num_cols: int) -> np.ndarray:
    return np.stack([np.linspace(-value, value, num_cols), np.linspace(value / 2, value, num_cols)])


@pytest.mark.slow
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t05_squares_that_nearly_overflow(strategy, statistics, where):
    """Elsewhere squares were summed in the dtype of x, which overflows first.

    Here they are summed in float32, or in float64 for float64.
    """
    turn = list(STRATEGIES).index(strategy) + list(STATISTICS).index(statistics)
    for at, (dtype, value) in enumerate(
        (("float16", 6e4), ("bfloat16", 1e18), ("float32", 1e18), ("float64", 1e150))
    ):
        norm_name = NORMS[(turn + at) % 2]
        case = Case(norm_name, 0, 0, dtype, strategy=strategy, statistics=statistics)
        problem = with_rows(case, spread(value, 40))
        # dx is about 1 / value. The bound allows 0 where float32 underflows.
        check(problem, where)


@pytest.mark.parametrize("value", [1e20, 1e30, 1e37])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t05_squares_that_overflow_float32(norm_name, strategy, statistics, dtype, value, where):
    """Elsewhere a variance that overflowed gave NaN.

    Here the documented result of an infinite variance: rstd is 0, y is the bias, dx is 0.
    """
    # Sums and differences of values stay finite in these rows.
    x = np.zeros((2, 40))
    x[0, ::2], x[0, 1::2] = value, -value
    x[1, 3] = value
    problem = with_rows(Case(norm_name, 0, 0, dtype, strategy=strategy, statistics=statistics), x)
    results = run_kernels(problem, where)
    assert (results["rstd"] == 0).all()
    assert (results["y"] == problem.bias).all()
    assert (results["dx"] == 0).all()
    assert (results["dweight"] == 0).all()


@pytest.mark.parametrize("value", [1e20, 1e30])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t05_constant_rows_of_huge_values(strategy, statistics, value, where):
    """Elsewhere the squares of huge equal values overflowed, and y was NaN.

    Here the mean is subtracted first, so y is the bias.
    """
    case = Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics)
    problem = with_rows(case, np.full((2, 40), value))
    assert_constant_rows(problem, run_kernels(problem, where))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t05_sums_of_a_row_that_overflow_float32(strategy, where):
    """The documented result: the whole row is NaN, and in two passes always, or it is the bias."""
    x = 1e38 * np.linspace(0.9, 1.1, 80).reshape(2, 40)
    for statistics in STATISTICS:
        case = Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics)
        problem = with_rows(case, x)
        y = run_kernels(problem, where, forward_only=True)["y"]
        is_nan = np.isnan(y).all()
        assert is_nan or (statistics == "welford" and (y == problem.bias).all())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t06_weights_near_zero_and_huge(norm_name, strategy, where):
    """Elsewhere backward recovered x_hat as y / weight and divided by zero.

    Here dx is computed from x, so it is finite for any weight.
    """
    eps = 1e-5
    case = Case(norm_name, 6, 96, "float32", strategy=strategy, eps=eps)
    problem = random_problem(case)
    problem.weight[:] = as_dtype(
        np.resize([0.0, eps / 2, -eps / 2, 1e-8, 1e10, 1.0], 96), "float32"
    )
    problem.x[:] = as_dtype(
        problem.x * np.array([1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9])[:, None], "float32"
    )
    results = check(problem, where)
    assert np.isfinite(results["dx"]).all()
    assert (results["y"][:, ::6] == problem.bias[::6]).all()


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t06_weights_near_zero_and_huge_in_arrays(norm_name, name):
    """The weights of t06 in the public functions."""
    problem = random_problem(Case(norm_name, 6, 96, "float32"))
    problem.weight[:] = as_dtype(np.resize([0.0, 5e-6, -5e-6, 1e-8, 1e10, 1.0], 96), "float32")
    problem.x[:] = as_dtype(
        problem.x * np.array([1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9])[:, None], "float32"
    )
    assert_right(problem, api_results(problem, library(name)))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows, num_cols", [(7, 33), (3, 1000), (2, 9000)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("norm_name", NORMS)
def test_t20_dx_is_orthogonal_to_what_the_norm_removes(norm_name, dtype, num_rows, num_cols, where):
    """Elsewhere dx lacked one of its mean terms, which looks plausible.

    Here dx sums to 0 over its row (LayerNorm) and is orthogonal to x_hat.
    """
    # A shift or (with eps 0) a scale of a row does not change y, so dx has no part along them.
    problem = random_problem(Case(norm_name, num_rows, num_cols, dtype, eps=0.0))
    results = run_kernels(problem, where)
    dx = results["dx"]
    mean = problem.x.mean(axis=1, keepdims=True) if norm_name == "layer_norm" else 0.0
    x_hat = (problem.x - mean) / np.sqrt(((problem.x - mean) ** 2).mean(axis=1, keepdims=True))
    # Both means that dx subtracts err by at most g times the mean of |wdy|, about that of |dx|.
    # x_hat, of size 1, errs by u * |mean| * rstd, at most 8 u here. dx is rounded once.
    # The sum of a dx that is not orthogonal would be of order sqrt(num_cols).
    compute = DTYPES[DTYPES[dtype].compute]
    relative = 4 * compute.half_ulp * (12 + np.sqrt(num_cols)) + 4 * DTYPES[
        dtype
    ].half_ulp / np.sqrt(num_cols)
    size = np.abs(dx).sum(axis=1)
    assert (size > 0).all()
    if norm_name == "layer_norm":
        assert (np.abs(dx.sum(axis=1)) <= relative * size).all()
    assert (np.abs((dx * x_hat).sum(axis=1)) <= relative * np.abs(dx * x_hat).sum(axis=1)).all()
    wrong = dx + 0.01 * np.abs(dx).mean() * (1 + x_hat)
    assert (
        np.abs((wrong * x_hat).sum(axis=1)) > relative * np.abs(wrong * x_hat).sum(axis=1)
    ).all()


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t21_eps_of_zero_and_below(norm_name, strategy, statistics, where):
    """Elsewhere an eps of 0 or less gave finite results for rows that have none.

    Here the results are NaN or infinite where those of float64 are.
    """
    generator = np.random.default_rng(0)
    rows = np.stack(
        [
            np.full(40, 3.0),
            np.zeros(40),
            generator.standard_normal(40),
            0.01 * generator.standard_normal(40),
        ]
    )
    for eps in (0.0, -0.05, -1e-3):
        problem = with_rows(
            Case(norm_name, 0, 0, "float32", strategy=strategy, statistics=statistics, eps=eps),
            rows,
        )
        results = check(problem, where)
        if eps < 0:
            assert np.isnan(results["y"][3]).all() and np.isfinite(results["y"][2]).all()
    # A constant row with eps 0: rstd is infinite, and y is 0 * inf.
    problem = with_rows(
        Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics, eps=0.0),
        rows[:1],
    )
    results = check(problem, where)
    assert np.isposinf(results["rstd"]).all() and np.isnan(results["y"]).all()


@pytest.mark.parametrize("eps", [0.0, -0.05])
@pytest.mark.parametrize("name", LIBRARIES)
def test_t21_eps_of_zero_and_below_in_arrays(name, eps):
    """The eps of t21 in the public functions."""
    rows = np.stack([np.full(40, 3.0), np.random.default_rng(0).standard_normal(40)])
    problem = with_rows(Case("layer_norm", 0, 0, "float32", eps=eps), rows)
    results = api_results(problem, library(name))
    assert_right(problem, results)
    assert np.isnan(results["y"][0]).all() and np.isfinite(results["y"][1]).all()
