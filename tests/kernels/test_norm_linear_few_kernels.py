"""norm_linear_few.cu and norm_linear_several.cu, on the CPU and on a GPU, beside float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import few_cases
import numpy as np
import pytest
from few_cases import excess, split
from mutated_machine import assert_bug_is_seen, changes, copy_of_sources, mutate
from product_cases import EPS, draw, rms_errors

Sizes = tuple[int, int, int]


class Kernel(NamedTuple):
    """One kernel's problems. options: of few_cases.run, such as {"num_sms": 8}.

    ragged: unequal blocks, steps, tiles and parts of rows. whole: as many rows as it takes.
    shares: options that share the work out in other ways. mutated: the problem of its bugs.
    """

    several: bool
    ragged: Sizes
    ragged_options: dict[str, int]
    whole: Sizes
    shares: tuple[dict[str, int], ...]
    mutated: tuple[Sizes, dict[str, int]]

    def run(self, problem: Any, machine: Any, **options: Any) -> few_cases.Found:
        return few_cases.run(problem, machine, several=self.several, **options)

    def assert_right(self, problem: Any, machine: Any, **options: Any) -> few_cases.Found:
        return few_cases.assert_right(problem, machine, several=self.several, **options)


KERNELS = {
    # The second part of a row has 264 columns.
    "few": Kernel(
        several=False,
        ragged=(2, 1288, 43),
        ragged_options={"num_sms": 8},
        whole=(2, 1288, 43),
        shares=({"num_sms": 5}, {"num_sms": 1}),
        mutated=((2, 264, 150), {"num_sms": 4}),
    ),
    "several": Kernel(
        several=True,
        ragged=(11, 328, 300),
        ragged_options={},
        whole=(16, 328, 300),
        shares=({"num_sms": 5}, {"most_outputs": 64, "num_sms": 1}, {"most_stages": 3}),
        mutated=((11, 200, 550), {"num_sms": 1, "most_stages": 3}),
    ),
}


def machine_of(kernel: str, request: pytest.FixtureRequest) -> tuple[Kernel, Any]:
    """A kernel, and the machine that runs it."""
    machine = request.getfixturevalue("machine" if kernel == "several" else "where")
    return KERNELS[kernel], machine


@pytest.fixture(params=KERNELS)
def both(request, where) -> tuple[Kernel, Any]:
    return machine_of(request.param, request)


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
def test_ragged_problem(both, dtype, centered, mean):
    """The error of y is also at most 1.1 times that of a rounded norm and a product after it."""
    kernel, machine = both
    problem = draw(kernel.ragged, dtype, centered=centered, mean=mean)
    if not centered:
        problem = replace(problem, zero_centered=True, bias=None)
    found = kernel.assert_right(problem, machine, **kernel.ragged_options)
    off, plain = rms_errors(problem, found.y)
    assert off <= 1.1 * plain


@pytest.mark.parametrize(
    ("kernel", "sizes", "options"),
    [
        ("few", (1, 8, 1), {}),  # a block with one output, few columns
        ("few", (2, 1024, 17), {}),  # whole parts
        ("few", (2, 2056, 100), {}),
        ("few", (1, 16384, 3), {}),  # as many parts as warps
        ("several", (3, 8, 1), {}),  # a block without columns, a tile of 8 outputs
        ("several", (16, 1288, 43), {"num_sms": 1}),
        ("several", (8, 136, 700), {"most_outputs": 64}),
        ("several", (9, 264, 1300), {"most_stages": 2}),  # six tiles a cluster
        ("several", (5, 8192, 16), {}),  # as many columns as a block can have
    ],
    ids=str,
)
def test_sizes(request, where, kernel, sizes, options):
    kernel, machine = machine_of(kernel, request)
    kernel.assert_right(draw(sizes, "bfloat16"), machine, **options)


@pytest.mark.parametrize(
    ("kernel", "sizes", "options"),
    [
        *(("few", sizes, {"num_sms": 3}) for sizes in ((2, 1288, 43), (1, 4104, 3), (2, 16384, 3))),
        ("several", (11, 328, 300), {}),
        ("several", (16, 2056, 9), {}),
    ],
    ids=str,
)
def test_residual(request, where, kernel, sizes, options):
    """The sum is rounded once, written once, and normalised: the bits of a call on the sum."""
    kernel, machine = machine_of(kernel, request)
    problem, parts = split(draw(sizes, "bfloat16", mean=3))
    found = kernel.assert_right(problem, machine, parts=parts, **options)
    for one, other in zip(found, kernel.run(problem, machine)):
        np.testing.assert_array_equal(one, other)


def test_outliers_and_constant_rows(both):
    """The mean of a constant row is exact, and y is the product of the norm's bias."""
    kernel, machine = both
    problem = draw(kernel.ragged, "bfloat16")
    problem.x[::3, 3] = 60
    problem.x[1::3, -138] = -500
    kernel.assert_right(problem, machine)
    problem.x[0] = 3.0
    problem.x[-1] = -(2.0**-10)
    found = kernel.assert_right(problem, machine)
    assert found.mean[0] == 3 and found.mean[-1] == -(2.0**-10)
    assert np.float32(found.rstd[0]) == np.float32(EPS) ** np.float32(-0.5)
    np.testing.assert_array_equal(found.y[0], found.y[-1])


