"""Every path, option and layout of operands: values against float64, bits, and no stray writes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import kernel_paths
import numpy as np
import pytest
from guarded_tensors import LAYOUTS, GuardedTensors
from kernel_checks import (
    as_dtype,
    assert_alone,
    assert_identical,
    assert_right,
    bits,
    run,
    y_of,
)
from kernel_paths import OPTIONS, PATHS, SMALL, Call
from laid_out import as_numpy, lay_out
from quantized_calls import How, judge_bytes, judge_values, run_quantized

import cupynorm
from cupynorm import Launch
from cupynorm.dispatch.problem import SCALINGS
from cupynorm.dispatch.strategies import STRATEGIES
from cupynorm.dtypes import compute_dtype
from cupynorm.verify.cases import Case, random_problem
from cupynorm.verify.kernels import CpuMachine, uses_welford
from cupynorm.verify.results import CheckResult

CALLS = [
    pytest.param(call, marks=[] if is_quick else pytest.mark.slow, id=str(call))
    for call, is_quick in kernel_paths.calls()
]


def problem_of(call: Call, where):
    case, backward = kernel_paths.case_of(call, where)
    problem = random_problem(case)
    for name, layout in call.layouts.items():
        values = getattr(problem, name, None)
        if layout == "broadcast" and values is not None:
            values[...] = values[:1]
    return problem, backward


@pytest.mark.parametrize("call", CALLS)
def test_call(call, small):
    tile = PATHS[call.path].tile
    if tile and small.device.compute_capability < 90 and (tile.stages or tile.cluster_size > 1):
        pytest.skip(f"{small.device.name} has no clusters and no copy engine")
    problem, backward = problem_of(call, small)
    results = run(problem, small, backward, call.layouts)
    assert_right(problem, results, small)
    if not call.layouts:
        assert_alone(problem, results, small, backward)
    if isinstance(small, CpuMachine):
        for seed in (1, 2) if call.layouts else (1, 2, 3):  # the order in which threads run
            again = run(problem, CpuMachine(SMALL, seed), backward, call.layouts)
            assert_identical(again, results)
    of_option = RELATIONS.get(call.option)
    if of_option:
        of_option(problem, results, small, call)


def _of_the_sum_alone(problem, results, where, call):
    """y is that of a call on the sum."""
    case = replace(problem.case, residual=False)
    alone = replace(problem, case=case, x=results["sum"], residual=None)
    if case.tile is not None or not call.layouts:
        assert_identical(run(alone, where), results, {"y", "mean", "rstd"})
    added = problem.x + problem.residual
    assert (results["sum"] == as_dtype(added, case.x)).all()


def _recomputed_from_what_was_saved(problem, results, where, call):
    """Backward uses the saved mean and rstd. A GPU's compiler fuses other operations."""
    if isinstance(where, CpuMachine):
        assert bits(results["recomputed"]) == bits(y_of(problem, results))


def _rounded_twice(problem, results, where, call):
    """The y of a weight of ones is x_hat, rounded once. Times weight it is rounded again.

    The calls have the same tiles: equal layouts too, by which dispatch chooses.
    """
    case, dtype = problem.case, problem.case.x
    plain = replace(problem, case=replace(case, round_x_hat=False))
    of_ones = replace(plain, weight=np.ones_like(problem.weight))
    x_hat, once = (run(each, where, layouts=call.layouts)["y"] for each in (of_ones, plain))
    compute = compute_dtype(dtype).name
    y = x_hat.astype(compute) * problem.weight.astype(compute)
    assert bits(results["y"]) == bits(as_dtype(y, dtype))
    if dtype not in ("float32", "float64"):
        assert case.num_cols < 16 or 0.1 < (results["y"] != once).mean() < 0.6


RELATIONS = {
    "residual": _of_the_sum_alone,
    "recomputed": _recomputed_from_what_was_saved,
    "recomputed, 1 + weight": _recomputed_from_what_was_saved,
    "recomputed sum": _recomputed_from_what_was_saved,
    "rounded x_hat": _rounded_twice,
}


