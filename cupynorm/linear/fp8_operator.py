"""torch: the operators of a layer inside cupynorm.fp8_autocast, for torch.compile.

    cupynorm::norm_linear_in_fp8            -> y, normalized, and the fields of fp8.Saved
    cupynorm::norm_linear_in_fp8_backward   -> gradients of input, norm_weight, norm_bias, *weights,
                                               *biases

A result that is not requested is empty. The operators run the layer's own call on the layer's own
scales, so they get the layer as a number.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..nn import autocast
from ..nn.dtypes import outside_autocast
from ..nn.recipes import BLOCK_SIZE, IN_BLOCKS, MX_BLOCK_SIZE, MXFP8BlockScaling, Recipe
from ..norm.quantized_tensor import QuantizedTensor
from . import fp8
from .call import LinearOptions, Operands
from .fp8 import QuantizedCall, RegionCall
from .matrices import as_result
from .operator import each_of
from .quantizers import Quantizers

_library = torch.library.Library("cupynorm", "FRAGMENT")
# The operators change what their layer keeps, so a CUDA graph must not replay their kernels alone.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library.define(
    "norm_linear_in_fp8(Tensor input, Tensor? norm_weight, Tensor? norm_bias, Tensor[] weights, "
    "Tensor[] biases, Tensor layer, str recipe, ScalarType dtype, bool centered, "
    "bool return_normalized, bool save_normalized, bool? is_first_microbatch, "
    "bool quantize_gradient, bool keeps_amaxes, bool recorded) "
    "-> (Tensor y, Tensor normalized, Tensor mean, Tensor rstd, Tensor scale, Tensor kept, "
    "Tensor kept_scale_inv, Tensor weight, Tensor weight_scale_inv)",
    tags=_TAGS,
)
_library.define(
    "norm_linear_in_fp8_backward(Tensor? dy, Tensor? dnormalized, Tensor input, "
    "Tensor? norm_weight, Tensor? norm_bias, Tensor[] saved, Tensor[] weights, Tensor[] biases, "
    "Tensor layer, str recipe, ScalarType dtype, bool quantize_gradient, bool[] wanted) "
    "-> Tensor[]",
    tags=_TAGS,
)


class _Arguments(NamedTuple):
    """The forward operator's arguments, in the order of its schema.

    layer: its number. keeps_amaxes: whether the region's step counts.
    recorded: whether this call has a backward.
    """

    input: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    layer: Tensor
    recipe: str
    dtype: torch.dtype
    centered: bool
    return_normalized: bool
    save_normalized: bool
    is_first_microbatch: bool | None
    quantize_gradient: bool
    keeps_amaxes: bool
    recorded: bool


class _BackwardArguments(NamedTuple):
    """The backward operator's arguments, in the order of its schema. saved: fp8.Saved."""

    dy: Tensor | None
    dnormalized: Tensor | None
    input: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    saved: Sequence[Tensor]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    layer: Tensor
    recipe: str
    dtype: torch.dtype
    quantize_gradient: bool
    wanted: Sequence[bool]


def _operands_of(arguments: _Arguments | _BackwardArguments) -> Operands:
    norm = arguments.norm_weight, arguments.norm_bias
    return Operands(arguments.input, None, *norm, arguments.weights, arguments.biases)


class Layer(Protocol):
    """What the operators call of a layer: see fp8_layer.py."""

    def linear_options(self, dtype: torch.dtype) -> LinearOptions: ...

    def quantizers(
        self, recipe: Recipe, device: torch.device, *, keeps_amaxes: bool
    ) -> Quantizers: ...

    def begin_in_fp8(
        self, call: RegionCall, operands: Operands, *, is_compiled: bool = False
    ) -> tuple[QuantizedCall, QuantizedTensor]: ...


# Layers by number.

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(layer: Layer) -> Tensor:
    """The number by which an operator finds a layer.

    It is a tensor, because torch.compile would compile anew for another int.
    """
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def _layer_of(number: Tensor) -> Layer:
    layer = _layers.get(number.item())
    if layer is None:
        raise RuntimeError(
            "a compiled layer was deleted before its backward; "
            "expected it to be kept, as its scales are used"
        )
    return layer


