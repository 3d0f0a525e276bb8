"""The libraries that the benchmark measures, each by its own public API: cupynorm and its peers.

A peer is one row of PEERS. Its `make` gets a cell and torch tensors. It returns the call that a
user of the library would write, forward() -> y or (y, sum). Backward is what torch.autograd.grad
then runs. A y in 8-bit floats is a QuantizedTensor or (data, scale_inv).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from .. import functional
from ..check.cases import NORMS
from ..dtypes import EIGHT_BITS, compute_dtype
from ..norm.request import Quantize
from ..plan.problem import cols_of_scale
from .cells import EPS, EXTRAS, OURS, Cell
from .tensors import Tensors


@dataclass(frozen=True)
class Peer:
    """How a library is used.

    package: its name for pip, for its version. make(cell, tensors): the forward call, on torch
    tensors. needs: modules that must be importable. norms: those that it has.
    extras: norm -> those of EXTRAS that it offers. parameters: norm -> the only dtype that it takes
    for weight and bias. has_backward: whether it has one. overwrites_dy: whether its backward
    writes dx over dy.
    """

    package: str
    make: Callable[[Cell, Tensors], Callable[[], Any]]
    needs: tuple[str, ...] = ()
    norms: tuple[str, ...] = NORMS
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    has_backward: bool = True
    overwrites_dy: bool = False


# One function for each library. eps is EPS everywhere.


def call_of_ours(cell: Cell, tensors: Tensors) -> Callable[..., Any]:
    """cupynorm's forward call, which takes further options of layer_norm or rms_norm."""
    options: dict[str, Any] = {}
    if tensors.residual is not None:
        options = {"residual": tensors.residual, "return_residual": True}
    if cell.scale:
        of_block = {"group_size": 64} if cell.scale == "block64" else {}
        scale = tensors.scale if cell.scale == "given" else cell.scale.removesuffix("64")
        options["out_dtype"] = Quantize(cell.out_dtype, scale, amax=tensors.amax, **of_block)
    elif cell.out_dtype:
        options["out_dtype"] = cell.out_dtype
    if cell.zero_centered:
        options["zero_centered_weight"] = True
    x, shape, weight = tensors.x, (cell.num_cols,), tensors.weight
    if cell.norm == "layer_norm":
        return partial(functional.layer_norm, x, shape, weight, tensors.bias, EPS, **options)
    return partial(functional.rms_norm, x, shape, weight, EPS, **options)


def _torch(cell: Cell, tensors: Tensors) -> Callable:
    import torch

    x, weight, bias = tensors.x, tensors.weight, tensors.bias
    if cell.norm == "layer_norm" and tensors.residual is None:
        return partial(torch.nn.functional.layer_norm, x, (cell.num_cols,), weight, bias, EPS)
    return partial(_torch_expression(cell), x, weight, bias, tensors.residual)


def _torch_expression(cell: Cell) -> Callable:
    """What users of torch write: forward(x, weight, bias, residual, scale) -> y or (y, sum)."""
    import torch
    from torch.nn import functional

    centered, shape = cell.norm == "layer_norm", (cell.num_cols,)
    compute = getattr(torch, compute_dtype(cell.dtype).name)

    def forward(x: Any, weight: Any, bias: Any, residual: Any, scale: Any = None) -> Any:
        added = x if residual is None else x + residual
        # A y of another dtype is rounded once.
        operands = (added, weight, bias)
        if cell.out_dtype:
            operands = (each if each is None else each.to(compute) for each in operands)
        rows, weight, bias = operands
        if centered:
            y = functional.layer_norm(rows, shape, weight, bias, EPS)
        else:
            y = functional.rms_norm(rows, shape, weight, EPS)
        if cell.scale:
            y = _torch_quantize(cell, y, scale)
        elif cell.out_dtype:
            y = y.to(getattr(torch, cell.out_dtype))
        return y if residual is None else (y, added)

    return forward


