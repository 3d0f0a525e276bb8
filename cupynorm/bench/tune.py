"""Which tile is the fastest on this GPU: `python -m cupynorm tune`.

    ranges     the rows of the output file, the one measured longest ago first; then the widths that
               are asked for
    tiles      the model's of each strategy, the file's, and from the best of them step by step to
               a neighbour: other threads, rows, blocks, clusters, stages, bundles, another path
    left out   tiles that do not fit all widths that are drawn from the range, or whose result is
               wrong (cupynorm.bench.measure)
    time       kernel time, all tiles in turns (cupynorm.bench.timer)
    written    a row with the best mean speed, if it is at least 2% faster than the model's tile,
               and again at other widths of the range: the best of many is partly luck

A range that is not measured in time keeps its row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from random import Random
from statistics import median

from ..dispatch.devices import Device
from ..dispatch.measured import COUNTS, Row, key_of, read_rows, row_for, write_rows
from ..dispatch.problem import PATHS_OF_STRATEGY, SCALINGS
from ..dispatch.strategies import STRATEGIES
from ..dtypes import DTYPES
from ..gpu import launch
from ..norm.request import Launch
from .cells import OURS, Cell
from .measure import Truth, plan_of, verify
from .peers import prepare, tensors_of
from .timer import Timer, take_turns

LEAST_GAIN = 0.02
_WIDTHS, _RUNS, _STEPS, _TILES = 3, 7, 3, 48
_X_BYTES = 2**28

# (a cell, launches) -> median microseconds of those whose result is right
Measure = Callable[[Cell, Sequence[Launch]], Mapping[Launch, float]]


@dataclass(frozen=True)
class Range:
    """Widths of one or more classes of problems, whose best tile is wanted.

    classes: a cell of each; their shapes mean nothing. row: of the file, None if the model decides.
    """

    classes: tuple[Cell, ...]
    from_cols: int
    to_cols: int
    step: int
    row: Row | None = None

    def cells(self, random: Random, device: Device) -> list[Cell]:
        """A few random widths, each of a random class, with many rows each."""
        multiples = range(-(-self.from_cols // self.step) * self.step, self.to_cols + 1, self.step)
        found: list[Cell] = []
        for num_cols in random.sample(multiples, min(len(multiples), 64 * _WIDTHS)):
            one = random.choice(self.classes)
            num_rows = max(1, _X_BYTES // (num_cols * DTYPES[one.dtype].itemsize))
            cell = replace(one, num_cols=num_cols, num_rows=num_rows)
            if self.row is None or key_of(plan_of(cell, device).problem) in self.row.keys:
                found.append(cell)
        return found[:_WIDTHS]


def ranges_of(rows: Iterable[Row], todo: Iterable[Cell]) -> list[Range]:
    """The file's ranges, those measured longest ago first, then the width of each cell."""
    ranges = []
    for row in sorted(rows, key=lambda row: row.date):
        words = set(row.kind.split())
        scale = next((word for word in SCALINGS if word in words), None)
        options = {
            "weight_dtype": "float32" if "wide" in words else None,
            "out_dtype": "float8_e4m3fn" if scale else None,
            "residual": bool({"residual", "dsum"} & words),
            "scale": scale,
            "amax": "amax" in words,
        }
        classes = tuple(
            Cell(norm, direction, dtype, 1, 1, **options) for direction, norm, dtype, _ in row.keys
        )
        ranges.append(Range(classes, row.from_cols, row.to_cols, row.step, row))
    return ranges + [Range((cell,), cell.num_cols, cell.num_cols, 1) for cell in todo]


