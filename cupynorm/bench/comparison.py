"""Two runs of the benchmark compared, cell by cell."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .cells import COPY, OURS, Cell
from .report import BenchResult, aligned

# Less is no change. The spread of a run leaves out what differs from run to run: clocks, and which
# pages of memory are used.
_LEAST_MARGIN = 0.02


@dataclass(frozen=True)
class Change:
    """Our share of the copy in one cell of two runs. margin: largest change that counts as none."""

    cell: Cell
    before: float
    after: float
    margin: float

    @property
    def relative(self) -> float:
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """ "slower", "faster" or "same"."""
        if abs(self.relative) <= self.margin:
            return "same"
        return "slower" if self.relative < 0 else "faster"


@dataclass(frozen=True)
class Comparison:
    """Two runs, cell by cell. Prints what changed. True if no cell is slower or off."""

    changes: list[Change]
    notes: list[str]
    off: list[str]

    @property
    def ok(self) -> bool:
        return not self.off and all(change.verdict != "slower" for change in self.changes)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        changed = [change for change in self.changes if change.verdict != "same"]
        lines = []
        if changed:
            rows = [["verdict", "share before", "after", "change", "more than", "cell"]]
            for each in changed:
                shares = (f"{each.before:.3f}", f"{each.after:.3f}")
                change = (f"{each.relative:+.1%}", f"{each.margin:.1%}")
                rows.append([each.verdict, *shares, *change, str(each.cell)])
            lines += [*aligned(rows), ""]
        counts = Counter(each.verdict for each in self.changes)
        counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("slower", "faster"))
        last = f"{len(self.changes)} cells: {counted}, {counts['same']} the same within the spread"
        return "\n".join([*lines, *self.notes, *self.off, last])


def compare(before: BenchResult, after: BenchResult) -> Comparison:
    """Compares our share of the copy, which does not depend on clocks, in the cells of both runs.

    Raises ValueError if the runs have no cell in common.
    """
    old, new = (
        {measured.cell: measured for measured in result.measurements} for result in (before, after)
    )
    shared = [cell for cell in old if cell in new]
    if not shared:
        raise ValueError(
            "the two runs have no cell in common; expected the same norm, direction, dtype and "
            "shape in both"
        )
    notes = []
    gpus = [result.environment.get("gpu") for result in (before, after)]
    if gpus[0] != gpus[1]:
        notes.append(
            f"the GPUs differ, {gpus[0]} before and {gpus[1]} after. Each share is of the copy of "
            "its GPU; a kernel tuned for one GPU need not reach it on another."
        )
    for label, number in (("before", len(old) - len(shared)), ("after", len(new) - len(shared))):
        if number:
            notes.append(f"cells measured {label} only: {number}")
    changes = []
    for cell in shared:
        measured = (old[cell], new[cell])
        spread = sum(each.spread(name) for each in measured for name in (COPY, OURS)) / 2
        margin = max(spread, _LEAST_MARGIN)
        changes.append(Change(cell, measured[0].share(OURS), measured[1].share(OURS), margin))
    off = [f"{cell}: {new[cell].faults[OURS]}" for cell in shared if OURS in new[cell].faults]
    return Comparison(changes, notes, off)
