"""One or two rows in one kernel: plans, what takes the plain path; on a GPU values and graphs."""

from __future__ import annotations

import numpy as np
import pytest
from linear_bounds import assert_right, draw

import cupynorm
from cupynorm.plan import few_products
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.products import NormLinearProblem

torch = pytest.importorskip("torch")

from linear_cases import NORMS, assert_replays_see_new_values, recorded, rms_off  # noqa: E402

from cupynorm import LayerNormLinear  # noqa: E402
from cupynorm.linear import few_rows, one_kernel  # noqa: E402
from cupynorm.linear.call import LinearCall, LinearOptions, Operands, launch_of  # noqa: E402
from cupynorm.norm.calls import FOR_STATISTICS, FOR_Y  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        ("H200", (1, 4096, 12288)),
        ("H200", (2, 4096, 100)),
        ("H200", (2, 8192, 128256)),
        ("A100", (1, 16384, 12288)),
    ],
    ids=str,
)
def test_plan(device, sizes):
    """Every output has a block, and every block has some."""
    device = DEVICES[device]
    assert few_products.why_not(device, "bfloat16", sizes) is None
    problem = NormLinearProblem(*sizes, "bfloat16", None, None, True, False)
    plan = few_products.few_launch(device, problem)
    assert plan.launch.smem_bytes <= device.smem_per_block
    blocks, outputs = plan.launch.grid_size, plan.outputs_of_block
    assert (blocks - 1) * outputs < sizes[2] <= blocks * outputs and blocks <= device.num_sms


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "reason"),
    [
        ("H200", "bfloat16", (3, 4096, 64), "is for 1 to 2 rows; the input has 3"),
        ("H200", "bfloat16", (1, 16392, 64), "multiples of 8 up to 16384; in_features is 16392"),
        ("H200", "float16", (1, 60, 64), "multiples of 8 up to 16384; in_features is 60"),
        ("A100", "bfloat16", (2, 16384, 300000), "300000 outputs do not fit"),
        ("H200", "bfloat16", (1, 64, 0), "1 or more outputs; out_features is 0"),
        ("H200", "float32", (1, 64, 64), "multiplies bfloat16 and float16; the input has float32"),
    ],
    ids=str,
)
def test_reasons(device, dtype, sizes, reason):
    assert reason in few_products.why_not(DEVICES[device], dtype, sizes)


def asked(x, weight, fused=None, residual=None, returns=False, dtype=torch.bfloat16):
    given = Operands(x, residual, None, None, (weight,), ())
    launching = launch_of(0)
    return LinearCall(
        given, LinearOptions(False, 1e-5, False, returns, False, fused, launching, dtype)
    )


def test_calls_on_a_cpu_take_the_plain_path():
    x, weight = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    for fused in ("kernel", None):
        assert few_rows.choose(asked(x, weight, fused), FOR_Y) is None


WIDTH, OUT = 64, 32
SHAPES = {
    "input": (2, WIDTH),
    "residual": (2, WIDTH),
    "norm_weight": (WIDTH,),
    "norm_bias": (WIDTH,),
    "weight": (OUT, WIDTH),
    "other weight": (OUT, WIDTH),
    "bias": (OUT,),
    "other bias": (OUT,),
}


def laid(layout, shape):
    """A bfloat16 tensor of ones. Strided: every second element of a row."""
    size = int(np.prod(shape))
    if layout == "without memory":
        return torch._efficientzerotensor(shape, dtype=torch.bfloat16)
    memory = torch.ones(2 * size + 8, dtype=torch.bfloat16)
    first = -memory.data_ptr() % 16 // 2
    if layout == "strided":
        return memory[first : first + 2 * size].view(*shape[:-1], 2 * shape[-1])[..., ::2]
    first += layout == "misaligned"
    plain = memory[first : first + size].view(shape)
    return torch._neg_view(plain.neg_()) if layout == "negated" else plain


def call_of(tensors, dtype=torch.bfloat16):
    input, residual, *norm, weight, other_weight, bias, other_bias = tensors.values()
    parts = (weight, other_weight), (bias, other_bias)
    options = LinearOptions(True, 1e-5, False, False, False, None, launch_of(0), dtype)
    return LinearCall(Operands(input, residual, *norm, *parts), options)


