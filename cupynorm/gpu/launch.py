"""Launches kernels on a GPU. No other module does.

A kernel takes one struct of 8-byte words. A loaded module belongs to one device, and so do its
functions and their attributes. They are cached per device.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path

from ..dispatch.devices import Device, device_like
from ..dispatch.instances import Kernel, KernelLaunch
from . import nvrtc

_MAX_WORDS = 448  # functors of both roles with all their arrays, forward and gradient
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CAPTURES_OVERLAPS = 12030  # the first CUDA version whose graphs support that attribute


class _ThreadState(threading.local):
    """The argument buffer of this thread.

    One is enough, because the driver copies it before launchKernel returns.
    """

    def __init__(self) -> None:
        cupy = nvrtc.cupy()
        self.words = ctypes.create_string_buffer(8 * _MAX_WORDS)
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.words))
        self.address = ctypes.addressof(self.parameters)
        # A new thread has no CUDA context until setDevice is called.
        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())


@cache
def _thread() -> _ThreadState:
    return _ThreadState()


def exchange_device(device_index: int) -> int:
    """Makes a device current and returns the former one."""
    runtime = nvrtc.cupy().cuda.runtime
    former = runtime.getDevice()
    if former != device_index:
        runtime.setDevice(device_index)
    return former


@contextmanager
def on_device(device_index: int):
    """Makes a device current inside the with block."""
    former = exchange_device(device_index)
    try:
        yield
    finally:
        exchange_device(former)


@cache
def device(device_index: int) -> Device:
    """The Device of a GPU of this machine, from its properties."""
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
    """Allows this thread to load a module while one of its streams is being captured.

    That is safe, because loading uses no stream.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class LoadedKernel:
    """One planned launch on one device, compiled and loaded.

    folder: of the sources, None for the installed ones.
    """

    def __init__(self, launch: KernelLaunch, device_index: int, folder: Path | None = None) -> None:
        from cupy_backends.cuda.api import driver

        self.thread = _thread()
        self.thread.address  # noqa: B018  (creates this thread's CUDA context)
        with on_device(device_index):
            # A reference to the function keeps the module loaded.
            self.function = _function(launch.kernel, device_index, folder)
            if launch.smem_bytes > 48 * 1024:
                # The device's limit, because another plan of the same kernel may need more.
                self.function.max_dynamic_shared_size_bytes = device(device_index).smem_per_block
            if launch.tile.cluster_size > 8:
                driver.funcSetAttribute(
                    self.function.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
                )
            pointer = self.function.kernel.ptr
        sizes = (launch.grid_size, 1, 1, launch.block_size, 1, 1, launch.smem_bytes)
        if launch.overlaps and nvrtc.cupy().cuda.runtime.driverGetVersion() >= _CAPTURES_OVERLAPS:
            self.launch = _launch_with(_PROGRAMMATIC_STREAM_SERIALIZATION, pointer, sizes)
        else:
            self.launch = partial(driver.launchKernel, pointer, *sizes)
        self.format: struct.Struct | None = None

    def enqueue(self, stream: int, words: tuple) -> None:
        """Launches the kernel. The caller has made its device current.

        words: the argument struct, as ints (addresses, counts) and floats of 8 bytes each. Each
        position has the same type in every call.
        """
        if self.format is None:
            self.format = struct.Struct(_format(words))
        thread = self.thread
        self.format.pack_into(thread.words, 0, *words)
        self.launch(stream, thread.address, 0)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def _launch_with(
    kind: int, function: int, sizes: tuple[int, ...]
) -> Callable[[int, int, int], None]:
    """A launch with one of the attributes above.

    Returns a function with the last three parameters of driver.launchKernel.
    """
    from cupy_backends.cuda.api import driver

    # PyDLL holds the GIL, so no other thread can change config.stream before the launch reads it.
    launch = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    attribute = _Attribute(kind, value=(1,))
    config = _Config(sizes, attributes=ctypes.pointer(attribute), num_attributes=1)

    def enqueue(stream: int, parameters: int, extra: int) -> None:
        config.stream = stream
        driver.check_status(launch(config, function, parameters, extra))

    return enqueue


_functions: dict = {}
_loading = threading.Lock()


def _function(kernel: Kernel, device_index: int, folder: Path | None):
    """The cupy.RawKernel of a kernel. The caller has made the device current."""
    key = (kernel, device_index, folder)
    function = _functions.get(key)
    if function is None:
        with _loading, _relaxed_capture():
            function = _functions.get(key)
            if function is None:
                function = _functions[key] = nvrtc.function(kernel, folder)
    return function


def load(launch: KernelLaunch, device_index: int) -> LoadedKernel:
    """Loads the kernel of a planned launch, and compiles it if it is not cached."""
    return LoadedKernel(launch, device_index)


def _format(words: tuple) -> str:
    return "".join("d" if isinstance(word, float) else "q" for word in words)


def pack(words: tuple) -> bytes:
    """A kernel's argument struct as bytes, for cupynorm.gpu.on_cpu."""
    return struct.pack(_format(words), *words)


def current_device() -> Device:
    """The Device of CuPy's current GPU.

    Raises MissingLibraryError without CuPy, ValueError without a GPU.
    """
    runtime = nvrtc.cupy().cuda.runtime
    try:
        return device(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise ValueError(
            f"no GPU was found ({error}); name a device, for example device='H200'"
        ) from error


# Tensor maps: descriptions of matrices by which the copy engine of sm_90 moves tiles of them.

_DATA_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_NO_INTERLEAVE, _L2_PROMOTION_256_BYTES, _ZEROS_OUTSIDE = 0, 3, 0
_SWIZZLES = {32: 1, 128: 3}  # by the bytes of a row of a tile
_NUM_WORDS, _ALIGNMENT = 16, 64  # of a CUtensorMap, in 8-byte words and in bytes


@cache
def _encode():
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint32
    encode.argtypes = (pointer, ctypes.c_int, unsigned, *[pointer] * 5, *[ctypes.c_int] * 4)
    return encode


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    num_rows: int,
    num_cols: int,
    row_bytes: int,
    dtype: str,
    tile: tuple[int, int],
) -> tuple[int, ...]:
    """The 16 words of a CUtensorMap of a matrix.

    address: a multiple of 16, as row_bytes is, from one row to the next. dtype: "float16" or
    "bfloat16". tile: rows and columns of what one copy moves; 32 or 128 bytes of a row, which are
    swizzled in shared memory.
    It depends on its arguments alone. Raises ValueError where the driver refuses them.
    """
    raw = ctypes.create_string_buffer(_NUM_WORDS * 8 + _ALIGNMENT)
    start = ctypes.addressof(raw) + -ctypes.addressof(raw) % _ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(num_cols, num_rows)
    strides = (ctypes.c_uint64 * 1)(row_bytes)
    box = (ctypes.c_uint32 * 2)(tile[1], tile[0])
    steps = (ctypes.c_uint32 * 2)(1, 1)
    failed = _encode()(
        start,
        _DATA_TYPES[dtype],
        2,
        address,
        sizes,
        strides,
        box,
        steps,
        _NO_INTERLEAVE,
        _SWIZZLES[tile[1] * 2],
        _L2_PROMOTION_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    if failed:
        raise ValueError(
            f"the driver makes no tensor map (error {failed}) of {num_rows} x {num_cols} elements "
            f"of {dtype} at {address:#x}, rows {row_bytes} bytes apart"
        )
    return tuple((ctypes.c_int64 * _NUM_WORDS).from_address(start))
