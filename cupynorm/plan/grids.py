"""How many blocks a kernel is launched with, and how rows are shared out among them. Pure Python, no GPU needed."""

from __future__ import annotations

from dataclasses import replace

from ..dtypes import DTYPES
from .devices import Device
from .instances import Choice, Kernel, Launch
from .problem import Problem, Tile, ceil_div
from .tile_model import blocks_that_fit, fetches_ahead, smem_bytes_of

# Of y in 8 bits a block has some instructions before its first row, so of many rows it takes a few groups one after the other
# (H200, bf16, 1 x 128 blocks, 1024 columns: four rows a block 0.94 of a copy, one 0.87); then the queue has the next ones.
# Of fewer rows the queue must have this many blocks for each place of one, by scaling, to even out what multiprocessors get
# (H200, bf16, microseconds: scale given, 8192 x 4096 32.2, four rows a block 35.4; 4096 x 8192 32.4 and 36.5; by row, 16,384 x
# 2048 32.3 and 35.7); but fewer than two for each start no queue (given, 1024 x 8192, 1.6: 13.9, one row a block 14.6). Where
# a second launch reads the rows again, resident blocks alone keep to their order, and leave more of them in the L2 cache
# (8192 x 4096 55.9, four rows a block 60.2; 8192 x 8192, 12.4 rows for each place, 98.9 and 102.8; 16,384 x 5120, 15.5 of
# them, 118.3 and 116.7).
_QUANTIZED_GROUPS, _QUEUED_QUANTIZED, _QUEUED_GIVEN, _RESIDENT_TENSOR = 4, 4, 12, 14


# Bytes of x that a block, or a cluster of 2, takes through a ring before the next one takes its place: the hardware gives the
# place to whoever is free. Larger clusters are slow to start: they stay. To 8 bits a block has instructions before its first
# row, so it takes more.
_QUEUED_RING_BYTES, _QUEUED_QUANTIZED_BYTES, _QUEUED_CLUSTER_SIZE = 256 * 1024, 1024 * 1024, 2

# Turns of a warp with bundles before the next block takes its place.
_BUNDLE_TURNS = 4


def queued_ring_bytes(problem: Problem) -> int | None:
    """Forward, bytes of x that a block takes before the next one takes its place; None where blocks stay."""
    if not problem.scaling or not problem.centered:
        return _QUEUED_RING_BYTES
    return None if problem.cols_of_scale is not None else _QUEUED_QUANTIZED_BYTES


