"""Which tile the model prefers for each path of a row, from registers to uncached.
Pure Python, no GPU needed.

The model prefers enough bytes in flight, few idle lanes, and warps spread evenly, on any GPU.
measured.py has tiles that measured faster on one. Measurements: docs/experiments.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from .abilities import can_bundle, can_ring, is_only_quantized, streamed
from .devices import Device
from .problem import Problem, Tile, ceil_div, cols_of_slice
from .tile_model import (
    blocks_that_fit,
    fits_smem,
    registers_of_thread,
    shaped,
    smem_bytes_of,
    warps_that_fit,
)

# Bytes of x in flight on a multiprocessor that hide memory latency: twice bandwidth times latency.
ENOUGH_BYTES = 55 * 1024

# Bytes of x in one thread, at most. Forward, long threads spread the fixed instructions of a row
# over more elements. Backward, each element takes five registers.
_THREAD_BYTES = {"forward": {2: 128, 4: 128, 8: 128}, "backward": {2: 48, 4: 64, 8: 64}}
_LANE_BYTES = {2: 80, 4: 64, 8: 64}

# The widest row of a warp, in bytes. A block of two warps is as fast for wider rows.
_WARP_ROW_BYTES = {"forward": {2: 2560, 4: 2048, 8: 2048}, "backward": {2: 1536, 4: 2048, 8: 2048}}
# The same for 16-bit rows to 8 bits. Wider rows get blocks of one warp, which wait for no other.
_QUANTIZED_WARP_BYTES = 1792

# Threads of all rings of a multiprocessor: with more, each has too few registers for its elements.
_RING_THREADS = 384
# Elements of a thread, at most; the second backward in clusters of 16, if no other ring fits.
_RING_ELEMENTS, _MOST_RING_ELEMENTS = {"forward": 64, "backward": 56}, 64

# Bytes in flight in a ring, including the rows in use; and the most rows.
_RING_BYTES = {"forward": {2: 96 * 1024, 4: 160 * 1024}, "backward": {2: 140 * 1024, 4: 128 * 1024}}
_MOST_STAGES = {"forward": {2: 3, 4: 4}, "backward": {2: 5, 4: 4}}

# Bytes of the rows of one turn. With fewer, warps wait for each other longer than for memory. A
# cluster needs more because its blocks wait for each other too.
_TURN_BYTES, _CLUSTER_TURN_BYTES = 20 * 1024, 28 * 1024

# _ROW_COST: the fixed instructions of a row cost a thread as much as 10 elements, plus 2 for each
# doubling of the cluster. _RATE: the elements at a time from which memory is the bottleneck.
_ROW_COST, _RATE = 10, {"forward": 3.2, "backward": 2.8}

# The most 2-byte elements in a thread of a bundle, by lanes of a row. One lane a row may have many:
# such lanes have no bank conflicts in shared memory.
_BUNDLE_ELEMENTS = {
    "forward": {1: 64, 8: 20, 16: 32, 32: 80},
    "backward": {1: 40, 2: 28, 8: 12, 16: 14, 32: 28},
}

# Bytes of a warp's bundle, by the warps of a block. In smaller bundles the copy engine reads too
# many cache lines twice.
_BUNDLE_WARPS = {"forward": (4,), "backward": (12, 8)}
_BUNDLE_BYTES = {4: 4800, 8: 8192, 12: 6656}


def in_flight(problem: Problem, tile: Tile) -> int:
    """Bytes of x that a multiprocessor has in flight."""
    row_bytes = cols_of_slice(problem, tile) * problem.itemsize * (1 + problem.residual)
    return tile.blocks_per_sm * tile.rows_per_block * row_bytes


def filled(problem: Problem, tile: Tile) -> float:
    """The share of a tile's packs that are inside the row. Packs beyond it cost as much."""
    return cols_of_slice(problem, tile) / tile.cols if tile.cols else 1.0


def register_tile(
    problem: Problem, device: Device, shapes: Iterable[Tile], most_bytes: int
) -> Tile | None:
    """Of tiles with the row in registers, the one with most bytes in flight and best filled packs.

    Of equals, the one with the most threads. Forward with too few bytes in flight, and to 8 bits,
    the one with long threads: the nearest to the wanted number of elements.
    """
    # Each single element takes an address and a register.
    most = most_bytes // (8 if problem.widest_pack == 1 else problem.itemsize)

    def score(tile: Tile) -> tuple[float, int]:
        moving = in_flight(problem, tile)
        # Blocks of a cluster wait for one another, so more bytes are always better for them.
        counted = moving if tile.cluster_size > 1 else min(moving, ENOUGH_BYTES)
        fit = filled(problem, tile) * (1.0 if tile.exact else 0.9)
        few = moving < ENOUGH_BYTES or tile.blocks_per_sm == 1
        long = problem.scaling is not None or (problem.forward and few)
        one_scale = problem.scaling in ("given", "tensor") and not problem.store
        wanted = 64 if one_scale else 54 if problem.scaling else 48
        return counted * fit, -abs(tile.elements - wanted) if long else tile.threads_per_row

    short = [tile for tile in shapes if tile.elements <= max(most, tile.pack_size)]
    tiles = [replace(tile, blocks_per_sm=blocks_that_fit(problem, device, tile)) for tile in short]
    return max((tile for tile in tiles if tile.blocks_per_sm), key=score, default=None)


