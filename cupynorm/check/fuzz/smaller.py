"""The smallest call that still fails, so that a report has nothing in it that does not matter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from ..cases import Case
from .draws import Draw, possible

_DEFAULTS = {each.name: each.default for each in fields(Case)}
_OPTIONS = [name for name in _DEFAULTS if name not in ("norm", "num_rows", "num_cols", "x")]


def smallest(drawn: Draw, fails: Callable[[Draw], bool], seconds: float) -> Draw:
    """Takes away options, layouts, rows and columns as long as `fails` holds, for some seconds."""
    deadline = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        # Calls that could not have been drawn may fail for a reason of their own.
        for simpler in map(possible, _simpler(drawn)):
            if simpler == drawn:
                continue
            if time.monotonic() > deadline:
                return drawn
            if fails(simpler):
                drawn, progress = simpler, True
                break
    return drawn


def _simpler(drawn: Draw) -> Iterator[Draw]:
    """Calls with one thing less, the largest steps first."""
    case = drawn.case
    for num_rows in dict.fromkeys((1, 2, case.num_rows // 2, case.num_rows - 1)):
        if 0 < num_rows < case.num_rows:
            yield replace(drawn, case=replace(case, num_rows=num_rows))
    for name in _OPTIONS:
        if getattr(case, name) != _DEFAULTS[name]:
            yield replace(drawn, case=replace(case, **{name: _DEFAULTS[name]}))
    for name in drawn.layouts:
        rest = {other: layout for other, layout in drawn.layouts.items() if other != name}
        yield replace(drawn, layouts=rest)
    if drawn.how is not None:
        for name, default in drawn.how._field_defaults.items():
            is_packed = drawn.how.layout == "packed"  # which needs powers of two
            if getattr(drawn.how, name) != default and not (is_packed and name == "power_of_two"):
                yield replace(drawn, how=drawn.how._replace(**{name: default}))
        yield replace(drawn, how=None)
    if drawn.route != "kernels":
        yield replace(drawn, route="kernels")
    if drawn.values != "normal":
        yield replace(drawn, values="normal")
    for num_cols in dict.fromkeys((case.num_cols // 2, case.num_cols - 8, case.num_cols - 1)):
        if 0 < num_cols < case.num_cols:
            yield replace(drawn, case=replace(case, num_cols=num_cols))


def as_python(drawn: Draw, on: str) -> str:
    """Three lines that make the call again."""
    case = drawn.case
    options = "".join(
        f", {name}={getattr(case, name)!r}"
        for name in _OPTIONS
        if getattr(case, name) != _DEFAULTS[name]
    )
    more = "".join(
        f", {name}={getattr(drawn, name)!r}"
        for name, default in (
            ("values", "normal"),
            ("layouts", {}),
            ("route", "kernels"),
            ("how", None),
        )
        if getattr(drawn, name) != default
    )
    names = ["Case", "Draw", "rerun"]
    names += ["How"] * (drawn.how is not None) + ["Tile"] * (case.tile is not None)
    return "\n".join(
        [
            f"from cupynorm.check.fuzz import {', '.join(sorted(names))}",
            f"case = Case({case.norm!r}, {case.num_rows}, {case.num_cols}, {case.x!r}{options})",
            f"print(rerun(Draw(case{more}, seed={drawn.seed}), {on!r}))",
        ]
    )
