"""What was measured: tables, JSON, the README's table and chart, and one run against another."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..table import as_html, as_markdown, as_text
from .cells import COPY, GEMM, OURS, Cell, LinearCell

README, CHART = Path("README.md"), Path("docs/speed.svg")
# The widths of the README's table: powers of two, a width of many models, and an odd one.
SHORT_COLS = (128, 768, 1024, 4096, 4097, 8192, 16384, 65536)
# A smaller change between runs is none: their clocks and pages of memory differ.
_LEAST_MARGIN = 0.02


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


@dataclass(frozen=True)
class Measurement:
    """One cell.

    samples: microseconds of each run, of "copy", "cupynorm", and each peer that ran. errors: the
    largest of the sampled elements of each library, in units of what is allowed. faults: name ->
    sentence for a library that is off, or could not run.
    """

    cell: Cell | LinearCell
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
        """Speed as a share of the copy's; with a linear layer, of its product and such a norm."""
        least = self.median(COPY)
        if isinstance(self.cell, LinearCell):
            if GEMM not in self.samples:
                return math.nan
            least = self.cell.least(least, self.median(GEMM))
        return least / self.median(name)

    @property
    def right(self) -> list[str]:
        """The libraries that ran and were not off, the fastest first."""
        names = [name for name in self.samples if name not in (COPY, GEMM, *self.faults)]
        return sorted(names, key=self.median)

    @property
    def fastest(self) -> set[str]:
        """The fastest right library, and those slower by less than half the sum of both spreads.

        A spread is the distance between the quartiles.
        """
        first = self.right[:1]
        return {
            name
            for name in self.right
            for best in first
            if self.median(name) - self.median(best)
            <= (self.spread(name) * self.median(name) + self.spread(best) * self.median(best)) / 2
        }


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
        return "stopped" not in self.settings and not any(
            OURS in measured.faults for measured in self.measurements
        )

    def __bool__(self) -> bool:
        return self.ok

    @property
    def libraries(self) -> list[str]:
        """cupynorm first, then the peers that ran in any cell."""
        names = [name for measured in self.measurements for name in measured.samples]
        return [OURS, *dict.fromkeys(name for name in names if name not in (COPY, OURS))]

    def tables(self) -> dict[str, list[Measurement]]:
        """Kind of cell -> its measurements."""
        tables: dict[str, list[Measurement]] = {}
        for measured in self.measurements:
            tables.setdefault(measured.cell.kind, []).append(measured)
        return tables

    def _rows(self, measurements: Sequence[Measurement]) -> list[list[str]]:
        """The table of one kind."""
        names = [name for name in self.libraries if any(name in m.samples for m in measurements)]
        rows = [["rows x cols", "strategy", "copy us"]]
        for name in names:
            rows[0] += [f"{name} us", "share"] + ["spread", "error"] * (name == OURS)
        for each in measurements:
            row = [each.cell.shape, each.strategy, f"{each.median(COPY):.1f}"]
            for name in names:
                if name not in each.samples:
                    row += ["-"] * (4 if name == OURS else 2)
                    continue
                mark = "*" if name in each.fastest else "OFF" if name in each.faults else ""
                row += [f"{each.median(name):.1f}{mark}", f"{each.share(name):.2f}"]
                if name == OURS:
                    row += [f"{each.spread(name):.1%}", f"{each.errors[name]:.2f}"]
            rows.append(row)
        return rows

    def _notes(self) -> list[str]:
        lines = ["* the fastest, or slower by less than the spread"]
        lines += ["share: of the speed of the copy; error: in units of what is allowed"]
        if any(isinstance(each.cell, LinearCell) for each in self.measurements):
            lines[-1] = "share: of the product alone and a copy of the norm's bytes at 0.97"
        # One line for all cells of a kind with the same sentence.
        shapes: dict[tuple[str, str], list[str]] = {}
        for each in self.measurements:
            for text in each.faults.values():
                shapes.setdefault((each.cell.kind, text), []).append(each.cell.shape)
        lines += [f"{kind}, {', '.join(each)}: {text}" for (kind, text), each in shapes.items()]
        lines += [f"{name} was not measured: {why}" for name, why in self.missing.items()]
        num_off = sum(OURS in each.faults for each in self.measurements)
        lines += [f"OFF: {OURS} is beyond what its dtypes allow in {num_off} cells"] * bool(num_off)
        return lines + [
            f"stopped {self.settings[name]}" for name in self.settings if name == "stopped"
        ]

    def __str__(self) -> str:
        parts = [f"{self.headline()}\n{self.method()}"]
        parts += [f"{title}\n{as_text(self._rows(each))}" for title, each in self.tables().items()]
        return "\n\n".join([*parts, "\n".join(self._notes())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self.headline())}</p>"]
        for title, each in self.tables().items():
            parts.append(f"<p>{html.escape(title)}</p>{as_html(self._rows(each))}")
        return "".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in self._notes())])

    def headline(self) -> str:
        """GPU, versions and date in one line."""
        machine = self.environment
        labels = {"driver": "driver", "cuda_runtime": "CUDA", "cupy": "CuPy", "torch": "torch"}
        shown = [machine.get("gpu")]
        shown += [f"{label} {machine[name]}" for name, label in labels.items() if machine.get(name)]
        of_peers = (machine.get("peers") or {}).items()
        shown += [f"{name} {each}" for name, each in of_peers if each and "torch" not in name]
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
        """The table of the README: shares of a copy's speed, of the first norm and dtype.

        It has cupynorm, torch, and the fastest of the others with its name, in the widths
        SHORT_COLS, or in all where none of them was measured.
        """
        measured = self.first_family()
        measured = [each for each in measured if each.cell.num_cols in SHORT_COLS] or measured
        copies = sorted({f"{each.gigabytes_per_second(COPY) / 1e3:.1f}" for each in measured})
        speed = " to ".join(dict.fromkeys((copies[0], copies[-1])))
        title = _family(measured[0].cell)
        lines = [f"{self.headline()}.", f"{self.method()}."]
        lines.append(
            f"{title}: share of a copy's speed ({speed} TB/s). "
            "Bold: the fastest, or within its spread."
        )
        # A block, which is scrolled where the command is wider than the page.
        command = f"<pre>{self.settings['command']}</pre>"
        return "\n".join([*lines, "", *_shares(measured), "", command])

    def first_family(self) -> list[Measurement]:
        """The measurements of the first norm and dtype, in all directions."""
        first = _family(self.measurements[0].cell)
        return [each for each in self.measurements if _family(each.cell) == first]

    def to_json(self) -> str:
        """Everything, with all samples."""
        cells = []
        for each in self.measurements:
            errors = {name: e if math.isfinite(e) else None for name, e in each.errors.items()}
            more = {"num_bytes": each.cell.num_bytes, "strategy": each.strategy}
            more |= {"microseconds": each.samples, "errors": errors, "faults": each.faults}
            cells.append(asdict(each.cell) | more)
        content = {"environment": self.environment, "settings": self.settings}
        content |= {"missing": self.missing, "cells": cells}
        return json.dumps(content, indent=1, allow_nan=False)


