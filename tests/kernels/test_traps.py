"""Inputs on which other implementations of these norms failed: each test says what broke there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from array_libraries import LIBRARIES, TORCH, api, api_results, library, loaded_torch

import cupynorm
from cupynorm.check.allowed import expect
from cupynorm.check.cases import NORMS, Case, Problem, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine, uses_welford
from cupynorm.check.results import CheckResult, judge, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import Call, backward_call, forward_call
from cupynorm.norm.request import BackwardOptions, ForwardOptions, Options
from cupynorm.plan import dispatch
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.problem import Layout
from cupynorm.plan.problem import Problem as DispatchProblem
from cupynorm.plan.strategies import STATISTICS, STRATEGIES

H200 = DEVICES["H200"]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request):
    return CpuMachine() if request.param == "cpu" else GpuCheckMachine()


def as_dtype(values, dtype: str) -> np.ndarray:
    return decode(encode(np.asarray(values, np.float64), dtype), dtype)


def with_rows(case: Case, rows, seed: int = 0) -> Problem:
    """A random problem with these rows for x, rounded to its dtype."""
    x = as_dtype(rows, case.x)
    case = replace(case, num_rows=x.shape[0], num_cols=x.shape[1])
    return replace(random_problem(case, seed), x=x)


def fits(case: Case, device) -> bool:
    """Whether a forced strategy takes the row in both directions."""
    parameters = {"weight": case.dtype("weight"), "layout": Layout.of(case.num_cols, ())}
    forward = DispatchProblem(
        "forward", True, case.num_cols, case.x, y=case.x, bias=case.dtype("bias"), **parameters
    )
    gradients = {
        "dy": case.x,
        "dx": case.x,
        "dweight": case.dtype("weight"),
        "dbias": case.dtype("bias"),
    }
    backward = DispatchProblem("backward", True, case.num_cols, case.x, **gradients, **parameters)
    tile = STRATEGIES[case.strategy].tile
    return tile(forward, device) is not None and tile(backward, device) is not None


def assert_right(problem: Problem, results: dict[str, np.ndarray], device=H200) -> None:
    welford = problem.case.statistics == "welford" or uses_welford(problem.case, device)
    result = CheckResult(judge_all(problem, results, rounded_mean=welford))
    assert len(result.findings) == len(results)
    assert result.ok, f"\n{result}"


def check(problem: Problem, where) -> dict[str, np.ndarray]:
    results = run_kernels(problem, where)
    assert_right(problem, results, where.device)
    return results


# -- values ----------------------------------------------------------------------------------------------


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
    """Welford merges means that are each rounded: they err by g * |mean|, as gradient_check allows of the mean it returns.

    So x_hat errs by `off` = g * |mean| * rstd more, and rstd, whose variance is about such a mean, by a share of
    off * (2 + off) more: the differences of two means, each of up to a standard deviation, err by `off` standard deviations.
    With e for what that makes of x_hat, off + |x_hat| * more_rstd, the gradients follow as they are defined: dweight is a sum
    of dy * x_hat, and dx = rstd * (wdy - mean(wdy) - x_hat * mean(wdy * x_hat)).
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
    # Where `off` nears 1, float32 holds no more than a digit of the row, and no bound says anything.
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


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", large_means())
def test_mean_far_larger_than_spread(rows, strategy, statistics, where):
    """E[x^2] - mean^2 cancels where the mean exceeds the spread by far: NaN, or a wrong rstd."""
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
def test_mean_far_larger_than_spread_in_arrays(name, rows):
    """The same rows through the public calls."""
    problem = with_rows(Case("layer_norm", 0, 0, "float32"), large_means()[rows])
    assert_right(problem, api_results(problem, library(name)))


CONSTANTS = np.array([14.0, 1234.0, 0.0, 0.1, -1 / 3, 1e-3 + 1e4])


