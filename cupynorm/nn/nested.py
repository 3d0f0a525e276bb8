"""torch: nested tensors, a batch of sequences of different lengths, as arguments of the norms.

A jagged tensor keeps the rows of all sequences in one dense tensor, its values. A norm acts on each
row alone, so it runs on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..norm.request import ForwardOperands, ForwardRequest


def is_any(*tensors: object) -> bool:
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
        self._input, self._ragged = input, input._ragged_idx
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


def normalize(
    request: ForwardRequest, of_dense: Callable[[ForwardRequest], tuple]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What of_dense returns for the values of nested operands, as nested tensors."""
    operands, options = request
    if options.quantization is not None or operands.out is not None:
        option = "out" if options.quantization is None else "8-bit out_dtype"
        raise NotImplementedError(f"{option} was given and input is nested; expected neither")
    packing = Packing(operands.input, len(options.extents))
    by_row = {name: getattr(operands, name) for name in ("input", "residual", "row_scale")}
    packed = {
        name: packing.values(tensor, name) for name, tensor in by_row.items() if tensor is not None
    }
    named = zip(ForwardOperands._fields, operands)  # torch.compile does not trace _replace
    dense = ForwardOperands(*[packed.get(name, each) for name, each in named])
    results = of_dense(ForwardRequest(dense, options))
    return packing.nested(results)


def _check_jagged(tensor: Tensor, name: str) -> None:
    if tensor.layout is not torch.jagged:
        raise TypeError(f"{name} is nested with layout torch.strided; expected torch.jagged")
