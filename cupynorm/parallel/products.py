"""torch: the products of a rank, in the dtype of the call or in 8-bit floats.

column.py and row.py say which values are multiplied, and what ranks exchange besides. The classes
here say how: each makes Rows of a rank's normalised values, gathers them where the ranks have
rows of their own, and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu import arrays
from ..linear import kernels
from ..linear.call import LinearOptions, Operands
from ..linear.fold import Folded
from ..linear.fp8 import QuantizedCall
from ..linear.matrices import join, split_like, sum_rows
from ..linear.quantizers import QuantizedGradient, transposed_factor
from ..linear.weight_gradients import WeightGradientSink, WeightProduct
from ..nn import quantization
from ..nn.dtypes import name_of
from ..nn.products import Factor, multiply
from ..nn.recipes import IN_BLOCKS
from ..norm.quantized_tensor import QuantizedTensor
from ..norm.request import Quantization
from . import overlap
from .ranks import Pending
from .sharding import Sharding


class Kept(NamedTuple):
    """What a forward keeps of its Rows.

    data: the Rows of this rank; None where backward makes them again. scale: of 8-bit floats.
    """

    data: Tensor | None
    scale: Tensor | None


class OutputGradient(NamedTuple):
    """The gradient of y.

    rows: as it came, [num_rows, out_features]. taken: as the products take it.
    sums: over rows, [out_features], or None.
    """

    rows: Tensor
    taken: Any
    sums: Tensor | None


class Products(Protocol):
    """value_dtype: of the normalised values, [num_rows, in_features], that `rows` takes."""

    options: LinearOptions
    sharding: Sharding
    value_dtype: torch.dtype

    def without_weight(self) -> Products:
        """For a backward, which has the weight among its saved tensors."""

    def fuses_norm(self, input: Tensor) -> bool:
        """Whether the norm's kernel writes Rows: then `normalize` and `normalize_again` exist."""

    def rows(self, values: Tensor) -> Any:
        """Rows of this rank."""

    def keep(self, rows: Any) -> Kept: ...

    def gather(self, rows: Any) -> Callable[[], Any]:
        """Starts to gather Rows. The function that is returned waits for those of all ranks."""

    def gather_again(
        self, make_values: Callable[[torch.dtype], Tensor], kept: Kept
    ) -> Callable[[], Any]:
        """The same in backward. The function returns the Rows as `dweight` takes them."""

    def weight(self, weights: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        """The weight for `project`, and the tensors that `dnormalized` needs besides weights."""

    def project(self, rows: Any, weight: Any, bias: Tensor | None) -> Tensor:
        """y of the Rows of all ranks, which it gathers."""

    def project_part(self, rows: Any, weight: Any) -> Pending:
        """The sum over ranks of the products of their columns: all rows of it, or this rank's."""

    def gradient(self, rows: Tensor, sum_dtype: torch.dtype | None) -> OutputGradient:
        """Of the rows of dy; with their sums if sum_dtype is given."""

    def dnormalized(
        self, dy: Any, weights: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Tensor: ...

    def dnormalized_of_ranks(
        self, dy: Any, weights: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Pending:
        """The same summed over ranks: all rows of it, or this rank's."""

    def round(self, dnormalized: Tensor) -> Tensor:
        """What the norm's backward takes of it: rounded to 8 bits by fp8_grad."""

    def dweight(self, dy: Any, rows: Any, dtype: torch.dtype) -> Tensor: ...

    def for_sink(self, dy: OutputGradient, rows: Any) -> WeightProduct:
        """The weight's gradient as a WeightGradientSink takes it."""


class FloatProducts:
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

    def project(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sharding = self.sharding
        if not sharding.cuts_gather(len(rows), weight):
            return functional.linear(self.gather(rows)(), weight, bias)
        if sharding.ranks.shares_memory and len(rows):
            y = overlap.gather_and_multiply(rows, weight, sharding.ranks)
            return y if bias is None else y + bias
        waits = [self.gather(chunk) for chunk in overlap.chunks_of(rows, 1)]
        return overlap.gather_in_chunks(
            waits, lambda chunk: functional.linear(chunk, weight, bias), sharding.ranks.size
        )

    def project_part(self, rows: Tensor, weight: Tensor) -> Pending:
        if self.sharding.cuts_scatter(len(rows), weight):
            return self._multiply_and_scatter(rows, weight.t())
        return self.sharding.reduce_output(functional.linear(rows, weight))

    def _multiply_and_scatter(self, a: Tensor, b: Tensor) -> Pending:
        ranks = self.sharding.ranks
        if ranks.shares_memory and len(a):
            return Pending(overlap.multiply_and_scatter(a, b, ranks))
        chunks = overlap.chunks_of(a, ranks.size)
        return overlap.reduce_in_chunks(chunks, lambda chunk: chunk @ b, ranks)

    def gradient(self, rows: Tensor, sum_dtype: torch.dtype | None) -> OutputGradient:
        return OutputGradient(rows, rows, None if sum_dtype is None else sum_rows(rows, sum_dtype))

    def dnormalized(self, dy: Tensor, weights: Sequence[Tensor], saved: Sequence[Tensor]) -> Tensor:
        return dy @ self.weight(weights)[0]

    def dnormalized_of_ranks(
        self, dy: Tensor, weights: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Pending:
        weight = self.weight(weights)[0]
        if self.sharding.cuts_scatter(len(dy), weight):
            return self._multiply_and_scatter(dy, weight)
        return self.sharding.reduce(dy @ weight)

    def round(self, dnormalized: Tensor) -> Tensor:
        return dnormalized

    def dweight(self, dy: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return dy.t() @ rows

    def for_sink(self, dy: OutputGradient, rows: Tensor) -> WeightProduct:
        return WeightProduct(dy.rows, lambda: rows, reads={"the normalised tensor": rows})


class QuantizedProducts:
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
        self._in_blocks = isinstance(call.quantizers.recipe, IN_BLOCKS)

    def without_weight(self) -> QuantizedProducts:
        return QuantizedProducts(self._call, self.sharding, None)

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
        return Kept(rows.data if is_kept else None, self.quantizers.scale_to_keep("input", rows))

    def gather(self, rows: QuantizedTensor | Factor) -> Callable[[], Factor]:
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

    def project(
        self, rows: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None
    ) -> Tensor:
        sharding = self.sharding
        if not sharding.cuts_gather(len(rows.data), weight.data):
            return self._project(self.gather(rows)(), weight, bias)
        if overlap.multiplies_scaled(rows, weight, sharding.ranks):
            dtype = self.options.dtype
            y = overlap.gather_and_multiply_scaled(rows, weight, dtype, sharding.ranks)
            return y if bias is None else y + bias
        waits = [self.gather(chunk) for chunk in self._chunks_of(rows, 1)]
        return overlap.gather_in_chunks(
            waits, lambda chunk: self._project(chunk, weight, bias), sharding.ranks.size
        )

    def _project(
        self, rows: QuantizedTensor | Factor, weight: QuantizedTensor, bias: Tensor | None
    ) -> Tensor:
        is_exact = self.quantizers.is_exact
        return multiply(rows, weight, self.options.dtype, bias=bias, fast=True, is_exact=is_exact)

    def project_part(self, rows: QuantizedTensor, weight: QuantizedTensor) -> Pending:
        if not self.sharding.cuts_scatter(len(rows.data), weight.data):
            return self.sharding.reduce_output(self._project(rows, weight, None))
        return self._multiply_and_scatter(rows, weight, fast=True)

    def _multiply_and_scatter(
        self, a: QuantizedTensor | Factor, b: QuantizedTensor | Factor, *, fast: bool
    ) -> Pending:
        ranks, dtype = self.sharding.ranks, self.options.dtype
        if overlap.multiplies_scaled(a, b, ranks):
            return Pending(overlap.multiply_scaled_and_scatter(a, b, dtype, ranks, fast=fast))
        is_exact = self.quantizers.is_exact
        return overlap.reduce_in_chunks(
            self._chunks_of(a, ranks.size),
            lambda chunk: multiply(chunk, b, dtype, fast=fast, is_exact=is_exact),
            ranks,
        )

    def _chunks_of(self, rows: QuantizedTensor | Factor, size: int) -> list[Factor]:
        bits = rows.data.view(torch.uint8)
        data = [each.view(rows.data.dtype) for each in overlap.chunks_of(bits, size)]
        scales = [rows.scale_inv] * len(data)
        if self._in_blocks:  # of which each row has its own
            scales = overlap.chunks_of(rows.scale_inv, size)
        blocks = rows.block_rows, rows.block_cols
        return [Factor(*each, *blocks) for each in zip(data, scales)]

    def gradient(self, rows: Tensor, sum_dtype: torch.dtype | None) -> OutputGradient:
        return OutputGradient(rows, *self.quantizers.quantize_gradient(rows, sum_dtype))

    def dnormalized(
        self, dy: QuantizedGradient, weights: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Tensor:
        return self.quantizers.dnormalized(dy.data, *saved, self.options.dtype)

    def dnormalized_of_ranks(
        self, dy: QuantizedGradient, weights: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Pending:
        sharding = self.sharding
        if not sharding.cuts_scatter(len(dy.data.data), saved[0]):
            return sharding.reduce(self.dnormalized(dy, weights, saved))
        weight = self.quantizers.transposed_weight(*saved)
        return self._multiply_and_scatter(dy.data, weight, fast=False)

    def round(self, dnormalized: Tensor) -> Tensor:
        if not self._call.quantize_gradient:
            return dnormalized
        return self.quantizers.quantize("grad_input", dnormalized).dequantize(self.options.dtype)

    def dweight(self, dy: QuantizedGradient, rows: Factor, dtype: torch.dtype) -> Tensor:
        return multiply(dy.transposed, rows, dtype, is_exact=self.quantizers.is_exact)

    def for_sink(self, dy: OutputGradient, rows: Factor) -> WeightProduct:
        def make_dweight(dtype: torch.dtype) -> Tensor:
            return self.dweight(dy.taken, rows, dtype)

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
            dweight = products.dweight(dy.taken, normalized, weights[0].dtype)
            dweights = split_like(dweight, weights)
        if dy.sums is not None:
            dbiases = split_like(dy.sums, biases)
    return [*dweights, *dbiases]


def joined_bias(biases: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The parts of the bias together, in a dtype; None of no parts."""
    bias = join(biases)
    return None if bias is None else bias.to(dtype)
