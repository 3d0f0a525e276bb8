"""What the gradient check found: the worst element of each tensor, and tables of them."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..dtypes import DTYPES, compute_dtype
from ..table import as_html, as_text
from .bounds import Expected, expect
from .cases import Case, Problem
from .diagnosis import Diagnosis, Judged, diagnose

Diagnose = Callable[[Judged], Diagnosis]

CALL = "call"  # stands for the tensors of a call that raised an error
_MOST_SHOWN, _MOST_OFF = 36, 12  # lines of a table; tensors in it that are off


@dataclass(frozen=True)
class Finding:
    """The worst element of one tensor of one case.

    error: |got - expected| / allowed; infinity or NaN where only one of them is finite.
    where: its index. num_off: how many elements of the tensor have an error above 1.
    diagnosis: which elements are off and why; None where nothing is off, or nobody asked.
    """

    case: str
    tensor: str
    error: float
    where: tuple[int, ...]
    got: float
    expected: float
    allowed: float
    num_off: int
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        return self.num_off == 0


def worst_of(findings: Iterable[Finding]) -> Finding:
    """The finding with the largest error, one that is off first."""
    return max(findings, key=lambda found: (not found.ok, found.error))


@dataclass
class CheckResult:
    """What a check found: true if no element of any tensor is off. Prints as a table.

    findings: the worst element of each tensor of each case. checked: whose arrays, where, and the
    shapes. not_covered: what this check left out.

    Examples:
        >>> def no_mean(input, normalized_shape, weight, bias, eps):
        ...     return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps) + bias
        >>> result = cupynorm.check_function(no_mean, shapes=[(8, 64)])
        >>> result.ok, [found.tensor for found in result.findings[:4] if not found.ok]
        (False, ['y', 'dx', 'dweight'])
        >>> result.diagnoses[0].rpartition("; ")[2]
        'the mean is not subtracted: this is RMSNorm (and in 1 more case)'
    """

    findings: list[Finding] = field(default_factory=list)
    checked: str = ""
    not_covered: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def num_off(self) -> int:
        """Tensors with an element that is off."""
        return sum(not finding.ok for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The first line: OK or OFF, and of how many tensors."""
        raised = sum(finding.tensor == CALL for finding in self.findings)
        count, off = len(self.findings) - raised, self.num_off - raised
        if not self.findings:
            return "OFF: no tensor was checked"
        if self.num_off:
            wrong = [f"{off} of {count} tensors are beyond what their dtypes allow"] * bool(off)
            wrong += [f"{raised} call{'s' * (raised > 1)} raised an error"] * bool(raised)
            return f"OFF: {'; '.join(wrong)}"
        return f"OK: {count} tensors checked, all within what their dtypes allow"

    @property
    def diagnoses(self) -> list[str]:
        """One sentence for each tensor that is off: which elements, by how much, and why.

        A tensor that is off for the same reason in several cases has one sentence.
        """
        same: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            if finding.diagnosis is not None:
                same.setdefault((finding.tensor, finding.diagnosis.cause), []).append(finding)
        sentences = []
        for (tensor, _), (first, *others) in same.items():
            more = f" (and in {len(others)} more case{'s' * (len(others) > 1)})" if others else ""
            sentences.append(f"{tensor} of {first.case}: {first.diagnosis}{more}")
        return sentences

    def __str__(self) -> str:
        return "\n".join(
            [self.verdict, *self.diagnoses, "", as_text(self._table()), *self._notes()]
        )

    def _repr_html_(self) -> str:
        lines = [f"<b>{html.escape(self.verdict)}</b>", *map(html.escape, self.diagnoses)]
        notes = "<br>".join(map(html.escape, self._notes()))
        return f"<p>{'<br>'.join(lines)}</p>{as_html(self._table())}<p>{notes}</p>"

    def _notes(self) -> list[str]:
        lines = ["error is in units of what is allowed"]
        if len(self._shown()) < len(self.findings):
            lines[0] += f"; shown: at most {_MOST_OFF} tensors that are off, the worst of each name"
        lines += [f"checked: {self.checked}"] * bool(self.checked)
        return lines + [f"not covered: {'; '.join(self.not_covered)}"] * bool(self.not_covered)

    def _shown(self) -> list[Finding]:
        """All findings, or of many some that are off and the worst of each name."""
        if len(self.findings) <= _MOST_SHOWN:
            return self.findings
        off = [found for found in self.findings if not found.ok][:_MOST_OFF]
        names = dict.fromkeys(found.tensor for found in self.findings)
        worst = [worst_of(each for each in self.findings if each.tensor == name) for name in names]
        return off + [found for found in worst if found not in off]

    def _table(self) -> list[tuple[str, ...]]:
        table = [("case", "tensor", "error", "where", "got", "expected", "allowed", "verdict")]
        for found in self._shown():
            off = f"{found.num_off} element{'s' * (found.num_off > 1)}"
            verdict = f"OFF: {'an error' if found.tensor == CALL else off}"
            verdict = "ok" if found.ok else verdict
            where = ",".join(map(str, found.where)) or "-"
            numbers = (f"{found.got:.6g}", f"{found.expected:.6g}", f"{found.allowed:.2g}")
            table.append((found.case, found.tensor, f"{found.error:.3f}", where, *numbers, verdict))
        return table


