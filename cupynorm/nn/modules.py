"""torch: LayerNorm and RMSNorm as modules.

They are torch.nn's modules, with the same constructors, parameters and state dicts, and with
cupynorm's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..dispatch.functor_text import BoundFunctor, Functors, Fuse
from ..functional import layer_norm, rms_norm
from ..gpu import arrays
from ..norm.checks import (
    bind_functors,
    check_eps,
    extents_of,
    names_what_was_removed,
    refuse_keywords,
)
from ..norm.quantized import QuantizedTensor
from ..norm.request import (
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Launch,
    checked_launch,
)
from ..options import check_flags, check_int
from ..recipes import E4M3, DelayedScaling
from . import autograd, by_torch, scales
from .modes import check_placement, is_recorded, is_transformed, run_untraced
from .quantization import quantization_of
from .scales import either

# torch.fx.symbolic_trace records these calls instead of tracing into them.
torch.fx.wrap("layer_norm")
torch.fx.wrap("rms_norm")
torch.fx.wrap("_without_dropout")
torch.fx.wrap("_keeping_y")

# Keywords beyond torch.nn's, with their defaults.
EXTRAS = {
    "zero_centered_gamma": False,
    "launch": None,
    "sequence_parallel": None,
    "round_x_hat": False,
    "memory_efficient": False,
    "fp8_state": False,
}


def calls_the_norm(module: torch.nn.Module, arguments: tuple) -> None:
    """A hook before forward, which does nothing.

    In eval mode torch.nn.TransformerEncoderLayer may read weight and eps of its norms and not call
    them. It calls modules with hooks.
    """


class Norm(scales.KeepsScales):
    """What LayerNorm and RMSNorm have beyond torch's: more options, forward, and 8 bits."""

    _centered: bool
    zero_centered_gamma: bool
    sequence_parallel: bool | None
    round_x_hat: bool
    memory_efficient: bool
    fp8_state: bool = False
    launch: Launch | None = None

    def _set_extras(self, *values: object) -> None:
        """values: in the order of EXTRAS.

        Must run before torch's constructor, which resets the parameters.
        """
        given = dict(zip(EXTRAS, values, strict=True))
        checked_launch(given["launch"])
        check_flags(
            **{name: each for name, each in given.items() if name != "launch" and each is not None}
        )
        for name, value in given.items():
            setattr(self, name, value)
        self.begin_state()

    def begin_state(self, kept: dict[str, scales.Scales] | None = None) -> None:
        kind = type(self).__qualname__
        self._fp8 = scales.Fp8State(kind, {"y": 1}, kept, warns=False)

    def reset_parameters(self) -> None:
        """Sets weight to 1, or to 0 with zero_centered_gamma, and bias to 0.

        Also sets the parameters' attribute sequence_parallel, unless it is None.
        """
        super().reset_parameters()
        if self.zero_centered_gamma and self.weight is not None:
            torch.nn.init.zeros_(self.weight)
            if not self._forward_pre_hooks:  # it is reset for the first time
                self.register_forward_pre_hook(calls_the_norm)
        self.mark_parameters()

    def mark_parameters(self) -> None:
        if self.sequence_parallel is not None:
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel

    def _parameter(self, name: str) -> torch.Tensor | None:
        """weight or bias.

        torch.nn.Module's attribute lookup takes a microsecond longer. It is needed where the
        parameter is parametrized.
        """
        held = self._parameters
        return held[name] if name in held else getattr(self, name)

    def forward(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        return_residual: bool = False,
        fp8_output: bool = False,
        fuse: Fuse = (),
        **unknown: NoReturn,
    ) -> torch.Tensor | QuantizedTensor | tuple[torch.Tensor | QuantizedTensor, ...]:
        if unknown:
            refuse_keywords(f"{type(self).__name__}'s call", unknown)
        if not self.training:
            fuse = _without_dropout(fuse)
        if fp8_output is not False:
            check_flags(fp8_output=fp8_output)
        if fp8_output:
            call = run_untraced(self._forward_in_fp8)
            return call(input, residual, return_residual, bind_functors(fuse))
        if self.memory_efficient:
            bias = self._parameter("bias") if self._centered else None
            tensors = input, self._parameter("weight"), bias, residual
            numerics = self.eps, self.zero_centered_gamma, self.round_x_hat
            options = (*numerics, None, None, fuse, self.launch, True)
            shape = self.normalized_shape
            return _keeping_y(self._centered, shape, tensors, options, return_residual)
        norm, parameters = rms_norm, (self._parameter("weight"),)
        if self._centered:
            norm, parameters = layer_norm, (*parameters, self._parameter("bias"))
        return norm(
            input,
            self.normalized_shape,
            *parameters,
            self.eps,
            residual=residual,
            return_residual=return_residual,
            zero_centered_weight=self.zero_centered_gamma,
            round_x_hat=self.round_x_hat,
            fuse=fuse,
            launch=self.launch,
        )

    def _get_name(self) -> str:
        """What print(model) shows."""
        return f"cupynorm.{type(self).__name__}"

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in EXTRAS}
        extras = [f"{name}={value}" for name, value in values.items() if value != EXTRAS[name]]
        return ", ".join([super().extra_repr(), *extras])

    def _forward_in_fp8(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        return_residual: bool,
        functors: Functors | None,
    ) -> Any:
        """The call with fp8_output."""
        region = scales.kept(scales.active)
        if region is None:
            raise ValueError(
                "fp8_output is True outside of fp8_autocast; "
                "expected False, or the call inside of it"
            )
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input is {arrays.type_in_words(input)}; expected a torch tensor")
        if is_recorded():
            raise NotImplementedError(
                "torch.export or make_fx was asked to record a norm with fp8_output=True; expected "
                "fp8_output=False"
            )
        is_sharded = by_torch.is_any_dtensor(input)
        if not (is_sharded or is_transformed()):
            arrays.check_addresses(input=input)  # before scales are moved to its device
        scales.check_checkpoint(region)
        recipe, kept, scale, amax = region.recipe, None, None, None
        if isinstance(recipe, DelayedScaling):  # changes nothing yet: the call may be refused
            scales.check_is_no_replica(self)
            keeps, former = scales.keeps_amaxes(), self._fp8.scales.get("y")
            kept = scales.scales_for(former, (E4M3,), recipe, input.device, keeps_amaxes=keeps)
            scale = scales.kept(kept.scale.clone) if scales.runs else kept.scale
            amax = kept.amax(0) if keeps else None
        # The next layer may need the transposed copy for its weight's gradient. No linear layer
        # takes a DTensor in 8 bits.
        transpose = torch.is_grad_enabled() and not is_sharded
        quantization = quantization_of(recipe, transpose=transpose)
        norm_operands = ForwardOperands(
            input,
            self._parameter("weight"),
            self._parameter("bias") if self._centered else None,
            residual,
            scale=scale,
            amax=amax,
            functors=functors,
        )
        norm_options = ForwardOptions(
            self._centered,
            self.normalized_shape,
            self.eps,
            self.zero_centered_gamma,
            quantization.dtype,
            round_x_hat=self.round_x_hat,
            memory_efficient=self.memory_efficient,
            quantization=quantization,
            launch=self.launch,
        )
        y, added = autograd.normalize(ForwardRequest(norm_operands, norm_options))
        if kept is not None:
            self._fp8.scales["y"] = kept
        if amax is not None:
            region.used[self._fp8.slot, 0] = scales.UsedScales(kept, recipe, region.group)
        return (y, added) if return_residual else y


