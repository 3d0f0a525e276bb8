"""torch: the forward operators as torch operations, for torch.onnx.export(dynamo=True).

The exporter looks operators up in torch's table of decompositions. torch.compile and torch.export
do not: there the operators stay in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition
from torch.nn import functional

from ..norm.checks import check_forward
from ..norm.request import ForwardOperands, ForwardOptions, ForwardRequest
from . import formulas
from .fused_operators import FusedNormForward, fused_request
from .operators import NormForward, forward_request


@register_decomposition(torch.ops.cupynorm.norm_forward.default)
def _norm_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return _decompose(forward_request(NormForward(*arguments)))[:4]


@register_decomposition(torch.ops.cupynorm.fused_norm_forward.default)
def _fused_norm_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return _decompose(fused_request(FusedNormForward(*arguments)))


def _decompose(request: ForwardRequest) -> tuple[Tensor, ...]:
    """y, mean, rstd, the sum, y1. The exporter drops what is not used."""
    operands, options = check_forward(request)
    if options.dropout_p > 0:
        raise NotImplementedError(
            f"dropout_p is {options.dropout_p}; expected 0 in torch.onnx.export: "
            "call eval() on the model first"
        )
    added = _sum(operands, options)
    x, num_dims = added.to(formulas.arithmetic(added)), len(options.extents)
    dims = tuple(range(-num_dims, 0))
    mean = x.mean(dims, keepdim=True)
    difference = x - mean if options.centered else x
    rstd = torch.rsqrt((difference * difference).mean(dims, keepdim=True) + options.eps)
    leading, empty = x.shape[: x.dim() - num_dims], x.new_empty(0)
    has_second = operands.weight1 is not None or operands.bias1 is not None
    rounded = operands.input.dtype if options.round_x_hat else x.dtype

    def normalize(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        factor = None
        if weight is not None:
            factor = formulas.scale(weight, bool(options.zero_centered_weight), x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        if rounded == x.dtype and options.centered:
            y = functional.layer_norm(x, options.extents, factor, bias, options.eps)
        elif rounded == x.dtype and bias is None:
            y = functional.rms_norm(x, options.extents, factor, options.eps)
        else:
            y = (difference * rstd).to(rounded).to(x.dtype)
            y = y if factor is None else y * factor
            y = y if bias is None else y + bias
        return y.to(getattr(torch, options.out_dtype))

    return (
        normalize(operands.weight, operands.bias),
        mean.reshape(leading) if options.centered else empty,
        rstd.reshape(leading),
        added,
        normalize(operands.weight1, operands.bias1) if has_second else empty,
    )


def _sum(operands: ForwardOperands, options: ForwardOptions) -> Tensor:
    """row_scale * input + residual, rounded once."""
    values, scale, residual = operands.input, operands.row_scale, operands.residual
    wide = formulas.arithmetic(values)
    if scale is not None:
        values = values.to(wide) * scale.to(wide)[(..., *(None,) * len(options.extents))]
    if residual is not None:
        values = values.to(wide) + residual.to(wide)
    return values.to(getattr(torch, options.residual_dtype))
