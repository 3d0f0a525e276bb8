"""What was measured: tables, JSON, the README's table and chart, and one run against another."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..table import as_html, as_markdown, as_text
from .cells import COPY, GEMM, OURS, Cell, LinearCell

# The widths of the README's table: powers of two, a width of many models, and an odd one.
SHORT_COLS = (128, 768, 1024, 4096, 4097, 8192, 16384, 65536)
# What the guard takes for a change. One cell differs by more from run to run than many in the mean.
_SLOWER_CELL, _SLOWER_TABLE = 0.05, 0.005


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    return tuple(statistics.quantiles(samples, n=4, method="inclusive"))


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
        found = {name: quartiles(self.samples[name]) for name in self.right}
        low, best, high = next(iter(found.values()), (0, 0, 0))
        return {
            name
            for name, (lower, middle, upper) in found.items()
            if middle - best <= (upper - lower + high - low) / 2
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
        return lines + [f"stopped {self.settings.get('stopped')}"] * ("stopped" in self.settings)

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
    """Lines of a table: a row for each width, three columns for each direction."""
    widths: dict[int, dict[str, Measurement]] = {}
    for each in measurements:
        widths.setdefault(each.cell.num_cols, {})[each.cell.direction] = each
    directions = dict.fromkeys(each.cell.direction for each in measurements)
    rows = [["num_cols"]]
    for direction in directions:
        rows[0] += [f"{direction}: {OURS}", "torch", "best other"]
    for num_cols, found in widths.items():
        row = [f"{num_cols:,}"]
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


# One run against another.


def change(before: Measurement, after: Measurement) -> float:
    """Of our speed beside the copy's, or the product's alone, whatever the clocks: -0.01 is slower
    by 1%."""
    ran = before.samples.keys() & after.samples.keys()
    other = GEMM if GEMM in ran and isinstance(before.cell, LinearCell) else COPY
    first, last = (run.median(other) / run.median(OURS) for run in (before, after))
    return last / first - 1


def guard(
    before: BenchResult, measure: Callable[[list[Cell | LinearCell]], BenchResult]
) -> tuple[BenchResult, str, bool]:
    """Measures the cells of a run again: what was found, in words, and whether nothing is slower.

    A table may be slower by 0.5% in the mean, a cell by 5%. Cells above that, and those of tables
    above it, are measured once more, and the second time counts. Raises ValueError for a run that
    did not measure cupynorm.
    """
    old = {each.cell: each for each in before.measurements if OURS in each.samples}
    if not old:
        raise ValueError(f"the run before has no time of {OURS}; expected one in some cell")

    def changes(run: BenchResult) -> tuple[dict[Cell | LinearCell, float], dict[str, float]]:
        found = {each.cell: change(old[each.cell], each) for each in run.measurements}
        tables = {kind: [found[m.cell] for m in own] for kind, own in run.tables().items()}
        return found, {kind: statistics.fmean(own) for kind, own in tables.items()}

    after = measure(list(old))
    first, of_tables = changes(after)
    above = [
        cell
        for cell, by in first.items()
        if by < -_SLOWER_CELL or of_tables[cell.kind] < -_SLOWER_TABLE
    ]
    rows = [["verdict", "change", "again", "cell"]]
    if above and "stopped" not in after.settings:
        again = measure(above)
        newer = {each.cell: each for each in again.measurements}
        merged = [newer.get(each.cell, each) for each in after.measurements]
        after = replace(after, settings=after.settings | again.settings, measurements=merged)
    second, of_tables = changes(after)
    for cell in above:
        verdict = "slower" if second[cell] < -_SLOWER_CELL else "same"
        rows.append([verdict, f"{first[cell]:+.1%}", f"{second[cell]:+.1%}", str(cell)])
    lines = [as_text(rows), ""] if above else []
    for kind, by in of_tables.items():
        lines.append(
            f"{'slower' if by < -_SLOWER_TABLE else 'same'}  {by:+.2%} in the mean  {kind}"
        )
    gpus = [run.environment.get("gpu") for run in (before, after)]
    if gpus[0] != gpus[1]:
        lines.append(f"the GPUs differ: {gpus[0]} before, {gpus[1]} after")
    num_slower = sum(row[0] == "slower" for row in rows)
    num_tables = sum(by < -_SLOWER_TABLE for by in of_tables.values())
    lines.append(
        f"{len(after.measurements)} cells: {num_slower} slower by more than {_SLOWER_CELL:.0%}; "
        f"{len(of_tables)} tables: {num_tables} slower by more than {_SLOWER_TABLE:.1%} in the mean"
    )
    return after, "\n".join(lines), after.ok and not num_slower and not num_tables
