"""Every path that a row takes through a kernel, what a call asks of it, and small devices."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from guarded_tensors import LAYOUTS

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.problem import Tile
from cupynorm.verify.cases import Case

H200 = DEVICES["H200"]
# Two multiprocessors and one cluster of each size: a few rows are enough for every block to work
# on several.
SMALL = replace(
    H200, name="small", num_sms=2, clusters=tuple((size, 1) for size, _ in H200.clusters)
)


class RowPath(NamedTuple):
    """A width and dtype whose rows take one path. tile: None leaves it to dispatch.

    kind: strategy and path. is_core: whether the quick tests have it.
    """

    kind: str
    norm: str
    dtype: str
    num_cols: int
    tile: Tile | None
    is_core: bool

    @property
    def strategy(self) -> str | None:
        name = self.kind.partition(" ")[0]
        return None if name == "any" else name


def _paths(table: str) -> dict[str, RowPath]:
    """By name, of lines "kind | name | dtype num_cols | tile"; * before those of quick tests.

    Before the dtype may be rms_norm. A tile is its first counts, in the order of its fields, and
    others by name.
    """
    found = {}
    for line in table.strip().splitlines():
        kind, name, row, counts = (each.strip() for each in line.lstrip("* ").split("|"))
        norm, dtype, num_cols = ["layer_norm", *row.split()][-3:]
        tile = None
        if counts:
            first, *others = counts.split(", ")
            named = {field: int(value) for field, value in map(str.split, others)}
            tile = Tile(*map(int, first.split()), **named)
        is_core = line.startswith("*")
        found[name] = RowPath(kind, norm, dtype, int(num_cols), tile, is_core)
    return found


PATHS = _paths(
    """
* warp registers | lanes | float32 40 | 4 4 3 16
* warp registers | lanes, single elements | bfloat16 37 | 1 16 3 4
  warp registers | lanes, pairs | rms_norm float16 64 | 2 4 8 8
  warp registers | a lane a row | float16 64 | 8 1 8 32
  warp registers | lanes that are filled | rms_norm float32 64 | 4 4 4 8, exact 1
  warp registers | a warp a row | float64 130 | 2 32 3 1
* warp bundle | bundle, a lane a row | bfloat16 33 | 1 1 33 64, exact 1, stages 2, bundle 32
  warp bundle | bundle, one column | rms_norm float32 1 | 1 1 1 32, exact 1, stages 3, bundle 96
  warp bundle | bundle, 2 lanes, pairs | float16 50 | 2 2 13 32, stages 2, bundle 32
  warp bundle | bundle, 4 lanes | rms_norm bfloat16 27 | 1 4 7 8, stages 1, bundle 8
* warp bundle | bundle, 8 lanes | bfloat16 127 | 1 8 16 8, stages 2, bundle 12
  warp bundle | bundle, 8 lanes, packs of 4 | rms_norm float16 100 | 4 8 4 4, stages 2, bundle 8
  warp bundle | bundle, packs of 4 | bfloat16 24 | 4 1 6 64, exact 1, stages 2, bundle 96
  warp bundle | bundle, packs of 8 | rms_norm bfloat16 72 | 8 4 3 16, stages 2, bundle 24
  warp bundle | bundle, 12 warps | bfloat16 72 | 2 8 5 48, stages 2, bundle 16
  warp bundle | bundle, 16 lanes | float32 255 | 1 16 16 4, stages 3, bundle 4
* warp bundle | bundle, 32 lanes | float16 95 | 1 32 3 2, stages 2, bundle 3
  warp bundle | bundle, idle lanes | bfloat16 29 | 1 32 1 2, stages 2, bundle 3
  warp bundle | bundle of one row | float16 223 | 1 32 7 2, stages 2, bundle 1
* block registers | block | float32 1040 | 4 96 3
  block registers | block, one pack | rms_norm float16 96 | 4 32 1
  block registers | block of 32 warps | float16 1024 | 1 1024 1
  block registers | block, packs | rms_norm bfloat16 1000 | 8 96 2
* block smem | block, smem | float16 264 | 8 64
  block smem | block, smem of single elements | float64 263 | 1 64
  block smem | block, smem of pairs | rms_norm bfloat16 1002 | 2 96
  block ring | ring of one warp | float32 80 | 4 32 1, stages 2
  block ring | ring that is filled | rms_norm bfloat16 1024 | 8 64 2, exact 1, stages 4
