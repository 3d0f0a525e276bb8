"""torch: the scales of 8-bit floats: of DelayedScaling, and the regions inside which they are used.

Scales          what a module keeps: scales, and the amaxes of earlier steps; saved as bytes
end_step        the end of a step: amaxes of all ranks, then new scales
fp8_autocast    a region, and the checkpoints that run a part of one again

All amaxes of a group are reduced at once. Each has a place of its own in what is reduced, by the
slot of its layer. Slots count layers in the order in which they were made, which all ranks share.
A layer that a rank has not used is zero there, so ranks need not use the same layers.

Ranks that made different layers would mix up their amaxes. So in the steps 1, 2, 4, 8 and so on of
a group the ranks first compare the kinds of the layers that they have made. Layers that a rank has
beyond those of the others are no difference, and an exchange of two of one kind is not seen.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ..gpu import arrays
from ..gpu.arrays import type_in_words
from ..norm.quantized import update_scales
from ..options import check_flags
from ..recipes import E4M3, LARGEST, LARGEST_FLOAT32, RECIPES, DelayedScaling, Recipe
from ..table import printable
from . import private
from .modes import is_inside_backward, is_recomputed, learns_shapes


def either(**spellings: object) -> object:
    """The one of two spellings that is given, None if neither is. Raises TypeError for both."""
    present = {name: value for name, value in spellings.items() if value is not None}
    if len(present) > 1:
        raise TypeError(
            f"{' and '.join(present)} are given; expected one of these two names of one argument"
        )
    return next(iter(present.values()), None)


class Scales:
    """Delayed scaling's state for some tensors, in float32.

    scale, largest: [num_tensors]. amax_history: [length, num_tensors]; row 0 is this step's, the
    other rows are those of earlier steps from the oldest to the latest.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...], length: int, device: torch.device) -> None:
        largest, float32 = [LARGEST[dtype] for dtype in dtypes], torch.float32
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.scale = torch.ones(len(dtypes), dtype=float32, device=device)
            self.amax_history = torch.zeros(length, len(dtypes), dtype=float32, device=device)
            self.largest = torch.tensor(largest, dtype=float32, device=device)
        self.dtypes = dtypes

    def amax(self, at: int) -> Tensor:
        """A view of this step's amax of tensor `at`, one element.

        A kernel raises it, so that it is the largest where the tensor is quantised repeatedly.
        """
        return self.amax_history[0, at : at + 1]

    def update(self, recipe: DelayedScaling) -> None:
        """Ends a step: computes new scales and shifts the history by one step."""
        history = self.amax_history
        has_callable = callable(recipe.amax_compute_algo)
        has_callable = has_callable or recipe.scaling_factor_compute_algo is not None
        if has_callable or arrays.on_host(history) or not history.is_contiguous():
            scale, history = updated(history, self.scale, self.largest, recipe)
            self.scale.copy_(scale)
            self.amax_history.copy_(history)
        else:
            most_recent = recipe.amax_compute_algo == "most_recent"
            factor = 2.0**-recipe.margin
            update_scales(self.scale, history, self.largest, factor, most_recent=most_recent)

    def forget(self) -> None:
        """Drops the amaxes of a step that did not end."""
        self.amax_history[0].zero_()

    def copied(self, dtypes: tuple[torch.dtype, ...], length: int, device: torch.device) -> Scales:
        """The same scales for other dtypes, with the latest amaxes of a history of this length."""
        made, latest = Scales(dtypes, length, device), min(length, len(self.amax_history)) - 1
        made.scale.copy_(self.scale)
        made.amax_history[0] = self.amax_history[0]
        if latest:
            made.amax_history[-latest:] = self.amax_history[-latest:]
        return made

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
    if kept is None:
        return Scales(dtypes, length, device)
    if not keeps_amaxes:
        dtypes, length = kept.dtypes, len(kept.amax_history)
    return kept if fits and kept.dtypes == dtypes else kept.copied(dtypes, length, device)


