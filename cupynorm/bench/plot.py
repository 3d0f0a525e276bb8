"""A plot of a benchmark: GB/s over num_cols."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..gpu.nvrtc import MissingLibraryError
from . import style
from .cells import COPY, OURS
from .report import BenchResult, Measurement


def require_matplotlib() -> None:
    """Raises MissingLibraryError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError(
            f"matplotlib could not be imported ({error}); a plot needs it: pip install matplotlib"
        ) from error


def check_format(path: str | Path) -> None:
    """Raises ValueError for a name of no format, MissingLibraryError without matplotlib."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    suffix = Path(path).suffix.lower()
    if suffix.removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(
            f"{path} is of no known format; expected a name that ends in .png, .svg or another of "
            "matplotlib's formats"
        )


def plot(result: BenchResult, path: str | Path, *, panel: tuple[float, float] = (6.5, 3.6)) -> None:
    """Draws GB/s over num_cols into a file. Each kind of cell is a panel, the copy is the ceiling.

    path: .png, .svg (with colours for light and dark pages) or another format of matplotlib.
    Where a width has several num_rows, each is a panel of its own. panel: width and height of one,
    inches.
    Raises MissingLibraryError without matplotlib, ValueError for an unknown format.
    """
    check_format(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(style.settings()):
        panels = panels_of(result)
        across = min(2, len(panels))
        down = -(-len(panels) // across)
        figure = Figure(figsize=(panel[0] * across, panel[1] * down + 0.6), layout="constrained")
        drawn: dict[str, Any] = {}
        for at, (title, measurements) in enumerate(panels.items()):
            axes = figure.add_subplot(down, across, at + 1)
            drawn |= draw_speeds(axes, measurements, result.libraries)
            axes.set(title=title, xlabel="num_cols", ylabel="GB/s")
        ncols = min(4 if len(drawn) > 6 else 6, len(drawn))
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=ncols)
        figure.suptitle(result.headline(), fontsize=8)
        path, is_svg = Path(path), Path(path).suffix == ".svg"
        # The same file for the same measurements: no date.
        figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)
        if is_svg:
            text = path.read_text(encoding="utf-8")
            path.write_text(style.with_dark_colors(text), encoding="utf-8")


def panels_of(result: BenchResult) -> dict[str, list[Measurement]]:
    """Title -> measurements of each panel, by width. Several num_rows have a panel each."""
    panels: dict[str, list[Measurement]] = {}
    for title, measurements in result.tables().items():
        several = len({measured.cell.num_cols for measured in measurements}) < len(measurements)
        for measured in sorted(measurements, key=lambda measured: measured.cell.num_cols):
            rows = f", {measured.cell.num_rows} rows" if several else ""
            panels.setdefault(title + rows, []).append(measured)
    return panels


def draw_speeds(
    axes: Any, measurements: Sequence[Measurement], libraries: Sequence[str]
) -> dict[str, Any]:
    """Draws GB/s over num_cols. Returns what a legend names.

    Odd widths are a line of their own, with open markers: their rows do not begin on addresses that
    packs need, so they are another problem and not a dip of the even ones.
    libraries: all that any panel has, so that each looks the same in all.
    """
    drawn: dict[str, Any] = {}
    for name in (COPY, *libraries):
        looks = style.look(list(libraries).index(name)) if name != COPY else style.GUIDE
        ran = [each for each in measurements if name in each.samples]
        odd = [each for each in ran if each.cell.num_cols % 2 and name != COPY]
        even = [each for each in ran if each not in odd]
        open_markers = {"markerfacecolor": "white", "linewidth": 0.8}
        for points, label, more in ((even, "", {}), (odd, ", odd num_cols", open_markers)):
            if points:
                xs = [each.cell.num_cols for each in points]
                speeds = [each.gigabytes_per_second(name) for each in points]
                order = 3 if name == OURS else 2
                (drawn[name + label],) = axes.plot(xs, speeds, **looks | more, zorder=order)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    return drawn
