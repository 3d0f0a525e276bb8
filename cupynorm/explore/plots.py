"""Plots for notebooks, in one style (bench/style.py). Each function returns a Plot.

A panel is an axes with a title. Functions take panels as a dict from titles to what they show, so
that one call puts pictures side by side on the same scales. Needs matplotlib.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..bench import style
from ..bench.plot import draw_speeds, panels_of, require_matplotlib
from ..bench.report import BenchResult
from ..plan.plans import plan
from ..plan.strategies import STRATEGIES
from ..svg import COLORS

require_matplotlib()
from matplotlib import rc_context  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

Points = tuple[Sequence[float], Sequence[float]]  # xs, ys
_FONT, _ELSE = "DejaVu Sans", "sans-serif"
_AS_TEXT = {"svg.fonttype": "none", "font.sans-serif": [_FONT]}
_ALL_WIDTHS = tuple(sorted({8 * round(2 ** (at / 8) / 8) for at in range(24, 177)}))


class Plot(Figure):
    """A figure that Jupyter shows as SVG. `axes` has its panels, in order."""

    def _repr_svg_(self) -> str:
        text = io.StringIO()
        with rc_context(style.settings() | _AS_TEXT):
            self.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
        svg = re.sub(r"\s*<metadata>.*</metadata>", "", text.getvalue(), flags=re.S)
        # Formulas name one font alone, which few readers' machines have. Hundredths of a point do.
        svg = svg.replace(f"'{_FONT}'\"", f"'{_FONT}', {_ELSE}\"")
        return re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)


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


def _legend(figure: Plot, named: Mapping[str, Any]) -> None:
    if len(named) > 1:
        ncols = min(4, len(named))
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
    with rc_context(style.settings()):
        figure, axes_of = _grid(panels, size, across)
        names = dict.fromkeys(name for each in panels.values() for name in each)
        drawn_lines = [name for name in names if name not in guides]
        drawn: dict[str, Any] = {}
        for named, axes in zip(panels.values(), axes_of):
            for name, (xs, ys) in named.items():
                if name in guides:
                    look = (style.GUIDE, style.OTHER_GUIDE)[list(guides).index(name) % 2]
                else:
                    look = style.look(drawn_lines.index(name))
                    look |= {} if joined else {"linestyle": "none"}
                (drawn[name],) = axes.plot(xs, ys, **look)
            axes.set_xlabel(xlabel)
            _scale(axes, log)
            axes.minorticks_off()
            if ylim is not None:
                axes.set_ylim(ylim)
        axes_of[0].set_ylabel(ylabel)
        _legend(figure, drawn)
    return figure


def rows(panels: Mapping[str, np.ndarray], *, size: tuple[float, float] = (3.6, 2.2)) -> Plot:
    """The values of each row of [num_rows, num_cols], with mean and one spread as a bar."""
    with rc_context(style.settings()):
        figure, axes_of = _grid(panels, size, 3)
        for values, axes in zip(panels.values(), axes_of):
            values = np.asarray(values, dtype=np.float64)
            for row, of_row in enumerate(values):
                color = style.look(row)["color"]
                axes.plot(*_teeth(of_row, row + 0.04, row + 0.26), color=color, linewidth=0.7)
                mean, spread = of_row.mean(), of_row.std()
                bar = {"color": color, "marker": style.look(row)["marker"], "capsize": 3}
                axes.errorbar([mean], [row - 0.18], xerr=[[spread], [spread]], **bar)
            axes.set_yticks(range(len(values)), [f"row {row}" for row in range(len(values))])
            axes.set_xlabel("value")
        axes_of[0].invert_yaxis()
    return figure


def _teeth(xs: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """A vertical line at each x, as one curve with gaps."""
    gaps = np.full(len(xs), np.nan)
    ys = np.tile([low, high, np.nan], len(xs))
    return np.stack([xs, xs, gaps], axis=1).ravel(), ys


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
    with rc_context(style.settings() | {"axes.grid": False}):
        are_alike = len({values.shape for values in arrays.values()}) == 1
        figure, axes_of = _grid(arrays, size, across, are_alike)
        for values, axes in zip(arrays.values(), axes_of):
            kind = "PuOr" if diverging else "Blues"
            look = {"cmap": kind, "vmin": low, "vmax": high, "interpolation": "none"}
            shown = axes.imshow(values, aspect="auto", **look)
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
    with rc_context(style.settings()):
        figure, axes_of = _grid(panels, size, 3)
        names = list(dict.fromkeys(name for each in panels.values() for name in each))
        drawn: dict[str, Any] = {}
        for named, axes in zip(panels.values(), axes_of):
            for name, values in named.items():
                look = style.look(names.index(name))
                count, _ = np.histogram(values, bins)
                share = count / max(1, np.size(values))
                kept = {key: look[key] for key in ("color", "linestyle")}
                drawn[name] = axes.stairs(share, bins, **kept, linewidth=1.3)
            if limit is not None:
                axes.axvline(limit, color="black", linewidth=1)
            axes.set_xlabel(xlabel)
            _scale(axes, log)
        axes_of[0].set_ylabel("share of values")
        _legend(figure, drawn)
    return figure


def combs(named: Mapping[str, np.ndarray], *, xlabel: str, log: bool = False) -> Plot:
    """Values as teeth on a line for each name."""
    with rc_context(style.settings() | {"axes.grid": False}):
        figure = Plot(figsize=(7.6, 0.5 * len(named) + 0.7), layout="constrained")
        axes = figure.subplots()
        for at, values in enumerate(named.values()):
            axes.plot(*_teeth(values, at - 0.35, at + 0.35), color=COLORS[at], linewidth=0.8)
        axes.set_yticks(range(len(named)), list(named))
        axes.invert_yaxis()
        axes.set_xlabel(xlabel)
        if log:
            axes.set_xscale("log", base=2)
    return figure


def strategies(
    devices: Sequence[str],
    directions: Sequence[str] = ("forward", "backward"),
    dtype: str = "bfloat16",
    *,
    widths: Sequence[int] = _ALL_WIDTHS,
) -> Plot:
    """Which strategy a row gets over its width: a bar for each GPU, a panel for each direction."""
    colors = dict(zip(STRATEGIES, COLORS))
    hatches = dict(zip(STRATEGIES, ("", "///", "\\\\\\", "xxx")))
    with rc_context(style.settings() | {"hatch.linewidth": 0.4, "hatch.color": "white"}):
        figure, axes_of = _grid(directions, (3.8, 0.38 * len(devices) + 1.1), 2)
        for direction, axes in zip(directions, axes_of):
            for at, device in enumerate(devices):
                chosen = [
                    plan(width, 4096, dtype, device=device, direction=direction).strategy
                    for width in widths
                ]
                for name, first, last in _spans(widths, chosen):
                    box = {"color": colors[name], "hatch": hatches[name], "linewidth": 0}
                    axes.barh(at, last - first, left=first, height=0.7, **box)
            axes.set_xscale("log", base=2)
            axes.set_xlabel("num_cols")
            axes.set_xlim(widths[0], widths[-1])
            axes.set_yticks(range(len(devices)), devices)
        axes_of[0].invert_yaxis()
        patches = {
            name: Patch(facecolor=colors[name], hatch=hatches[name], edgecolor="white")
            for name in STRATEGIES
        }
        _legend(figure, patches)
    return figure


def _spans(widths: Sequence[int], chosen: Sequence[str]) -> list[tuple[str, int, int]]:
    """Runs of the same name: (name, first width, the width at which the next begins).

    The last width only ends the last run.
    """
    spans: list[tuple[str, int, int]] = []
    for at, name in enumerate(chosen[:-1]):
        end = widths[at + 1]
        if spans and spans[-1][0] == name:
            spans[-1] = (name, spans[-1][1], end)
        else:
            spans.append((name, widths[at], end))
    return spans


def over_widths(
    number: Callable[[Any], float],
    device: str,
    directions: Sequence[str] = ("forward", "backward"),
    dtype: str = "bfloat16",
    *,
    ylabel: str = "",
    widths: Sequence[int] = _ALL_WIDTHS,
) -> Plot:
    """A number of each width's plan: a marker and a colour for each strategy. number(plan)."""
    panels: dict[str, dict[str, tuple[list, list]]] = {}
    for direction in directions:
        named: dict[str, tuple[list, list]] = {name: ([], []) for name in STRATEGIES}
        for width in widths:
            planned = plan(width, 4096, dtype, device=device, direction=direction)
            xs, ys = named[planned.strategy]
            xs.append(width)
            ys.append(number(planned))
        panels[f"{direction}, {device}"] = named
    return lines(panels, xlabel="num_cols", ylabel=ylabel, log="xy", joined=False, size=(3.8, 2.6))


