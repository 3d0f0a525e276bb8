"""One random call: its case, the kind of its values, and the layout of each operand."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ...dtypes import DTYPES, FLOAT8S, decode, encode
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
    "tiny spreads",
    "outliers",
    "subnormals",
    "zeros",
    "a NaN",
    "an infinity",
    "a NaN and an infinity",
)
# How a call is made: the kernels with their argument structs, or the public functions.
ROUTES = ("kernels", "cupy", "torch", "autograd")
OPERANDS = ("x", "residual", "dy", "dsum")  # those with rows
PARAMETERS = ("weight", "bias", "weight1", "bias1", "row_scale")  # they may be misaligned
OUTPUTS = ("y", "dx")  # of the kernels: rows with gaps between them, or misaligned
PER_CASE = 8

# Values whose float64 result is NaN or depends on the last bit when eps is 0.
_NEED_EPS = ("constant rows", "tiny spreads", "subnormals", "zeros")


@dataclass(frozen=True)
class Draw:
    """A call that can be made again: the same fields give the same bits.

    values: one of VALUES, of x. layouts: of OPERANDS, PARAMETERS and OUTPUTS, contiguous if not
    named. route: one of ROUTES. seed: of the values, of the dropout mask, and of the order of
    threads on the CPU. how: y becomes 8-bit floats; forward alone is then called.
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

    PER_CASE calls in a row have the same dtypes, width and options, because most of the time of a
    call would otherwise go into compiling its kernels.
    """
    generator = random.Random(f"{seed} {index // PER_CASE}")
    max_elements, max_cols = (2**18, 2**20) if on == "gpu" else (2**13, 2**13)
    case = _case(generator, max_cols)
    how = _how(generator) if generator.random() < 0.2 else None
    if generator.random() < 0.15:
        case = _with_tile(generator, case)
    generator = random.Random(f"{seed} {index}")
    num_rows = max(1, min(int(4096 ** generator.random()), max_elements // case.num_cols))
    sm_margin = generator.choice([0, 0, 0, generator.randrange(100)])
    case = replace(case, num_rows=num_rows, sm_margin=sm_margin)
    values = generator.choice([*["normal"] * len(VALUES), *VALUES])
    route = generator.choice(ROUTES) if on == "gpu" else "kernels"
    if route != "autograd" and generator.random() < 0.15:
        case = replace(case, dy=generator.choice(list(DTYPES)))
    if how is not None:
        case, route = _quantizable(case), "kernels"
        if on == "gpu" and values.startswith("a"):  # there y is compared as a number
            values = "normal"
    if values in _NEED_EPS:
        case = replace(case, eps=1e-5)
    if route == "autograd":  # it has a sum only with a residual, and no second pass over y
        case = replace(case, recompute=False, dsum=case.dsum and bool(case.residual))
    elif route != "kernels":
        case = replace(case, recompute=False)
    known = {"torch": LAYOUTS[:4] + LAYOUTS[5:], "autograd": LAYOUTS[:4] + LAYOUTS[5:]}
    known |= {"cupy": LAYOUTS, "kernels": LAYOUTS[:5]}
    there = [name for name in OPERANDS if _has(case, name)]
    layouts = {name: generator.choice(known[route]) for name in there if generator.random() < 0.4}
    for name in PARAMETERS:
        if getattr(case, name) is not None and generator.random() < 0.1:
            layouts[name] = "misaligned"
    for name in OUTPUTS if route == "kernels" and how is None else ():
        if generator.random() < 0.2:
            layouts[name] = generator.choice(["gap", "misaligned"])
    return Draw(case, values, layouts, route, generator.getrandbits(32), how)


def _how(generator: random.Random) -> How:
    scaling = generator.choice(SCALINGS)
    has_power = scaling in ("tensor", "row", "block") and generator.random() < 0.4
    has_amax = scaling == "given" and generator.random() < 0.5
    return How(generator.choice(list(FLOAT8S)), scaling, has_amax, has_power)


def _quantizable(case: Case) -> Case:
    """Without what an 8-bit y does not go with, and without backward."""
    names = ("y", "weight1", "bias1", "round_x_hat", "memory_efficient", "recompute", "dsum", "dy")
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
    return {"residual": bool(case.residual), "dsum": case.dsum}.get(name, True)


def _case(generator: random.Random, max_cols: int) -> Case:
    """A case of one row."""
    num_cols = int(max_cols ** generator.random())
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
        strategy=generator.choice([None, None, *STRATEGIES]),
        statistics=generator.choice([None, None, *STATISTICS]),
        zero_centered_weight=generator.random() < 0.2,
        residual=generator.random() < 0.3,
        eps=generator.choice([1e-5, 1e-12, 1e-3]),
        dsum=generator.random() < 0.3,
    )
    return case if generator.random() < 0.5 else _fused(generator, case)


def _fused(generator: random.Random, case: Case) -> Case:
    """Adds a sum of another dtype, dropout, a scale of each row, and second outputs."""
    dtypes = list(DTYPES)
    fused = replace(
        case,
        residual=generator.choice([False, True, case.x]),
        residual_dtype=generator.choice([None, "float32", *dtypes]),
        row_scale=generator.choice([None, None, *dtypes]),
        dropout_p=generator.choice([0.0, 0.0, 0.1, 0.9]),
        weight1=generator.choice([None, None, None, *dtypes]),
        bias1=generator.choice([None, None, None, *dtypes]),
        round_x_hat=generator.random() < 0.3,
        memory_efficient=generator.random() < 0.3,
        eps=generator.choice([1e-5, 1e-3]),
    )
    # y must have the arithmetic of the sum.
    wide = [name == "float64" for name in (fused.sum, fused.dtype("y"))]
    fused = replace(fused, memory_efficient=fused.memory_efficient and wide[0] == wide[1])
    return replace(fused, recompute=not fused.memory_efficient and generator.random() < 0.3)


def problem_of(drawn: Draw) -> Problem:
    """The values of a draw. Operands that are broadcast have equal rows."""
    case, generator = drawn.case, np.random.default_rng(drawn.seed)
    problem = random_problem(case, drawn.seed)
    x = _special(drawn, problem.x, generator)
    problem.x = decode(encode(x, case.x), case.x)
    problem.dropout_seed = int(generator.integers(-(2**63), 2**63))
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
        return np.broadcast_to(x[:, :1] * generator.choice([1.0, 100.0]), x.shape)
    if drawn.values == "huge means":
        return x + generator.choice([-1, 1]) * min(largest / 64, generator.choice([1e4, 1e6, 1e8]))
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
