"""torch: the values and the gradients of a linear layer's call, outside autograd.

    y            normalized  x  weight
    dnormalized  dy          x  weight, transposed
    dweight      dy, transposed  x  normalized, transposed

In the dtype of the call or in 8-bit floats, on one rank or with the columns of y shared by several
(parallel/row.py has the other way). Backward needs x, mean and rstd. It makes the normalised tensor
again, in the kernel of the norm's gradients where these are wanted too, unless save_normalized
keeps it. Ranks exchange tensors beside products:

    forward    normalized is gathered with sequence_parallel
    backward   the gathering of normalized runs beside the product that makes its gradient;
               the reduction of that gradient runs beside the product that makes dweight

Every call of the kernels of cupynorm.norm from this folder is here. Formulas:
cupynorm.reference.layer_norm_linear, cupynorm.reference.parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..gpu import arrays
from ..nn import quantization
from ..nn.modes import name_of
from ..nn.quantization import Factor, multiply
from ..norm import calls
from ..norm.calls import FOR_STATISTICS, FOR_Y
from ..norm.quantized import OfNorm, QuantizedTensor, quantize
from ..norm.request import (
    Backward,
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Quantization,
)
from ..recipes import BLOCK_SIZE
from . import one_kernel
from .fp8_products import Quantizers, transposed_factor
from .operands import LinearOptions, Operands, as_rows, join, split_like, sum_rows
from .weight_gradients import WeightGradientSink, WeightProduct

_PRODUCT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of products of 8-bit floats


class Pending:
    """A tensor that a collective may still make.

    work: of torch.distributed, or None where there is nothing to wait for.
    keeps: the tensors that it reads.
    """

    def __init__(self, result: Tensor, work: Any = None, keeps: Tensor | None = None) -> None:
        self._result, self._work, self._keeps = result, work, keeps

    def wait(self) -> Tensor:
        """The result, on the present stream."""
        if self._work is not None:
            self._work.wait()
        self._work = self._keeps = None
        return self._result


class Saved(NamedTuple):
    """What a forward saves for backward besides weights and biases.

    x: what was normalised, [..., in_features].
    kept, kept_scale: the normalised tensor; None where backward makes it again. In 8 bits they are
        of its transposed copy on one rank. Where it is made again the scale is that of its data.
    weight, weight_scale: as dnormalized takes it, where that is not the joined parameter.
    """

    x: Tensor
    mean: Tensor | None
    rstd: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    kept: Tensor | None = None
    kept_scale: Tensor | None = None
    weight: Tensor | None = None
    weight_scale: Tensor | None = None

    @property
    def operands(self) -> Operands:
        """Those of a norm of x."""
        return Operands(self.x, None, self.norm_weight, self.norm_bias, (), ())


class Result(NamedTuple):
    """normalized: None unless requested. added: input + residual."""

    y: Tensor
    normalized: Tensor | None
    added: Tensor
    saved: Saved


class OutputGradient(NamedTuple):
    """The gradient of y.

    rows: as it came, [num_rows, out_features]. factor: the rows as `dnormalized` takes them.
    transposed: as `dweight` takes them. sums: over rows, [out_features], or None.
    """

    rows: Tensor
    factor: Factor | None
    transposed: Factor
    sums: Tensor | None


class Products:
    """What a call multiplies, and how. Factors without a scale are in the dtype of the options.

    options: of the call.
    sharding: how ranks share it.
    quantizers: of products in 8-bit floats, or None.
    fp8_grad: whether the gradient of the normalised tensor is rounded to 8 bits too.
    is_alone, is_plain: whether there is one rank, and no 8 bits either.

    Ranks gather 8-bit data, 1 byte an element, and the scales of blocks. One scale for all rows is
    the same on all ranks: DelayedScaling reduces amaxes when a step ends, CurrentScaling here.
    Where scales are of blocks, ranks gather values in float32 in backward, because its blocks go
    along columns. Data is not kept then.
    """

    def __init__(
        self,
        options: LinearOptions,
        sharding: OneRank | None = None,
        quantizers: Quantizers | None = None,
        *,
        fp8_grad: bool = False,
    ) -> None:
        self.options, self.sharding = options, sharding or ONE_RANK
        self.quantizers, self.fp8_grad = quantizers, fp8_grad
        self.in_blocks = quantizers is not None and quantizers.in_blocks
        self.is_alone = self.sharding.size == 1
        self.is_plain = self.is_alone and quantizers is None

    @property
    def value_dtype(self) -> torch.dtype:
        """Of the normalised values that `rows` takes: 8-bit floats are rounded from float32."""
        return self.options.dtype if self.quantizers is None else torch.float32

    # Forward.

    def rows(self, values: Tensor, *, transpose: bool = False) -> Factor | QuantizedTensor:
        """This rank's normalised values as a factor. In 8 bits with a transposed copy if asked."""
        quantizers = self.quantizers
        if quantizers is None:
            return Factor(values, None)
        rule, values = quantizers.rule, as_rows(values)
        if rule is None or not self.sharding.shares_rows:
            return quantizers.quantize("input", values, transpose=transpose)
        amax = quantization.amax_of(values).reshape(1)
        amax = self.sharding.all_reduce(amax, largest=True).wait()
        dtype, smallest = quantizers.dtype("input"), rule.smallest_amax
        scale = quantization.scale_of(
            amax, dtype, power_of_two=rule.power_of_two, smallest_amax=smallest
        )
        return quantization.quantize(values, scale, dtype)

    def fuses_norm(self, input: Tensor) -> bool:
        """Whether the norm's kernel writes 8 bits: by one scale that needs no other rank, on a GPU,
        if no other dtype is requested."""
        if self.quantizers is None or self.in_blocks or self.options.return_normalized:
            return False
        needs_ranks = self.quantizers.rule is not None and self.sharding.shares_rows
        return not (needs_ranks or arrays.on_host(input))

    def normalize(
        self, operands: Operands, given: QuantizedTensor | None, *, recorded: bool
    ) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """rows, values (or None), mean, rstd, input + residual."""
        options, quantizers, input = self.options, self.quantizers, operands.input
        if quantizers is not None and not options.has_norm:
            if given is None:
                rows = quantizers.quantize("input", as_rows(input), transpose=recorded)
            else:
                rows = quantizers.with_transposed(given) if recorded else given
            return rows, None, None, None, input
        transpose = self.is_alone and options.save_normalized
        if self.fuses_norm(input):
            how, scale, amax = quantizers.of_normalized(transpose=transpose)
            rows, mean, rstd = norm_in_8_bits(options, operands, how, scale, amax)
            return rows, None, mean, rstd, input
        purpose = FOR_STATISTICS if recorded else FOR_Y
        values, mean, rstd, added = norm(options, operands, self.value_dtype, purpose)
        return self.rows(values, transpose=transpose), values, mean, rstd, added

    def keep(self, rows: Any, *, recorded: bool) -> tuple[Tensor | None, Tensor | None]:
        """`kept` and `kept_scale` of Saved."""
        if not recorded:
            return None, None
        saves, quantizers = self.options.save_normalized, self.quantizers
        if quantizers is None:
            return (rows.data if saves else None), None
        if self.is_alone and saves:
            return transposed_factor(rows)[:2]
        data = rows.data if saves and not self.in_blocks else None
        return data, quantizers.scale_to_keep(rows)

    def gather(self, rows: Any) -> Callable[[], Any]:
        """Starts to gather rows. The function that is returned waits for those of all ranks."""
        sharding = self.sharding
        if not sharding.gathers_input:
            return lambda: rows
        data, scale_inv = sharding.gather_input(rows.data), Pending(rows.scale_inv)
        if self.in_blocks:
            scale_inv = sharding.gather_input(rows.scale_inv)
        blocks = (rows.block_rows, rows.block_cols)
        return lambda: Factor(data.wait(), scale_inv.wait(), *blocks)

    def weight(
        self, joined: Tensor, quantized: QuantizedTensor | None
    ) -> tuple[Any, tuple[Tensor | None, Tensor | None]]:
        """The weight as a factor, and `weight` and `weight_scale` of Saved."""
        if self.quantizers is None:
            cast = joined.to(self.options.dtype)
            return Factor(cast, None), (None if cast is joined else cast, None)
        return quantized, transposed_factor(quantized)[:2]

    def multiply(
        self, a: Any, b: Any, dtype: torch.dtype, bias: Tensor | None = None, **how: bool
    ) -> Tensor:
        """a b^T + bias. dtype, how: of 8-bit floats, as nn.quantization.multiply."""
        if self.quantizers is None:
            return functional.linear(a.data, b.data, bias)
        how.setdefault("is_exact", self.quantizers.is_exact)
        return multiply(a, b, dtype, bias=bias, **how)

    # Backward.

    def gradient(self, dy: Tensor, sum_dtype: torch.dtype | None) -> OutputGradient:
        """Of the rows of dy; with their sums if sum_dtype is given."""
        if self.quantizers is None:
            sums = None if sum_dtype is None else sum_rows(dy, sum_dtype)
            return OutputGradient(dy, Factor(dy, None), Factor(dy.t(), None), sums)
        (factor, transposed), sums = self.quantizers.quantize_gradient(dy, sum_dtype)
        return OutputGradient(dy, factor, transposed, sums)

    def dnormalized(self, dy: OutputGradient, saved: Saved, weights: Sequence[Tensor]) -> Tensor:
        """dy weight of this rank, [num_rows, in_features]."""
        if self.quantizers is not None:
            block_rows = BLOCK_SIZE if self.in_blocks else None
            weight = Factor(saved.weight, saved.weight_scale, block_rows)
        else:
            weight = Factor(self.joined(saved, weights).t(), None)
        return self.multiply(dy.factor, weight, self.options.dtype)

    def joined(self, saved: Saved, weights: Sequence[Tensor]) -> Tensor:
        """The weight in the dtype of products."""
        return join(weights).to(self.options.dtype) if saved.weight is None else saved.weight

    def round(self, dnormalized: Tensor) -> Tensor:
        """What the norm's backward takes of it: rounded to 8 bits by fp8_grad."""
        if not self.fp8_grad:
            return dnormalized
        return self.quantizers.quantize("grad_input", dnormalized).dequantize(self.options.dtype)

    def normalized_again(
        self, saved: Saved, make_values: Callable[[torch.dtype], Tensor]
    ) -> Callable[[], Factor]:
        """The normalised tensor of all ranks, transposed, as `dweight` takes it.

        On several ranks the gathering of it begins now; else it is made when it is called for.
        make_values: makes the values of this rank, [num_rows, in_features], in a dtype.
        """
        data, scale = saved.kept, saved.kept_scale
        quantizers, sharding = self.quantizers, self.sharding
        if self.is_alone:
            return partial(self._normalized_again_alone, saved, make_values)
        if quantizers is None or self.in_blocks:
            values = make_values(self.value_dtype) if data is None else data
            values = sharding.gather_input(as_rows(values))
            if quantizers is None:
                return lambda: Factor(values.wait().t(), None)
            return lambda: transposed_factor(
                quantizers.quantize("input", values.wait(), transpose=True)
            )
        if data is None and self.fuses_norm(saved.x) and sharding.mode != "row":
            how = Quantization(name_of(quantizers.dtype("input")))
            data = norm_in_8_bits(self.options, saved.operands, how, scale, None)[0].data
        elif data is None:
            values = make_values(self.value_dtype)
            data = quantization.quantize(values, scale, quantizers.dtype("input")).data
        gathered = sharding.gather_input(data)
        return lambda: Factor(quantization.transpose_data(gathered.wait()), 1.0 / scale)

    def _normalized_again_alone(
        self, saved: Saved, make_values: Callable[[torch.dtype], Tensor]
    ) -> Factor:
        data, scale, quantizers = saved.kept, saved.kept_scale, self.quantizers
        if quantizers is None:
            values = make_values(self.value_dtype) if data is None else data
            return Factor(as_rows(values).t(), None)
        if data is not None:
            return Factor(data, scale, *((1, BLOCK_SIZE) if self.in_blocks else ()))
        dtype = quantizers.dtype("input")
        if scale is not None and not arrays.on_host(saved.x):
            options, of_x = self.options, (saved.mean, saved.rstd)
            parameters = saved.norm_weight, saved.norm_bias, options.zero_centered_weight
            of_norm = OfNorm(options.centered, *parameters, *of_x)
            how = {"wants_data": False, "transpose": True, "of_norm": of_norm}
            made = quantize(as_rows(saved.x), name_of(dtype), scale, **how)
            return Factor(made.transposed, made.scale_inv)
        values = make_values(torch.float32)
        if scale is None:
            quantized = quantizers.quantize("input", values, transpose=True)
        else:
            quantized = quantization.quantize(values, scale, dtype, transpose=True)
        return transposed_factor(quantized)

    def weight_gradients(
        self,
        dy: OutputGradient | None,
        normalized: Factor | Callable[[], Factor] | None,
        parts: tuple[Sequence[Tensor], Sequence[Tensor]],
        wanted: Sequence[bool],
        sink: WeightGradientSink | None,
        reads: Mapping[str, Tensor | None] = {},
    ) -> list[Tensor | None]:
        """The gradients of *weights, *biases, or what autograd gets where a sink takes them.

        normalized: as normalized_again returns it, or its result; None where no weight's gradient
            is wanted. parts: weights and biases. reads: the tensors that a function reads, by name.
        """
        if isinstance(normalized, Factor):
            made = normalized
            reads, normalized = {"the normalised tensor": made.data}, lambda: made
        weights, biases = parts
        dweights, dbiases = [None] * len(weights), [None] * len(biases)
        if sink is not None and dy is None:
            sink.take_nothing()
        elif dy is not None:
            make_dweight = partial(self.dweight, dy.transposed, normalized)
            if sink is not None and self.quantizers is None:
                product = WeightProduct(dy.rows, lambda: normalized().data.t(), reads=reads)
                dweights, dbiases = sink.take(product, wanted)
            elif sink is not None:
                product = WeightProduct(dy.rows, make_dweight=make_dweight)
                dweights, dbiases = sink.take(product, wanted)
            else:
                if normalized is not None:
                    dweights = split_like(make_dweight(weights[0].dtype), weights)
                if dy.sums is not None:
                    dbiases = split_like(dy.sums, biases)
        return [*dweights, *dbiases]

    def dweight(self, dy: Factor, normalized: Callable[[], Factor], dtype: torch.dtype) -> Tensor:
        """[out_features, in_features], rounded once to a dtype; to float32 where 8-bit products do
        not come in that dtype."""
        dtype = dtype if dtype in _PRODUCT_DTYPES else torch.float32
        return self.multiply(dy, normalized(), dtype)


