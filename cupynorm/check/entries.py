"""The cases that the command `check` runs: from files and from random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from ..dtypes import DTYPES
from ..plan import dispatch
from ..plan.devices import Device
from ..plan.dispatch import Plan
from ..plan.plans import plan
from ..plan.strategies import STRATEGIES
from .activations import Activations
from .cases import DIRECTIONS, Case
from .traps import trap_trials
from .trials import Trial, default_trials

# Elements of x in one case, by where the kernels run. Most of the time goes into the float64
# reference on the host, and into the kernels where they run on the CPU.
_GRID_ELEMENTS = {"gpu": 2**20, "cpu": 2**16}
_GRID_ROWS = {"gpu": 1021, "cpu": 61}
_FILE_ELEMENTS = {"gpu": 2**24, "cpu": 2**20}
_WIDEST = {"gpu": 2**22, "cpu": 2**19}


class Entry(NamedTuple):
    """One case of the check. name: its line in the table. make: returns what is run for it."""

    name: str
    case: Case
    make: Callable[[], list[Trial]]


Shape = tuple[int, int, str | None]  # num_rows, num_cols, and the strategy that is forced


def file_entries(
    recorded: Sequence[Activations],
    norms: Sequence[str],
    dtypes: Sequence[str | None],
    on: str,
    seed: int = 0,
) -> list[Entry]:
    """Activations in each norm and dtype. dtypes: None keeps the stored one. on: "gpu" or "cpu"."""
    entries = []
    for norm, each, dtype in product(norms, recorded, dtypes):
        problem = each.problem(norm, dtype, max_elements=_FILE_ELEMENTS[on], seed=seed)
        num_rows, num_cols = each.x.shape
        is_sample = problem.case.num_rows < num_rows
        sampled = f"{problem.case.num_rows} of " if is_sample else ""
        label = each.name.rpartition("layer_norms/")[2]
        name = f"{label}, {sampled}{num_rows} x {num_cols}"
        entries.append(Entry(name, problem.case, partial(list, [Trial(problem)])))
    return entries


def random_entries(
    shapes: Sequence[Shape],
    norms: Sequence[str],
    dtypes: Sequence[str],
    seed: int = 0,
    **options: Any,
) -> list[Entry]:
    """Random tensors of these shapes in each norm and dtype, and again with a NaN in one row.

    options: of the cases.
    """
    entries = []
    for norm, (num_rows, num_cols, strategy), dtype in product(norms, shapes, dtypes):
        case = Case(norm, num_rows, num_cols, dtype, strategy=strategy, **options)
        forced = f", {strategy} forced" if strategy else ""
        name = f"random, {num_rows} x {num_cols}{forced}"
        entries.append(Entry(name, case, partial(default_trials, case, seed)))
    return entries


def trap_entries(
    norms: Sequence[str], dtypes: Sequence[str], seed: int = 0, **options: Any
) -> list[Entry]:
    """All traps of the kernels in each norm and dtype. options: of the cases."""
    entries = []
    for norm, dtype in product(norms, dtypes):
        case = Case(norm, 0, 0, dtype, **options)
        for trial in trap_trials(case, seed=seed):
            case = trial.problem.case
            name = f"{trial.name}, {case.num_rows} x {case.num_cols}"
            entries.append(Entry(name, case, partial(list, [trial])))
    return entries


def strategies_of(device: Device) -> list[str]:
    """The strategies that a device can run."""
    capability = device.compute_capability
    return [name for name, row in STRATEGIES.items() if capability >= row.first_capability]


def grid_shapes(device: Device, on: str) -> list[Shape]:
    """Shapes that reach every strategy of a device in both directions. on: "gpu" or "cpu".

    A few narrow and odd widths; then, for each strategy and direction, the first width that is too
    wide for it in every dtype. Where that takes too long, the next strategy is forced on
    narrower rows.
    """
    widths = {1, 33, 768, 4095}
    forced = set()
    names = strategies_of(device)
    for direction in DIRECTIONS:
        problems = [
            plan(4096, dtype=dtype, device=device, direction=direction).problem for dtype in DTYPES
        ]
        for name, following in zip(names, names[1:]):
            widest = max(dispatch.widest(name, problem, device) for problem in problems)
            beyond = (widest // 16 + 1) * 16  # whole packs in every dtype
            if beyond > _WIDEST[on]:
                forced.add(following)
            else:
                widths.add(beyond)

    def num_rows(num_cols: int) -> int:
        fewest = 1 if num_cols >= 2**20 else 2
        return min(_GRID_ROWS[on], max(_GRID_ELEMENTS[on] // num_cols, fewest))

    shapes: list[Shape] = [(num_rows(num_cols), num_cols, None) for num_cols in sorted(widths)]
    return shapes + [(3, 4096, name) for name in names if name in forced]


def quick_shapes(device: Device) -> list[Shape]:
    """Two widths for each strategy of a device: whole packs, and an odd number of columns.

    Strategies for wide rows are forced on narrower ones.
    """
    names = [name for name in strategies_of(device) if name != "warp"]
    forced = [(3, num_cols, name) for name in names for num_cols in (4095, 4096)]
    return [(61, 33, None), (16, 768, None), *forced]


def plan_of(case: Case, device: Device, direction: str) -> Plan:
    """The plan of a case in one direction."""
    return plan(
        case.num_cols,
        case.num_rows,
        case.x,
        norm=case.norm,
        direction=direction,
        device=device,
        weight_dtype=case.dtype("weight"),
        bias_dtype=case.dtype("bias"),
        strategy=case.strategy,
    )
