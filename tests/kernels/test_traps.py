"""Traps t01 to t21: values, shapes and layouts on which norms of other libraries failed.

t08 and t12 are in test_widths.py, t11 is in test_contract.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from array_libraries import LIBRARIES, TORCH, api, api_results, library, loaded_torch
from kernel_checks import as_dtype, assert_right, run, with_rows
from kernel_paths import H200, PATHS, Call, case_of
from mutated_machine import copy_of_sources, mutate

import cupynorm
from cupynorm.dispatch.strategies import STATISTICS, STRATEGIES
from cupynorm.dtypes import DTYPES
from cupynorm.verify.bounds import expect
from cupynorm.verify.cases import NORMS, Case, Problem, random_problem
from cupynorm.verify.kernels import CpuMachine, GpuCheckMachine, run_kernels
from cupynorm.verify.results import CheckResult, judge, judge_all

WAYS = [
    pytest.param(strategy, statistics, id=f"{strategy}-{statistics}")
    for strategy in STRATEGIES
    for statistics in STATISTICS
]
ways = pytest.mark.parametrize("strategy, statistics", WAYS)
libraries = pytest.mark.parametrize("name", LIBRARIES)
norms = pytest.mark.parametrize("norm", NORMS)


def check(problem: Problem, where) -> dict[str, np.ndarray]:
    results = run_kernels(problem, where)
    assert_right(problem, results, where)
    return results


def check_arrays(problem: Problem, name: str) -> dict[str, np.ndarray]:
    """The public functions on arrays of a library."""
    results = api_results(problem, library(name))
    assert_right(problem, results, CpuMachine(H200))
    return results


# Values.


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
@ways
@pytest.mark.parametrize("rows", large_means())
def test_t01_mean_far_larger_than_spread(rows, strategy, statistics, where):
    """Elsewhere E[x^2] - mean^2 cancelled: rstd was NaN or wrong."""
    x = large_means()[rows]
    strategy = strategy if x.shape[1] < 4096 else None
    problem = with_rows(
        Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics), x
    )
    results = run_kernels(problem, where)
    if statistics == "two_pass":
        assert_right(problem, results, where)
    else:
        assert_right_with_rounded_means(problem, results)
    assert all(np.isfinite(values).all() for values in results.values())
    assert (results["rstd"] > 0).all()


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


def constants(dtype: str) -> np.ndarray:
    """Values of constant rows. float32 rounds the sums of the last; float16 has no first."""
    found = [14.0, 1234.0, 0.0, 0.1, -1 / 3, 1e-3 + 1e4, 3.14159e-5, 65499.0, 4.388819e-05]
    found += [] if dtype == "float16" else [-3507424260.0, 1e9]
    if dtype == "float32":
        generator = np.random.default_rng(0)
        found += list(generator.uniform(-1, 1, 20) * 10 ** generator.uniform(-4, 12, 20))
    return np.array(found)[:, None]


def constant_rows(case: Case) -> Problem:
    problem = with_rows(case, np.repeat(constants(case.x), case.num_cols, axis=1))
    problem.bias[::2] = 0.0  # where the last digits of an x_hat that is not 0 would show
    return problem


def assert_constant_rows(problem: Problem, results: dict[str, np.ndarray]) -> None:
    """Elsewhere the variance of a constant row rounded below zero, and rstd was NaN."""
    assert (results["y"] == problem.bias).all()
    assert (results["mean"] == problem.x[:, 0]).all()
    assert np.isfinite(results["dx"]).all() and (results["dweight"] == 0).all()
    if problem.case.x == "float32":
        np.testing.assert_allclose(results["rstd"], problem.case.eps**-0.5, rtol=2.0**-21)


CENTERED = [
    pytest.param(name, marks=[] if path.is_core else pytest.mark.slow)
    for name, path in PATHS.items()
    if path.norm == "layer_norm" and "backward" not in path.kind
]


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("name", CENTERED)
def test_t02_constant_rows_on_each_path(name, statistics, where):
    case, backward = case_of(Call(name, "plain", {}), where)
    problem = constant_rows(replace(case, statistics=statistics))
    assert_constant_rows(problem, run(problem, where, backward))


# Columns at which the sum of equal values is rounded most.
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize(
    "strategy, num_cols, tile",
    [
        ("block", 3515, cupynorm.Tile(1, 224, 16, blocks_per_sm=2)),
        ("block", 7003, cupynorm.Tile(1, 64)),
        ("cluster", 7003, cupynorm.Tile(1, 64, cluster_size=2)),
        ("cluster", 1000, None),
    ],
    ids=str,
)
def test_t02_constant_rows_of_rounded_sums(strategy, num_cols, tile, statistics, where):
    options = {"strategy": strategy, "tile": tile, "statistics": statistics}
    problem = constant_rows(Case("layer_norm", 0, num_cols, "float32", **options))
    assert_constant_rows(problem, run_kernels(problem, where))


@pytest.mark.gpu
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", [None, "cluster", "uncached"])
@pytest.mark.parametrize("num_cols", [10007, 33196, 100003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_t02_wide_constant_rows(dtype, num_cols, strategy, statistics):
    """The sum of a wide row is not exact, so the first mean may not be the value."""
    case = Case("layer_norm", 0, num_cols, dtype, strategy=strategy, statistics=statistics)
    problem = constant_rows(case)
    assert_constant_rows(problem, run_kernels(problem, GpuCheckMachine()))


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
def test_t02_wide_constant_rows_with_a_fused_multiply_add(residual, tmp_path):
    """On the CPU, with the multiply-add that a GPU's compiler makes of x_hat."""
    folder = copy_of_sources(tmp_path / "cuda_src")
    plain, fused = "(value - first) * rstd + shift", "fma(value - first, rstd, shift)"
    mutate(folder, "statistics.cuh", plain, fused)
    case = Case("layer_norm", 0, 100_003, "float32", strategy="uncached", statistics="two_pass")
    problem = constant_rows(replace(case, residual=residual))
    if residual:
        problem = replace(problem, residual=as_dtype(0.37 * problem.x, "float32"))
    results = run_kernels(problem, CpuMachine(folder=folder))
    if residual:  # the sum is what is constant
        problem = replace(problem, x=results["sum"])
    assert_constant_rows(problem, results)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_t03_rows_of_one_to_seven_columns(dtype, strategy, where):
    """Elsewhere merging the statistics of empty threads divided by zero."""
    case = Case("layer_norm", 0, 0, dtype, strategy=strategy)
    problem = with_rows(case, np.array([[1e6], [-3.0], [0.1]]))
    results = check(problem, where)
    assert_constant_rows(replace(problem, case=replace(problem.case, x="float64")), results)
    assert (results["dx"] == 0).all()
    for num_cols in (2, 3, 5, 7):
        check(random_problem(replace(case, num_rows=6, num_cols=num_cols)), where)


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
@ways
@norms
def test_t04_infinity_or_nan_stays_in_its_row(norm, strategy, statistics, value, where):
    """Elsewhere a NaN reached other rows of the same warp or block."""
    case = Case(norm, 5, 100, "float32", strategy=strategy, statistics=statistics)
    for at in (0, 99):
        clean = random_problem(case)
        broken = replace(clean, x=clean.x.copy())
        broken.x[2, at] = value
        assert_only_row_2_is_broken(broken, check(clean, where), run_kernels(broken, where))


