"""What fits a GPU, and which tile the model prefers for each path of a row.
Pure Python, no GPU needed.

abilities   which problems rings and bundles take: each function mirrors a condition of cuda_src
fits        registers, shared memory and warps of a tile. Shared memory is exact
prefers     enough bytes in flight, few idle lanes, and warps spread evenly, on any GPU. measured.py
            has tiles that measured faster on one. Measurements: docs/experiments.md
checks      whether a caller's tile fits: each raises a ValueError that explains it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from ..dtypes import DTYPES
from .devices import Device
from .problem import PATHS_OF_STRATEGY, SCALINGS, Problem, Tile, ceil_div, cols_of_slice

# The bytes of y that a thread keeps unpacked, at most, until the scale of an 8-bit row is known:
# the limit in register_row.cuh.
MOST_BYTES_MADE = 320


def streamed(problem: Problem) -> list[int]:
    """Itemsizes of the tensors that the copy engine fetches for each row."""
    of_backward = [problem.x, problem.dy, problem.dsum]
    names = [problem.x] * (1 + problem.residual) if problem.forward else of_backward
    return [DTYPES[name].itemsize for name in names if name]


def can_ring(problem: Problem, device: Device) -> bool:
    """Whether a ring can take the rows: it needs the copy engine, float32 sums and registers."""
    alone = {"input", "load"}
    fused = problem.extras & (alone if problem.forward else alone | {"store"})
    return not fused and problem.compute == "float32" and device.compute_capability >= 90


def can_bundle(problem: Problem, device: Device) -> bool:
    """Whether several rows are contiguous in each tensor, and results can overwrite x."""
    names = [problem.x, problem.y]
    if not problem.forward:
        names = [problem.x, problem.dy, problem.dx, problem.dsum or problem.x]
    sizes = {DTYPES[name].itemsize if name in DTYPES else None for name in names}
    beside = {"residual", "dsum", "wide", "round_x_hat"} | ({"store"} if problem.forward else set())
    plain = len(sizes) == 1 and problem.extras <= beside
    plain = plain and problem.layout.contiguous and problem.compute == "float32"
    return plain and device.compute_capability >= 90


def is_only_quantized(problem: Problem) -> bool:
    """Whether it is forward of 16-bit rows to 8 bits in packs of 16 bytes, with nothing fused."""
    aligned = problem.widest_pack == 8 and problem.itemsize == 2
    return bool(problem.scaling) and aligned and problem.extras <= {*SCALINGS, "amax"}


def scales_at_once(problem: Problem, tile: Tile, strategy: str) -> bool:
    """Whether one launch finds the scales of y and writes it.

    Otherwise one launch finds the amaxes and a second one writes y. For scales of blocks of columns
    one launch is enough if all of y is in registers and lanes of one warp hold each block. No
    slice of a cluster and no warp's part of a ring may end inside a block.
    """
    if problem.scaling not in ("block", "block64"):
        return problem.scaling != "tensor"
    block = problem.cols_of_scale
    if tile.path == "ring":
        return tile.exact == 1 and 32 * tile.pack_size % block == 0
    width = tile.pack_size * tile.threads_per_row
    is_whole = tile.exact == 1 and tile.cols % block == 0
    whole_slices = strategy in ("warp", "block") or (strategy == "cluster" and is_whole)
    bytes_made = tile.elements * DTYPES[problem.compute].itemsize
    by_warps = width % block == 0 and block <= 32 * tile.pack_size
    by_lanes = block % width == 0 and tile.threads_per_row <= 32
    return whole_slices and 0 < bytes_made <= MOST_BYTES_MADE and (by_warps or by_lanes)


RESERVED_BYTES = 1024  # of shared memory, which the hardware takes for each block


def reduce_bytes(problem: Problem, threads_per_row: int, cluster_size: int = 1) -> int:
    """BlockReduce (cluster_size 1) or ClusterReduce, as in reduce.cuh and cluster_reduce.cuh."""
    itemsize = DTYPES[problem.compute].itemsize
    parts = [threads_per_row // 32] + ([cluster_size] if cluster_size > 1 else [])
    return sum(ceil_div(2 * 3 * values * itemsize, 16) * 16 for values in parts)


def _ring_bytes(problem: Problem, tile: Tile) -> int:
    """WarpRing, Exchange, Broadcast and RingParameters, as in the headers of these names."""
    num_warps = tile.threads_per_row // 32
    sizes = streamed(problem)
    # A part that does not begin on 16 bytes is fetched in the aligned units that contain it.
    num_unaligned = num_warps * sum(tile.pack_size * size < 16 for size in sizes)
    row_bytes = tile.cols * sum(sizes) + 32 * num_unaligned
    rings = tile.rows_per_block * tile.stages * (row_bytes + 8 * num_warps)
    values = 3 if problem.forward and problem.centered else 2
    exchanged = [values] + [1] * (problem.scaling == "row")
    slots = sum(8 + 4 * each * num_warps * tile.cluster_size for each in exchanged)
    exchange = 4 * tile.rows_per_block * slots
    if problem.forward:
        rings, exchange = ceil_div(rings, 16) * 16, exchange + 48 * tile.rows_per_block
    parameters = 0
    if not problem.forward and tile.elements > 16:
        weight = problem.weight if problem.dx or problem.recomputed else None
        for itemsize in (DTYPES[name].itemsize for name in (weight, problem.bias) if name):
            packs = tile.packs_per_thread - (itemsize == 2)
            parameters += packs * tile.pack_size * tile.threads_per_row * itemsize
    return ceil_div(rings + exchange, 16) * 16 + parameters


def _bundle_bytes(problem: Problem, tile: Tile) -> int:
    """Bundles and BundleStream, as in cuda_src, or the sums that overwrite them at the end."""
    rows = [problem.num_cols * size for size in streamed(problem)]
    rows += [] if problem.forward else [4, 4]
    parts = 32 // tile.threads_per_row if tile.threads_per_row >= 8 else 1
    images = [ceil_div(tile.bundle // parts * row, 16) * 16 + 32 for row in rows]
    if parts > 1:  # each part has its own bank offset
        images = [image + (128 // parts - image) % 128 for image in images]
    num_warps = tile.block_size // 32
    sums = 0 if problem.forward or num_warps == 1 else 2 * num_warps * problem.num_cols * 4
    return max(num_warps * tile.stages * (parts * sum(images) + 8), sums)


def keeps_sums(tile: Tile) -> bool:
    """Backward: whether the kernel that writes dx also forms partial sums of dweight and dbias."""
    return tile.path != "uncached"


def smem_bytes_of(problem: Problem, tile: Tile, strategy: str) -> int:
    """Dynamic shared memory of one block."""
    itemsize, compute_bytes = problem.itemsize, DTYPES[problem.compute].itemsize
    if tile.path in ("ring", "bundle"):
        return (_ring_bytes if tile.path == "ring" else _bundle_bytes)(problem, tile)
    if strategy == "parameters":
        return 2 * tile.pack_size * tile.threads_per_row * tile.block_size // 32 * compute_bytes
    if strategy == "warp":
        sums_of = 0 if problem.forward or tile.block_size == 32 else tile.block_size // 32
        return 2 * sums_of * problem.num_cols * compute_bytes
    scratch = reduce_bytes(problem, tile.threads_per_row, tile.cluster_size)
    if tile.path != "smem":
        return scratch
    slice_cols = cols_of_slice(problem, tile)
    kept = [itemsize]
    if not problem.forward:
        kept += [DTYPES[problem.dy].itemsize] + [compute_bytes] * problem.num_sums
    return scratch + sum(ceil_div(slice_cols * size, 16) * 16 for size in kept)


def registers_of_thread(problem: Problem, device: Device, tile: Tile) -> int:
    """An estimate, from the compiler's reports, with which a thread spills at most 96 bytes. Fewer
    blocks without spills are slower (docs/experiments.md).

    A thread has a fixed number, some for each element of its row, and some for what is fused.
    Architectures other than sm_90 need a few more.
    """
    of_path = _registers_of_copied if tile.path in ("ring", "bundle") else _registers_of_loaded
    fixed, each = of_path(problem, device.compute_capability // 10, tile)
    # Forward, threads of rings and bundles keep their parameters, as do those that load them early.
    sizes = [DTYPES[name].itemsize for name in (problem.weight, problem.bias) if name]
    if problem.forward and (tile.path == "ring" or tile.early):
        each += sum(max(size, 4) if tile.pack_size == 1 else size for size in sizes) / 4
    elif tile.path == "bundle":
        wider = sum(size if size > 4 else size - 2 for size in sizes)
        each += (0.27 if problem.forward else 0.5) * wider
    return int(fixed + each * tile.elements)


def _registers_of_copied(problem: Problem, sm: int, tile: Tile) -> tuple[float, float]:
    """Fixed and for each element, of a thread whose rows the copy engine fetches."""
    single = tile.pack_size == 1
    if tile.path == "ring" and problem.forward:
        finds_scale = bool(problem.extras & {"row", "block"})
        fixed = 104 + 24 * finds_scale * (1 + problem.residual)
        if tile.elements > 40 and tile.pack_size * problem.itemsize < 16:
            fixed += (75 if single else 8) * problem.residual
            fixed += single * ("row" in problem.extras) * max(0, 1.5 * tile.elements - 56)
        return fixed, 0
    if tile.path == "ring":
        return 60 - 20 * (tile.elements > 40 and not single), 3.375 + 0.75 * single
    fixed = 37 + 8 * (sm == 10) + 16 * (sm == 12)
    if not problem.forward:
        return fixed, 5.2 if problem.x == "float16" else 4.7
    is_small = tile.pack_size * problem.itemsize < 8 and 1 < tile.threads_per_row < 32
    fixed += is_small * (7 + 20 * (problem.has_wide_parameters or problem.itemsize == 4))
    each = 1.9 + 0.25 * (tile.threads_per_row == 1)
    return fixed + problem.residual * max(24, tile.elements), each


def _registers_of_loaded(problem: Problem, sm: int, tile: Tile) -> tuple[float, float]:
    """Fixed and for each element, of a thread that loads its part of a row itself."""
    fused, elements, itemsize = problem.extras, tile.elements, problem.itemsize
    wide, double, long = "wide" in fused, problem.compute == "float64", elements > 40
    single = tile.pack_size == 1 and not double
    small = tile.pack_size * itemsize < 16 and not single
    if not problem.forward:
        each = 11.6 if double else 5.25 + 0.25 * (sm > 9 and problem.x == "bfloat16")
        each += 0.35 * (sm != 9) * (1 + (problem.x == "float16")) + 1.5 * single + 1.8 * small
        each += wide * (0.8 if itemsize == 4 else 0.25) + 0.5 * (problem.dsum == "float32")
        each += 2.75 * (not double and "float64" in (problem.weight, problem.bias))
        fixed = 36 + 8 * single + 40 * (sm == 10 and elements > 24) + 8 * bool(problem.recomputed)
        fixed += bool(problem.dsum) * (6 + 2 * (sm != 9) + 16 * (elements > 32))
        fixed += 16 * bool(fused & {"dresidual", "input"})
        return fixed + (24 * ("load" in fused) + 72 * ("store" in fused)) * (1 + double), each
    finds_scale, lanes = bool(fused & {"row", "block"}), tile.rows_per_block > 1
    if is_only_quantized(problem) and tile.cluster_size == 1:
        if not finds_scale:
            few = 8 * (sm != 9) - 8 * (sm == 9 and 40 < elements < 64)
            return min(32 + few, 128 - elements), 1.0
        fixed = 47.5 - 16 * tile.exact + 8 * (sm != 9)
        return fixed + ("block" in fused and lanes) * (8 + 22 * (elements > 32)), 1.26
    each = {2: 1.0, 4: 1.25, 8: 2.5}[itemsize] + 1.5 * single + small * wide
    each += small * lanes * (elements > 32) + 0.15 * (long and itemsize == 2)
    fixed = 40 + 8 * single + small * (6 + 2 * max(0, elements - 32))
    fixed += 14 * (lanes and elements > 32)
    fixed += 8 * wide + 8 * problem.residual * (1 + (elements > 24)) + 16 * ("input" in fused)
    fixed += 8 * (sm == 8) * ((elements > 24) + wide + (problem.residual and single))
    fixed += 40 * ("store" in fused) * (1 + double)
    fixed += (24 + 16 * long + 32 * single) * ("load" in fused) * (1 + double)
    if problem.scaling and problem.scaling != "given":
        each += 0.25 * finds_scale * (1 + (itemsize > 2)) + 1.5 * (single and sm == 8)
        each += 4.0 * (double and "block" in fused)
        fixed += 8 + 16 * finds_scale + 8 * (sm > 9) + 32 * long
        fixed += 24 * single * finds_scale + 32 * problem.residual * (single or small or wide)
    elif problem.scaling:
        fixed += 8 * (small and elements > 24)
    # If no pack is beyond the row's end, there are no bounds to check.
    if tile.exact and elements <= 48 and itemsize == 2 and sm >= 9 and not fused:
        fixed -= 16 * (tile.threads_per_row <= 4 and elements == 16)
        if 32 < tile.threads_per_row <= 512 and elements >= 32:
            fixed -= 8 + small * (6 + 2 * (elements - 32))
    return fixed, each


def warps_that_fit(device: Device, registers: int) -> int:
    """Warps with so many registers a thread that fit the four parts of a multiprocessor."""
    registers = ceil_div(registers, 8) * 8
    return 0 if registers > 256 else 4 * (device.registers_per_sm // 4 // 32 // registers)


def blocks_that_fit(problem: Problem, device: Device, tile: Tile, smem_bytes: int = 0) -> int:
    """Blocks that fit a multiprocessor, 0 if not even one does."""
    warps = warps_that_fit(device, registers_of_thread(problem, device, tile))
    threads = min(warps * 32, device.threads_per_sm)
    return min(threads // tile.block_size, device.smem_per_sm // (smem_bytes + RESERVED_BYTES), 32)


def fits_smem(device: Device, smem_bytes: int, blocks_per_sm: int) -> bool:
    """Whether so many blocks with so much dynamic shared memory fit a multiprocessor."""
    of_blocks = blocks_per_sm * (smem_bytes + RESERVED_BYTES)
    return smem_bytes <= device.smem_per_block and of_blocks <= device.smem_per_sm


def shaped(
    problem: Problem, pack_size: int, threads_per_row: int, cluster_size: int = 1, **counts: object
) -> Tile:
    """The tile with these threads, and as many packs as a row, or a block's slice of it, needs."""
    counts = {"path": "registers", "cluster_size": cluster_size, **counts}
    tile = Tile(pack_size, threads_per_row, 1, **counts)
    packs = max(1, ceil_div(cols_of_slice(problem, tile), tile.cols))
    exact = int(tile.cols * packs * cluster_size == problem.num_cols)
    return replace(tile, packs_per_thread=packs, exact=exact)


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
# With a scale that is known, by the bytes of a row up to these: the most elements of a thread, the
# wanted ones, and the bytes in flight that are enough.
_QUANTIZED_BYTES = (_QUANTIZED_WARP_BYTES, 16 * 1024)
_QUANTIZED_TILES = ((56, 40, ENOUGH_BYTES), (64, 64, 80 * 1024), (104, 64, 80 * 1024))

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
# Forward, the share that a cluster loses whose blocks are alone on a multiprocessor: nothing hides
# the turn in which they exchange sums.
_ALONE = 0.04
_ROW_COST, _RATE = 10, {"forward": 3.2, "backward": 2.8}

