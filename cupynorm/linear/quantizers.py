"""torch: how a linear layer quantises its tensors inside cupynorm.fp8_autocast, and its scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu import arrays
from ..nn import fp8, quantization
from ..nn.fp8 import Scales
from ..nn.modes import name_of
from ..nn.products import Factor
from ..nn.recipes import (
    BLOCK_SIZE,
    E4M3,
    LARGEST_FLOAT32,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
)
from ..norm.quantized import QuantizedTensor
from ..norm.request import Quantization
from .matrices import as_rows, sum_rows

# Tensors that have a scale, in TransformerEngine's order.
FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")
_FIELDS = (
    "data",
    "scale_inv",
    "dtype",
    "transposed",
    "transposed_scale_inv",
    "block_rows",
    "block_cols",
)


class Delayed(NamedTuple):
    """The scale of one tensor in one step of DelayedScaling: views of one element, in float32.

    value: of the layer's state, which changes at the end of the step.
    amax: where a kernel keeps the tensor's amax; None where the step's are not kept.
    """

    value: Tensor
    amax: Tensor | None


class QuantizedGradient(NamedTuple):
    """The gradient of y in 8-bit floats, as the two products of backward take it."""

    data: Factor
    transposed: Factor


class Quantizers:
    """How one layer quantises in a region.

    states: "forward" and "backward", kept by the layer, for DelayedScaling.
    keeps_amaxes: whether the amaxes of this forward are kept.
    forward_scale, backward_scale: used instead of the states' scales: by a forward that is run
    again, and by a second backward after the step of the first has ended.
    """

    def __init__(self, recipe: Recipe, states: dict[str, Scales], keeps_amaxes: bool) -> None:
        self.recipe, self.states, self.keeps_amaxes = recipe, states, keeps_amaxes
        self.forward_scale: Tensor | None = None
        self.backward_scale: Tensor | None = None

    def dtype(self, name: str) -> torch.dtype:
        return self.recipe.fp8_format.value[name in BACKWARD]

    def delayed(self, name: str) -> Delayed | None:
        """The scale of a tensor; None with another recipe."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        if name in BACKWARD:
            state, at = self.states["backward"], BACKWARD.index(name)
            if self.backward_scale is not None:
                return Delayed(self.backward_scale[at : at + 1], None)
            return Delayed(state.scale[at : at + 1], state.amax(at))
        state, at = self.states["forward"], FORWARD.index(name)
        scale = state.scale if self.forward_scale is None else self.forward_scale
        return Delayed(scale[at : at + 1], state.amax(at) if self.keeps_amaxes else None)

    def scale_to_keep(self, quantized: QuantizedTensor) -> Tensor | None:
        """A copy of the scale of the input, for quantising it again in backward.

        None for blocks. A current scale is the inverse of its inverse, which may differ in the last
        bit.
        """
        if isinstance(self.recipe, BlockScaling):
            return None
        delayed = self.delayed("input")
        if delayed is not None:
            return delayed.value.clone()
        return (1.0 / quantized.scale_inv).clamp(max=LARGEST_FLOAT32)

    @property
    def rule(self) -> quantization.Rule | None:
        """Of CurrentScaling; None with another recipe."""
        recipe = self.recipe
        if not isinstance(recipe, CurrentScaling):
            return None
        return quantization.Rule(recipe.amax_epsilon, recipe.power_of_two)

    @property
    def is_exact(self) -> bool:
        """Whether bfloat16 holds the values of blocks: whether their scales are powers of two."""
        return not isinstance(self.recipe, BlockScaling) or self.recipe.power_of_two

    def transposed_weight(self, data: Tensor, scale_inv: Tensor) -> Factor:
        """What a weight's transposed copy and its scales mean."""
        if isinstance(self.recipe, BlockScaling):
            return Factor(data, scale_inv, BLOCK_SIZE)
        return Factor(data, scale_inv)

    def of_normalized(
        self, *, transpose: bool
    ) -> tuple[Quantization, Tensor | None, Tensor | None]:
        """How the norm's kernel quantises the normalised tensor, and its scale and amax if they are
        given; not for scales of blocks."""
        quantization = Quantization(name_of(self.dtype("input")), transpose=transpose)
        delayed, recipe = self.delayed("input"), self.recipe
        if delayed is not None:
            return quantization, delayed.value, delayed.amax
        quantization = quantization._replace(
            scaling="tensor",
            power_of_two=recipe.power_of_two,
            smallest_amax=recipe.amax_epsilon,
        )
        return quantization, None, None

    def record(self, name: str, x: Tensor) -> None:
        """Records the amax of a matrix that is not quantised, for DelayedScaling."""
        _, amax = self.delayed(name)
        torch.maximum(amax, quantization.amax_of(x).reshape(1), out=amax)

    def quantize(self, name: str, x: Tensor, *, transpose: bool = False) -> QuantizedTensor:
        """A matrix in 8-bit floats. Its amax is recorded where the step is."""
        recipe, dtype = self.recipe, self.dtype(name)
        if isinstance(recipe, BlockScaling):
            return quantization.quantize_blocks(
                x,
                dtype,
                block_rows=BLOCK_SIZE if name == "weight" else 1,
                power_of_two=recipe.power_of_two,
                transpose=transpose,
            )
        if isinstance(recipe, CurrentScaling):
            return quantization.quantize_current(x, dtype, self.rule, transpose=transpose)
        # The output is quantised only where nothing is recorded, so no step has its amax.
        if name == "output":
            return quantization.quantize_current(x, dtype, transpose=transpose)
        scale, amax = self.delayed(name)
        return quantization.quantize(x, scale, dtype, amax=amax, transpose=transpose)

    def with_transposed(self, rows: QuantizedTensor) -> QuantizedTensor:
        """An input that was given in 8 bits, with its transposed copy.

        With scales of blocks that is quantised anew, from the values.
        """
        if rows.transposed is not None:
            return rows
        if rows.block_rows is None:
            return replaced(rows, transposed=quantization.transpose_data(rows.data))
        again = self.quantize("input", rows.dequantize(torch.float32), transpose=True)
        return replaced(
            rows, transposed=again.transposed, transposed_scale_inv=again.transposed_scale_inv
        )

    def quantize_gradient(
        self, dy: Tensor, sum_dtype: torch.dtype | None
    ) -> tuple[QuantizedGradient, Tensor | None]:
        """dy, [num_rows, out_features], in 8 bits; and its sums over rows if sum_dtype is given."""
        if isinstance(self.recipe, BlockScaling) or sum_dtype is None:
            quantized = self.quantize("grad_output", dy, transpose=True)
            sums = None if sum_dtype is None else sum_rows(dy, sum_dtype)
        else:  # one kernel makes both
            scale, amax = self.delayed("grad_output") or (None, None)
            dtype = self.dtype("grad_output")
            quantized, sums = quantization.quantize_and_sum(
                dy, dtype, sum_dtype, scale=scale, amax=amax, rule=self.rule
            )
        return QuantizedGradient(factor_of(quantized), transposed_factor(quantized)), sums


