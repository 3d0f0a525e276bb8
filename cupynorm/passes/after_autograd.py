"""The pass over torch's joint graph of forward and backward: casts and sums beside the operators.

Autocast's casts, and the gradients that meet where a tensor is read twice, appear only here.

    y = norm_forward(...), cast(y)          out_dtype
    norm_backward(cast(dy), ...)            reads dy itself
    norm_backward(...).dx + other           dsum

and, of the operators that lower.py puts in their place

    y and cast(y), dy + cast(dy1)           two_dtypes.py
    sum over rows of dx                     dx_sums.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..nn.dtypes import SUPPORTED, name_of
from ..nn.schemas import arguments_of
from .dx_sums import add_sum
from .graph_operators import BACKWARD, FORWARD
from .joint_nodes import is_cast, result_of, set_arguments
from .lower import FUSED_BACKWARD, NORM_BACKWARD, lower
from .norms import FUNCTOR, FUSED, NORM
from .report import Change, Report
from .spellings import have_one_shape
from .two_dtypes import read_both, write_both

FUNCTOR_BACKWARD = torch.ops.cupynorm.functor_norm_backward.default

_ADD = torch.ops.aten.add.Tensor


def rewrite(graph: Graph, replace: str, report: Report) -> None:
    """Changes the operators' options in a graph, in place, and reports each."""
    del replace  # the operators are there already
    _change(
        graph,
        report,
        {
            NORM: (_cast_y,),
            FUSED: (_cast_y,),
            FUNCTOR: (_cast_y,),
            NORM_BACKWARD: (_read_uncast, _add_gradient),
            FUSED_BACKWARD: (_read_uncast, _share_gradient, _add_gradient),
            FUNCTOR_BACKWARD: (_read_uncast, _add_gradient),
        },
    )
    lower(graph)
    _change(graph, report, {FORWARD: (write_both,), BACKWARD: (read_both,)})
    _change(graph, report, {BACKWARD: (add_sum,)})


def _change(
    graph: Graph,
    report: Report,
    changes: dict[Any, tuple[Callable[[Graph, Node], str | None], ...]],
) -> None:
    """Tries the changes of each operator. One returns a remark where it changed something."""
    for node in list(graph.nodes):
        for change in changes.get(node.target, ()) if node.op == "call_function" else ():
            remark = change(graph, node)
            if remark:
                name = node.target._schema.name.removeprefix("cupynorm::").removesuffix("_in_graph")
                number = max(1, report.num_graphs)
                report.changes.append(Change(number, "", name, "cast", remark))


def _cast_y(graph: Graph, node: Node) -> str | None:
    """y in the dtype that all its readers cast it to."""
    call = arguments_of(node.target)(*node.args, **node.kwargs)
    y = result_of(node, 0)
    if y is None or any((call.memory_efficient, call.weight1, call.bias1)):
        return None
    casts = list(y.users)
    if not casts or any(not is_cast(each) for each in casts):
        return None
    dtypes = {each.meta["val"].dtype for each in casts}
    dtype = dtypes.pop()
    if dtypes or dtype not in SUPPORTED or dtype.itemsize > y.meta["val"].dtype.itemsize:
        return None
    was = y.meta["val"].dtype
    set_arguments(node, call._replace(out_dtype=dtype))
    for each in casts:
        each.replace_all_uses_with(y)
        graph.erase_node(each)
    return f"writes y in {name_of(dtype)}, not {name_of(was)}"


def _read_uncast(graph: Graph, node: Node) -> str | None:
    """dy and dsum from before a cast to a wider dtype: the kernel casts what it reads."""
    call = arguments_of(node.target)(*node.args, **node.kwargs)
    found = {}
    for name in ("dy", "dsum"):
        cast = getattr(call, name)
        if isinstance(cast, Node) and is_cast(cast):
            source, wide = cast.args[0].meta["val"].dtype, cast.meta["val"].dtype
            if source in SUPPORTED and torch.promote_types(source, wide) == wide != source:
                found[name] = cast.args[0]
    if not found:
        return None
    set_arguments(node, call._replace(**found))
    for name in found:
        cast = getattr(call, name)
        if not cast.users:
            graph.erase_node(cast)
    dtype = next(iter(found.values())).meta["val"].dtype
    return f"reads {' and '.join(found)} in {name_of(dtype)}"


def _add_gradient(graph: Graph, node: Node) -> str | None:
    """dx + other of backward without dsum: other becomes dsum."""
    call = arguments_of(node.target)(*node.args, **node.kwargs)
    dx = result_of(node, 0)
    is_scaled = any((call.load, call.dropout_p, call.row_scale, call.dy1))
    if is_scaled or any(call.wanted[3:4]):
        return None  # dx is not the gradient of what was normalised
    if call.dsum is not None or dx is None or len(dx.users) != 1 or not call.wanted[0]:
        return None
    (added,) = dx.users
    if added.target is not _ADD or added.kwargs or len(added.args) != 2:
        return None
    other = added.args[1] if added.args[0] is dx else added.args[0]
    if not isinstance(other, Node) or other is dx:
        return None
    values = [each.meta["val"] for each in (added, dx, other)]
    dx_value = values[1]
    if any(not have_one_shape(each, dx_value) or each.dtype != dx_value.dtype for each in values):
        return None
    order = {each: at for at, each in enumerate(graph.nodes)}
    readers = {user for result in node.users for user in result.users} - {added}
    if any(order[each] < order[added] for each in readers):
        return None
    if order[other] > order[node]:
        # Backward then runs where the sum was.
        for each in (*node.users, node)[::-1]:
            added.prepend(each)
    set_arguments(node, call._replace(dsum=other))
    added.replace_all_uses_with(dx)
    graph.erase_node(added)
    _read_uncast(graph, node)
    return "adds the other gradient of its input"


def _share_gradient(graph: Graph, node: Node) -> str | None:
    """One gradient for the input and the residual where they are the same numbers."""
    call = arguments_of(node.target)(*node.args, **node.kwargs)
    dx, dresidual = result_of(node, 0), result_of(node, 3)
    if dx is None or dresidual is None or call.row_scale is not None or call.dropout_p:
        return None
    if dx.meta["val"].dtype != dresidual.meta["val"].dtype:
        return None
    first = min((dx, dresidual), key=[*graph.nodes].index)
    if first is dresidual:
        dresidual.prepend(dx)
    dresidual.replace_all_uses_with(dx)
    graph.erase_node(dresidual)
    wanted = [name != 3 and is_wanted for name, is_wanted in enumerate(call.wanted)]
    set_arguments(node, call._replace(wanted=wanted, dresidual_dtype=None))
    return "writes one gradient for input and residual"
