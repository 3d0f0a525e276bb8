"""Casts in torch's joint graph."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..dtypes import DTYPES

_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


def is_cast(node: object) -> bool:
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in _CASTS:
        return False
    given = node.kwargs
    if given.get("memory_format") is not None or given.get("pin_memory"):
        return False
    return node.args[0].meta["val"].device == node.meta["val"].device


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def is_supported(dtype: torch.dtype) -> bool:
    return name_of(dtype) in DTYPES


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
