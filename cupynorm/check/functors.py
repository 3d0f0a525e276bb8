"""The check of a user's functor: its kernels against its float64 `reference`.

Derivatives of the reference are central differences in float64, column by column, so the functor's
own backward lines are judged too. With F the reference, J its Jacobian within a row, b the error
that allowed.py allows of what F is applied to, and u the rounding error of the arithmetic:

    F(v)          |J| b + 8u * (|v| + |F| + |J| |v| + |dF/da| |a| for each array a) + h
    J^T g         |J^T| (error of g) + |J^T g at v + b, v - b, less at v|
                  + 16u * (|J^T| |g| + |g| * (1 + |v|)) + h
    (dF/da)^T g   the same with dF/da; summed over the repeats of a
h is half a unit in the last place of the dtype that is written. The differences themselves are off
by about 1e-9: beside float64 kernels that is the largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..dtypes import compute_dtype, decode, encode
from ..gpu.arrays import Rows
from ..norm.arguments import backward_call, forward_call
from ..norm.functors import PlacedArray, PlacedFunctor, PlacedFunctors, summed
from ..norm.request import BackwardOptions, ForwardOptions, Options
from ..plan.functors import ROLES, Functor
from .allowed import Expected, expect, half_ulp
from .cases import Case, Problem, random_problem
from .kernels import CpuMachine, GpuCheckMachine, machine, uses_welford
from .results import CheckResult, Finding, judge

KINDS = ("full", "cols", "rows", "one")
_DIFFERENCES = 1e-9


@dataclass
class FunctorProblem:
    """A problem of a norm, and a functor with its arrays: float64 values, [num_rows or 1, num_cols
    or 1], each exactly representable in the case's dtype."""

    problem: Problem
    role: str
    functor: Functor
    arrays: dict[str, np.ndarray]
    numbers: dict[str, float]

    def apply(self, values: np.ndarray, **others: np.ndarray) -> np.ndarray:
        """F(values). others: arrays in the place of the problem's."""
        full = {name: np.broadcast_to(a, values.shape) for name, a in self.arrays.items()}
        with np.errstate(all="ignore"):
            return self.functor.reference(values, **(full | others), **self.numbers)

    def slopes(self, values: np.ndarray, name: str | None = None) -> np.ndarray:
        """dF[row, col] / d argument[row, other], as [other, row, col]. name: an array, or None for
        the values."""
        argument = values if name is None else np.broadcast_to(self.arrays[name], values.shape)
        step, made = 1e-5 * (1 + np.abs(argument)), np.empty((values.shape[1], *values.shape))
        for col in range(values.shape[1]):
            ends = []
            for sign in (1, -1):
                moved = argument.copy()
                moved[:, col] += sign * step[:, col]
                ends.append(
                    self.apply(moved) if name is None else self.apply(values, **{name: moved})
                )
            made[col] = (ends[0] - ends[1]) / (2 * step[None, :, col].T)
        return made

    def gradients(self, values: np.ndarray, upstream: np.ndarray) -> dict[str | None, np.ndarray]:
        """J^T upstream by None, and that of each array by its name, before it is summed."""
        return {
            name: _product(self.slopes(values, name), upstream) for name in (None, *self.arrays)
        }


def _product(slopes: np.ndarray, upstream: np.ndarray) -> np.ndarray:
    return np.einsum("jrc,rc->rj", slopes, upstream)


def _bound_of_result(given: FunctorProblem, values: np.ndarray, off: np.ndarray, u: float):
    """F(values), and what is allowed of it before it is rounded."""
    result = given.apply(values)
    slopes = np.abs(given.slopes(values))
    moved = np.einsum("jrc,rj->rc", slopes, off)
    size = np.abs(values) + np.abs(result) + np.einsum("jrc,rj->rc", slopes, np.abs(values))
    for name, array in given.arrays.items():
        full = np.abs(np.broadcast_to(array, values.shape))
        size = size + np.einsum("jrc,rj->rc", np.abs(given.slopes(values, name)), full)
    return result, moved + (8 * u + _DIFFERENCES) * size


def _bound_of_gradients(
    given: FunctorProblem,
    values: np.ndarray,
    off: np.ndarray,
    upstream: tuple[np.ndarray, np.ndarray],
    u: float,
) -> dict[str | None, tuple[np.ndarray, np.ndarray]]:
    """Of F's argument (None) and of each array: the gradient and what is allowed of it."""
    gradient, off_upstream = upstream
    ends = [given.gradients(values + sign * off, gradient) for sign in (1, -1)]
    made = {}
    for name in (None, *given.arrays):
        slopes = given.slopes(values, name)
        exact, size = _product(slopes, gradient), np.abs(gradient) * (1 + np.abs(values))
        allowed = _product(np.abs(slopes), off_upstream)
        allowed = allowed + np.maximum(*(np.abs(end[name] - exact) for end in ends))
        size = size + _product(np.abs(slopes), np.abs(gradient))
        made[name] = exact, allowed + (16 * u + _DIFFERENCES) * size
    return made


