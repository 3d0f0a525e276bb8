"""The last step in the joint graph: operators that are cheaper to call (graph_operators.py)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..nn.dtypes import name_of
from ..nn.schemas import arguments_of
from . import graph_operators
from .graph_operators import BACKWARD_RESULTS, FORWARD_RESULTS
from .norms import FUNCTOR, FUSED, NORM

NORM_BACKWARD = torch.ops.cupynorm.norm_backward.default
FUSED_BACKWARD = torch.ops.cupynorm.fused_norm_backward.default

_FORWARD_OPTIONS = ("normalized_shape", "eps", "centered", "zero_centered_weight", "out_dtype")
_FORWARD_OPTIONS += ("residual_dtype", "dropout_p", "round_x_hat", "load", "store", "numbers")
_FORWARD_OPTIONS += ("strategy", "statistics", "tile", "sm_margin")
_BACKWARD_OPTIONS = ("normalized_shape", "centered", "zero_centered_weight", "dbias_dtype")
_BACKWARD_OPTIONS += ("dx_dtype", "dresidual_dtype", "dropout_p", "strategy", "sm_margin")


def lower(graph: Graph) -> None:
    """Replaces the operators that have no option beyond those of graph_operators."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (NORM, FUSED, FUNCTOR):
            _forward(node)
        elif node.target in (NORM_BACKWARD, FUSED_BACKWARD):
            _backward(node)


def _forward(node: Node) -> None:
    call = arguments_of(node.target)(*node.args, **node.kwargs)
    if any((call.weight1, call.bias1, call.row_scale, call.memory_efficient)):
        return
    tensors = (call.input, call.weight, call.bias, call.residual, call.dropout_seed)
    tensors += (list(call.arrays),)
    options = _options(call, _FORWARD_OPTIONS)
    _replace(node, graph_operators.FORWARD, tensors, options, FORWARD_RESULTS)


def _backward(node: Node) -> None:
    call = arguments_of(node.target)(*node.args, **node.kwargs)
    if any((call.dy1, call.row_scale, call.memory_efficient)):
        return
    options = _options(call, _BACKWARD_OPTIONS) | {"centered": call.mean is not None}
    if node.target is FUSED_BACKWARD and call.wanted[0] and call.wanted[3]:
        if options["dx_dtype"] == options["dresidual_dtype"] and not call.dropout_p:
            return  # one tensor, which an operator may not return twice
    tensors = (call.dy, call.x, call.mean, call.rstd, call.weight, call.dsum)
    tensors += (call.dropout_seed, None)
    _replace(node, graph_operators.BACKWARD, tensors, options, BACKWARD_RESULTS)


def _options(call: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(call, name) for name in names}
    return {
        name: name_of(each) if isinstance(each, torch.dtype) else each
        for name, each in found.items()
    }


def _replace(
    node: Node,
    target: Any,
    tensors: tuple[Any, ...],
    options: dict[str, Any],
    names: tuple[str, ...],
) -> None:
    """Puts an operator that returns only what the graph reads in place of a node.

    names: of all results of the operator, in the order of the node's.
    """
    graph, extents = node.graph, options["normalized_shape"]
    if not all(isinstance(each, int) for each in extents):
        return
    options["normalized_shape"] = tuple(extents)
    read = {each.args[1]: each for each in node.users if each.users}
    if any(each.target is not operator.getitem for each in node.users) or max(read, default=9) > 3:
        return
    places = sorted(read)
    text = graph_operators.text_of(tuple(names[place] for place in places), options)
    with graph.inserting_before(node):
        made = graph.call_function(target, (*tensors, text))
    made.meta |= node.meta
    made.meta.pop("eager_input_vals", None)  # those of the arguments before
    values = map_arg(made.args, lambda each: each.meta["val"])
    with torch.no_grad():
        made.meta["val"] = target(*values)
    for result in list(node.users):
        if result.users:
            with graph.inserting_before(result):
                now = graph.call_function(operator.getitem, (made, places.index(result.args[1])))
            now.meta |= result.meta | {"val": made.meta["val"][now.args[1]]}
            result.replace_all_uses_with(now)
        graph.erase_node(result)
    graph.erase_node(node)
