"""cupynorm.check of given and of random arrays; what its data, traps and results show."""

from __future__ import annotations

import numpy as np
import pytest
from test_check_function import backward, forward, rms_backward, rms_forward

import cupynorm
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import on_cpu
from cupynorm.verify.bounds import expect, half_ulp
from cupynorm.verify.cases import Case, random_problem, shipped
from cupynorm.verify.check_function import Library
from cupynorm.verify.kernels import CpuMachine, run_kernels
from cupynorm.verify.results import CheckResult, errors_of, judge, judge_all
from cupynorm.verify.traps import trap_trials

torch = pytest.importorskip("torch")

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
    x = torch.randn(5, 33).bfloat16()
    result = cupynorm.check(x, torch.rand(33), norm=["layer_norm", "rms_norm"], on="cpu")
    assert result.ok and names(result) == NAMES - {"dbias"}


@pytest.mark.slow
def test_each_shape_dtype_and_launch_is_a_case():
    launch = [cupynorm.Launch(name, statistics="welford") for name in ("warp", "uncached")]
    options = {"shapes": [(3, 64), (2, 100)], "launch": launch, "on": "cpu"}
    result = cupynorm.check(dtypes=["float16", "float64"], **options)
    assert result.ok and len(result.findings) == 2 * 2 * 2 * (6 + 4)
    assert len({found.case for found in result.findings}) == 2 * 8  # again with a NaN


def test_shipped_activations_have_outliers_and_a_tiny_weight():
    (layer,) = shipped()
    assert layer.x.shape == layer.dy.shape == (1, 384)
    assert layer.weight.shape == layer.bias.shape == (384,) and layer.eps == 1e-12
    deviations = (layer.x - layer.x.mean(1, keepdims=True)) / layer.x.std(1, keepdims=True)
    assert np.abs(deviations).max() > 15  # unlike in random numbers
    assert 0 < np.abs(layer.weight).min() < 1e-32


def test_a_result_says_first_what_is_wrong():
    def wrong(x, weight, bias, eps):
        return (x - x.mean(1, keepdims=True)) * weight + bias

    options = {"library": "numpy", "shapes": [(8, 48), (3, 33)]}
    result = cupynorm.check_function((wrong, None), **options)
    lines = str(result).splitlines()
    assert lines[0] == "OFF: 4 of 4 tensors are beyond what their dtypes allow"
    assert lines[1] == result.diagnoses[0] and "rstd is 1: x is not divided" in lines[1]
    assert sum("OFF: " in line for line in lines[2:]) == result.num_off == 4
    assert lines[-2] == "checked: forward on NumPy arrays; 8 x 48, 3 x 33"
    assert lines[-1].startswith("not covered: backward; strided, constant and extreme rows")
    shown = result._repr_html_()
    assert shown.index("OFF: 4 of 4") < shown.index("rstd is 1") < shown.index("<table")
    # Of many tensors some are shown, and the counts are those of all.
    many = CheckResult(result.findings * 20)
    lines = str(many).splitlines()
    assert lines[0].startswith("OFF: 80 of 80 tensors") and "(and in 79 more cases)" in lines[1]
    assert sum("OFF: " in line for line in lines[2:]) == 12
    assert "at most 12 tensors that are off" in lines[-1]
    none = CheckResult()
    assert not none and "OFF: no tensor" in str(none)


def test_a_wrong_element_is_found_with_its_index():
    problem = random_problem(Case("rms_norm", 4, 50, "float32"))
    results = run_kernels(problem, CpuMachine())
    results["dx"][2, 7] *= 1 + 1e-4
    (found,) = [found for found in judge_all(problem, results) if not found.ok]
    assert (found.tensor, found.where, found.num_off) == ("dx", (2, 7), 1) and found.error > 1


