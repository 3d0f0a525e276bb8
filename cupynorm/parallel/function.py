"""torch: the layer of several ranks as a differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..linear import dtensors, fold, one_kernel
from ..linear.call import LinearCall, Operands, is_fused
from ..linear.matrices import as_result
from ..linear.weight_gradients import WeightGradientSink, asked_for
from ..nn import modes
from ..nn.dtypes import outside_autocast
from . import column, row
from .products import FloatProducts, Products

_MODES = {"column": column, "row": row}


def project(
    products: Products, operands: Operands, sink: WeightGradientSink | None
) -> tuple[Tensor, Tensor | None]:
    """y and normalized (None unless requested).

    sink: takes the gradients of weights and biases.
    Raises NotImplementedError for what torch would transform or trace.
    """
    check_plain(operands)
    if torch.is_grad_enabled() and modes.wants_gradient(*operands.all):
        fold.forget(operands.weights[0])  # an optimizer may step without telling torch
        return Sharded.apply(products, sink, len(operands.weights), *operands.all)
    with torch.no_grad(), outside_autocast(operands.input):
        products = _with_cached_fold(products, operands)
        return _MODES[products.sharding.mode].forward(products, operands)[:2]


def _with_cached_fold(products: Products, operands: Operands) -> Products:
    options = products.options
    if not is_fused(options.fused) or products.folded is not None:
        return products
    call = LinearCall(operands, options)
    make = one_kernel.folds(call)
    if make is None:
        return products
    return FloatProducts(options, products.sharding, fold.cached_fold(call, make))


def check_plain(operands: Operands) -> None:
    """Raises NotImplementedError for what torch would transform, and for DTensors."""
    if modes.is_transformed():
        raise NotImplementedError(
            "torch.func or forward mode was asked to transform a layer with tp_size of 2 or more; "
            "expected it outside of them"
        )
    dtensors.refuse(operands, "with tp_size of 2 or more")


class Sharded(torch.autograd.Function):
    """y, normalized (None unless requested). tensors: operands.all."""

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
