"""torch: the row-parallel layer: a rank has some columns of x and of weight.

forward    x -> the statistics of whole rows -> normalized -> a product that is a part of y;
           the parts are summed over ranks, and bias is added to the sum
backward   two sums of each row, all that dx needs of other ranks, are reduced by one collective
           beside the product that makes dweight

With sequence_parallel a rank has some rows of y: its gradient is gathered first. Beside it
normalized is made again.
The formulas are in cupynorm.reference.parallel.

On a GPU our forward kernel computes the mean and variance of a rank's part of each row. All else
of the norm is operations of torch. Bytes that they move for each element of 16 bits:

    statistics    2; LayerNorm also 6 to subtract the mean of the part, 4 to sum what remains
    normalized    x_hat 8 and y 6; RMSNorm 6 and 6
    sums of rows  x_hat 14, weighted dy 6, its sum 4, the sum of its products 16; RMSNorm 6, 6, 16
    gradients     dweight 14, dbias 2, dx 24
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..gpu import arrays
from ..linear.call import LinearOptions, Operands, check_eps
from ..linear.matrices import as_rows
from ..linear.weight_gradients import WeightGradientSink
from ..nn.dtypes import name_of
from ..norm import route
from ..norm.prepared import FOR_STATISTICS_ALONE
from ..norm.request import ForwardOperands, ForwardOptions, ForwardRequest
from .products import Kept, Products, joined_bias, weight_gradients
from .ranks import Ranks


def forward(
    products: Products, operands: Operands
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """y, this rank's columns of normalized (None unless requested), and what `backward` needs."""
    options, sharding, input = products.options, products.sharding, operands.input
    statistics, deviations = statistics_of_rows(as_rows(input), options, sharding.ranks)
    values = normalize(operands, options, statistics, products.value_dtype, deviations)
    del deviations
    rows = products.rows(values)
    weight, saved_weight = products.weight(operands.weights)
    reduction = products.project_part(rows, weight)
    normalized = None
    if options.return_normalized:
        if values.dtype != options.dtype:
            values = normalize(operands, options, statistics, options.dtype)
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
    options, sharding, (dy, dnormalized) = products.options, products.sharding, incoming
    input, _, _, _, weights, biases = operands
    wants_norm, wants_parts = wanted[:3], wanted[3:]
    wants_weight = any(wants_parts[: len(weights)])

    def make_values(dtype: torch.dtype) -> Tensor:
        return normalize(operands, options, statistics, dtype)

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
    reduction = x_hat = None
    norm_scale = scale_of(operands, options)
    if total is not None and any(wants_norm):
        x_hat = x_hat_of(as_rows(input), statistics)
        if wants_norm[0]:
            sums = sums_of_rows(total, x_hat, norm_scale, options.centered)
            reduction = sharding.ranks.all_reduce(sums)
    dparts = weight_gradients(products, operands, gradient, normalized, wants_parts, sink)

    of_norm: tuple[Tensor | None, ...] = (None, None, None)
    if x_hat is not None:
        of_parameters = parameter_gradients(total, x_hat, operands, wants_norm[1:])
        dx = None
        if reduction is not None:
            means = reduction.wait() / (input.shape[-1] * sharding.ranks.size)
            dx = dx_of(total, x_hat, norm_scale, means, statistics[-1], input.dtype)
            dx = dx.reshape(input.shape)
        of_norm = dx, *of_parameters
    gradients = zip((*of_norm, *dparts), wanted)
    return tuple(each if is_wanted else None for each, is_wanted in gradients)


# The norm. x, x_hat, dy: [num_rows, columns of this rank].


