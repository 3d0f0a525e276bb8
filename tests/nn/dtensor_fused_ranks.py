"""Checks of fused options of DTensors on two ranks."""

from __future__ import annotations

import torch
from rank_checks import NORMS, check, full, ours
from torch.distributed.tensor import Partial, Replicate, Shard

SHAPE = (5, 4, 8)  # ranks have 3 and 2 of 5 rows


def options_of(ranks, dtype):
    """Keywords by name."""
    residual = ranks.random(*SHAPE, seed=6, dtype=dtype)
    wider = ranks.random(*SHAPE, seed=6, dtype=torch.float64)
    return {
        "residual": {"residual": residual},
        "a wider residual": {"residual": wider},
        "round_x_hat": {"round_x_hat": True},
    }


def on_ranks(ranks, given, placement):
    return {
        name: ranks.lay(each, placement) if isinstance(each, torch.Tensor) else each
        for name, each in given.items()
    }


def on_one(given):
    return {
        name: full(each) if isinstance(each, torch.Tensor) else each for name, each in given.items()
    }


def results(norm, x, weight, bias, dy, given):
    """Outputs, and the gradients of all tensors that have one."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves |= {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    leaves = {name: each.detach().clone().requires_grad_() for name, each in leaves.items()}
    options = {name: each for name, each in given.items() if name not in leaves}
    tensors = {name: each for name, each in leaves.items() if name not in ("x", "weight", "bias")}
    made = ours(
        norm,
        leaves["x"],
        leaves["weight"],
        leaves["bias"],
        return_residual=True,
        **options,
        **tensors,
    )
    torch.autograd.backward(made, [dy.to(each.dtype) for each in made])
    return made, {name: each.grad for name, each in leaves.items()}


def assert_same(name, got, right, dtype=None):
    """Of each row the bits are those of the unsharded call; sums over rows add in another order.

    dtype: in which kernels add, that of the input; by default that of the result.
    """
    got = full(got)
    assert got.dtype == right.dtype and right.abs().max() > 0, name
    if name in ("weight", "bias"):
        eps = torch.finfo(dtype or right.dtype).eps
        atol = eps * right.abs().max().item() * 2**4
        torch.testing.assert_close(got, right, rtol=0, atol=atol, msg=lambda text: f"{name} {text}")
    else:
        assert torch.equal(got, right), name


@check
def fused_options(ranks):
    for dtype in (torch.float64, torch.float32):
        x, dy = (ranks.random(*SHAPE, seed=seed, dtype=dtype) for seed in (0, 3))
        weight, bias = ranks.random(8, seed=1), ranks.random(8, seed=2)
        for name, given in options_of(ranks, dtype).items():
            norm = NORMS[len(name) % 2]
            right, gradients = results(norm, x, weight, bias, dy, on_one(given))
            for placement in (Shard(0), Shard(1), Replicate(), Shard(2), Partial()):
                made, found = results(
                    norm,
                    ranks.lay(x, placement),
                    ranks.lay(weight, Replicate()),
                    bias,
                    ranks.lay(dy, Shard(0)),
                    on_ranks(ranks, given, placement),
                )
                is_kept = placement in (Shard(0), Shard(1))
                for one, other in zip(made, right, strict=True):
                    assert one.placements == ((placement,) if is_kept else (Replicate(),))
                    assert_same(f"{name} {placement}", one, other)
                for leaf, gradient in gradients.items():
                    assert_same(leaf, found[leaf], gradient, dtype)
                assert type(found["bias"]) is torch.Tensor
