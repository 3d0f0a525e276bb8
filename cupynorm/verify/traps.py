"""The data of the gradient check: random rows, rows on which wrong kernels show, and traps.

Among random rows, whose mean is about as large as their spread, these mistakes do not show:

    E[x^2] - E[x]^2     subtracts two numbers of size mean^2, each rounded to u * mean^2. In rows
                        with mean / std = 500 to 2000 the variance is off by 1 to 20% in float32
                        and both right algorithms are off by less than 0.1%.
    another eps         changes rstd by half of (eps' - eps) / var. A row with var = eps shows it.
    a NaN that spreads  to other rows needs a row with one. It makes all of dweight NaN, so that row
                        is in a problem of its own.

dy of the special rows is 2^-10 as large: they add little to dweight and to what is allowed of it.

Traps are data and layouts on which norms of other libraries failed, each with a number:

    T1   a mean far above the spread            T10  strided rows and columns, an expanded gradient
    T2   constant rows                          T11  addresses of single elements
    T3   one to seven columns                   T12  widths beside powers of two
    T4   an infinity or NaN in one row          T13  a float32 weight beside 16-bit x
    T5   squares that nearly overflow           T16  a gradient in one column
    T6   weights of 0, near 0 and huge          T17  x of three dimensions
    T7   no rows                                T19  a residual, and a gradient of the sum
    T8   numbers of rows near those of blocks   T20  eps of 0   T21  eps below 0, constant rows

T9 (more than 2^31 elements), T14 (the bits of a row alone), T15 (repeated runs) and T18 (devices,
CUDA graphs) are not data of one call; tests/kernels hold this library's kernels to them, and to
layouts. T7, T10 and T11 are for functions, T17 for those that autograd differentiates, T19 for the
kernels. T20 and T21 need a parameter eps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, decode, encode
from ..table import printable
from .cases import Case, Problem, random_problem
from .diagnosis import Diagnosis
from .results import CALL, Finding, judge_all

THREE_DIMENSIONS = "three dimensions"  # a layout for functions, with rows of x in two dimensions
# Of narrow dtypes the rows have few different values, so that the errors of Welford's algorithm do
# not cancel: as small a ratio as shows the mistake beside the rounding of y.
_MEAN_OVER_STD = {"float16": 500.0, "bfloat16": 700.0, "float32": 2000.0, "float64": 2000.0}
_SMALL_DY = 2.0**-10
TENSORS_OF_ROWS = ("y", "mean", "rstd", "dx")  # tensors with a value or row for each row of x


class Trial(NamedTuple):
    """One run: a problem, and what is special about it.

    name: of that, in few words. layouts: of inputs by name, from check_function.LAYOUTS, or
    "three dimensions". tensors: those that are judged, None for all.
    """

    problem: Problem
    name: str = ""
    layouts: Mapping[str, str] = {}
    tensors: tuple[str, ...] | None = None

    def judged(
        self, results: dict[str, np.ndarray], *, rounded_mean: bool = False
    ) -> list[Finding]:
        """A finding for each tensor, with a diagnosis if it is off.

        rounded_mean: as for bounds.expect.
        """
        if self.tensors is not None:
            results = {name: results[name] for name in results if name in self.tensors}
        findings = judge_all(self.problem, results, rounded_mean=rounded_mean, diagnoses=True)
        if not self.name:
            return findings
        return [replace(finding, case=f"{finding.case}, {self.name}") for finding in findings]

    def failed(self, error: Exception) -> Finding:
        """The finding of a call that raised an error."""
        raised = f"it raised {type(error).__name__}: {printable(error)}"
        why = Diagnosis("the call is", float("inf"), raised)
        nan = float("nan")
        return Finding(f"{self.problem.case}, {self.name}", CALL, nan, (), nan, nan, nan, 1, why)


def default_problem(case: Case, seed: int = 0) -> Problem:
    """A random problem in which up to four rows, at most half of them, are special."""
    problem = random_problem(case, seed)
    generator = np.random.default_rng([seed, case.num_cols, 1])
    rows = special_rows(case)
    for count, row in enumerate(rows):
        if count == 1:
            std = np.sqrt(max(abs(case.eps), 1e-7))
            values = std * generator.standard_normal(case.num_cols)
        else:
            values = large_mean(case, generator)
        problem.x[row] = decode(encode(values, case.x), case.x)
        dtype = case.dtype("y")
        problem.dy[row] = decode(encode(problem.dy[row] * _SMALL_DY, dtype), dtype)
    return problem


def special_rows(case: Case) -> list[int]:
    """The indices of the special rows: spread over all rows, none if there is one row."""
    count = min(4, case.num_rows // 2)
    return [(2 * at + 1) * case.num_rows // (2 * count) for at in range(count)]


def large_mean(case: Case, generator: np.random.Generator) -> np.ndarray:
    """One row [num_cols] with a mean 500 to 2000 times its standard deviation."""
    ratio = _MEAN_OVER_STD[case.x]
    mean = generator.uniform(1.25, 1.75) * 1024.0
    step = 2.0 ** (11 - DTYPES[case.x].digits)  # between neighbouring numbers near the mean
    mean = np.rint(mean / step) * step
    std = mean / ratio
    if std >= step / 2:
        return mean + std * generator.standard_normal(case.num_cols)
    # Narrow dtypes: a few elements are one step away.
    num_apart = max(1, round(case.num_cols * (std / step) ** 2))
    values = np.full(case.num_cols, mean)
    values[generator.permutation(case.num_cols)[:num_apart]] += step
    return values


def default_trials(case: Case, seed: int = 0) -> list[Trial]:
    """The default problem; and again with one NaN in x, in its middle row, if there are rows."""
    trials = [Trial(default_problem(case, seed))]
    if case.num_rows > 1:
        problem = default_problem(case, seed)
        row = case.num_rows // 2
        problem.x[row, case.num_cols // 2] = np.nan
        trials.append(Trial(problem, f"NaN in row {row}", tensors=TENSORS_OF_ROWS))
    return trials


# Traps.

_NUMS_ROWS = {rows: 8 for rows in (1, 2, 31, 33, 131, 132, 133, 1025)} | {65537: 3}  # columns
_NUMS_COLS = (31, 33, 127, 129, 513, 1023, 1025, 4097)


def trap_trials(
    case: Case, library: str = "", takes_eps: bool = True, is_function: bool = False, seed: int = 0
) -> list[Trial]:
    """All traps of a case. Its numbers of rows and columns do not count.

    library: of the arrays of a function; "" for the kernels, whose layouts tests/kernels has.
    takes_eps: whether the function has a parameter for it. is_function: it takes more dimensions.
    """
    trials = [*_of_values(case, seed), *_of_parameters(case, seed), *_of_extents(case, seed)]
    if library:
        trials += [Trial(_random(case, 0, 64, seed), "T7 no rows"), *_of_layouts(case, seed)]
    else:
        added = _random(replace(case, residual=True, dsum=True), 6, 40, seed)
        trials.append(Trial(added, "T19 residual and dsum"))
    if is_function:
        deep = dict.fromkeys(("x", "dy"), THREE_DIMENSIONS)
        trials.append(Trial(_random(case, 6, 40, seed), "T17 three dimensions", deep))
    return trials + (list(_of_eps(case, seed)) if takes_eps else [])


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
    huge = 1e6 if DTYPES[case.x].largest > 1e6 else 6e4
    largest = {"float16": 6e4, "float64": 1e150}.get(case.x, 1e18)
    constants = np.array([14.0, 1234.0, 0.0, 0.1, -1 / 3, 10000.001])[:, None]
    steps = np.array([[0.0], [1e2], [1e3], [1e4]]) + np.arange(16) * 1e-3
    for name, rows in (
        ("T1 mean 2000, spread 1", generator.standard_normal((5, 4)) + 2000),
        ("T1 40000 to 40003", 40000 + np.arange(4.0)[None]),
        ("T1 1448 and 1450", 1449 + np.where(generator.random((3, 16)) < 0.5, -1.0, 1.0)),
        ("T1 steps of 0.001", steps),
        ("T2 constant rows", np.repeat(constants, 7, axis=1)),
        ("T2 constant rows", np.repeat(constants, 240, axis=1)),
        ("T3 one column", np.array([[huge], [-3.0], [0.1]])),
        (
            "T5 squares that nearly overflow",
            np.stack([np.linspace(-1, 1, 40), np.linspace(0.5, 1, 40)]) * largest,
        ),
    ):
        yield Trial(_with_rows(case, rows, seed), name)
    for num_cols in (2, 3, 5, 7):
        yield Trial(_random(case, 6, num_cols, seed), "T3 few columns")
    for value, col in product((np.inf, -np.inf, np.nan), (0, 99)):
        problem = _random(case, 5, 100, seed)
        problem.x[2, col] = value
        yield Trial(problem, f"T4 {value} in row 2", tensors=TENSORS_OF_ROWS)


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
    problem = _random(case, 6, 40, seed)
    problem.dy[:, np.arange(40) != 17] = 0
    yield Trial(problem, "T16 gradient in column 17")


def _of_layouts(case: Case, seed: int) -> Iterator[Trial]:
    for layouts in ({"x": "gap", "dy": "gap"}, {"x": "transposed", "dy": "transposed"}):
        name = f"T10 {layouts['x']} x and dy"
        yield Trial(_random(case, 6, 40, seed), name, layouts)
    problem = _random(case, 6, 40, seed)
    problem.dy[:] = problem.dy[:1]
    yield Trial(problem, "T10 broadcast dy", {"dy": "broadcast"})
    for name in ("x", "dy", "weight", "bias"):
        if getattr(case, name, "") is not None:
            yield Trial(_random(case, 3, 64, seed), f"T11 misaligned {name}", {name: "misaligned"})


def _of_eps(case: Case, seed: int) -> Iterator[Trial]:
    yield Trial(_random(replace(case, eps=0.0), 7, 33, seed), "T20 eps 0")
    generator = np.random.default_rng(seed)
    rows = np.stack([np.full(40, 3.0), np.zeros(40), *generator.standard_normal((2, 40))])
    rows[3] *= 0.01
    for eps in (0.0, -0.05, -1e-3):
        problem = _with_rows(replace(case, eps=eps), rows, seed)
        yield Trial(problem, f"T21 eps {eps:g}", tensors=TENSORS_OF_ROWS)
