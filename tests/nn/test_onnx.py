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


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) * shape[0])
    return torch.randn(shape, generator=generator)


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


@pytest.mark.parametrize("exports", [torch.export.export, torch.jit.trace], ids=["export", "trace"])
def test_no_exporter_needs_a_function_for_rms_norm(exports, monkeypatch):
    """Of torch 2.11 none has one for rms_norm. So it is written out, of fake tensors too."""

    def missing(*arguments):
        raise AssertionError("there is no ONNX function for it")

    monkeypatch.setattr(torch.nn.functional, "rms_norm", missing)
    layers = (
        cupynorm.RMSNorm(16),
        cupynorm.LayerNormLinear(16, 8, normalization="RMSNorm", device="cpu"),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        assert exports(torch.nn.Sequential(*layers).eval(), (draw(5, 16),)) is not None
    fake = torch._subclasses.FakeTensorMode().from_tensor(draw(5, 16))
    assert cupynorm.rms_norm(fake, 16).shape == (5, 16)
