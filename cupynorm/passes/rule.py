"""Which norms of a compiled graph become cupynorm's operators."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node
from torch.nn import functional

from ..dtypes import DTYPES
from .spellings import operation, value
from .surroundings import Fusion

# A launch from compiled code takes about 10 us of the CPU, inductor's own kernel about 3.
FEWEST_ELEMENTS = 2**20

# What has a kernel of its own in any case, into which inductor cannot fuse the norm.
_PRODUCTS = {
    *(functional.linear, torch._C._nn.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm),
    *(torch.baddbmm, operator.matmul, torch.einsum, functional.scaled_dot_product_attention),
    *(torch.conv1d, torch.conv2d, torch.conv3d, "matmul", "mm", "bmm", "__matmul__"),
}
# What moves no data, or none that a kernel before it would save.
_VIEWS = {"view", "reshape", "flatten", "unflatten", "contiguous", "transpose", "permute"}
_VIEWS |= {"unsqueeze", "squeeze", torch.reshape, torch.flatten, torch.transpose, torch.permute}


def why_left(fusion: Fusion, replace: str) -> str:
    """The reason why a norm stays as it is; "" for one that is replaced."""
    norm, x = fusion.norm, value(fusion.norm.x)
    if str(x.dtype).removeprefix("torch.") not in DTYPES:
        return f"x is {x.dtype}"
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
    reader = fused_reader(fusion.y)
    if reader is not None:
        return f"torch fuses it with what reads y: {reader}"
    dtypes = _dtypes_of_readers(fusion.y)
    if len(dtypes) > 1:
        return f"y is read in {' and '.join(dtypes)}; torch writes both at once"
    if fusion.sum is not None and not _is_sum_needed(fusion):
        return "nothing else reads the sum; torch does not write it"
    return ""


def _dtypes_of_readers(y: Node) -> list[str]:
    """Under autocast products read y in 16 bits, and additions as it is."""
    found = set()
    for user in y.users:
        is_product = user.target in _PRODUCTS
        made = value(user if is_product else y)
        if made is not None and user.op != "output":
            found.add(str(made.dtype).removeprefix("torch."))
    return sorted(found)


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


def fused_reader(y: Node) -> str | None:
    """The first element-wise operation that reads y; None where only products and sums read it.

    An addition belongs to the residual stream: it goes into the next norm.
    """
    for user in y.users:
        if user.op == "output" or user.target in _PRODUCTS or operation(user) == "add":
            continue
        if isinstance(user.target, torch._ops.HigherOrderOperator):
            continue
        if user.target in _VIEWS or operation(user) == "cast" or user.target is operator.getitem:
            reader = fused_reader(user)
            if reader is not None:
                return reader
            continue
        return getattr(user.target, "__name__", str(user.target))
    return None
