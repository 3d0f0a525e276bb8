"""One kernel for a norm and its product: what it takes, and on a GPU values, gradients, graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from linear_bounds import assert_right, draw

import cupynorm
from cupynorm.dispatch import product_plan
from cupynorm.dispatch.devices import DEVICES

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
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cupynorm import LayerNormLinear  # noqa: E402
from cupynorm.linear import one_kernel  # noqa: E402
from cupynorm.linear.operands import LinearOptions, Operands, launch_of  # noqa: E402
from cupynorm.norm.calls import FOR_STATISTICS, FOR_Y  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")


@pytest.mark.parametrize("norm_name", NORMS)
def test_on_a_cpu_it_is_the_plain_path(norm_name):
    problem = draw(norm_name, "float32")
    given = leaves(problem)
    assert torch.equal(call(problem, given, fused="kernel"), call(problem, given))
    plain, fused = recorded(problem), recorded(problem, fused="kernel")
    assert plain.keys() == fused.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(fused[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "reason"),
    [
        ("H200", "bfloat16", (8192, 4096, 12288), None),
        ("H100", "float16", (2**20, 8, 8), None),
        ("H200", "bfloat16", (1024, 4096, 8192), None),
        ("A100", "bfloat16", (9, 64, 64), "is for compute capability 9.0; A100 has another"),
        ("H200", "float32", (9, 64, 64), "multiplies bfloat16 and float16; the input has float32"),
        ("H200", "bfloat16", (9, 60, 64), "multiples of 8 up to 2147483647; in_features is 60"),
        ("H200", "bfloat16", (9, 64, 60), "a multiple of 8 outputs; out_features is 60"),
        ("H200", "bfloat16", (2**31, 64, 64), "1 to 2147483647 rows; the input has 2147483648"),
        ("H200", "bfloat16", (1023, 64, 8192), "slower for less than 8388608 results; 1023 x 8192"),
        ("H200", "bfloat16", (3, 4096, 64), "is for 1 to 2 rows; the input has 3"),
        ("H200", "bfloat16", (1, 16392, 64), "multiples of 8 up to 16384; in_features is 16392"),
        ("H200", "float16", (1, 60, 64), "multiples of 8 up to 16384; in_features is 60"),
        ("A100", "bfloat16", (2, 16384, 300000), "300000 outputs do not fit"),
        ("H200", "bfloat16", (1, 64, 0), "1 or more outputs; out_features is 0"),
        ("H200", "float32", (1, 64, 64), "multiplies bfloat16 and float16; the input has float32"),
    ],
    ids=str,
)
def test_reasons_of_a_plan(device, dtype, sizes, reason):
    """Up to two rows have a plan of their own."""
    why_not = product_plan.why_not_few if sizes[0] <= 3 else product_plan.why_not
    found = why_not(DEVICES[device], dtype, sizes)
    assert found is None if reason is None else reason in found


def test_a_plan_fills_the_gpu():
    """Whole clusters, one block a multiprocessor, and no more clusters than halves of tiles."""
    for num_rows, blocks in ((65536, 132), (8192, 128), (257, 8), (1, 4)):
        plan = product_plan.product_launch(DEVICES["H200"], num_rows, 8, "bfloat16", centered=True)
        assert plan.launch.grid_size == blocks and plan.launch.cluster_size == 2


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
def test_a_plan_of_few_rows(device, sizes):
    """Every output has a block, and every block has some."""
    device = DEVICES[device]
    assert product_plan.why_not_few(device, "bfloat16", sizes) is None
    problem = product_plan.NormLinearProblem(*sizes, "bfloat16", None, None, True, False)
    plan = product_plan.few_launch(device, problem)
    assert plan.launch.smem_bytes <= device.smem_per_block
    blocks, outputs = plan.launch.grid_size, plan.outputs_of_block
    assert (blocks - 1) * outputs < sizes[2] <= blocks * outputs and blocks <= device.num_sms


# The choice of a call.

DEFAULT = LinearOptions(True, 1e-5, False, False, False, None, launch_of(0), torch.bfloat16)


def found(num_rows=16384, in_features=2048, out_features=2048, purpose=FOR_STATISTICS, **options):
    """What computes a call on a GPU that may not be there: its tensors have no memory."""
    with FakeTensorMode():
        x = torch.empty(num_rows, in_features, dtype=torch.bfloat16, device="cuda")
        parts = [x.new_empty(out_features // 2, in_features) for _ in range(2)]
        norm = [x.new_empty(in_features) for _ in range(2)]
        residual = x.new_empty(x.shape) if options.pop("residual", False) else None
    operands = Operands(x, residual, *norm, parts, ())
    return one_kernel.find(operands, DEFAULT._replace(**options), purpose)


@pytest.fixture
def h200(monkeypatch):
    """What a call on an H200 takes, as far as its sizes and options say."""
    launch = SimpleNamespace(
        device=lambda index: DEVICES["H200"], load=lambda *given: SimpleNamespace(enqueue=None)
    )
    monkeypatch.setattr(one_kernel, "launch", launch)
    monkeypatch.setattr(one_kernel, "_fits", lambda operands, dtype: True)
    one_kernel._loaded.cache_clear()
    yield
    one_kernel._loaded.cache_clear()


FEW = {"num_rows": 2, "purpose": FOR_Y}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, "many"),
        ({"fused": "kernel", "num_rows": 8184, "residual": True, "launch": launch_of(8)}, "many"),
        ({"fused": "plain"}, None),
        ({"num_rows": 8184}, None),
        ({"num_rows": 0}, None),
        ({"out_features": 8192}, None),
        ({"in_features": 4096}, None),
        ({"return_normalized": True}, None),
        ({"save_normalized": True}, None),
        ({"residual": True}, None),
        ({"launch": launch_of({"forward": 8})}, None),
        ({"launch": launch_of(8)}, None),
        ({"has_norm": False}, None),
        (FEW, "few"),
        (FEW | {"residual": True, "launch": launch_of(8)}, "few"),
        (FEW | {"purpose": FOR_STATISTICS}, None),
        (FEW | {"purpose": FOR_STATISTICS, "fused": "kernel"}, "few"),
        (FEW | {"return_normalized": True}, None),
        (FEW | {"num_rows": 3}, None),
        (FEW | {"in_features": 16392}, None),
        (FEW | {"in_features": 8192, "out_features": 28672}, None),
    ],
    ids=str,
)
def test_what_computes_a_call(options, takes):
    kernel = found(**options)
    assert (kernel and ("few" if kernel.is_few else "many")) == takes


@pytest.mark.usefixtures("h200")
def test_default_of_several_ranks(monkeypatch):
    """Their collectives occupy multiprocessors, on which blocks of the kernel would wait."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for size, expected in ((1, True), (2, False)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        assert (found() is not None) is expected


