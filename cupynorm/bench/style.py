"""How plots look: one style for screen and print, which colour-blind readers can tell apart.

A line has one of Okabe and Ito's colours, and a marker and a dash of its own for print in grey.
"""

from __future__ import annotations

from typing import Any

from ..svg import COLORS

MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (4, 1, 1, 1, 1, 1)), (0, (6, 2)))
GREY = "#666666"
GUIDE = {"color": GREY, "linestyle": (0, (2, 2)), "linewidth": 1.0}  # a limit, or a theory
# What colours become on a dark page. Those of lines that are not named here are light enough.
DARK = {"#ffffff": "#0d1117", "#000000": "#c9d1d9", "#666666": "#9198a1", "#0072b2": "#58a6ff"}
OTHER_GUIDE = GUIDE | {"linestyle": "-", "linewidth": 0.8}


def look(at: int) -> dict[str, Any]:
    """Colour, marker and dash of line number `at`. The seventh line looks like the first."""
    at %= len(MARKERS)
    return {"color": COLORS[at], "marker": MARKERS[at], "linestyle": DASHES[at]}


def settings() -> dict[str, Any]:
    """matplotlib's rcParams: small text, no frame, the same file for the same data."""
    return {
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


def with_dark_colors(svg: str) -> str:
    """A matplotlib SVG whose colours follow the reader's preference for light or dark pages."""
    rules = "".join(
        f'[style*="{kind}: {light}"] {{{kind}: {dark} !important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    text = f"svg {{fill: {DARK['#000000']}}}"  # text has no colour of its own
    added = f'<style type="text/css">@media (prefers-color-scheme: dark) {{{text}{rules}}}</style>'
    return svg.replace("<defs>\n", f"<defs>\n  {added}\n", 1)
