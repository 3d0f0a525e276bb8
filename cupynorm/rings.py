"""Tiles of rows that pass through shared memory (cuda_src/ring.cuh), and where those beat registers. Pure Python, no GPU
needed.

Shares of a copy are of an H200, bf16 unless said otherwise, measured as in cupynorm.registers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from .devices import Device
from .dtypes import DTYPES
from .problem import Problem, Tile, ceil_div, cols_of_slice
from .quantized_registers import fetches_ahead


def ring_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory of WarpRing, Exchange, Notice and RingWeights, as in cuda_src/ring.cuh and backward_ring.cuh."""
    num_warps = tile.threads_per_row // 32
    # A part that does not begin on 16 bytes is fetched with what surrounds it.
    row_bytes = sum(tile.cols * size + (tile.pack_size * size < 16) * 32 * num_warps for size in _streamed(problem))
    rings = tile.rows_per_block * tile.stages * (row_bytes + 8 * num_warps)
    values = 3 if problem.forward and problem.centered else 2
    exchanged = [values] + [1] * (problem.scaling == "row")
    exchange = tile.rows_per_block * 4 * sum(8 + 4 * each * num_warps * tile.cluster_size for each in exchanged)
    if problem.forward:
        rings, exchange = ceil_div(rings, 16) * 16, exchange + 48 * tile.rows_per_block
    kept = [problem.weight if problem.dx or problem.recomputed else None, problem.bias]
    parameters = 0
    for itemsize in (DTYPES[name].itemsize for name in kept if name and not problem.forward):
        if tile.pack_size * tile.packs_per_thread > 16:
            parameters += (tile.packs_per_thread - (itemsize == 2)) * tile.pack_size * tile.threads_per_row * itemsize
    return ceil_div(rings + exchange, 16) * 16 + parameters


# From how many columns a ring beats registers, by direction and itemsize of x (backward, 2048 columns: 0.97, in registers 0.94;
# 648 columns 0.93 and 0.88; float32, 1024 columns 1.00 and 0.96; 448 columns 0.99 and 0.98).
_RING_FROM = {"forward": {2: 10241, 4: 8193}, "backward": {2: 640, 4: 440}}

# The same, backward with other tensors than x, dy, dx and what is added to it (896 columns: 0.94, in registers 0.88).
_FUSED_RING_FROM = {2: 800, 4: 4097}

# The same, backward of 16-bit rows that also writes y again, for which registers hold a block less (float16, 768 columns in
# registers: three blocks 0.94, two 0.86).
_RECOMPUTING_RING_FROM = 700

# The same, forward, for rows that do not fill the registers of their threads (8200 columns: 0.89, in registers 0.84; 6000 0.91
# and 0.97).
_UNEVEN_RING_FROM = 8193

# The same for rows that do not begin on 16 bytes (forward, 4097 columns: 0.81, in registers 0.48).
_LONE_RING_FROM = {"forward": {2: 500, 4: 2048}, "backward": {2: 512, 4: 512}}

# The same, forward to 8 bits, where the row fills a ring (16,384 columns: 0.87, in registers 0.90; 24,576 0.86 and 0.73; with
# the tensor's scale 12,288 columns 0.45 and 0.48, 16,384 0.42 and 0.43, 32,768 0.42 and 0.38).
_QUANTIZED_RING_FROM = {"given": 17000, "tensor": 20000}

# The same, forward of 16-bit rows with weights of 32 bits, which come from afar for each row (7168 columns: 0.96, in registers
# 0.93; 16,384 0.94 and 0.86) unless so many bytes of rows are in flight meanwhile, up to 12,288 columns and beyond (10,240
# columns, 60 KB: 0.85 and 0.91; 16,384 has 64 KB; 18,432, 72 KB: 0.80 and 0.85).
_WIDE_WEIGHT_RING_FROM, _ENOUGH_WIDE_BYTES = 7000, (60 * 1024, 70 * 1024)

# The same, backward with the gradient of a residual's sum, of rows that fill whole warps (512 columns: 1.01, in registers 0.99;
# float32, 256 columns 1.02 and 0.99).
_ADDING_RING_FROM = {2: 500, 4: 250}