def queued_bundles(tile: Tile) -> int:
    """Bundles that a warp takes forward before its block ends."""
    return max(2, ceil_div(_BUNDLE_TURNS * 32 // tile.threads_per_row, tile.bundle))


def _quantized_blocks(problem: Problem, groups: int, resident: int) -> int:
    """Blocks, or clusters, that write y in 8 bits from registers."""
    few = ceil_div(groups, _QUANTIZED_GROUPS)
    if problem.scaling == "tensor":
        return resident if groups < _RESIDENT_TENSOR * resident else max(resident, few)
    if groups < 2 * resident:
        return resident
    queued = _QUEUED_GIVEN if problem.scaling == "given" else _QUEUED_QUANTIZED
    return max(min(groups, queued * resident), few)


# Blocks that stay on their multiprocessor begin with this share of the rows; then the hardware's queue has blocks of so many,
# which evens out what multiprocessors get of the memory (H200, bf16 to 8 bits: LayerNorm by row, 8192 columns 0.974, all rows
# on resident blocks 0.958; 12,288 columns 0.94 and 0.90; RMSNorm, 16,384 columns 0.995 and 0.97, in a ring 49,152 columns 0.95,
# from the queue alone 0.88). Where one block of LayerNorm has a multiprocessor to itself nothing hides how it starts (32,768
# columns 0.86 and 0.85, in a ring 24,576 columns 0.84 and 0.89).
_SHARE_OF_FIRST, _ROWS_OF_LATER, _FEWEST_ROWS_OF_FIRST = 0.9, 2, 4


def _stays(choice: Choice, problem: Problem) -> bool:
    """Forward, of rows in registers: whether a block stays for the row that it has begun to fetch."""
    tile = choice.tile
    in_registers = choice.strategy == "block" and tile.path == "registers"
    return tile.path == "staged" or (
        in_registers and choice.amax_kernel is None and fetches_ahead(problem, tile)
    )


def shares_of_first(
    choice: Choice, problem: Problem, device: Device, num_rows: int, sm_margin: int
) -> tuple[int, int]:
    """num_first and rows_of_first of a Launch; 0 where all blocks are alike."""
    tile = choice.tile
    if tile.path == "ring":
        shares_out = (
            problem.scaling is not None
            and not problem.centered
            and tile.cluster_size <= _QUEUED_CLUSTER_SIZE
        )
    else:
        shares_out = choice.resident > 1 and _stays(choice, problem)
    if not shares_out or sm_margin:
        return 0, 0
    num_first = choice.resident * (
        dict(device.clusters)[tile.cluster_size] if tile.cluster_size > 1 else device.num_sms
    )
    rows_of_first = int(_SHARE_OF_FIRST * num_rows / num_first)
    return (num_first, rows_of_first) if rows_of_first >= _FEWEST_ROWS_OF_FIRST else (0, 0)


def grid_size(
    choice: Choice, problem: Problem, device: Device, num_rows: int, sm_margin: int
) -> int:
    """Blocks of the first kernel. Forward takes one block for each group of rows and lets the hardware queue them, unless a
    margin of multiprocessors is to stay free; backward keeps its sums from row to row, so its blocks are all resident."""
    tile = choice.tile
    groups = ceil_div(num_rows, tile.rows_per_block)
    most = (2**31 - 1) // tile.cluster_size
    if tile.cluster_size > 1:
        clusters = dict(device.clusters)[tile.cluster_size]
        left = clusters - ceil_div(sm_margin * clusters, device.num_sms)
        if left < 1:
            raise ValueError(
                f"sm_margin is {sm_margin}; it leaves {device.num_sms - sm_margin} multiprocessors of {device.name}, too few "
                f"for a cluster of {tile.cluster_size}"
            )
        resident = left * choice.resident
    else:
        resident = (device.num_sms - sm_margin) * choice.resident
    if not problem.forward or sm_margin or (tile.cluster_size > 1 and tile.path == "smem"):
        return (
            min(groups, resident) * tile.cluster_size
        )  # what waits in shared memory is worth a block that stays
    if tile.path == "bundle":
        rows = tile.bundle * queued_bundles(tile) * tile.block_size // 32
        return min(groups, max(resident, ceil_div(num_rows, rows)), most)
    num_first, rows_of_first = shares_of_first(choice, problem, device, num_rows, sm_margin)
    if num_first:
        later = ceil_div(num_rows - num_first * rows_of_first, _ROWS_OF_LATER)
        return min(num_first + later, most) * tile.cluster_size
    if _stays(choice, problem):
        return min(groups, resident)
    if tile.path == "ring":
        queued_bytes = (
            queued_ring_bytes(problem) if tile.cluster_size <= _QUEUED_CLUSTER_SIZE else None
        )
        queued = 0  # resident blocks alone
        if queued_bytes:
            rows = max(
                1,
                queued_bytes * tile.cluster_size // (problem.num_cols * DTYPES[problem.x].itemsize),
            )
            queued = ceil_div(num_rows, rows)
        return min(groups, max(resident, queued), most) * tile.cluster_size
    if problem.scaling and tile.path == "registers":
        return min(groups, _quantized_blocks(problem, groups, resident), most) * tile.cluster_size
    return min(groups, most) * tile.cluster_size


def parameters_launch(
    problem: Problem,
    tile: Tile,
    kernel: Kernel,
    *,
    overlaps: bool = False,
    most_blocks: int | None = None,
) -> Launch:
    grid = ceil_div(problem.num_cols, tile.threads_per_row * tile.pack_size)
    grid = grid if most_blocks is None else min(grid, most_blocks)
    return Launch(
        kernel,
        tile,
        grid,
        tile.block_size,
        smem_bytes_of(problem, tile, "parameters"),
        overlaps=overlaps,
    )


def for_few_rows(
    problem: Problem, device: Device, strategy: str, tile: Tile, num_rows: int, statistics: str
) -> Tile:
    """The tile, or one that gives few rows the same bits sooner: more lanes a row, whose sums the kernels form in one order
    (PackSums in cuda_src/statistics.cuh), and more rows a block, as blocks of few threads take longer to start.

    Few: all are on the multiprocessors at once, in 32 warps of each at most.
    """
    if not problem.forward or strategy != "warp" or tile.path != "registers" or problem.scaling:
        return tile
    most_lanes = min(32, 32 * 32 * device.num_sms // max(num_rows, 1))
    few = tile
    if tile.pack_size > 1 and (statistics == "two_pass" or not problem.centered):
        while few.packs_per_thread % 2 == 0 and 2 * few.threads_per_row <= most_lanes:
            few = replace(
                few,
                threads_per_row=2 * few.threads_per_row,
                packs_per_thread=few.packs_per_thread // 2,
            )
    for block_size in (256, 128, tile.block_size):
        rows = block_size // few.threads_per_row
        fitting = replace(few, rows_per_block=rows, blocks_per_sm=1)
        fitting = replace(fitting, blocks_per_sm=blocks_that_fit(problem, device, fitting))
        blocks = ceil_div(num_rows, rows)
        if 2 * device.num_sms <= blocks <= fitting.blocks_per_sm * device.num_sms:
            return fitting
    return fitting if fitting.blocks_per_sm and few != tile else tile
