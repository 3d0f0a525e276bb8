"""cupynorm.Linear, and inputs that are in 8 bits already."""

from __future__ import annotations

import pytest
from cupynorm.reference import fp8 as reference

torch = pytest.importorskip("torch")
from fp8_linear_cases import NAME, assert_product, values  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm import Linear, fp8_autocast  # noqa: E402
from cupynorm.recipes import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
)

RECIPES = (
    DelayedScaling(amax_history_len=2),
    CurrentScaling(Format.E4M3, power_of_two=True),
    BlockScaling(),
)
NUM_ROWS, IN, OUT = 37, 100, 31


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul(3).to(dtype)


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Linear(IN, OUT, dtype=dtype, **options)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_products_of_exactly_quantised_tensors(recipe):
    layer, x, dy = make(), draw(NUM_ROWS, IN).requires_grad_(), draw(NUM_ROWS, OUT, seed=1)
    for _ in range(2):  # the scales of the second step are those of the first one's amaxes
        layer.zero_grad()
        x.grad = None
        with fp8_autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
    weight, bias = layer.weight, layer.bias.detach().double().numpy()
    assert_product(y, values(x, recipe), values(weight, recipe, is_weight=True).T, bias)
    of_rows = values(weight.t().contiguous(), recipe, is_weight=True).T
    if isinstance(recipe, DelayedScaling):  # the scale of dy changes when the next region ends
        with fp8_autocast(recipe=recipe):
            y = layer(x)
        x.grad = layer.weight.grad = None
        y.backward(dy)
    assert_product(x.grad, values(dy, recipe, is_gradient=True), of_rows)
    x_cols, dy_cols = x.detach().t().contiguous(), dy.t().contiguous()
    assert_product(
        layer.weight.grad, values(dy_cols, recipe, is_gradient=True), values(x_cols, recipe).T
    )


def test_outside_of_a_region_it_is_torchs_layer():
    layer, plain = make(), torch.nn.Linear(IN, OUT)
    plain.load_state_dict(layer.state_dict())
    x = draw(2, 5, IN)
    assert torch.equal(layer(x), plain(x)) and isinstance(layer, torch.nn.Linear)
    with fp8_autocast(recipe=DelayedScaling(amax_history_len=2)):
        assert not torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("kind", (Linear, cupynorm.LayerNormLinear))
