"""What the benchmark measures beside each other: cupynorm and its peers, by their public APIs.

A peer is one row of PEERS; a program may add its own. `norm` and `linear` get a cell and torch
tensors and return the call that a user of the library would write. Backward is what
torch.autograd.grad then runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from .. import functional as ours
from .. import recipes, reference
from ..dispatch.problem import cols_of_scale
from ..dtypes import EIGHT_BITS, compute_dtype
from ..nn import quantization
from ..nn.scales import fp8_autocast
from ..norm.quantized import QuantizedTensor
from ..norm.request import Launch, Quantize
from ..parallel.module import LayerNormLinear
from .cells import EPS, FORMATS, GEMM, OURS, Cell, LinearCell
from .timer import Runner

_SAMPLED_ROWS = 16  # of a linear layer
_MOST_Y = 64.0  # room that a given scale leaves: y is 6 sigma of x_hat times 5 of weight at most
# Of y relative to its norm: one rounding of each factor and of y; in fp8 what the tests allow.
_ALLOWED = {"bfloat16": 2.0**-7, "fp8": 0.06}


# The tensors of a cell.


class Tensors(NamedTuple):
    """A cell's tensors; None for those that it does not have.

    x, dy, residual, dsum: [num_rows, num_cols]. weight, bias: [num_cols]. scale, amax: [1],
    float32.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    dy: torch.Tensor | None = None
    dsum: torch.Tensor | None = None


def normal_values(seed: int, device: str) -> Callable[..., torch.Tensor]:
    """normal(shape, dtype, center, spread): random values, fresh in each call."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: Any, dtype: str, center: float = 0.0, spread: float = 1.0) -> torch.Tensor:
        kind = getattr(torch, dtype)
        values = torch.empty(shape, dtype=kind, device=device)
        return values.normal_(center, spread, generator=generator)

    return normal


def tensors_of(cell: Cell, seed: int, device: str = "cuda") -> Tensors:
    """A cell's random tensors."""
    normal = normal_values(seed, device)
    matrix, vector, made = (cell.num_rows, cell.num_cols), (cell.num_cols,), {}
    made["x"] = normal(matrix, cell.dtype, 0.5, 2.0)
    made["weight"] = normal(vector, cell.parameters, 1.0, 0.5)
    centered = cell.norm == "layer_norm"
    made["bias"] = normal(vector, cell.parameters, 0.0, 0.5) if centered else None
    if cell.residual:
        made["residual"] = normal(matrix, cell.dtype)
    if cell.scale == "given":
        made["scale"] = torch.full((1,), EIGHT_BITS[cell.y].largest / _MOST_Y, device=device)
        made["amax"] = torch.zeros(1, device=device) if cell.amax else None
    if cell.direction == "backward":
        made["dy"] = normal(matrix, cell.y)
        made["dsum"] = normal(matrix, cell.dtype) if cell.residual else None
    return Tensors(**made)


