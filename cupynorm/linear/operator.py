"""torch: the operator cupynorm::norm_linear, for calls that torch traces.

    -> y, normalized, mean, rstd, sum    a result that is not requested is empty

Its gradients are made of torch operations and of the operators of nn/operators.py, so that they can
be traced and differentiated too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from ..nn import decompositions, formulas, schemas
from ..nn.dtypes import SUPPORTED, outside_autocast
from ..norm.prepared import FOR_STATISTICS
from ..norm.request import Options
from . import compute
from .call import LinearCall, LinearOptions, Operands, check
from .kernels import SavedNorm, forward_request
from .matrices import as_result, concatenate, join
from .norms import OPERATORS

_library = torch.library.Library("cupynorm", "FRAGMENT")
_library.define(
    "norm_linear(Tensor input, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor[] weights, Tensor[] biases, float? eps, bool centered, bool zero_centered_weight, "
    "ScalarType dtype, bool return_normalized, bool save_normalized, str? fused, int sm_margin, "
    "int backward_sm_margin) "
    "-> (Tensor y, Tensor normalized, Tensor mean, Tensor rstd, Tensor sum)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_operator = torch.ops.cupynorm.norm_linear.default


class _Arguments(NamedTuple):
    """The operator's arguments, in the order of its schema."""

    input: Tensor
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    eps: float | None
    centered: bool
    zero_centered_weight: bool
    dtype: torch.dtype
    return_normalized: bool
    save_normalized: bool
    fused: str | None
    sm_margin: int
    backward_sm_margin: int

    @property
    def operands(self) -> Operands:
        return Operands(*self[:6])

    def options(self, sm_margin: int) -> LinearOptions:
        return LinearOptions(
            self.centered,
            self.eps,
            self.zero_centered_weight,
            self.return_normalized,
            self.save_normalized,
            self.fused,
            Options(sm_margin=sm_margin),
            self.dtype,
        )

    @property
    def has_normalized(self) -> bool:
        """Whether the result `normalized` is not empty."""
        return self.return_normalized or self.save_normalized


def by_operator(call: LinearCall) -> tuple[Tensor, ...]:
    """y, normalized, mean, rstd, input + residual; a result that is not requested is empty.

    call: with a norm.
    """
    operands, options = call
    input, residual, norm_weight, norm_bias, weights, biases = operands
    kind = "forward" if torch.is_grad_enabled() else "inference"
    return _operator(
        input,
        residual,
        norm_weight,
        norm_bias,
        list(weights),
        list(biases),
        options.eps,
        options.centered,
        options.zero_centered_weight,
        options.dtype,
        options.return_normalized,
        options.save_normalized,
        options.fused,
        options.launch.of(kind).sm_margin,
        options.launch.of("backward").sm_margin,
    )


def fits(operands: Operands) -> bool:
    """Whether the parameters fit, in a tenth of the time of call.check.

    Returns False to run call.check, which raises the detailed error or accepts them.
    """
    input, _, norm_weight, norm_bias, weights, biases = operands
    try:
        in_features, dtype, device = input.shape[-1], input.dtype, input.device
        for at, weight in enumerate(weights):
            num_rows, num_cols = weight.shape
            if num_cols != in_features or weight.dtype != dtype or weight.device != device:
                return False
            if biases:
                bias = biases[at]
                if bias.shape != (num_rows,) or bias.dtype != dtype or bias.device != device:
                    return False
        for parameter in (norm_weight, norm_bias):
            if parameter is not None:
                if parameter.shape != (in_features,) or parameter.device != device:
                    return False
                if parameter.dtype not in SUPPORTED:
                    return False
        return dtype in SUPPORTED
    except (AttributeError, IndexError, ValueError):
        return False


def _run(*values: Any) -> tuple[Tensor, ...]:
    arguments = _Arguments(*values)
    operands, input = arguments.operands, arguments.input
    if not fits(operands):  # what torch.jit.trace recorded takes any tensors
        check(operands, arguments.fused, is_cast=True)
    call = LinearCall(operands, arguments.options(arguments.sm_margin))
    weight, bias = join(operands.weights), join(operands.biases)
    y, normalized, mean, rstd, added = compute.forward(call, weight, bias, FOR_STATISTICS)
    # An operator must not return a tensor that it was given.
    return (
        as_result(y),
        as_result(normalized) if arguments.has_normalized else y.new_empty(0),
        mean if arguments.centered else rstd.new_empty(0),
        rstd,
        input.new_empty(0) if operands.residual is None else added,
    )


