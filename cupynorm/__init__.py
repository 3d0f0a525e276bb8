"""LayerNorm and RMSNorm for NVIDIA GPUs.

The import loads neither torch nor CuPy and creates no CUDA context. Names load on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The names of _NAMES, for pyright, mypy and editors.
    from . import functors as functors
    from . import recipes as recipes
    from . import reference as reference
    from . import types as types
    from .dispatch.devices import DEVICES as DEVICES
    from .dispatch.functor_text import FunctorError as FunctorError
    from .dispatch.functor_text import functor as functor
    from .dispatch.problem import Tile as Tile
    from .dispatch.strategies import STRATEGIES as STRATEGIES
    from .explore.experiment import experiment as experiment
    from .explore.explain import explain as explain
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
    from .nn.scales import fp8_autocast as fp8_autocast
    from .nn.scales import fp8_checkpoint_contexts as fp8_checkpoint_contexts
    from .nn.swap import SwappedNorms as SwappedNorms
    from .nn.swap import swap_norms as swap_norms
    from .norm.request import Launch as Launch
    from .norm.request import Quantize as Quantize
    from .parallel.module import LayerNormLinear as LayerNormLinear
    from .plans import plan as plan
    from .plans import use_tiles as use_tiles
    from .verify.check import check as check
    from .verify.check_function import check_function as check_function
    from .verify.check_functor import check_functor as check_functor

__version__ = "0.2.0"

# reference/ and cuda_src/ are beside the package in a checkout, and inside an installed package.
if not (Path(__file__).parent / "reference").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

# Module -> its public names: those of _WITHOUT_TORCH load where torch is not installed.
_WITHOUT_TORCH = {
    "functional": "layer_norm rms_norm layer_norm_forward rms_norm_forward"
    " layer_norm_backward rms_norm_backward",
    "norm.request": "Quantize Launch",
    "dispatch.devices": "DEVICES",
    "dispatch.functor_text": "functor FunctorError",
    "plans": "plan use_tiles",
    "dispatch.problem": "Tile",
    "dispatch.strategies": "STRATEGIES",
    "verify.check": "check",
    "verify.check_function": "check_function",
    "verify.check_functor": "check_functor",
    "explore.experiment": "experiment",
    "explore.explain": "explain",
    "explore.trace": "trace",
    "gpu.nvrtc": "MissingLibraryError",
}
_WITH_TORCH = {
    "nn.enable": "enable disable enabled",
    "nn.modules": "LayerNorm RMSNorm",
    "nn.swap": "swap_norms SwappedNorms",
    "nn.scales": "fp8_autocast fp8_checkpoint_contexts",
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
    "MXFP8BlockScaling": "write cupynorm.recipes.BlockScaling, scales of 128 columns in float32",
}

# Public modules, and the names in them that stood at the top in 0.1.0.
_MODULES = ("functors", "recipes", "reference", "types")
_MOVED = dict.fromkeys("BlockScaling CurrentScaling DelayedScaling Format".split(), "recipes")
_MOVED |= dict.fromkeys(
    "Backward CheckResult Device Experiment Explanation Forward FusedBackward Functor Plan"
    " QuantizedTensor Trace".split(),
    "types",
)
_REMOVED |= {name: f"write cupynorm.{module}.{name}" for name, module in _MOVED.items()}

# `from cupynorm import *` works without torch, which recipes need.
__all__ = [
    "__version__",
    "functors",
    "reference",
    "types",
    *" ".join(_WITHOUT_TORCH.values()).split(),
]


if not TYPE_CHECKING:  # With __getattr__ a type checker would accept any misspelt name.

    def __getattr__(name: str) -> object:
        if name in _REMOVED:
            raise AttributeError(f"cupynorm.{name} was removed: {_REMOVED[name]}")
        if name not in _NAMES and name not in _MODULES:
            raise AttributeError(f"module 'cupynorm' has no attribute {name!r}")
        try:
            module = importlib.import_module(f".{_NAMES.get(name, name)}", __name__)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            from .gpu.nvrtc import MissingLibraryError

            raise MissingLibraryError(
                f"cupynorm.{name} needs torch, which is not installed: pip install torch"
            ) from error
        globals()[name] = value = module if name in _MODULES else getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_MODULES, *_NAMES])
