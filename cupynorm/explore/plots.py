"""Plots for notebooks, and pictures of a trace, by matplotlib in one style. Each returns a Plot.

A panel is an axes with a title. Functions take panels as a dict from titles to what they show, so
that one call puts pictures side by side on the same scales.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..bench.cells import COPY, OURS
from ..bench.report import BenchResult

Points = tuple[Sequence[float], Sequence[float]]  # xs, ys

# Colour-blind readers can tell the colours (Okabe and Ito 2008) apart. A line also has a marker and
# a dash of its own, for print in grey.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (4, 1, 1, 1, 1, 1)), (0, (6, 2)))
_TICKS = (64, 512, 4096, 32768, 262144)  # of widths
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
_FONT, _ELSE = "DejaVu Sans", "sans-serif"
_AS_TEXT = {"svg.fonttype": "none", "font.sans-serif": [_FONT]}


class Plot(Figure):
    """A figure that Jupyter shows as SVG. `axes` has its panels, in order."""

    def _repr_svg_(self) -> str:
        text = io.StringIO()
        with rc_context(STYLE | _AS_TEXT):
            self.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
        svg = re.sub(r"\s*<metadata>.*</metadata>", "", text.getvalue(), flags=re.S)
        # Formulas name one font alone, which few readers' machines have.
        svg = svg.replace(f"'{_FONT}'\"", f"'{_FONT}', {_ELSE}\"")
        # Hundredths of a point do for lines; numbers that are read keep their digits.
        short = lambda found: re.sub(r"(\d+\.\d\d)\d+", r"\1", found[0])  # noqa: E731
        return re.sub(r' (?:d|x|y)="[^"]*"', short, svg)


def look(at: int) -> dict[str, Any]:
    """Colour, marker and dash of line number `at`. The seventh line looks like the first."""
    at %= len(_MARKERS)
    return {"color": COLORS[at], "marker": _MARKERS[at], "linestyle": _DASHES[at]}


def _grid(
    titles: Collection[str], size: tuple[float, float], across: int, shared: bool = True
) -> tuple[Plot, list]:
    """A figure and its panels. size: of one panel, inches. across: the most in a line.

    shared: whether all panels have the same axes.
    """
    across = min(across, len(titles))
    down = -(-len(titles) // across)
    figure = Plot(figsize=(size[0] * across, size[1] * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=shared, sharey=shared).ravel()
    for axes in panels[len(titles) :]:
        axes.remove()
    for title, axes in zip(titles, panels):
        axes.set_title(title)
        axes.tick_params(labelbottom=True)
    return figure, list(panels[: len(titles)])


def _legend(figure: Plot, named: Mapping[str, Any], most: int = 4) -> None:
    if len(named) > 1:
        ncols = min(most, len(named))
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=ncols)


def _scale(axes: Any, log: str) -> None:
    """log: the axes that are logarithmic, "x", "y" or "xy"."""
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")


def lines(
    panels: Mapping[str, Mapping[str, Points]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    log: str = "",
    joined: bool = True,
    guides: Collection[str] = (),
    size: tuple[float, float] = (3.4, 2.6),
    across: int = 3,
    ylim: tuple[float, float] | None = None,
) -> Plot:
    """Lines in panels: title -> name -> (xs, ys). The same name looks the same in all panels.

    log: the axes that are logarithmic, "x", "y" or "xy". joined: False for markers alone.
    guides: names drawn in grey, for limits and theories: dashed the first, solid the second.
    """
    with rc_context(STYLE):
        figure, axes_of = _grid(panels, size, across)
        names = dict.fromkeys(name for each in panels.values() for name in each)
        drawn_lines = [name for name in names if name not in guides]
        drawn: dict[str, Any] = {}
        for named, axes in zip(panels.values(), axes_of):
            for name, (xs, ys) in named.items():
                if name in guides:
                    solid = {"linestyle": "-", "linewidth": 0.8} if list(guides)[0] != name else {}
                    looks = GUIDE | solid
                else:
                    looks = look(drawn_lines.index(name))
                    looks |= {} if joined else {"linestyle": "none"}
                (drawn[name],) = axes.plot(xs, ys, **looks)
            axes.set_xlabel(xlabel)
            _scale(axes, log)
            axes.minorticks_off()
            if ylim is not None:
                axes.set_ylim(ylim)
        axes_of[0].set_ylabel(ylabel)
        _legend(figure, drawn)
    return figure


def images(
    panels: Mapping[str, np.ndarray],
    *,
    xlabel: str = "column",
    ylabel: str = "row",
    label: str = "",
    limits: tuple[float, float] | None = None,
    diverging: bool = False,
    size: tuple[float, float] = (3.4, 2.2),
    across: int = 3,
) -> Plot:
    """Matrices as colours, on one scale. label: of the scale. limits: its ends.

    diverging: zero is white, negative values are orange and positive ones blue; else dark is more.
    """
    arrays = {title: np.asarray(values, dtype=np.float64) for title, values in panels.items()}
    largest = max(np.nanmax(np.abs(values)) for values in arrays.values())
    low, high = limits or ((-largest, largest) if diverging else (0.0, largest))
    with rc_context(STYLE | {"axes.grid": False}):
        are_alike = len({values.shape for values in arrays.values()}) == 1
        figure, axes_of = _grid(arrays, size, across, are_alike)
        for values, axes in zip(arrays.values(), axes_of):
            kind = "PuOr" if diverging else "Blues"
            looks = {"cmap": kind, "vmin": low, "vmax": high, "interpolation": "none"}
            shown = axes.imshow(values, aspect="auto", **looks)
            axes.yaxis.get_major_locator().set_params(integer=True)
            if len(values) == 1:
                axes.set_yticks([0])
            axes.set_xlabel(xlabel)
        axes_of[0].set_ylabel(ylabel)
        figure.colorbar(shown, ax=axes_of, label=label)
    return figure


def histograms(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    bins: np.ndarray,
    *,
    xlabel: str = "",
    limit: float | None = None,
    log: str = "",
    size: tuple[float, float] = (3.8, 2.6),
) -> Plot:
    """The share of values in each bin: title -> name -> values. limit: a vertical line."""
    with rc_context(STYLE):
        figure, axes_of = _grid(panels, size, 3)
        names = list(dict.fromkeys(name for each in panels.values() for name in each))
        drawn: dict[str, Any] = {}
        for named, axes in zip(panels.values(), axes_of):
            for name, values in named.items():
                looks = look(names.index(name))
                count, _ = np.histogram(values, bins)
                share = count / max(1, np.size(values))
                kept = {key: looks[key] for key in ("color", "linestyle")}
                drawn[name] = axes.stairs(share, bins, **kept, linewidth=1.3)
            if limit is not None:
                axes.axvline(limit, color="black", linewidth=1)
            axes.set_xlabel(xlabel)
            _scale(axes, log)
        axes_of[0].set_ylabel("share of values")
        _legend(figure, drawn)
    return figure


def speeds(
    result: BenchResult,
    dtype: str = "bfloat16",
    *,
    size: tuple[float, float] = (4.2, 3.2),
    across: int = 2,
) -> Plot:
    """GB/s over num_cols of one dtype, our line the thick one.

    Odd widths are hollow markers without a line: their rows do not begin on addresses that packs
    need, so they are another problem and not a dip of the even ones.
    """
    panels = {title: each for title, each in result.tables().items() if each[0].cell.dtype == dtype}
    if not panels:
        dtypes = ", ".join(sorted({each.cell.dtype for each in result.measurements}))
        raise ValueError(f"dtype is {dtype!r}; expected one of the benchmark's, {dtypes}")
    with rc_context(STYLE):
        figure, axes_of = _grid(panels, size, across)
        drawn: dict[str, Any] = {}
        for measurements, axes in zip(panels.values(), axes_of):
            for name in (*result.libraries, COPY):
                looks = GUIDE if name == COPY else look(result.libraries.index(name))
                looks |= {"linewidth": 2.2, "zorder": 3} if name == OURS else {}
                ran = {m.cell.num_cols: m for m in measurements if name in m.samples}
                for odd in (1, 0):
                    xs = sorted(cols for cols in ran if cols % 2 == odd or name == COPY)
                    if xs and not (odd and name == COPY):
                        ys = [ran[cols].gigabytes_per_second(name) for cols in xs]
                        hollow = {"linestyle": "none", "markerfacecolor": "white"} if odd else {}
                        label = f"{OURS}, this library" if name == OURS else name
                        (drawn[label],) = axes.plot(xs, ys, **looks | hollow)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_xticks(_TICKS, [f"{cols:,}" for cols in _TICKS])
            axes.set_ylabel("GB/s")
        axes.set_xlabel("columns of a row (hollow: odd widths)")
        _legend(figure, drawn, 2 * across)
    return figure


def chart(result: BenchResult, path: Path) -> None:
    """Writes the speeds of the first norm and dtype, as SVG that a telephone can show."""
    first = result.first_family()
    shown = replace(result, measurements=first)
    figure = speeds(shown, first[0].cell.dtype, size=(4.0, 2.1), across=1)
    with rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


def roofline(
    peaks: tuple[float, float],
    points: Mapping[str, tuple[float, float]],
    *,
    copy: float | None = None,
) -> Plot:
    """Operations a second over operations for each byte, under what a GPU can do.

    peaks: bytes and operations a second, of the data sheet. copy: bytes a second of a copy.
    points: name -> (operations for each byte, operations a second).
    """
    xs = np.geomspace(0.25, 256, 200)
    roofs = {"data sheet": peaks[0]} | ({"a copy's bytes": copy} if copy else {})
    named: dict[str, Points] = {
        name: (xs, np.minimum(xs * bandwidth, peaks[1])) for name, bandwidth in roofs.items()
    }
    named |= {name: ([x], [y]) for name, (x, y) in points.items()}
    labels = {"xlabel": "operations for each byte", "ylabel": "operations a second"}
    return lines({"": named}, **labels, log="xy", guides=list(roofs), joined=False, size=(6.0, 3.4))


# Pictures of a trace.

_WAITS = {"block": "__syncthreads", "cluster": "the cluster", "mbarrier": "mbarrier"}
_GREY, _LIGHT = (0.6, 0.6, 0.6), (0.87, 0.87, 0.87)
_MOST_STEPS = 1500  # in a picture


def _shade(color: str, share: float) -> tuple[float, ...]:
    """A colour mixed with white: share 0 is the colour itself, 1 is white."""
    return tuple(part + (1 - part) * share for part in to_rgb(color))


def _bare(height: float, title: str) -> tuple[Plot, Any]:
    """A figure of one panel, without a grid. height: inches."""
    with rc_context(STYLE | {"axes.grid": False}):
        figure = Plot(figsize=(7.6, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left")
    return figure, axes


def owners(trace: Any, tensor: str = "x", launch: int = 0) -> Plot:
    """Which warp and lane touches which columns of a tensor's first rows.

    A colour is a warp, counted over all blocks; the first lane is the darkest. Grey is copied
    between global and shared memory as a whole.
    """
    _, address, array = trace.tensors[tensor]
    num_rows, num_cols = array.shape if array.ndim == 2 else (1, array.size)
    accesses = trace.accesses(launch)
    own = accesses[accesses["tensor"] == list(trace.tensors).index(tensor)]
    first = (own["address"] - np.uint64(address)).astype(np.int64) // array.itemsize
    _, kept = np.unique(first, return_index=True)  # the first access to each pack
    own, first = own[kept], first[kept]
    last = first + np.maximum(1, own["num_bytes"].astype(np.int64) // array.itemsize) - 1
    shown = max(1, min(num_rows, 8))
    title = f"who owns which columns of {tensor}: warp (colour), lane (shade)"
    figure, axes = _bare(0.25 * shown + 0.9, title)
    warps_per_block = -(-trace.launches[launch].block_size // 32)
    image = np.ones((shown, num_cols, 3))
    for block, thread, kind, low, high in zip(
        own["block"], own["thread"], own["kind"], first, last + 1
    ):
        warp = int(block) * warps_per_block + int(thread) // 32
        color = _shade(COLORS[warp % 6], int(thread) % 32 / 31 * 0.75)
        image.reshape(-1, 3)[low:high] = _GREY if kind in trace.BULK else color
    extent = (0, num_cols, shown - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="none", extent=extent)
    axes.hlines(np.arange(1, shown) - 0.5, 0, num_cols, color="white", linewidth=3)
    axes.set_yticks(range(shown), [f"row {row}" for row in range(shown)])
    axes.set_xlabel(f"column, of {num_cols}")
    return figure


def lanes(trace: Any, tensor: str = "x", launch: int = 0) -> Plot:
    """The first request of warp 0 to a tensor: the lanes above, the sectors that serve them below.

    A warp that asks for 512 neighbouring bytes gets them in 16 sectors. Lanes that ask for bytes
    far apart each need a sector of their own.
    """
    one = trace.first_request(tensor, launch)
    sectors = one["address"].astype(np.int64) / trace.SECTOR_BYTES
    last = (one["address"] + one["num_bytes"] - np.uint64(1)).astype(np.int64) // trace.SECTOR_BYTES
    touched = sorted({each for a, b in zip(sectors, last) for each in range(int(a), int(b) + 1)})
    num_bytes = int(one["num_bytes"].sum())
    who = f"{len(one)} lanes ask for" if len(one) > 1 else "one thread asks for"
    title = f"{who} {num_bytes} bytes of {tensor}: {len(touched)} sectors"
    figure, axes = _bare(1.6, title)
    scale = 32 / (touched[-1] - touched[0] + 1)
    for thread, sector in zip(one["thread"], sectors):
        lane = int(thread) % 32
        axes.barh(1, 0.9, left=lane, height=0.3, color=_shade(COLORS[0], lane / 31 * 0.7))
        there = (sector - touched[0]) * scale
        axes.plot([lane + 0.45, there], [0.85, 0.15], color=_shade(COLORS[0], 0.4), linewidth=0.6)
    for sector in touched:
        left = (sector - touched[0]) * scale
        axes.barh(0, 0.9 * scale, left=left, height=0.3, color=COLORS[1])
    axes.set_yticks([0, 1], ["sectors of 32 bytes", "lanes"])
    axes.set_xticks([])
    return figure


def waits(trace: Any, launch: int = 0, block: int = 0) -> Plot:
    """What each warp of a block waits for, step by step.

    A step is a switch between threads on the CPU. The order is one of many that are allowed.
    """
    spans = trace.timeline(launch, block)
    events = trace.events(launch)
    clocks = events[events["block"] == block]["clock"]
    num_warps = -(-trace.launches[launch].block_size // 32)
    kinds = sorted({_WAITS.get(what, "lanes of the warp") for _, what, _, _ in spans})
    colors = dict(zip(kinds, COLORS))
    figure, axes = _bare(0.16 * num_warps + 1.0, f"what the warps of block {block} wait for")
    start, end = int(clocks.min()), int(clocks.max()) + 1
    scale = min(1.0, _MOST_STEPS / (end - start))
    image = np.full((num_warps, math.ceil((end - start) * scale), 3), _LIGHT)
    for warp, what, first, last in spans:
        at, to = (math.floor((step - start) * scale) for step in (first, last))
        image[warp, at : to + 1] = to_rgb(colors[_WAITS.get(what, "lanes of the warp")])
    extent = (start, end, num_warps - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="none", extent=extent)
    axes.hlines(np.arange(1, num_warps) - 0.5, start, end, color="white", linewidth=1)
    labels = range(0, num_warps, max(1, num_warps // 8))
    axes.set_yticks(labels, [f"warp {warp}" for warp in labels])
    axes.set_xlabel("step")
    _legend(
        figure, {name: Patch(color=color) for name, color in colors.items()} | {"": Patch(alpha=0)}
    )
    return figure
