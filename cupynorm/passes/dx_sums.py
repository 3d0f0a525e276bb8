"""Sums of dx over rows, in the joint graph: gradients of the bias of the layer before a norm.

norm_backward(...).dx, sum over rows of dx    norm_backward_in_graph gives both: dx_sum_dtype
"""

from __future__ import annotations

import ast
import math
from typing import Any

import torch
from torch.fx import Graph, Node

from ..gpu.launch import device as device_of
from ..nn.dtypes import SUPPORTED, name_of
from ..plan.dispatch import choose
from ..plan.problem import Layout, Problem, sums_dx
from .joint_nodes import add_result, dtype_of, is_cast, result_of

_VIEWS = {torch.ops.aten.view.default, torch.ops.aten.reshape.default}
_VIEWS |= {torch.ops.aten._unsafe_view.default, torch.ops.aten.squeeze.dim}
_SUM = torch.ops.aten.sum.dim_IntList


def add_sum(graph: Graph, node: Node) -> str | None:
    """The one sum over rows of dx, of its views or of its cast, from the operator itself."""
    options = ast.literal_eval(node.args[-1])
    results, extents = options["results"], options["normalized_shape"]
    dx = result_of(node, results.index("dx")) if "dx" in results else None
    if dx is None or len(extents) != 1 or options.get("dropout_p"):
        return None
    total = next(filter(None, (_sum_of(each, extents) for each in (dx, *_views_of(dx)))), None)
    if total is None:
        return None
    chain = [total, *_views_of(total)]
    last = chain[-1]
    if tuple(last.meta["val"].shape) != extents or any(len(each.users) != 1 for each in chain[:-1]):
        return None
    casts = [each for each in last.users if is_cast(each)]
    dtypes = {dtype_of(each) for each in casts}
    is_all_cast = len(casts) == len(last.users) and len(dtypes) == 1
    dtype = dtypes.pop() if is_all_cast else dtype_of(last)
    options["dx_sum_dtype"] = name_of(dtype)
    if dtype not in SUPPORTED or not _is_in_the_kernel(node, options, math.prod(extents)):
        return None
    made = add_result(node, options, "dx_sum")
    for each in casts if is_all_cast else [last]:
        each.replace_all_uses_with(made)
    for each in [*(casts if is_all_cast else []), *chain[::-1]]:
        if not each.users and not each._erased:
            graph.erase_node(each)
    return "sums dx over rows"


def _views_of(node: Node) -> list[Node]:
    """What views a node, the views of that, and so on, where each has one view."""
    found = [each for each in node.users if each.target in _VIEWS]
    return [*found, *_views_of(found[0])] if len(found) == 1 else []


def _sum_of(rows: Node, extents: tuple[int, ...]) -> Node | None:
    """The one sum over all but the last dimension."""
    shape = rows.meta["val"].shape
    found = [each for each in rows.users if each.target is _SUM and {*each.kwargs} <= {"dtype"}]
    if len(found) != 1 or tuple(shape[-1:]) != extents:
        return None
    dims = sorted(dim % len(shape) for dim in found[0].args[1])
    return found[0] if dims == [*range(len(shape) - 1)] else None


def _is_in_the_kernel(node: Node, options: dict[str, Any], num_cols: int) -> bool:
    """Whether a kernel gives the sum. On a CPU torch adds up, and nothing is lost."""
    x = node.args[1].meta["val"]
    if x.device.type != "cuda":
        return True
    results = options["results"]
    names = ("dy", "x", "mean", "rstd", "weight", "dsum", "dropout_seed", "dy1")
    dtypes = {
        name: name_of(dtype_of(each))
        for name, each in zip(names, node.args)
        if each is not None and name in ("dy", "x", "weight", "dsum", "dy1")
    }
    own = dtypes.get("weight", dtypes["x"])
    dtypes["dx"] = options.get("dx_dtype") or dtypes["x"]
    if "dresidual" in results:
        dtypes["dresidual"] = options.get("dresidual_dtype") or dtypes["x"]
    dtypes |= {name: own for name in ("dweight", "dbias") if name in results}
    problem = Problem(
        "backward",
        options.get("centered", False),
        num_cols,
        layout=Layout.of_new_arrays(num_cols),
        dx_sum=options["dx_sum_dtype"],
        **dtypes,
    )
    return sums_dx(problem, choose(problem, device_of(x.device.index or 0)).tile)
