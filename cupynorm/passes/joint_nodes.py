"""Nodes of the joint graph: casts, results of operators, and other arguments for them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .graph_operators import text_of

_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


def is_cast(node: object) -> bool:
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in _CASTS:
        return False
    given = node.kwargs
    if given.get("memory_format") is not None or given.get("pin_memory"):
        return False
    return node.args[0].meta["val"].device == node.meta["val"].device


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def result_of(node: Node, index: int) -> Node | None:
    """The one node that reads a result of an operator."""
    found = [each for each in node.users if each.args[1] == index]
    return found[0] if len(found) == 1 else None


def set_arguments(node: Node, arguments: tuple[Any, ...]) -> None:
    """Gives an operator other arguments, and the fake results that belong to them."""
    node.args, node.kwargs = tuple(arguments), {}
    node.meta.pop("eager_input_vals", None)  # those of the arguments before
    values = map_arg(node.args, lambda each: each.meta["val"])
    with torch.no_grad():
        made = node.target(*values)
    node.meta["val"] = made
    for result in node.users:
        if result.target is operator.getitem:
            result.meta["val"] = made[result.args[1]]


def add_result(node: Node, options: dict[str, Any], name: str) -> Node:
    """A node for one more result of an operator of graph_operators. options: those of it, changed.

    It comes after the nodes of the other results.
    """
    results = (*options.pop("results"), name)
    set_arguments(node, (*node.args[:-1], text_of(results, options)))
    last = max(node.users, key=[*node.graph.nodes].index)
    with node.graph.inserting_after(last):
        made = node.graph.call_function(operator.getitem, (node, len(results) - 1))
    made.meta["val"] = node.meta["val"][-1]
    return made
