"""What every call is held to.

- Each element is within the bound that allowed.py derives, and no output is absent.
- Inputs, guards and everything outside the outputs keep their bytes.
- The same call gives the same bits again. Of kernels the same launches are repeated.
- y in 8 bits, and its scales, are what a row within those bounds is quantised to. On the CPU y has
  the bytes that the reference makes of y in the compute dtype, by the same kernel.
- A row gives the same bits alone as among the others. Not for layouts that are not contiguous:
  alone, a row may be better aligned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .. import kernels
from ..allowed import expect
from ..cases import Case, Problem
from ..kernels import Machine
from ..placement import WrongWrite
from ..quantized import judge_bytes, judge_values, run_quantized
from ..results import Finding, judge_against
from .calls import Results, machine, start
from .draws import Draw, problem_of

# What the planner says of a forced strategy that a width cannot have, and of forced statistics that
# a forced strategy cannot have there.
_REFUSALS = ("too narrow", "too few for a cluster", "too wide")
_REFUSAL_OF_STATISTICS = "statistics is 'two_pass'; expected 'welford' or None"
_OPERANDS_WITH_ROWS = ("x", "dy", "residual", "dsum")  # with one row each
_OUTPUTS_WITH_ROWS = ("y", "mean", "rstd", "sum", "dx", "dresidual", "recomputed")


_NOT_OF_AUTOGRAD = {"mean", "rstd"}


class Complaint(NamedTuple):
    """One thing that is wrong. kind: what it is, without the numbers of this call."""

    kind: str
    sentence: str

    @classmethod
    def of(cls, sentence: str) -> Complaint:
        return cls(re.sub(r"\d+", "N", sentence), sentence)


class Refused(Exception):
    """The call was refused in a sentence, as it may be for a forced strategy or tile."""


def rerun(drawn: Draw, on: str | None = None) -> str:
    """Makes a call again and says what is wrong with it, "" if nothing is.

    on: "gpu", "cpu", or None for a GPU if there is one. Raises Refused.
    """
    where = machine(kernels.machine(on).on)
    return "\n".join(each.sentence for each in complaints(drawn, where))


def complaints(drawn: Draw, where: Machine) -> list[Complaint]:
    """All that is wrong, an error that the call raises included. Raises Refused."""
    return Started(drawn, where).complaints()


class Started:
    """A call that was started, so that a GPU runs it while results of earlier ones are judged.

    where: no other call may use it before complaints() was asked for.
    """

    def __init__(self, drawn: Draw, where: Machine) -> None:
        self._drawn, self._where = drawn, where
        self._error: Exception | None = None
        try:
            self._start()
        except Exception as error:  # whatever a call raises is what is looked for
            self._error = error

    def _start(self) -> None:
        """Starts the call, the same again, and one row alone."""
        drawn, where, how = self._drawn, self._where, self._drawn.how
        if where.on == "gpu":
            where.begin_call()
        else:
            where.seed = drawn.seed
        # It refuses what does not fit before values are drawn.
        self._welford = kernels.uses_welford(drawn.case, where.device)
        self._problem = problem = problem_of(drawn)
        self._beside_plain = None  # bytes of an 8-bit call, and of the same kernel without
        if how is not None and where.on == "cpu":
            self._beside_plain = run_quantized(problem, how, where, drawn.layouts)
            self._first, self._again = lambda: self._beside_plain[0], *start(drawn, problem, where)
        else:
            self._first, self._again = start(drawn, problem, where, times=2)
        self._alone, self._row = None, drawn.seed % drawn.case.num_rows
        scales_rows = how is None or how.scaling != "tensor"
        if drawn.case.num_rows > 1 and not drawn.layouts and scales_rows:
            (self._alone,) = start(drawn, _row_of(problem, self._row), where)
        if where.on == "gpu":
            where.mark_end()

    def complaints(self) -> list[Complaint]:
        """All that is wrong, an error that the call raises included. Raises Refused."""
        try:
            if self._error is not None:
                raise self._error
            if self._where.on == "gpu":
                self._where.wait()
            return self._wrong()
        except WrongWrite as error:
            return [Complaint.of(str(error))]
        except Exception as error:
            if isinstance(error, ValueError) and _is_refusal(self._drawn.case, str(error)):
                raise Refused(str(error)) from error
            return [Complaint.of(f"{type(error).__name__}: {error}")]

    def _wrong(self) -> list[Complaint]:
        problem, how, results = self._problem, self._drawn.how, self._first()
        if how is None:
            found = _off_of_float64(self._drawn, problem, results, self._welford)
        else:
            found = _off(judge_values(problem, how, results, rounded_mean=self._welford))
        if self._beside_plain:
            found = _off(judge_bytes(problem.case, how, *self._beside_plain)) + found
        found += _repeated(results, self._again())
        if self._alone is not None:
            one_a_row = how is not None and how.scaling != "given" and how.layout == "row"
            found += _alone(results, self._alone(), self._row, *["scale_inv"] * one_a_row)
        return found


def _is_refusal(case: Case, words: str) -> bool:
    """Whether the planner says that what the call forces does not fit."""
    return bool(
        (case.strategy and any(each in words for each in _REFUSALS))
        or (case.strategy and case.statistics and words.startswith(_REFUSAL_OF_STATISTICS))
        or (case.tile and words.startswith("tile "))
        or (case.sm_margin and words.startswith("sm_margin is "))
    )


def _off_of_float64(
    drawn: Draw, problem: Problem, results: Results, welford: bool
) -> list[Complaint]:
    expectations = expect(problem, rounded_mean=welford, added=results.get("sum"))
    found = _unjudged(drawn, set(expectations), set(results))
    return found + _off(judge_against(problem.case, expectations, results, skips_right=True))


def _unjudged(drawn: Draw, expected: set[str], returned: set[str]) -> list[Complaint]:
    """Outputs that the call did not return, or that it should not have: they are not judged."""
    if drawn.route == "autograd":
        expected = expected - _NOT_OF_AUTOGRAD
    return [Complaint.of(f"{name} is not judged") for name in sorted(expected ^ returned)]


def _off(findings: Iterable[Finding]) -> list[Complaint]:
    return [
        Complaint(
            f"{each.tensor}: {_nature(each.got)} for {_nature(each.expected)}",
            f"{each.tensor}: {each.num_off} elements are off, the worst at {each.where}: got "
            f"{each.got:.9g}, expected {each.expected:.9g}, allowed {each.allowed:.3g}",
        )
        for each in findings
        if not each.ok
    ]


def _nature(value: float) -> str:
    return "NaN" if np.isnan(value) else "infinity" if np.isinf(value) else "a number"


def _repeated(first: Results, second: Results) -> list[Complaint]:
    if second is first:
        return []
    different = [name for name in first if not has_same_bits(first[name], second[name])]
    return [Complaint.of(f"{name} differs when the call is repeated") for name in different]


def _alone(first: Results, alone: Results, row: int, *names: str) -> list[Complaint]:
    """names: of outputs with one row each, beside the usual ones."""
    there = [name for name in (*_OUTPUTS_WITH_ROWS, *names) if name in first]
    return [
        Complaint.of(f"row {row} of {name} differs alone")
        for name in there
        if not has_same_bits(first[name][row : row + 1], alone[name])
    ]


def has_same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Also of zeros, which have a sign. The bits of a NaN do not matter."""
    if first.dtype.kind != "f":
        return np.array_equal(first, second)
    is_nan = np.isnan(first)
    return np.array_equal(first, second, equal_nan=True) and np.array_equal(
        np.signbit(first) | is_nan, np.signbit(second) | is_nan
    )


def _row_of(problem: Problem, row: int) -> Problem:
    """The problem of one row."""
    there = {name: getattr(problem, name) for name in _OPERANDS_WITH_ROWS}
    rows = {name: each[row : row + 1] for name, each in there.items() if each is not None}
    return replace(problem, case=replace(problem.case, num_rows=1), **rows)