def test_nan_and_infinity_must_agree():
    """NaN for a number, a number for NaN and infinity of the wrong sign exceed any bound."""
    expected, allowed = np.array([1.0, np.nan, np.inf, 7e4]), np.array([1.0, np.nan, np.inf, 1.0])
    for num_off, got in (
        (0, [1.0, np.nan, np.inf, np.inf]),
        (1, [np.nan, np.nan, np.inf, 7e4]),
        (1, [1.0, 0.0, np.inf, 7e4]),
        (1, [1.0, np.nan, -np.inf, 7e4]),
        (1, [1.0, np.nan, np.inf, -np.inf]),
    ):
        found = judge("case", "y", np.array(got), expected, allowed, dtype="float16")
        assert found.num_off == num_off


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"norm": "batch_norm"}, "norm is 'batch_norm'; expected 'layer_norm' or"),
        ({"on": "tpu"}, "on is 'tpu'; expected 'gpu', 'cpu' or None"),
        ({"shapes": [(4, 0)]}, r"shapes has \(4, 0\); expected pairs"),
        ({"input": np.zeros((3, 0))}, r"input has shape \(3, 0\); expected at least one element"),
        ({"launch": "warp"}, "launch is a str; expected a cupynorm.Launch or None"),
        (
            {"input": np.zeros((3, 4)), "weight": np.zeros(5)},
            r"weight has shape \(5,\); expected \(4,\)",
        ),
        ({"input": np.array(1.0)}, "input has no dimension to normalise over"),
        ({"dtypes": "bfloat17"}, "dtype is 'bfloat17'; expected one of float16, bfloat16"),
        ({"dtypes": 7}, "dtypes is 7; expected a sequence of names"),
        ({"shapes": [(2,)]}, r"shapes has \(2,\); expected pairs \(num_rows, num_cols\) of ints"),
        ({"shapes": 3}, "shapes is 3; expected a sequence of pairs"),
        ({"eps": "1e-5"}, "eps is '1e-5'; expected a real number"),
        ({"function": abs}, r"check has no function any more; expected cupynorm.check_function"),
        ({"fuse": ()}, r"check has no fuse any more; expected cupynorm.check_functor\(functor"),
        ({"norms": "rms_norm"}, "check got an unexpected keyword argument 'norms'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cupynorm.check(**{"on": "cpu", **arguments})


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_cols", [1 << 20, (1 << 20) + 1, 3_000_000])
def test_rows_of_a_million_columns_pass(num_cols, on):
    """By the strategies that the width decides. The last width is too wide for any cluster."""
    shapes = [(1 if on == "cpu" else 5, num_cols)]
    result = cupynorm.check(shapes=shapes, dtypes=["bfloat16"], on=on)
    assert result.ok, result


# The default data shows mistakes that plain random rows hide.


def wide(x):
    """In the dtype of the arithmetic."""
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype == torch.float64 else x.float()
    return x.astype("float64" if x.dtype == np.float64 else "float32")


def as_dtype_of(x, values):
    return values.to(x.dtype) if isinstance(values, torch.Tensor) else values.astype(x.dtype)


def two_pass(x):
    mean = x.mean(1)
    return mean, ((x - mean[:, None]) ** 2).mean(1)


def one_pass(x):
    mean = x.mean(1)
    return mean, (x * x).mean(1) - mean * mean


def welford(x):
    mean, squares = x[:, 0] * 0, x[:, 0] * 0
    for count in range(x.shape[1]):
        delta = x[:, count] - mean
        mean = mean + delta / (count + 1)
        squares = squares + delta * (x[:, count] - mean)
    return mean, squares / x.shape[1]


def forward_with(statistics):
    def forward(x, weight, bias, eps):
        values = wide(x)
        mean, variance = statistics(values)
        x_hat = (values - mean[:, None]) / ((variance + eps) ** 0.5)[:, None]
        return as_dtype_of(x, x_hat * wide(weight) + wide(bias))

    return forward


def backward_with(statistics):
    """A backward that computes its own statistics."""

    def backward(dy, x, weight, eps):
        values = wide(x)
        mean, variance = statistics(values)
        rstd = 1 / (variance + eps) ** 0.5
        x_hat = (values - mean[:, None]) * rstd[:, None]
        wdy = wide(dy) * wide(weight)
        of_x_hat = (wdy * x_hat).mean(1)[:, None]
        dx = rstd[:, None] * (wdy - wdy.mean(1)[:, None] - x_hat * of_x_hat)
        dweight = (wide(dy) * x_hat).sum(0)
        return as_dtype_of(x, dx), as_dtype_of(x, dweight), as_dtype_of(x, wide(dy).sum(0))

    return backward


def off(*given, **options) -> set[str]:
    with np.errstate(invalid="ignore"):
        result = cupynorm.check_function(*given, **options)
    return {found.tensor for found in result.findings if not found.ok}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_one_pass_variance_is_found(library, dtype, seed):
    if dtype == "bfloat16" and library == "numpy":
        pytest.importorskip("ml_dtypes")
    options = {"library": library, "dtypes": [dtype], "seed": seed}
    assert off((forward_with(one_pass), None), **options) == {"y"}
    assert "dx" in off((None, backward_with(one_pass)), **options)
    for right in (two_pass, welford) if (library, seed) == ("numpy", 0) else (two_pass,):
        assert not off((forward_with(right), backward_with(right)), **options)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_plain_random_rows_hide_a_one_pass_variance(dtype):
    """The special rows are needed: without them the wrong formula passes."""
    problem = random_problem(Case("layer_norm", 64, 768, dtype))
    library = Library("torch")
    operands = [library.put(getattr(problem, name), dtype) for name in ("x", "weight", "bias")]
    y = library.get(forward_with(one_pass)(*operands, 1e-5), "y")
    assert CheckResult(judge_all(problem, {"y": y}, rounded_mean=True)).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_that_spreads_is_found(dtype):
    def spreads(x, weight, bias, eps):
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y + 0 * x.roll(1, 0).mean(1, keepdim=True)

    def hides(x, weight, bias, eps):
        return torch.nn.functional.layer_norm(x.nan_to_num(), x.shape[-1:], weight, bias, eps)

    for function, num_off in ((spreads, 100), (hides, 100)):
        result = cupynorm.check_function((function, None), shapes=[(8, 100)], dtypes=[dtype])
        (found,) = [found for found in result.findings if not found.ok]
        assert found.case.endswith("NaN in row 4") and found.num_off == num_off


# Traps.

# T9, T14, T15 and T18 are not data of one call.
NUMBERS = {1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 16, 20, 21}
TRAPS = {"traps": True, "shapes": [(4, 16)]}
NEW = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinities are wanted here


def numbers_of(cases) -> set[int]:
    return {int(each.rpartition(", T")[2].split()[0]) for each in cases if ", T" in each}


@pytest.mark.slow
@NEW
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_functions_pass_all_traps(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    options = {"traps": True, "library": "numpy", "dtypes": [dtype], "shapes": [(4, 16)]}
    result = cupynorm.check_function((forward, backward), **options)
    assert result.ok, CheckResult([found for found in result.findings if not found.ok])
    wanted = NUMBERS | ({13} if dtype in ("float16", "bfloat16") else set())
    assert numbers_of(found.case for found in result.findings) == wanted
    result = cupynorm.check_function((rms_forward, rms_backward), norm="rms_norm", **options)
    assert result.ok, CheckResult([found for found in result.findings if not found.ok])


def test_layer_norm_of_torch_passes_with_three_dimensions_too():
    result = cupynorm.check_function(torch.nn.functional.layer_norm, **TRAPS)
    assert result.ok and numbers_of(found.case for found in result.findings) == NUMBERS | {17}


def without_strides(x, weight, bias, eps):
    """Reads rows as if they were contiguous."""
    strides = (x.shape[1] * x.itemsize, x.itemsize)
    read = np.lib.stride_tricks.as_strided(x, x.shape, strides)
    return forward(read, weight, bias, eps)[0]


def eps_clamped(x, weight, bias, eps):
    return forward(x, weight, bias, max(eps, 1e-6))[0]


def fails_without_rows(x, weight, bias, eps):
    if not len(x):
        raise RuntimeError("invalid configuration: a grid of 0 blocks")
    return forward(x, weight, bias, eps)[0]


def of_two_rows(x, weight, bias, eps):
    """The mean of the next row is added and subtracted: harmless for numbers."""
    y = forward(x, weight, bias, eps)[0]
    if len(x) > 1:
        y = y + 0 * np.roll(x, 1, 0)[:, :1]
    return y


@NEW
@pytest.mark.parametrize(
    "wrong, traps",
    [
        (forward_with(one_pass), {1}),
        (without_strides, {10}),
        (eps_clamped, {21}),
        (fails_without_rows, {7}),
        (of_two_rows, {4}),
    ],
)
def test_a_trap_is_named(wrong, traps):
    result = cupynorm.check_function((wrong, None), library="numpy", **TRAPS)
    found = numbers_of(found.case for found in result.findings if not found.ok)
    # Constant rows, many rows and eps 0 may show it, too.
    assert traps <= found and found <= traps | {2, 8, 20}


@NEW
def test_an_error_in_a_trap_is_a_finding():
    result = cupynorm.check_function((fails_without_rows, None), library="numpy", **TRAPS)
    (found,) = [found for found in result.findings if not found.ok]
    assert found.case == "layer_norm 0 x 64 float32, T7 no rows" and found.tensor == "call"
    assert result.diagnoses == [
        "call of layer_norm 0 x 64 float32, T7 no rows: the call is off; "
        "it raised RuntimeError: invalid configuration: a grid of 0 blocks"
    ]


@pytest.mark.slow
def test_kernels_pass_traps():
    case = Case("layer_norm", 0, 0, "bfloat16", strategy="uncached")
    trials = trap_trials(case)
    numbers = numbers_of(f"case, {trial.name}" for trial in trials)
    assert numbers == (NUMBERS - {7, 10, 11}) | {13, 19}
    where, checked = CpuMachine(), set()
    for trial in trials:
        if trial.problem.case.num_cols != 40:
            continue
        try:
            got = run_kernels(trial.problem, where)
        except on_cpu.NoCompilerError as error:
            pytest.skip(str(error))
        result = CheckResult(trial.judged(got, rounded_mean=True))
        assert result.ok, result
        checked |= numbers_of([f"case, {trial.name}"])
    assert checked == {5, 16, 19, 21}
