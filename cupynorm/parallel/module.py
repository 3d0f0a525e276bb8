"""torch: LayerNormLinear on one rank or several: which part of it a rank has, and its calls.

sharding.py     how the ranks share the layer
row.py          what ranks compute and exchange in mode "row"; linear/products.py has "column"
ranks.py        the group and its collectives
agreement.py    what ranks must agree on, and how they compare it
checkpoints.py  state dicts that load on another number of ranks
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from ..linear import parameters
from ..linear.layers import LinearLayer
from ..linear.operands import (
    LinearOptions,
    Operands,
    check_fused,
    concatenate,
    is_fused,
    launch_of,
)
from ..linear.products import ONE_RANK, OneRank
from ..nn import modes, scales
from ..norm.checks import check_eps
from ..norm.quantized import QuantizedTensor
from ..options import check_choice, check_flags, check_int, shown
from ..recipes import DelayedScaling
from . import agreement
from .ranks import Ranks, group_size
from .sharding import Sharding

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
MODES = (None, "column", "row")
ALL_REDUCES = ("one_shot", "two_shot", "multimem_all_reduce")  # of TransformerEngine
WITHOUT_EFFECT = (
    *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad"),
    "symmetric_ar_type",
)
FLAGS = (
    *("sequence_parallel", "fuse_wgrad_accumulation", "bias", "return_bias", "zero_centered_gamma"),
    *("return_layernorm_output", "return_layernorm_output_gathered", "delay_wgrad_compute"),
    *("save_normalized", "reduce_norm_gradients", *WITHOUT_EFFECT[:-1]),
)
# Attributes that are the same on all ranks of a layer.
COMPARED = (
    "parallel_mode",
    "sequence_parallel",
    "normalization",
    "eps",
    "zero_centered_gamma",
    "return_bias",
    "return_layernorm_output_gathered",
    "reduce_norm_gradients",
)


class LayerNormLinear(LinearLayer):
    """A norm and the linear layer after it.

    It has TransformerEngine's arguments in TransformerEngine's order, its parameters and its state
    dict.

    Examples:
        >>> layer = cupynorm.LayerNormLinear(64, 192, normalization="RMSNorm", device="cpu")
        >>> layer(torch.randn(8, 64)).shape
        torch.Size([8, 192])
        >>> [name for name, _ in layer.named_parameters()]
        ['layer_norm_weight', 'weight', 'bias']

    in_features: the width of the norm. out_features: of all parts together. eps: of the norm.
    normalization: "LayerNorm" or "RMSNorm" (no bias in the norm).
    zero_centered_gamma: multiply by 1 + layer_norm_weight, which is initialised to 0.
    bias: whether the linear layer has one. return_bias: do not add it, return it.
    return_layernorm_output: also return the normalised tensor;
        return_layernorm_output_gathered: that of all ranks.
    parameters_split: names, which share out_features evenly, or a dict of names and sizes. The
        parameters are then name_weight and name_bias, views that follow each other in one storage.
    init_method: fills each weight in place; by default normal with standard deviation 0.023. It
        runs inside get_rng_state_tracker().fork(), or fork(name) where the attribute
        rng_tracker_name is set.
    params_dtype: of the parameters; by default torch's.
    device: "meta" leaves memory and values to to_empty() and reset_parameters().
    fuse_wgrad_accumulation: add the weight's gradient to weight.main_grad, which must exist. The
        first backward after a forward with is_first_microbatch=True overwrites it, or any if
        weight.overwrite_main_grad is true. weight.grad_added_to_main_grad, if present, becomes
        True; such a weight gets a gradient without meaning.
    delay_wgrad_compute: backward() leaves the gradients of weights and biases to backward_dw(), one
        call for each backward. DistributedDataParallel and fully_shard would miss these gradients,
        so both options are refused inside them.
    parallel_mode: None, "column" or "row": how the ranks of tp_group share the layer.
    tp_group: of torch.distributed. tp_size: its size, where set_tensor_parallel_group() gives the
        group later. With one rank nothing is shared.
    sequence_parallel: each rank has some rows (the first dimension) of the input ("column") or of
        the output ("row").
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad,
        symmetric_ar_type: accepted, with a warning where ranks share the layer: without effect.
    ub_name, name: for the user.
    save_normalized, fused (on one rank), sm_margin: as for cupynorm.layer_norm_linear.
    reduce_norm_gradients: with "column" and sequence_parallel, sum the gradients of the norm's
        parameters over tp_group in backward. Otherwise their attribute sequence_parallel tells
        Megatron to.

    Called with input (..., in_features) of the parameters' dtype, or of any under torch.autocast,
    or with a cupynorm.types.QuantizedTensor, it returns out (..., out_features), or a tuple of out,
    the bias (empty without one) and the normalised tensor, those that were requested.
    is_first_microbatch: True for the first of several forwards with the same parameters, False for
        the others: the weight is then quantised once. None: each time.

    Raises ValueError, TypeError or NotImplementedError for invalid arguments.
    """

    rng_tracker_name: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        save_normalized: bool = False,
        fused: str | None = None,
        sm_margin: int | Mapping[str, int] = 0,
        reduce_norm_gradients: bool = False,
    ) -> None:
        given = locals()
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_choice("parallel_mode", parallel_mode, MODES)
        check_flags(**{name: given[name] for name in FLAGS})
        check_fused(fused, return_layernorm_output=return_layernorm_output)
        modes.check_placement(device, params_dtype, "params_dtype")
        for what, function in (
            ("init_method", init_method),
            ("get_rng_state_tracker", get_rng_state_tracker),
        ):
            if function is not None and not callable(function):
                raise TypeError(f"{what} is {shown(function)}; expected a function or None")
        for what in ("in_features", "out_features", "tp_size"):
            check_int(what, given[what], 1)
        launch_of(sm_margin)
        check_eps(eps, "float32", has_default=normalization != "LayerNorm")
        super().__init__()
        if tp_group is not None and tp_size == 1:
            tp_size = group_size(tp_group)
        self._ranks, self.tp_size = Ranks(tp_size, tp_group), tp_size
        self.parallel_mode, self._is_shared = parallel_mode, tp_size > 1 and bool(parallel_mode)
        if self._is_shared and is_fused(fused):
            raise ValueError(f"fused is {fused!r} and tp_size is {tp_size}; expected fused=None")
        if self._is_shared and parallel_mode == "row":
            in_features = _share(in_features, tp_size, "in_features")
        elif self._is_shared:
            out_features = _share(out_features, tp_size, "out_features")
        check_choice("symmetric_ar_type", symmetric_ar_type, (None, *ALL_REDUCES))
        if idle := [name for name in WITHOUT_EFFECT if self._is_shared and given[name]]:
            warnings.warn(
                f"{', '.join(idle)} has no effect: collectives are those of tp_group, which run "
                "beside products where they can",
                stacklevel=2,
            )
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.sequence_parallel = bool(sequence_parallel) and tp_size > 1
        self.reduce_norm_gradients = reduce_norm_gradients
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        gathered = return_layernorm_output_gathered and return_layernorm_output
        self.return_layernorm_output_gathered = gathered
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.ub_name, self.name = ub_name, name
        self.save_normalized, self.fused, self.sm_margin = save_normalized, fused, sm_margin
        self.init_method, self.get_rng_state_tracker = init_method, get_rng_state_tracker
        self.begin_state()
        try:
            parameters.make(self, parameters_split, device, params_dtype)
            self.reset_parameters()
        except (AssertionError, RuntimeError) as error:  # what torch says depends on its build
            if torch.device(device).type != "cuda" or torch.cuda.is_available():
                raise
            raise ValueError(
                f"device is {str(device)!r}, but torch finds no GPU; expected device='cpu' here"
            ) from error

    # Parameters.

    def reset_parameters(self) -> None:
        """Sets the first values and the attributes of the parameters.

        layer_norm_weight is 1 (0 if zero-centered), each weight is filled by init_method, biases
        are 0. On "meta" only the attributes are set.
        """
        self.mark_parameters()
        if not self.layer_norm_weight.is_meta:
            parameters.fill(self)

    def mark_parameters(self) -> None:
        super().mark_parameters()
        is_row = self.parallel_mode == "row" and self._is_shared
        reduced = self._is_shared and self.reduce_norm_gradients
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel and not (is_row or reduced)
        split = [*self.weights(), *(self.biases() if self.parallel_mode == "column" else ())]
        if is_row:
            norm = (self.layer_norm_weight, self.layer_norm_bias)
            split += [each for each in norm if each is not None]
            for bias in self.biases():
                # Only a bias that is returned is added to some rows on each rank.
                bias.sequence_parallel = self.sequence_parallel and self.return_bias
            for weight in self.weights():
                weight.sequence_parallel = False
        for parameter in split:
            parameter.tensor_model_parallel = True
            parameter.partition_dim = int(is_row and parameter.ndim == 2)
            parameter.partition_stride = 1

    def shard_dims(self) -> dict[str, int]:
        """The parameters of which each rank has a part, and the dimension that is split."""
        if not self._is_shared:
            return {}
        if self.parallel_mode == "column":
            return dict.fromkeys([*self.weight_names, *(self.bias_names * self.use_bias)], 0)
        norm = ("layer_norm_weight", "layer_norm_bias")[: 1 + (self.layer_norm_bias is not None)]
        return dict.fromkeys(norm, 0) | dict.fromkeys(self.weight_names, 1)

    @property
    def tp_group(self) -> Any:
        """Of torch.distributed; None where none was given or set."""
        return self._ranks.group

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the group of tp_size ranks. Expected before the first call, if not given before.

        Raises ValueError for a group of another size, TypeError for what is no group.
        """
        if tp_group is not None or self.tp_size > 1:
            self._ranks.set_group(tp_group)

    # Calls.

    def forward(
        self,
        inp: Tensor | QuantizedTensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor | QuantizedTensor | tuple[Tensor | QuantizedTensor, ...]:
        """The call.

        Inside cupynorm.fp8_autocast:
        fp8_output: without gradients, return out as a QuantizedTensor of its rows. Its scale is of
            its own amax, except where the recipe's scales are of blocks.
        fp8_grad: round the gradient of the normalised tensor to an 8-bit float too, before that of
            return_layernorm_output is added.
        """
        if self._runs_untraced():
            run = modes.run_untraced(self.forward)
            return run(inp, is_first_microbatch, fp8_output, fp8_grad)
        if isinstance(inp, QuantizedTensor):
            inp = inp.dequantize()
        self._check_input(inp)
        operands = Operands(
            inp,
            None,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weights(),
            [] if self.return_bias else self.biases(),
        )
        y, normalized = self._call(
            operands,
            self._region(),
            is_first_microbatch,
            fp8_output=fp8_output,
            fp8_grad=fp8_grad,
        )
        if not self.return_bias and not self.return_layernorm_output:
            return y
        results: list[Any] = [y]
        if self.return_bias:
            bias = concatenate(self.biases(), y.dtype)
            results.append(inp.new_empty(0, dtype=y.dtype) if bias is None else bias)
        if self.return_layernorm_output:
            results.append(normalized)
        return tuple(results)

    def _runs_untraced(self) -> bool:
        """Also where several ranks share the layer."""
        if self._is_shared and (modes.is_compiling() or modes.present_tracer()):
            return True
        return super()._runs_untraced()

    def linear_options(self, dtype: torch.dtype) -> LinearOptions:
        """The layer's options for products of a dtype."""
        return LinearOptions(
            self.normalization == "LayerNorm",
            self.eps,
            bool(self.zero_centered_gamma),
            self.return_layernorm_output,
            self.save_normalized and not is_fused(self.fused),
            self.fused,
            launch_of(self.sm_margin),
            dtype,
        )

    def _call(
        self,
        operands: Operands,
        region: scales.Region | None,
        is_first_microbatch: bool | None,
        **options: Any,
    ) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        if self._is_shared:
            kind = agreement.kind_of(operands, region, self.training, options["fp8_grad"])
            if kind not in self._ranks.known:
                self._agree(kind, region, operands)
        return super()._call(operands, region, is_first_microbatch, **options)

    def _agree(self, kind: tuple, region: scales.Region | None, operands: Operands) -> None:
        """Raises before any collective unless all ranks make this kind of call."""
        self._ranks.check_group()
        self.sharding.check_plain(operands)
        call = agreement.describe(kind, region, shares_scales=self._shares_scales)
        call |= {name: getattr(self, name) for name in COMPARED}
        call |= {
            "out_features of a rank": self.out_features,
            "bias": self.use_bias,
            "the device": operands.input.device.type,
            "the dtype of the weight": operands.weights[0].dtype,
            "the dtype of layer_norm_weight": operands.norm_weight.dtype,
        }
        self._ranks.agree(call)
        if region is not None:
            self._check_amaxes(region)
        self._ranks.known.add(kind)

    def _check_input(self, inp: object) -> None:
        if not self._is_shared or not isinstance(inp, Tensor):
            super()._check_input(inp)
            return
        size, mode = self.tp_size, self.parallel_mode
        if inp.shape[-1:] != (self.in_features,):
            whole = f", of {self.in_features * size} on all ranks" if mode == "row" else ""
            raise ValueError(
                f"input has shape {tuple(inp.shape)}; expected (..., {self.in_features}), this "
                f"rank's in_features{whole}"
            )
        if self.sequence_parallel and inp.ndim < 2:
            raise ValueError(
                f"input has shape {tuple(inp.shape)} with sequence_parallel; expected two "
                "dimensions or more, the first of which is shared"
            )
        if self.sequence_parallel and mode == "row" and len(inp) % size:
            raise ValueError(
                f"input has {len(inp)} rows in its first dimension, and tp_size is {size}; "
                f"expected a multiple of {size}"
            )

    @property
    def sharding(self) -> OneRank:
        """How the ranks share the layer."""
        if not self._is_shared:
            return ONE_RANK
        return Sharding(
            self._ranks,
            self.parallel_mode,
            sequence_parallel=self.sequence_parallel,
            gathered=self.return_layernorm_output_gathered,
            reduces_norm=self.reduce_norm_gradients,
        )

    @property
    def _shares_scales(self) -> bool:
        return self.sequence_parallel or self.parallel_mode == "row"

    def _check_amaxes(self, region: scales.Region) -> None:
        """Raises where ranks that share an 8-bit tensor would have scales of their own.

        The ranks have agreed on the group, so that it has all of them or none.
        """
        recipe = region.recipe
        if not isinstance(recipe, DelayedScaling) or not self._shares_scales:
            return
        if not recipe.reduce_amax:
            raise ValueError(
                "reduce_amax is False and ranks share a tensor (sequence_parallel or "
                "parallel_mode='row'); expected reduce_amax=True"
            )
        if distributed.get_rank(region.group) < 0:
            raise ValueError(
                "the group of fp8_autocast is without this rank; expected a group that has all "
                "ranks of tp_group"
            )

    # State.

    def _apply(self, function: Callable, recurse: bool = True) -> LayerNormLinear:
        super()._apply(function, recurse)
        if not self.use_bias:
            for name in self.bias_names:
                setattr(self, name, function(getattr(self, name)))
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            parameters.separate_parts(self, destination, prefix)

    def extra_repr(self) -> str:
        values = {
            "eps": (self.eps, 1e-5),
            "bias": (self.use_bias, True),
            "normalization": (self.normalization, "LayerNorm"),
            "zero_centered_gamma": (self.zero_centered_gamma, False),
            "save_normalized": (self.save_normalized, False),
            "fused": (self.fused, None),
        }
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"{name}={value!r}" for name, (value, usual) in values.items() if value != usual]
        if self._is_shared:
            parts += [f"parallel_mode={self.parallel_mode!r}", f"tp_size={self.tp_size}"]
            parts.append(f"sequence_parallel={self.sequence_parallel}")
        return ", ".join(parts)


def _share(features: int, size: int, name: str) -> int:
    """The features of each rank."""
    if features % size:
        raise ValueError(
            f"{name} is {features} and tp_size is {size}; expected a multiple of {size}"
        )
    return features // size
