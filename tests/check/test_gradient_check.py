"""cupynorm.check of given arrays, of random arrays and of functions, right and wrong ones."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm.check.bounds import expect, half_ulp
from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.results import CheckResult, errors_of, judge, judge_all
from cupynorm.check.run import run_kernels

NAMES = {"y", "mean", "rstd", "dx", "dweight", "dbias"}


def names(result: CheckResult) -> set[str]:
    return {found.tensor for found in result.findings}


def test_given_numpy_arrays_pass():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 3, 40)).astype(np.float32)
    result = cupynorm.check(
        x, np.ones(40, np.float32), np.zeros(40, np.float32), x, eps=1e-6, on="cpu"
    )
    assert result and result.ok and names(result) == NAMES
    assert "6 x 40" in str(result) and "all within what their dtypes allow" in str(result)


def test_given_torch_tensors_in_bfloat16_pass():
    torch = pytest.importorskip("torch")
    x = torch.randn(5, 33).bfloat16()
    result = cupynorm.check(x, torch.rand(33), norm=["layer_norm", "rms_norm"], on="cpu")
    assert result.ok and names(result) == NAMES - {"dbias"}


@pytest.mark.slow
def test_each_shape_dtype_and_strategy_is_a_case():
    result = cupynorm.check(
        shapes=[(3, 64), (2, 100)],
        dtypes=["float16", "float64"],
        strategies=["warp", "uncached"],
        statistics=["welford"],
        on="cpu",
    )
    assert result.ok and len(result.findings) == 2 * 2 * 2 * (6 + 4)
    assert len({found.case for found in result.findings}) == 2 * 8  # again with a NaN


def layer_norm_of_torch(input, normalized_shape, weight, bias, eps):
    import torch

    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)


def test_a_given_function_is_judged():
    pytest.importorskip("torch")
    result = cupynorm.check(
        function=layer_norm_of_torch, shapes=[(64, 300)], dtypes=["float32", "float64"]
    )
    assert result.ok and names(result) == {"y", "dx", "dweight", "dbias"}


@pytest.mark.parametrize(
    "wrong, off",
    [
        (
            lambda x, shape, w, b, eps: layer_norm_of_torch(x, shape, w, b, eps + 1e-3),
            {"y", "dx", "dweight"},
        ),
        (lambda x, shape, w, b, eps: layer_norm_of_torch(x, shape, w, b, eps) + 1e-5, {"y"}),
        (
            lambda x, shape, w, b, eps: layer_norm_of_torch(x, shape, w.detach(), b, eps) + 0 * w,
            {"dweight"},
        ),
        (
            lambda x, shape, w, b, eps: layer_norm_of_torch(x.detach(), shape, w, b, eps) + 0 * x,
            {"dx"},
        ),
    ],
    ids=["eps", "bias", "no dweight", "no dx"],
)
def test_a_wrong_function_is_found(wrong, off):
    pytest.importorskip("torch")
    result = cupynorm.check(function=wrong, shapes=[(64, 300)])
    assert not result and {found.tensor for found in result.findings if not found.ok} == off
    assert "OFF" in str(result)


def test_a_wrong_element_is_found_with_its_index():
    problem = random_problem(Case("rms_norm", 4, 50, "float32"))
    results = run_kernels(problem, CpuMachine())
    results["dx"][2, 7] *= 1 + 1e-4
    (found,) = [found for found in judge_all(problem, results) if not found.ok]
    assert (found.tensor, found.where, found.num_off) == ("dx", (2, 7), 1) and found.error > 1


def test_nan_and_infinity_must_agree():
    """NaN for a number, a number for NaN and infinity of the wrong sign exceed any bound."""
    expected, allowed = np.array([1.0, np.nan, np.inf, 7e4]), np.array([1.0, np.nan, np.inf, 1.0])
    assert judge(
        "case", "y", np.array([1.0, np.nan, np.inf, np.inf]), expected, allowed, dtype="float16"
    ).ok
    for got in (
        [np.nan, np.nan, np.inf, 7e4],
        [1.0, 0.0, np.inf, 7e4],
        [1.0, np.nan, -np.inf, 7e4],
        [1.0, np.nan, np.inf, -np.inf],
    ):
        assert judge("case", "y", np.array(got), expected, allowed, dtype="float16").num_off == 1


def test_infinity_is_right_from_where_numbers_round_to_it():
    """float16: 65504 is the largest number, 65520 the first value that rounds to infinity."""
    expected, errors = np.array([65490.0, 65504.0, 65519.0, 65521.0, 65519.0]), np.zeros(5)
    errors[-1] = 2.0  # of the arithmetic
    allowed = half_ulp(expected, "float16") + errors
    for infinity in (np.inf, -np.inf):
        found = errors_of(np.full(5, infinity), np.sign(infinity) * expected, allowed, "float16")
        assert found[1].tolist() == [True, True, True, False, False]
        assert errors_of(np.full(5, infinity), np.sign(infinity) * expected, allowed)[1].all()


def test_the_gradients_of_float64_rows_with_a_large_mean_are_exact():
    """The mean, 2^27 + 1.5 * 2^-25, lies between two float64 numbers. x_hat is -1 and 1."""
    case = Case("layer_norm", 1, 2, "float64", eps=0.0)
    problem = random_problem(case)
    problem.x = 2.0**27 + np.array([[0.0, 3 * 2.0**-25]])
    (dweight, _), (dx, _) = (expect(problem)[name] for name in ("dweight", "dx"))
    np.testing.assert_array_equal(dweight, problem.dy[0] * [-1, 1])
    # Two elements have no freedom left: dx is 0, but for the rounding of three numbers.
    rstd = 2.0**25 / 1.5
    assert np.abs(dx).max() < rstd * np.abs(problem.dy * problem.weight).max() * 2.0**-51


def test_the_bound_of_a_narrow_y_is_hardly_more_than_half_an_ulp():
    """float16 y of a float32 computation errs by one rounding and little more."""
    problem = random_problem(Case("layer_norm", 8, 64, "float32", y="float16"))
    y, allowed = expect(problem)["y"]
    large = np.abs(y) > 0.1
    assert (allowed[large] < np.abs(y[large]) * 2.0**-11 * 1.2).all() and (
        allowed >= np.abs(y) * 2.0**-11
    ).all()


def test_an_empty_result_is_false():
    assert not CheckResult()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"norm": "batch_norm"}, "norm is 'batch_norm'; expected layer_norm or rms_norm"),
        ({"on": "tpu"}, "on is 'tpu'; expected 'gpu', 'cpu' or None"),
        ({"shapes": [(4, 0)]}, r"shapes has \(4, 0\); expected pairs"),
        ({"shapes": [(-4, 8)]}, r"shapes has \(-4, 8\); expected pairs"),
        ({"shapes": [(True, 8)]}, r"shapes has \(True, 8\); expected pairs"),
        ({"input": np.zeros((3, 0))}, r"input has shape \(3, 0\); expected at least one column"),
        ({"strategies": ["wrap"]}, "strategy is 'wrap'; expected one of"),
        (
            {"input": np.zeros((3, 4)), "weight": np.zeros(5)},
            r"weight has shape \(5,\); expected \(4,\)",
        ),
        ({"input": np.array(1.0)}, "input has no dimension to normalise over"),
        ({"dtypes": "bfloat17"}, "dtype is 'bfloat17'; expected one of float16, bfloat16"),
        ({"dtypes": ["int8"]}, "dtype is 'int8'; expected one of"),
        ({"dtypes": 7}, "dtypes is 7; expected a sequence of names"),
        ({"strategies": 3}, "strategies is 3; expected a sequence of names"),
        ({"shapes": [(2,)]}, r"shapes has \(2,\); expected pairs \(num_rows, num_cols\) of ints"),
        ({"shapes": [(2, 8.0)]}, r"shapes has \(2, 8.0\); expected pairs"),
        ({"shapes": 3}, "shapes is 3; expected a sequence of pairs"),
        ({"eps": "1e-5"}, "eps is '1e-5'; expected a real number"),
        ({"seed": "a"}, "seed is 'a'; expected an int of 0 or more"),
        ({"seed": -1}, "seed is -1; expected an int of 0 or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cupynorm.check(**{"on": "cpu", **arguments})


def test_one_name_is_enough():
    norm = {"function": lambda input: input, "library": "numpy", "shapes": [(2, 8)]}
    found = cupynorm.check(dtypes="float64", **norm).findings
    assert {each.case for each in found} == {
        "layer_norm 2 x 8 float64",
        "layer_norm 2 x 8 float64, NaN in row 1",
    }


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_cols", [1 << 20, (1 << 20) + 1, 3_000_000])
def test_rows_of_a_million_columns_pass(num_cols, on):
    """By the strategies that the width decides. The last width is too wide for any cluster."""
    result = cupynorm.check(
        shapes=[(1 if on == "cpu" else 5, num_cols)], dtypes=["bfloat16"], on=on
    )
    assert result.ok, result
