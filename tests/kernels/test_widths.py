"""Kernels against float64 at narrow and wide rows, at the edges of strategies, and by tile."""

from __future__ import annotations

import bisect
from dataclasses import replace

import pytest
from kernel_checks import (
    H200,
    OUTPUTS,
    SEEDS,
    check,
    forward_problem,
    identical,
    problem_of,
    strategy_of,
)
from small_devices import NO_REGISTERS, SMALL, TWO_CLUSTERS

from cupynorm.check.cases import NORMS, Case, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.plan import dispatch
from cupynorm.plan.devices import DEVICES, Device
from cupynorm.plan.problem import Layout, Tile
from cupynorm.plan.strategies import STATISTICS, STRATEGIES


@pytest.mark.parametrize("num_cols", [1, 2, 3, 5, 7, 33, 127, 768, 1000, 1023, 1025])
@pytest.mark.parametrize("at, dtype", [*enumerate(DTYPES)])
def test_width(at, dtype, num_cols, where):
    """One of the norms by turns: each has every width, and every dtype."""
    check(Case(NORMS[(at + num_cols // 2) % 2], 5, num_cols, dtype), where)


@pytest.mark.slow
@pytest.mark.parametrize("at, num_cols", [*enumerate([1, 2, 7, 33, 768, 1000, 1025])])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strategy_at_widths_where_another_is_chosen(dtype, at, num_cols, where):
    """Two of three strategies by turns, one for each norm, so that each has every width."""
    strategies = ["block", "cluster", "uncached"]
    turn = list(DTYPES).index(dtype) + at
    for name, strategy in zip(NORMS, (strategies[turn % 3], strategies[(turn + 1) % 3])):
        check(Case(name, 3, num_cols, dtype, strategy=strategy), where)


EDGES = [("warp", "forward"), ("warp", "backward"), ("block", "backward"), ("block", "forward")]


def last_width(strategy: str, direction: str, dtype: str, device) -> int:
    """The most columns, a multiple of 16, for which this strategy or an earlier one is chosen."""
    order = list(STRATEGIES)

    def beyond(num_cols: int) -> bool:
        return order.index(strategy_of(direction, dtype, num_cols, device)) > order.index(strategy)

    return 16 * (
        bisect.bisect_left(range(1, 4096), True, key=lambda sixteens: beyond(16 * sixteens))
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("strategy, direction", EDGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_of_a_strategy(dtype, strategy, direction, step, where):
    # One of the norms by turns.
    name = NORMS[(list(DTYPES).index(dtype) + EDGES.index((strategy, direction)) + step) % 2]
    # An even width is read in packs, an odd one element by element.
    widest = last_width(strategy, direction, dtype, where.device)
    assert strategy_of(direction, dtype, widest, where.device) == strategy
    assert strategy_of(direction, dtype, widest + 16, where.device) != strategy
    check(Case(name, 2, widest + step, dtype), where)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["block", "cluster"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_last_width_of_registers_and_first_of_shared_memory(dtype, strategy, where):
    """Within a strategy, wide rows are kept in shared memory: another kernel on each side.

    Strategy block has this edge where there are no clusters. Clusters of two have it earlier.
    """
    if strategy == "block":
        where = CpuMachine(DEVICES["A100"])
    elif isinstance(where, CpuMachine):
        where = CpuMachine(replace(SMALL, clusters=((2, 1),)))
    problem = problem_of("forward", dtype, layout=Layout(8, contiguous=True))

    def in_registers(num_cols: int) -> bool:
        choice = dispatch.choose(replace(problem, num_cols=num_cols), where.device, strategy)
        return choice.tile.packs_per_thread > 0

    low, high = 2048, dispatch.widest(strategy, problem, where.device)
    assert in_registers(low) and not in_registers(high)
    while high - low > 8:
        middle = (low + high) // 16 * 8
        low, high = (middle, high) if in_registers(middle) else (low, middle)
    for num_cols in (low - 1, low, low + 1, high):
        assert strategy_of("forward", dtype, num_cols, where.device) == strategy
        check(Case("layer_norm", 2, num_cols, dtype), where)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_rows_for_a_cluster(dtype, where):
    two = 2 * dispatch.widest("block", problem_of("backward", dtype), where.device) + 8
    assert strategy_of("backward", dtype, two, where.device) == "cluster"
    check(Case("layer_norm", 2, two, dtype), where)


@pytest.mark.slow
def test_rows_wider_than_a_cluster(where):
    """All blocks share such rows of other dtypes, up to widths that a CPU takes minutes for."""
    beyond = dispatch.widest("cluster", problem_of("backward", "float64"), where.device) + 16
    assert strategy_of("backward", "float64", beyond, where.device) == "uncached"
    check(Case("layer_norm", 1, beyond, "float64"), where)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["A100", "RTX 4090", "RTX 5090"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_kernels_planned_for_other_devices(dtype, device):
    """Without clusters or the copy engine, or with less shared memory, tiles differ."""
    where = CpuMachine(DEVICES[device])
    widest = dispatch.widest("block", problem_of("backward", dtype), where.device)
    for num_cols in (96, widest + 8):
        check(Case("layer_norm", 3, num_cols, dtype), where)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("num_rows, num_cols", [(1000, 1), (515, 3), (257, 8), (131, 64)])
def test_many_narrow_rows(name, num_rows, num_cols, where):
    check(Case(name, num_rows, num_cols, "float16"), where)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, num_cols, tile",
    [
        ("warp", 64, Tile(2, 4, packs_per_thread=8, rows_per_block=8)),
        ("warp", 64, Tile(8, 1, packs_per_thread=8, rows_per_block=32)),
        ("warp", 64, Tile(1, 32, packs_per_thread=2, rows_per_block=1)),
        ("warp", 33, Tile(1, 16, packs_per_thread=3, rows_per_block=2)),
        ("block", 96, Tile(4, 32, packs_per_thread=1)),
        ("block", 1000, Tile(8, 96, packs_per_thread=2)),
        ("block", 1024, Tile(1, 1024, packs_per_thread=1)),
        ("block", 1000, Tile(8, 128)),  # in shared memory, which backward does not have
        ("block", 1001, Tile(1, 96)),
        ("cluster", 1000, Tile(8, 32, packs_per_thread=1, cluster_size=16)),
        ("cluster", 1032, Tile(8, 32, packs_per_thread=2, cluster_size=4)),
        ("cluster", 1024, Tile(8, 32, packs_per_thread=2, cluster_size=2, exact=1)),
        ("cluster", 999, Tile(1, 96, packs_per_thread=6, cluster_size=2)),
        ("cluster", 24, Tile(8, 64, packs_per_thread=1, cluster_size=8)),
        ("cluster", 24, Tile(8, 64, cluster_size=8)),
        ("cluster", 1000, Tile(8, 32, cluster_size=16)),
        ("cluster", 1024, Tile(8, 512, cluster_size=4)),
        ("cluster", 999, Tile(1, 96, cluster_size=2)),
        ("uncached", 1000, Tile(2, 1024)),
        ("uncached", 1000, Tile(8, 32)),
    ],
)
def test_explicit_tile(strategy, num_cols, tile, where, tile_of_backward):
    in_memory = strategy == "block" and tile.packs_per_thread == 0
    plans = tile_of_backward(None if in_memory else tile)
    for statistics in STATISTICS if in_memory else (None,):
        options = {"strategy": strategy, "tile": tile, "statistics": statistics}
        check(Case("layer_norm", 5, num_cols, "float16", **options), where)
    assert plans[0].tile == tile and (plans[-1].tile == tile) == (not in_memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, device, num_rows, num_cols, margin",
    [
        ("warp", SMALL, 3000, 40, 1),
        ("block", SMALL, 37, 264, 1),
        # One cluster is left, with up to 32 resident blocks on each multiprocessor.
        ("cluster", TWO_CLUSTERS, 75, 264, 16),
        # The only cluster needs both multiprocessors. Its rows are in shared memory.
        ("cluster", NO_REGISTERS, 37, 264, 0),
        ("uncached", SMALL, 37, 264, 1),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else None,
)
@pytest.mark.parametrize("name", NORMS)
def test_blocks_that_take_many_rows(name, strategy, device, num_rows, num_cols, margin):
    """One multiprocessor or cluster is left, so each block reuses its buffers for many rows."""
    where = CpuMachine(device)
    case = Case(name, num_rows, num_cols, "float16", strategy=strategy, sm_margin=margin)
    plan = dispatch.make_plan(
        forward_problem(case), device, num_rows, strategy=strategy, sm_margin=margin
    )
    assert (plan.tile.packs_per_thread == 0) == (device is NO_REGISTERS or strategy == "uncached")
    assert (
        plan.launches[0].grid_size // plan.tile.cluster_size * plan.tile.rows_per_block < num_rows
    )
    results = check(case, where)
    for seed in SEEDS[1:]:
        assert identical(results, run_kernels(random_problem(case), CpuMachine(device, seed=seed)))
    # A margin shrinks the grid and never changes a row.
    full = run_kernels(
        random_problem(replace(case, sm_margin=0)),
        CpuMachine(replace(device, num_sms=132, clusters=H200.clusters)),
    )
    for tensor in ("y", "rstd", "dx"):
        assert results[tensor].tobytes() == full[tensor].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_margin_on_a_gpu(name, strategy):
    where = GpuCheckMachine()
    # A cluster of two needs the two multiprocessors that are left.
    case = Case(name, 3001, 760, "float16", strategy=strategy, sm_margin=where.device.num_sms - 2)
    results = check(case, where)
    full = run_kernels(random_problem(replace(case, sm_margin=0)), where)
    for tensor in ("y", "rstd", "dx"):
        assert results[tensor].tobytes() == full[tensor].tobytes()


@pytest.mark.parametrize("tensor", sorted(OUTPUTS))
def test_one_wrong_element_is_seen(tensor):
    problem = random_problem(Case("layer_norm", 4, 100, "float32"))
    results = run_kernels(problem, CpuMachine())
    assert CheckResult(judge_all(problem, results)).ok
    wrong = results[tensor].reshape(-1)
    wrong[-1] = wrong[-1] * (1 + 1e-4) + 1e-4
    result = CheckResult(judge_all(problem, results))
    assert [found.tensor for found in result.findings if not found.ok] == [tensor]
