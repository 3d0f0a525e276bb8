"""torch: the column-parallel layer: a rank has some rows of weight, and so some columns of y.

forward    x -> normalized, gathered with sequence_parallel -> y of the rank's columns
backward   the gathering of normalized runs beside the product that makes its gradient;
           the reduction of that gradient runs beside the product that makes dweight

The formulas are in cupynorm.reference.parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linear import compute, kernels, one_kernel
from ..linear.call import LinearCall, Operands, is_fused
from ..linear.kernels import SavedNorm
from ..linear.matrices import as_rows, join
from ..linear.weight_gradients import WeightGradientSink
from ..norm.calls import FOR_STATISTICS
from .products import FloatProducts, Kept, Products, joined_bias, weight_gradients
from .ranks import together


def forward(
    products: Products, operands: Operands
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """y, normalized (None unless requested), and the tensors that `backward` needs."""
    options, sharding = products.options, products.sharding
    if is_fused(options.fused):
        return _forward_fused(products, operands)
    if products.fuses_norm(operands.input):
        rows, mean, rstd = products.normalize(operands)
    else:
        values, mean, rstd, _ = kernels.forward(options, operands, products.value_dtype)
        rows = products.rows(as_rows(values))
    weight, saved_weight = products.weight(operands.weights)
    bias = joined_bias(operands.biases, options.dtype)
    y = products.multiply(products.gather(rows)(), weight, bias)
    normalized = None
    if options.return_normalized:
        normalized = values.to(options.dtype)
        if sharding.gathered:
            normalized = sharding.gather_input(normalized).wait()
    shape = operands.input.shape
    shape = sharding.with_all_rows(shape) if sharding.gathers_input else shape
    saved = (mean, rstd, *products.keep(rows), *saved_weight)
    return y.reshape(*shape[:-1], y.shape[-1]), normalized, saved


def _forward_fused(
    products: FloatProducts, operands: Operands
) -> tuple[Tensor, None, tuple[Tensor | None, ...]]:
    """As forward, by the folded weight: x itself is gathered, while the weight is folded.

    With sequence_parallel x is gathered whether its kernel fits or not, as on all ranks.
    """
    options, sharding, input = products.options, products.sharding, operands.input
    own, call, folded = as_rows(input), LinearCall(operands, options), products.folded
    gathering = sharding.gather_input(own)
    if folded is None and one_kernel.keeps_fold(call):
        folded = one_kernel.fold(call)
    rows = gathering.wait()
    weight, bias = join(operands.weights), join(operands.biases)
    call = LinearCall(operands._replace(input=rows), options)
    y, _, mean, rstd, _ = compute.forward(call, weight, bias, FOR_STATISTICS, folded)
    shape = input.shape
    if sharding.gathers_input:
        first = sharding.ranks.rank * len(own)
        mean, rstd = (
            None if each is None else each[first : first + len(own)] for each in (mean, rstd)
        )
        shape = sharding.with_all_rows(shape)
    mean = None if mean is None else mean.reshape(input.shape[:-1])
    saved = (mean, rstd.reshape(input.shape[:-1]), None, None)
    return y.reshape(*shape[:-1], y.shape[-1]), None, saved


def backward(
    products: Products,
    saved: Sequence[Tensor | None],
    operands: Operands,
    incoming: tuple[Tensor | None, Tensor | None],
    wanted: Sequence[bool],
    sink: WeightGradientSink | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of input, norm_weight, norm_bias, *weights, *biases.

    incoming: of y and of normalized. wanted: which gradients; the others are None.
    """
    mean, rstd, data, scale, *saved_weight = saved
    sharding, (dy, dnormalized) = products.sharding, incoming
    input, _, norm_weight, norm_bias, weights, biases = operands
    norm = SavedNorm(input, mean, rstd, norm_weight, norm_bias)
    wants_norm, wants_parts = wanted[:3], wanted[3:]
    wants_weight = any(wants_parts[: len(weights)])

    def make_values(dtype: torch.dtype) -> Tensor:
        return as_rows(kernels.forward(products.options, norm.operands, dtype)[0])

    gathering = reduction = gradient = None
    wants_dnormalized = any(wants_norm)
    if dy is not None:
        if wants_weight:
            kept = Kept(data, scale)
            if data is None and products.fuses_norm(input):
                kept = products.normalize_again(norm.operands, kept)
            gathering = products.gather_again(make_values, kept)
        sum_dtype = biases[0].dtype if sink is None and any(wants_parts[len(weights) :]) else None
        gradient = products.gradient(as_rows(dy), sum_dtype)
    if dnormalized is not None and sharding.gathered:
        # Each rank's copy of the gathered tensor is a tensor of its own: the gradients are added.
        if wants_dnormalized:
            total = as_rows(dnormalized)
            if dy is not None:
                total = total + products.dnormalized(gradient, weights, saved_weight)
            reduction = sharding.reduce(total)
        dnormalized = None
    elif dy is not None and wants_dnormalized:
        reduction = sharding.reduce(products.dnormalized(gradient, weights, saved_weight))
    normalized = None if gathering is None else gathering()
    dparts = weight_gradients(products, operands, gradient, normalized, wants_parts, sink)

    if reduction is not None:
        total = reduction.wait()
        total = (total if dy is None else products.round(total)).reshape(input.shape)
        total = total if dnormalized is None else total + dnormalized
    else:
        total = dnormalized
    of_norm: list[Tensor | None] = [None] * 3
    if total is not None and wants_dnormalized:
        of_norm = list(
            kernels.backward(
                products.options,
                total,
                norm,
                None,
                wanted=wants_norm,
                overwrite_dy=reduction is not None,
            )[:3]
        )
    if sharding.reduces_norm and sharding.gathers_input:
        places = [at for at in (1, 2) if of_norm[at] is not None]
        if places:
            sums = together([of_norm[at] for at in places], sharding.ranks.all_reduce)
            for at, each in zip(places, sums):
                of_norm[at] = each
    gradients = zip((*of_norm, *dparts), wanted)
    return tuple(each if is_wanted else None for each, is_wanted in gradients)
