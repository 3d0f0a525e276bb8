"""torch: swap_norms, which replaces the norms of a model by cupynorm's.

The norms of torch, TransformerEngine and apex are known by their classes. Any other module is run
on random input on the CPU to find out which norm it computes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import numbers
import re
import warnings
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..gpu.arrays import type_in_words
from ..norm.checks import extents_of
from ..norm.request import Launch, Margins
from ..table import as_html, as_text
from . import private
from .modes import name_of
from .modules import LayerNorm, Norm, RMSNorm, calls_the_norm, layer_norm, rms_norm


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
    """What swap_norms did. Prints as a table, in which norms that differ in a number are one line.

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
    _model: torch.nn.Module | None = None
    # (dotted name, original, replacement), with a line for each place of a shared module.
    _pairs: list[tuple[str, torch.nn.Module, Norm]] = field(default_factory=list)

    def undo(self) -> None:
        """Puts the original modules back wherever their replacements are now.

        They are the same objects, with the parameters and the training flag of their replacements.
        A replacement that has been hooked, parametrized or sharded since stays. A warning names
        these, and those that are no longer in the model.
        """
        pairs = {replacement: module for _, module, replacement in self._pairs}
        reasons = {each: _change(each) for each in pairs}
        missing = set(pairs)
        for parent in [*self._model.modules()] if pairs else ():
            for name, child in [*parent._modules.items()]:
                missing.discard(child)
                if child in pairs and not reasons[child]:
                    _hand_over(child, pairs[child])
                    setattr(parent, name, pairs[child])
        reasons |= dict.fromkeys(missing, "the model no longer holds its replacement")
        kept = [f"{name}: {reasons[each]}" for name, _, each in self._pairs if reasons[each]]
        self._pairs.clear()
        if kept:
            warnings.warn(f"undo() did not put back {'; '.join(kept)}", stacklevel=2)

    def __str__(self) -> str:
        rows, remarks = self._rows()
        return "\n".join([as_text(rows), *remarks, self._summary()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, remarks = self._rows()
        return as_html(rows) + "".join(f"{line}<br>" for line in [*remarks, self._summary()])

    def _rows(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """Lines of a table, and the remarks that these number."""
        rows, remarks = [("name", "was", "now", "")], {}
        for swaps in (self.swapped, self.left):
            groups: dict[tuple, list[str]] = {}
            for name, *others in swaps:
                groups.setdefault((_NUMBER.sub("*", name, count=1), *others), []).append(name)
            for (name, was, now, remark), names in groups.items():
                name = names[0] if len(names) == 1 else f"{name}, {len(names)} norms"
                at = remarks.setdefault(remark, len(remarks) + 1) if remark else 0
                rows.append((name, was, now, f"[{at}]" if at else ""))
        return rows, [f"[{at}] {remark}" for remark, at in remarks.items()]

    def _summary(self) -> str:
        compiled = "; compiled by torch.compile, a model runs torch's norms" if self.swapped else ""
        return f"{len(self.swapped)} swapped, {len(self.left)} left{compiled}"


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # the first number that is a whole part of a name


def swap_norms(model: torch.nn.Module, *, keep_rounding: bool = False) -> SwappedNorms:
    """Replaces every LayerNorm and RMSNorm inside model, in place, by cupynorm's.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4))
        >>> print(cupynorm.swap_norms(model))
        name  was            now
        1     torch.RMSNorm  cupynorm.RMSNorm
        1 swapped, 0 left; compiled by torch.compile, a model runs torch's norms

    model: any torch.nn.Module, on any device, meta included. The parameters stay the same objects,
        so that optimizers and state dicts stay valid.
    keep_rounding: if a module rounds x_hat before its weight multiplies it, as Hugging Face's Llama
        does, its replacement does too (round_x_hat). One that rounds in yet another way is left.

    Swapped are the norms of torch.nn, TransformerEngine and apex, and every module that looks like
    one and computes layer_norm or rms_norm, with weight or 1 + weight: for random input on the CPU
    it has their output and gradients, but for a few roundings. It looks like one if "norm" is in
    the name of its class, or if it has a weight, perhaps a bias, and an eps. Those that are not
    swapped are listed as left, with the reason, as is model itself.

    y then has the dtype that LayerNorm gives it, and is rounded once. The remarks say where the
    original module differs. Swap before torch.compile, DistributedDataParallel or
    FullyShardedDataParallel wraps the model.

    Returns a SwappedNorms: prints as a table, `.undo()` puts the original modules back. Raises
    TypeError if model is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type_in_words(model)}; expected a torch.nn.Module")
    report = SwappedNorms(_model=model)
    if _looks_like_a_norm(model):
        reason = (
            "it is the model itself, and only what holds a module can hold another in its place: "
            "swap inside torch.nn.Sequential(model)"
        )
        report.left.append(Swap("(model)", _name(model), "", reason))
    norms = [
        (f"{prefix}.{name}" if prefix else name, parent, name, module)
        for prefix, parent in model.named_modules()
        for name, module in parent._modules.items()  # a shared module has several places
        if module is not None and _looks_like_a_norm(module)
    ]
    places, seen = [], {}
    for path, parent, name, module in norms:
        if private.is_compiled(parent):
            replacement, remark = None, "torch.compile has wrapped it; expected the swap before"
        elif module in seen:
            first, replacement = seen[module]
            remark = f"the module of {first}"
        else:
            replacement, remark = _replace(module, keep_rounding)
            seen[module] = path, replacement
        if replacement is None:
            report.left.append(Swap(path, _name(module), "", remark))
        else:
            places.append((parent, name, replacement))
            report._pairs.append((path, module, replacement))
            report.swapped.append(Swap(path, _name(module), _name(replacement), remark))
    for parent, name, replacement in places:  # after all that may raise
        setattr(parent, name, replacement)
    return report


def _name(module: torch.nn.Module) -> str:
    """Package and class: torch.LayerNorm, apex.FusedRMSNorm."""
    return f"{type(module).__module__.partition('.')[0]}.{type(module).__qualname__}"


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Whether its class is named like a norm, or it has a weight, perhaps a bias, and an eps.

    Not one with modules inside, whatever its name, nor a lazy one, which has no shape yet, nor one
    of TorchScript, whose forward cannot be looked at.
    """
    parameters = _parameters_of(module)
    if isinstance(module, Norm) or type(module).__module__.startswith("torch.jit."):
        return False
    if any(map(is_lazy, parameters.values())):
        return False
    if module._modules and not is_parametrized(module):
        return False
    if re.search("norm", type(module).__name__, re.IGNORECASE):
        return True
    return "weight" in parameters and {*parameters} <= {"weight", "bias"} and bool(_eps_of(module))


# The norms of other dimensions, by torch's own names and timm's, of images (N, C, H, W).
_OTHER = re.compile("Batch|Group|Instance|LocalResponse|CrossMapLRN|Sync|2d$", re.IGNORECASE)
# Known by where their class is defined and its name. Most of them run only on CUDA, and cannot be
# probed on a CPU.
_KNOWN = {
    "torch.nn.modules.normalization": {"LayerNorm", "RMSNorm"},
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
    kind = type(module)
    return any(
        kind.__module__.startswith(package) and kind.__qualname__ in names
        for package, names in _KNOWN.items()
    )


def _replace(module: torch.nn.Module, keep_rounding: bool) -> tuple[Norm | None, str]:
    """(replacement, how results differ), or (None, why there is none)."""
    if obstacle := _obstacle(module):
        return None, obstacle
    kind, package = type(module), type(module).__module__.partition(".")[0]
    shape, names, remark = _shape(module), _parameters_of(module), ""
    if _is_known(module):
        zero_centered = getattr(module, "zero_centered_gamma", False)
        eps = (_eps_of(module) or [None])[0]
        formula = _Formula(shape, "LayerNorm" in kind.__qualname__, zero_centered, eps)
        if package == "transformer_engine" or kind.__qualname__.startswith("Mixed"):
            remark = "y had the weight's dtype, now the input's"
    else:
        try:
            formula, remark = _probe(module, shape, keep_rounding)
        except Exception as error:  # any forward may raise anything
            first_line = str(error).partition("\n")[0]
            return None, f"its forward raised {type(error).__name__} on the CPU: {first_line}"
        if formula is None:
            return None, remark
    options = {
        "zero_centered_gamma": formula.zero_centered,
        "round_x_hat": formula.rounds,
        "elementwise_affine": "weight" in names,
    }
    if package == "transformer_engine":
        options["launch"] = _launch_of(module)
        options["sequence_parallel"] = getattr(module, "sequence_parallel", None)
    if package == "apex":
        options["memory_efficient"] = getattr(module, "memory_efficient", False)
    if formula.centered:
        options["bias"] = "bias" in names
    norm_class = LayerNorm if formula.centered else RMSNorm
    replacement = norm_class(shape, formula.eps, device="meta", **options)
    _hand_over(module, replacement)
    return replacement, remark


def _hand_over(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Gives the parameters themselves and the training flag to another module."""
    for name, parameter in _parameters_of(module).items():
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
    for parameter in _parameters_of(module).values():
        return extents_of(parameter.shape)
    return extents_of(getattr(module, "normalized_shape", None) or ())


def _change(module: torch.nn.Module) -> str:
    """What was done to a module after it was made, which another in its place would lose; or ""."""
    if is_parametrized(module):
        return f"its {' and '.join(module.parametrizations)} is parametrized"
    hooks = sorted(
        name.strip("_")
        for name, value in vars(module).items()
        if name.endswith("hooks") and {*value.values()} - {calls_the_norm}
    )
    if hooks:
        return f"it has {', '.join(hooks)}"
    if "forward" in vars(module):
        return "its forward was replaced on this object"
    if isinstance(module, Norm) and type(module) not in (LayerNorm, RMSNorm):
        return f"it is a {type(module).__qualname__} now"
    for name, parameter in _parameters_of(module).items():
        if type(parameter) is not torch.nn.Parameter:
            kind = type(parameter).__name__
            return f"its {name} is a {kind}; expected a plain torch.nn.Parameter"
        if type(parameter.data) is not torch.Tensor or private.is_flattened(parameter):
            return "it has been sharded, as by FullyShardedDataParallel"
    return ""


def _obstacle(module: torch.nn.Module) -> str:
    """Why it is left, whatever it computes; "" if there is no reason."""
    if _OTHER.search(type(module).__name__):
        return "it normalises over other dimensions than the last ones"
    if change := _change(module):
        return change
    if type(module).__module__.startswith("transformer_engine.pytorch.ops"):
        return "TransformerEngine fuses it with what follows"
    parameters = _parameters_of(module)
    held = {*parameters, *module._buffers}
    if not held <= {"weight", "bias"} or {*module._buffers} or held == {"bias"}:
        return f"it holds {', '.join(sorted(held))}; expected a weight and perhaps a bias"
    if min(_shape(module), default=0) < (1 if _is_known(module) else 2):
        return "nothing says what it normalises over: its weight is absent, empty or broadcast"
    return ""


# Which norm a module computes.

_Parameters = dict[str, Tensor]
# float32 and float64 round to another bfloat16 about once in 10,000 elements. A second rounding
# changes one in three.
_FEW = 1 / 16
# The roundings to bfloat16 that a norm may have beyond ours, each half a unit of the last place.
_MOST_ROUNDINGS = 8


class _Formula(NamedTuple):
    """layer_norm (centered) or rms_norm, with weight or 1 + weight, perhaps of a rounded x_hat.

    shape: what it normalises over. eps: None for torch's default.
    """

    shape: tuple[int, ...]
    centered: bool
    zero_centered: bool
    eps: float | None
    rounds: bool = False

    def __call__(self, x: Tensor, parameters: _Parameters) -> Tensor:
        call = layer_norm if self.centered else rms_norm
        numerics = {"zero_centered_weight": self.zero_centered, "round_x_hat": self.rounds}
        return call(x, self.shape, **parameters, eps=self.eps, **numerics)

    def is_near(self, y: Tensor, x: Tensor, parameters: _Parameters) -> bool:
        """Whether y is what it gives, but for roundings.

        In float32 within four times what gradient_check allows, in bfloat16 within _MOST_ROUNDINGS.
        Other formulas are off by far more.
        """
        expected, most = self(x, parameters).double(), _MOST_ROUNDINGS
        if x.dtype == torch.float32:
            most = 4 * (4 + math.sqrt(math.prod(self.shape)))
        allowed = most * torch.finfo(x.dtype).eps / 2 * (1 + float(expected.abs().max()))
        return y.shape == x.shape and float((y.double() - expected).abs().max()) <= allowed

    def share_off(self, y: Tensor, x: Tensor, parameters: _Parameters) -> float:
        return (y != self(x, parameters)).double().mean().item()


def _parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Its own parameters that are not None."""
    return {name: each for name, each in module._parameters.items() if each is not None}


def _eps_of(module: torch.nn.Module) -> list[float | None]:
    """What may be its eps: attributes such as eps, epsilon, variance_epsilon.

    None stands for torch's machine epsilon.
    """
    values = [value for name, value in vars(module).items() if re.search("(^|_)eps", name)]
    return [
        each
        for each in values
        if each is None or (isinstance(each, numbers.Real) and not isinstance(each, bool))
    ]


def _probe(
    module: torch.nn.Module, shape: tuple[int, ...], keep_rounding: bool
) -> tuple[_Formula | None, str]:
    """The formula whose values the module returns, and how it rounds; or None, and the reason.

    shape: what it normalises over. Raises what the module raises.
    """
    takes, all_eps = inspect.signature(module.forward).parameters, _eps_of(module)
    if len(takes) != 1 or any(each.kind is each.VAR_POSITIONAL for each in takes.values()):
        return None, f"its forward takes {', '.join(takes) or 'nothing'}; expected one input"
    if not all_eps:
        return None, "it has no number as an attribute named eps, epsilon or variance_epsilon"
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0))
    float32 = torch.float32
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        parameters = {
            name: random(each.shape, dtype=float32) for name, each in _parameters_of(module).items()
        }
        # Rows of ordinary size, rows whose variance is about eps, large ones and zeros.
        roots = [math.sqrt(2.0**-23 if eps is None else abs(eps)) for eps in all_eps]
        x = random((4, *shape), dtype=float32) + 0.5
        rows = torch.cat([x * size for size in (1.0, *roots, 2.0**20, 0.0)])
        y = _output(module, rows, parameters)
        for centered, zero_centered, eps in product((False, True), (False, True), all_eps):
            if (centered and eps is None) or (not centered and "bias" in parameters):
                continue
            formula = _Formula(shape, centered, zero_centered, eps)
            if formula.is_near(y, rows, parameters):
                if reason := _other_result(formula, module, x, parameters):
                    return None, reason
                return _in_bfloat16(formula, module, x, parameters, keep_rounding)
    return None, "it computes neither layer_norm nor rms_norm of its weight"


def _output(
    module: torch.nn.Module, x: Tensor, parameters: _Parameters, training: bool = False
) -> Tensor:
    """Its output with other parameters. The module itself is not changed."""
    twin = copy.copy(module)
    twin._parameters = module._parameters | parameters
    twin.training = training
    return twin.forward(x.clone())


def _other_result(
    formula: _Formula, module: torch.nn.Module, x: Tensor, parameters: _Parameters
) -> str:
    """Where it computes another result: rows of another width, training, gradients; or "".

    A module for inference has no gradients.
    """
    *outer, num_cols = formula.shape
    with contextlib.suppress(Exception):  # a forward may raise anything
        _output(module, x.new_ones(2, *outer, 2 * num_cols), parameters)
        return f"it takes rows of {2 * num_cols} columns too"
    leaves = [each.clone().requires_grad_() for each in (x, *parameters.values())]
    with torch.enable_grad():
        named = dict(zip(parameters, leaves[1:]))
        y = _output(module, leaves[0] * 1, named, training=True)
        expected = formula(leaves[0], named)
    if not formula.is_near(y.detach(), x, parameters):
        return "it computes another result in training mode"
    dy = torch.randn_like(x) * 64  # beyond limits
    if y.requires_grad:
        found = torch.autograd.grad(y, leaves, dy.to(y.dtype), allow_unused=True)
        for gradient, right in zip(found, torch.autograd.grad(expected, leaves, dy)):
            # float32 and float64 are nearer, and other formulas farther.
            allowed = 1e-3 * float(right.abs().max())
            if gradient is None or float((gradient - right).abs().max()) > allowed:
                return "its gradients are not those of the norm that it computes"
    return ""


def _in_bfloat16(
    formula: _Formula,
    module: torch.nn.Module,
    x: Tensor,
    parameters: _Parameters,
    keep_rounding: bool,
) -> tuple[_Formula | None, str]:
    """The formula with its rounding of x_hat, and how y differs; or None and the reason."""
    rounding, remarks, rounds = formula._replace(rounds=True), [], False
    x = x.bfloat16()
    for values in ({name: each.bfloat16() for name, each in parameters.items()}, parameters):
        try:
            y = _output(module, x, values)
        except RuntimeError:  # some modules refuse weights of the same dtype, some of another
            continue
        if not formula.is_near(y, x, values):
            return None, "it computes neither layer_norm nor rms_norm in bfloat16"
        if y.dtype != x.dtype:
            weight = " with a float32 weight" if values is parameters else ""
            remarks.append(f"y of 16-bit input{weight} was {name_of(y.dtype)}, now 16-bit")
        elif formula.share_off(y, x, values) > _FEW:
            if rounding.share_off(y, x, values) <= _FEW:
                rounds = True
            elif keep_rounding:
                return None, "it rounds more than x_hat and y, which keep_rounding cannot keep"
            else:
                remarks.append("more than y was rounded to 16 bits, now y alone is")
    if rounds and not keep_rounding:
        remarks.insert(0, "x_hat was rounded to 16 bits before the weight, now y alone is")
    return formula._replace(rounds=rounds and keep_rounding), "; ".join(remarks)