def judge(
    case: object,
    tensor: str,
    got: np.ndarray,
    expected: np.ndarray,
    allowed: np.ndarray,
    dtype: str | None = None,
    *,
    diagnose: Diagnose | None = None,
) -> Finding:
    """The worst element of one tensor.

    got, expected, allowed: of one shape, float64. dtype: as for errors_of. diagnose: says why a
    tensor is off. Raises ValueError for different shapes.
    """
    if got.shape != expected.shape:
        raise ValueError(f"{tensor} of {case} has shape {got.shape}; expected {expected.shape}")
    if not got.size:
        return Finding(str(case), tensor, 0.0, (), 0.0, 0.0, 0.0, 0)
    error, off = errors_of(got, expected, allowed, dtype)
    finite = np.where(np.isfinite(error), error, np.inf)
    order = np.where(off, finite, np.where(np.isnan(error), np.inf, error))
    at = np.unravel_index(int(np.argmax(order)), order.shape)
    where = tuple(int(index) for index in at)
    numbers = (float(values[at]) for values in (got, expected, allowed))
    why = None
    if diagnose is not None and off.any():
        why = diagnose(Judged(tensor, dtype, got, expected, allowed, off))
    return Finding(str(case), tensor, float(error[at]), where, *numbers, int(off.sum()), why)


def errors_of(
    got: np.ndarray, expected: np.ndarray, allowed: np.ndarray, dtype: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """|got - expected| / allowed of each element, and which elements are off.

    dtype: of the output. Infinity is right too if a value that the arithmetic may have found rounds
    to it: one from half a unit above the largest number. None: infinity must be expected.
    """
    with np.errstate(all="ignore"):
        error = np.abs(got - expected) / allowed
        same = (np.isnan(got) & np.isnan(expected)) | (got == expected)
        if dtype is not None:
            half, largest = DTYPES[dtype].half_ulp, DTYPES[dtype].largest
            is_beyond = np.abs(expected) * (1 - half) + allowed >= largest * (1 + half / 2)
            same |= np.isinf(got) & (np.sign(got) == np.sign(expected)) & is_beyond
        error = np.where(same, 0.0, error)
        return error, ~(error <= 1.0)


def dtype_of(case: Case, tensor: str) -> str:
    """The dtype of a result; that of the arithmetic for mean and rstd."""
    dtypes = {"dx": case.x, "sum": case.sum, "dresidual": case.added}
    dtypes |= dict.fromkeys(("y", "recomputed"), case.dtype("y"))
    dtypes |= {"dweight": case.dtype("weight"), "dbias": case.dtype("bias")}
    return dtypes.get(tensor) or compute_dtype(case.sum).name


def judge_all(
    problem: Problem,
    results: dict[str, np.ndarray],
    *,
    rounded_mean: bool = False,
    diagnoses: bool = False,
) -> list[Finding]:
    """A finding for each tensor of results that `expect` knows.

    rounded_mean: as for `expect`. diagnoses: whether tensors that are off get one.
    """
    expectations = expect(problem, rounded_mean=rounded_mean, added=results.get("sum"))
    explain = partial(diagnose, problem) if diagnoses else None
    return judge_against(problem.case, expectations, results, diagnose=explain)


def judge_against(
    case: Case,
    expectations: Expected,
    results: dict[str, np.ndarray],
    *,
    diagnose: Diagnose | None = None,
) -> list[Finding]:
    """A finding for each tensor that is in both. diagnose: as for judge."""
    findings = []
    for name, (expected, allowed) in expectations.items():
        if name in results:
            got = results[name]
            if name == "mean":  # of a row with an infinity: NaN, or infinite
                got = np.where(np.isfinite(expected) | np.isfinite(got), got, expected)
            numbers = (got, expected, allowed, dtype_of(case, name))
            findings.append(judge(case, name, *numbers, diagnose=diagnose))
    return findings
