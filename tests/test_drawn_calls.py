"""Calls that hypothesis draws, held to float64 (drawn_calls.py), and what finds their faults.

On the CPU a few calls of narrow rows, which are always the same. On a GPU
`pytest -m gpu tests/test_drawn_calls.py -n 14` draws new ones each time, of 5 families in each of
14 parts; with `--hypothesis-profile long` of 50.
"""

from __future__ import annotations

from dataclasses import replace

import drawn_calls
import numpy as np
import pytest
from drawn_calls import Call, Family, check_call, drawn
from hypothesis import HealthCheck, given, settings
from quantized_calls import How

QUICK = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(  # --hypothesis-profile long draws ten times as many
    max_examples=50 if settings.get_current_profile_name() == "long" else 5,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@QUICK
@given(calls=drawn(most_cols=96, most_elements=2**12, most_calls=8))
def test_drawn_calls_on_the_cpu(kernels, calls):
    for call in calls:
        check_call(call, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(14))
@LONG
@given(calls=drawn(most_cols=2**14, most_elements=2**14, most_calls=128))
def test_drawn_calls_on_a_gpu(part, calls):
    for call in calls:
        check_call(call, "cuda")


PLAIN = Call(Family(num_cols=33, by="explicit"), num_rows=5, seed=7)
CALLS = {
    "explicit": PLAIN,
    "a residual of its own dtype": Call(
        Family("rms_norm", 40, "bfloat16", residual="float32", bias=None), 4, dsum=True
    ),
    "in place": Call(Family(num_cols=33, x="float16", residual="float16", by="in place"), 4),
    "layouts": replace(PLAIN, layouts=("gap", "gap", "broadcast", "gap", "misaligned")),
    "negated": replace(PLAIN, layouts=("negated", "negated", "negated", "negated", "gap"), seed=8),
    "8 bits": Call(Family(num_cols=64, y=How("float8_e4m3fn", "row"), by="explicit"), 4),
    "a functor": Call(Family(num_cols=16, fuse="silu_gate"), 3),
    "a functor, rows alone": Call(Family(num_cols=16, fuse="silu_gate", by="autograd"), 3, seed=7),
    "a sum over rows in 16 bits": Call(
        Family(num_cols=4, x="bfloat16", fuse="layer_scale", by="autograd"), 2
    ),
    "a NaN": replace(PLAIN, values="a NaN"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_each_kind_is_right(kernels, name):
    assert check_call(CALLS[name], "cpu") and kernels


def test_a_strategy_that_does_not_fit_is_refused(kernels):
    assert not check_call(Call(Family(num_cols=2**17, strategy="warp")), "cpu")


@pytest.mark.parametrize("name", ["explicit", "8 bits"])
@pytest.mark.parametrize(
    ("time", "message"),
    [
        (0, "Finding"),
        (1, "differs when the call is repeated"),
        (2, "of rstd differs alone"),
    ],
)
def test_a_wrong_result_is_found(kernels, monkeypatch, time, message, name):
    """time: of the call, the same again, and a row alone."""
    make, made = drawn_calls.make, []

    def spoilt(*arguments):
        results = make(*arguments)
        if len(made) == time:
            results["rstd"] = results["rstd"] * (1 + 2.0**-16)
        made.append(results)
        return results

    monkeypatch.setattr(drawn_calls, "make", spoilt)
    with pytest.raises(AssertionError, match=message):
        check_call(CALLS[name], "cpu")


@pytest.mark.parametrize(("name", "at"), [("x", 5), ("x", 200), ("out", -3)])
def test_a_write_outside_the_outputs_is_found(kernels, monkeypatch, name, at):
    """Before the first row, to a row of an input, and behind the last row of an output."""
    plain = drawn_calls.Placed.assert_untouched

    def written(self, label, **options):
        if label == name:
            self.memory[at] = 1.0
        plain(self, label, **options)

    monkeypatch.setattr(drawn_calls.Placed, "assert_untouched", written)
    with pytest.raises(AssertionError, match=f"bytes around {name} were written to"):
        check_call(PLAIN, "cpu")


def test_an_absent_output_is_found(kernels, monkeypatch):
    make = drawn_calls.make

    def without_dx(*arguments):
        return {name: each for name, each in make(*arguments).items() if name != "dx"}

    monkeypatch.setattr(drawn_calls, "make", without_dx)
    with pytest.raises(AssertionError, match="dx"):
        check_call(PLAIN, "cpu")


def test_a_zero_of_the_other_sign_differs():
    zero = np.array([0.0, np.nan])
    assert drawn_calls.has_same_bits(zero, np.array([0.0, -np.nan]))
    assert not drawn_calls.has_same_bits(zero, np.array([-0.0, np.nan]))