def keeps_amaxes() -> bool:
    """Whether the amaxes of a call that runs now are those of a step."""
    return torch.is_grad_enabled() and not runs_again() and not learns_shapes()


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


class Fp8State:
    """What a layer keeps for DelayedScaling.

    scales: by names, each of as many tensors as extents says. slot: of the layer: `end_step`.
    kind: what the layer's twins on other ranks share with it. warns: of foreign states.
    """

    def __init__(
        self, kind: str, extents: dict[str, int], kept: dict[str, Scales] | None, *, warns: bool
    ) -> None:
        self.scales, self.extents, self.warns = dict(kept or {}), extents, warns
        self.slot = new_slot(kind)

    def move(self, function: Callable[[Tensor], Tensor]) -> None:
        """As torch.nn.Module._apply moves a layer. Scales stay float32; there are none on meta."""
        for name, state in [*self.scales.items()]:
            device = function(state.scale).device
            if device.type == "meta":
                del self.scales[name]
            elif device != state.scale.device:
                self.scales[name] = state.copied(state.dtypes, len(state.amax_history), device)

    def load(self, packed: Any) -> None:
        """Takes what `pack` returned. Raises ValueError for that of another layer."""
        loaded, kept = unpack(packed, warns=self.warns), self.scales
        for name, (scale, _) in loaded.items():
            if len(scale) != self.extents.get(name):
                expected = " and ".join(f"{each} of {num}" for each, num in self.extents.items())
                raise ValueError(
                    f"the fp8 state has {name} of {len(scale)} tensors; expected {expected}"
                )
        self.scales = {}
        for name, (scale, amax_history) in loaded.items():
            state = kept.get(name) or Scales((E4M3,) * len(scale), len(amax_history), scale.device)
            state.load(scale, amax_history)
            self.scales[name] = state


class KeepsScales(torch.nn.Module):
    """A layer with an Fp8State, which its subclass makes in begin_state.

    fp8_state: whether the state dict has its key where there are no scales.
    """

    fp8_state: bool = True
    _fp8: Fp8State

    def begin_state(self, kept: dict[str, Scales] | None = None) -> None:
        """Must run in the constructor. kept: the scales of another copy."""
        raise NotImplementedError

    def mark_parameters(self) -> None:
        """Sets the attributes that frameworks read, which new parameters do not have."""

    def get_extra_state(self) -> Tensor:
        """The scales as bytes, without pickle: a uint8 tensor, empty where there are none."""
        return pack(self._fp8.scales)

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state returned.

        Without a state, the next step is the first. One of TransformerEngine is not opened. Raises
        TypeError or ValueError for what no module saves.
        """
        self._fp8.load(state)

    def _apply(self, function: Callable, recurse: bool = True) -> KeepsScales:
        super()._apply(function, recurse)
        self._fp8.move(function)
        self.mark_parameters()
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        complete(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.mark_parameters()  # load_state_dict(assign=True) replaces the parameters

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (self._fp8.scales or self.fp8_state):  # the state dict is then torch.nn's
            del destination[f"{prefix}{EXTRA_STATE}"]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_fp8": self._fp8.scales}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.begin_state(self._fp8)
        self._fp8.move(lambda tensor: tensor)  # torch.load may have put them on "meta"
        self.mark_parameters()  # a deep copy of a parameter loses its attributes


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


def unpack(packed: Any, *, warns: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (scale, amax_history) of what `pack` made.

    Nothing is unpickled. What TransformerEngine saves is ignored. warns: say so. Raises TypeError
    or ValueError for what neither saves.
    """
    if packed is None:
        return {}
    if not isinstance(packed, Tensor | io.BytesIO):
        raise TypeError(
            f"the fp8 state in a state dict is {type_in_words(packed)}; expected the uint8 tensor "
            "that state_dict() returned"
        )
    if isinstance(packed, Tensor):
        if not packed.numel() or packed.is_meta or packed.__class__ not in (Tensor, Packed):
            return {}  # without values: empty, on "meta" or a FakeTensor
        is_bytes = packed.dtype == torch.uint8 and packed.ndim == 1
        raw = bytes(packed.cpu().numpy()) if is_bytes else b""
        if raw.startswith(_MAGIC):
            header, _, numbers = raw[len(_MAGIC) :].partition(b"\n")
            return _opened(header, numbers)
    if warns:
        warnings.warn(
            "the fp8 state in a state dict is not cupynorm's, or is of a later version; it is not "
            "opened: scales start at 1",
            stacklevel=2,
        )
    return {}


