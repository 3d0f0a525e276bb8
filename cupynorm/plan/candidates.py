"""Which tiles are worth measuring: a few dozen of all that dispatch accepts for a problem.
Pure Python, no GPU needed.

The search varies threads, packs of a thread, rows, blocks, clusters and stages. The model bounds
it by registers, shared memory, and how busy a tile keeps a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from . import dispatch, model
from .devices import Device
from .instances import Choice
from .model import blocks_that_fit, shaped
from .problem import Problem, Tile, cols_of_slice

# Candidates of one problem, at most: this many compile in 15 seconds, sooner in several processes.
_MOST = 48
# The share of a tile's packs that a row must fill: packs beyond its end cost as much as others.
_FILLED = 0.8
# Bytes of x for each block of a cluster, at least: with fewer, blocks wait for each other most of
# the time.
_FEWEST_SLICE_BYTES = 8192
# If there are too many candidates, those below this share of the best estimate are dropped. It is
# low because estimates are rough.
_LEAST_ESTIMATE = 0.6


def candidates(problem: Problem, device: Device) -> list[Choice]:
    """The tiles that are worth measuring; the first is what dispatch chooses."""
    default = dispatch.choose(problem, device)
    generators = [_in_registers, _in_bundles, _in_rings]
    if default.tile.packs_per_thread == 0:
        generators.append(_not_in_registers)
    kinds: dict[tuple, list[Choice]] = {}
    for strategy, tile in (each for generate in generators for each in generate(problem, device)):
        try:
            choice = dispatch.choose(problem, device, strategy, tile)
        except ValueError:
            continue
        # If shared memory allows fewer blocks, the tile with that number is a candidate itself.
        if choice.resident >= tile.blocks_per_sm:
            kinds.setdefault((strategy, tile.cluster_size, choice.tile.path), []).append(choice)
    chosen = {(default.strategy, default.tile): default}
    most = _MOST // max(1, len(kinds))
    for choices in kinds.values():
        if len(choices) > most:
            least = _LEAST_ESTIMATE * max(_estimated_speed(problem, choice) for choice in choices)
            choices = [choice for choice in choices if _estimated_speed(problem, choice) >= least]
        evenly = range(min(most, len(choices)))
        for choice in (choices[at * len(choices) // len(evenly)] for at in evenly):
            chosen.setdefault((choice.strategy, choice.tile), choice)
    return list(chosen.values())


def _shapes(
    problem: Problem, device: Device, pack_size: int | None = None
) -> Iterator[tuple[str, Tile]]:
    """Tiles as wide as the row, or as one block's slice of it, and not much wider.

    Of tiles with equal packs_per_thread, only the one with fewest threads.
    """
    pack_size = pack_size or problem.widest_pack
    for cluster_size in (1, *(size for size, _ in device.clusters)):
        num_cols = cols_of_slice(problem, Tile(pack_size, 32, cluster_size=cluster_size))
        if cluster_size > 1 and num_cols * problem.itemsize < _FEWEST_SLICE_BYTES:
            continue
        all_threads = {"block" if cluster_size == 1 else "cluster": range(32, 1024 + 1, 32)}
        if cluster_size == 1:
            all_threads["warp"] = (1, 2, 4, 8, 16, 32)
        for strategy in all_threads:
            fullest: dict[int, Tile] = {}
            for threads in all_threads[strategy]:
                tile = shaped(problem, pack_size, threads, cluster_size)
                if num_cols >= _FILLED * tile.cols:
                    fullest.setdefault(tile.packs_per_thread, tile)
            yield from ((strategy, tile) for tile in fullest.values())


def _in_registers(problem: Problem, device: Device) -> Iterator[tuple[str, Tile]]:
    for strategy, tile in _shapes(problem, device):
        if tile.elements > 128:
            continue
        block_sizes = (64, 128, 256) if strategy == "warp" else (tile.threads_per_row,)
        for block_size in block_sizes:
            of_rows = replace(tile, rows_per_block=block_size // tile.threads_per_row)
            most = blocks_that_fit(problem, device, of_rows)
            for blocks in {most, -(-most // 2)} - {0}:
                yield strategy, replace(of_rows, blocks_per_sm=blocks)


def _in_bundles(problem: Problem, device: Device) -> Iterator[tuple[str, Tile]]:
    """For 16-bit rows and for rows that do not begin on 16 bytes.

    Forward has as many blocks as fit, backward one.
    """
    pack_size, itemsize = problem.widest_pack, problem.itemsize
    aligned = pack_size * itemsize >= 16
    if (aligned and itemsize > 2) or not model.can_bundle(problem, device):
        return
    if aligned:
        pack_size = 4 if problem.forward else 2  # rows of a bundle begin on 8 bytes, or on 4
    for strategy, tile in _shapes(problem, device, pack_size):
        if strategy == "warp" and tile.elements <= 96:
            if bundled := model.with_bundles(problem, device, tile):
                yield from ((strategy, replace(bundled, stages=stages)) for stages in (2, 3, 4))


def _in_rings(problem: Problem, device: Device) -> Iterator[tuple[str, Tile]]:
    """A multiprocessor works on several rows: forward in a block each, backward in one block."""
    for stages in (2, 3, 4, 5) if model.can_ring(problem, device) else ():
        for strategy, tile in _shapes(problem, device):
            if strategy == "warp" or tile.elements > 64:
                continue
            for rows in range(1, min(8, 1024 // tile.threads_per_row) + 1):
                shared = {"blocks_per_sm": rows} if problem.forward else {"rows_per_block": rows}
                of_rows = replace(tile, stages=stages, path="ring", **shared)
                if blocks_that_fit(problem, device, of_rows) >= of_rows.blocks_per_sm:
                    yield strategy, of_rows


def _not_in_registers(problem: Problem, device: Device) -> Iterator[tuple[str, Tile]]:
    """Rows in shared memory, and uncached rows."""
    for threads in (256, 512, 1024):
        tile = Tile(problem.widest_pack, threads, path="smem")
        yield "block", tile
        yield from (("cluster", replace(tile, cluster_size=size)) for size, _ in device.clusters)
        yield from (
            ("uncached", replace(tile, blocks_per_sm=blocks, path="uncached"))
            for blocks in (1, 2, 4)
        )


def _estimated_speed(problem: Problem, choice: Choice) -> float:
    """An estimate of the speed, as a share of a copy's.

    For rings it comes from the instruction count, for others from the bytes in flight.
    """
    tile = choice.tile
    if tile.path == "ring":
        return model.ring_share(problem, tile)
    row_bytes = cols_of_slice(problem, tile) * problem.itemsize
    return min(1.0, choice.resident * tile.rows_per_block * row_bytes / model.ENOUGH_BYTES)
