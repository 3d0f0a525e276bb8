"""Tables of tiles that `python -m cupynorm tune` measured, and use_tiles, which applies them.

valid for   the GPU and the sources with which it was measured; use_tiles rejects other tables
contents    strategy and tile of a problem: direction, norm, dtypes, num_cols, pack size. Never
            num_rows, so a row's result has the same bits in any batch. A tile only divides work;
            sums have a fixed order.
read        only by use_tiles: no other file or environment variable is read
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..gpu import launch, nvrtc
from ..plan import dispatch, measured
from ..plan.devices import Device
from ..plan.instances import Kernel
from ..plan.measured import FILES
from ..plan.problem import Layout, Problem, Tile
from .prepared import forget

# Modules that decide a tile.
_DECIDING = (
    *("abilities", "devices", "dispatch", "few_rows", "functors", "grids", "instances"),
    *("measured", "paths", "problem", "strategies", "tile_checks", "tile_model"),
)


def key(problem: Problem) -> Problem:
    """The problem as a table stores it: with its pack size, without what decides no tile."""
    return replace(
        problem, zero_centered=False, layout=replace(problem.layout, pack_limit=problem.widest_pack)
    )


def sources() -> str:
    """A digest of the kernels and of dispatch, with which the tiles of a table were measured."""
    text = nvrtc.source(Kernel("", ""))  # begins with a digest of all kernels
    folder = Path(__file__).parents[1] / "plan"
    text += "".join(code((folder / f"{name}.py").read_text()) for name in _DECIDING)
    text += "".join((folder / name).read_text() for name in (*FILES, "registers.csv"))
    return hashlib.sha256(text.encode()).hexdigest()


def code(text: str) -> str:
    """Python source without comments, docstrings and line breaks that change nothing."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # A string alone is a docstring, or as good as one.
            node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


@dataclass(frozen=True)
class Table:
    """The best tiles of one GPU. tiles: key(problem) -> (strategy, tile).
    measured: notes for the reader: when, by which command."""

    device: Device
    tiles: Mapping[Problem, tuple[str, Tile]]
    measured: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        entries = [
            {"problem": _without_none(asdict(problem)), "strategy": strategy, "tile": asdict(tile)}
            for problem, (strategy, tile) in self.tiles.items()
        ]
        head = {
            "cupynorm": __version__,
            "sources": sources(),
            "device": asdict(self.device),
            "measured": self.measured,
        }
        return json.dumps(head | {"tiles": entries}, indent=1)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _problem(fields: dict[str, Any]) -> Problem:
    return Problem(**fields | {"layout": Layout(**fields["layout"])})


def read(path: str | Path) -> Table:
    """A table that tune wrote.

    Raises OSError if it cannot be read, and ValueError if it is not a table, is of other sources
    or has a wrong tile.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        of_version, of_sources = content["cupynorm"], content["sources"]
        device = Device(**content["device"])
        entries = [
            (_problem(each["problem"]), each["strategy"], Tile(**each["tile"]))
            for each in content["tiles"]
        ]
        measured = dict(content["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of tiles: {type(error).__name__}: {error}") from error
    if (of_version, of_sources) != (__version__, sources()):
        raise ValueError(
            f"{path} was measured with other sources (cupynorm {of_version}; this is "
            f"{__version__}), so its tiles may no longer be the best. "
            "Measure again: python -m cupynorm tune"
        )
    for problem, strategy, tile in entries:
        try:
            if any(type(value) is not int for name, value in vars(tile).items() if name != "path"):
                raise ValueError("a tile has fields that are no integers")
            dispatch.choose(problem, device, strategy, tile)
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(
                f"{path} has a wrong tile for {getattr(problem, 'num_cols', None)} columns: {error}"
            ) from error
    return Table(
        device, {key(problem): (strategy, tile) for problem, strategy, tile in entries}, measured
    )


def present() -> list[Device]:
    """The GPUs of this machine; none without CuPy."""
    try:
        return [launch.device(index) for index in range(nvrtc.cupy().cuda.runtime.getDeviceCount())]
    except Exception:  # a missing library, driver or GPU raises different errors
        return []


def use_tiles(path: str | Path | None) -> None:
    """Use the tiles of a table that `python -m cupynorm tune` wrote, for the rest of this process.

    Examples:
        >>> cupynorm.use_tiles(None)
        >>> cupynorm.plan(4096, device="H200").strategy
        'block'

    path: the table, or a data file of ranges (.csv) that `tune --device-file` wrote. A table is for
    the GPU on which it was measured, a data file for all GPUs of this machine. None removes the
    table in use.

    Other GPUs, problems that the table does not cover, and calls whose Launch has a strategy or a
    tile keep theirs. plan() shows where a tile comes from. Results keep the same error bounds,
    repeat to the bit, and do not depend on the batch. Between two tables their last bits may
    differ.

    Do not call it while another thread is in a call of this library: that call may keep its old
    tile. A captured CUDA graph and a recorded autograd graph keep their tiles.

    Raises OSError if the file cannot be read. Raises ValueError, without a change, if the file is
    no such table, was measured with another version, or on a GPU that this machine does not have.
    Without any GPU every table is accepted, for plan(device=).
    """
    if path is not None and Path(path).suffix == ".csv":
        use_device_file(Path(path))
        return
    table = None if path is None else read(path)
    if table is not None:
        here = present()
        if here and table.device not in here:
            raise ValueError(
                f"{path} was measured on {_describe(table.device)}; here is "
                f"{' and '.join(map(_describe, dict.fromkeys(here)))}. "
                "Measure here: python -m cupynorm tune"
            )
    use(table, "" if path is None else f"from {Path(path).name}, measured on {table.device.name}")


def use_device_file(path: Path) -> None:
    """use_tiles with a data file of ranges of widths.

    It is for the GPUs of this machine; without a GPU, for any device.
    """
    try:
        rows = measured.read_rows(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no data file of tiles: {type(error).__name__}: {error}"
        ) from error
    if not rows:
        raise ValueError(f"{path} has no rows; expected those that tune --device-file writes")
    measured.use_rows(rows, path.name, present() or None)
    dispatch.choose.cache_clear()
    forget()


def use(table: Table | None, reason: str = "") -> None:
    """use_tiles with a table already read. reason: what a plan says about its tiles."""
    if table is None:
        measured.use_rows(None)
    else:
        rows = [
            measured.row_for(problem, *choice, problem.num_cols, problem.num_cols)
            for problem, choice in table.tiles.items()
        ]
        measured.use_rows(rows, reason.removeprefix("from "), (table.device,))
    dispatch.choose.cache_clear()
    forget()


def _describe(device: Device) -> str:
    capability = f"compute capability {device.compute_capability / 10:.1f}"
    return f"{device.name} ({capability}, {device.num_sms} multiprocessors)"