def _opened(header: bytes, raw: bytes) -> dict[str, tuple[Tensor, Tensor]]:
    states = {}
    try:
        numbers = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        for name, (length, width) in json.loads(header).items():
            scale, history, numbers = numbers.tensor_split((width, width + length * width))
            states[name] = scale.clone(), history.clone().reshape(length, width)
        is_right = bool(states) and not numbers.numel()
        is_right = is_right and all(
            history.numel() and (scale.isfinite() & (scale > 0)).all()
            for scale, history in states.values()
        )
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"the fp8 state in a state dict has {len(raw)} bytes after {printable(header)}; "
            "expected finite scales above 0, and histories, of the extents that this names"
        )
    return states


# The end of a step.

# The tensors of a layer, and where those of its backward begin.
SLOT_SIZE, OF_BACKWARD = 5, 3
# What is reduced is as long as a multiple of this, so that ranks agree that use different layers.
_SLOTS_AT_ONCE = 2048


class UsedScales(NamedTuple):
    """Scales that a region has used, and how they are updated."""

    scales: Scales
    recipe: DelayedScaling
    group: Any


# A number for each slot: of the kinds of this layer and of all that were made before it.
_digests: list[int] = []
_lock = threading.Lock()
# The steps of each group; a group is forgotten with its last reference.
_num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def new_slot(kind: str) -> int:
    """For a layer that is made. kind: what it shares with its twins on other ranks."""
    with _lock:
        _digests.append(zlib.crc32(kind.encode(), _digests[-1] if _digests else 0))
        return len(_digests) - 1