# Threads of all blocks of a multiprocessor: more have too few registers each for 64 elements forward, 32 backward.
_RING_THREADS = 384

# Elements of a thread. Forward it keeps their weights and biases. Backward it keeps their sums of dweight and dbias, two
# registers each: 64 are for rows that no cluster holds otherwise (262,144 columns 0.91).
RING_ELEMENTS, MOST_RING_ELEMENTS = {"forward": 64, "backward": 56}, 64

# Bytes on their way to a multiprocessor, the rows in use included, by itemsize of x: backward of float32, 65,536 columns 0.99
# with 128 KB, 0.98 with 192 KB. Of 16 bits the most, in 3 to 5 stages: 4096 columns 0.97 with 3 stages of 32 KB and 1.00 with
# 4, 7168 0.96 with 3 of 28 KB and 1.01 with 5, but 8960 0.98 with 3 of 35 KB and 0.96 with 4. Of lone elements, and on clusters
# of 2 and 16, more are slower (1023 columns 0.92 with 3, 0.88 with 4; 16,384 0.971 and 0.967; 131,072 0.91 and 0.88).
_RING_BYTES = {"forward": {2: 96 * 1024, 4: 160 * 1024}, "backward": {2: 140 * 1024, 4: 128 * 1024}}

# Rows of 16-bit elements are bound by instructions unless the four parts of a multiprocessor have as many warps each. The rate
# of a tile counts elements in the time of one element, where a row costs a thread as much as 10 elements beside its own, more
# in a cluster. Backward, 6 warps of 32 elements 0.84, 9 of 24 0.79, 7 of 32 0.94, 8 of 24 or 32 and 4 of 56 0.98; forward, 11
# of 32 0.87, 12 of 64 0.98.
_RING_ROW_COST = 10

_RING_RATE = {"forward": 3.2, "backward": 2.8}

# Fewer bytes of x and dy in the rows of one turn leave a multiprocessor waiting, in a cluster the sooner (24 KB: 6144 columns
# on one block 0.97, 24,576 on clusters of 4 0.88; with four stages 30 KB: 12,288 columns on clusters of 8 0.88, 36 KB 0.98).
_FEWEST_RING_BYTES, _FEWEST_CLUSTER_BYTES, _FEWEST_DEEP_BYTES = 20 * 1024, 28 * 1024, 32 * 1024

# Forward, bytes of x that a block, or a cluster of 2, takes before the next one takes its place. The hardware gives the place
# to whoever is free, which evens out what neighbours get of the memory (16,384 columns: 8 rows a block 0.95, all rows on
# resident blocks 0.92). Larger clusters are slow to start: they stay.
_QUEUED_RING_BYTES, QUEUED_CLUSTER_SIZE = 256 * 1024, 2

# The same to 8 bits, bound by instructions, of which a block has some before its first row. LayerNorm of 24,576 columns at a
# given scale: 256 KB 0.87, 1 MB 0.94, all rows on resident blocks 0.93; at scales that are found in the row 256 KB 0.73, 1 MB
# 0.81, all rows 0.85; RMSNorm 256 KB 0.97, all rows 0.96.
_QUEUED_QUANTIZED_BYTES = 1024 * 1024


def queued_ring_bytes(problem: Problem) -> int | None:
    """Forward, bytes of x that a block takes before the next one takes its place; None where blocks stay."""
    if not problem.scaling or not problem.centered:
        return _QUEUED_RING_BYTES
    return None if problem.cols_of_scale is not None else _QUEUED_QUANTIZED_BYTES


def can_ring(problem: Problem, device: Device) -> bool:
    """Whether there is a copy engine to fetch the rows. Sums cross as floats.

    A ring fetches what makes up a row forward as tensors of one type, and has no registers left for random words.
    """
    fits = (
        problem.input is None and not problem.dropout and problem.row_scale is None and (problem.forward or problem.y is None)
    )
    return fits and problem.compute == "float32" and device.compute_capability >= 90


