"""Tiles that were measured to be better than the model's, from one data file a device. Pure Python, no GPU needed.

A row of the file holds a range of widths of one class of problems: direction, norm, dtype and what else decides. The first row
that holds a problem gives its tile; packs_per_thread and exact follow from the width. `python -m cupynorm tune` writes it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..dtypes import DTYPES
from .devices import Device
from .problem import Problem, Tile
from .tile_model import can_bundle, shaped

# The data files, and the devices that each is for: an H100 has the multiprocessors of an H200.
FILES = {"h200.csv": ("H200", "H100")}

# Counts of a tile that a row holds.
COUNTS = (
    "pack_size",
    "threads_per_row",
    "rows_per_block",
    "cluster_size",
    "blocks_per_sm",
    "stages",
    "bundle",
)

# Elements of a thread beyond which the compiler moves more ahead, and spills, where there is no weight or no bias.
_LONG_ELEMENTS = 64

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Row:
    """One row of a data file: num_cols from from_cols to to_cols, those that are multiples of step.

    kind: what class_of says. gain: of the tile over the model's, a share; None where it is not measured."""

    direction: str
    norm: str
    dtype: str
    kind: str
    path: str
    strategy: str
    from_cols: int
    to_cols: int
    step: int
    pack_size: int
    threads_per_row: int
    rows_per_block: int
    cluster_size: int
    blocks_per_sm: int
    stages: int
    bundle: int
    gain: float | None = None
    date: str = ""

    @property
    def keys(self) -> list[Key]:
        """The classes of problems that the row is for: `norm` and `dtype` may name several."""
        return [
            (self.direction, norm, dtype, self.kind)
            for norm in self.norm.split("|")
            for dtype in self.dtype.split("|")
        ]

    def holds(self, num_cols: int) -> bool:
        return self.from_cols <= num_cols <= self.to_cols and num_cols % self.step == 0

    def tile(self, problem: Problem) -> Tile:
        if self.path in ("smem", "uncached"):
            counts = {name: getattr(self, name) for name in COUNTS}
            return Tile(**counts, path=self.path)
        counts = {
            name: getattr(self, name)
            for name in ("rows_per_block", "blocks_per_sm", "stages", "bundle")
        }
        return shaped(
            problem,
            self.pack_size,
            self.threads_per_row,
            self.cluster_size,
            path=self.path,
            **counts,
        )


def class_of(problem: Problem) -> str | None:
    """What decides a tile beside direction, norm, dtype and width, in words; None where data files have no rows.

    First the bytes of a pack of x; then residual or dsum, wide for parameters of a wider type than x, the scaling, and amax.
    """
    same = {problem.y, problem.dy, problem.dx, problem.dsum, problem.x}
    if problem.scaling:
        same -= {problem.y}
    other = [
        problem.input,
        problem.row_scale,
        problem.dropout,
        problem.dresidual,
        problem.y1,
        problem.round_x_hat,
    ]
    other += [problem.recomputed, None if problem.forward else problem.y, problem.x == "float64"]
    other += ["float64" in (problem.weight, problem.bias)]
    if any(other) or len(same - {None}) > 1:
        return None
    words = [f"{problem.widest_pack * DTYPES[problem.x].itemsize} bytes"]
    words += (
        ["residual"] * problem.residual
        + ["dsum"] * bool(problem.dsum)
        + ["wide"] * problem.has_wide_parameters
    )
    words += [problem.scaling] * bool(problem.scaling) + ["amax"] * problem.amax
    return " ".join(words)


def key_of(problem: Problem) -> Key | None:
    kind = class_of(problem)
    return kind and (
        problem.direction,
        "layer_norm" if problem.centered else "rms_norm",
        problem.x,
        kind,
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a data file. ValueError where one is none."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row_of(fields) for fields in csv.DictReader(file)]


def row_of(fields: dict[str, str]) -> Row:
    texts = {
        name: fields[name]
        for name in ("direction", "norm", "dtype", "kind", "path", "strategy", "date")
    }
    counts = {name: int(fields[name]) for name in ("from_cols", "to_cols", "step", *COUNTS)}
    return Row(**texts, **counts, gain=float(fields["gain"]) if fields["gain"] else None)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(vars(row) | {"gain": "" if row.gain is None else f"{row.gain:.3f}"})


def by_key(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = {}
    for row in rows:
        for key in row.keys:
            found.setdefault(key, []).append(row)
    return found


@cache
def _rows_of(name: str) -> dict[Key, list[Row]]:
    return by_key(read_rows(Path(__file__).parent / name))


def measured_tile(problem: Problem, device: Device) -> tuple[str, Tile, str] | None:
    """(strategy, tile, reason) of a problem that the data file of a device holds, None of another."""
    for name, devices in FILES.items():
        if device.name in devices and (key := key_of(problem)):
            found = tile_of(_rows_of(name).get(key, ()), problem, device)
            return found and (*found, f"measured, in {name}; path: {found[1].path_in_words}")
    return None


def tile_of(rows: Iterable[Row], problem: Problem, device: Device) -> tuple[str, Tile] | None:
    """Strategy and tile of the first of some rows that holds a problem of their class."""
    usual = not problem.forward or (
        problem.weight is not None
        and bool(problem.bias) == problem.centered
        and not problem.zero_centered
    )
    for row in rows:
        if row.holds(problem.num_cols) and (row.path != "bundle" or can_bundle(problem, device)):
            tile = row.tile(problem)
            if usual or row.path != "registers" or tile.elements <= _LONG_ELEMENTS:
                return row.strategy, tile
    return None
