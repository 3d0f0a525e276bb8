"""Pointers, shapes and strides of input arrays, and allocation of results by the same library.

An input is a CuPy, torch or NumPy array. Arrays of other libraries enter through DLPack and become
CuPy arrays. The library that owns the input allocates the results and provides the stream.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.problem import OperandLayout
from ..dtypes import DTYPES, ELEMENTS, FLOAT8S, decode, encode
from ..options import type_in_words
from . import launch, nvrtc


class View(NamedTuple):
    """Address, shape and dtype of an array. strides are in elements. device is None on the host.

    is_lazy: the elements are not those in memory, as is_lazy() says of a torch tensor.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    is_lazy: bool = False


class Rows(NamedTuple):
    """An array as [num_rows, num_cols] with contiguous columns; row_stride in elements."""

    pointer: int
    num_rows: int
    num_cols: int
    row_stride: int
    dtype: str

    def layout(self) -> OperandLayout:
        return OperandLayout(
            self.pointer, self.row_stride, ELEMENTS[self.dtype].itemsize, self.num_rows
        )


def product(shape: tuple[int, ...]) -> int:
    """The product of all extents; 1 of none."""
    total = 1
    for extent in shape:
        total *= extent
    return total


def _collapse(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The one stride that visits these dimensions in order, or None if there is none.

    The stride of an extent of 1 is ignored.
    """
    step = None
    expected = None
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent == 1:
            continue
        if step is None:
            step = stride
        elif stride != expected:
            return None
        expected = stride * extent
    return 0 if step is None else step


def rows(view: View, num_dims: int) -> Rows | None:
    """The array as rows over its last num_dims dimensions. None: the rows are not contiguous."""
    split = len(view.shape) - num_dims
    num_rows, num_cols = product(view.shape[:split]), product(view.shape[split:])
    if num_rows == 0 or num_cols == 0:
        return Rows(view.pointer, num_rows, num_cols, num_cols, view.dtype)
    col_step = _collapse(view.shape[split:], view.strides[split:])
    row_stride = _collapse(view.shape[:split], view.strides[:split])
    if row_stride is None or (num_cols > 1 and col_step != 1):
        return None
    return Rows(view.pointer, num_rows, num_cols, row_stride, view.dtype)


def contiguous_rows(shape: tuple[int, ...], num_dims: int, dtype: str) -> Rows:
    """The rows of a contiguous array that is not allocated yet.

    Its address is 0, which is aligned to 256 bytes as new arrays are.
    """
    split = len(shape) - num_dims
    num_cols = product(shape[split:])
    return Rows(0, product(shape[:split]), num_cols, num_cols, dtype)


def extent(view: View) -> tuple[int, int]:
    """The lowest byte address of an array, and one past its highest."""
    low = high = view.pointer
    if 0 in view.shape:
        return low, high
    itemsize = 8 if view.dtype == "int64" else DTYPES[view.dtype].itemsize  # of seeds
    for size, stride in zip(view.shape, view.strides):
        if stride > 0:
            high += (size - 1) * stride * itemsize
        else:
            low += (size - 1) * stride * itemsize
    return low, high + itemsize


class NumPyLibrary:
    """NumPy arrays: what a call on the host is found and checked by."""

    @staticmethod
    def layout_key(array: Any) -> tuple | None:
        """As CuPyLibrary's. The class counts: an array of another library has another class."""
        return None if array is None else (array.__class__, array.dtype, array.shape, array.strides)

    @staticmethod
    def view(array: Any) -> View:
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return View(array.ctypes.data, array.shape, strides, array.dtype.name, None)


class CuPyLibrary:
    """CuPy arrays on one device: CuPy's memory pool, CuPy's current stream.

    exchange_device(index): makes a device current and returns the former one.
    address(array): the address of the first element.
    stream(), and the function that allocator returns: the caller has made the device current.
    """

    address = operator.attrgetter("data.ptr")

    def __init__(self, device_index: int) -> None:
        self.exchange_device = launch.exchange_device

    @staticmethod
    def layout_key(array: Any) -> tuple | None:
        """A cache key of everything but address and values that a plan depends on.

        AttributeError: not a CuPy array.
        """
        if array is None:
            return None
        return array.device.id, array.dtype, array.shape, array.strides, array.data.ptr & 15

    @staticmethod
    def view(array: Any) -> View:
        itemsize = array.dtype.itemsize
        strides = tuple(stride // itemsize for stride in array.strides)
        return View(array.data.ptr, array.shape, strides, array.dtype.name, array.data.device_id)

    @staticmethod
    def dtype(name: str) -> np.dtype:
        return FLOAT8S[name].storage if name in FLOAT8S else _numpy_dtype(name)

    @staticmethod
    def allocator(shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], Any]:
        return partial(nvrtc.cupy().ndarray, shape, dtype)

    @staticmethod
    def contiguous(array: Any) -> Any:
        return nvrtc.cupy().ascontiguousarray(array)

    @staticmethod
    def stream() -> int:
        return nvrtc.cupy().cuda.get_current_stream().ptr


class TorchLibrary:
    """torch CUDA tensors on one device: torch's caching allocator, torch's current stream.

    Its members are those of CuPyLibrary. It calls three private functions of torch, because they
    take less host time than the public ones. Code that torch.compile generates calls them too.
    """

    def __init__(self, device_index: int) -> None:
        self.address = sys.modules["torch"].Tensor.data_ptr
        private = sys.modules["torch"]._C
        self.exchange_device = private._cuda_exchangeDevice
        self.stream = partial(private._cuda_getCurrentRawStream, device_index)

    @staticmethod
    def layout_key(tensor: Any) -> tuple | None:
        if tensor is None:
            return None
        # The class counts: check_addresses runs once for a key, and a subclass may have no address.
        # Other devices than CUDA have no index, and may have no memory.
        address, device_index = tensor.data_ptr(), tensor.get_device()
        return (
            tensor.__class__,
            tensor.dtype,
            tensor.shape,
            tensor.is_contiguous() or tensor.stride(),
            address & 15 if address else -1,
            device_index if device_index >= 0 else tensor.device.type,
            tensor.is_neg() or tensor._is_zerotensor(),  # is_lazy, in less time
        )

    @staticmethod
    def view(tensor: Any) -> View:
        return View(
            tensor.data_ptr(),
            tuple(tensor.shape),
            tensor.stride(),
            dtype_name(tensor),
            tensor.get_device(),
            tensor.is_neg() or tensor._is_zerotensor(),
        )

    @staticmethod
    def dtype(name: str) -> Any:
        import torch  # torch.compile would inspect all modules of sys.modules

        return getattr(torch, name)

    @staticmethod
    def allocator(shape: tuple[int, ...], dtype: Any) -> Callable[[], Any]:
        empty_strided = sys.modules["torch"]._C._dynamo.guards._empty_strided_cuda
        return partial(empty_strided, shape, _contiguous_strides(shape), dtype)

    @staticmethod
    def contiguous(tensor: Any) -> Any:
        return in_memory(tensor.contiguous())


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * max(1, shape[at + 1])
    return tuple(strides)


def _numpy_dtype(name: str) -> np.dtype:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise nvrtc.MissingLibraryError(
            "bfloat16 CuPy and NumPy arrays need the dtype of ml_dtypes: pip install ml_dtypes"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


# A global: torch.compile would trace a lookup in sys.modules, and inspect all modules there.
# Inspecting a module may import others.
_torch = sys.modules.get("torch")


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor. Does not import torch."""
    global _torch
    if _torch is None:
        _torch = sys.modules.get("torch")
    return _torch is not None and isinstance(array, _torch.Tensor)


def is_lazy(tensor: Any) -> bool:
    """Whether a torch tensor's elements are not those in its memory.

    torch negates them as it reads them, or they are zeros that have no memory.
    """
    return tensor.is_neg() or tensor._is_zerotensor()


def in_memory(tensor: Any) -> Any:
    """A torch tensor, or a copy whose elements are in its memory."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def is_cupy(array: Any) -> bool:
    """Whether it is a CuPy array. Does not import CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def on_host(array: Any) -> bool:
    """Whether this is a NumPy array or a CPU torch tensor, which the reference computes."""
    return isinstance(array, np.ndarray) or (is_torch(array) and array.device.type == "cpu")


def take(array: Any, name: str) -> object:
    """A CuPy, torch or NumPy array unchanged, another as a CuPy array that shares its memory.

    TypeError: not an array, a sparse torch tensor, or one on a device other than CPU and CUDA. Meta
    tensors pass: check_addresses refuses them where memory is needed.
    """
    if is_torch(array):
        if array.device.type not in ("cpu", "cuda", "meta"):
            raise TypeError(
                f"{name} is a torch tensor on {array.device}; "
                "expected one on the CPU or on a CUDA device"
            )
        _check_dense(array, name)
        return array
    if isinstance(array, np.ndarray) or is_cupy(array):
        return array
    if type(array).__module__ == "torch.fx.proxy":  # it has every attribute
        raise TypeError(
            f"{name} is a Proxy of torch.fx; expected an array. torch.fx.symbolic_trace records "
            "cupynorm's modules, and its functions after torch.fx.wrap in the module that calls "
            "them"
        )
    if hasattr(array, "__dlpack__"):
        return nvrtc.cupy().from_dlpack(array)
    raise TypeError(
        f"{name} is {type_in_words(array)}; "
        "expected a CuPy, torch or NumPy array, or an object with __dlpack__"
    )


def _check_dense(tensor: Any, name: str) -> None:
    if tensor.layout is not _torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TypeError(
            f"{name} is a torch tensor of layout {layout}; expected a dense (strided) tensor"
        )


def check_addresses(**arrays_by_name: Any) -> None:
    """Raises TypeError for sparse torch tensors and for those without an address.

    A DTensor keeps its elements in another tensor, a FakeTensor has none.
    """
    for name, array in arrays_by_name.items():
        if not is_torch(array):
            continue
        _check_dense(array, name)  # first: the error of data_ptr is less clear
        if array.is_meta:
            raise TypeError(
                f"{name} is a torch tensor on meta, which has no memory; "
                "expected one on the CPU or on a CUDA device"
            )
        if array.numel() and not (array.data_ptr() or array._is_zerotensor()):
            raise TypeError(
                f"{name} is {type_in_words(array)}, which has no address; "
                "expected a tensor with memory of its own"
            )


def mark_written(array: Any) -> None:
    """Tells torch that a tensor is written to: autograd refuses what it has saved of it before."""
    if is_torch(array):
        sys.modules["torch"].autograd.graph.increment_version(array)


def view(array: Any) -> View:
    """The View of an array of any of the three libraries."""
    if isinstance(array, np.ndarray):
        return NumPyLibrary.view(array)
    return library(array).view(array)


def address(array: Any) -> int:
    """The address of the first element."""
    if is_torch(array):
        return array.data_ptr()
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def library(array: Any) -> type[CuPyLibrary] | type[TorchLibrary] | type[NumPyLibrary]:
    """The class that says layouts; for a GPU array also allocates results and has the stream."""
    if is_torch(array):
        return TorchLibrary
    return NumPyLibrary if type(array) is np.ndarray else CuPyLibrary


def dtype_name(array: Any) -> str:
    """The dtype of an array by name: "bfloat16" for torch.bfloat16."""
    return str(array.dtype).removeprefix("torch.") if is_torch(array) else array.dtype.name


def where(array: Any) -> str:
    """Library and device, for error messages: "a torch tensor on cuda:0"."""
    if is_torch(array):
        return f"a torch tensor on {array.device}"
    return f"a CuPy array on cuda:{array.device.id}" if is_cupy(array) else "a NumPy array"


def to_float64(array: Any) -> np.ndarray:
    """The values of an array, copied to the host if they are elsewhere."""
    if is_torch(array):
        # After numpy() torch could not resize the tensor, as fully_shard does with weights.
        return np.from_dlpack(in_memory(array.detach().cpu().double()))
    array = array.get() if is_cupy(array) else array
    if array.dtype.kind == "V":  # bfloat16; its name takes longer
        return decode(np.ascontiguousarray(array).view(np.uint16), "bfloat16")
    return array.astype(np.float64)


def from_float64(values: np.ndarray, dtype: str, like: Any) -> Any:
    """A new host array of `like`'s library: the values rounded once to dtype."""
    # Not ascontiguousarray, which makes a scalar one-dimensional.
    raw = encode(np.asarray(values, order="C"), dtype)
    if is_torch(like):
        if not raw.size:  # NumPy's strides would be 0
            return _torch.empty(raw.shape, dtype=getattr(_torch, dtype))
        tensor = _torch.from_numpy(raw.view(np.int16) if dtype == "bfloat16" else raw)
        return tensor.view(_torch.bfloat16) if dtype == "bfloat16" else tensor
    return raw.view(_numpy_dtype(dtype)) if dtype == "bfloat16" else raw
