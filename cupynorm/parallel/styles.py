"""torch: styles of parallelize_module that shard LayerNormLinear as torch's shard nn.Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, parallel
from torch.distributed.tensor import distribute_tensor as distribute

from ..linear.parameters import NormLinearParameters


class ColwiseParallel(parallel.ColwiseParallel):
    """torch's, also for LayerNormLinear: weight and bias are sharded by rows.

    An input with input_layouts Shard(0), this rank's positions, is normalised as it is; the
    normalised tensor is gathered. Arguments and other modules: as torch's.

    Raises NotImplementedError for a layer that returns more than y.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, NormLinearParameters):
            return super()._apply(module, device_mesh)
        self.desired_input_layouts = self.input_layouts
        return _distribute(self, module, device_mesh, (Replicate(), Shard(0), Shard(0)))


class RowwiseParallel(parallel.RowwiseParallel):
    """torch's, also for LayerNormLinear: weight is sharded by columns, and the norm's parameters.

    The input's rows are split between ranks. The norm combines their statistics. Arguments and
    other modules: as torch's.

    Raises NotImplementedError for a layer that returns more than y.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, NormLinearParameters):
            return super()._apply(module, device_mesh)
        self.desired_input_layouts = (Shard(-1),)
        return _distribute(self, module, device_mesh, (Shard(0), Shard(1), Replicate()))


def _distribute(
    style: Any,
    module: NormLinearParameters,
    mesh: DeviceMesh,
    placements: tuple[Placement, Placement, Placement],
) -> torch.nn.Module:
    """placements: of the norm's parameters, of weights, of biases."""
    if module.return_bias or module.return_layernorm_output:
        raise NotImplementedError(
            "return_bias or return_layernorm_output is True of a layer for parallelize_module; "
            "expected a layer that returns y alone"
        )
    of_norm, of_weights, of_biases = placements

    def partition(name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_of_norm = name.startswith("layer_norm_")
            placement = of_weights if name in module.weight_names else of_biases
            placement = of_norm if is_of_norm else placement
            shard = distribute(parameter.detach(), mesh, [placement])
            shard = torch.nn.Parameter(shard, requires_grad=parameter.requires_grad)
            module.register_parameter(name, shard)

    def prepare(module: torch.nn.Module, inputs: tuple, mesh: DeviceMesh) -> Any:
        desired = style.desired_input_layouts
        input = style._prepare_input_fn(style.input_layouts, desired, module, inputs, mesh)
        return input, *inputs[1:]

    def finish(module: torch.nn.Module, y: Any, mesh: DeviceMesh) -> Any:
        return style._prepare_output_fn(
            style.output_layouts, style.use_local_output, module, y, mesh
        )

    return distribute_module(module, mesh, partition, prepare, finish)
