"""Matrix products of CuPy arrays by cuBLAS, in the four dtypes: cuBLAS adds in float32 (float64 for float64) and rounds once.

cupy.matmul knows no bfloat16 and adds to nothing; gemmEx, which CuPy wraps, does both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays, launch, nvrtc
from .dtypes import DTYPES, compute_dtype, encode

_CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType_t
_COMPUTE_TYPES = {"float32": 68, "float64": 70}  # cublasComputeType_t: CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F
_DEFAULT_ALGORITHM = -1


def multiply(
    a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, out: Any = None, accumulate: bool = False
) -> Any:
    """a @ b of two contiguous CuPy matrices of one dtype, each transposed if asked, on the current stream.

    out: a contiguous matrix to write to, or with accumulate=True to add to. Returns out, or a new matrix.
    """
    name = arrays.dtype_name(a)
    num_rows, depth = a.shape[::-1] if transpose_a else a.shape
    num_cols = b.shape[0] if transpose_b else b.shape[1]
    cupy = nvrtc.cupy()
    with launch.on_device(a.device.id):
        if out is None:
            out = cupy.ndarray((num_rows, num_cols), a.dtype)
        if out.size and depth:
            one, factor = np.ones((), compute_dtype(name).name), np.full((), accumulate, compute_dtype(name).name)
            kind = _CUDA_TYPES[name]
            # cuBLAS reads a row-major matrix as its transpose: out^T = b^T a^T.
            cupy.cuda.cublas.gemmEx(
                cupy.cuda.device.get_cublas_handle(), int(transpose_b), int(transpose_a), num_cols, num_rows, depth,
                one.ctypes.data, b.data.ptr, kind, b.shape[1], a.data.ptr, kind, a.shape[1],
                factor.ctypes.data, out.data.ptr, kind, num_cols, _COMPUTE_TYPES[compute_dtype(name).name], _DEFAULT_ALGORITHM,
            )  # fmt: skip
        elif out.size and not accumulate:
            bits(out).fill(0)
        return out


def bits(array: Any) -> Any:
    """The array as its storage dtype: CuPy copies and fills those of every dtype."""
    return array.view(DTYPES[arrays.dtype_name(array)].storage)


def sum_rows(a: Any) -> Any:
    """[num_cols]: the sum over the rows of a contiguous CuPy matrix on the current device, rounded once."""
    ones = nvrtc.cupy().ndarray((1, a.shape[0]), a.dtype)
    bits(ones).fill(encode(np.ones(()), arrays.dtype_name(a))[()])
    return multiply(ones, a)[0]
