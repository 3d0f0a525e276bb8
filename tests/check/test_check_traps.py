"""check(traps=True): data and layouts on which other norms failed, each named in the result."""

from __future__ import annotations

import numpy as np
import pytest
from test_callables import backward, forward, rms_backward, rms_forward

import cupynorm
from cupynorm.check import kernels
from cupynorm.check.cases import Case
from cupynorm.check.results import CheckResult
from cupynorm.check.run import run_kernels
from cupynorm.check.traps import trap_trials
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import on_cpu

# T9, T14, T15 and T18 are not data of one call.
NUMBERS = {1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 16, 20, 21}
NEW = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinities are wanted here


def numbers_of(cases) -> set[int]:
    return {int(each.rpartition(", T")[2].split()[0]) for each in cases if ", T" in each}


def off_of(**given) -> set[int]:
    result = cupynorm.check(traps=True, shapes=[(4, 16)], **given)
    return numbers_of(found.case for found in result.findings if not found.ok)


@NEW
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_functions_pass_all_traps(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    options = {"traps": True, "library": "numpy", "dtypes": [dtype], "shapes": [(4, 16)]}
    result = cupynorm.check(forward=forward, backward=backward, **options)
    assert result.ok, CheckResult([found for found in result.findings if not found.ok])
    wanted = NUMBERS | ({13} if dtype in ("float16", "bfloat16") else set())
    assert numbers_of(found.case for found in result.findings) == wanted
    result = cupynorm.check(forward=rms_forward, backward=rms_backward, norm="rms_norm", **options)
    assert result.ok, CheckResult([found for found in result.findings if not found.ok])


def test_layer_norm_of_torch_passes_with_three_dimensions_too():
    torch = pytest.importorskip("torch")
    result = cupynorm.check(function=torch.nn.functional.layer_norm, traps=True, shapes=[(4, 16)])
    assert result.ok and numbers_of(found.case for found in result.findings) == NUMBERS | {17}


def one_pass(x, weight, bias, eps):
    mean = x.mean(1, keepdims=True)
    variance = (x * x).mean(1, keepdims=True) - mean * mean
    return (x - mean) / np.sqrt(variance + x.dtype.type(eps)) * weight + bias


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
        (one_pass, {1}),
        (without_strides, {10}),
        (eps_clamped, {21}),
        (fails_without_rows, {7}),
        (of_two_rows, {4}),
    ],
)
def test_a_trap_is_named(wrong, traps):
    found = off_of(forward=wrong, library="numpy")
    # Constant rows, many rows and eps 0 may show it, too.
    assert traps <= found and found <= traps | {2, 8, 20}


@NEW
def test_an_error_in_a_trap_is_a_finding():
    result = cupynorm.check(
        forward=fails_without_rows, traps=True, library="numpy", shapes=[(4, 16)]
    )
    (found,) = [found for found in result.findings if not found.ok]
    assert found.case == "layer_norm 0 x 64 float32, T7 no rows" and found.tensor == "call"
    assert result.diagnoses == [
        "call of layer_norm 0 x 64 float32, T7 no rows: the call is off; "
        "it raised RuntimeError: invalid configuration: a grid of 0 blocks"
    ]


def test_traps_and_given_arrays_do_not_go_together():
    with pytest.raises(ValueError, match="traps is given together with input"):
        cupynorm.check(np.ones((2, 4), np.float32), traps=True, on="cpu")


@pytest.mark.slow
def test_kernels_pass_traps_of_layouts_and_options():
    case = Case("layer_norm", 0, 0, "bfloat16", strategy="uncached")
    trials = trap_trials(case)
    assert numbers_of(f"case, {trial.name}" for trial in trials) == (NUMBERS - {7}) | {13, 19}
    where, checked = kernels.machine("cpu"), set()
    for trial in trials:
        if trial.problem.case.num_cols != 40:
            continue
        try:
            got = run_kernels(trial.problem, where, trial.layouts or None)
        except on_cpu.NoCompilerError as error:
            pytest.skip(str(error))
        result = CheckResult(trial.judged(got, rounded_mean=True))
        assert result.ok, result
        checked |= numbers_of([f"case, {trial.name}"])
    assert checked == {5, 10, 16, 19, 21}
