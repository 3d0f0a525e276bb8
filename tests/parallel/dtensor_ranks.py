"""Checks of LayerNormLinear with DTensors, by two processes: see start_ranks.py.

All is in float64, so that the order of additions matters little.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from start_ranks import DEVICE, Checks, main
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cupynorm
from cupynorm import LayerNormLinear

CHECKS = Checks()
check = CHECKS.add


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)


def make_layer(in_features=24, out_features=16, **options) -> LayerNormLinear:
    layer = LayerNormLinear(
        in_features, out_features, params_dtype=torch.float64, device=DEVICE, **options
    )
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return layer


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Allows 2^10 roundings of terms of at most 2^4 times the largest result."""
    got = full(got).detach()
    assert got.dtype == expected.dtype == torch.float64, name
    allowed = 2.0**-53 * 2**14 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        got, expected, rtol=0, atol=allowed, msg=lambda text: f"{name}: {text}"
    )


def mesh_of_all():
    return init_device_mesh(DEVICE, (distributed.get_world_size(),))


@check
def weights_and_inputs_of_any_placement(rank):
    mesh = mesh_of_all()
    inputs = (Replicate(), Shard(0), Shard(2))
    weights = (Replicate(), Shard(0), Shard(1))
    options = (
        {"normalization": "RMSNorm", "bias": False},
        {"parameters_split": ("q", "k"), "return_layernorm_output": True},
    )
    for of_input, of_weight, given in itertools.product(inputs, weights, options):
        single = make_layer(**given)
        layer = copy.deepcopy(single)
        for name in layer.weight_names:
            made = distribute_tensor(getattr(single, name).detach(), mesh, [of_weight])
            setattr(layer, name, torch.nn.Parameter(made))
        x, dy = random(4, 2, 24, seed=8), random(4, 2, 16, seed=9)
        x_of_ranks = distribute_tensor(x, mesh, [of_input]).requires_grad_()
        x.requires_grad_()
        y, right = layer(x_of_ranks), single(x)
        if given.get("return_layernorm_output"):
            (y, normalized), (right, expected) = y, right
            assert_close(normalized, expected.detach(), "normalized")
        y.backward(distribute_tensor(dy, mesh, [Replicate()]))
        right.backward(dy)
        text = f"{of_input} {of_weight} {given}"
        assert_close(y, right.detach(), f"y of {text}")
        assert_close(x_of_ranks.grad, x.grad, f"dx of {text}")
        for (name, parameter), other in zip(layer.named_parameters(), single.parameters()):
            assert other.grad.abs().max() > 0
            assert_close(parameter.grad, other.grad, f"{name} of {text}")


@check
def the_function_with_a_residual(rank):
    mesh = mesh_of_all()
    x, residual, weight = random(4, 24), random(4, 24, seed=1), random(16, 24, seed=2)
    given = distribute_tensor(x, mesh, [Shard(0)]), random(24, seed=3), None, weight
    right = cupynorm.layer_norm_linear(x, *given[1:], residual=residual, return_residual=True)
    made = cupynorm.layer_norm_linear(
        *given, residual=distribute_tensor(residual, mesh, [Replicate()]), return_residual=True
    )
    for name, got, expected in zip(("y", "sum"), made, right):
        assert got.placements == (Shard(0),)
        assert_close(got, expected, name)


@check
def what_is_refused(rank):
    mesh = mesh_of_all()
    layer = make_layer()
    x = distribute_tensor(random(4, 24), mesh, [Replicate()])

    def refused(error, sentence, call):
        with pytest.raises(error, match=sentence):
            call()

    with cupynorm.fp8_autocast(recipe=cupynorm.recipes.CurrentScaling()):
        sentence = "a DTensor was given to a linear layer inside fp8_autocast"
        refused(NotImplementedError, sentence, lambda: layer(x.float()))
    sentence = "a layer with fuse_wgrad_accumulation or delay_wgrad_compute was called with tensors"
    refused(NotImplementedError, sentence, lambda: make_layer(delay_wgrad_compute=True)(x))
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    sentence = "a weight or bias is a DTensor and input is a Tensor; expected input to be a DTensor"
    refused(TypeError, sentence, lambda: layer(random(4, 24)))
    shared = make_layer(parallel_mode="column", tp_group=distributed.group.WORLD)
    sentence = "a DTensor was given to a layer with tp_size of 2 or more"
    refused(NotImplementedError, sentence, lambda: shared(x))


if __name__ == "__main__":
    main(CHECKS)