def expect_with_functor(given: FunctorProblem, rounded_mean: bool = False) -> Expected:
    """name -> (float64 result, allowed error): y, mean, rstd, dx, dweight, dbias, d<array>."""
    bound = _of_store if given.role == "store" else _of_load
    expected, of_arrays = bound(given, rounded_mean)
    case = given.problem.case
    compute = compute_dtype(case.x).name
    for name, array in given.arrays.items():
        exact, allowed = of_arrays[name]
        own = case.x if array.shape == exact.shape else compute
        allowed = allowed + half_ulp(exact, own)
        expected[f"d{name}"] = summed(exact, array.shape), summed(allowed, array.shape)
        if array.shape != exact.shape:
            count = exact.size // max(1, array.size)
            u = compute_dtype(case.x).half_ulp
            value, allowed = expected[f"d{name}"]
            rounding = u * count * summed(np.abs(exact), array.shape)
            expected[f"d{name}"] = value, allowed + rounding
    return expected


def _of_store(given: FunctorProblem, rounded_mean: bool):
    problem, case = given.problem, given.problem.case
    compute = compute_dtype(case.x)
    plain = replace(problem, case=replace(case, y=compute.name))
    y, off = expect(plain, rounded_mean=rounded_mean)["y"]
    result, allowed = _bound_of_result(given, y, off, compute.half_ulp)
    dy = problem.dy
    gradients = _bound_of_gradients(given, y, off, (dy, np.zeros_like(dy)), compute.half_ulp)
    dy, off_dy = gradients.pop(None)
    expected = expect(replace(plain, dy=dy), rounded_mean=rounded_mean)
    expected["y"] = result, allowed + half_ulp(result, case.dtype("y"))
    x_hat, rstd, w = _rows(problem, problem.x)
    wide = np.abs(w) * off_dy
    of_dx = wide + wide.mean(axis=1, keepdims=True)
    of_dx = rstd * (of_dx + np.abs(x_hat) * (np.abs(x_hat) * wide).mean(axis=1, keepdims=True))
    more = {"dx": of_dx, "dweight": (np.abs(x_hat) * off_dy).sum(0), "dbias": off_dy.sum(0)}
    return _with_more(expected, more), gradients


def _of_load(given: FunctorProblem, rounded_mean: bool):
    problem, case = given.problem, given.problem.case
    compute = compute_dtype(case.x)
    u = compute.half_ulp
    row, off = _bound_of_result(given, problem.x, np.zeros_like(problem.x), u)
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
    gradients = _bound_of_gradients(given, problem.x, np.zeros_like(row), upstream, u)
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


