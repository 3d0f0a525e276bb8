"""torch: layer_norm and rms_norm of a DTensor whose rows are split between ranks.

The ranks of the mesh dimension that splits rows exchange three numbers a row in forward and two in
backward. No row is gathered. y is split as the input is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..norm.request import ForwardOptions, ForwardRequest
from . import formulas, row_statistics
from .row_statistics import RowStatistics


class _Split(NamedTuple):
    """options: checked. counts: columns of each rank of group."""

    options: ForwardOptions
    group: ProcessGroup
    counts: list[int]


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
    columns = torch.arange(input.shape[-1]).chunk(mesh.size(mesh_dim))
    counts = [len(each) for each in columns]
    counts += [0] * (mesh.size(mesh_dim) - len(counts))
    split = _Split(options, mesh.get_group(mesh_dim), counts)
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
        made = _with_shards(gradient, *ctx.like)
        return made.redistribute(placements=ctx.wanted), None, None


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
        options, rows = split.options, _as_rows(x)
        centered, eps = options.centered, options.eps
        own = row_statistics.of_part(rows, centered=centered)
        parts = collectives.all_gather_tensor(own[None], 0, split.group)
        found = row_statistics.combined(parts, split.counts, eps, centered=centered)
        ctx.save_for_backward(x, weight, bias, *found)
        ctx.split = split
        return _affine(found.x_hat(rows), weight, bias, split).reshape(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, *found = ctx.saved_tensors
        wanted, split = ctx.needs_input_grad[:3], ctx.split
        if torch.is_grad_enabled():  # create_graph=True
            given = [each for each, is_wanted in zip((x, weight, bias), wanted) if is_wanted]
            with torch.enable_grad():
                y = _by_operations(x, weight, bias, split)
                made = iter(torch.autograd.grad(y, given, dy, create_graph=True))
            return *(next(made) if is_wanted else None for is_wanted in wanted), None
        found = RowStatistics(*found)
        x_hat, dy = found.x_hat(_as_rows(x)), _as_rows(dy).to(found.rstd.dtype)
        dx = dweight = dbias = None
        if wanted[0]:
            zero_centered = split.options.zero_centered_weight
            wdy = dy * formulas.scale(weight, zero_centered, dy.dtype)
            sums = torch.stack(((wdy * x_hat).sum(1), wdy.sum(1)))
            of_product, of_wdy = collectives.all_reduce(sums, "sum", split.group) / sum(
                split.counts
            )
            dx = wdy - x_hat * of_product[:, None]
            dx = dx - of_wdy[:, None] if split.options.centered else dx
            dx = (dx * found.rstd[:, None]).to(x.dtype).reshape(x.shape)
        if wanted[1]:
            dweight = (dy * x_hat).sum(0).to(weight.dtype)
        if wanted[2]:
            dbias = dy.sum(0).to(bias.dtype)
        return dx, dweight, dbias, None


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
    rows, num_cols = _as_rows(x), sum(split.counts)
    rows = rows.to(formulas.arithmetic(rows))

    def average(values: Tensor) -> Tensor:
        return (_SumOverRanks.apply(values.sum(1), split.group) / num_cols)[:, None]

    if split.options.centered:
        rows = rows - average(rows)
    x_hat = rows * torch.rsqrt(average(rows * rows) + split.options.eps)
    return _affine(x_hat, weight, bias, split).reshape(x.shape)


def _affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, split: _Split) -> Tensor:
    options = split.options
    y = x_hat * formulas.scale(weight, options.zero_centered_weight, x_hat.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(getattr(torch, options.out_dtype))


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
