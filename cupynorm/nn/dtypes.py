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


def product_dtype(input: Tensor) -> torch.dtype:
    """The dtype of a matrix product of input: the autocast dtype where torch.autocast is on.

    Autocast leaves float64 and dtypes that are not floating point unchanged.
    """
    if input.is_meta:  # torch knows no autocast for it
        return input.dtype
    kind = input.device.type
    is_cast = input.dtype != torch.float64 and input.is_floating_point()
    if not is_cast or not torch.is_autocast_enabled(kind):
        return input.dtype
    return torch.get_autocast_dtype(kind)


def outside_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """A context in which torch.autocast casts no operand on the tensor's kind of device."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
