"""tile_model.py: shared memory that fits, and tiles of a width."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tile_problems import H200, forward

from cupynorm.plan.model import RESERVED_BYTES, fits_smem, shaped
from cupynorm.plan.problem import Tile


def test_shared_memory_that_fits():
    """One KiB of every block is the driver's; the limit of a block does not include it."""
    device = replace(H200, smem_per_block=100_000, smem_per_sm=202_048)
    assert RESERVED_BYTES == 1024
    assert fits_smem(device, 100_000, 2)
    assert not fits_smem(device, 100_001, 1)
    assert not fits_smem(replace(device, smem_per_sm=202_047), 100_000, 2)
    assert fits_smem(device, 0, 197) and not fits_smem(device, 0, 198)


@pytest.mark.parametrize(
    ("num_cols", "pack_size", "threads", "cluster_size", "packs", "exact"),
    [
        (1024, 8, 128, 1, 1, 1),
        (1032, 8, 128, 1, 2, 0),
        (1016, 8, 128, 1, 1, 0),
        (1, 1, 32, 1, 1, 0),
        (8, 8, 32, 1, 1, 0),
        (2048, 8, 32, 2, 4, 1),
        # Slices are of 8 packs, 64 columns: 2112 columns give 1088 and 1024 to two blocks.
        (2112, 8, 32, 2, 5, 0),
        (2112, 8, 34, 2, 4, 0),
        (0, 8, 32, 1, 1, 0),
    ],
)
def test_shaped(num_cols, pack_size, threads, cluster_size, packs, exact):
    tile = shaped(forward(num_cols), pack_size, threads, cluster_size)
    assert tile == Tile(pack_size, threads, packs, cluster_size=cluster_size, exact=exact)
    assert tile.path == "registers"


def test_shaped_with_other_counts():
    tile = shaped(forward(1024), 8, 64, path="ring", stages=3, rows_per_block=2)
    assert tile == Tile(8, 64, 2, 2, exact=1, stages=3)
    assert tile.path == "ring"
