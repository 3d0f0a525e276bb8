"""How many registers threads need whose y has 8 bits, on a GPU of sm_90: found by compiling, held by tests to no spills but
at widths that notebooks/experiments.md names; and tiles that have threads as long as these. Pure Python, no GPU needed.

Shares of a copy are of an H200, bf16, measured as in cupynorm.registers.
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
    ("block", "given"): ((56, 56, 56, 64, 72, 80, 96), (64, 64, 64, 72, 72, 80, 96)),
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

# Of threads of LayerNorm that have so many elements of a row that comes through shared memory and does not fill them.
_STAGED_REGISTERS = {40: 72, 48: 80, 56: 96, 64: 128}

# What the compiler moves ahead where there is no mean.
_MORE_WITHOUT_MEAN = {("warp", 40): 8, ("warp", 48): 24, ("warp", 56): 16, ("block", 48): 8, ("block", 56): 16}


# Of y that waits in the registers of a thread until its scales are known, as in cuda_src/row.cuh.
MOST_BYTES_MADE = 320

# Of rows of LayerNorm, so many registers that a thread also holds the next row while it writes one (fetches_ahead). Of 64
# elements that a row fills, where scales are of rows or of 1 x 128 blocks: H200, bf16, 8192 columns by row 0.95, with a block
# more 0.93, 4096 columns 0.97 and 0.94; 8192 columns by blocks 0.95 and 0.89, 4096 0.93 and 0.91; MXFP8 0.88 and 0.92, RMSNorm
# by row 0.95 and 0.98.
_AHEAD_REGISTERS = 128

# By scaling, threads and elements: of rows that fill them (by row and by blocks: 768 columns 0.98 and 0.92, with 64 registers
# 0.91 and 0.87; 1024 columns 0.98, before 0.96 and 0.93; 2048 columns 0.99, before 0.97 and 0.96; 7168 columns 0.96 and 0.97,
# before 0.95 and 0.93; by blocks 2560 columns 0.97 and 0.92, 3840 0.90 and 0.89; but 14,336 columns, 256 threads, by row 0.91,
# staged 0.92), and of others (by row 7000 columns 0.95 and 0.90, staged 0.91, 3400 0.95 and 0.90, 3000 0.91 and 0.88; by blocks
# 1000 columns 0.91 and 0.87, but 3400 0.83 and 0.86).
_AHEAD = (
    {
        **{("row", 32, 24): 72, ("row", 32, 32): 80, ("row", 32, 64): 128, ("row", 128, 56): 128},
        **{("block", 32, 24): 72, ("block", 32, 32): 80, ("block", 32, 64): 128, ("block", 128, 56): 128},
        **{("block", 64, 40): 96, ("block", 96, 40): 96},
    },
    {("row", 64, 48): 128, ("row", 64, 56): 128, ("row", 128, 56): 128, ("block", 32, 32): 96},
)


def ahead_registers(problem: Problem, tile: Tile) -> int | None:
    """Registers of a thread that holds the next row where that is what makes it fast, None of others."""
    if not problem.centered or tile.threads_per_row < 32 or tile.rows_per_block * tile.cluster_size > 1 or tile.stages:
        return None
    elements = tile.pack_size * tile.packs_per_thread
    if elements == 64 and tile.exact and tile.threads_per_row > 32:
        fills = 512 // tile.threads_per_row * tile.threads_per_row >= 448
        if not fills or problem.scaling not in ("row", "block"):
            return None
        spills = problem.scaling == "block" and problem.x == "float16" and tile.threads_per_row >= 256
        return _AHEAD_REGISTERS + 16 * spills
    return _AHEAD[0 if tile.exact else 1].get((problem.scaling, tile.threads_per_row, elements))


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
    return bool(ahead_registers(problem, tile)) and tile.blocks_per_sm > 1 and fetches_ahead(problem, tile)


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
    if problem.centered:
        if tile.stages == 1 and not tile.exact and elements in _STAGED_REGISTERS:
            return _STAGED_REGISTERS[elements] + 8 * (elements == 56 and problem.scaling == "mx" and problem.x == "float16")
        if (of_ahead := ahead_registers(problem, tile)) is not None:
            return of_ahead
    if in_row and not problem.centered:
        registers += _MORE_WITHOUT_MEAN.get((place, elements), 0) if tile.exact else 8
        registers += 16 * (place == "block" and elements == 64 and problem.scaling == "mx")
    # Of 40 elements six blocks are better than seven (5120 columns by blocks 0.96 and 0.93, MXFP8 0.95 and 0.93).
    registers += 8 * (tile.stages == 1 and (elements == 56 or (elements == 40 and problem.scaling in ("block", "mx"))))
    if problem.scaling == "block" and problem.x == "float16" and not (tile.stages == 1 and elements == 40):
        registers += 16 * (not tile.exact or tile.threads_per_row >= 256)
    return registers


# Columns from which on, up to 20,480, rows have threads as long as 128 registers hold packed, or 80, where their scale, or the
# tensor's, is known when they are written. H200, bf16, and beside an amax: 9000 columns 0.97 and 0.93, before 0.93 and 0.89;
# 11,000 0.97 and 0.95, before 0.92 and 0.85; 12,288 0.99 and 0.98, before 0.97 and 0.93; 14,000 0.96 and 0.92, before 0.85 and
# 0.79; 15,600 0.94 and 0.83, before 0.84 and 0.79; 19,456 0.96 and 0.89, before 0.91 and 0.86; 10,752 0.99 and 0.96, before
# 0.99 and 0.97. At the tensor's scale: 11,000 0.56 and 0.49, 14,000 0.52 and 0.45, 17,000 0.49 and 0.47. RMSNorm is level.
_LONG_FROM = 8193


def long_quantized_tile(problem: Problem, device: Device) -> Tile | None:
    """Of such rows, None of others."""
    common = is_common_quantized(problem, device) and problem.num_cols >= _LONG_FROM
    if not common or problem.scaling not in ("given", "tensor") or (problem.scaling == "tensor" and not problem.centered):
        return None
    if problem.num_cols in (14336, 16384):
        return None  # RMSNorm of 16,384, and 14,336 at the tensor's scale, fill 256 threads
    # The most elements that 128 registers hold; that in up to 4 blocks of bfloat16 at a given scale, without an amax; and in 80
    # registers.
    longest = 88 if problem.x == "float16" and problem.amax else 96
    longer = 104 if problem.x == "bfloat16" and not problem.amax and problem.scaling == "given" else longest
    middle = 56 if problem.scaling == "given" else 0
    for threads, blocks_per_sm, most in ((96, 5, longest), (128, 4, longer), (256, 3, middle), (160, 3, longer), (256, 2, 80)):
        packs = ceil_div(problem.num_cols, 8 * threads)
        if 8 * packs <= most:
            exact = int(8 * packs * threads == problem.num_cols)
            return Tile(8, threads, packs, blocks_per_sm=blocks_per_sm, exact=exact)
    return None


# Blocks of 8 rows of LayerNorm on 8 lanes each, by columns and amax (H200, bf16: 576 columns 0.99 and 0.98, on 16 lanes 0.90
# and 0.85; 704 columns 0.97 and 0.98, before 0.91 and 0.85; beside an amax 640 columns 0.96 and 0.95, 768 0.98 and 0.93;
# without one they are 1.00 and 0.99 on 16 lanes).
_LONG_LANES = {(576, False): 8, (576, True): 10, (640, True): 8, (704, False): 6, (704, True): 8, (768, True): 7}


def long_lanes_tile(problem: Problem, device: Device) -> Tile | None:
    """Of such rows, whose scale is given, None of others."""
    blocks_per_sm = _LONG_LANES.get((problem.num_cols, problem.amax))
    if not (blocks_per_sm and is_common_quantized(problem, device) and problem.scaling == "given" and problem.centered):
        return None
    return Tile(8, 8, problem.num_cols // 64, rows_per_block=8, blocks_per_sm=blocks_per_sm, exact=1)


def _longest(problem: Problem, tile: Tile, place: str) -> int:
    """The most elements that 128 registers hold, and that are worth it: what blocks of 128 columns share is then not shared out
    in registers (4608 columns: 96 threads x 48 0.91, 64 x 72 0.80)."""
    if place == "lanes" or not tile.exact or problem.scaling in ("block", "mx"):
        return 64
    if problem.scaling == "row":
        return 72 if problem.x == "float16" and tile.threads_per_row > 128 else 80
    return 96 if problem.scaling == "given" and not problem.amax else 80
