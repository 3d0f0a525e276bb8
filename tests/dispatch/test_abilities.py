"""model.py: bundles and scales of blocks that a kernel can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_problems import H200, QUANTIZED, RING, backward, forward

from cupynorm.dispatch.model import can_bundle, scales_at_once
from cupynorm.dispatch.problem import Layout, Problem, Tile

STREAM = {"input": "bfloat16", "residual_dtype": "float32"}


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