def forward(
    products: Products,
    operands: Operands,
    weight: QuantizedTensor | None = None,
    given: QuantizedTensor | None = None,
    *,
    recorded: bool,
) -> Result:
    """weight: quantised, of products in 8 bits. given: the input, where it came in 8 bits.

    recorded: whether there is a backward, for which tensors are saved.
    """
    options, sharding, input = products.options, products.sharding, operands.input
    joined, bias = join(operands.weights), join(operands.biases)
    if products.is_plain:
        purpose = FOR_STATISTICS if recorded else FOR_Y
        found = one_kernel.find(operands, options, purpose)
        if found is not None:
            y, mean, rstd, added = one_kernel.forward(
                found, operands, options, joined, bias, purpose=purpose
            )
            return Result(y, None, added, Saved(added, mean, rstd, *operands[2:4]))
    rows, values, mean, rstd, added = products.normalize(operands, given, recorded=recorded)
    factor, saved_weight = products.weight(joined, weight)
    bias = None if bias is None else bias.to(options.dtype)
    # The scales of an input that was given in 8 bits may be no powers of two.
    how = {} if given is None else {"is_exact": False}
    y = products.multiply(products.gather(rows)(), factor, options.dtype, bias, fast=True, **how)
    normalized = None
    if options.return_normalized:
        normalized = values.to(options.dtype)
        if sharding.gathered:
            normalized = sharding.gather_input(normalized).wait()
    shape = sharding.with_all_rows(input.shape) if sharding.gathers_input else input.shape
    if y.shape[:-1] != shape[:-1]:
        y = y.reshape(*shape[:-1], y.shape[-1])
    kept = products.keep(rows, recorded=recorded)
    return Result(
        y, normalized, added, Saved(added, mean, rstd, *operands[2:4], *kept, *saved_weight)
    )


