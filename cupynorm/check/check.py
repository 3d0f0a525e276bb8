"""The gradient check: kernels, or a user's own functions, compared with float64."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..norm.checks import check_eps, dtype_name, names_what_was_removed
from ..plan.functors import BoundFunctor, Functor
from ..plan.problem import NormName
from ..plan.strategies import StatisticsName, StrategyName
from . import check_functor as functor_check
from . import kernels
from .cases import NORMS, Case, given_problem, random_problem
from .check_function import Callables, without_exit
from .results import CheckResult
from .run import run_kernels
from .traps import trap_trials
from .trials import Trial, default_trials

# For functions too: usual tiles leave rows and columns over. The rows are plain, because the errors
# of a large mean depend on the width, and in 16 bits Welford's method comes near what is allowed.
_TAILS = ((61, 769), (7, 8195))


@names_what_was_removed
def check(
    input: Any = None,
    weight: Any = None,
    bias: Any = None,
    dy: Any = None,
    *,
    eps: float = 1e-5,
    norm: NormName | Sequence[NormName] = "layer_norm",
    function: Callable | None = None,
    forward: Callable | None = None,
    backward: Callable | None = None,
    library: str | None = None,
    fuse: functor_check.Given | Sequence[functor_check.Given] = (),
    traps: bool = False,
    shapes: Iterable[tuple[int, int]] | None = None,
    dtypes: Iterable[str] = ("float32",),
    strategies: Iterable[StrategyName | None] = (None,),
    statistics: Iterable[StatisticsName | None] = (None,),
    zero_centered_weight: bool = False,
    on: str | None = None,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] | None = None,
) -> CheckResult:
    """Compare y, mean, rstd, dx, dweight and dbias with float64, element by element.

    Errors are in units of what the dtypes allow: above 1 is off. The formulas are in the docstring
    of cupynorm.check.bounds.

    Examples:
        >>> result = cupynorm.check(function=torch.nn.functional.layer_norm, shapes=[(4, 64)])
        >>> result.ok
        True

    On your arrays: input [..., num_cols] of any library, weight and bias [num_cols] or None, dy of
    input's shape or None for random values, in the dtypes of the kernels.
    Without input, on random arrays with weight and bias: every combination of shapes
    (num_rows, num_cols), dtypes, strategies and statistics. shapes is by default (64, 768). A few
    rows have a mean far above their spread, or a variance as small as eps. Each case is run again
    with a NaN in one row. By default your own functions also run on plain rows of (61, 769) and
    (7, 8195), which usual tiles do not divide.

    norm: "layer_norm", "rms_norm" or both. strategies, statistics: None leaves the choice to
    dispatch. eps, zero_centered_weight: as in layer_norm.

    Your own functions are checked in place of the kernels. They get arrays of library: "numpy",
    "cupy" or "torch", on a GPU if there is one; None for torch if it is installed, else NumPy.
    NumPy and CuPy have bfloat16 if ml_dtypes is installed.

    function: function(input, normalized_shape, weight, bias, eps) -> y. torch's autograd computes
        the gradients. With another library only y is checked.
    forward: forward(x, weight, bias, eps) -> y, or (y, mean, rstd), for RMSNorm (y, rstd).
    backward: backward(dy, x, mean, rstd, weight) -> dx, or (dx, dweight, dbias), without mean for
        RMSNorm. mean and rstd are right ones, in float32, or float64 for float64.
    x, y, dy and dx are [num_rows, num_cols]; mean and rstd are [num_rows]. Parameters of these
    names may be left out or in another order: see cupynorm.check.check_function.

    Your own functor is checked in the kernels: y, and every gradient if it has backward lines.

    fuse: a functor that has a reference, or several, each for itself. Derivatives of the reference
        are central differences, column by column, so shapes are small: by default (5, 96).
        Bind its numbers, and to each array a kind of random array: "full" [num_rows, num_cols],
        "cols" [1, num_cols], "rows" [num_rows, 1] or "one" [1, 1]; or a function of (num_rows,
        num_cols) that returns an array of one of these shapes. A functor alone has full arrays, and
        "rows" where it takes one element per row. A seed that is None is random.

        >>> scaled = cupynorm.functors.layer_scale(scale="cols")
        >>> cupynorm.check(fuse=scaled, shapes=[(2, 16)], on="cpu").ok
        True

    traps: also run data and layouts on which other libraries failed: cupynorm.check.traps lists
        them. An error that your function raises there is a finding.
    on: "gpu", "cpu" for the same kernels on the CPU, or None for a GPU if there is one.
    seed: of the random values. progress: wraps the cases, as tqdm does.

    Returns a CheckResult: true if no tensor is off; prints as a table.
    Raises ValueError for an unknown norm, a wrong shape, a result of a function that is None or
    detached, a function that calls sys.exit, a functor without a reference, and arguments that do
    not go together; TypeError for a dtype that the kernels do not have; and what a call raises.
    """
    check_seed(seed)
    norms, strategies = _several("norm", norm), _several("strategies", strategies)
    dtypes = [dtype_name(each, "dtype") for each in _several("dtypes", dtypes)]
    statistics = _several("statistics", statistics)
    eps = check_eps(eps, "float64", has_default=False)
    options = {"zero_centered_weight": zero_centered_weight, "eps": eps}
    for name in norms:
        if name not in NORMS:
            raise ValueError(f"norm is {name!r}; expected {' or '.join(NORMS)}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {progress!r}; expected a function as tqdm, or None")
    progress = progress or iter
    own = Callables(function, forward, backward, library)
    is_one = not isinstance(fuse, Iterable) or isinstance(fuse, (str, Functor, BoundFunctor))
    functors = [functor_check.with_kinds(each) for each in ([fuse] if is_one else fuse)]
    if functors:
        others = {"input": input, "weight": weight, "bias": bias, "dy": dy, "traps": traps or None}
        others |= {"function": function, "forward": forward, "backward": backward}
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"fuse is given together with {name}; expected one of the two: a functor is "
                    "checked by itself, on random values"
                )
    tails = _TAILS if shapes is None and own else ()
    if shapes is None:
        shapes = [(5, 96) if functors else (64, 768)]
    shapes = _pairs(shapes)
    if input is not None:
        if traps:
            raise ValueError("traps is given together with input; expected one of the two")
        _check_taken(own, norms, {"weight": weight, "bias": bias})
        trials = []
        for norm, strategy, kind in product(norms, strategies, statistics):
            fields = {"norm": norm, "strategy": strategy, "statistics": kind, **options}
            trials.append(Trial(given_problem(input, weight, bias, dy, seed=seed, **fields)))
    else:
        cases = [
            Case(
                norm, 0, 0, dtype, strategy=strategy, statistics=kind, **options | own.absent(norm)
            )
            for norm, dtype, strategy, kind in product(norms, dtypes, strategies, statistics)
        ]
        sized = [
            replace(case, num_rows=num_rows, num_cols=num_cols)
            for case, (num_rows, num_cols) in product(cases, shapes)
        ]
        if functors:
            return _check_functors(functors, progress(sized), on, seed)
        trials = [trial for case in sized for trial in default_trials(case, seed)]
        for case, (num_rows, num_cols) in product(cases, tails):
            case = replace(case, num_rows=num_rows, num_cols=num_cols)
            trials.append(Trial(random_problem(case, seed)))
        for case in cases if traps else ():
            trials += trap_trials(case, own, seed)
    if own:
        return check_callables(progress(trials), own, traps)
    where = kernels.machine(on)
    return check_kernels(progress(trials), where)


def _check_taken(own: Callables, norms: Sequence[str], parameters: dict[str, Any]) -> None:
    """Raises ValueError for weight or bias for which no function has a parameter."""
    for label, values in parameters.items():
        if values is not None and norms and all(label in own.absent(norm) for norm in norms):
            raise ValueError(
                f"{label} is given; expected None: your function has no parameter for it"
            )


def check_kernels(trials: Iterable[Trial], where: kernels.Machine) -> CheckResult:
    result = CheckResult()
    for trial in trials:
        rounded_mean = kernels.uses_welford(trial.problem.case, where.device)
        got = run_kernels(trial.problem, where, trial.layouts or None)
        result.findings += trial.judged(got, rounded_mean=rounded_mean)
    return result


def check_callables(trials: Iterable[Trial], own: Callables, traps: bool = False) -> CheckResult:
    """traps: an error that a function raises in a trap is a finding."""
    result = CheckResult()
    for trial in trials:
        try:
            got = own.run(trial.problem, trial.layouts)
        except Exception as error:
            if not (traps and trial.name):
                raise
            result.findings.append(trial.failed(error))
            continue
        result.findings += trial.judged(got, rounded_mean=True)
    return result


def check_seed(seed: object) -> None:
    """Raises ValueError for what is no seed."""
    if not _is_int(seed) or seed < 0:
        raise ValueError(f"seed is {seed!r}; expected an int of 0 or more")


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _several(name: str, given: object) -> tuple:
    """A sequence of names as a tuple; one name, or None, is a sequence of itself."""
    if given is None or isinstance(given, str):
        return (given,)
    try:
        return tuple(given)
    except TypeError:
        raise TypeError(f"{name} is {given!r}; expected a sequence of names") from None


def _pairs(shapes: object) -> list[tuple[int, int]]:
    try:
        shapes = list(shapes)
    except TypeError:
        raise TypeError(
            f"shapes is {shapes!r}; expected a sequence of pairs (num_rows, num_cols)"
        ) from None
    for shape in shapes:
        is_pair = isinstance(shape, Sequence) and len(shape) == 2
        if not is_pair or not all(map(_is_int, shape)) or shape[0] < 0 or shape[1] < 1:
            raise ValueError(
                f"shapes has {shape!r}; expected pairs (num_rows, num_cols) of ints, with at least "
                "one column"
            )
    return [tuple(shape) for shape in shapes]


def _check_functors(
    functors: Sequence[BoundFunctor], cases: Iterable[Case], on: str | None, seed: int
) -> CheckResult:
    where, result = kernels.machine(on), CheckResult()
    for case in cases:
        for each in functors:
            with without_exit(f"the reference of {each.functor.name}"):
                result.findings += functor_check.check_functor(each, case, where, seed)
    return result
