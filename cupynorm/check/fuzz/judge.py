"""What every call is held to.

- Each element is within the bound that allowed.py derives.
- Inputs, guards and everything outside the outputs keep their bytes.
- The same call gives the same bits again.
- y in 8 bits has the bytes that the reference makes of y in the compute dtype, by the same kernel.
  On a GPU, whose compiler may fuse other operations in another kernel, it is within half a step.
- A row gives the same bits alone as among the others. Not with dropout, whose mask depends on the
  index of the row, and not for layouts that are not contiguous: alone, a row may be better aligned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ...dtypes import compute_dtype, decode
from .. import kernels
from ..cases import Case, Problem
from ..kernels import CpuMachine
from ..placement import WrongWrite
from ..quantized import judge_quantized, run_quantized
from ..results import Finding, dtype_of, judge_all
from .calls import Machine, Results, run
from .draws import Draw, problem_of

# What the planner says of a forced strategy that a width cannot have.
_REFUSALS = ("too narrow", "too few for a cluster", "too wide")
_OF_ROWS = ("x", "dy", "residual", "row_scale", "dsum", "dy1")  # the operands with one row each
_OUTPUTS_OF_ROWS = ("y", "y1", "mean", "rstd", "sum", "dx", "dresidual", "recomputed")


class Refused(Exception):
    """The call was refused in a sentence, as it may be for a forced strategy or tile."""


def rerun(drawn: Draw, on: str | None = None) -> str:
    """Makes a call again and says what is wrong with it, "" if nothing is.

    on: "gpu", "cpu", or None for a GPU if there is one. Raises Refused.
    """
    where = kernels.machine(on)
    if isinstance(where, CpuMachine):
        where = CpuMachine(seed=drawn.seed)
    return "\n".join(complaints(drawn, where))


def complaints(drawn: Draw, where: Machine) -> list[str]:
    """One line for each thing that is wrong. Raises Refused."""
    try:
        return _complaints(drawn, where)
    except WrongWrite as error:
        return [str(error)]
    except ValueError as error:
        if _is_refusal(drawn.case, str(error)):
            raise Refused(str(error)) from error
        return [f"ValueError: {error}"]


def _is_refusal(case: Case, words: str) -> bool:
    """Whether the planner says that what the call forces does not fit."""
    return bool(
        (case.strategy and any(each in words for each in _REFUSALS))
        or (case.tile and words.startswith("tile "))
        or (case.sm_margin and words.startswith("sm_margin is "))
    )


def _complaints(drawn: Draw, where: Machine) -> list[str]:
    problem = problem_of(drawn)
    if drawn.how is not None:
        return _of_8_bits(drawn, problem, where)
    welford = kernels.uses_welford(problem.case, where.device)
    first = run(drawn, problem, where)
    found = _sentences(judge_all(problem, first, rounded_mean=welford))
    again = run(drawn, problem, where)
    found += [f"{name} differs when the call is repeated" for name in _different(first, again)]
    if problem.case.num_rows > 1 and not problem.case.dropout_p and not drawn.layouts:
        row = drawn.seed % problem.case.num_rows
        alone = run(drawn, _row_of(problem, row), where)
        among = {name: first[name][row : row + 1] for name in _OUTPUTS_OF_ROWS if name in first}
        found += [f"row {row} of {name} differs alone" for name in _different(among, alone)]
    return found


def _of_8_bits(drawn: Draw, problem: Problem, where: Machine) -> list[str]:
    """The same of a forward whose y has 8 bits."""
    how, case = drawn.how, problem.case
    is_exact = isinstance(where, CpuMachine)
    first, plain = run_quantized(problem, how, where, drawn.layouts)
    found = _sentences(judge_quantized(case, how, first, plain, is_exact))
    wide = replace(problem, case=replace(case, y=compute_dtype(case.sum).name))
    dtypes = {name: dtype_of(wide.case, name) for name in plain}
    values = {name: decode(each, dtypes[name]) for name, each in plain.items()}
    welford = kernels.uses_welford(wide.case, where.device)
    found += _sentences(judge_all(wide, values, rounded_mean=welford))
    again, _ = run_quantized(problem, how, where, drawn.layouts)
    found += [f"{name} differs when the call is repeated" for name in _different(first, again)]
    if case.num_rows > 1 and not case.dropout_p and not drawn.layouts and how.scaling != "tensor":
        row = drawn.seed % case.num_rows
        alone, _ = run_quantized(_row_of(problem, row), how, where, drawn.layouts)
        names = [*_OUTPUTS_OF_ROWS, *["scale_inv"] * (how.scaling != "given")]
        among = {name: first[name][row : row + 1] for name in names if name in first}
        found += [f"row {row} of {name} differs alone" for name in _different(among, alone)]
    return found


def _sentences(findings: Iterable[Finding]) -> list[str]:
    return [
        f"{each.tensor}: {each.num_off} elements are off, the worst at {each.where}: got "
        f"{each.got:.9g}, expected {each.expected:.9g}, allowed {each.allowed:.3g}"
        for each in findings
        if not each.ok
    ]


def _different(first: Results, second: Results) -> list[str]:
    return [name for name in first if not np.array_equal(first[name], second[name], equal_nan=True)]


def _row_of(problem: Problem, row: int) -> Problem:
    """The problem of one row."""
    there = {name: getattr(problem, name) for name in _OF_ROWS}
    rows = {name: each[row : row + 1] for name, each in there.items() if each is not None}
    return replace(problem, case=replace(problem.case, num_rows=1), **rows)
