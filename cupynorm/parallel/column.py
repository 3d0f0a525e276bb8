"""torch: the column-parallel layer: a rank has some rows of weight, and so some columns of y.

linear/products.py has its values and gradients. Here are those by one kernel, and the layer in
operations that torch.compile sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..linear import products as one_rank
from ..linear.layer_norm_linear import normalize_and_add
from ..linear.operands import LinearOptions, Operands, as_rows, concatenate, is_fused
from ..linear.products import Products, Result
from ..nn import private
from ..norm.quantized import QuantizedTensor


def forward(
    products: Products,
    operands: Operands,
    weight: QuantizedTensor | None = None,
    given: QuantizedTensor | None = None,
    *,
    recorded: bool,
) -> Result:
    """As linear.products.forward. By one kernel x itself is gathered.

    With sequence_parallel it is gathered whether the kernel fits or not, as on all ranks.
    """
    options, sharding, input = products.options, products.sharding, operands.input
    if not is_fused(options.fused):
        return one_rank.forward(products, operands, weight, given, recorded=recorded)
    own = as_rows(input)
    whole = operands._replace(input=sharding.gather_input(own).wait())
    y, _, _, saved = one_rank.forward(Products(options), whole, recorded=True)
    shape, first = input.shape, 0
    if sharding.gathers_input:
        shape, first = sharding.with_all_rows(shape), sharding.ranks.rank * len(own)
    mean, rstd = (
        None if each is None else each[first : first + len(own)].reshape(input.shape[:-1])
        for each in (saved.mean, saved.rstd)
    )
    saved = saved._replace(x=input, mean=mean, rstd=rstd)
    return Result(y.reshape(*shape[:-1], y.shape[-1]), None, input, saved)


def by_torch(
    sharding: Any, options: LinearOptions, operands: Operands
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, normalized (None unless requested) and the input, in operations that torch.compile sees.

    Its async tensor parallelism may fuse the product with the collective.
    """
    group = sharding.ranks.group
    if sharding.reduces_norm:
        norm_weight, norm_bias = (
            None if each is None else _Copied.apply(each, group.group_name)
            for each in (operands.norm_weight, operands.norm_bias)
        )
        parts = operands.weights, operands.biases
        operands = Operands(operands.input, None, norm_weight, norm_bias, *parts)
    normalized, _ = normalize_and_add(options, operands)
    if sharding.gathers_input:
        rows = private.functional_collectives().all_gather_tensor_autograd(normalized, 0, group)
    else:
        rows = _Copied.apply(normalized, group.group_name)
    weight, bias = (
        concatenate(parts, options.dtype) for parts in (operands.weights, operands.biases)
    )
    y = functional.linear(rows, weight, bias)
    returned = rows if sharding.gathered else normalized
    return y, returned if options.return_normalized else None, operands.input


class _Copied(torch.autograd.Function):
    """What all ranks have, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return private.functional_all_reduce(dy.contiguous(), ctx.name), None
