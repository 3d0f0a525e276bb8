"""Which elements of a tensor are off, in words."""

from __future__ import annotations

import numpy as np


def pattern_of(off: np.ndarray) -> str:
    """Which elements are off: "all elements are", "row 3 is", "every 4th column is", ..."""
    if off.all():
        return "all elements are"
    if off.sum() == 1:
        where = ", ".join(str(each[0]) for each in np.nonzero(off))
        return f"the element [{where}] is"
    if off.ndim == 1:
        return of_line(off, "element") or f"{off.sum()} of {off.size} elements are"
    in_row, in_col = off.any(axis=1), off.any(axis=0)
    # Elements near 0 may be right in a row that is wrong.
    of_rows = off[in_row].mean() > 0.5 and in_col.mean() > 0.5
    of_cols = off[:, in_col].mean() > 0.5 and in_row.mean() > 0.5
    if of_rows and of_cols and in_row.all() and in_col.all():
        share = off.mean()
        words = f"{share:.0%} of all elements" if share < 0.99 else "nearly all elements"
        return f"{words}, in all rows and columns, are"
    names = []
    if of_cols and not in_col.all():
        names.append(of_line(in_col, "column"))
    if of_rows and not in_row.all():
        names.append(of_line(in_row, "row"))
    if any(names):
        return next(filter(None, names))
    rows, cols = np.flatnonzero(in_row), np.flatnonzero(in_col)
    box = off[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    if box.mean() > 0.5 and box.size < off.size:
        return f"a block of rows {rows[0]} to {rows[-1]}, columns {cols[0]} to {cols[-1]} is"
    return f"{off.sum()} of {off.size} elements, scattered, are"


def of_line(off: np.ndarray, name: str) -> str:
    """Which rows, columns or elements of one dimension, or "" if all or in no order."""
    at = np.flatnonzero(off)
    steps = np.diff(at)
    if len(at) == 1:
        return f"{name} {at[0]} is"
    if (steps == 1).all():
        if at[-1] == len(off) - 1:
            return f"the last {len(at)} {name}s are"
        return f"{name}s {at[0]} to {at[-1]} are"
    if len(at) > 2 and len(set(steps)) == 1:
        return f"every {_ordinal(steps[0])} {name}, from {name} {at[0]}, is"
    if len(at) <= 4:
        return f"{name}s {', '.join(map(str, at[:-1]))} and {at[-1]} are"
    return f"{len(at)} of {len(off)} {name}s are"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
