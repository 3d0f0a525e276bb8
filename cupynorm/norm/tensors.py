"""What computes torch tensors lies in a folder above this one: cupynorm/__init__.py hands it in.

This module imports nothing, so that importing cupynorm stays quick.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

load_autograd: Callable[[], ModuleType]  # imports cupynorm.nn.autograd
