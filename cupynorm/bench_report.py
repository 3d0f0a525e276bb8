"""What was measured, and how it is shown: tables, the README's table, JSON, a plot, and one run against another.
No GPU needed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .bench_cells import COPY, DIRECTIONS, OURS, Cell
from .nvrtc import MissingLibraryError

_MARKERS = ("<!-- bench -->", "<!-- /bench -->")
# A run's own spread does not hold what differs from one run to the next (clocks, which pages of memory): less is no change.
_LEAST_MARGIN = 0.02


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


@dataclass(frozen=True)
class Measurement:
    """One cell. samples: microseconds of each run, for "copy", "cupynorm" and each peer that ran, or tile in words.

    errors: the worst sampled element of each library, in units of what is allowed. faults: name -> sentence for a library
    that is off, or could not run.
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
        return sorted((name for name in self.samples if name != COPY and name not in self.faults), key=self.median)

    @property
    def fastest(self) -> frozenset[str]:
        """The fastest right library, and all that are behind it by less than half of both spreads together."""

        def behind(name: str) -> bool:
            margin = (self.spread(name) * self.median(name) + self.spread(best) * self.median(best)) / 2
            return self.median(name) - self.median(best) > margin

        best = next(iter(self.right), None)
        return frozenset(name for name in self.right if not behind(name))