def fits(quantized: QuantizedTensor, recipe: Recipe) -> bool:
    """Whether a recipe can multiply what was quantised elsewhere, as an input."""
    if not arrays.is_torch(quantized.data) or quantized.data.dtype != recipe.fp8_format.value[0]:
        return False
    if not isinstance(recipe, BlockScaling):
        return quantized.block_rows is None
    return (
        (quantized.block_rows, quantized.block_cols) == (1, BLOCK_SIZE)
        and quantized.scale_inv.dtype == torch.float32
        and quantized.scale_inv.shape[:-1] == quantized.data.shape[:-1]
    )


def as_matrix(quantized: QuantizedTensor) -> QuantizedTensor:
    """An input that fits, as rows."""
    scale_inv = quantized.scale_inv
    scale_inv = scale_inv if quantized.block_rows is None else as_rows(scale_inv).contiguous()
    return replaced(quantized, data=as_rows(quantized.data), scale_inv=scale_inv)


def replaced(quantized: QuantizedTensor, **fields: Any) -> QuantizedTensor:
    """The same with other fields. Gradients of its values go nowhere."""
    return QuantizedTensor(**{name: getattr(quantized, name) for name in _FIELDS} | fields)


def factor_of(quantized: QuantizedTensor) -> Factor:
    """A matrix as a product takes it."""
    blocks = quantized.block_rows, quantized.block_cols
    return Factor(quantized.data, quantized.scale_inv, *blocks)


def transposed_factor(quantized: QuantizedTensor) -> Factor:
    """Its transposed copy as a product takes it. One scale for all is that of the data too."""
    scale_inv = quantized.transposed_scale_inv
    scale_inv = quantized.scale_inv if scale_inv is None else scale_inv
    return Factor(quantized.transposed, scale_inv, quantized.block_rows, quantized.block_cols)


def states_of(
    kept: dict[str, Scales], recipe: Recipe, device: torch.device, *, keeps_amaxes: bool
) -> dict[str, Scales]:
    """A layer's states for a recipe, on a device; made where there are none.

    keeps_amaxes: whether the step's are kept. Then they get the recipe's length.
    """
    if not isinstance(recipe, DelayedScaling):
        return kept
    names = {"forward": FORWARD, "backward": BACKWARD}
    for (name, tensors), dtype in zip(names.items(), recipe.fp8_format.value):
        dtypes = (dtype,) * len(tensors)
        kept[name] = fp8.scales_for(
            kept.get(name), dtypes, recipe, device, keeps_amaxes=keeps_amaxes
        )
    return kept


def states_from(
    loaded: dict[str, tuple[Tensor, Tensor]], kept: dict[str, Scales]
) -> dict[str, Scales]:
    """The states that fp8.unpack returned, in the tensors that a layer has kept.

    Raises ValueError if they are not those of a linear layer.
    """
    for name, (scale, _) in loaded.items():
        tensors = {"forward": FORWARD, "backward": BACKWARD}.get(name)
        if tensors is None or len(scale) != len(tensors):
            raise ValueError(
                f"the fp8 state has {name} of {len(scale)} tensors; expected forward of "
                f"{len(FORWARD)} and backward of {len(BACKWARD)}"
            )
    states = {}
    for name, (scale, amax_history) in loaded.items():
        dtypes = (E4M3,) * len(scale)
        states[name] = kept.get(name) or Scales(dtypes, len(amax_history), scale.device)
        states[name].load(scale, amax_history)
    return states
