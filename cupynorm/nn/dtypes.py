"""torch: dtypes, by name and under torch.autocast."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from .. import dtypes

SUPPORTED = frozenset(getattr(torch, name) for name in dtypes.DTYPES)


def name_of(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def arithmetic(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic on x and of its statistics: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def product_dtype(input: Tensor) -> torch.dtype:
    """The dtype of a matrix product of input: the autocast dtype where torch.autocast is on.

    Autocast leaves float64 and dtypes that are not floating point unchanged.
    """
    is_cast = input.dtype != torch.float64 and input.is_floating_point()
    if not is_cast or not in_autocast(input):
        return input.dtype
    return torch.get_autocast_dtype(input.device.type)


def in_autocast(tensor: Tensor) -> bool:
    """Whether torch.autocast is on for the tensor's kind of device. torch has none for meta."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def outside_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """A context in which torch.autocast casts no operand on the tensor's kind of device."""
    if in_autocast(tensor):
        return torch.autocast(tensor.device.type, enabled=False)
    return contextlib.nullcontext()