@pytest.mark.parametrize("layout", ("strided", "misaligned", "negated", "without memory"))
@pytest.mark.parametrize("name", SHAPES)
def test_layouts_of_each_operand(name, layout):
    """The linear bias is loaded element by element, so it may have any address."""
    tensors = {each: laid("aligned", shape) for each, shape in SHAPES.items()}
    assert few_rows.fits(call_of(tensors))
    tensors[name] = laid(layout, SHAPES[name])
    takes_any_address = name in ("bias", "other bias")
    assert few_rows.fits(call_of(tensors)) == (layout == "misaligned" and takes_any_address)


def test_dtypes_and_rows():
    tensors = {each: laid("aligned", shape) for each, shape in SHAPES.items()}
    for name in ("input", "residual", "weight", "other weight"):
        assert not few_rows.fits(call_of(tensors | {name: tensors[name].half()}))
    for name in ("norm_weight", "norm_bias"):  # they may have any dtype
        assert few_rows.fits(call_of(tensors | {name: tensors[name].float()}))
    for name in ("norm_weight", "norm_bias", "residual"):
        assert few_rows.fits(call_of(tensors | {name: None}))
    assert not few_rows.fits(call_of(tensors, torch.float16))
    # What does not fit the input is left to the checks of the plain path.
    for shape in ((1, WIDTH), (2, WIDTH // 2)):
        assert not few_rows.fits(call_of(tensors | {"residual": laid("aligned", shape)}))
    elsewhere = torch.empty(2, WIDTH, dtype=torch.bfloat16, device="meta")
    assert not few_rows.fits(call_of(tensors | {"residual": elsewhere}))
    for num_rows, expected in ((0, False), (1, True), (2, True), (3, False)):
        rows = laid("aligned", (num_rows, WIDTH))
        assert few_rows.fits(call_of(tensors | {"input": rows, "residual": rows})) is expected


# On a GPU.


@pytest.fixture
def sm_90():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"the default of {torch.cuda.get_device_name()} is the plain path")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", (1, 2))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("norm_name", NORMS)
def test_errors_are_those_of_the_plain_path(norm_name, dtype, num_rows):
    """The error of y is at most 1.1 times the plain path's. Gradients: within their bounds."""
    problem = draw(norm_name, dtype, num_rows=num_rows, in_features=1288, out_features=264)
    fused, plain = (recorded(problem, "cuda", fused=each) for each in ("kernel", None))
    off = rms_off(problem, fused, plain)
    assert off[0] <= 1.1 * off[1]
    assert_right(problem, fused, ("y", "normalized", "sum"))


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
def test_default_without_gradients_is_the_kernel():
    x = torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert few_rows.choose(asked(x, weight), FOR_Y) is not None
    for call, purpose in (
        (asked(x, weight), FOR_STATISTICS),
        (asked(x, weight, "plain"), FOR_Y),
        (asked(x, weight, returns=True), FOR_Y),
        (asked(x.float(), weight), FOR_Y),
        (asked(x.repeat(9, 1), weight), FOR_Y),
        (asked(x, weight.T), FOR_Y),
    ):
        assert few_rows.choose(call, purpose) is None
    with torch.no_grad():
        made = cupynorm.rms_norm_linear(x, None, weight)
        assert torch.equal(made, cupynorm.rms_norm_linear(x, None, weight, fused="kernel"))
        assert torch.equal(made[1:], cupynorm.rms_norm_linear(x[1:], None, weight))
        assert not one_kernel.keeps_fold(asked(x, weight, "kernel"))
        exact = torch.nn.functional.rms_norm(x.double(), (4096,)) @ weight.double().T
        plain = torch.nn.functional.linear(cupynorm.rms_norm(x, 4096), weight)
    assert (made - exact).norm() <= 1.1 * (plain - exact).norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize("num_rows", (1, 2))
def test_residual(num_rows):
    """The sum is that of the plain path, bit for bit, and y is that of a call on the sum."""
    x, residual = torch.randn(2, 1, num_rows, 4096, device="cuda").bfloat16()
    weight = torch.randn(600, 4096, device="cuda").bfloat16()
    assert few_rows.choose(asked(x, weight, residual=residual), FOR_Y) is not None
    y, added = cupynorm.rms_norm_linear(x, None, weight, residual=residual, return_residual=True)
    assert torch.equal(added, x + residual)
    assert torch.equal(y, cupynorm.rms_norm_linear(added, None, weight))


@pytest.mark.gpu
def test_replays_of_a_graph_see_new_values():
    module = LayerNormLinear(64, 256, fused="kernel", params_dtype=torch.bfloat16)
    x = torch.randn(2, 64, device="cuda", dtype=torch.bfloat16)
    assert_replays_see_new_values(module, x)
