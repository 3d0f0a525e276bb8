"""torch: state dicts whose shards torch.distributed.checkpoint saves and loads as whole tensors.

So a checkpoint of one tp_size loads at another, or into a model of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .module import LayerNormLinear


def distributed_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """model.state_dict() in which each rank's shards of LayerNormLinear are DTensors.

    Its tensors share the memory of the parameters, so torch.distributed.checkpoint.load fills these
    in place. Pass the loaded dict to load_distributed_state_dict, which takes the rest of it.

    Raises RuntimeError for a layer without its group, NotImplementedError for shards that another
    library has sharded too.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    state = model.state_dict()
    for prefix, layer in model.named_modules():
        if not isinstance(layer, LayerNormLinear):
            continue
        meshes: dict[str, DeviceMesh] = {}
        for name, dim in layer.shard_dims().items():
            if layer.tp_group is None:
                raise RuntimeError(
                    f"layer {prefix!r} has no tp_group; "
                    "expected set_tensor_parallel_group(group) before"
                )
            key = f"{prefix}.{name}" if prefix else name
            if isinstance(state[key], DTensor):
                raise NotImplementedError(
                    f"{key} is a DTensor already, and a shard of tp_group; expected a plain "
                    "parameter, not sharded by fully_shard"
                )
            kind = state[key].device.type
            if kind not in meshes:
                meshes[kind] = DeviceMesh.from_group(layer.tp_group, kind)
            state[key] = DTensor.from_local(state[key], meshes[kind], [Shard(dim)], run_check=False)
    return state


def load_distributed_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Loads what distributed_state_dict returned and torch.distributed.checkpoint filled.

    Raises RuntimeError for missing or unexpected keys, as model.load_state_dict does.
    """
    local = {
        key: value.to_local() if hasattr(value, "device_mesh") else value
        for key, value in state.items()
    }
    model.load_state_dict(local)
