"""What a tile needs of a multiprocessor: registers, shared memory and warps.
Pure Python, no GPU needed.

Shared memory is exact: each function mirrors a struct of cuda_src. Registers are upper bounds,
from the values that a thread keeps for each element. Tests compile the chosen tiles and check that
they do not spill.
"""

from __future__ import annotations

import csv
from functools import cache, lru_cache
from itertools import combinations
from pathlib import Path

from ..dtypes import DTYPES
from .abilities import is_only_quantized, streamed
from .devices import Device
from .problem import Problem, Tile, ceil_div, cols_of_slice

# The hardware reserves 1024 bytes of shared memory for each block.
RESERVED_BYTES = 1024

# Path grid, as in grid_shape.cuh and grid_words.cuh: warps of a block that exchange sums, and slots
# for them; all the shared memory of a block; registers of a thread for one step, by its
# packs, while the others keep weights and sums. The most groups of blocks that share a row.
GRID_EXCHANGERS, _GRID_SLOTS, _GRID_BYTES, _STEP_REGISTERS = 4, 8, 227 * 1024, {1: 80, 2: 96}
MOST_GRID_GROUPS, FEWEST_GRID_STAGES = 16, 4


def can_share_grid(problem: Problem) -> bool:
    """Whether all blocks of a grid can share rows. Asynchronous copies have 4 to 16 bytes."""
    plain = problem.compute == "float32" and problem.extras <= {"wide"}
    copied = all(4 <= problem.widest_pack * size <= 16 for size in streamed(problem))
    return plain and copied and bool(problem.forward or problem.dx)


def keeps_sums(problem: Problem, tile: Tile) -> bool:
    """Backward: whether the kernel that writes dx also forms partial sums of dweight and dbias.

    On path grid it does if they fit beside the stages.
    """
    if tile.path != "grid":
        return tile.path != "uncached"
    used = _exchange_bytes(problem, tile) + tile.stages * _slot_bytes(problem, tile)
    return used + _grid_sum_bytes(problem, tile) <= _GRID_BYTES


# Shared memory.


