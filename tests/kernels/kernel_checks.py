"""What tests of kernels share: checks against float64, problems, and comparisons of bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from cupynorm import reference
from cupynorm.check.cases import Case, Problem, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine, uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, compute_dtype, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import backward_call
from cupynorm.norm.request import BackwardOptions, Launch
from cupynorm.plan import dispatch
from cupynorm.plan.devices import DEVICES, Device
from cupynorm.plan.problem import Layout, Tile
from cupynorm.plan.problem import Problem as DispatchProblem
from cupynorm.plan.strategies import STRATEGIES

H200 = DEVICES["H200"]


OUTPUTS = {"y", "mean", "rstd", "dx", "dweight", "dbias"}


SEEDS = range(5)


def check(case: Case, where: CpuMachine | GpuCheckMachine, seed: int = 0) -> dict[str, np.ndarray]:
    problem = random_problem(case, seed)
    results = run_kernels(problem, where)
    welford = case.statistics == "welford" or uses_welford(case, where.device)
    result = CheckResult(judge_all(problem, results, rounded_mean=welford))
    missing = OUTPUTS - set(results)
    allowed = {"mean"} if case.norm == "rms_norm" else set()
    allowed |= {f"d{name}" for name in ("weight", "bias") if case.dtype(name) is None}
    assert missing == allowed
    assert len(result.findings) == len(results)
    assert result.ok, f"\n{result}"
    return results


def norm_and_cols(cases: Iterable[str], what: str, strategy: str) -> tuple[str, int]:
    """One of the norms, and packs or single elements, by turns: each case gets all of them."""
    turn = (list(cases).index(what) + list(STRATEGIES).index(strategy)) % 2
    return (("layer_norm", 120), ("rms_norm", 77))[turn]


def problem_of(
    direction: str, dtype: str, centered: bool = True, layout: Layout | None = None
) -> DispatchProblem:
    others = (
        {"y": dtype, "bias": dtype}
        if direction == "forward"
        else {"dy": dtype, "dx": dtype, "dweight": dtype, "dbias": dtype}
    )
    return DispatchProblem(
        direction, centered, 1, dtype, layout or Layout(16, contiguous=True), weight=dtype, **others
    )


def strategy_of(direction: str, dtype: str, num_cols: int, device: Device) -> str:
    problem = problem_of(direction, dtype, layout=Layout.of_new_arrays(num_cols))
    return dispatch.choose(replace(problem, num_cols=num_cols), device).strategy


def forward_problem(case: Case) -> DispatchProblem:
    return replace(
        problem_of(
            "forward", case.x, case.norm == "layer_norm", Layout.of_new_arrays(case.num_cols)
        ),
        num_cols=case.num_cols,
        residual=case.residual,
    )


def bits(values: np.ndarray) -> bytes:
    """The bytes of values; -0.0 counts as 0.0."""
    return (values + 0.0).tobytes()


def y_of(problem: Problem, results: dict[str, np.ndarray]) -> np.ndarray:
    """y from the saved mean and rstd, each operation rounded to the compute dtype."""
    case = problem.case
    compute = compute_dtype(case.sum).name
    given = (
        results.get("sum", problem.x),
        results.get("mean"),
        results["rstd"],
        problem.weight,
        problem.bias,
    )
    x, mean, rstd, weight, bias = (None if each is None else each.astype(compute) for each in given)
    y = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    if weight is not None:
        wide = problem.weight.astype(compute_dtype(case.dtype("weight")).name)
        y = y * ((1 + wide).astype(compute) if case.zero_centered_weight else weight)
    y = y if bias is None else y + bias
    return decode(encode(y.astype(np.float64), case.dtype("y")), case.dtype("y"))


def identical(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].tobytes() == right[name].tobytes() for name in left
    )


def only_row(problem: Problem, row: int) -> Problem:
    one = slice(row, row + 1)
    return replace(
        problem, case=replace(problem.case, num_rows=1), x=problem.x[one], dy=problem.dy[one]
    )


def assert_rows_are_the_same_alone(problem: Problem, where, rows) -> None:
    together = run_kernels(problem, where)
    for row in rows:
        alone = run_kernels(only_row(problem, row), where)
        for tensor in {"y", "mean", "rstd", "dx"} & set(together):
            assert alone[tensor][0].tobytes() == together[tensor][row].tobytes(), (
                f"{tensor} of row {row}"
            )


CALL_OPTIONS = {
    "welford": {"statistics": "welford"},
    "weight float32": {"weight": "float32", "bias": "float32"},
    "weight float64, 1 + weight": {
        "weight": "float64",
        "bias": "float64",
        "zero_centered_weight": True,
    },
    "y float32": {"y": "float32"},
    "no weight": {"weight": None},
    "no parameters": {"weight": None, "bias": None},
}


def gradients_of(
    problem: Problem, where, tile: Tile, wanted: tuple[str, ...], dsum: np.ndarray | None = None
) -> dict:
    """The wanted gradients of a problem, from statistics in float64; dsum is added to dx."""
    case, shape = problem.case, problem.x.shape
    centered, compute = case.norm == "layer_norm", compute_dtype(case.x).name
    norm = reference.layer_norm if centered else reference.rms_norm
    forward = norm(problem.x, problem.weight, problem.bias, case.eps)
    given = {"x": problem.x, "dy": problem.dy, "weight": problem.weight, "dsum": dsum}
    put = {
        name: where.put(encode(values, case.x))
        for name, values in given.items()
        if values is not None
    }
    saved = {"mean": forward.mean, "rstd": forward.rstd} if centered else {"rstd": forward.rstd}
    put_saved = {name: where.put(encode(values, compute)) for name, values in saved.items()}
    mean, rstd = (put_saved[name][1] if name in put_saved else 0 for name in ("mean", "rstd"))
    made = {name: where.empty(shape if name == "dx" else shape[1:], case.x) for name in wanted}
    rows = {
        name: Rows(pointer, *shape, shape[1], case.x) for name, (_, pointer) in (put | made).items()
    }
    for name in {"weight", "dweight", "dbias"} & set(rows):
        rows[name] = rows[name]._replace(num_rows=1)
    options = BackwardOptions(centered, shape[1:], launch=Launch(case.strategy, tile))
    call = backward_call(where.device, rows, options, compute)
    assert call.plan.tile == tile
    addresses = {name: each.pointer for name, each in rows.items()} | {"mean": mean, "rstd": rstd}
    kept = []
    if call.partials_shape:
        array, addresses["partials"] = where.empty(call.partials_shape, compute)
        kept.append(array)
    for launch, words in zip(call.launches, call.fill(addresses)):
        where.launch(launch, words)
    return {name: decode(where.get(made[name][0]), case.x) for name in wanted}


def assert_dsum_is_added(problem: Problem, where, tile: Tile) -> None:
    """dsum is added to dx before the one rounding. A GPU may fuse the addition."""
    dtype, names = problem.case.x, ("dx", "dweight", "dbias")
    dsum = decode(encode(np.random.default_rng(1).standard_normal(problem.x.shape), dtype), dtype)
    alone, found = (
        gradients_of(problem, where, tile, names),
        gradients_of(problem, where, tile, names, dsum),
    )
    off = np.abs(found["dx"] - (alone["dx"] + dsum))
    assert (
        off <= DTYPES[dtype].half_ulp * (2 * np.abs(alone["dx"]) + np.abs(alone["dx"] + dsum))
    ).all()
    assert (
        isinstance(where, GpuCheckMachine)
        or found["dweight"].tobytes() == alone["dweight"].tobytes()
    )
