"""Memory of a GPU for all tensors of a call, which one copy fills and one copy reads.

Several processes share the GPU, which serves one of them at a time. So a process starts several
calls before it waits for the results of the first: each call has a machine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...dtypes import DTYPES, decode
from ...gpu import arrays, nvrtc
from ...gpu.launch import LoadedKernel, load, on_device
from ...plan.instances import Launch
from ..kernels import GpuCheckMachine
from ..placement import GUARD_BYTES, Placed, WrongWrite


class _Part(NamedTuple):
    """An array in the memory of a call. first: its first byte."""

    first: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, memory: np.ndarray) -> np.ndarray:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return memory[self.first : self.first + num_bytes].view(self.dtype).reshape(self.shape)


class _Own(NamedTuple):
    """An array in memory of its own: its values before the launches, and after each run."""

    before: np.ndarray
    there: Any
    after: list[np.ndarray]


class Recorded:
    """The launches of a run that were enqueued, and the bytes of the call's memory they use."""

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self.launches: list[tuple[Launch, tuple]] = []
        self.own: list[_Own] = []


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
        self._address = self._there.data.ptr
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
        self._run.launches.append((kernel_launch, words))

    def _enqueue(self, kernel_launch: Launch, words: tuple) -> None:
        stream = nvrtc.cupy().cuda.get_current_stream().ptr
        with on_device(self.device_index):
            _loaded(kernel_launch, self.device_index).enqueue(stream, words)

    def end(self, repeats: bool) -> Recorded:
        """Enqueues the run and what reads its arrays. repeats: whether it runs twice."""
        run, self._run.end = self._run, self._used
        for time in range(1 + repeats):
            self._copy_there(run, time)
            for kernel_launch, words in run.launches:
                self._enqueue(kernel_launch, words)
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
        return np.array_equal(first, second) and all(
            own.after[0].tobytes() == own.after[1].tobytes() for own in run.own
        )

    def send(self, memory: np.ndarray, pointer: int) -> None:
        """Enqueues a copy of bytes to this address of the GPU."""
        first = self._take(memory.size)
        if first is not None:
            here = self._before[first : first + memory.size]
            here[...] = memory
            memory = here
        self._enqueue_copy(pointer, memory.ctypes.data, memory.size)

    def fetch(self, pointer: int, num_bytes: int) -> np.ndarray:
        """Bytes from this address, which are there after wait()."""
        first = self._take(num_bytes)
        if first is None:
            memory = np.empty(num_bytes, np.uint8)
        else:
            memory = self._after[0][first : first + num_bytes]
        self._enqueue_copy(memory.ctypes.data, pointer, num_bytes)
        return memory


