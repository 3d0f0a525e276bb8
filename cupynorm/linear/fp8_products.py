"""torch: how a linear layer quantises its tensors inside cupynorm.fp8_autocast, and what it keeps.

The normalised tensor is quantised from float32, without a rounding to 16 bits. x, mean and rstd are
saved for backward, which quantises it again by the same scale. save_normalized keeps its transposed
8-bit copy, 1 byte an element. So does a layer without a norm, which does not keep its input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gpu import arrays
from ..nn import modes, quantization, scales
from ..nn.quantization import Factor
from ..nn.scales import Scales
from ..norm.quantized import QuantizedTensor
from ..norm.request import Quantization
from ..recipes import (
    BLOCK_SIZE,
    LARGEST_FLOAT32,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
)
from .operands import as_rows, join, sum_rows

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


class Quantizers:
    """How one layer quantises in a region.

    states: "forward" and "backward", kept by the layer, for DelayedScaling.
    keeps_amaxes: whether the amaxes of this forward are kept.
    forward_scale: used instead of the state's scales, by a forward that is run again.
    """

    def __init__(self, recipe: Recipe, states: dict[str, Scales], keeps_amaxes: bool) -> None:
        self.recipe, self.states, self.keeps_amaxes = recipe, states, keeps_amaxes
        self.forward_scale: Tensor | None = None

    def dtype(self, name: str) -> torch.dtype:
        return self.recipe.fp8_format.value[name in BACKWARD]

    def delayed(self, name: str) -> tuple[Tensor, Tensor | None] | None:
        """The scale of a tensor in this step of DelayedScaling, and where a kernel keeps its amax
        (None where it is not kept): views of one element, in float32. None with another recipe."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        if name in BACKWARD:
            state, at = self.states["backward"], BACKWARD.index(name)
            return (state.scale[at : at + 1], state.amax(at))
        state, at = self.states["forward"], FORWARD.index(name)
        scale = state.scale if self.forward_scale is None else self.forward_scale
        return (scale[at : at + 1], state.amax(at) if self.keeps_amaxes else None)

    def scale_to_keep(self, quantized: QuantizedTensor) -> Tensor | None:
        """A copy of the scale of the input, for quantising it again in backward.

        None for blocks. A current scale is the inverse of its inverse, which may differ in the last
        bit.
        """
        if isinstance(self.recipe, BlockScaling):
            return None
        delayed = self.delayed("input")
        if delayed is not None:
            return delayed[0].clone()
        return (1.0 / quantized.scale_inv).clamp(max=LARGEST_FLOAT32)

    @property
    def rule(self) -> quantization.Rule | None:
        """Of CurrentScaling; None with another recipe."""
        recipe = self.recipe
        if not isinstance(recipe, CurrentScaling):
            return None
        return quantization.Rule(recipe.amax_epsilon, recipe.power_of_two)

    @property
    def in_blocks(self) -> bool:
        """Whether there are scales of blocks."""
        return isinstance(self.recipe, BlockScaling)

    @property
    def is_exact(self) -> bool:
        """Whether bfloat16 holds the values of blocks: whether their scales are powers of two."""
        return not self.in_blocks or self.recipe.power_of_two

    def of_normalized(
        self, *, transpose: bool
    ) -> tuple[Quantization, Tensor | None, Tensor | None]:
        """How the norm's kernel quantises the normalised tensor, and its scale and amax if they are
        given; not for scales of blocks."""
        how = quantization.quantization_of(self.recipe, transpose=transpose)
        return how, *(self.delayed("input") or (None, None))

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
            return quantization.quantize(x, self.rule, dtype, transpose=transpose)
        # The output is quantised only where nothing is recorded, so no step has its amax.
        if name == "output":
            return quantization.quantize(x, quantization.Rule(), dtype, transpose=transpose)
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
    ) -> tuple[tuple[Factor, Factor], Tensor | None]:
        """dy, [num_rows, out_features], and its transposed copy, as the products of backward take
        them; and its sums over rows if sum_dtype is given."""
        if isinstance(self.recipe, BlockScaling) or sum_dtype is None:
            quantized = self.quantize("grad_output", dy, transpose=True)
            sums = None if sum_dtype is None else sum_rows(dy, sum_dtype)
        else:  # one kernel makes both
            scale, amax = self.delayed("grad_output") or (None, None)
            dtype = self.dtype("grad_output")
            scale = self.rule or scale
            quantized, sums = quantization.quantize_and_sum(dy, scale, dtype, sum_dtype, amax=amax)
        blocks = quantized.block_rows, quantized.block_cols
        data = Factor(quantized.data, quantized.scale_inv, *blocks)
        return (data, transposed_factor(quantized)), sums


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


