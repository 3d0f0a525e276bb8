"""What the gradient check found: the worst element of each tensor, and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..dtypes import DTYPES, compute_dtype
from ..table import as_text
from .bounds import Expected, expect
from .cases import Case, Problem
from .diagnosis import Diagnosis, Judged, diagnose

Diagnose = Callable[[Judged], Diagnosis]


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
    """Findings of a check, printed as a table. True if no element of any tensor is off.

    Examples:
        >>> def no_mean(input, normalized_shape, weight, bias, eps):
        ...     return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps) + bias
        >>> result = cupynorm.check(function=no_mean, shapes=[(8, 64)])
        >>> result.ok, [found.tensor for found in result.findings[:4] if not found.ok]
        (False, ['y', 'dx', 'dweight'])
        >>> result.diagnoses[0].rpartition("; ")[2]
        'the mean is not subtracted: this is RMSNorm (and in 1 more case)'
    """

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def num_off(self) -> int:
        """Tensors with an element that is off."""
        return sum(not finding.ok for finding in self.findings)

    def __str__(self) -> str:
        verdict = f"{self.num_off} off" if self.num_off else "all within what their dtypes allow"
        last = (
            f"{len(self.findings)} tensors checked, {verdict}; error is in units of what is allowed"
        )
        return "\n".join([self._table(), last, *self.diagnoses])

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

    def _table(self) -> str:
        table = [("case", "tensor", "error", "where", "got", "expected", "allowed", "verdict")]
        for finding in self.findings:
            verdict = "ok" if finding.ok else f"OFF: {finding.num_off} elements"
            where = ",".join(map(str, finding.where)) or "-"
            numbers = (f"{finding.got:.6g}", f"{finding.expected:.6g}", f"{finding.allowed:.2g}")
            error = f"{finding.error:.3f}"
            table.append((finding.case, finding.tensor, error, where, *numbers, verdict))
        return as_text(table)

    def summary(self) -> str:
        """One line for each name of a tensor: its worst finding over all cases."""
        named: dict[str, list[Finding]] = {}
        for finding in self.findings:
            named.setdefault(finding.tensor, []).append(finding)
        worst = CheckResult([worst_of(findings) for findings in named.values()])
        last = f"{len(self.findings)} tensors checked, {self.num_off} off; "
        return f"{worst._table()}\n{last}the worst of each name is shown"


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

    dtype: of the output, whose half unit in the last place is in `allowed`. Infinity is right too
    if a value that the arithmetic may have found rounds to it: one from half a unit above the
    largest number. None: infinity is right only if it is expected.
    """
    with np.errstate(all="ignore"):
        error = np.abs(got - expected) / allowed
        same = (np.isnan(got) & np.isnan(expected)) | (got == expected)
        if dtype is not None:
            unrounded = np.abs(expected) * (1 - DTYPES[dtype].half_ulp) + allowed
            is_beyond = unrounded >= DTYPES[dtype].largest * (1 + DTYPES[dtype].half_ulp / 2)
            same |= np.isinf(got) & (np.sign(got) == np.sign(expected)) & is_beyond
        error = np.where(same, 0.0, error)
        return error, ~(error <= 1.0)


def _are_near(got: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> bool:
    """Whether all are finite and within what is allowed."""
    with np.errstate(all="ignore"):
        error = np.abs(got - expected)
        return bool((error <= allowed).all() and np.isfinite(error.max(initial=0.0)))


def dtype_of(case: Case, tensor: str) -> str:
    """The dtype of a result; that of the arithmetic for mean and rstd."""
    dtypes = {
        "y": case.dtype("y"),
        "recomputed": case.dtype("y"),
        "dx": case.x,
        "sum": case.sum,
        "dresidual": case.added,
        "dweight": case.dtype("weight"),
        "dbias": case.dtype("bias"),
    }
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
    skips_right: bool = False,
    diagnose: Diagnose | None = None,
) -> list[Finding]:
    """A finding for each tensor that is in both. diagnose: as for judge.

    skips_right: leaves out tensors that are plainly right, which takes less time.
    """
    findings = []
    for name, (expected, allowed) in expectations.items():
        if name in results:
            got = results[name]
            if skips_right and got.shape == expected.shape and _are_near(got, expected, allowed):
                continue
            if name == "mean":  # of a row with an infinity: NaN, or infinite
                got = np.where(np.isfinite(expected) | np.isfinite(got), got, expected)
            numbers = (got, expected, allowed, dtype_of(case, name))
            findings.append(judge(case, name, *numbers, diagnose=diagnose))
    return findings
