"""Path `ring`: the copy engine brings rows to a ring in shared memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import (
    CALL_OPTIONS,
    SEEDS,
    assert_dsum_is_added,
    assert_rows_are_the_same_alone,
    check,
    gradients_of,
    identical,
)
from kernel_rings import ONE_STAGE_RINGS, OPTION_TILES, RINGS, ring_case, rows_of_turns
from small_devices import SMALL, TWO_CLUSTERS

from cupynorm.check.cases import Problem, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.plan.problem import Tile
from cupynorm.plan.strategies import STATISTICS


def assert_same_in_other_orders(case, results):
    """The same bits, whichever thread of the CPU runs first. `results` are of seed 0."""
    for seed in SEEDS[1:]:
        others = run_kernels(random_problem(case), CpuMachine(SMALL, seed=seed))
        assert identical(results, others), f"seed {seed}"


@pytest.mark.parametrize(
    "tile",
    [Tile(8, 64, 3, stages=2), Tile(8, 64, 3, cluster_size=2, stages=3)],
    ids=["block", "cluster"],
)
def test_x_hat_is_rounded_in_a_ring(tile, small, tile_of_backward):
    tile_of_backward(tile)
    num_rows, packs = rows_of_turns(small, tile, 4), 190 * tile.cluster_size
    case = ring_case("rms_norm", num_rows, "bfloat16", packs, tile, bias=None, round_x_hat=True)
    once = run_kernels(random_problem(replace(case, round_x_hat=False)), small)["y"]
    assert 0.1 < (check(case, small)["y"] != once).mean() < 0.6


# Fewer turns than stages, as many, and so many that each slot and buffer is used several times.
@pytest.mark.parametrize(
    "turns", [*(pytest.param(turns, marks=pytest.mark.slow) for turns in (1, 3)), 12]
)
@pytest.mark.parametrize("ring", RINGS)
def test_ring(ring, turns, small, tile_of_backward):
    norm, dtype, packs, tile = RINGS[ring]
    plans = tile_of_backward(tile)
    case = ring_case(norm, rows_of_turns(small, tile, turns), dtype, packs, tile)
    results = check(case, small)
    assert [plan.tile for plan in plans] == [tile, tile]
    for plan in plans:
        taken = -(
            -case.num_rows
            // (plan.launches[0].grid_size // tile.cluster_size * tile.rows_per_block)
        )
        assert max(1, turns - 1) <= taken <= turns
    if isinstance(small, CpuMachine):
        assert_same_in_other_orders(case, results)


@pytest.mark.slow
@pytest.mark.parametrize("turns", [1, 2, 7])
@pytest.mark.parametrize("ring", ONE_STAGE_RINGS)
def test_ring_of_one_stage(ring, turns, small, tile_of_backward):
    norm, dtype, packs, tile = ONE_STAGE_RINGS[ring]
    plans = tile_of_backward(tile)
    case = replace(
        ring_case(norm, rows_of_turns(small, tile, turns), dtype, packs, tile), tile=None
    )
    results = check(case, small)
    assert plans[1].tile == tile
    if isinstance(small, CpuMachine):
        assert_same_in_other_orders(case, results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"residual": True, "dsum": True},
        {"recompute": True},
        {"weight": "float64", "bias": None},
        {"weight": None, "bias": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("ring", ["block", "cluster of single elements"])
def test_options_of_a_ring_of_one_stage(ring, options, small, tile_of_backward):
    norm, dtype, packs, tile = ONE_STAGE_RINGS[ring]
    plans = tile_of_backward(tile)
    check(
        replace(
            ring_case(norm, rows_of_turns(small, tile, 4), dtype, packs, tile, **options), tile=None
        ),
        small,
    )
    assert plans[-1].tile == tile


@pytest.mark.parametrize("ring", ONE_STAGE_RINGS)
def test_row_of_a_ring_of_one_stage_is_the_same_alone_and_in_a_batch(ring, small, tile_of_backward):
    norm, dtype, packs, tile = ONE_STAGE_RINGS[ring]
    tile_of_backward(tile)
    num_rows = rows_of_turns(small, tile, 5)
    problem = random_problem(replace(ring_case(norm, num_rows, dtype, packs, tile), tile=None))
    assert_rows_are_the_same_alone(problem, small, {0, num_rows // 2, num_rows - 1})


@pytest.mark.slow
@pytest.mark.parametrize("tile", OPTION_TILES, ids=["block", "cluster"])
@pytest.mark.parametrize("options", CALL_OPTIONS)
def test_options_of_a_ring(options, tile, small, tile_of_backward):
    tile_of_backward(tile)
    check(
        ring_case(
            "layer_norm",
            rows_of_turns(small, tile, 4),
            "bfloat16",
            190 * tile.cluster_size,
            tile,
            **CALL_OPTIONS[options],
        ),
        small,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ring", RINGS)
def test_row_of_a_ring_is_the_same_alone_and_in_a_batch(ring, small, tile_of_backward):
    norm, dtype, packs, tile = RINGS[ring]
    tile_of_backward(tile)
    num_rows = rows_of_turns(small, tile, 12)
    problem = random_problem(ring_case(norm, num_rows, dtype, packs, tile))
    assert_rows_are_the_same_alone(problem, small, {0, num_rows // 2, num_rows - 1})
    # Nor does a margin change a row.
    where = CpuMachine(TWO_CLUSTERS) if isinstance(small, CpuMachine) else small
    margin = replace(problem, case=replace(problem.case, sm_margin=where.device.num_sms // 2))
    whole, left = run_kernels(problem, where), run_kernels(margin, where)
    for tensor in ("y", "rstd", "dx"):
        assert left[tensor].tobytes() == whole[tensor].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("ring", RINGS)
def test_twenty_runs_of_a_ring_on_a_gpu_give_the_same_bits(ring, tile_of_backward):
    where = GpuCheckMachine()
    norm, dtype, packs, tile = RINGS[ring]
    tile_of_backward(tile)
    problem = random_problem(ring_case(norm, rows_of_turns(where, tile, 12), dtype, packs, tile))
    first = run_kernels(problem, where)
    assert all(np.isfinite(values).all() for values in first.values())
    for _ in range(19):
        assert identical(first, run_kernels(problem, where))


@pytest.mark.slow
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "ring", ["block whose last warp has no columns", "cluster of 8 of which 3 have nothing"]
)
def test_extreme_values_in_a_ring(ring, dtype, statistics, small, tile_of_backward):
    """Statistics of all warps are merged, also of warps without columns."""
    _, _, packs, tile = RINGS[ring]
    tile = replace(tile, pack_size=16 // DTYPES[dtype].itemsize)
    tile_of_backward(tile)
    usual = random_problem(ring_case("layer_norm", 3, dtype, packs, tile, statistics=statistics))

    def run(x: np.ndarray, eps: float = 1e-5) -> tuple[Problem, dict[str, np.ndarray]]:
        x = decode(encode(np.broadcast_to(x, usual.x.shape), dtype), dtype)
        problem = replace(usual, x=x, case=replace(usual.case, eps=eps))
        return problem, run_kernels(problem, small)

    if statistics == "two_pass":  # welford's mean errs more than is allowed of y
        result = CheckResult(judge_all(*run(usual.x + 1000)))
        assert result.ok, f"\n{result}"
    constants = np.array([0.1, -1 / 3, 1e-3 + 1e4])[:, None]
    for x in (constants, 1e20 * constants):
        problem, results = run(x)
        assert (results["y"] == problem.bias).all() and (results["mean"] == problem.x[:, 0]).all()
        assert np.isfinite(results["dx"]).all() and (results["dweight"] == 0).all()
    _, results = run(constants, eps=0.0)
    assert np.isposinf(results["rstd"]).all() and np.isnan(results["y"]).all()
    for value in (1e20, 1e37):  # an infinite variance: rstd is 0 and y is bias
        problem, results = run(value * np.resize([-1.0, 1.0], usual.x.shape))
        assert (
            (results["rstd"] == 0).all()
            and (results["y"] == problem.bias).all()
            and (results["dx"] == 0).all()
        )
    _, clean = run(usual.x)
    for value in (np.inf, np.nan):
        broken = usual.x.copy()
        broken[1, 5] = value
        _, results = run(broken)
        for tensor in ("y", "rstd", "dx"):
            assert np.isnan(results[tensor][1]).all()
            assert results[tensor][[0, 2]].tobytes() == clean[tensor][[0, 2]].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("ring", RINGS)
def test_residual_in_a_ring(ring, small):
    norm, dtype, packs, tile = RINGS[ring]
    problem = random_problem(
        ring_case(norm, rows_of_turns(small, tile, 5), dtype, packs, tile, residual=True)
    )
    fused = check(problem.case, small)
    alone = replace(
        problem, case=replace(problem.case, residual=False), x=fused["sum"], residual=None
    )
    assert run_kernels(alone, small)["y"].tobytes() == fused["y"].tobytes()


# Single elements and packs, one row and several, in blocks and in clusters.
RINGS_OF_ALL_SUBSETS = (
    "block of 4 rows",
    "block with weights in shared memory",
    "block of single elements",
    "cluster of 2 and 2 rows",
    "cluster of single elements",
)


def subsets_of_gradients(ring: str) -> list[int]:
    """Bits of dx, dweight and dbias. Each subset is a kernel; most rings have one of six."""
    if ring in RINGS_OF_ALL_SUBSETS:
        return [1, 2, 3, 4, 5, 6]
    return [1 + list(RINGS).index(ring) % 6]


@pytest.mark.slow
@pytest.mark.parametrize("ring", RINGS)
def test_gradients_that_a_ring_is_asked_for(ring, small):
    norm, dtype, packs, tile = RINGS[ring]
    problem = random_problem(ring_case(norm, rows_of_turns(small, tile, 5), dtype, packs, tile))
    names = ("dx", "dweight", "dbias")
    everything = gradients_of(problem, small, tile, names)
    for number in subsets_of_gradients(ring):
        wanted = tuple(name for bit, name in enumerate(names) if number >> bit & 1)
        found = gradients_of(problem, small, tile, wanted)
        assert CheckResult(judge_all(problem, found)).ok and set(found) == set(wanted)
        # With fewer gradients a GPU's compiler fuses other operations.
        assert isinstance(small, GpuCheckMachine) or identical(
            found, {name: everything[name] for name in wanted}
        ), wanted
    assert_dsum_is_added(problem, small, tile)
