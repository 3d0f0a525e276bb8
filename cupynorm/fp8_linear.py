"""torch: what LayerNormLinear does inside cupynorm.fp8_autocast. Its three products are of 8-bit floats:

    y            quantised normalized   x  quantised weight
    d normalized quantised dy           x  quantised weight, transposed
    dweight      quantised dy, transposed  x  quantised normalized, transposed

The normalised tensor is quantised from float32, never rounded to 16 bits before. As elsewhere x, mean and rstd wait for
backward, where it is made and quantised again, by the same scale; save_normalized keeps its transposed 8-bit copy, 1 byte an
element.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arrays, fp8, fused, norm, quantized, survey
from .calls import NOTHING_FUSED, Options, Quantization
from .fp8 import BlockScaling, CurrentScaling, DelayedScaling, QuantizedTensor, Scales

PRODUCTS = (torch.bfloat16, torch.float16, torch.float32)
# Tensors that have a scale, in the order of TransformerEngine's.
FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")


class Delayed(NamedTuple):
    """The scale of one tensor in one step of DelayedScaling, float32 of one element each. value: what the layer keeps, and
    changes at the end of the step. amax: where the tensor's amax is still to be recorded, by a kernel; or None."""

    value: Tensor
    amax: Tensor | None


class Quantizers:
    """How one layer quantises in a region. states: "forward" and "backward", kept by the layer, for DelayedScaling."""

    def __init__(self, recipe: fp8.Recipe, states: dict[str, Scales], is_recorded: bool) -> None:
        self.recipe, self.states, self.is_recorded = recipe, states, is_recorded

    def dtype(self, name: str) -> torch.dtype:
        return self.recipe.fp8_format.value[name in BACKWARD]

    def delayed(self, name: str) -> Delayed | None:
        """None of another recipe."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        names = BACKWARD if name in BACKWARD else FORWARD
        state, at = self.states["backward" if name in BACKWARD else "forward"], names.index(name)
        return Delayed(state.scale[at : at + 1], state.amax(at) if self.is_recorded else None)

    def scale_to_keep(self, name: str, made: QuantizedTensor) -> Tensor | None:
        """By which a tensor was quantised, and is again in backward, before which the step ends; None of blocks. A current
        scale is the inverse of its inverse, which may differ in the last place."""
        if isinstance(self.recipe, BlockScaling):
            return None
        delayed = self.delayed(name)
        if delayed is not None:
            return delayed.value.clone()
        return (1.0 / made.scale_inv).clamp(max=fp8.LARGEST_FLOAT32)

    @property
    def rule(self) -> fp8.Rule | None:
        """Of CurrentScaling."""
        recipe = self.recipe
        return fp8.Rule(recipe.amax_epsilon, recipe.power_of_two) if isinstance(recipe, CurrentScaling) else None

    @property
    def is_exact(self) -> bool:
        """Whether bfloat16 holds the values of blocks: their scales are powers of two."""
        return not isinstance(self.recipe, BlockScaling) or self.recipe.power_of_two

    def quantize(self, name: str, x: Tensor, *, transpose: bool = False) -> QuantizedTensor:
        """A matrix, whose amax is recorded where it is to be."""
        recipe, dtype = self.recipe, self.dtype(name)
        if isinstance(recipe, BlockScaling):
            block_rows = fp8.BLOCK_SIZE if name == "weight" else 1
            return fp8.quantize_blocks(
                x, dtype, block_rows=block_rows, power_of_two=recipe.power_of_two, transpose=transpose
            )  # fmt: skip
        if isinstance(recipe, CurrentScaling):
            return fp8.quantize_current(x, dtype, self.rule, transpose=transpose)
        if name == "output":  # it is asked for where nothing is recorded: no step has left an amax of it
            return fp8.quantize_current(x, dtype, transpose=transpose)
        scale, amax = self.delayed(name)
        return fp8.quantize(x, scale, dtype, amax=amax, transpose=transpose)

    def quantize_gradient(self, dy: Tensor, sum_dtype: torch.dtype | None) -> tuple[QuantizedTensor, Tensor | None]:
        """dy and its transposed copy; and its sums over rows in sum_dtype, where it is given and one reading makes both."""
        if isinstance(self.recipe, BlockScaling) or sum_dtype is None:
            return self.quantize("grad_output", dy, transpose=True), None
        scale, amax = self.delayed("grad_output") or (None, None)
        return fp8.quantize_and_sum(dy, self.dtype("grad_output"), sum_dtype, scale=scale, amax=amax, rule=self.rule)


def states_of(kept: dict[str, Scales], recipe: fp8.Recipe, device: torch.device, records: bool) -> dict[str, Scales]:
    """A layer's states for a recipe, on a device: made where there are none, and, where a step is recorded, as long as the
    recipe says."""
    if not isinstance(recipe, DelayedScaling):
        return kept
    for name, tensors, dtype in zip(("forward", "backward"), (FORWARD, BACKWARD), recipe.fp8_format.value):
        kept[name] = fp8.scales_for(kept.get(name), (dtype,) * len(tensors), recipe, device, records)
    return kept


def states_from(loaded: dict[str, tuple[Tensor, Tensor]], kept: dict[str, Scales]) -> dict[str, Scales]:
    """The states of cupynorm.fp8.unpack, in place of those that a layer has kept. ValueError if they are not those of a linear
    layer."""
    for name, (scale, _) in loaded.items():
        tensors = {"forward": FORWARD, "backward": BACKWARD}.get(name)
        if tensors is None or len(scale) != len(tensors):
            raise ValueError(
                f"the fp8 state has {name} of {len(scale)} tensors; expected forward of {len(FORWARD)} and "
                f"backward of {len(BACKWARD)}"
            )
    states = {}
    for name, (scale, amax_history) in loaded.items():
        states[name] = kept.get(name) or Scales((fp8.E4M3,) * len(scale), len(amax_history), scale.device)
        states[name].load(scale, amax_history)
    return states


class Call(NamedTuple):
    """What a call depends on besides its tensors. normalize, of_norm: the norm in float32 and its gradients,
    of cupynorm.linear."""

    normalize: Callable[..., tuple]
    of_norm: Callable[..., Sequence[Tensor | None]]
    centered: bool
    eps: float | None
    zero_centered_weight: bool
    options: Options
    dtype: torch.dtype
    return_normalized: bool
    save_normalized: bool
    quantizers: Quantizers
    quantize_gradient: bool
    group: Any


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor [..., num_cols] as [num_rows, num_cols], even where one of them is 0."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def sum_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_cols]: the sums over rows of a matrix, rounded once: on a GPU by a kernel whose scratch memory is small."""
    if arrays.on_host(rows) or rows.stride(-1) != 1:
        return rows.sum(0, dtype=dtype)
    return survey.sum_rows(rows, _name(dtype))


