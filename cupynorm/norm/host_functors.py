"""Functors on NumPy arrays and CPU tensors: the user's own lines, compiled for the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..gpu import arrays, launch
from ..plan.functors import BoundFunctor, Functor, Fused, struct_text

_FLOAT64 = "float64"
_THREADS = 32


@cache
def _kernel(functor: Functor, role: str, backward: bool) -> Any:
    from ..gpu import on_cpu  # not before a functor is used: it imports what compiles

    count = len(functor.arrays)
    fused = Fused(functor, (_FLOAT64,) * count, ("elements",) * count)
    if backward:
        fused = Fused(functor, fused.dtypes, fused.reaches, gradients=(_FLOAT64,) * count)
    struct = fused.struct(role, _FLOAT64, backward)
    flag = "true" if backward else "false"
    return on_cpu.kernel(
        "apply_functor.cu",
        f"apply_functor<double, {struct}, {flag}>",
        functors=struct_text(functor, role, backward),
    )


def _run(
    bound: BoundFunctor, role: str, shape: tuple[int, ...], matrices: list, gradients: list
) -> np.ndarray:
    """matrices: values, and backward the gradients of the results. gradients: of the arrays."""
    backward = len(matrices) == 2
    num_rows, num_cols = matrices[0].shape
    values = [np.ascontiguousarray(each, np.float64) for each in matrices]
    read, words = [], []
    for array in bound.arrays:
        full = np.broadcast_to(arrays.to_float64(array), shape)
        read.append(np.ascontiguousarray(full).reshape(num_rows, num_cols))
        words += [read[-1].ctypes.data, num_cols, 1, max(1, num_rows)]
    words += [*map(float, bound.numbers), num_cols]
    words += [each.ctypes.data for each in gradients]
    results = np.empty((num_rows, num_cols))
    words += [values[0].ctypes.data, values[1].ctypes.data if backward else 0]
    words += [results.ctypes.data, num_rows, num_cols]
    kernel = _kernel(bound.functor, role, backward)
    kernel.launch(1, _THREADS, launch.pack(tuple(words)))
    return results


def apply(bound: BoundFunctor, role: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """f(values), [num_rows, num_cols] in float64. shape: of the input."""
    return _run(bound, role, shape, [values], [])


def gradients(
    bound: BoundFunctor,
    role: str,
    values: np.ndarray,
    upstream: np.ndarray,
    shape: tuple[int, ...],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The gradient of f's argument, and of each array before it is summed over its repeats.

    values: f's argument; upstream: the gradient of its result.
    """
    of_arrays = [np.zeros(values.shape) for _ in bound.arrays]
    results = _run(bound, role, shape, [values, upstream], of_arrays)
    return results, [each.reshape(shape) for each in of_arrays]
