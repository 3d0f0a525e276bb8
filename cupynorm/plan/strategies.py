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
    grid_is_faster,
    grid_tile,
    lanes_tile,
    ring_in_block_is_faster,
    ring_is_faster,
    ring_tile,
    smem_tile,
    uncached_tile,
)
from .problem import Problem, Tile


@dataclass(frozen=True)
class Strategy:
    """One row of the dispatch table.

    kept_in: where a row is kept between its uses.
    tile: the tile for a problem on a device, or None if the row does not fit.
    first_capability: the oldest compute capability that runs it; 90 is 9.0.
    later_is_faster: whether a later strategy is faster although this one is wide enough.
    """

    name: str
    kept_in: str
    tile: Callable[[Problem, Device], Tile | None]
    first_capability: int = 0
    later_is_faster: Callable[[Problem, Device, Tile], bool] = lambda problem, device, tile: False


# Each strategy tries its paths (docs/dispatch.md) in an order of its own.


def _warp_tile(problem: Problem, device: Device) -> Tile | None:
    """Bundles for rows that do not begin on 16 bytes, else registers."""
    return bundle_tile(problem, device) or lanes_tile(problem, device)


def _is_slower_than_block(problem: Problem, device: Device, tile: Tile) -> bool:
    """Whether a ring of strategy block beats a warp's registers."""
    if tile.path == "bundle" or not ring_is_faster(problem, tile):
        return False
    return ring_tile(problem, device, (1,)) is not None


def _block_tile(problem: Problem, device: Device) -> Tile | None:
    """A ring where it is faster and fits, else registers, else shared memory."""
    registers = block_tile(problem, device)
    if ring_is_faster(problem, registers) and (ring := ring_tile(problem, device, (1,))):
        return ring
    if registers is not None or not problem.forward or device.clusters:
        return registers  # a cluster's registers, if any, beat one block's shared memory
    return smem_tile(problem, device, (1,))


def _is_slower_than_cluster(problem: Problem, device: Device, tile: Tile) -> bool:
    """Whether a ring in a cluster beats a ring, or registers, in one block."""
    is_for_ring = tile.path == "ring" or ring_is_faster(problem, tile)
    if not is_for_ring or ring_in_block_is_faster(problem):
        return False
    return ring_tile(problem, device, _cluster_sizes(device)) is not None


def _cluster_sizes(device: Device) -> tuple[int, ...]:
    return tuple(size for size, _ in device.clusters)


def _cluster_tile(problem: Problem, device: Device) -> Tile | None:
    """A ring if one fits, else registers or shared memory, else a grid; or a grid before these."""
    sizes = _cluster_sizes(device)
    ring = ring_tile(problem, device, sizes)
    if ring is not None:
        return ring
    grid = grid_tile(problem, device) if sizes else None
    if grid is not None and grid_is_faster(problem):
        return grid
    return cluster_tile(problem, device) or smem_tile(problem, device, sizes) or grid


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "warp",
            "in the registers of a warp, or of part of one",
            _warp_tile,
            later_is_faster=_is_slower_than_block,
        ),
        Strategy(
            "block",
            "in one block's registers or shared memory",
            _block_tile,
            later_is_faster=_is_slower_than_cluster,
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
        if given is not None and given not in list(known):
            raise ValueError(
                f"{name} is {given!r}; expected one of {', '.join(known)}, "
                "or None to let the width decide"
            )
