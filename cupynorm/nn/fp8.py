"""torch: the state of delayed scaling: scales, the amaxes of earlier steps, and saving them."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from ..gpu import arrays
from ..norm.quantized import update_scales
from .recipes import LARGEST, LARGEST_FLOAT32, DelayedScaling


class Scales:
    """Delayed scaling's state for some tensors, in float32.

    scale, largest: [num_tensors]. amax_history: [length, num_tensors]; row 0 is this step's, the
    other rows are those of earlier steps from the oldest to the latest.
    num_steps: since they were made.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...], length: int, device: torch.device) -> None:
        largest, float32 = [LARGEST[dtype] for dtype in dtypes], torch.float32
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.scale = torch.ones(len(dtypes), dtype=float32, device=device)
            self.amax_history = torch.zeros(length, len(dtypes), dtype=float32, device=device)
            self.largest = torch.tensor(largest, dtype=float32, device=device)
        self.dtypes, self.num_steps = dtypes, 0

    def amax(self, at: int) -> Tensor:
        """A view of this step's amax of tensor `at`, one element.

        A kernel raises it, so that it is the largest where the tensor is quantised repeatedly.
        """
        return self.amax_history[0, at : at + 1]

    def update(self, recipe: DelayedScaling) -> None:
        """Ends a step: computes new scales and shifts the history by one step."""
        history = self.amax_history
        self.num_steps += 1
        has_callable = callable(recipe.amax_compute_algo)
        has_callable = has_callable or recipe.scaling_factor_compute_algo is not None
        if not has_callable and not arrays.on_host(history) and history.is_contiguous():
            update_scales(
                self.scale,
                history,
                self.largest,
                2.0**-recipe.margin,
                most_recent=recipe.amax_compute_algo == "most_recent",
            )
            return
        scale, history = updated(history, self.scale, self.largest, recipe)
        self.scale.copy_(scale)
        self.amax_history.copy_(history)

    def forget(self) -> None:
        """Drops the amaxes of a step that did not end."""
        self.amax_history[0].zero_()

    def resize(self, length: int) -> None:
        """Changes the number of steps in the history, and keeps the latest of them."""
        history = self.amax_history
        with torch.inference_mode(False):
            if length < len(history):
                latest = history[len(history) - length + 1 :]
                self.amax_history = torch.cat([history[:1], latest])
            elif length > len(history):
                older = history.new_zeros(length - len(history), history.shape[1])
                self.amax_history = torch.cat([history[:1], older, history[1:]])

    def to(self, device: torch.device) -> Scales:
        if self.scale.device != device:
            with torch.inference_mode(False):
                for name in ("scale", "amax_history", "largest"):
                    setattr(self, name, getattr(self, name).to(device))
        return self

    def load(self, scale: Tensor, amax_history: Tensor) -> None:
        """Takes what `unpack` returned.

        It is copied in place where the length is the same: a CUDA graph may hold the addresses.
        """
        self.scale.copy_(scale)
        if amax_history.shape == self.amax_history.shape:
            self.amax_history.copy_(amax_history)
        else:
            with torch.inference_mode(False):
                self.amax_history = amax_history.to(self.scale.device, copy=True)


def updated(
    history: Tensor, scale: Tensor, largest: Tensor, recipe: DelayedScaling
) -> tuple[Tensor, Tensor]:
    """The scale and the history after a step whose amaxes are in history[0]."""
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history)
    elif recipe.amax_compute_algo == "max":
        amax = history.nan_to_num(nan=0.0, posinf=float("inf")).amax(0)  # a NaN is no maximum
    else:
        amax = history[0]
    if recipe.scaling_factor_compute_algo is not None:
        new = recipe.scaling_factor_compute_algo(amax, scale, largest, recipe)
    else:
        new = (largest * 2.0**-recipe.margin / amax).clamp(max=LARGEST_FLOAT32)
        new = torch.where(torch.isfinite(amax) & (amax > 0), new, scale)
    rolled = torch.zeros_like(history)
    if len(history) > 1:
        rolled = torch.cat([rolled[:1], history[2:], history[:1]])
    unused = history[0] == 0
    return torch.where(unused, scale, new), torch.where(unused, history, rolled)


def moved(scales: Scales, function: Callable[[Tensor], Tensor]) -> Scales | None:
    """The scales on the device that torch.nn.Module._apply moves a module to, still float32.

    None on "meta", where no state can be.
    """
    device = function(scales.scale).device
    return None if device.type == "meta" else scales.to(device)


def check_is_no_replica(module: torch.nn.Module) -> None:
    """Raises NotImplementedError for a copy that torch.nn.DataParallel makes for one step."""
    if "_is_replica" in module.__dict__:
        raise NotImplementedError(
            "torch.nn.DataParallel runs a copy of the module, with which its scales of "
            "DelayedScaling would be lost; expected DistributedDataParallel, or another recipe"
        )


