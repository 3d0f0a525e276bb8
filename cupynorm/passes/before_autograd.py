"""The pass over torch's graph before autograd: norms become cupynorm's operators.

An operator has its own derivative, so this one replacement changes forward and backward: the
residual that forward adds is a gradient that backward adds, in the same kernels.
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import torch
from torch.fx import Graph, Node

from ..nn.dtypes import name_of
from ..nn.schemas import arguments_of
from ..norm.checked_forward import SEED_LIMIT
from .norms import FUNCTOR, FUSED, LAUNCH, NORM, Norm, find
from .report import Change, Report
from .rule import why_left
from .spellings import operation, value
from .surroundings import Fusion, can_move, surround


def rewrite(graph: Graph, replace: str, report: Report) -> None:
    """Replaces norms in a graph, in place, and reports each.

    replace: "faster", "all" or "none", as compile_passes takes it.
    """
    number = report.next_graph()
    for norm in find(graph):
        order = {node: at for at, node in enumerate(graph.nodes)}
        # torch's own kernels with such operations are faster than functors (docs/torch_compile.md).
        functors = "all" if replace == "all" else "some" if norm.is_ours else "none"
        fusion = surround(norm, order, functors)
        reason = why_left(fusion, replace)
        if not reason and not can_move(norm, order):
            reason = "the graph writes in place among its operations"
        change = Change(number, module_of(norm), description_of(fusion), "left", reason)
        if not reason:
            takes_in = fusion.residual or fusion.load or fusion.store
            done = ("fused" if takes_in else "kept") if norm.is_ours else "replaced"
            if done != "kept":
                apply(graph, fusion)
            change = change._replace(done=done, remark="; ".join(fusion.notes))
        report.changes.append(change)


def apply(graph: Graph, fusion: Fusion) -> None:
    """Puts the operator in place of the norm and of what it takes in."""
    with graph.inserting_before(fusion.place):
        target, arguments = _call(graph, fusion)
        node = graph.call_function(target, arguments)
        results = [(fusion.y, graph.call_function(operator.getitem, (node, 0)))]
        if fusion.sum is not None:
            results.append((fusion.sum, graph.call_function(operator.getitem, (node, 3))))
    for was, now in results:
        names = ("stack_trace", "nn_module_stack")
        node.meta |= {name: was.meta[name] for name in names if name in was.meta}
        now.meta |= was.meta
        was.replace_all_uses_with(now)
    gone = [*fusion.norm.nodes, *fusion.nodes, fusion.y]
    _erase(graph, [*filter(None, [fusion.norm.x, fusion.sum]), *gone])


def _call(graph: Graph, fusion: Fusion) -> tuple[Any, tuple[Any, ...]]:
    """The operator and its arguments; a seed goes into the graph where there is dropout."""
    norm, p = fusion.norm, fusion.dropout_p
    input, y = value(fusion.input), value(fusion.y)
    sum_dtype = fusion.sum_dtype()
    load, store = (each and each[0].text for each in (fusion.load, fusion.store))
    given = {
        "input": fusion.input,
        "weight": norm.weight,
        "bias": norm.bias,
        "residual": fusion.residual,
        "normalized_shape": norm.extents,
        "eps": norm.eps,
        "centered": norm.centered,
        "zero_centered_weight": norm.zero_centered,
        "out_dtype": None if y.dtype == input.dtype else y.dtype,
        "residual_dtype": None if sum_dtype == input.dtype else sum_dtype,
        "dropout_p": p,
        "round_x_hat": norm.rounded is not None,
        "memory_efficient": False,
        "arrays": list(fusion.arrays()),
        "load": load,
        "store": store,
        "numbers": [],
        **dict(zip(LAUNCH, norm.launch)),
    }
    if p > 0:
        arguments = {"dtype": torch.int64, "device": input.device}
        given["dropout_seed"] = graph.call_function(torch.randint, (0, SEED_LIMIT, (1,)), arguments)
    target = FUSED if p > 0 or given["residual_dtype"] or given["round_x_hat"] else NORM
    target = FUNCTOR if load or store else target
    return target, tuple(given.get(name) for name in arguments_of(target)._fields)


def _erase(graph: Graph, nodes: list[Node]) -> None:
    """Erases nodes that nothing reads, and what only they read if it is a known operation."""
    while nodes:
        node = nodes.pop()
        if node.users or node._erased:
            continue
        nodes += [each for each in node.all_input_nodes if operation(each) is not None]
        graph.erase_node(node)


def module_of(norm: Norm) -> str:
    """The module's name in the model; "" outside modules."""
    stack = list((norm.y.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    # L['self']._modules['blocks']._modules['0'] is blocks.0
    return re.sub(r"\._modules\['([^']*)'\]", r".\1", stack[-1][0]).partition(".")[2]


def description_of(fusion: Fusion) -> str:
    """layer_norm 4096 x 768 bfloat16."""
    norm, x = fusion.norm, value(fusion.input)
    rows = math.prod(x.shape[: x.dim() - len(norm.extents)])
    return f"{norm.kind} {rows} x {math.prod(norm.extents)} {name_of(x.dtype)}"