WIDTH, HEIGHT = 64, 32
SHAPES = {
    "input": (2, WIDTH),
    "residual": (2, WIDTH),
    "norm_weight": (WIDTH,),
    "norm_bias": (WIDTH,),
    "weight": (HEIGHT, WIDTH),
    "other weight": (HEIGHT, WIDTH),
    "bias": (HEIGHT,),
    "other bias": (HEIGHT,),
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
    first += 4 * (layout == "misaligned")  # 8 bytes
    plain = memory[first : first + size].view(shape)
    return torch._neg_view(plain.neg_()) if layout == "negated" else plain


def fits(tensors, dtype=torch.bfloat16):
    input, residual, *norm, weight, other_weight, bias, other_bias = tensors.values()
    parts = (weight, other_weight), (bias, other_bias)
    return one_kernel._fits(Operands(input, residual, *norm, *parts), dtype)


@pytest.mark.parametrize("layout", ("strided", "misaligned", "negated", "without memory"))
@pytest.mark.parametrize("name", SHAPES)
def test_layouts_of_each_operand(name, layout):
    """The linear bias is loaded element by element, so it may have any address."""
    tensors = {each: laid("aligned", shape) for each, shape in SHAPES.items()}
    assert fits(tensors)
    tensors[name] = laid(layout, SHAPES[name])
    takes_any_address = name in ("bias", "other bias")
    assert fits(tensors) == (layout == "misaligned" and takes_any_address)


def test_dtypes_and_shapes():
    tensors = {each: laid("aligned", shape) for each, shape in SHAPES.items()}
    for name in ("input", "residual", "weight", "other weight"):
        assert not fits(tensors | {name: tensors[name].half()})
    for name in ("norm_weight", "norm_bias"):  # they may have any dtype
        assert fits(tensors | {name: tensors[name].float()})
    for name in ("norm_weight", "norm_bias", "residual"):
        assert fits(tensors | {name: None})
    assert not fits(tensors, torch.float16)
    # What does not fit the input is left to the checks of the plain path.
    for shape in ((1, WIDTH), (2, WIDTH // 2)):
        assert not fits(tensors | {"residual": laid("aligned", shape)})
    elsewhere = torch.empty(2, WIDTH, dtype=torch.bfloat16, device="meta")
    assert not fits(tensors | {"residual": elsewhere})


LAYERS = ({}, {"main_grad": True}, {"microbatch": True}, {"parameters_split": ("q", "k")})


def test_the_default_folds_in_each_call_and_follows_writes(folds):
    module, x = LayerNormLinear(24, 16, **CPU), torch.randn(5, 24)
    with torch.no_grad():
        first = module(x)
        module.weight.data.mul_(2)
        module.bias.data.add_(3)
        torch.testing.assert_close(module(x), first * 2 + 3)
        for is_first in (True, False, None):
            module(x, is_first_microbatch=is_first)
    module(x).sum().backward()
    assert len(folds) == 6


@pytest.mark.parametrize("way", LAYERS, ids=str)
def test_gradients_of_the_default_are_those_of_the_plain_path(folds, way):
    """They are made of x, mean and rstd. y differs: it is that of the kernel."""
    accumulates, is_first = way.get("main_grad", False), way.get("microbatch")
    split = {name: value for name, value in way.items() if name == "parameters_split"}
    options = {**split, "fuse_wgrad_accumulation": accumulates, **CPU}
    modules = [LayerNormLinear(24, 16, fused=each, **options) for each in (None, "plain")]
    modules[1].load_state_dict(modules[0].state_dict())
    x, found = torch.randn(5, 24), []
    for module in modules:
        rows = x.clone().requires_grad_()
        for weight in module.weights() if accumulates else ():
            weight.main_grad = torch.zeros(weight.shape)
        y = module(rows, is_first_microbatch=is_first)
        y.square().sum().backward()
        weights = [each.main_grad if accumulates else each.grad for each in module.weights()]
        biases = [each.grad for each in module.biases()]
        of_norm = [module.layer_norm_weight.grad, module.layer_norm_bias.grad]
        found.append((y, rows.grad, *weights, *biases, *of_norm))
    assert len(folds) == 1
    for ours, plain in zip(*found):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)
    assert not torch.equal(found[0][0], found[1][0])


def test_double_backward_of_the_default(folds):
    given = [torch.randn(*each, dtype=torch.float64) for each in ((3, 8), (8,), (8,), (4, 8), (4,))]
    given = [each.requires_grad_() for each in given]
    assert torch.autograd.gradgradcheck(cupynorm.layer_norm_linear, given)
    assert folds


def test_plain_names_the_plain_path(folds):
    """With it the normalised tensor can be returned and saved."""
    module = LayerNormLinear(24, 16, fused="plain", return_layernorm_output=True, **CPU)
    x = torch.randn(5, 24)
    y, normalized = module(x)
    assert torch.equal(y, torch.nn.functional.linear(normalized, module.weight, module.bias))
    module = LayerNormLinear(24, 16, fused="plain", save_normalized=True, **CPU)
    assert module.linear_options(torch.float32).save_normalized
    assert "fused='plain'" in repr(module) and not folds
    with pytest.raises(ValueError, match="fused is 'plane'; expected None, 'plain' or 'kernel'"):
        LayerNormLinear(8, 8, fused="plane", **CPU)


# On a GPU.


@pytest.fixture
def sm_90(monkeypatch):
    """Few rows take the kernel too."""
    monkeypatch.setattr(product_plan, "LEAST_RESULTS", 1)
    one_kernel._loaded.cache_clear()
    name = torch.cuda.get_device_name()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"the kernel is for compute capability 9.0, not for {name}")


SIZES = {"num_rows": 130, "in_features": 200, "out_features": 264}
FEW_SIZES = ({"num_rows": rows, "in_features": 1288, "out_features": 264} for rows in (1, 2))


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize("sizes", (SIZES, *FEW_SIZES), ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("norm_name", NORMS)
def test_errors_are_those_of_the_plain_path(norm_name, dtype, sizes):
    """The error of y is at most 1.1 times the plain path's. Gradients: within their bounds."""
    problem = draw(norm_name, dtype, **sizes)
    fused, plain = (recorded(problem, "cuda", fused=each) for each in ("kernel", "plain"))
    off = rms_off(problem, fused, plain)
    assert off[0] <= 1.1 * off[1] and one_kernel._loaded.cache_info().currsize
    assert_right(problem, fused, ("y", "normalized", "sum"))


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize("num_rows", (1, 2, 300))
def test_a_residual_is_added_before(num_rows):
    """The sum is that of the plain path, bit for bit, and y is that of a call on the sum."""
    x, residual = torch.randn(2, num_rows, 136, device="cuda").bfloat16()
    weight = torch.randn(264, 136, device="cuda").bfloat16()
    call = partial(cupynorm.rms_norm_linear, norm_weight=None, weight=weight, fused="kernel")
    y, added = call(x, residual=residual, return_residual=True)
    assert torch.equal(added, x + residual) and torch.equal(y, call(added))


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize("num_rows", (2, 300))
def test_replays_of_a_graph_see_new_values(num_rows):
    module = LayerNormLinear(64, 256, fused="kernel", params_dtype=torch.bfloat16)
    x = torch.randn(num_rows, 64, device="cuda", dtype=torch.bfloat16)
    assert_replays_see_new_values(module, x)


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
def test_the_default_of_few_rows():
    x = torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    made = cupynorm.rms_norm_linear(x, None, weight)
    assert torch.equal(made, cupynorm.rms_norm_linear(x, None, weight, fused="kernel"))
    assert torch.equal(made[1:], cupynorm.rms_norm_linear(x[1:], None, weight))
    exact = torch.nn.functional.rms_norm(x.double(), (4096,)) @ weight.double().T
    plain = cupynorm.rms_norm_linear(x, None, weight, fused="plain")
    assert (made - exact).norm() <= 1.1 * (plain - exact).norm() and not torch.equal(made, plain)


@pytest.mark.gpu
@pytest.mark.usefixtures("sm_90")
def test_what_does_not_fit_takes_the_plain_path():
    x = torch.randn(64, 136, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    for each in (x[:, :128], x[:, :124].contiguous(), x[:, :128].float().contiguous()):
        part = weight[:, : each.shape[1]].contiguous().to(each.dtype)
        made = cupynorm.rms_norm_linear(each, None, part, fused="kernel")
        assert torch.equal(made, cupynorm.rms_norm_linear(each, None, part))


ROWS, OUT = 32768, 2048  # enough for the default with 1024 columns


@pytest.fixture
def takes_kernel():
    name = torch.cuda.get_device_name()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"the default of {name} is the plain path")


def rows_of(kind, num_cols):
    """Rows in float32 on a GPU: what they are, or their mean in standard deviations."""
    draw = partial(torch.randn, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    x = draw(ROWS, num_cols)
    if kind == "outliers":
        x[:, 3] += 36
        x[:, num_cols // 2] *= -60
        x[::7, 5] = 500
    elif kind == "constant rows":
        x = (x[:, :1] * 1000).expand(ROWS, num_cols).contiguous()
    elif kind != "random":
        x += kind
    return x


def real_layer():
    """x, norm_weight and norm_bias of a pretrained encoder, in float32, and their eps."""
    layers = np.load(Path(__file__).parents[1] / "data" / "minilm_layer_norms.npz")
    x, weight, bias, eps = (layers[f"embeddings/{name}"] for name in ("x", "weight", "bias", "eps"))
    on_gpu = partial(torch.tensor, dtype=torch.float32, device="cuda")
    return *map(on_gpu, (np.resize(x, (ROWS, x.shape[1])), weight, bias)), float(eps)


@pytest.mark.gpu
@pytest.mark.usefixtures("takes_kernel")
@torch.no_grad()
@pytest.mark.parametrize("kind", ("random", 64, 1000, "outliers", "constant rows", "real"))
def test_default_is_as_exact_as_the_plain_path(kind, monkeypatch):
    """The error of y is at most 1.1 times the plain path's."""
    torch.manual_seed(0)
    calls, forward = [], one_kernel.forward
    monkeypatch.setattr(
        one_kernel, "forward", lambda *given, **how: calls.append(1) or forward(*given, **how)
    )
    num_cols, out_features, eps = product_plan.MOST_CENTERED_COLS, OUT, 1e-5
    if kind == "real":
        x, norm_weight, norm_bias, eps = real_layer()
        num_cols, out_features = x.shape[1], 4 * OUT
    else:
        x = rows_of(kind, num_cols)
        norm_weight, norm_bias = torch.randn(2, num_cols, device="cuda") / 2
        norm_weight += 1
    weight = torch.randn(out_features, num_cols, device="cuda") * num_cols**-0.5
    given = [each.bfloat16() for each in (x, norm_weight, norm_bias, weight, weight[:, 0] * 20)]
    made, plain = (cupynorm.layer_norm_linear(*given, eps, fused=each) for each in (None, "plain"))
    x, norm_weight, norm_bias, *linear = (each.double() for each in given)
    normalized = torch.nn.functional.layer_norm(x, (num_cols,), norm_weight, norm_bias, eps)
    exact = torch.nn.functional.linear(normalized, *linear)
    assert (made - exact).norm() <= 1.1 * (plain - exact).norm() and len(calls) == 1


@pytest.fixture
def layer(takes_kernel):
    """A layer and its input. The second of both is that of the plain path."""
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16}
    made = [LayerNormLinear(1024, OUT, fused=fused, **options) for fused in (None, "plain")]
    made[1].load_state_dict(made[0].state_dict())
    return *made, torch.randn(ROWS, 1024, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
def test_default_follows_writes_and_keeps_no_memory(layer):
    module, plain, x = layer
    with torch.no_grad():
        y = module(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        module.weight.data.mul_(2)
        plain.weight.data.mul_(2)
        again = module(x)
        assert torch.cuda.memory_allocated() - before == again.nbytes
        assert torch.equal(again, 2 * y) and not torch.equal(again, plain(x))
        assert (again - plain(x)).norm() <= 2**-7 * again.norm()
        assert_replays_see_new_values(module, x)
