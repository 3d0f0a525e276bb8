"""The check of a user's functor: its kernels against its float64 `reference`.

Derivatives of the reference are central differences in float64, column by column, so the functor's
own backward lines are judged too. With F the reference, J its Jacobian within a row, b the error
that bounds.py allows of what F is applied to, and u the rounding error of the arithmetic:

    F(v)          |J| b + 8u * (|v| + |F| + |J| |v| + |dF/da| |a| for each array a) + h
    J^T g         |J^T| (error of g) + |J^T g at v + b, v - b, less at v|
                  + 16u * (|J^T| |g| + |g| * (1 + |v|)) + h
    (dF/da)^T g   the same with dF/da; summed over the repeats of a
h is half a unit in the last place of the dtype that is written. The differences themselves are off
by about 1e-9: beside float64 kernels that is the largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from ..dispatch.dispatch import Plan
from ..dispatch.functor_text import ROLES, BoundFunctor, Functor
from ..dispatch.problem import NormName
from ..dtypes import compute_dtype, decode, encode
from ..norm.arguments import PlacedArray, PlacedFunctor, PlacedFunctors, summed
from ..norm.checks import check_eps
from ..norm.request import Launch, of_backward
from ..options import check_flags
from . import kernels
from .bounds import Expected, expect, half_ulp
from .cases import Case, Problem, random_problem
from .check import check_dtypes, check_launches, check_norms, check_seed, check_shapes, in_words
from .check_function import without_exit
from .diagnosis import UNKNOWN, Candidate, Diagnosis, Judged, best_of, described
from .kernels import Machine, Tensors, run_backward, run_forward, uses_welford
from .results import CheckResult, Finding, dtype_of, judge

Given = Functor | BoundFunctor
KINDS = ("full", "cols", "rows", "one")
_DIFFERENCES = 1e-9
_MOST_DIFFERENCES = 2**24  # numbers in one array of derivatives


def check_functor(
    functor: Given,
    *,
    norm: NormName | Sequence[NormName] = "layer_norm",
    eps: float = 1e-5,
    shapes: Iterable[tuple[int, int]] = ((5, 96), (3, 33)),
    dtypes: Iterable[str] = ("float32",),
    launch: Launch | Sequence[Launch] | None = None,
    zero_centered_weight: bool = False,
    on: str | None = None,
    seed: int = 0,
) -> CheckResult:
    """Compare your own functor in the kernels with its float64 reference: y, and every gradient if
    it has backward lines.

    Examples:
        >>> scaled = cupynorm.functors.layer_scale(scale="cols")
        >>> cupynorm.check_functor(scaled, shapes=[(2, 16)], on="cpu").ok
        True

    functor: it has a reference, whose derivatives are central differences, column by column, so
        shapes are small. Bind its numbers, and to each array a kind of random array: "full"
        [num_rows, num_cols], "cols" [1, num_cols], "rows" [num_rows, 1] or "one" [1, 1]; or a
        function of (num_rows, num_cols) that returns an array of one of these shapes. A functor
        alone has full arrays, and "rows" where it takes one element per row. A seed that is None is
        random.
    norm, eps, dtypes, launch, on: as in cupynorm.check. zero_centered_weight: as in
        cupynorm.check_function. seed: of the random values.

    Returns a CheckResult. Raises ValueError for a functor without a reference, numbers that are not
    bound and shapes that are too wide; TypeError for what is no functor.
    """
    check_seed(seed)
    check_flags(zero_centered_weight=zero_centered_weight)
    bound, where, result = with_kinds(functor), kernels.machine(on), CheckResult()
    label = bound.functor.name
    if bound.functor.reference is None:
        raise ValueError(
            f"functor {label} has no reference; expected a Python function that computes the same "
            "in float64"
        )
    options = {
        "zero_centered_weight": zero_centered_weight,
        "eps": check_eps(eps, "float64", has_default=False),
    }
    cases = [
        Case(norm, *shape, dtype, **fields, **options)
        for norm, dtype, fields, shape in product(
            check_norms(norm), check_dtypes(dtypes), check_launches(launch), check_shapes(shapes)
        )
    ]
    for case in cases:
        if case.num_rows * case.num_cols**2 > _MOST_DIFFERENCES:
            raise ValueError(
                f"shapes has {case.num_rows} x {case.num_cols}; a functor is differentiated column "
                f"by column, so expected num_rows * num_cols**2 of at most {_MOST_DIFFERENCES}"
            )
        with without_exit(f"the reference of {label}"):
            problem = random_functor_problem(bound, case, seed)
            result.findings += judge_functor(
                problem, run_with_functor(problem, where).results, where
            )
    what = f"functor {label} in the kernels, planned for an {where.device.name}"
    result.checked = in_words(f"{what}, on the {where.on.upper()}", cases)
    if bound.functor.backward is None:
        result.not_covered.append("gradients: the functor has no backward lines")
    if where.on == "cpu":
        result.not_covered.append("a GPU")
    return result


@dataclass
class FunctorProblem:
    """A problem of a norm, and a functor with its arrays: float64 values, [num_rows or 1, num_cols
    or 1], each exactly representable in the case's dtype."""

    problem: Problem
    functor: Functor
    arrays: dict[str, np.ndarray]
    numbers: dict[str, float]
    seeds: dict[str, int] = field(default_factory=dict)

    def dtype_of(self, tensor: str) -> str:
        """The dtype of a result."""
        array = self.arrays.get(tensor[1:])
        if array is not None and array.shape == self.problem.x.shape:
            return self.problem.case.x
        return dtype_of(self.problem.case, tensor)

    def argument_and_gradient(self) -> tuple[np.ndarray, np.ndarray]:
        """What F is applied to, and the gradient of its result, without roundings."""
        problem, case = self.problem, self.problem.case
        if self.functor.role == "store":
            return expect(problem)["y"][0], problem.dy
        compute = compute_dtype(case.x).name
        dtypes = {name: case.dtype(name) for name in ("y", "weight", "bias")}
        plain = replace(problem, case=replace(case, x=compute, **dtypes), x=self.apply(problem.x))
        return problem.x, expect(plain)["dx"][0]

    def apply(self, values: np.ndarray, **others: np.ndarray) -> np.ndarray:
        """F(values). others: arrays in the place of the problem's."""
        full = {name: np.broadcast_to(a, values.shape) for name, a in self.arrays.items()}
        with np.errstate(all="ignore"):
            given = full | others | self.numbers | self.seeds
            return self.functor.reference(values, **given)

    def slopes(self, values: np.ndarray, name: str | None = None) -> np.ndarray:
        """dF[row, col] / d argument[row, other], as [other, row, col]. name: an array, or None for
        the values."""
        argument = values if name is None else np.broadcast_to(self.arrays[name], values.shape)
        step, slopes = 1e-5 * (1 + np.abs(argument)), np.empty((values.shape[1], *values.shape))
        for col in range(values.shape[1]):
            ends = []
            for sign in (1, -1):
                moved = argument.copy()
                moved[:, col] += sign * step[:, col]
                ends.append(
                    self.apply(moved) if name is None else self.apply(values, **{name: moved})
                )
            slopes[col] = (ends[0] - ends[1]) / (2 * step[None, :, col].T)
        return slopes

    def gradients(self, values: np.ndarray, upstream: np.ndarray) -> dict[str | None, np.ndarray]:
        """J^T upstream by None, and that of each array by its name, before it is summed."""
        return {
            name: _product(self.slopes(values, name), upstream) for name in (None, *self.arrays)
        }