def _torch_quantize(cell: Cell, y: Any, scale: Any) -> tuple[Any, Any]:
    """data and scale_inv of a matrix, and amax if the cell has it."""
    import torch
    from torch.nn import functional

    largest = EIGHT_BITS[cell.y].largest

    def in_8_bits(values: Any) -> Any:
        values = values.round() if cell.y == "int8" else values
        return values.clamp(-largest, largest).to(getattr(torch, cell.y))

    if cell.scale == "given":
        amax = (y.abs().amax().float().reshape(1),) if cell.amax else ()
        return in_8_bits(y * scale), 1 / scale, *amax
    if cell.scale == "tensor":
        scale_inv = (y.abs().amax() / largest).float().reshape(1)
        return in_8_bits(y / scale_inv), scale_inv
    cols = cols_of_scale(cell.scale, cell.num_cols)
    blocks = functional.pad(y, (0, -cell.num_cols % cols)).unflatten(-1, (-1, cols))
    scale_inv = (blocks.abs().amax(-1) / largest).float()
    return in_8_bits((blocks / scale_inv[..., None]).flatten(-2)[..., : cell.num_cols]), scale_inv


def _torch_compile(cell: Cell, tensors: Tensors) -> Callable:
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # else backward cannot run twice
    torch.compiler.reset()  # each cell is compiled for its own shape
    compiled = torch.compile(_torch_expression(cell), dynamic=False)
    x, weight, bias = tensors.x, tensors.weight, tensors.bias
    return partial(compiled, x, weight, bias, tensors.residual, tensors.scale)


def _tutorial(cell: Cell, tensors: Tensors) -> Callable:
    from . import triton_tutorial as tutorial

    return partial(tutorial.layer_norm, tensors.x, tensors.weight, tensors.bias, EPS)


def _liger(cell: Cell, tensors: Tensors) -> Callable:
    from liger_kernel import ops

    x, weight = tensors.x, tensors.weight
    if cell.norm == "layer_norm":
        return partial(ops.LigerLayerNormFunction.apply, x, weight, tensors.bias, EPS)
    # "gemma" rounds once, as all others do; "llama" rounds x_hat before the multiplication.
    offset = float(cell.zero_centered)
    return partial(ops.LigerRMSNormFunction.apply, x, weight, EPS, offset, "gemma")


def _quack(cell: Cell, tensors: Tensors) -> Callable:
    import torch
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm

    x, weight, bias, residual = tensors.x, tensors.weight, tensors.bias, tensors.residual
    if cell.norm == "rms_norm":
        out_dtype = getattr(torch, cell.out_dtype) if cell.out_dtype else None
        with_sum, offset = residual is not None, float(cell.zero_centered)
        dtypes = (out_dtype, None)
        return partial(rmsnorm, x, weight, None, residual, *dtypes, EPS, with_sum, offset)
    if not x.requires_grad:
        return partial(layernorm_fwd, x, weight, bias, EPS)

    class LayerNorm(torch.autograd.Function):  # quack leaves the autograd function to its user
        @staticmethod
        def forward(ctx, x, weight, bias):
            y, rstd, mean = layernorm_fwd(x, weight, bias, EPS, True, True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, weight, dy, rstd, mean)

    return partial(LayerNorm.apply, x, weight, bias)


def _cudnn(cell: Cell, tensors: Tensors) -> Callable:
    from cudnn.ops import norm as cudnn_norm

    x, weight, shape = tensors.x, tensors.weight, (cell.num_cols,)
    if cell.norm == "layer_norm":
        return partial(cudnn_norm.layer_norm, x, shape, weight, tensors.bias, EPS)
    return partial(cudnn_norm.rms_norm, x, weight, None, EPS)


def _flash_attn(cell: Cell, tensors: Tensors) -> Callable:
    from flash_attn.ops.triton import layer_norm as flash

    function = flash.layer_norm_fn if cell.norm == "layer_norm" else flash.rms_norm_fn
    options = {"residual": tensors.residual, "prenorm": tensors.residual is not None}
    return partial(function, tensors.x, tensors.weight, tensors.bias, eps=EPS, **options)


def _apex(cell: Cell, tensors: Tensors) -> Callable:
    from apex.normalization import fused_layer_norm as apex

    x, weight, shape = tensors.x, tensors.weight, (cell.num_cols,)
    if cell.norm == "layer_norm":
        return partial(apex.fused_layer_norm_affine, x, weight, tensors.bias, shape, EPS)
    return partial(apex.fused_rms_norm_affine, x, weight, shape, EPS)


def _apex_fast(cell: Cell, tensors: Tensors) -> Callable:
    from apex.contrib.layer_norm import FastLayerNorm

    return partial(_with_parameters(FastLayerNorm(cell.num_cols, eps=EPS), tensors), tensors.x)


