"""Matrix products of CuPy arrays by cuBLAS, in the four dtypes.

Sums are formed in float32 (float64 for float64 inputs) and rounded once. cupy.matmul supports
neither bfloat16 nor accumulation into an output; gemmEx supports both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import DTYPES, compute_dtype, encode
from . import arrays, launch, nvrtc

# cudaDataType_t.
_CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
# cublasComputeType_t: CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F.
_COMPUTE_TYPES = {"float32": 68, "float64": 70}
_DEFAULT_ALGORITHM = -1


def multiply(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Any = None,
    accumulate: bool = False,
) -> Any:
    """a @ b of two contiguous CuPy matrices of one dtype, on the current stream.

    transpose_a, transpose_b: multiply by the transpose of a or b.
    out: a contiguous matrix that receives the product. accumulate: add the product to out.
    Returns out, or a new matrix.
    """
    name = arrays.dtype_name(a)
    num_rows, depth = a.shape[::-1] if transpose_a else a.shape
    num_cols = b.shape[0] if transpose_b else b.shape[1]
    cupy = nvrtc.cupy()
    with launch.on_device(a.device.id):
        if out is None:
            out = cupy.ndarray((num_rows, num_cols), a.dtype)
        if out.size and depth:
            compute = compute_dtype(name).name
            alpha, beta = np.ones((), compute), np.full((), accumulate, compute)
            cuda_type = _CUDA_TYPES[name]
            # cuBLAS reads a row-major matrix as its transpose: out^T = b^T a^T.
            transposes = int(transpose_b), int(transpose_a)
            first = b.data.ptr, cuda_type, b.shape[1]
            second = a.data.ptr, cuda_type, a.shape[1]
            result = out.data.ptr, cuda_type, num_cols
            cupy.cuda.cublas.gemmEx(
                cupy.cuda.device.get_cublas_handle(),
                *transposes,
                *(num_cols, num_rows, depth),
                alpha.ctypes.data,
                *first,
                *second,
                beta.ctypes.data,
                *result,
                _COMPUTE_TYPES[compute],
                _DEFAULT_ALGORITHM,
            )
        elif out.size and not accumulate:
            bits(out).fill(0)
        return out


def bits(array: Any) -> Any:
    """A view in the storage dtype, which CuPy can copy and fill for each of the four dtypes."""
    return array.view(DTYPES[arrays.dtype_name(array)].storage)


def sum_rows(a: Any) -> Any:
    """[num_cols]: the sum over the rows of a contiguous matrix on the current device."""
    ones = nvrtc.cupy().ndarray((1, a.shape[0]), a.dtype)
    bits(ones).fill(encode(np.ones(()), arrays.dtype_name(a))[()])
    return multiply(ones, a)[0]