def _product(slopes: np.ndarray, upstream: np.ndarray) -> np.ndarray:
    return np.einsum("jrc,rc->rj", slopes, upstream)


def _bound_of_result(problem: FunctorProblem, values: np.ndarray, off: np.ndarray, u: float):
    """F(values), and what is allowed of it before it is rounded."""
    result = problem.apply(values)
    slopes = np.abs(problem.slopes(values))
    moved = np.einsum("jrc,rj->rc", slopes, off)
    size = np.abs(values) + np.abs(result) + np.einsum("jrc,rj->rc", slopes, np.abs(values))
    for name, array in problem.arrays.items():
        full = np.abs(np.broadcast_to(array, values.shape))
        size = size + np.einsum("jrc,rj->rc", np.abs(problem.slopes(values, name)), full)
    return result, moved + (8 * u + _DIFFERENCES) * size


def _bound_of_gradients(
    problem: FunctorProblem,
    values: np.ndarray,
    off: np.ndarray,
    upstream: tuple[np.ndarray, np.ndarray],
    u: float,
) -> dict[str | None, tuple[np.ndarray, np.ndarray]]:
    """Of F's argument (None) and of each array: the gradient and what is allowed of it."""
    gradient, off_upstream = upstream
    ends = [problem.gradients(values + sign * off, gradient) for sign in (1, -1)]
    bounds = {}
    for name in (None, *problem.arrays):
        slopes = problem.slopes(values, name)
        exact, size = _product(slopes, gradient), np.abs(gradient) * (1 + np.abs(values))
        allowed = _product(np.abs(slopes), off_upstream)
        allowed = allowed + np.maximum(*(np.abs(end[name] - exact) for end in ends))
        size = size + _product(np.abs(slopes), np.abs(gradient))
        bounds[name] = exact, allowed + (16 * u + _DIFFERENCES) * size
    return bounds


