"""Checks of weights that are kept in another form in distributed training: in 8 bits, or flat."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from training_cases import DEVICE, check, gathered, make_layers, random

from cupynorm import (
    CurrentScaling,
    DelayedScaling,
    LayerNormLinear,
    Linear,
    fp8_autocast,
    fp8_model_init,
)


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
