"""One random call: its case, the kind of its values, and the layout of each operand."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from ...dtypes import DTYPES, EIGHT_BITS, FLOAT8S, decode, encode
from ...plan.candidates import candidates
from ...plan.devices import DEVICES
from ...plan.problem import SCALINGS, Layout
from ...plan.problem import Problem as PlanProblem
from ...plan.strategies import STATISTICS, STRATEGIES
from ..cases import NORMS, Case, Problem, random_problem
from ..placement import LAYOUTS
from ..quantized import How

VALUES = (
    "normal",
    "constant rows",
    "huge means",
    "neighbours",
    "tiny spreads",
    "outliers",
    "subnormals",
    "zeros",
    "huge weights",
    "a NaN",
    "an infinity",
    "a NaN and an infinity",
)
# How a call is made: the kernels with their argument structs, or the public functions.
ROUTES = ("kernels", "cupy", "torch", "autograd")
OPERANDS = ("x", "residual", "dy", "dsum")  # those with rows
PARAMETERS = ("weight", "bias")  # they may be misaligned
OUTPUTS = ("y", "dx")  # of the kernels: rows with gaps between them, or misaligned
# Calls in a row that use the same few kernels: a kernel takes as long to compile as forty calls.
PER_CASE = {"gpu": 2048, "cpu": 128}
_CALLS_FOR_MANY = 64  # of which one may have many elements: it takes as long as ten others
_PER_WIDE_CASE = 8  # the last ones of these are of wide rows, whose calls take longer than a kernel
_MOST_COLS = {"warp": 2**10, "block": 2**14}  # of a forced strategy; most wider rows do not fit it
_WIDE = 2**14, 2**20  # columns of wide rows

_NUM_POOLED = 2**20  # normal numbers that calls take theirs from

# Values whose float64 result is NaN or depends on the last bit when eps is 0.
_NEED_EPS = ("constant rows", "neighbours", "tiny spreads", "subnormals", "zeros")


@dataclass(frozen=True)
class Draw:
    """A call that can be made again: the same fields give the same bits.

    values: one of VALUES. layouts: of OPERANDS, PARAMETERS and OUTPUTS, contiguous if not
    named. route: one of ROUTES. seed: of the values and of the order of threads on the CPU.
    how: y becomes 8-bit floats; forward alone is then called.
    """

    case: Case
    values: str = "normal"
    layouts: Mapping[str, str] = field(default_factory=dict)
    route: str = "kernels"
    seed: int = 0
    how: How | None = None

    def __hash__(self) -> int:
        return hash((self.case, self.values, self.route, self.seed, self.how))


def draw(seed: int, index: int, on: str) -> Draw:
    """Number `index` of the calls of a seed. on: "gpu" or "cpu", which takes small ones.

    PER_CASE calls in a row have the same dtypes and options, about the same width, and one of three
    choices of layouts. On a GPU the last ones are instead of another case, with wide rows.
    """
    group, place = divmod(index, PER_CASE[on])
    is_wide = on == "gpu" and place >= PER_CASE[on] - _PER_WIDE_CASE
    widths = _WIDE if is_wide else (1, _MOST[on].cols)
    shared = _shared(f"{seed} {group} {'wide' if is_wide else on}", *widths)
    return _call(random.Random(f"{seed} {index} call"), shared, on)


class _Most(NamedTuple):
    """The largest calls: columns of a row, elements of most calls, and of a few."""

    cols: int
    elements: int
    many: int


_MOST = {"gpu": _Most(2**14, 2**14, 2**18), "cpu": _Most(2**13, 2**13, 2**13)}


@lru_cache(maxsize=16)
def _shared(seed: str, least_cols: int, most_cols: int) -> Draw:
    """What calls in a row have in common: a call of one row, and a seed of their layouts."""
    generator = random.Random(seed)
    case = _case(generator, least_cols, most_cols)
    how = _how(generator) if generator.random() < 0.2 else None
    if generator.random() < 0.15:
        case = _with_tile(generator, case)
    if generator.random() < 0.15:
        case = replace(case, dy=generator.choice(list(DTYPES)))
    return Draw(case, how=how, seed=generator.getrandbits(32))


def _call(generator: random.Random, shared: Draw, on: str) -> Draw:
    """One of the calls that have `shared` in common."""
    case, most = shared.case, _MOST[on]
    num_cols = case.num_cols
    if case.tile is None:  # another width that allows the same packs, most often in the same tile
        step = 2 * (num_cols & -num_cols)
        num_cols -= step * generator.randrange(1 + min(3, num_cols // (8 * step)))
    elements = most.many if generator.randrange(_CALLS_FOR_MANY) == 0 else most.elements
    num_rows = max(1, min(int(4096 ** generator.random()), elements // num_cols))
    sm_margin = generator.choice([0, 0, 0, generator.randrange(100)])
    case = replace(case, num_rows=num_rows, num_cols=num_cols, sm_margin=sm_margin)
    values = generator.choice([*["normal"] * len(VALUES), *VALUES])
    route = generator.choice(ROUTES) if on == "gpu" else "kernels"
    of_layouts = generator.choice([None, None, 1, 2])
    layouts = _layouts(random.Random(f"{shared.seed} {of_layouts}")) if of_layouts else {}
    drawn = Draw(case, values, layouts, route, generator.getrandbits(32), shared.how)
    return possible(drawn)


def _layouts(generator: random.Random) -> dict[str, str]:
    """Of tensors that a call may not have, which `possible` takes away."""
    layouts = {name: generator.choice(LAYOUTS) for name in OPERANDS if generator.random() < 0.6}
    layouts |= {name: "misaligned" for name in PARAMETERS if generator.random() < 0.1}
    choices = ["gap", "misaligned"]
    layouts |= {name: generator.choice(choices) for name in OUTPUTS if generator.random() < 0.2}
    return layouts


def possible(drawn: Draw) -> Draw:
    """The call without what its options, its values or its route do not allow."""
    case, route, how = drawn.case, drawn.route, drawn.how
    if how is not None:
        case, route = _quantizable(case), "kernels"
    if drawn.values in _NEED_EPS:
        case = replace(case, eps=1e-5)
    case = replace(case, recompute=case.recompute and route == "kernels")
    if route == "autograd":  # it has a sum only with a residual, and dy has the dtype of y
        case = replace(case, dsum=case.dsum and bool(case.residual), dy=None)
    unknown = {"kernels": "transposed", "torch": "reversed", "autograd": "reversed"}.get(route)
    has_outputs = route == "kernels" and how is None
    layouts = {
        name: layout
        for name, layout in drawn.layouts.items()
        if layout not in ("contiguous", unknown)
        and (_has(case, name) if name not in OUTPUTS else has_outputs)
    }
    return replace(drawn, case=case, route=route, layouts=layouts)


def _how(generator: random.Random) -> How:
    scaling = generator.choice(SCALINGS)
    is_given, in_blocks = scaling == "given", scaling.startswith("block")
    has_power = not is_given and generator.random() < 0.4
    layout = generator.choice(("row", "column", *["packed"] * has_power)) if in_blocks else "row"
    return How(
        generator.choice(list(EIGHT_BITS if scaling in ("given", "row") else FLOAT8S)),
        scaling,
        is_given and generator.random() < 0.5,
        has_power,
        None if is_given else generator.choice([None, None, 2.0]),
        is_given and generator.random() < 0.3,
        layout,
    )


def _quantizable(case: Case) -> Case:
    """Without what an 8-bit y does not go with, and without backward."""
    names = ("y", "round_x_hat", "recompute", "dsum", "dy")
    return replace(case, **{name: Case.__dataclass_fields__[name].default for name in names})


def _with_tile(generator: random.Random, case: Case) -> Case:
    """One of the tiles that the benchmark would try for such a row, with its strategy."""
    layout = Layout.of_new_arrays(case.num_cols)
    centered = case.norm == "layer_norm"
    problem = PlanProblem("forward", centered, case.num_cols, case.sum, layout=layout)
    try:
        choice = generator.choice(candidates(problem, DEVICES["H200"]))
    except ValueError:
        return case
    return replace(case, strategy=choice.strategy, tile=choice.tile)


def _has(case: Case, name: str) -> bool:
    """Whether the case has this one of OPERANDS or PARAMETERS."""
    has = {"residual": bool(case.residual), "dsum": case.dsum, "x": True, "dy": True}
    return has[name] if name in has else getattr(case, name) is not None


def _case(generator: random.Random, least_cols: int, most_cols: int) -> Case:
    """A case of one row."""
    strategies = [each for each in STRATEGIES if _MOST_COLS.get(each, most_cols) > least_cols]
    strategy = generator.choice([None, None, *strategies])
    most_cols = min(most_cols, _MOST_COLS.get(strategy, most_cols))
    num_cols = int(least_cols * (most_cols / least_cols) ** generator.random())
    if generator.random() < 0.5:
        num_cols = max(8, num_cols // 8 * 8)
    dtypes = list(DTYPES)
    case = Case(
        generator.choice(NORMS),
        1,
        num_cols,
        generator.choice(dtypes),
        y=generator.choice([None, None, *dtypes]),
        weight=generator.choice(["same", "same", None, *dtypes]),
        bias=generator.choice(["same", "same", None, *dtypes]),
        strategy=strategy,
        statistics=generator.choice([None, None, *STATISTICS]),
        zero_centered_weight=generator.random() < 0.2,
        residual=generator.random() < 0.3,
        eps=generator.choice([1e-5, 1e-12, 1e-3]),
        dsum=generator.random() < 0.3,
    )
    return case if generator.random() < 0.5 else _fused(generator, case)


def _fused(generator: random.Random, case: Case) -> Case:
    """Adds a residual of another dtype, and what goes with it."""
    dtypes = list(DTYPES)
    return replace(
        case,
        residual=generator.choice([False, True, "float32", *dtypes]),
        round_x_hat=generator.random() < 0.3,
        eps=generator.choice([1e-5, 1e-3]),
        recompute=generator.random() < 0.3,
    )


class _Pooled:
    """A generator whose normal numbers are those of one long list, from a random one on.

    Numbers that are drawn anew take longer than the kernels of a call.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng([seed, 1])
        self.uniform = self._generator.uniform

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        if size > _NUM_POOLED // 4:
            return self._generator.standard_normal(shape)
        first = self._generator.integers(_NUM_POOLED - size)
        return _pool()[first : first + size].reshape(shape)