def by_operator(call: RegionCall, operands: Operands, number: Tensor) -> tuple[Tensor, Tensor]:
    """y, normalized (empty unless requested). number: of the layer."""
    options = call.options
    return torch.ops.cupynorm.norm_linear_in_fp8.default(
        operands.input,
        operands.norm_weight,
        operands.norm_bias,
        operands.weights,
        operands.biases,
        number,
        call.region.text,
        options.dtype,
        options.centered,
        options.return_normalized,
        options.save_normalized,
        call.is_first_microbatch,
        call.quantize_gradient,
        call.keeps_amaxes,
        call.recorded,
    )[:2]


# Forward.


def _run(*values: Any) -> tuple[Tensor, ...]:
    arguments = _Arguments(*values)
    operands, recorded = _operands_of(arguments), arguments.recorded
    layer, region = _layer_of(arguments.layer), autocast.active()
    keeps_amaxes = arguments.keeps_amaxes
    if region is None or region.text != arguments.recipe:
        # A checkpoint recomputes the call after the region has ended: no step of its scales.
        keeps_amaxes = False
        recipe = autocast.recipe_of(arguments.recipe)
        region = autocast.Region(recipe, None, {}, [], arguments.recipe, False)
    call = RegionCall(
        region,
        layer.linear_options(arguments.dtype),
        arguments.quantize_gradient,
        arguments.is_first_microbatch,
        keeps_amaxes,
        recorded,
    )
    with torch.no_grad():
        quantized_call, weight = layer.begin_in_fp8(call, operands, is_compiled=True)
        with outside_autocast(operands.input):
            y, normalized, saved = fp8.forward(quantized_call, weight, operands, recorded=recorded)
        if not recorded:
            saved = fp8.Saved(*[None] * len(saved))
        elif arguments.is_first_microbatch is not None:
            # The layer keeps these, and a compiler may write over what an operator returns.
            saved = saved._replace(
                weight=saved.weight.clone(), weight_scale_inv=saved.weight_scale_inv.clone()
            )
    results = (as_result(y), as_result(normalized), *saved)
    return tuple(y.new_empty(0) if each is None else each.contiguous() for each in results)


def _run_without_memory(*values: Any) -> tuple[Tensor, ...]:
    arguments = _Arguments(*values)
    recipe = autocast.recipe_of(arguments.recipe)
    input, keeps = arguments.input, arguments.save_normalized
    leading, in_features = input.shape[:-1], input.shape[-1]
    out_features, num_rows = sum(len(each) for each in arguments.weights), math.prod(leading)
    has_norm = arguments.norm_weight is not None  # a norm of a layer has a weight
    in_blocks, is_mx = isinstance(recipe, IN_BLOCKS), isinstance(recipe, MXFP8BlockScaling)
    of_scales = torch.uint8 if is_mx else torch.float32

    def blocks(extent):
        block_size = MX_BLOCK_SIZE if is_mx else BLOCK_SIZE
        return (extent + block_size - 1) // block_size

    def empty(shape, dtype, is_there=True):
        return input.new_empty(shape if is_there and arguments.recorded else 0, dtype=dtype)

    narrow, wide = recipe.fp8_format.value[0], torch.float32
    kept_scales = (in_features, blocks(num_rows)) if in_blocks else 1
    weight_rows = in_features if is_mx else blocks(in_features)
    weight_scales = (weight_rows, blocks(out_features)) if in_blocks else 1
    has_normalized = arguments.return_normalized
    return (
        input.new_empty((*leading, out_features), dtype=arguments.dtype),
        input.new_empty(input.shape if has_normalized else 0, dtype=arguments.dtype),
        empty(leading, wide, arguments.centered),
        empty(leading, wide, has_norm),
        empty(1, wide, not (keeps or in_blocks)),
        empty((in_features, num_rows), narrow, keeps),
        empty(kept_scales, of_scales, keeps),
        empty((in_features, out_features), narrow),
        empty(weight_scales, of_scales),
    )


def _save(ctx, inputs, output):
    arguments = _Arguments(*inputs)
    _, normalized, *saved = output
    unused = saved if arguments.return_normalized else [*saved, normalized]
    ctx.mark_non_differentiable(*unused)
    operands = _operands_of(arguments)
    ctx.save_for_backward(arguments.layer, *saved, *operands.all)
    ctx.set_materialize_grads(False)
    ctx.num_parts = len(operands.weights), len(operands.biases)
    ctx.options = arguments.recipe, arguments.dtype, arguments.quantize_gradient


