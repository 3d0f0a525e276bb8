"""The table STRATEGIES: where a row is kept between its uses, and which path beats another.
Pure Python, no GPU needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ..options import check_choice
from .devices import Device
from .model import (
    ENOUGH_BYTES,
    block_tile,
    bundle_tile,
    cluster_tile,
    filled,
    in_flight,
    lanes_tile,
    ring_tile,
    smem_tile,
    streamed,
    uncached_tile,
)
from .problem import Problem, Tile

# The fewest columns for a ring, by direction and itemsize: first for rows that begin on 16 bytes,
# then for others, which threads load in small packs. Backward, a ring hides the latency of two
# tensors. Forward, registers are as fast below these widths.
_RING_FROM = {"forward": {2: 8193, 4: 8193}, "backward": {2: 640, 4: 440}}
_SMALL_PACK_RING_FROM = {"forward": {2: 500, 4: 2048}, "backward": {2: 512, 4: 512}}

# The widest row of a ring in one block, in columns. A cluster uses its registers better for wider
# rows, and forward for single elements, whose parameters take a register each.
_COLS_OF_BLOCK, _COLS_OF_FULL_BLOCK = 24576, 10240


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


def _ring_is_faster(problem: Problem, registers: Tile | None) -> bool:
    """Whether a ring, if one fits, beats the tile in registers, if there is one."""
    if problem.compute != "float32":
        return False
    if problem.scaling and registers is not None:
        return registers.blocks_per_sm == 1 and problem.cols_of_scale is None
    aligned = all(problem.widest_pack * size >= 16 for size in streamed(problem))
    first = (_RING_FROM if aligned else _SMALL_PACK_RING_FROM)[problem.direction]
    if problem.num_cols < first[problem.itemsize]:
        return False
    if problem.forward and registers is not None and filled(problem, registers) >= 0.95:
        few = registers.blocks_per_sm == 1 and not problem.residual
        return few or in_flight(problem, registers) < ENOUGH_BYTES
    return True


# Each strategy tries its paths (docs/dispatch.md) in an order of its own.


def _warp_tile(problem: Problem, device: Device) -> Tile | None:
    """Bundles for rows that do not begin on 16 bytes, else registers."""
    return bundle_tile(problem, device) or lanes_tile(problem, device)


def _is_slower_than_block(problem: Problem, device: Device, tile: Tile) -> bool:
    """Whether a ring of strategy block beats a warp's registers."""
    if tile.path == "bundle" or not _ring_is_faster(problem, tile):
        return False
    return ring_tile(problem, device, (1,)) is not None


def _block_tile(problem: Problem, device: Device) -> Tile | None:
    """A ring where it is faster and fits, else registers, else shared memory."""
    registers = block_tile(problem, device)
    if _ring_is_faster(problem, registers) and (ring := ring_tile(problem, device, (1,))):
        return ring
    if registers is not None or not problem.forward or device.clusters:
        return registers  # a cluster's registers, if any, beat one block's shared memory
    return smem_tile(problem, device, (1,))


def _is_slower_than_cluster(problem: Problem, device: Device, tile: Tile) -> bool:
    """Whether a ring in a cluster beats a ring, or registers, in one block."""
    if tile.path == "ring":
        full = not problem.forward or problem.widest_pack == 1
        if problem.num_cols <= (_COLS_OF_FULL_BLOCK if full else _COLS_OF_BLOCK):
            return False
    elif not _ring_is_faster(problem, tile):
        return False
    return ring_tile(problem, device, tuple(dict(device.clusters))) is not None


def _cluster_tile(problem: Problem, device: Device) -> Tile | None:
    """A ring if one fits, else registers or shared memory."""
    sizes = tuple(dict(device.clusters))
    ring = ring_tile(problem, device, sizes)
    return ring or cluster_tile(problem, device) or smem_tile(problem, device, sizes)


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

StrategyName = Literal["warp", "block", "cluster", "uncached"]
StatisticsName = Literal["two_pass", "welford"]
STATISTICS = get_args(StatisticsName)


def check_strategy(strategy: str | None, statistics: str | None, tile: object = None) -> None:
    """Raises ValueError for an unknown strategy or statistics, and for a tile without a strategy.

    None: the width decides.
    """
    more = " to let the width decide"
    check_choice("strategy", strategy, (*STRATEGIES, None), more)
    check_choice("statistics", statistics, (*STATISTICS, None), more)
    if tile is not None and strategy is None:
        raise ValueError(
            "tile is given without strategy; expected the strategy that it belongs to as well"
        )
