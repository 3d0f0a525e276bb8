"""Checks of LayerNormLinear in distributed training, by two processes: see start_ranks.py."""

from __future__ import annotations

import copy
import sys
import tempfile

import amax_ranks  # noqa: F401  (adds to CHECKS; first, because it counts reductions)
import pytest
import torch
import weight_ranks  # noqa: F401  (adds to CHECKS)
from start_ranks import main
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint as activation_checkpoint
from training_cases import CHECKS, DEVICE, check, full, gathered, make_layers, random

from cupynorm import (
    LayerNorm,
    LayerNormLinear,
    Linear,
    fp8_autocast,
)
from cupynorm.recipes import DelayedScaling


class Checkpointed(torch.nn.Module):
    """Runs each layer without recording it, and again in backward."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = activation_checkpoint(layer, x, use_reentrant=True)
        return x


def wrapped(kind: str, layers: torch.nn.Module) -> torch.nn.Module:
    data_parallel = torch.nn.parallel.DistributedDataParallel
    if kind.startswith("DistributedDataParallel"):
        if kind.endswith("that ignores"):
            names = [name for name, _ in layers.named_parameters() if "layer_norm" not in name]
            data_parallel._set_params_and_buffers_to_ignore_for_model(layers, names)
        return data_parallel(Checkpointed(layers) if kind.endswith("checkpoints") else layers)
    options: dict = {"mesh": init_device_mesh(DEVICE, (2,))}
    if not kind.startswith("fully_shard of all"):
        for layer in layers:
            fully_shard(layer, **options)
    return fully_shard(layers, **options)


KINDS = (
    "DistributedDataParallel",
    "DistributedDataParallel of checkpoints",
    "fully_shard of all",
    "fully_shard of each",
)


@check
def weight_gradients_that_torch_would_miss_are_refused(rank: int) -> None:
    """They come after the reduction, or in main_grad. What the wrapper ignores is not reduced."""
    x = random(6, 16, seed=rank).requires_grad_()
    for option in ("delay_wgrad_compute", "fuse_wgrad_accumulation"):
        for kind in (*KINDS, "DistributedDataParallel that ignores"):
            layers = torch.nn.Sequential(*make_layers(2, **{option: True}))
            for layer in layers:
                layer.weight.main_grad = torch.zeros_like(layer.weight)
            model = wrapped(kind, layers)
            with torch.no_grad():
                model.eval()(x)
            model.train()
            if kind.endswith("that ignores"):
                model(x).sum().backward()
                layers[0].backward_dw()
                made = layers[0].weight.main_grad if "fuse" in option else layers[0].weight.grad
                assert made.abs().max() > 0
                continue
            name = kind.split()[0]
            with pytest.raises(NotImplementedError, match=f"{option}=True runs inside {name}, whi"):
                model(x)


def trained(num_steps: int, length: int) -> torch.nn.Module:
    """Two sharded layers."""
    layers = torch.nn.Sequential(*make_layers(2))
    wrapped("fully_shard of each", layers)
    for step in range(num_steps):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=length)):
            y = layers(random(8, 16, seed=step))
        y.square().sum().backward()
    return layers


@check
def sharded_layers_load_delayed_scales(rank: int) -> None:
    """Into new and trained layers, from sharded and whole checkpoints."""
    folder = gathered(tempfile.mkdtemp(dir=sys.argv[3]))[0]
    # With cpu_offload rank 0 alone has the state.
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole = StateDictOptions(full_state_dict=True)
    for number, of_loader in enumerate(((0, 1), (1, 4), (2, 7))):
        saver = trained(3, 4)
        saved = [layer.get_extra_state() for layer in saver]
        for way in ("sharded", "whole", "from rank 0"):
            loader = trained(*of_loader)
            if way == "sharded":
                path = f"{folder}/{number}"
                checkpoint.save(get_model_state_dict(saver), checkpoint_id=path)
                state = get_model_state_dict(loader)
                checkpoint.load(state, checkpoint_id=path)
                set_model_state_dict(loader, state)
            else:
                one, options = (whole, whole) if way == "whole" else (offloaded, spread)
                state = get_model_state_dict(saver, options=one)
                set_model_state_dict(loader, state, options=options)
            for layer, expected in zip(loader, saved):
                assert expected.numel() and torch.equal(layer.get_extra_state(), expected), way
            for one, other in zip(saver.parameters(), loader.parameters()):
                assert torch.equal(full(one), full(other))


@check
def rank_0_broadcasts_scales(rank: int) -> None:
    """Those of a norm too. A state dict of adapters leaves all of them."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def model(num_steps: int) -> torch.nn.Sequential:
        layers = torch.nn.Sequential(LayerNorm(16, device=DEVICE), *make_layers(1))
        layers.append(Linear(16, 16, device=DEVICE))
        torch.nn.init.eye_(layers[2].weight)
        torch.nn.init.ones_(layers[2].bias)
        for _ in range(num_steps):
            with fp8_autocast(recipe=DelayedScaling(amax_history_len=3)):
                y = layers[2](layers[1](layers[0](random(8, 16), fp8_output=True)))
            y.sum().backward()
        return layers

    saver, loader = model(2), model(0)
    state = {name: value.clone() for name, value in saver.state_dict().items()}
    assert sum("_extra_state" in name for name in state) == 3
    set_model_state_dict(loader, dict(state) if rank == 0 else {}, options=options)
    loaded = loader.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], each) for name, each in state.items())
    adapters = {"0.adapter": torch.ones(1)}
    set_model_state_dict(
        loader, adapters, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    assert all(torch.equal(loader.state_dict()[name], state[name]) for name in state)


def a_pipeline_that_splits_backwards(rank: int) -> None:
    """Gradients of inputs come first, those of weights later, between other microbatches."""
    recipe, layers, mine = DelayedScaling(amax_history_len=3), make_layers(4), (rank, 3 - rank)
    whole = torch.nn.Sequential(*copy.deepcopy(layers))
    stages = [PipelineStage(layers[at], at, 4, torch.device(DEVICE)) for at in mine]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=mse_loss, scale_grads=False)
    for step in range(2):
        x, target = random(16, 16, seed=step), random(16, 16, seed=9)
        with fp8_autocast(recipe=recipe):
            schedule.step(x, target=target) if rank == 0 else schedule.step()
        with fp8_autocast(recipe=recipe):
            ys = [whole(part) for part in x.chunk(4)]
        for y, part in zip(ys, target.chunk(4)):
            mse_loss(y, part).backward()
        for at in mine:
            for one, other in zip(layers[at].parameters(), whole[at].parameters()):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


