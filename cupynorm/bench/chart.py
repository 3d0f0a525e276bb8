"""How plots look, and the README's chart. Needs matplotlib.

Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart; a line also
has a marker and a dash of its own, for print in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .cells import COPY, OURS
from .report import BenchResult, Measurement

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
