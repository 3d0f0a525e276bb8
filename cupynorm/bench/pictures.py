"""A picture of a benchmark: the share of a copy's speed over the width of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..svg import COLORS, Picture
from .cells import COPY

_WIDTH, _LEFT, _TOP, _HEIGHT = 640, 44, 28, 150
_MOST = 1.1  # of the copy's speed, at the top


def shares(title: str, measurements: Sequence[Any]) -> Picture:
    """A line for each library. measurements: Measurements of one kind, of several widths."""
    names = dict.fromkeys(
        name for each in measurements for name in each.samples if name != COPY and ":" not in name
    )
    colors = dict(zip(names, COLORS * (1 + len(names) // len(COLORS))))
    widths = sorted({each.cell.num_cols for each in measurements})
    low, high = math.log2(widths[0]), math.log2(max(widths[-1], widths[0] + 1))
    right = _WIDTH - _LEFT - 10

    def at(num_cols: int, share: float) -> tuple[float, float]:
        x = _LEFT + (math.log2(num_cols) - low) / (high - low) * right
        return x, _TOP + (1 - min(share, _MOST) / _MOST) * _HEIGHT

    picture = Picture(_WIDTH, title)
    picture.text(0, 12, title)
    picture.legend(330, 12, colors)
    for share in (0.0, 0.5, 1.0):
        _, y = at(widths[0], share)
        picture.line((_LEFT, y), (_LEFT + right, y), COLORS[7])
        picture.text(_LEFT - 6, y + 4, f"{share:g}", "end")
    for name, color in colors.items():
        ran = sorted((each.cell.num_cols, each) for each in measurements if name in each.samples)
        points = [at(num_cols, each.share(name)) for num_cols, each in ran]
        picture.curve(points, color)
        for (num_cols, each), (x, y) in zip(ran, points):
            hint = f"{name}, {num_cols} columns: {each.share(name):.2f} of the copy"
            picture.rectangle(x - 2, y - 2, (4, 4), color, hint)
    for num_cols in (widths[0], widths[len(widths) // 2], widths[-1]):
        picture.text(at(num_cols, 0)[0], _TOP + _HEIGHT + 14, f"{num_cols:,}", "middle")
    picture.text(_LEFT + right / 2, _TOP + _HEIGHT + 28, "columns of a row", "middle")
    return picture
