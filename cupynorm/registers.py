"""Tiles of rows that wait in registers: how many a thread needs, what fits a multiprocessor, and which is the fastest.

What ptxas reports was fitted; tests compile every tile that is chosen and hold it to no spills. Pure Python, no GPU needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .devices import Device
from .dtypes import DTYPES
from .problem import Problem, Tile, ceil_div, cols_of_slice
from .quantized_registers import (
    ahead_registers,
    common_quantized_registers,
    is_common_quantized,
    is_fetched_ahead,
    long_lanes_tile,
    long_quantized_tile,
)

# The shares of a copy beside the numbers below were measured on 2026-11-20 to 22 while these were chosen, by timing
# layer_norm_forward and layer_norm_backward with explicit strategy= and tile= at 2^28 elements (2^27 of float32). `python -m
# cupynorm tune` measures such tiles again, on any GPU, and `bench --tile` any of them.

# Bytes of the widest row that a warp takes, by itemsize. Forward: more would fit, but from there on a block of two warps is as
# fast (H200, bf16: 2048 columns 0.997 of a copy on 64 threads, 0.989 on 32).
_WARP_ROW_BYTES = {"forward": {2: 2560, 4: 2048, 8: 2048}, "backward": {2: 1536, 4: 2048, 8: 2048}}

# Bytes of x that one lane keeps (H200, bf16: backward of 640 columns 0.95 on 16 lanes x 40 elements, 0.88 on 32 x 24).
_WARP_BYTES = {"forward": {2: 80, 4: 64, 8: 64}, "backward": {2: 80, 4: 64, 8: 64}}

# The same for a thread of a block. Forward: 4096 columns 0.98 on 64 threads x 64 elements, 0.76 on 256 x 16 (H200, bf16).
BLOCK_BYTES = {"forward": {2: 128, 4: 128, 8: 128}, "backward": {2: 48, 4: 64, 8: 64}}

# Bytes of x in flight on a multiprocessor beyond which more do not help: 4.15 TB/s times the latency of memory, twice over
# (H200: fp32 1024 columns 0.99 with 16 elements a thread and 64 KB in flight, 0.97 with 32 and 96 KB).
ENOUGH_BYTES, _MOST_BYTES = {2: 55 * 1024, 4: 54 * 1024, 8: 54 * 1024}, 64 * 1024

# In flight in a block that is alone, from which it wants many threads (with a residual; float32, 16,384 columns: 1024 threads
# with 16 elements each 0.98, 512 with 32 0.95).
_MOST_BYTES_OF_BLOCK = 100 * 1024

# Beyond so many columns of float32 forward blocks are counted, not bytes: see _wanted_blocks.
_THREE_BLOCKS_FROM = 5120

# Elements of a thread there that rows want which do not fill it (15,000 columns: 384 x 40 0.95, 480 x 32 0.93; 10,000 columns:
# 256 x 40 0.98, 640 x 16 0.96).
_FLOAT32_ELEMENTS = 40

# Threads and blocks of rows forward that were better than what the rules below find, by itemsize and columns, each pair in one
# run (float32: 2048 columns 0.984, 128 x 16 elements in eight blocks 0.980; 4096 1.00, 256 x 16 in four 0.98; 8192 0.991, 512 x
# 16 in two 0.987. bf16: 8192 columns 0.992, 256 x 32 in four 0.986; 12,288 0.981, 256 x 48 in three 0.972).
_FOUND_TILES = {4: {2048: (64, 12), 4096: (288, 4), 8192: (352, 2)}, 2: {8192: (224, 4), 12288: (192, 3)}}

# Float32 columns up to which lanes of forward keep 8 elements where a row fills them (128 columns: 16 lanes 1.01, 8 lanes 0.99;
# 256 columns: 32 lanes 1.01, 16 lanes 1.00).
_SHORT_FLOAT32_COLS = 256


def _is_plain(problem: Problem) -> bool:
    """Forward of x to y, both without scales, and nothing else."""
    fused = problem.residual or problem.input or problem.scaling or problem.y1 or problem.round_x_hat or problem.dropout
    return problem.forward and not fused and not problem.row_scale


# Elements of a lane of float32 rows forward that begin anywhere, where a warp keeps them, and its registers: others are faster
# in bundles (511 columns: 0.96, in bundles 0.94; 901 0.95 and 0.94; 1023 0.96 and 0.94; 333 0.93 and 0.94; 801 0.93 and 0.95).
_LONE_FLOAT32 = {16: 96, 29: 128, 30: 128, 31: 128, 32: 128}


def lone_float32_registers(problem: Problem, device: Device) -> int | None:
    """Registers of a lane of such a row, None of another."""
    lone = problem.x == "float32" and problem.widest_pack == 1 and device.compute_capability == 90
    if not (lone and _is_plain(problem)) or problem.has_wide_parameters:
        return None
    return _LONE_FLOAT32.get(ceil_div(problem.num_cols, 32))


def _found_tile(problem: Problem, device: Device) -> tuple[int, int] | None:
    """Threads and blocks a multiprocessor of a row in _FOUND_TILES, None of another."""
    itemsize = DTYPES[problem.x].itemsize
    usual = _is_plain(problem) and problem.widest_pack * itemsize == 16 and device.compute_capability == 90
    if not usual or problem.has_wide_parameters:
        return None
    return _FOUND_TILES.get(itemsize, {}).get(problem.num_cols)


def _wanted_blocks(problem: Problem, device: Device) -> int | None:
    """How many blocks of a wide float32 row forward must fit a multiprocessor, or None where their bytes decide.

    Three up to 8191 columns (H200, 6656 columns: 0.98 in three, 0.93 in two of the same tile), from 8193 on two (10,240 columns
    0.99 in two, 0.95 in a ring; 14,336 columns 0.97, 0.95, and 0.85 in one).
    """
    if not _is_plain(problem) or problem.x != "float32" or problem.widest_pack != 4 or problem.weight == "float64":
        return None
    if device.compute_capability < 90 or problem.num_cols <= _THREE_BLOCKS_FROM:
        return None
    return 3 if problem.num_cols < 8192 else 2 if problem.num_cols > 8192 else None


# Forward of 16-bit rows that are wide: columns up to which so many blocks a multiprocessor, of so many threads, keep a row.
# About 512 threads in all have 128 registers each, or 384 have 168; what they hold was found by compiling, and is less without
# a mean, where the compiler unpacks more at a time (H200, bf16, beside rings: 9504 columns 0.99 and 0.93, 14,336 0.98 and 0.92,
# 15,000 0.96 and 0.90, 20,480 0.98 and 0.94, 24,576 0.97 and 0.95; 4096 rows of 14,336 columns 0.94 and 0.83, of 20,480 0.96
# and 0.88; 512 rows of 14,336 columns 0.77 and 0.84).
_LONG_TILES = {
    True: ((128 * 80, 4, 128), (160 * 96, 3, 160), (256 * 96, 2, 256)),
    False: ((128 * 80, 4, 128), (128 * 112, 3, 128), (256 * 80, 2, 256)),
}
_LONG_FROM = 9217


def long_tile(problem: Problem, device: Device) -> Tile | None:
    """Of rows forward that have as many elements in a thread as its registers hold, packed; None for other rows."""
    if problem.scaling:
        return long_quantized_tile(problem, device)
    suits = _is_plain(problem) and DTYPES[problem.x].itemsize == 2 and problem.widest_pack == 8
    suits = suits and not problem.has_wide_parameters
    # The compiler moves more ahead, and spills, where there is no weight or no bias; 1 + weight takes registers of its own.
    suits = suits and problem.weight and bool(problem.bias) == problem.centered and not problem.zero_centered
    if not suits or device.compute_capability != 90 or problem.num_cols < _LONG_FROM:
        return None
    for most_cols, blocks_per_sm, threads in _LONG_TILES[problem.centered]:
        if problem.num_cols <= most_cols:
            packs = ceil_div(problem.num_cols, 8 * threads)
            exact = int(8 * threads * packs == problem.num_cols)
            return Tile(8, threads, packs, blocks_per_sm=blocks_per_sm, exact=exact)
    return None


def registers_of_thread(problem: Problem, device: Device, tile: Tile) -> int:
    """Registers of a thread that keeps its part of a row, with no spills: fitted to what ptxas reports, which tests hold.

    Forward keeps a 16-bit row unpacked up to 32 elements and packed beyond; backward keeps x_hat, wdy and two sums of each.
    """
    words = DTYPES[problem.compute].itemsize // 4
    elements = tile.pack_size * tile.packs_per_thread
    lone = 3 * elements // 2 + 8 if tile.pack_size == 1 else 0  # each lone element has an address of its own
    wide_weight = int(problem.weight is not None and DTYPES[problem.weight].itemsize > DTYPES[problem.x].itemsize)
    # Small packs of 16-bit rows: many addresses, of which those of x and wide weights differ.
    small = tile.pack_size > 1 and tile.pack_size * DTYPES[problem.x].itemsize < 16
    # Random words take the registers of 8 elements while a mask is made; of two loads, or two stores, each has its addresses.
    fused = 24 * words * problem.dropout + 8 * bool(problem.row_scale) + 16 * bool(problem.input or problem.dresidual)
    fused += 8 * (problem.recomputed is not None and words * elements > (16 if device.compute_capability == 90 else 7))
    fused += 40 * (problem.recomputed is not None and elements >= 32 and device.compute_capability >= 120)
    fused += 16 * (problem.dropout and elements > 48)
    if problem.y and not problem.forward:
        fused += 24
    if problem.y1:
        fused += 32 + 3 * elements // 4 + (5 * elements // 2 if tile.pack_size == 1 else 0)
    if problem.scaling:
        wide = DTYPES[problem.x].itemsize > 2
        row = 16 + elements // (2 if wide else 4)
        fused += {"given": 0, "tensor": 8 + 16 * wide, "row": row}.get(problem.scaling, 24)
        # Long threads keep weights until there is a scale.
        found_in_row = problem.cols_of_scale is not None
        fused += 32 * (elements > (40 if found_in_row or wide_weight else 48) and problem.scaling != "given")
        if found_in_row:
            fused += elements // 2 * (elements > (40 if wide_weight else 80))
            fused += (24 + 32 * problem.residual) * (tile.pack_size == 1)
            fused += 32 * (problem.residual and wide_weight)
            fused += 8 * (problem.round_x_hat is not None and elements >= 32 and device.compute_capability >= 100)
        elif elements > 80:
            fused += elements // 4
    if (common := common_quantized_registers(problem, device, tile)) is not None:
        return common
    if problem.forward:
        if tile.threads_per_row == 32 and (lone_registers := lone_float32_registers(problem, device)):
            return lone_registers
        newer = device.compute_capability >= 90
        # Of 16 bits, 32 elements fit 64 registers where warps share a row and fill it, so that 60 KB are in flight on 32 warps,
        # and 48 fit 80 (H200, bf16, 12,288 columns: three blocks of 256 threads x 48 elements 0.97 of a copy, 128 x 96 0.94).
        fills = newer and tile.exact and 32 < tile.threads_per_row <= 512 and DTYPES[problem.x].itemsize == 2
        fills = fills and problem.round_x_hat is None and not fused and not wide_weight and not problem.residual
        fits = fills and 32 <= elements <= 48
        if fits_wide := _wide_weight_registers(problem, device, tile):
            return fits_wide
        narrow = device.compute_capability == 90 and elements == 16 and tile.threads_per_row <= 4 and tile.exact
        if narrow and DTYPES[problem.x].itemsize == 2 and _is_plain(problem) and not problem.has_wide_parameters:
            return 40  # blocks of more warps (H200, bf16: 32 columns 1.02, with 56 registers 0.98; 64 columns 1.02 and 0.97)
        per_element = 1.25 if DTYPES[problem.x].itemsize > 2 else 1.15 if elements > 40 and not fills else 1.0
        extra = 8 * (problem.residual + wide_weight) + fused
        # Both packs of a residual's sum wait, those of 32 bits unpacked.
        extra += 8 * (problem.residual and elements > 24 and (DTYPES[problem.x].itemsize > 2 or problem.weight == "float64"))
        fixed = 32 if fits else 40
        found = _found_tile(problem, device)
        if found and tile.threads_per_row == found[0]:
            warps_of_quarter = ceil_div(found[0] * found[1], 4 * 32)
            return device.registers_per_sm // 4 // 32 // warps_of_quarter // 8 * 8
        if _wanted_blocks(problem, device):
            return max(48, 24 + 5 * elements // 4 + (6 if problem.centered or not problem.bias else 14) * (not tile.exact))
        if tile.rows_per_block > 1 and elements > 32:
            fixed = 54 + (2 * tile.packs_per_thread if tile.pack_size < 8 else 0)
        extra += 8 * (not newer and (wide_weight or (elements >= 32 and not tile.exact) or (problem.residual and lone)))
        extra += small * (6 + elements * wide_weight + 2 * max(0, elements - 32))
        return int(fixed + per_element * words * elements + extra + lone)
    # float16 takes more instructions to unpack than bfloat16, and the compiler keeps more for sm_100 and sm_120. Three blocks
    # of 24 elements fit sm_90 all the same (H200, float16, 768 columns: 0.94 of a copy, with two blocks 0.86), and two of 40
    # (320 columns: 0.95, of 24 elements 0.89).
    fits = device.compute_capability == 90 and (tile.exact or problem.centered or elements == 40)
    tight = (0.1 if fits else 0.35) * (problem.x == "float16") + 0.35 * (device.compute_capability >= 100)
    tight += 0.35 * (device.compute_capability < 90 and elements > 24)
    # On sm_90 three blocks of 24 elements also hold a weight of 32 bits (H200, 384 columns: 0.96, two blocks 0.86), or what is
    # added to dx (0.99, 0.95), but not both. What is added waits packed.
    three = device.compute_capability == 90 and elements <= 24 and DTYPES[problem.x].itemsize == 2
    added = bool(problem.dsum) * (8 * (not three or wide_weight) + 16 * (elements >= 40))
    added += bool(problem.dsum) * elements // 2 * (DTYPES[problem.x].itemsize > 2)
    fits_wide = three and problem.weight == "float32"
    extra = fused + added + ((0.15 if fits_wide else 0.3) * wide_weight + tight + 1.8 * small) * elements
    return int(36 + 5.25 * words * elements + extra + lone)


def _wide_weight_registers(problem: Problem, device: Device, tile: Tile) -> int | None:
    """The same of forward of 16-bit rows with weights of 32 bits on a GPU of sm_90, None for anything else: the next pack's are
    on their way while one is written. What fits was found by compiling (H200, 3072 columns: 0.99 with 12 blocks of 64 threads x
    48 elements, 0.92 with 8; 6144 columns 0.99 with 6 of 128, 0.95 with 5)."""
    elements = tile.pack_size * tile.packs_per_thread
    plain = not (problem.residual or problem.input or problem.round_x_hat or problem.dropout or problem.row_scale or problem.y1)
    suits = device.compute_capability == 90 and tile.pack_size == 8
    suits = suits and (tile.threads_per_row > 16 or (tile.threads_per_row == 16 and elements == 40 and not tile.exact))
    if not (plain and suits and problem.weight == "float32" and problem.scaling is None) or tile.cluster_size > 1:
        return None
    in_a_warp = tile.threads_per_row == 32
    if elements <= 24:
        return 48 + elements
    if not tile.exact and in_a_warp:
        return {32: 72, 40: 96 if problem.x == "float16" and problem.centered else 80}.get(elements, 96)
    if not tile.exact:
        return {48: 96, 56: 112, 64: 128, 72: 128}.get(elements, 40 + elements if elements < 48 else 168)
    if elements <= 48:
        return 96 if in_a_warp and elements == 48 else 40 + min(elements, 40)
    if elements == 96 and problem.centered and tile.threads_per_row == 128:
        return 128
    return {56: 96 if in_a_warp else 128, 64: 128, 72: 96, 80: 176, 88: 176}.get(elements, 168)


def blocks_that_fit(problem: Problem, device: Device, tile: Tile) -> int:
    """Blocks whose registers fit a multiprocessor, 0 if not even one does: each of its four parts holds whole warps."""
    registers = ceil_div(registers_of_thread(problem, device, tile), 8) * 8
    if registers > 255 + 1:
        return 0
    warps = 4 * (device.registers_per_sm // 4 // 32 // registers)
    if tile.block_size == 32 and is_common_quantized(problem, device) and not ahead_registers(problem, tile):
        # The compiler may take fewer (2048 columns in MXFP8: 96 where 18 blocks leave 112, and 0.93; with 16 blocks 0.89).
        warps = device.registers_per_sm // 32 // registers
    return min(warps * 32 // tile.block_size, device.threads_per_sm // tile.block_size, 32)


def register_tile(
    problem: Problem,
    device: Device,
    threads: Iterable[int],
    max_bytes: int,
    block_size: int,
    cluster_size: int = 1,
) -> Tile | None:
    """Of the given threads_per_row, those that keep most of x in flight on a multiprocessor.

    A row that fills its threads is preferred: packs beyond the row cost their instructions all the same.
    """
    pack_size = problem.widest_pack
    itemsize = DTYPES[problem.x].itemsize
    # A lone element needs an address of its own, and fills a register of 32 bits if it has 16.
    lone = pack_size == 1 and problem.forward and itemsize == 2
    if pack_size > 1:
        max_elements = max_bytes // itemsize
    elif itemsize == 2:
        max_elements = 16 if problem.forward else 6
    else:
        max_elements = max_bytes // (2 * itemsize)
    may_be_long = problem.forward and itemsize == 2 and pack_size > 1 and cluster_size == 1
    wanted = _wanted_blocks(problem, device) if cluster_size == 1 else None
    found = _found_tile(problem, device) if cluster_size == 1 else None
    if found:
        wanted = found[1]
    if wanted:
        max_elements = max(max_elements, _FLOAT32_ELEMENTS)
    num_cols = cols_of_slice(problem, pack_size, cluster_size)
    short = block_size > 1 and problem.x == "float32" and problem.widest_pack == 4 and _is_plain(problem)
    short = short and num_cols <= _SHORT_FLOAT32_COLS and any(8 * lanes == num_cols for lanes in threads)
    common_quantized = is_common_quantized(problem, device) and cluster_size == 1
    best, best_score = None, None
    for threads_per_row in threads:
        packs_per_thread = max(1, ceil_div(num_cols, pack_size * threads_per_row))
        elements = pack_size * packs_per_thread
        rows_per_block = max(1, block_size // threads_per_row)
        tile = Tile(pack_size, threads_per_row, packs_per_thread, rows_per_block, cluster_size)
        tile = replace(tile, exact=int(tile.cols * cluster_size == problem.num_cols))
        blocks_per_sm = blocks_that_fit(problem, device, tile)
        long = elements > max(max_elements, pack_size)
        if common_quantized:
            if blocks_per_sm == 0 or registers_of_thread(problem, device, tile) > 168:
                continue
        elif blocks_per_sm == 0 or (
            long and not (may_be_long and _may_keep_more(tile, problem.scaling, problem.has_wide_parameters))
        ):
            continue
        if wanted:
            if blocks_per_sm < wanted:
                continue
            blocks_per_sm = wanted  # more are slower (9216 columns, 384 threads: 0.99 in two, 0.98 in three)
        tile = replace(tile, blocks_per_sm=blocks_per_sm)
        in_flight = blocks_per_sm * rows_per_block * num_cols * itemsize * (1 + problem.residual)
        ahead = common_quantized and is_fetched_ahead(problem, tile)
        in_flight *= 1 + ahead
        enough = in_flight >= ENOUGH_BYTES[itemsize]
        # Blocks of a cluster wait for one another: for them more is better without end.
        counted = in_flight if cluster_size > 1 else min(in_flight, ENOUGH_BYTES[itemsize])
        fit = 1.0 if tile.exact else 0.9 * num_cols / tile.cols
        if problem.forward and itemsize == 2:
            # A little more still helps blocks (H200, bf16: 4608 columns 0.98 with 73 KB, 0.95 with 55 KB), but not threads as
            # long as that (4088 columns 0.97 on 64 x 64 elements, 0.99 on 128 x 32).
            if block_size == 1 and cluster_size == 1:
                counted += 0.1 * (min(in_flight, _MOST_BYTES) - counted)
            # Packs beyond the row cost as much as others (H200, bf16: 520 columns 0.78 on 32 x 24 elements, 0.87 on 16 x 40),
            # and those in the row no more than in an exact tile.
            fit = 1.0 if tile.exact else 0.995 * num_cols / tile.cols
            fit *= 0.95 if long and (elements > 72 or threads_per_row <= 32) else 0.98 if elements > 48 else 1.0
        if problem.scaling in ("given", "tensor", "row") or common_quantized:
            # Bound by instructions, of which a row's own are fewer where threads are long (H200, bf16 to 8 bits: 8192 columns
            # 0.92 on 128 threads x 64 elements, 0.84 on 256 x 32; 768 columns 0.94 on 16 x 48, 0.89 on 32 x 24).
            fit = 1.0 if tile.exact else 0.995 * num_cols / tile.cols
        # Of equals, most threads; but forward with too little in flight, or one block alone, wants long threads: 48 elements
        # were best (H200, bf16, 12288 columns: 24, 32, 48 and 64 elements gave 0.82, 0.84, 0.86 and 0.81 of a copy).
        many_threads = not problem.forward or (enough and not lone and (blocks_per_sm > 1 or in_flight >= _MOST_BYTES_OF_BLOCK))
        if found:
            score = (-abs(threads_per_row - found[0]), 0)
        elif short:
            score = (fit, -abs(elements - 8))
        elif wanted and not tile.exact:
            score = (counted * fit, -abs(elements - _FLOAT32_ELEMENTS))
        elif common_quantized:
            # Lanes of one warp want more rows (512 columns, MXFP8: 16 lanes x 32 elements 0.96, 8 x 64 0.88), others long
            # threads (4096 columns: 64 threads x 64 0.94, 128 x 32 0.86), best of 48 (6144 columns: 128 x 48 0.92, 96 x 64
            # 0.91), or at a given scale of 80 (5120 columns: 64 threads 1.01).
            wanted_elements = 40 if block_size > 1 else 54
            uneven = 4 * (threads_per_row & (threads_per_row - 1) > 0)
            # One that fetches its next row is better than either (6144 columns by 1 x 128 blocks: 96 x 64 0.96, 128 x 48 0.93).
            score = (counted * fit, 10 * ahead - (8 if elements > 64 else abs(elements - wanted_elements)) - uneven)
        elif problem.scaling in ("given", "tensor") or (problem.scaling == "row" and enough):
            score = (counted * fit, -abs(elements - 64))
        elif _wide_weight_registers(problem, device, tile) and problem.num_cols > 8192:
            # Rows wait for their weights: long threads, and more in flight (9216 columns: 128 x 72 0.99, 192 x 48 0.97).
            score = (min(in_flight, 96 * 1024), -abs(threads_per_row - 128))
        else:
            # To find a scale of a row two blocks want short threads (12,288 columns: 384 x 32 0.67, 256 x 48 0.63).
            wanted_elements = 32 if problem.scaling == "row" and blocks_per_sm > 1 else 48
            score = (counted * fit, threads_per_row if many_threads else -abs(elements - wanted_elements))
        if best_score is None or score > best_score:
            best, best_score = tile, score
    return best


# Elements of a lane that writes 8 bits at a given scale, at most (3072 columns on 32 lanes: 1.00, on 64 threads x 48 0.95).
_LONGEST_OF_LANE = 96


def _may_keep_more(tile: Tile, scaling: str | None, is_wide: bool) -> bool:
    """Whether 16-bit rows forward may have threads longer than others: those they fill, and few of them. is_wide: whether their
    weights are wider.

    H200, bf16: 1152 columns 0.94 on 16 lanes x 72 elements, 0.93 on 32 x 40; 8960 columns 0.97 on 128 x 72, 0.92 on 224 x 40;
    13,312 columns 0.93 on 128 x 104, in a ring 0.86. To 8 bits: 2560 columns 0.98 on 32 x 80, 0.93 on 64 x 40.
    """
    elements = tile.pack_size * tile.packs_per_thread
    if is_wide and tile.threads_per_row == 32:
        return elements <= 56
    if tile.exact and tile.threads_per_row == 32 and scaling in ("given", "tensor"):
        return elements <= _LONGEST_OF_LANE
    if tile.exact and tile.threads_per_row > 32:
        return elements <= 104 and tile.threads_per_row <= 160
    return elements <= 72 and (tile.exact or 32 < tile.threads_per_row <= 160)


# Bytes of the widest row to 8 bits that part of a warp takes; of wider ones a warp is a block by itself (1024 columns: 1 x 128
# blocks 0.94, 16 lanes x 64 elements 0.88).
_QUANTIZED_LANES_BYTES = 2 * 896


def lanes_tile(problem: Problem, device: Device) -> Tile | None:
    """Of rows that lanes of a warp load by themselves."""
    itemsize = DTYPES[problem.x].itemsize
    pack_bytes = problem.widest_pack * itemsize
    row_bytes = problem.num_cols * itemsize
    if lone_float32_registers(problem, device):
        return register_tile(problem, device, (32,), 2 * 32 * itemsize, 64)
    most_bytes = _WARP_ROW_BYTES[problem.direction][itemsize]
    if is_common_quantized(problem, device):
        most_bytes = _QUANTIZED_LANES_BYTES
        if (long := long_lanes_tile(problem, device)) is not None:
            return long
    if row_bytes > most_bytes:
        return None
    # The lanes of a row move at least 64 bytes of it together, or half the row if it is shorter (H200, bf16: 64 columns 0.88 of
    # a copy on 4 lanes, 0.84 on 2); of 16-bit rows 32 bytes where that fills them (48 columns 0.96 on 2 lanes, 0.77 on 4).
    fewest = min(64, row_bytes // 2, 32 * pack_bytes) // pack_bytes
    if itemsize == 2 and fewest == 3 and row_bytes == 6 * pack_bytes:
        fewest = 2
    # Lone elements: a quarter of the row (127 columns 0.48 on 16 lanes, 0.36 on 32, 0.38 on 8).
    if problem.forward and pack_bytes == 2:
        fewest = min(32, row_bytes // 4) // pack_bytes
    lanes = [lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= fewest]
    # Blocks of two warps forward: a place is free again sooner (H200, bf16: 64 to 1024 columns 0.3 to 1% faster than four; fp32
    # 1 to 2%).
    block_size = 64 if problem.forward and fewest > 2 else 128
    max_bytes = _WARP_BYTES[problem.direction][itemsize]
    return register_tile(problem, device, lanes, max_bytes, block_size)


def for_few_rows(problem: Problem, device: Device, strategy: str, tile: Tile, num_rows: int, statistics: str) -> Tile:
    """The tile, or one that gives few rows the same bits sooner: more lanes a row, whose sums the kernels form in one order
    (PackSums in cuda_src/statistics.cuh), and more rows a block, as blocks of few threads only take longer to start.

    Few: all are on the multiprocessors at once, in 32 warps of each at most. H200, bf16, RMSNorm: 8192 x 128 5.3 us on 8 or 16
    lanes in blocks of 256 threads, 6.4 on 4 lanes in blocks of 64; 4096 x 512 6.2 on 32 lanes and 256 threads, 7.4 on 16, 64.
    """
    if not problem.forward or strategy != "warp" or tile.stages or problem.scaling:
        return tile
    most_lanes = min(32, 32 * 32 * device.num_sms // max(num_rows, 1))
    few = tile
    if tile.pack_size > 1 and (statistics == "two_pass" or not problem.centered):
        while few.packs_per_thread % 2 == 0 and 2 * few.threads_per_row <= most_lanes:
            few = replace(few, threads_per_row=2 * few.threads_per_row, packs_per_thread=few.packs_per_thread // 2)
    for block_size in (256, 128, tile.block_size):
        rows = block_size // few.threads_per_row
        fitting = replace(few, rows_per_block=rows, blocks_per_sm=1)
        fitting = replace(fitting, blocks_per_sm=blocks_that_fit(problem, device, fitting))
        blocks = ceil_div(num_rows, rows)
        if 2 * device.num_sms <= blocks <= fitting.blocks_per_sm * device.num_sms:
            return fitting
    return fitting if fitting.blocks_per_sm and few != tile else tile
