"""How many registers threads need whose y has 8 bits, on a GPU of sm_90: found by compiling, held by tests to no spills. Pure
Python, no GPU needed.
"""

from __future__ import annotations

from .devices import Device
from .dtypes import DTYPES
from .problem import Problem, Tile, ceil_div

# Of threads with 16, 24, 32, 40, 48, 56 and 64 elements: of rows that fill their threads, and of others. lanes: of a warp that
# has several rows, or shares a block with another; warp: that is a block by itself; block: of several. At scales that are found
# in the row y waits unpacked, so threads hold no more.
_ELEMENTS = (16, 24, 32, 40, 48, 56, 64)
_REGISTERS = {
    ("lanes", "given"): ((56, 56, 64, 80, 96, 96, 128), (56, 64, 64, 80, 96, 128, 128)),
    ("lanes", "tensor"): ((56, 56, 64, 80, 96, 96, 128), (56, 64, 64, 80, 96, 128, 128)),
    ("lanes", "row"): ((56, 56, 64, 72, 80, 96, 128), (64, 64, 80, 80, 96, 128, 128)),
    ("lanes", "block"): ((56, 64, 72, 96, 96, 128, 168), (64, 72, 80, 96, 128, 168, 168)),
    ("lanes", "mx"): ((56, 56, 64, 80, 112, 128, 128), (64, 72, 80, 88, 128, 168, 168)),
    ("warp", "given"): ((64, 64, 64, 64, 72, 96, 112), (64, 64, 64, 72, 96, 112, 112)),
    ("warp", "tensor"): ((64, 64, 64, 96, 96, 112, 112), (64, 64, 64, 72, 96, 112, 112)),
    ("warp", "row"): ((64, 64, 64, 64, 72, 96, 112), (64, 64, 64, 72, 112, 112, 128)),
    ("warp", "block"): ((64, 64, 64, 64, 72, 96, 112), (64, 64, 80, 96, 128, 128, 128)),
    ("warp", "mx"): ((64, 64, 64, 64, 72, 96, 112), (64, 64, 72, 96, 112, 112, 168)),
    ("block", "given"): ((56, 56, 56, 64, 72, 80, 96), (64, 64, 64, 72, 72, 96, 96)),
    ("block", "tensor"): ((56, 56, 64, 64, 80, 80, 96), (64, 64, 64, 72, 80, 96, 96)),
    ("block", "row"): ((48, 56, 72, 72, 72, 80, 96), (56, 64, 72, 80, 96, 96, 96)),
    ("block", "block"): ((48, 56, 64, 72, 72, 80, 96), (56, 64, 64, 72, 80, 96, 128)),
    ("block", "mx"): ((48, 56, 64, 72, 72, 80, 96), (56, 64, 64, 72, 80, 96, 128)),
}

# Of rows of LayerNorm that fill so many lanes with so many elements, by scaling, where one number of lanes differs from others.
_LANES_REGISTERS = {
    ("block", 4, 32): 64, ("block", 4, 64): 128, ("block", 8, 32): 80, ("block", 8, 48): 112, ("block", 16, 40): 80,
    ("mx", 4, 24): 64,
}  # fmt: skip

# What the compiler moves ahead where there is no mean.
_MORE_WITHOUT_MEAN = {("warp", 40): 8, ("warp", 48): 24, ("warp", 56): 16, ("block", 48): 8, ("block", 56): 16}


# Of y that waits in the registers of a thread until its scales are known, as in cuda_src/row.cuh.
MOST_BYTES_MADE = 320

# Of exact rows of LayerNorm, so many that a thread also holds the next row while it writes one (fetches_ahead): by scaling, of
# blocks of so many threads at least. H200, bf16: 8192 columns by row 0.95, with a block more 0.93, 4096 columns 0.97 and 0.94;
# 8192 columns by 1 x 128 blocks 0.95 and 0.89, 4096 0.93 and 0.91; MXFP8 0.88 and 0.92, RMSNorm by row 0.95 and 0.98. Of 56
# elements on 128 threads alone: 7168 columns by row 0.96 and 0.95, by blocks 0.97 and 0.93; 14,336 columns, 256 threads, 0.91,
# staged 0.92.
_AHEAD_FROM = {"row": 64, "block": 64}
_AHEAD_REGISTERS = 128


