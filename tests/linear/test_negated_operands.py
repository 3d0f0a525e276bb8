"""Torch views whose elements are those in memory times -1, as operands of linear layers."""

from __future__ import annotations

import copy

import pytest

import cupynorm

torch = pytest.importorskip("torch")

from linear_cases import CPU  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cupynorm import LayerNormLinear, Linear  # noqa: E402
from cupynorm.linear import one_kernel  # noqa: E402
from cupynorm.linear.operands import LinearCall, LinearOptions, Operands, launch_of  # noqa: E402
from cupynorm.linear.operands import join  # noqa: E402
from cupynorm.plan.devices import DEVICES  # noqa: E402

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
        with cupynorm.fp8_autocast(recipe=cupynorm.CurrentScaling()):
            y = layer(x)
        return y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))

    expected = call(x)
    for name, parameter in layer.named_parameters():
        setattr(layer, name, torch.nn.Parameter(negated(parameter)))
    assert all(each.is_neg() for each in layer.parameters())
    for result, right in zip(call(negated(x)), expected, strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("recipe", [cupynorm.CurrentScaling, cupynorm.DelayedScaling])
def test_what_8_bits_save_comes_back_negated(device, recipe):
    """Hooks of saved tensors may return any tensor with the same elements."""
    torch.manual_seed(0)
    x = torch.randn(16, WIDTH, device=device)
    layer = LayerNormLinear(WIDTH, OUT, device=device)

    def negated_if_wide(tensor):
        return negated(tensor) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor

    def gradients(unpack):
        made = copy.deepcopy(layer)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            with cupynorm.fp8_autocast(recipe=recipe()):
                y = made(x)
            return torch.autograd.grad(y, [*made.parameters()], torch.ones_like(y))

    for got, expected in zip(gradients(negated_if_wide), gradients(lambda tensor: tensor)):
        assert torch.equal(got, expected)


def test_joined_parts():
    memory = torch.arange(1.0, 9.0).view(4, 2)
    first, second = memory.split(2)
    for parts in ((first, torch._neg_view(second)), (torch._neg_view(first), second)):
        assert torch.equal(join(parts), torch.cat(parts))
    both = torch._neg_view(first), torch._neg_view(second)
    assert torch.equal(join(both), -memory) and join(both).data_ptr() == memory.data_ptr()


def test_the_kernel_takes_no_negated_operand(monkeypatch):
    monkeypatch.setattr(one_kernel.launch, "device", lambda index: DEVICES["H200"])
    options = LinearOptions(True, 1e-5, False, False, False, None, launch_of(0))
    options = options._replace(dtype=torch.bfloat16)
    shapes = SHAPES | {"input": (16384, 2048), "residual": (16384, 2048), "weight": (2048, 2048)}
    with FakeTensorMode():
        for name in shapes:
            tensors = {
                each: torch.empty(shape, dtype=torch.bfloat16, device="cuda")
                for each, shape in shapes.items()
            }
            tensors[name] = torch._neg_view(tensors[name])
            parts = (tensors.pop("weight"),), (tensors.pop("bias"),)
            input, *norm, residual = tensors.values()
            call = LinearCall(Operands(input, residual, *norm, *parts), options)
            assert "negate their memory" in one_kernel.why_not(call), name


def test_saved_parts_have_their_sign():
    layer = LayerNormLinear(8, 4, parameters_split=("a", "b"), **CPU)
    values = {name: each.detach().clone() for name, each in layer.named_parameters()}
    for name, parameter in layer.named_parameters():
        setattr(layer, name, torch.nn.Parameter(negated(parameter)))
    saved = layer.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in values.items())