def statistics_of_rows(
    x: Tensor, options: LinearOptions, ranks: Ranks
) -> tuple[Tensor, Tensor | None]:
    """What x_hat_of takes: LayerNorm [3, num_rows], RMSNorm rstd alone, [1, num_rows]; and x minus
    the mean of this rank's part of the row, None in RMSNorm.

    Means and variances of parts are combined by Chan, Golub and LeVeque's formula (1983) for parts
    of one size. All ranks compute the same rstd, to the bit.
    """
    eps = check_eps(options.eps, name_of(x.dtype), centered=options.centered)
    mean, var = _moments(x, options.centered)
    if mean is None:
        var = ranks.gather(var[None]).wait().mean(0)
        return (var + eps).sqrt_().reciprocal_()[None], None
    deviations = x - mean[:, None]
    rest = deviations.mean(1)  # what the mean lost when it was rounded
    means, rests, variances = ranks.gather(torch.stack((mean, rest, var))[None]).wait().unbind(1)
    # Means are compared with that of rank 0: equal ones give exactly that mean.
    between, offset = torch.var_mean(means - means[0] + rests, 0, correction=0)
    rstd = variances.mean(0).add_(between).add_(eps).sqrt_().reciprocal_()
    shift = (mean - means[0] - offset) * rstd
    return torch.stack((mean, shift, rstd)), deviations


def _moments(x: Tensor, centered: bool) -> tuple[Tensor | None, Tensor]:
    """Mean and variance of the rows of x; RMSNorm: None and the mean square."""
    if torch.compiler.is_compiling() or arrays.on_host(x):
        x = x.to(_arithmetic(x))
        if not centered:
            return None, x.square().mean(1)
        var, mean = torch.var_mean(x, 1, correction=0)
        return mean, var
    # Without eps rstd is infinite in a constant row, and its inverse is 0.
    options = ForwardOptions(centered, tuple(x.shape[1:]), 0.0)
    made = route.forward(ForwardRequest(ForwardOperands(x), options), FOR_STATISTICS_ALONE)
    return made.mean, made.rstd.reciprocal().square_()


def x_hat_of(x: Tensor, statistics: Tensor, deviations: Tensor | None = None) -> Tensor:
    """In the dtype of the statistics. deviations: from statistics_of_rows; they are overwritten."""
    if len(statistics) == 1:
        return x * statistics[0][:, None]
    mean, shift, rstd = statistics[:, :, None]
    deviations = x - mean if deviations is None else deviations
    return torch.addcmul(shift, deviations, rstd, out=deviations)


def normalize(
    operands: Operands,
    options: LinearOptions,
    statistics: Tensor,
    dtype: torch.dtype,
    deviations: Tensor | None = None,
) -> Tensor:
    """y, [num_rows, columns of this rank]. deviations: as x_hat_of takes them."""
    x_hat = x_hat_of(as_rows(operands.input), statistics, deviations)
    scale, bias = scale_of(operands, options), operands.norm_bias
    y = torch.empty(x_hat.shape, dtype=dtype, device=x_hat.device)
    if bias is None:
        return torch.mul(x_hat, scale, out=y)
    return torch.addcmul(bias.to(x_hat.dtype), x_hat, scale, out=y)


def scale_of(operands: Operands, options: LinearOptions) -> Tensor:
    """What x_hat is multiplied by: [columns of this rank], or one number without a weight."""
    input, weight = operands.input, operands.norm_weight
    if weight is None:
        return torch.ones(1, dtype=_arithmetic(input), device=input.device)
    scale = weight.to(_arithmetic(input))
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
    dx = torch.empty(dy.shape, dtype=dtype, device=dy.device)
    means = means[:, :, None].neg()
    if len(means) == 1:
        x_hat.mul_(means[0])
    else:
        torch.addcmul(means[1], x_hat, means[0], out=x_hat)
    x_hat.addcmul_(dy, scale)
    return torch.mul(x_hat, rstd[:, None], out=dx)


def parameter_gradients(
    dy: Tensor, x_hat: Tensor, operands: Operands, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Those of the norm's weight and bias: sums over rows, in the dtypes of the parameters."""
    dweight = dbias = None
    if wanted[0]:
        dweight = (dy * x_hat).sum(0).to(operands.norm_weight.dtype)
    if wanted[1]:
        dbias = dy.sum(0, dtype=x_hat.dtype).to(operands.norm_bias.dtype)
    return dweight, dbias


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