class _Arrays:
    """Arrays where kernels run, by name; outputs hold NaN before they run."""

    def __init__(self, where: CpuMachine | GpuCheckMachine) -> None:
        self.where, self.there, self.rows, self.addresses = where, {}, {}, {}

    def add(self, name: str, made: tuple[object, int], shape: tuple[int, ...], dtype: str) -> None:
        self.there[name], self.addresses[name] = (made[0], dtype), made[1]
        num_rows = shape[0] if len(shape) == 2 else 1
        self.rows[name] = Rows(made[1], num_rows, shape[-1], shape[-1], dtype)

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        if values is not None:
            self.add(name, self.where.put(encode(values, dtype)), values.shape, dtype)

    def make(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.add(name, self.where.empty(shape, dtype), shape, dtype)

    def some(self, *names: str) -> dict[str, Rows]:
        return {name: self.rows[name] for name in names if name in self.rows}

    def get(self, name: str) -> np.ndarray:
        array, dtype = self.there[name]
        return decode(self.where.get(array), dtype)

    def launch(self, call) -> None:
        for each, words in zip(call.launches, call.fill(self.addresses)):
            self.where.launch(each, words)


def run_with_functor(
    given: FunctorProblem, where: CpuMachine | GpuCheckMachine
) -> dict[str, np.ndarray]:
    """y, mean, rstd, dx, dweight, dbias and d<array> of the kernels; the gradients if the functor
    has backward lines."""
    case, problem, role = given.problem.case, given.problem, given.role
    shape, dtype = problem.x.shape, case.x
    compute, centered = compute_dtype(dtype).name, case.norm == "layer_norm"
    own = _Arrays(where)
    own.put("x", problem.x, dtype)
    for name in ("weight", "bias"):
        own.put(name, getattr(problem, name), case.dtype(name))
    placed = []
    for name, values in given.arrays.items():
        own.put(f"{role}.{name}", values, dtype)
        num_rows, num_cols = values.shape
        stride = num_cols if num_rows > 1 else 0
        rows = Rows(own.addresses[f"{role}.{name}"], num_rows, shape[1], stride, dtype)
        placed.append(PlacedArray(rows, 1, 2**62, num_cols == 1 < shape[1]))
    functor = PlacedFunctor(given.functor, tuple(given.numbers.values()), tuple(placed))
    options = ForwardOptions(
        centered,
        shape[1:],
        case.eps,
        case.zero_centered_weight,
        launch=Options(case.strategy, case.tile, case.statistics),
    )
    own.make("y", shape, case.dtype("y"))
    own.make("rstd", shape[:1], compute)
    if centered:
        own.make("mean", shape[:1], compute)
    functors = PlacedFunctors(**{role: functor})
    read = own.some("x", "weight", "bias")
    own.launch(forward_call(where.device, read | own.some("y"), options, "forward", functors))
    names = ["y", "rstd", *(["mean"] if centered else [])]
    sums = {}
    if given.functor.backward is not None:
        own.put("dy", problem.dy, case.dtype("y"))
        own.make("dx", shape, dtype)
        names.append("dx")
        for name in ("weight", "bias"):
            if name in own.rows:
                own.make(f"d{name}", shape[1:], case.dtype(name))
                names.append(f"d{name}")
        gradients = []
        for name, values in given.arrays.items():
            gradients.append(dtype if values.shape == shape else compute)
            own.make(f"{role}.d{name}", shape, gradients[-1])
        functors = PlacedFunctors(**{role: functor._replace(gradients=tuple(gradients))})
        options = BackwardOptions(
            centered, shape[1:], case.zero_centered_weight, launch=Options(case.strategy)
        )
        read = read | own.some("dy", "dx", "dweight", "dbias")
        call = backward_call(where.device, read, options, compute, functors)
        if call.partials_shape:
            own.make("partials", call.partials_shape, compute)
        own.launch(call)
        for name, values in given.arrays.items():
            sums[f"d{name}"] = summed(own.get(f"{role}.d{name}"), values.shape)
    return {name: own.get(name) for name in names} | sums


# What users call.


def check_functor(
    functor: Functor,
    role: str = "store",
    *,
    arrays: Mapping[str, str | Callable] | None = None,
    numbers: Mapping[str, float] | None = None,
    norm: str = "layer_norm",
    shapes: Iterable[tuple[int, int]] = ((5, 96),),
    dtypes: Iterable[str] = ("float32", "bfloat16", "float16"),
    on: str | None = None,
    seed: int = 0,
) -> CheckResult:
    """Compares a functor in the kernels of a norm, forward and backward, with its reference.

    role: "store" or "load". arrays: for each name a kind of random array, "full" ([num_rows,
        num_cols]), "cols" ([1, num_cols]), "rows" ([num_rows, 1]) or "one" ([1, 1]); by default all
        are full. Or a function of (num_rows, num_cols) that returns a float64 array of one of these
        shapes.
    numbers: the functor's numbers. norm: "layer_norm" or "rms_norm". on: as for cupynorm.check.
    shapes: of x; a few rows and at most some hundred columns, since each column is moved by itself.

    Returns a cupynorm.CheckResult. Raises ValueError for a functor without a reference, and for
    names that it does not have.
    """
    if functor.reference is None:
        raise ValueError(
            f"functor {functor.name} has no reference; expected a Python function that computes "
            "the same in float64"
        )
    kinds, numbers = dict(arrays or {}), dict(numbers or {})
    unknown = [name for name in kinds if name not in functor.arrays]
    if role not in ROLES or unknown or set(numbers) != set(functor.numbers):
        raise ValueError(
            f"the check of {functor.name} got role {role!r}, arrays {', '.join(kinds) or 'none'} "
            f"and numbers {', '.join(numbers) or 'none'}; expected load or store, "
            f"{', '.join(functor.arrays) or 'none'} and {', '.join(functor.numbers) or 'none'}"
        )
    where, findings = machine(on), []
    for shape in shapes:
        for dtype in dtypes:
            case = Case(norm, *shape, dtype)
            generator = np.random.default_rng([seed, *shape])
            values = {
                name: _draw(kinds.get(name, "full"), shape, dtype, generator)
                for name in functor.arrays
            }
            ordered = {name: float(numbers[name]) for name in functor.numbers}
            given = FunctorProblem(random_problem(case, seed), role, functor, values, ordered)
            findings += judge_functor(given, run_with_functor(given, where), where)
    return CheckResult(findings)


def _draw(
    kind: str | Callable, shape: tuple[int, int], dtype: str, generator: np.random.Generator
) -> np.ndarray:
    if callable(kind):
        values = np.asarray(kind(*shape), np.float64)
    elif kind in KINDS:
        num_rows = shape[0] if kind in ("full", "rows") else 1
        num_cols = shape[1] if kind in ("full", "cols") else 1
        values = generator.standard_normal((num_rows, num_cols))
    else:
        raise ValueError(f"an array is of kind {kind!r}; expected one of {', '.join(KINDS)}")
    return decode(encode(values, dtype), dtype)


def judge_functor(
    given: FunctorProblem,
    results: Mapping[str, np.ndarray],
    where: CpuMachine | GpuCheckMachine,
) -> list[Finding]:
    """The worst element of each result."""
    case = given.problem.case
    expected = expect_with_functor(given, uses_welford(case, where.device))
    label = f"{case} {given.role} {given.functor.name}"
    return [judge(label, name, got, *expected[name]) for name, got in results.items()]
