"""Whether a caller's tile fits a problem: each rule raises a ValueError that explains it.
Pure Python, no GPU needed.
"""

from __future__ import annotations

from dataclasses import replace

from .abilities import can_bundle, can_ring
from .devices import Device
from .problem import PATHS_OF_STRATEGY, Problem, Tile, cols_of_slice
from .tile_model import (
    smem_bytes_of,
)


def check_tile(problem: Problem, strategy: str, tile: Tile, device: Device) -> None:
    """Raise a ValueError that says what does not fit."""
    _check_threads(problem, strategy, tile)
    _check_blocks_of_row(problem, strategy, tile, device)
    in_registers = strategy == "warp" or (strategy == "block" and not problem.forward)
    in_registers = in_registers or tile.path not in ("smem", "uncached")
    if in_registers:
        _check_registers(problem, strategy, tile)
    elif tile.packs_per_thread:
        raise ValueError(
            f"tile has packs_per_thread {tile.packs_per_thread}; "
            "expected 0: here the row is not kept in registers"
        )
    _check_exact(problem, tile, in_registers)
    if tile.blocks_per_sm < 1 or tile.blocks_per_sm * tile.block_size > device.threads_per_sm:
        raise ValueError(
            f"tile has blocks_per_sm {tile.blocks_per_sm} and blocks of {tile.block_size} threads; "
            f"expected 1 to {device.threads_per_sm} threads on a multiprocessor of {device.name}"
        )
    takes_early = problem.forward and not problem.scaling and tile.path == "registers"
    if tile.early not in (0, int(takes_early and strategy in ("warp", "block"))):
        raise ValueError(
            f"tile has early {tile.early}; expected 1 only for forward of strategies 'warp' and "
            "'block' with rows in registers and no 8-bit y, else 0"
        )
    if tile.path == "bundle":
        _check_bundle(problem, strategy, tile, device)
    else:
        _check_stages(problem, strategy, tile, device)
    check_path(strategy, tile)
    smem_bytes = smem_bytes_of(problem, tile, strategy)
    if smem_bytes > device.smem_per_block:
        raise ValueError(
            f"tile needs {smem_bytes} bytes of shared memory a block, "
            f"{device.name} has {device.smem_per_block}"
        )


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _check_threads(problem: Problem, strategy: str, tile: Tile) -> None:
    """The pack of a thread, and the threads of a row and of a block."""
    threads, rows = tile.threads_per_row, tile.rows_per_block
    if not _is_power_of_two(tile.pack_size) or tile.pack_size > problem.layout.pack_limit:
        raise ValueError(
            f"tile has pack_size {tile.pack_size}; expected a power of two up to "
            f"{problem.layout.pack_limit}, which num_cols {problem.num_cols} and the alignment of "
            "the arrays allow"
        )
    if threads < 1 or rows < 1 or tile.block_size > 1024 or tile.block_size % 32:
        raise ValueError(
            f"tile has threads_per_row {threads} and rows_per_block {rows}; "
            "expected a product that is a multiple of 32 up to 1024"
        )
    if strategy == "warp" and (threads > 32 or not _is_power_of_two(threads)):
        raise ValueError(
            f"tile has threads_per_row {threads}; "
            "expected a power of two up to 32 for strategy 'warp'"
        )
    if strategy != "warp" and not tile.stages and rows != 1:
        raise ValueError(
            f"tile has rows_per_block {rows}; "
            f"expected 1: without stages strategy {strategy!r} works on one row a block"
        )


def _check_blocks_of_row(problem: Problem, strategy: str, tile: Tile, device: Device) -> None:
    """The blocks that share a row."""
    if strategy == "cluster" and tile.cluster_size not in dict(device.clusters):
        sizes = ", ".join(str(size) for size, _ in device.clusters)
        raise ValueError(
            f"tile has cluster_size {tile.cluster_size}; expected one of {sizes}, "
            f"the clusters that {device.name} runs"
        )
    elif strategy != "cluster" and tile.cluster_size != 1:
        raise ValueError(
            f"tile has cluster_size {tile.cluster_size}; "
            f"expected 1: strategy {strategy!r} has no clusters"
        )


