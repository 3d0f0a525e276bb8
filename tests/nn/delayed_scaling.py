"""A second implementation of delayed scaling, one number at a time."""

from __future__ import annotations

import numpy as np


class Machine:
    """Delayed scaling of one tensor by the rules in words, one number at a time."""

    def __init__(self, largest: float, length: int, margin: int, rule: str) -> None:
        self.largest, self.length, self.margin, self.rule = largest, length, margin, rule
        self.scale, self.latest, self.older = (
            np.float32(1),
            np.float32(0),
            [np.float32(0)] * (length - 1),
        )  # older: oldest first

    def step(self, amax: float) -> None:
        amax = np.float32(amax)
        if amax == 0:
            return  # not used
        seen = [value for value in (amax, *self.older) if not np.isnan(value)]
        chosen = amax if self.rule == "most_recent" else max(seen, default=np.float32(0))
        if np.isfinite(chosen) and chosen > 0:
            with np.errstate(over="ignore"):
                scale = np.float32(self.largest * 2.0**-self.margin) / chosen
            self.scale = min(scale, np.finfo(np.float32).max)
        if self.length > 1:
            self.older = [*self.older[1:], amax]

    def history(self) -> list[float]:
        return [0.0, *self.older]
