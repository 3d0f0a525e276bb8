"""torch: LayerNorm and RMSNorm as modules, and swapping them into a model.

The modules are torch.nn's, whose constructors, parameters and state dicts they keep, with another forward. `swap_norms` knows
torch's, TransformerEngine's and apex's norms by their classes; any other module it asks what it computes (`_probe`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import arrays, fp8, norm
from .calls import Margins, Quantization
from .norm import layer_norm, rms_norm

_EXTRAS = {
    "zero_centered_gamma": False,
    "sm_margin": 0,
    "sequence_parallel": None,
    "round_x_hat": False,
    "memory_efficient": False,
}


_EXTRA_STATE = "_extra_state"


class _Norm(torch.nn.Module):
    """What LayerNorm and RMSNorm have beyond torch's."""

    _fp8_scales: fp8.Scales | None = None  # of DelayedScaling, from the first such call on: of y alone

    def _set_extras(
        self, zero_centered_gamma: bool, sm_margin: int | Mapping[str, int], sequence_parallel: bool | None, round_x_hat: bool,
        memory_efficient: bool,
    ) -> None:  # fmt: skip
        """Comes before torch's constructor, which resets the parameters."""
        norm._margins(sm_margin)
        self.zero_centered_gamma = zero_centered_gamma
        self.sm_margin = sm_margin
        self.sequence_parallel = sequence_parallel
        self.round_x_hat = round_x_hat
        self.memory_efficient = memory_efficient

    def reset_parameters(self) -> None:
        """Weight 1, or 0 with zero_centered_gamma; bias 0; and their attribute sequence_parallel, if it is set."""
        super().reset_parameters()
        if self.zero_centered_gamma and self.weight is not None:
            torch.nn.init.zeros_(self.weight)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        if self.sequence_parallel is not None:
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel

    def _held(self, name: str) -> torch.Tensor | None:
        """weight or bias. As an attribute of a module it takes a microsecond longer to find;
        it is none where it is parametrized."""
        held = self._parameters
        return held[name] if name in held else getattr(self, name)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_parameters()  # a deep copy of a parameter loses its attributes

    def _apply(self, function: Callable, recurse: bool = True) -> _Norm:
        super()._apply(function, recurse)
        if self._fp8_scales is not None:
            self._fp8_scales = fp8.moved(self._fp8_scales, function)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._fp8_scales is not None:  # else it is torch.nn's state dict
            destination[f"{prefix}{_EXTRA_STATE}"] = fp8.pack({"y": self._fp8_scales})

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        key = f"{prefix}{_EXTRA_STATE}"
        # TransformerEngine's modules save a state of fp8 that norms do not have: that is passed over.
        extra = state_dict.get(key)
        self._load_scales(fp8.unpack(extra) if fp8.is_packed(extra) else {})
        super()._load_from_state_dict({name: value for name, value in state_dict.items() if name != key}, prefix, *arguments)
        self._mark_parameters()  # load_state_dict(assign=True) brings other parameters

    def _load_scales(self, states: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Of fp8.unpack; without any, the next step with DelayedScaling is the first."""
        if not states:
            self._fp8_scales = None
            return
        given = ", ".join(f"{name} of {len(scale)}" for name, (scale, _) in states.items())
        if given != "y of 1":
            raise ValueError(f"the fp8 state is of {given} tensors; expected that of a norm, y of 1")
        ((scale, amax_history),) = states.values()
        if self._fp8_scales is None:
            self._fp8_scales = fp8.Scales((fp8.E4M3,), len(amax_history), scale.device)
        self._fp8_scales.load(scale, amax_history)

    def _forward_in_fp8(
        self, centered: bool, input: torch.Tensor, residual: torch.Tensor | None, return_residual: bool, residual_dtype: Any,
        row_scale: torch.Tensor | None, dropout_p: float, dropout_seed: int | torch.Tensor | None,
        weight1: torch.Tensor | None, bias1: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        region = fp8.active()
        if region is None:
            raise ValueError("fp8_output is True outside of fp8_autocast; expected False, or the call inside of it")
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input is a {type(input).__name__}; expected a torch tensor")
        arrays.check_addresses(input=input)  # before scales go where it is
        how = self._quantization(region, input.device)
        fused_options = norm._fused_options(
            residual_dtype, row_scale, dropout_p if self.training else _dropping_none(dropout_p), dropout_seed, weight1, bias1,
            self.round_x_hat, self.memory_efficient, how.dtype,
        )  # fmt: skip
        return norm.normalize(
            centered, input, self.normalized_shape, self._held("weight"), self._held("bias") if centered else None, self.eps,
            residual, return_residual, self.zero_centered_gamma, how.dtype, None,
            norm._options(None, None, None, self.sm_margin), fused_options._replace(quantization=how),
        )  # fmt: skip

    def _quantization(self, region: fp8.Region, device: torch.device) -> Quantization:
        """Of y, by the region's recipe. Where gradients are recorded the transposed copy comes with one scale: what follows may
        need it for its weight's gradient, whatever the norm's own tensors need."""
        recipe, records = region.recipe, torch.is_grad_enabled()
        dtype = recipe.fp8_format.value[0]
        how = Quantization(str(dtype).removeprefix("torch."), transpose=records)
        if isinstance(recipe, fp8.CurrentScaling):
            return how._replace(scaling="tensor", power_of_two=recipe.power_of_two, smallest_amax=recipe.amax_epsilon)
        if isinstance(recipe, fp8.BlockScaling):
            return how._replace(scaling="block", power_of_two=recipe.power_of_two, transpose=False)
        self._fp8_scales = scales = fp8.scales_for(self._fp8_scales, (dtype,), recipe, device, records)
        if records:
            region.ended[id(self)] = fp8.UsedScales(scales, recipe, region.group)
        return how._replace(scale=scales.scale, amax=scales.amax(0) if records else None)

    def extra_repr(self) -> str:
        extras = [f"{name}={getattr(self, name)}" for name, default in _EXTRAS.items() if getattr(self, name) != default]
        return ", ".join([super().extra_repr(), *extras])


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed by cupynorm.layer_norm: its arguments in its order, its parameters, its state dict.

    normalized_shape, eps, elementwise_affine, bias, device, dtype: as torch's. weight and bias have shape normalized_shape.

    By keyword only, spelt as TransformerEngine spells them:
    zero_centered_gamma: multiply by 1 + weight, which starts at 0.
    sm_margin: an int, or a dict of "forward", "backward" and "inference", as of cupynorm.layer_norm.
    sequence_parallel: unless None, the parameters' attribute of that name, for those who reduce their gradients.
    round_x_hat, memory_efficient: as of cupynorm.layer_norm.
    hidden_size, params_dtype: other names of normalized_shape and dtype.

    Called with input (..., *normalized_shape) and perhaps a residual of its shape and dtype, it returns y of input's shape and
    dtype, or (y, input + residual) with return_residual=True. Under CUDA's autocast y is float32, as torch's is.
    residual_dtype, row_scale, dropout_p, dropout_seed, weight1 and bias1 are as of cupynorm.layer_norm, but that nothing is
    dropped unless the module trains.
    fp8_output: inside cupynorm.fp8_autocast y is a cupynorm.QuantizedTensor, in the format that the recipe has for forward; its
        dequantize() is differentiable. DelayedScaling: by a scale that the module keeps; where gradients are recorded the
        kernel records the amax of y, and the scale changes when the outermost region is left. CurrentScaling: by the scale of
        this y. BlockScaling: by one for each 128 columns. With one scale for all, and where gradients are recorded, there is
        also y.transposed, as what follows may need it for the gradient of its weight. It comes with what an 8-bit out_dtype of
        cupynorm.layer_norm comes with.

    State dicts go to torch.nn and back; in one of TransformerEngine `_extra_state` is passed over. Under that name a module
    with a scale of DelayedScaling saves it, as bytes without pickle (which torch.nn's load with strict=False), and loading a
    state dict without it takes it away.

    Raises TypeError where both spellings are given or normalized_shape is missing, ValueError for fp8_output=True outside of
    cupynorm.fp8_autocast, ValueError or TypeError for what cupynorm.layer_norm refuses.
    """

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
        sm_margin: int | Mapping[str, int] = 0,
        sequence_parallel: bool | None = None,
        round_x_hat: bool = False,
        memory_efficient: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        extents = norm._extents(_either(normalized_shape=normalized_shape, hidden_size=hidden_size))
        self._set_extras(zero_centered_gamma, sm_margin, sequence_parallel, round_x_hat, memory_efficient)
        super().__init__(extents, eps, elementwise_affine, bias, device, _either(dtype=dtype, params_dtype=params_dtype))

    def forward(
        self, input: torch.Tensor, residual: torch.Tensor | None = None, *, return_residual: bool = False,
        residual_dtype: torch.dtype | None = None, row_scale: torch.Tensor | None = None, dropout_p: float = 0.0,
        dropout_seed: int | torch.Tensor | None = None, weight1: torch.Tensor | None = None, bias1: torch.Tensor | None = None,
        fp8_output: bool = False,
    ) -> torch.Tensor | fp8.QuantizedTensor | tuple[torch.Tensor | fp8.QuantizedTensor, ...]:  # fmt: skip
        if fp8_output:
            return _untraced(self._forward_in_fp8)(
                True, input, residual, return_residual, residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1
            )
        return layer_norm(
            input, self.normalized_shape, self._held("weight"), self._held("bias"), self.eps, residual=residual,
            return_residual=return_residual, zero_centered_weight=self.zero_centered_gamma, sm_margin=self.sm_margin,
            residual_dtype=residual_dtype, row_scale=row_scale,
            dropout_p=dropout_p if self.training else _dropping_none(dropout_p), dropout_seed=dropout_seed,
            weight1=weight1, bias1=bias1, round_x_hat=self.round_x_hat, memory_efficient=self.memory_efficient,
        )  # fmt: skip


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by cupynorm.rms_norm: its arguments in its order, its parameter, its state dict.

    eps: by default the machine epsilon of the arithmetic, as torch's (TransformerEngine's is 1e-5).
    All else as cupynorm.LayerNorm, but that there is no bias.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        sm_margin: int | Mapping[str, int] = 0,
        sequence_parallel: bool | None = None,
        round_x_hat: bool = False,
        memory_efficient: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        extents = norm._extents(_either(normalized_shape=normalized_shape, hidden_size=hidden_size))
        self._set_extras(zero_centered_gamma, sm_margin, sequence_parallel, round_x_hat, memory_efficient)
        super().__init__(extents, eps, elementwise_affine, device, _either(dtype=dtype, params_dtype=params_dtype))

    def forward(
        self, input: torch.Tensor, residual: torch.Tensor | None = None, *, return_residual: bool = False,
        residual_dtype: torch.dtype | None = None, row_scale: torch.Tensor | None = None, dropout_p: float = 0.0,
        dropout_seed: int | torch.Tensor | None = None, weight1: torch.Tensor | None = None, bias1: torch.Tensor | None = None,
        fp8_output: bool = False,
    ) -> torch.Tensor | fp8.QuantizedTensor | tuple[torch.Tensor | fp8.QuantizedTensor, ...]:  # fmt: skip
        if fp8_output:
            return _untraced(self._forward_in_fp8)(
                False, input, residual, return_residual, residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1
            )
        return rms_norm(
            input, self.normalized_shape, self._held("weight"), self.eps, residual=residual, return_residual=return_residual,
            zero_centered_weight=self.zero_centered_gamma, sm_margin=self.sm_margin, residual_dtype=residual_dtype,
            row_scale=row_scale, dropout_p=dropout_p if self.training else _dropping_none(dropout_p), dropout_seed=dropout_seed,
            weight1=weight1, bias1=bias1, round_x_hat=self.round_x_hat, memory_efficient=self.memory_efficient,
        )  # fmt: skip


