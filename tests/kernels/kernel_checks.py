"""Kernels run forward and backward with the tiles of a test, and are judged against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from guarded_tensors import GuardedTensors

from cupynorm.dispatch.problem import Tile
from cupynorm.dtypes import compute_dtype, decode, encode
from cupynorm.norm.request import Launch
from cupynorm.verify.cases import Case, Problem, random_problem
from cupynorm.verify.kernels import (
    CpuMachine,
    GpuCheckMachine,
    Tensors,
    run_backward,
    run_forward,
    run_kernels,
    uses_welford,
)
from cupynorm.verify.results import CheckResult, judge_all

Where = CpuMachine | GpuCheckMachine
Results = dict[str, np.ndarray]


def run(
    problem: Problem, where: Where, backward: Tile | None = None, layouts: dict | None = None
) -> Results:
    """As run_kernels, with this tile of backward; the case has that of forward.

    layouts: of operands by name, between guards. Anything but outputs that is written to raises.
    """
    case = problem.case
    tensors = Tensors(where) if layouts is None else GuardedTensors(where, layouts)
    run_forward(problem, tensors, Launch(case.strategy, case.tile, case.statistics, case.sm_margin))
    run_backward(problem, tensors, Launch(case.strategy, backward, sm_margin=case.sm_margin))
    return tensors.results()


def assert_right(problem: Problem, results: Results, where: Where) -> None:
    """Every tensor of the case is there, and within what float64 allows."""
    case = problem.case
    welford = case.statistics == "welford" or uses_welford(case, where.device)
    result = CheckResult(judge_all(problem, results, rounded_mean=welford))
    wanted = {"y", "rstd", "dx"} | ({"mean"} if case.norm == "layer_norm" else set())
    wanted |= {f"d{name}" for name in ("weight", "bias") if case.dtype(name) is not None}
    wanted |= {"sum"} if case.residual else set()
    wanted |= {"dresidual"} if case.has_own_sum else set()
    wanted |= {"recomputed"} if case.recompute else set()
    assert set(results) == wanted == {found.tensor for found in result.findings}
    assert result.ok, f"\n{result}"


def check(case: Case, where: Where, seed: int = 0) -> Results:
    problem = random_problem(case, seed)
    results = run_kernels(problem, where)
    assert_right(problem, results, where)
    return results


def as_dtype(values, dtype: str) -> np.ndarray:
    return decode(encode(np.asarray(values, np.float64), dtype), dtype)


def with_rows(case: Case, rows, seed: int = 0) -> Problem:
    """A random problem with these rows for x, rounded to its dtype."""
    x = as_dtype(rows, case.x)
    case = replace(case, num_rows=x.shape[0], num_cols=x.shape[1])
    return replace(random_problem(case, seed), x=x)


def only_rows(problem: Problem, rows: slice) -> Problem:
    tensors = {name: getattr(problem, name) for name in ("x", "dy", "residual", "dsum")}
    some = {name: each[rows] for name, each in tensors.items() if each is not None}
    return replace(problem, case=replace(problem.case, num_rows=len(some["x"])), **some)


OF_A_ROW = {"y", "sum", "mean", "rstd", "dx", "dresidual", "recomputed"}


def assert_identical(got: Results, expected: Results, names: set[str] | None = None) -> None:
    """The same bits; of the tensors with these names."""
    for name in names & set(expected) if names else expected:
        assert got[name].tobytes() == expected[name].tobytes(), name


def assert_alone(problem: Problem, together: Results, where: Where, backward: Tile | None) -> None:
    """The first row, one in the middle and the last one have the same bits alone."""
    for row in {0, problem.case.num_rows // 2, problem.case.num_rows - 1}:
        alone = run(only_rows(problem, slice(row, row + 1)), where, backward)
        own = {name: together[name][row : row + 1] for name in OF_A_ROW & set(together)}
        assert_identical(alone, own, OF_A_ROW)


def bits(values: np.ndarray) -> bytes:
    """The bytes of values; -0.0 counts as 0.0."""
    return (values + 0.0).tobytes()


def y_of(problem: Problem, results: Results) -> np.ndarray:
    """y from the saved mean and rstd, each operation rounded to the compute dtype."""
    case = problem.case
    compute = compute_dtype(case.sum).name
    given = [results.get("sum", problem.x), results.get("mean"), results["rstd"]]
    given += [problem.weight, problem.bias]
    x, mean, rstd, weight, bias = (None if each is None else each.astype(compute) for each in given)
    y = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    if weight is not None:
        wide = problem.weight.astype(compute_dtype(case.dtype("weight")).name)
        y = y * ((1 + wide).astype(compute) if case.zero_centered_weight else weight)
    y = y if bias is None else y + bias
    return as_dtype(y, case.dtype("y"))