class Incoming(NamedTuple):
    """Gradients of the results: y, the normalised tensor, the sum. None of what was not used."""

    dy: Tensor | None
    dnormalized: Tensor | None
    dsum: Tensor | None


def backward(
    products: Products,
    saved: Saved,
    parts: tuple[Sequence[Tensor], Sequence[Tensor]],
    incoming: Incoming,
    wanted: Sequence[bool],
    sink: WeightGradientSink | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of input, residual, norm_weight, norm_bias, *weights, *biases.

    parts: weights and biases. wanted: which gradients; the others are None.
    sink: takes the gradients of weights and biases instead.
    """
    options, sharding, (weights, biases) = products.options, products.sharding, parts
    dy, dnormalized, dsum = incoming
    wants_norm = (wanted[0] or wanted[1], wanted[2], wanted[3])
    wants_parts, is_alone = wanted[4:], products.is_alone

    # What waits for backward_dw() holds no weight.
    of_norm = saved._replace(weight=None, weight_scale=None)

    def make_values(dtype: torch.dtype) -> Tensor:
        return as_rows(norm(options, of_norm.operands, dtype, FOR_Y)[0])

    # Each tensor is freed before the next one is made, so that few exist at a time.
    gradient = again = reduction = None
    if dy is not None:
        if any(wants_parts[: len(weights)]):
            again = products.normalized_again(of_norm, make_values)
            if is_alone and products.quantizers is not None and sink is not None and sink.delays:
                again = again()  # now, because x may change before
        sum_dtype = biases[0].dtype if sink is None and any(wants_parts[len(weights) :]) else None
        gradient = products.gradient(as_rows(dy), sum_dtype)
    if any(wants_norm):
        if dnormalized is not None and sharding.gathered:
            # Each rank's copy of the gathered tensor is a tensor of its own: gradients are added.
            total = as_rows(dnormalized)
            if gradient is not None:
                total = total + products.dnormalized(gradient, saved, weights)
            reduction, dnormalized = sharding.reduce(total), None
        elif gradient is not None and dnormalized is not None and products.is_plain:
            weight = products.joined(saved, weights)
            total = as_rows(dnormalized).to(gradient.rows.dtype)
            reduction = Pending(torch.addmm(total, gradient.rows, weight))
            dnormalized = None
        elif gradient is not None:
            reduction = sharding.reduce(products.dnormalized(gradient, saved, weights))
    if gradient is not None:
        gradient = gradient._replace(factor=None)

    dparts: list[Tensor | None] = []
    if not is_alone:  # beside the reduction
        again = None if again is None else again()
        dparts = products.weight_gradients(gradient, again, parts, wants_parts, sink)
        gradient = again = None

    total, gradients, recomputed = dnormalized, [dsum, None, None], None
    if reduction is not None:
        total = reduction.wait()
        total = (total if dy is None else products.round(total)).reshape(saved.x.shape)
        total = total if dnormalized is None else total + dnormalized
    if total is not None and any(wants_norm):
        recompute = again is not None and products.is_plain and saved.kept is None
        overwrites = reduction is not None
        reduction = dnormalized = None
        *gradients, recomputed = norm_backward(
            options,
            total,
            saved,
            dsum,
            wanted=wants_norm,
            recompute=recompute,
            overwrite_dy=overwrites,
        )
    total = reduction = dnormalized = None
    if is_alone:
        reads = {
            "the input": saved.x,
            "the norm's weight": saved.norm_weight,
            "the norm's bias": saved.norm_bias,
        }
        if recomputed is not None:
            again = Factor(as_rows(recomputed).t(), None)
        elif saved.kept is not None:
            reads = {"the normalised tensor": saved.kept}
        dparts = products.weight_gradients(gradient, again, parts, wants_parts, sink, reads)
    else:
        gradients = sharding.reduce_norm(gradients)
    pairs = zip((gradients[0], *gradients, *dparts), wanted)
    return tuple(each if is_wanted else None for each, is_wanted in pairs)


class OneRank:
    """How a layer is shared: not at all. parallel/ranks.py has how several ranks share it.

    mode: None, "column" or "row". sequence_parallel: whether each rank has rows of its own of the
    input (column) or of y (row). gathers_input: whether the product needs those of all ranks.
    gathered: whether normalized is returned with the rows of all ranks. shares_rows: whether the
    matrix that a rank multiplies is a part of one that all ranks have.
    """

    mode: str | None = None
    size = 1
    sequence_parallel = gathers_input = gathered = shares_rows = False
    forward, backward = staticmethod(forward), staticmethod(backward)

    def gather_input(self, tensor: Tensor) -> Pending:
        """The rows of all ranks, where gathers_input."""
        return Pending(tensor)

    def reduce(self, tensor: Tensor) -> Pending:
        """The sum over ranks: this rank's rows of it, or all rows without sequence_parallel."""
        return Pending(tensor)


ONE_RANK = OneRank()


# The norm.


def forward_request(options: LinearOptions, operands: Operands, dtype: Any) -> ForwardRequest:
    """The norm of a call, in dtype."""
    input = operands.input
    return ForwardRequest(
        ForwardOperands(input, operands.norm_weight, operands.norm_bias, operands.residual),
        ForwardOptions(
            options.centered,
            tuple(input.shape[-1:]),
            options.eps,
            options.zero_centered_weight,
            dtype,
            launch=options.launch,
        ),
    )


def norm(
    options: LinearOptions, operands: Operands, dtype: Any, purpose: str = FOR_STATISTICS
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """normalized (in dtype), mean, rstd, input + residual. Without a norm: the input in dtype."""
    if not options.has_norm:
        return operands.input.to(dtype), None, None, operands.input
    return calls.forward(forward_request(options, operands, dtype), purpose)[:4]


def norm_of_rows(
    x: Tensor, centered: bool, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x_hat, in dtype, and rstd of a matrix, without a weight and a bias."""
    options = LinearOptions(centered, eps, False, False, False, None, None)
    operands = Operands(x, None, None, None, (), ())
    made = calls.forward(forward_request(options, operands, dtype))
    return made.y, made.rstd


def norm_backward(
    options: LinearOptions,
    dy: Tensor,
    saved: Saved,
    dsum: Tensor | None,
    *,
    wanted: Sequence[bool],
    recompute: bool = False,
    overwrite_dy: bool = False,
) -> tuple[Tensor | None, ...]:
    """dx, dnorm_weight, dnorm_bias (None where not wanted), and the normalised tensor or None.

    recompute: also write the normalised tensor again. overwrite_dy: dx may be written over dy.
    """
    x, mean, rstd, norm_weight, norm_bias, *_ = saved
    if not options.has_norm:
        return dy.to(x.dtype), None, None, x.to(dy.dtype) if recompute else None
    operands = BackwardOperands(dy, x, mean, rstd, norm_weight, dsum)
    if recompute:
        operands = operands._replace(bias=norm_bias)
    names = tuple(name for name, is_wanted in zip(Backward._fields, wanted) if is_wanted)
    gradients = calls.backward(
        BackwardRequest(
            operands,
            BackwardOptions(
                options.centered,
                tuple(x.shape[-1:]),
                options.zero_centered_weight,
                names,
                dbias_dtype=None if norm_bias is None else norm_bias.dtype,
                recompute=recompute,
                overwrite_dy=overwrite_dy,
                launch=options.launch,
            ),
        )
    )
    return *gradients[:3], gradients.y


def norm_in_8_bits(
    options: LinearOptions,
    operands: Operands,
    quantization: Quantization,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[QuantizedTensor, Tensor | None, Tensor]:
    """The normalised tensor in 8-bit floats as a matrix of rows; mean and rstd of the input.

    scale, amax: as for cupynorm.layer_norm.
    """
    leading, rows = operands.input.shape[:-1], as_rows(operands.input)
    request = forward_request(options, operands._replace(input=rows, residual=None), None)
    quantized, mean, rstd, *_ = calls.forward(
        ForwardRequest(
            request.operands._replace(scale=scale, amax=amax),
            request.options._replace(quantization=quantization),
        )
    )
    return quantized, None if mean is None else mean.reshape(leading), rstd.reshape(leading)