def test_the_calls_have_each_kind_of_path_with_each_option_and_layout():
    calls = [call for call, _ in kernel_paths.calls()]
    kinds = {path.kind for path in PATHS.values()}
    assert {(PATHS[call.path].kind, call.option) for call in calls} == {
        (kind, option) for kind in kinds for option in OPTIONS
    }
    found = {
        (PATHS[call.path].kind.split()[0], operand, layout)
        for call in calls
        for operand, layout in call.layouts.items()
    }
    assert len(found) > 80
    quick = [call for call, is_quick in kernel_paths.calls() if is_quick]
    assert {call.option for call in quick} == set(OPTIONS)


# Calls of users: NumPy arrays that stand in for CuPy's, or CuPy's own.

CORE = [name for name, path in PATHS.items() if path.is_core]


def of_numpy(path: kernel_paths.RowPath) -> tuple[str, Launch]:
    """A dtype that NumPy has, and how the path is launched forward."""
    dtype = "float16" if path.dtype == "bfloat16" else path.dtype
    tile = None if "backward" in path.kind else path.tile
    return dtype, Launch(path.strategy, tile)


@pytest.mark.parametrize("name", CORE)
def test_a_call_in_place_has_the_bits_of_one_that_is_not(name, library):
    """out is the input, the sum is the residual; each alone, and both."""
    path = PATHS[name]
    dtype, launch = of_numpy(path)
    generator = np.random.default_rng(path.num_cols)
    rows = generator.standard_normal((2, 70 if path.num_cols < 1000 else 20, path.num_cols)).astype(
        dtype
    )
    weight, bias = map(library.asarray, generator.standard_normal((2, path.num_cols)).astype(dtype))
    can_move = launch.tile is None or launch.tile.pack_size == 1
    can_have_gaps = launch.tile is None or not launch.tile.bundle
    for at, layout in enumerate(
        ("contiguous", *["gap"] * can_have_gaps, *["misaligned", "reversed"] * can_move)
    ):
        if layout == "reversed" and not can_have_gaps:
            continue
        for added in ("nothing", "both", "the sum", "y")[at % 2 :: 1 + (at > 0)]:
            x, residual, right, right_sum = (
                lay_out(library, each, layout) for each in (*rows, *rows * np.nan)
            )
            given, own, outs = {"weight": weight, "bias": bias}, right, x
            if added != "nothing":
                given |= {"residual": residual, "return_residual": True}
                own = right, right_sum
                outs = {"both": (x, residual), "the sum": (None, residual), "y": x}[added]
            given["launch"] = launch
            cupynorm.layer_norm(x, path.num_cols, **given, out=own)
            made = cupynorm.layer_norm(x, path.num_cols, **given, out=outs)
            y, total = made if added != "nothing" else (made, None)
            assert (y is x) == (added != "the sum")
            assert total is None or (total is residual) == (added != "y")
            np.testing.assert_array_equal(as_numpy(y), as_numpy(right))
            assert as_numpy(right).astype("float32").std() > 0.5
            if total is not None:
                np.testing.assert_array_equal(as_numpy(total), as_numpy(right_sum))
                assert np.isfinite(as_numpy(total).astype("float32")).all()
            if added == "y":
                np.testing.assert_array_equal(as_numpy(residual), rows[1])


@pytest.mark.parametrize("num_cols", [200, 201])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_float32_stream_is_updated_in_place(strategy, num_cols, library):
    """The sum has the residual's dtype."""
    generator, launch = np.random.default_rng(num_cols), Launch(strategy)
    x, residual = (
        library.asarray(generator.standard_normal((70, num_cols)).astype(dtype))
        for dtype in ("float16", "float32")
    )
    options = {"residual": residual, "return_residual": True, "launch": launch}
    right = cupynorm.rms_norm(x, num_cols, **options)
    made = cupynorm.rms_norm(x, num_cols, **options, out=(x, residual))
    assert made[0] is x and made[1] is residual
    for one, other in zip(made, right):
        np.testing.assert_array_equal(as_numpy(one), as_numpy(other))