def end_step(used: Mapping[tuple[int, int], UsedScales], groups: Sequence[Any]) -> None:
    """Computes new scales from the amaxes of all ranks.

    used: by the layer's slot and the place in it. groups: of torch.distributed, each reduced once.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        for group in groups:
            if distributed.get_world_size(group) > 1:
                _reduce(used, group)
    for _, each in sorted(used.items()):
        each.scales.update(each.recipe)


def _reduce(used: Mapping[tuple[int, int], UsedScales], group: Any) -> None:
    rows = {
        slot * SLOT_SIZE + at: each.scales.amax_history[0]
        for (slot, at), each in sorted(used.items())
        if each.recipe.reduce_amax and each.group is group
    }
    most = max(len(_digests), max(rows, default=0) // SLOT_SIZE + 1)
    num_slots = (most + _SLOTS_AT_ONCE - 1) // _SLOTS_AT_ONCE * _SLOTS_AT_ONCE
    _compare(num_slots, group)
    if torch.distributed.get_backend(group) == "gloo":
        device = torch.device("cpu")
    else:
        here = "cuda" if torch.cuda.is_available() else "cpu"
        device = next((row.device for row in rows.values()), torch.device(here))
    zeros = torch.zeros(num_slots * SLOT_SIZE, dtype=torch.float32, device=device)
    parts, end = [], 0
    for place, row in rows.items():
        parts += [zeros[end:place], row.to(device)]
        end = place + len(row)
    amaxes = torch.cat([*parts, zeros[end:]])
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group)
    for place, row in rows.items():
        row.copy_(amaxes[place : place + len(row)])


def _compare(num_slots: int, group: Any) -> None:
    """Raises RuntimeError on all ranks unless all have made the same layers in the same order.

    num_slots: those of what is reduced. Only in some steps of a group.
    """
    key = torch.distributed.group.WORLD if group is None else group
    _num_steps[key] = num_steps = _num_steps.get(key, 0) + 1
    if num_steps & (num_steps - 1):
        return
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(of_ranks, (num_slots, _digests), group)
    fewest = min(len(digests) for _, digests in of_ranks)
    if len({(slots, *digests[:fewest][-1:]) for slots, digests in of_ranks}) > 1:
        raise RuntimeError(
            f"the ranks of the group of fp8_autocast have made different layers ({len(_digests)} "
            "on this rank), so that their amaxes do not fit together; expected layers with 8-bit "
            "scales to be made on all ranks in one order, or a group of the ranks that share them"
        )


# Regions.


@dataclass(eq=False)
class Region:
    """The inside of a fp8_autocast.

    recipe: None where the region is disabled.
    group: the torch.distributed group of DelayedScaling's amaxes.
    used: the scales of each module, updated when the outermost region ends.
    groups: those over which it then reduces amaxes.
    records: whether gradients were recorded where it began.
    """

    recipe: Recipe | None
    group: Any
    used: dict[tuple[int, int], UsedScales]
    groups: list[Any]
    records: bool


# What torch.distributed.new_group gives a rank that is not in the group.
_OUTSIDE_OF_GROUP = getattr(
    getattr(torch.distributed, "GroupMember", None), "NON_GROUP_MEMBER", None
)

# Of the whole process: a backward in a thread of its own sees them too.
_regions: list[Region] = []


def active() -> Region | None:
    """The innermost region. None where there is none, or where it is disabled."""
    return _regions[-1] if _regions and _regions[-1].recipe is not None else None


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    recipe: Recipe | None = None,
    group: Any = None,
    *,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> Iterator[None]:
    """A context manager or decorator inside which LayerNormLinear multiplies in 8-bit floats.

    LayerNorm and RMSNorm write 8-bit floats inside of it where they are called with
    fp8_output=True.

    Examples:
        >>> norm, x = cupynorm.RMSNorm(2), torch.tensor([[3.0, 4.0]])
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.recipes.CurrentScaling()):
        ...     y = norm(x, fp8_output=True)
        >>> y.data.dtype, y.dequantize().detach().numpy().round(3)
        (torch.float8_e4m3fn, array([[0.808, 1.131]], dtype=float32))

    enabled: False switches an outer region off.
    recipe: DelayedScaling (the default), CurrentScaling or BlockScaling.
    group: the torch.distributed group over which DelayedScaling takes the largest amax.
    fp8_recipe, fp8_group, calibrating: TransformerEngine's names of recipe and group; False.

    When the outermost region ends and gradients are recorded, the delayed scales of its layers are
    updated for the next step, by the amaxes of all ranks: every rank of the group must enter a
    region. A forward under torch.no_grad() changes no state, nor does a region that an exception
    leaves. Checkpoints need context_fn=cupynorm.fp8_checkpoint_contexts. torch.compile breaks the
    graph where a region begins. Regions belong to the process, not to a thread.

    Raises TypeError or ValueError for other arguments, or both names of one.
    """
    if torch.compiler.is_dynamo_compiling():
        private.graph_break()  # the region must be active while a graph runs
    recipe = either(recipe=recipe, fp8_recipe=fp8_recipe)
    group = either(group=group, fp8_group=fp8_group)
    _check(enabled, calibrating, recipe, group)
    used, groups = (_regions[0].used, _regions[0].groups) if _regions else ({}, [])
    recipe = recipe or DelayedScaling()
    region = Region(recipe if enabled else None, group, used, groups, torch.is_grad_enabled())
    if enabled and isinstance(recipe, DelayedScaling) and recipe.reduce_amax:
        if not any(each is group for each in groups):
            groups.append(group)
    is_complete = False
    try:  # an interrupt may come after each call, also of append
        _regions.append(region)
        yield
        is_complete = True
    finally:
        _regions.remove(region)  # another thread's may have begun after it
        if not _regions and torch.is_grad_enabled():
            if not is_complete:  # what earlier backwards recorded remains
                for (_, at), each in used.items():
                    if at < OF_BACKWARD:
                        each.scales.forget()
            elif used or not is_inside_backward():  # a checkpoint's second run is no step
                end_step(used, groups)


# Checkpoints of activations.


class _Run:
    """The first run of what a checkpoint runs, or a run that repeats it, as a context manager.

    values: what layers keep in the first run, in order. A repetition may end early.
    """

    def __init__(self, values: list[Any], *, repeats: bool) -> None:
        self.values, self.repeats = values, repeats

    def __enter__(self) -> None:
        self.thread, self.left = threading.get_ident(), iter(self.values)
        runs.append(self)

    def __exit__(self, *error: object) -> None:
        runs.remove(self)

    def next_value(self) -> Any:
        """Of the first run."""
        for value in self.left:
            return value
        raise RuntimeError(
            "a checkpoint runs more layers again than it ran at first; expected a function that "
            "calls the same layers in each run"
        )


# Of all threads, the innermost last. A list, because torch.compile guards its length cheaply.
runs: list[_Run] = []
_T = TypeVar("_T")


def fp8_checkpoint_contexts() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """For torch.utils.checkpoint: layers are run again by the recipe and scales of their forward.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> layer, x = cupynorm.Linear(64, 64), torch.randn(8, 64, requires_grad=True)
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.recipes.DelayedScaling()):
        ...     y = checkpoint(
        ...         layer,
        ...         x,
        ...         use_reentrant=False,
        ...         context_fn=cupynorm.fp8_checkpoint_contexts,
        ...     )
        >>> y.sum().backward()
        >>> x.grad.shape
        torch.Size([8, 64])

    The second run records no amaxes. Results and gradients are those without a checkpoint, to the
    bit. Also needed with DelayedScaling where fp8_autocast is inside of the checkpointed function.

    Returns two context managers, around the first run and around each later one. Without them
    layers raise NotImplementedError where they would run again by other scales.
    """
    values: list[Any] = []
    return _Run(values, repeats=False), _Run(values, repeats=True)


def kept(make: Callable[[], _T]) -> _T:
    """make(), or what it made in the first run of what a checkpoint runs again."""
    firsts = []
    for run in reversed(_own_runs()):
        if run.repeats:
            value = run.next_value()
            break
        firsts.append(run)
    else:
        value = make()
    for run in firsts:
        run.values.append(value)
    return value


def runs_again() -> bool:
    """Whether a checkpoint with fp8_checkpoint_contexts runs again what runs now."""
    return any(run.repeats for run in _own_runs())


def _own_runs() -> list[_Run]:
    return [run for run in runs if run.thread == threading.get_ident()] if runs else []


def check_checkpoint(region: Region) -> None:
    """Raises NotImplementedError in a checkpoint that runs a call again by other scales."""
    is_wrong = isinstance(region.recipe, DelayedScaling) and is_recomputed() and not runs_again()
    if region.records and not torch.is_grad_enabled():  # perhaps a reentrant one inside the region
        frame, code = sys._getframe(1), CheckpointFunction.forward.__code__
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        is_wrong = is_wrong or frame is not None
    if is_wrong:
        raise NotImplementedError(
            "a checkpoint runs a layer again without the scales of its forward; expected "
            "checkpoint(..., use_reentrant=False, context_fn=cupynorm.fp8_checkpoint_contexts)"
        )


def _check(enabled: object, calibrating: object, recipe: object, group: object) -> None:
    check_flags(enabled=enabled)
    if calibrating is not False:
        raise ValueError(
            f"calibrating is {calibrating!r}; expected False: scales start at 1 and follow in the "
            "first steps in 8 bits"
        )
    if recipe is not None and not isinstance(recipe, RECIPES):
        raise TypeError(
            f"recipe is {type_in_words(recipe)}; expected DelayedScaling, CurrentScaling "
            "or BlockScaling"
        )
    is_group = callable(getattr(group, "size", None)) and not isinstance(group, torch.Tensor)
    if not (is_group or group is None or group is _OUTSIDE_OF_GROUP):
        raise TypeError(f"group is {type_in_words(group)}; expected a group of torch.distributed")
