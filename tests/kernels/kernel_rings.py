"""Tiles of rings, and problems that fill them."""

from __future__ import annotations

from cupynorm.check.cases import Case
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.plan.problem import Tile


def rows_of_tiles(table: str) -> dict[str, tuple[str, str, int, Tile]]:
    """By name: norm, dtype, a width and a tile, of lines "name | norm dtype width | tile".

    A tile is its first counts, in the order of its fields, and others by name.
    """
    found = {}
    for line in table.strip().splitlines():
        if not line.startswith("#"):
            name, row, tile = line.split(" | ")
            (norm, dtype, width), (counts, *others) = row.split(), tile.split(", ")
            named = {field: int(value) for field, value in map(str.split, others)}
            found[name] = norm, dtype, int(width), Tile(*map(int, counts.split()), **named)
    return found


# (norm, dtype, packs of a row, tile). A warp owns 32 x packs_per_thread consecutive packs; a block
# of a cluster owns a multiple of 8.
RINGS = rows_of_tiles(
    """
one warp | layer_norm float32 20 | 4 32 1, stages 2
block | rms_norm bfloat16 128 | 8 64 2, exact 1, stages 4
block whose last warp has a part | layer_norm float32 470 | 4 96 5, stages 3
block whose last warp has no columns | layer_norm float16 130 | 8 128 2, stages 2
block with weights in shared memory | layer_norm bfloat16 192 | 8 64 3, exact 1, stages 2
block of 4 rows | layer_norm bfloat16 180 | 8 64 3, rows_per_block 4, stages 3
block of 3 rows of one warp | rms_norm float32 30 | 4 32 1, rows_per_block 3, stages 2
block of 7 rows of one warp | layer_norm float32 110 | 4 32 4, rows_per_block 7, stages 4
block of 12 rows of one warp | layer_norm bfloat16 80 | 8 32 3, rows_per_block 12, stages 3
# A lane reads the values of three warps, of two or three, or of four.
block of 11 warps | layer_norm bfloat16 340 | 8 352 1, stages 3
cluster of 4 with 20 warps | layer_norm float16 620 | 8 160 1, cluster_size 4, stages 2
cluster of 16 with 64 warps | layer_norm bfloat16 2000 | 8 128 1, cluster_size 16, stages 2
# Rows and slices that begin and end at any offset within 16 bytes.
block of single elements | layer_norm bfloat16 333 | 1 64 6, stages 3
cluster of pairs | rms_norm float16 270 | 2 64 3, cluster_size 2, stages 2
cluster of single elements | layer_norm float32 1301 | 1 96 4, cluster_size 4, stages 2
cluster of 2 | layer_norm float32 256 | 4 64 2, cluster_size 2, exact 1, stages 3
cluster of 2 and 2 rows | layer_norm float16 100 | 8 64 1 2, cluster_size 2, stages 2
cluster of 4 whose last warp is idle | layer_norm bfloat16 200 | 8 64 1, cluster_size 4, stages 3
cluster of 8 of which 3 have nothing | rms_norm float16 36 | 8 32 1, cluster_size 8, stages 4
cluster of 16 | layer_norm bfloat16 512 | 8 32 1, cluster_size 16, exact 1, stages 2
cluster of 16 of which 3 have nothing | layer_norm float32 510 | 4 64 1, cluster_size 16, stages 3
"""
)


# packs_per_thread is 3, so weights are in shared memory, too.
OPTION_TILES = (Tile(8, 64, 3, stages=2), Tile(8, 64, 3, cluster_size=2, stages=3))


def ring_case(
    norm: str, num_rows: int, dtype: str, packs: int, tile: Tile, **options: object
) -> Case:
    strategy = "cluster" if tile.cluster_size > 1 else "block"
    return Case(
        norm, num_rows, packs * tile.pack_size, dtype, strategy=strategy, tile=tile, **options
    )


def rows_of_turns(where: CpuMachine | GpuCheckMachine, tile: Tile, turns: int) -> int:
    """So many rows that each block or cluster works on `turns` rows, and the last on one less."""
    at_once = (
        dict(where.device.clusters)[tile.cluster_size]
        if tile.cluster_size > 1
        else where.device.num_sms
    )
    return max(1, turns * at_once * tile.rows_per_block - 1)


# Backward rings of one stage: one row fills the shared memory.
ONE_STAGE_RINGS = rows_of_tiles(
    """
block | layer_norm float32 470 | 4 96 5, stages 1
block that is filled | rms_norm bfloat16 512 | 8 64 8, exact 1, stages 1
cluster of single elements | layer_norm float32 1301 | 1 96 4, cluster_size 4, stages 1
cluster whose last warp has a part | layer_norm float16 1100 | 8 64 9, cluster_size 2, stages 1
cluster of 16 | layer_norm float32 8192 | 4 32 16, cluster_size 16, exact 1, stages 1
"""
)
