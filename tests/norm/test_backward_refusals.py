"""Arguments that the public backward calls refuse, and gradients that autograd may not give."""

from __future__ import annotations

import pytest
from array_libraries import loaded_torch, ones

import cupynorm

X = ones(4, 40)

BACKWARD = {
    "no dy": ("dy is None; expected the gradient of y", {"dy": None}),
    "other dy": (r"dy has shape \(4, 39\); expected \(4, 40\)", {"dy": ones(4, 39)}),
    "dy of ints": ("dy is of dtype int64", {"dy": ones(4, 40, dtype="int64")}),
    "no mean": ("mean is None; expected the statistic", {"mean": None}),
    "no rstd": ("rstd is None; expected the statistic", {"rstd": None}),
    "other mean": (r"mean has shape \(5,\); expected \(4,\)", {"mean": ones(5)}),
    "mean of another dtype": (
        "mean is of dtype float64; expected float32 for x of float32",
        {"mean": ones(4, dtype="float64")},
    ),
    "other weight": (r"weight has shape \(41,\); expected \(40,\)", {"weight": ones(41)}),
    "other dsum": (r"dsum has shape \(40,\); expected \(4, 40\)", {"dsum": ones(40)}),
    "unknown gradient": (
        r"gradients is \('dx', 'dgamma'\); expected some of dx, dweight, dbias",
        {"gradients": ("dx", "dgamma")},
    ),
    "gradients in words": (
        "gradients is 'dx'; expected some of dx, dweight, dbias",
        {"gradients": "dx"},
    ),
    "no gradients": ("gradients is None; expected some of dx, dweight, dbias", {"gradients": None}),
    "dweight_dtype": (
        "dweight_dtype is 'int8'; expected one of float16",
        {"dweight_dtype": "int8"},
    ),
    "launch": ("launch is a str; expected a cupynorm.Launch", {"launch": "warp"}),
}


@pytest.mark.parametrize("what", BACKWARD)
def test_wrong_arguments_of_backward_are_refused(what):
    sentence, changes = BACKWARD[what]
    given = {"dy": X, "x": X, "mean": ones(4), "rstd": ones(4), "normalized_shape": 40} | changes
    with pytest.raises((TypeError, ValueError), match=sentence):
        cupynorm.layer_norm_backward(**given)
    if "gradients" in changes:
        for options in ({}, {"dx_dtype": "float32"}):
            with pytest.raises((TypeError, ValueError), match=sentence):
                cupynorm.rms_norm_backward(X, X, 40, ones(4), **changes, **options)


@pytest.mark.parametrize("options", [{}, {"round_x_hat": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("name", ["torch-cpu", pytest.param("torch-cuda", marks=pytest.mark.gpu)])
def test_a_sparse_gradient_is_refused(name, options):
    torch = loaded_torch()
    weight = torch.ones(5, 40, device=name.removeprefix("torch-"), requires_grad=True)
    y = cupynorm.layer_norm(weight, 40, **options)
    found = torch.nn.functional.embedding(
        torch.tensor([1, 2], device=weight.device), y, sparse=True
    )
    with pytest.raises(
        TypeError, match="dy is a torch tensor of layout sparse_coo; expected a dense"
    ):
        found.sum().backward()
