"""torch: QuantizedWeight, a weight that is kept in 8-bit floats alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..nn import modes, recipes
from ..nn.quantization import transpose_data
from ..nn.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from ..norm.quantized_tensor import QuantizedTensor
from ..plan.problem import ceil_div
from .quantizers import Quantizers, replaced

_aten = torch.ops.aten
_QUANTISED = (torch.float16, torch.bfloat16, torch.float32)
_FIELDS, _KEPT = ("data", "scale_inv", "transposed", "transposed_scale_inv"), "kept_"


# The tensor.


class QuantizedWeight(Tensor):
    """A matrix that is kept in 8-bit floats alone.

    To torch it is a tensor of its dtype with the values of dequantize(). What reads it gets plain
    tensors. What writes to all of it, such as copy_ or an optimizer, computes in its dtype and
    quantises the result by a scale of its own amax, in place. Views of it can only be read.

    quantized: what is kept. recipe: by which writes are quantised.
    """

    # Operations come to __torch_dispatch__ alone.
    __torch_function__ = torch._C._disabled_torch_function_impl

    quantized: QuantizedTensor
    recipe: Recipe
    _initial: Tensor | None

    @staticmethod
    def __new__(
        cls, quantized: QuantizedTensor, recipe: Recipe | None = None, /, **others: Any
    ) -> QuantizedWeight:
        if not isinstance(quantized, QuantizedTensor) or recipe is None or others:
            raise NotImplementedError(
                "a weight in 8-bit floats was to be copied by a call of its class, as accelerate "
                "does; expected a layer that was not made inside fp8_model_init"
            )
        data = quantized.data
        weight = Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=quantized.dtype, device=data.device
        )
        weight.quantized, weight.recipe, weight._initial = quantized, recipe, None
        return weight

    @classmethod
    def of(cls, values: Tensor, recipe: Recipe) -> QuantizedWeight:
        """values, quantised."""
        if isinstance(recipe, DelayedScaling):
            recipe = CurrentScaling(recipe.fp8_format)
        return cls(_quantize(values.detach(), recipe), recipe)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor, in its dtype or another; differentiable."""
        if modes.has_functorch_transforms():
            raise NotImplementedError(
                "torch.func was asked to transform a layer whose weight is kept in 8-bit floats; "
                "expected one that was not made inside fp8_model_init"
            )
        if modes.is_recorded():
            raise NotImplementedError(
                "torch.export or make_fx was asked to record a layer whose weight is kept in 8-bit "
                "floats; expected one that was not made inside fp8_model_init"
            )
        return _Dequantized.apply(self, dtype)

    @property
    def data(self) -> QuantizedWeight:
        """As of every tensor. Assigning values quantises them."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ValueError(
                f"data has shape {tuple(values.shape)}, the weight that is kept in 8-bit floats "
                f"{tuple(self.shape)}; expected the same"
            )
        with torch.no_grad():
            self.copy_(values)

    def write(self, values: Tensor) -> None:
        """Quantises values, [out_features, in_features], in place, without another rounding."""
        values = values if values.dtype in _QUANTISED else values.float()
        quantized = _quantize(values.to(self.device).expand(self.shape), self.recipe)
        for name, tensor in _tensors(self.quantized).items():
            tensor.copy_(getattr(quantized, name))

    def quantized_like(self, values: Tensor) -> Tensor:
        """values by this weight's recipe; as they are if they are quantised or do not fit."""
        fits = values.shape == self.shape and values.dtype in _QUANTISED
        if isinstance(values, QuantizedWeight) or not fits:
            return values
        return QuantizedWeight.of(values, self.recipe)

    def check_recipe(self, recipe: Recipe) -> None:
        """Raises ValueError where a region's recipe has other scales than the weight."""
        if _scales_of(recipe) != _scales_of(self.recipe):
            raise ValueError(
                f"the weight was made in 8 bits with {_scales_of(self.recipe)}, and the recipe of "
                f"fp8_autocast has {_scales_of(recipe)}; expected the same in fp8_model_init"
            )

    def for_products(self, *, transpose: bool) -> QuantizedTensor:
        """What a region multiplies, without quantising. Its recipe was checked."""
        kept = self.quantized
        if not transpose or kept.transposed is not None:
            return kept
        scale_inv = kept.scale_inv.t().contiguous() if kept.block_rows else None
        transposed = transpose_data(kept.data)
        return replaced(kept, transposed=transposed, transposed_scale_inv=scale_inv)

    def share_memory_(self) -> QuantizedWeight:
        """As of every tensor. torch would share the memory of values, which there is not."""
        for each in _tensors(self.quantized).values():
            each.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(each.is_shared() for each in _tensors(self.quantized).values())

    def keep_initial(self, values: Tensor) -> None:
        """Keeps the first values as they were before they were quantised."""
        self._initial = values

    def get_high_precision_init_val(self) -> Tensor | None:
        """The first values before they were quantised, if fp8_model_init kept them."""
        return self._initial

    def clear_high_precision_init_val(self) -> None:
        self._initial = None

    # What torch calls.

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedWeight):
            if function in (_aten.detach.default, _aten.alias.default):
                return QuantizedWeight(first.quantized, first.recipe)
            if function is _aten.as_strided.default and _is_whole(first, *args[1:]):
                return QuantizedWeight(first.quantized, first.recipe)
            if function is _aten.clone.default:
                return first._map(torch.clone)
            if function is _aten.copy_.default:
                return first._copy(args[1])
            if function is _aten._to_copy.default and (
                _conversions.keep_8_bits or kwargs.get("dtype") in (None, first.dtype)
            ):
                device = kwargs.get("device") or first.device
                return first._map(lambda each: each.to(device, copy=True), kwargs.get("dtype"))
            if function is _aten.empty_like.default and _conversions.keep_8_bits:
                device = kwargs.get("device") or first.device
                return first._map(lambda each: torch.empty_like(each, device=device))
        return _by_values(function, args, kwargs)

    def _map(
        self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> QuantizedWeight:
        mapped = {name: function(each) for name, each in _tensors(self.quantized).items()}
        quantized = replaced(self.quantized, **mapped, dtype=dtype or self.dtype)
        return QuantizedWeight(quantized, self.recipe)

    def _copy(self, source: Tensor) -> QuantizedWeight:
        is_alike = isinstance(source, QuantizedWeight) and source.recipe == self.recipe
        if is_alike and source.shape == self.shape:
            tensors = _tensors(source.quantized)
            for name, tensor in _tensors(self.quantized).items():
                tensor.copy_(tensors[name])
        else:
            self.write(_values(source))
        return self

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.quantized!r}, recipe={self.recipe!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        kept = self.quantized
        names = [f"{_KEPT}{name}" for name in _tensors(kept)]
        return names, (kept.dtype, kept.block_rows, kept.block_cols, self.recipe)

    def __getattr__(self, name: str) -> Tensor:
        """The tensors of __tensor_flatten__, whose names must not be torch's."""
        if name.startswith(_KEPT) and name.removeprefix(_KEPT) in _FIELDS:
            return getattr(self.quantized, name.removeprefix(_KEPT))
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> QuantizedWeight:
        *blocks, recipe = context
        return QuantizedWeight(
            _join({name.removeprefix(_KEPT): each for name, each in inner.items()}, blocks), recipe
        )

    def __deepcopy__(self, memo: dict) -> QuantizedWeight:
        with torch.no_grad():
            copy = self.detach().clone()
        memo[id(self)] = copy = _like_parameter(copy, self)
        return copy

    def __reduce_ex__(self, protocol: int) -> Any:
        """Of plain tensors, so that torch.load(weights_only=True) opens it.

        As bytes, because pickle.loads cannot make torch's 8-bit floats.
        """
        kept, recipe = self.quantized, self.recipe
        tensors = {
            name: each.view(torch.uint8)
            if each.is_floating_point() and each.itemsize == 1
            else each
            for name, each in _tensors(kept).items()
        }
        options = {"fp8_format": recipe.fp8_format.name}
        for name in ("power_of_two", "amax_epsilon"):
            if hasattr(recipe, name):
                options[name] = getattr(recipe, name)
        blocks = kept.dtype, kept.block_rows, kept.block_cols
        is_parameter = isinstance(self, torch.nn.Parameter)
        flags = self.requires_grad, is_parameter
        return load_weight, (tensors, blocks, type(recipe).__name__, options, flags)


def load_weight(
    tensors: dict[str, Tensor],
    blocks: tuple[torch.dtype, int | None, int],
    recipe: str,
    options: dict[str, Any],
    flags: tuple[bool, bool],
) -> QuantizedWeight:
    """What a QuantizedWeight is pickled as a call of."""
    options = {**options, "fp8_format": recipes.Format[options["fp8_format"]]}
    dtype = options["fp8_format"].value[0]
    tensors = {
        name: each.view(dtype) if name in ("data", "transposed") else each
        for name, each in tensors.items()
    }
    weight = QuantizedWeight(_join(tensors, blocks), getattr(recipes, recipe)(**options))
    requires_grad, is_parameter = flags
    if is_parameter:
        return torch.nn.Parameter(weight, requires_grad)
    return weight.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([load_weight])


class _View(Tensor):
    """A view of a QuantizedWeight's values, which can only be read."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> _View:
        view = Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )
        view.values = values
        return view

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        return _by_values(function, args, kwargs or {})

    def __repr__(self) -> str:
        return repr(self.values)


class _Dequantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, dtype):
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)  # a gradient may have gone to main_grad
        return weight.quantized.dequantize(dtype or weight.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return None if gradient is None else gradient.to(ctx.dtype), None


def _values(argument: Any) -> Any:
    """What an operation reads: the values of this module's tensors."""
    if isinstance(argument, QuantizedWeight):
        return argument.quantized.dequantize(argument.dtype)
    return argument.values if isinstance(argument, _View) else argument


def _by_values(function: Any, args: Sequence, kwargs: dict) -> Any:
    """An operation of torch on values. Those of weights that it writes to are quantised."""
    weights: list[tuple[QuantizedWeight, Tensor]] = []

    def read(argument: Any) -> Any:
        values = next((values for weight, values in weights if weight is argument), None)
        values = _values(argument) if values is None else values
        if isinstance(argument, QuantizedWeight):
            weights.append((argument, values))
        return values

    written = _written(function, args, kwargs)
    if any(isinstance(each, _View) for each in written):
        raise RuntimeError(
            f"{function} writes to a view of a weight that is kept in 8-bit floats; expected a "
            "write to all of it, such as weight.copy_(values)"
        )
    plain_args, plain_kwargs = tree_map(read, (tuple(args), kwargs))
    result = function(*plain_args, **plain_kwargs)
    is_view = any(
        each.alias_info is not None and not each.alias_info.is_write
        for each in function._schema.returns
    )
    if is_view:
        return tree_map(lambda each: _View(each) if isinstance(each, Tensor) else each, result)
    for weight in written:
        values = next((values for each, values in weights if each is weight), None)
        if values is not None:
            weight.write(values)
            result = weight if result is values else result
    return result


def _written(function: Any, args: Sequence, kwargs: dict) -> list[Any]:
    """The arguments that an operation writes to."""
    written = []
    for at, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, list | tuple) else [value]
    return written


