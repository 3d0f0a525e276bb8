"""Torch views whose elements are those in memory times -1, as operands of linear layers."""

from __future__ import annotations

import pytest

import cupynorm

torch = pytest.importorskip("torch")

from linear_cases import CPU  # noqa: E402

from cupynorm import LayerNormLinear, Linear  # noqa: E402
from cupynorm.linear.operands import join  # noqa: E402

ROWS, WIDTH, OUT = 3, 64, 32
SHAPES = {
    "input": (ROWS, WIDTH),
    "norm_weight": (WIDTH,),
    "norm_bias": (WIDTH,),
    "weight": (OUT, WIDTH),
    "bias": (OUT,),
    "residual": (ROWS, WIDTH),
}


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same elements whose memory has the opposite ones."""
    view = torch._neg_view(-tensor.detach())
    assert view.is_neg() and torch.equal(view, tensor)
    return view.requires_grad_(tensor.requires_grad)


def each_negated(tensors: dict) -> list[dict]:
    everything = {name: negated(each) for name, each in tensors.items()}
    return [*(tensors | {name: each} for name, each in everything.items()), everything]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("fused", [None, "kernel"])
def test_calls(device, fused, is_recorded):
    """On a GPU another path may compute them, which rounds elsewhere. A wrong sign is off by 1."""
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape, device=device).bfloat16().requires_grad_(is_recorded)
        for name, shape in SHAPES.items()
    }

    def call(input, norm_weight, norm_bias, weight, bias, residual):
        options = {"residual": residual, "return_residual": True, "fused": fused}
        operands = input, norm_weight, norm_bias, weight, bias
        results = cupynorm.layer_norm_linear(*operands, **options)
        if not is_recorded:
            return results
        upstream = [torch.full_like(each, 0.5) for each in results]
        leaves = *operands, residual
        plain = torch.autograd.grad(results, leaves, upstream, retain_graph=True)
        again = torch.autograd.grad(results, leaves, list(map(negated, upstream)))
        assert all(map(torch.equal, plain, again))
        return *results, *plain

    expected = call(**tensors)
    for given in each_negated(tensors):
        for result, right in zip(call(**given), expected, strict=True):
            assert (result - right).float().norm() <= 2**-6 * right.float().norm()


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_layers_in_8_bits(device, kind):
    torch.manual_seed(0)
    layer = kind(WIDTH, OUT, device=device)
    x = torch.randn(16, WIDTH, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()

    def call(x):
        x = x.detach().requires_grad_()
        with cupynorm.fp8_autocast(recipe=cupynorm.recipes.CurrentScaling()):
            y = layer(x)
        return y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))

    expected = call(x)
    for name, parameter in layer.named_parameters():
        setattr(layer, name, torch.nn.Parameter(negated(parameter)))
    assert all(each.is_neg() for each in layer.parameters())
    for result, right in zip(call(negated(x)), expected, strict=True):
        assert torch.equal(result, right)


def test_joined_parts():
    memory = torch.arange(1.0, 9.0).view(4, 2)
    first, second = memory.split(2)
    for parts in ((first, torch._neg_view(second)), (torch._neg_view(first), second)):
        assert torch.equal(join(parts), torch.cat(parts))
    both = torch._neg_view(first), torch._neg_view(second)
    assert torch.equal(join(both), -memory) and join(both).data_ptr() == memory.data_ptr()


def test_saved_parts_have_their_sign():
    layer = LayerNormLinear(8, 4, parameters_split=("a", "b"), **CPU)
    values = {name: each.detach().clone() for name, each in layer.named_parameters()}
    for name, parameter in layer.named_parameters():
        setattr(layer, name, torch.nn.Parameter(negated(parameter)))
    saved = layer.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in values.items())
