"""LayerNorm and RMSNorm for NVIDIA GPUs.

The import loads neither torch nor CuPy and creates no CUDA context. Names load on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The names of _NAMES, for pyright, mypy and editors.
    from . import functors as functors
    from . import reference as reference
    from .dispatch.devices import DEVICES as DEVICES
    from .dispatch.devices import Device as Device
    from .dispatch.dispatch import Plan as Plan
    from .dispatch.functor_text import Functor as Functor
    from .dispatch.functor_text import FunctorError as FunctorError
    from .dispatch.functor_text import functor as functor
    from .dispatch.problem import Tile as Tile
    from .dispatch.strategies import STRATEGIES as STRATEGIES
    from .explore.experiment import Experiment as Experiment
    from .explore.experiment import experiment as experiment
    from .explore.explain import Explanation as Explanation
    from .explore.explain import explain as explain
    from .explore.trace import Trace as Trace
    from .explore.trace import trace as trace
    from .functional import layer_norm as layer_norm
    from .functional import layer_norm_backward as layer_norm_backward
    from .functional import layer_norm_forward as layer_norm_forward
    from .functional import rms_norm as rms_norm
    from .functional import rms_norm_backward as rms_norm_backward
    from .functional import rms_norm_forward as rms_norm_forward
    from .gpu.nvrtc import MissingLibraryError as MissingLibraryError
    from .linear.layer_norm_linear import layer_norm_linear as layer_norm_linear
    from .linear.layer_norm_linear import rms_norm_linear as rms_norm_linear
    from .linear.layers import Linear as Linear
    from .nn.enable import disable as disable
    from .nn.enable import enable as enable
    from .nn.enable import enabled as enabled
    from .nn.modules import LayerNorm as LayerNorm
    from .nn.modules import RMSNorm as RMSNorm
    from .nn.recipes import BlockScaling as BlockScaling
    from .nn.recipes import CurrentScaling as CurrentScaling
    from .nn.recipes import DelayedScaling as DelayedScaling
    from .nn.recipes import Format as Format
    from .nn.scales import fp8_autocast as fp8_autocast
    from .nn.scales import fp8_checkpoint_contexts as fp8_checkpoint_contexts
    from .nn.swap import SwappedNorms as SwappedNorms
    from .nn.swap import swap_norms as swap_norms
    from .norm.quantized import QuantizedTensor as QuantizedTensor
    from .norm.request import Backward as Backward
    from .norm.request import Forward as Forward
    from .norm.request import FusedBackward as FusedBackward
    from .norm.request import Launch as Launch
    from .norm.request import Quantize as Quantize
    from .parallel.module import LayerNormLinear as LayerNormLinear
    from .plans import plan as plan
    from .plans import use_tiles as use_tiles
    from .verify.check import check as check
    from .verify.check_function import check_function as check_function
    from .verify.check_functor import check_functor as check_functor
    from .verify.results import CheckResult as CheckResult

__version__ = "0.2.0"

# reference/ and cuda_src/ are beside the package in a checkout, and inside an installed package.
if not (Path(__file__).parent / "reference").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

# Module -> its public names: those of _WITHOUT_TORCH load where torch is not installed.
_WITHOUT_TORCH = {
    "functional": "layer_norm rms_norm layer_norm_forward rms_norm_forward"
    " layer_norm_backward rms_norm_backward",
    "norm.request": "Forward Backward FusedBackward Quantize Launch",
    "norm.quantized": "QuantizedTensor",
    "dispatch.devices": "DEVICES Device",
    "dispatch.dispatch": "Plan",
    "dispatch.functor_text": "functor Functor FunctorError",
    "plans": "plan use_tiles",
    "dispatch.problem": "Tile",
    "dispatch.strategies": "STRATEGIES",
    "verify.check": "check",
    "verify.check_function": "check_function",
    "verify.check_functor": "check_functor",
    "verify.results": "CheckResult",
    "explore.experiment": "experiment Experiment",
    "explore.explain": "explain Explanation",
    "explore.trace": "trace Trace",
    "gpu.nvrtc": "MissingLibraryError",
}
_WITH_TORCH = {
    "nn.enable": "enable disable enabled",
    "nn.modules": "LayerNorm RMSNorm",
    "nn.swap": "swap_norms SwappedNorms",
    "nn.scales": "fp8_autocast fp8_checkpoint_contexts",
    "nn.recipes": "Format DelayedScaling CurrentScaling BlockScaling",
    "linear.layer_norm_linear": "layer_norm_linear rms_norm_linear",
    "linear.layers": "Linear",
    "parallel.module": "LayerNormLinear",
}
_NAMES = {
    name: module
    for module, names in (_WITHOUT_TORCH | _WITH_TORCH).items()
    for name in names.split()
}

# Public names of earlier versions, and what to do instead.
_REMOVED = {
    "compile_passes": "torch.compile fuses torch's own norms; leave the call out",
    "CompilePasses": "torch.compile fuses torch's own norms; leave it out",
    "layer_norm_linear_forward": "multiply by weight.T with @, after layer_norm_forward",
    "layer_norm_linear_backward": "multiply by weight with @, before layer_norm_backward",
    "rms_norm_linear_forward": "multiply by weight.T with @, after rms_norm_forward",
    "rms_norm_linear_backward": "multiply by weight with @, before rms_norm_backward",
    "ProjectedForward": "multiply by weight.T with @, after layer_norm_forward",
    "ProjectedBackward": "multiply by weight with @, before layer_norm_backward",
    "FusedForward": "every explicit forward returns a Forward",
    "fp8_model_init": "torchao keeps weights in 8-bit floats; leave the call out",
    "MXFP8BlockScaling": "write cupynorm.BlockScaling, scales of 128 columns in float32",
}

# Public modules.
_MODULES = ("functors", "reference")

# `from cupynorm import *` works without torch.
__all__ = ["__version__", *_MODULES, *" ".join(_WITHOUT_TORCH.values()).split()]


if not TYPE_CHECKING:  # With __getattr__ a type checker would accept any misspelt name.

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name in _REMOVED:
            raise AttributeError(f"cupynorm.{name} was removed: {_REMOVED[name]}")
        if name not in _NAMES:
            raise AttributeError(f"module 'cupynorm' has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            from .gpu.nvrtc import MissingLibraryError

            raise MissingLibraryError(
                f"cupynorm.{name} needs torch, which is not installed: pip install torch"
            ) from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_MODULES, *_NAMES])
