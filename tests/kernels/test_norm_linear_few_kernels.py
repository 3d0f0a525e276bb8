"""norm_linear_few.cu, on the CPU and on a GPU, beside float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from few_cases import assert_right, run, split
from product_cases import EPS, draw, rms_errors

RAGGED = (2, 1288, 43)  # unequal blocks; the second part of a row has 264 columns


@pytest.mark.parametrize(
    ("dtype", "centered", "mean"),
    [
        ("bfloat16", True, 0),
        ("bfloat16", True, 64),
        ("bfloat16", True, 1000),
        ("float16", False, 0),
    ],
    ids=str,
)
def test_ragged_problem(where, dtype, centered, mean):
    """The error of y is also at most 1.1 times that of a rounded norm and a product after it."""
    problem = draw(RAGGED, dtype, centered=centered, mean=mean)
    if not centered:
        problem = replace(problem, zero_centered=True, bias=None)
    found = assert_right(problem, where, num_sms=8)
    off, plain = rms_errors(problem, found.y)
    assert off <= 1.1 * plain


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 8, 1),  # a block with one output, few columns
        (2, 1024, 17),  # whole parts
        (2, 2056, 100),
        (1, 16384, 3),  # as many parts as warps
    ],
    ids=str,
)
def test_sizes(where, sizes):
    assert_right(draw(sizes, "bfloat16"), where)


@pytest.mark.parametrize("sizes", [RAGGED, (1, 4104, 3), (2, 16384, 3)], ids=str)
def test_residual(where, sizes):
    """The sum is rounded once, written once, and normalised: the bits of a call on the sum."""
    problem, parts = split(draw(sizes, "bfloat16", mean=3))
    found = assert_right(problem, where, parts=parts, num_sms=3)
    for one, other in zip(found, run(problem, where)):
        np.testing.assert_array_equal(one, other)


def test_outliers_and_constant_rows(where):
    """The mean of a constant row is exact, and y is the product of the norm's bias."""
    problem = draw(RAGGED, "bfloat16")
    problem.x[::3, 3] = 60
    problem.x[1::3, -138] = -500
    assert_right(problem, where)
    problem.x[0] = 3.0
    problem.x[-1] = -(2.0**-10)
    found = assert_right(problem, where)
    assert found.mean[0] == 3 and found.mean[-1] == -(2.0**-10)
    assert np.float32(found.rstd[0]) == np.float32(EPS) ** np.float32(-0.5)
    np.testing.assert_array_equal(found.y[0], found.y[-1])


def test_same_bits_however_the_work_is_shared(where):
    """A row alone and among others, any number of blocks."""
    problem = draw(RAGGED, "bfloat16", mean=3)
    first = run(problem, where)
    for num_sms in (5, 1):
        for one, other in zip(first, run(problem, where, num_sms=num_sms)):
            np.testing.assert_array_equal(one, other, err_msg=str(num_sms))
    alone = run(replace(problem, x=problem.x[-1:]), where)
    for one, other in zip(first, alone):
        np.testing.assert_array_equal(one[-1:], other)


@pytest.mark.parametrize("value", (np.inf, np.nan), ids=str)
def test_rows_that_are_not_finite(where, value):
    """They make their own results NaN, and no others."""
    problem = draw(RAGGED, "bfloat16")
    clean = run(problem, where).y
    bad = len(problem.x) // 2
    problem.x[bad, -1] = value
    found = run(problem, where)
    assert np.isnan(found.y[bad]).all() and not found.rstd[bad] > 0
    good = np.delete(np.arange(len(problem.x)), bad)
    np.testing.assert_array_equal(found.y[good], clean[good])
