"""float32 values below 2^-126 may count as 0; no others do, and no float64 ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cupynorm
from cupynorm.check.cases import Case, random_problem
from cupynorm.check.run import run_kernels

LEAST = 2.0**-126  # the smallest normal float32


def summed(sum_dtype: str, x, residual, where) -> np.ndarray:
    """Sums by the kernels of rows whose input and residual are these numbers."""
    problem = random_problem(Case("layer_norm", 3, 200, "float32", residual=sum_dtype))
    problem = replace(problem, x=np.full_like(problem.x, x))
    problem = replace(problem, residual=np.full_like(problem.x, residual))
    return run_kernels(problem, where)["sum"]


@pytest.mark.parametrize("sum_dtype", ["float32", "float64"])
@pytest.mark.parametrize("x", [2.0**-130, -(2.0**-127)])
def test_a_subnormal_float32_is_added_or_counts_as_zero(x, sum_dtype, where):
    """Nothing else: it is added whole or not at all."""
    for residual in (0.0, 4 * LEAST):
        got, whole = summed(sum_dtype, x, residual, where), np.float32(residual + x)
        close = np.abs(got - whole) <= 2.0**-22 * np.abs(whole)
        assert (close | (got == residual)).all()


@pytest.mark.parametrize("sum_dtype", ["float32", "float64"])
def test_the_smallest_normal_float32_is_kept(sum_dtype, where):
    assert (summed(sum_dtype, LEAST, 0.0, where) == LEAST).all()


def test_subnormal_float64_are_kept(where):
    case = Case("rms_norm", 3, 200, "float64", residual=True)
    problem = random_problem(case)
    rows = {name: np.rint(4 * getattr(problem, name)) * 2.0**-1074 for name in ("x", "residual")}
    problem = replace(problem, **rows)
    got = run_kernels(problem, where)["sum"]
    np.testing.assert_array_equal(got, problem.x + problem.residual)
    assert np.unique(got).size > 10


def test_numpy_arrays_keep_subnormals():
    x = np.full((2, 8), 2.0**-130, np.float32)
    _, added = cupynorm.layer_norm(x, 8, residual=x, return_residual=True)
    np.testing.assert_array_equal(added, 2 * x)
