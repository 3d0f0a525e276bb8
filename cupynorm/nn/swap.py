"""torch: swap_norms, which replaces the norms of a model by cupynorm's.

torch's, TransformerEngine's and apex's norms are known by their classes. Any other module is run on
random input to find out what it computes (probe.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..gpu.arrays import type_in_words
from ..norm.checks import extents_of
from ..norm.request import Launch, Margins
from ..table import as_html, as_text
from . import private
from .modules import LayerNorm, Norm, RMSNorm
from .probe import Formula, eps_of, normalized_input, parameters_of, probe


class Swap(NamedTuple):
    """One place in a model: its dotted name, and the class before and after.

    remark: how results differ, or why the module was left.
    """

    name: str
    was: str
    now: str
    remark: str


@dataclass(repr=False)
class SwappedNorms:
    """What swap_norms did. Prints as a table.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> swapped = cupynorm.swap_norms(model)
        >>> swapped.swapped[0].name, swapped.swapped[0].now
        ('1', 'cupynorm.LayerNorm')
        >>> swapped.undo()
        >>> type(model[1])
        <class 'torch.nn.modules.normalization.LayerNorm'>

    swapped: the places with another module now. left: those that look like a norm and were not
    swapped, with the reason.
    """

    swapped: list[Swap] = field(default_factory=list)
    left: list[Swap] = field(default_factory=list)
    # (parent, name in it, original module, replacement)
    _places: list[tuple[torch.nn.Module, str, torch.nn.Module, torch.nn.Module]] = field(
        default_factory=list, repr=False
    )

    def undo(self) -> None:
        """Puts the original modules back.

        They are the same objects, with the parameters and the training flag of their replacements.
        """
        while self._places:
            parent, name, module, replacement = self._places.pop()
            _hand_over(replacement, module)
            setattr(parent, name, module)

    def __str__(self) -> str:
        return f"{as_text(self._rows())}\n{self._summary()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{as_html(self._rows())}{self._summary()}"

    def _rows(self) -> list[Swap]:
        return [Swap("name", "was", "now", ""), *self.swapped, *self.left]

    def _summary(self) -> str:
        compiled = "; compiled by torch.compile, a model runs torch's norms" if self.swapped else ""
        return f"{len(self.swapped)} swapped, {len(self.left)} left{compiled}"


def swap_norms(model: torch.nn.Module, *, keep_rounding: bool = False) -> SwappedNorms:
    """Replaces every LayerNorm and RMSNorm inside model, in place, by cupynorm's.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4))
        >>> print(cupynorm.swap_norms(model))
        name  was            now
        1     torch.RMSNorm  cupynorm.RMSNorm
        1 swapped, 0 left; compiled by torch.compile, a model runs torch's norms

    model: any torch.nn.Module, on any device, meta included. The parameters stay the same objects,
        so that optimizers and state dicts stay valid. A module that is used in several places is
        replaced by one module.
    keep_rounding: if a module rounds x_hat before its weight multiplies it, as Hugging Face's Llama
        does, its replacement does too (round_x_hat).

    Swapped are
    - torch.nn's LayerNorm and RMSNorm, TransformerEngine's, and apex's fused ones;
    - every module with one or two parameters of one shape and one input, whose output for random
      input on the CPU is that of layer_norm or rms_norm, with weight or 1 + weight, and so are its
      gradients, if it has any. The RMSNorm classes of language models are such modules. The
      parameters may have any names, such as gamma and beta, and keep them. eps may be an attribute,
      or a number of up to four digits.

    Not replaced ("left") are modules with hooks, with parametrized weights, with a weight such as
    (1,) or (1, 1, C), with a __call__ or _load_from_state_dict of their own, or with a forward that
    does more or depends on the shape of its input. Norms that torch.compile or
    FullyShardedDataParallel has wrapped are left. So is model itself: only its parent could replace
    it. The result lists those that look like a norm, with the reason. A module looks like a norm by
    the names of its class or parameters, or if the size of its input does not change its output.
    One without parameters does if it returns about what a norm of 24 columns returns.

    y then has the dtype that LayerNorm gives it, and is rounded once. The remarks say where the
    original module differs. Attributes that only the original module had are lost. Swap before
    torch.compile, DistributedDataParallel or FullyShardedDataParallel wraps the model.

    Returns a SwappedNorms: prints as a table, `.undo()` puts the original modules back.
    Raises TypeError if model is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type_in_words(model)}; expected a torch.nn.Module")
    report = SwappedNorms()
    if _looks_like_a_norm(model):
        reason = (
            "it is the model itself, and only what holds a module can hold another in its place: "
            "swap inside torch.nn.Sequential(model)"
        )
        report.left.append(Swap("(model)", _name(model), "", reason))
    seen: dict[torch.nn.Module, tuple[str, torch.nn.Module | None]] = {}
    for path, parent, name, module in list(_places(model)):
        if private.is_compiled(parent):
            replacement, remark = None, "torch.compile has wrapped it; expected the swap before"
        elif module in seen:
            first, replacement = seen[module]
            remark = f"the module of {first}"
        else:
            replacement, remark = _replace(module, keep_rounding)
            seen[module] = path, replacement
        if replacement is None:
            kind = normalized_input(module)
            if kind == "images" and remark.startswith("its forward raised"):
                remark = "it normalises images of shape (N, C, H, W); expected rows"
            if kind or _looks_like_a_norm(module) or _is_named_as_a_norm(module):
                report.left.append(Swap(path, _name(module), "", remark))
        else:
            report._places.append((parent, name, module, replacement))
            report.swapped.append(Swap(path, _name(module), _name(replacement), remark))
    for parent, name, _, replacement in report._places:  # last: an error leaves the model as it was
        setattr(parent, name, replacement)
    return report


