"""torch: layer_norm and rms_norm of a DTensor whose rows are split between ranks.

The ranks of the mesh dimension that splits rows exchange three numbers a row in forward and two in
backward. No row is gathered. y is split as the input is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..norm.request import ForwardOptions, ForwardRequest
from ..norm.split_rows import OfPart, SplitNorm, Wanted
from . import formulas, row_statistics
from .dtypes import name_of


class _Split(NamedTuple):
    """options: checked. group: the ranks that share the rows."""

    options: ForwardOptions
    group: ProcessGroup
    norm: SplitNorm


def normalize(request: ForwardRequest, mesh_dim: int) -> tuple[DTensor, None, DTensor]:
    """y, None, input + residual. request: checked; its tensors are DTensors or None.

    mesh_dim: the only one that splits the rows.
    """
    operands, options = request
    input = operands.input
    mesh, placements = input.device_mesh, input.placements
    added = input
    if operands.residual is not None:
        added = (input + operands.residual).redistribute(placements=placements)
    # Shard gives ranks as many columns as torch.chunk does, as SplitNorm says.
    norm = SplitNorm(
        options.centered,
        options.eps,
        options.zero_centered_weight,
        input.shape[-1],
        mesh.size(mesh_dim),
    )
    split = _Split(options, mesh.get_group(mesh_dim), norm)
    parameters = [
        None if each is None else _Columns.apply(each, placements, mesh_dim)
        for each in (operands.weight, operands.bias)
    ]
    y = _Normalized.apply(_ToLocal.apply(added), *parameters, split)
    return _with_shards(y, mesh, placements, input.shape, input.stride()), None, added


class _ToLocal(torch.autograd.Function):
    """x.to_local(), whose gradient has the strides of x.

    torch 2.11 guesses them where ranks have different numbers of columns, and gathers the gradient.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.like = x.device_mesh, x.placements, x.shape, x.stride()
        local = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx, dx):
        return _with_shards(dx, *ctx.like)


class _Columns(torch.autograd.Function):
    """This rank's elements of a weight or bias. Gradients are sums over the rank's rows.

    Of torch's own redistribute(), torch 2.11 drops gradients of the gradient.
    """

    @staticmethod
    def forward(ctx, parameter, placements, mesh_dim):
        mesh, own = parameter.device_mesh, [Replicate()] * len(placements)
        own[mesh_dim] = Shard(0)
        gradient = [Partial() if each.is_shard() else Replicate() for each in placements]
        gradient[mesh_dim] = Shard(0)
        ctx.like = mesh, gradient, parameter.shape, parameter.stride()
        ctx.wanted = list(gradient)
        ctx.wanted[mesh_dim] = parameter.placements[mesh_dim]
        local = parameter.redistribute(placements=own).to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx, gradient):
        sharded = _with_shards(gradient, *ctx.like)
        return sharded.redistribute(placements=ctx.wanted), None, None


def _with_shards(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: Sequence[int],
) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _Normalized(torch.autograd.Function):
    """y of this rank's columns."""

    @staticmethod
    def forward(ctx, x, weight, bias, split):
        of_part, norm = OfPart(_as_rows(x), weight, bias), split.norm
        own = row_statistics.statistics_of_part(of_part, norm)
        parts = _arrived(collectives.all_gather_tensor(own[None], 0, split.group))
        y, statistics = row_statistics.normalize(
            of_part._replace(parts=parts), norm, getattr(torch, split.options.out_dtype)
        )
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.split = split
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, statistics = ctx.saved_tensors
        wanted, split = ctx.needs_input_grad[:3], ctx.split
        if torch.is_grad_enabled():  # create_graph=True
            differentiable = [
                each for each, is_wanted in zip((x, weight, bias), wanted) if is_wanted
            ]
            with torch.enable_grad():
                y = _by_operations(x, weight, bias, split)
                gradients = iter(torch.autograd.grad(y, differentiable, dy, create_graph=True))
            return *(next(gradients) if is_wanted else None for is_wanted in wanted), None
        rows, dy_rows, sums = _as_rows(x), _as_rows(_arrived(dy)), None
        of_part = OfPart(rows, weight, None, dy_rows, None, statistics)
        if wanted[0]:
            own = row_statistics.sums_of_part(of_part, split.norm)
            sums = _arrived(collectives.all_reduce(own, "sum", split.group))
        dtypes = (
            name_of(each.dtype) if is_wanted else None
            for each, is_wanted in zip((x, weight, bias), wanted)
        )
        dx, dweight, dbias = row_statistics.gradients(
            of_part._replace(sums=sums), split.norm, Wanted(*dtypes)
        )
        return None if dx is None else dx.reshape(x.shape), dweight, dbias, None


def _arrived(tensor: Tensor) -> Tensor:
    """The result of a collective as a plain tensor, which has an address."""
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


class _SumOverRanks(torch.autograd.Function):
    """Differentiable to any order: each rank's sum is used on all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, dy):
        return _SumOverRanks.apply(dy, ctx.group), None


def _by_operations(x: Tensor, weight: Tensor | None, bias: Tensor | None, split: _Split) -> Tensor:
    """y by operations that torch differentiates."""
    rows, num_cols = _as_rows(x), split.norm.cols_of_row
    rows = rows.to(formulas.arithmetic(rows))

    def average(values: Tensor) -> Tensor:
        return (_SumOverRanks.apply(values.sum(1), split.group) / num_cols)[:, None]

    if split.options.centered:
        rows = rows - average(rows)
    x_hat = rows * torch.rsqrt(average(rows * rows) + split.options.eps)
    options = split.options
    y = x_hat * formulas.scale(weight, options.zero_centered_weight, x_hat.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(getattr(torch, options.out_dtype)).reshape(x.shape)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
