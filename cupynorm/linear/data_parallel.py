"""torch: delayed weight gradients of parameters that DistributedDataParallel or fully_shard holds.

Both reduce gradients over ranks at the end of backward, when a delayed one does not exist yet. So
backward_dw() reduces it, and takes the mean, as they do.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..nn.modes import is_inside_backward


class DataParallel:
    """The DistributedDataParallel in whose forward a layer runs, if any."""

    def __init__(self) -> None:
        self._wrapper: Any = None

    def begin_forward(self) -> None:
        """Notes the wrapper. A checkpoint runs the forward without gradients first, and again in
        backward, where no wrapper is active."""
        if not torch.distributed.is_available() or is_inside_backward():
            return
        wrapper = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None or torch.is_grad_enabled():
            self._wrapper = wrapper

    def group(self, parameter: Tensor) -> Any:
        """The group that shares a parameter's gradient; None where the wrapper leaves it alone.

        Raises NotImplementedError inside DistributedDataParallel.join().
        """
        wrapper = self._wrapper
        if wrapper is None or all(each is not parameter for each in wrapper._module_parameters):
            return None
        if wrapper._join_config.enable:
            raise NotImplementedError(
                "a layer with delay_wgrad_compute=True runs inside DistributedDataParallel.join(), "
                "and a rank without inputs cannot take part in its backward_dw(); expected "
                "delay_wgrad_compute=False, or inputs on all ranks"
            )
        return wrapper.process_group


def check_is_leaf(name: str, weight: Tensor) -> None:
    """Raises RuntimeError where a delayed gradient would reach no parameter."""
    if weight.requires_grad and not weight.is_leaf:
        raise RuntimeError(
            f"{name} is made of other tensors (by FullyShardedDataParallel or a parametrization), "
            "which backward_dw() cannot reach; expected a parameter, or delay_wgrad_compute=False"
        )


def accumulate(parameter: Tensor, present: Tensor, gradient: Tensor, group: Any) -> None:
    """Adds a delayed gradient to .grad, and runs the hooks that follow.

    parameter: of the forward. present: what the layer holds now, a DTensor after fully_shard.
    group: of DistributedDataParallel, or None.
    """
    fsdp_group, sharded = _fully_sharded(parameter)
    if sharded is None and present is not parameter and hasattr(present, "device_mesh"):
        sharded = present
    if sharded is not None:
        parameter, gradient = sharded, _sharded(gradient, sharded, fsdp_group)
    elif group is not None:
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=group)
        gradient.div_(torch.distributed.get_world_size(group))
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in tuple(hooks.values()):
        hook(parameter)


def _fully_sharded(parameter: Tensor) -> tuple[Any, Tensor | None]:
    """fully_shard's group of parameters, and the shard, of a parameter that it has gathered.

    The layer may hold either: fully_shard may be told not to reshard after backward.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return None, None
    from torch.distributed import _composable_state

    for reference in [*_composable_state._module_state_mapping.values()]:
        for group in _groups_of(reference()):
            for each in group.fsdp_params:
                if getattr(each, "_unsharded_param", None) is parameter:
                    return group, each.sharded_param
    return None, None


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there is one
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [each for each in groups if each is not None]


def _sharded(gradient: Tensor, parameter: Tensor, fsdp_group: Any) -> Tensor:
    """The mean over ranks of a whole gradient, sharded as the parameter is.

    fsdp_group: may have another divisor than the number of ranks, and a dtype for sums.
    """
    from torch.distributed.tensor import DTensor, Partial

    mesh = parameter.device_mesh
    divisor = getattr(fsdp_group, "gradient_divide_factor", None) or mesh.size()
    dtype = getattr(fsdp_group, "_reduce_dtype", None) or parameter.dtype
    dtype = torch.promote_types(dtype, parameter.dtype)
    whole = DTensor.from_local(
        gradient.to(dtype) / divisor, mesh, [Partial()] * mesh.ndim, run_check=False
    )
    return whole.redistribute(placements=parameter.placements).to(parameter.dtype)
