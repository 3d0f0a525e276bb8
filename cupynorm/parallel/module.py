"""torch: LayerNormLinear on one rank or several: which part of it a rank has, and its calls.

function.py         a call, differentiable, eager and for torch.compile
column.py, row.py   what ranks compute and exchange in it
products.py         their products, in the dtype of the call or in 8-bit floats
sharding.py         how the ranks share the layer
ranks.py            the group and its collectives
agreement.py        what ranks must agree on, and how they compare it
checkpoints.py      state dicts that load on another number of ranks
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, distributed

from ..linear.call import LinearCall, Operands, is_fused
from ..linear.fp8 import RegionCall
from ..linear.function import check_call
from ..linear.matrices import as_rows
from ..linear.module import OneRankLayerNormLinear
from ..linear.weight_gradients import WeightGradientSink
from ..nn import autocast, modes
from ..nn.modes import product_dtype
from ..nn.recipes import DelayedScaling
from ..norm.quantized import QuantizedTensor
from . import agreement
from .function import check_plain, project, project_by_torch
from .products import FloatProducts, QuantizedProducts
from .ranks import Ranks, group_size
from .sharding import Sharding

MODES = (None, "column", "row")
ALL_REDUCES = ("one_shot", "two_shot", "multimem_all_reduce")  # of TransformerEngine
WITHOUT_EFFECT = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_wgrad",
    "ub_bulk_dgrad",
    "symmetric_ar_type",
)
# Attributes that are the same on all ranks of a layer.
COMPARED = (
    "parallel_mode",
    "sequence_parallel",
    "normalization",
    "eps",
    "zero_centered_gamma",
    "fused",
    "return_bias",
    "return_layernorm_output_gathered",
    "reduce_norm_gradients",
)


class LayerNormLinear(OneRankLayerNormLinear):
    __doc__ = OneRankLayerNormLinear.__doc__

    # Parameters.

    def _share(self, arguments: Mapping[str, Any]) -> None:
        mode, group, size = arguments["parallel_mode"], arguments["tp_group"], arguments["tp_size"]
        if mode not in MODES:
            raise ValueError(f"parallel_mode is {mode!r}; expected None, 'column' or 'row'")
        self._ranks = Ranks(_size(group, size), group)
        self.tp_size = size = self._ranks.size
        self.sequence_parallel = bool(arguments["sequence_parallel"]) and size > 1
        self.reduce_norm_gradients = arguments["reduce_norm_gradients"]
        is_shared = size > 1 and mode is not None
        if is_shared and mode == "row" and is_fused(arguments["fused"]):
            raise ValueError(
                f"fused is {arguments['fused']!r} and tp_size is {size} with parallel_mode='row'; "
                "expected fused=None, because a rank has no whole rows"
            )
        name = {"column": "out_features", "row": "in_features"}.get(mode, "")
        if is_shared:
            if arguments[name] % size:
                raise ValueError(
                    f"{name} is {arguments[name]} and tp_size is {size}; "
                    f"expected a multiple of {size}"
                )
            setattr(self, name, arguments[name] // size)
        if is_shared and mode == "column":
            self._num_out_shards = size
        self._is_shared = is_shared
        _check_collectives(arguments, is_shared=is_shared)

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        of_norm = [
            each for each in (self.layer_norm_weight, self.layer_norm_bias) if each is not None
        ]
        if self.parallel_mode == "row" and self._is_shared:
            for parameter in of_norm:
                _mark(parameter, 0)
            for weight in self._weights():
                _mark(weight, 1)
            for bias in self._biases():
                # Only a bias that is returned is added to some rows on each rank.
                bias.sequence_parallel = self.sequence_parallel and self.return_bias
        else:
            reduced = self._is_shared and self.reduce_norm_gradients
            for parameter in of_norm:
                parameter.sequence_parallel = self.sequence_parallel and not reduced

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
        if self._is_shared and (modes.is_compiling() or modes.present_tracer()):
            if self._is_traced(inp):
                return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)
            call = modes.run_untraced(self.forward)
            return call(inp, is_first_microbatch, fp8_output, fp8_grad)
        return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)

    forward.__doc__ = OneRankLayerNormLinear.forward.__doc__

    def _is_traced(self, inp: Tensor | QuantizedTensor) -> bool:
        """Whether torch.compile sees the operations of a call: function.project_by_torch."""
        return (
            modes.is_compiling()
            and self.parallel_mode == "column"
            and isinstance(inp, Tensor)
            and self.tp_group is not None
            and not is_fused(self.fused)
            and not self.fuse_wgrad_accumulation
            and not self.delay_wgrad_compute
            and not autocast.is_inside()
            and not autocast.runs
        )

    def _call(
        self,
        operands: Operands,
        region: autocast.Region | None,
        is_first_microbatch: bool | None,
        **options: Any,
    ) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        if self._is_shared and not modes.is_compiling():
            kind = agreement.kind_of(operands, region, self.training, options["fp8_grad"])
            if kind not in self._ranks.known:
                self._agree(kind, region, operands)
        return super()._call(operands, region, is_first_microbatch, **options)

    def _agree(self, kind: tuple, region: autocast.Region | None, operands: Operands) -> None:
        """Raises before any collective unless all ranks make this kind of call."""
        self._ranks.check_group()
        check_plain(operands)
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
    def _sharding(self) -> Sharding:
        is_gathered = self.return_layernorm_output_gathered and self.sequence_parallel
        return Sharding(
            self._ranks,
            self.parallel_mode,
            self.sequence_parallel,
            is_gathered and self.parallel_mode == "column",
            self.reduce_norm_gradients,
        )

    def _project(
        self,
        operands: Operands,
        is_first_microbatch: bool | None,
        sink: WeightGradientSink | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if not self._is_shared:
            return super()._project(operands, is_first_microbatch, sink)
        call = LinearCall(operands, self.linear_options(product_dtype(operands.input)))
        check_call(call)
        if modes.is_compiling():
            return project_by_torch(call, self._sharding)
        folded = self._fold(call, is_first_microbatch)
        return project(FloatProducts(call.options, self._sharding, folded), operands, sink)

    def _project_in_fp8(
        self, call: RegionCall, operands: Operands, fp8_output: bool
    ) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        if not self._is_shared:
            return super()._project_in_fp8(call, operands, fp8_output)
        call = self._checked(call, operands, fp8_output)
        check_plain(operands)
        has_sink = call.recorded and self._has_sink()
        sink = self._make_sink(call.is_first_microbatch) if has_sink else None
        quantized, weight = self.begin_in_fp8(call, operands)
        products = QuantizedProducts(quantized, self._sharding, weight)
        y, normalized = project(products, operands, sink)
        self._take_step(sink)
        if fp8_output:
            y = quantized.quantizers.quantize("output", as_rows(y))
        return y, normalized

    def _record_amaxes(self, operands: Operands, region: autocast.Region) -> None:
        if self._is_shared and self.parallel_mode == "row":
            raise NotImplementedError(
                f"calibrating is True and parallel_mode 'row' with tp_size {self.tp_size}; "
                "expected calibrating=False, because a rank has no whole rows to normalise"
            )
        super()._record_amaxes(operands, region)

    def _check_amaxes(self, region: autocast.Region) -> None:
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

    @property
    def _shares_scales(self) -> bool:
        return self.sequence_parallel or self.parallel_mode == "row"

    def extra_repr(self) -> str:
        if not self._is_shared:
            return super().extra_repr()
        return (
            f"{super().extra_repr()}, parallel_mode={self.parallel_mode!r}, "
            f"tp_size={self.tp_size}, sequence_parallel={self.sequence_parallel}"
        )


def _check_collectives(arguments: Mapping[str, Any], *, is_shared: bool) -> None:
    """Raises ValueError for an unknown symmetric_ar_type, and warns of what has no effect here."""
    kind = arguments["symmetric_ar_type"]
    if kind is not None and kind not in ALL_REDUCES:
        expected = ", ".join(map(repr, ALL_REDUCES))
        raise ValueError(f"symmetric_ar_type is {kind!r}; expected None, {expected}")
    idle = [name for name in WITHOUT_EFFECT if is_shared and arguments[name]]
    if idle:
        warnings.warn(
            f"{', '.join(idle)} has no effect: collectives are those of tp_group, which run beside "
            "products where they can",
            stacklevel=4,
        )


def _size(group: Any, size: Any) -> int:
    """The number of ranks. Raises TypeError or ValueError for arguments that do not fit."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"tp_size is {size!r}; expected an int, 1 or more")
    if size < 1:
        raise ValueError(f"tp_size is {size}; expected 1 or more")
    return group_size(group) if group is not None and size == 1 else size


def _mark(parameter: Tensor, dim: int) -> None:
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dim, 1
    parameter.sequence_parallel = False
