"""What is around a norm in a graph, and which option of the operators takes it in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..dtypes import DTYPES
from .norms import Norm
from .spellings import is_barrier, operation, two_nodes, uncast, value


@dataclass
class Fusion:
    """A norm and what goes into its kernel.

    input, residual: of the operator. sum: the node whose value is input + residual.
    place: the node before which the operator goes.
    """

    norm: Norm
    input: Node
    place: Node
    residual: Node | None = None
    sum: Node | None = None
    notes: list[str] = field(default_factory=list)


def surround(norm: Norm, order: dict[Node, int]) -> Fusion:
    """order: the position of every node of the graph."""
    fusion = Fusion(norm, norm.x, norm.y)
    add_residual(fusion, order)
    return fusion


def add_residual(fusion: Fusion, order: dict[Node, int]) -> None:
    """Takes in x = a + b of two tensors of x's shape."""
    added = fusion.norm.x
    if operation(added) != "add" or (given := two_nodes(added)) is None:
        return
    made = value(added)
    sources = [uncast(each) if set(each.users) == {added} else each for each in given]
    values = [value(each) for each in sources]
    if made is None or any(each is None or each.shape != made.shape for each in values):
        return
    if sources[0] is sources[1] or any(not _is_supported(each) for each in values):
        return
    input, residual = (
        sources if values[0].dtype != made.dtype or values[1].dtype == made.dtype else sources[::-1]
    )
    # The operators take a residual of the input's dtype or of the sum's.
    if value(residual).dtype not in (value(input).dtype, made.dtype):
        return
    place = _place(fusion, (input, residual), added, order)
    if place is None:
        fusion.notes.append("the addition before it stays: the graph writes in place between them")
        return
    fusion.input, fusion.residual, fusion.sum, fusion.place = input, residual, added, place
    fusion.notes.append("with the addition before it")


def _is_supported(given: torch.Tensor) -> bool:
    return str(given.dtype).removeprefix("torch.") in DTYPES


def _place(
    fusion: Fusion, operands: tuple[Node, ...], added: Node, order: dict[Node, int]
) -> Node | None:
    """Where the operator may go so that all it reads is before it, and all that reads it after."""
    norm = fusion.norm
    read = [each for each in (*operands, norm.weight, norm.bias) if each is not None]
    first = min(order[each] for each in (added, *norm.nodes))
    between = [node for node, at in order.items() if first <= at <= order[norm.y]]
    if any(is_barrier(node) for node in between):
        return None
    if all(order[each] < order[added] for each in read):
        return added
    users = set(added.users) - set(norm.nodes)
    return norm.y if all(order[each] > order[norm.y] for each in users) else None


def can_move(norm: Norm, order: dict[Node, int]) -> bool:
    """Whether nothing is written in place from the first to the last node of the norm."""
    first = min(order[each] for each in norm.nodes)
    between: list[Any] = [node for node, at in order.items() if first <= at <= order[norm.y]]
    return not any(is_barrier(node) for node in between)
