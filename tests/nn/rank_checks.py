"""Checks of two ranks: how they are listed, their tensors, and how results are compared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from start_ranks import Checks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

import cupynorm


class Ranks(NamedTuple):
    rank: int
    device: str
    mesh: DeviceMesh

    def random(self, *shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
        """Random numbers that are the same on both ranks."""
        generator = torch.Generator().manual_seed(seed + sum(shape))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device, dtype)

    def lay(self, tensor: torch.Tensor, placement) -> DTensor:
        """A DTensor of a tensor that both ranks have. Partial: all on rank 0, zeros on rank 1."""
        if placement.is_partial():
            return DTensor.from_local(
                tensor * (self.rank == 0), self.mesh, [placement], run_check=False
            )
        return distribute_tensor(tensor, self.mesh, [placement])


CHECKS = Checks()
check = CHECKS.add


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares float64 results of one formula whose operations differ in order.

    Allows 2^10 roundings of terms of at most 2^4 times the largest result.
    """
    got = full(got).detach()
    assert got.dtype == expected.dtype == torch.float64, f"{name} is of dtype {got.dtype}"
    allowed = 2.0**-53 * 2**14 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        got, expected, rtol=0, atol=allowed, msg=lambda text: f"{name}: {text}"
    )


def ours(norm, x, weight, bias, extents=(8,), **options):
    if norm == "rms_norm":
        return cupynorm.rms_norm(x, extents, weight, 0.1, bias=bias, **options)
    return cupynorm.layer_norm(x, extents, weight, bias, 0.1, **options)


def theirs(norm, x, weight, bias, extents=(8,)):
    if norm == "rms_norm":
        return functional.rms_norm(x, extents, weight, 0.1) + (0 if bias is None else bias)
    return functional.layer_norm(x, extents, weight, bias, 0.1)


NORMS = ("layer_norm", "rms_norm")
