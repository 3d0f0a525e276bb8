"""The only launch of a kernel on a GPU: device guard, stream, packed arguments.

A kernel takes one struct of 8-byte words. Functions and their attributes belong to a module that is loaded once for each
device, so both are kept per device.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from contextlib import contextmanager
from functools import cache

from . import nvrtc
from .dispatch import Device, Launch, device_like

_MAX_WORDS = 32
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


class _ThreadState(threading.local):
    """The argument buffer of this thread: the driver copies it before launchKernel returns, so one is enough."""

    def __init__(self) -> None:
        cupy = nvrtc.cupy()
        self.words = ctypes.create_string_buffer(8 * _MAX_WORDS)
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.words))
        self.address = ctypes.addressof(self.parameters)
        # A new thread has no CUDA context until its device is set once.
        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())


@cache
def _thread() -> _ThreadState:
    return _ThreadState()


@contextmanager
def on_device(device_index: int):
    """Makes a device current for the body, and the former one again after it."""
    runtime = nvrtc.cupy().cuda.runtime
    current = runtime.getDevice()
    if current == device_index:
        yield
        return
    runtime.setDevice(device_index)
    try:
        yield
    finally:
        runtime.setDevice(current)


@cache
def device(device_index: int) -> Device:
    """What dispatch must know of a GPU that is present."""
    properties = nvrtc.cupy().cuda.runtime.getDeviceProperties(device_index)
    name = properties["name"]
    return device_like(
        name.decode() if isinstance(name, bytes) else name,
        properties["major"] * 10 + properties["minor"],
        properties["multiProcessorCount"],
        properties["sharedMemPerBlockOptin"],
        properties["sharedMemPerMultiprocessor"],
        properties["maxThreadsPerMultiProcessor"],
    )


@contextmanager
def _relaxed_capture():
    """Lets this thread load a module while a stream of it is being captured: loading touches no stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_functions: dict = {}
_loading = threading.Lock()


def _function(launch: Launch, device_index: int):
    key = (launch.kernel, device_index)
    function = _functions.get(key)
    if function is None:
        with _loading:
            function = _functions.get(key)
            if function is None:
                function = _functions[key] = _load(launch, device_index)
    if launch.smem_bytes > function.allowed_smem_bytes:
        # The device's limit at once, so that it is never set again for this function.
        with on_device(device_index):
            function.kernel.max_dynamic_shared_size_bytes = device(device_index).smem_per_block
        function.allowed_smem_bytes = device(device_index).smem_per_block
    return function


class _Function:
    """A loaded kernel; keeps its module alive."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.pointer = kernel.kernel.ptr
        self.allowed_smem_bytes = 48 * 1024


def _load(launch: Launch, device_index: int) -> _Function:
    from cupy_backends.cuda.api import driver

    with on_device(device_index), _relaxed_capture():
        kernel = nvrtc.module(launch.kernel).get_function(launch.kernel.name_expression)
        function = _Function(kernel)
        if launch.cluster_size > 8:
            driver.funcSetAttribute(function.pointer, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    return function


def launch(launch: Launch, device_index: int, stream: int, words: tuple) -> None:
    """Enqueues one kernel. words: its argument, ints (pointers, counts) and floats, each 8 bytes."""
    from cupy_backends.cuda.api import driver

    thread = _thread()
    struct.pack_into(_format(words), thread.words, 0, *words)
    with on_device(device_index):
        function = _function(launch, device_index)
        driver.launchKernel(
            function.pointer, launch.grid_size, 1, 1, launch.block_size, 1, 1, launch.smem_bytes, stream, thread.address, 0
        )


def _format(words: tuple) -> str:
    return "".join("d" if isinstance(word, float) else "q" for word in words)


def pack(words: tuple) -> bytes:
    """A kernel's argument as bytes, for a launch that is not made here (cupynorm.on_cpu)."""
    return struct.pack(_format(words), *words)


def current_device() -> Device:
    """The Device of CuPy's current GPU. Raises MissingLibraryError without CuPy, ValueError without a GPU."""
    runtime = nvrtc.cupy().cuda.runtime
    try:
        return device(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise ValueError(f"no GPU was found ({error}); name a device, for example device='H200'") from error