def _tensors(quantized: QuantizedTensor) -> dict[str, Tensor]:
    tensors = {name: getattr(quantized, name) for name in _FIELDS}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _join(tensors: Mapping[str, Tensor], blocks: Sequence) -> QuantizedTensor:
    """blocks: dtype, block_rows, block_cols."""
    dtype, block_rows, block_cols = blocks
    return QuantizedTensor(**tensors, dtype=dtype, block_rows=block_rows, block_cols=block_cols)


def _quantize(values: Tensor, recipe: Recipe) -> QuantizedTensor:
    if values.is_meta:
        return _without_memory(values, recipe)
    return Quantizers(recipe, {}, False).quantize("weight", values.contiguous())


def _without_memory(values: Tensor, recipe: Recipe) -> QuantizedTensor:
    """As _quantize, on "meta"."""
    num_rows, num_cols = values.shape
    dtype = recipe.fp8_format.value[0]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return values.new_empty(shape, dtype=dtype)

    data = empty(num_rows, num_cols)
    if isinstance(recipe, BlockScaling):
        size = recipes.BLOCK_SIZE
        shape = ceil_div(num_rows, size), ceil_div(num_cols, size)
        scale_inv = empty(*shape, dtype=torch.float32)
        return QuantizedTensor(data, scale_inv, values.dtype, block_rows=size)
    return QuantizedTensor(data, empty(1, dtype=torch.float32), values.dtype)


