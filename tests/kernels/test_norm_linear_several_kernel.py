"""norm_linear_several.cu, on the CPU and on a GPU, beside float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import few_cases
import numpy as np
import pytest
from few_cases import excess, split
from mutated_machine import assert_bug_is_seen, changes, copy_of_sources, mutate
from product_cases import EPS, draw, rms_errors

from cupynorm.plan.devices import DEVICES

H200 = DEVICES["H200"]
RAGGED = (11, 328, 300)  # no multiple of a step, nor of a tile; blocks have unequal steps
run = partial(few_cases.run, several=True)
assert_right = partial(few_cases.assert_right, several=True)


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
def test_ragged_problem(machine, dtype, centered, mean):
    """The error of y is also at most 1.1 times that of a rounded norm and a product after it."""
    problem = draw(RAGGED, dtype, centered=centered, mean=mean)
    if not centered:
        problem = replace(problem, zero_centered=True, bias=None)
    found = assert_right(problem, machine)
    off, plain = rms_errors(problem, found.y)
    assert off <= 1.1 * plain


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((3, 8, 1), {}),  # a block without columns, a tile of 8 outputs
        ((16, 1288, 43), {"num_sms": 1}),
        ((8, 136, 700), {"most_outputs": 64}),
        ((9, 264, 1300), {"most_stages": 2}),  # six tiles a cluster
        ((5, 8192, 16), {}),  # as many columns as a block can have
    ],
    ids=str,
)
def test_sizes(machine, sizes, options):
    assert_right(draw(sizes, "bfloat16"), machine, **options)


@pytest.mark.parametrize("sizes", (RAGGED, (16, 2056, 9)), ids=str)
def test_residual(machine, sizes):
    """The sum is rounded once, written once, and normalised: the bits of a call on the sum."""
    problem, parts = split(draw(sizes, "bfloat16", mean=3))
    found = assert_right(problem, machine, parts=parts)
    for one, other in zip(found, run(problem, machine)):
        np.testing.assert_array_equal(one, other)


def test_outliers_and_constant_rows(machine):
    """The mean of a constant row is exact, and y is the product of the norm's bias."""
    problem = draw(RAGGED, "bfloat16")
    problem.x[::3, 3] = 60
    problem.x[1::3, 150] = -500
    assert_right(problem, machine)
    problem.x[5] = 3.0
    problem.x[10] = -(2.0**-10)
    found = assert_right(problem, machine)
    assert found.mean[5] == 3 and found.mean[10] == -(2.0**-10)
    assert np.float32(found.rstd[5]) == np.float32(EPS) ** np.float32(-0.5)
    np.testing.assert_array_equal(found.y[5], found.y[10])


def test_same_bits_however_the_work_is_shared(machine):
    """A row alone and among others, any number of clusters, tiles and stages."""
    problem = draw((16, 328, 300), "bfloat16", mean=3)
    first = run(problem, machine)
    for options in ({"num_sms": 5}, {"most_outputs": 64, "num_sms": 1}, {"most_stages": 3}):
        again = run(problem, machine, **options)
        for one, other in zip(first, again):
            np.testing.assert_array_equal(one, other, err_msg=str(options))
    alone = run(replace(problem, x=problem.x[13:]), machine)
    for one, other in zip(first, alone):
        np.testing.assert_array_equal(one[13:], other)


@pytest.mark.parametrize("value", (np.inf, np.nan), ids=str)
def test_rows_that_are_not_finite(machine, value):
    """They make their own results NaN, and no others."""
    problem = draw(RAGGED, "bfloat16")
    clean = run(problem, machine).y
    problem.x[7, 327] = value
    found = run(problem, machine)
    assert np.isnan(found.y[7]).all() and not found.rstd[7] > 0
    good = np.delete(np.arange(11), 7)
    np.testing.assert_array_equal(found.y[good], clean[good])


# What a wrong kernel does on the CPU.

BUGS = changes(
    r"""
a product of rows that are not normalised yet | norm_linear_several.cu
    fence_tile_store();\n  __syncthreads();\n  =>    fence_tile_store();\n
mean and rstd that are not there yet | norm_linear_several.cu
      find_mean_rstd<centered>(rows);\n  }\n  __syncthreads();\n  =>
        find_mean_rstd<centered>(rows);\n  }\n
columns beyond the row that are not 0 | several_rows.cuh
  store_pack<8>(pack(row, col), Pack<T, 8>{})  =>
    store_pack<8>(pack(row, col), Pack<T, 8>{{~0u, ~0u, ~0u, ~0u}})
a stage is given back before it is multiplied | several_products.cuh
      last_stage = place.stage;\n  =>      last_stage = (place.stage + 1) % memory.num_stages;\n
barriers that are used before they are there | norm_linear_several.cu
    cluster_wait();  =>    __syncwarp();
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_seen(name, tmp_path):
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, *BUGS[name])
    problem = draw((11, 200, 550), "bfloat16", mean=4)
    options = {"num_sms": 1, "most_stages": 3}
    assert_bug_is_seen(
        folder, lambda machine, _: max(excess(problem, run(problem, machine, **options)).values())
    )
