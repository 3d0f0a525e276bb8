"""The data of the gradient check by default: random rows, and rows on which wrong kernels show.

Among random rows, whose mean is about as large as their spread, these mistakes do not show:

    E[x^2] - E[x]^2     subtracts two numbers of size mean^2, each rounded to u * mean^2. In rows
                        with mean / std = 500 to 2000 the variance is off by 1 to 20% in float32
                        and both right algorithms are off by less than 0.1%.
    another eps         changes rstd by half of (eps' - eps) / var. A row with var = eps shows it.
    a NaN that spreads  to other rows needs a row with one. It makes all of dweight NaN, so that row
                        is in a problem of its own.

dy of the special rows is 2^-10 as large: they add little to dweight and to what is allowed of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, decode, encode
from ..table import printable
from .cases import Case, Problem, random_problem
from .diagnosis import Diagnosis
from .results import Finding, judge_all

# Of narrow dtypes the rows have few different values, so that the errors of Welford's algorithm do
# not cancel: as small a ratio as shows the mistake beside the rounding of y.
_MEAN_OVER_STD = {"float16": 500.0, "bfloat16": 700.0, "float32": 2000.0, "float64": 2000.0}
_SMALL_DY = 2.0**-10
TENSORS_OF_ROWS = ("y", "mean", "rstd", "dx")  # tensors with a value or row for each row of x


class Trial(NamedTuple):
    """One run: a problem, and what is special about it.

    name: of that, in few words. layouts: of inputs by name, from run.LAYOUTS, or
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
        return Finding(f"{self.problem.case}, {self.name}", "call", nan, (), nan, nan, nan, 1, why)


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
