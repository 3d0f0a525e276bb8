"""torch.onnx.export(dynamo=True): what an ONNX model computes is what the modules compute."""

from __future__ import annotations

import copy
import warnings

import pytest

import cupynorm

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
reference = pytest.importorskip("onnx.reference")

ROWS = {0: torch.export.Dim("rows")}


def export(module: torch.nn.Module, *inputs: torch.Tensor):
    """The ONNX model of a module, with any number of rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, of deprecated functions of torch
        program = torch.onnx.export(
            module.eval(), inputs, dynamo=True, verbose=False, dynamic_shapes=[ROWS] * len(inputs)
        )
    return program.model_proto


def run(model, *inputs: torch.Tensor) -> list[torch.Tensor]:
    names = [each.name for each in model.graph.input]
    given = {name: each.numpy() for name, each in zip(names, inputs)}
    return [torch.from_numpy(each) for each in reference.ReferenceEvaluator(model).run(None, given)]


def operators(model) -> set[str]:
    return {node.op_type for node in model.graph.node}


class Call(torch.nn.Module):
    """A module of a function and its keywords."""

    def __init__(self, function, **options) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.weight = torch.nn.Parameter(torch.randn(16))
        self.bias = torch.nn.Parameter(torch.randn(16))

    def forward(self, x, other=None):
        inputs = (x,) if other is None else (x, other)
        return self.function(self, *inputs, **self.options)


def layer_norm(module, x, **options):
    return cupynorm.layer_norm(x, 16, module.weight, module.bias, **options)


def rms_norm(module, x, **options):
    return cupynorm.rms_norm(x, 16, module.weight, **options)


def with_residual(module, x, residual, **options):
    return layer_norm(module, x, residual=residual, return_residual=True, **options)


def with_scaled_rows(module, x, scale, **options):
    return rms_norm(module, x, fuse=cupynorm.functors.row_scale(scale), **options)


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) * shape[0])
    return torch.randn(shape, generator=generator)


CALLS = {
    "layer_norm": (layer_norm, {}, (draw(5, 16),)),
    "rms_norm": (rms_norm, {}, (draw(5, 16),)),
    "zero_centered": (rms_norm, {"zero_centered_weight": True}, (draw(5, 3, 16),)),
    "out_dtype": (layer_norm, {"out_dtype": torch.float64}, (draw(5, 16),)),
    "float64": (layer_norm, {}, (draw(5, 16).double(),)),
    "residual": (with_residual, {}, (draw(5, 16), draw(5, 16) + 2)),
    "wide residual": (with_residual, {}, (draw(5, 16), draw(5, 16).double())),
    "row_scale": (with_scaled_rows, {}, (draw(5, 16), draw(5))),
    "round_x_hat": (rms_norm, {"round_x_hat": True}, (draw(5, 16).half(),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    function, options, inputs = CALLS[name]
    module = Call(function, **options)
    model = export(module, *inputs)
    more = [torch.cat([each, each.flip(-1)]) for each in inputs]  # other rows than the example's
    got, expected = run(model, *more), module(*more)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        assert one.dtype == other.dtype
        # The dtype of the arithmetic is at least float32, and ONNX sums in another order.
        unit = max(torch.finfo(torch.float32).eps, torch.finfo(one.dtype).eps)
        torch.testing.assert_close(one, other.detach(), rtol=4 * unit, atol=16 * unit)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda **keywords: cupynorm.LayerNorm(16, **keywords),
        lambda **keywords: cupynorm.RMSNorm(16, **keywords),
        lambda **keywords: cupynorm.LayerNormLinear(
            16, 24, parameters_split=("q", "k", "v"), device="cpu", **keywords
        ),
    ],
    ids=["LayerNorm", "RMSNorm", "LayerNormLinear"],
)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_modules(make, zero_centered):
    module = make(zero_centered_gamma=zero_centered)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    model, x = export(module, draw(5, 16)), draw(9, 16)
    assert not any(node.domain for node in model.graph.node if "cupynorm" in node.domain)
    if isinstance(module, cupynorm.LayerNorm):
        assert "LayerNormalization" in operators(model)
    (got,) = run(model, x)
    torch.testing.assert_close(got, module(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_model_whose_norms_were_swapped():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    swapped = copy.deepcopy(layer)
    assert len(cupynorm.swap_norms(swapped).swapped) == 2
    x = draw(3, 4, 16)
    (got,) = run(export(swapped, x), x)
    torch.testing.assert_close(got, layer(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_functors():
    module, x = Call(layer_norm, fuse=cupynorm.functors.layer_scale(draw(16))), draw(5, 16)
    (got,) = run(export(module, x), x)
    torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)