def _is_whole(weight: QuantizedWeight, shape: Any, strides: Any, offset: int = 0) -> bool:
    """Whether as_strided with these arguments is the weight itself, as fully_shard asks for it."""
    return tuple(shape) == weight.shape and tuple(strides) == weight.stride() and not offset


def _scales_of(recipe: Recipe) -> str:
    """In words, which differ where one recipe cannot use the other's weights."""
    if isinstance(recipe, BlockScaling):
        return f"the scales of BlockScaling(power_of_two={recipe.power_of_two})"
    return "one scale"


def _like_parameter(weight: QuantizedWeight, like: QuantizedWeight) -> QuantizedWeight:
    if isinstance(like, torch.nn.Parameter):
        weight = torch.nn.Parameter(weight, like.requires_grad)
    else:
        weight.requires_grad_(like.requires_grad)
    weight._initial = like._initial
    return weight


class _Conversions(threading.local):
    keep_8_bits = False  # True inside of Module._apply


_conversions = _Conversions()


@contextlib.contextmanager
def keeping_8_bits() -> Iterator[None]:
    """Inside of it a conversion to another dtype changes the dtype that a weight has to torch."""
    before, _conversions.keep_8_bits = _conversions.keep_8_bits, True
    try:
        yield
    finally:
        _conversions.keep_8_bits = before