def speeds(result: BenchResult, dtype: str = "bfloat16") -> Plot:
    """GB/s over num_cols of one dtype, as in the chart of the README. Odd widths are open."""
    all_panels = panels_of(result).items()
    panels = {title: each for title, each in all_panels if each[0].cell.dtype == dtype}
    if not panels:
        dtypes = ", ".join(sorted({each[0].cell.dtype for _, each in all_panels}))
        raise ValueError(f"dtype is {dtype!r}; expected one of the benchmark's, {dtypes}")
    with rc_context(style.settings()):
        figure, axes_of = _grid(panels, (4.2, 3.2), 2)
        drawn: dict[str, Any] = {}
        for measurements, axes in zip(panels.values(), axes_of):
            drawn |= draw_speeds(axes, measurements, result.libraries)
            axes.set_xlabel("num_cols")
        axes_of[0].set_ylabel("GB/s")
        _legend(figure, drawn)
    return figure


def roofline(
    peaks: tuple[float, float], points: Mapping[str, tuple[float, float]], *, copy: float
) -> Plot:
    """Measured operations a second over operations for each byte, under what a GPU can do.

    peaks: bytes and operations a second, of the data sheet. copy: bytes a second of a copy.
    points: name -> (operations for each byte, operations a second).
    """
    bandwidth, most = peaks
    xs = np.geomspace(0.25, 256, 200)
    named: dict[str, Points] = {
        "data sheet": (xs, np.minimum(xs * bandwidth, most)),
        "a copy's bytes": (xs, np.minimum(xs * copy, most)),
    }
    measured = {name: ([x], [y]) for name, (x, y) in points.items()}
    labels = {"xlabel": "operations for each byte", "ylabel": "operations a second"}
    kinds = {"log": "xy", "guides": list(named)[:2], "joined": False}
    return lines({"": named | measured}, **labels, **kinds, size=(6.0, 3.4))


def before_after(
    changes: Sequence[tuple[str, float, float]], *, xlabel: str, title: str = ""
) -> Plot:
    """An arrow for each change: (name, before, after). Blue: more; orange: less."""
    with rc_context(style.settings()):
        figure = Plot(figsize=(7.6, 0.3 * len(changes) + 1.0), layout="constrained")
        axes = figure.subplots()
        for at, (_, before, after) in enumerate(changes):
            color = COLORS[0] if after > before else COLORS[5]
            arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkB": 0}
            axes.annotate("", (after, at), (before, at), arrowprops=arrow)
            axes.plot([before], [at], "o", markerfacecolor="white", color=color)
            axes.plot([after], [at], "|", color=color, markersize=7)
        axes.set_yticks(range(len(changes)), [name for name, _, _ in changes])
        axes.invert_yaxis()
        axes.set_xlabel(xlabel)
        axes.set_title(title)
    return figure
