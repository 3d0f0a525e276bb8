"""torch: delayed weight gradients of parameters that DistributedDataParallel or fully_shard holds.

Both reduce gradients over ranks at the end of backward, when a delayed one does not exist yet. So
backward_dw() reduces it, and takes the mean, as they do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nn.modes import is_inside_backward


class DataParallel:
    """The DistributedDataParallel in whose forward a layer runs, if any."""

    def __init__(self) -> None:
        self._wrapper: Any = None

    def group(self, weight: Tensor) -> Any:
        """The group that shares a layer's gradients; None where the wrapper leaves them alone.

        Raises NotImplementedError inside DistributedDataParallel.join().
        """
        if not torch.distributed.is_available():
            return None
        if not is_inside_backward():  # otherwise a checkpoint runs the forward again
            self._wrapper = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
        wrapper = self._wrapper
        if wrapper is None or _is_ignored(weight, wrapper):
            return None
        if wrapper._join_config.enable:
            raise NotImplementedError(
                "a layer with delay_wgrad_compute=True runs inside DistributedDataParallel.join(), "
                "and a rank without inputs cannot take part in its backward_dw(); expected "
                "delay_wgrad_compute=False, or inputs on all ranks"
            )
        return wrapper.process_group


def _is_ignored(weight: Tensor, wrapper: Any) -> bool:
    ignored = wrapper.parameters_to_ignore
    return bool(ignored) and any(
        name in ignored and each is weight for name, each in wrapper.module.named_parameters()
    )


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
    if present is not parameter and hasattr(present, "device_mesh"):
        parameter, gradient = present, _sharded(gradient, present)
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


def _sharded(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The mean over ranks of a whole gradient, sharded as the parameter is."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = parameter.device_mesh
    gradient = gradient.to(parameter.dtype) / mesh.size()
    whole = DTensor.from_local(gradient, mesh, [Partial()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=parameter.placements)