def assert_constant_rows(problem: Problem, results: dict[str, np.ndarray]) -> None:
    assert (results["y"] == problem.bias).all()
    assert (results["mean"] == problem.x[:, 0]).all()
    assert np.isfinite(results["dx"]).all()
    assert (results["dweight"] == 0).all()


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_rows(dtype, strategy, statistics, where):
    """A variance that rounds below zero gives NaN for a constant row; y is bias and dweight is
    0.
    """
    checked = 0
    for num_cols in (3, 7, 240, 768, 1000, 5000):
        case = Case("layer_norm", 0, num_cols, dtype, strategy=strategy, statistics=statistics)
        if fits(case, where.device):
            problem = with_rows(case, np.repeat(CONSTANTS[:, None], num_cols, axis=1))
            assert_constant_rows(problem, run_kernels(problem, where))
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("num_cols", [3, 7, 768, 1000, 5000])
@pytest.mark.parametrize("name", LIBRARIES)
def test_constant_rows_in_arrays(name, num_cols):
    """The same rows through the public calls."""
    for dtype in ("float16", "float32", "float64"):
        problem = with_rows(
            Case("layer_norm", 0, 0, dtype), np.repeat(CONSTANTS[:, None], num_cols, axis=1)
        )
        assert_constant_rows(problem, api_results(problem, library(name)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_one_value_and_of_few(dtype, strategy, where):
    """A row of one column has no spread. Merging one value must not divide by zero."""
    problem = with_rows(
        Case("layer_norm", 0, 0, dtype, strategy=strategy), np.array([[1e6], [-3.0], [0.1]])
    )
    results = check(problem, where)
    assert_constant_rows(problem, results)
    assert (results["dx"] == 0).all()
    for num_cols in (2, 3, 5, 7):
        check(random_problem(Case("layer_norm", 6, num_cols, dtype, strategy=strategy)), where)


@pytest.mark.parametrize("name", LIBRARIES)
def test_rows_of_one_value_in_arrays(name):
    """The same rows through the public calls."""
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
        # As in float64: an infinite mean of squares makes rstd 0, finite values 0 and the infinite one 0 * inf.
        assert broken["rstd"][2] == 0
        assert (np.isnan(broken["y"][2]) == infinite).all() and (broken["y"][2] == problem.bias)[
            ~infinite
        ].all()
        assert (np.isnan(broken["dweight"]) == infinite).all()
    else:
        assert np.isnan(broken["y"][2]).all() and np.isnan(broken["rstd"][2])
        assert np.isnan(broken["dweight"]).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_an_infinity_or_nan_stays_in_its_row(norm_name, strategy, value, where):
    """Rows that share a warp or a block leaked a NaN to their neighbours; the others keep their
    bits.
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
def test_an_infinity_or_nan_stays_in_its_row_of_arrays(norm_name, name, value):
    """The same rows through the public calls."""
    clean = random_problem(Case(norm_name, 5, 100, "float16"))
    broken = replace(clean, x=clean.x.copy())
    broken.x[2, 7] = value
    results = [api_results(problem, library(name)) for problem in (clean, broken)]
    assert_only_row_2_is_broken(broken, *results)


def spread(value: float, num_cols: int) -> np.ndarray:
    return np.stack([np.linspace(-value, value, num_cols), np.linspace(value / 2, value, num_cols)])


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_values_whose_squares_nearly_overflow(norm_name, strategy, statistics, where):
    """Squares summed in the dtype of x overflow long before float32 does."""
    for dtype, value in (
        ("float16", 6e4),
        ("bfloat16", 1e18),
        ("float32", 1e18),
        ("float64", 1e150),
    ):
        case = Case(norm_name, 0, 0, dtype, strategy=strategy, statistics=statistics)
        problem = with_rows(case, spread(value, 40))
        # dx is about 1 / value: where it falls below what float32 holds it may be flushed to 0, as the bound allows.
        check(problem, where)


@pytest.mark.parametrize("value", [1e20, 1e30, 1e37])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_values_whose_squares_overflow(norm_name, strategy, statistics, dtype, value, where):
    """Beyond float32 the variance is infinite, so rstd is 0 and y is bias, in every kernel."""
    # Documented: infinite variance, so rstd is 0 and y is bias. Sums and differences of values stay finite in these rows.
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
def test_constant_rows_of_huge_values(strategy, statistics, value, where):
    """A row of equal huge values has no spread, though the squares of its values overflow."""
    case = Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics)
    problem = with_rows(case, np.full((2, 40), value))
    assert_constant_rows(problem, run_kernels(problem, where))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_weights_near_zero_and_huge(norm_name, strategy, where):
    """A backward that recovers x_hat as y / weight divides by zero. Ours reads x."""
    # dx comes from x, not from y / weight: a zero weight divides nothing.
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
def test_weights_near_zero_and_huge_in_arrays(norm_name, name):
    """The same weights through the public calls."""
    problem = random_problem(Case(norm_name, 6, 96, "float32"))
    problem.weight[:] = as_dtype(np.resize([0.0, 5e-6, -5e-6, 1e-8, 1e10, 1.0], 96), "float32")
    problem.x[:] = as_dtype(
        problem.x * np.array([1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9])[:, None], "float32"
    )
    assert_right(problem, api_results(problem, library(name)))


# -- extents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_launched_for_nothing(strategy):
    """A grid of zero blocks is an error that later calls report; an empty input needs no launch."""
    for num_rows, num_cols in ((0, 64), (4, 0), (0, 0)):
        for direction, others in (
            ("forward", {"y": "float16"}),
            ("backward", {"dy": "float16", "dx": "float16", "dweight": "float16"}),
        ):
            problem = DispatchProblem(
                direction,
                True,
                num_cols,
                "float16",
                Layout.of(num_cols, ()),
                weight="float16",
                **others,
            )
            assert dispatch.make_plan(problem, H200, num_rows, strategy=strategy).launches == ()
            assert (
                dispatch.make_plan(
                    replace(problem, num_cols=64), H200, 4, strategy=strategy
                ).launches
                != ()
            )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 64), (3, 2, 0)])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_no_rows_and_no_columns(norm_name, name, shape):
    """Empty batches raised errors or left the gradients of the parameters uninitialised; they
    are 0.
    """
    lib = library(name)
    x, dy = (lib.put(np.ones(shape), "float32") for _ in range(2))
    weight, bias = (lib.put(np.ones(shape[-1:]), "float32") for _ in range(2))
    forward = api(norm_name, "forward")(x, weight, bias)
    assert tuple(forward.y.shape) == shape and tuple(forward.rstd.shape) == shape[:-1]
    statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
    backward = api(norm_name, "backward")(dy, x, *statistics, weight)
    assert tuple(backward.dx.shape) == shape
    assert tuple(backward.dweight.shape) == tuple(backward.dbias.shape) == shape[-1:]
    if 0 in shape[:-1]:
        assert (lib.get(backward.dweight) == 0).all() and (lib.get(backward.dbias) == 0).all()
    # No error is left behind for the next call to find.
    problem = random_problem(Case(norm_name, 3, 8, "float32"))
    assert_right(problem, api_results(problem, lib))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_sms", [1, 3])
def test_rows_around_the_number_of_multiprocessors(num_sms, strategy):
    """A partial-sum buffer of a fixed size was overrun where rows do not divide among the
    blocks.
    """
    # The number of partial rows of dweight and dbias follows the grid, which stops growing at what is resident.
    device = replace(
        H200, name="small", num_sms=num_sms, clusters=((2, num_sms), (4, 1), (8, 1), (16, 1))
    )
    where = CpuMachine(device)
    for num_rows in (1, 2, 3, 4, 5, 13, 49, 200):
        check(random_problem(Case("layer_norm", num_rows, 48, "float32", strategy=strategy)), where)


@pytest.mark.parametrize("num_rows", [65535, 65536, 65537])
def test_more_rows_than_16_bits_count(num_rows):
    """gridDim.y holds 16 bits: 65536 rows failed to launch, or lost rows."""
    check(random_problem(Case("layer_norm", num_rows, 3, "float16")), CpuMachine())


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [8, 128, 2112])
def test_rows_around_the_number_of_multiprocessors_of_a_gpu(num_cols):
    """The same counts of rows on a real GPU."""
    where = GpuCheckMachine()
    num_sms = where.device.num_sms
    counts = [
        1,
        num_sms - 1,
        num_sms,
        num_sms + 1,
        *(2 * num_sms * times + 1 for times in (1, 3, 16)),
    ]
    # A wide row this often would take minutes in float64 on the host, and exercises the same grid.
    counts += [65535, 65536, 65537, 131072] if num_cols <= 128 else []
    for num_rows in counts:
        check(random_problem(Case("layer_norm", num_rows, num_cols, "bfloat16")), where)


def boundary_rows(problem_rows: list[int], tensors: dict, dtype: str, num_cols: int) -> None:
    """Single rows of a result too large for the host, against float64."""
    weight, bias = (tensors[name].double().cpu().numpy() for name in ("weight", "bias"))
    x, dy = (tensors[name][problem_rows].double().cpu().numpy() for name in ("x", "dy"))
    case = Case("layer_norm", len(problem_rows), num_cols, dtype)
    problem = Problem(case, x, dy, weight, bias)
    names = ("y", "mean", "rstd", "dx")
    results = {name: tensors[name][problem_rows].double().cpu().numpy() for name in names}
    result = CheckResult(judge_all(problem, results))
    assert len(result.findings) == len(names)
    assert result.ok, f"rows {problem_rows}\n{result}"


def parameter_gradients(tensors: dict, dtype: str) -> None:
    """dweight and dbias against float64 in chunks on the GPU; the bounds are those of gradient_check's docstring."""
    torch = loaded_torch()
    num_rows, num_cols = tensors["x"].shape
    u = 2.0**-24
    g = u * (4 + num_cols**0.5)
    sums = {
        name: torch.zeros(num_cols, dtype=torch.float64, device="cuda")
        for name in ("dw", "dw2", "db", "db2", "e2")
    }
    step = max(1, 2**27 // num_cols)
    for first in range(0, num_rows, step):
        x, dy = (tensors[name][first : first + step].double() for name in ("x", "dy"))
        variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        rstd = (variance + 1e-5).rsqrt()
        x_hat = (x - mean) * rstd
        e = g * (1 + x_hat.abs()) + u * mean.abs() * rstd
        terms = dy * x_hat
        for name, values in (
            ("dw", terms),
            ("dw2", terms**2),
            ("db", dy),
            ("db2", dy**2),
            ("e2", (dy * e) ** 2),
        ):
            sums[name] += values.sum(0)
    found = {name: values.cpu().numpy() for name, values in sums.items()}
    of_sum = u * (4 + num_rows**0.5)
    for name, expected, squares, more in (
        ("dweight", found["dw"], found["dw2"], 2 * np.sqrt(found["e2"])),
        ("dbias", found["db"], found["db2"], 0.0),
    ):
        allowed = (
            more
            + of_sum * np.maximum(np.abs(expected), np.sqrt(squares))
            + np.abs(expected) * DTYPES[dtype].half_ulp
        )
        finding = judge("large", name, tensors[name].double().cpu().numpy(), expected, allowed)
        assert finding.ok, finding


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, num_rows, num_cols",
    [("float16", 175000, 12288), ("float16", 2**23 + 16, 256), ("bfloat16", 2**26 + 3, 64)],
)
def test_more_elements_than_32_bits_count(dtype, num_rows, num_cols):
    """row * num_cols in 32 bits wraps beyond 2^31 elements, and reads or writes elsewhere."""
    torch = loaded_torch()
    kind = getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    shape, parameters = (num_rows, num_cols), (num_cols,)
    tensors = {
        name: torch.empty(shape, device="cuda", dtype=kind).normal_(generator=generator)
        for name in ("x", "dy")
    }
    tensors |= {
        name: torch.randn(parameters, device="cuda", dtype=kind) for name in ("weight", "bias")
    }
    forward = cupynorm.layer_norm_forward(tensors["x"], tensors["weight"], tensors["bias"])
    backward = cupynorm.layer_norm_backward(
        tensors["dy"], tensors["x"], forward.mean, forward.rstd, tensors["weight"]
    )
    tensors |= {"y": forward.y, "mean": forward.mean, "rstd": forward.rstd} | backward._asdict()
    # Rows about each multiple of 2^30 and 2^31 elements or bytes, and the ends.
    rows = {0, 1, num_rows - 2, num_rows - 1}
    for elements in (2**30, 2**31, 2**32):
        rows |= {
            row
            for row in range(elements // num_cols - 1, elements // num_cols + 2)
            if row < num_rows
        }
    boundary_rows(sorted(rows), tensors, dtype, num_cols)
    parameter_gradients(tensors, dtype)


@pytest.mark.gpu
def test_rows_two_gigaelements_apart():
    """row * row_stride in 32 bits wraps, though the tensor has few elements."""
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


# -- layouts ---------------------------------------------------------------------------------------------


def layouts(lib, values: np.ndarray):
    """The same values in other layouts: name -> array, one entry at a time because libraries differ in what they can."""
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


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_other_layouts_of_x_and_dy(norm_name, name):
    """Strided, transposed, expanded and reversed arrays were read as if they were contiguous."""
    lib = library(name)
    problem = random_problem(Case(norm_name, 6, 40, "float32"))
    weight, bias = lib.put(problem.weight, "float32"), lib.put(problem.bias, "float32")

    def results(x, dy) -> dict[str, np.ndarray]:
        forward = api(norm_name, "forward")(x, weight, bias, problem.case.eps)
        statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
        backward = api(norm_name, "backward")(dy, x, *statistics, weight)
        found = {"y": forward.y, "mean": forward.mean, "rstd": forward.rstd} | backward._asdict()
        return {key: lib.get(value) for key, value in found.items() if value is not None}

    expected = results(lib.put(problem.x, "float32"), lib.put(problem.dy, "float32"))
    assert len(expected) == 5 + (norm_name == "layer_norm")
    seen = 0
    for (label, x), (_, dy) in zip(layouts(lib, problem.x), layouts(lib, problem.dy)):
        assert (lib.get(x) == problem.x).all(), label
        found = results(x, dy)
        assert_right(problem, found)
        # On a GPU narrower packs add up in another order; on the host nothing changes.
        assert not lib.on_host or all((found[key] == expected[key]).all() for key in expected), (
            label
        )
        assert (lib.get(x) == problem.x).all() and (lib.get(dy) == problem.dy).all(), label
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("name", TORCH)
def test_the_expanded_gradient_of_a_sum(name):
    """sum().backward() sends a gradient of stride 0, which kernels read past its end."""
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


def run_call(
    machine: CpuMachine, call: Call, tensors: dict[str, Rows], statistics: dict[str, int]
) -> None:
    addresses = {name: rows.pointer for name, rows in tensors.items()} | statistics
    if call.partials_shape:
        partials, addresses["partials"] = machine.empty(
            call.partials_shape, call.plan.problem.compute
        )
    for launch, words in zip(call.launches, call.fill(addresses)):
        machine.launch(launch, words)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_row_strides_in_the_kernels(strategy):
    """A kernel that takes num_cols for the row stride reads the wrong rows."""
    # Rows of x, y, dy and dx that lie apart, a single row repeated (stride 0), and rows in reverse.
    machine = CpuMachine()
    case = Case("layer_norm", 5, 48, "float32", strategy=strategy)
    problem = random_problem(case)
    right = run_kernels(problem, machine)
    launch_options = Options(strategy)

    def apart(values: np.ndarray | None, stride: int) -> tuple[np.ndarray, Rows]:
        buffer = np.full((5, stride), np.nan, np.float32)
        if values is not None:
            buffer[:, :48] = values
        return buffer, Rows(buffer.ctypes.data, 5, 48, stride, "float32")

    parameters = [
        (encode(values, "float32"), "float32") for values in (problem.weight, problem.bias)
    ]
    weight, bias = (Rows(array.ctypes.data, 1, 48, 48, dtype) for array, dtype in parameters)
    kept_x, x = apart(problem.x, 64)
    kept_dy, dy = apart(problem.dy, 52)
    kept_y, y = apart(None, 80)
    kept_dx, dx = apart(None, 56)
    mean, rstd = (np.full(5, np.nan, np.float32) for _ in range(2))
    dweight, dbias = (np.full(48, np.nan, np.float32) for _ in range(2))

    def run(x, y, dy, dx):
        statistics = {"mean": mean.ctypes.data, "rstd": rstd.ctypes.data}
        sums = {
            f"d{name}": Rows(array.ctypes.data, 1, 48, 48, "float32")
            for name, array in (("weight", dweight), ("bias", dbias))
        }
        forward = ForwardOptions(True, (48,), 1e-5, launch=launch_options)
        tensors = {"x": x, "y": y, "weight": weight, "bias": bias}
        run_call(
            machine, forward_call(machine.device, tensors, forward, "forward"), tensors, statistics
        )
        tensors = {"x": x, "dy": dy, "weight": weight, "dx": dx, **sums}
        backward = BackwardOptions(True, (48,), launch=launch_options)
        run_call(
            machine,
            backward_call(machine.device, tensors, backward, "float32"),
            tensors,
            statistics,
        )

    run(x, y, dy, dx)
    for tensor, got in (
        ("y", kept_y[:, :48]),
        ("dx", kept_dx[:, :48]),
        ("dweight", dweight),
        ("dbias", dbias),
        ("mean", mean),
    ):
        assert (got == right[tensor]).all(), tensor
    assert np.isnan(kept_y[:, 48:]).all() and np.isnan(kept_dx[:, 48:]).all()
    assert (kept_x[:, :48] == problem.x).all() and (kept_dy[:, :48] == problem.dy).all()

    def reverse(rows: Rows) -> Rows:
        return rows._replace(
            pointer=rows.pointer + 4 * 4 * rows.row_stride, row_stride=-rows.row_stride
        )

    run(reverse(x), reverse(y), reverse(dy), reverse(dx))
    assert (
        (kept_y[:, :48] == right["y"]).all()
        and (kept_dx[:, :48] == right["dx"]).all()
        and (mean == right["mean"][::-1]).all()
    )

    run(x._replace(row_stride=0), y, dy._replace(row_stride=0), dx)
    assert (kept_y[:, :48] == right["y"][0]).all() and (kept_dx[:, :48] == right["dx"][0]).all()
    # Five equal terms: four additions, each rounded.
    assert judge(
        "repeated",
        "dbias",
        np.float64(dbias),
        5 * problem.dy[0],
        5 * np.abs(problem.dy[0]) * 2.0**-22 + 1e-30,
    ).ok


class Displaced:
    """A machine that places one tensor, and no other, `offset` elements after an aligned address."""

    puts = ("weight", "bias", "x", "residual", "dy")
    empties = ("sum", "y", "mean", "rstd", "dx", "dweight", "dbias")

    def __init__(self, machine, tensor: str, offset: int) -> None:
        self.machine, self.tensor, self.offset = machine, tensor, offset
        self.device = machine.device
        self.get, self.launch = machine.get, machine.launch
        self.counts = {"put": 0, "empty": 0}
        self.displaced = 0

    def _place(self, kind: str, names: tuple[str, ...], array, pointer: int, shape, fill=None):
        at = self.counts[kind]
        self.counts[kind] += 1
        if at >= len(names) or names[at] != self.tensor:
            return array, pointer
        size = int(np.prod(shape))
        # The last `size` of a buffer that starts aligned and is `offset` longer.
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        buffer, start = self.machine.empty((size + self.offset,), dtype)
        placed = buffer[self.offset :].reshape(shape)
        if fill is not None:
            placed[...] = array
        self.displaced += 1
        return placed, start + self.offset * array.dtype.itemsize

    def put(self, values: np.ndarray):
        array, pointer = self.machine.put(values)
        return self._place("put", self.puts, array, pointer, values.shape, fill=True)

    def empty(self, shape: tuple[int, ...], dtype: str):
        array, pointer = self.machine.empty(shape, dtype)
        return self._place("empty", self.empties, array, pointer, shape)


@pytest.mark.parametrize("tensor", [*Displaced.puts, *Displaced.empties])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_base_address_off_by_some_elements(dtype, tensor, where):
    """A vector load at an unaligned base address faults; a view may start anywhere."""
    case = Case("layer_norm", 3, 64, dtype, residual=True)
    problem = random_problem(case)
    for offset in (1, 2, 3, 4, 8):
        machine = Displaced(where, tensor, offset)
        assert_right(problem, run_kernels(problem, machine), where.device)
        assert machine.displaced == 1
    for strategy in STRATEGIES:
        machine = Displaced(where, tensor, 1)
        forced = replace(problem, case=replace(case, strategy=strategy))
        assert_right(forced, run_kernels(forced, machine), where.device)
        assert machine.displaced == 1


@pytest.mark.parametrize("num_cols", [1, 3, 31, 33, 1023, 1024, 1025, 8191, 8193])
@pytest.mark.parametrize(
    "x, weight",
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float64", "float32"),
    ],
)
def test_edges_of_strategies_with_mixed_dtypes(x, weight, num_cols, where):
    """Widths beside the limit of a kernel, with two dtypes, overran shared memory or lost a
    tail.
    """
    check(random_problem(Case("layer_norm", 2, num_cols, x, weight=weight, bias=weight)), where)


# -- calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight, bias", [(None, None), ("w", None), ("w", "w")])
@pytest.mark.parametrize("kind", ["same", "float32"])
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("name", TORCH)
def test_dtypes_of_x_and_weight(name, x, kind, weight, bias):
    """A weight of another dtype than x was read as if it had the dtype of x, or refused."""
    case = Case(
        "layer_norm", 5, 48, x, weight=kind if weight else None, bias=kind if bias else None
    )
    problem = random_problem(case)
    assert_right(problem, api_results(problem, library(name)))


def test_weights_of_two_dtypes_in_one_process(where):
    """A kernel cached for one weight dtype served the next call with another."""
    # What is cached for the first must not serve the second.
    for weight in ("bfloat16", "float32", "bfloat16", "float16"):
        check(
            random_problem(Case("layer_norm", 4, 256, "bfloat16", weight=weight, bias=weight)),
            where,
        )
    problem = DispatchProblem(
        "forward", True, 256, "bfloat16", Layout.of(256, ()), y="bfloat16", weight="bfloat16"
    )
    kernels = {dispatch.choose(replace(problem, weight=dtype), H200).kernel for dtype in DTYPES}
    assert len(kernels) == len(DTYPES)


@pytest.mark.parametrize("num_rows", [1, 7, 132, 4097])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_a_row_alone_and_in_a_batch(norm_name, name, num_rows):
    """Where the kernel follows the batch size, a row's result changes with its neighbours."""
    lib = library(name)
    problem = random_problem(Case(norm_name, num_rows, 100, "float32"))
    weight, bias = lib.put(problem.weight, "float32"), lib.put(problem.bias, "float32")
    together = lib.get(api(norm_name, "forward")(lib.put(problem.x, "float32"), weight, bias).y)
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = lib.get(
            api(norm_name, "forward")(lib.put(problem.x[row : row + 1], "float32"), weight, bias).y
        )
        assert alone[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize("name", LIBRARIES)
def test_twenty_backwards_give_the_same_bits(name):
    """dweight summed by atomics changes its last bits from run to run."""
    problem = random_problem(Case("layer_norm", 1030, 100, "float16"))
    first, *others = (
        {key: value.tobytes() for key, value in api_results(problem, library(name)).items()}
        for _ in range(20)
    )
    assert len(others) == 19 and all(other == first for other in others)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_in_one_column_only(strategy, where):
    """dweight and dbias were swapped, or written to another column."""
    problem = random_problem(Case("layer_norm", 6, 40, "float32", strategy=strategy))
    for col in (0, 17, 39):
        problem.dy[:] = 0
        problem.dy[:, col] = 1
        results = check(problem, where)
        others = np.arange(40) != col
        assert results["dbias"][col] == 6 and (results["dbias"][others] == 0).all()
        assert results["dweight"][col] != 6 and (results["dweight"][others] == 0).all()


@pytest.mark.parametrize("name", TORCH)
def test_gradients_share_nothing_and_inputs_stay(name):
    """Gradients shared memory with one another, or a backward overwrote its inputs."""
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
    [((3, 5, 40), 40), ((2, 3, 5, 40), (40,)), ((7, 6, 129), (6, 129)), ((65537, 8, 16), (8, 16))],
)
@pytest.mark.parametrize("name", TORCH)
def test_ranks_and_normalized_shapes(name, shape, normalized_shape):
    """Several normalised dimensions were flattened wrongly, or only the last one was normalised."""
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
    assert_right(problem, results)


@pytest.mark.multi_gpu
def test_a_device_that_is_not_current():
    """Kernels were launched on the current device, not on the one that holds the tensors."""
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
def test_capture_with_the_first_call_inside_and_replay_on_a_side_stream():
    """Compiling or allocating within a capture broke the graph, or work went to the default
    stream.
    """
    torch = loaded_torch()
    x, dy = (torch.randn(33, 1111, device="cuda", dtype=torch.float16) for _ in range(2))
    weight = torch.randn(1111, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # A shape that nothing before had: its kernels are compiled and loaded while the stream is captured.
        forward = cupynorm.layer_norm_forward(x, weight)
        backward = cupynorm.layer_norm_backward(dy, x, forward.mean, forward.rstd, weight)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.current_stream().wait_stream(stream)
        again = cupynorm.layer_norm_forward(x, weight)
        gradients = cupynorm.layer_norm_backward(dy, x, again.mean, again.rstd, weight)
        assert torch.equal(forward.y, again.y) and again.y.isfinite().all()
        assert torch.equal(backward.dx, gradients.dx) and torch.equal(
            backward.dweight, gradients.dweight
        )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("with_dsum", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_the_sum_with_a_residual_and_its_gradient(norm_name, name, with_dsum, dtype):
    """The sum was rounded before it was normalised, or its gradient was dropped."""
    lib = library(name)
    problem = random_problem(Case(norm_name, 6, 40, dtype, residual=True))
    put = {
        key: lib.put(getattr(problem, key), dtype)
        for key in ("x", "dy", "weight", "bias", "residual")
    }
    forward = api(norm_name, "forward")(
        put["x"], put["weight"], put["bias"], problem.case.eps, residual=put["residual"]
    )  # fmt: skip
    added = as_dtype(problem.x + problem.residual, dtype)
    assert (lib.get(forward.sum) == added).all()
    dsum = as_dtype(np.random.default_rng(1).standard_normal((6, 40)), dtype) if with_dsum else None
    statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
    given = None if dsum is None else lib.put(dsum, dtype)
    dx = lib.get(
        api(norm_name, "backward")(
            put["dy"], forward.sum, *statistics, put["weight"], dsum=given
        ).dx
    )
    expected, allowed = expect(problem)["dx"]
    if dsum is not None:
        # dx and dsum are added before the one rounding, to the dtype of dx.
        expected = expected + dsum
        allowed = allowed + np.abs(expected) * DTYPES[dtype].half_ulp + np.abs(dsum) * 2.0**-24
    found = judge(problem.case, "dx", dx, expected, allowed)
    assert found.ok, found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_gradient_of_the_sum_in_the_kernels(dtype, strategy):
    """dsum is added to dx before the one rounding, in every kernel."""
    machine = CpuMachine()
    problem = random_problem(Case("layer_norm", 5, 48, dtype, strategy=strategy))
    plain = run_kernels(problem, machine)
    compute = DTYPES[dtype].compute
    dsum = as_dtype(np.random.default_rng(1).standard_normal((5, 48)), dtype)
    kept = [encode(values, dtype) for values in (problem.x, problem.dy, dsum, problem.weight)]
    kept += [encode(plain[name], compute) for name in ("mean", "rstd")]
    dx, _ = machine.empty((5, 48), dtype)
    x, dy, more, dx_rows = (Rows(array.ctypes.data, 5, 48, 48, dtype) for array in (*kept[:3], dx))
    weight = Rows(kept[3].ctypes.data, 1, 48, 48, dtype)
    tensors = {"x": x, "dy": dy, "dsum": more, "dx": dx_rows, "weight": weight}
    options = BackwardOptions(True, (48,), launch=Options(strategy))
    statistics = {"mean": kept[4].ctypes.data, "rstd": kept[5].ctypes.data}
    run_call(machine, backward_call(machine.device, tensors, options, compute), tensors, statistics)
    expected, allowed = expect(problem)["dx"]
    expected = expected + dsum
    allowed = (
        allowed
        + np.abs(expected) * DTYPES[dtype].half_ulp
        + np.abs(dsum) * DTYPES[compute].half_ulp
    )
    found = judge(problem.case, "dx", decode(dx, dtype), expected, allowed)
    assert found.ok, found


@pytest.mark.parametrize("num_rows, num_cols", [(7, 33), (3, 1000), (2, 9000)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("norm_name", NORMS)
def test_dx_is_orthogonal_to_what_the_norm_removes(norm_name, dtype, num_rows, num_cols, where):
    """A dx with a wrong mean term looks plausible, but does not sum to 0 over its row."""
    # The norm does not see a shift or (with eps 0) a scale of its row, so dx has no part along either.
    problem = random_problem(Case(norm_name, num_rows, num_cols, dtype, eps=0.0))
    results = run_kernels(problem, where)
    dx = results["dx"]
    mean = problem.x.mean(axis=1, keepdims=True) if norm_name == "layer_norm" else 0.0
    x_hat = (problem.x - mean) / np.sqrt(((problem.x - mean) ** 2).mean(axis=1, keepdims=True))
    # Both means that dx subtracts err by at most g times the mean of |wdy|, which is about that of |dx|; x_hat, of size 1, errs
    # by u * |mean| * rstd, at most 8 u here; dx is rounded once. A dx that is not orthogonal has a sum of order sqrt(num_cols).
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
def test_eps_of_zero_and_below(norm_name, strategy, statistics, where):
    """With eps 0 or below a constant row has no finite result. It is NaN or infinite, as in
    float64.
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
    # Against float64, kind by kind: a constant row with eps 0 has an infinite rstd and 0 * inf in y.
    problem = with_rows(
        Case("layer_norm", 0, 0, "float32", strategy=strategy, statistics=statistics, eps=0.0),
        rows[:1],
    )
    results = check(problem, where)
    assert np.isposinf(results["rstd"]).all() and np.isnan(results["y"]).all()


@pytest.mark.parametrize("eps", [0.0, -0.05])
@pytest.mark.parametrize("name", LIBRARIES)
def test_eps_of_zero_and_below_in_arrays(name, eps):
    """The same eps through the public calls."""
    rows = np.stack([np.full(40, 3.0), np.random.default_rng(0).standard_normal(40)])
    problem = with_rows(Case("layer_norm", 0, 0, "float32", eps=eps), rows)
    results = api_results(problem, library(name))
    assert_right(problem, results)
    assert np.isnan(results["y"][0]).all() and np.isfinite(results["y"][1]).all()
