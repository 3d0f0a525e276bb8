"""torch.jit.trace, torch.export and torch.fx record the norms, and no result of them."""

from __future__ import annotations

import warnings

import pytest

import cupynorm

torch = pytest.importorskip("torch")
from module_inputs import random_input  # noqa: E402
from norm_calls import assert_few_roundings  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Block(torch.nn.Module):
    """Both norms, one with a residual whose sum is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.first, self.last = cupynorm.RMSNorm(16), cupynorm.LayerNorm(16)

    def forward(self, x):
        y, added = self.first(self.linear(x), residual=x, return_residual=True)
        return self.last(y) + added


def jit_trace(call, x):
    """Any warning but that of its age is an error: torch warns of values that it bakes in."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return torch.jit.trace(call, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recorded", [False, True])
def test_jit_trace_takes_other_values_and_other_rows(recorded, device):
    """The trace under no_grad had the result of its example as a constant."""
    block = Block().to(device)
    example, x = random_input(4, 16).to(device), random_input(7, 16, seed=1).to(device)
    with torch.set_grad_enabled(recorded):
        traced = jit_trace(block, example)
        got, expected = traced(x), block(x)
    assert_few_roundings([got], [expected])
    assert not torch.allclose(got[:4], block(example))
    if recorded:
        parameters = list(block.parameters())
        dy = torch.randn_like(got)
        pair = (torch.autograd.grad(each, parameters, dy) for each in (got, expected))
        assert_few_roundings(*pair, 2**5)


@pytest.mark.parametrize("device", DEVICES)
def test_jit_trace_of_fused_options(device):
    def call(x):
        options = {"fuse": cupynorm.functors.dropout(0.5, 3), "residual": x.double()}
        return cupynorm.layer_norm(x, 16, return_residual=True, **options)

    example, x = random_input(4, 16).to(device), random_input(7, 16, seed=1).to(device)
    traced = jit_trace(call, example)
    assert_few_roundings(traced(x), call(x))


@pytest.mark.parametrize("options", [{"out_dtype": "float8_e4m3fn"}, {"out": torch.empty(4, 16)}])
def test_jit_trace_refuses_what_is_no_result_of_torch(options):
    with pytest.raises(NotImplementedError, match="was given to a call that torch traces"):
        jit_trace(lambda x: cupynorm.layer_norm(x, 16, **options), random_input(4, 16))


def test_jit_trace_refuses_what_a_layer_keeps():
    layer, x = cupynorm.LayerNormLinear(16, 8, device="cpu"), random_input(4, 16)
    with pytest.raises(NotImplementedError, match="record a layer inside fp8_autocast"):
        with cupynorm.fp8_autocast():
            jit_trace(layer, x)
    layer = cupynorm.LayerNormLinear(16, 8, device="cpu", delay_wgrad_compute=True)
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute was called .* torch.no_gr"):
        jit_trace(layer, x)
    with torch.no_grad():
        assert_few_roundings([jit_trace(layer, x)(x + 1)], [layer(x + 1)])


def export(call, x):
    return torch.export.export(call, (x,)).module()


def compiled(call, x):
    torch._dynamo.reset()
    return torch.compile(call, backend="eager")


@pytest.mark.parametrize(
    "record, region",
    ((jit_trace, False), (export, False), (compiled, False), (compiled, True)),
    ids=("jit_trace", "export", "compiled", "compiled in a region"),
)
def test_what_is_recorded_may_be_written_in_place(record, region):
    """As torch.nn.ReLU(inplace=True) writes."""
    layer = cupynorm.LayerNormLinear(16, 8, device="cpu")
    made = []
    for in_place in (False, True):
        model = torch.nn.Sequential(layer, torch.nn.ReLU(in_place))
        x = random_input(2, 3, 16).requires_grad_()
        with cupynorm.fp8_autocast(region, cupynorm.recipes.CurrentScaling()):
            y = record(model, x.detach())(x) if in_place else model(x)
        y.square().sum().backward()
        made.append((y.detach(), x.grad))
    assert made[0][1].abs().max() > 0
    assert_few_roundings(*made)


