"""Modules and tensors of the tests of 8-bit outputs."""

from __future__ import annotations

import pytest

import cupynorm

torch = pytest.importorskip("torch")

BOTH = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])


def random(*shape, seed=0, dtype=torch.float32, device="cpu", grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_(grad)


def make(kind, num_cols=200, device="cpu", **options):
    """A module with random parameters."""
    module = getattr(cupynorm, kind)(num_cols, device=device, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(num_cols, seed=seed + 1))
    return module


def raw(tensor):
    return (
        (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).detach().cpu().numpy()
    )