@pytest.mark.parametrize("name", CENTERED)
def test_t04_infinity_or_nan_stays_in_its_row_on_each_path(name, where):
    case, backward = case_of(Call(name, "plain", {}), where)
    clean = random_problem(replace(case, num_rows=5))
    right = run(clean, where, backward)
    for value in (np.inf, np.nan):
        broken = replace(clean, x=clean.x.copy())
        broken.x[2, case.num_cols // 2] = value
        assert_only_row_2_is_broken(broken, right, run(broken, where, backward))


@pytest.mark.parametrize("value", [np.inf, np.nan])
@libraries
@norms
def test_t04_infinity_or_nan_stays_in_its_row_of_arrays(norm, name, value):
    clean = random_problem(Case(norm, 5, 100, "float16"))
    broken = replace(clean, x=clean.x.copy())
    broken.x[2, 7] = value
    results = [api_results(problem, library(name)) for problem in (clean, broken)]
    assert_only_row_2_is_broken(broken, *results)


@pytest.mark.slow
@ways
@norms
def test_t05_squares_that_nearly_overflow(norm, strategy, statistics, where):
    """Elsewhere squares were summed in the dtype of x, which overflows first."""
    for dtype, value in (
        ("float16", 6e4),
        ("bfloat16", 1e18),
        ("float32", 1e18),
        ("float64", 1e150),
    ):
        case = Case(norm, 0, 0, dtype, strategy=strategy, statistics=statistics)
        rows = [np.linspace(-value, value, 40), np.linspace(value / 2, value, 40)]
        check(with_rows(case, rows), where)  # dx is about 1 / value, or 0 where it underflows


@pytest.mark.parametrize("value", [1e20, 1e30, 1e37])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@ways
@norms
def test_t05_squares_that_overflow_float32(norm, strategy, statistics, dtype, value, where):
    """Elsewhere NaN. Of an infinite variance rstd is 0, y is the bias, dx is 0."""
    x = np.zeros((2, 40))  # sums and differences stay finite
    x[0, ::2], x[0, 1::2], x[1, 3] = value, -value, value
    case = Case(norm, 0, 0, dtype, strategy=strategy, statistics=statistics)
    problem = with_rows(case, x)
    results = run_kernels(problem, where)
    assert (results["rstd"] == 0).all() and (results["y"] == problem.bias).all()
    assert (results["dx"] == 0).all() and (results["dweight"] == 0).all()


@ways
def test_t05_sums_of_a_row_that_overflow_float32(strategy, statistics, where):
    """The documented result: the whole row is NaN, in two passes always, or it is the bias.

    Of huge equal values y is the bias, because the mean is subtracted first.
    """
    case = Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics)
    problem = with_rows(case, 1e38 * np.linspace(0.9, 1.1, 80).reshape(2, 40))
    y = run_kernels(problem, where, forward_only=True)["y"]
    is_nan = np.isnan(y).all()
    assert is_nan or (statistics == "welford" and (y == problem.bias).all())
    for value in (1e20, 1e30):
        equal = with_rows(case, np.full((2, 40), value))
        assert_constant_rows(equal, run_kernels(equal, where))


