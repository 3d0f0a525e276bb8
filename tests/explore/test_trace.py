"""trace(): what is recorded is what the plan says, and what the sources do."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

import cupynorm
from cupynorm.explore.trace import EVENT, Trace, requests_of, sectors_of, turns_of
from cupynorm.gpu.nvrtc import cuda_src

# One for each strategy and path: keywords of trace().
FORWARD = {
    "warp": {"num_cols": 1024, "strategy": "warp"},  # too wide for that of backward
    "warp, float64": {"num_cols": 65, "dtype": "float64"},
    "bundle": {"num_cols": 33, "num_rows": 9},
    "several rows a warp": {"num_cols": 64, "num_rows": 37},
    "block": {"num_cols": 4096},
    "block with idle lanes": {"num_cols": 1000, "dtype": "float32"},
    "smem": {"num_cols": 30001, "dtype": "float32", "num_rows": 2},
    "cluster": {"num_cols": 16384, "strategy": "cluster"},
    "residual": {"num_cols": 768, "residual": True},
    "rms_norm": {"num_cols": 2048, "norm": "rms_norm"},
}
BACKWARD = {
    "warp": {"num_cols": 128, "num_rows": 40},
    "ring": {"num_cols": 1024},
    "block": {"num_cols": 1000, "dtype": "float32"},
    "cluster": {"num_cols": 16384, "strategy": "cluster", "num_rows": 2},
}


def traced(**options) -> Trace:
    return cupynorm.trace(**options)


def different_bytes(trace: Trace) -> int:
    return sum(different for _, different in trace.bytes.values())


@pytest.mark.parametrize("name", FORWARD)
def test_forward_moves_the_bytes_of_its_plan(name):
    trace = traced(**FORWARD[name])
    assert [each.kernel for each in trace.launches] == [each.kernel for each in trace.plan.launches]
    assert different_bytes(trace) == trace.plan.bytes_moved


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_moves_the_bytes_of_its_plan(name):
    trace = traced(**BACKWARD[name], direction="backward")
    assert [each.kernel for each in trace.launches] == [each.kernel for each in trace.plan.launches]
    # Partial sums are written by one kernel and read by the next.
    assert different_bytes(trace) == trace.plan.bytes_moved


@pytest.mark.parametrize("statistics, passes", [("welford", 2), ("two_pass", 3)])
def test_uncached_reads_x_in_every_pass(statistics, passes):
    trace = traced(num_cols=4096, strategy="uncached", statistics=statistics)
    num_bytes = 4 * 4096 * 2
    # In three passes every thread also reads the row's first value, which the first one subtracts.
    firsts = 4 * trace.plan.tile.threads_per_row * 2 if passes == 3 else 0
    assert trace.bytes["x"] == (passes * num_bytes + firsts, num_bytes)
    again = (passes - 1) * num_bytes
    assert different_bytes(trace) + again == trace.plan.bytes_moved


def test_every_element_is_read_once_by_the_lane_that_owns_it():
    """Lane t of a warp takes packs t, t + 32, ... of 8 elements."""
    trace = traced(num_cols=1024, num_rows=4)
    accesses, x = trace.accesses(), trace.tensors["x"]
    own = accesses[accesses["tensor"] == list(trace.tensors).index("x")]
    element = (own["address"] - np.uint64(x.address)).astype(np.int64) // 2
    row, col = element // 1024, element % 1024
    assert sorted(element) == list(range(0, 4 * 1024, 8)) and set(own["num_bytes"]) == {16}
    assert np.array_equal(own["thread"] % 32, col // 8 % 32)
    tile = trace.plan.tile
    assert np.array_equal(
        own["block"] * tile.rows_per_block + own["thread"] // tile.threads_per_row, row
    )


def test_coalesced_requests_need_the_fewest_sectors():
    trace = traced(num_cols=1024)
    streams = [each for each in trace.requests if each.tensor in ("x", "y")]
    assert {each.tensor for each in streams} == {"x", "y"}
    for each in streams:
        assert each.num_sectors == each.least == each.num_bytes // 32
        assert each.num_bytes == 512 * each.num_requests  # 32 lanes of 16 bytes


def test_sites_are_lines_of_the_sources():
    trace = traced(num_cols=1024)
    (site,) = {each.site for each in trace.requests if each.tensor == "x"}
    assert site.lines[0].startswith("pack.cuh:")
    line = int(site.of_kernel.removeprefix("forward_warp.cu:"))
    source = (cuda_src() / "forward_warp.cu").read_text().splitlines()
    assert "values.fetch(call.load" in source[line - 1]


def events(*rows) -> np.ndarray:
    """Reads of shared memory, or of global memory: (thread, site, address, bytes, space)."""
    made = np.zeros(len(rows), EVENT)
    for field, values in zip(("thread", "site", "address", "num_bytes", "space"), zip(*rows)):
        made[field] = values
    return made


def test_lanes_at_one_place_are_one_request_and_a_loop_makes_new_ones():
    made = events(*[(lane, 7, 4 * lane, 4, 1) for lane in (0, 1, 31, 32)] * 2)
    request = requests_of(made)
    assert request[0] == request[1] == request[2] != request[3]
    assert len(set(request)) == 4 and set(request[:4]).isdisjoint(request[4:])


@pytest.mark.parametrize("stride, turns", [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1), (0, 1)])
def test_lanes_that_need_one_bank_take_turns(stride, turns):
    made = events(*[(lane, 7, 4 * stride * lane, 4, 2) for lane in range(32)])
    assert turns_of(made, requests_of(made))[0] == turns


@pytest.mark.parametrize("stride, sectors", [(1, 4), (2, 8), (8, 32), (0, 1)])
def test_lanes_far_apart_need_more_sectors(stride, sectors):
    made = events(*[(lane, 7, 4 * stride * lane, 4, 1) for lane in range(32)])
    moved, least = sectors_of(made, requests_of(made))
    assert moved == sectors and least == (1 if stride == 0 else 4)


def test_the_timeline_has_the_waits_of_the_sources():
    """A block of one row shares its two sums through shared memory, each behind a barrier."""
    trace = traced(num_cols=4096, num_rows=1)
    spans = trace.timeline()
    num_warps = trace.plan.tile.block_size // 32
    assert {warp for warp, *_ in spans} == set(range(num_warps))
    barriers = [span for span in spans if span[1] == "block"]
    assert len(barriers) % num_warps == 0 and len(barriers) >= 2 * num_warps
    assert all(first <= last for _, _, first, last in spans)
    # Nobody leaves a barrier before everybody has come.
    nth = sorted(barriers)[:: len(barriers) // num_warps]
    assert max(first for *_, first, _ in nth) <= min(last for *_, last in nth)


def test_a_functor_moves_its_arrays_and_nothing_else():
    tile = cupynorm.Tile(pack_size=4, threads_per_row=4, packs_per_thread=4, rows_per_block=16)
    plain = {"num_cols": 64, "num_rows": 3, "dtype": "float32", "strategy": "warp", "tile": tile}
    without = traced(**plain)
    trace = traced(**plain, fuse=cupynorm.functors.silu_gate)
    assert trace.bytes == without.bytes | {"silu_gate.gate": (3 * 64 * 4, 3 * 64 * 4)}
    assert different_bytes(trace) == trace.plan.bytes_moved + 3 * 64 * 4
    trace = traced(**plain, direction="backward", fuse=cupynorm.functors.layer_scale(scale="cols"))
    assert trace.bytes["layer_scale.scale"][1] == 64 * 4
    assert trace.bytes["layer_scale.dscale"] == (3 * 64 * 4, 3 * 64 * 4)  # summed afterwards


def test_a_trace_prints_draws_and_is_pickled():
    trace = traced(num_cols=1024, num_rows=2)
    text = str(trace)
    assert repr(trace) == text and re.search(r"^x +4,096 +4,096 +1\.00$", text, re.MULTILINE)
    assert re.search(r"^forward_warp\.cu:\d+ +x +read +8 +4,096 +128 +128$", text, re.MULTILINE)
    assert str(pickle.loads(pickle.dumps(trace))) == text
    pytest.importorskip("matplotlib")
    image = trace.owners().axes[0].images[0].get_array()
    assert image.shape == (2, 1024, 3) and len(np.unique(image[0], axis=0)) == 32  # shades
    assert np.array_equal(image[0, :8], image[0, 256:264])  # lane 0, and lane 0 again
    assert (image[0, 8:16] == image[0, 8]).all() and (image[0, 7] != image[0, 8]).any()
    (axes,) = trace.lanes().axes
    assert axes.get_title("left") == "32 lanes ask for 512 bytes of x: 16 sectors"
    assert "lanes of the warp" in trace.waits()._repr_svg_()
    assert trace._repr_html_().count("<svg") == 2


def test_a_tile_may_be_a_dict():
    tile = {"pack_size": 8, "threads_per_row": 8, "packs_per_thread": 1, "rows_per_block": 4}
    found = traced(num_cols=64, strategy="warp", tile=tile)
    assert found.plan == traced(num_cols=64, strategy="warp", tile=cupynorm.Tile(**tile)).plan
    explanation = cupynorm.explain(64, device="H200", strategy="warp", tile=tile)
    assert explanation.plan.tile == found.plan.tile and explanation.trace.bytes
    same = {"statistics.cuh": [("// row: see", "// Row: see")]}
    assert cupynorm.experiment(same, 64, strategy="warp", tile=tile, on="cpu").changed.ok


def test_changed_sources_are_traced():
    """Lanes that take neighbouring packs each, not in turn, need twice the sectors."""
    far_apart = {
        "tile.cuh": [
            ("(pack * tile.threads_per_row + thread)", "(thread * tile.packs_per_thread + pack)")
        ],
        "register_row.cuh": [
            (
                "register_col<tile>(0) + static_cast<long long>(pack * cols_apart)",
                "register_col<tile>(pack)",
            )
        ],
    }
    tile = cupynorm.Tile(pack_size=4, threads_per_row=32, packs_per_thread=2)
    options = {"num_cols": 256, "num_rows": 1, "dtype": "float32", "strategy": "warp", "tile": tile}
    sectors = [
        sum(each.num_sectors for each in traced(**options, **more).requests if each.tensor == "x")
        for more in ({}, {"changes": far_apart})
    ]
    assert sectors == [32, 64]
