"""torch: what torch does with a call: compile, trace, transform, record or cast it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from types import NoneType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import dtypes
from ..options import shown
from . import private
from .private import is_forward_mode

# Classes of arguments that no subclass intercepts, and of what kernels read in place: not torch's
# wrappers (DTensor, FakeTensor), which have no address.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, NoneType})

is_compiling = torch.compiler.is_dynamo_compiling
is_jit_traced = private.jit_tracing_state
num_dispatch_modes = private.num_dispatch_modes
is_mapped = private.is_mapped
has_functorch_transforms = private.has_functorch_transforms
present_tracer = private.present_tracer

# Functions of torch.distributed.pipelining, of torch 2.13 and of former versions.
_LEARN_SHAPES = frozenset({"_forward_metadata_inference", "_shape_inference"})

_MODES = private.DispatchModeKey


def is_transformed() -> bool:
    """Whether torch.func transforms the call, or forward mode runs."""
    return has_functorch_transforms() or is_forward_mode()


def is_recorded() -> bool:
    """Whether torch.export or make_fx puts the call into a graph, which may run in another process.

    torch.compile does not: its graphs run where the call was made.
    """
    if private.is_exporting():
        return True
    if is_compiling() or not num_dispatch_modes():
        return False
    return private.dispatch_mode(_MODES.PROXY) is not None


def is_faked() -> bool:
    """Whether tensors have no values now, or torch records what is done to them.

    Other dispatch modes, as of selective checkpoints, do not look into an eager call.
    """
    if not num_dispatch_modes():
        return False
    of_torch = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
    return any(private.dispatch_mode(each) is not None for each in of_torch)


def wants_gradient(*tensors: object) -> bool:
    """Whether any of them requires a gradient. None and arrays of other libraries do not."""
    for tensor in tensors:
        if tensor is not None and getattr(tensor, "requires_grad", False):
            return True
    return False


def have_tangents(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether forward mode differentiates any of them. A transform of torch.func does not count."""
    if not is_forward_mode():
        return False
    return any(
        each is not None and forward_ad.unpack_dual(each).tangent is not None for each in tensors
    )


def stream_of(tensor: torch.Tensor) -> tuple[int, bool] | None:
    """The current stream of a tensor's GPU, and whether a CUDA graph captures it; None on a CPU.

    What was computed on another stream may not be there yet. What a graph computes is there after
    its replays alone, and what was computed before does not change with them.
    """
    if not tensor.is_cuda:
        return None
    stream = private.current_raw_stream(tensor.get_device())
    return stream, torch.cuda.is_current_stream_capturing()


def learns_shapes() -> bool:
    """Whether torch.distributed.pipelining runs a stage to learn its shapes.

    The input may be memory without values, and no module should keep what it computes.
    """
    frame = sys._getframe(1) if "torch.distributed.pipelining" in sys.modules else None
    while frame is not None:
        code, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if code in _LEARN_SHAPES and module.startswith("torch.distributed.pipelining."):
            return True
        frame = frame.f_back
    return False


def is_inside_backward() -> bool:
    """Whether autograd runs a backward in this thread, as torch.utils.checkpoint asks it."""
    return private.graph_task_id() != -1


def is_recomputed() -> bool:
    """Whether a checkpoint with use_reentrant=False runs again what runs now."""
    hooks = private.top_saved_tensors_hooks(False)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return name.startswith("_recomputation_hook.")


def run_untraced(method):
    """The method itself, which torch.compile calls without tracing it.

    For methods that keep Python objects from step to step, such as scales.
    """
    if not (is_compiling() or present_tracer()):
        return method
    if is_compiling():  # with fullgraph=True this raises the sentence
        private.graph_break(
            "cupynorm keeps scales or gradients of this call in Python, so the graph breaks here; "
            "expected fullgraph=False"
        )
    return torch.compiler.disable(method)


# Dtypes, by name and under torch.autocast.

SUPPORTED = frozenset(getattr(torch, name) for name in dtypes.DTYPES)


def name_of(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def check_placement(device: object, dtype: object, name: str = "dtype") -> None:
    """Raises TypeError for a device or dtype that no parameter has. None: torch's default."""
    try:
        torch.device("cpu" if device is None else device)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        expected = "a torch.device or the name of one"
        raise TypeError(f"device is {shown(device)}; expected {expected}") from None
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in SUPPORTED):
        expected = ", ".join(sorted(map(str, SUPPORTED)))
        raise TypeError(f"{name} is {shown(dtype)}; expected {expected}, or None")


def arithmetic(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic on x and of its statistics: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def product_dtype(input: Tensor) -> torch.dtype:
    """The dtype of a matrix product of input: the autocast dtype where torch.autocast is on.

    Autocast leaves float64 and dtypes that are not floating point unchanged.
    """
    is_cast = input.dtype != torch.float64 and input.is_floating_point()
    if not is_cast or not in_autocast(input):
        return input.dtype
    return torch.get_autocast_dtype(input.device.type)


def in_autocast(tensor: Tensor) -> bool:
    """Whether torch.autocast is on for the tensor's kind of device. torch has none for meta."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def outside_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """A context in which torch.autocast casts no operand on the tensor's kind of device."""
    if in_autocast(tensor):
        return torch.autocast(tensor.device.type, enabled=False)
    return contextlib.nullcontext()
