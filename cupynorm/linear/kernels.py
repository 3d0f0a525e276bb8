"""The norm of a linear call, and its gradients, outside autograd.

Every call of the kernels of cupynorm.norm from this folder is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..norm import calls
from ..norm.calls import FOR_STATISTICS
from ..norm.quantized import OfNorm, QuantizedMatrix, QuantizedTensor, quantize
from ..norm.request import (
    Array,
    Backward,
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Quantization,
)
from .call import LinearOptions, Operands
from .matrices import as_rows


class SavedNorm(NamedTuple):
    """What the gradients of a norm need. x: what was normalised, [..., in_features]."""

    x: Array
    mean: Array | None
    rstd: Array
    norm_weight: Array | None
    norm_bias: Array | None

    @property
    def operands(self) -> Operands:
        """Those of a norm of x."""
        return Operands(self.x, None, self.norm_weight, self.norm_bias, (), ())


def forward_request(options: LinearOptions, operands: Operands, dtype: Any) -> ForwardRequest:
    """The norm of a call, in dtype."""
    input = operands.input
    return ForwardRequest(
        ForwardOperands(input, operands.norm_weight, operands.norm_bias, operands.residual),
        ForwardOptions(
            options.centered,
            tuple(input.shape[-1:]),
            options.eps,
            options.zero_centered_weight,
            dtype,
            launch=options.launch,
        ),
    )


def backward_request(
    options: LinearOptions,
    dy: Array,
    saved: SavedNorm,
    dsum: Array | None,
    *,
    wanted: Sequence[bool],
    recompute: bool = False,
    overwrite_dy: bool = False,
) -> BackwardRequest:
    """The gradients of a norm; wanted: which of dx, dnorm_weight, dnorm_bias.

    recompute: also write the normalised tensor again. overwrite_dy: dx may be written over dy.
    """
    x, mean, rstd, norm_weight, norm_bias = saved
    operands = BackwardOperands(dy, x, mean, rstd, norm_weight, dsum)
    if recompute:
        operands = operands._replace(bias=norm_bias)
    names = tuple(name for name, is_wanted in zip(Backward._fields, wanted) if is_wanted)
    return BackwardRequest(
        operands,
        BackwardOptions(
            options.centered,
            tuple(x.shape[-1:]),
            options.zero_centered_weight,
            names,
            dbias_dtype=None if norm_bias is None else norm_bias.dtype,
            recompute=recompute,
            overwrite_dy=overwrite_dy,
            launch=options.launch,
        ),
    )


def forward(
    options: LinearOptions, operands: Operands, dtype: Any, purpose: str = FOR_STATISTICS
) -> tuple[Array | None, Array | None, Array | None, Array]:
    """normalized (in dtype), mean, rstd, input + residual. Without a norm: the input in dtype."""
    if not options.has_norm:
        return operands.input.to(dtype), None, None, operands.input
    return calls.forward(forward_request(options, operands, dtype), purpose)[:4]


def backward(
    options: LinearOptions,
    dy: Array,
    saved: SavedNorm,
    dsum: Array | None,
    *,
    wanted: Sequence[bool],
    recompute: bool = False,
    overwrite_dy: bool = False,
) -> tuple[Array | None, ...]:
    """dx, dnorm_weight, dnorm_bias (None where not wanted), and the normalised tensor or None.

    recompute, overwrite_dy: as for backward_request.
    """
    if not options.has_norm:
        return dy.to(saved.x.dtype), None, None, saved.x.to(dy.dtype) if recompute else None
    gradients = calls.backward(
        backward_request(
            options,
            dy,
            saved,
            dsum,
            wanted=wanted,
            recompute=recompute,
            overwrite_dy=overwrite_dy,
        )
    )
    return *gradients[:3], gradients.y


def forward_quantized(
    options: LinearOptions,
    operands: Operands,
    quantization: Quantization,
    scale: Array | None,
    amax: Array | None,
) -> tuple[QuantizedTensor, Array | None, Array]:
    """The normalised tensor in 8-bit floats as a matrix of rows; mean and rstd of the input.

    scale, amax: as for cupynorm.layer_norm.
    """
    leading, rows = operands.input.shape[:-1], as_rows(operands.input)
    request = forward_request(options, operands._replace(input=rows, residual=None), None)
    quantized, mean, rstd, *_ = calls.forward(
        ForwardRequest(
            request.operands._replace(scale=scale, amax=amax),
            request.options._replace(quantization=quantization),
        )
    )
    return quantized, None if mean is None else mean.reshape(leading), rstd.reshape(leading)


def quantize_again(
    options: LinearOptions, saved: SavedNorm, format: str, scale: Array
) -> QuantizedMatrix:
    """The transposed 8-bit copy of the normalised tensor, by a known scale, on a GPU.

    format: of 8-bit floats, by name.
    """
    of_norm = OfNorm(
        options.centered,
        saved.norm_weight,
        saved.norm_bias,
        options.zero_centered_weight,
        saved.mean,
        saved.rstd,
    )
    x = as_rows(saved.x)
    return quantize(x, format, scale, wants_data=False, transpose=True, of_norm=of_norm)
