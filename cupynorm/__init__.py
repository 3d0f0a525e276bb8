"""cupynorm: LayerNorm and RMSNorm for NVIDIA GPUs. Importing it imports neither torch nor CuPy, and makes no CUDA context."""

from __future__ import annotations

import importlib
from pathlib import Path

__version__ = "0.1.0"

# In a checkout, reference/ and cuda_src/ lie beside the package; installed, they lie inside it.
if not (Path(__file__).parent / "reference").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

_NAMES = {
    "layer_norm": "norm",
    "rms_norm": "norm",
    "layer_norm_forward": "norm",
    "layer_norm_backward": "norm",
    "rms_norm_forward": "norm",
    "rms_norm_backward": "norm",
    "Forward": "norm",
    "Backward": "norm",
    "layer_norm_linear": "norm_linear",
    "rms_norm_linear": "norm_linear",
    "layer_norm_linear_forward": "norm_linear",
    "layer_norm_linear_backward": "norm_linear",
    "rms_norm_linear_forward": "norm_linear",
    "rms_norm_linear_backward": "norm_linear",
    "ProjectedForward": "norm_linear",
    "ProjectedBackward": "norm_linear",
    "FusedForward": "norm",
    "FusedBackward": "norm",
    "plan": "dispatch",
    "Plan": "dispatch",
    "Tile": "problem",
    "Device": "devices",
    "DEVICES": "devices",
    "STRATEGIES": "strategies",
    "use_tiles": "tiles",
    "check": "gradient_check",
    "CheckResult": "gradient_check",
    "MissingLibraryError": "nvrtc",
    "LayerNorm": "modules",
    "RMSNorm": "modules",
    "swap_norms": "modules",
    "SwappedNorms": "modules",
    "LayerNormLinear": "linear",
    "fp8_autocast": "fp8",
    "Format": "fp8",
    "DelayedScaling": "fp8",
    "CurrentScaling": "fp8",
    "BlockScaling": "fp8",
    "QuantizedTensor": "quantized",
}

# `from cupynorm import *` works without torch: what needs it is asked for by name.
_NEED_TORCH = ("modules", "linear", "fp8")
__all__ = ["__version__", *(name for name, module in _NAMES.items() if module not in _NEED_TORCH)]


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module 'cupynorm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_NAMES])
