"""model.py: what a tile needs of a multiprocessor, and tiles that fit on every GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plan_problems import (
    GPUS,
    H200,
    RING,
    backward,
    forward,
    problem_of,
    without_file,
)

from cupynorm.dispatch.dispatch import choose
from cupynorm.dispatch.model import (
    blocks_that_fit,
    check_tile,
    fits_smem,
    reduce_bytes,
    registers_of_thread,
    smem_bytes_of,
    warps_that_fit,
)
from cupynorm.dispatch.problem import SCALINGS, Tile


@pytest.mark.parametrize("name", GPUS)
def test_chosen_tiles_of_random_widths_fit(name):
    """The model's tile of 50 widths: its registers and shared memory hold all its blocks."""
    device, generator = without_file(name), random.Random(name)
    to_8_bits = [{"y": "float8_e4m3fn", "scaling": scaling} for scaling in SCALINGS]
    for at in range(50):
        step, direction = generator.choice((1, 2, 4, 8, 64)), ("forward", "backward")[at % 2]
        num_cols = max(step, int(2 ** generator.uniform(2, 18)) // step * step)
        changes = generator.choice([{}, {"weight": "float32"}, {"dsum": "bfloat16"}])
        if direction == "forward":
            changes = generator.choice([{}, {"residual": True}, *to_8_bits])
        problem = problem_of(num_cols, "bfloat16", direction, **changes)
        choice = choose(problem, device)
        tile = choice.tile
        check_tile(problem, choice.strategy, tile, device)
        if tile.path in ("registers", "ring", "bundle"):
            registers = registers_of_thread(problem, device, tile)
            warps = tile.blocks_per_sm * tile.block_size // 32
            assert warps <= warps_that_fit(device, registers), (problem, tile)
        if tile.path in ("ring", "bundle"):
            blocks = min(tile.blocks_per_sm, choice.resident)
            assert blocks == tile.blocks_per_sm, (problem, tile)
            assert fits_smem(device, choice.smem_bytes, tile.blocks_per_sm), (problem, tile)


def test_shared_memory_that_fits():
    """One KiB of every block is the driver's; the limit of a block does not include it."""
    device = replace(H200, smem_per_block=100_000, smem_per_sm=202_048)
    assert fits_smem(device, 100_000, 2) and not fits_smem(device, 100_001, 1)
    assert not fits_smem(replace(device, smem_per_sm=202_047), 100_000, 2)
    assert fits_smem(device, 0, 197) and not fits_smem(device, 0, 198)
    # No more than 32 blocks, although 40 would have registers.
    assert blocks_that_fit(forward(248), H200, Tile(8, 32, 1, path="registers")) == 32
    few = replace(H200, threads_per_sm=1024)
    assert blocks_that_fit(forward(2040), few, Tile(8, 128, 2, path="registers")) == 8


def test_shared_memory_by_hand():
    """Each formula once in numbers, so that a mistake in both the structs and the model shows."""
    # Two buffers of three sums for each of 4 warps, 4 or 8 bytes each.
    assert reduce_bytes(forward(), 128) == 2 * 3 * 4 * 4
    assert reduce_bytes(forward(x="float64"), 128) == 2 * 3 * 4 * 8
    # A cluster of 2 adds two buffers of three sums for each block: 48 bytes.
    assert reduce_bytes(forward(), 128, 2) == 2 * 3 * 4 * 4 + 2 * 3 * 2 * 4
    # One warp: 24 bytes, rounded to 32.
    assert reduce_bytes(forward(), 32) == 32
    # A ring of 3 rows of 1536 columns in 3 warps: rows and 3 barriers a row; 2 broadcasts of 24
    # bytes; 4 buffers of 3 floats for each warp and a barrier. 9512 is rounded up.
    assert 3 * (1536 * 2 + 3 * 8) + 2 * 24 + 4 * (3 * 3 * 4 + 8) == 9512
    assert smem_bytes_of(forward(1528), RING, "block") == 9520
    # forward_warp needs none; backward keeps 2 sums for each column in each of 4 warps.
    tile = Tile(8, 32, 4, rows_per_block=4, path="registers")
    assert smem_bytes_of(forward(1024), tile, "warp") == 0
    assert smem_bytes_of(backward(1024), tile, "warp") == 2 * 4 * 1024 * 4
    assert smem_bytes_of(backward(1024), replace(tile, rows_per_block=1), "warp") == 0
    # backward_parameters: 2 sums for each column of a pack of 8, 4 packs, in each of 16 warps.
    parameters = Tile(8, 4, rows_per_block=128)
    assert smem_bytes_of(backward(1024), parameters, "parameters") == 2 * 8 * 4 * 16 * 4
