"""python -m cupynorm check: --norm, --eps and --traps; and the default shapes of functions."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm import __main__ as command
from cupynorm.verify import kernels
from cupynorm.verify.command import entries_of


def forward(x, weight, bias, eps):
    x_hat = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
    return (x_hat * weight + bias).astype(x.dtype)


def wrong_last_columns(x, weight, bias, eps):
    y = forward(x, weight, bias, eps)
    y[:, x.shape[1] // 4 * 4 :] = 0
    return y


def too_wide(x, weight, bias, eps):
    y = forward(x, weight, bias, eps)
    y[:, 8192:] = 0
    return y


def wrong_tail(dy, x, mean, rstd, weight):
    dx = cupynorm.layer_norm_backward(dy, x, x.shape[1], mean, rstd, weight).dx
    whole = len(dx) // 4 * 4
    dx[whole:] = dx[whole - 1]
    return dx


@pytest.mark.parametrize(
    "pair, case",
    [
        ((None, wrong_tail), "61 x 769"),
        ((wrong_last_columns, None), "61 x 769"),
        ((too_wide, None), "7 x 8195"),
    ],
)
def test_tails_of_rows_and_columns_show_by_default(pair, case):
    result = cupynorm.check_function(pair, library="numpy")
    assert not result and f"of layer_norm {case} float32: " in str(result)
    assert cupynorm.check_function(pair, library="numpy", shapes=[(64, 768)])


def test_norm_and_eps_reach_the_cases_of_the_kernels():
    for words in (["--quick"], ["--traps"]):
        given = ["check", *words, "--norm", "rms_norm", "--eps", "1e-3", "--on", "cpu"]
        made = entries_of(command.parser().parse_args(given), kernels.machine("cpu"), {"eps": 1e-3})
        assert len(made) > 8 and {entry.case.norm for entry in made} == {"rms_norm"}
        cases = [trial.problem.case for entry in made[:30] for trial in entry.drawn(0)]
        assert {case.eps for case in cases} <= {1e-3, 0.0, -0.05, -1e-3}
