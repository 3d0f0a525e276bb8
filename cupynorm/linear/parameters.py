"""torch: the parameters of LayerNormLinear: their names, parts, first values and storage.

layer_norm_weight, layer_norm_bias (None for RMSNorm), and weights and biases by weight_names and
bias_names: parts of one linear layer, views that follow each other in one storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gpu import arrays
from .operands import join


def make(layer: Any, split: Any, device: torch.device | str, dtype: torch.dtype | None) -> None:
    """Makes the parameters of a layer that has its other attributes, without values.

    split: the argument parameters_split.
    """
    num_ranks = layer.sharding.size if layer.sharding.mode == "column" else 1
    in_features, out_features = layer.in_features, layer.out_features
    names, sizes = _splits(split, out_features * num_ranks, num_ranks)
    layer.parameter_split_sizes = sizes
    layer.weight_names = [f"{name}weight" for name in names]
    layer.bias_names = [f"{name}bias" for name in names]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    layer.layer_norm_weight = torch.nn.Parameter(empty(in_features))
    is_centered = layer.normalization == "LayerNorm"
    layer.layer_norm_bias = torch.nn.Parameter(empty(in_features)) if is_centered else None
    for name, part in zip(layer.weight_names, empty(out_features, in_features).split(sizes)):
        layer.register_parameter(name, torch.nn.Parameter(part))
    for name, part in zip(layer.bias_names, empty(out_features).split(sizes)):
        if layer.use_bias:
            layer.register_parameter(name, torch.nn.Parameter(part))
        else:
            setattr(layer, name, empty(0))


def fill(layer: Any) -> None:
    """First values: layer_norm_weight is 1 (0 if zero-centered), each weight is filled by
    init_method, biases are 0."""
    init = layer.init_method or (lambda weight: torch.nn.init.normal_(weight, 0.0, 0.023))
    tracker, name = layer.get_rng_state_tracker, layer.rng_tracker_name
    with torch.no_grad():
        layer.layer_norm_weight.fill_(0.0 if layer.zero_centered_gamma else 1.0)
        if layer.layer_norm_bias is not None:
            layer.layer_norm_bias.zero_()
        for weight in layer.weights():
            forked = contextlib.nullcontext()
            if tracker is not None:
                forked = tracker().fork(*(() if name is None else (name,)))
            with forked:
                init(weight)
        for bias in layer.biases():
            bias.zero_()


def join_parts(layer: torch.nn.Module) -> None:
    """Puts the parts into one storage again, after each was moved by itself."""
    for names in (layer.weight_names, layer.bias_names):
        # What pruning or a parametrization makes anew in each forward is no parameter.
        parts = [each for name in names if (each := layer._parameters.get(name)) is not None]
        is_plain = all(part.data.__class__ is Tensor and not part.is_meta for part in parts)
        if len(parts) > 1 and is_plain and len(parts) == len(names):
            joined = join(parts)
            if joined.data_ptr() == parts[0].data_ptr():
                continue
            for part, view in zip(parts, joined.split([len(part) for part in parts])):
                part.data = view


def separate_parts(layer: Any, state_dict: dict, prefix: str) -> None:
    """In a saved state dict: safetensors saves no tensor that is a part of a storage."""
    names = (*layer.weight_names, *layer.bias_names) if len(layer.weight_names) > 1 else ()
    for name in names:
        part = state_dict.get(f"{prefix}{name}")
        if part.__class__ is Tensor and not part.is_meta and part.numel():
            state_dict[f"{prefix}{name}"] = torch.from_dlpack(arrays.in_memory(part))


def _splits(
    parameters: Sequence[str] | Mapping[str, int] | None, out_features: int, num_ranks: int
) -> tuple[list[str], list[int]]:
    """What precedes "weight" in the names of the parts, and the rows that a rank has of each.

    parameters, out_features: of the whole layer, which num_ranks share.
    """
    if parameters is None:
        return [""], [out_features // num_ranks]
    wrong = f"parameters_split is {parameters!r}"
    if not isinstance(parameters, Sequence | Mapping):
        raise TypeError(f"{wrong}; expected names, or a dict of names and sizes")
    if not parameters:
        raise ValueError(f"{wrong}; expected at least one name")
    names = [parameters] if isinstance(parameters, str) else list(parameters)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{wrong}; expected names, or a dict of names and sizes")
    stems = [name.rstrip("_") for name in names]
    has_dot = any("." in name for name in stems)
    if len(set(stems)) < len(stems) or "layer_norm" in stems or has_dot:
        raise ValueError(
            f"{wrong}; expected names without a dot, which differ in more than underscores at "
            "their end, and none of which is layer_norm, the norm's"
        )
    if isinstance(parameters, Mapping):
        sizes = list(parameters.values())
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
            raise TypeError(f"{wrong}; expected sizes that are numbers of rows")
    else:
        sizes = [out_features // len(names)] * len(names)
    if sum(sizes) != out_features:
        raise ValueError(
            f"parameters_split has sizes {sizes}, {sum(sizes)} together; "
            f"expected out_features{' of all ranks' * (num_ranks > 1)}, {out_features}"
        )
    for name, size in zip(names, sizes):
        if size % num_ranks:
            raise ValueError(
                f"{name} of parameters_split has {size} rows and tp_size is {num_ranks}; "
                f"expected a multiple of {num_ranks}"
            )
    return [f"{stem}_" for stem in stems], [size // num_ranks for size in sizes]