class LayerNorm(Norm, torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed by cupynorm.layer_norm.

    It has the same arguments in the same order, the same parameters and the same state dict.

    Examples:
        >>> norm = cupynorm.LayerNorm(4)
        >>> norm(torch.tensor([[1.0, 2.0, 3.0, 6.0]])).detach().numpy().round(3)
        array([[-1.069, -0.535,  0.   ,  1.604]], dtype=float32)

    normalized_shape, eps, elementwise_affine, bias, device, dtype: as torch's.

    By keyword only:
    zero_centered_gamma: multiply by 1 + weight; weight is initialised to 0.
    launch: a cupynorm.Launch; TransformerEngine's sm_margin is Launch(sm_margin=...).
    sequence_parallel: unless None, parameters get it as an attribute of that name, for frameworks
        that reduce their gradients.
    round_x_hat: as for cupynorm.layer_norm.
    memory_efficient: keep y for backward instead of the normalised row, as apex's norms do:
        docs/calls.md. It goes with neither fp8_output nor fuse.
    fp8_state: True puts `_extra_state` into the state dict from the start, as
        torch.distributed.checkpoint needs it to load a scale.
    hidden_size, params_dtype: other names of normalized_shape and dtype.

    Called with input (..., *normalized_shape), and optionally a residual of its shape, it returns y
    of input's shape and dtype, or (y, input + residual) with return_residual=True. Under CUDA's
    autocast y is float32. fuse is as for cupynorm.layer_norm; functors named dropout apply only in
    training mode.
    fp8_output: inside cupynorm.fp8_autocast, return y as a cupynorm.types.QuantizedTensor by the
        recipe, with its transposed copy where gradients are recorded and y has one scale. Its
        dequantize() is differentiable.

    State dicts can be exchanged with torch.nn. A module with a scale of DelayedScaling saves it as
    `_extra_state`, bytes without pickle. Loading a state dict without it removes the scale.

    Raises ValueError or TypeError as cupynorm.layer_norm, and for both spellings of an argument.
    """

    _centered = True

    @names_what_was_removed
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        launch: Launch | None = None,
        sequence_parallel: bool | None = None,
        round_x_hat: bool = False,
        memory_efficient: bool = False,
        fp8_state: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        shape = either(normalized_shape=normalized_shape, hidden_size=hidden_size)
        dtype = either(dtype=dtype, params_dtype=params_dtype)
        extents = _checked(True, shape, eps, device, dtype)
        check_flags(elementwise_affine=elementwise_affine, bias=bias)
        numerics = round_x_hat, memory_efficient, fp8_state
        self._set_extras(zero_centered_gamma, launch, sequence_parallel, *numerics)
        super().__init__(extents, eps, elementwise_affine, bias, device, dtype)


class RMSNorm(Norm, torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by cupynorm.rms_norm.

    It has the same arguments in the same order, the same parameter and the same state dict.

    Examples:
        >>> norm = cupynorm.RMSNorm(2)
        >>> norm(torch.tensor([[3.0, 4.0]])).detach().numpy().round(3)
        array([[0.849, 1.131]], dtype=float32)

    eps: by default the machine epsilon of the arithmetic, as torch's (TransformerEngine's is 1e-5).
    All else as cupynorm.LayerNorm, except that there is no bias.
    """

    _centered = False

    @names_what_was_removed
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        launch: Launch | None = None,
        sequence_parallel: bool | None = None,
        round_x_hat: bool = False,
        memory_efficient: bool = False,
        fp8_state: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        shape = either(normalized_shape=normalized_shape, hidden_size=hidden_size)
        dtype = either(dtype=dtype, params_dtype=params_dtype)
        extents = _checked(False, shape, eps, device, dtype)
        check_flags(elementwise_affine=elementwise_affine)
        numerics = round_x_hat, memory_efficient, fp8_state
        self._set_extras(zero_centered_gamma, launch, sequence_parallel, *numerics)
        super().__init__(extents, eps, elementwise_affine, device, dtype)


def _without_dropout(fuse: Fuse) -> Fuse:
    """fuse, for a module that does not train."""
    if fuse.__class__ is tuple and not fuse:
        return fuse
    is_one = isinstance(fuse, BoundFunctor) or not isinstance(fuse, (tuple, list))
    given = (fuse,) if is_one else fuse
    return tuple(
        each
        for each in given
        if not (isinstance(each, BoundFunctor) and each.functor.name == "dropout")
    )


def _keeping_y(*arguments: Any) -> Any:
    """The norm, of which autograd keeps y and not the normalised row."""
    return autograd.norm(*arguments)


def _checked(
    centered: bool, shape: object, eps: object, device: object, dtype: object
) -> tuple[int, ...]:
    """The shape that a norm is over. Raises TypeError or ValueError for what no norm has."""
    check_eps(eps, "float32", has_default=not centered)
    check_placement(device, dtype)
    return tuple(check_int("normalized_shape", extent) for extent in extents_of(shape))