def odd_weights(norm: str, **options) -> Problem:
    """Weights near zero and huge, for rows of six sizes."""
    problem = random_problem(Case(norm, 6, 96, "float32", **options))
    weights = np.resize([0.0, 5e-6, -5e-6, 1e-8, 1e10, 1.0], 96)
    problem.weight[:] = as_dtype(weights, "float32")
    problem.x[:] = as_dtype(problem.x * 10.0 ** np.arange(-6, 12, 3)[:, None], "float32")
    return problem


@pytest.mark.parametrize("strategy", STRATEGIES)
@norms
def test_t06_weights_near_zero_and_huge(norm, strategy, where):
    """Elsewhere backward recovered x_hat as y / weight and divided by zero."""
    problem = odd_weights(norm, strategy=strategy)
    results = check(problem, where)
    assert np.isfinite(results["dx"]).all()
    assert (results["y"][:, ::6] == problem.bias[::6]).all()


@pytest.mark.parametrize("rows", [*large_means(), "one column", "constant", "weights", "eps"])
@libraries
def test_values_in_arrays(name, rows):
    """The rows of t01 to t06 and t21 in the public functions."""
    if rows == "weights":
        for norm in NORMS:
            check_arrays(odd_weights(norm), name)
    elif rows == "constant":
        for num_cols in (3, 7, 768, 1000, 5000):
            for dtype in ("float16", "float32", "float64"):
                problem = constant_rows(Case("layer_norm", 0, num_cols, dtype))
                assert_constant_rows(problem, api_results(problem, library(name)))
    elif rows == "eps":
        x = np.stack([np.full(40, 3.0), np.random.default_rng(0).standard_normal(40)])
        for eps in (0.0, -0.05):
            results = check_arrays(with_rows(Case("layer_norm", 0, 0, "float32", eps=eps), x), name)
            assert np.isnan(results["y"][0]).all() and np.isfinite(results["y"][1]).all()
    else:
        x = large_means().get(rows, np.array([[1e6], [-3.0], [0.1]]))
        problem = with_rows(Case("layer_norm", 0, 0, "float32"), x)
        results = check_arrays(problem, name)
        if x.shape[1] == 1:
            assert_constant_rows(problem, results)
            assert (results["dx"] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_rows, num_cols", [(7, 33), (3, 1000), (2, 9000)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@norms
def test_t20_dx_is_orthogonal_to_what_the_norm_removes(norm, dtype, num_rows, num_cols, where):
    """Elsewhere dx lacked one of its mean terms, which looks plausible.

    A shift or (with eps 0) a scale of a row does not change y, so dx has no part along them.
    """
    problem = random_problem(Case(norm, num_rows, num_cols, dtype, eps=0.0))
    results = run_kernels(problem, where)
    dx = results["dx"]
    mean = problem.x.mean(axis=1, keepdims=True) if norm == "layer_norm" else 0.0
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
    if norm == "layer_norm":
        assert (np.abs(dx.sum(axis=1)) <= relative * size).all()
    assert (np.abs((dx * x_hat).sum(axis=1)) <= relative * np.abs(dx * x_hat).sum(axis=1)).all()
    wrong = dx + 0.01 * np.abs(dx).mean() * (1 + x_hat)
    assert (
        np.abs((wrong * x_hat).sum(axis=1)) > relative * np.abs(wrong * x_hat).sum(axis=1)
    ).all()


@ways
@norms
def test_t21_eps_of_zero_and_below(norm, strategy, statistics, where):
    """Elsewhere finite results for rows that have none. Here NaN or infinite as in float64."""
    drawn = np.random.default_rng(0).standard_normal((2, 40))
    rows = np.stack([np.full(40, 3.0), np.zeros(40), drawn[0], 0.01 * drawn[1]])
    case = Case(norm, 0, 0, "float32", strategy=strategy, statistics=statistics)
    for eps in (0.0, -0.05, -1e-3):
        results = check(with_rows(replace(case, eps=eps), rows), where)
        if eps < 0:
            assert np.isnan(results["y"][3]).all() and np.isfinite(results["y"][2]).all()
    problem = with_rows(replace(case, norm="layer_norm", eps=0.0), rows[:1])
    results = check(problem, where)  # a constant row: y is 0 * inf
    assert np.isposinf(results["rstd"]).all() and np.isnan(results["y"]).all()


# Extents.


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 64), (3, 2, 0)])
@libraries
@norms
def test_t07_no_rows_or_no_columns(norm, name, shape):
    """Elsewhere empty batches raised, failed the next call, or left gradients uninitialised."""
    lib = library(name)
    x, dy = (lib.put(np.ones(shape), "float32") for _ in range(2))
    weight, bias = (lib.put(np.ones(shape[-1:]), "float32") for _ in range(2))
    forward = api(norm, "forward")(x, shape[-1], weight, bias=bias)
    assert tuple(forward.y.shape) == shape and tuple(forward.rstd.shape) == shape[:-1]
    statistics = (forward.mean, forward.rstd) if norm == "layer_norm" else (forward.rstd,)
    backward = api(norm, "backward")(dy, x, shape[-1], *statistics, weight)
    assert tuple(backward.dx.shape) == shape
    assert tuple(backward.dweight.shape) == tuple(backward.dbias.shape) == shape[-1:]
    if 0 in shape[:-1]:
        assert (lib.get(backward.dweight) == 0).all() and (lib.get(backward.dbias) == 0).all()
    # No error is left behind for the next call to find.
    problem = random_problem(Case(norm, 3, 8, "float32"))
    check_arrays(problem, name)


