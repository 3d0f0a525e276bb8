"""Data and layouts on which norms of other libraries failed, each with the number of its trap.

    T1   a mean far above the spread            T10  strided rows and columns, an expanded gradient
    T2   constant rows                          T11  addresses of single elements
    T3   one to seven columns                   T12  widths beside powers of two
    T4   an infinity or NaN in one row          T13  a float32 weight beside 16-bit x
    T5   squares that nearly overflow           T16  a gradient in one column
    T6   weights of 0, near 0 and huge          T17  x of three dimensions
    T7   no rows                                T19  a residual, and a gradient of the sum
    T8   numbers of rows near those of blocks   T20  eps of 0   T21  eps below 0, constant rows

T9 (more than 2^31 elements), T14 (the bits of a row alone), T15 (repeated runs) and T18 (devices,
CUDA graphs) are not data of one call; tests/kernels hold this library's kernels to them.
T7 is for functions, T17 for function=, T19 for the kernels. T20 and T21 need a
parameter eps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..dtypes import DTYPES, decode, encode
from .cases import Case, Problem, random_problem
from .check_function import THREE_DIMENSIONS, Callables
from .libraries import Library
from .trials import TENSORS_OF_ROWS, Trial

_NUMS_ROWS = {rows: 8 for rows in (1, 2, 31, 33, 131, 132, 133, 1025)} | {65537: 3}  # columns
_NUMS_COLS = (31, 33, 127, 129, 513, 1023, 1025, 4097)


def trap_trials(case: Case, own: Callables | None = None, seed: int = 0) -> list[Trial]:
    """All traps of a case. Its numbers of rows and columns do not count.

    own: the functions that are checked; without one the kernels are, which refuse some layouts.
    """
    layouts, of_kernels = ("gap", "reversed", "transposed", "broadcast"), not own
    if of_kernels:
        layouts = ("gap", "reversed", "broadcast")
    elif Library(own.library).name == "torch":  # it has no negative strides
        layouts = ("gap", "transposed", "broadcast")
    trials = [*_of_values(case, seed), *_of_parameters(case, seed), *_of_extents(case, seed)]
    if not of_kernels:
        trials.append(Trial(_random(case, 0, 64, seed), "T7 no rows"))
    trials += _of_layouts(case, layouts, seed)
    if of_kernels:
        added = _random(replace(case, residual=True, dsum=True), 6, 40, seed)
        trials.append(Trial(added, "T19 residual and dsum"))
    elif "function" in own.given:
        deep = dict.fromkeys(("x", "dy"), THREE_DIMENSIONS)
        trials.append(Trial(_random(case, 6, 40, seed), "T17 three dimensions", deep))
    if of_kernels or "eps" in own.operands(case.norm):
        trials += _of_eps(case, seed)
    return trials


def _with_rows(case: Case, rows: np.ndarray, seed: int) -> Problem:
    """A random problem with these rows for x, rounded to its dtype."""
    x = decode(encode(np.asarray(rows, np.float64), case.x), case.x)
    case = replace(case, num_rows=x.shape[0], num_cols=x.shape[1])
    return replace(random_problem(case, seed), x=x)


def _random(case: Case, num_rows: int, num_cols: int, seed: int) -> Problem:
    return random_problem(replace(case, num_rows=num_rows, num_cols=num_cols), seed)


def _of_values(case: Case, seed: int) -> Iterator[Trial]:
    generator = np.random.default_rng(seed)
    any_strategy = replace(case, strategy=None)  # of wide rows
    wide = generator.standard_normal((2, 32768)) * 0.01 + 100
    yield Trial(_with_rows(any_strategy, wide, seed), "T1 mean 100, spread 0.01")
    rows = generator.standard_normal((5, 4)) + 2000
    yield Trial(_with_rows(case, rows, seed), "T1 mean 2000, spread 1")
    yield Trial(_with_rows(case, 40000 + np.arange(4.0)[None], seed), "T1 40000 to 40003")
    rows = 1449 + np.where(generator.random((3, 16)) < 0.5, -1.0, 1.0)
    yield Trial(_with_rows(case, rows, seed), "T1 1448 and 1450")
    rows = np.array([[0.0], [1e2], [1e3], [1e4]]) + np.arange(16) * 1e-3
    yield Trial(_with_rows(case, rows, seed), "T1 steps of 0.001")

    constants = np.array([14.0, 1234.0, 0.0, 0.1, -1 / 3, 10000.001])[:, None]
    for num_cols in (7, 240):
        rows = np.repeat(constants, num_cols, axis=1)
        yield Trial(_with_rows(case, rows, seed), "T2 constant rows")
    huge = 1e6 if DTYPES[case.x].largest > 1e6 else 6e4
    yield Trial(_with_rows(case, np.array([[huge], [-3.0], [0.1]]), seed), "T3 one column")
    for num_cols in (2, 3, 5, 7):
        yield Trial(_random(case, 6, num_cols, seed), "T3 few columns")

    for value in (np.inf, -np.inf, np.nan):
        for col in (0, 99):
            problem = _random(case, 5, 100, seed)
            problem.x[2, col] = value
            yield Trial(problem, f"T4 {value} in row 2", tensors=TENSORS_OF_ROWS)

    largest = {"float16": 6e4, "float64": 1e150}.get(case.x, 1e18)
    rows = np.stack([np.linspace(-1, 1, 40), np.linspace(0.5, 1, 40)]) * largest
    yield Trial(_with_rows(case, rows, seed), "T5 squares that nearly overflow")


def _of_parameters(case: Case, seed: int) -> Iterator[Trial]:
    problem = _random(case, 6, 96, seed)
    reach = 3.0 if case.x == "float16" else 9.0
    scales = 10.0 ** np.linspace(-reach, reach, 6)[:, None]
    problem.x[:] = decode(encode(problem.x * scales, case.x), case.x)
    if problem.weight is not None:
        huge = 1e3 if case.x == "float16" else 1e10
        weights = np.resize([0.0, 0.5e-5, -0.5e-5, 1e-8, huge, 1.0], 96)
        dtype = case.dtype("weight")
        problem.weight[:] = decode(encode(weights, dtype), dtype)
    yield Trial(problem, "T6 weights of 0, near 0 and huge")
    if case.x in ("float16", "bfloat16"):
        wider = {name: "float32" for name in ("weight", "bias") if getattr(case, name) is not None}
        if wider:
            problem = _random(replace(case, **wider), 5, 48, seed)
            yield Trial(problem, f"T13 {' and '.join(wider)} float32")


def _of_extents(case: Case, seed: int) -> Iterator[Trial]:
    for num_rows, num_cols in _NUMS_ROWS.items():
        yield Trial(_random(case, num_rows, num_cols, seed), "T8 numbers of rows")
    for num_cols in _NUMS_COLS:
        any_strategy = replace(case, strategy=None)
        yield Trial(_random(any_strategy, 3, num_cols, seed), "T12 widths")


def _of_layouts(case: Case, layouts: tuple[str, ...], seed: int) -> Iterator[Trial]:
    for layout in layouts:
        problem = _random(case, 6, 40, seed)
        of_both = {"x": layout, "dy": layout}
        if layout == "broadcast":
            problem.dy[:] = problem.dy[:1]
            of_both = {"dy": layout}
        yield Trial(problem, f"T10 {layout} {' and '.join(of_both)}", of_both)
    for name in ("x", "dy", "weight", "bias"):
        if getattr(case, name, "") is not None:
            yield Trial(_random(case, 3, 64, seed), f"T11 misaligned {name}", {name: "misaligned"})
    problem = _random(case, 6, 40, seed)
    problem.dy[:, np.arange(40) != 17] = 0
    yield Trial(problem, "T16 gradient in column 17")


def _of_eps(case: Case, seed: int) -> Iterator[Trial]:
    yield Trial(_random(replace(case, eps=0.0), 7, 33, seed), "T20 eps 0")
    generator = np.random.default_rng(seed)
    rows = np.stack([np.full(40, 3.0), np.zeros(40), *generator.standard_normal((2, 40))])
    rows[3] *= 0.01
    for eps in (0.0, -0.05, -1e-3):
        problem = _with_rows(replace(case, eps=eps), rows, seed)
        yield Trial(problem, f"T21 eps {eps:g}", tensors=TENSORS_OF_ROWS)
