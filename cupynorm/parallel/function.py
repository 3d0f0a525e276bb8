"""torch: the layer of several ranks as a differentiable function, eager and for torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..linear import fold, one_kernel
from ..linear.call import LinearCall, Operands, all_of
from ..linear.function import normalize_and_add
from ..linear.matrices import as_result, concatenate
from ..linear.weight_gradients import WeightGradientSink, asked_for
from ..nn import by_torch, modes, private
from ..nn.modes import outside_autocast
from ..norm.request import replaced
from . import column, row
from .products import FloatProducts, Products
from .sharding import Sharding

_MODES = {"column": column, "row": row}


def project(
    products: Products, operands: Operands, sink: WeightGradientSink | None
) -> tuple[Tensor, Tensor | None]:
    """y and normalized (None unless requested).

    sink: takes the gradients of weights and biases.
    Raises NotImplementedError for what torch would transform or trace.
    """
    check_plain(operands)
    if torch.is_grad_enabled() and modes.wants_gradient(*all_of(operands)):
        fold.forget(operands.weights[0])  # an optimizer may step without telling torch
        return Sharded.apply(products, sink, len(operands.weights), *all_of(operands))
    with torch.no_grad(), outside_autocast(operands.input):
        products = _with_cached_fold(products, operands)
        return _MODES[products.sharding.mode].forward(products, operands)[:2]


def _with_cached_fold(products: Products, operands: Operands) -> Products:
    call = LinearCall(operands, products.options)
    if not one_kernel.keeps_fold(call) or products.folded is not None:
        return products
    return FloatProducts(products.options, products.sharding, fold.cached_fold(call))


def check_plain(operands: Operands) -> None:
    """Raises NotImplementedError for what torch would transform, and for DTensors."""
    if modes.is_transformed():
        raise NotImplementedError(
            "torch.func or forward mode was asked to transform a layer with tp_size of 2 or more; "
            "expected it outside of them"
        )
    if by_torch.is_any_dtensor(*all_of(operands)):
        raise NotImplementedError(
            "a DTensor was given to a layer with tp_size of 2 or more; expected plain tensors, "
            "to_local()"
        )


class Sharded(torch.autograd.Function):
    """y, normalized (None unless requested). tensors: all_of(operands)."""

    @staticmethod
    def forward(ctx, products, sink, num_weights, *tensors):
        operands, mode = Operands.split(tensors, num_weights), products.sharding.mode
        with outside_autocast(operands.input):
            y, normalized, saved = _MODES[mode].forward(products, operands)
        ctx.save_for_backward(*saved, *tensors)
        ctx.products, ctx.sink = products.without_weight(), sink
        ctx.num_saved, ctx.num_weights, ctx.first_backward = len(saved), num_weights, None
        ctx.set_materialize_grads(False)
        return as_result(y), as_result(normalized)

    @staticmethod
    def backward(ctx, dy, dnormalized):
        # Compiled autograd would trace it.
        return modes.run_untraced(_gradients)(ctx, dy, dnormalized)


def _gradients(ctx: Any, dy: Tensor | None, dnormalized: Tensor | None) -> tuple:
    """What Sharded.backward returns."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph is True for a layer with tp_size of 2 or more; "
            "expected create_graph=False"
        )
    tensors: tuple[Any, ...] = ctx.saved_tensors
    operands = Operands.split(tensors[ctx.num_saved :], ctx.num_weights)
    wants_input, _, *wants_others = ctx.needs_input_grad[3:]
    wanted, sink = asked_for(ctx, (wants_input, *wants_others), ctx.sink)
    with outside_autocast(operands.input):
        products = ctx.products.of_backward(ctx)
        dx, *others = _MODES[products.sharding.mode].backward(
            products,
            tensors[: ctx.num_saved],
            operands,
            (dy, dnormalized),
            wanted,
            sink,
        )
    return None, None, None, dx, None, *others


# torch.compile.


def project_by_torch(call: LinearCall, sharding: Sharding) -> tuple[Tensor, Tensor | None]:
    """As project, of a column-parallel layer, in operations that torch.compile sees.

    Its async tensor parallelism may fuse the product with the collective.
    """
    operands, options = call
    group, gathers = sharding.ranks.group, sharding.gathers_input
    if sharding.reduces_norm and gathers:
        norm_weight, norm_bias = (
            None if each is None else _Copied.apply(each, group.group_name)
            for each in (operands.norm_weight, operands.norm_bias)
        )
        operands = replaced(operands, norm_weight=norm_weight, norm_bias=norm_bias)
    normalized, _ = normalize_and_add(LinearCall(operands, options))
    if gathers:
        rows = private.functional_collectives().all_gather_tensor_autograd(normalized, 0, group)
    else:
        rows = _Copied.apply(normalized, group.group_name)
    weight, bias = (
        concatenate(parts, options.dtype) for parts in (operands.weights, operands.biases)
    )
    y = functional.linear(rows, weight, bias)
    if not options.return_normalized:
        return y, None
    return y, rows if sharding.gathered else normalized


class _Copied(torch.autograd.Function):
    """What all ranks have, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return private.functional_all_reduce(dy.contiguous(), ctx.name), None
