"""torch: the row-parallel layer: a rank has some columns of x and of weight.

forward    x -> the statistics of whole rows -> normalized -> a product that is a part of y;
           the parts are summed over ranks, and bias is added to the sum
backward   two sums of each row, all that dx needs of other ranks, are reduced by one collective
           beside the product that makes dweight

With sequence_parallel a rank has some rows of y: its gradient is gathered first. The formulas are
in cupynorm.reference.parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linear.call import Operands, check_eps
from ..linear.matrices import as_rows
from ..linear.weight_gradients import WeightGradientSink
from ..nn.dtypes import name_of
from ..nn.formulas import scale as norm_scale
from ..nn.row_statistics import RowStatistics, combined, of_part
from .products import Kept, Products, joined_bias
from .weights import Arrived, weight_gradients


def forward(
    products: Products, operands: Operands
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """y, this rank's columns of normalized (None unless requested), and what `backward` needs."""
    options, split, input = products.options, products.split, operands.input
    eps = check_eps(options.eps, name_of(input.dtype), centered=options.centered)
    parts = split.ranks.gather(of_part(as_rows(input), centered=options.centered)[None]).wait()
    counts = [input.shape[-1]] * split.ranks.size
    found = combined(parts, counts, eps, centered=options.centered)
    values = _values(products, found.x_hat(as_rows(input)), operands, products.value_dtype)
    rows = products.rows(values)
    weight, saved_weight = products.weight(operands.weights)
    reduction = products.project_part(rows, weight)
    normalized = None
    if options.return_normalized:
        normalized = values.to(options.dtype).reshape(input.shape)
    y, shape = reduction.wait(), input.shape
    if split.sequence_parallel:
        shape = (len(input) // split.ranks.size, *shape[1:])
    y = y.reshape(*shape[:-1], y.shape[-1])
    bias = joined_bias(operands.biases, options.dtype)
    y = y if bias is None else y + bias
    return y, normalized, (*found, *products.keep(rows), *saved_weight)


def backward(
    products: Products,
    saved: Sequence[Tensor | None],
    operands: Operands,
    incoming: tuple[Tensor | None, Tensor | None],
    wanted: Sequence[bool],
    sink: WeightGradientSink | None,
) -> tuple[Tensor | None, ...]:
    """As column.backward. Where rows of dy were gathered, each rank has the whole dbias."""
    pivot, shift, rstd, data, scale, *saved_weight = saved
    found, split, (dy, dnormalized) = RowStatistics(pivot, shift, rstd), products.split, incoming
    input, _, norm_weight, norm_bias, weights, biases = operands
    wants_norm, wants_parts = wanted[:3], wanted[3:]
    wants_weight = any(wants_parts[: len(weights)])
    x_hat = found.x_hat(as_rows(input))

    def values(dtype: torch.dtype) -> Tensor:
        return _values(products, x_hat, operands, dtype)

    total = rows = made = dbias = None
    if dy is not None:
        rows = as_rows(split.ranks.gather(dy).wait() if split.sequence_parallel else dy)
        sums = biases[0].dtype if sink is None and any(wants_parts[len(weights) :]) else None
        made, dbias = products.gradient(rows, sums)
        if any(wants_norm):
            total = products.dnormalized(made, weights, saved_weight)
    if dnormalized is not None:
        dnormalized = as_rows(dnormalized)
        total = dnormalized if total is None else total + dnormalized
    reduction = weighted = dnorm_weight = dnorm_bias = None
    if total is not None and any(wants_norm[:2]):
        product = total * x_hat
        if wants_norm[1]:
            dnorm_weight = product.sum(0).to(norm_weight.dtype)
    if total is not None and wants_norm[0]:
        factor = norm_scale(norm_weight, products.options.zero_centered_weight, x_hat.dtype)
        weighted = total * factor
        sums = [product.mul_(factor).sum(1), *([] if pivot is None else [weighted.sum(1)])]
        reduction = split.ranks.all_reduce(torch.stack(sums))
        del product
    dparts = [None] * (len(weights) + len(biases))
    if dy is not None:
        # The rows are this rank's alone: nothing is gathered.
        kept = Kept(data, scale)
        normalized = products.gather_again(values, kept)() if wants_weight else None
        of_dy = Arrived(rows, made, dbias)
        dparts = weight_gradients(products, operands, of_dy, normalized, wants_parts, sink)
    elif sink is not None:
        sink.take_nothing()

    dx = None
    if total is not None and wants_norm[2]:
        dnorm_bias = total.sum(0, dtype=x_hat.dtype).to(norm_bias.dtype)
    if reduction is not None:
        of_row = reduction.wait() / (input.shape[-1] * split.ranks.size)
        weighted.addcmul_(x_hat, of_row[0][:, None], value=-1)
        if pivot is not None:
            weighted.sub_(of_row[1][:, None])
        dx = weighted.new_empty(weighted.shape, dtype=input.dtype)
        dx = torch.mul(weighted, rstd[:, None], out=dx).reshape(input.shape)
    made = (dx, dnorm_weight, dnorm_bias, *dparts)
    return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted))


def _values(products: Products, x_hat: Tensor, operands: Operands, dtype: torch.dtype) -> Tensor:
    """This rank's columns of normalized, rounded once to dtype."""
    scale = norm_scale(operands.norm_weight, products.options.zero_centered_weight, x_hat.dtype)
    values = x_hat.new_empty(x_hat.shape, dtype=dtype)
    if operands.norm_bias is None:
        return torch.mul(x_hat, scale, out=values)
    return torch.addcmul(operands.norm_bias.to(x_hat.dtype), x_hat, scale, out=values)