* block ring | ring, a part at the end | float32 1880 | 4 96 5, stages 3
  block ring | ring, an idle warp | float16 1040 | 8 128 2, stages 2
  block ring | ring, weights in smem | bfloat16 1536 | 8 64 3, exact 1, stages 2
* block ring | ring of 4 rows | bfloat16 1440 | 8 64 3, rows_per_block 4, stages 3
  block ring | ring of 3 rows of a warp | rms_norm float32 120 | 4 32 1, rows_per_block 3, stages 2
  block ring | ring of 7 rows of a warp | float32 440 | 4 32 4, rows_per_block 7, stages 4
  block ring | ring of 12 rows of a warp | bfloat16 640 | 8 32 3, rows_per_block 12, stages 3
  block ring | ring of 11 warps | bfloat16 2720 | 8 352 1, stages 3
* block ring | ring of single elements | bfloat16 333 | 1 64 6, stages 3
  block backward | ring of one stage | float32 1880 | 4 96 5, stages 1
* block backward | ring of one stage, filled | rms_norm bfloat16 4096 | 8 64 8, exact 1, stages 1
* cluster registers | cluster | float64 264 | 2 32 3, cluster_size 2
  cluster registers | cluster of 16 | float16 1000 | 8 32 1, cluster_size 16
  cluster registers | cluster of 4 | rms_norm bfloat16 1032 | 8 32 2, cluster_size 4
  cluster registers | cluster that is filled | float16 1024 | 8 32 2, cluster_size 2, exact 1
  cluster registers | cluster, single elements | float32 999 | 1 96 6, cluster_size 2
  cluster registers | cluster of idle blocks | rms_norm float16 24 | 8 64 1, cluster_size 8
* cluster smem | cluster, smem | float32 264 | 4 32, cluster_size 4
  cluster smem | cluster of idle blocks, smem | float16 24 | 8 64, cluster_size 8
  cluster smem | cluster of 16, smem | rms_norm bfloat16 1000 | 8 32, cluster_size 16
  cluster smem | cluster, smem of single elements | float16 999 | 1 96, cluster_size 2
* cluster ring | cluster ring | float32 840 | 4 64 1, cluster_size 4, stages 3
  cluster ring | cluster ring, 20 warps | float16 4960 | 8 160 1, cluster_size 4, stages 2
  cluster ring | cluster ring, 64 warps | bfloat16 16000 | 8 128 1, cluster_size 16, stages 2
  cluster ring | cluster ring of pairs | rms_norm float16 540 | 2 64 3, cluster_size 2, stages 2
  cluster ring | cluster ring of single elements | float32 1301 | 1 96 4, cluster_size 4, stages 2
  cluster ring | filled cluster ring | float32 1024 | 4 64 2, cluster_size 2, exact 1, stages 3
* cluster ring | cluster ring of 2 rows | float16 800 | 8 64 1 2, cluster_size 2, stages 2
  cluster ring | cluster ring, an idle warp | bfloat16 1600 | 8 64 1, cluster_size 4, stages 3
  cluster ring | cluster ring, idle blocks | rms_norm float16 288 | 8 32 1, cluster_size 8, stages 4
  cluster ring | cluster ring of 16 | bfloat16 4096 | 8 32 1, cluster_size 16, exact 1, stages 2
  cluster ring | cluster ring of 13 | float32 2040 | 4 64 1, cluster_size 16, stages 3
  cluster backward | cluster ring of one stage | float16 8800 | 8 64 9, cluster_size 2, stages 1
  cluster backward | one-stage cluster, singles | float32 1301 | 1 96 4, cluster_size 4, stages 1
  cluster backward | stage of 8 blocks | float32 16384 | 4 32 16, cluster_size 8, exact 1, stages 1
* uncached | uncached | bfloat16 1002 | 2 96
  uncached | uncached, packs | rms_norm float16 1000 | 8 32
  uncached | uncached, single elements | float32 515 | 1 64
  any | chosen, 3 columns | float16 3 |
* any | chosen, two lanes | float32 65 |
  any | chosen, registers | rms_norm float16 512 |
* any | chosen, ring of packs | bfloat16 4096 |
  any | chosen, ring of single elements | float32 2049 |
  block | chosen in a block | float32 1000 |
  cluster | chosen in a cluster | float16 4001 |
  uncached | chosen, uncached | float16 515 |