class Normalized(NamedTuple):
    """The normalised tensor. rows: in 8 bits, as a matrix. values: in float32, None where nobody asked for them."""

    rows: QuantizedTensor
    values: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def normalize(call: Call, input: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> Normalized:
    """By one kernel where one scale is for all: it writes 8 bits."""
    quantizers = call.quantizers
    if arrays.on_host(input) or isinstance(quantizers.recipe, BlockScaling) or call.return_normalized:
        values, mean, rstd, _ = call.normalize(input, norm_weight, norm_bias)
        rows = as_rows(values)
        made = quantizers.quantize("input", rows, transpose=call.save_normalized)
        return Normalized(made, values, mean, rstd)
    how = Quantization(_name(quantizers.dtype("input")), transpose=call.save_normalized)
    delayed = quantizers.delayed("input")
    if delayed is None:
        recipe = quantizers.recipe
        how = how._replace(scaling="tensor", power_of_two=recipe.power_of_two, smallest_amax=recipe.amax_epsilon)
    else:
        how = how._replace(scale=delayed.value, amax=delayed.amax)
    prepared, given = fused.prepare_forward(
        call.centered, as_rows(input), tuple(input.shape[-1:]), norm_weight, norm_bias, call.eps, None,
        call.zero_centered_weight, None, None, call.options, NOTHING_FUSED._replace(quantization=how), norm.FOR_STATISTICS,
    )  # fmt: skip
    made, mean, rstd, *_ = prepared.run(*given)
    leading = input.shape[:-1]
    mean, rstd = None if mean is None else mean.reshape(leading), rstd.reshape(leading)
    return Normalized(made, None, mean, rstd)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def normalize_again(
    call: Call, input: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    scale: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The transposed 8-bit copy of the normalised tensor and its scale_inv, by the same scale."""
    quantizers = call.quantizers
    if scale is None or arrays.on_host(input):
        rows = as_rows(call.normalize(input, norm_weight, norm_bias)[0])
        if scale is None:
            made = quantizers.quantize("input", rows, transpose=True)
        else:
            made = fp8.quantize(rows, scale, quantizers.dtype("input"), transpose=True)
        return made.transposed, _scale_inv_of_transposed(made)
    of_norm = quantized.OfNorm(call.centered, norm_weight, norm_bias, call.zero_centered_weight, mean, rstd)
    name = _name(quantizers.dtype("input"))
    made = quantized.quantize(as_rows(input), name, scale, wants_data=False, transpose=True, of_norm=of_norm)
    return made.transposed, made.scale_inv


def project(call: Call, rows: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """y as a matrix, of the quantised normalised tensor."""
    return fp8.multiply(
        rows.data, rows.scale_inv, weight.data, weight.scale_inv, call.dtype, bias=bias, a_block_rows=rows.block_rows,
        b_block_rows=weight.block_rows, fast=True, is_exact=call.quantizers.is_exact,
    )  # fmt: skip


class Waiting(NamedTuple):
    """What waits for backward beside input and parameters. scale: that of the normalised tensor, where it is made again; kept:
    else its transposed 8-bit copy. weight: transposed, in 8 bits."""

    mean: Tensor | None
    rstd: Tensor
    scale: Tensor | None
    kept: Tensor | None
    kept_scale_inv: Tensor | None
    weight: Tensor
    weight_scale_inv: Tensor


def forward(
    call: Call, weight: QuantizedTensor, input: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
    bias: Tensor | None, recorded: bool
) -> tuple[Tensor, Tensor | None, Waiting]:  # fmt: skip
    """y, normalized (None unless asked for), and what waits for `backward`, where there is one (recorded)."""
    rows, normalized, mean, rstd = normalize(call, input, norm_weight, norm_bias)
    y = project(call, rows, weight, None if bias is None else bias.to(call.dtype))
    scale, kept = None, (None, None)
    if call.save_normalized:
        kept = (rows.transposed, _scale_inv_of_transposed(rows))
    elif recorded:
        scale = call.quantizers.scale_to_keep("input", rows)
    y = y.reshape(*input.shape[:-1], y.shape[-1])
    waiting = Waiting(mean, rstd, scale, *kept, weight.transposed, _scale_inv_of_transposed(weight))
    return y, normalized.to(call.dtype) if call.return_normalized else None, waiting


def _join(biases: Sequence[Tensor]) -> Tensor | None:
    """Parts of one layer's."""
    if len(biases) < 2:
        return biases[0].detach() if biases else None
    with fp8.outside_autocast(biases[0]):  # it has no cat of the other dtype of 16 bits
        return torch.cat([each.detach() for each in biases])


def backward(
    call: Call, take: Any, waiting: Waiting, dy: Tensor | None, dnormalized: Tensor | None, input: Tensor,
    norm_weight: Tensor | None, norm_bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of input, norm_weight, norm_bias, *weights, *biases: those that `wanted` asks for. take: as of
    cupynorm.linear."""
    quantizers = call.quantizers
    mean, rstd, scale, kept, kept_scale_inv, weight, weight_scale_inv = waiting
    block_rows = fp8.BLOCK_SIZE if isinstance(quantizers.recipe, BlockScaling) else None
    wants_norm, wants_parts = wanted[:3], wanted[3:]
    rows = None if dy is None else as_rows(dy)
    sums_up = biases and take is None and any(wants_parts[len(weights) :])
    # Each tensor goes before the next is made: few are there at a time.
    data = transposed_dy = dbias = None
    if rows is not None:
        made, dbias = quantizers.quantize_gradient(rows, biases[0].dtype if sums_up else None)
        data, data_scale_inv, dy_block_rows = made.data, made.scale_inv, made.block_rows
        transposed_dy, transposed_dy_scale_inv = made.transposed, _scale_inv_of_transposed(made)
        made = None
    reaches = dnormalized
    if rows is not None and any(wants_norm):
        reaches = fp8.multiply(
            data, data_scale_inv, weight, weight_scale_inv, call.dtype, a_block_rows=dy_block_rows, b_block_rows=block_rows,
            is_exact=quantizers.is_exact,
        )  # fmt: skip
        if call.quantize_gradient:
            reaches = quantizers.quantize("grad_input", reaches).dequantize(call.dtype)
        reaches = reaches.reshape(input.shape)
        if dnormalized is not None:
            reaches = reaches + dnormalized
    data, of_norm = None, [None] * 3
    if reaches is not None and any(wants_norm):
        of_norm = call.of_norm(
            reaches, input, mean, rstd, norm_weight, norm_bias, wanted=wants_norm, spends_dy=rows is not None
        )  # fmt: skip
    reaches = None

    def make_dweight(dtype: torch.dtype) -> Tensor:
        """[out_features, in_features], rounded once to a dtype that products come in; else in float32."""
        transposed, of_transposed = kept, kept_scale_inv
        if transposed is None:
            transposed, of_transposed = normalize_again(call, input, norm_weight, norm_bias, mean, rstd, scale)
        return fp8.multiply(
            transposed_dy, transposed_dy_scale_inv, transposed, of_transposed, dtype if dtype in PRODUCTS else torch.float32,
            a_block_rows=dy_block_rows, b_block_rows=dy_block_rows, is_exact=quantizers.is_exact,
        )  # fmt: skip

    dweights, dbiases = [None] * len(weights), [None] * len(biases)
    if take is not None and rows is None:
        take.nothing()
    elif take is not None:
        if take.queue is not None and kept is None and any(wants_parts[: len(weights)]):
            # What is made later is not of an input that may be another by then: one byte an element waits in its place.
            kept, kept_scale_inv = normalize_again(call, input, norm_weight, norm_bias, mean, rstd, scale)
        dweights, dbiases = take(rows, None, wants_parts, make_dweight)
    elif rows is not None:
        if any(wants_parts[: len(weights)]):
            split = make_dweight(weights[0].dtype).split([len(each) for each in weights])
            dweights = [part.to(each.dtype) for part, each in zip(split, weights)]
        if sums_up:
            dbias = sum_rows(rows, biases[0].dtype) if dbias is None else dbias
            dbiases = dbias.split([len(each) for each in biases])
    if isinstance(quantizers.recipe, DelayedScaling):
        quantizers.states["backward"].update(quantizers.recipe, call.group)
    made = (*of_norm, *dweights, *dbiases)
    return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted))


class Projected(torch.autograd.Function):
    """y, normalized (None unless asked for); weights and biases are parts of one linear layer."""

    @staticmethod
    def forward(ctx, call, weight, take, num_parts, input, norm_weight, norm_bias, *parts):
        y, normalized, waiting = forward(call, weight, input, norm_weight, norm_bias, _join(parts[num_parts:]), True)
        ctx.save_for_backward(input, norm_weight, norm_bias, *waiting, *parts)
        ctx.call, ctx.take, ctx.num_parts = call, take, num_parts
        ctx.set_materialize_grads(False)
        return y, normalized

    @staticmethod
    def backward(ctx, dy, dnormalized):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a differentiable gradient was asked for of a layer inside fp8_autocast; expected create_graph=False"
            )
        input, norm_weight, norm_bias, *saved = ctx.saved_tensors
        waiting, parts = Waiting(*saved[: len(Waiting._fields)]), saved[len(Waiting._fields) :]
        return None, None, None, None, *backward(
            ctx.call, ctx.take, waiting, dy, dnormalized, input, norm_weight, norm_bias, parts[: ctx.num_parts],
            parts[ctx.num_parts :], ctx.needs_input_grad[4:],
        )  # fmt: skip


def _scale_inv_of_transposed(quantized: QuantizedTensor) -> Tensor:
    return quantized.scale_inv if quantized.transposed_scale_inv is None else quantized.transposed_scale_inv


# The operator, of what torch.compile traces: it is a layer's call as it is, on the layer's own scales.

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("cupynorm", "FRAGMENT")
# It changes what its layer keeps, so nothing may replay its kernels without it.
_TAGS = (torch.Tag.pt2_compliant_tag, *(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None))
_library.define(
    "norm_linear_in_fp8(Tensor input, Tensor? norm_weight, Tensor? norm_bias, Tensor[] weights, Tensor[] biases, Tensor layer, "
    "str recipe, ScalarType dtype, bool centered, bool return_normalized, bool save_normalized, bool? is_first_microbatch, "
    "bool quantize_gradient, bool records, bool recorded) "
    "-> (Tensor y, Tensor normalized, Tensor mean, Tensor rstd, Tensor scale, Tensor kept, Tensor kept_scale_inv, "
    "Tensor weight, Tensor weight_scale_inv)",
    tags=_TAGS,
)
_library.define(
    "norm_linear_in_fp8_backward(Tensor? dy, Tensor? dnormalized, Tensor input, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor[] waiting, Tensor[] weights, Tensor[] biases, Tensor layer, str recipe, ScalarType dtype, bool quantize_gradient, "
    "bool[] wanted) -> Tensor[]",
    tags=_TAGS,
)


def number_of(layer: Any) -> Tensor:
    """By which the operator finds a layer that is still there: a tensor, as another int would be compiled anew."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def _layer_of(number: Tensor) -> Any:
    layer = _layers.get(number.item())
    if layer is None:
        raise RuntimeError("a compiled layer was deleted before its backward; expected it to be kept, as its scales are used")
    return layer


def by_operator(
    layer: Any, number: Tensor, region: fp8.Region, input: Tensor, dtype: torch.dtype, is_first_microbatch: bool | None,
    quantize_gradient: bool, recorded: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y, normalized (empty unless it is asked for)."""
    weights, biases = layer.parts_in_fp8()
    return torch.ops.cupynorm.norm_linear_in_fp8.default(
        input, layer.layer_norm_weight, layer.layer_norm_bias, weights, biases, number, region.text, dtype,
        layer.normalization == "LayerNorm", layer.return_layernorm_output, layer.save_normalized, is_first_microbatch,
        quantize_gradient, torch.is_grad_enabled(), recorded,
    )[:2]  # fmt: skip


def _run(
    input, norm_weight, norm_bias, weights, biases, layer, recipe, dtype, centered, return_normalized, save_normalized,
    is_first_microbatch, quantize_gradient, records, recorded,
):  # fmt: skip
    region = fp8.active()
    if region is None:  # a checkpoint runs it again, when the region has been left: no step of its scales
        region, records = fp8.Region(fp8.recipe_of(recipe), None, {}, recipe), False
    with torch.no_grad():
        call, weight = _layer_of(layer).begin_in_fp8(
            region, input, weights, dtype, is_first_microbatch, quantize_gradient, records, recorded
        )
        with fp8.outside_autocast(input):
            y, normalized, waiting = forward(call, weight, input, norm_weight, norm_bias, _join(biases), recorded)
        if not recorded:
            waiting = Waiting(*[None] * len(Waiting._fields))
        elif is_first_microbatch is not None:  # what the layer keeps: a compiler may write over what an operator returns
            waiting = waiting._replace(weight=waiting.weight.clone(), weight_scale_inv=waiting.weight_scale_inv.clone())
    return tuple(y.new_empty(0) if each is None else each.contiguous() for each in (y, normalized, *waiting))


def _run_without_memory(
    input, norm_weight, norm_bias, weights, biases, layer, recipe, dtype, centered, return_normalized, save_normalized,
    is_first_microbatch, quantize_gradient, records, recorded,
):  # fmt: skip
    recipe = fp8.recipe_of(recipe)
    leading, in_features = input.shape[:-1], input.shape[-1]
    out_features, num_rows = sum(len(each) for each in weights), leading.numel()
    in_blocks = isinstance(recipe, BlockScaling)

    def blocks(extent):
        return (extent + fp8.BLOCK_SIZE - 1) // fp8.BLOCK_SIZE

    def empty(shape, dtype, is_there=True):
        return input.new_empty(shape if is_there and recorded else 0, dtype=dtype)

    keeps, narrow, wide = save_normalized, recipe.fp8_format.value[0], torch.float32
    return (
        input.new_empty((*leading, out_features), dtype=dtype),
        input.new_empty(input.shape if return_normalized else 0, dtype=dtype),
        empty(leading, wide, centered),
        empty(leading, wide),
        empty(1, wide, not (keeps or in_blocks)),
        empty((in_features, num_rows), narrow, keeps),
        empty((in_features, blocks(num_rows)) if in_blocks else 1, wide, keeps),
        empty((in_features, out_features), narrow),
        empty((blocks(in_features), blocks(out_features)) if in_blocks else 1, wide),
    )


def _save(ctx, inputs, output):
    input, norm_weight, norm_bias, weights, biases, layer, recipe, dtype, _, return_normalized, *rest = inputs
    _, _, quantize_gradient, *_ = rest
    _, normalized, *waiting = output
    ctx.mark_non_differentiable(*waiting, *(() if return_normalized else (normalized,)))
    ctx.save_for_backward(layer, input, norm_weight, norm_bias, *waiting, *weights, *biases)
    ctx.set_materialize_grads(False)
    ctx.num_parts, ctx.given = (len(weights), len(biases)), (recipe, dtype, quantize_gradient)


def _differentiate(ctx, dy, dnormalized, *_):
    layer, input, norm_weight, norm_bias, *saved = ctx.saved_tensors
    num_waiting, (num_weights, num_biases) = len(Waiting._fields), ctx.num_parts
    waiting, parts = saved[:num_waiting], saved[num_waiting:]
    wants_input, wants_norm_weight, wants_norm_bias, wants_weights, wants_biases, *rest = ctx.needs_input_grad
    wanted = [wants_input, wants_norm_weight, wants_norm_bias, *each_of(wants_weights, num_weights)]
    wanted += each_of(wants_biases, num_biases)
    if dy is None:
        wanted[3:] = [False] * len(wanted[3:])
    made = torch.ops.cupynorm.norm_linear_in_fp8_backward.default(
        dy, dnormalized, input, norm_weight, norm_bias, waiting, parts[:num_weights], parts[num_weights:], layer, *ctx.given,
        wanted,
    )  # fmt: skip
    made = [gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted)]
    return *made[:3], made[3 : 3 + num_weights], made[3 + num_weights :], *(None for _ in rest)


def each_of(wants: Any, number: int) -> list[bool]:
    """What torch says of a list of tensors: a list, or one answer for all."""
    return list(wants) if isinstance(wants, Sequence) else [bool(wants)] * number


def _run_backward(
    dy, dnormalized, input, norm_weight, norm_bias, waiting, weights, biases, layer, recipe, dtype, quantize_gradient, wanted
):  # fmt: skip
    with torch.no_grad():
        call = _layer_of(layer).call_in_fp8(fp8.recipe_of(recipe), input, dtype, quantize_gradient, records=True)
        mean, rstd, scale, kept, kept_scale_inv, *of_weight = waiting
        if not call.save_normalized:
            kept = kept_scale_inv = None
        if call.save_normalized or isinstance(call.quantizers.recipe, BlockScaling):
            scale = None
        waiting = Waiting(mean if call.centered else None, rstd, scale, kept, kept_scale_inv, *of_weight)
        with fp8.outside_autocast(input):
            made = backward(
                call, None, waiting, dy, dnormalized, input, norm_weight, norm_bias, weights, biases, wanted
            )  # fmt: skip
    return [input.new_empty(0) if each is None else _alone(each) for each in made]


def _alone(tensor: Tensor) -> Tensor:
    """Contiguous, and in memory of its own, as an operator's results are."""
    shares = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if shares else tensor.contiguous()


def _run_backward_without_memory(
    dy, dnormalized, input, norm_weight, norm_bias, waiting, weights, biases, layer, recipe, dtype, quantize_gradient, wanted
):  # fmt: skip
    like = (input, norm_weight, norm_bias, *weights, *biases)
    return [each.new_empty(each.shape) if is_wanted else input.new_empty(0) for each, is_wanted in zip(like, wanted)]


for _device in ("CPU", "CUDA"):
    _library.impl("norm_linear_in_fp8", _run, _device)
    _library.impl("norm_linear_in_fp8_backward", _run_backward, _device)
torch.library.register_fake("cupynorm::norm_linear_in_fp8", _run_without_memory, lib=_library)
torch.library.register_fake("cupynorm::norm_linear_in_fp8_backward", _run_backward_without_memory, lib=_library)
torch.library.register_autograd("cupynorm::norm_linear_in_fp8", _differentiate, setup_context=_save, lib=_library)
