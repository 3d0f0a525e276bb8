"""Small pictures as SVG text: rectangles, lines and words, in one style for screen and print.

Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart. Words and
lines take the colour of the page's text, so that pictures work in light and dark themes.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_FONT = "font-family: system-ui, sans-serif; font-size: 11px"


class Picture:
    """A picture of a width, as high as what is drawn. Coordinates are pixels from the top left."""

    def __init__(self, width: int, title: str) -> None:
        self.width, self.height, self.title = width, 0.0, title
        self._parts: list[str] = []

    def rectangle(
        self, x: float, y: float, size: tuple[float, float], color: str, hint: str = ""
    ) -> None:
        """size: width and height. hint: what a pointer that rests on it shows."""
        width, height = size
        self.height = max(self.height, y + height)
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        hint = f"<title>{html.escape(hint)}</title>" if hint else ""
        self._parts.append(f'<rect {shape} fill="{color}">{hint}</rect>')

    def text(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        """y: of the line on which the letters stand. anchor: start, middle or end."""
        self.height = max(self.height, y + 4)
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text {at} fill="currentColor">{html.escape(words)}</text>')

    def line(self, start: tuple[float, float], end: tuple[float, float], color: str = "") -> None:
        self.height = max(self.height, start[1], end[1])
        ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
        self._parts.append(f'<line {ends} stroke="{color or "currentColor"}"/>')

    def curve(self, points: Sequence[tuple[float, float]], color: str) -> None:
        """A line through all points."""
        self.height = max([self.height, *(y for _, y in points)])
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"/>')

    def legend(self, x: float, y: float, named: dict[str, str]) -> None:
        """Names with their colours, side by side."""
        for name, color in named.items():
            self.rectangle(x, y - 9, (10, 10), color)
            self.text(x + 14, y, name)
            x += 26 + 6.2 * len(name)

    def __str__(self) -> str:
        height = self.height + 6
        size = f'width="{self.width}" height="{height:.0f}" viewBox="0 0 {self.width} {height:.0f}"'
        label = html.escape(self.title)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" style="{_FONT}">'
        return f"{head}<title>{label}</title>{''.join(self._parts)}</svg>"

    def _repr_svg_(self) -> str:
        return str(self)


def shade(color: str, share: float) -> str:
    """A colour mixed with white: share 0 is the colour itself, 1 is white."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
