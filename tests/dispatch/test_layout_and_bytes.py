"""Layout: the packs that addresses and strides allow. Plans: the bytes that they move."""

from __future__ import annotations

import numpy as np
from plan_problems import pack_limit

from cupynorm.dispatch.problem import Tile
from cupynorm.plans import plan


def packs_fit(num_cols, layouts, pack_size):
    """Whether whole packs make up a row and the first packs of 16 rows start aligned."""
    for address, stride, itemsize in layouts:
        if any(
            (address + row * stride * itemsize) % min(16, pack_size * itemsize) for row in range(16)
        ):
            return False
    return num_cols % pack_size == 0


def test_pack_limit_is_the_largest_aligned_pack():
    """Packs of the limit are aligned in every row. Packs of twice the limit are not."""
    generator = np.random.default_rng(1)
    doubled = 0
    for _ in range(2000):
        num_cols = int(generator.integers(1, 2000)) * int(generator.choice([1, 2, 4, 8]))
        layouts = [
            (int(generator.integers(0, 64)) * size, int(generator.integers(-4000, 4000)), size)
            for size in generator.choice([2, 4, 8], 3).tolist()
        ]
        limit = pack_limit(num_cols, layouts)

        assert limit in (1, 2, 4, 8, 16) and packs_fit(num_cols, layouts, limit)
        assert limit == 16 or not packs_fit(num_cols, layouts, 2 * limit)
        doubled += limit < 16
    assert doubled > 1000


def test_alignment_and_width_reach_the_tile():
    for alignment, num_cols, expected in (
        (256, 768, 8),
        (16, 768, 8),
        (8, 768, 4),
        (2, 768, 1),
        (256, 767, 1),
        (256, 766, 2),
    ):
        assert plan(num_cols, device="H200", alignment=alignment).tile.pack_size == expected
    assert plan(768, dtype="float32", device="H200").tile.pack_size == 4
    assert plan(768, dtype="float64", device="H200").tile.pack_size == 2
    # 16 bytes of the narrowest streamed tensor: a wide x is then moved as two instructions a pack.
    assert plan(768, dtype="float32", out_dtype="bfloat16", device="H200").tile.pack_size == 8


def test_bytes_moved():
    """By hand: rows x streamed tensors, statistics, parameters, partial sums twice."""
    elements, bare = 10 * 1000, {"weight_dtype": None, "bias_dtype": None}
    of_rms_norm = {"norm": "rms_norm", "weight_dtype": "float32", "bias_dtype": None}
    for dtype, options, expected in (
        ("bfloat16", {}, elements * (2 + 2) + 10 * 2 * 4 + 1000 * (2 + 2)),
        ("float64", of_rms_norm | {"out_dtype": "float16"}, elements * 10 + 10 * 8 + 1000 * 4),
        ("float16", bare | {"residual": True}, elements * (2 + 2 + 2 + 2) + 10 * 2 * 4),
    ):
        made = plan(1000, 10, dtype, device="A100", **options)
        assert made.bytes_moved == made.bytes_needed == expected
    tile = Tile(pack_size=4, threads_per_row=32, packs_per_thread=4, rows_per_block=4)
    made = plan(500, 10, "float32", direction="backward", device="H200", strategy="warp", tile=tile)
    needed = 10 * 500 * 4 * 3 + 10 * 2 * 4 + 500 * 4 * 3
    # Ten rows, four a block; each a row of dweight and of dbias, written and read.
    assert made.num_partials == 3
    assert (made.bytes_needed, made.bytes_moved) == (needed, needed + 2 * 2 * 3 * 500 * 4)


def test_bytes_moved_if_rows_are_read_again():
    """uncached forward: welford reads x twice, two_pass three times, or twice without a mean.

    Backward reads x and dy for its sums, for dx, and for dweight and dbias.
    """
    once, options = 10 * 1000, {"strategy": "uncached", "device": "H200"}
    for norm, statistics, passes in (
        ("layer_norm", "welford", 2),
        ("layer_norm", "two_pass", 3),
        ("rms_norm", "welford", 2),
        ("rms_norm", "two_pass", 2),
    ):
        made = plan(1000, 10, "float32", norm=norm, statistics=statistics, **options)
        assert made.bytes_moved - made.bytes_needed == (passes - 1) * once * 4
    made = plan(1000, 10, "float32", statistics="welford", residual=True, **options)
    assert made.bytes_moved - made.bytes_needed == once * (4 + 4), "x and residual are read again"
    made = plan(1000, 10, "float32", direction="backward", **options)
    assert made.bytes_moved - made.bytes_needed == 2 * once * (4 + 4)
    assert made.num_partials == 0
