"""The table STRATEGIES: where a row is kept between its uses, and the tile that the model prefers.
Pure Python, no GPU needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .devices import Device
from .paths import (
    block_tile,
    bundle_tile,
    cluster_tile,
    grid_tile,
    lanes_tile,
    ring_tile,
    smem_tile,
    suits_block,
    uncached_tile,
    wants_grid,
    wants_ring,
)
from .problem import Problem, Tile


@dataclass(frozen=True)
class Strategy:
    """One row of the dispatch table.

    kept_in: where a row is kept between its uses.
    tile: the tile for a problem on a device, or None if the row does not fit.
    gives_way: whether a later strategy is faster although this one is wide enough.
    """

    name: str
    kept_in: str
    tile: Callable[[Problem, Device], Tile | None]
    first_capability: int = 0
    gives_way: Callable[[Problem, Device, Tile], bool] = lambda problem, device, tile: False


def _warp_tile(problem: Problem, device: Device) -> Tile | None:
    return bundle_tile(problem, device) or lanes_tile(problem, device)


def _warp_gives_way(problem: Problem, device: Device, tile: Tile) -> bool:
    ring = tile.path != "bundle" and wants_ring(problem, tile)
    return ring and ring_tile(problem, device, (1,)) is not None


def _block_tile(problem: Problem, device: Device) -> Tile | None:
    tile = block_tile(problem, device)
    ring = ring_tile(problem, device, (1,)) if wants_ring(problem, tile) else None
    if ring is not None:
        return ring
    if tile is not None or not problem.forward or device.clusters:
        return tile  # a cluster's registers, if any, are faster than one block's shared memory
    return smem_tile(problem, device, (1,))


def _block_gives_way(problem: Problem, device: Device, tile: Tile) -> bool:
    ring = tile.path == "ring" or wants_ring(problem, tile)
    return (
        ring
        and not suits_block(problem)
        and ring_tile(problem, device, _cluster_sizes(device)) is not None
    )


def _cluster_sizes(device: Device) -> tuple[int, ...]:
    return tuple(size for size, _ in device.clusters)


def _cluster_tile(problem: Problem, device: Device) -> Tile | None:
    sizes = _cluster_sizes(device)
    ring = ring_tile(problem, device, sizes)
    if ring is not None:
        return ring
    shared = grid_tile(problem, device) if sizes else None
    if shared is not None and wants_grid(problem):
        return shared
    return cluster_tile(problem, device) or smem_tile(problem, device, sizes) or shared


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "warp",
            "in the registers of a warp, or of part of one",
            _warp_tile,
            gives_way=_warp_gives_way,
        ),
        Strategy(
            "block",
            "in one block's registers or shared memory",
            _block_tile,
            gives_way=_block_gives_way,
        ),
        Strategy(
            "cluster",
            "in the registers or shared memory of a thread-block cluster",
            _cluster_tile,
            first_capability=90,
        ),
        Strategy("uncached", "nowhere: it is read again", uncached_tile),
    )
}
"""The dispatch table, by name, from narrow rows to wide ones: where a row is kept.

Examples:
    >>> for name, strategy in cupynorm.STRATEGIES.items():
    ...     print(name, strategy.kept_in, sep=': ')
    warp: in the registers of a warp, or of part of one
    block: in one block's registers or shared memory
    cluster: in the registers or shared memory of a thread-block cluster
    uncached: nowhere: it is read again
"""

STATISTICS = ("two_pass", "welford")


def check_choice(strategy: str | None, statistics: str | None) -> None:
    """Raises ValueError for an unknown strategy or statistics. None: the width decides."""
    for name, given, known in (
        ("strategy", strategy, STRATEGIES),
        ("statistics", statistics, STATISTICS),
    ):
        if given is not None and given not in known:
            raise ValueError(
                f"{name} is {given!r}; expected one of {', '.join(known)}, "
                "or None to let the width decide"
            )
