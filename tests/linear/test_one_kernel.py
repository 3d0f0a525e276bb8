"""fused="kernel": what takes the plain path, and on a GPU values, gradients and graphs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from linear_bounds import assert_right, draw

import cupynorm
from cupynorm.plan import products
from cupynorm.plan.devices import DEVICES

torch = pytest.importorskip("torch")

from linear_cases import (  # noqa: E402
    CPU,
    NORMS,
    assert_replays_see_new_values,
    call,
    leaves,
    recorded,
    rms_off,
)

from cupynorm import LayerNormLinear  # noqa: E402
from cupynorm.linear import one_kernel  # noqa: E402
from cupynorm.linear.call import LinearCall, LinearOptions, Operands, launch_options  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")
SIZES = {"num_rows": 130, "in_features": 200, "out_features": 264}


@pytest.mark.parametrize("norm_name", NORMS)
def test_on_a_cpu_it_is_the_plain_path(norm_name):
    problem = draw(norm_name, "float32")
    given = leaves(problem)
    assert torch.equal(call(problem, given, fused="kernel"), call(problem, given))
    plain, fused = recorded(problem), recorded(problem, fused="kernel")
    assert plain.keys() == fused.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(fused[name], value, err_msg=name)
    arrays = [np.ones((3, 8)), None, None, np.ones((2, 8))]
    assert np.array_equal(
        cupynorm.layer_norm_linear(*arrays, fused="kernel"), cupynorm.layer_norm_linear(*arrays)
    )


def test_it_has_no_normalized_tensor():
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match="return_normalized is given with fused='kernel'"):
        cupynorm.rms_norm_linear(x, None, torch.ones(2, 8), fused="kernel", return_normalized=True)
    with pytest.raises(ValueError, match="return_layernorm_output is given with fused='kernel'"):
        LayerNormLinear(8, 8, fused="kernel", return_layernorm_output=True, **CPU)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "reason"),
    [
        ("H200", "bfloat16", (8192, 4096, 12288), None),
        ("H100", "float16", (2**20, 8, 8), None),
        ("H200", "bfloat16", (1024, 4096, 8192), None),
        ("A100", "bfloat16", (9, 64, 64), "is for compute capability 9.0; A100 has another"),
        ("H200", "float32", (9, 64, 64), "multiplies bfloat16 and float16; the input has float32"),
        ("H200", "bfloat16", (9, 60, 64), "needs multiples of 8; in_features is 60"),
        ("H200", "bfloat16", (9, 64, 60), "needs multiples of 8; out_features is 60"),
        ("H200", "bfloat16", (2**31, 64, 64), "at most 2147483647 rows; the input has 2147483648"),
        ("H200", "bfloat16", (1023, 64, 8192), "slower for less than 8388608 results; 1023 x 8192"),
    ],
    ids=str,
)
def test_reasons_of_a_plan(device, dtype, sizes, reason):
    found = products.why_not(DEVICES[device], dtype, sizes)
    assert found is None if reason is None else reason in found


def test_a_plan_fills_the_gpu():
    """Whole clusters, one block a multiprocessor, and no more clusters than halves of tiles."""
    for num_rows, blocks in ((65536, 132), (8192, 128), (257, 8), (1, 4)):
        plan = products.product_launch(DEVICES["H200"], num_rows, 8, "bfloat16", centered=True)
        assert plan.launch.grid_size == blocks and plan.launch.cluster_size == 2


def options_of(dtype=torch.bfloat16, centered=True):
    return LinearOptions(centered, 1e-5, False, False, False, "kernel", launch_options(0), dtype)


def test_reasons_of_a_call_on_a_cpu():
    x, weight = torch.ones(3, 8), torch.ones(8, 8)
    given = LinearCall(Operands(x, None, None, None, (weight,), ()), options_of(x.dtype))
    assert "on a GPU" in one_kernel.why_not(given) and one_kernel.folds(given) is None


# On a GPU.


@pytest.fixture
def sm_90(monkeypatch):
    """Few rows take the kernel too."""
    monkeypatch.setattr(products, "LEAST_RESULTS", 1)
    name = torch.cuda.get_device_name()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"the kernel is for compute capability 9.0, not for {name}")


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("norm_name", NORMS)
def test_errors_are_those_of_the_plain_path(norm_name, dtype):
    """The error of y is at most 1.1 times the plain path's. Gradients: within their bounds."""
    problem = draw(norm_name, dtype, **SIZES)
    given = leaves(problem, "cuda")
    parts = (given["x"], None, given["norm_weight"], given["norm_bias"])
    options = options_of(given["x"].dtype, problem.centered)
    asked = LinearCall(Operands(*parts, (given["weight"],), (given["bias"],)), options)
    assert one_kernel.why_not(asked) is None
    fused, plain = (recorded(problem, "cuda", fused=each) for each in ("kernel", None))
    off = rms_off(problem, fused, plain)
    assert off[0] <= 1.1 * off[1] and not np.array_equal(fused["y"], plain["y"])
    assert_right(problem, fused, ("y", "normalized", "sum"))


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
def test_a_residual_is_added_before():
    """The sum is that of the plain path, bit for bit, and y is that of a call on the sum."""
    x, residual = torch.randn(2, 300, 136, device="cuda").bfloat16()
    weight = torch.randn(264, 136, device="cuda").bfloat16()
    call = partial(cupynorm.rms_norm_linear, norm_weight=None, weight=weight, fused="kernel")
    y, added = call(x, residual=residual, return_residual=True)
    assert torch.equal(added, x + residual) and torch.equal(y, call(added))
    problem = draw("rms_norm", "bfloat16", **SIZES, residual=True, dsum=True)
    assert_right(problem, recorded(problem, "cuda", fused="kernel"), ("y", "normalized", "sum"))


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
def test_replays_of_a_graph_see_new_values():
    module = LayerNormLinear(64, 256, fused="kernel", params_dtype=torch.bfloat16)
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    assert_replays_see_new_values(module, x)


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
def test_what_does_not_fit_takes_the_plain_path():
    x = torch.randn(64, 136, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    for each in (x[:, :128], x[:, :124].contiguous(), x[:, :128].float().contiguous()):
        part = weight[:, : each.shape[1]].contiguous().to(each.dtype)
        made = cupynorm.rms_norm_linear(each, None, part, fused="kernel")
        assert torch.equal(made, cupynorm.rms_norm_linear(each, None, part))