def test_a_layer_with_delayed_gradients_is_exported():
    for make in (cupynorm.LayerNormLinear, cupynorm.Linear):
        layer, x = make(16, 8, delay_wgrad_compute=True, device="cpu"), random_input(4, 16)
        exported = export(layer, x)
        assert_few_roundings([exported(x)], [layer(x)])
        exported(x).sum().backward()
        assert dict(exported.named_parameters())["weight"].grad.abs().max() > 0


def test_export_refuses_8_bits():
    """A graph has no way to the scales that a layer keeps, in another process least of all."""
    x = random_input(4, 16)
    norm, linear = cupynorm.LayerNorm(16), cupynorm.Linear(16, 16)

    class Quantised(torch.nn.Module):
        def forward(self, x):
            return norm(x, fp8_output=True).dequantize()

    for recording in (export, lambda call, x: make_fx(call)(x)):
        for model, said in (
            (linear, "a layer inside fp8_autocast"),
            (cupynorm.LayerNormLinear(16, 8, device="cpu"), "a layer inside fp8_autocast"),
            (Quantised(), "a norm with fp8_output=True"),
        ):
            with cupynorm.fp8_autocast(), pytest.raises(NotImplementedError, match=said):
                recording(model, x)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
ANY_ROWS = ({0: torch.export.Dim("rows", min=2, max=64)},)
WAYS = {
    "jit.trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "export": lambda m, x: torch.export.export(m, (x,), dynamic_shapes=ANY_ROWS).module(),
    "make_fx": lambda m, x: make_fx(m, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x),
    "compile": lambda m, _: torch.compile(m, fullgraph=True, dynamic=True, backend="aot_eager"),
}


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_recorded_models_take_any_rows_in_any_context(way, context):
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        cupynorm.Linear(16, 16),
        cupynorm.LayerNorm(16),
        cupynorm.LayerNormLinear(16, 16, device="cpu", parameters_split=("q", "k")),
        cupynorm.RMSNorm(16),
    )
    with CONTEXTS[context]():
        recorded = WAYS[way](model, random_input(4, 16))
    for rows in (4, 7):
        x = random_input(rows, 16, seed=rows)
        with CONTEXTS[context]():
            got, expected = recorded(x), model(x)
        assert_few_roundings([got], [expected])


EXPLICIT = {
    "forward": lambda x: cupynorm.layer_norm_forward(x, 16).y,
    "fused forward": lambda x: cupynorm.rms_norm_forward(x, 16, round_x_hat=True).y,
    "backward": lambda x: cupynorm.rms_norm_backward(x, x, 16, x[:, 0]).dx,
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_jit_trace_refuses_explicit_calls(name):
    """Their kernels write to memory that torch does not see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of shapes that are looked at
        with pytest.raises(NotImplementedError, match="an explicit forward or backward; expected"):
            torch.jit.trace(EXPLICIT[name], random_input(4, 16))


@pytest.mark.parametrize("device", DEVICES)
def test_symbolic_trace_records_the_calls(device):
    block = Block().to(device)
    traced = torch.fx.symbolic_trace(block)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert cupynorm.layer_norm in called and cupynorm.rms_norm in called
    x = random_input(7, 16).to(device)
    assert torch.equal(traced(x), block(x))


def wrapped_norm(x, weight):
    return cupynorm.rms_norm(x, 16, weight)


torch.fx.wrap("wrapped_norm")


def test_symbolic_trace_of_a_function_needs_wrap():
    weight, x = random_input(16, seed=1), random_input(7, 16)
    traced = torch.fx.symbolic_trace(lambda x: wrapped_norm(x, weight) + 1)
    assert torch.equal(traced(x), wrapped_norm(x, weight) + 1)
    for name in ("layer_norm", "rms_norm", "layer_norm_forward"):
        with pytest.raises(TypeError, match="is a Proxy of torch.fx; .* after torch.fx.wrap"):
            torch.fx.symbolic_trace(lambda x: getattr(cupynorm, name)(x, 16))  # noqa: B023
