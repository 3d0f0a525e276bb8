"""torch: the row-parallel layer: a rank has some columns of x and of weight.

forward    x -> the statistics of whole rows -> normalized -> a product that is a part of y;
           the parts are summed over ranks, and bias is added to the sum
backward   two sums of each row, all that dx needs of other ranks, are reduced by one collective
           beside the product that makes dweight

With sequence_parallel a rank has some rows of y: its gradient is gathered first. Beside it
normalized is made again.
The formulas are in cupynorm.reference.parallel.

On a GPU our forward kernel normalises a rank's part of each row by its own mean and rstd. All else
of the norm is operations of torch. Bytes that are moved for each element of 16 bits:

    forward    the part 6, x_hat 8, y 6
    backward   the part 6, x_hat 8; weighted dy 6, its sum 4 (LayerNorm), that of its products 16;
               dweight 14, dbias 2, dx 24
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..gpu import arrays
from ..linear.operands import LinearOptions, Operands, as_rows, join
from ..linear.products import Incoming, Products, Result, Saved, norm_of_rows
from ..linear.weight_gradients import WeightGradientSink
from ..nn.modes import arithmetic, name_of
from ..norm.checks import check_eps
from ..norm.quantized import QuantizedTensor
from .ranks import Ranks


def forward(
    products: Products,
    operands: Operands,
    weight: QuantizedTensor | None = None,
    given: QuantizedTensor | None = None,
    *,
    recorded: bool,
) -> Result:
    """As linear.products.forward. normalized is this rank's columns of it.

    What is saved as rstd are the statistics of statistics_of_rows.
    """
    options, sharding, input = products.options, products.sharding, operands.input
    part = normalize_part(as_rows(input), options.centered)
    statistics = statistics_of_rows(as_rows(input), part, options, sharding.ranks)
    values = normalize(operands, options, statistics, products.value_dtype, part.x_hat)
    del part
    rows = products.rows(values)
    factor, saved_weight = products.weight(join(operands.weights), weight)
    y = products.multiply(rows, factor, options.dtype, fast=True)
    reduction, normalized = sharding.reduce(y), None
    if options.return_normalized:
        if values.dtype != options.dtype:
            values = normalize(operands, options, statistics, options.dtype)
        normalized = values.reshape(input.shape)
    y, shape = reduction.wait(), input.shape
    if sharding.sequence_parallel:
        shape = (len(input) // sharding.size, *shape[1:])
    y, bias = y.reshape(*shape[:-1], y.shape[-1]), join(operands.biases)
    y = y if bias is None else y + bias.to(options.dtype)
    kept = products.keep(rows, recorded=recorded)
    saved = Saved(input, None, statistics, *operands[2:4], *kept, *saved_weight)
    return Result(y, normalized, input, saved)


def backward(
    products: Products,
    saved: Saved,
    parts: tuple[Sequence[Tensor], Sequence[Tensor]],
    incoming: Incoming,
    wanted: Sequence[bool],
    sink: WeightGradientSink | None,
) -> tuple[Tensor | None, ...]:
    """As linear.products.backward. Where rows of dy are gathered, each rank has the whole dbias."""
    options, sharding, (weights, biases) = products.options, products.sharding, parts
    operands, statistics, input = saved.operands, saved.rstd, saved.x
    dy, dnormalized, _ = incoming
    wants_norm, wants_parts = (wanted[0], *wanted[2:4]), wanted[4:]

    def make_values(dtype: torch.dtype) -> Tensor:
        return normalize(operands, options, statistics, dtype)

    total = gradient = again = None
    if dy is not None:
        gathering = sharding.ranks.gather(as_rows(dy)) if sharding.sequence_parallel else None
        if any(wants_parts[: len(weights)]):
            # The rows of normalized are this rank's alone: nothing is gathered.
            again = products.normalized_again(saved, make_values)()
        rows = as_rows(dy) if gathering is None else gathering.wait()
        sum_dtype = biases[0].dtype if sink is None and any(wants_parts[len(weights) :]) else None
        gradient = products.gradient(rows, sum_dtype)
        if any(wants_norm):
            total = products.round(products.dnormalized(gradient, saved, weights))
    if dnormalized is not None:
        dnormalized = as_rows(dnormalized)
        total = dnormalized if total is None else total + dnormalized
    reduction = x_hat = None
    norm_scale = scale_of(operands, options)
    if total is not None and any(wants_norm):
        x_hat = x_hat_of(operands, options, statistics)
        if wants_norm[0]:
            sums = sums_of_rows(total, x_hat, norm_scale, options.centered)
            reduction = sharding.all_reduce(sums)
    dparts = products.weight_gradients(gradient, again, parts, wants_parts, sink)

    of_norm: tuple[Tensor | None, ...] = (None, None, None)
    if x_hat is not None:
        dx = dweight = dbias = None
        if wants_norm[1]:
            dweight = (total * x_hat).sum(0).to(operands.norm_weight.dtype)
        if wants_norm[2]:
            dbias = total.sum(0, dtype=x_hat.dtype).to(operands.norm_bias.dtype)
        if reduction is not None:
            means = reduction.wait() / (input.shape[-1] * sharding.size)
            dx = dx_of(total, x_hat, norm_scale, means, statistics[-1], input.dtype)
            dx = dx.reshape(input.shape)
        of_norm = dx, dweight, dbias
    gradients = zip((of_norm[0], None, *of_norm[1:], *dparts), wanted)
    return tuple(each if is_wanted else None for each, is_wanted in gradients)


# The norm. x, x_hat, y, dy: [num_rows, columns of this rank].


class Part(NamedTuple):
    """A rank's part of each row, normalised alone, in the dtype of the arithmetic."""

    x_hat: Tensor
    rstd: Tensor