@cache
def _pool() -> np.ndarray:
    pool = np.random.default_rng(0).standard_normal(_NUM_POOLED)
    pool.flags.writeable = False
    return pool


def problem_of(drawn: Draw) -> Problem:
    """The values of a draw. Operands that are broadcast have equal rows."""
    case, generator = drawn.case, np.random.default_rng(drawn.seed)
    problem = random_problem(case, generator=_Pooled(drawn.seed))
    x = _special(drawn, problem.x, generator)
    if x is not problem.x:
        problem.x = decode(encode(x, case.x), case.x)
    if drawn.values == "huge weights" and problem.weight is not None:
        largest = DTYPES[case.dtype("weight")].largest
        problem.weight = np.clip(problem.weight * 2.0**14, -largest, largest)
    for name, layout in drawn.layouts.items():
        if layout == "broadcast":
            values = getattr(problem, name)
            values[...] = values[:1]
    return problem


def _special(drawn: Draw, x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """x with values of a kind."""
    case = drawn.case
    largest = min(DTYPES[case.x].largest, 1e9)
    at = generator.integers(case.num_rows), generator.integers(case.num_cols)
    if drawn.values == "constant rows":
        # A residual of a smaller size would leave rows of equal values and very few others.
        constants = x[:, :1] * generator.choice([1.0, 100.0, *[1e5, 1e9] * (not case.residual)])
        return np.broadcast_to(np.clip(constants, -largest, largest), x.shape)
    if drawn.values == "huge means":
        return x + generator.choice([-1, 1]) * min(largest / 64, generator.choice([1e4, 1e6, 1e8]))
    if drawn.values == "neighbours":  # two values of a row, of which one is the next larger number
        mean = min(largest / 2, generator.choice([1.0, 1e3, 1e6, 1e9])) * (1 + generator.random())
        step = 2 * DTYPES[case.x].half_ulp * (generator.random(x.shape) < generator.random())
        return mean * (1 + step)
    if drawn.values == "tiny spreads":
        return x * max(1e-6, DTYPES[case.x].smallest)
    if drawn.values == "outliers":
        x = x.copy()
        x[at] *= 1e3
        return np.clip(x, -largest, largest)
    if drawn.values == "subnormals":
        return x * DTYPES[case.x].smallest * 64
    if drawn.values == "zeros":
        return np.zeros_like(x)
    if drawn.values in ("a NaN", "an infinity"):
        x = x.copy()
        x[at] = np.nan if drawn.values == "a NaN" else generator.choice([-np.inf, np.inf])
    if drawn.values == "a NaN and an infinity":
        x = x.copy()
        other = generator.integers(case.num_rows), generator.integers(case.num_cols)
        x[at], x[other] = np.nan, generator.choice([-np.inf, np.inf])
    return x
