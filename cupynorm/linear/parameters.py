"""torch: the parameters of LayerNormLinear: their names, parts, first values and attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gpu import arrays
from .gradient_layer import GradientLayer
from .matrices import concatenate, join


class NormLinearParameters(GradientLayer):
    """A module with the parameters of LayerNormLinear.

    layer_norm_weight, layer_norm_bias (None for RMSNorm), and weights and biases by weight_names
    and bias_names: parts of one linear layer, views that follow each other in one storage.
    The subclass sets the attributes that are arguments of LayerNormLinear.
    """

    rng_tracker_name: str | None = None
    _num_out_shards = 1  # ranks that share the rows of the linear weight

    def _make_parameters(
        self,
        split: Sequence[str] | Mapping[str, int] | None,
        device: torch.device | str,
        dtype: torch.dtype | None,
    ) -> None:
        in_features, out_features = self.in_features, self.out_features
        num_ranks = self._num_out_shards
        names, self.parameter_split_sizes = _splits(split, out_features * num_ranks, num_ranks)
        self.weight_names = [f"{name}weight" for name in names]
        self.bias_names = [f"{name}bias" for name in names]

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        self.layer_norm_weight = torch.nn.Parameter(empty(in_features))
        is_centered = self.normalization == "LayerNorm"
        self.layer_norm_bias = torch.nn.Parameter(empty(in_features)) if is_centered else None
        weights = empty(out_features, in_features).split(self.parameter_split_sizes)
        for name, part in zip(self.weight_names, weights):
            self.register_parameter(name, torch.nn.Parameter(part))
        biases = empty(out_features).split(self.parameter_split_sizes)
        for name, part in zip(self.bias_names, biases):
            if self.use_bias:
                self.register_parameter(name, torch.nn.Parameter(part))
            else:
                setattr(self, name, empty(0))
        self.reset_parameters()
        self._mark_parameters()

    def reset_parameters(self) -> None:
        """Sets the first values and the attributes of the parameters.

        layer_norm_weight is 1 (0 if zero-centered), each weight is filled by init_method, biases
        are 0. On "meta" only the attributes are set.
        """
        self._mark_parameters()
        if self.layer_norm_weight.is_meta:
            return
        with torch.no_grad():
            self.layer_norm_weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.layer_norm_bias is not None:
                self.layer_norm_bias.zero_()
            for weight in self._weights():
                with self._random_state():
                    (self.init_method or _initialize)(weight)
            for bias in self._biases():
                bias.zero_()

    def _random_state(self) -> Any:
        if self.get_rng_state_tracker is None:
            return contextlib.nullcontext()
        names = () if self.rng_tracker_name is None else (self.rng_tracker_name,)
        return self.get_rng_state_tracker().fork(*names)

    def _weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.weight_names]

    def _biases(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.bias_names] if self.use_bias else []

    def _returned_bias(self, inp: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias that return_bias returns, in a dtype; empty without one."""
        bias = concatenate(self._biases(), dtype)
        return inp.new_empty(0, dtype=dtype) if bias is None else bias

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = False
        split = self._weights()
        if self.parallel_mode == "column":
            split += self._biases()
        for parameter in split:
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = 0, 1

    def _join_parameters(self) -> None:
        """Puts the parts into one storage again, after each was moved by itself."""
        for names in (self.weight_names, self.bias_names):
            # What pruning or a parametrization makes anew in each forward is no parameter.
            parts = [each for name in names if (each := self._parameters.get(name)) is not None]
            is_plain = all(part.data.__class__ is Tensor and not part.is_meta for part in parts)
            is_plain = is_plain and len(parts) == len(names)
            if len(parts) > 1 and is_plain:
                joined = join(parts)
                if joined.data_ptr() == parts[0].data_ptr():
                    continue
                for part, view in zip(parts, joined.split([len(part) for part in parts])):
                    part.data = view

    def _apply(self, function: Callable, recurse: bool = True) -> NormLinearParameters:
        super()._apply(function, recurse)
        if not self.use_bias:
            for name in self.bias_names:
                setattr(self, name, function(getattr(self, name)))
        self._join_parameters()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._join_parameters()

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars or len(self.weight_names) < 2:
            return
        # safetensors saves no tensor that is a part of a storage.
        for name in (*self.weight_names, *self.bias_names):
            part = destination.get(f"{prefix}{name}")
            if part.__class__ is Tensor and not part.is_meta and part.numel():
                destination[f"{prefix}{name}"] = torch.from_dlpack(arrays.in_memory(part))


def _initialize(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, 0.0, 0.023)


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
