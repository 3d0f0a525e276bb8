"""Checks of weights that distributed training keeps in another form: split, or flat."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from training_cases import DEVICE, check, make_layers, random

from cupynorm import (
    LayerNormLinear,
    Linear,
    fp8_autocast,
)
from cupynorm.recipes import CurrentScaling, DelayedScaling


@check
def weights_split_by_torch(rank: int) -> None:
    """A layer whose weight is a DTensor has no 8-bit products."""
    x = random(8, 16, seed=rank)
    layer = parallelize_module(
        Linear(16, 16, device=DEVICE), init_device_mesh(DEVICE, (2,)), ColwiseParallel()
    )
    assert layer(x).shape == (8, 8)
    try:
        with fp8_autocast(recipe=CurrentScaling()):
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
