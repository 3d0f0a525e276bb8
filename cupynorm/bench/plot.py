"""A plot of a benchmark: GB/s over num_cols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..gpu.nvrtc import MissingLibraryError
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


def plot(result: BenchResult, path: str | Path, *, panel: tuple[float, float] = (6.5, 3.6)) -> None:
    """Draws GB/s over num_cols into a file. Each kind of cell is a panel, the copy is the ceiling.

    path: .png, .svg or another format of matplotlib. Where a width has several num_rows, each is a
    panel of its own. panel: width and height of one, inches.
    Raises MissingLibraryError without matplotlib, ValueError for an unknown format.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels: dict[str, list[Measurement]] = {}
    for title, measurements in result.tables().items():
        several = len({measured.cell.num_cols for measured in measurements}) < len(measurements)
        for measured in sorted(measurements, key=lambda measured: measured.cell.num_cols):
            rows = f", {measured.cell.num_rows} rows" if several else ""
            panels.setdefault(title + rows, []).append(measured)
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(panel[0] * across, panel[1] * down + 0.6), layout="constrained")
    drawn: dict[str, Any] = {}
    for at, (title, measurements) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, at + 1)
        for name in (COPY, *result.libraries):
            points = [measured for measured in measurements if name in measured.samples]
            styles = {
                COPY: {"color": "gray", "linestyle": "--"},
                OURS: {"color": "black", "marker": "o", "zorder": 3},
            }
            color = None if name == COPY else f"C{result.libraries.index(name) - 1}"
            look = styles.get(name, {"color": color, "marker": "."})
            xs = [measured.cell.num_cols for measured in points]
            speeds = [measured.gigabytes_per_second(name) for measured in points]
            (drawn[name],) = axes.plot(xs, speeds, **look)
        axes.set(title=title, xlabel="num_cols", ylabel="GB/s")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(
        drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(6, len(drawn))
    )
    figure.suptitle(result.headline(), fontsize=8)
    # The same file for the same measurements: no random ids, no date.
    metadata = {"Date": None} if Path(path).suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "cupynorm"}):
        figure.savefig(path, dpi=150, metadata=metadata)
