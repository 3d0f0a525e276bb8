"""What few rows get: tiles that compute the same bits sooner, and a backward of one launch.
Pure Python, no GPU needed. docs/experiments.md has the measurements behind the integers.
"""

from __future__ import annotations

from dataclasses import replace

from .devices import Device
from .instances import Choice, Kernel, Launch, cpp_bool, cpp_name, functor_structs, row_arguments
from .problem import Problem, Tile, ceil_div
from .tile_model import blocks_that_fit, reduce_bytes

# Backward in one launch: threads of a block, the fewest that are as many as rows; the rows that a
# group of threads adds up, at most; the elements of x, at most, because they are read twice.
_BLOCK_SIZES, _ROWS_OF_GROUP, _ELEMENTS = (128, 256, 512), 16, 2**22
# Forward: the share of a tile's blocks that must stay resident for weight and bias to load early,
# if rows take more than one turn. RMSNorm of rows of so few bytes in the lanes of a warp: the turns
# of rows whose weight loads early, if all packs are inside the row (1), and if not (0).
_EARLY_SHARE, _EARLY_LANES_BYTES = 0.8, 1024
_EARLY_LANES_TURNS = {1: range(3, 9), 0: range(2, 5)}
_FUSED = {"dsum", "dresidual", "wide"}


def for_few_rows(
    problem: Problem, device: Device, strategy: str, tile: Tile, num_rows: int, statistics: str
) -> Tile:
    """The tile, or one that computes the same bits of few rows sooner.

    It has more lanes a row, because PackSums (reduce.cuh) adds in the same order for
    any number of lanes. It has more rows a block, because many small blocks take longer to start.
    It loads weight and bias with the row. Rows are few if all are resident at once, in at most 32
    warps of each multiprocessor.
    """
    in_registers = strategy in ("warp", "block") and tile.path == "registers"
    if not problem.forward or not in_registers or problem.scaling:
        return tile
    few = _more_lanes(problem, device, tile, num_rows, statistics) if strategy == "warp" else tile
    return _early(problem, device, few, num_rows, _early_turns(problem, strategy, few))


def _early_turns(problem: Problem, strategy: str, tile: Tile) -> range:
    """The turns of resident blocks for which fewer blocks with an early weight are faster."""
    itemsize = problem.itemsize
    alone = not (problem.centered or problem.bias or problem.extras)
    narrow = strategy == "warp" and problem.num_cols * itemsize <= _EARLY_LANES_BYTES
    if narrow and alone and tile.pack_size * itemsize == 16:
        return _EARLY_LANES_TURNS[tile.exact]
    return range(0)


def _early(problem: Problem, device: Device, tile: Tile, num_rows: int, lanes_turns: range) -> Tile:
    """The tile with weight and bias loaded early, if rows take few turns of resident blocks.

    A thread keeps them beside the row, so fewer blocks fit. Few are 1, lanes_turns, and 2 if as
    many blocks fit, or nearly.
    """
    if not (problem.weight or problem.bias) or problem.store:
        return tile
    early = replace(tile, early=1, blocks_per_sm=1)
    early = replace(
        early, blocks_per_sm=min(blocks_that_fit(problem, device, early), tile.blocks_per_sm)
    )

    def turns(of: Tile) -> int:
        return ceil_div(num_rows, max(1, of.blocks_per_sm) * of.rows_per_block * device.num_sms)

    few = turns(early) in (1, *lanes_turns) or (
        turns(early) <= min(2, turns(tile))
        and early.blocks_per_sm >= _EARLY_SHARE * tile.blocks_per_sm
    )
    return early if few and early.blocks_per_sm else tile


def _more_lanes(
    problem: Problem, device: Device, tile: Tile, num_rows: int, statistics: str
) -> Tile:
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


def in_one_launch(choice: Choice, problem: Problem, num_rows: int) -> Launch | None:
    """backward_few.cu, where it is faster than a kernel of the strategy and one of the sums."""
    tile = choice.tile
    # Without a weight, the compiler fuses other operations where it sums dweight beside dx.
    whole = problem.dx and problem.weight and choice.parameters_kernel
    if not whole or problem.extras - _FUSED:
        return None
    if tile.path not in ("registers", "ring") or num_rows * problem.num_cols > _ELEMENTS:
        return None
    of_row = tile.threads_per_row * tile.cluster_size
    in_registers = tile.path == "registers"
    if of_row > (512 if tile.elements > 16 else 1024) or (in_registers and tile.cluster_size > 1):
        return None
    wanted = next((size for size in _BLOCK_SIZES if size >= num_rows), _BLOCK_SIZES[-1])
    together = 1 if in_registers and of_row > 32 else ceil_div(wanted, of_row)
    block_size = of_row * together
    lanes = 32 if num_rows <= block_size // 32 else 8
    sums = Tile(min(problem.widest_pack, 4), lanes, rows_per_block=block_size // lanes)
    if num_rows > _ROWS_OF_GROUP * sums.rows_per_block:
        return None
    few = replace(tile, rows_per_block=together, blocks_per_sm=1)
    row_blocks = ceil_div(num_rows, together)
    sum_blocks = ceil_div(problem.num_cols, sums.pack_size * sums.threads_per_row)
    return Launch(
        few_instance(problem, few, sums),
        few,
        row_blocks + sum_blocks,
        block_size,
        smem_bytes_of_few(problem, few, sums),
        num_row_blocks=row_blocks,
    )


def smem_bytes_of_few(problem: Problem, tile: Tile, sums: Tile) -> int:
    """Shared memory of a block that has rows, or columns: the larger of the two."""
    compute_bytes = 4 if problem.compute == "float32" else 8
    of_rows = 0
    if tile.path == "ring":
        of_rows = 2 * 4 * tile.block_size * tile.cluster_size // 32
    elif tile.threads_per_row > 32:
        of_rows = reduce_bytes(problem, tile.threads_per_row)
    warps = sums.block_size // 32
    return max(of_rows, 2 * sums.pack_size * sums.threads_per_row * warps * compute_bytes)


def few_instance(problem: Problem, tile: Tile, sums: Tile) -> Kernel:
    """The instance of backward_few.cu. sums: the tile of the blocks that own columns."""
    outputs = f"{cpp_name(problem.dweight)}, {cpp_name(problem.dbias)}"
    name = f"{row_arguments(problem)}, {outputs}, {cpp_bool(problem.centered)}"
    return Kernel(
        "backward_few.cu",
        f"backward_few<{name}, {tile.cpp}, {sums.cpp}>",
        functor_structs(problem),
    )
