"""torch: tensors that hold tensors: nested ones of several sequences, DTensors of several ranks.

A norm acts on each row alone. So it runs on the values of all sequences of a jagged tensor, which
are one dense tensor, and on each rank's part of a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..gpu.arrays import type_in_words
from ..norm.request import ForwardRequest, replaced
from . import modes, private


def is_any_nested(*tensors: object) -> bool:
    """Whether one of them is a nested tensor."""
    for each in tensors:
        if isinstance(each, Tensor) and each.is_nested:
            return True
    return False


class Packing:
    """How the rows of a nested input are packed. Takes others apart and puts results together.

    num_dims: over which rows are normalised. Raises TypeError or ValueError for an input that is
    not jagged, or whose sequences have their length in one of these dimensions.
    """

    def __init__(self, input: Tensor, num_dims: int) -> None:
        if not input.is_nested:
            raise TypeError(
                "input is dense and another argument is nested; expected a nested input"
            )
        _check_jagged(input, "input")
        self._input, self._ragged = input, private.ragged_dim(input)
        if self._ragged >= input.ndim - num_dims:
            raise ValueError(
                f"dimension {self._ragged} of input differs between sequences; "
                f"expected the last {num_dims}, which are normalised, to be of one size"
            )
        self._leading = input.shape[: self._ragged + 1]

    def values(self, tensor: Tensor, name: str) -> Tensor:
        """The rows of an argument that has one for each row of the input."""
        if not tensor.is_nested:
            raise TypeError(f"input is nested and {name} is dense; expected both nested")
        _check_jagged(tensor, name)
        if tensor.shape[: len(self._leading)] != self._leading:
            raise ValueError(f"{name} has offsets of its own; expected the offsets of input")
        return tensor.values()

    def nested(self, results: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Results that have a row for each row of the input. None stays None."""
        offsets, lengths, ragged = self._input.offsets(), self._input.lengths(), self._ragged
        make = torch.nested.nested_tensor_from_jagged
        return tuple(
            None if each is None else make(each, offsets, lengths, jagged_dim=ragged)
            for each in results
        )


def normalize_nested(
    request: ForwardRequest, of_dense: Callable[[ForwardRequest], tuple]
) -> tuple[Tensor, Tensor]:
    """What of_dense returns for the values of nested operands, as nested tensors."""
    operands, options = request
    has_out = operands.out is not None or operands.out_sum is not None
    if options.quantization is not None or has_out:
        option = "out" if options.quantization is None else "8-bit out_dtype"
        raise NotImplementedError(f"{option} was given and input is nested; expected neither")
    packing = Packing(operands.input, len(options.extents))
    by_row = {name: getattr(operands, name) for name in ("input", "residual")}
    packed = {
        name: packing.values(tensor, name) for name, tensor in by_row.items() if tensor is not None
    }
    functors = operands.functors
    if functors is not None:
        pairs = zip(functors.names(), functors.arrays())
        packed["functors"] = functors.with_arrays(
            [packing.values(each, name) if is_any_nested(each) else each for name, each in pairs]
        )
    results = of_dense(ForwardRequest(replaced(operands, **packed), options))
    return packing.nested(results)


def _check_jagged(tensor: Tensor, name: str) -> None:
    if tensor.layout is not torch.jagged:
        raise TypeError(f"{name} is nested with layout torch.strided; expected torch.jagged")


def is_any_dtensor(*tensors: object) -> bool:
    """Whether one of them is a DTensor, whose class takes seconds to import."""
    for each in tensors:
        # torch.compile cannot trace hasattr of a symbolic number.
        if isinstance(each, Tensor) and hasattr(each, "device_mesh"):
            return True
    return False


def normalize_dtensors(
    request: ForwardRequest, of_local: Callable[[ForwardRequest], tuple]
) -> tuple[Tensor, Tensor]:
    """What of_local returns for the rows of each rank, as DTensors.

    Rows that ranks have parts of are gathered first. A plain parameter is the same on every rank.
    Gradients of parameters are partial sums where rows are sharded, as those of torch's norms.
    """
    from torch.distributed.tensor import Partial, Replicate

    operands, options = request
    input, by_row = operands.input, ("input", "residual")
    refused = {"an 8-bit out_dtype": options.quantization}
    refused |= {"out": operands.out, "the sum of out": operands.out_sum, "fuse": operands.functors}
    for name, given in refused.items():
        if given is not None:
            raise NotImplementedError(
                f"{name} was given and an argument is a DTensor; expected to_local()"
            )
    first = input.ndim - len(options.extents)
    for name in by_row:
        each = getattr(operands, name)
        if each is None:
            continue
        if not is_any_dtensor(each):
            raise TypeError(
                f"{name} is {type_in_words(each)} and another argument is a DTensor; "
                "expected a DTensor too"
            )
        if each.shape != input.shape:  # parts of some ranks may fit
            raise ValueError(f"{name} has shape {tuple(each.shape)}; expected {tuple(input.shape)}")
    mesh = input.device_mesh
    rows = [
        each if each.is_shard() and each.dim < first else Replicate() for each in input.placements
    ]
    whole = [Replicate()] * mesh.ndim
    sums = [Partial() if each.is_shard() else each for each in rows]
    local = {}
    for name in (*by_row, "weight", "bias"):
        each = getattr(operands, name)
        placements, of_gradient = (rows, rows) if name in by_row else (whole, sums)
        if each is None:
            continue
        each = on_every_rank(each, input)
        if list(each.placements) != placements:
            each = each.redistribute(placements=placements)
        local[name] = _to_local(each, of_gradient)
    results = of_local(ForwardRequest(replaced(operands, **local), options))
    return tuple(
        None if each is None else _from_local(each, mesh, input.shape, rows) for each in results
    )


# torch's own to_local and from_local, whose gradients have no graph before torch 2.13: second
# derivatives were lost without a word.


def _to_local(tensor: Tensor, of_gradient: list) -> Tensor:
    """This rank's part. of_gradient: the placements of its gradient."""
    if modes.is_compiling():
        return tensor.to_local(grad_placements=of_gradient)
    return _ToLocal.apply(tensor, of_gradient)


def _from_local(part: Tensor, mesh: Any, shape: torch.Size, placements: list) -> Tensor:
    if modes.is_compiling():
        return _FromLocal.forward(None, part, mesh, shape, placements)
    return _FromLocal.apply(part, mesh, shape, placements)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, of_gradient):
        ctx.of_whole = tensor.device_mesh, tensor.shape, of_gradient
        part = tensor.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx, gradient):
        return _from_local(gradient, *ctx.of_whole), None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, mesh, shape, placements):
        from torch.distributed.tensor import DTensor

        if ctx is not None:
            ctx.placements = placements
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, mesh, placements, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx, gradient):
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if each.is_partial() else each for each in ctx.placements]
        if list(gradient.placements) != placements:
            gradient = gradient.redistribute(placements=placements)
        return _to_local(gradient, placements), None, None, None


def on_every_rank(tensor: Tensor, like: Tensor) -> Tensor:
    """A plain tensor as a DTensor that is the same on all ranks of another's mesh."""
    if is_any_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