def expect_with_functor(problem: FunctorProblem, rounded_mean: bool = False) -> Expected:
    """name -> (float64 result, allowed error): y, mean, rstd, dx, dweight, dbias, d<array>."""
    bound = _of_store if problem.functor.role == "store" else _of_load
    expected, of_arrays = bound(problem, rounded_mean)
    case = problem.problem.case
    compute = compute_dtype(case.x).name
    for name, array in problem.arrays.items():
        exact, allowed = of_arrays[name]
        is_full = array.shape == exact.shape
        allowed = summed(allowed + half_ulp(exact, case.x if is_full else compute), array.shape)
        if not is_full:
            count = exact.size // max(1, array.size)
            u = compute_dtype(case.x).half_ulp
            allowed = allowed + u * count * summed(np.abs(exact), array.shape)
        expected[f"d{name}"] = summed(exact, array.shape), allowed
    return expected


def _of_store(functor_problem: FunctorProblem, rounded_mean: bool):
    problem, case = functor_problem.problem, functor_problem.problem.case
    compute = compute_dtype(case.x)
    plain = replace(problem, case=replace(case, y=compute.name))
    y, off = expect(plain, rounded_mean=rounded_mean)["y"]
    result, allowed = _bound_of_result(functor_problem, y, off, compute.half_ulp)
    dy = problem.dy
    gradients = _bound_of_gradients(
        functor_problem, y, off, (dy, np.zeros_like(dy)), compute.half_ulp
    )
    dy, off_dy = gradients.pop(None)
    expected = expect(replace(plain, dy=dy), rounded_mean=rounded_mean)
    expected["y"] = result, allowed + half_ulp(result, case.dtype("y"))
    x_hat, rstd, w = _rows(problem, problem.x)
    wide = np.abs(w) * off_dy
    of_dx = wide + wide.mean(axis=1, keepdims=True)
    of_dx = rstd * (of_dx + np.abs(x_hat) * (np.abs(x_hat) * wide).mean(axis=1, keepdims=True))
    more = {"dx": of_dx, "dweight": (np.abs(x_hat) * off_dy).sum(0), "dbias": off_dy.sum(0)}
    return _with_more(expected, more), gradients


def _of_load(functor_problem: FunctorProblem, rounded_mean: bool):
    problem, case = functor_problem.problem, functor_problem.problem.case
    compute = compute_dtype(case.x)
    u = compute.half_ulp
    row, off = _bound_of_result(functor_problem, problem.x, np.zeros_like(problem.x), u)
    off = off + half_ulp(row, compute.name)
    x_hat, rstd, w = _rows(problem, row)
    size = np.abs(x_hat)
    of_rstd = rstd * (size * off).mean(axis=1, keepdims=True)
    e = rstd * (off + off.mean(axis=1, keepdims=True)) + size * of_rstd
    g = u * (4 + np.sqrt(case.num_cols))
    of_mean = g * np.abs(row.mean(axis=1, keepdims=True)) * rstd
    usual = g * (1 + size) + of_mean + (of_mean + of_mean**2) * size
    dtypes = {name: case.dtype(name) for name in ("y", "weight", "bias")}
    plain_case = replace(case, x=compute.name, **dtypes)
    plain = Problem(plain_case, row, problem.dy, problem.weight, problem.bias)
    expected = expect(plain, rounded_mean=rounded_mean, e_backward=usual + e)
    exact, allowed = expected["dx"]
    upstream = exact, allowed + of_rstd * np.abs(exact)
    gradients = _bound_of_gradients(functor_problem, problem.x, np.zeros_like(row), upstream, u)
    exact, allowed = gradients.pop(None)
    expected["dx"] = exact, allowed + half_ulp(exact, case.x)
    more = {"y": np.abs(w) * e, "rstd": (of_rstd * rstd)[:, 0], "mean": off.mean(axis=1)}
    return _with_more(expected, more), gradients