@dataclass(frozen=True)
class BenchResult:
    """All measurements of one run. Prints as tables; true if it came to its end and cupynorm was right in every cell.

    environment: GPU, driver, versions. settings: of the run. missing: peer -> why it was not measured.
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
        # A tile in words has a colon, and is too long for a column's head.
        tiles = {name: f"tile {at}" for at, name in enumerate((name for name in peers if ":" in name), 1)}
        for title, measurements in self.tables().items():
            header = ["num_cols", "num_rows", "strategy", "copy GB/s", f"{OURS} us", "GB/s", "share", "spread", "error"]
            rows = [header + [text for name in peers for text in (f"{tiles.get(name, name)} us", "share")]]
            for measured in measurements:
                cell = measured.cell
                row = [str(cell.num_cols), str(cell.num_rows), measured.strategy]
                row += [f"{measured.gigabytes_per_second(COPY):.0f}", _time(measured, OURS)]
                row += [f"{measured.gigabytes_per_second(OURS):.0f}", f"{measured.share(OURS):.2f}"]
                row += [f"{measured.spread(OURS):.1%}", f"{measured.errors[OURS]:.2f}"]
                for name in peers:
                    row += [_time(measured, name), f"{measured.share(name):.2f}" if name in measured.samples else "-"]
                rows.append(row)
            lines += ["", title, *aligned(rows)]
        lines += [
            "",
            "* the fastest, or behind it by less than the spread; share: of the copy; error: in units of what is allowed",
        ]
        lines += [f"{short}: {name}" for name, short in tiles.items()]
        if peers:
            num_fastest = sum(OURS in measured.fastest for measured in self.measurements)
            lines.append(f"{OURS} is among the fastest in {num_fastest} of {len(self.measurements)} cells")
        lines += [*self._faults(), *(f"{name} was not measured: {why}" for name, why in self.missing.items())]
        if self.num_off:
            lines.append(f"OFF: {OURS} is beyond what its dtypes allow in {self.num_off} cells")
        if "stopped" in self.settings:
            lines.append(f"stopped {self.settings['stopped']}")
        return "\n".join(lines)

    def _faults(self) -> list[str]:
        """What is off or could not run, in which cells: one line for cells of one kind with the same sentence."""
        shapes: dict[tuple[str, str], list[str]] = {}
        for measured in self.measurements:
            for text in measured.faults.values():
                cell = measured.cell
                shapes.setdefault((cell.kind, text), []).append(f"{cell.num_rows} x {cell.num_cols}")
        return [f"{kind}, {', '.join(each)}: {text}" for (kind, text), each in shapes.items()]

    def headline(self) -> str:
        """GPU, versions and date in one line."""
        found = self.environment
        shown = [found.get("gpu")]
        for name, label in (("driver", "driver"), ("cuda_runtime", "CUDA"), ("cupy", "CuPy"), ("torch", "torch")):
            if found.get(name):
                shown.append(f"{label} {found[name]}")
        # torch has its version already, and what is no package of its own has none.
        shown += [f"{name} {version}" for name, version in (found.get("peers") or {}).items() if version]
        shown += [f"cupynorm {found.get('cupynorm')}", str(found.get("date"))[:10]]
        return ", ".join(filter(None, shown))

    def method(self) -> str:
        """How the numbers came about, in a sentence."""
        return (
            f"Medians of {self.settings['runs']} runs on random data; kernel time by CUDA events, the L2 cache flushed before "
            "each run by a write during which the host enqueues the call"
        )

    def markdown(self) -> str:
        """The README's table: for each norm and dtype one row per shape, with GB/s and the share of the copy.

        Of many libraries it shows cupynorm, torch, and by name the best of the others.
        """
        lines = [f"{self.headline()}. {self.method()}. GB/s (share of a copy of the same bytes), the fastest in bold."]
        shown = [name for name in self.libraries if name in (OURS, "torch")]
        others = [name for name in self.libraries if name not in shown]
        families: dict[str, dict[tuple[int, int], dict[str, Measurement]]] = {}
        for measured in self.measurements:
            cell = measured.cell
            family = families.setdefault(f"{cell.norm}, {cell.details}", {})
            family.setdefault((cell.num_cols, cell.num_rows), {})[cell.direction] = measured
        directions = [name for name in DIRECTIONS if any(name == each.cell.direction for each in self.measurements)]
        for title, shapes in families.items():
            with_rows = len({num_cols for num_cols, _ in shapes}) < len(shapes)
            header = ["num_cols", *(["num_rows"] if with_rows else [])]
            for direction in directions:
                header += [f"{direction}: strategy", *shown, *(["best other"] if others else [])]
            if len(families) > 1:
                lines += ["", f"{title}:"]
            rule = ["---:" if name in (*shown, "best other") else "---" for name in header]
            lines += ["", _markdown_row(header), _markdown_row(rule)]
            for (num_cols, num_rows), found in shapes.items():
                row = [f"{num_cols:,}", *([f"{num_rows:,}"] if with_rows else [])]
                for direction in directions:
                    measured = found.get(direction)
                    row.append(measured.strategy if measured else "")
                    row += [_markdown_cell(measured, name) for name in shown]
                    if others:
                        best = next((name for name in measured.right if name in others), None) if measured else None
                        row.append(f"{best} {_markdown_cell(measured, best)}" if best else "-")
                lines.append(_markdown_row(row))
        lines += [f"\n{name} was not measured: {why}." for name, why in self.missing.items() if name == "torch"]
        lines += ["", f"Made by `{self.settings['command']}`."]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything, with all raw samples."""
        measurements = [
            {
                **asdict(measured.cell),
                "num_bytes": measured.cell.num_bytes,
                "strategy": measured.strategy,
                "microseconds": measured.samples,
                "errors": {name: error if math.isfinite(error) else None for name, error in measured.errors.items()},
                "faults": measured.faults,
            }
            for measured in self.measurements
        ]
        content = {"environment": self.environment, "settings": self.settings, "missing": self.missing, "cells": measurements}
        return json.dumps(content, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> BenchResult:
        """What to_json wrote. ValueError if it did not."""
        names = [each.name for each in fields(Cell)]
        try:
            content = json.loads(text)
            measurements = [
                Measurement(
                    Cell(**{name: found[name] for name in names if name in found}),  # older files lack the newer fields
                    found["strategy"],
                    found["microseconds"],
                    {name: math.nan if error is None else error for name, error in found["errors"].items()},
                    found["faults"],
                )
                for found in content["cells"]
            ]
            return cls(content["environment"], content["settings"], measurements, content["missing"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no result of the benchmark: {type(error).__name__}: {error}") from error


def read(path: str | Path) -> BenchResult:
    """A file that `bench --json` wrote. OSError if it cannot be read, ValueError if it holds something else."""
    try:
        return BenchResult.from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from error


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of columns, each as wide as its widest text."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(f"{text:>{width}}" for text, width in zip(row, widths)).rstrip() for row in rows]


def _time(measured: Measurement, name: str) -> str:
    if name not in measured.samples:
        return "-"
    mark = "*" if name in measured.fastest else "OFF" if name in measured.faults else ""
    return f"{measured.median(name):.1f}{mark}"


def _markdown_row(row: list[str]) -> str:
    return f"| {' | '.join(row)} |"


def _markdown_cell(measured: Measurement | None, name: str) -> str:
    if measured is None or name not in measured.samples:
        return "-"
    if name in measured.faults:
        return "off"
    text = f"{measured.gigabytes_per_second(name):,.0f} ({measured.share(name):.2f})"
    return f"**{text}**" if name in measured.fastest else text


def rewrite_readme(text: str, table: str) -> str:
    """A README's text with what lies between its bench markers replaced. ValueError if it does not have them once, in order."""
    start, end = _MARKERS
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"README.md needs the markers {start} and {end}, each once and in this order, around the table")
    before, after = text.partition(start)[0], text.partition(end)[2]
    return f"{before}{start}\n\n{table.strip()}\n\n{end}{after}"


# A plot.


def require_matplotlib() -> None:
    """Raises MissingLibraryError if a plot cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError(
            f"matplotlib could not be imported ({error}); a plot needs it: pip install matplotlib"
        ) from error


def plot(result: BenchResult, path: str | Path) -> None:
    """Draws GB/s over num_cols into a file, one panel for each kind of cell, the copy as the ceiling.

    path: its suffix is the format, .png or .svg among others. Where a width has several num_rows, each has its own panel.
    Raises MissingLibraryError without matplotlib, ValueError for a format that it does not know.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    panels: dict[str, list[Measurement]] = {}
    for title, measurements in result.tables().items():
        several = len({measured.cell.num_cols for measured in measurements}) < len(measurements)
        for measured in sorted(measurements, key=lambda measured: measured.cell.num_cols):
            rows = f", {measured.cell.num_rows} rows" if several else ""
            panels.setdefault(title + rows, []).append(measured)
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(6.5 * across, 3.6 * down + 0.6), layout="constrained")
    drawn: dict[str, Any] = {}
    for at, (title, measurements) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, at + 1)
        for name in (COPY, *result.libraries):
            points = [measured for measured in measurements if name in measured.samples]
            style = {COPY: {"color": "gray", "linestyle": "--"}, OURS: {"color": "black", "marker": "o", "zorder": 3}}
            look = style.get(name, {"color": f"C{result.libraries.index(name) - 1}" if name != COPY else None, "marker": "."})
            xs = [measured.cell.num_cols for measured in points]
            (drawn[name],) = axes.plot(xs, [measured.gigabytes_per_second(name) for measured in points], **look)
        axes.set(title=title, xlabel="num_cols", ylabel="GB/s")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(6, len(drawn)))
    figure.suptitle(result.headline(), fontsize=8)
    figure.savefig(path, dpi=150)


