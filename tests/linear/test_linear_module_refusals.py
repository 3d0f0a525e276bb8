"""LayerNormLinear: arguments and inputs that are refused."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from linear_cases import CPU  # noqa: E402

from cupynorm import LayerNormLinear  # noqa: E402

WRONG_SPLITS = (
    ((), r"parameters_split is \(\); expected at least one name"),
    ((1, 2), r"parameters_split is \(1, 2\); expected names"),
    (3, "parameters_split is 3; expected names, or a dict of names and sizes"),
    ({"a", "b"}, "parameters_split is {.*}; expected names, or a dict of names and sizes"),
    (("q", "q_"), "which differ in more than underscores at their end"),
    (("layer_norm", "b"), "none of which is layer_norm, the norm's"),
    ({"a.b": 8, "c": 8}, "expected names without a dot"),
    (("a", "b", "c"), r"sizes \[5, 5, 5\], 15 together; expected out_features, 16"),
    ({"a": 8, "b": 9}, r"sizes \[8, 9\], 17 together"),
    ({"a": 8.0, "b": 8}, "expected sizes that are numbers of rows"),
    ({"a": True, "b": 15}, "expected sizes that are numbers of rows"),
)
COLUMN, ROW = {"parallel_mode": "column"}, {"parallel_mode": "row"}
OF_SPLIT = "of parameters_split has"
WRONG = (
    ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm'; expected 'LayerNorm' or 'RMSN"),
    ({"eps": "small"}, "eps is 'small'; expected a real number"),
    ({"params_dtype": torch.int32}, "params_dtype is torch.int32; expected torch.bfloat16, torch"),
    ({"params_dtype": "half"}, "params_dtype is 'half'; expected torch.bfloat16, torch.float16, "),
    ({"parallel_mode": "both"}, "parallel_mode is 'both'; expected None, 'column' or 'row'"),
    ({"tp_group": object()}, "tp_group is an object; expected a group of torch"),
    ({"tp_size": 0}, "tp_size is 0; expected an int of 1 or more"),
    ({"tp_size": 2.0}, "tp_size is 2.0; expected an int"),
    ({"tp_size": 3} | COLUMN, "out_features is 16 and tp_size is 3; expected a multiple of 3"),
    ({"tp_size": 5} | ROW, "in_features is 24 and tp_size is 5; expected a multiple of 5"),
    ({"tp_size": 2, "fused": "kernel"} | ROW, "tp_size is 2; expected fused=None"),
    ({"tp_size": 2, "fused": "kernel"} | COLUMN, "tp_size is 2; expected fused=None"),
    ({"tp_size": 4, "parameters_split": {"a": 6, "b": 10}} | COLUMN, f"a {OF_SPLIT} 6 rows and tp"),
    ({"tp_size": 4, "parameters_split": list("abcdefgh")} | COLUMN, f"a {OF_SPLIT} 2 rows and tp_"),
    ({"tp_size": 2, "parameters_split": {"a": 6, "b": 8}} | COLUMN, r"sizes \[6, 8\], 14 together"),
    ({"fused": "gemm"}, "fused is 'gemm'; expected None, 'plain' or 'kernel'"),
    ({"fused": "kernel", "return_layernorm_output": True}, "no normalised tensor exists"),
    ({"sm_margin": -1}, "sm_margin is -1"),
    *(({"parameters_split": split}, sentence) for split, sentence in WRONG_SPLITS),
)


@pytest.mark.parametrize(
    "options, sentence", WRONG, ids=lambda each: "-".join(each) if isinstance(each, dict) else ""
)
def test_wrong_arguments_of_the_module_are_refused(options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
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
