"""Launch: how a caller has a kernel chosen and launched."""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ..gpu import arrays
from ..plan.model import check_path
from ..plan.problem import PATHS, Tile
from ..plan.strategies import StatisticsName, StrategyName, check_choice

_TILE_FIELDS = tuple(each.name for each in fields(Tile))


class Margins(NamedTuple):
    """sm_margin for each kind of call. inference: a forward whose gradients are not recorded."""

    forward: int = 0
    backward: int = 0
    inference: int = 0


@dataclass(frozen=True)
class Launch:
    """How a kernel is chosen and launched. None of it changes a result beyond rounding.

    Examples:
        >>> cupynorm.Launch("warp", {"pack_size": 8, "threads_per_row": 32}).tile.block_size
        32
        >>> cupynorm.Launch(sm_margin={"backward": 16}).sm_margin
        Margins(forward=0, backward=16, inference=0)

    strategy: a name of cupynorm.STRATEGIES. None: the width of a row decides. It holds for backward
        too.
    tile: a cupynorm.Tile of that strategy, or a dict of its fields. The backward of autograd
        chooses its own.
    statistics: "two_pass" or "welford". None: the strategy decides.
    sm_margin: multiprocessors to leave free for other kernels, in forward and backward. Or a dict
        with values for "forward", "backward" and "inference" (a forward whose gradients are not
        recorded); a missing value is 0.

    It does not apply to NumPy arrays and CPU tensors: a warning says so once.

    Raises TypeError or ValueError for names that do not exist, for a tile without a strategy or
    with a path that the strategy lacks, and for a margin below 0. A call raises ValueError for a
    strategy or tile that does not fit its rows.
    """

    strategy: StrategyName | None = None
    tile: Tile | Mapping[str, Any] | None = None
    statistics: StatisticsName | None = None
    sm_margin: int | Mapping[str, int] | Margins = 0

    def __post_init__(self) -> None:
        tile = tile_of(self.tile)
        check_choice(self.strategy, self.statistics, tile)
        if tile is not None and tile.path is not None:
            # Now: tiles are compared without their path, so a prepared call does not know it.
            check_path(self.strategy, tile)
        object.__setattr__(self, "tile", tile)
        object.__setattr__(self, "sm_margin", _margins(self.sm_margin))


def checked_launch(launch: object) -> Launch | None:
    """The launch of a call. Raises TypeError for what is neither a Launch nor None."""
    if launch is None or isinstance(launch, Launch):
        return launch
    raise TypeError(f"launch is {arrays.type_in_words(launch)}; expected a cupynorm.Launch or None")


def planned_with(launch: Launch | None, kind: str) -> dict[str, Any]:
    """What plan.dispatch.make_plan takes of a launch. kind: of the call, a field of Margins."""
    if launch is None:
        return {}
    chosen = {name: getattr(launch, name) for name in ("strategy", "tile", "statistics")}
    return chosen | {"sm_margin": margin_of(launch, kind)}


def margin_of(launch: Launch | None, kind: str) -> int:
    """Multiprocessors that a call of this kind leaves free."""
    margin = 0 if launch is None else launch.sm_margin
    return getattr(margin, kind) if isinstance(margin, Margins) else margin


def of_backward(launch: Launch | None) -> Launch | None:
    """The launch of the backward that autograd runs.

    A tile belongs to one kernel; a strategy is meant for both directions.
    """
    return launch if launch is None or launch.tile is None else replace(launch, tile=None)


def warn_on_host(launch: Launch | None) -> None:
    """Warns, once in a process, that a launch was given for arrays on the CPU."""
    if launch is not None:
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        "launch was given for arrays on the CPU, where no kernel runs; it does not apply",
        stacklevel=2,
    )


def tile_of(tile: object) -> Tile | None:
    """A caller's tile as a Tile. Raises TypeError or ValueError for what is none."""
    if tile is None:
        return None
    if not isinstance(tile, Tile):
        if not isinstance(tile, Mapping):
            raise TypeError(
                f"tile is {arrays.type_in_words(tile)}; "
                "expected a cupynorm.Tile or a dict of its fields"
            )
        try:
            tile = Tile(**tile)
        except TypeError as error:
            names, (first, second, *others) = ", ".join(map(str, tile)), _TILE_FIELDS
            raise ValueError(
                f"tile has fields {names}; "
                f"expected {first}, {second} and some of {', '.join(others)}"
            ) from error
    for name in _TILE_FIELDS:
        value = getattr(tile, name)
        if name == "path":
            if value is not None and value not in PATHS:
                paths = ", ".join(PATHS)
                raise ValueError(f"tile has path {value!r}; expected one of {paths}, or None")
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"tile has {name} {value!r}; expected an int")
    return tile


def _margins(sm_margin: object) -> int | Margins:
    if isinstance(sm_margin, Margins):
        sm_margin = sm_margin._asdict()
    if not isinstance(sm_margin, Mapping):
        return _margin(sm_margin)
    if not set(sm_margin) <= set(Margins._fields):
        values = ", ".join(map(str, sm_margin))
        raise ValueError(f"sm_margin has {values}; expected some of {', '.join(Margins._fields)}")
    return Margins(**{kind: _margin(margin) for kind, margin in sm_margin.items()})


def _margin(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(f"sm_margin is {value!r}; expected a number of multiprocessors, 0 or more")
    return int(value)
