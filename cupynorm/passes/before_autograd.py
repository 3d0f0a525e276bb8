"""The pass over torch's graph before autograd: norms become cupynorm's operators.

An operator has its own derivative, so this one replacement changes forward and backward: the
residual that forward adds is a gradient that backward adds, in the same kernels.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from torch.fx import Graph, Node

from .norms import FUSED, NORM, Norm, find
from .report import Change, Report
from .rule import why_left
from .spellings import operation, value
from .surroundings import Fusion, can_move, surround


def rewrite(graph: Graph, replace: str, report: Report) -> None:
    """Replaces norms in a graph, in place, and reports each.

    replace: "faster", "all" or "none", as compile_passes takes it.
    """
    number = report.next_graph()
    for norm in list(find(graph)):
        order = {node: at for at, node in enumerate(graph.nodes)}
        if norm.y not in order:
            continue
        reason = why_left(norm, replace)
        if not reason and not can_move(norm, order):
            reason = "the graph writes in place among its operations"
        change = Change(number, name_of(norm), described(norm), "left", reason)
        if not reason:
            fusion = surround(norm, order)
            if norm.is_ours and fusion.residual is None:
                change = change._replace(done="kept", remark="; ".join(fusion.notes))
            else:
                apply(graph, fusion)
                done = "fused" if norm.is_ours else "replaced"
                change = change._replace(done=done, remark="; ".join(fusion.notes))
        report.changes.append(change)


def apply(graph: Graph, fusion: Fusion) -> None:
    """Puts the operator in place of the norm and of what it takes in."""
    norm = fusion.norm
    with graph.inserting_before(fusion.place):
        target, arguments = call_of(fusion)
        node = graph.call_function(target, arguments)
        y = graph.call_function(operator.getitem, (node, 0))
        results = [(norm.y, y)]
        if fusion.sum is not None:
            results.append((fusion.sum, graph.call_function(operator.getitem, (node, 3))))
    for was, now in results:
        node.meta |= {
            name: was.meta[name] for name in ("stack_trace", "nn_module_stack") if name in was.meta
        }
        now.meta |= was.meta
        was.replace_all_uses_with(now)
    _erase(graph, [norm.y, *reversed(norm.nodes), *filter(None, [fusion.sum])])


def call_of(fusion: Fusion) -> tuple[Any, tuple[Any, ...]]:
    """The operator and its arguments."""
    norm, residual = fusion.norm, fusion.residual
    input_dtype, y_dtype = value(fusion.input).dtype, value(norm.y).dtype
    sum_dtype = input_dtype if fusion.sum is None else value(fusion.sum).dtype
    out_dtype = None if y_dtype == input_dtype else y_dtype
    common = (norm.extents, norm.eps, norm.centered, norm.zero_centered, out_dtype)
    if sum_dtype == input_dtype and not norm.rounds:
        tensors = (fusion.input, norm.weight, norm.bias, residual)
        return NORM, (*tensors, *common, *norm.launch)
    tensors = (fusion.input, norm.weight, norm.bias, residual, None, None, None, None)
    residual_dtype = None if sum_dtype == input_dtype else sum_dtype
    options = (residual_dtype, 0.0, norm.rounds, False)
    return FUSED, (*tensors, *common, *options, *norm.launch)


def _erase(graph: Graph, nodes: list[Node]) -> None:
    """Erases nodes that nothing reads, and what only they read if it is a known operation."""
    while nodes:
        node = nodes.pop()
        if node.users or node not in graph.nodes:
            continue
        nodes += [each for each in node.all_input_nodes if operation(each) is not None]
        graph.erase_node(node)


def name_of(norm: Norm) -> str:
    """The module's name in the model; "" outside modules."""
    stack = list((norm.y.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    # L['self']._modules['blocks']._modules['0'] is blocks.0
    return re.sub(r"\._modules\['([^']*)'\]", r".\1", stack[-1][0]).partition(".")[2]


def described(norm: Norm) -> str:
    """layer_norm 4096 x 768 bfloat16."""
    x = value(norm.x)
    rows = 1
    for extent in x.shape[: x.dim() - len(norm.extents)]:
        rows = rows * extent
    cols = " x ".join(str(each) for each in norm.extents)
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{norm.kind} {rows} x {cols} {dtype}"
