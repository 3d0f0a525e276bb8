"""Checks of refusals, checkpoints and first values on several ranks."""

from __future__ import annotations

import contextlib
import sys
import tempfile

import numpy as np
import torch
from layer_cases import (
    DEVICE,
    IN,
    OUT,
    Case,
    Shares,
    check,
    for_main,
    gathered,
    inputs,
    make_layer,
    problem_of,
    refused,
)
from torch import distributed
from torch.distributed import checkpoint as checkpoint_files

from cupynorm import LayerNormLinear, fp8_autocast
from cupynorm.parallel.checkpoints import distributed_state_dict, load_distributed_state_dict
from cupynorm.recipes import DelayedScaling


@check
def scales_that_would_differ_over_ranks(rank):
    case = Case("column", True, "layer_norm", "float32")
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    x, _ = inputs(problem, own)
    alone = [distributed.new_group([each]) for each in range(distributed.get_world_size())][rank]
    outside = distributed.GroupMember.NON_GROUP_MEMBER

    def call(group=None, **options):
        with fp8_autocast(recipe=DelayedScaling(**options), group=group):
            layer(x)

    for _ in range(2):
        refused(
            ValueError, "reduce_amax is False and ranks share a", lambda: call(reduce_amax=False)
        )
        sentence = r"the group of fp8_autocast is .* of ranks \[1\] on rank 1 of tp_group and"
        refused(ValueError, sentence, lambda: call(alone))
        sentence = "the group of fp8_autocast is without this rank; expected a group that has all"
        refused(ValueError, sentence, lambda: call(outside))


@for_main
def gradients_of_gradients(case, rank):
    problem, own = problem_of(case), Shares(case, rank)
    layer = make_layer(case, problem, own)
    x, _ = inputs(problem, own)
    y = layer(x)
    refused(
        RuntimeError,
        "create_graph is True for a layer with tp_size of 2 or more",
        lambda: torch.autograd.grad(y.sum(), x, create_graph=True),
    )
    refused(
        NotImplementedError,
        "torch.func or forward mode was asked to transform a layer with tp_size of 2 or more",
        lambda: torch.func.vmap(layer)(x),
    )


def checkpoints_load_at_another_size(case, rank):
    """From two ranks to one and back; also the scales of DelayedScaling."""
    problem, size = problem_of(case), distributed.get_world_size()
    own, split = Shares(case, rank, split={"q": 8, "k": 8}), {"parameters_split": ("q", "k")}
    one = Case("column", False, case.norm, case.dtype)
    everything = Shares(one, rank)
    everything.outs, everything.ins = np.arange(OUT), np.arange(IN)
    folder = gathered(tempfile.mkdtemp(dir=sys.argv[3]))[0]

    def shards():
        return torch.nn.Sequential(make_layer(case, problem, own, **split))

    def whole():
        return torch.nn.Sequential(make_layer(one, problem, everything, tp_group=None, **split))

    def emptied(model):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        return model

    for save, load, right in ((shards, whole, whole), (whole, shards, shards)):
        saved, path = save(), f"{folder}/{load.__name__}"
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=2)):
            x = torch.ones(size, saved[0].in_features, device=DEVICE)
            saved[0](x)
        checkpoint_files.save(distributed_state_dict(saved), checkpoint_id=path)
        loaded = emptied(load())
        state = distributed_state_dict(loaded)
        checkpoint_files.load(state, checkpoint_id=path)
        load_distributed_state_dict(loaded, state)
        for (name, got), expected in zip(loaded.named_parameters(), right().parameters()):
            assert torch.equal(got, expected), name
        extra = [model[0].get_extra_state() for model in (saved, loaded)]
        assert extra[0].numel() and torch.equal(*extra)


for_main(checkpoints_load_at_another_size)


@for_main
def first_values_of_shards(case, rank):
    """With a generator for each rank they differ; with the same one they are the same."""

    of_device = torch.cuda if DEVICE == "cuda" else torch

    class Tracker:
        generator_state = torch.Generator(DEVICE).manual_seed(2718 + rank).get_state()

        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            before = of_device.get_rng_state()
            of_device.set_rng_state(self.generator_state)
            yield
            self.generator_state = of_device.get_rng_state()
            of_device.set_rng_state(before)

    torch.manual_seed(5)
    tracker = Tracker()
    weights = []
    for get in (lambda: tracker, None):
        layer = LayerNormLinear(
            IN,
            OUT,
            get_rng_state_tracker=get,
            parallel_mode=case.mode,
            tp_group=distributed.group.WORLD,
            device=DEVICE,
        )
        weights.append(layer.weight.detach().cpu())
    parts = [gathered(weight) for weight in weights]
    assert not torch.equal(*parts[0][:2]) and torch.equal(*parts[1][:2])
