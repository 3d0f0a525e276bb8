"""torch's graphs before autograd: the norms in them.

Found are torch's layer_norm and rms_norm, cupynorm's operators, and norms of torch operations, as
Hugging Face's models have:

    h = cast(x)                       float32
    x_hat = h * rsqrt(mean(h^2) + eps)
    y = weight * cast(x_hat)          or x_hat * (1 + weight), as Gemma's
    and the same of h - mean(h), with a bias
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..nn import functor_operators, fused_operators, operators  # noqa: F401, they register
from ..nn.dtypes import SUPPORTED
from ..nn.schemas import arguments_of
from .spellings import (
    known,
    number_and_node,
    only_user,
    operation,
    other_operand,
    two_nodes,
    uncast,
    value,
)

NORM = torch.ops.cupynorm.norm_forward.default
FUSED = torch.ops.cupynorm.fused_norm_forward.default
FUNCTOR = torch.ops.cupynorm.functor_norm_forward.default

LAUNCH = ("sm_margin", "strategy", "statistics", "tile", "backward_sm_margin")
DEFAULT_LAUNCH = (0, None, None, None, 0)


@dataclass
class Norm:
    """A norm in a graph. x: what it normalises. y: its result, the last of its nodes.

    rounded: the dtype to which x_hat is rounded before the weight. bare: the same norm without
    weight and bias, where they can be left out. is_ours: it is cupynorm's operator.
    """

    x: Node
    y: Node
    nodes: list[Node]
    extents: tuple[Any, ...]
    eps: float | None
    centered: bool
    weight: Node | None = None
    bias: Node | None = None
    zero_centered: bool = False
    rounded: torch.dtype | None = None
    bare: Norm | None = None
    is_ours: bool = False
    launch: tuple[Any, ...] = field(default=DEFAULT_LAUNCH)

    @property
    def kind(self) -> str:
        return "layer_norm" if self.centered else "rms_norm"


def find(graph: Graph) -> Iterator[Norm]:
    """Every norm of a graph, in the graph's order. The graph may change from one to the next."""
    for node in list(graph.nodes):
        if node._erased:
            continue
        found = None
        if operation(node) in ("layer_norm", "rms_norm"):
            found = _of_torch(node)
        elif node.op == "call_function" and node.target in (NORM, FUSED):
            found = _of_cupynorm(node)
        elif operation(node) in ("rsqrt", "sqrt", "pow"):
            found = _of_operations(node)
        if found is not None and value(found.x) is not None and value(found.y) is not None:
            yield found


def _of_torch(node: Node) -> Norm | None:
    centered = operation(node) == "layer_norm"
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    if not centered:
        names = ("input", "normalized_shape", "weight", "eps")
    arguments = dict(zip(names, node.args)) | node.kwargs
    extents = arguments.get("normalized_shape")
    eps = arguments.get("eps", 1e-5 if centered else None)
    if (
        not isinstance(arguments.get("input"), Node)
        or not _are_ints(extents)
        or isinstance(eps, Node)
    ):
        return None
    found = Norm(
        arguments["input"],
        node,
        [node],
        tuple(extents),
        eps,
        centered,
        arguments.get("weight"),
        arguments.get("bias"),
    )
    _read_before_cast(found)
    return found


def _are_ints(extents: object) -> bool:
    """Whether the width of a row is known."""
    return isinstance(extents, (tuple, list)) and all(isinstance(each, int) for each in extents)


def _read_before_cast(norm: Norm) -> None:
    """Makes x what it was cast from, where only the norm reads the cast."""
    source = uncast(norm.x)
    if source is not norm.x and set(norm.x.users) <= set(norm.nodes):
        norm.nodes.insert(0, norm.x)
        norm.x = source


def _of_cupynorm(node: Node) -> Norm | None:
    """An operator without a residual and without fused options other than round_x_hat."""
    call = arguments_of(node.target)(*node.args, **node.kwargs)
    others = (call.residual, call.weight1, call.bias1, call.row_scale, call.residual_dtype)
    others += (call.dropout_p, call.memory_efficient)
    if any(others) or not _are_ints(call.normalized_shape):
        return None
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(results) != len(node.users) or set(results) != {0}:
        return None
    return Norm(
        call.input,
        results[0],
        [node, results[0]],
        tuple(call.normalized_shape),
        call.eps,
        call.centered,
        call.weight,
        call.bias,
        call.zero_centered_weight,
        value(call.input).dtype if call.round_x_hat else None,
        is_ours=True,
        launch=tuple(getattr(call, name) for name in LAUNCH),
    )


# Norms of torch operations.


