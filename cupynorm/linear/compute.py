"""torch: the values and the gradients of a call, outside autograd.

function.py differentiates them. Backward needs x, mean and rstd. It recomputes the
normalised tensor, in the kernel of the norm's gradients where these are wanted too, unless
save_normalized keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..norm.calls import FOR_Y
from . import few_rows, kernels, one_kernel
from .call import LinearCall, LinearOptions
from .kernels import SavedNorm
from .matrices import as_rows, split_like, sum_rows
from .weight_gradients import WeightGradientSink, WeightProduct


def forward(
    call: LinearCall,
    weight: Tensor,
    bias: Tensor | None,
    purpose: str,
    folded: one_kernel.Folded | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """y, normalized, mean, rstd, input + residual. Statistics may be None with FOR_Y.

    weight, bias: the joined parts of the linear layer.
    purpose: of the norm, one of cupynorm.norm.FOR_*.
    folded: the parameters already folded.
    """
    operands, options = call
    few = few_rows.choose(call, purpose)
    if few is not None:
        y, mean, rstd, added = few_rows.forward(call, few, weight, bias, purpose)
        return y, None, mean, rstd, added
    if one_kernel.computes(call):
        y, mean, rstd, added = one_kernel.forward(call, folded)
        return y, None, mean, rstd, added
    normalized, mean, rstd, added = kernels.forward(options, operands, options.dtype, purpose)
    bias = None if bias is None else bias.to(options.dtype)
    y = functional.linear(normalized, weight.to(options.dtype), bias)
    return y, normalized, mean, rstd, added


class Saved(NamedTuple):
    """What a forward saved for its gradients.

    normalized: None where it is to be recomputed. weight: joined from weights, in the dtype of the
    products.
    """

    norm: SavedNorm
    normalized: Tensor | None
    weight: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]


class Incoming(NamedTuple):
    """Gradients of the results: y, the normalised tensor, the sum. None of what was not used."""

    dy: Tensor | None
    dnormalized: Tensor | None
    dsum: Tensor | None


def gradients(
    options: LinearOptions,
    saved: Saved,
    incoming: Incoming,
    wanted: Sequence[bool],
    sink: WeightGradientSink | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of input, residual, norm_weight, norm_bias, *weights, *biases.

    wanted: which of them; the others are None. sink: takes the gradients of weights and biases
    instead.
    """
    dy, dnormalized, dsum = incoming
    weights, biases, normalized = saved.weights, saved.biases, saved.normalized
    wants_norm = (wanted[0] or wanted[1], wanted[2], wanted[3])
    wants_weights, wants_biases = wanted[4 : 4 + len(weights)], wanted[4 + len(weights) :]
    rows = None if dy is None else as_rows(dy)
    wants_normalized = rows is not None and any(wants_weights)
    # Each tensor is freed before the next one is made, so that few exist at a time.
    dbiases: Sequence[Tensor | None] = [None] * len(biases)
    if rows is not None and sink is None and any(wants_biases):
        dbiases = split_like(sum_rows(rows, biases[0].dtype), biases)
    dx, dnorm_weight, dnorm_bias = dsum, None, None
    if rows is not None and any(wants_norm):
        dnormalized = _dnormalized(rows, saved, dnormalized)
    if dnormalized is not None and any(wants_norm):
        recompute = wants_normalized and normalized is None
        dx, dnorm_weight, dnorm_bias, recomputed = kernels.backward(
            options,
            dnormalized,
            saved.norm,
            dsum,
            wanted=wants_norm,
            recompute=recompute,
            overwrite_dy=rows is not None,
        )
        normalized = recomputed if recompute else normalized
    dnormalized = recomputed = None

    dweights: Sequence[Tensor | None] = [None] * len(weights)
    if sink is not None and rows is None:
        sink.take_nothing()
    elif sink is not None:
        product = _product(options, rows, saved.norm, normalized)
        dweights, dbiases = sink.take(product, wanted[4:])
    elif wants_normalized:
        if normalized is None:
            normalized = _normalize(options, saved.norm)
        dweights = split_like(rows.t() @ as_rows(normalized), weights)
    all_gradients = (dx, dx, dnorm_weight, dnorm_bias, *dweights, *dbiases)
    return tuple(
        gradient if is_wanted else None for gradient, is_wanted in zip(all_gradients, wanted)
    )


def _normalize(options: LinearOptions, norm: SavedNorm) -> Tensor:
    return kernels.forward(options, norm.operands, options.dtype, FOR_Y)[0]


def _dnormalized(rows: Tensor, saved: Saved, dnormalized: Tensor | None) -> Tensor:
    """The gradient of the normalised tensor: dy weight, and what comes from elsewhere."""
    if dnormalized is None:
        total = rows @ saved.weight
    else:
        total = torch.addmm(as_rows(dnormalized).to(rows.dtype), rows, saved.weight)
    return total.reshape(saved.norm.x.shape)


def _product(
    options: LinearOptions,
    rows: Tensor,
    saved: SavedNorm,
    normalized: Tensor | None,
) -> WeightProduct:
    """The product for a sink. If it waits, it keeps one tensor: the normalised one, or x."""
    if normalized is not None:
        reads = {"the normalised tensor": normalized}
        return WeightProduct(rows, partial(as_rows, normalized), reads=reads)

    def make_normalized() -> Tensor:
        return as_rows(_normalize(options, saved))

    reads = {
        "the input": saved.x,
        "the norm's weight": saved.norm_weight,
        "the norm's bias": saved.norm_bias,
    }
    return WeightProduct(rows, make_normalized, reads=reads)
