"""The libraries that the benchmark measures, each through its own public API: cupynorm and its peers.

A peer is one row of PEERS. Its `make` is given one problem as torch tensors and returns the call that a user of that library
would write, forward() -> y or (y, sum); its backward is whatever torch.autograd.grad then runs. A y in 8-bit floats is a
QuantizedTensor or (data, scale_inv).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

from . import arrays, norm, nvrtc
from .bench_cells import EPS, EXTRAS, OURS, Cell
from .dtypes import ELEMENTS, FLOAT8S, compute_dtype
from .gradient_check import NORMS
from .problem import Tile, cols_of_scale
from .quantized import QuantizedTensor
from .strategies import STRATEGIES


class Tensors(NamedTuple):
    """A cell's arrays, of one library; None where the cell has none.

    x, dy, y, residual, dsum: [num_rows, num_cols]; weight, bias: [num_cols]. scale: one float32, where one is given;
    amax: one more, where it is recorded.
    """

    x: Any
    dy: Any
    y: Any
    weight: Any
    bias: Any
    residual: Any
    dsum: Any
    scale: Any = None
    amax: Any = None


class Runner(NamedTuple):
    """One library on one cell. call: enqueues the work on the current stream and returns the library's own result.

    outputs: what a call returned, as a dict of arrays: y, scale_inv and sum, dx, dweight and dbias, those that there are.
    before: restores what a call destroys; it runs ahead of each call and is not timed.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], dict[str, Any]] = dict
    before: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Peer:
    """How a library is used.

    package: as pip names it, for its version. make(cell, x, weight, bias, residual): forward, for torch tensors, of which one
    with the extra "scale" takes it, too. needs: modules that must be importable. norms: those it has. extras: norm -> those of
    EXTRAS that it offers. parameters: norm -> the dtype in which alone it takes weight and bias. has_backward: whether it has
    one. overwrites_dy: whether that one puts dx where dy was.
    """

    package: str
    make: Callable[..., Callable[[], Any]]
    needs: tuple[str, ...] = ()
    norms: tuple[str, ...] = NORMS
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    has_backward: bool = True
    overwrites_dy: bool = False


# One function for each library. eps is EPS everywhere.


def _cupynorm(
    cell: Cell, x: Any, weight: Any, bias: Any, residual: Any, scale: Any = None, amax: Any = None
) -> Callable:  # fmt: skip
    options: dict[str, Any] = {"residual": residual, "return_residual": True} if residual is not None else {}
    if cell.out_dtype:
        options["out_dtype"] = cell.out_dtype
    if cell.scale:
        options["scale"] = scale if cell.scale == "given" else cell.scale
    if cell.amax:
        options["amax"] = amax
    if cell.zero_centered:
        options["zero_centered_weight"] = True
    if cell.norm == "layer_norm":
        return partial(norm.layer_norm, x, (cell.num_cols,), weight, bias, EPS, **options)
    return partial(norm.rms_norm, x, (cell.num_cols,), weight, EPS, **options)


