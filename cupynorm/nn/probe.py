"""torch: which norm a module computes, found by running it on random input on the CPU."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import numbers
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..functional import layer_norm, rms_norm
from .modes import name_of

_Parameters = dict[str, Tensor]
_LARGE = 2.0**20
# Of an input that shows whether many rows are treated as few.
_MOST_ELEMENTS = 2**16
# float32 and float64 round to another 16-bit number about once in 10,000 elements. A second
# rounding changes one in three.
_FEW = 1 / 16
# The roundings to 16 bits that a norm may have beyond ours, each half a unit of the last place.
_MOST_ROUNDINGS = 8


class Formula(NamedTuple):
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

        In float32 within four times what gradient_check allows, in 16 bits within _MOST_ROUNDINGS.
        Other formulas are off by far more.
        """
        if y.shape != x.shape:
            return False
        expected, x_hat = self(x, parameters).double(), self(x, {}).double()
        most = _MOST_ROUNDINGS
        if x.dtype == torch.float32:
            most = 4 * (4 + math.sqrt(math.prod(self.shape)))
        # A bound for weight and 1 + weight alike.
        weight, bias = (parameters.get(name, torch.zeros(())) for name in ("weight", "bias"))
        magnitude = (1 + x_hat.abs()) * (1 + weight.double().abs()) + bias.double().abs()
        near = (y.double() - expected).abs() <= most * torch.finfo(x.dtype).eps / 2 * magnitude
        return bool((near | (y.isnan() & expected.isnan())).all())


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Its own parameters that are not None."""
    return {name: each for name, each in module._parameters.items() if each is not None}


def eps_of(module: torch.nn.Module) -> list[float | None]:
    """What may be its eps: attributes such as eps, epsilon, variance_epsilon.

    None stands for torch's machine epsilon.
    """
    values = [value for name, value in vars(module).items() if re.search("(^|_)eps", name)]
    return [
        each
        for each in values
        if each is None or (isinstance(each, numbers.Real) and not isinstance(each, bool))
    ]


def probe(
    module: torch.nn.Module, shape: tuple[int, ...], keep_rounding: bool
) -> tuple[Formula | None, str]:
    """The formula whose values the module returns, and how it rounds; or None, and the reason.

    shape: what it normalises over. Raises what the module raises.
    """
    takes = inspect.signature(module.forward).parameters
    if len(takes) != 1 or any(each.kind is each.VAR_POSITIONAL for each in takes.values()):
        return None, f"its forward takes {', '.join(takes) or 'nothing'}; expected one input"
    if not eps_of(module):
        return None, "it has no number as an attribute named eps, epsilon or variance_epsilon"
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        parameters = {name: random(*shape) for name in parameters_of(module)}
        # Rows of ordinary size, rows whose variance is about eps, each with a mean, and zeros.
        roots = [math.sqrt(2.0**-23 if eps is None else abs(eps)) for eps in eps_of(module)]
        sizes = [1.0, *(root or 1.0 for root in roots), 0.0, _LARGE]
        x = torch.cat([(random(4, *shape) + 0.5) * size for size in sizes])
        x[0].view(-1)[0] = 100.0  # an outlier
        y = _output(module, x, parameters)
        for formula in _formulas(module, shape, parameters):
            if formula.is_near(y, x, parameters):
                reason = _other_result(formula, module, x, parameters)
                reason = reason or _other_gradients(formula, module, x[:4], parameters)
                if reason:
                    return None, reason
                # Rows whose squares float16 holds.
                x = torch.cat([(random(8, *shape) + 0.5) * size for size in (1.0, 16.0)])
                return _in_16_bits(formula, module, x, parameters, keep_rounding)
    return None, "it computes neither layer_norm nor rms_norm of its weight"


def _formulas(
    module: torch.nn.Module, shape: tuple[int, ...], parameters: _Parameters
) -> Iterator[Formula]:
    """Those that LayerNorm and RMSNorm have."""
    for eps in eps_of(module):
        for zero_centered in (False, True) if parameters else (False,):
            if "bias" not in parameters:
                yield Formula(shape, False, zero_centered, eps)
            if eps is not None:
                yield Formula(shape, True, zero_centered, eps)


def _output(
    module: torch.nn.Module, x: Tensor, parameters: _Parameters, training: bool = False
) -> Tensor:
    """Its output with other parameters. The module itself is not changed."""
    twin = copy.copy(module)
    twin._parameters = module._parameters | parameters
    twin.training = training
    return twin.forward(x.clone())


def _other_result(
    formula: Formula, module: torch.nn.Module, x: Tensor, parameters: _Parameters
) -> str:
    """Why it is no norm of each row by itself, or of other rows too; "" if it may be one.

    A module may refuse any other input.
    """
    if not formula.is_near(_output(module, x, parameters, training=True), x, parameters):
        return "it computes another result in training mode"
    large = {name: each * _LARGE for name, each in parameters.items()}
    if not formula.is_near(_output(module, x, large), x, large):
        return "it limits its results"
    with_nan = x.clone()
    with_nan[1] = math.nan
    many = torch.cat([x] * max(1, _MOST_ELEMENTS // x.numel()))
    for other in (x[:1], x[0], x[:, None], x[None, :, None, None], many, with_nan):
        with contextlib.suppress(Exception):  # any forward may raise anything
            if not formula.is_near(_output(module, other, parameters), other, parameters):
                what = "a NaN" if other is with_nan else f"input of shape {tuple(other.shape)}"
                return f"it computes another result for {what}"
    *outer, num_cols = formula.shape
    for extents in ((2, *outer, 2 * num_cols), (2, *formula.shape, 1, 3 if num_cols == 2 else 2)):
        with contextlib.suppress(Exception):
            _output(module, torch.ones(extents), parameters)
            allowed = ", ".join(map(str, formula.shape))
            return f"it takes input of shape {extents} too; expected (..., {allowed}) alone"
    return ""


def _other_gradients(
    formula: Formula, module: torch.nn.Module, x: Tensor, parameters: _Parameters
) -> str:
    """Why its replacement would train differently, as of a detached variance; "" if it would not.

    A module for inference, which has no gradients, is no reason.
    """
    dy = torch.randn_like(x) * 64  # beyond limits
    leaves = [each.clone().requires_grad_() for each in (x, *parameters.values())]
    with torch.enable_grad():
        named = dict(zip(parameters, leaves[1:]))
        output = _output(module, leaves[0] * 1, named, training=True)
        expected = formula(leaves[0], named)
    if output.requires_grad:
        found = torch.autograd.grad(output, leaves, dy.to(output.dtype), allow_unused=True)
        for gradient, right in zip(found, torch.autograd.grad(expected, leaves, dy)):
            # float32 and float64 are nearer, and other formulas farther.
            allowed = 1e-3 * float(right.abs().max())
            if gradient is None or float((gradient - right).abs().max()) > allowed:
                return "its gradients are not those of the norm that it computes"
    return ""


def _in_16_bits(
    formula: Formula,
    module: torch.nn.Module,
    x: Tensor,
    parameters: _Parameters,
    keep_rounding: bool,
) -> tuple[Formula | None, str]:
    """The formula with its rounding of x_hat, and how y differs; or None and the reason."""
    rounding, remarks, rounds = formula._replace(rounds=True), [], False
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.to(dtype)
        for values in ({key: each.to(dtype) for key, each in parameters.items()}, parameters):
            try:
                y = _output(module, narrow, values)
            except RuntimeError:  # some modules refuse weights of the same dtype, some of another
                continue
            if not formula.is_near(y, narrow, values):
                return None, f"it computes neither layer_norm nor rms_norm in {name_of(dtype)}"
            if y.dtype != dtype:
                weight = " with a float32 weight" if values is parameters else ""
                remarks.append(f"y of 16-bit input{weight} was {name_of(y.dtype)}, now 16-bit")
            elif _share_off(y, formula(narrow, values)) > _FEW:
                if _share_off(y, rounding(narrow, values)) <= _FEW:
                    rounds = True
                elif keep_rounding:
                    return None, "it rounds more than x_hat and y, which keep_rounding cannot keep"
                else:
                    remarks.append("more than y was rounded to 16 bits, now y alone is")
    if rounds and not keep_rounding:
        remarks.insert(0, "x_hat was rounded to 16 bits before the weight, now y alone is")
    kept = formula._replace(rounds=rounds and keep_rounding)
    return kept, "; ".join(dict.fromkeys(remarks))


def _share_off(y: Tensor, expected: Tensor) -> float:
    return (y != expected).double().mean().item()