@pytest.fixture
def memory_is_given_back():
    """torch keeps what a test allocates. Other processes that share the GPU need it."""
    yield
    loaded_torch().cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("memory_is_given_back")
@pytest.mark.parametrize(
    "dtype, num_rows, num_cols",
    [("float16", 175000, 12288), ("float16", 2**23 + 16, 256), ("bfloat16", 2**26 + 3, 64)],
)
def test_t09_more_than_2_to_the_31_elements(dtype, num_rows, num_cols):
    """Elsewhere row * num_cols in 32 bits wrapped.

    Rows around multiples of 2^30 and 2^31 agree with float64. dweight and dbias are those of the
    parts of x, which are added in float64.
    """
    torch = loaded_torch()
    kind, generator = getattr(torch, dtype), torch.Generator("cuda").manual_seed(0)
    x, dy = (
        torch.empty(num_rows, num_cols, device="cuda", dtype=kind).normal_(generator=generator)
        for _ in range(2)
    )
    weight, bias = (torch.randn(num_cols, device="cuda", dtype=kind) for _ in range(2))
    forward = cupynorm.layer_norm_forward(x, num_cols, weight, bias)
    saved = forward.mean, forward.rstd, weight
    backward = cupynorm.layer_norm_backward(dy, x, num_cols, *saved)
    made = {"y": forward.y, "mean": forward.mean, "rstd": forward.rstd, "dx": backward.dx}
    rows = {0, 1, num_rows - 2, num_rows - 1}
    for elements in (2**30, 2**31, 2**32):
        near = elements // num_cols
        rows |= {row for row in range(near - 1, near + 2) if row < num_rows}
    rows = sorted(rows)

    def of_rows(tensor):
        return tensor[rows].double().cpu().numpy()

    case = Case("layer_norm", len(rows), num_cols, dtype)
    parameters = (each.double().cpu().numpy() for each in (weight, bias))
    problem = Problem(case, of_rows(x), of_rows(dy), *parameters)
    bounds = expect(problem)
    for name, tensor in made.items():
        found = judge(case, name, of_rows(tensor), *bounds[name])
        assert found.ok, found
    sums = {}
    step = max(1, 2**27 // num_cols)
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        x_hat = (x[part].double() - forward.mean[part, None]) * forward.rstd[part, None]
        for name, terms in (("dweight", dy[part].double() * x_hat), ("dbias", dy[part].double())):
            total, squares = sums.get(name, (0.0, 0.0))
            sums[name] = total + terms.sum(0), squares + terms.square().sum(0)
    # A term of dweight is rounded three times, each time by u / sqrt(3) in the mean, which is u
    # together. Four standard deviations of the sum of these errors are 4u * sqrt(squares). A term
    # of dbias is exact. The other part is of the additions.
    u, of_terms = 2.0**-24, {"dweight": 4, "dbias": 0}
    for name, (total, squares) in sums.items():
        length = squares.sqrt()
        size = torch.maximum(total.abs(), length)
        allowed = u * ((4 + num_rows**0.5) * size + of_terms[name] * length)
        allowed += total.abs() * DTYPES[dtype].half_ulp
        assert ((getattr(backward, name).double() - total).abs() <= allowed).all(), name


@pytest.mark.gpu
@pytest.mark.usefixtures("memory_is_given_back")
def test_t09_row_stride_of_2_to_the_31_elements():
    """Elsewhere row * row_stride in 32 bits wrapped for tensors of few elements, too."""
    torch = loaded_torch()
    num_cols, stride = 1000, 2**31
    buffer = torch.empty(2 * stride + num_cols, device="cuda", dtype=torch.float16)
    x = buffer.as_strided((3, num_cols), (stride, 1))
    x.normal_()
    weight, bias = (torch.randn(num_cols, device="cuda", dtype=torch.float16) for _ in range(2))
    expected = cupynorm.layer_norm(x.contiguous(), num_cols, weight, bias)
    assert expected.isfinite().all() and expected.std() > 0.5
    assert torch.equal(cupynorm.layer_norm(x, num_cols, weight, bias), expected)
    del buffer, x
    out = torch.empty(2 * stride + num_cols, device="cuda", dtype=torch.float16).as_strided(
        (3, num_cols), (stride, 1)
    )
    rows = torch.randn(3, num_cols, device="cuda").half()
    cupynorm.layer_norm(rows, num_cols, weight, bias, out=out)
    assert torch.equal(out, cupynorm.layer_norm(rows, num_cols, weight, bias))


# Layouts.


def layouts(lib, values: np.ndarray):
    """Pairs of a name and the same values in that layout; libraries differ in what they allow."""
    num_rows, num_cols = values.shape
    wide = np.repeat(values, 2, axis=1)
    wide[:, 1::2] = 777.0
    yield "every other column", lib.put(wide, "float32")[:, ::2]
    yield "transposed", lib.put(np.ascontiguousarray(values.T), "float32").T
    fused = np.full((num_rows, 3 * num_cols), 777.0)
    fused[:, num_cols : 2 * num_cols] = values
    yield "a part of a fused row", lib.put(fused, "float32")[:, num_cols : 2 * num_cols]
    yield "every other row", lib.put(np.repeat(values, 2, axis=0), "float32")[::2]
    if not lib.is_torch:
        yield "rows in reverse", lib.put(np.ascontiguousarray(values[::-1]), "float32")[::-1]
        yield (
            "columns in reverse",
            lib.put(np.ascontiguousarray(values[:, ::-1]), "float32")[:, ::-1],
        )
    else:
        column = lib.put(values, "float32").as_strided(
            (1, num_rows, 1, num_cols), (12345, num_cols, 777, 1)
        )
        yield "extents of 1 with strides that mean nothing", column.reshape(num_rows, num_cols)


@libraries
@norms
def test_t10_strided_arrays(norm, name):
    """Elsewhere strided, transposed, expanded or reversed arrays were read as contiguous."""
    lib = library(name)
    problem = random_problem(Case(norm, 6, 40, "float32"))
    weight, bias = lib.put(problem.weight, "float32"), lib.put(problem.bias, "float32")

    def results(x, dy) -> dict[str, np.ndarray]:
        forward = api(norm, "forward")(x, 40, weight, bias=bias, eps=problem.case.eps)
        statistics = (forward.mean, forward.rstd) if norm == "layer_norm" else (forward.rstd,)
        backward = api(norm, "backward")(dy, x, 40, *statistics, weight)
        found = {"y": forward.y, "mean": forward.mean, "rstd": forward.rstd} | backward._asdict()
        return {key: lib.get(value) for key, value in found.items() if value is not None}

    expected = results(lib.put(problem.x, "float32"), lib.put(problem.dy, "float32"))
    assert len(expected) == 5 + (norm == "layer_norm")
    seen = 0
    for (label, x), (_, dy) in zip(layouts(lib, problem.x), layouts(lib, problem.dy)):
        assert (lib.get(x) == problem.x).all(), label
        found = results(x, dy)
        assert_right(problem, found, CpuMachine(H200))
        # On a GPU narrower packs add up in another order; on the host nothing changes.
        assert not lib.on_host or all((found[key] == expected[key]).all() for key in expected), (
            label
        )
        assert (lib.get(x) == problem.x).all() and (lib.get(dy) == problem.dy).all(), label
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("name", TORCH)
def test_t10_expanded_gradient_of_a_sum(name):
    """Elsewhere the gradient of sum(), whose strides are 0, was read past its end."""
    torch, lib = loaded_torch(), library(name)
    x = lib.put(np.random.default_rng(0).standard_normal((6, 40)), "float32").requires_grad_()
    weight = lib.put(np.linspace(-1, 2, 40), "float32").requires_grad_()
    cupynorm.layer_norm(x, 40, weight).sum().backward()
    x64, weight64 = (each.detach().double().cpu().requires_grad_() for each in (x, weight))
    torch.nn.functional.layer_norm(x64, (40,), weight64).sum().backward()
    problem = Problem(
        Case("layer_norm", 6, 40, "float32", bias=None),
        lib.get(x),
        np.ones((6, 40)),
        lib.get(weight),
        None,
    )
    bounds = expect(problem)
    for tensor, got, right in (("dx", x.grad, x64.grad), ("dweight", weight.grad, weight64.grad)):
        assert judge("sum", tensor, lib.get(got), right.numpy(), bounds[tensor][1]).ok


# Dtypes, batches, devices and sums.


@pytest.mark.parametrize("weight, bias", [(None, None), ("w", None), ("w", "w")])
@pytest.mark.parametrize("kind", ["same", "float32"])
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("name", TORCH)
def test_t13_dtypes_of_x_and_weight(name, x, kind, weight, bias):
    """Elsewhere a weight of another dtype than x was misread or refused."""
    case = Case("layer_norm", 5, 48, x, weight=weight and kind, bias=bias and kind)
    check_arrays(random_problem(case), name)


@pytest.mark.slow
def test_t13_weights_of_two_dtypes_in_one_process(where):
    """Elsewhere a kernel cached for one weight dtype was used for the next."""
    for weight in ("bfloat16", "float32", "bfloat16", "float16"):
        case = Case("layer_norm", 4, 256, "bfloat16", weight=weight, bias=weight)
        check(random_problem(case), where)


@pytest.mark.parametrize("num_rows", [1, 7, 132, 4097])
@libraries
@norms
def test_t14_row_alone_and_in_a_batch(norm, name, num_rows):
    """Elsewhere the kernel depended on the batch size, and so did the bits of a row."""
    lib = library(name)
    problem = random_problem(Case(norm, num_rows, 100, "float32"))
    weight, bias = lib.put(problem.weight, "float32"), lib.put(problem.bias, "float32")

    def y_of(x):
        x = lib.put(x, "float32")
        return lib.get(api(norm, "forward")(x, 100, weight, bias=bias).y)

    together = y_of(problem.x)
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = y_of(problem.x[row : row + 1])
        assert alone[0].tobytes() == together[row].tobytes()


@libraries
def test_t15_twenty_backwards_give_the_same_bits(name):
    """Elsewhere atomics summed dweight in any order, so its last bits changed."""
    problem = random_problem(Case("layer_norm", 1030, 100, "float16"))
    first, *others = (
        {key: value.tobytes() for key, value in api_results(problem, library(name)).items()}
        for _ in range(20)
    )
    assert len(others) == 19 and all(other == first for other in others)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t16_gradient_in_one_column_only(strategy, where):
    """Elsewhere dweight and dbias were swapped or written to other columns."""
    problem = random_problem(Case("layer_norm", 6, 40, "float32", strategy=strategy))
    for col in (0, 17, 39):
        problem.dy[:] = 0
        problem.dy[:, col] = 1
        results = check(problem, where)
        others = np.arange(40) != col
        assert results["dbias"][col] == 6 and (results["dbias"][others] == 0).all()
        assert results["dweight"][col] != 6 and (results["dweight"][others] == 0).all()


@pytest.mark.parametrize("name", TORCH)
def test_t16_gradients_share_no_memory(name):
    """Elsewhere gradients shared memory, or backward overwrote its inputs."""
    torch, lib = loaded_torch(), library(name)
    problem = random_problem(Case("layer_norm", 6, 40, "float32", residual=True))
    names = ("x", "weight", "bias", "residual")
    leaves = {key: lib.put(getattr(problem, key), "float32").requires_grad_() for key in names}
    dy = lib.put(problem.dy, "float32")
    x, weight, bias, residual = leaves.values()
    y, added = cupynorm.layer_norm(x, 40, weight, bias, residual=residual, return_residual=True)
    torch.autograd.backward([y, added], [dy, dy])
    assert (lib.get(dy) == problem.dy).all()
    for key, leaf in leaves.items():
        assert (lib.get(leaf) == getattr(problem, key)).all(), key
    pointers = [
        tensor.data_ptr()
        for tensor in (y, added, dy, *leaves.values(), *(leaf.grad for leaf in leaves.values()))
    ]
    assert len(set(pointers)) == len(pointers)
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert residual.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "shape, normalized_shape",
    [
        ((3, 5, 40), 40),
        ((2, 3, 5, 40), (40,)),
        ((7, 6, 129), (6, 129)),
        pytest.param((65537, 8, 16), (8, 16), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", TORCH)
def test_t17_ranks_and_normalized_shapes(name, shape, normalized_shape):
    """Elsewhere several normalized dimensions were flattened wrongly, or only the last was used."""
    lib = library(name)
    normalized = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    num_cols = int(np.prod(normalized))
    num_rows = int(np.prod(shape)) // num_cols
    problem = random_problem(Case("layer_norm", num_rows, num_cols, "float32"))
    x, dy = (lib.put(values.reshape(shape), "float32") for values in (problem.x, problem.dy))
    weight, bias = (
        lib.put(values.reshape(normalized), "float32") for values in (problem.weight, problem.bias)
    )
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    y = cupynorm.layer_norm(x, normalized_shape, weight, bias)
    gradients = loaded_torch().autograd.grad(y, leaves, dy)
    shapes = [tuple(each.shape) for each in (y, *gradients)]
    assert shapes == [shape, shape, normalized, normalized]
    results = dict(
        zip(("y", "dx", "dweight", "dbias"), (lib.get(each) for each in (y, *gradients)))
    )
    results = {
        key: values.reshape(problem.x.shape if key in ("y", "dx") else -1)
        for key, values in results.items()
    }
    result = CheckResult(judge_all(problem, results))
    assert result.ok and len(result.findings) == 4, result


@pytest.mark.multi_gpu
def test_t18_device_that_is_not_current():
    """Elsewhere kernels ran on the current device, not on that of the tensors."""
    torch = loaded_torch()
    torch.cuda.set_device(0)
    x = torch.randn(64, 1000, device="cuda:1")
    weight = torch.randn(1000, device="cuda:1")
    results = []
    for device in (0, 1):
        with torch.cuda.device(device):
            leaf = x.clone().requires_grad_()
            y = cupynorm.layer_norm(leaf, 1000, weight)
            (dx,) = torch.autograd.grad(y, leaf, x)
            assert torch.cuda.current_device() == device
        assert y.device == dx.device == x.device
        results.append((y, dx))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    there = cupynorm.layer_norm(x.to("cuda:0"), 1000, weight.to("cuda:0"))
    assert torch.equal(there.cpu(), results[0][0].cpu())


@pytest.mark.gpu
def test_t18_first_call_inside_a_graph_capture():
    """Elsewhere compiling or allocating during a capture broke the CUDA graph."""
    torch = loaded_torch()
    x, dy = (torch.randn(33, 1111, device="cuda", dtype=torch.float16) for _ in range(2))
    weight = torch.randn(1111, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # No other call has this shape, so its kernels are compiled during the capture.
        forward = cupynorm.layer_norm_forward(x, 1111, weight)
        backward = cupynorm.layer_norm_backward(dy, x, 1111, forward.mean, forward.rstd, weight)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.current_stream().wait_stream(stream)
        again = cupynorm.layer_norm_forward(x, 1111, weight)
        gradients = cupynorm.layer_norm_backward(dy, x, 1111, again.mean, again.rstd, weight)
        assert torch.equal(forward.y, again.y) and again.y.isfinite().all()
        assert torch.equal(backward.dx, gradients.dx) and torch.equal(
            backward.dweight, gradients.dweight
        )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("with_dsum", [False, True])
@libraries
@norms
def test_t19_sum_with_a_residual_and_its_gradient(norm, name, with_dsum, dtype):
    """Elsewhere the gradient of the sum was dropped, or added after dx was rounded."""
    lib = library(name)
    problem = random_problem(Case(norm, 6, 40, dtype, residual=True))
    put = {
        key: lib.put(getattr(problem, key), dtype)
        for key in ("x", "dy", "weight", "bias", "residual")
    }
    forward = api(norm, "forward")(
        put["x"],
        40,
        put["weight"],
        bias=put["bias"],
        eps=problem.case.eps,
        residual=put["residual"],
    )
    added = as_dtype(problem.x + problem.residual, dtype)
    assert (lib.get(forward.sum) == added).all()
    dsum = as_dtype(np.random.default_rng(1).standard_normal((6, 40)), dtype) if with_dsum else None
    statistics = (forward.mean, forward.rstd) if norm == "layer_norm" else (forward.rstd,)
    given = None if dsum is None else lib.put(dsum, dtype)
    dx = lib.get(
        api(norm, "backward")(put["dy"], forward.sum, 40, *statistics, put["weight"], dsum=given).dx
    )
    expected, allowed = expect(problem)["dx"]
    if dsum is not None:
        # dx and dsum are added before the one rounding, to the dtype of dx.
        expected = expected + dsum
        allowed = allowed + np.abs(expected) * DTYPES[dtype].half_ulp + np.abs(dsum) * 2.0**-24
    found = judge(problem.case, "dx", dx, expected, allowed)
    assert found.ok, found
