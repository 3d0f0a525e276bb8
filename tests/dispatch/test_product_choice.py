"""What computes a norm and the linear layer after it by default, on literals."""

from __future__ import annotations

import pytest

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.product_plan import NormLinearProblem, choose


def choice(device, sizes, dtype="bfloat16", *, norm="layer_norm", own=None, **options):
    """own: the dtype of the norm's parameters, by default that of x."""
    own, centered = own or dtype, norm == "layer_norm"
    problem = NormLinearProblem(*sizes, dtype, own, own if centered else None, centered, False)
    return choose(DEVICES[device], problem, **options)


# As before many rows had a kernel by default.


@pytest.mark.parametrize(
    ("device", "sizes", "expected"),
    [
        ("H200", (1, 4096, 12288), "norm_linear_few.cu is measured to be faster for 1 x 4096 x"),
        ("H100", (2, 8192, 8192), "norm_linear_few.cu is measured to be faster"),
    ],
    ids=str,
)
def test_few_rows_take_a_kernel(device, sizes, expected):
    taken, reason = choice(device, sizes)
    assert taken and expected in reason
    assert choice(device, sizes, "float16", norm="rms_norm").takes_kernel


@pytest.mark.parametrize(
    ("device", "sizes", "expected"),
    [
        ("H200", (1, 8192, 28672), "norm_linear_few.cu is not measured to be faster for 1 x 8192"),
        ("A100", (1, 4096, 12288), "norm_linear_few.cu is not measured to be faster"),
        ("A100", (3, 4096, 64), "is for compute capability 9.0; A100 has another"),
        ("H200", (3, 4096, 12288), "slower for less than 8388608 results; 3 x 12288"),
        ("H200", (2048, 4096, 12288), "with more than 2048 columns; in_features is 4096"),
        ("A100", (65536, 1024, 1024), "is for compute capability 9.0; A100 has another"),
        ("H200", (65536, 1020, 1024), "multiples of 8 up to 2147483647; in_features is 1020"),
    ],
    ids=str,
)
def test_the_plain_path_and_why(device, sizes, expected):
    taken, reason = choice(device, sizes)
    assert not taken and expected in reason


# Many rows.


@pytest.mark.parametrize("device", ("H100", "H200"))
@pytest.mark.parametrize(
    "sizes",
    [(65536, 1024, 1024), (32768, 1024, 4096), (16384, 2048, 2048), (65536, 2048, 6144)],
    ids=str,
)
def test_many_rows_take_the_kernel(device, sizes):
    taken, reason = choice(device, sizes)
    assert taken and reason == (
        "norm_linear.cu, with a fold in each call, is measured to be faster for "
        + " x ".join(map(str, sizes))
    )


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        (
            (12288, 1024, 1024),
            {},
            "1024 outputs or 68719476736 products, which 12288 x 1024 x 1024",
        ),
        ((2**20, 1024, 512), {}, "slower with fewer than 1024 outputs"),
        (
            (65536, 8192, 2048),
            {"own": "float32", "norm": "rms_norm"},
            "up to 4096 columns, not 8192",
        ),
        ((4096, 1024, 12288), {}, "slower with fewer than 8192 rows"),
        ((16384, 1024, 8192), {}, "fewer than 4 for each output; 16384 rows have 8192"),
        ((65536, 1024, 1024), {"dtype": "float16"}, "cost accuracy in float16"),
        ((65536, 4096, 1024), {}, "large means cost accuracy with more than 2048 columns"),
        ((65536, 1024, 1024), {"norm": "rms_norm"}, "rounds norm weights of bfloat16"),
        ((65536, 1024, 1024), {"residual": True}, "also adds the residual"),
    ],
    ids=str,
)
def test_many_rows_that_keep_the_plain_path(sizes, options, expected):
    for device in ("H100", "H200"):
        taken, reason = choice(device, sizes, **options)
        assert not taken and expected in reason


def test_rms_norm_takes_the_kernel_with_wider_norm_weights():
    """Their roundings after the norm are no smaller than those of folded weights."""
    sizes = (65536, 4096, 4096)
    assert choice("H200", sizes, norm="rms_norm", own="float32").takes_kernel
    without = NormLinearProblem(*sizes, "bfloat16", None, None, False, False)
    assert choose(DEVICES["H100"], without).takes_kernel


def test_edges_of_the_choice():
    """One row fewer, one column pack more: the other side of each bound."""
    edges = [
        ((16384, 2048, 4096), (16383, 2048, 4096)),
        ((16384, 2048, 2048), (16383, 2048, 2048)),
        ((32768, 2048, 1024), (32768, 2056, 1024)),
        ((65536, 2048, 1024), (65536, 2048, 1016)),
    ]
    for inside, outside in edges:
        assert choice("H200", inside).takes_kernel and not choice("H200", outside).takes_kernel
