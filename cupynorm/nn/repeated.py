"""torch: whether a call is like the last one of its kind, which is checked and prepared.

torch compares the layouts of all tensors in one call. A key of them, as norm/prepared.py makes it,
takes six calls for each tensor.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import torch

from ..norm.prepared import Prepared, keep
from .private import TensorGuards

_address = torch.Tensor.data_ptr


class Repeated:
    """A prepared call, and the layouts that its tensors had last."""

    __slots__ = ("_are_same", "_read", "_run", "prepared")

    def __init__(self, prepared: Any, launches: Prepared, operands: tuple) -> None:
        self.prepared = prepared
        self._read, self._run = launches.read, launches.run_in_place
        self._are_same = TensorGuards(
            *self._read(operands), dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check

    def run(self, operands: tuple) -> tuple | None:
        """What prepared.run returns; None, if the tensors that it reads are not like those of last
        time.

        Compared are classes, dtypes, shapes, strides, devices and requires_grad. Addresses must be
        multiples of 16. A tensor that is given twice does not fit.
        """
        tensors = self._read(operands)
        if not self._are_same(*tensors):
            return None
        addresses = tuple(map(_address, tensors))
        if reduce(or_, addresses) & 15:
            return None
        return self._run(operands, tensors, addresses)


def remember(calls: dict, kind: tuple | None, prepared: Any, operands: tuple) -> None:
    """Keeps a call that kernels compute as the last one of its kind, unless a tensor is copied or
    not aligned to 16 bytes."""
    launches = prepared if isinstance(prepared, Prepared) else getattr(prepared, "on_gpu", None)
    if kind is None or launches is None or not launches.is_simple():
        return
    tensors = launches.read(operands)
    if all(each is not None and not each.data_ptr() & 15 for each in tensors):
        keep(calls, kind, Repeated(prepared, launches, operands))
