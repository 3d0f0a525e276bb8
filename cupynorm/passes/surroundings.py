"""What is around a norm in a graph, and which option of the operators takes it in.

before   residual + x                 residual, residual_dtype
         residual + dropout(x)        dropout_p
         residual + scale * x         load: layer_scale
         x * silu(gate)               load: gated_input
after    y * (1 + scale) + shift      store: ada_ln
         y * silu(gate)               store: silu_gate
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch._inductor.config as config
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..functors import ada_ln, layer_scale, silu_gate
from ..nn.dtypes import SUPPORTED
from ..plan.functors import Functor, functor
from .norms import Norm
from .spellings import (
    have_one_shape,
    is_barrier,
    number_and_node,
    only_user,
    operation,
    other_operand,
    two_nodes,
    uncast,
    value,
)

# load: x * silu(gate), as Mamba 2 does before its norm. gate: as the input.
GATED_INPUT = functor(
    "gated_input",
    "x = x * gate / (C(1) + exp(-gate));",
    arrays=("gate",),
    backward="""
        const C sigmoid = C(1) / (C(1) + exp(-gate));
        dgate = dx * x * sigmoid * (C(1) + gate * (C(1) - sigmoid));
        dx = dx * gate * sigmoid;
    """,
)


@dataclass
class Fusion:
    """A norm and what goes into its kernel.

    input, residual: of the operator. sum: the node whose value is what was normalised.
    y: the last node that goes. nodes: those that go beside the norm's.
    place: the node before which the operator goes.
    load, store: a functor and its arrays.
    """

    norm: Norm
    input: Node
    y: Node
    place: Node
    residual: Node | None = None
    sum: Node | None = None
    dropout_p: float = 0.0
    load: tuple[Functor, tuple[Node, ...]] | None = None
    store: tuple[Functor, tuple[Node, ...]] | None = None
    nodes: list[Node] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def sum_dtype(self) -> torch.dtype:
        """Of what is normalised, as the operator keeps it."""
        return value(self.input if self.sum is None else self.sum).dtype

    def arrays(self) -> tuple[Node, ...]:
        """Of the load, then of the store."""
        return tuple(array for bound in (self.load, self.store) if bound for array in bound[1])

    def reads(self) -> list[Node]:
        """The nodes that must come before the operator."""
        read = (self.input, self.residual, self.norm.weight, self.norm.bias, *self.arrays())
        return [each for each in read if each is not None]


def surround(norm: Norm, order: dict[Node, int], functors: str) -> Fusion:
    """The norm with all that its operator can take in.

    order: the position of every node of the graph. functors: which of them are used. "all", "none",
    or "some": all but those whose arrays are broadcast over rows and want a gradient, which torch
    sums faster.
    """
    for parts in _PARTS:
        fusion = Fusion(norm, norm.x, norm.y, norm.y)
        for part in parts:
            part(fusion, functors)
        if parts != _PARTS[0]:
            fusion.notes.append("without more: the graph reads or writes that in between")
        if _find_place(fusion, order):
            break
    if norm.rounded is not None and norm.bare is not None:
        if fusion.load or fusion.store:
            fusion.notes.append("x_hat is not rounded before the weight")
        elif norm.rounded != fusion.sum_dtype():
            return surround(norm.bare, order, functors)
    return fusion


def _add_store(fusion: Fusion, functors: str) -> None:
    """Takes in an element-wise operation of y."""
    y, user = fusion.y, only_user(fusion.y)
    factor = other_operand(user, "mul", y)
    if functors == "none" or factor is None:
        return
    last = only_user(user)
    shift = other_operand(last, "add", user)
    scaled = number_and_node(factor) if operation(factor) == "add" else None
    if scaled is not None and scaled[0] == 1 and shift is not None:
        arrays = (scaled[1], shift)
        if all(_is_array(each, y, functors) for each in arrays):
            fusion.store, fusion.y, fusion.nodes = (ada_ln, arrays), last, [y, user, last]
            fusion.notes.append("with scale and shift after it")
    elif operation(factor) == "silu" and _is_array(factor.args[0], y, functors):
        fusion.store, fusion.y = (silu_gate, (uncast(factor.args[0]),)), user
        fusion.nodes = [y, user]
        fusion.notes.append("with the gate after it")


def _add_residual(fusion: Fusion, functors: str) -> None:
    """Takes in x = a + b of two tensors of x's shape."""
    added = fusion.norm.x
    if operation(added) != "add" or (pair := two_nodes(added)) is None:
        return
    made = value(added)
    # Either may be the branch: the one with a dropout or a scale, or else with fewer bytes.
    sides = [(pair[1], pair[0]), pair]  # (branch, residual)
    found = [(_branch(branch, added, made, functors), residual) for branch, residual in sides]
    taking = [each for each in found if each[0][1] or each[0][2]]
    narrow = [each for each in found if getattr(value(each[0][0]), "dtype", None) != made.dtype]
    (input, dropout_p, load), residual = (taking or narrow or found)[0]
    residual = uncast(residual) if only_user(residual) is added else residual
    values = [value(input), value(residual)]
    if any(each is None or not have_one_shape(each, made) for each in values) or input is residual:
        return
    dtypes = [each.dtype for each in values]
    # The operators take a residual of the input's dtype or of the sum's.
    if any(each not in SUPPORTED for each in dtypes) or dtypes[1] not in (dtypes[0], made.dtype):
        return
    fusion.input, fusion.residual, fusion.sum = input, residual, added
    fusion.dropout_p, fusion.load = dropout_p, load
    words = "the dropout and " if dropout_p else "the scale and " if load else ""
    fusion.notes.append(f"with {words}the addition before it")


