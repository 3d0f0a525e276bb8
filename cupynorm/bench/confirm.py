"""Each row of a device's data file beside the model: `tune --device-file h200.csv --confirm`.

The tile of a row and the model's take turns at a random width of one of its classes. If it is not
slower there, they take turns once more, in another class if there is one. A row stays if its mean
gain is 1 % or more; 2 % if its range is narrow (its last width less than a tenth above its first).
It gets the date and the mean gain. These rows leave the file:

- others, unless a row that stays would hold their widths;
- rows whose kernel spills;
- rows whose tile is the model's at all widths that are tried.

Rows without a date are measured first, then those measured longest ago. A row that is not measured
in time stays as it was. Nothing is checked against float64 here: tests run every tile of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain, zip_longest
from random import Random
from statistics import mean
from time import monotonic

from ..plan.devices import Device
from ..plan.dispatch import choose
from ..plan.instances import Choice, Kernel
from ..plan.measured import Key, Row, by_key
from .cells import Cell
from .measure import plan_of
from .runners import prepare_ours
from .tensors import tensors_of
from .tune_ranges import Range, by_model, medians_of, part_of

LEAST_GAIN, LEAST_GAIN_OF_NARROW, NARROW = 0.01, 0.02, 1.1
_TRIED, _MEASURED, _RUNS = 8, 2, 11  # widths of a class, pairs of a row, runs of a pair

Measure = Callable[[Cell, Choice, Choice], tuple[float, float]]


@dataclass(frozen=True)
class Pair:
    """A row beside the model, on one cell."""

    cell: Cell
    of_model: Choice
    of_row: Choice


def pairs_of(row: Row, device: Device, random: Random) -> list[Pair]:
    """Random widths at which a row's tile is not the model's: _MEASURED of them at most.

    They are of different classes if the row has as many.
    """
    without_file = by_model(device)
    of_classes = []
    for key in random.sample(row.keys, len(row.keys)):
        range_ = Range(key, row.from_cols, row.to_cols, row.step, row)
        widths = range_.widths(random, _TRIED)
        random.shuffle(widths)
        of_class = []
        for num_cols in widths:
            cell = range_.cell(num_cols)
            problem = plan_of(cell, cell.direction, device).problem
            of_model = choose(problem, without_file)
            of_row = choose(problem, without_file, row.strategy, row.tile(problem))
            if (of_model.strategy, of_model.tile) != (of_row.strategy, of_row.tile):
                of_class.append(Pair(cell, of_model, of_row))
        of_classes.append(of_class)
    in_turn = chain.from_iterable(zip_longest(*of_classes))
    return [pair for pair in in_turn if pair][:_MEASURED]


def kernels_of(pairs: Sequence[Pair]) -> set[Kernel]:
    """The kernels of both tiles of all pairs."""
    choices = [each for pair in pairs for each in (pair.of_model, pair.of_row)]
    kernels = {kernel for each in choices for kernel in (each.amax_kernel, each.kernel)}
    return kernels - {None}


def measure_on_gpu(cell: Cell, of_model: Choice, of_row: Choice) -> tuple[float, float]:
    """Median microseconds of both tiles."""
    tensors, _ = tensors_of(cell, seed=cell.num_cols)
    choices = enumerate((of_model, of_row))
    runners = {
        at: prepare_ours(cell, tensors, strategy=each.strategy, tile=each.tile)
        for at, each in choices
    }
    medians = medians_of(runners, _RUNS)
    return medians[0], medians[1]


def confirm(
    rows: Sequence[Row],
    device: Device,
    *,
    part: tuple[int, int] = (1, 1),
    seconds: float = 480,
    seed: int = 0,
    compile_ahead: Callable[[set[Kernel]], Mapping[Kernel, str | None]] = dict.fromkeys,
    measure: Measure = measure_on_gpu,
) -> tuple[list[Row], int, int]:
    """The rows that stay, how many of them were measured, and how many left.

    part: (3, 8) takes the third of eight parts; rows of others stay. seconds: without compiling.
    compile_ahead: is given all kernels of a turn before the first is measured, and says what is
    wrong with one.
    """
    random = Random(seed)
    chosen = set(part_of(range(len(rows)), part))
    pairs = {at: pairs_of(rows[at], device, random) for at in sorted(chosen)}
    gains: dict[int, list[float]] = {at: [] for at, each in pairs.items() if not each}
    spilled = set()
    for turn in range(_MEASURED):
        if seconds < 0:
            break
        ahead = {at: each[turn] for at, each in pairs.items() if len(each) > turn}
        if turn:
            ahead = {at: pair for at, pair in ahead.items() if gains.get(at, [-1.0])[0] >= 0.0}
        faults = compile_ahead(kernels_of(list(ahead.values())))
        start = monotonic()
        for at in sorted(ahead, key=lambda at: rows[at].date):
            if monotonic() - start > seconds:
                break
            if faults[ahead[at].of_row.kernel]:
                spilled.add(at)
                continue
            of_model, of_row = measure(ahead[at].cell, ahead[at].of_model, ahead[at].of_row)
            gains.setdefault(at, []).append(of_model / of_row - 1)
        seconds -= monotonic() - start
    kept, slow = {}, {}
    for at, row in enumerate(rows):
        if at in spilled:
            continue
        if at not in gains:
            kept[at] = row
            continue
        row = replace(row, gain=round(mean(gains[at] or [0.0]), 3), date=str(date.today()))
        rows_of = kept if is_worth_a_row(row) else slow
        rows_of[at] = row
    others = by_key(kept.values())
    kept |= {at: row for at, row in slow.items() if row.gain > -LEAST_GAIN and shares(row, others)}
    return [kept[at] for at in sorted(kept)], len(gains.keys() | spilled), len(rows) - len(kept)


def is_worth_a_row(row: Row) -> bool:
    """Whether the mean gain of a measured row is enough for the widths that it covers."""
    is_narrow = row.to_cols < NARROW * row.from_cols
    return (row.gain or 0.0) >= (LEAST_GAIN_OF_NARROW if is_narrow else LEAST_GAIN)


def shares(row: Row, others: Mapping[Key, Sequence[Row]]) -> bool:
    """Whether another row of its classes holds one of the widths of a row."""
    first = -(-row.from_cols // row.step) * row.step
    widths = range(first, row.to_cols + 1, row.step)
    near = [each for key in row.keys for each in others.get(key, ())]
    return any(each.holds(num_cols) for each in near for num_cols in widths)
