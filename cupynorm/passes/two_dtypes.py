"""y in two dtypes, in the joint graph: models whose norms come after the sums, under autocast.

y, cast(y)                 norm_forward_in_graph writes both: y1_dtype
norm_backward(dy + cast(dy1))    norm_backward_in_graph reads both
"""

from __future__ import annotations

import ast

import torch
from torch.fx import Graph, Node

from ..nn.dtypes import SUPPORTED, name_of
from .joint_nodes import add_result, dtype_of, is_cast, set_arguments
from .spellings import have_one_shape

_ADD = torch.ops.aten.add.Tensor
_DY, _RSTD, _DY1 = 0, 3, 7  # places among the arguments of norm_backward_in_graph


def write_both(graph: Graph, node: Node) -> str | None:
    """y also in the one narrower dtype to which some of its readers cast it."""
    options = ast.literal_eval(node.args[-1])
    results = options["results"]
    if "y" not in results or "load" in options or "store" in options:
        return None
    y = next(each for each in node.users if each.args[1] == results.index("y"))
    casts = [each for each in y.users if is_cast(each) and dtype_of(each) in SUPPORTED]
    casts = [each for each in casts if dtype_of(each).itemsize < dtype_of(y).itemsize]
    if len({dtype_of(each) for each in casts}) != 1 or len(casts) == len(y.users):
        return None
    dtype = dtype_of(casts[0])
    options["y1_dtype"] = name_of(dtype)
    y1 = add_result(node, options, "y1")
    for each in casts:
        each.replace_all_uses_with(y1)
        graph.erase_node(each)
    return f"writes y in {name_of(dtype)} too"


def read_both(graph: Graph, node: Node) -> str | None:
    """dy and dy1 before they are added, where one of them was cast from a narrower dtype."""
    added, compute = node.args[_DY], dtype_of(node.args[_RSTD])
    if added.target is not _ADD or added.kwargs or set(added.users) != {node}:
        return None
    for dy, cast in (added.args, added.args[::-1]):
        if not (isinstance(dy, Node) and is_cast(cast)) or is_cast(dy):
            continue
        dy1, values = cast.args[0], [each.meta["val"] for each in (dy, cast, added)]
        if any(each.dtype != compute for each in values):
            continue
        if dtype_of(dy1) not in SUPPORTED or dtype_of(dy1).itemsize >= compute.itemsize:
            continue
        if not all(have_one_shape(each, values[-1]) for each in values):
            continue
        arguments = list(node.args)
        arguments[_DY], arguments[_DY1] = dy, dy1
        set_arguments(node, tuple(arguments))
        graph.erase_node(added)
        if not cast.users:
            graph.erase_node(cast)
        return f"adds two gradients of y, {name_of(compute)} and {name_of(dtype_of(dy1))}"
    return None