def _branch(
    node: Node, added: Node, made: torch.Tensor, functors: str
) -> tuple[Node, float, tuple[Functor, tuple[Node, ...]] | None]:
    """An operand of the addition: what the operator reads of it, its dropout_p and its load."""
    if only_user(node) is not added:
        return node, 0.0, None
    source = uncast(node)
    if operation(source) == "dropout" and len(source.users) == 1:
        names = ("input", "p", "training", "inplace")
        arguments = {"p": 0.5, "training": True} | dict(zip(names, source.args)) | source.kwargs
        p, training = arguments["p"], arguments["training"]
        if isinstance(p, float) and 0 < p < 1 and training is True and not arguments.get("inplace"):
            if not config.fallback_random:  # which asks for torch's own random numbers
                return arguments["input"], p, None
    if functors != "none" and operation(source) == "mul" and len(source.users) == 1:
        for input, scale in _orders(two_nodes(source)):
            is_whole = value(input) is not None and have_one_shape(value(input), made)
            if is_whole and _is_broadcast(scale, made, functors):
                return uncast(input), 0.0, (layer_scale, (uncast(scale),))
    return source, 0.0, None


def _orders(pair: tuple[Node, Node] | None) -> list[tuple[Node, Node]]:
    return [] if pair is None else [pair, pair[::-1]]


def _add_gate(fusion: Fusion, functors: str) -> None:
    """Takes in x = input * silu(gate)."""
    x = fusion.norm.x
    if functors == "none" or operation(x) != "mul":
        return
    for input, factor in _orders(two_nodes(x)):
        if operation(factor) == "silu" and operation(input) != "silu":
            source, gate = uncast(input), uncast(factor.args[0])
            values = [value(each) for each in (x, source, gate)]
            if any(each is None or not have_one_shape(each, values[0]) for each in values):
                continue
            # A load without a residual does not return what it made.
            if set(x.users) <= _readers(fusion.norm):
                fusion.input, fusion.load = source, (GATED_INPUT, (gate,))
                fusion.notes.append("with the gate before it")
                return


def _readers(norm: Norm) -> set[Node]:
    """The norm's nodes and the casts that only they read."""
    found = set(norm.nodes)
    casts = {user for user in norm.x.users if operation(user) == "cast"}
    return found | {each for each in casts if set(each.users) <= found}


def _is_array(node: object, y: Node, functors: str) -> bool:
    """Whether a functor of y can read a node as an array."""
    array, made = value(node), value(y)
    if array is None or made is None or array.dtype not in SUPPORTED:
        return False
    return have_one_shape(array, made) or _is_broadcast(node, made, functors)


def _is_broadcast(node: object, made: torch.Tensor, functors: str) -> bool:
    """Whether a node is broadcast over rows, in one of the ways of docs/functors.md."""
    array = value(node)
    if array is None or array.dtype not in SUPPORTED or array.requires_grad and functors != "all":
        return False
    shape = (1,) * (made.dim() - array.dim()) + tuple(array.shape)
    if len(shape) != made.dim() or not statically_known_true(shape[-1] == made.shape[-1]):
        return False
    own = [at for at, extent in enumerate(shape[:-1]) if not statically_known_true(extent == 1)]
    fits = all(statically_known_true(shape[at] == made.shape[at]) for at in own)
    return fits and (not own or own == list(range(own[0], own[-1] + 1)))


# What is tried, until there is a place for the operator.
_PARTS = ((_add_store, _add_residual, _add_gate), (_add_store, _add_gate), (_add_residual,), ())

# Where the operator goes.


def _find_place(fusion: Fusion, order: dict[Node, int]) -> bool:
    """Sets a place so that all it reads is before it, and all that reads its results after."""
    norm, first = fusion.norm, fusion.sum
    own = {*norm.nodes, *fusion.nodes, fusion.y}
    own |= set() if first is None else {first}
    if _has_barrier(own, order):
        return False
    last = max(order[each] for each in fusion.reads())
    if first is None:
        fusion.place = fusion.y
        return last < order[fusion.y]
    if last < order[first]:
        fusion.place = first
        return True
    fusion.place = fusion.y
    readers = set(first.users) - own - _readers(norm)
    return last < order[fusion.y] and all(order[each] > order[fusion.y] for each in readers)


def _has_barrier(nodes: set[Node], order: dict[Node, int]) -> bool:
    """Whether something is written in place from the first to the last of the nodes."""
    places = [order[each] for each in nodes]
    between = (node for node, at in order.items() if min(places) <= at <= max(places))
    return any(is_barrier(node) for node in between)


def can_move(norm: Norm, order: dict[Node, int]) -> bool:
    """Whether nothing is written in place from the first to the last node of the norm."""
    return not _has_barrier({*norm.nodes, norm.y}, order)
