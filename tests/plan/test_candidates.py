"""candidates.py: candidates are valid, few, different, and fit the registers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from nvrtc_here import needs_nvrtc

from cupynorm.gpu import nvrtc
from cupynorm.norm.plans import plan
from cupynorm.plan.candidates import _FILLED, _MOST, candidates
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.dispatch import choose
from cupynorm.plan.problem import cols_of_slice

WIDTHS = (1, 8, 33, 64, 768, 1000, 1023, 4096, 5120, 8192, 16384, 65536, 131072, 262144, 1 << 20)


def problems(device):
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        for direction in ("forward", "backward"):
            for num_cols in WIDTHS:
                yield plan(num_cols, dtype=dtype, direction=direction, device=device).problem
    for norm in ("layer_norm", "rms_norm"):
        for direction in ("forward", "backward"):
            yield plan(
                4096,
                norm=norm,
                direction=direction,
                weight_dtype="float32",
                bias_dtype=None,
                device=device,
            ).problem
    yield plan(4096, residual=True, device=device).problem


@pytest.mark.slow
@pytest.mark.parametrize("name", ["H200", "A100", "RTX 4090", "B200"])
def test_candidates_are_valid_and_few(name):
    device = DEVICES[name]
    for problem in problems(device):
        found = candidates(problem, device)
        default = choose(problem, device)
        assert (found[0].strategy, found[0].tile) == (default.strategy, default.tile)
        assert len({(each.strategy, each.tile) for each in found}) == len(found) <= _MOST + 1
        for each in found[1:]:
            tile = each.tile
            assert each == choose(problem, device, each.strategy, tile)
            assert each.resident >= tile.blocks_per_sm
            filled = cols_of_slice(problem, tile)
            assert tile.packs_per_thread == 0 or filled >= _FILLED * tile.cols
            assert device.clusters or (tile.cluster_size == 1 and not tile.stages)


@pytest.mark.parametrize("name", ["H200", "A100", "RTX 4090", "B200"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_candidates_differ_in_all_that_a_tile_is(name, direction):
    """A table of candidates has several threads, packs, blocks and rows, and rings."""
    device = DEVICES[name]

    def seen(num_cols, field):
        problem = plan(num_cols, direction=direction, device=device).problem
        return {getattr(each.tile, field) for each in candidates(problem, device)}

    assert len(seen(4096, "threads_per_row")) > 2 and len(seen(4096, "packs_per_thread")) > 2
    assert len(seen(768, "blocks_per_sm")) > 2 and len(seen(768, "rows_per_block")) > 2
    assert seen(4096, "stages") == ({0, 2, 3, 4, 5} if device.clusters else {0})
    assert (
        len(seen(65536, "cluster_size")) > 1
        if device.clusters
        else seen(65536, "cluster_size") == {1}
    )


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("name", ["H200", "A100"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("num_cols,dtype", [(1000, "bfloat16"), (8192, "float32")])
def test_hardly_any_candidate_spills(name, direction, num_cols, dtype):
    """Registers are estimated as bounds. `tune` leaves out candidates that spill all the same."""
    device = DEVICES[name]
    sample = candidates(
        plan(num_cols, dtype=dtype, direction=direction, device=device).problem, device
    )[:: 4 if os.cpu_count() >= 8 else 8]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(
            pool.map(
                lambda each: nvrtc.compile_for(each.kernel, device.compute_capability)[1], sample
            )
        )
    spilled = [
        str(each.tile)
        for each, used in zip(sample, reports)
        if used.spill_store_bytes or used.spill_load_bytes
    ]
    assert len(spilled) <= 1 + len(sample) // 8, spilled
