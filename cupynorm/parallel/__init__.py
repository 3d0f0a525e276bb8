"""A norm and the linear layer after it, on several ranks of torch.distributed."""

from __future__ import annotations

import sys
from types import ModuleType

# Modules of earlier versions: their names, and what to do instead.
_REMOVED = {
    "styles": (
        ("ColwiseParallel", "RowwiseParallel"),
        "give LayerNormLinear parallel_mode and tp_group instead",
    ),
    "gathered_weights": (
        ("gather_in_8_bits",),
        "leave the call out: fully_shard gathers weights in their own dtype",
    ),
}


class _Removed(ModuleType):
    def __getattr__(self, name: str) -> object:
        names, instead = _REMOVED[self.__name__.rpartition(".")[-1]]
        if name in names:
            raise ImportError(f"{self.__name__}.{name} was removed: {instead}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


for _name in _REMOVED:  # `from cupynorm.parallel.styles import ...` finds it
    sys.modules[f"{__name__}.{_name}"] = _Removed(f"{__name__}.{_name}")
