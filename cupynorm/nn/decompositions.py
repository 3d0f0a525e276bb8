"""torch: the forward operators as torch operations, for torch.onnx.export(dynamo=True).

The exporter supports no operators but torch's. It replaces others by their entries in torch's table
of decompositions. torch.compile and torch.export use other tables, and keep the operators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..norm.checks import check_forward
from ..norm.request import ForwardOperands, ForwardOptions, ForwardRequest
from ..norm.results import FusedForward
from . import formulas


def forward(request: ForwardRequest) -> FusedForward:
    """As route.forward. Raises NotImplementedError for dropout, whose bits no torch operation
    draws."""
    operands, options = check_forward(request)
    if options.dropout_p > 0:
        raise NotImplementedError(
            f"dropout_p is {options.dropout_p} where a norm is decomposed into torch operations, "
            "as torch.onnx.export does; expected 0: call eval() on the model first"
        )
    added = _sum(operands, options)
    y = _normalize(added, operands.weight, operands.bias, options)
    y1 = None
    if operands.weight1 is not None or operands.bias1 is not None:
        y1 = _normalize(added, operands.weight1, operands.bias1, options)
    num_dims = len(options.extents)
    _, *statistics = formulas.moments(added, num_dims, options.centered, options.eps)
    mean, rstd = (None if each is None else each.flatten(-num_dims)[..., 0] for each in statistics)
    return FusedForward(y, mean, rstd, added, y1, None)


def _sum(operands: ForwardOperands, options: ForwardOptions) -> Tensor:
    """row_scale * input + residual, rounded once."""
    values, scale, residual = operands.input, operands.row_scale, operands.residual
    wide = formulas.arithmetic(values)
    if scale is not None:
        values = values.to(wide) * scale.to(wide)[(..., *(None,) * len(options.extents))]
    if residual is not None:
        values = values.to(wide) + residual.to(wide)
    return values.to(getattr(torch, options.residual_dtype))


def _normalize(
    added: Tensor, weight: Tensor | None, bias: Tensor | None, options: ForwardOptions
) -> Tensor:
    """y, by one operation where ONNX may have it."""
    x, extents = added.to(formulas.arithmetic(added)), options.extents
    weight = None if weight is None else weight.to(x.dtype)
    if weight is not None and options.zero_centered_weight:
        weight = 1 + weight
    bias = None if bias is None else bias.to(x.dtype)
    if options.round_x_hat:
        x_hat = formulas.x_hat(x, len(extents), options.centered, options.eps)
        y = x_hat.to(added.dtype).to(x.dtype)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    elif options.centered:
        y = functional.layer_norm(x, extents, weight, bias, options.eps)
    else:
        y = functional.rms_norm(x, extents, weight, options.eps)
        y = y if bias is None else y + bias
    return y.to(getattr(torch, options.out_dtype))