def _of_operations(root: Node) -> Norm | None:
    """root: rsqrt(variance + eps), sqrt(variance + eps), or (variance + eps) ** -0.5."""
    if operation(root) == "pow":
        pair = number_and_node(root)
        if pair is None or pair[0] != -0.5:
            return None
    shifted = root.args[0]
    if operation(shifted) != "add" or (pair := number_and_node(shifted)) is None:
        return None
    eps, variance = pair
    if (squared := _mean_of(variance)) is None or (h := _square_of(squared)) is None:
        return None
    made = _normalized(root, h)
    if made is None:
        return None
    x_hat, numerator = made
    wide = value(squared)
    x, nodes, centered = uncast(h), [squared, variance, shifted, root, x_hat], False
    if (source := _centered(h)) is not None:
        x, centered = source, True
        differences = dict.fromkeys((h, numerator))
        means = dict.fromkeys(two_nodes(each)[1] for each in differences)
        nodes = [*means, *differences, *nodes]
    x_value = value(x)
    if wide is None or x_value is None or value(x_hat) is None:
        return None
    if centered and any(value(mean).dtype != wide.dtype for mean in means):
        return None  # a mean of 16 bits, ours would differ
    extents = known(x_value.shape[-1:])
    if not _are_ints(extents):
        return None
    if wide.dtype != torch.promote_types(x_value.dtype, torch.float32):
        return None  # its statistics are in 16 bits, ours would differ
    found = Norm(x, x_hat, nodes, extents, eps, centered)
    if not _are_private(found):
        return None
    _add_affine(found)
    return found


def _mean_of(node: object) -> Node | None:
    """The operand of a mean over the last dimension, which is kept."""
    if operation(node) != "mean" or not isinstance(node.args[0], Node):
        return None
    squared = value(node.args[0])
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keeps = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if squared is None or not keeps or dim not in (-1, squared.dim() - 1):
        return None
    return node.args[0]


def _square_of(node: Node) -> Node | None:
    found = operation(node)
    if found == "square":
        return node.args[0]
    if found == "pow":
        pair = number_and_node(node)
        return pair[1] if pair is not None and pair[0] == 2 and pair[1] is node.args[0] else None
    if found == "mul":
        pair = two_nodes(node)
        return pair[0] if pair is not None and pair[0] is pair[1] else None
    return None


def _centered(node: Node) -> Node | None:
    """x where the node is x - mean(x)."""
    if operation(node) != "sub" or (pair := two_nodes(node)) is None:
        return None
    mean = _mean_of(pair[1])
    return uncast(pair[0]) if mean is not None and uncast(mean) is uncast(pair[0]) else None


def _normalized(root: Node, h: Node) -> tuple[Node, Node] | None:
    """h * root, or h / root where root is a square root; and the node of h in it."""
    if len(root.users) != 1:
        return None
    (user,) = root.users
    expected = "div" if operation(root) == "sqrt" else "mul"
    if operation(user) != expected or (pair := two_nodes(user)) is None:
        return None
    if expected == "div" and pair[1] is not root:
        return None
    other = pair[0] if pair[1] is root else pair[1]
    centered = _centered(h)
    same = uncast(other) is uncast(h) or centered is not None and _centered(other) is centered
    return (user, other) if same else None


def _are_private(norm: Norm) -> bool:
    """Whether only the norm reads its own nodes, but for y."""
    inside = set(norm.nodes)
    return all(set(node.users) <= inside for node in norm.nodes if node is not norm.y)


def _add_affine(norm: Norm) -> None:
    """Takes in the rounding of x_hat, the weight and the bias that follow."""
    x_hat, last, rounded = value(norm.y), norm.y, None
    taken: list[Node] = []
    user = only_user(last)
    if operation(user) == "cast":
        if value(user).dtype != x_hat.dtype:
            rounded = value(user).dtype
        last, taken = user, [user]
        user = only_user(last)
    weight = other_operand(user, "mul", last)
    if not _is_parameter(weight, norm.extents):
        return
    norm.bare = replace(norm, nodes=[*norm.nodes])
    norm.nodes += [*taken, user]
    norm.y, norm.rounded = user, rounded
    norm.weight, norm.zero_centered = _weight(weight)
    user = only_user(norm.y)
    bias = other_operand(user, "add", norm.y)
    if value(norm.y).dtype == x_hat.dtype and _is_parameter(bias, norm.extents):
        norm.nodes.append(user)
        norm.y, norm.bias = user, uncast(bias)


def _is_parameter(node: object, extents: tuple[Any, ...]) -> bool:
    parameter = value(node)
    return (
        parameter is not None and parameter.dtype in SUPPORTED and known(parameter.shape) == extents
    )


def _weight(node: Node) -> tuple[Node, bool]:
    """The weight, and whether 1 is added to it in float32 or wider."""
    made = value(node)
    if operation(node) == "add" and made is not None and made.dtype.itemsize >= 4:
        pair = number_and_node(node)
        if pair is not None and pair[0] == 1:
            return uncast(pair[1]), True
    return uncast(node), False
