"""torch.compile: the layer of several ranks as operations of torch.

torch's compiler sees the products and the collectives, and its async tensor parallelism may fuse
them. Each function of autograd here is a collective whose gradient is another one:

    _Gathered   rows of all ranks          _Scattered   this rank's rows of a sum
    _Summed     a sum that all ranks use   _Copied      what all ranks have
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..linear.call import LinearCall
from ..linear.matrices import concatenate
from ..linear.norms import normalize_and_add
from ..nn import formulas
from .sharding import Sharding

# Older compilers do not know the groups of torch.distributed well enough.
IS_KNOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
_collectives = torch.ops._c10d_functional


def project(call: LinearCall, sharding: Sharding) -> tuple[Tensor, Tensor | None]:
    """y and normalized (None unless requested), as function.project."""
    operands, options = call
    name, size = sharding.ranks.group.group_name, sharding.ranks.size
    weight, bias = (
        concatenate(parts, options.dtype) for parts in (operands.weights, operands.biases)
    )
    if sharding.mode == "row":
        normalized = _normalize_split_rows(call, name, size)
        part = functional.linear(normalized, weight)
        if sharding.sequence_parallel:
            y = _Scattered.apply(part, size, name)
            bias = None if bias is None else _Copied.apply(bias, name)  # for some rows on each rank
        else:
            y = _Summed.apply(part, name)
        y = y if bias is None else y + bias
        return y, normalized if options.return_normalized else None
    if sharding.reduces_norm and sharding.gathers_input:
        of_norm = (
            None if each is None else _Copied.apply(each, name)
            for each in (operands.norm_weight, operands.norm_bias)
        )
        norm_weight, norm_bias = of_norm
        call = LinearCall(operands._replace(norm_weight=norm_weight, norm_bias=norm_bias), options)
    normalized, _ = normalize_and_add(call)
    if sharding.gathers_input:
        rows = _Gathered.apply(normalized, size, name)
    else:
        rows = _Copied.apply(normalized, name)
    y = functional.linear(rows, weight, bias)
    if not options.return_normalized:
        return y, None
    return y, rows if sharding.gathered else normalized


def _normalize_split_rows(call: LinearCall, name: str, size: int) -> Tensor:
    """This rank's columns of normalized. Its sums are of centred values, as in the kernels."""
    operands, options = call
    x = operands.input
    rows, num_cols = x.to(formulas.arithmetic(x)), x.shape[-1] * size

    def average(values: Tensor) -> Tensor:
        return _SummedForAll.apply(values.sum(-1, keepdim=True), name) / num_cols

    if options.centered:
        rows = rows - average(rows)
        rows = rows - average(rows)  # the mean is rounded
    eps = torch.finfo(rows.dtype).eps if options.eps is None else options.eps
    x_hat = rows * torch.rsqrt(average(rows * rows) + eps)
    y = x_hat * formulas.scale(operands.norm_weight, options.zero_centered_weight, x_hat.dtype)
    y = y if operands.norm_bias is None else y + operands.norm_bias.to(y.dtype)
    return y.to(options.dtype)


def _gather(x: Tensor, size: int, name: str) -> Tensor:
    gathering = _collectives.all_gather_into_tensor(x.contiguous(), size, name)
    return _collectives.wait_tensor(gathering)


def _scatter(x: Tensor, size: int, name: str) -> Tensor:
    scattering = _collectives.reduce_scatter_tensor(x.contiguous(), "sum", size, name)
    return _collectives.wait_tensor(scattering)


def _sum(x: Tensor, name: str) -> Tensor:
    return _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), "sum", name))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size, name):
        ctx.ranks = size, name
        return _gather(x, size, name)

    @staticmethod
    def backward(ctx, dy):
        return _scatter(dy, *ctx.ranks), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size, name):
        ctx.ranks = size, name
        return _scatter(x, size, name)

    @staticmethod
    def backward(ctx, dy):
        return _gather(dy, *ctx.ranks), None, None


class _Summed(torch.autograd.Function):
    """Of parts of y, whose gradient all ranks have."""

    @staticmethod
    def forward(ctx, x, name):
        return _sum(x, name)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _SummedForAll(torch.autograd.Function):
    """Of numbers that each rank uses for its own columns: their gradients are added."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return _sum(x, name)

    @staticmethod
    def backward(ctx, dy):
        return _sum(dy, ctx.name), None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _sum(dy, ctx.name), None