def _untraced(method: Callable) -> Callable:
    """A method that keeps scales from step to step and gives no tensor: torch.compile runs it as it is."""
    return torch.compiler.disable(method) if torch.compiler.is_dynamo_compiling() else method


def _dropping_none(dropout_p: object) -> float:
    """0 for a module that does not train, which checks dropout_p as if it did."""
    if type(dropout_p) is not float or dropout_p != 0.0:
        norm._check_dropout_p(dropout_p)
    return 0.0


def _either(**spellings: object) -> object:
    """The one of two spellings that is given, None if neither is."""
    given = {name: value for name, value in spellings.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"{' and '.join(given)} are given; expected one of these two names of one argument")
    return next(iter(given.values()), None)


# Swapping.


class Swap(NamedTuple):
    """One place in a model: its dotted name, the classes of the module that was there and of the one that is.

    remark: in which way results differ, or why the module was left.
    """

    name: str
    was: str
    now: str
    remark: str


@dataclass
class SwappedNorms:
    """What swap_norms did: the places where it swapped, and those where it left what looks like a norm. Prints as a table."""

    swapped: list[Swap] = field(default_factory=list)
    left: list[Swap] = field(default_factory=list)
    _places: list[tuple[torch.nn.Module, str, torch.nn.Module, torch.nn.Module]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Puts the original modules back, the same objects, with the parameters and the training flag of what stood for
        them."""
        while self._places:
            parent, name, module, replacement = self._places.pop()
            _hand_over(replacement, module)
            setattr(parent, name, module)

    def __str__(self) -> str:
        table = [Swap("name", "was", "now", ""), *self.swapped, *self.left]
        widths = [max(len(line[at]) for line in table) for at in range(3)]
        lines = [
            "  ".join([*(f"{cell:<{width}}" for cell, width in zip(line, widths)), line.remark]).rstrip() for line in table
        ]
        lines.append(f"{len(self.swapped)} swapped, {len(self.left)} left")
        return "\n".join(lines)


def swap_norms(model: torch.nn.Module, *, keep_rounding: bool = False) -> SwappedNorms:
    """Replaces every LayerNorm and RMSNorm inside model, in place, by cupynorm.LayerNorm and cupynorm.RMSNorm.

    keep_rounding: where a module rounds x_hat before its weight multiplies it, as those of Hugging Face's Llama do, its
        replacement does so too (round_x_hat): what was trained with that rounding keeps it.
    model: any torch.nn.Module, on any device, meta included. The parameters stay the same objects, so optimizers and state
    dicts stay valid; a module that is in several places is one module afterwards too.

    Swapped are torch.nn's LayerNorm and RMSNorm, TransformerEngine's, apex's fused ones, and every module that has but a weight
    and perhaps a bias, an eps, one input, and on random input on the CPU the output of a layer_norm or rms_norm, with weight or
    1 + weight: the RMSNorm classes of language models. Left are modules with hooks, with parametrized weights, or with a
    forward that does more. model itself is left too: only what holds a module can hold another in its place. y then has the
    dtype that LayerNorm gives it and one rounding, whatever the former module did; the remarks say where that differs.
    Attributes that only the former module had are gone. Swap before torch.compile wraps the model.

    Returns a SwappedNorms: prints as a table, `.undo()` puts the original modules back.
    Raises TypeError if model is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    report = SwappedNorms()
    if _looks_like_a_norm(model):
        reason = "it is the model itself, and only what holds a module can hold another in its place"
        report.left.append(Swap("(model)", _name(model), "", f"{reason}: swap inside torch.nn.Sequential(model)"))
    seen: dict[torch.nn.Module, tuple[str, torch.nn.Module | None]] = {}
    for path, parent, name, module in list(_places(model)):
        if module in seen:
            first, replacement = seen[module]
            remark = f"the module of {first}"
        else:
            replacement, remark = _replace(module, keep_rounding)
            seen[module] = path, replacement
        if replacement is None:
            report.left.append(Swap(path, _name(module), "", remark))
        else:
            setattr(parent, name, replacement)
            report._places.append((parent, name, module, replacement))
            report.swapped.append(Swap(path, _name(module), _name(replacement), remark))
    return report


def _places(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Module]]:
    """(dotted name, parent, name in it, module) of all that looks like a norm; a shared module once for each of its places."""
    for prefix, parent in model.named_modules():
        for name, module in parent._modules.items():
            if module is not None and _looks_like_a_norm(module):
                yield f"{prefix}.{name}" if prefix else name, parent, name, module


