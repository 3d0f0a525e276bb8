"""torch: fused options and 8-bit outputs of a DTensor whose rows are whole on each rank.

Each rank normalises its own rows by the call of plain tensors. What it returns is placed as the
input. Rows that are split between ranks, and partial sums, are gathered or reduced first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..norm.quantized_tensor import QuantizedTensor
from ..norm.request import ForwardOperands, ForwardRequest, Quantization
from . import quantization
from .dtensor import check_kinds, on_every_rank
from .operators import draw_seed

_BY_ROW = ("input", "residual", "row_scale")
_PARAMETERS = ("weight", "bias", "weight1", "bias1")
_CONSTANTS = ("dropout_seed", "scale", "amax")


class ShardedQuantizedTensor(QuantizedTensor):
    """A QuantizedTensor whose data and scales are DTensors.

    own: of this rank's rows. as_dtensor: makes the DTensor of a tensor of these rows.
    """

    def __init__(
        self, own: QuantizedTensor, as_dtensor: Callable, scale_inv: DTensor, transposed
    ) -> None:
        super().__init__(
            as_dtensor(own.data),
            scale_inv,
            own.dtype,
            transposed=transposed,
            block_rows=own.block_rows,
            block_cols=own.block_cols,
            format=own.format,
        )
        self.own, self._as_dtensor = own, as_dtensor

    def dequantize(self, dtype: Any = None) -> Tensor:
        return self._as_dtensor(self.own.dequantize(dtype))

    def without_values(self) -> Tensor:
        return self._as_dtensor(self.own.without_values())


class _Rows(NamedTuple):
    """How ranks share rows: the placements of the input, once its rows are whole."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's part of a DTensor of rows."""
        return tensor.redistribute(placements=self.placements).to_local()

    def on_all(self, tensor: Tensor) -> Tensor:
        """A tensor that all ranks have. Its gradient is the sum over rows of all ranks."""
        of_gradient = [Partial() if each.is_shard() else Replicate() for each in self.placements]
        every = [Replicate()] * self.mesh.ndim
        return tensor.redistribute(placements=every).to_local(grad_placements=of_gradient)

    def as_dtensor(self, own: Tensor, shape: Sequence[int] | None = None) -> DTensor:
        """The DTensor of this rank's part. shape: of all of it; by default the input's."""
        shape = self.shape if shape is None else torch.Size(shape)
        return _dtensor_of(own, self.mesh, self.placements, shape)

    @property
    def number(self) -> int:
        """Of this rank's rows among those of all ranks: ranks with the same rows have the same."""
        number = 0
        for dim, each in enumerate(self.placements):
            if each.is_shard():
                number = number * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        return number

    def reduce_amax(self, amax: Tensor) -> None:
        """Makes an amax that of the rows of all ranks, in place. A NaN is larger than all."""
        bits = amax.view(torch.int32)
        for dim, each in enumerate(self.placements):
            if each.is_shard():
                distributed.all_reduce(bits, distributed.ReduceOp.MAX, self.mesh.get_group(dim))


def _dtensor_of(own: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape) -> DTensor:
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def normalize(request: ForwardRequest, normalize_own: Callable[[ForwardRequest], tuple]) -> tuple:
    """y (a ShardedQuantizedTensor in 8 bits), y1, and the sum, as DTensors.

    normalize_own: makes the same of plain tensors.
    Raises TypeError and NotImplementedError, before any collective, for tensors that do not fit.
    """
    operands, options = request
    _check(operands, options.quantization)
    input = operands.input
    num_leading = input.ndim - len(options.extents)
    rows = _Rows(
        input.device_mesh,
        tuple(
            each if each.is_shard() and each.dim < num_leading else Replicate()
            for each in input.placements
        ),
        input.shape,
    )
    own = operands._replace(
        **{name: rows.own(each) for name, each in _given(operands, _BY_ROW)},
        **{
            name: rows.on_all(on_every_rank(each, input))
            for name, each in _given(operands, _PARAMETERS)
        },
        **{
            name: each.full_tensor() if isinstance(each, DTensor) else each
            for name, each in _given(operands, _CONSTANTS)
        },
    )
    if options.dropout_p:
        own = own._replace(dropout_seed=_seed(rows, own))
    scale_is_found = options.quantization is not None and options.quantization.scaling == "tensor"
    if scale_is_found:
        own = own._replace(scale=_scale(rows, own, request, normalize_own))
        quantization = options.quantization._replace(scaling="given")
        options = options._replace(quantization=quantization)
    y, y1, added = normalize_own(ForwardRequest(own, options))
    if operands.amax is not None:
        rows.reduce_amax(own.amax)
    y = rows.as_dtensor(y) if isinstance(y, Tensor) else _quantized_dtensors(rows, y)
    return y, None if y1 is None else rows.as_dtensor(y1), rows.as_dtensor(added)


def _given(operands: ForwardOperands, names: Sequence[str]) -> list[tuple[str, Any]]:
    named = ((name, getattr(operands, name)) for name in names)
    return [(name, each) for name, each in named if each is not None]


def _check(operands: ForwardOperands, quantization: Quantization | None) -> None:
    check_kinds(by_row=_BY_ROW, **operands._asdict())
    if quantization is not None and quantization.transpose and operands.input.ndim != 2:
        raise NotImplementedError(
            f"transpose is True for a DTensor of shape {tuple(operands.input.shape)}; expected two "
            "dimensions, or transpose=False"
        )


def _seed(rows: _Rows, own: ForwardOperands) -> Any:
    """Another one for each part of the rows, from one that all ranks have; drawn without one."""
    seed = own.dropout_seed
    if seed is None:
        if any(not each.is_shard() for each in rows.placements):
            raise ValueError(
                "dropout_p was given without dropout_seed for a DTensor that several ranks have; "
                "expected a dropout_seed, the same on all ranks"
            )
        return draw_seed(own.input)
    if isinstance(seed, Tensor):
        return seed + (rows.number << 32)
    return (int(seed) + (rows.number << 32) + 2**63) % 2**64 - 2**63


def _scale(rows: _Rows, own: ForwardOperands, request: ForwardRequest, normalize_own) -> Tensor:
    """Of the reduce_amax magnitude of the rows of all ranks, which a first call finds."""
    options, asked = request.options, request.options.quantization
    amax = own.input.new_zeros(1, dtype=torch.float32)
    alone = Quantization(asked.dtype)
    with torch.no_grad():
        normalize_own(ForwardRequest(own._replace(amax=amax), options._replace(quantization=alone)))
    rows.reduce_amax(amax)
    return quantization.scale_of(
        amax,
        getattr(torch, asked.dtype),
        power_of_two=asked.power_of_two,
        smallest_amax=asked.smallest_amax,
    )


def _quantized_dtensors(rows: _Rows, own: QuantizedTensor) -> ShardedQuantizedTensor:
    mesh, scale_inv, transposed = rows.mesh, own.scale_inv, None
    if own.block_rows is None:
        scale_inv = _dtensor_of(scale_inv, mesh, [Replicate()] * mesh.ndim, scale_inv.shape)
    else:
        num_leading = scale_inv.ndim - 1
        scale_inv = rows.as_dtensor(scale_inv, (*rows.shape[:num_leading], scale_inv.shape[-1]))
    if own.transposed is not None:
        turned = [Shard(1) if each.is_shard() else each for each in rows.placements]
        transposed = _dtensor_of(own.transposed, mesh, turned, rows.shape[::-1])
    return ShardedQuantizedTensor(own, rows.as_dtensor, scale_inv, transposed)
