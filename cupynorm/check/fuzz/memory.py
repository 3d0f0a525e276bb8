"""Memory of a GPU for all tensors of a call, which one copy fills and one copy reads.

Several processes share the GPU, which serves one of them at a time. So a process starts several
calls before it waits for the results of the first: each call has a machine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...gpu import arrays, nvrtc
from ...gpu.launch import LoadedKernel, load, on_device
from ...plan.instances import Launch
from ..kernels import GpuCheckMachine
from ..placement import GUARD_BYTES


class _Part(NamedTuple):
    """An array in the memory of a call. first: its first byte."""

    first: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: np.ndarray) -> np.ndarray:
        own = memory[self.first : self.first + self.num_bytes]
        return own.view(self.dtype).reshape(self.shape)


class _Own(NamedTuple):
    """An array in memory of its own: its values before the launches, and after each run."""

    before: np.ndarray
    there: Any
    after: list[np.ndarray]


class Recorded:
    """What a run enqueues, and the bytes of the call's memory that it uses.

    fetched: of each time, copies of arrays that it made.
    """

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self.steps: list[Callable[[], object]] = []
        self.own: list[_Own] = []
        self.fetched: list[list[np.ndarray]] = []


@lru_cache(maxsize=4096)
def _loaded(kernel_launch: Launch, device_index: int) -> LoadedKernel:
    return load(kernel_launch, device_index)


class OneCallMachine(GpuCheckMachine):
    """Enqueues the launches of a call, and copies of its arrays to the GPU and back together.

    num_bytes: of the memory for them. Arrays that it has no room for have memory of their own.
    """

    def __init__(self, num_bytes: int = 2**24) -> None:
        super().__init__()
        self._there = self._on_gpu(num_bytes)
        self._address = arrays.address(self._there)
        # Arrays before the launches, after them, and after the same launches again.
        self._before, *self._after = (self._pinned(num_bytes) for _ in range(3))
        self._end: Any = None
        self._used, self._is_open = 0, False
        self.begin_call()

    @cached_property
    def own_stream(self) -> Any:
        """A stream that is not the current one."""
        return nvrtc.cupy().cuda.Stream(non_blocking=True)

    @staticmethod
    def _on_gpu(num_bytes: int) -> Any:
        return nvrtc.cupy().empty(num_bytes, np.uint8)

    @staticmethod
    def _pinned(num_bytes: int) -> np.ndarray:
        """Memory of the host that copies reach without waiting."""
        return np.frombuffer(nvrtc.cupy().cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)

    @staticmethod
    def _enqueue_copy(to: int, source: int, num_bytes: int) -> None:
        """Between memory of the GPU and memory of the host."""
        cuda = nvrtc.cupy().cuda
        kind = cuda.runtime.memcpyDefault
        cuda.runtime.memcpyAsync(to, source, num_bytes, kind, cuda.get_current_stream().ptr)

    def begin_call(self) -> None:
        """The arrays of the former call are not used again."""
        if self._is_open and self._used:  # an error ended it before mark_end()
            self.mark_end()
            self.wait()
        self._used, self._is_open = 0, True
        self.begin()

    def begin(self) -> None:
        self._run = Recorded(self._used)

    def wait(self) -> None:
        """Until everything that was enqueued has run."""
        if self._end is not None:
            self._end.synchronize()

    def mark_end(self) -> None:
        """wait() waits for what was enqueued until now."""
        if self._end is None:
            self._end = nvrtc.cupy().cuda.Event(block=True, disable_timing=True)
        self._end.record()
        self._is_open = False

    def _take(self, num_bytes: int) -> int | None:
        """The first of so many bytes, None if there is no room for them."""
        first = self._used
        if first + num_bytes > self._before.size:
            return None
        self._used += -(-num_bytes // GUARD_BYTES) * GUARD_BYTES
        return first

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        first = self._take(array.nbytes)
        if first is None:
            there, pointer = super().put(array)
            self._run.own.append(_Own(array.copy(), there, []))
            return self._run.own[-1], pointer
        part = _Part(first, array.shape, array.dtype)
        part.of(self._before)[...] = array
        return part, self._address + first

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        """It is enqueued by end(), after one copy of all arrays of the run."""
        self.call(partial(self._enqueue, kernel_launch, words))

    def call(self, step: Callable[[], object]) -> None:
        """end() calls it, after the same copy."""
        self._run.steps.append(step)

    def _enqueue(self, kernel_launch: Launch, words: tuple) -> None:
        stream = nvrtc.cupy().cuda.get_current_stream().ptr
        with on_device(self.device_index):
            _loaded(kernel_launch, self.device_index).enqueue(stream, words)

    def end(self, repeats: bool) -> Recorded:
        """Enqueues the run and what reads its arrays. repeats: whether it runs twice."""
        run, self._run.end = self._run, self._used
        for time in range(1 + repeats):
            run.fetched.append([])
            self._copy_there(run, time)
            for step in run.steps:
                step()
            self._copy_back(run, time)
        return run

    def _copy_there(self, run: Recorded, time: int) -> None:
        source = self._before.ctypes.data + run.first
        self._enqueue_copy(self._address + run.first, source, run.end - run.first)
        for own in run.own:
            if time:
                own.there[...] = nvrtc.cupy().asarray(own.before)

    def _copy_back(self, run: Recorded, time: int) -> None:
        to = self._after[time].ctypes.data + run.first
        self._enqueue_copy(to, self._address + run.first, run.end - run.first)
        for own in run.own:
            own.after.append(super().get(own.there))

    def get(self, array: _Part | _Own) -> np.ndarray:
        """After the first time that its launches ran."""
        return self._get(array, 0)

    def get_again(self, array: _Part | _Own) -> np.ndarray:
        """After the second time."""
        return self._get(array, 1)

    def _get(self, array: _Part | _Own, time: int) -> np.ndarray:
        return array.of(self._after[time]) if isinstance(array, _Part) else array.after[time]

    def is_repeated(self, run: Recorded) -> bool:
        """Whether both times left the same bytes everywhere."""
        first, second = (each[run.first : run.end] for each in self._after)
        return (
            np.array_equal(first, second)
            and all(own.after[0].tobytes() == own.after[1].tobytes() for own in run.own)
            and all(map(np.array_equal, *run.fetched))
        )

    def there(self, array: _Part | _Own) -> Any:
        """The bytes of an array on the GPU, a CuPy array."""
        if isinstance(array, _Own):
            return array.there.view(np.uint8)
        return self._there[array.first : array.first + array.num_bytes]

    def fetch(self, array: Any) -> np.ndarray:
        """The bytes of a contiguous CuPy array or tensor, which are here after wait()."""
        first = self._take(array.nbytes)
        if first is None:
            memory = np.empty(array.nbytes, np.uint8)
        else:
            memory = self._after[0][first : first + array.nbytes]
        self._enqueue_copy(memory.ctypes.data, arrays.address(array), array.nbytes)
        self._run.fetched[-1].append(memory)
        return memory
