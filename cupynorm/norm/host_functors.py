"""Functors on NumPy arrays and CPU tensors: the user's own lines, compiled for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..gpu import arrays, launch
from ..plan.functor_text import BoundFunctor, Functor, FusedPart, struct_text

_FLOAT64 = "float64"
_THREADS = 32


@cache
def _kernel(functor: Functor, backward: bool) -> Any:
    from ..gpu import on_cpu  # not before a functor is used: it imports what compiles

    count = len(functor.arrays)
    dtypes = (_FLOAT64,) * count
    part = FusedPart(functor, dtypes, ("elements",) * count, dtypes if backward else ())
    flag = "true" if backward else "false"
    return on_cpu.kernel(
        "apply_functor.cu",
        f"apply_functor<double, {part.struct(_FLOAT64, backward)}, {flag}>",
        functors=struct_text(functor, backward),
    )


def _run(
    bound: BoundFunctor, shape: tuple[int, ...], matrices: list, gradients: list
) -> np.ndarray:
    """matrices: values, and backward the gradients of the results. gradients: of the arrays."""
    backward = len(matrices) == 2
    num_rows, num_cols = matrices[0].shape
    values = [np.ascontiguousarray(each, np.float64) for each in matrices]
    read, words = [], []
    for name, array in zip(bound.functor.arrays, bound.arrays):
        array = arrays.to_float64(array)
        if name in bound.functor.per_row:
            array = array.reshape(array.shape + (1,) * (len(shape) - array.ndim))
        full = np.broadcast_to(array, shape)
        read.append(np.ascontiguousarray(full).reshape(num_rows, num_cols))
        words += [read[-1].ctypes.data, num_cols, 1, max(1, num_rows)]
    seeds = [np.array([int(each.item())], np.int64) for each in bound.seeds]
    words += [each.ctypes.data for each in seeds]
    words += [*map(float, bound.numbers), num_cols]
    words += [each.ctypes.data for each in gradients]
    results = np.empty((num_rows, num_cols))
    words += [values[0].ctypes.data, values[1].ctypes.data if backward else 0]
    words += [results.ctypes.data, num_rows, num_cols]
    _kernel(bound.functor, backward).launch(1, _THREADS, launch.pack(tuple(words)))
    return results


def apply(parts: Sequence[BoundFunctor], values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The functors of values, one after another, [num_rows, num_cols] in float64.

    shape: of the input.
    """
    for bound in parts:
        values = _run(bound, shape, [values], [])
    return values


def gradients(
    parts: Sequence[BoundFunctor],
    values: np.ndarray,
    upstream: np.ndarray,
    shape: tuple[int, ...],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The gradient of what the functors are applied to, and of each array before it is summed over
    its repeats.

    values: what they are applied to; upstream: the gradient of the result.
    """
    arguments = [values]
    for bound in parts[:-1]:
        arguments.append(_run(bound, shape, arguments[-1:], []))
    of_arrays: list[np.ndarray] = []
    for bound, argument in zip(reversed(parts), reversed(arguments)):
        own = [np.zeros(values.shape) for _ in bound.arrays]
        upstream = _run(bound, shape, [argument, upstream], own)
        of_arrays[:0] = [each.reshape(shape) for each in own]
    return upstream, of_arrays