def fetches_ahead(problem: Problem, tile: Tile) -> bool:
    """Whether a block of registers that finds all scales of a row itself fetches the next row while it writes one, as
    Forward::fetches_ahead in cuda_src/forward.cuh says."""
    plain = not (problem.residual or problem.input) and not problem.has_wide_parameters
    registers = 512 // ceil_div(tile.block_size * tile.blocks_per_sm, 128) // 8 * 8
    elements = tile.pack_size * tile.packs_per_thread
    waits = problem.cols_of_scale is not None and elements * DTYPES[problem.compute].itemsize <= MOST_BYTES_MADE
    fits = registers >= elements + elements // 2 + 32 + 8 * (not tile.exact)
    return plain and waits and fits and tile.pack_size == 8 and DTYPES[problem.x].itemsize == 2


def is_fetched_ahead(problem: Problem, tile: Tile) -> bool:
    """Whether that is what makes a tile of several blocks of LayerNorm a fast one."""
    suits = problem.centered and problem.scaling in _AHEAD_FROM and 56 <= tile.pack_size * tile.packs_per_thread <= 64
    return suits and tile.exact == 1 and tile.blocks_per_sm > 1 and fetches_ahead(problem, tile)


def is_common_quantized(problem: Problem, device: Device) -> bool:
    """Forward of 16-bit rows to 8 bits on a GPU of sm_90, all else as in most models."""
    plain = not (problem.residual or problem.input or problem.round_x_hat or problem.dropout or problem.row_scale or problem.y1)
    weights = {name for name in (problem.weight, problem.bias) if name is not None}
    usual = plain and weights <= {problem.x} and problem.widest_pack == 8 and DTYPES[problem.x].itemsize == 2
    return problem.scaling is not None and device.compute_capability == 90 and usual


def common_quantized_registers(problem: Problem, device: Device, tile: Tile) -> int | None:
    """Registers of a thread of such a row, None of anything else."""
    elements = tile.pack_size * tile.packs_per_thread
    if not is_common_quantized(problem, device) or elements < 16 or tile.pack_size != 8:
        return None
    if tile.cluster_size > 1 and problem.scaling != "row":
        return None
    place = "block" if tile.threads_per_row > 32 else "warp" if tile.block_size == 32 else "lanes"
    in_row = problem.cols_of_scale is not None
    if elements > 64:
        return 128 if elements <= _longest(problem, tile, place) else 255
    if place == "lanes" and tile.exact and problem.centered:
        of_lanes = _LANES_REGISTERS.get((problem.scaling, tile.threads_per_row, elements))
        if of_lanes is not None:
            return of_lanes
    registers = _REGISTERS[place, problem.scaling][0 if tile.exact else 1][_ELEMENTS.index(elements)]
    if in_row and not problem.centered and elements < 64:
        if 384 * 64 < problem.num_cols <= 512 * 64 and problem.num_cols % (32 * 64) == 0:
            return 255  # one block of fewer threads, of 64 elements, holds the next row as well
    if place == "block" and elements >= 56 and tile.exact and problem.centered and not tile.stages:
        fills = 512 // tile.threads_per_row * tile.threads_per_row >= 448
        fewest = _AHEAD_FROM.get(problem.scaling, 1024)
        if fills and (tile.threads_per_row >= fewest if elements == 64 else tile.threads_per_row == 128 >= fewest):
            registers = _AHEAD_REGISTERS
    if in_row and not problem.centered:
        registers += _MORE_WITHOUT_MEAN.get((place, elements), 0) if tile.exact else 8
        registers += 16 * (place == "block" and elements == 64 and problem.scaling == "mx")
    registers += 8 * (tile.stages == 1 and elements == 56)
    if problem.scaling == "block" and problem.x == "float16":
        registers += 16 * (not tile.exact or tile.threads_per_row >= 256)
    return registers


def _longest(problem: Problem, tile: Tile, place: str) -> int:
    """The most elements that 128 registers hold, and that are worth it: what blocks of 128 columns share is then not shared out
    in registers (4608 columns: 96 threads x 48 0.91, 64 x 72 0.80)."""
    if place == "lanes" or not tile.exact or problem.scaling in ("block", "mx"):
        return 64
    if problem.scaling == "row":
        return 72 if problem.x == "float16" and tile.threads_per_row > 128 else 80
    return 96 if problem.scaling == "given" and not problem.amax else 80
