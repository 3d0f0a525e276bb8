"""NumPy arrays that are given to the kernels on the CPU as if they were CuPy's, in every layout."""

from __future__ import annotations

import numpy as np

from cupynorm.gpu import arrays, launch
from cupynorm.norm import prepared
from cupynorm.verify.kernels import CpuMachine

LAYOUTS = ("contiguous", "gap", "misaligned", "broadcast", "transposed", "reversed")


class NumpyLibrary(arrays.CuPyLibrary):
    """NumPy arrays that stand in for CuPy's; allocated memory is NaN."""

    address = staticmethod(lambda array: array.ctypes.data)
    exchange_device = staticmethod(lambda index: index)

    def __init__(self, device_index: int) -> None:
        pass

    @staticmethod
    def layout_key(array):
        return (
            array
            if array is None
            else (array.dtype, array.shape, array.strides, array.ctypes.data & 15)
        )

    @staticmethod
    def view(array):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return arrays.View(array.ctypes.data, array.shape, strides, array.dtype.name, 0)

    @staticmethod
    def allocator(shape, dtype):
        return lambda: np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 0xFE, dtype)

    @staticmethod
    def contiguous(array):
        return np.ascontiguousarray(array)

    @staticmethod
    def stream():
        return 0


def lay_out(library, values: np.ndarray, layout: str):
    """values, [num_rows, num_cols], in memory of that layout; whatever lies between rows is NaN."""
    num_rows, num_cols = values.shape
    values = library.asarray(values)
    if layout == "contiguous":
        return library.ascontiguousarray(values)
    if layout == "broadcast":
        memory = library.full(
            values.shape, np.nan, values.dtype
        )  # what a kernel reads that takes the rows for neighbours
        memory[0] = values[0]
        return library.broadcast_to(memory[0], values.shape)
    if layout == "transposed":
        return library.ascontiguousarray(values.T).T
    if layout == "reversed":
        return library.ascontiguousarray(values[::-1])[::-1]
    gap = 16 if layout == "gap" else 0
    memory = library.full(num_rows * (num_cols + gap) + 16, np.nan, values.dtype)
    first = 0 if layout == "gap" else 1
    made = memory[first : first + num_rows * (num_cols + gap)].reshape(num_rows, num_cols + gap)[
        :, :num_cols
    ]
    made[...] = values
    return made


def as_numpy(array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def give_numpy_to_kernels(monkeypatch, device):
    """Until the test ends, calls on NumPy arrays run the kernels on the CPU, planned for device."""

    class Loaded:
        def __init__(self, planned, device_index):
            self.planned = planned

        def enqueue(self, stream, words):
            CpuMachine().launch(self.planned, words)

    monkeypatch.setattr(arrays, "library", lambda array: NumpyLibrary)
    monkeypatch.setattr(arrays, "on_host", lambda array: False)
    monkeypatch.setattr(arrays, "view", NumpyLibrary.view)
    monkeypatch.setattr(launch, "device", lambda index: device)
    monkeypatch.setattr(launch, "load", Loaded)
    prepared.forget()
