"""What checks of linear layers in distributed training share."""

from __future__ import annotations

import torch
from start_ranks import DEVICE, Checks
from torch import distributed

from cupynorm import LayerNormLinear

CHECKS = Checks()
check = CHECKS.add


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_layers(number: int, **options) -> torch.nn.ModuleList:
    layers = torch.nn.ModuleList(
        LayerNormLinear(16, 16, device=DEVICE, **options) for _ in range(number)
    )
    with torch.no_grad():
        for seed, parameter in enumerate(layers.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return layers


def gathered(value) -> list:
    values = [None, None]
    distributed.all_gather_object(values, value)
    return values


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
