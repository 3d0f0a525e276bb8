"""The gradient check: the kernels, on random arrays or a user's own, compared with float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..dispatch.problem import NormName
from ..norm.checks import check_eps, dtype_name
from ..norm.request import Launch, checked_launch
from ..options import check_choice, is_int, sequence, shown
from . import kernels
from .cases import NORMS, Case, given_problem, random_problem
from .kernels import run_kernels
from .results import CheckResult
from .traps import Trial, default_trials

# Usual tiles leave rows and columns of these over. The rows are plain, because the errors of a
# large mean depend on the width, and in 16 bits Welford's method comes near what is allowed.
_TAILS = ((61, 769), (7, 8195))
_REMOVED = {
    **dict.fromkeys(("function", "library"), "cupynorm.check_function(function, library=...)"),
    **dict.fromkeys(("forward", "backward"), "cupynorm.check_function((forward, backward), ...)"),
    **dict.fromkeys(("functor", "fuse", "load", "store"), "cupynorm.check_functor(functor, ...)"),
    "traps": "cupynorm.check_function(function, traps=True), or python -m cupynorm check --traps",
    "strategies": "launch=cupynorm.Launch(strategy), or a sequence of launches",
    "statistics": "launch=cupynorm.Launch(statistics=...), or a sequence of launches",
    "zero_centered_weight": "a weight that has 1 added to it",
    "seed": "python -m cupynorm check --seed, or arrays of your own",
    "progress": "python -m cupynorm check, which shows its progress",
}


def check(
    input: Any = None,
    weight: Any = None,
    bias: Any = None,
    dy: Any = None,
    *,
    norm: NormName | Sequence[NormName] = "layer_norm",
    eps: float = 1e-5,
    shapes: Iterable[tuple[int, int]] | None = None,
    dtypes: Iterable[str] = ("float32",),
    launch: Launch | Sequence[Launch] | None = None,
    on: str | None = None,
    **removed: Any,
) -> CheckResult:
    """Compare y, mean, rstd, dx, dweight and dbias of the kernels with float64, element by element.

    Errors are in units of what the dtypes allow: above 1 is off. The formulas are in the docstring
    of cupynorm.verify.bounds. check_function and check_functor check your own code.

    Examples:
        >>> cupynorm.check(shapes=[(4, 64)], on="cpu").ok
        True

    input, weight, bias, dy: your arrays, [..., num_cols] and [num_cols], in the dtypes of the
        kernels; None for no weight or bias and a random dy.
    Without input: random arrays of every shape (num_rows, num_cols) and dtype. A few rows have a
    mean far above their spread, or a variance as small as eps, and each case runs again with a NaN.
    Default shapes are (64, 768), and plain rows of (61, 769) and (7, 8195), for tiles' ends.

    norm: "layer_norm", "rms_norm" or both. launch: one or several; None leaves the choice to
    dispatch. on: "gpu", "cpu" for the same kernels on the CPU, or None for a GPU if there is one.
    removed: keywords of earlier versions, which are refused.

    Returns a CheckResult: true if no tensor is off; prints as a table.
    Raises ValueError for an unknown norm and a wrong shape, TypeError for a dtype that the kernels
    do not have and for keywords of other checks.
    """
    for key in removed:
        if key in _REMOVED:
            raise TypeError(f"check has no {key} any more; expected {_REMOVED[key]}")
        raise TypeError(f"check got an unexpected keyword argument {key!r}")
    chosen = check_launches(launch)
    norms, eps = check_norms(norm), check_eps(eps, "float64", has_default=False)
    if input is None:
        cases = [
            Case(norm, 0, 0, dtype, eps=eps, **fields)
            for norm, dtype, fields in product(norms, check_dtypes(dtypes), chosen)
        ]
        trials = random_trials(cases, shapes)
    else:
        trials = [
            Trial(given_problem(input, weight, bias, dy, norm=norm, eps=eps, **fields))
            for norm, fields in product(norms, chosen)
        ]
    return check_kernels(trials, kernels.machine(on))


def random_trials(
    cases: Sequence[Case], shapes: Iterable[tuple[int, int]] | None, seed: int = 0
) -> list[Trial]:
    """Random problems of the cases, whose numbers of rows and columns do not count.

    shapes: None for the default ones.
    """
    trials = []
    for case, shape in product(cases, [(64, 768)] if shapes is None else check_shapes(shapes)):
        trials += default_trials(replace(case, num_rows=shape[0], num_cols=shape[1]), seed)
    for case, shape in product(cases, _TAILS if shapes is None else ()):
        case = replace(case, num_rows=shape[0], num_cols=shape[1])
        trials.append(Trial(random_problem(case, seed)))
    return trials


def check_kernels(trials: Iterable[Trial], where: kernels.Machine) -> CheckResult:
    """Runs the kernels on each trial."""
    result, cases = CheckResult(), []
    for trial in trials:
        rounded_mean = kernels.uses_welford(trial.problem.case, where.device)
        got = run_kernels(trial.problem, where)
        result.findings += trial.judged(got, rounded_mean=rounded_mean)
        cases.append(trial.problem.case)
    what = f"cupynorm's kernels, planned for an {where.device.name}, on the {where.on.upper()}"
    result.checked = in_words(what, cases)
    if where.on == "cpu":
        result.not_covered.append("a GPU")
    return result


def in_words(what: str, cases: Iterable[Case]) -> str:
    """What was checked, and the shapes of it."""
    shapes = dict.fromkeys(f"{case.num_rows} x {case.num_cols}" for case in cases)
    shown, rest = list(shapes)[:12], len(shapes) - 12
    return f"{what}; {', '.join(shown)}" + (f" and {rest} other shapes" if rest > 0 else "")


# Arguments that several checks have.


def check_norms(norm: object) -> tuple[str, ...]:
    """One norm or several as a tuple. Raises ValueError for an unknown one."""
    norms = sequence("norm", norm)
    for name in norms:
        check_choice("norm", name, NORMS)
    return norms


def check_dtypes(dtypes: object) -> list[str]:
    """Their names. Raises TypeError for what is no dtype of the kernels."""
    return [dtype_name(each, "dtype") for each in sequence("dtypes", dtypes)]


def check_launches(launch: object) -> list[dict[str, Any]]:
    """The fields of a Case of one launch or several. Raises TypeError for what is none."""
    names = ("strategy", "tile", "statistics")
    launches = launch if isinstance(launch, (list, tuple)) else [launch]
    return [
        {name: getattr(each, name) for name in names} if checked_launch(each) else {}
        for each in launches
    ]


def check_seed(seed: object) -> None:
    """Raises ValueError for what is no seed."""
    if not is_int(seed) or seed < 0:
        raise ValueError(f"seed is {shown(seed)}; expected an int of 0 or more")


def check_shapes(shapes: object) -> list[tuple[int, int]]:
    """Pairs (num_rows, num_cols). Raises TypeError or ValueError for others."""
    try:
        shapes = list(shapes)
    except TypeError:
        raise TypeError(
            f"shapes is {shown(shapes)}; expected a sequence of pairs (num_rows, num_cols)"
        ) from None
    for shape in shapes:
        is_pair = isinstance(shape, Sequence) and len(shape) == 2
        if not is_pair or not all(map(is_int, shape)) or shape[0] < 0 or shape[1] < 1:
            raise ValueError(
                f"shapes has {shown(shape)}; expected pairs (num_rows, num_cols) of ints, with at "
                "least one column"
            )
    return [tuple(shape) for shape in shapes]