def transposed_factor(quantized: QuantizedTensor) -> Factor:
    """Its transposed copy as a product takes it. One scale for all is that of the data too."""
    scale_inv = quantized.transposed_scale_inv
    scale_inv = quantized.scale_inv if scale_inv is None else scale_inv
    return Factor(quantized.transposed, scale_inv, quantized.block_rows, quantized.block_cols)


class LinearState(scales.Fp8State):
    """What a linear layer keeps of its calls inside cupynorm.fp8_autocast.

    weight: the quantised weight that is_first_microbatch shares, behind its recipe and
        modes.stream_of.
    """

    def __init__(self, kind: str, kept: dict[str, Scales] | None = None) -> None:
        extents = {"forward": len(FORWARD), "backward": len(BACKWARD)}
        super().__init__(kind, extents, kept, warns=True)
        self.weight: tuple[Recipe, tuple | None, QuantizedTensor] | None = None

    def quantizers(self, recipe: Recipe, device: torch.device, *, keeps_amaxes: bool) -> Quantizers:
        """Those of a call in a region with this recipe.

        keeps_amaxes: whether it adds its amaxes to the history of delayed scaling. Then the scales
        get the recipe's length.
        """
        if not isinstance(recipe, DelayedScaling):
            return Quantizers(recipe, self.scales, keeps_amaxes)
        for (name, extent), dtype in zip(self.extents.items(), recipe.fp8_format.value):
            dtypes = (dtype,) * extent
            self.scales[name] = scales.scales_for(
                self.scales.get(name), dtypes, recipe, device, keeps_amaxes=keeps_amaxes
            )
        # A backward of a pipeline that learns shapes would change them.
        states = copy.deepcopy(self.scales) if modes.learns_shapes() else self.scales
        return Quantizers(recipe, states, keeps_amaxes)

    def begin(self, region: scales.Region, recipe: Recipe, device: torch.device) -> Quantizers:
        """The quantizers of a call. Its scales are updated when the outermost region ends."""
        keeps = scales.keeps_amaxes()
        quantizers = self.quantizers(recipe, device, keeps_amaxes=keeps)
        if isinstance(recipe, DelayedScaling) and scales.runs:
            quantizers.forward_scale = scales.kept(quantizers.states["forward"].scale.clone)
        if keeps and isinstance(recipe, DelayedScaling):
            for name, at in (("forward", 0), ("backward", scales.OF_BACKWARD)):
                used = scales.UsedScales(self.scales[name], recipe, region.group)
                region.used[self.slot, at] = used
        return quantizers

    def quantized_weight(
        self,
        quantizers: Quantizers,
        weights: Sequence[Tensor],
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
        *,
        recorded: bool,
    ) -> QuantizedTensor:
        """The weight, quantised or cached.

        is_first_microbatch True: quantised and cached; False: from the cache, if recipe and stream
        are the same; None: quantised. recorded: whether backward needs its transposed copy.
        """
        is_first = is_first_microbatch
        stream = None if is_first is None else modes.stream_of(weights[0])
        recipe, cached_on, cached = self.weight or (None, None, None)
        if is_first is False and recipe == quantizers.recipe and cached_on == stream:
            if cached.transposed is not None or not recorded:
                return cached
        with torch.no_grad():
            quantized = quantizers.quantize("weight", join(weights), transpose=recorded)
            quantized.dtype = dtype
        if is_first is not None:
            self.weight = quantizers.recipe, stream, quantized
        return quantized

    def move(self, function: Callable[[Tensor], Tensor]) -> None:
        super().move(function)
        self.weight = None

    def load(self, packed: Any) -> None:
        super().load(packed)
        self.weight = None
