"""CuPy: the calls of CuPy arrays. The norm is that of cupynorm.norm, the products are cuBLAS's."""

from __future__ import annotations

from ..gpu import arrays, cublas, launch
from ..norm.prepared import FOR_Y
from ..norm.request import Array
from ..norm.results import Backward
from . import kernels
from .call import GRADIENTS, LinearBackwardCall, LinearCall
from .kernels import SavedNorm


def project(call: LinearCall, rows: Array) -> Array:
    """y of the normalised tensor."""
    weight, biases = call.operands.weights[0], call.operands.biases
    shape = (*rows.shape[:-1], weight.shape[0])
    with launch.on_device(rows.device.id):
        rows, weight = _contiguous(kernels.as_rows(rows)), _contiguous(weight)
        y = _repeated(biases[0], len(rows)) if biases else None
        y = cublas.multiply(rows, weight, transpose_b=True, out=y, accumulate=y is not None)
    return y.reshape(shape)


def gradients(call: LinearBackwardCall) -> list[Array | None]:
    """dx, dnorm_weight, dnorm_bias, dweight, dbias; None where not requested."""
    with launch.on_device(call.x.device.id):
        return _gradients(call)


def _gradients(call: LinearBackwardCall) -> list[Array | None]:
    options, normalized = call.options, call.normalized
    saved = SavedNorm(call.x, call.mean, call.rstd, call.norm_weight, call.norm_bias)
    rows, weight = _contiguous(kernels.as_rows(call.dy)), _contiguous(call.weight)
    wanted = [name in call.gradients for name in GRADIENTS[: len(Backward._fields)]]
    wants_weight = "dweight" in call.gradients
    norm_gradients: list[Array | None] = [None] * len(wanted)
    if any(wanted):
        dnormalized = _dnormalized(call, rows, weight)
        recompute = wants_weight and normalized is None
        *norm_gradients, recomputed = kernels.backward(
            options,
            dnormalized,
            saved,
            call.dsum,
            wanted=wanted,
            recompute=recompute,
            overwrite_dy=True,
        )
        normalized = recomputed if recompute else normalized
    dweight = dbias = None
    if wants_weight:
        if normalized is None:
            normalized = kernels.forward(options, saved.operands, None, FOR_Y)[0]
        normalized_rows = _contiguous(kernels.as_rows(normalized))
        dweight = cublas.multiply(rows, normalized_rows, transpose_a=True)
    if "dbias" in call.gradients:
        dbias = cublas.sum_rows(rows)
    return [*norm_gradients, dweight, dbias]


def _dnormalized(call: LinearBackwardCall, rows: Array, weight: Array) -> Array:
    """The gradient of the normalised tensor: dy weight, and what comes from elsewhere."""
    x, total = call.x, None
    if call.dnormalized is not None:  # copied, because the product is added in place
        total = type(x)(kernels.as_rows(x).shape, x.dtype)
        cublas.bits(total)[...] = cublas.bits(_contiguous(kernels.as_rows(call.dnormalized)))
    total = cublas.multiply(rows, weight, out=total, accumulate=total is not None)
    return total.reshape(x.shape)


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else arrays.CuPyLibrary.contiguous(array)


def _repeated(bias: Array, num_rows: int) -> Array:
    """[num_rows, out_features], each row the bias: a product is added to it."""
    rows = type(bias)((num_rows, bias.shape[0]), bias.dtype)
    cublas.bits(rows)[...] = cublas.bits(_contiguous(bias))
    return rows