def read(path: str | Path) -> BenchResult:
    """The result in a file of `bench --json`. Raises OSError, or ValueError for other text."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        measurements = []
        for each in content["cells"]:
            kind = LinearCell if "in_features" in each else Cell
            # Older files lack newer fields of a cell.
            known = {name.name: each[name.name] for name in fields(kind) if name.name in each}
            errors = {name: math.nan if e is None else e for name, e in each["errors"].items()}
            more = (each["strategy"], each["microseconds"], errors, each["faults"])
            measurements.append(Measurement(kind(**known), *more))
        parts = [content[name] for name in ("environment", "settings")]
        return BenchResult(*parts, measurements, content["missing"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no result of the benchmark: {why}") from error


def _family(cell: Cell | LinearCell) -> str:
    """The kind of a cell without its direction."""
    return cell.kind.replace(f" {cell.direction},", ",")


def _shares(measurements: Sequence[Measurement]) -> list[str]:
    """Lines of a table: a row for each shape, three columns for each direction."""
    shapes: dict[tuple[int, int], dict[str, Measurement]] = {}
    for each in measurements:
        shape = (each.cell.num_cols, each.cell.num_rows)
        shapes.setdefault(shape, {})[each.cell.direction] = each
    directions = dict.fromkeys(each.cell.direction for each in measurements)
    with_rows = len({num_cols for num_cols, _ in shapes}) < len(shapes)
    rows = [["num_cols", *["num_rows"] * with_rows]]
    for direction in directions:
        rows[0] += [f"{direction}: {OURS}", "torch", "best other"]
    for (num_cols, num_rows), found in shapes.items():
        row = [f"{num_cols:,}", *[f"{num_rows:,}"] * with_rows]
        for each in (found.get(direction) for direction in directions):
            right = each.right if each else []
            others = [name for name in right if name not in (OURS, "torch")]
            for name in (OURS, "torch", *(others[:1] or ["-"])):
                text = f"{each.share(name):.2f}" if name in right else "-"
                text = f"**{text}**" if each and name in each.fastest else text
                row.append(f"{name} {text}" if name in others else text)
        rows.append(row)
    return as_markdown(rows)


# Documents.


def rewrite_table(path: Path, table: str, name: str = "bench") -> None:
    """Puts a table between the markers of a name in a document.

    Raises ValueError unless the document is there and has both markers once and in order.
    """
    if not path.is_file():
        raise ValueError(f"there is no {path} in {Path.cwd()}")
    start, end, text = f"<!-- {name} -->", f"<!-- /{name} -->", path.read_text(encoding="utf-8")
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"{path} needs the markers {start} and {end}, once and in this order")
    before, after = text.partition(start)[0], text.partition(end)[2]
    path.write_text(f"{before}{start}\n{table.strip()}\n{end}{after}", encoding="utf-8")


# The chart. Colour-blind readers can tell the colours (Okabe and Ito 2008) apart. A line also has a
# marker and a dash of its own, for print in grey.

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (4, 1, 1, 1, 1, 1)), (0, (6, 2)))
TICKS = (64, 512, 4096, 32768, 262144)  # of the README's chart
GUIDE = {"color": "#666666", "linestyle": (0, (2, 2)), "linewidth": 1.0}  # a limit, or a theory
STYLE = {  # small text, no frame, the same file for the same data
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 3.5,
    "lines.linewidth": 1.3,
    "svg.hashsalt": "cupynorm",
}


def look(at: int) -> dict[str, Any]:
    """Colour, marker and dash of line number `at`. The seventh line looks like the first."""
    at %= len(_MARKERS)
    return {"color": COLORS[at], "marker": _MARKERS[at], "linestyle": _DASHES[at]}


def draw_speeds(
    axes: Any, measurements: Sequence[Measurement], libraries: Sequence[str]
) -> dict[str, Any]:
    """Draws GB/s over num_cols. Returns what a legend names.

    Odd widths are markers without a line: their rows do not begin on addresses that packs need, so
    they are another problem and not a dip of the even ones. libraries: all that any panel has, so
    that each looks the same in all.
    """
    drawn: dict[str, Any] = {}
    for name in (COPY, *libraries):
        looks = GUIDE if name == COPY else look(list(libraries).index(name))
        ran = sorted((each.cell.num_cols, each) for each in measurements if name in each.samples)
        for odd in (0, 1):
            own = [each for cols, each in ran if name == COPY or cols % 2 == odd]
            if own and not (odd and name == COPY):
                xs = [each.cell.num_cols for each in own]
                ys = [each.gigabytes_per_second(name) for each in own]
                more = {"linestyle": "none", "markerfacecolor": "white"} if odd else {}
                more |= {"linewidth": 2.2, "zorder": 3} if name == OURS and not odd else {}
                label = "this library" if name == OURS else name
                label += ", odd widths" * odd
                (drawn[label],) = axes.plot(xs, ys, **looks | more)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    return drawn


def chart(result: BenchResult, path: Path) -> None:
    """Draws GB/s over num_cols of the first norm and dtype, as SVG that a telephone can show.

    Forward is above backward. Our line is the thick one, and the first of the legend.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = replace(result, measurements=result.first_family()).tables()
    with rc_context(STYLE | {"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 12}):
        figure = Figure(figsize=(5.4, 2.2 * len(panels) + 1.1), layout="constrained")
        drawn: dict[str, Any] = {}
        for at, (title, measurements) in enumerate(panels.items()):
            axes = figure.add_subplot(len(panels), 1, at + 1)
            drawn |= draw_speeds(axes, measurements, result.libraries)
            axes.set(title=title, ylabel="GB/s")
            widths = [each.cell.num_cols for each in measurements]
            ticks = [cols for cols in TICKS if min(widths) <= cols <= max(widths)]
            axes.set_xticks(ticks, [f"{cols:,}" for cols in ticks])
        axes.set_xlabel("columns of a row (hollow: odd widths)")
        names = [name for name in drawn if not name.endswith("odd widths")]
        names.sort(key=lambda name: name != "this library")
        labels = ["cupynorm, this library" if name == "this library" else name for name in names]
        lines = [drawn[name] for name in names]
        figure.legend(lines, labels, loc="outside lower center", ncols=2)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


# One run against another.


def compare(before: BenchResult, after: BenchResult) -> tuple[str, bool]:
    """What changed, and whether no cell is slower or off.

    It compares our share of the copy, or of the product alone, which does not depend on clocks, in
    the cells of both runs. Raises ValueError if they have no cell in common.
    """
    old, new = ({each.cell: each for each in run.measurements} for run in (before, after))
    shared = [cell for cell in old if cell in new]
    if not shared:
        raise ValueError("the two runs have no cell in common; expected the same shapes in both")
    rows = [["verdict", "share before", "after", "change", "more than", "cell"]]
    verdicts, notes = [], []
    for cell in shared:
        runs, other = (old[cell], new[cell]), COPY if isinstance(cell, Cell) else GEMM
        spread = sum(run.spread(name) for run in runs for name in (other, OURS)) / 2
        margin = max(spread, _LEAST_MARGIN)
        first, last = (run.median(other) / run.median(OURS) for run in runs)
        change = last / first - 1
        verdicts.append("same" if abs(change) <= margin else "slower" if change < 0 else "faster")
        if verdicts[-1] != "same":
            shares = (f"{first:.3f}", f"{last:.3f}", f"{change:+.1%}", f"{margin:.1%}")
            rows.append([verdicts[-1], *shares, str(cell)])
        if OURS in new[cell].faults:
            verdicts.append("off")
            notes.append(f"{cell}: {new[cell].faults[OURS]}")
    gpus = [run.environment.get("gpu") for run in (before, after)]
    if gpus[0] != gpus[1]:
        notes.append(f"the GPUs differ: {gpus[0]} before, {gpus[1]} after")
    for label, number in (("before", len(old) - len(shared)), ("after", len(new) - len(shared))):
        notes += [f"cells measured {label} only: {number}"] * bool(number)
    counts = {name: verdicts.count(name) for name in ("slower", "faster", "same")}
    line = "{} cells: {slower} slower, {faster} faster, {same} the same within the spread"
    table = [as_text(rows), ""] if len(rows) > 1 else []
    text = "\n".join([*table, *notes, line.format(len(shared), **counts)])
    return text, not {"slower", "off"} & set(verdicts)