def _streamed(problem: Problem) -> list[int]:
    """Itemsizes of what passes through a ring."""
    names = [problem.x] * (1 + problem.residual) if problem.forward else [problem.x, problem.dy, problem.dsum]
    return [DTYPES[name].itemsize for name in names if name]


def wants_ring(problem: Problem, registers: Tile | None) -> bool:
    """Whether a ring, if there is one, beats the tile of registers."""
    if problem.compute != "float32":
        return False
    if problem.scaling and registers is not None:
        # Of scales that are sought in the row: where registers hold one block (see beats_one_quantized_block).
        sought = problem.cols_of_scale is not None
        return registers.blocks_per_sm == 1 if sought else problem.num_cols >= _QUANTIZED_RING_FROM[problem.scaling]
    itemsize = DTYPES[problem.x].itemsize
    aligned = all(problem.widest_pack * size >= 16 for size in _streamed(problem))
    first = (_RING_FROM if aligned else _LONE_RING_FROM)[problem.direction][itemsize]
    if aligned and not problem.forward and not _is_plain_backward(problem):
        first = _FUSED_RING_FROM[itemsize]
    if problem.forward and aligned and not (registers and registers.exact):
        first = min(first, _UNEVEN_RING_FROM)
    # Blocks with enough in flight (bf16: 8960 columns 0.97, in a ring 0.93; 13,312 columns 0.93 and 0.86; two blocks: 16,384
    # columns 0.95 and 0.94, 18,432 columns 0.99 and 0.98). With a residual twice as much is in flight (4096 columns: 0.97, in a
    # ring 0.91; one block: 20,480 columns 0.98 and 0.94).
    fewest = 1 if problem.residual else 2 if registers and (registers.exact or itemsize > 2) else 3
    if problem.forward and registers and registers.blocks_per_sm >= fewest:
        in_flight = registers.blocks_per_sm * registers.rows_per_block * problem.num_cols * itemsize * (1 + problem.residual)
        wide = itemsize == 2 and problem.has_wide_parameters and not problem.residual
        enough = _ENOUGH_WIDE_BYTES[problem.num_cols > 12288]
        if wide and problem.num_cols >= _WIDE_WEIGHT_RING_FROM and in_flight < enough:
            return True
        if in_flight >= 60 * 1024 and problem.num_cols >= 0.95 * registers.cols:
            return False
    if problem.dsum and _is_plain_backward(problem) and aligned:
        if problem.num_cols % (32 * problem.widest_pack) == 0:
            first = min(first, _ADDING_RING_FROM[itemsize])
        elif itemsize > 2 and problem.num_cols < 1024 and not _least_turn_bytes(problem):
            return False
    if problem.recomputed and itemsize == 2:
        first = min(first, _RECOMPUTING_RING_FROM)
    if _least_turn_bytes(problem) == _NARROW_TURN_BYTES and problem.num_cols in _NARROW_IN_REGISTERS:
        return False
    return problem.num_cols >= first


