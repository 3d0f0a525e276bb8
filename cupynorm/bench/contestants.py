"""The contestants of `bench linear`: a norm and the linear layer after it, in several libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

FORMATS = ("bfloat16", "fp8")
EPS = 1e-5
GEMM = "gemm"


@dataclass(frozen=True)
class LinearCell:
    """One case. format: "bfloat16" or "fp8". passes: "forward" or "both"."""

    num_rows: int
    in_features: int
    out_features: int
    format: str
    passes: str

    def __str__(self) -> str:
        what = "forward" if self.passes == "forward" else "forward and backward"
        return f"{self.num_rows} x {self.in_features} x {self.out_features} {self.format}, {what}"

    @property
    def norm_bytes(self) -> int:
        """Bytes that the norm alone must move."""
        of_element = 4 if self.format == "bfloat16" else 3
        of_element += 0 if self.passes == "forward" else 6
        return self.num_rows * self.in_features * of_element


class Inputs(NamedTuple):
    """torch tensors in bfloat16: x, normalized [num_rows, in_features], dy, and the parameters."""

    x: Any
    normalized: Any
    dy: Any
    norm_weight: Any
    norm_bias: Any
    weight: Any
    bias: Any

    @property
    def leaves(self) -> tuple:
        """What y is differentiated for: x and the parameters."""
        return (self.x, *self[3:])


class Contestant(NamedTuple):
    """A library, or a way to use it.

    formats: that it has. make(cell, inputs): (forward() -> y, tensors that y is differentiated
    for).
    needs: a module that must be importable.
    """

    formats: tuple[str, ...]
    make: Callable[[LinearCell, Inputs], tuple[Callable[[], Any], Sequence[Any]]]
    needs: str | None = None


def _gemm(cell, inputs):
    from torch.nn import functional

    if cell.format == "bfloat16":
        tensors = (inputs.normalized, inputs.weight, inputs.bias)
        return partial(functional.linear, *tensors), tensors
    return _fp8_products(cell, inputs), ()


def _fp8_products(cell, inputs):
    """Products of tensors that are quantised already, those of the gradients after that of y."""
    from ..nn import quantization, recipes
    from ..nn.quantization import Factor, multiply

    def quantized(x, dtype=recipes.E4M3):
        x = x.detach()
        scale = quantization.scale_of(quantization.amax_of(x), dtype)
        return quantization.quantize(x, scale, dtype, transpose=cell.passes == "both")

    def transposed(x):
        return Factor(x.transposed, x.scale_inv)

    x, weight = quantized(inputs.normalized), quantized(inputs.weight)
    dy = quantized(inputs.dy, recipes.E5M2) if cell.passes == "both" else None
    bias, dtype = inputs.bias.detach(), inputs.x.dtype

    def run():
        y = multiply(x, weight, dtype, bias=bias, fast=True)
        if dy is not None:
            multiply(dy, transposed(weight), dtype)
            multiply(transposed(dy), transposed(x), dtype)
            inputs.dy.detach().sum(0)
        return y

    return run


def _torch_layers(inputs):
    from torch.nn import functional

    def forward(x, norm_weight, norm_bias, weight, bias):
        normalized = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, EPS)
        return functional.linear(normalized, weight, bias)

    return forward, inputs.leaves


def _torch(cell, inputs):
    forward, tensors = _torch_layers(inputs)
    return partial(forward, *tensors), tensors


def _torch_compile(cell, inputs):
    import torch

    torch.compiler.reset()  # each cell is compiled for its own shape
    forward, tensors = _torch_layers(inputs)
    return partial(torch.compile(forward, dynamic=False), *tensors), tensors


def _layer(cell, inputs, make, **options):
    options |= {"params_dtype": inputs.weight.dtype, "device": inputs.x.device}
    module = make(cell.in_features, cell.out_features, EPS, **options)
    module.layer_norm_weight, module.layer_norm_bias, module.weight, module.bias = inputs[3:]
    return module


def _cupynorm(cell, inputs, recipe=None, **options):
    from ..nn.recipes import DelayedScaling
    from ..nn.scales import fp8_autocast
    from ..parallel.module import LayerNormLinear

    module, differentiated = _layer(cell, inputs, LayerNormLinear, **options), inputs.leaves
    if cell.format == "bfloat16":
        return partial(module, inputs.x), differentiated
    recipe = recipe or DelayedScaling()
    return _in_fp8(cell, inputs, module, lambda: fp8_autocast(recipe=recipe)), differentiated


def _cupynorm_current(cell, inputs):
    from ..nn.recipes import CurrentScaling

    return _cupynorm(cell, inputs, CurrentScaling())


def _in_fp8(cell, inputs, module, region):
    """forward() in a region of fp8.

    Without gradients it reads a weight that is quantised already, as inference does. With them it
    quantises the weight in each call.
    """
    cached = cell.passes == "forward"

    def forward(first=False if cached else None):
        with region():
            return module(inputs.x, is_first_microbatch=first)

    if cached:
        forward(True)
    return forward


def _transformer_engine(cell, inputs):
    from transformer_engine import pytorch as engine

    module, differentiated = _layer(cell, inputs, engine.LayerNormLinear), inputs.leaves
    if cell.format == "bfloat16":
        return partial(module, inputs.x), differentiated
    return _in_fp8(cell, inputs, module, partial(engine.fp8_autocast, enabled=True)), differentiated


CONTESTANTS = {
    GEMM: Contestant(FORMATS, _gemm),
    "cupynorm": Contestant(FORMATS, _cupynorm),
    "cupynorm-saved": Contestant(FORMATS, partial(_cupynorm, save_normalized=True)),
    "cupynorm-kernel": Contestant(("bfloat16",), partial(_cupynorm, fused="kernel")),
    "cupynorm-plain": Contestant(("bfloat16",), partial(_cupynorm, fused="plain")),
    "cupynorm-current": Contestant(("fp8",), _cupynorm_current),
    "torch": Contestant(("bfloat16",), _torch),
    "torch.compile": Contestant(("bfloat16",), _torch_compile, "triton"),
    "transformer_engine": Contestant(FORMATS, _transformer_engine, "transformer_engine.pytorch"),
}
