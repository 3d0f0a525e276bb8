"""Grids: what num_rows and sm_margin change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_problems import DIRECTIONS, GPUS, pack_limit, problem_of

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import choose, make_plan
from cupynorm.dispatch.grids import queued_bundles
from cupynorm.dispatch.problem import Layout, Tile, ceil_div
from cupynorm.dtypes import DTYPES
from cupynorm.plans import plan


def test_reason_of_a_plan_names_the_lanes_of_few_rows():
    few, many = (plan(128, num_rows, device="H200") for num_rows in (4096, 2**20))
    assert few.tile.threads_per_row > many.tile.threads_per_row
    lanes, rows = few.tile.threads_per_row, few.tile.rows_per_block
    assert (
        few.reason
        == f"{many.reason}; as rows are few, {lanes} lanes for each and {rows} in a block"
    )
    assert few.reason in str(few) and "few" not in many.reason
    # What is asked for stays as it is.
    assert plan(128, 4096, device="H200", strategy="warp", tile=many.tile).tile == many.tile


def test_num_rows_changes_only_the_grid():
    """A row has the same bits alone and in any batch: 300 random problems, many num_rows."""
    generator = np.random.default_rng(0)

    def pick(values):
        return values[generator.integers(len(values))]

    for _ in range(300):
        device = pick(list(DEVICES.values()))
        num_cols = int(np.exp(generator.uniform(0, np.log(2e6))))
        names = list(DTYPES)
        problem = problem_of(
            num_cols,
            pick(names),
            pick(DIRECTIONS),
            weight=pick([*names, None]),
            centered=bool(pick([0, 1])),
            zero_centered=bool(pick([0, 1])),
            layout=Layout(min(pick([1, 2, 4, 8, 16]), pack_limit(num_cols, [])), contiguous=True),
        )
        made = [
            make_plan(problem, device, num_rows)
            for num_rows in (1, 2, 17, 1000, 131072, 2**31 + 5, 2**40)
        ]
        # Few rows may have one launch backward. Forward they may have more lanes, and load their
        # parameters early: with the same bits (tests/kernels/test_widths.py).
        if any(launch.num_row_blocks for launch in made[0].launches):
            assert made[0].launches[0].num_row_blocks == 1
            made = [one for one in made if not one.launches[0].num_row_blocks]
            assert made[-1].num_rows == 2**40
        constant = {
            (
                one.strategy,
                one.tile,
                one.statistics,
                tuple(replace(launch, grid_size=0) for launch in one.launches),
            )
            for one in made
        }
        if made[0].strategy in ("warp", "block") and problem.forward:
            constant = {
                (strategy, tile.pack_size, tile.cols, statistics)
                for strategy, tile, statistics, _ in constant
            }
        assert len(constant) == 1
        for earlier, later in zip(made, made[1:]):
            for first, second in zip(earlier.launches, later.launches):
                assert 1 <= first.grid_size <= second.grid_size < 2**31
        tile = made[0].tile
        if made[0].num_rows == 1:
            assert made[0].launches[0].grid_size == tile.cluster_size
        stays = tile.cluster_size > (2 if tile.stages else 1 if not tile.packs_per_thread else 16)
        if problem.forward and tile.bundle:  # queued, some rows for each
            rows = tile.bundle * queued_bundles(tile) * tile.block_size // 32
            assert made[-1].launches[0].grid_size == min(2**31 - 1, ceil_div(2**40, rows))
        elif problem.forward and not stays:  # queued: as many as a grid may have
            assert (
                made[-1].launches[0].grid_size
                == (2**31 - 1) // tile.cluster_size * tile.cluster_size
            )
        else:  # all resident
            resident = (
                dict(device.clusters)[tile.cluster_size] * tile.cluster_size
                if tile.cluster_size > 1
                else device.num_sms
            )
            assert made[-1].launches[0].grid_size == resident * choose(problem, device).resident


def test_empty_problems_have_no_launches():
    for num_cols, num_rows in ((0, 8), (768, 0), (0, 0)):
        for direction in DIRECTIONS:
            made = plan(num_cols, num_rows, device="H200", direction=direction)
            assert made.launches == () and made.num_partials == 0
            assert "none: there is nothing to compute" in str(made)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device", GPUS)
def test_sm_margin_shrinks_the_grid(device, direction):
    """Several margins in turn: the cached choice must not keep the grid of the first."""
    gpu = DEVICES[device]
    for num_cols in (768, 4096, 20000, 262144):
        full = plan(num_cols, 100000, device=device, direction=direction)
        grids = []
        for margin in (16, 64, 16, gpu.num_sms - 20):
            made = plan(num_cols, 100000, device=device, direction=direction, sm_margin=margin)
            grids.append(made.launches[0].grid_size)
            launch, cluster_size = made.launches[0], made.tile.cluster_size
            assert replace(launch, grid_size=0) == replace(full.launches[0], grid_size=0)
            if cluster_size == 1:
                per_sm = choose(made.problem, gpu).resident
                assert per_sm <= made.tile.blocks_per_sm
                assert grids[-1] == (gpu.num_sms - margin) * per_sm
            else:
                # As many clusters as the multiprocessors that are left hold, rounded down.
                clusters = dict(gpu.clusters)[cluster_size]
                left = clusters * (gpu.num_sms - margin) // gpu.num_sms
                assert 1 <= left * cluster_size <= gpu.num_sms - margin
                assert grids[-1] == left * choose(made.problem, gpu).resident * cluster_size
            if full.num_partials:
                assert made.num_partials == grids[-1] // cluster_size
        assert full.launches[0].grid_size > grids[0] > grids[1] > 0 and grids[0] == grids[2]
        assert grids[1] >= grids[3] > 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sm_margin_that_leaves_no_cluster(direction):
    """On an H200 a cluster of 2 needs 2 of 132 multiprocessors; one of 16 needs 132 / 7."""
    for packs_per_thread in (3, 0):  # in registers and in shared memory
        # 3 packs of 8 columns for each thread of the cluster: 2 x 128 threads, 16 x 32.
        for cluster_size, num_cols, threads, margin in ((2, 6144, 128, 130), (16, 12288, 32, 113)):
            tile = Tile(8, threads, packs_per_thread, cluster_size=cluster_size)
            options = {
                "device": "H200",
                "direction": direction,
                "strategy": "cluster",
                "tile": tile,
            }
            assert plan(num_cols, sm_margin=margin, **options).launches[0].grid_size == cluster_size
            leaves = f"sm_margin is {margin + 1}; it leaves {131 - margin} multiprocessors of H200"
            with pytest.raises(
                ValueError, match=f"{leaves}, too few for a cluster of {cluster_size}$"
            ):
                plan(num_cols, sm_margin=margin + 1, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sm_margin_of_small_grids_and_of_all_multiprocessors(direction):
    options = {"device": "H200", "direction": direction}
    assert plan(8192, 3, sm_margin=1, **options).launches[0].grid_size == 3
    for margin in (132, 1000):
        message = f"sm_margin is {margin}; expected 0 to 131 of the 132 multiprocessors"
        with pytest.raises(ValueError, match=message):
            plan(768, sm_margin=margin, **options)


def test_shared_memory_limits_resident_blocks():
    """Each resident block needs its shared memory and 1 KiB that the driver keeps."""
    # Of 233472 bytes two blocks of 116000 fit only without the driver's share.
    tile = Tile(pack_size=8, threads_per_row=512, blocks_per_sm=2)
    for num_cols, smem_bytes, resident in ((57008, 114400, 2), (57808, 116000, 1)):
        choice = choose(problem_of(num_cols, "float16"), DEVICES["H200"], "block", tile)
        assert (choice.smem_bytes, choice.resident) == (smem_bytes, resident)
