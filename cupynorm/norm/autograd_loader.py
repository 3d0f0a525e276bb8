"""How norm/ reaches nn/autograd.py, which imports norm/: cupynorm/__init__.py sets `load`.

It imports nothing at run time, so that importing cupynorm stays quick.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

load: Callable[[], ModuleType]
