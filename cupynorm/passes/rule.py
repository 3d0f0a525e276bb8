"""Which norms of a compiled graph become cupynorm's operators."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..nn.dtypes import SUPPORTED, name_of
from .spellings import operation, value
from .surroundings import Fusion

# A call from compiled code takes 13 us of the CPU, inductor's own kernel 3 (docs/experiments.md).
FEWEST_ELEMENTS = 2**20

# What has a kernel of its own in any case, into which inductor cannot fuse the norm.
_PRODUCTS = {
    *(functional.linear, torch._C._nn.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm),
    *(torch.baddbmm, operator.matmul, torch.einsum, functional.scaled_dot_product_attention),
    *(torch.conv1d, torch.conv2d, torch.conv3d, "matmul", "mm", "bmm", "__matmul__"),
}
_ELEMENTWISE = {"mul", "div", "sub", "pow", "silu"}
# What moves no data, or none that a kernel before it would save.
_VIEWS = {"view", "reshape", "flatten", "unflatten", "contiguous", "transpose", "permute"}
_VIEWS |= {"unsqueeze", "squeeze", torch.reshape, torch.flatten, torch.transpose, torch.permute}


def why_left(fusion: Fusion, replace: str) -> str:
    """The reason why a norm stays as it is; "" for one that is replaced."""
    norm, x = fusion.norm, value(fusion.norm.x)
    if x.dtype not in SUPPORTED:
        return f"x is {x.dtype}"
    for node in fusion.reads():
        if is_traceable_wrapper_subclass(value(node)):
            return f"it reads a {type(value(node)).__name__}; expected plain tensors"
    if norm.is_ours:
        return ""
    if replace == "none":
        return 'replace="none": only operators of cupynorm are fused'
    if replace == "all":
        return ""
    if x.device.type != "cuda":
        return f"x is on {x.device.type}; the kernels run on CUDA"
    num_elements = hint(math.prod(x.shape))
    if num_elements < FEWEST_ELEMENTS:
        return f"x has {num_elements:,} elements; under {FEWEST_ELEMENTS:,} torch is faster"
    return _why_torch_is_faster(fusion)


def _why_torch_is_faster(fusion: Fusion) -> str:
    """What torch fuses with its own norm and cannot fuse with an operator; "" for nothing."""
    y, readers = fusion.y, readers_of(fusion.y)
    for reader in readers:
        if not _is_opaque(reader):
            return f"torch fuses it with what reads y: {_name(reader)}"
    dtypes = {_dtype_read(reader, y) for reader in readers if reader.op != "output"}
    if len(dtypes) > 2 or len(dtypes) == 2 and value(y).dtype != torch.float32:
        return f"y is read in {' and '.join(sorted(dtypes))}; torch writes all at once"
    if len(readers) > max(1, len(dtypes)) and value(y).requires_grad:
        return f"{len(readers)} operations read y; torch adds their gradients in its own kernel"
    if fusion.sum is None:
        return ""
    for part in (fusion.input, fusion.residual):
        if operation(part) in _ELEMENTWISE and len(part.users) == 1:
            return f"torch fuses it with what is added: {_name(part)}"
    if not _is_sum_needed(fusion):
        return "nothing else reads the sum; torch does not write it"
    return ""


def readers_of(y: Node) -> list[Node]:
    """What reads a node, through views and casts."""
    found = []
    for user in y.users:
        is_view = user.target in _VIEWS or user.target is operator.getitem
        found += readers_of(user) if is_view or operation(user) == "cast" else [user]
    return found


def _is_opaque(reader: Node) -> bool:
    """Whether torch cannot fuse the norm into it. An addition belongs to the residual stream: it
    goes into the next norm."""
    if isinstance(reader.target, torch._ops.HigherOrderOperator):
        return True
    return reader.op == "output" or reader.target in _PRODUCTS or operation(reader) == "add"


def _dtype_read(reader: Node, y: Node) -> str:
    """Under autocast products read y in 16 bits, and additions as it is."""
    made = value(reader if reader.target in _PRODUCTS else y)
    return name_of(getattr(made, "dtype", value(y).dtype))


def _name(node: Node) -> str:
    return operation(node) or getattr(node.target, "__name__", str(node.target))


def _is_sum_needed(fusion: Fusion) -> bool:
    """Whether backward or anything but the norm reads the sum."""
    readers = {user for user in fusion.sum.users if operation(user) != "cast"}
    readers |= {each for user in set(fusion.sum.users) - readers for each in user.users}
    inside = {*fusion.norm.nodes, *fusion.nodes, fusion.norm.y, fusion.y}
    return value(fusion.sum).requires_grad or not readers <= inside


def hint(size: int | torch.SymInt) -> int:
    """A size, or the size in the call that is compiled where it is dynamic."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return int(found) if found is not None else FEWEST_ELEMENTS