def _with_more(expected: Expected, more: Mapping[str, np.ndarray]) -> Expected:
    return {
        name: (exact, allowed + more.get(name, 0.0)) for name, (exact, allowed) in expected.items()
    }


def _rows(problem: Problem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x_hat, rstd as a column, and the weight."""
    case = problem.case
    mean = x.mean(axis=1, keepdims=True) if case.norm == "layer_norm" else 0.0
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + case.eps)
    weight = np.ones(case.num_cols) if problem.weight is None else problem.weight
    return (x - mean) * rstd, rstd, weight + 1 if case.zero_centered_weight else weight


# Running the kernels.


class FunctorRun(NamedTuple):
    """What kernels computed, by the name of the tensor, and the plans of "forward" and "backward".

    There is no backward if the functor has no backward lines.
    """

    results: dict[str, np.ndarray]
    plans: dict[str, Plan]


def run_with_functor(functor_problem: FunctorProblem, where: Machine) -> FunctorRun:
    """y, mean, rstd, dx, dweight, dbias and d<array> of the kernels."""
    problem, functor = functor_problem.problem, functor_problem.functor
    case, shape, label = problem.case, problem.x.shape, functor_problem.functor.name
    tensors, placed = Tensors(where), []
    for name, values in functor_problem.arrays.items():
        tensors.put(f"{label}.{name}", values, case.x)
        num_rows, num_cols = values.shape
        stride = num_cols if num_rows > 1 else 0
        rows = tensors.rows[f"{label}.{name}"]._replace(num_cols=shape[1], row_stride=stride)
        placed.append(PlacedArray(rows, 1, 2**62, num_cols == 1 < shape[1]))
    for name, seed in functor_problem.seeds.items():
        tensors.put(f"{label}.{name}", np.array([seed]), "int64")
    numbers = tuple(functor_problem.numbers.values())
    applied = PlacedFunctor(functor, numbers, tuple(placed), label)
    launch, is_load = Launch(case.strategy, case.tile, case.statistics), functor.role == "load"
    functors = PlacedFunctors(**{functor.role: (applied,)})
    options = {"functors": functors, "applies_load": is_load}
    plans = {"forward": run_forward(problem, tensors, launch, **options)}
    if functor.backward is not None:
        gradients = []
        for name, values in functor_problem.arrays.items():
            is_full = values.shape == shape
            gradients.append(case.x if is_full else compute_dtype(case.x).name)
            tensors.make(f"{label}.d{name}", shape, gradients[-1])
        applied = applied._replace(gradients=tuple(gradients))
        functors = PlacedFunctors(**{functor.role: (applied,)})
        plans["backward"] = run_backward(problem, tensors, of_backward(launch), functors)
    made, results = tensors.results(), {}
    for name in sorted(made, key=lambda name: name.startswith(f"{label}.")):
        results[name.removeprefix(f"{label}.")] = made[name]  # an array may be called bias, too
    for name, values in functor_problem.arrays.items():
        if f"d{name}" in results:
            results[f"d{name}"] = summed(results[f"d{name}"], values.shape)
    return FunctorRun(results, plans)


def with_kinds(given: Given) -> BoundFunctor:
    """A functor with a kind, or a function, for each of its arrays; see check_functor().

    Raises ValueError for a functor whose numbers are not bound, or that is bound to something else;
    TypeError for what is no functor.
    """
    if not isinstance(given, (Functor, BoundFunctor)):
        raise TypeError(f"a {type(given).__name__} is no functor; expected one of cupynorm.functor")
    if isinstance(given, Functor):
        if given.numbers:
            bound = [f'{name}="full"' for name in given.arrays]
            bound += [f"{name}=0.5" for name in given.numbers]
            raise ValueError(
                f"functor {given.name} has numbers {', '.join(given.numbers)}; expected it with "
                f"them and a kind for each array, as {given.name}({', '.join(bound)})"
            )
        kinds = ("rows" if name in given.per_row else "full" for name in given.arrays)
        return BoundFunctor(given, tuple(kinds), seeds=(None,) * len(given.seeds))
    for name, kind in zip(given.functor.arrays, given.arrays):
        kinds = ("rows",) if name in given.functor.per_row else KINDS
        if not callable(kind) and not (isinstance(kind, str) and kind in kinds):
            shown = repr(kind) if isinstance(kind, str) else f"of type {type(kind).__name__}"
            raise ValueError(
                f"{given.functor.name}.{name} is {shown}; expected one of {', '.join(kinds)}, or "
                "a function of num_rows and num_cols"
            )
    return given


def random_functor_problem(bound: BoundFunctor, case: Case, seed: int) -> FunctorProblem:
    """Random values, and arrays of the kinds that `given` is bound to."""
    shape = (case.num_rows, case.num_cols)
    functor, generator = bound.functor, np.random.default_rng([seed, *shape])
    arrays = {
        name: _draw(kind, shape, case.x, generator)
        for name, kind in zip(functor.arrays, bound.arrays)
    }
    numbers = dict(zip(functor.numbers, bound.numbers))
    seeds = {
        name: int(generator.integers(-(2**63), 2**63)) if value is None else int(value)
        for name, value in zip(functor.seeds, bound.seeds)
    }
    return FunctorProblem(random_problem(case, seed), functor, arrays, numbers, seeds)


def _draw(
    kind: str | Callable, shape: tuple[int, int], dtype: str, generator: np.random.Generator
) -> np.ndarray:
    if callable(kind):
        values = np.asarray(kind(*shape), np.float64)
        if values.ndim != 2 or any(own not in (1, all_) for own, all_ in zip(values.shape, shape)):
            raise ValueError(
                f"an array of a functor has shape {values.shape}; expected {shape}, or 1 in the "
                "place of either"
            )
    else:
        num_rows = shape[0] if kind in ("full", "rows") else 1
        num_cols = shape[1] if kind in ("full", "cols") else 1
        values = generator.standard_normal((num_rows, num_cols))
    return decode(encode(values, dtype), dtype)


@np.errstate(all="ignore")
def judge_functor(
    functor_problem: FunctorProblem, results: Mapping[str, np.ndarray], where: Machine
) -> list[Finding]:
    """The worst element of each result. A tensor that is off has a diagnosis."""
    case = functor_problem.problem.case
    expected = expect_with_functor(functor_problem, uses_welford(case, where.device))
    label = f"{case} {functor_problem.functor.name}"
    explain = partial(_diagnose, functor_problem)
    return [
        judge(label, name, got, *expected[name], functor_problem.dtype_of(name), diagnose=explain)
        for name, got in results.items()
    ]


# Why a tensor is off.


def _diagnose(functor_problem: FunctorProblem, judged: Judged) -> Diagnosis:
    tried = (Candidate(*each) for each in _mistakes(functor_problem, judged))
    return described(judged, best_of(judged, tried) or UNKNOWN)


def _mistakes(functor_problem: FunctorProblem, judged: Judged) -> Iterator[tuple[str, np.ndarray]]:
    """What the tensor would be if a mistake had been made in the lines, and its name."""
    value, problem = ROLES[functor_problem.functor.role], functor_problem.problem
    tensor, expected = judged.tensor, judged.expected
    if tensor in ("y", "mean", "rstd"):
        plain = expect(problem)
        yield f"it is that of the norm alone: the lines do not change {value}", plain[tensor][0]
        return
    array = tensor[1:] if tensor[1:] in functor_problem.arrays else None
    if array is not None:
        yield f"the backward lines do not set {tensor}", np.zeros_like(expected)
    yield "it has the wrong sign", -expected
    values, upstream = functor_problem.argument_and_gradient()
    if array is not None:
        shape = functor_problem.arrays[array].shape
        of_ones = _product(functor_problem.slopes(values, array), np.ones_like(values))
        yield f"the factor d{value} is missing", summed(of_ones, shape)
        overwritten = _product(functor_problem.slopes(values), upstream)
        of_array = _product(functor_problem.slopes(values, array), overwritten)
        yield f"d{value} was overwritten before {tensor} was computed", summed(of_array, shape)
    elif functor_problem.functor.role == "load":
        if tensor == "dx":
            yield "the lines do not change dx: the derivative by x is missing", upstream
    else:
        plain = expect(problem)
        yield "the lines do not change dy: the derivative by y is missing", plain[tensor][0]