def neighbours(row: Row) -> Iterator[Row]:
    """Rows that differ in one count, or in the path."""
    for name in COUNTS[1:]:
        count, step = getattr(row, name), 32 if name == "threads_per_row" else 1
        others = {count // 2, count - step, count + step, 2 * count} - {count}
        yield from (replace(row, **{name: other}) for other in sorted(others) if other > 0)
    for path in PATHS_OF_STRATEGY[row.strategy]:
        if path != row.path:
            stages = {"ring": 3, "bundle": 2}.get(path, 1)
            yield replace(row, path=path, stages=stages, bundle=int(path == "bundle"))


class Tuner:
    """Measures ranges on a device. measure: of a cell and launches."""

    def __init__(self, device: Device, measure: Measure, seed: int = 0) -> None:
        # Under another name a device has no data file.
        self.device = replace(device, name=f"{device.name} by the model")
        self.measure, self.random = measure, Random(seed)

    def launch(self, cell: Cell, row: Row | None) -> Launch:
        """With a row's tile, or the model's. Raises ValueError if it does not fit."""
        own = plan_of(cell, self.device)
        if row is not None:
            own = plan_of(cell, self.device, strategy=row.strategy, tile=row.tile(own.problem))
        return Launch(own.strategy, own.tile)

    def seeds(self, cell: Cell, range_: Range) -> list[Row]:
        """The model's choice, that of each strategy, and the file's row."""
        widths = (range_.from_cols, range_.to_cols)
        rows = []
        for options in ({}, *({"strategy": name} for name in STRATEGIES)):
            try:
                plan = plan_of(cell, self.device, **options)
            except ValueError:
                continue
            rows.append(row_for(plan.problem, plan.strategy, plan.tile, *widths, step=range_.step))
        if range_.row:  # in the class of this cell
            names = {
                name: getattr(rows[0], name) for name in ("direction", "norm", "dtype", "kind")
            }
            rows.append(replace(range_.row, gain=None, date="", **names))
        return list(dict.fromkeys(rows))

    def gains(self, cells: Sequence[Cell], rows: Sequence[Row]) -> dict[Row, float]:
        """Row -> mean speedup over the model's tile, of rows that fit and are right everywhere."""
        launches: dict[Row | None, list[Launch]] = {}
        for row in (None, *rows[:_TILES]):
            try:
                launches[row] = [self.launch(cell, row) for cell in cells]
            except ValueError:
                continue
        logs = dict.fromkeys(launches, 0.0)
        for at, cell in enumerate(cells):
            times = self.measure(cell, list(dict.fromkeys(launches[row][at] for row in logs)))
            for row in list(logs):
                if launches[row][at] in times:
                    logs[row] += math.log(times[launches[row][at]])
                else:
                    del logs[row]
        if None not in logs:  # the model's own tile is wrong: nothing to compare with
            return {}
        own = logs.pop(None)
        return {row: math.exp((own - total) / len(cells)) - 1 for row, total in logs.items()}

    def best(self, range_: Range) -> Row | None:
        """The row to write for a range: None where the model's tile is good enough.

        Where nothing can be measured, the row that it has.
        """
        cells = range_.cells(self.random, self.device)
        found: dict[Row, float] = {}
        front = self.seeds(cells[len(cells) // 2], range_) if cells else []
        for _ in range(_STEPS):
            found |= self.gains(cells, [row for row in dict.fromkeys(front) if row not in found])
            if not found:
                return range_.row
            front = list(neighbours(max(found, key=found.__getitem__)))
        row = max(found, key=found.__getitem__)
        again = self.gains(range_.cells(self.random, self.device), [row]).get(row, 0.0)
        gain = min(again, found[row])
        if gain < LEAST_GAIN:
            return None
        own = range_.row or row
        today = str(date.today())
        return replace(row, norm=own.norm, dtype=own.dtype, gain=round(gain, 3), date=today)


def tune(
    path: Path,
    todo: Iterable[Cell] = (),
    *,
    seconds: float = 480,
    seed: int = 0,
    progress: Callable[..., Iterable] | None = None,
    tuner: Tuner | None = None,
) -> str:
    """Measures the rows of a file again, and the widths of todo; rewrites the file.

    seconds: after these, other rows stay as they are.
    Returns a sentence. Raises ValueError for a file that has no rows of tiles.
    """
    progress = progress or (lambda items, **_: items)
    tuner = tuner or Tuner(launch.current_device(), on_gpu, seed)
    ranges = ranges_of(read_rows(path) if path.exists() else [], todo)
    end, kept, num_measured, num_faster = time.monotonic() + seconds, [], 0, 0
    for range_ in progress(ranges, desc="measuring", unit="range"):
        if time.monotonic() > end:
            kept.append(range_.row)
            continue
        row = tuner.best(range_)
        num_measured += 1
        num_faster += row is not None
        kept.append(row)
    # A family of widths with a step comes before the range that contains it.
    rows = sorted(filter(None, kept), key=lambda row: (*row.keys[0], -row.step, row.from_cols))
    write_rows(path, rows)
    faster = f"{num_faster} have a tile 2% or more faster than the model's"
    return f"{num_measured} of {len(ranges)} ranges measured, {faster}; {path} has {len(rows)} rows"


def on_gpu(cell: Cell, launches: Sequence[Launch]) -> dict[Launch, float]:
    """Median microseconds of each launch whose result is right."""
    tensors = tensors_of(cell, 0)
    truth, runners = Truth(cell, tensors, 0), {}
    for each in launches:
        try:
            runner = prepare(OURS, cell, tensors, launch=each)
            if verify(runner, truth, rounded_mean=each.strategy == "uncached")[1] is None:
                runners[each] = runner
        except RuntimeError:  # it does not compile or launch
            continue
    return {
        each: median(times) for each, times in take_turns(Timer.on_gpu(), runners, _RUNS).items()
    }
