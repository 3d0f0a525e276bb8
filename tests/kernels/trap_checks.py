"""What all trap tests use: problems with given rows, and checks against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupynorm.check.cases import Case, Problem, random_problem
from cupynorm.check.kernels import CpuMachine, uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import Call
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.problem import Layout
from cupynorm.plan.problem import Problem as DispatchProblem
from cupynorm.plan.strategies import STRATEGIES

H200 = DEVICES["H200"]


def as_dtype(values, dtype: str) -> np.ndarray:
    return decode(encode(np.asarray(values, np.float64), dtype), dtype)


def with_rows(case: Case, rows, seed: int = 0) -> Problem:
    """A random problem with these rows for x, rounded to its dtype."""
    x = as_dtype(rows, case.x)
    case = replace(case, num_rows=x.shape[0], num_cols=x.shape[1])
    return replace(random_problem(case, seed), x=x)


def fits(case: Case, device) -> bool:
    """Whether a forced strategy takes the row in both directions."""
    parameters = {"weight": case.dtype("weight"), "layout": Layout.of_new_arrays(case.num_cols)}
    forward = DispatchProblem(
        "forward", True, case.num_cols, case.x, y=case.x, bias=case.dtype("bias"), **parameters
    )
    gradients = {
        "dy": case.x,
        "dx": case.x,
        "dweight": case.dtype("weight"),
        "dbias": case.dtype("bias"),
    }
    backward = DispatchProblem("backward", True, case.num_cols, case.x, **gradients, **parameters)
    tile = STRATEGIES[case.strategy].tile
    return tile(forward, device) is not None and tile(backward, device) is not None


def assert_right(problem: Problem, results: dict[str, np.ndarray], device=H200) -> None:
    welford = problem.case.statistics == "welford" or uses_welford(problem.case, device)
    result = CheckResult(judge_all(problem, results, rounded_mean=welford))
    assert len(result.findings) == len(results)
    assert result.ok, f"\n{result}"


def check(problem: Problem, where) -> dict[str, np.ndarray]:
    results = run_kernels(problem, where)
    assert_right(problem, results, where.device)
    return results


def run_call(
    machine: CpuMachine, call: Call, tensors: dict[str, Rows], statistics: dict[str, int]
) -> None:
    addresses = {name: rows.pointer for name, rows in tensors.items()} | statistics
    if call.partials_shape:
        partials, addresses["partials"] = machine.empty(
            call.partials_shape, call.plan.problem.compute
        )
    for launch, words in zip(call.launches, call.fill(addresses)):
        machine.launch(launch, words)
