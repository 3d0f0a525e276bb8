"""What was measured, as tables and as JSON."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..table import as_html, as_markdown
from .cells import COPY, DIRECTIONS, OURS, Cell
from .pictures import shares


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def is_faster(samples: Sequence[float], than: Sequence[float], least: float = 0.0) -> bool:
    """Whether the median is lower by more than half the sum of both spreads.

    A spread is the distance between the quartiles. least: a share by which it is lower, too.
    """
    (low, median, high), (other_low, other_median, other_high) = quartiles(samples), quartiles(than)
    spread = (high - low + other_high - other_low) / 2
    return other_median - median > max(spread, least * other_median)


@dataclass(frozen=True)
class Measurement:
    """One cell.

    samples: microseconds of each run, of "copy", "cupynorm", and each peer or tile in words that
    ran.
    errors: the largest of the sampled elements of each library, in units of what is allowed.
    faults: name -> sentence for a library that is off, or could not run.
    """

    cell: Cell
    strategy: str
    samples: dict[str, list[float]]
    errors: dict[str, float]
    faults: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Microseconds."""
        return quartiles(self.samples[name])[1]

    def spread(self, name: str) -> float:
        """Distance between the quartiles, as a share of the median."""
        low, middle, high = quartiles(self.samples[name])
        return (high - low) / middle

    def gigabytes_per_second(self, name: str) -> float:
        return self.cell.num_bytes / self.median(name) / 1e3

    def share(self, name: str) -> float:
        """Speed as a share of the copy's."""
        return self.median(COPY) / self.median(name)

    @property
    def right(self) -> list[str]:
        """The libraries that ran and were not off, the fastest first."""
        return sorted(
            (name for name in self.samples if name != COPY and name not in self.faults),
            key=self.median,
        )

    def best_of(self, names: Sequence[str]) -> str | None:
        """The fastest of these libraries that was right."""
        return next((name for name in self.right if name in names), None)

    @property
    def fastest(self) -> frozenset[str]:
        """The fastest right library, and those slower by less than half the sum of both spreads."""
        right, samples = self.right, self.samples
        return frozenset(name for name in right if not is_faster(samples[right[0]], samples[name]))


def by_shape(measurements: Sequence[Measurement]) -> dict[tuple[int, int], dict[str, Measurement]]:
    """(num_cols, num_rows) -> direction -> measurement."""
    shapes: dict[tuple[int, int], dict[str, Measurement]] = {}
    for each in measurements:
        found = shapes.setdefault((each.cell.num_cols, each.cell.num_rows), {})
        found[each.cell.direction] = each
    return shapes


