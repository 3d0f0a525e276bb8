"""LayerNormLinear: arguments and inputs that are refused."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from linear_cases import CPU  # noqa: E402

from cupynorm import LayerNormLinear  # noqa: E402

WRONG_SPLITS = (
    ((), ValueError, r"parameters_split is \(\); expected at least one name"),
    ((1, 2), TypeError, r"parameters_split is \(1, 2\); expected names"),
    (3, TypeError, "parameters_split is 3; expected names, or a dict of names and sizes"),
    (
        {"a", "b"},
        TypeError,
        "parameters_split is {.*}; expected names, or a dict of names and sizes",
    ),
    (("q", "q_"), ValueError, "which differ in more than underscores at their end"),
    (("layer_norm", "b"), ValueError, "none of which is layer_norm, the norm's"),
    ({"a.b": 8, "c": 8}, ValueError, "expected names without a dot"),
    (("a", "b", "c"), ValueError, r"sizes \[5, 5, 5\], 15 together; expected out_features, 16"),
    ({"a": 8, "b": 9}, ValueError, r"sizes \[8, 9\], 17 together"),
    ({"a": 8.0, "b": 8}, TypeError, "expected sizes that are numbers of rows"),
    ({"a": True, "b": 15}, TypeError, "expected sizes that are numbers of rows"),
)


@pytest.mark.parametrize(
    "options, error, sentence",
    (
        (
            {"normalization": "BatchNorm"},
            ValueError,
            "normalization is 'BatchNorm'; expected 'LayerNorm' or 'RMSNorm'",
        ),
        ({"eps": "small"}, TypeError, "eps is 'small'; expected a real number"),
        (
            {"params_dtype": torch.int32},
            TypeError,
            "params_dtype is torch.int32; expected torch.bfloat16, torch.float16, ",
        ),
        (
            {"params_dtype": "half"},
            TypeError,
            "params_dtype is 'half'; expected torch.bfloat16, torch.float16, ",
        ),
        ({"parallel_mode": "both"}, ValueError, "parallel_mode is 'both'; expected None, 'col"),
        ({"tp_group": object()}, TypeError, "tp_group is an object; expected a group of torch"),
        ({"tp_size": 0}, ValueError, "tp_size is 0; expected an int of 1"),
        ({"tp_size": 2.0}, TypeError, "tp_size is 2.0; expected an int"),
        (
            {"tp_size": 3, "parallel_mode": "column"},
            ValueError,
            "out_features is 16 and tp_size is 3; expected a multiple of 3",
        ),
        (
            {"tp_size": 5, "parallel_mode": "row"},
            ValueError,
            "in_features is 24 and tp_size is 5; expected a multiple of 5",
        ),
        (
            {"tp_size": 2, "parallel_mode": "row", "fused": "kernel"},
            ValueError,
            "fused is 'kernel' and tp_size is 2 with parallel_mode='row'; expected fused=None, bec",
        ),
        (
            {"tp_size": 4, "parallel_mode": "column", "parameters_split": {"a": 6, "b": 10}},
            ValueError,
            "a of parameters_split has 6 rows and tp_size is 4; expected a multiple of 4",
        ),
        (
            {"tp_size": 4, "parallel_mode": "column", "parameters_split": list("abcdefgh")},
            ValueError,
            "a of parameters_split has 2 rows and tp_size is 4; expected a multiple of 4",
        ),
        (
            {"tp_size": 2, "parallel_mode": "column", "parameters_split": {"a": 6, "b": 8}},
            ValueError,
            r"sizes \[6, 8\], 14 together; expected out_features of all ranks, 16",
        ),
        ({"fused": "gemm"}, ValueError, "fused is 'gemm'; expected None, 'plain' or 'kernel'"),
        (
            {"fused": "kernel", "return_layernorm_output": True},
            ValueError,
            "no normalised tensor exists",
        ),
        ({"sm_margin": -1}, ValueError, "sm_margin is -1"),
        *(({"parameters_split": split}, *expected) for split, *expected in WRONG_SPLITS),
    ),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_arguments_of_the_module_are_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        LayerNormLinear(24, 16, **options, **CPU)


@pytest.mark.parametrize(
    "given, error",
    [
        (0, ValueError),
        (-1, ValueError),
        (8.5, TypeError),
        (8.0, TypeError),
        ("8", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
@pytest.mark.parametrize("name", ["in_features", "out_features"])
def test_wrong_numbers_of_features_are_refused(name, given, error):
    with pytest.raises(error, match=f"{name} is {given!r}; expected an int of 1 or more"):
        LayerNormLinear(**{"in_features": 24, "out_features": 16, name: given}, **CPU)
    LayerNormLinear(**{"in_features": 24, "out_features": 16, name: np.int64(8)}, **CPU)(
        torch.ones(3, 8 if name == "in_features" else 24)
    )


def test_wrong_inputs_of_the_module_are_refused():
    module = LayerNormLinear(24, 16, **CPU)
    for x, error, sentence in (
        (np.ones((3, 24), np.float32), TypeError, "input is an ndarray; expected a torch tensor"),
        ([1.0] * 24, TypeError, "input is a list; expected a torch tensor"),
        (
            torch.ones(3, 23),
            ValueError,
            r"input has shape \(3, 23\); expected \(..., 24\), in_features of this layer",
        ),
        (
            torch.ones(3, 24, dtype=torch.bfloat16),
            TypeError,
            "weight is of dtype float32, input of bfloat16; expected both the same",
        ),
    ):
        with pytest.raises(error, match=sentence):
            module(x)
    for name in ("fp8_output", "fp8_grad"):
        with pytest.raises(ValueError, match=f"{name} is True outside of fp8_autocast"):
            module(torch.ones(3, 24), **{name: True})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_names_the_device_to_give():
    with pytest.raises(ValueError, match="torch finds no GPU; expected device='cpu' here"):
        LayerNormLinear(16, 16)
    assert LayerNormLinear(16, 16, device="cpu").weight.device.type == "cpu"