"""
)

# What a call asks for, as fields of a Case.
OPTIONS = {
    "plain": {},
    "residual": {"residual": True},
    "welford": {"statistics": "welford"},
    "float32 parameters": {"weight": "float32", "bias": "float32"},
    "1 + weight": {"weight": "float64", "bias": "float64", "zero_centered_weight": True},
    "residual and dsum": {"residual": True, "dsum": True},
    "no weight": {"weight": None},
    "recomputed": {"recompute": True},
    "y float32": {"y": "float32"},
    "float32 sum": {"residual": "float32", "dsum": True},
    "no parameters": {"weight": None, "bias": None},
    "rounded x_hat": {"round_x_hat": True, "bias": None},
    "recomputed, 1 + weight": {"recompute": True, "zero_centered_weight": True, "bias": None},
    "recomputed sum": {"recompute": True, "residual": "float32", "dsum": True, "weight": "float32"},
}
OPERANDS = ("x", "residual", "dy", "dsum", "y", "sum", "dx")
_OUTPUTS = ("y", "sum", "dx")
_SINGLE_ROWS = ("weight", "bias", "mean", "rstd", "dweight", "dbias")


class Call(NamedTuple):
    """A path, an option, and the layouts of operands that are not contiguous."""

    path: str
    option: str
    layouts: dict[str, str]

    def __str__(self) -> str:
        shown = [f"{name} {self.layouts[name]}" for name in OPERANDS if name in self.layouts]
        return ", ".join([self.path, self.option, *shown]).replace(" ", "-")


def _layouts(path: RowPath, option: dict, generator: random.Random) -> dict[str, str]:
    """One for each operand that there is. Bundles have no gaps; packs are aligned."""
    some = list(LAYOUTS)
    if path.tile and path.tile.bundle:
        some = ["contiguous", "misaligned"]
    if path.tile and path.tile.pack_size > 1:
        some = [each for each in some if each != "misaligned"]
    drawn = {
        name: generator.choice([each for each in some if each != "broadcast"])
        if name in _OUTPUTS
        else generator.choice(some)
        for name in OPERANDS
        if option.get({"sum": "residual"}.get(name, name), name not in ("residual", "dsum", "sum"))
    }
    if "misaligned" in some:
        drawn |= {name: generator.choice(["contiguous", "misaligned"]) for name in _SINGLE_ROWS}
    return {name: layout for name, layout in drawn.items() if layout != "contiguous"}


def calls() -> list[tuple[Call, bool]]:
    """Each path plainly; each option on a path of each kind, every operand in a layout of its own.

    And whether it is one of the quick tests.
    """
    kinds: dict[str, list[str]] = {}
    for name, path in PATHS.items():
        kinds.setdefault(path.kind, []).append(name)
    found, generator = [], random.Random(1)
    for of_kind, names in enumerate(kinds.values()):
        core = [name for name in names if PATHS[name].is_core]
        found += [(Call(name, "plain", {}), name in core) for name in names]
        for at, option in enumerate(OPTIONS):
            is_quick = bool(core) and (at + of_kind) % 3 == 0
            name = (core if is_quick else names)[at % len(core if is_quick else names)]
            layouts = _layouts(PATHS[name], OPTIONS[option], generator)
            found.append((Call(name, option, layouts), is_quick))
    return found


def case_of(call: Call, where) -> tuple[Case, Tile | None]:
    """The case of a call, with the tile of forward, and the tile of backward."""
    path = PATHS[call.path]
    case = Case(
        path.norm,
        num_rows_of(path.tile, where),
        path.num_cols,
        path.dtype,
        strategy=path.strategy,
        tile=path.tile,
        **OPTIONS[call.option],
    )
    backward = path.tile
    if "backward" in path.kind:
        case = replace(case, tile=None)
    if path.kind == "block smem":  # backward has no such path
        backward = None
    by_copies = path.tile is not None and path.tile.stages > 0
    if by_copies and (case.has_own_sum or (path.tile.bundle and case.dtype("y") != case.x)):
        case = replace(case, tile=None)  # the copy engine fetches rows of one dtype
    one_dtype = not case.has_own_sum and case.dtype("y") == case.x
    if by_copies and path.tile.bundle and (case.recompute or not one_dtype):
        backward = None
    return case, backward


def num_rows_of(tile: Tile | None, where) -> int:
    """So many rows that each block, cluster or warp works on several, the last on one less."""
    if tile is None or not tile.stages:
        return 37
    if tile.bundle:
        return 150
    at_once = where.device.num_sms
    if tile.cluster_size > 1:
        at_once = dict(where.device.clusters)[tile.cluster_size]
    return 9 * at_once * tile.rows_per_block - 1