def scales_for(
    kept: Scales | None,
    dtypes: tuple[torch.dtype, ...],
    recipe: DelayedScaling,
    device: torch.device,
    *,
    keeps_amaxes: bool,
) -> Scales:
    """The scales that a module has kept, if they fit, or new ones with what those hold.

    keeps_amaxes: of this step. Then they have these dtypes and the recipe's length.
    Raises RuntimeError where they would be made while a CUDA graph is captured.
    """
    length = recipe.amax_history_len
    fits = kept is not None and kept.scale.device == device
    fits = fits and (not keeps_amaxes or len(kept.amax_history) == length)
    if not fits and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "scales of DelayedScaling were to be made while a CUDA graph is captured, each replay "
            "of which would make them anew; expected one call with this recipe on this device "
            "before"
        )
    if fits and (not keeps_amaxes or kept.dtypes == dtypes):
        return kept
    scales = Scales(dtypes, length, device) if kept is None else copy.copy(kept).to(device)
    if not keeps_amaxes:
        return scales
    if len(scales.amax_history) != length:
        scales.resize(length)
    if scales.dtypes != dtypes:
        with torch.inference_mode(False):
            scales.dtypes, scales.largest = dtypes, scales.largest.clone()
        for at, dtype in enumerate(dtypes):
            scales.largest[at].fill_(LARGEST[dtype])
    return scales


# Saving.

EXTRA_STATE = "_extra_state"
_MAGIC = b"cupynorm fp8 state 1\n"


class Packed(Tensor):
    """What `pack` returns: a uint8 tensor whose length depends on the state.

    torch.distributed.checkpoint loads a tensor into one of the same length. This one it saves and
    loads as an object, so that any state can be loaded into any module.
    """

    def __create_write_items__(self, name: str, packed: Tensor) -> list:
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import MetadataIndex

        kind = planner.WriteItemType.BYTE_IO
        return [planner.WriteItem(index=MetadataIndex(name), type=kind)]

    def __deepcopy__(self, memo: dict) -> Packed:
        memo[id(self)] = copied = Packed.of(self.clone())
        return copied

    def __reduce_ex__(self, protocol: int) -> Any:
        """As a plain tensor, which torch.load(weights_only=True) opens."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @staticmethod
    def of(plain: Tensor) -> Packed:
        return plain.as_subclass(Packed)


# Between processes it stays what it is: torch.distributed.checkpoint may save it in another one.
ForkingPickler.register(Packed, lambda packed: (Packed.of, (packed.as_subclass(Tensor),)))


def pack(states: dict[str, Scales]) -> Tensor:
    """States as bytes, a uint8 tensor on the CPU: a line of JSON, then float32 numbers.

    An empty tensor where there are no states.
    """
    if not states:
        return Packed.of(torch.empty(0, dtype=torch.uint8, device="cpu"))
    header = {name: list(state.amax_history.shape) for name, state in states.items()}
    tensors = [each for state in states.values() for each in (state.scale, state.amax_history)]
    raw = torch.cat([each.cpu().reshape(-1) for each in tensors]).contiguous().view(torch.uint8)
    text = _MAGIC + json.dumps(header).encode() + b"\n"
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Packed.of(torch.cat([text, raw]))


def is_packed(state: Any) -> bool:
    """Whether `pack` made it of at least one state."""
    if not isinstance(state, Tensor) or _has_no_values(state):
        return False
    if state.dtype != torch.uint8 or state.ndim != 1:
        return False
    return bytes(state[: len(_MAGIC)].cpu().numpy()) == _MAGIC


def _has_no_values(state: Tensor) -> bool:
    """Whether it is empty, on "meta" or a FakeTensor."""
    return not state.numel() or state.is_meta or state.__class__ not in (Tensor, Packed)


def complete(module: torch.nn.Module, state_dict: dict, prefix: str) -> None:
    """Gives a state dict that a module loads the key of its extra state, if it is absent.

    A state dict with the module's parameters and without that key removes the scales: another
    library may have saved it. One without the parameters, such as one of adapters, leaves them.
    In place, not in a copy: pre-hooks of torch change what children load.
    """
    key = f"{prefix}{EXTRA_STATE}"
    # torch.distributed.checkpoint puts an object of this class where no state was given, and the
    # parameters themselves where no values were.
    is_filled = type(state_dict.get(key)).__name__ == "_EXTRA_STATE"
    if is_filled:
        del state_dict[key]
    own = {name: each for name, each in module._parameters.items() if each is not None}
    values = {name: state_dict.get(f"{prefix}{name}") for name in own}
    keeps = bool(own) and all(
        value is None or (is_filled and value is own[name]) for name, value in values.items()
    )
    state_dict.setdefault(key, module.get_extra_state() if keeps else None)


def unpack(packed: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (scale, amax_history) of what `pack` made.

    Nothing is unpickled: other states are ignored with a warning.
    """
    if packed is None or (isinstance(packed, Tensor) and _has_no_values(packed)):
        return {}
    if not is_packed(packed):
        warnings.warn(
            "the fp8 state in a state dict is not cupynorm's, or is of a later version; it is not "
            "opened: scales start at 1",
            stacklevel=2,
        )
        return {}
    text, _, raw = bytes(packed.cpu().numpy())[len(_MAGIC) :].partition(b"\n")
    shapes = json.loads(text) if raw else {}
    expected = 4 * sum((1 + length) * num_tensors for length, num_tensors in shapes.values())
    if not shapes or len(raw) != expected:
        raise ValueError(
            f"the fp8 state in a state dict has {len(raw)} bytes of numbers; "
            f"expected {expected or 'some'}"
        )
    numbers, states = torch.frombuffer(bytearray(raw), dtype=torch.float32), {}
    for name, (length, num_tensors) in shapes.items():
        scale, history, numbers = numbers.tensor_split(
            (num_tensors, num_tensors + length * num_tensors)
        )
        states[name] = scale.clone(), history.clone().reshape(length, num_tensors)
    return states