def _differentiate(ctx, dy, dnormalized, *_):
    layer, *tensors = ctx.saved_tensors
    num_saved, (num_weights, num_biases) = len(fp8.Saved._fields), ctx.num_parts
    saved, operands = tensors[:num_saved], Operands.split(tensors[num_saved:], num_weights)
    *wants_norm, wants_weights, wants_biases = ctx.needs_input_grad[:5]
    wants_parts = [*each_of(wants_weights, num_weights), *each_of(wants_biases, num_biases)]
    if dy is None:
        wants_parts = [False] * len(wants_parts)
    wanted = [*wants_norm, *wants_parts]
    gradients = torch.ops.cupynorm.norm_linear_in_fp8_backward.default(
        dy,
        dnormalized,
        operands.input,
        operands.norm_weight,
        operands.norm_bias,
        saved,
        operands.weights,
        operands.biases,
        layer,
        *ctx.options,
        wanted,
    )
    gradients = [gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted)]
    rest = [None] * (len(ctx.needs_input_grad) - 5)
    return *gradients[:3], gradients[3 : 3 + num_weights], gradients[3 + num_weights :], *rest


# Backward.


def _run_backward(*values: Any) -> list[Tensor]:
    arguments = _BackwardArguments(*values)
    input, operands, layer = arguments.input, _operands_of(arguments), _layer_of(arguments.layer)
    recipe = autocast.recipe_of(arguments.recipe)
    options = layer.linear_options(arguments.dtype)
    with torch.no_grad():
        quantizers = layer.quantizers(recipe, input.device, keeps_amaxes=True)
        call = QuantizedCall(options, quantizers, arguments.quantize_gradient)
        saved = fp8.Saved(*arguments.saved)
        if not options.centered:
            saved = saved._replace(mean=None)
        if not options.save_normalized:
            saved = saved._replace(kept=None, kept_scale_inv=None)
        if options.save_normalized or isinstance(recipe, IN_BLOCKS):
            saved = saved._replace(scale=None)
        incoming = arguments.dy, arguments.dnormalized
        with outside_autocast(input):
            gradients = fp8.backward(call, saved, operands, incoming, arguments.wanted)
    return [input.new_empty(0) if each is None else _alone(each) for each in gradients]


def _alone(tensor: Tensor) -> Tensor:
    """Contiguous, and in memory of its own, as an operator's results must be."""
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def _run_backward_without_memory(*values: Any) -> list[Tensor]:
    arguments = _BackwardArguments(*values)
    input, _, *others = _operands_of(arguments).all
    return [
        each.new_empty(each.shape) if is_wanted else input.new_empty(0)
        for each, is_wanted in zip((input, *others), arguments.wanted)
    ]


for _device in ("CPU", "CUDA"):
    _library.impl("norm_linear_in_fp8", _run, _device)
    _library.impl("norm_linear_in_fp8_backward", _run_backward, _device)
torch.library.register_fake("cupynorm::norm_linear_in_fp8", _run_without_memory, lib=_library)
torch.library.register_fake(
    "cupynorm::norm_linear_in_fp8_backward", _run_backward_without_memory, lib=_library
)
torch.library.register_autograd(
    "cupynorm::norm_linear_in_fp8", _differentiate, setup_context=_save, lib=_library
)


@register_flop_formula(torch.ops.cupynorm.norm_linear_in_fp8)
def _count_flops(input_shape, *shapes, out_shape=None, **_) -> int:
    return 2 * math.prod(input_shape) * out_shape[0][-1]


@register_flop_formula(torch.ops.cupynorm.norm_linear_in_fp8_backward)
def _count_backward_flops(dy_shape, dnormalized_shape, input_shape, *rest, **_) -> int:
    """One product for the gradient of the input, one for those of the weights."""
    wanted = rest[-1]
    products = any(wanted[:3]) + any(wanted[3:])
    return 0 if dy_shape is None else 2 * math.prod(input_shape) * dy_shape[-1] * products
