"""Memory of a GPU for all tensors of a call, which one copy fills and one copy reads.

Several processes share the GPU, so that each copy waits for the work of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...dtypes import DTYPES, decode
from ...gpu import arrays, nvrtc
from ...plan.instances import Launch
from ..kernels import GpuCheckMachine
from ..placement import GUARD_BYTES, Placed, WrongWrite


class _Part(NamedTuple):
    """An array in the memory of a call. first: its first byte."""

    first: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, memory: np.ndarray) -> np.ndarray:
        num_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        return memory[self.first : self.first + num_bytes].view(self.dtype).reshape(self.shape)


class OneCopyMachine(GpuCheckMachine):
    """Copies the arrays of a call to the GPU when a kernel is launched, and back together.

    num_bytes: of the memory for them. Arrays that it has no room for have memory of their own.
    """

    def __init__(self, num_bytes: int = 2**25) -> None:
        super().__init__()
        self._there, self._here = self._memories(num_bytes)
        self._address = self._there.data.ptr
        self.begin()

    @staticmethod
    def _memories(num_bytes: int) -> tuple[Any, np.ndarray]:
        """Memory of the GPU, and memory of the host that is copied to it without waiting."""
        cupy = nvrtc.cupy()
        pinned = cupy.cuda.alloc_pinned_memory(num_bytes)
        return cupy.empty(num_bytes, np.uint8), np.frombuffer(pinned, np.uint8, num_bytes)

    def begin(self) -> None:
        self._used = self._copied = 0
        self._back: np.ndarray | None = None

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        if self._used + array.nbytes > self._here.size:
            return super().put(array)
        part = _Part(self._used, array.shape, array.dtype)
        part.of(self._here)[...] = array
        self._used += -(-array.nbytes // GUARD_BYTES) * GUARD_BYTES
        return part, self._address + part.first

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        if self._copied < self._used:
            self._copy(self._copied, self._used)
            self._copied = self._used
        self._back = None
        super().launch(kernel_launch, words)

    def _copy(self, first: int, end: int) -> None:
        source, stream = self._here[first:end], nvrtc.cupy().cuda.get_current_stream()
        self._there[first:end].data.copy_from_host_async(source.ctypes.data, source.size, stream)

    def get(self, array: Any) -> np.ndarray:
        if not isinstance(array, _Part):
            return super().get(array)
        if self._back is None:
            self._back = self._there[: self._used].get()
        return array.of(self._back)


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

    def check(self) -> None:
        """Raises WrongWrite if a call has changed them, or their guards."""
        after = self._library.get(self._memory)
        if np.array_equal(after, self._before):
            return
        for name, part in self._parts.items():
            if part.of(after).tobytes() != part.of(self._before).tobytes():
                raise WrongWrite(f"{name} was written to, or what surrounds it")
        raise WrongWrite("memory between two operands was written to")


class Torch:
    """Tensors of torch on the current GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def put(self, memory: np.ndarray) -> Any:
        """memory: bytes."""
        return self.torch.from_numpy(memory).cuda()

    def view(self, memory: Any, first: int, placed: Placed, dtype: str) -> Any:
        """The tensor that lies at this byte of the memory."""
        elements = memory[first : first + placed.memory.nbytes].view(getattr(self.torch, dtype))
        begin = elements.storage_offset() + placed.first
        return elements.as_strided(placed.shape, placed.strides, begin)

    def get(self, memory: Any) -> np.ndarray:
        return memory.cpu().numpy()

    def float64(self, made: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs on the host."""
        flat = [each.contiguous().reshape(-1).view(self.torch.uint8) for each in made.values()]
        return _float64(made, self.get(self.torch.cat(flat)))

    def stream(self) -> Any:
        """A context with a stream of its own, which begins after all earlier work."""
        self.torch.cuda.synchronize()
        return self.torch.cuda.stream(self.torch.cuda.Stream())

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


class CuPy:
    """Arrays of CuPy on the current GPU."""

    def __init__(self) -> None:
        self.cupy = nvrtc.cupy()

    def put(self, memory: np.ndarray) -> Any:
        """memory: bytes."""
        return self.cupy.asarray(memory)

    def view(self, memory: Any, first: int, placed: Placed, dtype: str) -> Any:
        """The array that lies at this byte of the memory."""
        kind = arrays.CuPyLibrary.dtype(dtype)
        elements = memory[first : first + placed.memory.nbytes].view(kind)[placed.first :]
        strides = tuple(stride * elements.itemsize for stride in placed.strides)
        return self.cupy.lib.stride_tricks.as_strided(elements, placed.shape, strides)

    def get(self, memory: Any) -> np.ndarray:
        return memory.get()

    def float64(self, made: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs on the host."""
        contiguous = map(self.cupy.ascontiguousarray, made.values())
        flat = [each.reshape(-1).view(np.uint8) for each in contiguous]
        return _float64(made, self.get(self.cupy.concatenate(flat)))

    def stream(self) -> Any:
        """A context with a stream of its own, which begins after all earlier work."""
        self.synchronize()
        return self.cupy.cuda.Stream(non_blocking=True)

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()


Library = Torch | CuPy


def _float64(made: Mapping[str, Any], memory: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays whose bytes lie one after another in memory."""
    results, first = {}, 0
    for name, each in made.items():
        dtype = arrays.dtype_name(each)
        part = _Part(first, tuple(each.shape), np.dtype(DTYPES[dtype].storage))
        results[name] = decode(part.of(memory), dtype)
        first += results[name].size * part.dtype.itemsize
    return results
