"""torch: the row-parallel layer: a rank has some columns of x and of weight.

forward    x -> the statistics of whole rows -> normalized -> a product that is a part of y;
           the parts are summed over ranks, and bias is added to the sum
backward   two sums of each row, all that dx needs of other ranks, are reduced by one collective
           beside the product that makes dweight

With sequence_parallel a rank has some rows of y: its gradient is gathered first. Beside it
normalized is made again.
The formulas are in cupynorm.reference.parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linear.call import Operands, check_eps
from ..linear.matrices import as_rows
from ..linear.weight_gradients import WeightGradientSink
from ..nn import row_statistics
from ..nn.dtypes import name_of
from ..norm.split_rows import OfPart, SplitNorm, Wanted
from .products import Kept, Products, joined_bias, weight_gradients


def forward(
    products: Products, operands: Operands
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """y, this rank's columns of normalized (None unless requested), and what `backward` needs."""
    options, sharding, input = products.options, products.sharding, operands.input
    norm, of_part = _norm(products, input), _of_part(operands)
    own = row_statistics.statistics_of_part(of_part, norm)
    parts = sharding.ranks.gather(own[None]).wait()
    values, statistics = row_statistics.normalize(
        of_part._replace(parts=parts), norm, products.value_dtype
    )
    rows = products.rows(values)
    weight, saved_weight = products.weight(operands.weights)
    reduction = products.project_part(rows, weight)
    normalized = None
    if options.return_normalized:
        if values.dtype != options.dtype:
            of_part = of_part._replace(statistics=statistics)
            values, _ = row_statistics.normalize(of_part, norm, options.dtype)
        normalized = values.reshape(input.shape)
    y, shape = reduction.wait(), input.shape
    if sharding.sequence_parallel:
        shape = (len(input) // sharding.ranks.size, *shape[1:])
    y = y.reshape(*shape[:-1], y.shape[-1])
    bias = joined_bias(operands.biases, options.dtype)
    y = y if bias is None else y + bias
    return y, normalized, (statistics, *products.keep(rows), *saved_weight)


def backward(
    products: Products,
    saved: Sequence[Tensor | None],
    operands: Operands,
    incoming: tuple[Tensor | None, Tensor | None],
    wanted: Sequence[bool],
    sink: WeightGradientSink | None,
) -> tuple[Tensor | None, ...]:
    """As column.backward. Where rows of dy were gathered, each rank has the whole dbias."""
    statistics, data, scale, *saved_weight = saved
    sharding, (dy, dnormalized) = products.sharding, incoming
    input, _, norm_weight, norm_bias, weights, biases = operands
    wants_norm, wants_parts = wanted[:3], wanted[3:]
    wants_weight = any(wants_parts[: len(weights)])
    norm, of_part = _norm(products, input), _of_part(operands)._replace(statistics=statistics)

    def make_values(dtype: torch.dtype) -> Tensor:
        return row_statistics.normalize(of_part, norm, dtype)[0]

    total = gradient = normalized = None
    if dy is not None:
        gathering = sharding.ranks.gather(as_rows(dy)) if sharding.sequence_parallel else None
        if wants_weight:
            # The rows of normalized are this rank's alone: nothing is gathered.
            normalized = products.gather_again(make_values, Kept(data, scale))()
        rows = as_rows(dy) if gathering is None else gathering.wait()
        sum_dtype = biases[0].dtype if sink is None and any(wants_parts[len(weights) :]) else None
        gradient = products.gradient(rows, sum_dtype)
        if any(wants_norm):
            total = products.round(products.dnormalized(gradient, weights, saved_weight))
    if dnormalized is not None:
        dnormalized = as_rows(dnormalized)
        total = dnormalized if total is None else total + dnormalized
    reduction = None
    of_total = of_part._replace(bias=None, dy=total)
    if total is not None and wants_norm[0]:
        reduction = sharding.ranks.all_reduce(row_statistics.sums_of_part(of_total, norm))
    dparts = weight_gradients(products, operands, gradient, normalized, wants_parts, sink)

    of_norm: tuple[Tensor | None, ...] = (None, None, None)
    if total is not None and any(wants_norm):
        of_total = of_total._replace(sums=None if reduction is None else reduction.wait())
        dtypes = (
            name_of(each.dtype) if is_wanted else None
            for each, is_wanted in zip((input, norm_weight, norm_bias), wants_norm)
        )
        of_norm = row_statistics.gradients(of_total, norm, Wanted(*dtypes))
    dx, *of_parameters = of_norm
    dx = None if dx is None else dx.reshape(input.shape)
    gradients = zip((dx, *of_parameters, *dparts), wanted)
    return tuple(each if is_wanted else None for each, is_wanted in gradients)


def _norm(products: Products, input: Tensor) -> SplitNorm:
    options, num_ranks = products.options, products.sharding.ranks.size
    eps = check_eps(options.eps, name_of(input.dtype), centered=options.centered)
    return SplitNorm(
        options.centered,
        eps,
        options.zero_centered_weight,
        input.shape[-1] * num_ranks,
        num_ranks,
    )


def _of_part(operands: Operands) -> OfPart:
    """Without dy and what comes from other ranks."""
    input, _, norm_weight, norm_bias, _, _ = operands
    return OfPart(as_rows(input), norm_weight, norm_bias)
