"""Each row of a device's data file beside the model: `tune --device-file h200.csv --confirm`.

For each class of a row, its tile and the model's take turns at two random widths of its range. A
row stays if its mean gain is 1 % or more; 2 % if its range is narrow (its last width less than a
tenth above its first). It gets the date and the mean gain. These rows leave the file:

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
from random import Random
from statistics import mean
from time import monotonic

from ..plan.devices import Device
from ..plan.dispatch import choose
from ..plan.instances import Choice, Kernel
from ..plan.tables import Key, Row, by_key
from .cells import Cell
from .measure import free_memory, plan_of
from .report import quartiles
from .runners import prepare_ours
from .tensors import tensors_of
from .timer import Timer, take_turns
from .tune_ranges import Range, part_of

LEAST_GAIN, LEAST_GAIN_OF_NARROW, NARROW = 0.01, 0.02, 1.1
_TRIED, _MEASURED, _RUNS = 8, 2, 11  # widths of a class; runs of each

Measure = Callable[[Cell, Choice, Choice], tuple[float, float]]


@dataclass(frozen=True)
class Pair:
    """A row beside the model, on one cell."""

    cell: Cell
    of_model: Choice
    of_row: Choice


def pairs_of(row: Row, device: Device, random: Random) -> list[Pair]:
    """Of each class of a row, the first random widths at which its tile is not the model's."""
    by_model = replace(device, name=f"{device.name} by the model")
    pairs = []
    for key in row.keys:
        range_ = Range(key, row.from_cols, row.to_cols, row.step, row)
        widths = range_.widths(random, _TRIED)
        random.shuffle(widths)
        of_class = []
        for num_cols in widths:
            cell = range_.cell(num_cols)
            problem = plan_of(cell, cell.direction, device).problem
            of_model = choose(problem, by_model)
            of_row = choose(problem, by_model, row.strategy, row.tile(problem))
            if (of_model.strategy, of_model.tile) != (of_row.strategy, of_row.tile):
                of_class.append(Pair(cell, of_model, of_row))
        pairs += of_class[:_MEASURED]
    return pairs


def kernels_of(pairs: Sequence[Pair]) -> set[Kernel]:
    """The kernels of both tiles of all pairs."""
    choices = [each for pair in pairs for each in (pair.of_model, pair.of_row)]
    kernels = {kernel for each in choices for kernel in (each.amax_kernel, each.kernel)}
    return kernels - {None}


def measure_on_gpu(cell: Cell, of_model: Choice, of_row: Choice) -> tuple[float, float]:
    """Median microseconds of both tiles."""
    tensors, _ = tensors_of(cell, seed=cell.num_cols)
    runners = {
        name: prepare_ours(cell, tensors, strategy=choice.strategy, tile=choice.tile)
        for name, choice in (("model", of_model), ("row", of_row))
    }
    samples = take_turns(Timer.on_gpu(), runners, _RUNS)
    free_memory()
    return quartiles(samples["model"])[1], quartiles(samples["row"])[1]


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
    compile_ahead: is given all kernels before the first is measured, and says what is wrong with
    one.
    """
    random = Random(seed)
    chosen = set(part_of(range(len(rows)), part))
    pairs = {at: pairs_of(rows[at], device, random) for at in sorted(chosen)}
    faults = compile_ahead({kernel for each in pairs.values() for kernel in kernels_of(each)})
    end = monotonic() + seconds
    kept, slow, num_measured = {}, {}, 0
    for at in sorted(range(len(rows)), key=lambda at: rows[at].date):
        row = rows[at]
        if at not in pairs or monotonic() > end:
            kept[at] = row
            continue
        num_measured += 1
        if any(faults[pair.of_row.kernel] for pair in pairs[at]):
            continue
        times = [measure(pair.cell, pair.of_model, pair.of_row) for pair in pairs[at]]
        gains = [of_model / of_row - 1 for of_model, of_row in times] or [0.0]
        row = replace(row, gain=round(mean(gains), 3), date=str(date.today()))
        rows_of = kept if is_worth_a_row(row) else slow
        rows_of[at] = row
    others = by_key(kept.values())
    kept |= {at: row for at, row in slow.items() if row.gain > -LEAST_GAIN and shares(row, others)}
    return [kept[at] for at in sorted(kept)], num_measured, len(rows) - len(kept)


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
