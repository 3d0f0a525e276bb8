"""Traps: values and extents on which norms of other libraries failed, by their number in
cupynorm/verify/traps.py. Others are in test_widths.py and test_contract.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

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
from cupynorm.verify.kernels import CpuMachine, GpuCheckMachine, run_kernels, uses_welford
from cupynorm.verify.results import CheckResult, judge
from cupynorm.verify.traps import Trial, trap_trials

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


# Values.


def of_small_traps(case: Case, library: str = "") -> list[Trial]:
    """The traps of the gradient check that few fibers run in a moment, in rows as they are."""
    trials = trap_trials(case, library)
    return [each for each in trials if each.problem.x.size < 1000 and not each.layouts]


@pytest.mark.parametrize(
    "at, strategy, statistics",
    [
        pytest.param(at, *way, marks=[pytest.mark.slow] * (at % 3 > 0), id="-".join(way))
        for at, way in enumerate(product(STRATEGIES, STATISTICS))
    ],
)
def test_traps_of_the_gradient_check(at, strategy, statistics, where):
    """t01 to t06, t08, t12, t13, t16, t19 to t21; one of the dtypes and norms by turns."""
    dtype, norm = list(DTYPES)[(at + at // 4) % 4], NORMS[(at + at // 2) % 2]
    trials = of_small_traps(Case(norm, 0, 0, dtype, strategy=strategy, statistics=statistics))
    assert len(trials) > 30
    for trial in trials:
        rounded = uses_welford(trial.problem.case, where.device)
        found = trial.judged(run_kernels(trial.problem, where), rounded_mean=rounded)
        assert CheckResult(found).ok, CheckResult(found)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@libraries
@norms
def test_traps_in_arrays(norm, name, dtype):
    trials = of_small_traps(Case(norm, 0, 0, dtype), name)
    assert len(trials) > 30
    for trial in trials:
        found = trial.judged(api_results(trial.problem, library(name)))
        assert CheckResult(found).ok, CheckResult(found)


@pytest.mark.slow
def test_t01_wide_rows_of_a_mean_far_larger_than_their_spread(where):
    """Elsewhere E[x^2] - mean^2 cancelled: rstd was NaN or wrong."""
    rows = np.random.default_rng(0).standard_normal((2, 32768)) * 0.01 + 100
    check(with_rows(Case("layer_norm", 0, 0, "float32"), rows), where)


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
@pytest.mark.slow
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


@pytest.mark.parametrize("name", CENTERED)
def test_t04_infinity_or_nan_stays_in_its_row_on_each_path(name, where):
    case, backward = case_of(Call(name, "plain", {}), where)
    clean = random_problem(replace(case, num_rows=5))
    right = run(clean, where, backward)
    for value in (np.inf, np.nan):
        broken = replace(clean, x=clean.x.copy())
        broken.x[2, case.num_cols // 2] = value
        assert_only_row_2_is_broken(broken, right, run(broken, where, backward))


@ways
@norms
def test_t05_squares_that_overflow_float32(norm, strategy, statistics, where):
    """Elsewhere NaN. Of an infinite variance rstd is 0, y is the bias, dx is 0."""
    x = np.zeros((6, 40))  # sums and differences stay finite
    for at, value in enumerate((1e20, 1e30, 1e37)):
        x[2 * at, ::2], x[2 * at, 1::2], x[2 * at + 1, 3] = value, -value, value
    dtype = ("float32", "bfloat16")[STATISTICS.index(statistics)]
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
    assert_right(problem, api_results(problem, lib), CpuMachine(H200))


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


# Calls of libraries.


@pytest.mark.parametrize("name", TORCH)
def test_t10_expanded_gradient_of_a_sum(name):
    """Elsewhere the gradient of sum(), whose strides are 0, was read past its end."""
    torch, lib = loaded_torch(), library(name)
    x = lib.put(np.random.default_rng(0).standard_normal((6, 40)), "float32").requires_grad_()
    weight = lib.put(np.linspace(-1, 2, 40), "float32").requires_grad_()
    y = cupynorm.layer_norm(x, 40, weight)
    right = torch.autograd.grad(y, (x, weight), torch.ones_like(y), retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, weight)), right))


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
