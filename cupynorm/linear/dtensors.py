"""torch: a norm and the linear layer after it whose tensors are DTensors.

The norm is that of DTensors (nn/dtensor.py), the product is torch's. torch records both. So ranks
exchange what the placements of the tensors need:

    weight sharded by rows      the normalised tensor is gathered where its rows are sharded
    weight sharded by columns   rows that are split are gathered for the norm; y is a partial sum
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu.arrays import type_in_words
from ..nn.dtensor import on_every_rank
from .call import LinearCall, Operands
from .norms import normalize_and_add


def has_dtensors(operands: Operands) -> bool:
    """Whether any operand is a DTensor."""
    return any(hasattr(each, "device_mesh") for each in operands.all)


def refuse(operands: Operands, where: str) -> None:
    """Raises NotImplementedError where an operand is a DTensor."""
    if has_dtensors(operands):
        raise NotImplementedError(
            f"a DTensor was given to a norm and linear layer {where}; "
            "expected plain tensors, to_local()"
        )


def normalize_and_project(call: LinearCall) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, normalized (None unless requested), input + residual.

    Raises TypeError where input is no DTensor.
    """
    from torch.distributed.tensor import Replicate, Shard

    operands, options = call
    input = operands.input
    if not hasattr(input, "device_mesh"):
        raise TypeError(
            f"a weight or bias is a DTensor and input is {type_in_words(input)}; "
            "expected input to be a DTensor too"
        )
    weights, biases = (
        [on_every_rank(each, input) for each in parts]
        for parts in (operands.weights, operands.biases)
    )
    normalized, added = normalize_and_add(LinearCall(operands, options))
    outputs = []
    for at, weight in enumerate(weights):
        placements = [
            {0: Replicate(), 1: Shard(normalized.ndim - 1)}.get(getattr(split, "dim", None), own)
            for split, own in zip(weight.placements, normalized.placements)
        ]
        rows = normalized.redistribute(placements=placements)
        bias = biases[at].to(options.dtype) if biases else None
        outputs.append(functional.linear(rows, weight.to(options.dtype), bias))
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return y, normalized if options.return_normalized else None, added