def reduce_bytes(problem: Problem, threads_per_row: int, cluster_size: int = 1) -> int:
    """BlockReduce (cluster_size 1) or ClusterReduce, as in reduce.cuh and cluster_reduce.cuh."""
    itemsize = DTYPES[problem.compute].itemsize
    parts = [threads_per_row // 32] + ([cluster_size] if cluster_size > 1 else [])
    return sum(ceil_div(2 * 3 * values * itemsize, 16) * 16 for values in parts)


def _ring_bytes(problem: Problem, tile: Tile) -> int:
    """WarpRing, Exchange, Broadcast and RingParameters, as in the headers of these names."""
    num_warps = tile.threads_per_row // 32
    # A part that does not begin on 16 bytes is fetched in the aligned units that contain it.
    row_bytes = sum(
        tile.cols * size + (tile.pack_size * size < 16) * 32 * num_warps
        for size in streamed(problem)
    )
    rings = tile.rows_per_block * tile.stages * (row_bytes + 8 * num_warps)
    values = 3 if problem.forward and problem.centered else 2
    exchanged = [values] + [1] * (problem.scaling == "row")
    exchange = (
        tile.rows_per_block
        * 4
        * sum(8 + 4 * each * num_warps * tile.cluster_size for each in exchanged)
    )
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


def _grid_bytes(problem: Problem, tile: Tile) -> int:
    """All that a block can have: for GridExchange, slots, sums, and then parameters."""
    sums = _grid_sum_bytes(problem, tile) if keeps_sums(problem, tile) else 0
    used = _exchange_bytes(problem, tile) + tile.stages * _slot_bytes(problem, tile) + sums
    return max(used, _GRID_BYTES)


def _exchange_bytes(problem: Problem, tile: Tile) -> int:
    parts = (3 if problem.centered else 1) if problem.forward else 2
    num_warps = tile.threads_per_row // 32 - GRID_EXCHANGERS
    return ceil_div(_GRID_SLOTS * (parts * (num_warps + 1) * 4 + 16), 16) * 16


def _slot_bytes(problem: Problem, tile: Tile) -> int:
    """The packs of one step of each worker."""
    workers = tile.threads_per_row - 32 * GRID_EXCHANGERS
    return packs_at_once(tile) * tile.pack_size * workers * sum(streamed(problem))


def grid_stages(problem: Problem, tile: Tile, sums: bool) -> int:
    """Path grid: the most stages that fit beside parameters, and the sums of dweight and dbias.

    If too few are left for a row, some parameters are read again for each row.
    """
    left = _GRID_BYTES - _exchange_bytes(problem, tile)
    left -= _grid_sum_bytes(problem, tile) if sums else 0
    slot_bytes = _slot_bytes(problem, tile)
    beside = (left - _grid_parameter_bytes(problem, tile, sums)) // slot_bytes
    return max(beside, min(left // slot_bytes, stages_of_row(tile)))


def _spare_registers(tile: Tile, forward: bool) -> int:
    """Registers of a thread for sums and parameters: grid_shape.cuh, backward grid_sums.cuh."""
    registers = 512 // ceil_div(tile.threads_per_row, 128) // 8 * 8
    registers -= 0 if forward or grid_steps(tile) < 8 else 24
    return registers - _STEP_REGISTERS[packs_at_once(tile)]


def _grid_parameter_bytes(problem: Problem, tile: Tile, sums: bool) -> int:
    """Shared memory for the weights and biases that are not in registers."""
    names = [problem.weight] + [problem.bias] * problem.forward
    pack_bytes = tile.pack_size * sum(DTYPES[name].itemsize for name in names if name)
    if not pack_bytes:
        return 0
    packs, spare = tile.packs_per_thread, _spare_registers(tile, problem.forward)
    if problem.forward:
        spare += 16 * (packs * pack_bytes <= 4 * (spare + 16))
    else:
        spare -= 24 - 16 * tile.exact
        wanted = (bool(problem.dweight) + bool(problem.dbias)) * sums
        spare -= _sums_in_registers(tile, wanted) * tile.pack_size * wanted
    in_registers = min(packs, max(spare, 0) * 4 // pack_bytes)
    return (packs - in_registers) * pack_bytes * (tile.threads_per_row - 32 * GRID_EXCHANGERS)


def _sums_in_registers(tile: Tile, wanted: int) -> int:
    """The packs whose sums are in registers. wanted: of dweight, dbias or both."""
    spare = max(_spare_registers(tile, False), 0)
    return min(tile.packs_per_thread, spare // (tile.pack_size * wanted)) if wanted else 0


def packs_at_once(tile: Tile) -> int:
    """Path grid: packs that a worker takes in one step; few warps need more."""
    return 2 if tile.threads_per_row // 32 - GRID_EXCHANGERS <= 8 else 1


def grid_steps(tile: Tile) -> int:
    """Path grid: steps in which a worker takes its packs of a row."""
    return tile.packs_per_thread // packs_at_once(tile)


def stages_of_row(tile: Tile) -> int:
    """Path grid: the fewest stages of a row that stays while its sums travel."""
    return grid_steps(tile) + max(ceil_div(grid_steps(tile), 2), 3)


def _grid_sum_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory for sums of dweight and dbias: those of GridSums that are not in registers."""
    wanted = bool(problem.dweight) + bool(problem.dbias)
    if problem.forward or not wanted:
        return 0
    in_registers = _sums_in_registers(tile, wanted)
    workers = tile.threads_per_row - 32 * GRID_EXCHANGERS
    return (tile.packs_per_thread - in_registers) * wanted * tile.pack_size * workers * 4


def grid_packs(problem: Problem, tile: Tile) -> int:
    """Path grid: packs of a row that one thread has, in whole steps."""
    slice_cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size)
    workers = tile.threads_per_row - 32 * GRID_EXCHANGERS
    at_once = packs_at_once(tile)
    return max(1, ceil_div(slice_cols, at_once * tile.pack_size * workers)) * at_once


def grid_cols(problem: Problem, tile: Tile) -> int:
    """Path grid: columns of the packs of a block's threads, which hold its slice of a row."""
    workers = tile.threads_per_row - 32 * GRID_EXCHANGERS
    return grid_packs(problem, tile) * tile.pack_size * workers


def fits_grid(problem: Problem, device: Device, tile: Tile) -> bool:
    """Whether one block fits a multiprocessor, and two do not (cuda_src/grid/grid_exchange.cuh)."""
    smem_bytes = smem_bytes_of(problem, tile, "cluster")
    of_blocks = tile.blocks_per_sm * (smem_bytes + RESERVED_BYTES)
    return of_blocks <= device.smem_per_sm and smem_bytes <= device.smem_per_block


def smem_bytes_of(problem: Problem, tile: Tile, strategy: str) -> int:
    """Dynamic shared memory of one block."""
    itemsize, compute_bytes = DTYPES[problem.x].itemsize, DTYPES[problem.compute].itemsize
    of_path = {"bundle": _bundle_bytes, "ring": _ring_bytes, "grid": _grid_bytes}
    if tile.path in of_path:
        return of_path[tile.path](problem, tile)
    if strategy == "parameters":
        return 2 * tile.pack_size * tile.threads_per_row * tile.block_size // 32 * compute_bytes
    if strategy == "warp":
        sums_of = 0 if problem.forward or tile.block_size == 32 else tile.block_size // 32
        return 2 * sums_of * problem.num_cols * compute_bytes
    scratch = reduce_bytes(problem, tile.threads_per_row, tile.cluster_size)
    if tile.path == "staged":  # StagedRow in cuda_src/rows/staged_row.cuh
        return scratch + ceil_div(tile.cols * itemsize, 16) * 16 + 16
    if tile.path != "smem" or (strategy == "block" and not problem.forward):
        return scratch
    slice_cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size)
    kept = [itemsize]
    if not problem.forward:
        wanted = bool(problem.dweight) + bool(problem.dbias)
        kept += [DTYPES[problem.dy].itemsize] + [compute_bytes] * wanted
    return scratch + sum(ceil_div(slice_cols * size, 16) * 16 for size in kept)


@cache
def _register_table() -> dict[tuple[str, str], tuple[float, float]]:
    """The registers that words add, fixed and for each element: upper bounds without spills."""
    with (Path(__file__).parent / "registers.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return {
            (row["kind"], row["words"]): (float(row["fixed"]), float(row["each"])) for row in rows
        }


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
    itemsize, kind = DTYPES[problem.x].itemsize, problem.direction
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
    kept = [problem.weight, problem.bias, problem.weight1, problem.bias1]
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


def blocks_that_fit(problem: Problem, device: Device, tile: Tile) -> int:
    """Blocks whose registers and threads fit a multiprocessor, 0 if not even one does."""
    warps = warps_that_fit(device, registers_of_thread(problem, device, tile))
    return min(warps * 32 // tile.block_size, device.threads_per_sm // tile.block_size, 32)


def fits_smem(device: Device, smem_bytes: int, blocks_per_sm: int) -> bool:
    """Whether so many blocks with so much dynamic shared memory fit a multiprocessor."""
    of_blocks = blocks_per_sm * (smem_bytes + RESERVED_BYTES)
    return smem_bytes <= device.smem_per_block and of_blocks <= device.smem_per_sm


def shaped(
    problem: Problem, pack_size: int, threads_per_row: int, cluster_size: int = 1, **counts: object
) -> Tile:
    """The tile with these threads, and as many packs as a row, or a block's slice of it, needs."""
    width = pack_size * threads_per_row
    packs = max(1, ceil_div(cols_of_slice(problem, pack_size, cluster_size), width))
    exact = int(width * packs * cluster_size == problem.num_cols)
    counts = {"path": "registers", **counts}
    return Tile(pack_size, threads_per_row, packs, cluster_size=cluster_size, exact=exact, **counts)
