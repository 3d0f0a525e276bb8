"""Traps t07 to t09 and t12: numbers of rows, columns and elements on which others failed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from array_libraries import LIBRARIES, api, api_results, library, loaded_torch
from trap_checks import H200, assert_right, check

import cupynorm
from cupynorm.check.cases import NORMS, Case, Problem, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.results import CheckResult, judge, judge_all
from cupynorm.dtypes import DTYPES
from cupynorm.plan import dispatch
from cupynorm.plan.problem import Layout
from cupynorm.plan.problem import Problem as DispatchProblem
from cupynorm.plan.strategies import STRATEGIES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t07_empty_input_launches_no_kernel(strategy):
    """Elsewhere a grid of zero blocks failed, and a later call reported the error.

    Here a plan for an empty input has no launches.
    """
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
                Layout.of_new_arrays(num_cols),
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
def test_t07_no_rows_or_no_columns(norm_name, name, shape):
    """Elsewhere empty batches raised, or dweight and dbias were uninitialised.

    Here shapes are right, both gradients are 0, and the next call works.
    """
    lib = library(name)
    x, dy = (lib.put(np.ones(shape), "float32") for _ in range(2))
    weight, bias = (lib.put(np.ones(shape[-1:]), "float32") for _ in range(2))
    forward = api(norm_name, "forward")(x, shape[-1], weight, bias=bias)
    assert tuple(forward.y.shape) == shape and tuple(forward.rstd.shape) == shape[:-1]
    statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
    backward = api(norm_name, "backward")(dy, x, shape[-1], *statistics, weight)
    assert tuple(backward.dx.shape) == shape
    assert tuple(backward.dweight.shape) == tuple(backward.dbias.shape) == shape[-1:]
    if 0 in shape[:-1]:
        assert (lib.get(backward.dweight) == 0).all() and (lib.get(backward.dbias) == 0).all()
    # No error is left behind for the next call to find.
    problem = random_problem(Case(norm_name, 3, 8, "float32"))
    assert_right(problem, api_results(problem, lib))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_sms", [1, 3])
def test_t08_rows_around_the_number_of_multiprocessors(num_sms, strategy):
    """Elsewhere a buffer of partial sums of fixed size was overrun.

    Here the buffer has as many rows as the grid has blocks or clusters, for any number of rows.
    """
    # The grid stops growing at the number of resident blocks.
    device = replace(
        H200, name="small", num_sms=num_sms, clusters=((2, num_sms), (4, 1), (8, 1), (16, 1))
    )
    where = CpuMachine(device)
    for num_rows in (1, 2, 3, 4, 5, 13, 49, 200):
        check(random_problem(Case("layer_norm", num_rows, 48, "float32", strategy=strategy)), where)


@pytest.mark.parametrize("num_rows", [65535, 65536, 65537])
def test_t08_more_than_65535_rows(num_rows):
    """Elsewhere rows were in gridDim.y, which holds 16 bits: the launch failed, or rows were lost.

    Here 65535, 65536 and 65537 rows are all right.
    """
    check(random_problem(Case("layer_norm", num_rows, 3, "float16")), CpuMachine())


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [8, 128, 2112])
def test_t08_rows_around_the_number_of_multiprocessors_of_a_gpu(num_cols):
    """The counts of t08 on a GPU."""
    where = GpuCheckMachine()
    num_sms = where.device.num_sms
    counts = [
        1,
        num_sms - 1,
        num_sms,
        num_sms + 1,
        *(2 * num_sms * times + 1 for times in (1, 3, 16)),
    ]
    # So many wide rows would take minutes in float64 on the host; the grid is the same.
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
    """dweight and dbias against float64, in chunks on the GPU; bounds as in gradient_check."""
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
    """Elsewhere row * num_cols in 32 bits wrapped, and other addresses were used.

    Here rows around multiples of 2^30 and 2^31, dweight and dbias agree with float64.
    """
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
    forward = cupynorm.layer_norm_forward(
        tensors["x"], num_cols, tensors["weight"], tensors["bias"]
    )
    backward = cupynorm.layer_norm_backward(
        tensors["dy"], tensors["x"], num_cols, forward.mean, forward.rstd, tensors["weight"]
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
@pytest.mark.usefixtures("memory_is_given_back")
def test_t09_row_stride_of_2_to_the_31_elements():
    """Elsewhere row * row_stride in 32 bits wrapped for tensors of few elements, too.

    Here strided rows give the bits of contiguous ones, for x and for out.
    """
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


@pytest.mark.slow
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
def test_t12_widths_at_edges_with_mixed_dtypes(x, weight, num_cols, where):
    """Elsewhere two dtypes at a kernel's widest row overran shared memory or lost columns.

    Here such widths agree with float64 for weights narrower and wider than x.
    """
    check(random_problem(Case("layer_norm", 2, num_cols, x, weight=weight, bias=weight)), where)
