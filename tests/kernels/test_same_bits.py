"""The same bits in every run, for any order of threads, alone and in any batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import (
    CALL_OPTIONS,
    SEEDS,
    assert_rows_are_the_same_alone,
    check,
    identical,
    problem_of,
)
from small_devices import SMALL

from cupynorm.check.cases import NORMS, Case, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.run import run_kernels
from cupynorm.plan import dispatch
from cupynorm.plan.problem import Layout, Tile
from cupynorm.plan.strategies import STATISTICS, STRATEGIES


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_twenty_runs_give_the_same_bits(dtype, strategy, statistics):
    """The seed draws the order in which threads run, within what barriers allow."""
    problem = random_problem(
        Case("layer_norm", 9, 104, dtype, strategy=strategy, statistics=statistics)
    )
    first = run_kernels(problem, CpuMachine(SMALL))
    assert all(np.isfinite(values).all() for values in first.values())
    for seed in range(1, 20):
        assert identical(first, run_kernels(problem, CpuMachine(SMALL, seed=seed))), f"seed {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_twenty_runs_on_a_gpu_give_the_same_bits(name, strategy):
    where = GpuCheckMachine()
    problem = random_problem(Case(name, 2049, 760, "float16", strategy=strategy))
    first = run_kernels(problem, where)
    assert all(np.isfinite(values).all() for values in first.values())
    for _ in range(19):
        assert identical(first, run_kernels(problem, where))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_cols", [3, 40, 264])
@pytest.mark.parametrize("at, strategy", [*enumerate(STRATEGIES)])
def test_any_order_of_threads(at, strategy, num_cols, seed):
    name = NORMS[(at + num_cols) % 2]  # by turns
    check(
        Case(name, 5, num_cols, "bfloat16", strategy=strategy), CpuMachine(SMALL, seed=seed), seed
    )


@pytest.mark.parametrize("num_rows", [1, 7, 132, pytest.param(4097, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_row_is_the_same_alone_and_in_a_batch(strategy, statistics, num_rows, where):
    on_cpu = isinstance(where, CpuMachine)
    dtype, num_cols = ("float32", 40) if on_cpu or num_rows == 7 else ("float16", 504)
    options = {"strategy": strategy, "statistics": statistics}
    problem = random_problem(Case("layer_norm", num_rows, num_cols, dtype, **options))
    # Neither do another order of threads and fewer multiprocessors change a row.
    for machine in (where, CpuMachine(SMALL, seed=1)) if on_cpu else (where,):
        assert_rows_are_the_same_alone(problem, machine, {0, num_rows // 2, num_rows - 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    "at, num_cols", [*enumerate([16, 24, 32, 64, 96, 128, 160, 250, 256, 320, 500, 512, 640])]
)
@pytest.mark.parametrize("of_dtype, dtype", [*enumerate(["bfloat16", "float32", "float64"])])
def test_more_lanes_for_few_rows_change_no_bits(of_dtype, dtype, at, num_cols, where):
    name = NORMS[(of_dtype + at) % 2]  # by turns
    problem = replace(
        problem_of("forward", dtype, name == "layer_norm", Layout.of_new_arrays(num_cols)),
        num_cols=num_cols,
    )
    of_many = dispatch.choose(problem, where.device)
    of_few = dispatch.make_plan(problem, where.device, 5).tile
    in_a_warp = of_many.strategy == "warp" and not of_many.tile.bundle
    if in_a_warp and of_many.tile.packs_per_thread % 2 == 0 and of_many.tile.threads_per_row < 32:
        assert of_few.threads_per_row > of_many.tile.threads_per_row
    assert of_few.cols == of_many.tile.cols
    assert_bits_are_of_tile(Case(name, 5, num_cols, dtype), of_many.strategy, of_many.tile, where)


# Not welford, whose number of lanes does not change.
SUM_OPTIONS = {
    name: options for name, options in CALL_OPTIONS.items() if "statistics" not in options
}


SUM_OPTIONS |= {
    "residual": {"residual": True},
    "residual float32": {
        "residual": "float32",
    },
    "rounded": {"round_x_hat": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", SUM_OPTIONS)
def test_more_lanes_for_few_rows_change_no_bits_with_any_option(options, where):
    case = Case("layer_norm", 5, 256, "bfloat16", strategy="warp", **SUM_OPTIONS[options])
    check(case, where)
    for lanes in (8, 16):
        assert_bits_are_of_tile(
            case, "warp", Tile(8, lanes, 32 // lanes, 64 // lanes, exact=1), where
        )


def assert_bits_are_of_tile(case: Case, strategy: str, tile: Tile, where) -> None:
    """The case's own tile and this one give the same bits."""
    problem = random_problem(case, seed=case.num_cols)
    own = run_kernels(problem, where)
    forced = run_kernels(replace(problem, case=replace(case, strategy=strategy, tile=tile)), where)
    for tensor in {"y", "sum", "mean", "rstd"} & set(own):
        assert own[tensor].tobytes() == forced[tensor].tobytes(), tensor