class Operands:
    """The inputs of a call of the public functions, in one memory of the GPU.

    placed: name -> (where it lies in memory of its own, its dtype). library: a Torch or a CuPy.
    """

    def __init__(self, placed: Mapping[str, tuple[Placed, str]], library: Library) -> None:
        self._library, self._parts = library, {}
        size = 0
        for name, (each, _) in placed.items():
            self._parts[name] = _Part(size, each.memory.shape, each.memory.dtype)
            size += -(-each.memory.nbytes // GUARD_BYTES) * GUARD_BYTES
        self._before = np.zeros(size, np.uint8)
        for name, (each, _) in placed.items():
            self._parts[name].of(self._before)[...] = each.memory
        self._memory = library.put(self._before)
        self.arrays = {
            name: library.view(self._memory, self._parts[name].first, each, dtype)
            for name, (each, dtype) in placed.items()
        }

    def fetch(self) -> Callable[[], None]:
        """Reads them. Returns a check, which raises WrongWrite if a call has changed them, or their
        guards.
        """
        after = self._library.fetch(self._memory)

        def check() -> None:
            if np.array_equal(after, self._before):
                return
            for name, part in self._parts.items():
                if part.of(after).tobytes() != part.of(self._before).tobytes():
                    raise WrongWrite(f"{name} was written to, or what surrounds it")
            raise WrongWrite("memory between two operands was written to")

        return check


class Torch:
    """Tensors of torch on the current GPU."""

    def __init__(self, where: OneCallMachine) -> None:
        import torch

        self.torch, self._where = torch, where

    def put(self, memory: np.ndarray) -> Any:
        """memory: bytes."""
        there = self.torch.empty(memory.size, dtype=self.torch.uint8, device="cuda")
        self._where.send(memory, there.data_ptr())
        return there

    def view(self, memory: Any, first: int, placed: Placed, dtype: str) -> Any:
        """The tensor that lies at this byte of the memory."""
        elements = memory[first : first + placed.memory.nbytes].view(getattr(self.torch, dtype))
        begin = elements.storage_offset() + placed.first
        return elements.as_strided(placed.shape, placed.strides, begin)

    def fetch(self, memory: Any) -> np.ndarray:
        """Its bytes, which are there after where.wait()."""
        return self._where.fetch(memory.data_ptr(), memory.numel())

    def join(self, made: Iterable[Any]) -> Any:
        """The bytes of several arrays, one after another."""
        flat = [each.contiguous().reshape(-1).view(self.torch.uint8) for each in made]
        return self.torch.cat(flat)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream of its own, which begins after all earlier work and ends before later work."""
        cuda = self.torch.cuda
        own, current = cuda.Stream(), cuda.current_stream()
        own.wait_stream(current)
        with cuda.stream(own):
            yield
        current.wait_stream(own)


class CuPy:
    """Arrays of CuPy on the current GPU."""

    def __init__(self, where: OneCallMachine) -> None:
        self.cupy, self._where = nvrtc.cupy(), where

    def put(self, memory: np.ndarray) -> Any:
        """memory: bytes."""
        there = self.cupy.empty(memory.size, np.uint8)
        self._where.send(memory, there.data.ptr)
        return there

    def view(self, memory: Any, first: int, placed: Placed, dtype: str) -> Any:
        """The array that lies at this byte of the memory."""
        kind = arrays.CuPyLibrary.dtype(dtype)
        elements = memory[first : first + placed.memory.nbytes].view(kind)[placed.first :]
        strides = tuple(stride * elements.itemsize for stride in placed.strides)
        return self.cupy.lib.stride_tricks.as_strided(elements, placed.shape, strides)

    def fetch(self, memory: Any) -> np.ndarray:
        """Its bytes, which are there after where.wait()."""
        return self._where.fetch(memory.data.ptr, memory.size)

    def join(self, made: Iterable[Any]) -> Any:
        """The bytes of several arrays, one after another."""
        contiguous = map(self.cupy.ascontiguousarray, made)
        return self.cupy.concatenate([each.reshape(-1).view(np.uint8) for each in contiguous])

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream of its own, which begins after all earlier work and ends before later work."""
        own, current = self._where.own_stream, self.cupy.cuda.get_current_stream()
        own.wait_event(current.record())
        with own:
            yield
        current.wait_event(own.record())


Library = Torch | CuPy


class Made:
    """Outputs of the public functions, copied to the host."""

    def __init__(self, made: Mapping[str, Any], library: Library) -> None:
        self._kept = made  # until they are copied
        self._kinds = {
            name: (tuple(each.shape), arrays.dtype_name(each)) for name, each in made.items()
        }
        joined = library.join(made.values())
        self._kept_too, self._memory = joined, library.fetch(joined)

    def has_bytes_of(self, other: Made) -> bool:
        """After where.wait()."""
        return self._kinds == other._kinds and np.array_equal(self._memory, other._memory)

    def float64(self) -> dict[str, np.ndarray]:
        """After where.wait()."""
        results, first = {}, 0
        for name, (shape, dtype) in self._kinds.items():
            part = _Part(first, shape, np.dtype(DTYPES[dtype].storage))
            results[name] = decode(part.of(self._memory), dtype)
            first += results[name].size * part.dtype.itemsize
        return results