def normalize_part(x: Tensor, centered: bool) -> Part:
    """By our forward kernel on a GPU."""
    dtype = arithmetic(x)
    eps = torch.finfo(dtype).tiny  # a constant row has a finite rstd
    if not (torch.compiler.is_compiling() or arrays.on_host(x)):
        return Part(*norm_of_rows(x, centered, eps, dtype))
    x_hat = x.to(dtype)
    if centered:
        x_hat = x_hat - x_hat.mean(1, keepdim=True)
        x_hat = x_hat - x_hat.mean(1, keepdim=True)  # the mean was rounded
    rstd = (x_hat.square().mean(1) + eps).rsqrt()
    return Part(x_hat * rstd[:, None], rstd)


def statistics_of_rows(x: Tensor, part: Part, options: LinearOptions, ranks: Ranks) -> Tensor:
    """[3, num_rows]: x_hat of whole rows is that of the part times the first plus the second. The
    last is rstd. RMSNorm has no second.

    Means and variances of parts are combined by Chan, Golub and LeVeque's formula (1983) for parts
    of one size, in float64. All ranks compute the same rstd, to the bit.
    """
    eps = check_eps(options.eps, name_of(x.dtype), has_default=not options.centered)
    own = part.rstd.double()
    variance = own.square().reciprocal()
    # Finite, so that x_hat is 0 where the variance overflowed.
    deviation = own.reciprocal().clamp_(max=torch.finfo(torch.float32).max)
    if not options.centered:
        rstd = (ranks.gather(variance[None]).wait().mean(0) + eps).rsqrt()
        return torch.stack((deviation * rstd, rstd)).to(part.rstd.dtype)
    # From one column, because a float32 mean has too few digits.
    mean = x[:, 0] - part.x_hat[:, 0] * deviation
    means, variances = ranks.gather(torch.stack((mean, variance))[None]).wait().unbind(1)
    offsets = means - means[0]  # 0 in a constant row
    center = offsets.mean(0)
    rstd = (variances.mean(0) + (offsets - center).square().mean(0) + eps).rsqrt()
    statistics = torch.stack((deviation * rstd, (mean - means[0] - center) * rstd, rstd))
    return statistics.to(part.rstd.dtype)


def x_hat_of(
    operands: Operands, options: LinearOptions, statistics: Tensor, of_part: Tensor | None = None
) -> Tensor:
    """x_hat of whole rows. of_part: x_hat of the part; it is overwritten. None: it is made."""
    if of_part is None:
        of_part = normalize_part(as_rows(operands.input), options.centered).x_hat
    factor, *shift, _ = statistics[:, :, None]
    if not shift:
        return of_part.mul_(factor)
    return torch.addcmul(*shift, of_part, factor, out=of_part)


def normalize(
    operands: Operands,
    options: LinearOptions,
    statistics: Tensor,
    dtype: torch.dtype,
    of_part: Tensor | None = None,
) -> Tensor:
    """y. of_part: as x_hat_of takes it."""
    x_hat = x_hat_of(operands, options, statistics, of_part)
    scale, bias = scale_of(operands, options), operands.norm_bias
    y = x_hat if dtype == x_hat.dtype else torch.empty_like(x_hat, dtype=dtype)
    if bias is None:
        return torch.mul(x_hat, scale, out=y)
    return torch.addcmul(bias.to(x_hat.dtype), x_hat, scale, out=y)


def scale_of(operands: Operands, options: LinearOptions) -> Tensor:
    """What x_hat is multiplied by: [columns of this rank], or one number without a weight."""
    input, weight = operands.input, operands.norm_weight
    if weight is None:
        return torch.ones(1, dtype=arithmetic(input), device=input.device)
    scale = weight.to(arithmetic(input))
    return scale + 1 if options.zero_centered_weight else scale


def sums_of_rows(dy: Tensor, x_hat: Tensor, scale: Tensor, centered: bool) -> Tensor:
    """[2, num_rows]: sums of wdy * x_hat and of wdy = dy * scale; RMSNorm: the first alone."""
    wdy = dy * scale
    sums = [wdy.sum(1)] if centered else []
    return torch.stack([wdy.mul_(x_hat).sum(1), *sums])


def dx_of(
    dy: Tensor,
    x_hat: Tensor,
    scale: Tensor,
    means: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """dx, in dtype. means: sums_of_rows of whole rows, divided by their number of columns.

    x_hat is overwritten.
    """
    dx = x_hat if dtype == x_hat.dtype else torch.empty_like(x_hat, dtype=dtype)
    means = means[:, :, None].neg()
    if len(means) == 1:
        x_hat.mul_(means[0])
    else:
        torch.addcmul(means[1], x_hat, means[0], out=x_hat)
    x_hat.addcmul_(dy, scale)
    return torch.mul(x_hat, rstd[:, None], out=dx)
