"""torch: LayerNormLinear on one rank; cupynorm.LayerNormLinear in parallel/module.py extends it.

parameters.py         its parameters
layer.py              one call of it
fp8_layer.py          its calls inside cupynorm.fp8_autocast
function.py           its other calls
compiled.py           its operator for torch.compile
gradient_layer.py     fuse_wgrad_accumulation and delay_wgrad_compute
weight_gradients.py   how they add
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..nn.modes import SUPPORTED, are_plain, is_compiling, product_dtype, run_untraced
from ..norm.quantized import QuantizedTensor
from . import fold, one_kernel
from .call import (
    LinearCall,
    LinearOptions,
    Operands,
    all_of,
    check_eps,
    check_fused,
    has_no_normalized,
    is_fused,
    launch_of,
)
from .function import normalize_and_project
from .layer import LinearLayer
from .parameters import NormLinearParameters
from .weight_gradients import WeightGradientSink

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class OneRankLayerNormLinear(LinearLayer, NormLinearParameters):
    """A norm and the linear layer after it.

    It has TransformerEngine's arguments in TransformerEngine's order, its parameters and its state
    dict.

    Examples:
        >>> layer = cupynorm.LayerNormLinear(64, 192, normalization="RMSNorm", device="cpu")
        >>> layer(torch.randn(8, 64)).shape
        torch.Size([8, 192])
        >>> [name for name, _ in layer.named_parameters()]
        ['layer_norm_weight', 'weight', 'bias']

    in_features: the width of the norm.
    out_features: rows of the linear weight, of all parts together.
    eps: of the norm.
    normalization: "LayerNorm" or "RMSNorm" (no bias in the norm).
    zero_centered_gamma: multiply by 1 + layer_norm_weight, which is initialised to 0.
    bias: whether the linear layer has one. return_bias: do not add it, return it.
    return_layernorm_output: also return the normalised tensor.
    return_layernorm_output_gathered: the normalised tensor of all ranks, here the same.
    parameters_split: names, which share out_features evenly, or a dict of names and sizes. The
        parameters are then name_weight and name_bias instead of weight and bias, views that follow
        each other in one storage.
    init_method: fills each weight in place; by default normal with standard deviation 0.023.
    get_rng_state_tracker: init_method runs inside get_rng_state_tracker().fork(), or fork(name)
        where the module's attribute rng_tracker_name is set.
    params_dtype: of the parameters; by default torch's.
    device: "meta" leaves memory and values to to_empty() and reset_parameters().
    fuse_wgrad_accumulation: add the weight's gradient to weight.main_grad, which must exist. It is
        overwritten by the first backward after a forward with is_first_microbatch=True, or if
        weight.overwrite_main_grad is true. A weight with an attribute grad_added_to_main_grad gets
        it set to True, and a gradient without meaning.
    delay_wgrad_compute: backward() leaves the gradients of weights and biases to backward_dw(), one
        call for each backward. Both are refused inside DistributedDataParallel and fully_shard,
        which would miss the gradient; Megatron's reducer has hooks for them.
    parallel_mode: None, "column" or "row": how the ranks of tp_group share the layer. The biases
        of "column" get the attributes that weights have: tensor_model_parallel, partition_dim and
        partition_stride.
    tp_group: of torch.distributed. tp_size: its size, where set_tensor_parallel_group() gives the
        group later. With one rank nothing is shared, whatever the other arguments are.
    sequence_parallel: "column": the input has this rank's rows (its first dimension); "row": the
        output has.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad,
    symmetric_ar_type (None, "one_shot", "two_shot" or "multimem_all_reduce"): accepted, with a
        warning where several ranks share the layer. They have no effect on results, nor on
        collectives, which run beside products where they can: docs/parallel.md.
    ub_name, name: for the user.

    By keyword only, and not TransformerEngine's: save_normalized, fused, sm_margin, as for
    cupynorm.layer_norm_linear; and reduce_norm_gradients: with "column" and sequence_parallel, sum
    the gradients of the norm's parameters over tp_group in backward. Otherwise their attribute
    sequence_parallel tells Megatron to.

    Called with input (..., in_features) of the parameters' dtype, or of any under torch.autocast,
    it returns out (..., out_features), or a tuple of out, the bias (an empty tensor without one)
    and the normalised tensor, those that were requested. A cupynorm.QuantizedTensor as input is
    dequantised.

    is_first_microbatch: True for the first of several forwards with the same parameters, False for
        the others. What is made of the weight, in 8-bit floats or folded, is then made once.
        None: it is made each time. A fold without gradients is cached. A fold is made anew after a
        change of the parameters that torch can see; use True after another one
        (cupynorm.linear.fold.KeptFold).

    Raises ValueError, TypeError or NotImplementedError for invalid arguments.
    """

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
        arguments = locals()
        _check_choices(arguments)
        launch_of(sm_margin)
        check_eps(eps, "float32", centered=normalization == "LayerNorm")
        _check_features(in_features=in_features, out_features=out_features)
        super().__init__()
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self._share(arguments)
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        gathered = return_layernorm_output_gathered and return_layernorm_output
        self.return_layernorm_output_gathered = gathered
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.parallel_mode, self.ub_name, self.name = parallel_mode, ub_name, name
        self.save_normalized, self.fused, self.sm_margin = save_normalized, fused, sm_margin
        self.init_method, self.get_rng_state_tracker = init_method, get_rng_state_tracker
        for name in ("init_method", "get_rng_state_tracker"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise TypeError(f"{name} is {value!r}; expected a function or None")
        self._folded: fold.KeptFold | None = None
        self._begin_state()
        try:
            self._make_parameters(parameters_split, device, params_dtype)
        except (AssertionError, RuntimeError) as error:  # what torch says depends on its build
            if torch.device(device).type != "cuda" or torch.cuda.is_available():
                raise
            raise ValueError(
                f"device is {str(device)!r}, but torch finds no GPU; expected device='cpu' here"
            ) from error

    def _share(self, arguments: Mapping[str, Any]) -> None:
        """Takes the arguments of parallelism."""
        raise NotImplementedError

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
            return run_untraced(self.forward)(inp, is_first_microbatch, fp8_output, fp8_grad)
        if isinstance(inp, QuantizedTensor):
            inp = inp.dequantize()
        self._check_input(inp)
        operands = Operands(
            inp,
            None,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self._weights(),
            [] if self.return_bias else self._biases(),
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
        bias = (self._returned_bias(inp, y.dtype),) if self.return_bias else ()
        return y, *bias, *((normalized,) if self.return_layernorm_output else ())

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

    def _project(
        self,
        operands: Operands,
        is_first_microbatch: bool | None,
        sink: WeightGradientSink | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        call = LinearCall(operands, self.linear_options(product_dtype(operands.input)))
        folded = self._fold(call, is_first_microbatch)
        y, normalized, _ = normalize_and_project(call, sink, folded)
        return y, normalized

    def _fold(self, call: LinearCall, is_first_microbatch: bool | None) -> one_kernel.Folded | None:
        """The folded parameters: made and kept for True; those that were kept, for False.

        None where the call does not use them, or makes them itself.
        """
        if is_first_microbatch is None or not is_fused(self.fused) or is_compiling():
            return None
        if not are_plain(all_of(call.operands)) or not one_kernel.keeps_fold(call):
            return None
        kept = self._folded
        if is_first_microbatch or kept is None or not kept.fits(call):
            fold.forget(call.operands.weights[0])
            self._folded = kept = fold.KeptFold(call)
        return kept.folded

    # State.

    def _drop_derived(self) -> None:
        super()._drop_derived()
        self._folded = None
        fold.forget(self._weights()[0])

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_folded": None}

    def extra_repr(self) -> str:
        defaults = {
            "eps": 1e-5,
            "bias": True,
            "normalization": "LayerNorm",
            "zero_centered_gamma": False,
            "save_normalized": False,
            "fused": None,
        }
        values = {name: getattr(self, name) for name in defaults if name != "bias"}
        values["bias"] = self.use_bias
        extras = [
            f"{name}={values[name]!r}"
            for name, default in defaults.items()
            if values[name] != default
        ]
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return ", ".join([features, *extras])


def _check_choices(arguments: Mapping[str, Any]) -> None:
    normalization, fused = arguments["normalization"], arguments["fused"]
    if normalization not in NORMALIZATIONS:
        expected = " or ".join(map(repr, NORMALIZATIONS))
        raise ValueError(f"normalization is {normalization!r}; expected {expected}")
    check_fused(fused)
    if is_fused(fused) and arguments["return_layernorm_output"]:
        raise ValueError(has_no_normalized("return_layernorm_output", fused))
    dtype = arguments["params_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in SUPPORTED):
        expected = ", ".join(sorted(map(str, SUPPORTED)))
        raise TypeError(f"params_dtype is {dtype!r}; expected {expected}, or None")


def _check_features(**features_by_name: object) -> None:
    for name, features in features_by_name.items():
        if isinstance(features, bool) or not isinstance(features, numbers.Integral):
            raise TypeError(f"{name} is {features!r}; expected an int, 1 or more")
        if features < 1:
            raise ValueError(f"{name} is {features}; expected an int, 1 or more")
