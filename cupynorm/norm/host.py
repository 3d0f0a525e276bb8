"""Calls on NumPy arrays and CPU tensors: the float64 reference, rounded once. Exact, not fast."""

from __future__ import annotations

import numpy as np

from .. import reference
from ..dtypes import compute_dtype, decode, encode
from ..gpu import arrays
from ..reference.layer_norm import affine
from . import host_functors
from .checked_forward import CheckedForward
from .functors import summed
from .quantized_tensor import quantize_on_host
from .request import Array, BackwardOperands, BackwardRequest, ForwardOperands, ForwardRequest
from .results import Forward, Gradients


def _vector(array: Array | None) -> np.ndarray | None:
    return None if array is None else arrays.to_float64(array).reshape(-1)


class HostForward(CheckedForward):
    """The sum by the reference, rounded once, and the norm of that."""

    def __init__(self, request: ForwardRequest, stores_sum: bool) -> None:
        super().__init__(request, stores_sum)
        x, extents = request.operands.input, self.options.extents
        self.shape = tuple(x.shape)
        self.leading = self.shape[: len(self.shape) - len(extents)]
        self.matrix_shape = arrays.product(self.leading), arrays.product(extents)

    def run(self, operands: ForwardOperands) -> Forward:
        options, added = self.options, self._sum(operands)
        x = arrays.to_float64(added).reshape(self.matrix_shape)
        load, store = operands.functors or ((), ())
        if not self.makes_sum:
            x = host_functors.apply(load, x, self.shape)
        y64, mean, rstd = self._norm(x, operands.weight, operands.bias)
        y64 = host_functors.apply(store, y64, self.shape).reshape(self.shape)
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

    def _sum(self, operands: ForwardOperands) -> Array:
        if not self.makes_sum:
            return operands.input
        values = arrays.to_float64(operands.input).reshape(self.matrix_shape)
        if operands.functors is not None:
            values = host_functors.apply(operands.functors.load, values, self.shape)
        values = values.reshape(self.shape)
        if operands.residual is not None:
            values = values + arrays.to_float64(operands.residual)
        return arrays.from_float64(values, self.sum_dtype, operands.input)

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


class HostBackward:
    """The gradients by the reference."""

    def __init__(self, request: BackwardRequest) -> None:
        self.options = request.options
        shape, extents = tuple(request.operands.x.shape), request.options.extents
        self.shape = shape
        leading = shape[: len(shape) - len(extents)]
        self.matrix_shape = arrays.product(leading), arrays.product(extents)

    def run(self, operands: BackwardOperands) -> Gradients:
        options = self.options
        x, mean = operands.x, operands.mean
        x64, mean64 = self._matrix(x), _vector(mean)
        load, store = operands.functors or ((), ())
        raw64, of_load, of_store = x64, [], []
        if options.applies_load:
            x64 = host_functors.apply(load, raw64, self.shape)
        elif operands.input is not None:
            raw64 = self._matrix(operands.input)
        dy64 = self._matrix(operands.dy)
        if store:
            y64 = self._y(operands, x64, mean64)
            dy64, of_store = host_functors.gradients(store, y64, dy64, self.shape)
        total, dweight, dbias = self._gradients(operands, dy64, x64, mean64)
        dx = dresidual = y = None
        if options.dx_dtype:
            dx = total
            if load:
                dx, of_load = host_functors.gradients(load, raw64, total, self.shape)
            dx = arrays.from_float64(dx.reshape(self.shape), options.dx_dtype, x)
        if options.dresidual_dtype:
            values = total.reshape(self.shape)
            dresidual = arrays.from_float64(values, options.dresidual_dtype, x)
        dweight, dbias = (
            arrays.from_float64(values.reshape(options.extents), dtype, x) if dtype else None
            for values, dtype in ((dweight, options.dweight_dtype), (dbias, options.dbias_dtype))
        )
        if options.recompute:
            y64 = self._y(operands, x64, mean64).reshape(self.shape)
            y = arrays.from_float64(y64, arrays.dtype_name(operands.dy), x)
        of_functors = self._of_functors(operands, [*of_load, *of_store])
        return Gradients(dx, dweight, dbias, dresidual, y, of_functors)

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

    def _matrix(self, array: Array) -> np.ndarray:
        return arrays.to_float64(array).reshape(self.matrix_shape)

    def _gradients(
        self, operands: BackwardOperands, dy: np.ndarray, x: np.ndarray, mean: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        options = self.options
        if self.matrix_shape[1] == 0:
            return np.empty(self.matrix_shape), np.empty(0), np.empty(0)
        rows = [dy, x, _vector(operands.rstd)]
        if options.centered:
            rows.insert(2, mean)
        backward = (
            reference.layer_norm_backward if options.centered else reference.rms_norm_backward
        )
        return backward(
            *rows,
            _vector(operands.weight),
            zero_centered_weight=bool(options.zero_centered_weight),
            dsum=None if operands.dsum is None else self._matrix(operands.dsum),
        )

    def _y(self, operands: BackwardOperands, x: np.ndarray, mean: np.ndarray | None) -> np.ndarray:
        """y from mean and rstd as they were rounded."""
        rstd = _vector(operands.rstd).reshape(-1, 1)
        zero_centered = bool(self.options.zero_centered_weight)
        with np.errstate(all="ignore"):
            x_hat = (x if mean is None else x - mean.reshape(-1, 1)) * rstd
            return affine(x_hat, _vector(operands.weight), _vector(operands.bias), zero_centered)