def _torch(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    import torch

    if cell.norm == "layer_norm" and residual is None:
        return partial(torch.nn.functional.layer_norm, x, (cell.num_cols,), weight, bias, EPS)
    return partial(_torch_expression(cell), x, weight, bias, residual)


def _torch_expression(cell: Cell) -> Callable:
    """What torch's users write: forward(x, weight, bias, residual, scale) -> y or (y, sum)."""
    import torch
    from torch.nn import functional

    centered, shape = cell.norm == "layer_norm", (cell.num_cols,)
    compute = getattr(torch, compute_dtype(cell.dtype).name)

    def forward(x: Any, weight: Any, bias: Any, residual: Any, scale: Any = None) -> Any:
        added = x if residual is None else x + residual
        # y of another dtype is rounded to that alone.
        taken = (added, weight, bias)
        if cell.out_dtype:
            taken = (each if each is None else each.to(compute) for each in taken)
        rows, weight, bias = taken
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
    """data and scale_inv of a matrix, and amax if it is asked for."""
    import torch
    from torch.nn import functional

    largest = FLOAT8S[cell.y].largest

    def as_float8(values: Any) -> Any:
        return values.clamp(-largest, largest).to(getattr(torch, cell.y))

    if cell.scale == "given":
        amax = (y.abs().amax().float().reshape(1),) if cell.amax else ()
        return as_float8(y * scale), 1 / scale, *amax
    if cell.scale == "tensor":
        scale_inv = (y.abs().amax() / largest).float().reshape(1)
        return as_float8(y / scale_inv), scale_inv
    cols = cols_of_scale(cell.scale, cell.num_cols)
    blocks = functional.pad(y, (0, -cell.num_cols % cols)).unflatten(-1, (-1, cols))
    scale_inv = kept = (blocks.abs().amax(-1) / largest).float()
    if cell.scale == "mx":
        exponent = torch.ceil(torch.log2(scale_inv))
        scale_inv, kept = torch.exp2(exponent), (exponent + 127).to(torch.uint8)
    return as_float8((blocks / scale_inv[..., None]).flatten(-2)[..., : cell.num_cols]), kept


def _torch_compile(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any, scale: Any = None) -> Callable:
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # torch's own words: else a backward cannot be run again
    torch.compiler.reset()  # each cell is compiled for its own shape, however many there were
    return partial(torch.compile(_torch_expression(cell), dynamic=False), x, weight, bias, residual, scale)


def _tutorial(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from . import tutorial

    return partial(tutorial.layer_norm, x, weight, bias, EPS)


def _liger(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from liger_kernel import ops

    if cell.norm == "layer_norm":
        return partial(ops.LigerLayerNormFunction.apply, x, weight, bias, EPS)
    # "gemma" rounds once, as all others do; "llama" rounds x_hat before it is multiplied.
    return partial(ops.LigerRMSNormFunction.apply, x, weight, EPS, float(cell.zero_centered), "gemma")


def _quack(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    import torch
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm

    if cell.norm == "rms_norm":
        out_dtype = getattr(torch, cell.out_dtype) if cell.out_dtype else None
        return partial(
            rmsnorm, x, weight, None, residual, out_dtype, None, EPS, residual is not None, float(cell.zero_centered)
        )
    if not x.requires_grad:
        return partial(layernorm_fwd, x, weight, bias, EPS)

    class LayerNorm(torch.autograd.Function):  # quack has both directions and leaves joining them to its user
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


def _cudnn(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from cudnn.ops import norm as cudnn_norm

    if cell.norm == "layer_norm":
        return partial(cudnn_norm.layer_norm, x, (cell.num_cols,), weight, bias, EPS)
    return partial(cudnn_norm.rms_norm, x, weight, None, EPS)


def _flash_attn(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from flash_attn.ops.triton import layer_norm as flash

    function = flash.layer_norm_fn if cell.norm == "layer_norm" else flash.rms_norm_fn
    return partial(function, x, weight, bias, residual=residual, eps=EPS, prenorm=residual is not None)


def _apex(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from apex.normalization import fused_layer_norm as apex

    if cell.norm == "layer_norm":
        return partial(apex.fused_layer_norm_affine, x, weight, bias, (cell.num_cols,), EPS)
    return partial(apex.fused_rms_norm_affine, x, weight, (cell.num_cols,), EPS)


def _apex_fast(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from apex.contrib.layer_norm import FastLayerNorm

    return partial(_with_parameters(FastLayerNorm(cell.num_cols, eps=EPS), weight, bias), x)


def _transformer_engine(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from transformer_engine import pytorch as engine

    module = engine.LayerNorm if cell.norm == "layer_norm" else engine.RMSNorm
    module = module(cell.num_cols, eps=EPS, dtype=weight.dtype, zero_centered_gamma=cell.zero_centered)
    return partial(_with_parameters(module, weight, bias), x)


def _with_parameters(module: Any, weight: Any, bias: Any) -> Any:
    module.weight = weight
    if bias is not None:
        module.bias = bias
    return module


def _flashinfer(cell: Cell, x: Any, weight: Any, bias: Any, residual: Any) -> Callable:
    from flashinfer import norm as flashinfer_norm

    if cell.norm == "layer_norm":
        return partial(flashinfer_norm.layernorm, x, weight, bias, EPS)
    return partial(flashinfer_norm.rmsnorm, x, weight, EPS)


# A row for each library. What a library lacks is not looked for elsewhere: `1 + weight` in a call is a kernel of its own.
_FLOAT32 = {"layer_norm": "float32"}
_RESIDUAL = {name: ("residual",) for name in NORMS}
_ZERO_CENTERED = {name: ("zero_centered",) for name in NORMS}
PEERS = {
    OURS: Peer("cupynorm", _cupynorm, extras=dict.fromkeys(NORMS, EXTRAS)),
    "torch": Peer("torch", _torch, extras=_RESIDUAL),
    "torch.compile": Peer(
        "torch", _torch_compile, ("triton",), extras=dict.fromkeys(NORMS, ("residual", "out_dtype", "scale", "amax"))
    ),
    "tutorial": Peer("triton", _tutorial, ("triton",), NORMS[:1]),
    "liger": Peer("liger-kernel", _liger, ("liger_kernel.ops",), extras={"rms_norm": ("zero_centered",)}, overwrites_dy=True),
    "quack": Peer(
        "quack-kernels",
        _quack,
        ("quack.rmsnorm",),
        extras={"rms_norm": ("residual", "zero_centered", "out_dtype")},
        parameters=_FLOAT32,
    ),
    "cudnn": Peer("nvidia-cudnn-frontend", _cudnn, ("cudnn.ops.norm.layernorm",), parameters=_FLOAT32),
    "flash_attn": Peer("flash-attn", _flash_attn, ("flash_attn.ops.triton.layer_norm",), extras=_RESIDUAL),
    "apex": Peer("apex", _apex, ("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda")),
    "apex_fast": Peer("apex", _apex_fast, ("apex.contrib.layer_norm",), NORMS[:1]),
    "transformer_engine": Peer(
        "transformer-engine", _transformer_engine, ("transformer_engine.pytorch",), extras=_ZERO_CENTERED
    ),
    "flashinfer": Peer("flashinfer-python", _flashinfer, ("flashinfer.norm",), parameters=_FLOAT32, has_backward=False),
}


@cache
def missing(name: str) -> str | None:
    """Why a peer cannot run here, in words, or None. Imports it."""
    if name == OURS:
        return None
    for module in ("torch", *PEERS[name].needs):
        try:
            importlib.import_module(module)
        except Exception as error:  # a library built for another torch or CUDA fails in its own way
            return f"{module} could not be imported ({first_line(error)})"
    torch = sys.modules["torch"]
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def version(name: str) -> str | None:
    """The installed version of a peer's package, None if it has none."""
    try:
        return importlib.metadata.version(PEERS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def fault(name: str, error: Exception) -> str:
    """What is shown for a peer that raised."""
    return f"{name} could not run: {first_line(error)}"


def refuse(name: str, cell: Cell, wants_gradients: bool) -> None:
    """Raises ValueError for what a peer has no function for."""
    peer = PEERS[name]
    if cell.norm not in peer.norms:
        raise ValueError(f"it has no {cell.norm}")
    if wants_gradients and not peer.has_backward:
        raise ValueError("it has no backward")
    for extra in cell.extras:
        if extra not in peer.extras.get(cell.norm, ()):
            raise ValueError(f"its {cell.norm} has no {extra}")


# Runners.


def _results(cell: Cell, made: Any) -> dict[str, Any]:
    """What a forward returned, by name."""
    y, *added = made if cell.residual else (made,)
    if cell.scale:
        if isinstance(y, QuantizedTensor):
            y = (y.data, y.scale_inv)
        return dict(zip(("y", "scale_inv", "amax"), y)) | dict(zip(("sum",), added))
    return {"y": y} | dict(zip(("sum",), added))


def bits(array: Any) -> Any:
    """The CuPy array in storage dtype that shares the memory of a CuPy array or torch tensor. ValueError: not contiguous."""
    cupy = nvrtc.cupy()
    dtype = arrays.dtype_name(array)
    if arrays.is_torch(array):
        torch = sys.modules["torch"]
        array = array.detach()
        carriers = {"bfloat16": torch.int16, **dict.fromkeys(FLOAT8S, torch.uint8)}
        array = cupy.from_dlpack(array.view(carriers[dtype]) if dtype in carriers else array)
    if not array.flags.c_contiguous:
        raise ValueError(f"an output has strides {array.strides} for shape {array.shape}; expected it to be contiguous")
    storage = ELEMENTS[dtype].storage if dtype in ELEMENTS else array.dtype
    return cupy.ndarray(array.shape, storage, memptr=array.data)


def _as_torch(array: Any) -> Any:
    """The torch tensor that shares the memory of a CuPy array."""
    import torch

    raw = bits(array)
    if arrays.dtype_name(array) == "bfloat16":
        return torch.from_dlpack(raw.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(raw)


def options_of(tile: str) -> dict[str, Any]:
    """strategy= and tile= of a tile as tune prints it: "block: pack_size 8, threads_per_row 128, packs_per_thread 8".
    Raises ValueError for other words."""
    strategy, colon, words = tile.partition(":")
    if strategy not in STRATEGIES or not colon:
        raise ValueError(f"tile is {tile!r}; expected one of {', '.join(STRATEGIES)}, a colon, and the fields of a tile")
    return {"strategy": strategy, "tile": Tile.of(words)}


def prepare(name: str, cell: Cell, tensors: Tensors) -> Runner:
    """A library, or cupynorm with a tile in words, on a cell's CuPy arrays. Raises ValueError, or whatever the library raises,
    if it cannot."""
    if name == OURS or name not in PEERS:
        return prepare_ours(cell, tensors, **({} if name == OURS else options_of(name)))
    return prepare_torch(name, cell, Tensors(*(None if array is None else _as_torch(array) for array in tensors)))


def prepare_torch(name: str, cell: Cell, tensors: Tensors, *, record: bool = False) -> Runner:
    """A library on a cell's torch tensors, through torch's autograd. record: also if the cell is of forward alone."""
    import torch

    peer = PEERS[name]
    wants_gradients = record or "backward" in cell.passes
    refuse(name, cell, wants_gradients)
    x, dy, _, weight, bias, residual, dsum, scale, _ = tensors
    dtype = getattr(torch, peer.parameters.get(cell.norm, cell.parameters))
    x, residual = (each if each is None else each.detach().requires_grad_(wants_gradients) for each in (x, residual))
    weight, bias = (
        each if each is None else torch.nn.Parameter(each.detach().to(dtype), wants_gradients) for each in (weight, bias)
    )
    inputs = {"dx": x, "dweight": weight, "dbias": bias, "dresidual": residual}
    inputs = {key: each for key, each in inputs.items() if each is not None}
    forward = peer.make(cell, x, weight, bias, residual, **({"scale": scale} if cell.scale else {}))
    results = partial(_results, cell)
    if cell.direction == "forward":
        return Runner(forward, results)
    before = None
    if peer.overwrites_dy:
        kept, dy = dy, dy.clone()
        before = partial(dy.copy_, kept)
    gradients = dy if residual is None else (dy, dsum)
    values = tuple(inputs.values())

    def named(made: Any) -> dict[str, Any]:
        return dict(zip(inputs, made))

    if cell.direction == "backward":
        made = forward()
        return Runner(lambda: torch.autograd.grad(made, values, gradients, retain_graph=True), named, before)

    def both() -> tuple[Any, Any]:
        made = forward()
        return made, torch.autograd.grad(made, values, gradients)

    return Runner(both, lambda made: results(made[0]) | named(made[1]), before)


def _forward_alone(cell: Cell, tensors: Tensors, **options: Any) -> Runner:
    """Our forward that nothing is to differentiate: it writes y, and no statistics. options: of cupynorm.layer_norm."""
    x, _, y, weight, bias, residual, _, scale, amax = tensors
    if not cell.scale:  # 8-bit floats are made by the call
        options["out"] = y
    call = partial(_cupynorm(cell, x, weight, bias, residual, scale, amax), **options)
    if not cell.amax:
        return Runner(call, partial(_results, cell))
    # Raised, and never lowered: each call begins at 0, as each step does.
    return Runner(call, lambda made: _results(cell, made) | {"amax": amax}, partial(amax.fill, 0))


def prepare_ours(cell: Cell, tensors: Tensors, **options: Any) -> Runner:
    """On CuPy arrays, which need no torch. options: strategy= and tile= of the one direction that is timed."""
    if cell.direction == "forward":
        return _forward_alone(cell, tensors, **options)
    x, dy, y, weight, bias, residual, dsum, _, _ = tensors
    centered = cell.norm == "layer_norm"
    gradients = ("dx", "dweight", "dbias") if centered else ("dx", "dweight")
    run_forward = norm.layer_norm_forward if centered else norm.rms_norm_forward
    run_backward = norm.layer_norm_backward if centered else norm.rms_norm_backward
    zero_centered = {"zero_centered_weight": True} if cell.zero_centered else {}

    def forward() -> norm.Forward:
        return run_forward(x, weight, bias, EPS, residual=residual, out_dtype=cell.out_dtype, out=y, **zero_centered)

    def backward(saved: norm.Forward) -> norm.Backward:
        statistics = (saved.mean, saved.rstd) if centered else (saved.rstd,)
        return run_backward(dy, saved.sum, *statistics, weight, dsum=dsum, gradients=gradients, **zero_centered, **options)

    def results(made: norm.Forward) -> dict[str, Any]:
        return {"y": made.y} if residual is None else {"y": made.y, "sum": made.sum}

    def named(made: norm.Backward) -> dict[str, Any]:
        return {name: getattr(made, name) for name in gradients}

    if cell.direction == "backward":
        saved = forward()
        return Runner(lambda: backward(saved), named)

    def both() -> tuple[norm.Forward, norm.Backward]:
        made = forward()
        return made, backward(made)

    return Runner(both, lambda made: results(made[0]) | named(made[1]))
