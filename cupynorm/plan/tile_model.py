"""What a tile needs of a multiprocessor: registers, shared memory and warps.
Pure Python, no GPU needed.

Shared memory is exact: each function mirrors a struct of cuda_src. Registers are upper bounds,
from the values that a thread keeps for each element. Tests compile the chosen tiles and check that
they do not spill.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache, lru_cache
from itertools import combinations
from pathlib import Path

from ..dtypes import DTYPES
from .abilities import is_only_quantized, streamed
from .devices import Device
from .problem import Problem, Tile, ceil_div, cols_of_slice

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


def keeps_sums(problem: Problem, tile: Tile) -> bool:
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


@cache
def _register_table() -> dict[tuple[str, str], tuple[float, float]]:
    """The registers that words add, fixed and for each element: upper bounds without spills."""
    with (Path(__file__).parent / "registers.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
        return {(kind, words): (float(fixed), float(each)) for kind, words, fixed, each in rows}


@lru_cache(maxsize=1024)
def _registers_of_words(kind: str, words: frozenset[str]) -> tuple[float, float]:
    """The sums over the words, and over each two and each three of them in their order."""
    table = _register_table()
    groups = (group for size in (1, 2, 3) for group in combinations(sorted(words), size))
    names = [(kind, " ".join(group)) for group in groups]
    fixed, each = zip(*(table[name] for name in names if name in table))
    return sum(fixed), sum(each)


def registers_of_thread(problem: Problem, device: Device, tile: Tile) -> int:
    """An upper bound of the registers that a thread needs without spills: a line of registers.csv.

    Its words are the dtype of x, what is fused, and what follows here of the tile and the device.
    """
    itemsize, kind = problem.itemsize, problem.direction
    small = tile.pack_size * itemsize < (8 if tile.path == "bundle" else 16)
    words = {problem.x, *problem.extras, f"sm_{device.compute_capability // 10 * 10}"}
    words |= {"weight64"} if problem.weight == "float64" and itemsize < 8 else set()
    words |= {"single" if tile.pack_size == 1 else "small"} if small else set()
    words |= {f"over {count}" for count in (24, 32, 40) if tile.elements > count}
    if tile.path in ("ring", "bundle"):
        kind += f" {tile.path}"
        words |= {"one lane"} if tile.threads_per_row == 1 else set()
        words |= {"lanes"} if 1 < tile.threads_per_row < 32 else set()
    else:
        words |= {"lanes"} if tile.rows_per_block > 1 else set()
        kind += " to 8 bits" * (is_only_quantized(problem) and tile.cluster_size == 1)
        # If no pack is beyond the row's end, there are no bounds to check.
        few_lanes = tile.threads_per_row <= 4 and tile.elements == 16
        bare = kind == "forward" and itemsize == 2 and device.compute_capability >= 90
        long = 32 < tile.threads_per_row <= 512 and tile.elements >= 32
        bare = bare and not problem.extras and (few_lanes or long)
        if tile.exact and tile.elements <= 48 and (bare or " to " in kind):
            words.add("exact")
    fixed, each = _registers_of_words(kind, frozenset(words))
    # Forward, threads of rings and bundles keep their parameters, as do those that load them early.
    kept = [problem.weight, problem.bias]
    sizes = [DTYPES[name].itemsize for name in kept if name]
    if kind == "forward ring" or tile.early:
        each += sum(max(size, 4) if tile.pack_size == 1 else size for size in sizes) / 4
    if tile.path == "bundle":
        wider = sum(size - 2 for size in sizes)
        each += (0.27 if problem.forward else 0.5) * wider
        fixed -= wider / 2 * problem.forward
    return int(fixed + each * tile.elements)


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
