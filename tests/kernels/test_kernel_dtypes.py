"""Kernels with operands of several dtypes, and how numbers at their limits are rounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import as_dtype, assert_identical, assert_right, check

import cupynorm
from cupynorm.verify.cases import Case, random_problem
from cupynorm.verify.kernels import run_kernels

LEAST = 2.0**-126  # the smallest normal float32


def test_weight_and_bias_of_two_dtypes(where):
    check(Case("layer_norm", 4, 96, "float16", weight="float32", bias="bfloat16"), where)
    check(Case("rms_norm", 4, 97, "bfloat16", weight="float64", bias="float16"), where)


@pytest.mark.parametrize("y", [None, "float64"])
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
def test_float64_parameters_of_narrow_rows_are_used_in_float32(x, y, where):
    """To the bit as if they had been rounded. A float64 y holds float32 values."""
    case = Case("layer_norm", 9, 200, x, y, weight="float64", bias="float64", strategy="warp")
    problem = random_problem(case)
    narrow = {name: np.float64(np.float32(getattr(problem, name))) for name in ("weight", "bias")}
    assert (problem.weight != narrow["weight"]).any()
    got, expected = (run_kernels(each, where) for each in (problem, replace(problem, **narrow)))
    assert_identical(got, expected)
    assert (got["y"] == np.float32(got["y"])).all()
    wide = replace(problem, case=replace(case, x="float64", y="float64"))
    assert (run_kernels(wide, where)["y"] != got["y"]).all(axis=1).any()


@pytest.mark.parametrize(
    "x, weight", [("bfloat16", "float64"), ("float64", "float32"), ("float64", "bfloat16")]
)
def test_zero_centered_weight_near_minus_one(x, weight, where):
    """1 + weight is computed in the wider of the two types, because its leading digits cancel."""
    case = Case("layer_norm", 4, 200, x, y="float32", weight=weight, zero_centered_weight=True)
    problem = random_problem(case)
    problem.weight = as_dtype(problem.weight * 2.0**-8 - 1, weight)
    assert_right(problem, run_kernels(problem, where), where)


@pytest.mark.parametrize("sum_dtype", ["float32", "float64"])
@pytest.mark.parametrize("x", [2.0**-130, -(2.0**-127), LEAST])
def test_a_subnormal_float32_is_added_or_counts_as_zero(x, sum_dtype, where):
    """Nothing else: it is added whole or not at all. The smallest normal number is added."""
    problem = random_problem(Case("layer_norm", 3, 200, "float32", residual=sum_dtype))
    problem = replace(problem, x=np.full_like(problem.x, x))
    for residual in (0.0, 4 * LEAST):
        problem.residual[:] = residual
        got, whole = run_kernels(problem, where)["sum"], np.float32(residual + x)
        close = np.abs(got - whole) <= 2.0**-22 * np.abs(whole)
        assert (close | (got == residual) & (x != LEAST)).all()


def test_subnormals_of_float64_and_of_numpy_are_kept(where):
    case = Case("rms_norm", 3, 200, "float64", residual=True)
    problem = random_problem(case)
    rows = {name: np.rint(4 * getattr(problem, name)) * 2.0**-1074 for name in ("x", "residual")}
    problem = replace(problem, **rows)
    got = run_kernels(problem, where)["sum"]
    np.testing.assert_array_equal(got, problem.x + problem.residual)
    assert np.unique(got).size > 10
    x = np.full((2, 8), 2.0**-130, np.float32)
    _, added = cupynorm.layer_norm(x, 8, residual=x, return_residual=True)
    np.testing.assert_array_equal(added, 2 * x)