def lanes_tile(problem: Problem, device: Device) -> Tile | None:
    """Rows in the registers of a warp, or of part of one."""
    pack_size, itemsize = problem.widest_pack, problem.itemsize
    pack_bytes, row_bytes = pack_size * itemsize, problem.num_cols * itemsize
    most_bytes = _WARP_ROW_BYTES[problem.direction][itemsize]
    if row_bytes > (_QUANTIZED_WARP_BYTES if is_only_quantized(problem) else most_bytes):
        return None
    # The lanes of a row load at least 64 bytes together, or half of a shorter row.
    fewest = min(64, row_bytes // 2, 32 * pack_bytes) // pack_bytes
    if problem.forward and pack_bytes == 2:
        fewest = min(32, row_bytes // 4) // pack_bytes  # with more, some lanes are idle
    # Small blocks end sooner, so the next ones start sooner.
    block_size = 64 if problem.forward and fewest > 2 else 128
    lanes = [lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= fewest]
    shapes = [shaped(problem, pack_size, at, rows_per_block=block_size // at) for at in lanes]
    return register_tile(problem, device, shapes, _LANE_BYTES[itemsize])


def block_tile(problem: Problem, device: Device, cluster_size: int = 1) -> Tile | None:
    """Rows in the registers of a block, or of the blocks of a cluster."""
    threads = range(32, (1024 if cluster_size == 1 else 512) + 1, 32)
    shapes = [shaped(problem, problem.widest_pack, count, cluster_size) for count in threads]
    most_bytes = _THREAD_BYTES[problem.direction][problem.itemsize]
    return register_tile(problem, device, shapes, most_bytes)


def cluster_tile(problem: Problem, device: Device) -> Tile | None:
    """The clusters with most bytes in flight; the smallest ones if blocks also exchange scales."""
    tiles = [tile for size, _ in device.clusters if (tile := block_tile(problem, device, size))]
    if problem.cols_of_scale is not None and problem.compute == "float32":
        return tiles[0] if tiles else None
    return max(tiles, key=lambda tile: in_flight(problem, tile), default=None)


def smem_tile(problem: Problem, device: Device, cluster_sizes: Iterable[int]) -> Tile | None:
    """The tile of path "smem", or None if no cluster of these sizes holds the row."""
    # Random words of a functor need more than the 128 registers of each of 512 threads.
    threads = 256 if problem.load else 512
    for size in cluster_sizes:
        tile = Tile(problem.widest_pack, threads, cluster_size=size, path="smem")
        if smem_bytes_of(problem, tile, "cluster") <= device.smem_per_block:
            return tile
    return None


def uncached_tile(problem: Problem, device: Device) -> Tile:
    """The tile of strategy "uncached", which takes any row."""
    # A functor needs more than the 64 registers of a thread with two blocks. With
    # dsum, RMSNorm of float32 rows needs a few more, on GPUs of compute capability 8.
    is_tight = problem.load or problem.store
    threads = 448 if problem.dsum == "float32" and not problem.centered else 512
    return Tile(problem.widest_pack, threads, blocks_per_sm=1 if is_tight else 2, path="uncached")


def ring_share(problem: Problem, tile: Tile) -> float:
    """An estimate of the share of memory bandwidth that the instructions of a tile allow."""
    warps = tile.block_size * tile.blocks_per_sm // 32
    # One warp less in one of a multiprocessor's four parts costs less than a whole turn.
    turns = ceil_div(warps, 4) if warps <= 4 else 0.75 * ceil_div(warps, 4) + 0.25 * warps / 4
    row_cost = _ROW_COST + 2 * (tile.cluster_size.bit_length() - 1)
    rate = filled(problem, tile) * warps * tile.elements / (turns * (tile.elements + row_cost))
    return min(1.0, rate * problem.itemsize / 2 / _RATE[problem.direction])


@lru_cache(maxsize=4096)
def ring_tile(problem: Problem, device: Device, sizes: tuple[int, ...]) -> Tile | None:
    """The best tile whose ring fits registers and shared memory."""
    # With small packs no warp has all columns of a block that share a scale.
    split = problem.scaling in ("block", "block64") and problem.widest_pack * problem.itemsize < 16
    rings = _rings(problem, device, sizes) if can_ring(problem, device) and not split else ()
    return max(rings, key=lambda tile: _ring_score(problem, tile), default=None)


def _rings(problem: Problem, device: Device, sizes: Iterable[int]) -> Iterator[Tile]:
    """Rings that fit, each with the best number of stages.

    A multiprocessor works on several rows at a time: forward in a block each, backward in one
    block, which writes one partial row of sums. Backward, the widest rows may have one stage, and
    16-bit rows of large clusters have three if they fit.
    """
    wanted = _RING_BYTES[problem.direction][problem.itemsize]
    most = _MOST_STAGES[problem.direction][problem.itemsize]
    for cluster_size, threads in product(sizes, range(32, _RING_THREADS + 1, 32)):
        tile = shaped(problem, problem.widest_pack, threads, cluster_size, path="ring")
        usual = _RING_ELEMENTS[problem.direction]
        if tile.elements > (_MOST_RING_ELEMENTS if cluster_size == 16 else usual):
            continue
        warps = warps_that_fit(device, registers_of_thread(problem, device, tile))
        fewest = 3 if cluster_size >= 8 and problem.itemsize == 2 and not problem.forward else 2
        for rows in range(1, min(12, _RING_THREADS // threads, warps * 32 // threads) + 1):
            turn_bytes = rows * tile.cols * sum(streamed(problem))
            turns = ceil_div(wanted, turn_bytes) if problem.forward else wanted // turn_bytes
            least = 1 if rows == 1 and cluster_size == 16 and not problem.forward else 2
            counts = {"blocks_per_sm": rows} if problem.forward else {"rows_per_block": rows}
            for stages in range(max(fewest, min(turns, most)), least - 1, -1):
                ring = replace(tile, stages=stages, **counts)
                if fits_smem(device, smem_bytes_of(problem, ring, "block"), ring.blocks_per_sm):
                    yield ring
                    break


def _ring_score(problem: Problem, tile: Tile) -> tuple:
    """An estimate of the tile's speed as a share of a copy's; of equals, few threads are better."""
    slice_bytes = cols_of_slice(problem, tile) * sum(streamed(problem))
    rows = tile.rows_per_block * tile.blocks_per_sm
    enough = _TURN_BYTES if tile.cluster_size == 1 else _CLUSTER_TURN_BYTES
    share = ring_share(problem, tile) * min(1.0, rows * slice_bytes / enough)
    share -= 0.01 * (tile.block_size * tile.blocks_per_sm < 256)
    share -= (0.06 - 0.05 * problem.forward) * (not tile.exact)
    share -= 0.01 * (tile.cluster_size.bit_length() - 1) + 0.05 * (tile.cluster_size == 16)
    share -= 0.001 * max(0, tile.elements - 32) * (not problem.forward)
    usual = tile.elements <= _RING_ELEMENTS[problem.direction] or tile.stages == 1
    return tile.stages > 1, usual, round(share, 3), -tile.block_size, tile.stages


def bundle_tile(problem: Problem, device: Device) -> Tile | None:
    """For rows that do not begin on 16 bytes, which threads would load in small packs."""
    itemsize, pack_size = problem.itemsize, problem.widest_pack
    small = pack_size * itemsize <= (8 if itemsize == 2 else 4)
    if not can_bundle(problem, device) or not small:
        return None
    pack_size = 1 if itemsize == 2 and not problem.forward else pack_size
    for lanes, most in _BUNDLE_ELEMENTS[problem.direction].items():
        tile = shaped(problem, pack_size, lanes)
        few = tile.elements * itemsize <= 2 * most
        if few and (tile := with_bundles(problem, device, tile)):
            return tile
    return None


def with_bundles(problem: Problem, device: Device, tile: Tile) -> Tile | None:
    """The tile with rows_per_block, bundle and blocks_per_sm set; None if no block fits."""
    lanes, row_bytes = tile.threads_per_row, problem.num_cols * problem.itemsize
    # Each group of lanes has the same number of rows of a bundle.
    of_row = row_bytes if problem.forward else len(streamed(problem)) * row_bytes + 8
    group_bytes = 32 // lanes * of_row
    for num_warps in _BUNDLE_WARPS[problem.direction]:
        rows = max(1, _BUNDLE_BYTES[num_warps] // max(1, group_bytes)) * (32 // lanes)
        per_block = num_warps * 32 // lanes
        bundled = replace(tile, rows_per_block=per_block, stages=2, bundle=rows, path="bundle")
        smem_bytes = smem_bytes_of(problem, bundled, "warp")
        blocks = blocks_that_fit(problem, device, bundled, smem_bytes)
        if smem_bytes <= device.smem_per_block and blocks:
            return replace(bundled, blocks_per_sm=blocks if problem.forward else 1)
    return None