def _run_without_memory(*values: Any) -> tuple[Tensor, ...]:
    arguments = _Arguments(*values)
    check(arguments.operands, arguments.fused, is_cast=True)
    input, dtype = arguments.input, arguments.dtype
    compute_dtype = formulas.arithmetic(input)
    leading, out_features = input.shape[:-1], sum(len(part) for part in arguments.weights)
    return (
        input.new_empty((*leading, out_features), dtype=dtype),
        input.new_empty(input.shape if arguments.has_normalized else 0, dtype=dtype),
        input.new_empty(leading if arguments.centered else 0, dtype=compute_dtype),
        input.new_empty(leading, dtype=compute_dtype),
        input.new_empty(0 if arguments.residual is None else input.shape),
    )


def _run_by_torch_operations(*values: Any) -> tuple[Tensor, ...]:
    arguments = _Arguments(*values)
    operands, dtype, empty = arguments.operands, arguments.dtype, arguments.input.new_empty
    options = arguments.options(arguments.sm_margin)
    outputs = decompositions.forward(forward_request(options, operands, dtype))
    weight, bias = concatenate(operands.weights, dtype), concatenate(operands.biases, dtype)
    return (
        functional.linear(outputs.y, weight, bias),
        outputs.y if arguments.has_normalized else empty(0),
        outputs.mean if arguments.centered else outputs.rstd.new_empty(0),
        outputs.rstd,
        empty(0) if operands.residual is None else outputs.sum,
    )


def _save(ctx, inputs, output):
    arguments = _Arguments(*inputs)
    _, normalized, mean, rstd, added = output
    unused = [mean, rstd]
    if not arguments.return_normalized:
        unused.append(normalized)
    if arguments.residual is None:
        unused.append(added)
    ctx.mark_non_differentiable(*unused)
    ctx.save_for_backward(
        arguments.input if arguments.residual is None else added,
        mean,
        rstd,
        arguments.norm_weight,
        arguments.norm_bias,
        normalized if arguments.save_normalized else None,
        *arguments.weights,
        *arguments.biases,
    )
    ctx.set_materialize_grads(False)
    ctx.num_parts = len(arguments.weights), len(arguments.biases)
    ctx.options = arguments.options(arguments.backward_sm_margin)


def _differentiate(ctx, dy, dnormalized, _dmean, _drstd, dsum):
    added, mean, rstd, norm_weight, norm_bias, normalized, *parts = ctx.saved_tensors
    norm = SavedNorm(added, mean, rstd, norm_weight, norm_bias)
    num_weights, num_biases = ctx.num_parts
    weights, biases = parts[:num_weights], parts[num_weights:]
    wants_weights, wants_biases, *rest = ctx.needs_input_grad[4:]
    wanted = (
        *ctx.needs_input_grad[:4],
        *each_of(wants_weights, num_weights),
        *each_of(wants_biases, num_biases),
    )
    # With create_graph=True the saved tensor would be a constant; recomputed it depends on x.
    if torch.is_grad_enabled():
        normalized = None
    with outside_autocast(norm.x):
        weight = concatenate(weights, ctx.options.dtype)
        saved = compute.Saved(norm, normalized, weight, weights, biases)
        incoming = compute.Incoming(dy, dnormalized, dsum)
        gradients = compute.gradients(OPERATORS, ctx.options, saved, incoming, wanted)
    dweights, dbiases = list(gradients[4 : 4 + num_weights]), list(gradients[4 + num_weights :])
    return *gradients[:4], dweights, dbiases, *(None for _ in rest)


def each_of(wants: Any, number: int) -> list[bool]:
    """needs_input_grad of a list of tensors: torch gives a list, or one answer for all."""
    return list(wants) if isinstance(wants, Sequence) else [bool(wants)] * number


for _device in ("CPU", "CUDA"):
    _library.impl("norm_linear", _run, _device)
torch.library.register_fake("cupynorm::norm_linear", _run_without_memory, lib=_library)
torch.library.register_autograd(
    "cupynorm::norm_linear", _differentiate, setup_context=_save, lib=_library
)
schemas.register_decompositions("norm_linear", _run_by_torch_operations, _run_without_memory)


@register_flop_formula(torch.ops.cupynorm.norm_linear)
def _count_flops(input_shape, *shapes, out_shape=None, **_) -> int:
    """Those of the product, as for torch.nn.Linear. torch counts none for a norm."""
    return 2 * math.prod(input_shape) * out_shape[0][-1]
