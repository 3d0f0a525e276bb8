"""Checks of weights that are kept in another form in distributed training: in 8 bits, or flat."""

from __future__ import annotations

import copy
import sys
import tempfile
from unittest import mock

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from training_cases import DEVICE, check, full, gathered, make_layers, random

from cupynorm import (
    CurrentScaling,
    DelayedScaling,
    LayerNormLinear,
    Linear,
    QuantizedTensor,
    fp8_autocast,
    fp8_model_init,
)
from cupynorm.linear.quantized_weight import QuantizedWeight
from cupynorm.parallel.gathered_weights import gather_in_8_bits


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
    path = gathered(tempfile.mkdtemp(dir=sys.argv[3]))[0]
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