SUBSETS = [("dx",), ("dweight",), ("dx", "dweight"), ("dbias",), ("dx", "dbias")]
SUBSETS += [("dweight", "dbias")]


@pytest.mark.parametrize(
    "at, name",
    [
        pytest.param(at, name, marks=[] if path.is_core else pytest.mark.slow, id=name)
        for at, (name, path) in enumerate(PATHS.items())
        if path.tile is not None and path.kind != "block smem"
    ],
)
def test_gradients_that_are_asked_for(at, name, library):
    """With the bits that they have beside the others. dsum is added before the one rounding.

    Bundles are for all gradients.
    """
    path = PATHS[name]
    dtype, _ = of_numpy(path)
    generator = np.random.default_rng(path.num_cols)
    x, dy, dsum = map(
        library.asarray, generator.standard_normal((3, 40, path.num_cols)).astype(dtype)
    )
    weight = library.asarray(generator.standard_normal(path.num_cols).astype(dtype))
    saved = cupynorm.layer_norm_forward(x, path.num_cols, weight)
    given = dy, x, path.num_cols, saved.mean, saved.rstd, weight

    def gradients(*names: str, **options) -> dict[str, np.ndarray]:
        launch = Launch(path.strategy, path.tile)
        made = cupynorm.layer_norm_backward(*given, gradients=names, launch=launch, **options)
        return {k: as_numpy(v) for k, v in made._asdict().items() if v is not None}

    everything = gradients("dx", "dweight", "dbias")
    for names in [] if path.tile.bundle else (SUBSETS[at % 6], SUBSETS[(at + 2) % 6]):
        found = gradients(*names)
        assert set(found) == set(names)
        for each in names:
            if library is np:
                assert found[each].tobytes() == everything[each].tobytes(), (names, each)
            else:  # with fewer gradients a GPU's compiler fuses other operations
                np.testing.assert_allclose(found[each], everything[each], rtol=2e-3, atol=2e-3)
    with_dsum = gradients("dx", dsum=dsum)["dx"].astype(np.float64)
    alone, added = everything["dx"].astype(np.float64), as_numpy(dsum).astype(np.float64)
    half = np.finfo(dtype).eps / 2
    off = np.abs(with_dsum - alone - added)
    assert (off <= half * (2 * np.abs(alone) + 1.01 * np.abs(alone + added)) + 1e-7).all()


# y in 8 bits.


@pytest.mark.parametrize("at, strategy", [*enumerate(STRATEGIES)])
@pytest.mark.parametrize("of_scaling, scaling", [*enumerate(SCALINGS)])
def test_8_bits(of_scaling, scaling, at, strategy, where):
    """The bytes that the reference makes of y in float32, and no stray writes."""
    turn = at + of_scaling
    num_cols, x = ((560, "bfloat16"), (255, "float32"), (504, "float16"))[turn % 3]
    residual = (False, True, "float32")[(turn // 2) % 3]
    case = Case("layer_norm", 9, num_cols, x, strategy=strategy, residual=residual)
    how = How(("float8_e4m3fn", "float8_e5m2", "int8")[turn % 3], scaling, scaling == "given")
    problem = random_problem(case)
    layouts = {"x": LAYOUTS[1 + turn % 4], "residual": LAYOUTS[1 + (turn + 1) % 4]}
    for name, layout in layouts.items():
        values = getattr(problem, name)
        if layout == "broadcast" and values is not None:
            values[...] = values[:1]
    got, plain = run_quantized(problem, how, where, partial(GuardedTensors, layouts=layouts))
    judged = judge_values(problem, how, got, rounded_mean=uses_welford(case, where.device))
    assert CheckResult(judged).ok, CheckResult(judged)
    if isinstance(where, CpuMachine):
        exact = judge_bytes(case, how, got, plain)
        assert len(exact) >= 4 and CheckResult(exact).ok, CheckResult(exact)