def _check_registers(problem: Problem, strategy: str, tile: Tile) -> None:
    """The columns in the registers of a block's threads: all of its slice, no pack without any."""
    num_cols = cols_of_slice(problem, tile)
    if tile.cols < num_cols:
        raise ValueError(
            f"tile holds {tile.cols} columns (pack_size {tile.pack_size} x "
            f"threads_per_row {tile.threads_per_row} x "
            f"packs_per_thread {tile.packs_per_thread}); expected {num_cols} or more"
            + " for each block"
            * (strategy == "cluster")
        )
    if tile.cols - tile.pack_size * tile.threads_per_row >= max(num_cols, 1):
        raise ValueError(
            f"tile has packs_per_thread {tile.packs_per_thread}; expected fewer: the last pack "
            f"of every thread is beyond the {num_cols} columns of its block"
        )
    if tile.elements > 256:
        raise ValueError(
            f"tile keeps {tile.elements} elements in each thread; "
            "expected fewer than its 255 registers"
        )


def _check_exact(problem: Problem, tile: Tile, in_registers: bool) -> None:
    fills = tile.cols * tile.cluster_size == problem.num_cols and in_registers
    if tile.exact not in (0, 1) or (tile.exact and not fills):
        raise ValueError(
            f"tile has exact {tile.exact}; expected 1 for a row that fills the {tile.cols} "
            "columns of the registers, else 0"
        )


def _check_stages(problem: Problem, strategy: str, tile: Tile, device: Device) -> None:
    """The stages of path "ring"."""
    fewest = 2 if problem.forward or tile.rows_per_block > 1 else 1
    is_counted = tile.stages >= fewest and tile.packs_per_thread
    if tile.stages and not (is_counted and strategy in ("block", "cluster")):
        raise ValueError(
            f"tile has stages {tile.stages}, rows_per_block {tile.rows_per_block}, "
            f"packs_per_thread {tile.packs_per_thread}; expected 2 or more stages of a ring, "
            "or backward 1 for one row a block, and 1 or more packs, with strategy 'block' or "
            "'cluster'"
        )
    if tile.path == "ring" and not can_ring(problem, device):
        raise ValueError(
            f"tile has stages {tile.stages}; a ring needs float32 arithmetic, sm_90 or later for "
            "the copy engine, no residual of another dtype, and no functor that acts on x, nor "
            "backward on y"
        )


def check_path(strategy: str, tile: Tile) -> None:
    """Raise a ValueError if the path does not fit the strategy, or the counts the path."""
    if tile.path not in PATHS_OF_STRATEGY[strategy]:
        paths = ", ".join(PATHS_OF_STRATEGY[strategy])
        raise ValueError(
            f"tile has path {tile.path!r}; expected one of {paths} for strategy {strategy!r}"
        )
    if tile.stages and tile.path not in ("ring", "bundle"):
        raise ValueError(f"tile has stages {tile.stages}; expected 0: path {tile.path!r} has none")
    if not tile.stages and tile.path in ("ring", "bundle"):
        raise ValueError(f"tile has path {tile.path!r} and stages 0; expected 1 or more stages")
    if tile.bundle and tile.path != "bundle":
        raise ValueError(f"tile has bundle {tile.bundle}; expected 0: path {tile.path!r} has none")
    by_counts = replace(tile, path=None).of_strategy(strategy).path
    if tile.path != by_counts:
        raise ValueError(
            f"tile has path {tile.path!r}; expected {by_counts!r}, which its counts describe"
        )


def _check_bundle(problem: Problem, strategy: str, tile: Tile, device: Device) -> None:
    """The rules of check_tile for path "bundle"."""
    groups = 32 // min(tile.threads_per_row, 32)
    if tile.bundle < 1 or tile.bundle % groups or tile.stages < 1 or strategy != "warp":
        raise ValueError(
            f"tile has bundle {tile.bundle} and stages {tile.stages}; bundles belong to strategy "
            f"'warp', with stages, and with threads_per_row {tile.threads_per_row} "
            f"have a multiple of {groups} rows"
        )
    if not can_bundle(problem, device):
        raise ValueError(
            f"tile has bundle {tile.bundle}; bundles need float32 arithmetic, sm_90 or later for "
            "the copy engine, rows without gaps between them, tensors of one itemsize, and "
            "nothing that is fused with the norm"
        )
