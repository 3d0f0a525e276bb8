"""torch: what this library uses of torch that is not public, each with its reason.

Nothing else in cupynorm spells a private name of torch, but for gpu/arrays.py. That stands below
this folder, and takes from torch._C what kernels are launched by: _cuda_exchangeDevice,
_cuda_getCurrentRawStream and _dynamo.guards._empty_strided_cuda. Importing this module fails where
torch has moved one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.autograd import forward_ad

from ..gpu.nvrtc import MissingLibraryError

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
if _VERSION < (2, 8):  # every call on tensors imports this module
    raise MissingLibraryError(
        f"torch {torch.__version__} is installed; expected 2.8 or later: pip install -U torch"
    )

# What torch does with a call. Each is asked in each eager call.

# torch.jit.is_tracing asks the same in four times the time.
jit_tracing_state = torch._C._get_tracing_state
# The public names are Python classes of modes; none counts or names those that are active.
num_dispatch_modes = torch._C._len_torch_dispatch_stack
dispatch_mode = torch._C._get_dispatch_mode
DispatchModeKey = torch._C._TorchDispatchModeKey
# torch.func has no way to ask whether a transform runs.
has_functorch_transforms = torch._C._are_functorch_transforms_active
# Of a tensor that is_grads_batched=True of torch.autograd.grad maps, which is no such transform.
is_mapped = torch._C._functorch.is_legacy_batchedtensor
# The callback by which torch.compile traces what is called now; None or False where it traces none.
# After graph breaks the compiler may run a function as it is, where is_dynamo_compiling() is False,
# and still trace what that function calls.
present_tracer = torch._C._dynamo.eval_frame.get_eval_frame_callback
# torch.is_autocast_enabled asks for one kind of device.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def is_forward_mode() -> bool:
    """Whether a dual_level of torch.autograd.forward_ad, or torch.func.jvp, is open."""
    return forward_ad._current_level >= 0


# Host time of a call.


def same_layouts(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says whether tensors have the layouts of these, compared at once as guards of
    torch.compile do: class, dtype, shape, strides, device, and whether autograd records them. False
    for other classes, and if one is given twice."""
    guards = torch._C._dynamo.guards.TensorGuards
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


# torch.cuda.current_stream takes 3.1 us, this 0.07. Absent where torch has no CUDA.
current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# What autograd does with a node, which only C++ can ask publicly.

graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward
will_execute = torch._C._will_engine_execute_node
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# The public torch.nn.functional.scaled_mm is of torch 2.10.
scaled_mm = torch._scaled_mm


def graph_break(reason: str = "") -> None:
    """Ends torch.compile's graph here, with a reason that torch.compiler.disable cannot give."""
    torch._dynamo.graph_break(reason)


def is_exporting() -> bool:
    """torch.compiler.is_exporting, which torch.compile takes for True in torch 2.11."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


# Kernels of aten (enable.py).

fused_rms_norm = getattr(torch, "_fused_rms_norm", None)  # of torch 2.9; it has no public name


def dispatch_keys(*names: str) -> Any:
    """The keys with which a kernel of aten is called. A kernel that asks for those of a call takes
    0.6 us longer."""
    sets = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    return reduce(or_, sets)


def run_as_it_is(function: Callable) -> None:
    """torch.compile never traces it, nor what it calls. torch.compiler.disable makes a wrapper that
    takes host time in each call."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


# Wrappers, which have no public sign on what they wrap.


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether it is what torch.compile returns for a module."""
    return type(module).__module__.startswith("torch._dynamo.")


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether FullyShardedDataParallel has put it into a flat parameter."""
    return getattr(parameter, "_fsdp_flattened", False)


def reduced_parameters() -> list[torch.Tensor]:
    """Those of the DistributedDataParallel whose forward runs."""
    wrapper = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return [] if wrapper is None else wrapper._module_parameters


def gathered_parameters() -> Iterator[torch.Tensor | None]:
    """Those that fully_shard has gathered."""
    fsdp = sys.modules.get("torch.distributed._composable_state")
    for reference in [] if fsdp is None else [*fsdp._module_state_mapping.values()]:
        groups = getattr(reference(), "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 there is one
            groups = [getattr(reference(), "_fsdp_param_group", None)]
        for group in filter(None, groups):
            yield from (getattr(each, "_unsharded_param", None) for each in group.fsdp_params)
