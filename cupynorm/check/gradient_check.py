"""The gradient check: kernels, or any callable like layer_norm, compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from ..gpu import on_cpu
from . import kernels
from .cases import NORMS, Case, Problem, given_problem, random_problem
from .results import CheckResult, judge_all
from .run import run_kernels


def check(
    input: Any = None,
    weight: Any = None,
    bias: Any = None,
    dy: Any = None,
    *,
    eps: float = 1e-5,
    norm: str | Sequence[str] = "layer_norm",
    function: Callable | None = None,
    shapes: Iterable[tuple[int, int]] = ((64, 768),),
    dtypes: Iterable[str] = ("float32",),
    strategies: Iterable[str | None] = (None,),
    statistics: Iterable[str | None] = (None,),
    zero_centered_weight: bool = False,
    on: str | None = None,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] | None = None,
) -> CheckResult:
    """Compare y, mean, rstd, dx, dweight and dbias with float64, element by element.

    Errors are in units of what the dtypes allow: above 1 is off. The formulas are in the docstring
    of cupynorm.check.allowed.

    Examples:
        >>> result = cupynorm.check(function=torch.nn.functional.layer_norm, shapes=[(4, 64)])
        >>> result.ok
        True

    On your arrays: input [..., num_cols] of any library, weight and bias [num_cols] or None, dy of
    input's shape or None for random values, in the dtypes of the kernels.
    Without input, on random arrays with weight and bias: every combination of shapes
    (num_rows, num_cols), dtypes, strategies and statistics.

    norm: "layer_norm", "rms_norm" or both. strategies, statistics: None leaves the choice to
    dispatch. eps, zero_centered_weight: as in layer_norm.
    function: a callable to check instead of the kernels. It is called as
    function(input, normalized_shape, weight, bias, eps) on torch tensors; without torch on NumPy
    arrays, and only y is checked.
    on: "gpu", "cpu" for the same kernels on the CPU, or None for a GPU if there is one.
    seed: of the random values. progress: wraps the cases, as tqdm does.

    Returns a CheckResult: true if no tensor is off; prints as a table.
    Raises ValueError for an unknown norm or a wrong shape, TypeError for a dtype that the kernels
    do not have, and what a call of the kernels raises.
    """
    norms = (norm,) if isinstance(norm, str) else tuple(norm)
    for name in norms:
        if name not in NORMS:
            raise ValueError(f"norm is {name!r}; expected {' or '.join(NORMS)}")
    options = {"zero_centered_weight": zero_centered_weight, "eps": eps}

    def problem_of(name: str, strategy: str | None, kind: str | None, **shape: Any) -> Problem:
        fields = {"norm": name, "strategy": strategy, "statistics": kind, **options}
        if input is not None:
            return given_problem(input, weight, bias, dy, seed=seed, **fields)
        return random_problem(Case(**fields, **shape), seed)

    if input is not None:
        problems = [problem_of(*each) for each in product(norms, strategies, statistics)]
    else:
        every = product(norms, shapes, dtypes, strategies, statistics)
        problems = [
            problem_of(name, strategy, kind, num_rows=num_rows, num_cols=num_cols, x=dtype)
            for name, (num_rows, num_cols), dtype, strategy, kind in every
        ]
    result = CheckResult()
    if function is None:
        where = kernels.machine(on)
        if isinstance(where, kernels.CpuMachine):
            on_cpu.compiler()  # without a compiler, the error says what to install
    for problem in progress(problems) if progress else problems:
        if function is not None:
            got, rounded_mean = kernels.run_callable(function, problem), True
        else:
            rounded_mean = kernels.uses_welford(problem.case, where.device)
            got = run_kernels(problem, where)
        result.findings += judge_all(problem, got, rounded_mean=rounded_mean)
    return result