def test_same_bits_however_the_work_is_shared(both):
    """A row alone and among others, any number of blocks or clusters, tiles and stages."""
    kernel, machine = both
    problem = draw(kernel.whole, "bfloat16", mean=3)
    first = kernel.run(problem, machine)
    for options in kernel.shares:
        again = kernel.run(problem, machine, **options)
        for one, other in zip(first, again):
            np.testing.assert_array_equal(one, other, err_msg=str(options))
    last = 3 if kernel.several else 1  # the fewest rows that it takes
    alone = kernel.run(replace(problem, x=problem.x[-last:]), machine)
    for one, other in zip(first, alone):
        np.testing.assert_array_equal(one[-last:], other)


@pytest.mark.parametrize("value", (np.inf, np.nan), ids=str)
def test_rows_that_are_not_finite(both, value):
    """They make their own results NaN, and no others."""
    kernel, machine = both
    problem = draw(kernel.ragged, "bfloat16")
    clean = kernel.run(problem, machine).y
    bad = len(problem.x) // 2
    problem.x[bad, -1] = value
    found = kernel.run(problem, machine)
    assert np.isnan(found.y[bad]).all() and not found.rstd[bad] > 0
    good = np.delete(np.arange(len(problem.x)), bad)
    np.testing.assert_array_equal(found.y[good], clean[good])


# What a wrong kernel does on the CPU.

BUGS = {
    "few": changes(
        r"""
a product of rows that are not normalised yet | normalized_rows.cuh
  call); });\n    }\n    __syncthreads();  =>  call); });\n    }
sums that are not there yet | norm_linear_few.cu
    }\n  __syncthreads();  =>    }
columns beyond the row that are not 0 | normalized_rows.cuh
  store_pack<8>(at(row, col), Pack<T, 8>{})  =>
    store_pack<8>(at(row, col), Pack<T, 8>{{~0u, ~0u, ~0u, ~0u}})
the next output is loaded too early | norm_linear_few.cu
        const int output = units.output;\n      units.replace(at);  =>
          units.replace(at);\n      const int output = units.output;
"""
    ),
    "several": changes(
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
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name in BUGS for bug in BUGS[name]])
def test_bugs_are_seen(name, bug, tmp_path):
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, *BUGS[name][bug])
    kernel = KERNELS[name]
    sizes, options = kernel.mutated
    problem = draw(sizes, "bfloat16", mean=4)
    run = partial(kernel.run, problem, **options)
    assert_bug_is_seen(folder, lambda machine, _: max(excess(problem, run(machine)).values()))
