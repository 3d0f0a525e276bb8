"""Checks of models on two ranks: DistributedDataParallel and fully_shard."""

from __future__ import annotations

import copy
from functools import partial

import torch
from rank_checks import assert_close, check, full
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional

import cupynorm


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(8), torch.nn.RMSNorm(8, 1e-5)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.norm_2(x + self.down(torch.tanh(self.up(self.norm_1(x)))))


def model_of_torch(ranks) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), Block(), Block(), torch.nn.LayerNorm(8)).to(
        ranks.device, torch.float64
    )
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(ranks.random(*parameter.shape, seed=seed) / 2)
    return model


NUM_NORMS = 5


def step(model, x, target):
    """The gradients, and the parameters after one step of AdamW, by name.

    A change of a gradient changes its parameter by no more: the step's slope is at most lr / eps,
    which is 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, weight_decay=0.1)
    functional.mse_loss(model(x), target).backward()
    of = {name: full(parameter.grad).clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    return of, {
        name: full(parameter).detach().clone() for name, parameter in model.named_parameters()
    }


def check_training(ranks, wrap) -> torch.nn.Module:
    """wrap(model), with half a batch on each rank, takes the step of torch's norms on all of it."""
    x, target = ranks.random(4, 3, 6), ranks.random(4, 3, 8, seed=1)
    plain = model_of_torch(ranks)
    expected = step(copy.deepcopy(plain), x, target)
    swapped = cupynorm.swap_norms(plain)
    assert len(swapped.swapped) == NUM_NORMS and not swapped.left, swapped
    mine = slice(2 * ranks.rank, 2 * ranks.rank + 2)
    model = wrap(plain)
    found = step(model, x[mine], target[mine])
    for what, one, other in zip(("gradient of", "stepped"), found, expected):
        one = {name.removeprefix("module."): value for name, value in one.items()}
        assert list(one) == list(other)
        for name, right in other.items():
            assert_close(f"{what} {name}", one[name], right)
    moved = max(
        (found[1][name] - right).abs().max().item()
        for name, right in zip(found[1], plain_values(ranks))
    )
    assert moved > 1e-3, "the step changed nothing: it shows nothing"
    return model


def plain_values(ranks):
    return [parameter.detach() for parameter in model_of_torch(ranks).parameters()]


@check
def distributed_data_parallel(ranks):
    options = {"device_ids": [ranks.rank]} if ranks.device == "cuda" else {}
    check_training(ranks, partial(torch.nn.parallel.DistributedDataParallel, **options))


def shard_blocks(model, **options):
    for block in model[1:3]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@check
def fully_sharded(ranks):
    model = check_training(ranks, partial(shard_blocks, mesh=ranks.mesh))
    for name, parameter in model.named_parameters():
        assert (
            parameter.placements == (Shard(0),)
            and parameter.to_local().shape[0] == parameter.shape[0] // 2
        ), name


@check
def fully_sharded_and_compiled(ranks):
    def wrap(model):
        for block in model[1:3]:
            block.compile(backend="aot_eager")
        return shard_blocks(model, mesh=ranks.mesh)

    check_training(ranks, wrap)


@check
def fully_sharded_in_mixed_precision(ranks):
    """float32 parameters, bfloat16 arithmetic, float32 sums: the mean of both ranks, to the bit."""
    norm = cupynorm.LayerNorm(8, device=ranks.device)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(ranks.random(8, seed=seed, dtype=torch.float32))
    leaves = [parameter.detach().bfloat16().requires_grad_() for parameter in norm.parameters()]
    x = ranks.random(5, 8, seed=10 + ranks.rank, dtype=torch.bfloat16)
    dy = ranks.random(5, 8, seed=20 + ranks.rank, dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(torch.nn.Sequential(norm), mesh=ranks.mesh, mp_policy=policy)
    y = model(x)
    y.backward(dy)
    right = cupynorm.layer_norm(x, 8, *leaves)
    right.backward(dy)
    assert y.dtype == torch.bfloat16 and torch.equal(y, right)
    for parameter, leaf in zip(norm.parameters(), leaves):
        average = leaf.grad.float()
        distributed.all_reduce(average)
        assert (
            parameter.dtype == torch.float32
            and torch.equal(full(parameter.grad), average / 2)
            and average.abs().max() > 0
        )


@check
def norms_that_are_sharded_already_are_left(ranks):
    """fully_shard gathers weights by hooks of the module, which a swapped module would not have."""
    model = model_of_torch(ranks)
    x, target = ranks.random(4, 3, 6), ranks.random(4, 3, 8, seed=1)
    expected, _ = step(copy.deepcopy(model), x, target)
    fully_shard(model[1].norm_1, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    swapped = cupynorm.swap_norms(model)
    assert len(swapped.left) == NUM_NORMS and not swapped.swapped, swapped
    found, _ = step(model, x, target)
    for name, right in expected.items():
        assert_close(f"gradient of {name}", found[name], right)
