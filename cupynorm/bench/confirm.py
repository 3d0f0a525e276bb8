"""Each row of a device's data file beside the model: `tune --device-file h200.csv --confirm`.

For each row, its tile and the model's take turns at a random width of the row's range, of one of
the row's classes. A row that is at least 1 % faster than the model stays, with its gain and the
date. Others leave the file; so do rows whose kernel spills, and rows whose tile is the model's at
all widths that are tried. But where a row that stays would hold widths of one that leaves, that one
stays too. A row that is not measured in time stays as it was.

Nothing is checked against float64 here: tests run every tile of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from random import Random
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

LEAST_GAIN = 0.01
_WIDTHS, _RUNS = 8, 11

Measure = Callable[[Cell, Choice, Choice], tuple[float, float]]


@dataclass(frozen=True)
class Pair:
    """A row beside the model, on one cell."""

    cell: Cell
    of_model: Choice
    of_row: Choice


def pair_of(row: Row, device: Device, random: Random) -> Pair | None:
    """The first of some random widths at which the row's tile is not the model's."""
    by_model = replace(device, name=f"{device.name} by the model")
    range_ = Range(random.choice(row.keys), row.from_cols, row.to_cols, row.step, row)
    widths = range_.widths(random, _WIDTHS)
    random.shuffle(widths)
    for num_cols in widths:
        cell = range_.cell(num_cols)
        problem = plan_of(cell, cell.direction, device).problem
        of_model = choose(problem, by_model)
        of_row = choose(problem, by_model, row.strategy, row.tile(problem))
        if (of_model.strategy, of_model.tile) != (of_row.strategy, of_row.tile):
            return Pair(cell, of_model, of_row)
    return None


def kernels_of(pair: Pair) -> set[Kernel]:
    choices = (pair.of_model, pair.of_row)
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
    pairs = {at: pair_of(rows[at], device, random) for at in sorted(chosen)}
    kernels = {kernel for pair in pairs.values() if pair for kernel in kernels_of(pair)}
    faults = compile_ahead(kernels)
    end = monotonic() + seconds
    kept, slow, num_measured = {}, {}, 0
    for at, row in enumerate(rows):
        if at not in pairs or monotonic() > end:
            kept[at] = row
            continue
        pair, gain = pairs[at], 0.0
        if pair is not None and faults[pair.of_row.kernel]:
            gain = -1.0
        elif pair is not None:
            of_model, of_row = measure(pair.cell, pair.of_model, pair.of_row)
            gain = of_model / of_row - 1
        num_measured += 1
        of_row = kept if gain >= LEAST_GAIN else slow
        of_row[at] = replace(row, gain=round(gain, 3), date=str(date.today()))
    others = by_key(kept.values())
    kept |= {at: row for at, row in slow.items() if row.gain > -LEAST_GAIN and shares(row, others)}
    return [kept[at] for at in sorted(kept)], num_measured, len(rows) - len(kept)


def shares(row: Row, others: Mapping[Key, Sequence[Row]]) -> bool:
    """Whether another row of its classes holds one of the widths of a row."""
    first = -(-row.from_cols // row.step) * row.step
    widths = range(first, row.to_cols + 1, row.step)
    near = [each for key in row.keys for each in others.get(key, ())]
    return any(each.holds(num_cols) for each in near for num_cols in widths)
