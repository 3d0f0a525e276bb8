"""Tiles that measured faster than the model's: one data file a device, and the file of use_tiles.
Pure Python, no GPU needed.

Each row of a file covers a range of widths of one class of problems: direction, norm, dtype and
kind. The first row that covers a problem gives its tile; packs_per_thread and exact follow from the
width. `python -m cupynorm tune` writes files; use_tiles reads them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..dtypes import DTYPES
from .devices import Device
from .model import fits, shaped
from .problem import DIRECTIONS, NORMS, PATHS, PATHS_OF_STRATEGY, SCALINGS, Problem, Tile

# The data files and their devices. An H100 has the multiprocessors of an H200.
FILES = {"h200.csv": ("H200", "H100")}

# The counts of a tile that a row lists.
COUNTS = ("pack_size", "threads_per_row", "rows_per_block", "cluster_size", "blocks_per_sm")
COUNTS += ("stages", "bundle")

# Without a weight or bias the compiler moves more loads ahead; threads with more elements spill.
_LONG_ELEMENTS = 64

# Words of a kind, in their order.
_WORDS = ("residual", "dsum", "wide", *SCALINGS, "amax")

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Row:
    """One row of a data file, for num_cols from from_cols to to_cols that are multiples of step.

    kind: the result of class_of.
    gain: the speedup of the tile over the model's, as a share; None if it was not measured.
    """

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
        """The classes of problems that the row covers: `norm` and `dtype` may name several."""
        return [
            (self.direction, norm, dtype, self.kind)
            for norm in self.norm.split("|")
            for dtype in self.dtype.split("|")
        ]

    def holds(self, num_cols: int) -> bool:
        return self.from_cols <= num_cols <= self.to_cols and num_cols % self.step == 0

    def tile(self, problem: Problem) -> Tile:
        counts = {name: getattr(self, name) for name in COUNTS}
        if self.path in ("smem", "uncached"):
            return Tile(**counts, path=self.path)
        sizes = counts.pop("pack_size"), counts.pop("threads_per_row")
        return shaped(problem, *sizes, path=self.path, **counts)


def class_of(problem: Problem) -> str | None:
    """What decides a tile besides direction, norm, dtype and width; None if files have no rows.

    The words are: bytes of a pack of x, "residual" or "dsum", "wide" if parameters have a wider
    dtype than x, the scaling, and "amax".
    """
    tensors = [problem.y, problem.dy, problem.dx, problem.dsum]
    others = set(tensors[1:] if problem.scaling else tensors) - {None, problem.x}
    if others or "float64" in (problem.x, problem.weight, problem.bias):
        return None
    if problem.extras - set(_WORDS):
        return None
    words = [f"{problem.widest_pack * problem.itemsize} bytes"]
    return " ".join(words + [word for word in _WORDS if word in problem.extras])


def key_of(problem: Problem) -> Key | None:
    """The class of a problem in a data file; None for problems that have no rows there."""
    kind = class_of(problem)
    return kind and (
        problem.direction,
        "layer_norm" if problem.centered else "rms_norm",
        problem.x,
        kind,
    )


# What the cells of a row may say; `norm` and `dtype` may name several.
_KNOWN = {
    "direction": DIRECTIONS,
    "norm": NORMS,
    "dtype": tuple(DTYPES),
    "path": PATHS,
    "strategy": tuple(PATHS_OF_STRATEGY),
}


def read_rows(path: Path) -> list[Row]:
    """The rows of a data file. Raises ValueError or KeyError if a line is not a row."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row_of(fields) for fields in csv.DictReader(file)]


def row_of(fields: dict[str, str]) -> Row:
    """A row of a data file from its fields, as text.

    Raises ValueError for a missing cell, an unknown word, or a count that is too small.
    """
    if None in fields.values():
        raise ValueError("a row has fewer cells than the first line")
    for name, known in _KNOWN.items():
        if not set(fields[name].split("|")) <= set(known):
            raise ValueError(f"{name} is {fields[name]!r}; expected one of {', '.join(known)}")
    texts = {name: fields[name] for name in (*_KNOWN, "kind", "date")}
    counts = {name: int(fields[name]) for name in ("from_cols", "to_cols", "step", *COUNTS)}
    for name in ("step", *COUNTS[:5]):
        if counts[name] < 1:
            raise ValueError(f"{name} is {counts[name]}; expected 1 or more")
    return Row(**texts, **counts, gain=float(fields["gain"]) if fields["gain"] else None)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes a data file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(vars(row) | {"gain": "" if row.gain is None else f"{row.gain:.3f}"})


def row_for(
    problem: Problem, strategy: str, tile: Tile, from_cols: int, to_cols: int, **others: object
) -> Row:
    """The row that gives a tile to the class of a problem. others: step (1), gain and date.

    Raises ValueError for a problem of no class.
    """
    key = key_of(problem)
    if key is None:
        raise ValueError(f"no row covers {problem}")
    counts = {name: getattr(tile, name) for name in COUNTS}
    ends = {"from_cols": from_cols, "to_cols": to_cols, "step": 1}
    path = tile.of_strategy(strategy).path
    return Row(*key, path, strategy, **counts, **(ends | others))


def by_key(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """The rows of each class."""
    rows_of: dict[Key, list[Row]] = {}
    for row in rows:
        for key in row.keys:
            rows_of.setdefault(key, []).append(row)
    return rows_of


@cache
def _rows_of(name: str) -> dict[Key, list[Row]]:
    return by_key(read_rows(Path(__file__).parent / name))


# The rows of use_rows by class, their devices (None: any), and what plans call them.
_used: tuple[dict[Key, list[Row]], tuple[Device, ...] | None, str] | None = None


def use_rows(
    rows: Iterable[Row] | None, name: str = "", devices: Iterable[Device] | None = None
) -> None:
    """From now on these rows come before those of the devices' files; None removes them.

    devices: those that they are for, None for any. Plans that were made before keep their tiles.
    """
    global _used
    devices = None if devices is None else tuple(devices)
    _used = None if rows is None else (by_key(rows), devices, name)


def tile_in_use(problem: Problem, device: Device) -> tuple[str, Tile, str] | None:
    """(strategy, tile, reason) from the rows of use_rows; None without one that fits."""
    rows, devices, name = _used or ({}, None, "")
    if devices is not None and device not in devices:
        return None
    found = tile_of(rows.get(key_of(problem), ()), problem, device)
    return found and (*found, f"from {name}")


def measured_tile(problem: Problem, device: Device) -> tuple[str, Tile, str] | None:
    """(strategy, tile, reason) from the device's data file; None if no row covers the problem."""
    for name, devices in FILES.items():
        if device.name in devices:
            found = tile_of(_rows_of(name).get(key_of(problem), ()), problem, device)
            return found and (*found, f"measured, in {name}")
    return None


def tile_of(rows: Iterable[Row], problem: Problem, device: Device) -> tuple[str, Tile] | None:
    """Strategy and tile of the first row that covers a problem and fits a device.

    rows: of the problem's class.
    """
    usual = not problem.forward or (
        problem.weight is not None
        and bool(problem.bias) == problem.centered
        and not problem.zero_centered
    )
    for row in rows:
        if row.holds(problem.num_cols):
            tile = row.tile(problem)
            is_short = usual or row.path != "registers" or tile.elements <= _LONG_ELEMENTS
            if is_short and fits(problem, row.strategy, tile, device):
                return row.strategy, tile
    return None
