"""Tensors of a cell: arrays on the GPU with random values, and the copy of as many bytes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import DTYPES, EIGHT_BITS, ELEMENTS, FLOAT8S
from ..gpu import arrays, nvrtc
from .cells import Cell
from .timer import Runner

_MOST_Y = 64.0  # room that a given scale leaves: y is 6 sigma of x_hat times 5 of weight at most


class Tensors(NamedTuple):
    """A cell's arrays, of one library; None for those that it does not have.

    x, dy, y, residual, dsum: [num_rows, num_cols]. weight, bias: [num_cols]. scale, amax: [1],
    float32.
    """

    x: Any
    dy: Any
    y: Any
    weight: Any
    bias: Any
    residual: Any
    dsum: Any
    scale: Any = None
    amax: Any = None


def bits(array: Any) -> Any:
    """A CuPy array in the storage dtype, with the memory of a CuPy array or torch tensor.

    Raises ValueError if it is not contiguous.
    """
    cupy = nvrtc.cupy()
    dtype = arrays.dtype_name(array)
    if arrays.is_torch(array):
        torch = sys.modules["torch"]
        array = array.detach()
        carriers = {"bfloat16": torch.int16, **dict.fromkeys(FLOAT8S, torch.uint8)}
        array = cupy.from_dlpack(array.view(carriers[dtype]) if dtype in carriers else array)
    if not array.flags.c_contiguous:
        raise ValueError(
            f"an output has strides {array.strides} for shape {array.shape}; "
            "expected it to be contiguous"
        )
    storage = ELEMENTS[dtype].storage if dtype in ELEMENTS else array.dtype
    return cupy.ndarray(array.shape, storage, memptr=array.data)


def as_torch(array: Any) -> Any:
    """A torch tensor with the memory of a CuPy array."""
    import torch

    raw = bits(array)
    if arrays.dtype_name(array) == "bfloat16":
        return torch.from_dlpack(raw.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(raw)


# splitmix64 and Box-Muller: numbers depend on the seed and the index alone, without cuRAND.
_NORMAL = """
    unsigned long long z = seed + 0x9E3779B97F4A7C15ULL * (unsigned long long)(i + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    float radius = sqrtf(-2.0f * logf(((float)(z >> 40) + 0.5f) * 5.9604645e-8f));
    float value = center + spread * radius * cospif((float)(z & 0xFFFFFF) * 1.1920929e-7f);
"""
_ROUND_TO_BFLOAT16 = (
    "unsigned int u = __float_as_uint(value); out = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;"
)


def fill(array: Any, seed: int, center: float = 0.0, spread: float = 1.0) -> None:
    """Fills a CuPy array with normal random values."""
    cupy = nvrtc.cupy()
    bfloat16 = arrays.dtype_name(array) == "bfloat16"
    store = _ROUND_TO_BFLOAT16 if bfloat16 else "out = value;"
    inputs = "uint64 seed, float32 center, float32 spread"
    name = f"cupynorm_bench_normal_{int(bfloat16)}"
    kernel = cupy.ElementwiseKernel(inputs, "T out", _NORMAL + store, name)
    mixed = int(np.random.default_rng(seed).integers(2**63))
    kernel(np.uint64(mixed), np.float32(center), np.float32(spread), bits(array))


def tensors_of(cell: Cell, seed: int) -> tuple[Tensors, Runner]:
    """A cell's random inputs, memory for y, and the copy of as many bytes.

    All inputs are in one block of memory and y in another. The copy goes from the one to the other,
    so a cell needs little more memory than its own tensors.
    """
    cupy = nvrtc.cupy()
    num_bytes = cell.num_bytes // 2
    shape = (cell.num_rows, cell.num_cols)
    backward = "backward" in cell.passes
    dtypes = {
        "x": cell.dtype,
        "residual": cell.dtype if cell.residual else None,
        "dy": cell.y if backward else None,
        "dsum": cell.dtype if backward and cell.residual else None,
    }
    size = cell.num_rows * cell.num_cols
    sizes = {
        name: -(-size * DTYPES[dtype].itemsize // 256) * 256 if dtype else 0
        for name, dtype in dtypes.items()
    }
    held = sum(sizes.values())
    source = cupy.empty(max(num_bytes, held), cupy.uint8)
    target = cupy.empty(max(num_bytes, size * ELEMENTS[cell.y].itemsize), cupy.uint8)

    def view(block: Any, first: int, shape: tuple[int, ...], dtype: str) -> Any:
        return cupy.ndarray(shape, arrays.CuPyLibrary.dtype(dtype), memptr=block.data + first)

    tensors: dict[str, Any] = {"y": None if cell.scale else view(target, 0, shape, cell.y)}
    if cell.scale == "given":
        tensors["scale"] = cupy.asarray(
            np.array([EIGHT_BITS[cell.y].largest / _MOST_Y], np.float32)
        )
    if cell.amax:
        tensors["amax"] = cupy.asarray(np.zeros(1, np.float32))
    first = 0
    for at, (name, dtype) in enumerate(dtypes.items()):
        tensors[name] = view(source, first, shape, dtype) if dtype else None
        first += sizes[name]
        if dtype:
            fill(tensors[name], seed + at, *((0.5, 2.0) if name == "x" else ()))
    # Random data in the rest, too: zeros would cost the memory less power.
    source[held:] = source[: len(source) - held]
    names = ("weight", "bias") if cell.norm == "layer_norm" else ("weight",)
    for at, name in enumerate(names):
        tensors[name] = cupy.ndarray(shape[1:], arrays.CuPyLibrary.dtype(cell.parameters))
        fill(tensors[name], seed + 4 + at, float(name == "weight" and not cell.zero_centered), 0.5)

    def copy() -> None:
        stream = cupy.cuda.get_current_stream().ptr
        device_to_device = 3
        addresses = (target.data.ptr, source.data.ptr)
        cupy.cuda.runtime.memcpyAsync(*addresses, num_bytes, device_to_device, stream)

    return Tensors(**{"bias": None, **tensors}), Runner(copy)
