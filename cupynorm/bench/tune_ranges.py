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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import exp, inf, log
from operator import truediv
from random import Random

from ..dtypes import DTYPES
from ..gpu import launch
from ..plan import measured
from ..plan.candidates import candidates
from ..plan.devices import Device
from ..plan.dispatch import choose
from ..plan.instances import Kernel
from ..plan.measured import COUNTS, Row
from ..plan.problem import DIRECTIONS, NORMS, SCALINGS, Problem, Tile
from .cells import Cell
from .measure import free_memory, plan_of
from .report import quartiles
from .runners import prepare_ours
from .tensors import tensors_of
from .timer import Runner, Timer, take_turns
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

    key: measured.Key
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
        alignment = int(self.words[0])
        pack = alignment // DTYPES[self.key[2]].itemsize
        step = max(self.step, pack)
        multiples = range(-(-max(1, self.from_cols) // step) * step, self.to_cols + 1, step)
        fitting = [cols for cols in multiples if alignment >= 16 or cols % (2 * pack)]
        return sorted(random.sample(fitting, min(count, len(fitting))))

    def cell(self, num_cols: int) -> Cell:
        direction, norm, dtype, _ = self.key
        scale = next((word for word in self.words if word in SCALINGS), None)
        size = DTYPES[dtype].itemsize
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
    for direction in DIRECTIONS:
        for norm in NORMS:
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
    without_file = by_model(device)
    middle = problems[len(problems) // 2]
    _, norm, dtype, _ = range_.key
    chosen = choose(middle, without_file)
    widths = (range_.from_cols, range_.to_cols, range_.step)
    empty = Row(*range_.key, "", "", *widths, *([0] * len(COUNTS)))
    choices = (chosen, *candidates(middle, device))
    tried = [_like(empty, choice.tile, choice.strategy) for choice in choices]
    own = [replace(range_.row, norm=norm, dtype=dtype, gain=None, date="")] if range_.row else []
    tried[1:1] = [*own, *(near for row in (*own, tried[0]) for near in _neighbours(row))]
    fitting = []
    for row in dict.fromkeys(tried):
        try:
            for problem in problems:
                choose(problem, without_file, row.strategy, row.tile(problem))
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
    if gains[at] < LEAST_GAIN:
        return None
    return replace(rows[at], gain=round(gains[at], 3), date=str(date.today()))


def measure_on_gpu(cell: Cell, tiles: Sequence[tuple[str, Tile]], seed: int = 0) -> list[float]:
    """Median microseconds of each tile; infinite if it spills or its result is wrong."""
    problem = plan_of(cell, cell.direction).problem
    device = launch.current_device()
    tensors, _ = tensors_of(cell, seed)
    truth, runners = Truth(cell, tensors, seed), {}
    for at, (strategy, tile) in enumerate(tiles):
        if fault_of(choose(problem, device, strategy, tile).kernel):
            continue
        runner = prepare_ours(cell, tensors, strategy=strategy, tile=tile)
        if not verify(runner, truth, rounded_mean=strategy == "uncached")[1]:
            runners[at] = runner
    medians = medians_of(runners, _RUNS)
    return [medians.get(at, inf) for at in range(len(tiles))]


def medians_of(runners: Mapping[int, Runner], runs: int) -> dict[int, float]:
    """Median microseconds of each, in turns."""
    samples = take_turns(Timer.on_gpu(), runners, runs)
    free_memory()
    return {name: quartiles(each)[1] for name, each in samples.items()}


def by_model(device: Device) -> Device:
    """The device under a name that has no data file."""
    return replace(device, name=f"{device.name} by the model")


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
    without_file = by_model(device)
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
            own = choose(problem, without_file)
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
        if last and _is_continued(last, row):
            gains = [gain for gain in (last.gain, row.gain) if gain is not None]
            to_cols = max(last.to_cols, row.to_cols)
            row = replace(
                row, from_cols=last.from_cols, to_cols=to_cols, gain=min(gains, default=None)
            )
            whole.pop()
        whole.append(row)
    return whole


def _is_continued(last: Row, row: Row) -> bool:
    """Whether a row has the tile of the one before it, and begins where that ends."""
    alike = replace(
        last, from_cols=row.from_cols, to_cols=row.to_cols, gain=row.gain, date=row.date
    )
    return alike == row and row.from_cols <= last.to_cols + max(row.step, 16)
