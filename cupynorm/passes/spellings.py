"""torch's graphs before autograd: which operation a node is, however it was spelled.

Dynamo keeps the spelling of the model: x + y, torch.add(x, y) and x.add(y) are three nodes.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from ..nn.dtypes import SUPPORTED

# operation -> functions, and names of methods
_SPELLINGS: dict[str, tuple[Any, ...]] = {
    "add": (operator.add, torch.add, "add", "__add__"),
    "sub": (operator.sub, torch.sub, torch.subtract, "sub", "subtract"),
    "mul": (operator.mul, torch.mul, torch.multiply, "mul", "multiply"),
    "div": (operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide"),
    "pow": (operator.pow, torch.pow, "pow"),
    "square": (torch.square, "square"),
    "mean": (torch.mean, "mean"),
    "sqrt": (torch.sqrt, "sqrt"),
    "rsqrt": (torch.rsqrt, "rsqrt"),
    "silu": (functional.silu, torch.ops.aten.silu.default),
    "unsqueeze": (torch.unsqueeze, "unsqueeze"),
    "dropout": (functional.dropout,),
    "cast": ("to", "type", "type_as", "float", "half", "bfloat16", "double"),
    "layer_norm": (functional.layer_norm, torch.layer_norm),
    "rms_norm": (functional.rms_norm, torch.rms_norm),
}
_OPERATIONS = {
    spelling: operation for operation, spellings in _SPELLINGS.items() for spelling in spellings
}

_IN_PLACE = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "setitem", "delitem")
}
_MAY_BE_IN_PLACE = {"dropout", "relu", "relu6", "silu", "mish", "hardswish", "leaky_relu", "elu"}
_MAY_BE_IN_PLACE |= {"selu", "celu", "hardtanh", "threshold", "rrelu", "alpha_dropout"}


def operation(node: object) -> str | None:
    """The name of a node's operation, as in _SPELLINGS; None for any other.

    None also where keywords such as alpha, out or memory_format change what is computed.
    """
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    found = _OPERATIONS.get(node.target)
    if found in ("layer_norm", "rms_norm", "dropout"):
        return found
    known = {"mean": {"dim", "keepdim"}, "cast": {"dtype"}, "silu": {"inplace"}}
    known |= {"pow": {"exponent"}, "unsqueeze": {"dim"}}
    for name, given in node.kwargs.items():
        if name == "inplace" and not given:
            continue
        if name not in known.get(found or "", {"other"}) or name == "inplace":
            return None
    if found == "cast" and not _is_cast(node):
        return None
    return found


def _is_cast(node: Node) -> bool:
    """Whether only the dtype changes."""
    source = node.args[0]
    made, source_value = value(node), value(source)
    if made is None or source_value is None or any(isinstance(each, bool) for each in node.args):
        return False
    return made.device == source_value.device


def value(node: object) -> torch.Tensor | None:
    """The fake tensor that a node returns; None if it returns none."""
    if not isinstance(node, Node):
        return None
    found = node.meta.get("example_value", node.meta.get("val"))
    return found if isinstance(found, torch.Tensor) else None


def known(extents: Any) -> tuple[Any, ...]:
    """Extents as ints where torch knows them, also where it calls them by a symbol."""
    return tuple(
        found if isinstance(each, torch.SymInt) and (found := each.node.maybe_as_int()) else each
        for each in extents
    )


def have_one_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two shapes are known to be equal. No size is guarded for it."""
    pairs = zip(one.shape, other.shape)
    return one.dim() == other.dim() and all(statically_known_true(a == b) for a, b in pairs)


def operands(node: Node) -> tuple[Any, ...]:
    """The arguments of an operation of two operands, by position or keyword."""
    named = (node.kwargs[name] for name in ("other", "exponent") if name in node.kwargs)
    return (*node.args, *named)


def number_and_node(node: Node) -> tuple[float, Node] | None:
    """The operands of an operation of a number and a node, in either order."""
    pair = operands(node)
    if len(pair) == 2:
        for one, other in (pair, pair[::-1]):
            if isinstance(one, numbers.Real) and isinstance(other, Node):
                return float(one), other
    return None


def two_nodes(node: Node) -> tuple[Node, Node] | None:
    """The operands of an operation of two nodes."""
    pair = operands(node)
    if len(pair) == 2 and isinstance(pair[0], Node) and isinstance(pair[1], Node):
        return pair[0], pair[1]
    return None


def other_operand(node: object, name: str, operand: Node) -> Node | None:
    """The other operand, where a node is the operation of that name on one operand and another."""
    pair = two_nodes(node) if operation(node) == name else None
    if pair is None:
        return None
    return pair[0] if pair[1] is operand else pair[1]


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def uncast(node: Node) -> Node:
    """What a node was cast from, through casts that lose nothing; the node itself without one.

    Not a source of another kind of numbers, such as a mask: the operators take floats alone.
    """
    while operation(node) == "cast":
        source = node.args[0]
        made, source_value = value(node), value(source)
        assert made is not None and source_value is not None  # or it would be no cast
        is_lossless = torch.promote_types(made.dtype, source_value.dtype) == made.dtype
        if not is_lossless or source_value.dtype not in SUPPORTED:
            break
        node = source
    return node


def is_barrier(node: Node) -> bool:
    """Whether a node writes to a tensor in place, or changes a mode: nothing moves across it."""
    if node.op == "call_module":
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__") or name == "__setitem__"
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.target in _IN_PLACE:
        return True
    name = getattr(node.target, "__name__", "")
    if name in _MAY_BE_IN_PLACE and (node.kwargs.get("inplace") or node.args[3:4] == (True,)):
        return True
    if name in _MAY_BE_IN_PLACE - {"dropout", "alpha_dropout"} and True in node.args[1:]:
        return True
    return "out" in node.kwargs or name.endswith("_") or "set_grad_enabled" in name