def test_weight_gradients_without_values_are_refused(kind):
    layer = kind(8, 4, device="meta", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.empty_like(layer.weight)
    x = torch.empty(3, 8, device="meta")
    with pytest.raises(NotImplementedError, match="of their own or on meta"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (3, 4)
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="a class of their own"):
        kind(8, 4, device="cpu", delay_wgrad_compute=True)(torch.empty(3, 8))


def test_backward_keeps_a_byte_an_element():
    layer, x, seen = make(torch.bfloat16), draw(64, IN, dtype=torch.bfloat16), {}

    def pack(saved):
        if not isinstance(saved, torch.nn.Parameter):
            seen[saved.data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with fp8_autocast(recipe=CurrentScaling()), hooks:
        layer(x.requires_grad_())
    # Transposed in 8 bits: input and weight. Two scales, and an element of the input's dtype.
    assert sum(seen.values()) == 64 * IN + IN * OUT + 2 * 4 + 2


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_8_bit_y_of_a_norm_is_used_as_it_is(recipe, monkeypatch):
    norm, layer = cupynorm.RMSNorm(IN, device="cpu"), make()
    x, dy = draw(4, 9, IN).requires_grad_(), draw(4, 9, OUT, seed=1)
    with fp8_autocast(recipe=recipe):
        y_norm = norm(x, fp8_output=True)
        y = layer(y_norm)
    y.backward(dy)
    rows = y_norm.dequantize().detach().double().reshape(36, IN).numpy()
    is_delayed = isinstance(recipe, DelayedScaling)

    def of(tensor, **options):  # a layer's first delayed scale is 1
        if is_delayed:
            name = NAME[recipe.fp8_format.value["is_gradient" in options]]
            return reference.decode(reference.encode(tensor.detach().numpy(), name), name)
        return values(tensor, recipe, **options)

    bias = layer.bias.detach().double().numpy()
    assert_product(y.reshape(36, OUT), rows, of(layer.weight, is_weight=True).T, bias)
    # The transposed copy has blocks of its own, of the dequantised values.
    columns = rows.T
    if isinstance(recipe, BlockScaling):
        columns = values(torch.from_numpy(rows.T.copy()), recipe)
    dy_cols = dy.reshape(36, OUT).t().contiguous()
    assert_product(layer.weight.grad, of(dy_cols, is_gradient=True), columns.T)
    # The gradient passes through the 8-bit tensor to what was normalised.
    twin = draw(4, 9, IN).requires_grad_()
    reaches = (
        of(dy.reshape(36, OUT), is_gradient=True)
        @ of(layer.weight.t().contiguous(), is_weight=True).T
    )
    reaches = torch.from_numpy(reaches).float().reshape(4, 9, IN)
    cupynorm.rms_norm(twin, IN, norm.weight).backward(reaches)
    assert (x.grad - twin.grad).abs().max() <= 2.0**-20 * twin.grad.abs().max()
    if is_delayed:
        state = layer._fp8.scales["forward"]
        assert state.scale[0] == 1 and state.scale[1] != 1 and not state.amax_history[:, 0].any()


def test_8_bit_inputs_that_do_not_fit_are_dequantised():
    layer, x = make(), draw(9, IN)
    behind_norm = cupynorm.LayerNormLinear(IN, OUT, device="cpu")
    dtypes = {"row": "int8", "tensor": "float8_e5m2", "block": "float8_e4m3fn"}
    for scale, dtype in dtypes.items():
        quantized = cupynorm.layer_norm(x, IN, out_dtype=cupynorm.Quantize(dtype, scale))
        for each in (layer, behind_norm):
            assert torch.equal(each(quantized), each(quantized.dequantize()))
            with torch.no_grad(), fp8_autocast(recipe=CurrentScaling()):
                assert torch.equal(each(quantized), each(quantized.dequantize()))
    host = cupynorm.layer_norm(x.numpy(), IN, out_dtype="float8_e4m3fn")
    for each in (layer, behind_norm):
        with pytest.raises(TypeError, match="input is an ndarray; expected a torch tensor"):
            each(host)


def test_layers_in_a_row_hand_8_bits_on():
    first, second, x = make(), Linear(OUT, 8), draw(9, IN)
    with torch.no_grad(), fp8_autocast(recipe=CurrentScaling()):
        quantized = first(x, fp8_output=True)
        y = second(quantized)
    assert_product(
        y,
        quantized.dequantize().double().numpy(),
        values(second.weight, CurrentScaling()).T,
        second.bias.detach().double().numpy(),
    )


def test_wrong_calls_are_refused():
    layer, x = make(), draw(3, IN)
    for call, error, sentence in (
        (lambda: layer(x[:, 1:]), ValueError, r"input has shape \(3, 99\); expected \(..., 100\)"),
        (lambda: layer([1.0]), TypeError, "input is a list; expected a torch tensor"),
        (lambda: layer(x, fp8_output=True), ValueError, "fp8_output is True outside of fp8_autoc"),
        (
            lambda: torch.fx.symbolic_trace(torch.nn.Sequential(layer)),
            NotImplementedError,
            "torch.fx was asked to trace into a cupynorm.Linear",
        ),
        (lambda: Linear(IN, OUT, 1e-5), TypeError, "bias is 1e-05; expected True or False"),
        (
            lambda: Linear(IN, OUT, False, False),
            TypeError,
            "device is False; expected a torch.device",
        ),
    ):
        with pytest.raises(error, match=sentence):
            call()
    with fp8_autocast(recipe=CurrentScaling()):
        with pytest.raises(TypeError, match="float64 inside fp8_autocast"):
            make(torch.float64)(x.double())
        with pytest.raises(ValueError, match="fp8_output is True where gradients are recorded"):
            layer(x, fp8_output=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_results_on_a_gpu_are_those_of_the_cpu(recipe):
    made = []
    for device in ("cpu", "cuda"):
        norm, layer = cupynorm.LayerNorm(IN).to(device), make().to(device)
        for _ in range(3):
            x = draw(NUM_ROWS, IN).to(device).requires_grad_()
            layer.zero_grad()
            with fp8_autocast(recipe=recipe):
                y = layer(norm(x, fp8_output=True)) + layer(x)
            y.backward(draw(NUM_ROWS, OUT, seed=1).to(device))
        made.append([each.double().cpu() for each in (y, x.grad, layer.weight.grad)])
    for expected, got in zip(*made):
        assert (got - expected).norm() <= 2.0**-7 * expected.norm()