def _places(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Module]]:
    """(dotted name, parent, name in it, module) of all that may be a norm.

    A shared module comes once for each of its places. A lazy one has no shape yet.
    """
    for prefix, parent in model.named_modules():
        for name, module in parent._modules.items():
            if module is None or any(map(is_lazy, parameters_of(module).values())):
                continue
            if _looks_like_a_norm(module) or _may_be_a_norm(module):
                yield f"{prefix}.{name}" if prefix else name, parent, name, module


def _name(module: torch.nn.Module) -> str:
    """Package and class: torch.LayerNorm, apex.FusedRMSNorm."""
    return f"{type(module).__module__.partition('.')[0]}.{type(module).__qualname__}"


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Whether its class is named like a norm, or it has only a weight and an eps.

    A module with children is not a norm, whatever its name.
    """
    if isinstance(module, Norm):
        return False
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return True
    if _is_torchs(module) or (
        module._modules and not torch.nn.utils.parametrize.is_parametrized(module)
    ):
        return False
    if re.search("norm", type(module).__name__, re.IGNORECASE):
        return not re.search("(batch|group|instance)_?norm", type(module).__name__, re.IGNORECASE)
    return [*parameters_of(module)] == ["weight"] and bool(eps_of(module))


def _may_be_a_norm(module: torch.nn.Module) -> bool:
    """Whether it holds up to two parameters of one shape, as a norm does, and no modules.

    It may also hold a number, such as an eps that is learned.
    """
    parameters = parameters_of(module).values()
    vectors = [each for each in parameters if each.numel() != 1]
    return (
        len({each.shape for each in vectors}) <= 1
        and len(vectors) <= 2
        and len(parameters) <= max(2, len(vectors) + 1)
        and max((parameter.numel() for parameter in parameters), default=0) <= _MOST_COLS
        and not module._modules
        and not isinstance(module, Norm)
        and not _is_torchs(module)
    )


def _is_named_as_a_norm(module: torch.nn.Module) -> bool:
    """Whether its parameters are called gamma and beta, or as in other well-known norms."""
    return tuple(sorted(parameters_of(module))) in _NAMES


def _is_torchs(module: torch.nn.Module) -> bool:
    """Whether it is one of torch.nn's modules other than LayerNorm and RMSNorm, or TorchScript."""
    return type(module).__module__.startswith(("torch.nn.", "torch.jit."))


# Methods besides forward that change what a module computes or stores. A replacement has torch's.
_LOST = (
    "__call__",
    "_apply",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
)
_NAMES = {("beta", "gamma"), ("gamma",), ("a_2", "b_2")}
# Wider parameters are a table or a matrix; a probe of them would take gigabytes.
_MOST_COLS = 2**20


class _OwnNames(Norm):
    """A norm whose weight and bias are registered by other names, as the replaced module's were."""

    _own_names: Mapping[str, str] = {}

    def _parameter(self, name: str) -> torch.Tensor | None:
        return super()._parameter(self._own_names[name]) if name in self._own_names else None

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self._own_names.get(name, name))


class RenamedLayerNorm(_OwnNames, LayerNorm):
    """A LayerNorm whose parameters keep names such as gamma and beta."""


class RenamedRMSNorm(_OwnNames, RMSNorm):
    """An RMSNorm whose weight keeps a name such as scale."""


# Known by package and class. Most of them run only on CUDA, and cannot be probed on a CPU.
_KNOWN = {
    "transformer_engine": {"LayerNorm", "RMSNorm"},
    "apex": {
        "FusedLayerNorm",
        "MixedFusedLayerNorm",
        "FastLayerNorm",
        "FusedRMSNorm",
        "MixedFusedRMSNorm",
    },
}


def _is_known(module: torch.nn.Module) -> bool:
    package = type(module).__module__.partition(".")[0]
    return type(module).__qualname__ in _KNOWN.get(package, ())