# Stages of torch 2.11 and older fail over gloo, with torch's layers too.
if hasattr(PipelineStage, "_forward_metadata_inference"):
    check(a_pipeline_that_splits_backwards)


@check
def other_layers_on_a_rank_are_refused(rank: int) -> None:
    """A layer that one rank alone has made shifts the slots of those after it. It runs last."""
    group = distributed.new_group([0, 1])
    recipe = DelayedScaling(amax_history_len=3)
    if rank == 1:
        LayerNormLinear(24, 8, device=DEVICE)
    (layer,) = make_layers(1)
    said = ""
    try:
        with fp8_autocast(recipe=recipe, group=group):
            layer(random(8, 16))
    except RuntimeError as error:
        said = str(error)
    assert gathered("have made different layers" in said) == [True, True], said
    if rank == 0:  # the ranks have the same number of layers again, in another order
        LayerNormLinear(24, 8, device=DEVICE)
    group, (layer,) = distributed.new_group([0, 1]), make_layers(1)
    try:
        with fp8_autocast(recipe=recipe, group=group):
            layer(random(8, 16))
        said = ""
    except RuntimeError as error:
        said = str(error)
    assert "expected layers with 8-bit scales to be made on all ranks in one order" in said


if __name__ == "__main__":
    main(CHECKS)