def _name(module: torch.nn.Module) -> str:
    """Package and class: torch.LayerNorm, apex.FusedRMSNorm."""
    return f"{type(module).__module__.partition('.')[0]}.{type(module).__qualname__}"


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    """By its class, or by being nothing but a weight and an eps. What holds other modules is no norm, whatever its name."""
    if isinstance(module, _Norm):
        return False
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return True
    if module._modules and not torch.nn.utils.parametrize.is_parametrized(module):
        return False
    named = re.search("(layer|rms)_?norm", type(module).__name__, re.IGNORECASE)
    return bool(named) or ([*_parameters(module)] == ["weight"] and bool(_eps_of(module)))


def _parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _eps_of(module: torch.nn.Module) -> list[float | None]:
    """What may be its eps: eps, epsilon, variance_epsilon, .. of the module; None is torch's machine epsilon."""
    found = [value for name, value in vars(module).items() if re.search("(^|_)eps", name)]
    return [value for value in found if value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))]


# By package, the classes that are taken at their name: most of them run on CUDA alone, and cannot be asked on a CPU.
_KNOWN = {
    "transformer_engine": {"LayerNorm", "RMSNorm"},
    "apex": {"FusedLayerNorm", "MixedFusedLayerNorm", "FastLayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm"},
}


def _replace(module: torch.nn.Module, keep_rounding: bool) -> tuple[torch.nn.Module | None, str]:
    """(replacement, how results differ), or (None, why there is none)."""
    if obstacle := _obstacle(module):
        return None, obstacle
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    eps, rounds = _eps_of(module)[0], False
    if kind in (torch.nn.LayerNorm, torch.nn.RMSNorm):
        formula, remark = _Formula(kind is torch.nn.LayerNorm, False, eps), ""
    elif kind.__qualname__ in _KNOWN.get(package, ()):
        zero_centered = getattr(module, "zero_centered_gamma", False)
        formula = _Formula("LayerNorm" in kind.__qualname__, zero_centered, eps)
        casts = package == "transformer_engine" or kind.__qualname__.startswith("Mixed")
        remark = "y was of the weight's dtype, now of the input's" if casts else ""
    else:
        try:
            formula, rounds, remark = _probe(module, keep_rounding)
        except Exception as error:  # of any forward whatever
            return None, f"its forward raised {type(error).__name__} on the CPU: {str(error).partition(chr(10))[0]}"
        if formula is None:
            return None, remark
    extras = {"zero_centered_gamma": formula.zero_centered, "round_x_hat": rounds}
    if package == "transformer_engine":
        extras |= {"sm_margin": _margins_of(module), "sequence_parallel": getattr(module, "sequence_parallel", None)}
    if package == "apex":
        extras["memory_efficient"] = getattr(module, "memory_efficient", False)
    parameters, shape = _parameters(module), _shape(module)
    if formula.centered:
        replacement = LayerNorm(shape, formula.eps, "weight" in parameters, "bias" in parameters, device="meta", **extras)
    else:
        replacement = RMSNorm(shape, formula.eps, "weight" in parameters, device="meta", **extras)
    _hand_over(module, replacement)
    return replacement, remark


