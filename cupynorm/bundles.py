"""Tiles of rows that come and go in bundles (cuda_src/bundle.cuh): several at a time, of rows that do not begin on 16 bytes,
and of others of 16-bit elements that do not fill registers well: there a warp's loads and stores are whole lines whatever the
width. Pure Python, no GPU needed.

Shares of a copy are of an H200, bf16, measured on 2026-11-22 as in cupynorm.registers.
"""

from __future__ import annotations

from dataclasses import replace

from .devices import Device
from .dtypes import DTYPES, FLOAT8S
from .problem import Problem, Tile, ceil_div
from .registers import lanes_tile, lone_float32_registers

# The most elements of a thread, by the lanes that share a row: the first that suits wins. Lanes that have a row each do not
# meet at the banks of shared memory, and long threads are better (forward, 63 columns: 0.89 on one lane, 0.80 on 8; 383 columns
# 0.93 on 16 x 24, 0.89 on 32 x 12); backward short ones, of which there are more (255 columns 0.92 on 32 x 8, 0.87 on 16 x 16).
# Beyond the last, rings: backward of 1023 columns is 0.86 in both.
_BUNDLE_ELEMENTS = {
    "forward": {2: {1: 67, 2: 28, 4: 28, 8: 20, 16: 32, 32: 80}, 4: {1: 41, 8: 20, 16: 16, 32: 64}},
    "backward": {2: {1: 41, 2: 28, 8: 12, 16: 14, 32: 28}, 4: {1: 33, 8: 10, 16: 10, 32: 28}},
}

# The same of rows that begin on 16 bytes, or forward on 8, in packs of 4 elements, backward of 2.
WIDE_BUNDLE_PACK = {"forward": 4, "backward": 2}

_WIDE_BUNDLE_ELEMENTS = {
    "forward": {1: 24, 2: 28, 4: 36, 8: 28, 16: 28, 32: 64},
    "backward": {1: 41, 2: 28, 8: 14, 16: 14, 32: 28},
}

# Up to which share of its registers a row that begins on 16 bytes fills bundles are faster (forward: 392 columns fill 0.77 of
# their registers, 0.90 there and 0.95 in bundles; 136 columns 0.85, 0.90 and 0.93; 456 columns 0.89, 0.98 and 0.97; backward:
# 392 columns 0.83 and 0.93; 648 columns 0.84, 0.88 and 0.86).
# With dsum, which takes room in bundles: 576 columns fill 0.75 of their registers, 0.94 there and 0.88 in bundles; 264 columns
# 0.69, and 0.94 in bundles.
_BUNDLE_BELOW, _ADDING_BUNDLE_BELOW = {"forward": 0.88, "backward": 0.82}, 0.7

# Warps of a block. Backward they are all that a multiprocessor has, and leave one partial row: the first count that registers
# allow (333 columns on threads of 11 elements: 12 warps 0.93, 8 warps 0.84), but of single elements, up to how many a thread
# (639 columns on 20: 12 warps 0.88, 8 warps 0.92).
_BUNDLE_WARPS, _MANY_WARPS_ELEMENTS = {"forward": (4,), "backward": (12, 8)}, 16

# Bytes of the rows of a warp's bundle, at the most, unless one row of each group of lanes has more; by the warps of a block,
# and forward where lanes share one image. Less and the copy engine reads too many lines twice, for two bundles (forward, 1025
# columns: one row 0.90, two 0.94; 333 columns: 4 rows 0.89, 6 rows 0.95; backward, 127 columns: 10 rows 0.88, 12 rows 0.90);
# more is worse backward (392 columns: 3 rows 0.93, 5 rows 0.89).
_BUNDLE_BYTES, _SHARED_IMAGE_BYTES = {2: {4: 4800, 8: 8192, 12: 6656}, 4: {4: 4800, 8: 8704}}, 3600

# The same with dsum, on 8 warps (127 columns: 12 rows 0.89, 10 rows 0.83; 333 columns: 4 rows 0.95, 5 rows 0.91).
_ADDING_BUNDLE_BYTES = 9500

# Backward on 8 warps, from how many bytes of a row a third stage is faster (777 columns 0.91, with two 0.90).
_THREE_BUNDLES_FROM = 1000

# Forward, turns after which a warp makes room for the next block, as blocks of rings do (383 columns: 6 turns 0.93, 24 0.85;
# 2047 columns: 4 turns 0.88, 2 0.83).
_BUNDLE_TURNS = 4


