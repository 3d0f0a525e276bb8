"""Tiles of rows that come to registers through shared memory: while one is written, the copy engine brings the next (StagedRow
in cuda_src/row.cuh). Pure Python, no GPU needed.

For y of 8 bits, whose blocks are few and have no registers for what is on its way. Shares of a copy are of an H200, bf16,
measured as in cupynorm.registers.
"""

from __future__ import annotations

from dataclasses import replace

from .devices import Device
from .dtypes import DTYPES
from .problem import Problem, Tile, ceil_div
from .quantized_registers import is_common_quantized, is_fetched_ahead
from .registers import blocks_that_fit


def staged_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory of StagedRow, as in cuda_src/row.cuh."""
    return ceil_div(tile.cols * DTYPES[problem.x].itemsize, 16) * 16 + 16


# Columns of LayerNorm's rows that are staged where scales are found in the row (by 1 x 128 blocks, 12,288 columns: 0.93,
# fetched by threads 0.86; 14,000 0.89 and 0.69; MXFP8 16,384 0.91 and 0.83, 32,768 0.90 and 0.77; between, a block or a ring
# are no worse: by row 20,480 columns 0.76 and 0.86, 22,528 0.79 and 0.80). RMSNorm is not (by row, 28,672 columns 0.83, fetched
# ahead by threads 0.97; 40,960 0.95, in a ring 0.94).
_COLUMNS = (range(9217, 16385), range(24577, 32769))

# Narrower ones, by scaling, of which rows that fill no tile are staged (7600 columns by row 0.93 and 0.82, by blocks 0.92 and
# 0.80, MXFP8 0.93 and 0.80; 4624 columns 0.92 and 0.82, 0.85 and 0.82, 0.86 and 0.83; but 8104 by row 0.91 and 0.93).
_NARROWER = (range(4609, 9217),)
_UNEVEN_COLUMNS = {"row": (range(4609, 7809), range(8193, 9217)), "block": _NARROWER, "mx": _NARROWER}

# Threads of other rows that are staged, by scaling and columns (by row, 5120 columns: 0.97 and 0.94, by blocks 0.94 and 0.91,
# 18,432 0.88 and 0.80; MXFP8, 4096 columns 0.95 and 0.94, 8192 0.94 and 0.92), or that the rule below does not find (by row,
# 10,240 columns: 160 x 64 0.97, 256 x 40 0.94; 15,360 columns: 384 x 40 0.91, 256 x 64 0.88), and where scales are known
# (16,384 columns 0.97 and 0.90, 20,480 0.99 and 0.97; at the tensor's, 16,384 columns 0.53 and 0.48).
_THREADS = {
    "given": {16384: 512, 20480: 512},
    "tensor": {16384: 512},
    "row": {5120: 128, 10240: 160, 15360: 384},
    "block": {5120: 128, 10240: 160, 15360: 384, 18432: 384},
    "mx": {4096: 128, 5120: 128, 8192: 256, 10240: 160, 15360: 384, 18432: 384},
}

# Of a thread.
_FEWEST_ELEMENTS, _MOST_ELEMENTS = 40, 64

# A row costs a thread as much as so many elements beside its own (7600 columns: 128 x 64 0.93, 192 x 40 0.87; 12,400 by row 256
# x 56 0.85, 320 x 40 0.81).
_ROW_COST = 24

# Of shared memory beside the row: at most 768 bytes of BlockReduce, and the 1024 that the hardware keeps of each block.
_OTHER_BYTES = 2048


def staged_tile(problem: Problem, device: Device, registers: Tile | None) -> Tile | None:
    """The tile of rows that are faster staged, None of others. registers: the tile of those that threads fetch themselves."""
    if not (is_common_quantized(problem, device) and problem.centered and problem.widest_pack == 8):
        return None
    threads = _THREADS[problem.scaling].get(problem.num_cols)
    if not threads:
        uneven = registers is not None and not registers.exact
        columns = _COLUMNS + (_UNEVEN_COLUMNS.get(problem.scaling, ()) if uneven else ())
        if problem.cols_of_scale is None or not any(problem.num_cols in some for some in columns):
            return None
    if not threads and registers is not None and is_fetched_ahead(problem, registers):
        return None  # 16,384 columns by row: 0.94, staged 0.92
    best, best_score = None, None
    for threads_per_row in (threads,) if threads else range(128, 1024 + 1, 32):
        packs = ceil_div(problem.num_cols, 8 * threads_per_row)
        tile = Tile(8, threads_per_row, packs, exact=int(8 * threads_per_row * packs == problem.num_cols), stages=1)
        if not threads and not _FEWEST_ELEMENTS <= 8 * packs <= _MOST_ELEMENTS:
            continue
        most_blocks = device.smem_per_sm // (staged_bytes(problem, tile) + _OTHER_BYTES)
        fitting = min(blocks_that_fit(problem, device, tile), most_blocks)
        if not fitting:
            continue
        tile = replace(tile, blocks_per_sm=fitting)
        score = _score(problem, tile)
        if best is None or score > best_score:
            best, best_score = tile, score
    return best


def _score(problem: Problem, tile: Tile) -> float:
    """About what its instructions allow: long threads, most of them in the row, as many warps on each of a multiprocessor's
    four parts, and of several blocks many, as they wait at different times (30,720 columns: 512 x 64 0.87, 768 x 40 0.85)."""
    elements, warps = tile.pack_size * tile.packs_per_thread, tile.block_size * tile.blocks_per_sm // 32
    balance = warps / (4 * ceil_div(warps, 4))
    hidden = 1 + 0.016 * min(warps, 32) if tile.blocks_per_sm > 1 else 1.0
    return (problem.num_cols / tile.cols) ** 0.5 * balance * elements / (elements + _ROW_COST) * hidden