def _hand_over(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """The parameters themselves, and whether it trains."""
    for name, parameter in _parameters(module).items():
        setattr(other, name, parameter)
    other.training = module.training


def _margins_of(module: torch.nn.Module) -> int | dict[str, int]:
    """TransformerEngine's margins; its releases spell the keys forward or fwd, and so on."""
    kinds = {kind[0]: kind for kind in Margins._fields}
    margins = {kinds[key[0]]: margin for key, margin in getattr(module, "_sm_margins", {}).items()}
    return margins if any(margins.values()) else 0


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    """What it normalises over; () where nothing says."""
    weight = module._parameters.get("weight")
    return norm._extents((getattr(module, "normalized_shape", None) or ()) if weight is None else weight.shape)


def _obstacle(module: torch.nn.Module) -> str:
    """Why it is left, whatever it computes; "" if nothing speaks against it."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return f"its {' and '.join(module.parametrizations)} is parametrized"
    hooks = sorted(name.strip("_") for name, value in vars(module).items() if name.endswith("hooks") and value)
    if hooks:
        return f"it has {', '.join(hooks)}"
    if "forward" in vars(module):
        return "its forward was replaced on this object"
    if type(module).__module__.startswith("transformer_engine.pytorch.ops"):
        return "TransformerEngine fuses it with what follows"
    parameters = _parameters(module)
    held = {*parameters, *module._buffers, *module._modules}
    if held not in ({"weight", "bias"}, {"weight"}, set()):
        return f"it holds {', '.join(sorted(held))}; expected a weight and perhaps a bias"
    for name, parameter in parameters.items():
        if type(parameter) is not torch.nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}; expected a plain torch.nn.Parameter"
    shape = _shape(module)
    if not shape or not math.prod(shape):
        return "nothing says what it normalises over: its weight is absent or empty"
    if any(tuple(parameter.shape) != shape for parameter in parameters.values()):
        return f"its weight has shape {shape}, its bias {tuple(parameters['bias'].shape)}; expected one shape"
    return "" if _eps_of(module) else "it has no eps"


# Asking a module what it computes.


class _Formula(NamedTuple):
    centered: bool
    zero_centered: bool
    eps: float | None

    def __call__(self, x: torch.Tensor, parameters: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The float64 values."""
        parameters = {name: parameter.double() for name, parameter in parameters.items()}
        eps = 2.0**-23 if self.eps is None else self.eps  # float32's, although x is float64 here
        call = layer_norm if self.centered else rms_norm
        return call(x.double(), shape, **parameters, eps=eps, zero_centered_weight=self.zero_centered)


def _probe(module: torch.nn.Module, keep_rounding: bool) -> tuple[_Formula | None, bool, str]:
    """The formula whose values the module gives, whether x_hat is to be rounded, and how dtypes and roundings differ;
    or None, and why."""
    takes = [*inspect.signature(module.forward).parameters]
    if len(takes) != 1:
        return None, False, f"its forward takes {', '.join(takes) or 'nothing'}; expected one input"
    shape, all_eps = _shape(module), _eps_of(module)
    # Rows of ordinary size, and rows whose variance is about eps, each with a mean.
    sizes = [1.0, *(math.sqrt(2.0**-23 if eps is None else abs(eps)) or 1.0 for eps in all_eps)]
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        x = torch.stack([(random(4, *shape) + 0.5) * size for size in sizes])
        parameters = {name: random(*shape) for name in _parameters(module)}
        # Neither training nor more dimensions may change anything.
        outputs = [_output(module, x, parameters, training) for training in (False, True)]
        outputs.append(_output(module, x.unsqueeze(1), parameters, False).reshape(x.shape))
        for formula in _formulas(all_eps, parameters):
            if all(_agrees(formula, output, x, parameters, shape) for output in outputs):
                return formula, *_differences(formula, module, x, parameters, shape, keep_rounding)
    return None, False, "it computes neither layer_norm nor rms_norm of its weight"


def _formulas(all_eps: list[float | None], parameters: dict[str, torch.Tensor]) -> Iterator[_Formula]:
    """Those that LayerNorm and RMSNorm have."""
    for eps in all_eps:
        for zero_centered in (False, True) if parameters else (False,):
            if "bias" not in parameters:
                yield _Formula(False, zero_centered, eps)
            if eps is not None:
                yield _Formula(True, zero_centered, eps)


def _output(module: torch.nn.Module, x: torch.Tensor, parameters: dict[str, torch.Tensor], training: bool) -> torch.Tensor:
    """The module's, with other parameters; the module does not notice."""
    twin = copy.copy(module)
    twin._parameters = module._parameters | parameters
    twin.training = training
    return twin.forward(x.clone())


def _agrees(
    formula: _Formula, output: torch.Tensor, x: torch.Tensor, parameters: dict[str, torch.Tensor], shape: tuple[int, ...]
) -> bool:
    """Within four times what cupynorm.gradient_check allows float32: other formulas are off by far more."""
    expected, x_hat = formula(x, parameters, shape), formula(x, {}, shape)
    # For weight and 1 + weight alike.
    magnitude = (1 + x_hat.abs()) * (1 + parameters.get("weight", torch.zeros(())).abs())
    magnitude += parameters.get("bias", torch.zeros(())).abs()
    allowed = 4 * 2.0**-24 * (4 + math.sqrt(math.prod(shape))) * magnitude
    return output.shape == x.shape and bool(((output.double() - expected).abs() <= allowed).all())


def _differences(
    formula: _Formula, module: torch.nn.Module, x: torch.Tensor, parameters: dict[str, torch.Tensor], shape: tuple[int, ...],
    keep_rounding: bool,
) -> tuple[bool, str]:  # fmt: skip
    """What bfloat16 input shows: whether a rounding of x_hat is kept; the dtype of y, and where the module rounds."""
    x = x.bfloat16()
    rounded = {name: parameter.bfloat16() for name, parameter in parameters.items()}
    remarks, keeps = [], False
    for given, what in ((rounded, "bfloat16"), (parameters, "bfloat16 with float32 weight")):
        with contextlib.suppress(RuntimeError):  # some refuse the first, some the second
            y = _output(module, x, given, False)
            if y.dtype != x.dtype:
                remarks.append(f"y of {what} was {str(y.dtype).removeprefix('torch.')}, now bfloat16")
            elif _share_off(y, formula(x, given, shape).bfloat16()) > _FEW:
                x_hat = formula(x, {}, shape).bfloat16()
                twice = x_hat * (given.get("weight", 1) + formula.zero_centered) + given.get("bias", 0)
                rounds = _share_off(y, twice) <= _FEW
                if rounds and keep_rounding:
                    keeps = True
                else:
                    was = "x_hat was rounded before the weight" if rounds else "more than y was rounded"
                    remarks.append(f"{was}, now y alone is")
    return keeps, "; ".join(dict.fromkeys(remarks))


_FEW = 1 / 16  # float32 and float64 round to another bfloat16 about once in 10,000; a second rounding changes one in three


def _share_off(y: torch.Tensor, expected: torch.Tensor) -> float:
    return (y != expected).double().mean().item()