def can_bundle(problem: Problem, device: Device) -> bool:
    """Whether several rows are one piece of each tensor, for the copy engine to fetch, and results fit in x's place."""
    streamed = [problem.x, problem.y] if problem.forward else [problem.x, problem.dy, problem.dx, problem.dsum or problem.x]
    sizes = {DTYPES[name].itemsize if name and name not in FLOAT8S else None for name in streamed}
    fused = [problem.input, problem.row_scale, problem.dropout, problem.y1, problem.dresidual]
    fused += [problem.recomputed, None if problem.forward else problem.y]
    fits = len(sizes) == 1 and not any(fused) and not problem.pitched
    return fits and problem.compute == "float32" and device.compute_capability >= 90


def bundle_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory of Bundles, as in cuda_src/bundle.cuh, and of the sums that take their place at the end."""
    names = [problem.x] * (1 + problem.residual) if problem.forward else [problem.x, problem.dy]
    names += [problem.dsum] if problem.dsum else []
    rows = [problem.num_cols * DTYPES[name].itemsize for name in names] + [4, 4] * (not problem.forward)
    parts = 32 // tile.threads_per_row if tile.threads_per_row >= 8 else 1
    images = [ceil_div(tile.bundle // parts * row, 16) * 16 + 32 for row in rows]
    if parts > 1:  # each part at its own banks
        images = [image + (128 // parts - image) % 128 for image in images]
    slot_bytes = parts * sum(images)
    num_warps = tile.block_size // 32
    sums = 0 if problem.forward or num_warps == 1 else 2 * num_warps * problem.num_cols * 4
    return max(num_warps * tile.stages * (slot_bytes + 8), sums)


def queued_bundles(tile: Tile) -> int:
    """Bundles that a warp takes forward before its block ends."""
    return max(2, ceil_div(_BUNDLE_TURNS * 32 // tile.threads_per_row, tile.bundle))


def _bundle_registers(problem: Problem, device: Device, tile: Tile) -> int:
    """Registers of a thread of a bundle's warp, with no spills, as registers_of_thread."""
    elements, lanes, lone = tile.pack_size * tile.packs_per_thread, tile.threads_per_row, tile.pack_size < 4
    kept = [name for name in ((problem.weight, problem.bias) if problem.forward else (problem.weight,)) if name]
    wide = sum(max(DTYPES[name].itemsize - 2, 0) for name in kept)
    tight = 16 if device.compute_capability >= 120 else 8 * (device.compute_capability >= 100)
    if problem.forward:
        # Each row that lanes begin in the middle of, and each single element, has addresses of its own.
        apart = lanes < 8 or (lone and lanes < 32)
        if problem.residual:  # both packs of an element wait
            tight += 36 if lanes == 1 else 8 * (wide > 0) + max(16, elements - 12 * (not lone))
        addresses = elements // 4 if lanes == 1 else (31 if wide and lone else 12 if wide else 7) * apart
        addresses += 4 * (wide > 0 and 8 <= lanes < 32 and not apart) + elements // 10 * (problem.x == "float16" and not lone)
        each = 1.86 + 0.27 * wide + 0.16 * max(0, wide - 4)
        needed = max(62, 34 - wide // 2 + each * elements + 0.2 * max(0, elements - 33) + addresses)
        # A row in each lane is tight beyond 60 elements and fits three blocks all the same (65 columns: two 0.83, three 0.92).
        return int(min(needed, 168) if lanes == 1 and elements <= 67 and not wide else needed + 0.99) + tight
    tight += 4 * wide * (device.compute_capability >= 120)
    return tight + int(36 + ((5.2 if problem.x == "float16" else 4.7) + 0.5 * wide) * elements)


def bundle_tile(problem: Problem, device: Device) -> Tile | None:
    if not can_bundle(problem, device) or lone_float32_registers(problem, device):
        return None
    itemsize, pack_bytes = DTYPES[problem.x].itemsize, problem.widest_pack * DTYPES[problem.x].itemsize
    elements = _BUNDLE_ELEMENTS[problem.direction][itemsize]
    if pack_bytes <= 4 or (pack_bytes == 8 and itemsize == 2 and not problem.forward):
        pack_size = problem.widest_pack if problem.forward else 1  # pairs: 300 columns 0.89, single elements 0.92
        return _tile_of_bundles(problem, device, pack_size, elements)
    registers = lanes_tile(problem, device)
    if itemsize > 2 or (registers is None and pack_bytes > 8):
        return None
    # Lanes that have a row each move 16 bytes here and there (24 columns 0.73, in bundles 0.93).
    apart = pack_bytes == 8 or (problem.forward and registers.threads_per_row == 1 < registers.packs_per_thread)
    below = _ADDING_BUNDLE_BELOW if problem.dsum else _BUNDLE_BELOW[problem.direction]
    if not apart and problem.num_cols >= below * registers.cols:
        return None
    pack_size = WIDE_BUNDLE_PACK[problem.direction]
    return _tile_of_bundles(problem, device, pack_size, _WIDE_BUNDLE_ELEMENTS[problem.direction])


def _tile_of_bundles(problem: Problem, device: Device, pack_size: int, elements: dict[int, int]) -> Tile | None:
    """elements: the most of a thread, by the lanes that share a row."""
    tiles = []
    for lanes, most in elements.items():
        packs_per_thread = ceil_div(problem.num_cols, pack_size * lanes)
        meets = problem.forward and pack_size == 1 and lanes in (2, 4)
        if pack_size * packs_per_thread > most or meets or (packs_per_thread - 1) * pack_size * lanes >= problem.num_cols:
            continue
        tile = Tile(pack_size, lanes, packs_per_thread)
        tile = with_bundles(problem, device, replace(tile, exact=int(tile.cols == problem.num_cols)))
        if tile is not None:
            if problem.num_cols >= 0.9 * tile.cols:
                return tile
            tiles.append(tile)
    return min(tiles, key=lambda tile: tile.cols, default=None)


def with_bundles(problem: Problem, device: Device, tile: Tile) -> Tile | None:
    """The tile with rows for its block and its bundles, stages, and as many blocks as fit, or None if one does not."""
    itemsize = DTYPES[problem.x].itemsize
    registers = ceil_div(_bundle_registers(problem, device, tile), 8) * 8
    if registers > 255 + 1:
        return None
    short = tile.pack_size > 1 or tile.packs_per_thread <= _MANY_WARPS_ELEMENTS
    # With dsum 12 warps have too few rows each, unless rows are narrow (333 columns: 0.91, 8 warps 0.95; 65: 0.88, 0.85).
    many = problem.forward or (itemsize == 2 and short and (not problem.dsum or tile.threads_per_row <= 8))
    for num_warps in _BUNDLE_WARPS[problem.direction][0 if many else 1 :]:
        of_block = replace(tile, rows_per_block=num_warps * 32 // tile.threads_per_row)
        fitting = 4 * (device.registers_per_sm // 4 // 32 // registers) // num_warps
        fitting = min(fitting, device.threads_per_sm // of_block.block_size)
        third = num_warps == 8 and itemsize == 2 and problem.num_cols * itemsize >= _THREE_BUNDLES_FROM
        for smaller in (1, 2, 4, 8):
            most_bytes = _ADDING_BUNDLE_BYTES if problem.dsum and num_warps == 8 else _BUNDLE_BYTES[itemsize][num_warps]
            bundle = _rows_of_bundle(problem, tile.threads_per_row, most_bytes // smaller)
            for stages in (3, 2) if third else (2,):
                staged = replace(of_block, stages=stages, bundle=bundle)
                smem_bytes = bundle_bytes(problem, staged)
                blocks_per_sm = min(fitting, device.smem_per_sm // (smem_bytes + 1024), 32 if problem.forward else 1)
                if smem_bytes <= device.smem_per_block and blocks_per_sm > 0:
                    return replace(staged, blocks_per_sm=blocks_per_sm)
    return None


def _rows_of_bundle(problem: Problem, lanes: int, most_bytes: int) -> int:
    """About as many as have most_bytes, the same number in each image.

    Images that all begin on 32 bytes, and not all on 64, are slower, and backward those that begin on 16 are the fastest
    (forward, 500 columns: 3 rows 0.96, 4 rows, of 4000 bytes, 0.92; 808 columns: 3 rows 0.95, 2 rows 0.92; backward, 440
    columns: 3 rows, of 2640 bytes of x, 0.90, 4 rows 0.87, 2 rows 0.85).
    """
    row_bytes, groups = problem.num_cols * DTYPES[problem.x].itemsize, 32 // lanes
    if problem.forward:
        most_bytes = most_bytes if lanes >= 8 else min(most_bytes, _SHARED_IMAGE_BYTES)
    bytes_of_group = row_bytes if problem.forward else (3 if problem.dsum else 2) * row_bytes + 8
    rows = max(1, most_bytes // max(1, groups * bytes_of_group))

    def rank(rows: int) -> int:
        image_bytes = rows * row_bytes if lanes >= 8 else rows * groups * row_bytes
        return 0 if image_bytes % 64 == 32 else 1 if problem.forward or image_bytes % 32 == 0 else 2

    other = rows + 1 if problem.forward and rows < 3 else rows - 1
    matters = rank(rows) == 0 or rows <= 4  # one of many rows less only makes a bundle smaller
    return (other if matters and other > 0 and rank(other) > rank(rows) else rows) * groups
