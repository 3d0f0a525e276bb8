"""Runs the kernels of one call on the CPU and records what every thread does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..check.kernels import CpuMachine
from ..gpu import on_cpu
from ..plan.devices import Device
from ..plan.dispatch import Plan
from ..plan.instances import Launch

# trace::Event of cuda_src/on_cpu/cuda_on_cpu_trace.h.
EVENT = np.dtype(
    [
        ("block", "u4"),
        ("thread", "u4"),
        ("kind", "u1"),
        ("space", "u1"),
        ("what", "u1"),
        ("call", "u1"),
        ("num_bytes", "u4"),
        ("address", "u8"),
        ("site", "u8"),
        ("target_block", "u4"),
        ("clock", "u4"),
    ]
)
assert EVENT.itemsize == on_cpu.EVENT_BYTES
KINDS = ("read", "write", "bulk_load", "send", "wait", "go_on", "arrive", "finish")
SPACES = ("none", "global", "shared")
WHATS = ("none", "warp", "block", "cluster", "mbarrier")
CALLS = ("syncwarp", "shfl", "shfl_up", "shfl_down", "shfl_xor", "ballot")
_ALIGNMENT = 256  # of what GPUs allocate
_ACCESSES = [KINDS.index(kind) for kind in ("read", "write", "bulk_load", "send")]
BULK = [KINDS.index("bulk_load")]
_GLOBAL, _SHARED = SPACES.index("global"), SPACES.index("shared")


class Tensor(NamedTuple):
    """A tensor of the call. address: of its first byte."""

    name: str
    address: int
    array: np.ndarray


class Recorded(NamedTuple):
    """One launch: its events, and where its code was loaded."""

    launch: Launch
    events: np.ndarray
    kernel: on_cpu.CpuKernel


class Recording:
    """The events of one call.

    plan: of the call. tensors: by name. launches: its kernels, in order.
    """

    def __init__(self, plan: Plan, tensors: dict[str, Tensor], recorded: list[Recorded]) -> None:
        self.plan, self.tensors, self._recorded = plan, tensors, recorded
        self.launches = [each.launch for each in recorded]

    def events(self, launch: int = 0) -> np.ndarray:
        """All events of a launch in the order in which they happened (recording.EVENT)."""
        return self._recorded[launch].events

    def accesses(self, launch: int = 0) -> np.ndarray:
        """Accesses to tensors and to shared memory, with the index of the tensor in `tensor`.

        tensor: -1 for shared memory. A bulk copy has two: one of each memory.
        """
        events = self._recorded[launch].events
        events = events[np.isin(events["kind"], _ACCESSES)]
        tensor = self._tensor_of(events)
        return _with_field(events, "tensor", tensor)[(tensor >= 0) | (events["space"] == _SHARED)]

    def _tensor_of(self, events: np.ndarray) -> np.ndarray:
        tensor = np.full(len(events), -1)
        for index, (_, address, array) in enumerate(self.tensors.values()):
            inside = (events["address"] >= address) & (events["address"] < address + array.nbytes)
            tensor[inside & (events["space"] == _GLOBAL)] = index
        return tensor

    def timeline(self, launch: int = 0, block: int = 0) -> list[tuple[int, str, int, int]]:
        """What the warps of a block wait for: (warp, what, first step, last step).

        Steps are switches between threads in the order that this run drew, not nanoseconds.
        what: "block", "cluster", "mbarrier", or a call of the warp such as shfl_xor.
        """
        events = self._recorded[launch].events
        events = events[events["block"] == block]
        waits: dict[tuple, list[list[int]]] = {}
        for event in events[np.isin(events["kind"], [KINDS.index("wait"), KINDS.index("go_on")])]:
            what = WHATS[event["what"]]
            what = CALLS[event["call"]] if what == "warp" else what
            thread, clock = int(event["thread"]), int(event["clock"])
            if KINDS[event["kind"]] == "wait":
                waits.setdefault((thread, what), []).append([clock, clock])
            else:
                waits[thread, what][-1][1] = clock
        # The nth wait of a warp begins with its first lane and ends with its last.
        spans: dict[tuple[int, str, int], tuple[int, int]] = {}
        for (thread, what), each in waits.items():
            for ordinal, (first, last) in enumerate(each):
                key = (thread // 32, what, ordinal)
                before = spans.get(key, (first, last))
                spans[key] = (min(before[0], first), max(before[1], last))
        return sorted((warp, what, *span) for (warp, what, _), span in spans.items())


class Recorder(CpuMachine):
    """Records the launches of one direction. Tensors are aligned as a GPU aligns them."""

    def __init__(
        self, device: Device, direction: str, seed: int = 0, folder: Path | None = None
    ) -> None:
        super().__init__(device, seed, folder=folder)
        self.direction = direction
        self.recorded: list[Recorded] = []
        self.tensors: dict[str, Tensor] = {}
        self._named: dict[str, Tensor] = {}  # of the call that comes next
        self._arrays: dict[int, np.ndarray] = {}  # by their addresses

    def _new(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        array = memory[first : first + num_bytes].view(dtype).reshape(shape)
        self._arrays[array.ctypes.data] = array
        return array

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, int]:
        like, _ = super().empty(shape, dtype)
        return self.put(like)

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        mine = self._new(array.shape, array.dtype)
        mine[...] = array
        return mine, mine.ctypes.data

    def name_tensors(self, addresses: Mapping[str, int]) -> None:
        there = {name: address for name, address in addresses.items() if address in self._arrays}
        self._named = {name: Tensor(name, at, self._arrays[at]) for name, at in there.items()}

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        kernel = kernel_launch.kernel
        if not kernel.source.startswith(self.direction):
            super().launch(kernel_launch, words)
            return
        self.tensors |= self._named
        names = (kernel.source, kernel.name_expression)
        instance = on_cpu.kernel(*names, folder=self.folder, traced=True, functors=kernel.functors)
        self.run(instance, kernel_launch, words)
        events = np.frombuffer(instance.take_trace(), EVENT)
        self.recorded.append(Recorded(kernel_launch, events, instance))


def _with_field(array: np.ndarray, name: str, values: np.ndarray) -> np.ndarray:
    wider = np.empty(len(array), [*array.dtype.descr, (name, "i4")])
    for field in array.dtype.names:
        wider[field] = array[field]
    wider[name] = values
    return wider
