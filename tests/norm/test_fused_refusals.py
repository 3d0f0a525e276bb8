"""Fused options that the public calls refuse."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm.dtypes import DTYPES

torch = pytest.importorskip("torch")

from fused_cases import random  # noqa: E402


@pytest.fixture
def device(anywhere: str) -> str:
    """The device of the tensors, for each of three ways through the library."""
    return anywhere


X = np.ones((3, 8), np.float32)


AN_INT = "expected an int or one element of int64"
WRONG_SEEDS = (
    (2**64, "dropout_seed is 18446744073709551616; expected an int of 64 bits"),
    (1.5, f"dropout_seed is 1.5; {AN_INT}"),
    ("3", f"dropout_seed is '3'; {AN_INT}"),
    (True, f"dropout_seed is True; {AN_INT}"),
    (np.float64(3), rf"dropout_seed is .*3\.0.*; {AN_INT}"),
    (np.bool_(True), f"dropout_seed is .*True.*; {AN_INT}"),
    ([3], f"dropout_seed is a list; {AN_INT}"),
    (np.ones(1), r"dropout_seed has shape \(1,\) and dtype float64; expected one element of int64"),
    (np.ones(2, int), r"dropout_seed has shape \(2,\) and dtype int64; expected one element"),
    (torch.ones(1, dtype=torch.int64), "dropout_seed is a torch tensor on cpu, input is a NumPy"),
)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"dropout_p": 1.5}, "dropout_p is 1.5; expected a probability, from 0 to 1"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1; expected a probability"),
        ({"dropout_p": float("nan")}, "dropout_p is nan; expected a probability"),
        ({"dropout_p": True}, "dropout_p is True; expected a probability"),
        ({"dropout_p": "half"}, "dropout_p is 'half'; expected a probability"),
        *(({"dropout_p": 0.5, "dropout_seed": seed}, words) for seed, words in WRONG_SEEDS),
        ({"row_scale": np.ones(4)}, r"row_scale has shape \(4,\); expected \(3,\)"),
        ({"row_scale": np.ones(3, int)}, "row_scale is of dtype int64; expected one of float16"),
        ({"row_scale": 2.0}, "row_scale is a float; expected a CuPy, torch or NumPy array"),
        ({"residual_dtype": "int8"}, "residual_dtype is 'int8'; expected one of float16"),
        (
            {"residual_dtype": "float16", "residual": np.ones((3, 8))},
            "residual is of dtype float64; expected the input's or residual_dtype, "
            "float32 or float16",
        ),
        (
            {"dropout_p": 0.5, "residual": np.ones((3, 8))},
            "residual is of dtype float64; expected the input.s, float32",
        ),
        (
            {"dropout_p": 0.5, "residual": np.ones((3, 7))},
            r"residual has shape \(3, 7\); expected \(3, 8\)",
        ),
        ({"dropout_p": 0.5, "weight": np.ones(7)}, r"weight has shape \(7,\); expected \(8,\)"),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    for call in (cupynorm.layer_norm, cupynorm.rms_norm):
        with pytest.raises((TypeError, ValueError), match=sentence):
            call(X, 8, **options)


def test_a_seed_of_true_is_refused_after_a_seed_of_1():
    """True equals 1, but must not find the prepared call of 1. A NumPy int is an int."""
    for make in (np.ones, torch.ones):
        x = make((3, 8))
        y = cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=1)
        assert (cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=np.uint8(1)) == y).all()
        with pytest.raises(
            TypeError, match="dropout_seed is True; expected an int or one element of int64"
        ):
            cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=True)


def test_wrong_arguments_of_torch_calls_and_of_backward_are_refused():
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match="row_scale requires a gradient; it is a constant here"):
        cupynorm.layer_norm(x, 8, row_scale=torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="out was given for tensors that require gradients"):
        cupynorm.layer_norm(x.clone().requires_grad_(), 8, dropout_p=0.5, out=torch.empty(3, 8))
    forward = cupynorm.layer_norm_forward(x, 8, dropout_p=0.5, dropout_seed=1)
    given = (x, forward.sum, 8, forward.mean, forward.rstd)
    with pytest.raises(
        TypeError, match="dropout_seed is None; expected the seed that the forward returned"
    ):
        cupynorm.layer_norm_backward(*given, dropout_p=0.5)
    with pytest.raises(
        ValueError,
        match=r"gradients is \('dinput',\); expected some of dx, dweight, dbias, dresidual",
    ):
        cupynorm.layer_norm_backward(*given, gradients=("dinput",), dx_dtype="float32")
    with pytest.raises(TypeError, match="dx_dtype is 'int8'"):
        cupynorm.layer_norm_backward(*given, dx_dtype="int8")
    with pytest.raises(ValueError, match="out shares memory with row_scale"):
        memory = torch.ones(3, 8)
        cupynorm.layer_norm(x, 8, row_scale=memory[:, 0], out=memory)


def test_a_strategy_that_does_not_fit_the_backward_is_refused_at_once(kernels):
    x = torch.ones(2, 2048, requires_grad=True)
    with pytest.raises(ValueError, match="strategy 'warp' is too narrow"):
        cupynorm.layer_norm(x, 2048, dropout_p=0.5, launch=cupynorm.Launch("warp"))


def test_out_is_written_and_returned(device):
    x, out = torch.ones(4, 40, device=device), torch.empty(4, 40, device=device)
    y = cupynorm.layer_norm(x, 40, dropout_p=0.5, dropout_seed=1, out=out)
    assert y is out and torch.equal(y, cupynorm.layer_norm(x, 40, dropout_p=0.5, dropout_seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_dtype_equal_to_the_input_s_changes_nothing(dtype, kernels):
    """The results are the same bits, by the kernels of a plain residual."""
    x, residual = (
        random(5, 48, dtype=getattr(torch, dtype)),
        random(5, 48, dtype=getattr(torch, dtype), seed=1),
    )
    plain, named = (
        cupynorm.layer_norm(x, 48, residual=residual, return_residual=True, residual_dtype=each)
        for each in (None, dtype)
    )
    assert all(map(torch.equal, plain, named)) and kernels[0].kernel == kernels[1].kernel
