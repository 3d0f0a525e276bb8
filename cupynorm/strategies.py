"""The table STRATEGIES: where a row waits between its uses, and the tile for a problem. Pure Python, no GPU needed.

The tiles: cupynorm.registers, cupynorm.bundles, cupynorm.rings. Every tuned number stands beside what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .bundles import bundle_bytes, bundle_tile
from .devices import Device
from .dtypes import DTYPES
from .problem import Problem, Tile, ceil_div, cols_of_slice, is_ring, is_staged
from .quantized_registers import MOST_BYTES_MADE, ahead_registers, is_common_quantized
from .registers import BLOCK_BYTES, lanes_tile, long_tile, register_tile
from .rings import beats_one_quantized_block, ring_bytes, ring_clusters, ring_tile, suits_block, wants_ring
from .staged import staged_bytes, staged_tile


@dataclass(frozen=True)
class Strategy:
    """One row of the dispatch table: where a row waits between its uses, and the tile for a problem,
    or None if the row does not fit.

    gives_way: whether a later strategy is faster although this one is wide enough.
    """

    name: str
    row_waits: str
    tile: Callable[[Problem, Device], Tile | None]
    first_capability: int = 0
    gives_way: Callable[[Problem, Device, Tile], bool] = lambda problem, device, tile: False


_BLOCK_THREADS = 512

# Where the row waits in shared memory: random words need more than the 128 registers that 512 threads have.
_DROPOUT_THREADS = 256


def _warp_tile(problem: Problem, device: Device) -> Tile | None:
    return bundle_tile(problem, device) or lanes_tile(problem, device)


def _warp_gives_way(problem: Problem, device: Device, tile: Tile) -> bool:
    # A whole warp is sooner where it is a block (to 8 bits at given scales, 2048 columns: 1.00, two warps a block 0.95).
    if is_common_quantized(problem, device):
        if tile.threads_per_row == 32:
            return True
        # And where a whole one fetches its next row (768 columns by row: 0.98, 16 lanes 0.95).
        if problem.num_cols % 256 == 0 and ahead_registers(problem, Tile(8, 32, problem.num_cols // 256, exact=1)):
            return True
    return not tile.bundle and wants_ring(problem, tile) and ring_tile(problem, device, (1,)) is not None


def reduce_bytes(problem: Problem, threads_per_row: int, cluster_size: int = 1) -> int:
    """Shared memory of BlockReduce (cluster_size 1) or ClusterReduce, as in cuda_src/reduce.cuh."""
    itemsize = DTYPES[problem.compute].itemsize
    parts = [threads_per_row // 32] + ([cluster_size] if cluster_size > 1 else [])
    return sum(ceil_div(2 * 3 * values * itemsize, 16) * 16 for values in parts)


def smem_bytes_of(problem: Problem, tile: Tile, strategy: str) -> int:
    """Dynamic shared memory of one block."""
    compute_bytes = DTYPES[problem.compute].itemsize
    if tile.bundle:
        return bundle_bytes(problem, tile)
    if is_ring(problem, tile):
        return ring_bytes(problem, tile)
    if strategy == "parameters":
        return 2 * tile.pack_size * tile.threads_per_row * tile.block_size // 32 * compute_bytes
    if strategy == "warp":
        num_warps = tile.block_size // 32
        return 0 if problem.forward or num_warps == 1 else 2 * num_warps * problem.num_cols * compute_bytes
    if strategy == "uncached" or (strategy == "block" and not problem.forward):
        return reduce_bytes(problem, tile.threads_per_row)
    scratch = reduce_bytes(problem, tile.threads_per_row, tile.cluster_size)
    if is_staged(problem, tile):
        return scratch + staged_bytes(problem, tile)
    if tile.packs_per_thread:
        return scratch
    slice_cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size)
    kept = [DTYPES[problem.x].itemsize]
    if not problem.forward:
        kept += [DTYPES[problem.dy].itemsize]
        kept += [compute_bytes] * (bool(problem.dweight) + bool(problem.dbias))
    return scratch + sum(ceil_div(slice_cols * itemsize, 16) * 16 for itemsize in kept)


def _bytes_made(problem: Problem, tile: Tile) -> int:
    return tile.pack_size * tile.packs_per_thread * DTYPES[problem.compute].itemsize


def scales_at_once(problem: Problem, tile: Tile, strategy: str) -> bool:
    """Whether one launch finds the scales of y and writes it; else one finds the amaxes and a second writes.

    The lanes of a warp find those of blocks, where all of y waits in registers, and where no slice of a cluster and no warp's
    part of a ring ends in a block.
    """
    if problem.scaling not in ("block", "mx"):
        return problem.scaling != "tensor"
    block = problem.cols_of_scale
    if is_ring(problem, tile):
        return tile.exact == 1 and 32 * tile.pack_size % block == 0
    width = tile.pack_size * tile.threads_per_row
    whole_slices = strategy in ("warp", "block") or (strategy == "cluster" and tile.exact)
    in_registers = whole_slices and 0 < _bytes_made(problem, tile) <= MOST_BYTES_MADE
    by_warps = width % block == 0 and block <= 32 * tile.pack_size
    return in_registers and (by_warps or (block % width == 0 and tile.threads_per_row <= 32))


def _smem_threads(problem: Problem) -> int:
    return _DROPOUT_THREADS if problem.dropout else _BLOCK_THREADS


def _beats_registers(problem: Problem, ring: Tile, registers: Tile | None) -> bool:
    """Of a ring that is wanted: to 8 bits not each."""
    return registers is None or not problem.scaling or beats_one_quantized_block(problem, ring, registers)


def _block_tile(problem: Problem, device: Device) -> Tile | None:
    tile = register_tile(
        problem,
        device,
        range(32, 1024 + 1, 32),
        BLOCK_BYTES[problem.direction][DTYPES[problem.x].itemsize],
        1,
    )
    long = long_tile(problem, device)
    if long is not None and problem.scaling:
        return staged_tile(problem, device, tile) or long  # staged: LayerNorm of 20,480 columns at a given scale
    if long is not None and (tile is None or tile.blocks_per_sm < 3 or wants_ring(problem, tile)):
        return long
    ring = ring_tile(problem, device, (1,)) if wants_ring(problem, tile) else None
    if ring is not None and _beats_registers(problem, ring, tile):
        return ring
    if (staged := staged_tile(problem, device, tile)) is not None:
        return staged
    if tile is not None or not problem.forward:
        return tile
    if device.clusters:
        return None  # a cluster's registers are faster than one block's shared memory (H200, bf16: 65536 columns 0.61, 0.54)
    tile = Tile(problem.widest_pack, _smem_threads(problem))
    return tile if smem_bytes_of(problem, tile, "block") <= device.smem_per_block else None


def _block_gives_way(problem: Problem, device: Device, tile: Tile) -> bool:
    if tile == long_tile(problem, device):
        return False
    if is_staged(problem, tile) or (tile.stages and suits_block(problem)):
        return False
    if not (tile.stages or wants_ring(problem, tile)):
        return False
    ring = ring_tile(problem, device, ring_clusters(problem, device))
    return ring is not None and (tile.stages > 0 or _beats_registers(problem, ring, tile))


def _cluster_tile(problem: Problem, device: Device) -> Tile | None:
    ring = ring_tile(problem, device, ring_clusters(problem, device))
    if ring is not None:
        return ring
    itemsize = DTYPES[problem.x].itemsize
    max_bytes = BLOCK_BYTES[problem.direction][itemsize]
    # The most bytes in flight; where clusters of several sizes have as many, this order. Backward of 16-bit rows spends so
    # little time on a row's bytes that several small blocks a multiprocessor are needed to hide the exchange (H200, bf16: 16384
    # columns 0.73 of a copy on clusters of 8, 0.69 on 2; fp32: 0.79 and 0.86).
    order = (8, 4, 2, 16) if itemsize == 2 and not problem.forward else (2, 4, 8, 16)
    best, best_score = None, (0, False)
    # To find the scale of a row its blocks wait for each other once more: the smallest clusters (65,536 columns: clusters of 2
    # 0.43, of 16 0.26).
    smallest = problem.cols_of_scale is not None and problem.compute == "float32"
    for cluster_size in (size for size in order if size in dict(device.clusters)):
        tile = register_tile(problem, device, range(32, 512 + 1, 32), max_bytes, 1, cluster_size)
        if tile is not None and smallest:
            return tile
        if tile is not None:
            in_flight = cols_of_slice(problem, tile.pack_size, cluster_size) * tile.blocks_per_sm * (10 if tile.exact else 9)
            score = (in_flight, order[0] == 8 and tile.blocks_per_sm > 1)
            if score > best_score:
                best, best_score = tile, score
    if best is not None:
        return best
    for cluster_size, _ in device.clusters:
        tile = Tile(problem.widest_pack, _smem_threads(problem), cluster_size=cluster_size)
        if smem_bytes_of(problem, tile, "cluster") <= device.smem_per_block:
            return tile
    return None


def _uncached_tile(problem: Problem, device: Device) -> Tile:
    return Tile(problem.widest_pack, 512, blocks_per_sm=1 if problem.y1 else 2)  # two outputs need more than 64 registers


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("warp", "in the registers of a warp, or of part of one", _warp_tile, gives_way=_warp_gives_way),
        Strategy("block", "in one block's registers or shared memory", _block_tile, gives_way=_block_gives_way),
        Strategy("cluster", "in the registers or shared memory of a thread-block cluster", _cluster_tile, first_capability=90),
        Strategy("uncached", "nowhere: it is read again", _uncached_tile),
    )
}

STATISTICS = ("two_pass", "welford")
