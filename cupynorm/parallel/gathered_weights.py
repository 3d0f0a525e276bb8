"""torch: weights that fully_shard gathers in 8-bit floats, one byte an element.

Each rank keeps its shard in the weight's own dtype, and the optimizer updates that. Before a
gathering ranks agree on the largest magnitude of all shards, and each quantises its shard by the
same scale. So the gathered weight is what one rank would make of the whole weight. Layers multiply
it without quantising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ..gpu.arrays import type_in_words
from ..linear.linear import Linear
from ..linear.quantized_weight import QuantizedWeight
from ..nn import quantization
from ..nn.recipes import BlockScaling, CurrentScaling, Recipe
from ..norm.quantized_tensor import QuantizedTensor
from .module import LayerNormLinear

_aten = torch.ops.aten
# What fully_shard makes a shard by, and what modules and state dicts do with one.
_SHARDING = frozenset(
    (
        _aten.as_strided.default,
        _aten.clone.default,
        _aten.copy_.default,
        _aten.detach.default,
        _aten.empty_like.default,
        _aten.new_zeros.default,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.view.default,
        _aten._to_copy.default,
    )
)


def gather_in_8_bits(model: torch.nn.Module, recipe: Recipe | None = None) -> torch.nn.Module:
    """Makes fully_shard gather the weights of LayerNormLinear and Linear in 8-bit floats.

    Call it before fully_shard, which takes all of the model's layers. Inside fp8_autocast the
    layers multiply the gathered weights as they are; outside they multiply the dequantised values.
    Parameters, gradients and the optimizer keep their dtype. A gathering needs one small
    all_reduce a weight before it.

    recipe: of fp8_autocast; DelayedScaling and CurrentScaling, by default the latter. The scale of
        a weight is always of its own amax.

    Returns the model. Raises ValueError for a recipe of blocks and a model without such layers,
    NotImplementedError for parameters_split, and weights that are DTensors, in 8 bits already or of
    float64.
    """
    recipe = CurrentScaling() if recipe is None else recipe
    if not isinstance(recipe, Recipe) or isinstance(recipe, BlockScaling):
        raise ValueError(
            f"recipe is {recipe!r}; expected DelayedScaling or CurrentScaling, with one scale for "
            "a weight"
        )
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LayerNormLinear | Linear)
    }
    if not layers:
        raise ValueError(
            f"model is {type_in_words(model)} without LayerNormLinear and Linear of "
            "cupynorm; expected at least one such layer"
        )
    for name, layer in layers.items():
        weight, obstacle = getattr(layer, layer.weight_names[0]), None
        if len(layer.weight_names) > 1:
            obstacle = "has parameters_split"
        elif weight.dtype == torch.float64 or type(weight.data) is not Tensor:
            obstacle = f"has a weight of class {type(weight.data).__name__} and {weight.dtype}"
        if obstacle is not None:
            raise NotImplementedError(
                f"layer {name!r} {obstacle}; expected one plain weight of 16 or 32 bits, "
                "before fully_shard"
            )
    for layer in layers.values():
        weight = layer.weight
        shard = torch.nn.Parameter(_Shard(weight.detach(), recipe), weight.requires_grad)
        shard.__dict__.update(weight.__dict__)  # what Megatron reads
        layer.register_parameter("weight", shard)
    return model


class _Shard(Tensor):
    """A weight, or the rows of it that a rank has, which fully_shard gathers in 8-bit floats.

    Operations compute with `values`, a plain tensor. Those of _SHARDING return a _Shard again.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    values: Tensor
    recipe: Recipe

    @staticmethod
    def __new__(cls, values: Tensor, recipe: Recipe) -> _Shard:
        shard = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            values.stride(),
            values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        shard.values, shard.recipe = values, recipe
        return shard

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        recipe = next(each.recipe for each in _shards((args, kwargs or {})))
        args, kwargs = tree_map_only(_Shard, lambda each: each.values, (args, kwargs or {}))
        result = function(*args, **kwargs)
        if function not in _SHARDING:
            return result
        return tree_map_only(Tensor, lambda each: _Shard(each, recipe), result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor, int]]:
        """What a rank sends: its shard in 8 bits, as bytes. Besides: scale_inv, and all rows."""
        values, recipe = self.values, self.recipe
        amax = quantization.amax_of(values).reshape(1)
        distributed.all_reduce(amax, distributed.ReduceOp.MAX, mesh.get_group())
        power_of_two = getattr(recipe, "power_of_two", False)
        smallest_amax = getattr(recipe, "amax_epsilon", 0.0)
        dtype = recipe.fp8_format.value[0]
        scale = quantization.scale_of(
            amax, dtype, power_of_two=power_of_two, smallest_amax=smallest_amax
        )
        quantized = quantization.quantize(values, scale, dtype)
        # Every rank sends as many rows as the first.
        missing = -(-outer_size[0] // mesh.size()) - len(values)
        data = functional.pad(quantized.data.view(torch.uint8), (0, 0, 0, missing))
        return (data,), (quantized.scale_inv, outer_size[0])

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor],
        sent: tuple[Tensor, int],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedWeight, tuple[Tensor]] | None:
        """The whole weight, and the bytes that fully_shard frees after its use."""
        (data,), (scale_inv, num_rows) = gathered, sent
        narrow = data[:num_rows].view(self.recipe.fp8_format.value[0])
        quantized = QuantizedTensor(narrow, scale_inv, param_dtype)
        if out is not None:
            out.quantized = quantized
            return None
        return QuantizedWeight(quantized, self.recipe), (data,)

    def __repr__(self) -> str:
        return repr(self.values)

    def __reduce_ex__(self, protocol: int) -> Any:
        """As the plain tensor."""
        return self.values.__reduce_ex__(protocol)


def _shards(arguments: Any) -> list[_Shard]:
    found: list[_Shard] = []
    tree_map_only(_Shard, found.append, arguments)
    return found
