"""The data file of a device, measured: `python -m cupynorm tune --device-file h200.csv`.

    ranges    rows of the file, and bands of widths between powers of two that it does not cover
    tiles     the model's, the file's, its neighbours in threads, blocks and stages, and candidates
              of the middle width
    time      all tiles take turns at a few random widths of the range
    kept      the tile with the best mean speed, if it is at least 2% faster than the model's; else
              the model's

A range that is not measured in time keeps its row. Problems with a residual or dsum are not
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import exp, inf, log
from operator import truediv
from random import Random

from ..gpu import launch
from ..plan import measured_tiles
from ..plan.candidates import candidates
from ..plan.devices import Device
from ..plan.dispatch import choose
from ..plan.instances import Kernel
from ..plan.measured_tiles import COUNTS, Row
from ..plan.problem import Problem, Tile
from .cells import Cell
from .measure import free_memory, plan_of
from .report import quartiles
from .runners import prepare_ours
from .tensors import tensors_of
from .timer import Timer, take_turns
from .truth import Truth, verify
from .tune import fault_of

LEAST_GAIN = 0.02
_WIDTHS, _RUNS, _MOST_TILES, _AHEAD = 3, 9, 12, 16
_BAND_FROM, _BAND_TO = 4096, 2**18
_X_BYTES = 2**28

Measure = Callable[[Cell, Sequence[tuple[str, Tile]]], list[float]]


@dataclass(frozen=True)
class Range:
    """Widths of one class. row: the file's row for them, or None if the model decides."""

    key: measured_tiles.Key
    from_cols: int
    to_cols: int
    step: int
    row: Row | None = None

    @property
    def words(self) -> list[str]:
        return self.key[3].split()

    @property
    def is_measured(self) -> bool:
        return not {"residual", "dsum"} & set(self.words)

    def widths(self, random: Random, count: int = _WIDTHS) -> list[int]:
        """Random widths of the range, whose rows have exactly the alignment of the class."""
        pack = int(self.words[0]) // (4 if self.key[2] == "float32" else 2)
        step = max(self.step, pack)
        fitting = [
            cols
            for cols in range(-(-self.from_cols // step) * step, self.to_cols + 1, step)
            if cols
        ]
        if int(self.words[0]) < 16:
            fitting = [cols for cols in fitting if cols % (2 * pack)]
        return sorted(random.sample(fitting, min(count, len(fitting))))

    def cell(self, num_cols: int) -> Cell:
        direction, norm, dtype, _ = self.key
        scale = next(
            (word for word in self.words if word in ("given", "tensor", "row", "block", "mx")), None
        )
        size = 4 if dtype == "float32" else 2
        return Cell(
            norm,
            direction,
            dtype,
            max(1, _X_BYTES // (num_cols * size)),
            num_cols,
            weight_dtype="float32" if "wide" in self.words else None,
            out_dtype="float8_e4m3fn" if scale else None,
            residual=bool({"residual", "dsum"} & set(self.words)),
            scale=scale,
            amax="amax" in self.words,
        )


def ranges_of(rows: Iterable[Row]) -> list[Range]:
    """The file's ranges, one for each class, then bands between powers of two.

    The bands are for rows that begin on 16 bytes.
    """
    ranges = [
        Range(key, row.from_cols, row.to_cols, row.step, row) for row in rows for key in row.keys
    ]
    for direction in ("forward", "backward"):
        for norm in ("layer_norm", "rms_norm"):
            for dtype in ("bfloat16", "float16", "float32"):
                at = _BAND_FROM
                while at < _BAND_TO:
                    for first, last in ((at + 1, at * 3 // 2), (at * 3 // 2 + 1, 2 * at)):
                        ranges.append(Range((direction, norm, dtype, "16 bytes"), first, last, 64))
                    at *= 2
    return ranges


def part_of(ranges: Sequence[Range], part: tuple[int, int]) -> list[Range]:
    """One part of the ranges: (3, 8) is every eighth range from the third on.

    Parts formed in this way take about equally long.
    """
    at, count = part
    return list(ranges[at - 1 :: count])


def _like(row: Row, choice_tile: Tile, strategy: str) -> Row:
    counts = {name: getattr(choice_tile, name) for name in COUNTS}
    return replace(row, strategy=strategy, path=choice_tile.path, gain=None, date="", **counts)


def _neighbours(row: Row) -> Iterable[Row]:
    step = 32 if row.threads_per_row >= 64 else 0
    for threads in (row.threads_per_row - step, row.threads_per_row + step):
        yield replace(row, threads_per_row=threads)
    for blocks in (row.blocks_per_sm - 1, row.blocks_per_sm + 1):
        yield replace(row, blocks_per_sm=max(1, blocks))
    if row.path in ("ring", "bundle"):
        yield from (
            replace(row, stages=stages) for stages in (row.stages - 1, row.stages + 1) if stages > 1
        )


def rows_to_try(range_: Range, problems: Sequence[Problem], device: Device) -> list[Row]:
    """Rows whose tile fits every problem; the first has the model's tile of the middle width."""
    by_model = replace(device, name=f"{device.name} by the model")
    middle = problems[len(problems) // 2]
    direction, norm, dtype, kind = range_.key
    chosen = choose(middle, by_model)
    empty = Row(
        direction,
        norm,
        dtype,
        kind,
        "",
        "",
        range_.from_cols,
        range_.to_cols,
        range_.step,
        *([0] * len(COUNTS)),
    )
    tried = [
        _like(empty, choice.tile, choice.strategy)
        for choice in (chosen, *candidates(middle, device))
    ]
    own = [replace(range_.row, norm=norm, dtype=dtype, gain=None, date="")] if range_.row else []
    tried[1:1] = [*own, *(near for row in (*own, tried[0]) for near in _neighbours(row))]
    fitting = []
    for row in dict.fromkeys(tried):
        try:
            for problem in problems:
                choose(problem, by_model, row.strategy, row.tile(problem))
        except ValueError:
            continue
        fitting.append(row)
    return fitting[:_MOST_TILES]


def best_of(
    rows: Sequence[Row], times: Sequence[Sequence[float]], model: Sequence[float]
) -> Row | None:
    """The row with the best mean speed over the widths, if its gain is at least LEAST_GAIN.

    times: of each row, at each width.
    model: times of the model's own tile, at each width.
    """
    gains = [
        -1.0 if inf in each else exp(sum(map(log, map(truediv, model, each))) / len(model)) - 1
        for each in times
    ]
    at = max(range(len(rows)), key=gains.__getitem__)
    return (
        replace(rows[at], gain=round(gains[at], 3), date=str(date.today()))
        if gains[at] >= LEAST_GAIN
        else None
    )


def measure_on_gpu(cell: Cell, tiles: Sequence[tuple[str, Tile]], seed: int = 0) -> list[float]:
    """Median microseconds of each tile; infinite if it spills or its result is wrong."""
    problem = plan_of(cell, cell.direction).problem
    device = launch.current_device()
    faults = [fault_of(choose(problem, device, strategy, tile).kernel) for strategy, tile in tiles]
    tensors, _ = tensors_of(cell, seed)
    truth, runners = Truth(cell, tensors, seed), {}
    for at, ((strategy, tile), fault) in enumerate(zip(tiles, faults)):
        runner = None if fault else prepare_ours(cell, tensors, strategy=strategy, tile=tile)
        if runner and not verify(runner, truth, rounded_mean=strategy == "uncached")[1]:
            runners[str(at)] = runner
    samples = take_turns(Timer.on_gpu(), runners, _RUNS)
    free_memory()
    return [
        quartiles(samples[str(at)])[1] if str(at) in samples else inf for at in range(len(tiles))
    ]


def _prepared(range_: Range, random: Random, device: Device) -> tuple:
    """Cells, their problems, the rows to try, and the kernels of all of these."""
    cells = [range_.cell(num_cols) for num_cols in range_.widths(random)]
    problems = [plan_of(cell, cell.direction, device).problem for cell in cells]
    tried = rows_to_try(range_, problems, device) if cells else []
    kernels = [
        choose(each, device, row.strategy, row.tile(each)).kernel
        for each in problems
        for row in tried
    ]
    return cells, problems, tried, kernels


def tune_ranges(
    rows: Sequence[Row],
    device: Device,
    *,
    part: tuple[int, int] = (1, 1),
    seconds: float = 480,
    seed: int = 0,
    measure: Measure = measure_on_gpu,
    compile_ahead: Callable[[set[Kernel]], object] = len,
) -> tuple[list[Row], list[Range]]:
    """The winning rows of one part of the ranges, and the ranges that were measured in time.

    compile_ahead: receives the kernels of the next ranges before they are measured.
    """
    end, random = time.monotonic() + seconds, Random(seed)
    by_model = replace(device, name=f"{device.name} by the model")
    winners, done = [], []
    ranges = part_of([each for each in ranges_of(rows) if each.is_measured], part)
    ahead: dict[Range, tuple] = {}
    for at, each in enumerate(ranges):
        if time.monotonic() > end:
            break
        if each not in ahead:
            ahead = {
                coming: _prepared(coming, random, device) for coming in ranges[at : at + _AHEAD]
            }
            compile_ahead({kernel for *_, kernels in ahead.values() for kernel in kernels})
        cells, problems, tried, _ = ahead[each]
        if not cells:
            continue
        times, model = [[] for _ in tried], []
        for cell, problem in zip(cells, problems):
            own = choose(problem, by_model)
            of_width = measure(
                cell,
                [(own.strategy, own.tile), *((row.strategy, row.tile(problem)) for row in tried)],
            )
            model.append(of_width[0])
            for samples, microseconds in zip(times, of_width[1:]):
                samples.append(microseconds)
        if inf in model:  # the model's own tile spills or is wrong: nothing to compare with
            continue
        best = best_of(tried, times, model) if tried else None
        winners += [best] if best else []
        done.append(each)
    return winners, done


def merged(rows: Sequence[Row], winners: Sequence[Row], done: Sequence[Range]) -> list[Row]:
    """The file's rows, in which the winners replace the rows of the measured ranges.

    Neighbouring rows with equal tiles become one row.
    """
    measured = {(each.key, each.from_cols, each.to_cols, each.step) for each in done}
    alone = [replace(row, norm=key[1], dtype=key[2]) for row in rows for key in row.keys]
    kept = [
        row for row in alone if (row.keys[0], row.from_cols, row.to_cols, row.step) not in measured
    ]
    whole: list[Row] = []
    # Rows of the widest step first: a family of widths comes before the range that contains it.
    for row in sorted([*kept, *winners], key=lambda row: (*row.keys[0], -row.step, row.from_cols)):
        last = whole[-1] if whole else None
        if (
            last
            and replace(
                last, to_cols=row.to_cols, from_cols=row.from_cols, gain=row.gain, date=row.date
            )
            == row
        ):
            if row.from_cols <= last.to_cols + max(row.step, 16):
                gains = [gain for gain in (last.gain, row.gain) if gain is not None]
                whole[-1] = replace(
                    last,
                    to_cols=max(last.to_cols, row.to_cols),
                    gain=min(gains, default=None),
                    date=row.date,
                )
                continue
        whole.append(row)
    return whole
