"""A stand-in for CuPy on NumPy arrays, so that the benchmark runs without a GPU.

Memory is on the host. Calls are synchronous. An event is never done before it is waited for.
"""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from cupynorm.dtypes import encode


class Memory(NamedTuple):
    """An address and the object that owns the memory."""

    ptr: int
    owner: object

    def __add__(self, num_bytes):
        return Memory(self.ptr + num_bytes, self.owner)


class ndarray(np.ndarray):  # noqa: N801
    def __new__(cls, shape, dtype=float, memptr=None):
        dtype = np.dtype(dtype)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memptr = memptr or Memory((block := np.empty(num_bytes, np.uint8)).ctypes.data, block)
        made = (
            np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(memptr.ptr), dtype)
            .reshape(shape)
            .view(cls)
        )
        made.owner = memptr.owner
        return made

    def __array_finalize__(self, parent):
        self.owner = getattr(parent, "owner", parent)

    @property
    def data(self):
        return Memory(self.ctypes.data, self)

    @property
    def device(self):
        return SimpleNamespace(id=0)

    def get(self):
        return np.array(self)


class Event:
    done = False

    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        pass


def from_dlpack(tensor):
    return ndarray(tuple(tensor.shape), tensor.numpy().dtype, Memory(tensor.data_ptr(), tensor))


def asarray(array):
    made = ndarray(array.shape, array.dtype)
    made[...] = array
    return made


def ElementwiseKernel(inputs, outputs, code, name):  # noqa: N802
    """Every kernel fills its output with normal random numbers."""

    def fill(seed, center, spread, out):
        values = np.random.default_rng(seed).standard_normal(out.shape) * spread + center
        out[...] = encode(values, "bfloat16") if out.dtype == np.uint16 else values

    return fill


ndarray.__name__ = "ndarray"
empty, uint8, isnan = ndarray, np.uint8, np.isnan
__version__ = "0.0"
_properties = {"name": b"a host", "l2CacheSize": 1024}
cuda = SimpleNamespace(
    Event=Event,
    get_elapsed_time=lambda start, stop: (stop.time - start.time) * 1e3,
    get_current_stream=lambda: SimpleNamespace(ptr=0),
    runtime=SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda device: _properties,
        runtimeGetVersion=lambda: 13020,
        driverGetVersion=lambda: 13020,
        deviceSynchronize=lambda: None,
        memsetAsync=lambda address, value, num_bytes, stream: None,
        memcpyAsync=lambda target, source, num_bytes, kind, stream: ctypes.memmove(
            target, source, num_bytes
        ),
    ),
)


def get_default_memory_pool():
    return SimpleNamespace(free_all_blocks=lambda: None)
