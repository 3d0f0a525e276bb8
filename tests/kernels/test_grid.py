"""Rows that all blocks of a grid share: path "grid", on a small GPU of 8 multiprocessors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import H200, SEEDS, check, identical
from test_traps_values import assert_constant_rows, wide_constant_rows, with_rows

from cupynorm.check.cases import NORMS, Case, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.run import run_kernels
from cupynorm.plan import dispatch
from cupynorm.plan.grids import blocks_of_groups
from cupynorm.plan.problem import Tile

SMALL = replace(H200, name="eight", num_sms=8, clusters=((2, 4), (4, 2), (8, 1)))
# Two warps that have columns and four that exchange sums; five blocks.
TILE = Tile(8, 192, packs_per_thread=2, cluster_size=5, stages=4, path="grid")


def grid_case(
    name: str = "layer_norm", num_rows: int = 11, num_cols: int = 5000, **changes
) -> Case:
    return Case(name, num_rows, num_cols, **{"x": "bfloat16", "strategy": "cluster", **changes})


@pytest.fixture
def both_ways(monkeypatch, tile_of_backward):
    """Runs a case, whose forward has the tile, with the tile in backward too."""

    def run(case: Case, tile: Tile = TILE, seed: int = 0) -> dict[str, np.ndarray]:
        plans = tile_of_backward(tile)
        results = check(replace(case, tile=tile), CpuMachine(SMALL, seed=seed))
        assert plans and {plan.tile.path for plan in plans} == {"grid"}
        groups = SMALL.num_sms // tile.cluster_size
        assert plans[-1].num_partials == (groups if groups > 1 or not tile.stages else 0)
        return results

    return run


@pytest.mark.parametrize(
    "changes, tile",
    [
        ({}, TILE),
        ({"name": "rms_norm", "x": "float32", "num_cols": 2500}, replace(TILE, pack_size=4)),
        # Six turns from sums to results; fewer rows than that.
        ({"num_rows": 3}, replace(TILE, stages=9)),
        # Results begin within a row; many rows.
        ({"num_cols": 7000, "num_rows": 30}, replace(TILE, packs_per_thread=4, stages=6)),
        # The fewest stages.
        ({"num_cols": 9000, "num_rows": 12}, replace(TILE, packs_per_thread=4)),
        ({"num_cols": 28000, "num_rows": 3}, replace(TILE, packs_per_thread=12, stages=9)),
        # Rows that are read twice, some at a time; slices that end within a warp.
        ({"num_cols": 4808, "num_rows": 67}, replace(TILE, stages=0)),
        ({"num_cols": 28000, "num_rows": 3}, replace(TILE, packs_per_thread=12, stages=0)),
        # Nine warps that have columns: one pack in a step.
        (
            {"num_cols": 34000, "num_rows": 9},
            replace(TILE, threads_per_row=416, packs_per_thread=3, stages=6),
        ),
        (
            {"name": "rms_norm", "x": "float32", "num_cols": 34000, "num_rows": 5},
            replace(TILE, pack_size=4, threads_per_row=416, packs_per_thread=6, stages=0),
        ),
        # Single elements; blocks without columns.
        (
            {"x": "float32", "num_cols": 67, "num_rows": 9},
            replace(TILE, pack_size=1, packs_per_thread=2, stages=6, cluster_size=8),
        ),
        (
            {"x": "float32", "num_cols": 67, "num_rows": 9},
            replace(TILE, pack_size=1, packs_per_thread=2, stages=0, cluster_size=8),
        ),
        # More groups than rows.
        ({"num_rows": 1}, replace(TILE, cluster_size=3, packs_per_thread=4)),
        ({"num_rows": 1}, replace(TILE, cluster_size=3, packs_per_thread=4, stages=0)),
        ({"name": "rms_norm", "x": "float16", "num_rows": 1}, TILE),
        # Two groups of three blocks, and rows that fill all packs of all threads.
        ({}, replace(TILE, cluster_size=3, packs_per_thread=4)),
        (
            {"num_cols": 6144, "num_rows": 8},
            replace(TILE, cluster_size=3, packs_per_thread=4, exact=1),
        ),
        # Weights of some packs are in registers, of others in shared memory, or fetched.
        (
            {"num_cols": 24 * 512 * 5 - 64, "num_rows": 4},
            replace(TILE, packs_per_thread=24, stages=24),
        ),
    ],
)
def test_rows_that_all_blocks_share(changes, tile, both_ways):
    both_ways(grid_case(**changes), tile)


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_bits_of_rows_that_all_blocks_share(name, both_ways):
    """Neither the order of threads nor other rows change a bit."""
    case = grid_case(name, 7)
    results = both_ways(case)
    for seed in SEEDS[1:3]:
        assert identical(results, both_ways(case, seed=seed))
    problem = random_problem(replace(case, tile=TILE))
    for row in (0, 6):
        one = slice(row, row + 1)
        alone = with_rows(replace(case, tile=TILE, num_rows=1), problem.x[one])
        alone = replace(alone, weight=problem.weight, bias=problem.bias, dy=problem.dy[one])
        lone = run_kernels(alone, CpuMachine(SMALL))
        for tensor in {"y", "mean", "rstd", "dx"} & set(results):
            assert lone[tensor].tobytes() == results[tensor][one].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_constant_rows_that_all_blocks_share(dtype):
    pack_size = 16 // np.dtype("f2" if dtype == "bfloat16" else "f4").itemsize
    tile = replace(TILE, pack_size=pack_size, packs_per_thread=32 // pack_size, stages=6)
    problem = wide_constant_rows(grid_case(x=dtype, num_rows=0, num_cols=10008, tile=tile))
    assert_constant_rows(problem, run_kernels(problem, CpuMachine(SMALL)))


def test_one_row_that_is_not_finite_spoils_no_other():
    case = grid_case(num_rows=5, tile=TILE)
    problem = random_problem(case)
    spoilt = replace(problem, x=problem.x.copy())
    spoilt.x[2, 1234] = (
        np.asarray(np.inf, problem.x.dtype) if problem.x.dtype.kind == "f" else 0x7F80
    )
    clean, results = (run_kernels(each, CpuMachine(SMALL)) for each in (problem, spoilt))
    others = [0, 1, 3, 4]
    for tensor in ("y", "mean", "rstd", "dx"):
        assert results[tensor][others].tobytes() == clean[tensor][others].tobytes()
    assert results["rstd"][2] != clean["rstd"][2]


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [1 << 20, 1_000_004])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NORMS)
def test_widest_rows_on_a_gpu(name, dtype, num_cols):
    """As dispatch plans them, twice: a launch leaves its counters ready for the next one."""
    where = GpuCheckMachine()
    case = Case(name, 11, num_cols, dtype)
    results = check(case, where)
    assert identical(results, run_kernels(random_problem(case), where))


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [1 << 22, 5_000_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_wider_than_the_chip_on_a_gpu(dtype, num_cols):
    """Backward reads them twice. The weights of float32 rows are fetched again for each row."""
    where = GpuCheckMachine()
    case = Case("layer_norm", 3, num_cols, dtype)
    results = check(case, where)
    assert identical(results, run_kernels(random_problem(case), where))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NORMS)
def test_rows_that_are_read_twice_on_a_gpu(name, dtype, tile_of_backward):
    """More rows than are read at a time; slices that end within a warp; a group of all blocks."""
    pack_size = 8 if dtype == "bfloat16" else 4
    packs = 2 if dtype == "bfloat16" else 4
    tile = Tile(pack_size, 384, packs, cluster_size=128, path="grid")
    plans = tile_of_backward(tile)
    where = GpuCheckMachine()
    case = grid_case(name, 67, 300_008, x=dtype, tile=tile)
    results = check(case, where)
    assert {plan.tile.stages for plan in plans} == {0}
    assert identical(results, run_kernels(random_problem(case), where))


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [1 << 20, (1 << 20) + 8, 1 << 21])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widest_constant_rows_on_a_gpu(dtype, num_cols):
    problem = wide_constant_rows(Case("layer_norm", 0, num_cols, dtype))
    assert_constant_rows(problem, run_kernels(problem, GpuCheckMachine()))


def test_wide_rows_are_shared_by_all_blocks():
    """What the path cannot do is left to strategy uncached."""
    from cupynorm.norm.plans import plan

    options = {"device": "H200", "direction": "forward"}
    made = plan(1 << 21, 8, **options)
    assert made.tile.path == "grid" and made.launches[0].grid_size == 128
    assert plan(1 << 21, 8, sm_margin=4, **options).launches == made.launches
    for changes in ({"sm_margin": 5}, {"statistics": "two_pass"}, {"residual": True}):
        assert plan(1 << 21, 8, **options, **changes).strategy == "uncached"
    for num_cols, dtype in ((1 << 21, "float64"), ((1 << 21) + 1, "bfloat16")):
        assert plan(num_cols, 8, dtype, **options).strategy == "uncached"
    with pytest.raises(ValueError, match="sm_margin is 5; .* too few for groups of 64 blocks"):
        plan(1 << 21, 8, sm_margin=5, strategy="cluster", **options)
    with pytest.raises(ValueError, match="statistics is 'two_pass'; expected 'welford' or None"):
        plan(1 << 21, 8, statistics="two_pass", strategy="cluster", **options)
    assert dispatch.choose(made.problem, H200).statistics == "welford"


def test_two_launches_of_groups_never_fit_a_gpu_together():
    """They would use the same words in global memory."""
    for blocks in (16, 32, 64, 128):
        tile = replace(TILE, cluster_size=blocks)
        for margin in range(H200.num_sms):
            launched = blocks_of_groups(tile, H200, margin)
            assert launched % blocks == 0 and launched <= H200.num_sms - margin
            assert launched == 0 or 2 * launched > H200.num_sms
        assert blocks_of_groups(tile, H200, 4) == 128
