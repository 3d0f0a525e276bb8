"""Kernels against float64 by width, by number of rows and by device."""

from __future__ import annotations

import bisect
from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import (
    OF_A_ROW,
    assert_identical,
    check,
    only_rows,
    run,
)
from kernel_paths import H200, SMALL

from cupynorm import plan
from cupynorm.dispatch import dispatch
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.problem import Tile
from cupynorm.dispatch.strategies import STATISTICS, STRATEGIES
from cupynorm.dtypes import DTYPES
from cupynorm.verify.cases import NORMS, Case, random_problem
from cupynorm.verify.kernels import CpuMachine, GpuCheckMachine, run_kernels

ORDER = list(STRATEGIES)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("at, num_cols", [*enumerate([1, 2, 3, 7, 33, 127, 768, 1000, 1023, 1025])])
def test_width(at, num_cols, second, where):
    """Two of the dtypes by turns, each with one of the norms."""
    dtype = list(DTYPES)[(at + 2 * second) % 4]
    check(Case(NORMS[(at // 2 + second) % 2], 5, num_cols, dtype), where)


def strategy_of(direction: str, dtype: str, num_cols: int, device) -> str:
    return plan(num_cols, dtype=dtype, direction=direction, device=device).strategy


def last_width(strategy: str, direction: str, dtype: str, device) -> int:
    """The most columns, a multiple of 16, for which this strategy or an earlier one is chosen."""

    def is_beyond(sixteens: int) -> bool:
        own = strategy_of(direction, dtype, 16 * sixteens, device)
        return ORDER.index(own) > ORDER.index(strategy)

    return 16 * bisect.bisect_left(range(1, 4096), True, key=is_beyond)


EDGES = [("warp", "forward"), ("warp", "backward"), ("block", "backward"), ("block", "forward")]


@pytest.mark.slow
@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_edge_of_a_strategy(edge, step, where):
    """An even width is read in packs, an odd one element by element; dtypes and norms by turns."""
    (strategy, direction), turn = edge, EDGES.index(edge) + step
    dtype = list(DTYPES)[turn % 4]
    widest = last_width(strategy, direction, dtype, where.device)
    assert strategy_of(direction, dtype, widest, where.device) == strategy
    assert strategy_of(direction, dtype, widest + 16, where.device) != strategy
    check(Case(NORMS[turn % 2], 2, widest + step, dtype), where)


@pytest.mark.slow
def test_rows_wider_than_a_block_and_than_a_cluster(where):
    problem = plan(4096, dtype="float64", direction="backward", device=where.device).problem
    for strategy, following in (("block", "cluster"), ("cluster", "uncached")):
        num_cols = dispatch.widest(strategy, problem, where.device) + 16
        assert strategy_of("backward", "float64", num_cols, where.device) == following
        check(Case("layer_norm", 2, num_cols, "float64"), where)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["A100", "RTX 4090", "RTX 5090"])
def test_kernels_planned_for_other_devices(device):
    """Without clusters or the copy engine, or with less shared memory, tiles differ."""
    where = CpuMachine(DEVICES[device])
    problem = plan(4096, dtype="float16", direction="backward", device=device).problem
    for num_cols in (96, dispatch.widest("block", problem, where.device) + 8):
        check(Case("layer_norm", 3, num_cols, "float16"), where)


# Numbers of rows.


@pytest.mark.parametrize(
    "num_rows, num_cols", [(1000, 1), (515, 3), (257, 8), (131, 64), (65537, 3)]
)
def test_many_narrow_rows(num_rows, num_cols, where):
    """gridDim.y would hold 65535."""
    check(Case(NORMS[num_cols % 2], num_rows, num_cols, "float16"), where)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_sms", [1, 3])
def test_rows_around_the_number_of_multiprocessors(num_sms, strategy):
    """The buffer of partial sums has a row for each block or cluster of any grid."""
    clusters = ((2, num_sms), (4, 1), (8, 1), (16, 1))
    where = CpuMachine(replace(H200, name="small", num_sms=num_sms, clusters=clusters))
    for num_rows in (1, 2, 3, 4, 5, 13, 49, 200):
        check(Case("layer_norm", num_rows, 48, "float32", strategy=strategy), where)


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [8, 128, 2112])
def test_rows_around_the_number_of_multiprocessors_of_a_gpu(num_cols):
    where = GpuCheckMachine()
    num_sms = where.device.num_sms
    counts = [1, num_sms - 1, num_sms, num_sms + 1, *(2 * num_sms * n + 1 for n in (1, 3, 16))]
    counts += [65535, 65536, 65537, 131072] if num_cols <= 128 else []
    for num_rows in counts:
        check(Case("layer_norm", num_rows, num_cols, "bfloat16"), where)


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_margin_and_other_rows_change_no_row(strategy, statistics, where):
    """On fewer multiprocessors each block reuses its buffers for more rows."""
    if isinstance(where, CpuMachine):
        where, margin, num_rows, num_cols = CpuMachine(SMALL), 1, 300, 40
        if strategy == "cluster":  # needs two
            clusters = tuple((size, 2) for size, _ in SMALL.clusters)
            where = CpuMachine(replace(SMALL, num_sms=32, clusters=clusters))
            margin, num_rows = 16, 75
    else:
        margin, num_rows, num_cols = where.device.num_sms - 2, 3001, 760
    options = {"strategy": strategy, "statistics": statistics}
    case = Case("layer_norm", num_rows, num_cols, "float16", **options)
    whole = check(case, where)
    left = check(replace(case, sm_margin=margin), where)
    assert_identical(left, whole, OF_A_ROW)
    problem = random_problem(case)
    for rows in (slice(0, 1), slice(num_rows // 2, num_rows // 2 + 7)):
        own = {name: whole[name][rows] for name in OF_A_ROW & set(whole)}
        assert_identical(run(only_rows(problem, rows), where), own, OF_A_ROW)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS)
def test_twenty_runs_on_a_gpu_give_the_same_bits(norm, strategy):
    where = GpuCheckMachine()
    problem = random_problem(Case(norm, 2049, 760, "float16", strategy=strategy))
    first = run_kernels(problem, where)
    assert all(np.isfinite(values).all() for values in first.values())
    for _ in range(19):
        assert_identical(run_kernels(problem, where), first)


# Few rows: backward in one launch, forward that loads its parameters with the row, more lanes.

FEW = {
    "ring in a block, rows beyond the last": Case("layer_norm", 3, 1024, "bfloat16"),
    "ring of two rows, packs beyond a part": Case("rms_norm", 5, 2888, "bfloat16"),
    "ring of clusters": Case("layer_norm", 2, 9216, "bfloat16", weight="float32", bias="float32"),
    "ring of single elements": Case("layer_norm", 3, 4097, "bfloat16"),
    "ring and dsum": Case("layer_norm", 3, 4096, "float32", residual=True, dsum=True),
    "lanes of a warp": Case("rms_norm", 37, 128, "float16"),
    "registers of a block": Case("layer_norm", 9, 1000, "float64"),
    "warp, early parameters": Case("layer_norm", 5, 768, "bfloat16", residual=True),
}


@pytest.mark.parametrize("case", FEW.values(), ids=list(FEW))
def test_few_rows_have_the_bits_of_many(case, where):
    """Backward of few rows is one launch, of many two."""
    few = check(case, where)
    repeats = 1 + where.device.num_sms * 64 // case.num_rows
    if isinstance(where, CpuMachine):
        where, repeats = CpuMachine(replace(SMALL, name="H200")), 40 if case.num_cols < 2000 else 12
    problem = random_problem(case)
    tensors = {name: getattr(problem, name) for name in ("x", "dy", "residual", "dsum")}
    tensors = {n: np.tile(v, (repeats, 1)) for n, v in tensors.items() if v is not None}
    many = replace(case, num_rows=case.num_rows * repeats, sm_margin=where.device.num_sms // 2)
    results = run_kernels(replace(problem, case=many, **tensors), where)
    for name in OF_A_ROW & set(few):
        expected = np.tile(few[name], (repeats, *[1] * (few[name].ndim - 1)))
        assert results[name].tobytes() == expected.tobytes(), name
    sources = [
        plan(case.num_cols, rows, case.x, norm=case.norm, direction="backward", device="H200")
        .launches[-1]
        .kernel.source
        for rows in (case.num_rows, 2**20)
    ]
    assert sources == ["backward_few.cu", "backward_parameters.cu"]


@pytest.mark.parametrize("tile", [Tile(8, 8, 4, 8, exact=1), Tile(8, 16, 2, 4, exact=1)], ids=str)
@pytest.mark.parametrize("residual", [False, "float32"])
def test_lanes_change_no_bits_of_y(tile, residual, where):
    case = Case("layer_norm", 5, 256, "bfloat16", strategy="warp", residual=residual)
    problem = random_problem(case)
    forced = replace(problem, case=replace(case, tile=tile))
    assert_identical(run(problem, where), run(forced, where), {"y", "sum", "mean", "rstd"})