def _transformer_engine(cell: Cell, tensors: Tensors) -> Callable:
    from transformer_engine import pytorch as engine

    make = engine.LayerNorm if cell.norm == "layer_norm" else engine.RMSNorm
    options = {"dtype": tensors.weight.dtype, "zero_centered_gamma": cell.zero_centered}
    return partial(_with_parameters(make(cell.num_cols, eps=EPS, **options), tensors), tensors.x)


def _with_parameters(module: Any, tensors: Tensors) -> Any:
    module.weight = tensors.weight
    if tensors.bias is not None:
        module.bias = tensors.bias
    return module


def _flashinfer(cell: Cell, tensors: Tensors) -> Callable:
    from flashinfer import norm as flashinfer_norm

    if cell.norm == "layer_norm":
        return partial(flashinfer_norm.layernorm, tensors.x, tensors.weight, tensors.bias, EPS)
    return partial(flashinfer_norm.rmsnorm, tensors.x, tensors.weight, EPS)


# What a library lacks is not emulated: `1 + weight` would be a kernel of its own.
_FLOAT32 = {"layer_norm": "float32"}
_RESIDUAL = {name: ("residual",) for name in NORMS}
_ZERO_CENTERED = {name: ("zero_centered",) for name in NORMS}
PEERS = {
    OURS: Peer("cupynorm", call_of_ours, extras=dict.fromkeys(NORMS, EXTRAS)),
    "torch": Peer("torch", _torch, extras=_RESIDUAL),
    "torch.compile": Peer(
        "torch",
        _torch_compile,
        ("triton",),
        extras=dict.fromkeys(NORMS, ("residual", "out_dtype", "scale", "amax")),
    ),
    "tutorial": Peer("triton", _tutorial, ("triton",), NORMS[:1]),
    "liger": Peer(
        "liger-kernel",
        _liger,
        ("liger_kernel.ops",),
        extras={"rms_norm": ("zero_centered",)},
        overwrites_dy=True,
    ),
    "quack": Peer(
        "quack-kernels",
        _quack,
        ("quack.rmsnorm",),
        extras={"rms_norm": ("residual", "zero_centered", "out_dtype")},
        parameters=_FLOAT32,
    ),
    "cudnn": Peer(
        "nvidia-cudnn-frontend", _cudnn, ("cudnn.ops.norm.layernorm",), parameters=_FLOAT32
    ),
    "flash_attn": Peer(
        "flash-attn", _flash_attn, ("flash_attn.ops.triton.layer_norm",), extras=_RESIDUAL
    ),
    "apex": Peer("apex", _apex, ("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda")),
    "apex_fast": Peer("apex", _apex_fast, ("apex.contrib.layer_norm",), NORMS[:1]),
    "transformer_engine": Peer(
        "transformer-engine",
        _transformer_engine,
        ("transformer_engine.pytorch",),
        extras=_ZERO_CENTERED,
    ),
    "flashinfer": Peer(
        "flashinfer-python",
        _flashinfer,
        ("flashinfer.norm",),
        parameters=_FLOAT32,
        has_backward=False,
    ),
}


@cache
def missing(name: str) -> str | None:
    """Why a peer cannot run here, or None. Imports it."""
    if name == OURS:
        return None
    why = not_importable(("torch", *PEERS[name].needs))
    if why:
        return why
    torch = sys.modules["torch"]
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def not_importable(modules: Iterable[str]) -> str | None:
    """Why one of them cannot be imported, or None."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a library built for another torch or CUDA fails in its own way
            return f"{module} could not be imported ({first_line(error)})"
    return None


def version(name: str) -> str | None:
    """The installed version of a peer's package, None if it has none."""
    try:
        return importlib.metadata.version(PEERS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def fault(name: str, error: Exception) -> str:
    """The sentence for a peer that raised an error."""
    return f"{name} could not run: {first_line(error)}"


def refuse(name: str, cell: Cell, wants_gradients: bool) -> None:
    """Raises ValueError for a cell for which a peer has no function."""
    peer = PEERS[name]
    if cell.norm not in peer.norms:
        raise ValueError(f"it has no {cell.norm}")
    if wants_gradients and not peer.has_backward:
        raise ValueError("it has no backward")
    for extra in cell.extras:
        if extra not in peer.extras.get(cell.norm, ()):
            raise ValueError(f"its {cell.norm} has no {extra}")
