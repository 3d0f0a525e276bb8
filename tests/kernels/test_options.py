"""Kernels with the options of a call: dtypes, parameters, statistics, backward that reads y."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import check, forward_problem, identical, norm_and_cols

from cupynorm.check.cases import NORMS, Case, random_problem
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.plan import dispatch
from cupynorm.plan.strategies import STATISTICS, STRATEGIES

MIXED = [
    (x, weight)
    for x, weights in (
        ("bfloat16", ("float32", "float64", "float16")),
        ("float16", ("float32", "float64", "bfloat16")),
        ("float32", ("bfloat16", "float16", "float64")),
        ("float64", ("bfloat16", "float32")),
    )
    for weight in weights
]


@pytest.mark.slow
@pytest.mark.parametrize("x, weight", MIXED)
def test_weight_of_another_dtype(x, weight, where):
    check(Case("layer_norm", 4, 96, x, weight=weight, bias=weight), where)


def test_weight_and_bias_of_two_dtypes(where):
    check(Case("layer_norm", 4, 96, "float16", weight="float32", bias="bfloat16"), where)
    check(Case("rms_norm", 4, 97, "bfloat16", weight="float64", bias="float16"), where)


@pytest.mark.parametrize("y", [None, "float64"])
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
def test_float64_parameters_of_narrow_rows_are_used_in_float32(x, y, where):
    """To the bit as if they had been rounded. A float64 y holds float32 values."""
    case = Case("layer_norm", 9, 200, x, y, weight="float64", bias="float64", strategy="warp")
    problem = random_problem(case)
    for name in ("weight", "bias"):
        assert (getattr(problem, name) != np.float32(getattr(problem, name))).any()
    rounded = replace(
        problem,
        weight=np.float64(np.float32(problem.weight)),
        bias=np.float64(np.float32(problem.bias)),
    )
    got, expected = (run_kernels(each, where) for each in (problem, rounded))
    assert identical(got, expected)
    assert (got["y"] == np.float32(got["y"])).all()
    wide = replace(problem, case=replace(case, x="float64", y="float64"))
    assert (run_kernels(wide, where)["y"] != got["y"]).all(axis=1).any()


@pytest.mark.slow
@pytest.mark.parametrize("y", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
def test_out_dtype(x, y, where):
    check(Case("layer_norm", 4, 72, x, y=y), where)


@pytest.mark.slow
@pytest.mark.parametrize("weight, bias", [("same", None), (None, "same"), (None, None)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_absent_parameters(name, strategy, weight, bias, where):
    check(Case(name, 4, 100, "bfloat16", weight=weight, bias=bias, strategy=strategy), where)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_centered_weight(strategy, dtype, where):
    case = Case("rms_norm", 4, 100, dtype, strategy=strategy, zero_centered_weight=True)
    results = check(case, where)
    # The option matters: the same numbers without it are another result.
    plain = run_kernels(
        replace(random_problem(case), case=replace(case, zero_centered_weight=False)), where
    )
    assert not np.array_equal(results["y"], plain["y"])


@pytest.mark.parametrize(
    "x, weight", [("bfloat16", "float64"), ("float64", "float32"), ("float64", "bfloat16")]
)
def test_zero_centered_weight_near_minus_one(x, weight, where):
    """1 + weight is computed in the wider of the two types, because its leading digits cancel."""
    case = Case("layer_norm", 4, 200, x, y="float32", weight=weight, zero_centered_weight=True)
    problem = random_problem(case)
    problem.weight = decode(encode(problem.weight * 2.0**-8 - 1, weight), weight)
    result = CheckResult(judge_all(problem, run_kernels(problem, where)))
    assert result.ok, f"\n{result}"


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(each, marks=pytest.mark.slow) if each == "cluster" else each
        for each in STRATEGIES
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_x_hat_is_rounded_first(dtype, strategy, where):
    """Exact bits: a product of two 16-bit numbers is exact in float32 and rounded once."""
    name, num_cols = norm_and_cols(["float16", "bfloat16"], dtype, strategy)
    case = Case(name, 4, num_cols, dtype, bias=None, strategy=strategy, round_x_hat=True)
    tile = dispatch.choose(forward_problem(case), where.device, strategy).tile
    if tile.bundle:  # a y of another size does not fit
        tile = replace(tile, blocks_per_sm=1, stages=0, bundle=0, path="registers")
    problem = random_problem(replace(case, tile=tile))
    rounded = check(problem.case, where)["y"]
    bare = replace(problem.case, y="float32", weight=None, round_x_hat=False)
    x_hat = run_kernels(replace(problem, case=bare, weight=None), where)["y"]
    expected = decode(encode(decode(encode(x_hat, dtype), dtype) * problem.weight, dtype), dtype)
    assert rounded.tobytes() == expected.tobytes()
    once = run_kernels(replace(problem, case=replace(problem.case, round_x_hat=False)), where)["y"]
    assert 0.1 < (rounded != once).mean() < 0.6


# 240 columns fit a warp in any dtype.
@pytest.mark.slow
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("at, dtype", [*enumerate(["bfloat16", "float32", "float64"])])
def test_statistics(at, dtype, strategy, statistics, where):
    # Single elements or packs by turns.
    turn = at + list(STRATEGIES).index(strategy) + list(STATISTICS).index(statistics)
    num_cols = (57, 240)[turn % 2]
    check(Case("layer_norm", 4, num_cols, dtype, strategy=strategy, statistics=statistics), where)