def ring_registers(problem: Problem, device: Device, tile: Tile) -> int:
    """Registers of a thread of a ring, with no spills, as registers_of_thread."""
    elements, exact = tile.pack_size * tile.packs_per_thread, tile.exact == 1
    if problem.forward:
        tight = (24 if "float64" in (problem.weight, problem.bias) else 8) * (device.compute_capability >= 120)
        fewest = 4 if problem.widest_pack == 1 else 0  # a register holds one lone element
        parameters = (problem.weight, problem.bias, problem.weight1, problem.bias1)
        kept = sum(max(DTYPES[name].itemsize, fewest) for name in parameters if name)
        waiting = elements if problem.scaling == "row" else 0  # y, while the next row is summed up
        if is_lone(problem) and kept == 8 and device.compute_capability == 90:
            return 168 if 41 <= elements <= 43 and not waiting else 46 + 3 * elements + waiting  # found by compiling
        if problem.cols_of_scale is not None:
            wide_in_cluster = tile.cluster_size > 1 and problem.has_wide_parameters
            newer = tile.cluster_size > 1 and device.compute_capability >= 100
            tight += 24 * problem.residual + 8 * (wide_in_cluster or not exact) + 8 * newer
        if waiting:
            num_warps = tile.threads_per_row // 32 * tile.cluster_size
            lanes = 16 if num_warps > 48 else 1 << ((num_warps + 2) // 3 - 1).bit_length()  # as Exchange::lanes
            tight += 8 * (num_warps % lanes > 0 or not exact)
        return max(104, 40 + waiting) + elements * kept // 4 + tight
    lone = 3 * elements // 4 if problem.widest_pack == 1 else 0
    wide_bias = 8 * (problem.bias is not None and DTYPES[problem.bias].itemsize > DTYPES[problem.x].itemsize)
    return 60 + 27 * min(elements, 57) // 8 + lone + wide_bias


@lru_cache(maxsize=4096)
def ring_tile(problem: Problem, device: Device, cluster_sizes: tuple[int, ...]) -> Tile | None:
    """The best of the tiles whose ring fits registers and shared memory."""
    in_blocks = problem.scaling in ("block", "mx")
    if not can_ring(problem, device) or (in_blocks and problem.widest_pack * DTYPES[problem.x].itemsize < 16):
        return None  # of lone elements no warp has a whole block that shares a scale
    tile = _best_ring(problem, device, cluster_sizes, RING_ELEMENTS[problem.direction])
    largest = [size for size in cluster_sizes if size >= 16]
    tile = tile or _best_ring(problem, device, largest, MOST_RING_ELEMENTS)
    # Backward, one row that fills the shared memory (float32, 262,144 columns: 0.76, read again from memory 0.42).
    return tile or (None if problem.forward else _best_ring(problem, device, largest, MOST_RING_ELEMENTS, stages=1))


def _best_ring(
    problem: Problem, device: Device, cluster_sizes: Iterable[int], most_elements: int, stages: int | None = None
) -> Tile | None:
    """stages: None, or how many there are to be."""
    score_of = _forward_ring_score if problem.forward else _backward_ring_score
    pack_size = problem.widest_pack
    best, best_score = None, None
    for cluster_size in cluster_sizes:
        slice_cols = cols_of_slice(problem, pack_size, cluster_size)
        for threads_per_row in range(32, _RING_THREADS + 1, 32):
            packs_per_thread = max(1, ceil_div(slice_cols, pack_size * threads_per_row))
            elements = pack_size * packs_per_thread
            # Half-empty threads are no better than fewer full ones.
            if elements > most_elements or (packs_per_thread > 1 and 2 * slice_cols < elements * threads_per_row):
                continue
            # Lone elements of a row in one warp (1023 columns 0.61, on two warps 0.71; 1279 0.63 and 0.77; 1535 0.84 and 0.81).
            if problem.forward and pack_size == 1 and threads_per_row == 32 and 24 < elements < 48:
                continue
            exact = int(elements * threads_per_row * cluster_size == problem.num_cols)
            tile = Tile(pack_size, threads_per_row, packs_per_thread, cluster_size=cluster_size, exact=exact)
            registers = ring_registers(problem, device, tile)
            for rows in range(1, min(12, _RING_THREADS // threads_per_row) + 1):
                if registers > min(255, device.registers_per_sm // (ceil_div(threads_per_row * rows, 128) * 128) // 8 * 8):
                    break
                # Rows that a multiprocessor works on at a time: forward in a block each, backward in one,
                # which leaves one partial row.
                rows_per_block, blocks_per_sm = (1, rows) if problem.forward else (rows, 1)
                tile = Tile(pack_size, threads_per_row, packs_per_thread, rows_per_block, cluster_size, blocks_per_sm, exact)
                tile = _with_stages(problem, device, tile, rows, stages)
                score = score_of(problem, tile) if tile else None
                if tile and (best is None or score > best_score):
                    best, best_score = tile, score
    return best


def _with_stages(problem: Problem, device: Device, tile: Tile, rows: int, stages: int | None) -> Tile | None:
    """The tile with as many stages as are wanted and fit, or None if 2 do not; or with those that are given, if they fit."""
    itemsize = DTYPES[problem.x].itemsize
    slot_bytes = tile.cols * sum(_streamed(problem))
    most_bytes = min(device.smem_per_block, device.smem_per_sm // tile.blocks_per_sm - 1024)
    if stages is not None:
        staged = replace(tile, stages=stages)
        return staged if rows == 1 and ring_bytes(problem, staged) <= most_bytes else None
    wanted, turn_bytes = _RING_BYTES[problem.direction][itemsize], slot_bytes * rows
    if problem.forward:
        used_bytes = cols_of_slice(problem, tile.pack_size, tile.cluster_size) * sum(_streamed(problem)) * rows
        most_deep = _DEEP_LONE_BYTES if tile.pack_size == 1 else _DEEP_RING_BYTES * (tile.cluster_size in (4, 8))
        deep = itemsize == 2 and used_bytes <= most_deep
        stages = min(ceil_div(wanted, turn_bytes), 4 if deep else 3)
    elif itemsize > 2 and _least_turn_bytes(problem):
        stages = min(wanted // turn_bytes, 4)
    elif itemsize == 2:
        deep = turn_bytes <= _DEEP_TURN_BYTES.get(tile.cluster_size, 0) and tile.pack_size > 1
        short = _has_short_threads(tile)
        if tile.cluster_size == 2:
            stages = 4 if deep and short else 3
        else:
            stages = min(wanted // turn_bytes, 5) if deep else 3
        if _least_turn_bytes(problem) or (deep and short and tile.cluster_size in (4, 8)):
            stages = max(stages, 4)
    else:
        stages = min(ceil_div(wanted, turn_bytes), 4)
    stages = max(stages, 3 if itemsize == 2 else 2)
    stages = min(stages, most_bytes // (slot_bytes * tile.rows_per_block))  # before the smaller parts of a ring
    fitting = (replace(tile, stages=count) for count in range(stages, 1, -1))
    return next((staged for staged in fitting if ring_bytes(problem, staged) <= most_bytes), None)


# Bytes of one turn forward up to which four stages are better than three: on clusters of 4 and 8, and of lone elements (3001
# columns 0.87 and 0.86, 6001 0.83 and 0.80; 4097, 33 KB, 0.84 and 0.85).
_DEEP_RING_BYTES, _DEEP_LONE_BYTES = 27 * 1024, 29 * 1024

# Backward of float32: rows of up to so many columns pass through a ring in the smallest turns of at least so many bytes of x
# and dy (1024 columns: 3 rows 1.00, 4 rows 0.99, 8 rows 0.97, in registers 0.96; 2560 columns: one row, of 20 KB, 0.96, two
# 0.99, in registers 0.98), but for those that threads of two or three packs hold as well (768 columns 0.99 in both).
_NARROW_FLOAT32, _NARROW_TURN_BYTES, _NARROW_IN_REGISTERS = 4096, 22000, range(641, 880)

# The same with the gradient of a residual's sum, which is part of them: of float32 below 1024 columns, of others that fill
# short threads in turns of that size (512 columns: 10 rows 1.01, 8 rows 0.95; 2048 columns: 3 rows x 16 elements 1.02, 4 x 32
# 0.98; 5120 columns: 16 elements 1.02, 40 0.98; float32, 1024 columns: 3 rows x 8 elements 1.03, 8 x 32 0.99).
_ADDING_TURN_BYTES = {2: 28000, 4: 27500}

# Backward of 16 bits, by the size of a cluster: bytes in one turn up to which four or five stages are better than three, in a
# cluster of threads that have few elements (one block: 4096 columns, 32 KB, 1.00 and 0.98; 8960, 35 KB, 0.96 and 0.98; clusters
# of 2: 14,336 columns, 28 KB, 0.97 and 0.95; 16,384, 32 KB, 0.97 with both, on clusters of 4 0.99 and 0.96; 40,960 columns on
# clusters of 8 0.97 and 0.96, on clusters of 4 with 40 elements 0.89 and 0.93).
_DEEP_TURN_BYTES = {1: 34 * 1024, 2: 30 * 1024, 4: 40 * 1024, 8: 40 * 1024}


def _has_short_threads(tile: Tile) -> bool:
    """On clusters of 8 they may be longer (10,240 columns on 40 elements: clusters of 8 0.96, of 4 0.94)."""
    return tile.pack_size * tile.packs_per_thread <= (40 if tile.cluster_size == 8 and tile.rows_per_block >= 4 else 32)


def _is_plain_backward(problem: Problem) -> bool:
    """Of x, dy, dx and what is added to it alone: more tensors to write take registers."""
    return not (problem.forward or problem.dresidual or problem.recomputed)


def _fills_short_threads(problem: Problem, least_bytes: int, filled: float) -> bool:
    """Whether some number of whole rows is a turn of that size, and not much more, on threads of 24 elements at the most that
    a row fills to that share."""
    row_bytes = problem.num_cols * sum(_streamed(problem))
    rows = ceil_div(least_bytes, row_bytes)
    for threads in range(32, _RING_THREADS // rows + 1, 32):
        elements = ceil_div(problem.num_cols, threads * problem.widest_pack) * problem.widest_pack
        if elements <= 24 and problem.num_cols >= filled * elements * threads and rows * threads >= 192:
            return rows * row_bytes <= 1.5 * least_bytes
    return False


def _least_turn_bytes(problem: Problem) -> int | None:
    """Backward, where the smallest turns of at least so many bytes are the best; None where larger ones are no worse."""
    itemsize, num_cols, aligned = (
        DTYPES[problem.x].itemsize,
        problem.num_cols,
        problem.widest_pack * DTYPES[problem.x].itemsize >= 16,
    )
    if not _is_plain_backward(problem) or problem.compute != "float32" or not aligned:
        return None
    if problem.dsum:
        filled = 0.8 if itemsize > 2 and num_cols < 1024 else 1.0
        return _ADDING_TURN_BYTES[itemsize] if _fills_short_threads(problem, _ADDING_TURN_BYTES[itemsize], filled) else None
    return _NARROW_TURN_BYTES if itemsize > 2 and num_cols <= _NARROW_FLOAT32 else None


# Backward: columns of one turn on a multiprocessor beyond which more are worse: a cluster takes over (12,288 columns on
# clusters of 2 1.07 times as fast as on one block).
_MOST_BACKWARD_COLS = 11264

# Columns of a row that one block takes (16 bits, 9216 columns: clusters of 4 0.98, one block 0.94; 8960: one block 0.98).
_MOST_COLS_OF_BLOCK = {2: 9000, 4: 11264}


def is_lone(problem: Problem) -> bool:
    """Whether rows are of 16-bit elements that each begin anywhere."""
    return problem.widest_pack == 1 and DTYPES[problem.x].itemsize == 2


def suits_block(problem: Problem) -> bool:
    """Whether a row is better in the ring of one block than in those of a cluster, if it fits both.

    Forward lone elements alone pass through clusters then, of 4 or more (12,001 columns: 0.86, of 2 0.77, one block 0.81).
    """
    narrow = problem.num_cols <= _MOST_COLS_OF_BLOCK[DTYPES[problem.x].itemsize]
    return narrow or (problem.forward and not is_lone(problem))


def ring_clusters(problem: Problem, device: Device) -> tuple[int, ...]:
    """Sizes of clusters that a ring may have."""
    fewest = 4 if problem.forward and is_lone(problem) else 2
    return tuple(size for size, _ in device.clusters if size >= fewest)


def ring_share(problem: Problem, tile: Tile) -> float:
    """About the share of what memory allows that the instructions of a tile allow."""
    elements = tile.pack_size * tile.packs_per_thread
    warps = tile.block_size * tile.blocks_per_sm // 32
    used = cols_of_slice(problem, tile.pack_size, tile.cluster_size) / tile.cols  # packs beyond the row cost as much as others
    row_cost = _RING_ROW_COST + 2 * (tile.cluster_size.bit_length() - 1)
    turns = ceil_div(warps, 4)
    if warps > 4:  # a little less where one part has a warp less (backward of 200,000 columns: 7 warps filled 0.91, 8 not 0.87)
        turns = 0.75 * turns + 0.25 * warps / 4
    rate = used * warps * elements / (turns * (elements + row_cost))
    return min(1.0, rate * DTYPES[problem.x].itemsize / 2 / _RING_RATE[problem.direction])


def _suits_turn(tile: Tile, turn_bytes: int, itemsize: int) -> bool:
    """Whether clusters forward have the right number of bytes in one turn on a multiprocessor.

    16-bit rows are faster in two blocks if clusters of 8 are enough (32,768 columns: clusters of 4 with two blocks 0.97, of 2
    with one 0.95; 73,728: clusters of 8 with two blocks 0.91, of 16 with three 0.81; float32, 20,480: 0.99 on one block of
    clusters of 2). One block of a large cluster wants more (81,920: 0.80 with 20 KB; 163,840: 0.91 with 40 KB, 0.74 with 20 KB
    on clusters of 16), two of a small one less (40,960: 0.87 with 40 KB, 0.91 with 30 KB in three blocks of clusters of 8).
    """
    fewest, most = 20, 40
    if itemsize == 2 and tile.blocks_per_sm == 1:
        fewest, most = (26 if tile.cluster_size >= 8 else 20), 48
    elif itemsize == 2 and (tile.cluster_size <= 4 or (tile.cluster_size == 8 and tile.blocks_per_sm > 2)):
        most = 39 if tile.blocks_per_sm == 2 else 32
    elif itemsize == 4:
        most = 50
    return fewest * 1024 <= turn_bytes <= most * 1024


def fills_quantized_ring(problem: Problem, tile: Tile) -> bool:
    """Whether a ring is the one for rows of 16 bits to 8 bits: 12 warps of long threads that the row fills.

    RMSNorm at scales that are sought in the row has shorter ones as well (36,864 columns, 1 x 128 blocks: 48 elements 0.89, in
    registers 0.82; LayerNorm 0.65 and 0.67).
    """
    fewest = 48 if problem.cols_of_scale is not None and not problem.centered else 56
    long = tile.pack_size * tile.packs_per_thread >= fewest
    return long and _threads_of_all(tile) == 384 and tile.exact == 1 and DTYPES[problem.x].itemsize == 2


def beats_one_quantized_block(problem: Problem, ring: Tile, registers: Tile) -> bool:
    """Whether a ring beats the registers of one block for rows of 16 bits to 8 bits: that one, or at scales that are sought in
    the row one of 10 or 11 warps (at a given scale in clusters alone: LayerNorm of 40,960 columns 0.87, in registers 0.84).

    LayerNorm by row, 24,576 columns 0.88, in registers 0.83; by 1 x 128 blocks, 22,528 columns 0.86, in registers 0.78, 24,576
    0.93 and 0.81. Registers that also hold the next row beat rings in clusters (RMSNorm, 32,768 columns, by row 0.97, in a ring
    0.92, by blocks 0.96 and 0.90). The registers of two blocks are better than any: RMSNorm, 20,480 columns 0.99, in a ring
    0.83.
    """
    sought = problem.cols_of_scale is not None
    if sought and ring.cluster_size > 1 and registers.exact and fetches_ahead(problem, registers):
        return False
    nearly = sought or (problem.scaling == "given" and problem.centered and ring.cluster_size > 1)
    return fills_quantized_ring(problem, ring) or (nearly and nearly_fills_quantized_ring(problem, ring))


def nearly_fills_quantized_ring(problem: Problem, tile: Tile) -> bool:
    """10 or 11 warps of the longest threads."""
    long = tile.pack_size * tile.packs_per_thread == 64 and DTYPES[problem.x].itemsize == 2
    return long and _threads_of_all(tile) >= 320 and tile.exact == 1


def _threads_of_all(tile: Tile) -> int:
    """Of the blocks of a multiprocessor."""
    return tile.block_size * tile.blocks_per_sm


def _forward_ring_score(problem: Problem, tile: Tile) -> tuple:
    """One block if it will do, or the smallest clusters that suit. Then the instructions, then the most columns at a time."""
    itemsize = DTYPES[problem.x].itemsize
    cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size) * tile.blocks_per_sm
    lone = tile.cluster_size == 1
    suits = lone or _suits_turn(tile, cols * itemsize, itemsize)
    two_blocks = not lone and itemsize == 2 and tile.blocks_per_sm > 1 and tile.cluster_size <= 8
    share = round(ring_share(problem, tile), 2)
    # To 8 bits: 32,768 columns on 3 blocks of clusters of 4 0.90, on 2 0.79. The smallest clusters: those of 2 leave no
    # multiprocessor without one (49,152 columns by 1 x 128 blocks 0.90, of 8 0.70; 98,304 columns on clusters of 4 0.82, of 8
    # 0.72, at a given scale 0.97 and 0.91).
    full = ()
    if problem.scaling:
        fills = fills_quantized_ring(problem, tile)
        full = (
            fills,
            -tile.cluster_size * fills,
            nearly_fills_quantized_ring(problem, tile),
            tile.cluster_size <= 2,
            tile.cluster_size < 16,
            min(tile.blocks_per_sm, 3),
        )
    # With a residual a row takes twice the room: of the same bytes, deeper rings (8192 columns: 2 blocks of 3 stages 0.92, 3 of
    # 2 0.90).
    bytes_first = (cols * tile.stages, tile.stages) if problem.residual else (cols,)
    return *full, lone, suits, two_blocks, -tile.cluster_size, share, tile.exact, *bytes_first, tile.threads_per_row


def _backward_ring_score(problem: Problem, tile: Tile) -> tuple:
    """About the share of a copy that the tile reaches; of equals, few threads."""
    cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size) * tile.rows_per_block
    warps, elements, itemsize = tile.block_size // 32, tile.pack_size * tile.packs_per_thread, DTYPES[problem.x].itemsize
    bytes_per_col = sum(_streamed(problem))
    if least_bytes := _least_turn_bytes(problem):
        turn_bytes, filled = cols * bytes_per_col, problem.num_cols >= 0.8 * tile.cols
        return turn_bytes >= least_bytes, filled and warps >= 6, -turn_bytes, tile.exact, tile.block_size
    # Deep rings of short threads hide what blocks of a cluster wait for (12,288 columns: clusters of 8, 6 rows 0.98, of 4, 3
    # rows 0.96, of 2 with 48 elements 0.94), but not that one part has a third warp (24,576 columns: 9 warps 0.87, 12 0.98).
    deep = itemsize == 2 and tile.stages >= 4 and tile.exact and _has_short_threads(tile)
    deep = deep and (tile.cluster_size == 2 or (tile.cluster_size in (4, 8) and warps in (8, 10, 12)))
    fewest = (
        _FEWEST_RING_BYTES
        if tile.cluster_size == 1
        else _FEWEST_DEEP_BYTES
        if deep and tile.cluster_size > 2
        else _FEWEST_CLUSTER_BYTES
    )
    share = max(ring_share(problem, tile), 0.94 * deep) * min(1.0, cols * bytes_per_col / fewest)
    share -= 0.01 * (warps < 8) + 0.02 * (cols > _MOST_BACKWARD_COLS) + 0.06 * (not tile.exact)
    # Narrow rows want more warps, others fewer (640 columns: 12 0.97, 8 0.85; 800: 0.99, 0.88; 904: 0.93, 0.95).
    narrow = problem.num_cols <= 820 and tile.threads_per_row == 32 and _is_plain_backward(problem)
    if narrow:
        share += 0.02 * (warps == 12)
    else:
        share += 0.06 + 0.02 * min(tile.rows_per_block - 1, 3) if deep else -0.03 * (warps > 8)
    share -= 0.001 * max(0, elements - 32)
    share -= 0.01 * (tile.cluster_size.bit_length() - 1) + 0.05 * (tile.cluster_size == 16)
    return round(share, 3), -tile.block_size
