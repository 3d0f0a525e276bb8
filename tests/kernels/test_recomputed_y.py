"""Backward kernels that write y again from x."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import H200, bits, check, problem_of, y_of
from kernel_rings import ring_case, rows_of_turns

from cupynorm.check import run
from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.plan import dispatch
from cupynorm.plan.problem import Tile
from cupynorm.plan.strategies import STRATEGIES

RECOMPUTED = {
    "plain": {},
    "without parameters": {"weight": None, "bias": None},
    "without weight": {"weight": None},
    "without bias": {"bias": None},
    "1 + weight": {"zero_centered_weight": True},
    "wide parameters": {"weight": "float64", "bias": "float32"},
    "y of another dtype": {"y": "float32", "weight": "float32"},
    "a residual": {"residual": True, "dsum": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", RECOMPUTED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_recomputes_y(strategy, what, where):
    """The bits that forward writes from the same mean and rstd.

    Welford keeps no rest of the mean beside them, except in a ring.
    """
    turn = list(RECOMPUTED).index(what) + list(STRATEGIES).index(strategy)
    name, num_cols = (("layer_norm", 120 + turn // 2 % 2), ("rms_norm", 77 - turn // 2 % 2))[
        turn % 2
    ]
    dtype = list(DTYPES)[(turn // 2 + turn) % 4]
    options = {"statistics": "welford", "recompute": True, **RECOMPUTED[what]}
    case = Case(name, 5, num_cols, dtype, strategy=strategy, **options)
    results = check(case, where)
    if isinstance(where, CpuMachine):
        assert bits(results["recomputed"]) == bits(y_of(random_problem(case), results))
    # Without a weight a GPU may round x_hat + bias once.
    if (name == "rms_norm" or strategy != "cluster") and (
        case.weight is not None or case.bias is None
    ):
        assert bits(results["recomputed"]) == bits(results["y"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recomputed_y_uses_the_saved_mean(strategy, dtype):
    case = Case(
        "layer_norm", 5, 120, dtype, strategy=strategy, statistics="two_pass", recompute=True
    )
    results = check(case, CpuMachine())
    assert bits(results["recomputed"]) == bits(y_of(random_problem(case), results))


@pytest.mark.slow
@pytest.mark.parametrize(
    "gradients", [(), ("dweight",), ("dbias",), ("dx",), ("dx", "dweight", "dbias")], ids=str
)
@pytest.mark.parametrize(
    "strategy, num_cols, tile",
    [
        ("warp", 64, None),
        ("block", 1000, Tile(8, 64, packs_per_thread=2)),
        ("block", 1000, Tile(4, 64, 4, stages=2)),
        ("cluster", 1000, Tile(8, 32, packs_per_thread=1, cluster_size=4)),
        ("cluster", 1000, Tile(8, 32, cluster_size=4)),
        ("cluster", 1000, Tile(4, 32, 4, cluster_size=2, stages=3)),
        ("cluster", 999, Tile(1, 96, cluster_size=2)),
        ("uncached", 1000, None),
    ],
)
def test_recomputed_y_with_any_gradients(strategy, num_cols, tile, gradients, where, monkeypatch):
    """Alone, with some gradients, and with all; gradients not asked for are not written."""
    plans = []
    plain = run.backward_call

    def backward_call(device, tensors, options, compute, functors):
        unwanted = {"dx", "dweight", "dbias"} - set(gradients)
        tensors = {name: rows for name, rows in tensors.items() if name not in unwanted}
        options = options._replace(launch=replace(options.launch, tile=tile))
        call = plain(device, tensors, options, compute, functors)
        plans.append(call.plan)
        return call

    monkeypatch.setattr(run, "backward_call", backward_call)
    case = Case("layer_norm", 9, num_cols, "bfloat16", strategy=strategy, recompute=True)
    problem = random_problem(case)
    results = run_kernels(problem, where)
    for name in ("dx", "dweight", "dbias"):
        if name not in gradients:
            assert np.isnan(results.pop(name)).all()
    result = CheckResult(judge_all(problem, results, rounded_mean=uses_welford(case, where.device)))
    assert result.ok and len(result.findings) == 4 + len(gradients), f"\n{result}"
    assert tile is None or plans[-1].tile == tile
    assert "RecomputingStore" in plans[-1].launches[0].kernel.name_expression


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residual": True, "dsum": True},
        {"weight": "float32", "bias": "float32"},
        {"bias": None},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "tile",
    [
        Tile(8, 64, 3, stages=2),
        Tile(8, 64, 1, rows_per_block=3, stages=3),
        Tile(8, 64, 3, cluster_size=2, stages=3),
        Tile(1, 64, 24, stages=2),
    ],
    ids=str,
)
def test_recomputed_y_in_a_ring(tile, options, small, tile_of_backward):
    """Many biases are kept in shared memory, with weights or alone; few in registers."""
    plans = tile_of_backward(tile)
    num_rows, packs = (
        rows_of_turns(small, tile, 4),
        (tile.threads_per_row * tile.packs_per_thread - 2) * tile.cluster_size,
    )
    case = ring_case("layer_norm", num_rows, "bfloat16", packs, tile, recompute=True, **options)
    results = check(case, small)
    if isinstance(small, CpuMachine):
        assert bits(results["recomputed"]) == bits(y_of(random_problem(case), results))
    assert (
        plans[-1].tile == tile
        and plans[-1].launches[0].kernel.name_expression.count("RecomputingStore") == 1
    )


def test_recomputed_y_counts_as_bytes_moved():
    made = [
        dispatch.make_plan(
            replace(
                problem_of("backward", "bfloat16"), num_cols=4096, recomputed=recomputed, bias=bias
            ),
            H200,
            1000,
        )
        for recomputed, bias in ((None, None), ("float32", "float16"))
    ]
    assert made[1].bytes_needed - made[0].bytes_needed == 1000 * 4096 * 4 + 4096 * 2
    uncached = [
        dispatch.make_plan(
            replace(plan.problem, num_cols=1 << 20, dx=None), H200, 10, strategy="uncached"
        )
        for plan in made
    ]
    assert [len(plan.launches) for plan in uncached] == [1, 2]
    # The sums read x and dy once. y reads them again.
    assert uncached[1].bytes_moved - uncached[0].bytes_moved == (1 << 20) * (10 * (2 + 2 + 4) + 2)