def _replace(module: torch.nn.Module, keep_rounding: bool) -> tuple[torch.nn.Module | None, str]:
    """(replacement, how results differ), or (None, why there is none)."""
    if obstacle := _obstacle(module):
        return None, obstacle
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    eps, rounds = (eps_of(module) or [None])[0], False
    own_names = {name: name for name in parameters_of(module)}
    if kind in (torch.nn.LayerNorm, torch.nn.RMSNorm):
        formula, remark = Formula(kind is torch.nn.LayerNorm, False, eps), ""
    elif _is_known(module):
        zero_centered = getattr(module, "zero_centered_gamma", False)
        formula = Formula("LayerNorm" in kind.__qualname__, zero_centered, eps)
        casts = package == "transformer_engine" or kind.__qualname__.startswith("Mixed")
        remark = "y was of the weight's dtype, now of the input's" if casts else ""
    else:
        try:
            found, reason = probe(module, _shape(module), keep_rounding)
        except Exception as error:  # any forward may raise anything
            first_line = str(error).partition("\n")[0]
            reason = f"its forward raised {type(error).__name__} on the CPU: {first_line}"
            return None, reason
        if found is None:
            return None, reason
        formula, own_names, rounds, remark = found
    extras = {"zero_centered_gamma": formula.zero_centered, "round_x_hat": rounds}
    if package == "transformer_engine":
        extras["launch"] = _launch_of(module)
        extras["sequence_parallel"] = getattr(module, "sequence_parallel", None)
    if package == "apex":
        extras["memory_efficient"] = getattr(module, "memory_efficient", False)
    affine = {"elementwise_affine": "weight" in own_names}
    if formula.centered:
        affine["bias"] = "bias" in own_names
    norm_class = LayerNorm if formula.centered else RMSNorm
    if any(name != own for name, own in own_names.items()):
        norm_class = RenamedLayerNorm if formula.centered else RenamedRMSNorm
    replacement = norm_class(_shape(module), formula.eps, device="meta", **affine, **extras)
    if isinstance(replacement, _OwnNames):
        replacement._parameters.clear()
        replacement._own_names = own_names
    _hand_over(module, replacement)
    return replacement, remark


def _hand_over(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Gives the parameters themselves and the training flag to another module."""
    for name, parameter in parameters_of(module).items():
        setattr(other, name, parameter)
    other.training = module.training


def _launch_of(module: torch.nn.Module) -> Launch | None:
    """TransformerEngine's margins. Its releases spell the keys differently: forward, fwd."""
    kinds = {kind[0]: kind for kind in Margins._fields}
    by_key = getattr(module, "_sm_margins", {})
    margins = {kinds[key[0]]: margin for key, margin in by_key.items()}
    return Launch(sm_margin=margins) if any(margins.values()) else None


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    """The shape it normalises over; () where it is unknown."""
    for parameter in parameters_of(module).values():
        return extents_of(parameter.shape)
    return extents_of(getattr(module, "normalized_shape", None) or ())


def _obstacle(module: torch.nn.Module) -> str:
    """Why it is left, whatever it computes; "" if there is no reason."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return f"its {' and '.join(module.parametrizations)} is parametrized"
    attributes = vars(module).items()
    hooks = sorted(
        name.strip("_") for name, value in attributes if name.endswith("hooks") and value
    )
    if hooks:
        return f"it has {', '.join(hooks)}"
    if "forward" in vars(module):
        return "its forward was replaced on this object"
    for name in () if _is_known(module) else _LOST:
        if getattr(type(module), name) is not getattr(torch.nn.Module, name):
            return f"its class has a {name} of its own"
    for name, value in attributes:
        if isinstance(value, torch.Tensor) and not re.search("(^|_)eps", name):
            return f"its attribute {name} is a tensor; expected a parameter"
    if type(module).__module__.startswith("transformer_engine.pytorch.ops"):
        return "TransformerEngine fuses it with what follows"
    parameters = parameters_of(module)
    held = {*parameters, *module._buffers, *module._modules}
    if len(parameters) > 2 or len(held) > len(parameters):
        return f"it holds {', '.join(sorted(held))}; expected a weight and perhaps a bias"
    for name, parameter in parameters.items():
        if type(parameter) is not torch.nn.Parameter:
            kind = type(parameter).__name__
            return f"its {name} is a {kind}; expected a plain torch.nn.Parameter"
        if private.is_flattened(parameter):
            return "FullyShardedDataParallel has wrapped it; expected the swap before"
    shape = _shape(module)
    if not shape or not math.prod(shape):
        return "nothing says what it normalises over: its weight is absent or empty"
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if type(module) not in (torch.nn.LayerNorm, torch.nn.RMSNorm) and 1 in shape:
        first = next(iter(parameters))
        return (
            f"its {first} has shape {shape}; expected no dimension of 1, over which nothing says "
            "whether it normalises"
        )
    if len({*shapes.values()}) > 1:
        each = ", its ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
        return f"its {each}; expected one shape"
    return ""
