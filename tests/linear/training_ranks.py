"""Checks of LayerNormLinear in distributed training, by two processes: see start_ranks.py."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import tempfile
from unittest import mock

import pytest
import torch
from start_ranks import main
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint as activation_checkpoint

from cupynorm import (
    CurrentScaling,
    DelayedScaling,
    LayerNorm,
    LayerNormLinear,
    Linear,
    QuantizedTensor,
    fp8_autocast,
    fp8_model_init,
)
from cupynorm.linear.quantized_weight import QuantizedWeight
from cupynorm.parallel.gathered_weights import gather_in_8_bits

CHECKS = {}
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")


def check(function):
    CHECKS[function.__name__] = function
    return function


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


@check
def amaxes_are_reduced_once_a_step(rank: int) -> None:
    """Six layers of which each rank skips others, and takes the rest in another order."""
    asked, plain = [], distributed.all_reduce

    def all_reduce(tensor, *arguments, **options):
        asked.append(len(tensor))
        return plain(tensor, *arguments, **options)

    layers, recipe = make_layers(6), DelayedScaling(amax_history_len=3)
    distributed.all_reduce = all_reduce
    order = ((0, 1, 2, 3, 5), (5, 4, 3, 2, 1))[rank]
    largest = {}
    try:
        for step in range(3):
            with fp8_autocast(recipe=recipe):
                y = sum(layers[at](random(8, 16, seed=10 * rank + at)) * (1 + rank) for at in order)
            y.square().sum().backward()
            if step == 0:
                rows = {at: layers[at]._fp8_states["backward"].amax_history[0, 0] for at in order}
                largest = {at: row.item() for at, row in rows.items()}
    finally:
        distributed.all_reduce = plain
    # In two of the first three steps the ranks compare their layers before, by two reductions.
    assert len(asked) == 3 + 2 * 2 and asked.count(max(asked)) == 3, asked
    states = {
        at: {
            name: (state.scale.tolist(), state.amax_history[1:].tolist())
            for name, state in layers[at]._fp8_states.items()
        }
        for at in order
    }
    (one, other), (first, second) = gathered(states), gathered(largest)
    shared = one.keys() & other.keys()
    assert shared == {1, 2, 3, 5}
    for at in shared:
        assert one[at] == other[at], (at, one[at], other[at])
        # The amax of the first backward: the larger of both.
        assert first[at] != second[at]
        assert one[at]["backward"][1][0][0] == max(first[at], second[at])


@check
def a_rank_that_uses_no_layer_takes_part(rank: int) -> None:
    (layer,), recipe = make_layers(1), DelayedScaling(amax_history_len=3)
    with fp8_autocast(recipe=recipe):
        if rank == 0:
            layer(random(8, 16))
    assert not layer._fp8_states or layer._fp8_states["forward"].scale[0] != 1
    assert gathered(bool(layer._fp8_states)) == [True, False]


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
            data_parallel._set_params_and_buffers_to_ignore_for_model(layers, ["0.weight"])
        return data_parallel(Checkpointed(layers) if kind.endswith("checkpoints") else layers)
    options: dict = {"mesh": init_device_mesh(DEVICE, (2,))}
    if kind.endswith("kept after forward"):
        options["reshard_after_forward"] = False
    if kind.endswith("bfloat16"):
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    if not kind.startswith("fully_shard of all"):
        for layer in layers:
            fully_shard(layer, **options)
    model = fully_shard(layers, **options)
    for layer in (*layers, model) if kind.endswith("divisor") else ():
        layer.set_gradient_divide_factor(3.0)
        layer.set_force_sum_reduction_for_comms(True)  # gloo has no other
    if kind.endswith("not resharded"):
        model.set_reshard_after_backward(False)
    return model


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


KINDS = (
    "DistributedDataParallel",
    "DistributedDataParallel with no_sync",
    "DistributedDataParallel of checkpoints",
    "DistributedDataParallel that ignores",
    "fully_shard of all",
    "fully_shard of each",
    "fully_shard of each with a divisor",
    "fully_shard of each, not resharded",
    "fully_shard of each, kept after forward",
    "fully_shard of each in bfloat16",
)


@check
def delayed_weight_gradients_are_the_mean_of_all_ranks(rank: int) -> None:
    """As without a delay, of one backward and of two microbatches, and so is a step after them."""
    for kind, num_microbatches in itertools.product(KINDS, (1, 2)):
        made = []
        for delay in (False, True):
            layers = torch.nn.Sequential(*make_layers(2, delay_wgrad_compute=delay))
            model, hooked = wrapped(kind, layers), set()
            parameters = [*layers.parameters()]

            def hook(parameter, hooked=hooked):
                if parameter.grad is not None:
                    hooked.add(id(parameter))

            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                optimizer.zero_grad()
                for at in range(num_microbatches):
                    x = random(6, 16, seed=100 * step + 10 * at + rank)
                    x.requires_grad_()  # else a checkpoint would have no backward
                    keeps = kind.endswith("no_sync") and at < num_microbatches - 1
                    with model.no_sync() if keeps else contextlib.nullcontext():
                        model(x).square().mean().backward()
                    for layer in layers:
                        layer.backward_dw()
                    assert {id(each) for each in parameters} == hooked
                    hooked.clear()
                made += [full(each.grad).clone() for each in parameters]
                optimizer.step()
        names = [name for name, _ in layers.named_parameters()] * 2
        half = len(made) // 2
        for name, right, got in zip(names, made[:half], made[half:]):
            assert right.abs().max() > 0
            said, off = f"{kind} {num_microbatches} {name}", 2.0**-18
            if kind.endswith("bfloat16"):
                off = 2.0**-7 * right.abs().max().item()
            torch.testing.assert_close(got, right, rtol=2.0**-18, atol=off, msg=said)
        one, other = gathered([each.tolist() for each in made])
        assert (one == other) != kind.endswith("that ignores"), kind


@check
def delayed_weight_gradients_do_not_join(rank: int) -> None:
    """A rank that has joined would not know of backward_dw() of the other one."""
    layer, x = make_layers(1, delay_wgrad_compute=True)[0], random(6, 16)
    model = wrapped("DistributedDataParallel", layer)
    with pytest.raises(NotImplementedError, match="join.*; expected delay_wgrad_compute=False"):
        with model.join():
            model(x)
    with model.join(enable=False):
        model(x).sum().backward()
    layer.backward_dw()
    assert layer.weight.grad.abs().max() > 0


@check
def main_grad_of_a_sharded_layer(rank: int) -> None:
    """The weight that fully_shard gathers has a main_grad, which the user reduces."""
    made = []
    for fuses in (False, True):
        layer = make_layers(1, fuse_wgrad_accumulation=fuses)[0]
        main_grad = torch.zeros(16, 16, device=DEVICE)
        fully_shard(layer)
        if fuses:  # after fully_shard's own hook, which gathers the weight

            def give(layer, arguments, main_grad=main_grad):
                layer.weight.main_grad = main_grad

            layer.register_forward_pre_hook(give)
        for at in range(2):
            layer(random(6, 16, seed=10 * at + rank)).square().mean().backward()
        if fuses:
            assert layer.weight.grad is None
            distributed.all_reduce(main_grad)
            made.append(main_grad / 2)
        else:
            made.append(full(layer.weight.grad))
        made.append(full(layer.bias.grad))
    for right, got in zip(made[:2], made[2:]):
        assert right.abs().max() > 0
        torch.testing.assert_close(got, right, rtol=2.0**-18, atol=2.0**-18)
    layer = make_layers(1, fuse_wgrad_accumulation=True)[0]
    fully_shard(layer)
    with pytest.raises(RuntimeError, match="weight has no main_grad, to which fuse_wgrad_accum"):
        layer(random(6, 16))


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
    folder = gathered(tempfile.mkdtemp())[0]
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


@check
def weights_in_8_bits(rank: int) -> None:
    """DistributedDataParallel makes them equal on all ranks; fully_shard makes them plain."""
    recipe, x, made = CurrentScaling(), random(8, 16, seed=rank), []
    for in_8_bits in (True, False):
        with fp8_model_init(in_8_bits):
            layer = make_layers(1)[0]
        with torch.no_grad():
            layer.weight.mul_(1 + rank)
            if not in_8_bits:
                layer.weight.copy_(made[0][0])
        wrapped = torch.nn.parallel.DistributedDataParallel(layer)
        values = layer.weight.detach().clone()
        if in_8_bits:
            values = values.dequantize()
        with fp8_autocast(recipe=recipe):
            y = wrapped(x)
        y.square().sum().backward()
        made.append((values, y.detach(), layer.weight.grad))
        torch.optim.SGD(wrapped.parameters(), 0.1).step()
        both = gathered(layer.state_dict()["weight"].cpu())
        assert torch.equal(*both) and not torch.equal(both[0], values.cpu())
        one, other = gathered([each.cpu().numpy().tolist() for each in (values, layer.weight.grad)])
        assert one == other
    assert all(map(torch.equal, *made))

    with fp8_model_init():
        layer = make_layers(1)[0]
    values = layer.weight.detach().dequantize()
    fully_shard(layer)
    assert type(layer.weight.to_local()) is torch.Tensor
    assert torch.equal(layer.weight.full_tensor(), values)
    with fp8_autocast(recipe=recipe):
        layer(x).sum().backward()

    # A layer whose weight is split by torch's tensor parallelism has no 8-bit products.
    layer = parallelize_module(
        Linear(16, 16, device=DEVICE), init_device_mesh(DEVICE, (2,)), ColwiseParallel()
    )
    assert layer(x).shape == (8, 8)
    try:
        with fp8_autocast(recipe=recipe):
            layer(x)
    except NotImplementedError as error:
        assert "a DTensor was given to a linear layer inside fp8_autocast" in str(error)
    else:
        raise AssertionError("expected NotImplementedError")


@check
def weights_gathered_in_8_bits(rank: int) -> None:
    """fully_shard of them: y has the bits of whole weights, and shards are as precise as before.

    Ranks have 8 and 7 rows of one weight. The second policy gathers for bfloat16 products.
    """
    recipe = CurrentScaling()
    for dtype in (torch.float32, torch.bfloat16):
        layers = torch.nn.Sequential(
            LayerNormLinear(16, 15, device=DEVICE), Linear(15, 16, device=DEVICE)
        )
        with torch.no_grad():
            for seed, parameter in enumerate(layers.parameters()):
                parameter.copy_(random(*parameter.shape, seed=seed))
        whole = copy.deepcopy(layers)
        policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
        for layer in (*gather_in_8_bits(layers, recipe), layers):
            fully_shard(layer, mp_policy=policy)
        optimizer = torch.optim.AdamW(layers.parameters(), 0.01)
        for step in range(2):
            x = random(8, 16, seed=10 * rank + step).to(dtype)
            with torch.no_grad():
                for parameter, shard in zip(whole.parameters(), layers.parameters()):
                    parameter.copy_(full(shard))
            rounded = copy.deepcopy(whole).to(dtype)
            for layer, other in zip(rounded, whole):  # the weight is quantised from float32
                made = QuantizedWeight.of(other.weight, recipe).quantized
                made = QuantizedTensor(made.data, made.scale_inv, dtype)
                layer.weight = torch.nn.Parameter(QuantizedWeight(made, recipe))
            with fp8_autocast(recipe=recipe):
                y, right = layers(x), rounded(x)
            assert y.dtype == dtype and torch.equal(y, right) and y.abs().max() > 0
            y.square().sum().backward()
            right.square().sum().backward()
            for shard, parameter in zip(layers.parameters(), rounded.parameters()):
                distributed.all_reduce(parameter.grad)
                eps = torch.finfo(dtype).eps  # a mean of two, and its roundings
                atol = eps * parameter.grad.abs().max().item()
                got, mean = full(shard.grad), parameter.grad.float() / 2
                torch.testing.assert_close(got, mean, rtol=eps, atol=atol)
            optimizer.step()
            optimizer.zero_grad()
        assert full(layers[0].weight).dtype == torch.float32
        assert not torch.equal(full(layers[0].weight), whole[0].weight)
        layers[0].unshard()
        made = layers[0].weight.quantized.data
        assert made.dtype == torch.float8_e4m3fn and made.shape == (15, 16)
        layers[0].reshard()
    path = gathered(tempfile.mkdtemp())[0]
    checkpoint.save(get_model_state_dict(layers), checkpoint_id=path)
    saved = [full(each).clone() for each in layers.parameters()]
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.zero_()
    state = get_model_state_dict(layers)
    checkpoint.load(state, checkpoint_id=path)
    set_model_state_dict(layers, state)
    assert all(map(torch.equal, saved, [full(each) for each in layers.parameters()]))


@check
def weights_in_flat_parameters(rank: int) -> None:
    """FullyShardedDataParallel, whose weights are views, learns what one rank does with all rows.

    It asks torch.cpu for streams and events, of which they are mocks here.
    """
    recipe = DelayedScaling(amax_history_len=3)
    names = ("Event", "Stream", "current_stream", "stream")
    mocks = mock.patch.multiple(torch.cpu, create=True, **dict.fromkeys(names, mock.MagicMock()))
    for use_orig_params in (False, True):
        whole = torch.nn.Sequential(*make_layers(2))
        options = {"device_id": torch.device(DEVICE), "use_orig_params": use_orig_params}
        options["auto_wrap_policy"] = ModuleWrapPolicy({LayerNormLinear})
        with mocks:
            sharded = FullyShardedDataParallel(copy.deepcopy(whole), **options)
            for step in range(3):
                made = []
                for model, parts in ((whole, (0, 1)), (sharded, (rank,))):
                    with fp8_autocast(recipe=recipe):
                        made.append([model(random(8, 16, seed=10 * step + at)) for at in parts])
                    torch.cat(made[-1]).square().sum().div(len(parts)).backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            if parameter.grad is not None:  # a rank may have none of it
                                parameter -= 1e-3 * parameter.grad
                            parameter.grad = None
                torch.testing.assert_close(made[1][0], made[0][rank])


@check
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