# One run against another.


@dataclass(frozen=True)
class Change:
    """cupynorm's share of the copy in one cell of two runs, and the relative change up to which it is none."""

    cell: Cell
    before: float
    after: float
    margin: float

    @property
    def relative(self) -> float:
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """ "slower", "faster" or "same"."""
        return "same" if abs(self.relative) <= self.margin else "slower" if self.relative < 0 else "faster"


@dataclass(frozen=True)
class Comparison:
    """Two runs, cell by cell. Prints what changed; true if nothing became slower and nothing is off."""

    changes: list[Change]
    notes: list[str]
    off: list[str]

    @property
    def ok(self) -> bool:
        return not self.off and all(change.verdict != "slower" for change in self.changes)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        changed = [change for change in self.changes if change.verdict != "same"]
        lines = []
        if changed:
            rows = [["verdict", "share before", "after", "change", "more than", "cell"]]
            rows += [
                [each.verdict, f"{each.before:.3f}", f"{each.after:.3f}", f"{each.relative:+.1%}", f"{each.margin:.1%}",
                 str(each.cell)]
                for each in changed
            ]  # fmt: skip
            lines += [*aligned(rows), ""]
        counts = {verdict: sum(each.verdict == verdict for each in self.changes) for verdict in ("slower", "faster", "same")}
        counted = f"{counts['slower']} slower, {counts['faster']} faster, {counts['same']} the same within the spread"
        return "\n".join([*lines, *self.notes, *self.off, f"{len(self.changes)} cells: {counted}"])


def compare(before: BenchResult, after: BenchResult) -> Comparison:
    """cupynorm in the cells that two runs share, as a share of the copy, so that another clock does not count.

    Raises ValueError if they share none.
    """
    old, new = ({measured.cell: measured for measured in result.measurements} for result in (before, after))
    shared = [cell for cell in old if cell in new]
    if not shared:
        raise ValueError("the two runs have no cell in common")
    notes = []
    gpus = [result.environment.get("gpu") for result in (before, after)]
    if gpus[0] != gpus[1]:
        notes.append(
            f"the GPUs differ, {gpus[0]} before and {gpus[1]} after: what is compared is the share of each GPU's own copy, and "
            "a kernel tuned for one need not reach it on the other"
        )
    for label, number in (("before", len(old) - len(shared)), ("after", len(new) - len(shared))):
        if number:
            notes.append(f"cells measured {label} only: {number}")
    changes = []
    for cell in shared:
        measured = (old[cell], new[cell])
        spread = sum(each.spread(name) for each in measured for name in (COPY, OURS)) / 2
        changes.append(Change(cell, measured[0].share(OURS), measured[1].share(OURS), max(spread, _LEAST_MARGIN)))
    off = [f"{cell}: {new[cell].faults[OURS]}" for cell in shared if OURS in new[cell].faults]
    return Comparison(changes, notes, off)