def copy_of(num_bytes: int, x: torch.Tensor) -> Runner:
    """A device-to-device copy that reads half of so many bytes and writes the other half.

    x: random data to copy, over and over. Zeros would cost the memory less power.
    """
    data = x.detach().reshape(-1).view(torch.uint8)
    source = data.repeat(-(-num_bytes // 2 // len(data)))[: num_bytes // 2]
    target = torch.empty_like(source)
    return Runner(lambda: target.copy_(source))


def float64(tensor: torch.Tensor | None) -> Any:
    """The values of a tensor on the host; None for None."""
    return None if tensor is None else tensor.detach().double().cpu().numpy()


class Inputs(NamedTuple):
    """torch tensors in bfloat16: x, normalized [num_rows, in_features], dy, and the parameters."""

    x: Any
    normalized: Any
    dy: Any
    norm_weight: Any
    norm_bias: Any
    weight: Any
    bias: Any


@dataclass(frozen=True)
class Peer:
    """How a library is used.

    package: its name for pip, for its version.
    norm(cell, tensors): forward() -> y or (y, sum); a y of 8 bits is (data, scale_inv).
    linear(cell, inputs): (forward() -> y, tensors that y is differentiated for).
    needs: modules that must be importable. extras: those of Cell.extras that it offers, "rms_norm
    residual" for that norm alone; what it lacks is not emulated. float32_parameters: whether its
    layer_norm takes no other weight and bias.
    formats: of linear. overwrites_dy: whether its backward writes dx over dy.
    """

    package: str
    norm: Callable[[Cell, Tensors], Callable[[], Any]] | None = None
    linear: Callable[[LinearCell, Inputs], tuple[Callable[[], Any], Sequence[Any]]] | None = None
    needs: tuple[str, ...] = ()
    extras: Collection[str] = ()
    float32_parameters: bool = False
    formats: tuple[str, ...] = ("bfloat16",)
    overwrites_dy: bool = False


# Norms. eps is EPS everywhere.


def _ours(cell: Cell, tensors: Tensors) -> Callable[..., Any]:
    """cupynorm's forward call, which takes further options of layer_norm or rms_norm."""
    options: dict[str, Any] = {}
    if tensors.residual is not None:
        options |= {"residual": tensors.residual, "return_residual": True}
    if cell.scale:
        of_block = {"group_size": 64} if cell.scale == "block64" else {}
        scale = tensors.scale if cell.scale == "given" else cell.scale.removesuffix("64")
        quantize = Quantize(cell.out_dtype, scale, amax=tensors.amax, **of_block)
        options["out_dtype"] = quantize
    elif cell.out_dtype:
        options["out_dtype"] = cell.out_dtype
    operands = (tensors.x, (cell.num_cols,), tensors.weight)
    if cell.norm == "layer_norm":
        return partial(ours.layer_norm, *operands, tensors.bias, EPS, **options)
    return partial(ours.rms_norm, *operands, EPS, **options)


def _torch(cell: Cell, tensors: Tensors) -> Callable:
    return partial(_torch_expression(cell), *tensors[:5])


def _torch_compile(cell: Cell, tensors: Tensors) -> Callable:
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # else backward cannot run twice
    torch.compiler.reset()  # each cell is compiled for its own shape
    compiled = torch.compile(_torch_expression(cell), dynamic=False)
    return partial(compiled, *tensors[:5])


def _torch_expression(cell: Cell) -> Callable:
    """What users of torch write: forward(x, weight, bias, residual, scale) -> y or (y, sum)."""
    compute = getattr(torch, compute_dtype(cell.dtype).name)

    def forward(x: Any, weight: Any, bias: Any, residual: Any, scale: Any) -> Any:
        added = rows = x if residual is None else x + residual
        if cell.out_dtype:  # y is rounded once
            rows, weight = rows.to(compute), weight.to(compute)
            bias = bias if bias is None else bias.to(compute)
        if cell.norm == "layer_norm":
            y = functional.layer_norm(rows, (cell.num_cols,), weight, bias, EPS)
        else:
            y = functional.rms_norm(rows, (cell.num_cols,), weight, EPS)
        if cell.scale:
            y = _torch_quantize(cell, y, scale)
        elif cell.out_dtype:
            y = y.to(getattr(torch, cell.out_dtype))
        return y if residual is None else (y, added)

    return forward


def _torch_quantize(cell: Cell, y: Any, scale: Any) -> tuple[Any, ...]:
    """data and scale_inv of a matrix, and amax if the cell has it."""
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


def _liger(cell: Cell, tensors: Tensors) -> Callable:
    from liger_kernel import ops

    x, weight = tensors.x, tensors.weight
    if cell.norm == "layer_norm":
        return partial(ops.LigerLayerNormFunction.apply, x, weight, tensors.bias, EPS)
    # "gemma" rounds once, as all others do; "llama" rounds x_hat before the multiplication.
    return partial(ops.LigerRMSNormFunction.apply, x, weight, EPS, 0.0, "gemma")


def _quack(cell: Cell, tensors: Tensors) -> Callable:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm

    x, weight, bias, residual = tensors.x, tensors.weight, tensors.bias, tensors.residual
    if cell.norm == "rms_norm":
        dtypes = (getattr(torch, cell.out_dtype) if cell.out_dtype else None, None)
        return partial(rmsnorm, x, weight, None, residual, *dtypes, EPS, residual is not None)
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


# A norm and the linear layer after it.


def _gemm(cell: LinearCell, inputs: Inputs) -> tuple:
    """The product alone, on an input that is normalised, in fp8 also quantised, already."""
    if cell.format == "bfloat16":
        tensors = (inputs.normalized, inputs.weight, inputs.bias)
        return partial(functional.linear, *tensors), tensors
    both, bias, dtype = cell.direction == "both", inputs.bias.detach(), inputs.x.dtype

    def quantized(x, dtype=recipes.E4M3):
        scale = quantization.scale_of(quantization.amax_of(x.detach()), dtype)
        return quantization.quantize(x.detach(), scale, dtype, transpose=both)

    def transposed(x):
        return quantization.Factor(x.transposed, x.scale_inv)

    x, weight = quantized(inputs.normalized), quantized(inputs.weight)
    dy = quantized(inputs.dy, recipes.E5M2) if both else None

    def products():
        y = quantization.multiply(x, weight, dtype, bias=bias, fast=True)
        if both:
            quantization.multiply(dy, transposed(weight), dtype)
            quantization.multiply(transposed(dy), transposed(x), dtype)
            inputs.dy.detach().sum(0)
        return y

    return products, ()


def _torch_linear(cell: LinearCell, inputs: Inputs, compiled: bool = False) -> tuple:
    def forward(x, norm_weight, norm_bias, weight, bias):
        normalized = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, EPS)
        return functional.linear(normalized, weight, bias)

    if compiled:
        torch.compiler.reset()  # each cell is compiled for its own shape
        forward = torch.compile(forward, dynamic=False)
    leaves = (inputs.x, *inputs[3:])
    return partial(forward, *leaves), leaves


def _our_linear(cell: LinearCell, inputs: Inputs, recipe: str = "", **options: Any) -> tuple:
    """LayerNormLinear. In fp8 a forward alone reads a weight that is quantised already."""
    options |= {"params_dtype": inputs.weight.dtype, "device": inputs.x.device}
    layer = LayerNormLinear(cell.in_features, cell.out_features, EPS, **options)
    layer.layer_norm_weight, layer.layer_norm_bias, layer.weight, layer.bias = inputs[3:]
    leaves = (inputs.x, *inputs[3:])
    if cell.format == "bfloat16":
        return partial(layer, inputs.x), leaves
    scaling = getattr(recipes, recipe or "DelayedScaling")()
    is_cached = cell.direction == "forward"

    def forward(first: bool | None = False if is_cached else None) -> Any:
        with fp8_autocast(recipe=scaling):
            return layer(inputs.x, is_first_microbatch=first)

    if is_cached:
        forward(True)
    return forward, leaves


_ALL = {"residual", "out_dtype", "scale", "amax"}


def _our_layer(formats: tuple[str, ...], **options: Any) -> Peer:
    return Peer("cupynorm", linear=partial(_our_linear, **options), formats=formats)


PEERS = {
    OURS: Peer("cupynorm", _ours, _our_linear, extras=_ALL, formats=FORMATS),
    "torch": Peer("torch", _torch, _torch_linear, extras={"residual"}),
    "torch.compile": Peer(
        "torch", _torch_compile, partial(_torch_linear, compiled=True), ("triton",), _ALL
    ),
    "liger": Peer("liger-kernel", _liger, needs=("liger_kernel.ops",), overwrites_dy=True),
    "quack": Peer(
        "quack-kernels",
        _quack,
        needs=("quack.rmsnorm",),
        extras={"rms_norm residual", "rms_norm out_dtype"},
        float32_parameters=True,
    ),
    "cudnn": Peer(
        "nvidia-cudnn-frontend",
        _cudnn,
        needs=("cudnn.ops.norm.layernorm",),
        float32_parameters=True,
    ),
    GEMM: Peer("torch", linear=_gemm, formats=FORMATS),
    "cupynorm-saved": _our_layer(FORMATS, save_normalized=True),
    "cupynorm-kernel": _our_layer(FORMATS[:1], fused="kernel"),
    "cupynorm-plain": _our_layer(FORMATS[:1], fused="plain"),
    "cupynorm-current": _our_layer(FORMATS[1:], recipe="CurrentScaling"),
}


@cache
def missing(name: str) -> str | None:
    """Why a peer cannot run here, or None. Imports it."""
    if name == OURS:
        return None
    for module in PEERS[name].needs:
        try:
            importlib.import_module(module)
        except Exception as error:  # a library built for another torch or CUDA fails in its own way
            return f"{module} could not be imported ({first_line(error)})"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def version(name: str) -> str | None:
    """The installed version of a peer's package, None if it has none."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(PEERS[name].package)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# Runners.


def prepare(
    name: str, cell: Cell, tensors: Tensors, *, record: bool = False, launch: Launch | None = None
) -> Runner:
    """A library on a cell's tensors.

    record: whether autograd records a forward. launch: of cupynorm. Raises ValueError for what a
    library does not have, and what the library raises.
    """
    if cell.direction == "backward" and name == OURS:
        return _our_backward(cell, tensors, launch)
    peer = PEERS[name]
    for extra in sorted(cell.extras):
        if not {extra, f"{cell.norm} {extra}"} & set(peer.extras):
            raise ValueError(f"its {cell.norm} has no {extra}")
    record = record or cell.direction == "backward"
    is_float32 = peer.float32_parameters and cell.norm == "layer_norm"
    dtype = torch.float32 if is_float32 else getattr(torch, cell.parameters)
    leaves: dict[str, torch.Tensor] = {}
    for label in ("x", "weight", "bias", "residual"):
        tensor = getattr(tensors, label)
        if tensor is not None and label in ("weight", "bias"):
            leaves[label] = torch.nn.Parameter(tensor.detach().to(dtype), record)
        elif tensor is not None:
            leaves[label] = tensor.detach().requires_grad_(record)
    forward = peer.norm(cell, tensors._replace(**leaves))
    if launch is not None:
        forward = partial(forward, launch=launch)
    before = None
    if cell.direction == "forward":
        if cell.amax:  # a call only ever raises amax: it is 0 before each, as in a step of training
            before = tensors.amax.zero_
        return Runner(forward, partial(_results, cell, tensors.amax), before)
    dy = tensors.dy
    if peer.overwrites_dy:
        dy = dy.clone()
        before = partial(dy.copy_, tensors.dy)
    made, inputs = forward(), tuple(leaves.values())
    gradients = dy if tensors.residual is None else (dy, tensors.dsum)
    backward = partial(torch.autograd.grad, made, inputs, gradients, retain_graph=True)
    return Runner(backward, lambda result: {f"d{at}": d for at, d in zip(leaves, result)}, before)


def _results(cell: Cell, amax: torch.Tensor | None, result: Any) -> dict[str, torch.Tensor]:
    """The result of a forward, by name. amax: that a call writes, if it does not return one."""
    y, *added = result if cell.residual else (result,)
    if isinstance(y, QuantizedTensor):
        y = (y.data, y.scale_inv)
    named = {} if amax is None else {"amax": amax}
    named |= zip(("y", "scale_inv", "amax"), y if cell.scale else (y,))
    return named | dict(zip(("sum",), added))


def _our_backward(cell: Cell, tensors: Tensors, launch: Launch | None) -> Runner:
    """The explicit backward: autograd would choose its tile itself."""
    centered, weight = cell.norm == "layer_norm", tensors.weight
    forward = ours.layer_norm_forward if centered else ours.rms_norm_forward
    backward = ours.layer_norm_backward if centered else ours.rms_norm_backward
    given = {"residual": tensors.residual, "out_dtype": cell.out_dtype, "bias": tensors.bias}
    saved = forward(tensors.x, weight.shape, weight=weight, eps=EPS, **given)
    statistics = (saved.mean, saved.rstd) if centered else (saved.rstd,)
    gradients = ("dx", "dweight", *["dbias"] * centered)
    operands = (tensors.dy, saved.sum, weight.shape, *statistics, weight)
    call = partial(backward, *operands, launch=launch, dsum=tensors.dsum, gradients=gradients)
    return Runner(call, lambda result: {name: getattr(result, name) for name in gradients})


def inputs_of(cell: LinearCell, seed: int, device: str = "cuda") -> Inputs:
    """Random tensors. They require gradients where the cell has them."""
    recorded, size = cell.direction == "both", cell.in_features
    normal = partial(normal_values(seed, device), dtype="bfloat16")
    x = normal((cell.num_rows, size), center=0.5, spread=2.0)
    parameters = [normal((size,), center=each, spread=0.5) for each in (1.0, 0.0)]
    parameters += [normal((cell.out_features, size), spread=size**-0.5)]
    parameters += [normal((cell.out_features,))]
    normalized = functional.layer_norm(x, (size,), *parameters[:2], EPS)
    dy = normal((cell.num_rows, cell.out_features))
    x, normalized = x.requires_grad_(recorded), normalized.requires_grad_(recorded)
    return Inputs(x, normalized, dy, *(torch.nn.Parameter(each, recorded) for each in parameters))


def prepare_linear(name: str, cell: LinearCell, inputs: Inputs) -> Runner:
    """A library's norm and linear layer; the call returns y."""
    peer = PEERS[name]
    if cell.format not in peer.formats:
        raise ValueError(f"it has no norm and linear layer in {cell.format}")
    forward, leaves = peer.linear(cell, inputs)

    def call() -> torch.Tensor:
        with torch.set_grad_enabled(cell.direction == "both"):
            y = forward()
        if cell.direction == "both" and leaves:
            torch.autograd.grad(y, leaves, inputs.dy)
        return y

    call()  # delayed scales are right from the second step on
    return Runner(call)


def verify_linear(cell: LinearCell, inputs: Inputs, y: Any) -> tuple[float, str | None]:
    """(error of sampled rows of y in units of what is allowed, a sentence or None).

    The error is relative to the norm of the rows.
    """
    count = min(_SAMPLED_ROWS, cell.num_rows)
    rows = np.unique(np.linspace(0, cell.num_rows - 1, count).astype(int))
    x, got = float64(inputs.x[rows]), float64(y[rows])
    truth = reference.norm_linear(x, *map(float64, inputs[3:]), EPS).y
    error = float(np.linalg.norm(got - truth) / np.linalg.norm(truth) / _ALLOWED[cell.format])
    return error, None if error <= 1 else f"y is off by {error:.3g} of what is allowed"
