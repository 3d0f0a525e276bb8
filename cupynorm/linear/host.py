"""NumPy: the calls of arrays on the host, in float64 by the reference and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import reference
from ..gpu import arrays
from ..norm.checks import take_like
from .call import LinearBackwardCall, LinearCall, check_eps


def project(call: LinearCall, added: np.ndarray) -> np.ndarray:
    """y of the rounded sum `added`, from the unrounded normalised tensor: one rounding in all."""
    _, _, norm_weight, norm_bias, (weight,), biases = call.operands
    options, bias = call.options, biases[0] if biases else None
    dtype = arrays.dtype_name(added)
    num_rows = arrays.product(added.shape[:-1])
    result = reference.norm_linear(
        _values(added, num_rows, added.shape[-1]),
        *(_values(each) for each in (norm_weight, norm_bias, weight, bias)),
        check_eps(options.eps, dtype, centered=options.centered),
        centered=options.centered,
        zero_centered_weight=options.zero_centered_weight,
    )
    y = result.y.reshape(*added.shape[:-1], weight.shape[0])
    return arrays.from_float64(y, dtype, added)


def gradients(call: LinearBackwardCall) -> list[np.ndarray]:
    """dx, dnorm_weight, dnorm_bias, dweight, dbias, whichever are requested."""
    x, weight, norm_weight, norm_bias = call.x, call.weight, call.norm_weight, call.norm_bias
    num_rows, in_features = arrays.product(x.shape[:-1]), x.shape[-1]
    for name in ("mean", "rstd"):
        take_like(getattr(call, name), x, tuple(x.shape[:-1]), name, "x")
    results = reference.norm_linear_backward(
        _values(call.dy, num_rows, weight.shape[0]),
        _values(x, num_rows, in_features),
        _values(call.mean, num_rows),
        _values(call.rstd, num_rows),
        _values(norm_weight),
        _values(norm_bias),
        weight=_values(weight),
        zero_centered_weight=call.options.zero_centered_weight,
        dnormalized=_values(call.dnormalized, num_rows, in_features),
        dsum=_values(call.dsum, num_rows, in_features),
    )
    dtype, weight_dtype = arrays.dtype_name(x), arrays.dtype_name(weight)
    norm_dtype = dtype if norm_weight is None else arrays.dtype_name(norm_weight)
    norm_bias_dtype = norm_dtype if norm_bias is None else arrays.dtype_name(norm_bias)
    dtypes = (dtype, norm_dtype, norm_bias_dtype, weight_dtype, weight_dtype)
    shapes = (x.shape, *(each.shape for each in results[1:]))
    return [
        arrays.from_float64(each.reshape(shape), dtype, x)
        for each, shape, dtype in zip(results, shapes, dtypes)
    ]


def _values(array: Any, *shape: int) -> np.ndarray | None:
    """An array in float64, reshaped if a shape is given."""
    if array is None:
        return None
    values = arrays.to_float64(array)
    return values.reshape(shape) if shape else values
