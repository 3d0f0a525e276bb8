"""model.py: rings, bundles and scales of blocks that a kernel can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_problems import A100, H200, QUANTIZED, RING, RTX_4090, RTX_5090, backward, forward

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import choose
from cupynorm.dispatch.model import can_bundle, can_ring, scales_at_once
from cupynorm.dispatch.problem import Layout, Problem, Tile

STREAM = {"input": "bfloat16", "residual_dtype": "float32"}


def test_problems_that_can_use_a_ring():
    for problem in (
        forward(x="float32", residual=True),
        forward(weight="float64"),
        forward(**QUANTIZED),
        backward(dsum="bfloat16"),
        backward(recomputed="bfloat16", bias="bfloat16"),
    ):
        assert can_ring(problem, H200) and can_ring(problem, RTX_5090), problem
        assert not can_ring(problem, A100) and not can_ring(problem, RTX_4090)
    assert not can_ring(forward(x="float64"), H200) and not can_ring(forward(**STREAM), H200)


def test_problems_that_can_use_bundles():
    for problem in (
        forward(127),
        forward(127, "float32"),
        forward(127, residual=True),
        forward(127, weight="float64", bias=None),
        forward(127, round_x_hat="bfloat16"),
        backward(127),
        backward(127, dsum="bfloat16"),
    ):
        assert can_bundle(problem, H200), problem
        assert not can_bundle(problem, A100)


@pytest.mark.parametrize(
    "problem",
    [
        forward(127, "float64"),
        forward(127, y="float32"),
        forward(127, **QUANTIZED),
        forward(127, **STREAM),
        forward(127, layout=Layout(1, contiguous=False)),
        backward(127, dy="float32"),
        backward(127, dx=None),
        backward(127, dsum="float32"),
        backward(127, dresidual="bfloat16"),
        backward(127, recomputed="bfloat16"),
    ],
    ids=("float64,wide y,8 bits,input,gaps,wide dy,no dx,wide dsum,dresidual,recomputed").split(
        ","
    ),
)
def test_problems_that_cannot_use_bundles(problem):
    assert not can_bundle(problem, H200)


def quantized(scaling: str | None, num_cols: int = 4096, **changes: object) -> Problem:
    return forward(num_cols, y="float8_e4m3fn", scaling=scaling, **changes)


def test_scales_that_belong_to_no_block_of_columns():
    """A scale of the whole tensor takes two launches; a given scale or one of a row takes one."""
    for tile, strategy in (
        (Tile(8, 128, 4, path="registers"), "block"),
        (Tile(8, 512, path="smem"), "block"),
        (Tile(8, 512, path="uncached"), "uncached"),
        (RING, "block"),
    ):
        assert scales_at_once(quantized("given"), tile, strategy)
        assert scales_at_once(quantized("row"), tile, strategy)
        assert scales_at_once(forward(), tile, strategy)
        assert not scales_at_once(quantized("tensor"), tile, strategy)


@pytest.mark.parametrize(
    ("tile", "strategy", "block"),
    [
        # Lanes of a warp find the amax: 8 x 128 columns are a multiple of 128.
        (Tile(8, 128, 4), "block", True),
        # 8 x 4 = 32 columns at a time: a quarter of a block of 128.
        (Tile(8, 4, 4), "warp", True),
        # 8 x 2 = 16 columns at a time divide it.
        (Tile(8, 2, 4), "warp", True),
        # 24 lanes of 4: 96 columns do not divide it.
        (Tile(4, 24, 4), "warp", False),
        # 32 lanes of one element: 32 columns at a time, a quarter of a block of 128.
        (Tile(1, 32, 4), "warp", True),
        # 64 threads of one element: a block of 128 columns belongs to lanes of two warps.
        (Tile(1, 64, 4), "block", False),
        # 64 threads of two: the same, although 128 columns are all that they hold at a time.
        (Tile(2, 64, 4), "block", False),
        # Rows that are in no register.
        (Tile(8, 128, path="smem"), "block", False),
        (Tile(8, 128, path="uncached"), "uncached", False),
        # 80 elements of y, unpacked, are 320 bytes; 88 are more than a thread keeps.
        (Tile(8, 128, 10), "block", True),
        (Tile(8, 128, 11), "block", False),
        # A cluster only if its slices are whole.
        (Tile(8, 128, 4, cluster_size=2), "cluster", False),
        (Tile(8, 128, 4, cluster_size=2, exact=1), "cluster", True),
        # A slice of 64 columns is half of a block of 128.
        (Tile(2, 32, 1, cluster_size=2, exact=1), "cluster", False),
        # One of 320 columns ends in the middle of a block of 128.
        (Tile(2, 32, 5, cluster_size=2, exact=1), "cluster", False),
        # A ring: 32 lanes of 8 or 2 are 256 or 64 columns, and no warp's part may end in a block.
        (replace(RING, exact=1), "block", True),
        (replace(RING, exact=1, pack_size=2), "block", False),
        (RING, "block", False),
    ],
    ids=str,
)
def test_scales_of_blocks_in_one_launch(tile, strategy, block):
    assert scales_at_once(quantized("block"), tile, strategy) == block


def splits_a_block(tile: Tile, block: int) -> bool:
    """Whether a slice of the row, or what the lanes of one warp hold, ends inside a block."""
    at_a_time, of_warp = tile.pack_size * tile.threads_per_row, tile.pack_size * 32
    if tile.cluster_size > 1 and not (tile.exact == 1 and tile.cols % block == 0):
        return True
    if tile.path == "ring":
        return tile.exact != 1 or of_warp % block != 0
    by_warps = at_a_time % block == 0 and of_warp >= block
    return not by_warps and not (block % at_a_time == 0 and tile.threads_per_row <= 32)


# What else is fused with 8-bit rows; options of which a row of a data file is chosen come first.
FUSED_WITH_SCALES = (
    {"x": "bfloat16", "weight": "bfloat16"},
    {"x": "float32"},
    {"x": "float64"},
    {"x": "float16", "residual": True},
    {"x": "float32", "input": "bfloat16", "residual_dtype": "float32"},
    {"x": "float16", "input": "float64", "residual_dtype": "float16"},
)
TILES_OF_CALLERS = [
    (strategy, Tile(pack_size, threads, packs, rows, cluster_size, stages=stages))
    for pack_size in (1, 2, 4, 8)
    for packs in (1, 3, 8)
    for strategy, threads, rows, cluster_size, stages in (
        *(("warp", lanes, 128 // lanes, 1, 0) for lanes in (1, 4, 16, 32)),
        *(("block", threads, 1, 1, 0) for threads in (32, 96, 160, 256)),
        *(("block", threads, 1, 1, stages) for threads in (96, 128) for stages in (1, 2)),
        *(("cluster", threads, 1, 2, stages) for threads in (32, 96, 128) for stages in (0, 2)),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["A100", "RTX 4090", "H200", "B200", "RTX 5090"])
def test_no_plan_splits_the_block_of_a_scale(device):
    """One launch writes the scales of blocks only where each block lies in one slice of the row,
    and there in lanes of one warp: chosen tiles, forced strategies, and tiles of callers."""
    at_once = {"chosen": 0, "of a caller": 0}

    def look(problem: Problem, strategy: str | None, tile: Tile | None = None) -> None:
        try:
            choice = choose(problem, DEVICES[device], strategy, tile)
        except ValueError:  # too wide or too narrow, or not for this device
            return
        if choice.amax_kernel is None:
            at_once["of a caller" if tile else "chosen"] += 1
            assert not splits_a_block(choice.tile, 128), (problem, choice.tile)

    def problem_of(num_cols: int, fused: dict) -> Problem:
        named = {"y": "float8_e5m2", "scaling": "block", **fused}
        layout = Layout.of_new_arrays(num_cols)
        return Problem("forward", True, num_cols, layout=layout, **named)

    for fused in FUSED_WITH_SCALES:
        for num_cols in (1, 24, 32, 96, 127, 128, 160, 384, 640, 1000, 1024, 4096, 9216, 24576):
            for strategy in (None, "warp", "block", "cluster", "uncached"):
                look(problem_of(num_cols, fused), strategy)
    for num_cols in range(128, 32768, 416):  # ranges of a data file
        look(problem_of(num_cols, FUSED_WITH_SCALES[0]), None)
    for at, (strategy, tile) in enumerate(TILES_OF_CALLERS):
        for exact in (0, 1):
            num_cols = tile.cluster_size * tile.cols - tile.pack_size * (1 - exact)
            fused = FUSED_WITH_SCALES[at % len(FUSED_WITH_SCALES)]
            look(problem_of(num_cols, fused), strategy, replace(tile, exact=exact))
    assert at_once["chosen"] > 50 and at_once["of a caller"] > 30, at_once


def test_the_check_of_split_blocks_can_fail():
    for tile in (
        Tile(8, 96, 2, cluster_size=2, exact=1, path="registers"),
        Tile(2, 128, 4, exact=1, stages=2, path="ring"),
        Tile(1, 64, 4, path="registers"),
    ):
        assert splits_a_block(replace(tile, pack_size=1), 128)