@dataclass(frozen=True, repr=False)
class BenchResult:
    """All measurements of one run, printed as tables.

    True if the run was complete and cupynorm was right in every cell. environment: GPU, driver,
    versions. settings: of the run. missing: peer -> why it was not measured.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    measurements: list[Measurement]
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.num_off and "stopped" not in self.settings

    @property
    def num_off(self) -> int:
        """Cells in which cupynorm was wrong."""
        return sum(OURS in measurement.faults for measurement in self.measurements)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def libraries(self) -> list[str]:
        """cupynorm first, then the peers that ran in any cell."""
        names = [name for measurement in self.measurements for name in measurement.samples]
        return [OURS, *dict.fromkeys(name for name in names if name not in (COPY, OURS))]

    def tables(self) -> dict[str, list[Measurement]]:
        """Kind of cell -> its measurements."""
        tables: dict[str, list[Measurement]] = {}
        for measurement in self.measurements:
            tables.setdefault(measurement.cell.kind, []).append(measurement)
        return tables

    def __str__(self) -> str:
        lines = [self.headline(), self.method()]
        peers = self.libraries[1:]
        # A tile in words has a colon, and is too long for the head of a column.
        in_words = [name for name in peers if ":" in name]
        tiles = {name: f"tile {at}" for at, name in enumerate(in_words, 1)}
        titles = {name: tiles.get(name, name) for name in peers}
        for title, measurements in self.tables().items():
            lines += ["", title, *aligned(_table(measurements, titles))]
        lines += ["", "* the fastest, or slower by less than the spread"]
        lines += ["share: of the speed of the copy; error: in units of what is allowed"]
        lines += [f"{short}: {name}" for name, short in tiles.items()]
        num_cells = len(self.measurements)
        if peers:
            num_fastest = sum(OURS in measured.fastest for measured in self.measurements)
            lines.append(f"{OURS} is among the fastest in {num_fastest} of {num_cells} cells")
        lines += self._faults()
        lines += [f"{name} was not measured: {why}" for name, why in self.missing.items()]
        if self.num_off:
            lines.append(f"OFF: {OURS} is beyond what its dtypes allow in {self.num_off} cells")
        if "stopped" in self.settings:
            lines.append(f"stopped {self.settings['stopped']}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self.headline())}</p>"]
        for title, measurements in self.tables().items():
            if len({each.cell.num_cols for each in measurements}) > 1:
                parts.append(str(shares(title, measurements)))
            peers = {name: name for name in self.libraries[1:]}
            parts.append(as_html(_table(measurements, peers)))
        return "".join([*parts, f"<p>{html.escape(' '.join(self._faults()))}</p>"])

    def _faults(self) -> list[str]:
        """What is off or could not run: one line for all cells of a kind with the same sentence."""
        shapes: dict[tuple[str, str], list[str]] = {}
        for measured in self.measurements:
            cell = measured.cell
            for text in measured.faults.values():
                lines = shapes.setdefault((cell.kind, text), [])
                lines.append(f"{cell.num_rows} x {cell.num_cols}")
        return [f"{kind}, {', '.join(each)}: {text}" for (kind, text), each in shapes.items()]

    def headline(self) -> str:
        """GPU, versions and date in one line."""
        machine = self.environment
        labels = {"driver": "driver", "cuda_runtime": "CUDA", "cupy": "CuPy", "torch": "torch"}
        shown = [machine.get("gpu")]
        shown += [f"{label} {machine[name]}" for name, label in labels.items() if machine.get(name)]
        peers = machine.get("peers") or {}
        shown += [f"{name} {version}" for name, version in peers.items() if version]
        shown += [f"cupynorm {machine.get('cupynorm')}", str(machine.get("date"))[:10]]
        return ", ".join(filter(None, shown))

    def method(self) -> str:
        """How it was measured, in a sentence."""
        return (
            f"Medians of {self.settings['runs']} runs on random data; kernel time by CUDA events, "
            "the L2 cache flushed before each run by a write during which the host enqueues the "
            "call"
        )

    def markdown(self) -> str:
        """The table of docs/benchmarks.md: GB/s and the share of the copy for each shape.

        It has cupynorm, torch, and the fastest of the other libraries with its name. Each norm and
        dtype is a table of its own.
        """
        numbers = "GB/s (share of a copy of the same bytes), the fastest in bold"
        lines = [f"{self.headline()}. {self.method()}. {numbers}."]
        families: dict[str, list[Measurement]] = {}
        for measured in self.measurements:
            cell = measured.cell
            families.setdefault(f"{cell.norm}, {cell.details}", []).append(measured)
        for title, measurements in families.items():
            if len(families) > 1:
                lines += ["", f"{title}:"]
            lines += ["", *self._markdown_table(measurements)]
        if "torch" in self.missing:
            lines.append(f"\ntorch was not measured: {self.missing['torch']}.")
        lines += ["", f"Made by `{self.settings['command']}`."]
        return "\n".join(lines)

    def _markdown_table(self, measurements: Sequence[Measurement]) -> list[str]:
        shown = [name for name in self.libraries if name in (OURS, "torch")]
        others = [name for name in self.libraries if name not in shown]
        measured_directions = {each.cell.direction for each in self.measurements}
        directions = [name for name in DIRECTIONS if name in measured_directions]
        shapes = by_shape(measurements)
        with_rows = len({num_cols for num_cols, _ in shapes}) < len(shapes)
        rows = [["num_cols", *["num_rows"] * with_rows]]
        for direction in directions:
            rows[0] += [f"{direction}: strategy", *shown, *["best other"] * bool(others)]
        for (num_cols, num_rows), found in shapes.items():
            row = [f"{num_cols:,}", *[f"{num_rows:,}"] * with_rows]
            for direction in directions:
                measured = found.get(direction)
                row.append(measured.strategy if measured else "")
                row += [_markdown_cell(measured, name) for name in shown]
                if others:
                    best = measured and measured.best_of(others)
                    row.append(f"{best} {_markdown_cell(measured, best)}" if best else "-")
            rows.append(row)
        numbers = (*shown, "best other")
        words = [at for at, heading in enumerate(rows[0]) if heading not in numbers]
        return as_markdown(rows, words)

    def to_json(self) -> str:
        """Everything, with all samples."""
        cells = []
        for measured in self.measurements:
            errors = {name: e if math.isfinite(e) else None for name, e in measured.errors.items()}
            more = {"num_bytes": measured.cell.num_bytes, "strategy": measured.strategy}
            more |= {"microseconds": measured.samples, "errors": errors, "faults": measured.faults}
            cells.append(asdict(measured.cell) | more)
        content = {"environment": self.environment, "settings": self.settings}
        content |= {"missing": self.missing, "cells": cells}
        return json.dumps(content, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> BenchResult:
        """The result that to_json wrote. Raises ValueError for other text."""
        try:
            content = json.loads(text)
            measurements = [_measurement_of(cell) for cell in content["cells"]]
            environment, settings = content["environment"], content["settings"]
            return cls(environment, settings, measurements, content["missing"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"no result of the benchmark: {why}") from error


def _measurement_of(content: dict[str, Any]) -> Measurement:
    # Older files lack newer fields of a cell.
    known = {each.name: content[each.name] for each in fields(Cell) if each.name in content}
    errors = {name: math.nan if e is None else e for name, e in content["errors"].items()}
    more = (content["strategy"], content["microseconds"], errors, content["faults"])
    return Measurement(Cell(**known), *more)


def read(path: str | Path) -> BenchResult:
    """The result in a file of `bench --json`. Raises OSError, or ValueError for other text."""
    try:
        return BenchResult.from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from error


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of columns, each as wide as its widest text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{text:>{width}}" for text, width in zip(row, widths)).rstrip() for row in rows
    ]


def _table(measurements: Sequence[Measurement], titles: dict[str, str]) -> list[list[str]]:
    """Cells of one kind, with a head. titles: peer -> the head of its column."""
    head = ["num_cols", "num_rows", "strategy", "copy GB/s", f"{OURS} us", "GB/s", "share"]
    head += ["spread", "error"]
    for title in titles.values():
        head += [f"{title} us", "share"]
    rows = [head]
    for measured in measurements:
        cell = measured.cell
        row = [str(cell.num_cols), str(cell.num_rows), measured.strategy]
        row += [f"{measured.gigabytes_per_second(COPY):.0f}", _time(measured, OURS)]
        row += [f"{measured.gigabytes_per_second(OURS):.0f}", f"{measured.share(OURS):.2f}"]
        row += [f"{measured.spread(OURS):.1%}", f"{measured.errors[OURS]:.2f}"]
        for name in titles:
            has_run = name in measured.samples
            row += [_time(measured, name), f"{measured.share(name):.2f}" if has_run else "-"]
        rows.append(row)
    return rows


def _time(measured: Measurement, name: str) -> str:
    if name not in measured.samples:
        return "-"
    mark = "*" if name in measured.fastest else "OFF" if name in measured.faults else ""
    return f"{measured.median(name):.1f}{mark}"


def _markdown_cell(measured: Measurement | None, name: str) -> str:
    if measured is None or name not in measured.samples:
        return "-"
    if name in measured.faults:
        return "off"
    text = f"{measured.gigabytes_per_second(name):,.0f} ({measured.share(name):.2f})"
    return f"**{text}**" if name in measured.fastest else text
