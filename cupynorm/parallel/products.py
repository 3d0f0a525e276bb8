"""torch: the products of a rank, in the dtype of the call or in 8-bit floats.

column.py and row.py say which values are multiplied, and what ranks exchange besides. The classes
here say how: each makes Rows of a rank's normalised values, gathers them where the ranks have
rows of their own, and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu import arrays
from ..linear import kernels
from ..linear.call import LinearOptions, Operands
from ..linear.fp8 import QuantizedCall, call_of_backward
from ..linear.matrices import join, split_like, sum_rows
from ..linear.one_kernel import Folded
from ..linear.quantizers import transposed_factor
from ..linear.weight_gradients import WeightGradientSink, WeightProduct
from ..nn import quantization
from ..nn.modes import name_of
from ..nn.products import Factor, multiply
from ..nn.recipes import BlockScaling
from ..norm.quantized import QuantizedTensor
from ..norm.request import Quantization
from .ranks import Pending
from .sharding import Sharding

Matrix = QuantizedTensor | Factor  # of 8-bit floats, with its scales


class Kept(NamedTuple):
    """What a forward keeps of its Rows.

    data: the Rows of this rank; None where backward makes them again. scale: of 8-bit floats.
    """

    data: Tensor | None
    scale: Tensor | None


class OutputGradient(NamedTuple):
    """The gradient of y.

    rows: as it came, [num_rows, out_features]. factor: the rows as `dnormalized` takes them.
    transposed: as `dweight` takes them. sums: over rows, [out_features], or None.
    """

    rows: Tensor
    factor: Any
    transposed: Any
    sums: Tensor | None


class Products:
    """What both kinds of products share; the methods without a body are the kind's own.

    A factor is a tensor, or a matrix of 8-bit floats with its scales; it has .data.
    value_dtype: of the normalised values, [num_rows, in_features], that `rows` takes.
    """

    options: LinearOptions
    sharding: Sharding
    value_dtype: torch.dtype

    def dnormalized(
        self, dy: OutputGradient, weights: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Tensor:
        """dy weight of this rank. saved: the tensors of `weight`."""
        return self.multiply(dy.factor, self.transposed_weight(weights, saved), fast=False)

    def without_weight(self) -> Products:
        """For a backward, which has the weight among its saved tensors."""

    def of_backward(self, ctx: Any) -> Products:
        """For one of a node's backwards: fp8.call_of_backward."""

    def fuses_norm(self, input: Tensor) -> bool:
        """Whether the norm's kernel writes Rows: then `normalize` and `normalize_again` exist."""

    def rows(self, values: Tensor) -> Any:
        """Rows of this rank."""

    def keep(self, rows: Any) -> Kept:
        """What backward needs of Rows."""

    def gather(self, rows: Any) -> Callable[[], Any]:
        """Starts to gather Rows. The function that is returned waits for those of all ranks."""

    def gather_again(
        self, make_values: Callable[[torch.dtype], Tensor], kept: Kept
    ) -> Callable[[], Any]:
        """The same in backward. The function returns the Rows as `dweight` takes them."""

    def weight(self, weights: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        """The weight as a factor, and what `transposed_weight` needs besides weights."""

    def transposed_weight(self, weights: Sequence[Tensor], saved: Sequence[Tensor]) -> Any:
        """The factor [in_features, out_features]."""

    def multiply(self, a: Any, b: Any, bias: Tensor | None = None, *, fast: bool = True) -> Tensor:
        """a b^T + bias in the dtype of the call. fast: as for nn.products.multiply."""

    def gradient(self, rows: Tensor, sum_dtype: torch.dtype | None) -> OutputGradient:
        """Of the rows of dy; with their sums if sum_dtype is given."""

    def round(self, dnormalized: Tensor) -> Tensor:
        """What the norm's backward takes of it: rounded to 8 bits by fp8_grad."""

    def dweight(self, dy: OutputGradient, rows: Any, dtype: torch.dtype) -> Tensor:
        """[out_features, in_features]. rows: of gather_again."""

    def for_sink(self, dy: OutputGradient, rows: Any) -> WeightProduct:
        """The weight's gradient as a WeightGradientSink takes it."""


class FloatProducts(Products):
    """Products in the dtype of the options. Rows are tensors.

    folded: the parameters already folded, for `fused`.
    """

    def __init__(
        self, options: LinearOptions, sharding: Sharding, folded: Folded | None = None
    ) -> None:
        self.options, self.sharding, self.value_dtype = options, sharding, options.dtype
        self.folded = folded

    def without_weight(self) -> FloatProducts:
        return FloatProducts(self.options, self.sharding)

    def of_backward(self, ctx: Any) -> FloatProducts:
        return self

    def fuses_norm(self, input: Tensor) -> bool:
        return False

    def rows(self, values: Tensor) -> Tensor:
        return values

    def keep(self, rows: Tensor) -> Kept:
        return Kept(rows if self.options.save_normalized else None, None)

    def gather(self, rows: Tensor) -> Callable[[], Tensor]:
        return self.sharding.gather_input(rows).wait

    def gather_again(
        self, make_values: Callable[[torch.dtype], Tensor], kept: Kept
    ) -> Callable[[], Tensor]:
        return self.gather(make_values(self.value_dtype) if kept.data is None else kept.data)

    def weight(self, weights: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return join(weights).to(self.options.dtype), ()

    def transposed_weight(self, weights: Sequence[Tensor], saved: Sequence[Tensor]) -> Tensor:
        return self.weight(weights)[0].t()

    def multiply(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, *, fast: bool = True
    ) -> Tensor:
        return functional.linear(a, b, bias)

    def gradient(self, rows: Tensor, sum_dtype: torch.dtype | None) -> OutputGradient:
        sums = None if sum_dtype is None else sum_rows(rows, sum_dtype)
        return OutputGradient(rows, rows, rows.t(), sums)

    def round(self, dnormalized: Tensor) -> Tensor:
        return dnormalized

    def dweight(self, dy: OutputGradient, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return dy.transposed @ rows

    def for_sink(self, dy: OutputGradient, rows: Tensor) -> WeightProduct:
        return WeightProduct(dy.rows, lambda: rows, reads={"the normalised tensor": rows})


class QuantizedProducts(Products):
    """Products of 8-bit floats. Rows are QuantizedTensors of values in float32.

    Ranks gather data, 1 byte an element, and the scales of blocks. One scale for all rows is the
    same on all ranks: DelayedScaling reduces amaxes when a step ends, CurrentScaling here.
    Where scales are of blocks, backward gathers values in float32, because its blocks go along
    columns. Data is not kept then.

    weight: quantised, with its transposed copy where there is a backward; None in backward.
    """

    def __init__(
        self, call: QuantizedCall, sharding: Sharding, weight: QuantizedTensor | None
    ) -> None:
        self.options, self.sharding, self.value_dtype = call.options, sharding, torch.float32
        self.quantizers, self._call, self._weight = call.quantizers, call, weight
        self._in_blocks = isinstance(call.quantizers.recipe, BlockScaling)

    def without_weight(self) -> QuantizedProducts:
        return QuantizedProducts(self._call, self.sharding, None)

    def of_backward(self, ctx: Any) -> QuantizedProducts:
        return QuantizedProducts(call_of_backward(ctx, self._call), self.sharding, None)

    def fuses_norm(self, input: Tensor) -> bool:
        """On a GPU, for one scale that needs no other rank, and if nothing else is returned."""
        needs_amax_of_ranks = self.quantizers.rule is not None and self.sharding.shares_rows
        needs_values = self._in_blocks or needs_amax_of_ranks or self.options.return_normalized
        return not (needs_values or arrays.on_host(input))

    def normalize(self, operands: Operands) -> tuple[QuantizedTensor, Tensor | None, Tensor]:
        """Rows, mean and rstd."""
        how, scale, amax = self.quantizers.of_normalized(transpose=False)
        return kernels.forward_quantized(self.options, operands, how, scale, amax)

    def normalize_again(self, operands: Operands, kept: Kept) -> Kept:
        """With the data of the forward, by its scale."""
        how = Quantization(name_of(self.quantizers.dtype("input")))
        rows, _, _ = kernels.forward_quantized(self.options, operands, how, kept.scale, None)
        return kept._replace(data=rows.data)

    def rows(self, values: Tensor) -> QuantizedTensor:
        quantizers, rule = self.quantizers, self.quantizers.rule
        if rule is None or not self.sharding.shares_rows:
            return quantizers.quantize("input", values)
        amax = quantization.amax_of(values).reshape(1)
        amax = self.sharding.ranks.all_reduce(amax, largest=True).wait()
        dtype, smallest = quantizers.dtype("input"), rule.smallest_amax
        scale = quantization.scale_of(
            amax, dtype, power_of_two=rule.power_of_two, smallest_amax=smallest
        )
        return quantization.quantize(values, scale, dtype)

    def keep(self, rows: QuantizedTensor) -> Kept:
        is_kept = self.options.save_normalized and not self._in_blocks
        return Kept(rows.data if is_kept else None, self.quantizers.scale_to_keep(rows))

    def gather(self, rows: Matrix) -> Callable[[], Factor]:
        data, scale_inv = self.sharding.gather_input(rows.data), Pending(rows.scale_inv)
        if self._in_blocks:
            scale_inv = self.sharding.gather_input(rows.scale_inv)
        blocks = rows.block_rows, rows.block_cols
        return lambda: Factor(data.wait(), scale_inv.wait(), *blocks)

    def gather_again(
        self, make_values: Callable[[torch.dtype], Tensor], kept: Kept
    ) -> Callable[[], Factor]:
        if self._in_blocks:
            values, quantize = make_values(self.value_dtype), self.quantizers.quantize
            values = self.sharding.gather_input(values)
            return lambda: transposed_factor(quantize("input", values.wait(), transpose=True))
        data = kept.data
        if data is None:
            values, dtype = make_values(self.value_dtype), self.quantizers.dtype("input")
            data = quantization.quantize(values, kept.scale, dtype).data
        data = self.sharding.gather_input(data)
        return lambda: Factor(quantization.transpose_data(data.wait()), 1.0 / kept.scale)

    def weight(self, weights: Sequence[Tensor]) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
        weight = self._weight
        if weight.transposed is None:
            return weight, ()
        return weight, transposed_factor(weight)[:2]

    def transposed_weight(self, weights: Sequence[Tensor], saved: Sequence[Tensor]) -> Factor:
        return self.quantizers.transposed_weight(*saved)

    def multiply(
        self, a: Matrix, b: Matrix, bias: Tensor | None = None, *, fast: bool = True
    ) -> Tensor:
        is_exact = self.quantizers.is_exact
        return multiply(a, b, self.options.dtype, bias=bias, fast=fast, is_exact=is_exact)

    def gradient(self, rows: Tensor, sum_dtype: torch.dtype | None) -> OutputGradient:
        (factor, transposed), sums = self.quantizers.quantize_gradient(rows, sum_dtype)
        return OutputGradient(rows, factor, transposed, sums)

    def round(self, dnormalized: Tensor) -> Tensor:
        if not self._call.quantize_gradient:
            return dnormalized
        return self.quantizers.quantize("grad_input", dnormalized).dequantize(self.options.dtype)

    def dweight(self, dy: OutputGradient, rows: Factor, dtype: torch.dtype) -> Tensor:
        return multiply(dy.transposed, rows, dtype, is_exact=self.quantizers.is_exact)

    def for_sink(self, dy: OutputGradient, rows: Factor) -> WeightProduct:
        def make_dweight(dtype: torch.dtype) -> Tensor:
            return self.dweight(dy, rows, dtype)

        return WeightProduct(dy.rows, make_dweight=make_dweight)


def weight_gradients(
    products: Products,
    operands: Operands,
    dy: OutputGradient | None,
    normalized: Any,
    wanted: Sequence[bool],
    sink: WeightGradientSink | None,
) -> list[Tensor | None]:
    """The gradients of *weights, *biases, or what autograd gets where a sink takes them.

    normalized: the Rows of the product; None where no weight's gradient is wanted.
    """
    weights, biases = operands.weights, operands.biases
    if sink is not None and dy is not None:
        dweights, dbiases = sink.take(products.for_sink(dy, normalized), wanted)
        return [*dweights, *dbiases]
    dweights, dbiases = [None] * len(weights), [None] * len(biases)
    if sink is not None:
        sink.take_nothing()
    elif dy is not None:
        if normalized is not None:
            dweight = products.dweight(dy, normalized, weights[0].dtype)
            dweights = split_like(dweight, weights)
        if dy.sums is not None:
            dbiases = split_like(dy.sums, biases)
    return [*dweights, *dbiases]


def joined_bias(biases: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The parts of the bias together, in a dtype; None of no parts."""
    bias = join(biases)
    return None if bias is None else bias.to(dtype)
