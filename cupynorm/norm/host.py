"""Calls on NumPy arrays and CPU tensors: the float64 reference, rounded once. Exact, not fast.

Functors run the user's own lines, compiled for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .. import reference
from ..dispatch.functor_text import BoundFunctor, Functor, FusedPart, struct_text
from ..dtypes import compute_dtype, decode, encode
from ..gpu import arrays, launch
from ..reference.layer_norm import affine
from .arguments import summed
from .quantized import quantize_on_host
from .request import (
    Array,
    BackwardOperands,
    BackwardRequest,
    Forward,
    ForwardOperands,
    ForwardRequest,
    Gradients,
)


def _vector(array: Array | None) -> np.ndarray | None:
    return None if array is None else arrays.to_float64(array).reshape(-1)


class _Rows:
    """The shapes of a call of x. leading: of its statistics."""

    def __init__(self, x: Array, options: Any) -> None:
        self.options, self.shape = options, tuple(x.shape)
        self.leading = self.shape[: len(self.shape) - len(options.extents)]
        self.matrix_shape = arrays.product(self.leading), arrays.product(options.extents)

    def _matrix(self, array: Array) -> np.ndarray:
        return arrays.to_float64(array).reshape(self.matrix_shape)


class HostForward(_Rows):
    """The sum by the reference, rounded once, and the norm of that."""

    def __init__(self, request: ForwardRequest, sum_dtype: str, makes_sum: bool) -> None:
        super().__init__(request.operands.input, request.options)
        self.dtype = arrays.dtype_name(request.operands.input)
        self.sum_dtype, self.makes_sum = sum_dtype, makes_sum

    @np.errstate(all="ignore")
    def run(self, operands: ForwardOperands) -> Forward:
        options, added = self.options, operands.input
        load, store = operands.functors or ((), ())
        x = _apply(load, self._matrix(operands.input), self.shape)
        if self.makes_sum:
            x = x.reshape(self.shape)
            if operands.residual is not None:
                x = x + arrays.to_float64(operands.residual)
            added = arrays.from_float64(x, self.sum_dtype, operands.input)
            x = self._matrix(added)
        y64, mean, rstd = self._norm(x, operands.weight, operands.bias)
        y64 = _apply(store, y64, self.shape).reshape(self.shape)
        if options.quantization is not None:
            y = quantize_on_host(options.quantization, operands, y64, options.extents)
        else:
            y = arrays.from_float64(y64, options.out_dtype, operands.input)
            if operands.out is not None:
                operands.out[...] = y
                y = operands.out
        if operands.out_sum is not None:
            operands.out_sum[...] = added
            added = operands.out_sum
        compute = compute_dtype(self.sum_dtype).name
        mean, rstd = (
            None if each is None else arrays.from_float64(each, compute, operands.input)
            for each in (mean, rstd)
        )
        return Forward(y, mean, rstd, added)

    def _norm(
        self, x: np.ndarray, weight: Array | None, bias: Array | None
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """y, mean and rstd in float64, of the leading shape where that is theirs."""
        options = self.options
        if x.shape[1] == 0:
            nan = np.full(self.leading, np.nan)
            return np.empty(self.matrix_shape), nan if options.centered else None, nan
        rounds = options.round_x_hat and compute_dtype(self.dtype).name != self.dtype
        norm = reference.layer_norm if options.centered else reference.rms_norm
        result = norm(
            x,
            _vector(weight),
            _vector(bias),
            options.eps,
            zero_centered_weight=bool(options.zero_centered_weight),
            round_x_hat=self._rounded if rounds else None,
        )
        mean = result.mean.reshape(self.leading) if options.centered else None
        return result.y, mean, result.rstd.reshape(self.leading)

    def _rounded(self, x_hat: np.ndarray) -> np.ndarray:
        return decode(encode(x_hat, self.dtype), self.dtype)


class HostBackward(_Rows):
    """The gradients by the reference."""

    def __init__(self, request: BackwardRequest) -> None:
        super().__init__(request.operands.x, request.options)

    @np.errstate(all="ignore")
    def run(self, operands: BackwardOperands) -> Gradients:
        options, x = self.options, operands.x
        x64, mean = self._matrix(x), _vector(operands.mean)
        load, store = operands.functors or ((), ())
        raw64, of_load, of_store = x64, [], []
        if options.applies_load:
            x64 = _apply(load, raw64, self.shape)
        elif operands.input is not None:
            raw64 = self._matrix(operands.input)
        dy64 = self._matrix(operands.dy)
        if store:
            y64 = self._y(operands, x64, mean)
            dy64, of_store = _gradients(store, y64, dy64, self.shape)
        total, dweight, dbias = self._norm_gradients(operands, dy64, x64, mean)
        dx = total
        if load and options.dx_dtype:
            dx, of_load = _gradients(load, raw64, total, self.shape)
        y = self._y(operands, x64, mean) if options.recompute else None
        y_dtype = arrays.dtype_name(operands.dy) if options.recompute else None
        made = (
            arrays.from_float64(values.reshape(shape), dtype, x) if dtype else None
            for values, shape, dtype in (
                (dx, self.shape, options.dx_dtype),
                (dweight, options.extents, options.dweight_dtype),
                (dbias, options.extents, options.dbias_dtype),
                (total, self.shape, options.dresidual_dtype),
                (y, self.shape, y_dtype),
            )
        )
        return Gradients(*made, self._of_functors(operands, [*of_load, *of_store]))

    def _of_functors(self, operands: BackwardOperands, gradients: list[np.ndarray]) -> tuple:
        """The wanted gradients of functors' arrays, rounded once after they are summed."""
        if operands.functors is None:
            return ()
        named = operands.functors.named_arrays()
        return tuple(
            arrays.from_float64(
                summed(each, tuple(array.shape), per_row), arrays.dtype_name(array), operands.x
            )
            for (name, array, per_row), each in zip(named, gradients)
            if name in self.options.functor_gradients
        )

    def _norm_gradients(
        self, operands: BackwardOperands, dy: np.ndarray, x: np.ndarray, mean: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        options = self.options
        if self.matrix_shape[1] == 0:
            return np.empty(self.matrix_shape), np.empty(0), np.empty(0)
        backward, statistics = reference.rms_norm_backward, [_vector(operands.rstd)]
        if options.centered:
            backward, statistics = reference.layer_norm_backward, [mean, *statistics]
        return backward(
            dy,
            x,
            *statistics,
            _vector(operands.weight),
            zero_centered_weight=bool(options.zero_centered_weight),
            dsum=None if operands.dsum is None else self._matrix(operands.dsum),
        )

    @np.errstate(all="ignore")
    def _y(self, operands: BackwardOperands, x: np.ndarray, mean: np.ndarray | None) -> np.ndarray:
        """y from mean and rstd as they were rounded."""
        rstd = _vector(operands.rstd).reshape(-1, 1)
        zero_centered = bool(self.options.zero_centered_weight)
        x_hat = (x if mean is None else x - mean.reshape(-1, 1)) * rstd
        return affine(x_hat, _vector(operands.weight), _vector(operands.bias), zero_centered)


# Functors.


@cache
def _kernel(functor: Functor, backward: bool) -> Any:
    from ..gpu import on_cpu  # not before a functor is used: it imports what compiles

    count = len(functor.arrays)
    dtypes = ("float64",) * count
    part = FusedPart(functor, dtypes, ("elements",) * count, dtypes if backward else ())
    flag = "true" if backward else "false"
    return on_cpu.kernel(
        "apply_functor.cu",
        f"apply_functor<double, {part.struct('float64', backward)}, {flag}>",
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
    _kernel(bound.functor, backward).launch(1, 32, launch.pack(tuple(words)))
    return results


def _apply(parts: Sequence[BoundFunctor], values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The functors of values, one after another, [num_rows, num_cols] in float64.

    shape: of the input.
    """
    for bound in parts:
        values = _run(bound, shape, [values], [])
    return values


def _gradients(
    parts: Sequence[BoundFunctor], values: np.ndarray, upstream: np.ndarray, shape: tuple[int, ...]
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