# The most 2-byte elements in a thread of a bundle, by lanes of a row. One lane a row may have many,
# without bank conflicts in shared memory. 4 lanes are for packs of several elements.
_BUNDLE_ELEMENTS = {
    "forward": {1: 68, 4: 28, 8: 20, 16: 32, 32: 80},
    "backward": {1: 40, 2: 28, 8: 12, 16: 14, 32: 28},
}

# Bytes of a warp's bundle, by the warps of a block. In smaller bundles the copy engine reads too
# many cache lines twice. Backward, 8 warps are better for 3 tensors, and for long threads.
_BUNDLE_BYTES = {4: 4800, 8: 9216, 12: 6656}
_LONG_BUNDLE_ELEMENTS = 18


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
    enough, wanted, if_inexact = ENOUGH_BYTES, 54 if problem.scaling else 48, 0.9
    if problem.scaling in ("given", "tensor") and not problem.store:
        wanted = 64
        if is_only_quantized(problem):
            row_bytes = problem.num_cols * problem.itemsize
            at = bisect_left(_QUANTIZED_BYTES, row_bytes)
            most, wanted, enough = _QUANTIZED_TILES[at]
            if row_bytes <= (_QUANTIZED_WARP_BYTES if problem.x == "float16" else 704):
                most = min(most, 40)  # 192 columns: 24 elements take 0.87 of the time of 48
            if_inexact = 0.8

    def score(tile: Tile) -> tuple[float, int]:
        moving = in_flight(problem, tile)
        # Blocks of a cluster wait for one another, so more bytes are always better for them.
        counted = moving if tile.cluster_size > 1 else min(moving, enough)
        fit = filled(problem, tile) * (1.0 if tile.exact else if_inexact)
        few = moving < ENOUGH_BYTES or tile.blocks_per_sm == 1
        long = problem.scaling is not None or (problem.forward and few)
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
        for rows in range(1, min(12, _RING_THREADS // threads, warps * 32 // threads) + 1):
            turn_bytes = rows * tile.cols * sum(streamed(problem))
            turns = ceil_div(wanted, turn_bytes) if problem.forward else wanted // turn_bytes
            least = 1 if rows == 1 and cluster_size == 16 and not problem.forward else 2
            counts = {"blocks_per_sm": rows} if problem.forward else {"rows_per_block": rows}
            for stages in range(max(3, min(turns, most)), least - 1, -1):
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
    share -= _ALONE * (problem.forward and tile.cluster_size > 1 and tile.blocks_per_sm == 1)
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
        if lanes == 4 and pack_size == 1:
            continue
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
    is_long = not problem.forward and lanes == 32 and tile.elements > _LONG_BUNDLE_ELEMENTS
    counts = (4,) if problem.forward else (8,) if is_long or problem.dsum else (12, 8)
    for num_warps, stages in product(counts, (3, 2) if is_long else (2,)):
        rows = max(1, _BUNDLE_BYTES[num_warps] // max(1, group_bytes)) * (32 // lanes)
        per_block = num_warps * 32 // lanes
        bundled = replace(tile, rows_per_block=per_block, stages=stages, bundle=rows, path="bundle")
        smem_bytes = smem_bytes_of(problem, bundled, "warp")
        blocks = blocks_that_fit(problem, device, bundled, smem_bytes)
        if smem_bytes <= device.smem_per_block and blocks:
            return replace(bundled, blocks_per_sm=blocks if problem.forward else 1)
    return None


def check_tile(problem: Problem, strategy: str, tile: Tile, device: Device) -> None:
    """Raise a ValueError that says what does not fit."""
    for misfit in _misfits(problem, strategy, tile, device):
        raise ValueError(f"tile {misfit}")


def fits(problem: Problem, strategy: str, tile: Tile, device: Device) -> bool:
    """Whether check_tile would raise nothing."""
    return not any(_misfits(problem, strategy, tile, device))


def check_path(strategy: str, tile: Tile) -> None:
    """Raise a ValueError if the path does not fit the strategy, or the counts the path."""
    for misfit in _misfits_of_path(strategy, tile):
        raise ValueError(f"tile {misfit}")


def _misfits(problem: Problem, strategy: str, tile: Tile, device: Device) -> Iterator[str]:
    """What does not fit. What follows the first need not make sense."""
    threads, rows, num_cols = tile.threads_per_row, tile.rows_per_block, problem.num_cols
    packs, stages, backward = tile.packs_per_thread, tile.stages, not problem.forward
    is_power_of_two = {1 << bit for bit in range(10)}.__contains__
    limit, of_row = problem.layout.pack_limit, f"has threads_per_row {threads}"
    if not is_power_of_two(tile.pack_size) or tile.pack_size > limit:
        yield (
            f"has pack_size {tile.pack_size}; expected a power of two up to {limit}, which "
            f"num_cols {num_cols} and the alignment of the arrays allow"
        )
    if threads < 1 or rows < 1 or tile.block_size > 1024 or tile.block_size % 32:
        expected = "a product that is a multiple of 32 up to 1024"
        yield f"{of_row} and rows_per_block {rows}; expected {expected}"
    if strategy == "warp" and (threads > 32 or not is_power_of_two(threads)):
        yield f"{of_row}; expected a power of two up to 32 for strategy 'warp'"
    if strategy != "warp" and not stages and rows != 1:
        why = f"without stages strategy {strategy!r} works on one row a block"
        yield f"has rows_per_block {rows}; expected 1: {why}"
    blocks = f"has cluster_size {tile.cluster_size}; expected"
    if strategy == "cluster" and tile.cluster_size not in dict(device.clusters):
        sizes = ", ".join(str(size) for size, _ in device.clusters)
        yield f"{blocks} one of {sizes}, the clusters that {device.name} runs"
    if strategy != "cluster" and tile.cluster_size != 1:
        yield f"{blocks} 1: strategy {strategy!r} has no clusters"

    in_registers = strategy == "warp" or (strategy == "block" and backward)
    in_registers = in_registers or tile.path not in ("smem", "uncached")
    slice_cols = cols_of_slice(problem, tile)
    if in_registers and tile.cols < slice_cols:
        counts = (
            f"pack_size {tile.pack_size} x threads_per_row {threads} x packs_per_thread {packs}"
        )
        each = " for each block" * (strategy == "cluster")
        yield f"holds {tile.cols} columns ({counts}); expected {slice_cols} or more{each}"
    if in_registers and tile.cols - tile.pack_size * threads >= max(slice_cols, 1):
        why = f"the last pack of every thread is beyond the {slice_cols} columns of its block"
        yield f"has packs_per_thread {packs}; expected fewer: {why}"
    if in_registers and tile.elements > 256:
        kept = f"keeps {tile.elements} elements in each thread"
        yield f"{kept}; expected fewer than its 255 registers"
    if packs and not in_registers:
        yield f"has packs_per_thread {packs}; expected 0: here the row is not kept in registers"
    fills = tile.cols * tile.cluster_size == num_cols and in_registers
    if tile.exact not in (0, 1) or (tile.exact and not fills):
        why = f"for a row that fills the {tile.cols} columns of the registers"
        yield f"has exact {tile.exact}; expected 1 {why}, else 0"
    if tile.blocks_per_sm < 1 or tile.blocks_per_sm * tile.block_size > device.threads_per_sm:
        yield (
            f"has blocks_per_sm {tile.blocks_per_sm} and blocks of {tile.block_size} threads; "
            f"expected 1 to {device.threads_per_sm} threads on a multiprocessor of {device.name}"
        )
    takes_early = problem.forward and not problem.scaling and tile.path == "registers"
    if tile.early not in (0, int(takes_early and strategy in ("warp", "block"))):
        yield (
            f"has early {tile.early}; expected 1 only for forward of strategies 'warp' and "
            "'block' with rows in registers and no 8-bit y, else 0"
        )

    bundled, groups = tile.path == "bundle", 32 // min(threads, 32)
    if bundled and (tile.bundle < 1 or tile.bundle % groups or stages < 1 or strategy != "warp"):
        yield (
            f"has bundle {tile.bundle} and stages {stages}; bundles belong to strategy 'warp', "
            f"with stages, and with threads_per_row {threads} have a multiple of {groups} rows"
        )
    if bundled and not can_bundle(problem, device):
        yield (
            f"has bundle {tile.bundle}; bundles need float32 arithmetic, sm_90 or later for "
            "the copy engine, rows without gaps between them, tensors of one itemsize, and "
            "nothing that is fused with the norm"
        )
    enough = stages >= (1 if backward and rows == 1 else 2) and packs
    if stages and not bundled and not (enough and strategy in ("block", "cluster")):
        yield (
            f"has stages {stages}, rows_per_block {rows}, packs_per_thread {packs}; expected 2 or "
            "more stages of a ring, or backward 1 for one row a block, and 1 or more packs, with "
            "strategy 'block' or 'cluster'"
        )
    if tile.path == "ring" and not can_ring(problem, device):
        yield (
            f"has stages {stages}; a ring needs float32 arithmetic, sm_90 or later for the copy "
            "engine, no residual of another dtype, and no functor on x, nor backward on y"
        )
    yield from _misfits_of_path(strategy, tile)
    smem_bytes, most = smem_bytes_of(problem, tile, strategy), device.smem_per_block
    if smem_bytes > most:
        yield f"needs {smem_bytes} bytes of shared memory a block, {device.name} has {most}"


def _misfits_of_path(strategy: str, tile: Tile) -> Iterator[str]:
    path, streams = f"path {tile.path!r}", tile.path in ("ring", "bundle")
    if tile.path not in (paths := PATHS_OF_STRATEGY[strategy]):
        yield f"has {path}; expected one of {', '.join(paths)} for strategy {strategy!r}"
    if tile.stages and not streams:
        yield f"has stages {tile.stages}; expected 0: {path} has none"
    if streams and not tile.stages:
        yield f"has {path} and stages 0; expected 1 or more stages"
    if tile.bundle and tile.path != "bundle":
        yield f"has bundle {tile.bundle}; expected 0: {path} has none"
    by_counts = replace(tile, path=None).of_strategy(strategy).path
    if tile.path != by_counts:
        yield f"has {path}; expected {by_counts!r}, which its counts describe"
