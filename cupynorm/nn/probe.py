"""torch: which norm an unknown module computes, found by running it on random input on the CPU."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import numbers
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..functional import layer_norm, rms_norm
from .modes import name_of


class Formula(NamedTuple):
    """layer_norm (centered) or rms_norm, with weight or 1 + weight.

    eps: None for torch's default.
    """

    centered: bool
    zero_centered: bool
    eps: float | None

    def __call__(
        self, x: torch.Tensor, parameters: dict[str, torch.Tensor], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """The values in float64."""
        parameters = {name: parameter.double() for name, parameter in parameters.items()}
        # torch's default is the machine epsilon of the module's float32 input.
        eps = 2.0**-23 if self.eps is None else self.eps
        call = layer_norm if self.centered else rms_norm
        return call(
            x.double(), shape, **parameters, eps=eps, zero_centered_weight=self.zero_centered
        )


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Its own parameters that are not None."""
    parameters = module._parameters.items()
    return {name: parameter for name, parameter in parameters if parameter is not None}


def eps_of(module: torch.nn.Module) -> list[float | None]:
    """What may be its eps: attributes such as eps, epsilon, variance_epsilon.

    None stands for torch's machine epsilon.
    """
    values = [value for name, value in vars(module).items() if re.search("(^|_)eps", name)]
    return [value for value in values if value is None or _is_number(value)]


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class Found(NamedTuple):
    """What a module computes.

    own_names: the names of its weight and bias. rounds: whether its replacement must round x_hat.
    remark: how dtypes and roundings differ.
    """

    formula: Formula
    own_names: dict[str, str]
    rounds: bool
    remark: str


class _Sample(NamedTuple):
    """Random input and parameters of a module. shape: what it normalises over."""

    x: torch.Tensor
    parameters: dict[str, torch.Tensor]
    shape: tuple[int, ...]


_LARGE = 2.0**20
# Of an input that shows whether many rows are treated as few.
_MOST_ELEMENTS = 2**16

NEITHER = "it computes neither layer_norm nor rms_norm of its weight"


def probe(
    module: torch.nn.Module, shape: tuple[int, ...], keep_rounding: bool
) -> tuple[Found | None, str]:
    """The formula whose values the module returns; or None, and the reason.

    shape: what it normalises over.
    """
    takes = inspect.signature(module.forward).parameters
    if len(takes) != 1 or any(each.kind is each.VAR_POSITIONAL for each in takes.values()):
        return None, f"its forward takes {', '.join(takes) or 'nothing'}; expected one input"
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        parameters = {name: random(*shape) for name in parameters_of(module)}
        measured = _measure_eps(module, parameters, shape)
        all_eps = [*eps_of(module), *measured]
        # Rows of ordinary size, rows whose variance is about eps, each with a mean, and zeros.
        roots = [math.sqrt(2.0**-23 if eps is None else abs(eps)) for eps in all_eps]
        sizes = [1.0, *(root or 1.0 for root in roots), 0.0, _LARGE]
        x = torch.stack([(random(4, *shape) + 0.5) * size for size in sizes])
        x[0, 0].view(-1)[0] = 100.0  # an outlier
        sample = _Sample(x, parameters, shape)
        # Neither training mode nor more dimensions may change the result.
        outputs = [_output(module, x, parameters, training) for training in (False, True)]
        outputs.append(_output(module, x.unsqueeze(1), parameters, False).reshape(x.shape))
        # Large results show whether they are limited.
        large = {name: parameter * _LARGE for name, parameter in parameters.items()}
        large_output = _output(module, x, large, False)
        for own_names in _own_names(parameters):
            named, large_named = (
                sample._replace(parameters={name: of[own] for name, own in own_names.items()})
                for of in (parameters, large)
            )
            for formula in _formulas(all_eps, named.parameters):
                if all(_agrees(formula, output, named) for output in outputs) and _agrees(
                    formula, large_output, large_named
                ):
                    reason = _why_not_in_training(formula, module, sample, own_names)
                    if reason := reason or _why_not_for_other_input(module, sample, outputs[0]):
                        return None, reason
                    rounds, remark = _differences(formula, module, sample, own_names, keep_rounding)
                    if formula.eps not in eps_of(module):
                        remark = "; ".join(filter(None, [f"eps={formula.eps}, measured", remark]))
                    return Found(formula, own_names, rounds, remark), ""
    return None, NEITHER


def _measure_eps(
    module: torch.nn.Module, parameters: dict[str, torch.Tensor], shape: tuple[int, ...]
) -> list[float]:
    """What may be the eps of a norm whose code has it as a number: to two, three and four digits.

    Rows t * u with u of mean 0 and mean square 1 become w * u * t / sqrt(t^2 + eps) + bias. Half
    the difference of t * u and -t * u has no bias, and its ratio to that of a large t no w.
    """
    u = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32)
    if len(u) < 2:
        return []
    u = (u / u.square().mean().sqrt()).reshape(shape)

    def response(t: float) -> torch.Tensor:
        above, below = _output(module, torch.stack([t * u, -t * u]), parameters, False).double()
        return (above - below) / 2

    large, t, eps = response(2.0**10), 2.0**-10, 0.0
    for _ in range(3):  # best where t^2 is about eps
        ratio = float((response(t) * large).sum() / large.square().sum())
        if not 0 < ratio <= 1.1:
            return []
        eps = t * t * max(0.0, 1 / ratio**2 - 1)
        t = min(1.0, max(1e-12, math.sqrt(eps)))
    machine = 2.0**-23
    if abs(eps / machine - 1) < 1e-3:
        return [machine]
    return [*dict.fromkeys(float(f"{eps:.{digits}e}") for digits in (1, 2, 3))]


def _own_names(parameters: dict[str, torch.Tensor]) -> Iterator[dict[str, str]]:
    """Which of the module's parameters may be weight and bias."""
    roles = ("weight", "bias")[: len(parameters)]
    if set(roles) == set(parameters):
        yield {name: name for name in roles}
        return
    for own in itertools.permutations(parameters):
        yield dict(zip(roles, own))


def _formulas(
    all_eps: list[float | None], parameters: dict[str, torch.Tensor]
) -> Iterator[Formula]:
    """Those that LayerNorm and RMSNorm have."""
    for eps in all_eps:
        for zero_centered in (False, True) if parameters else (False,):
            if "bias" not in parameters:
                yield Formula(False, zero_centered, eps)
            if eps is not None:
                yield Formula(True, zero_centered, eps)


def _output(
    module: torch.nn.Module, x: torch.Tensor, parameters: dict[str, torch.Tensor], training: bool
) -> torch.Tensor:
    """Its output with other parameters. The module itself is not changed."""
    twin = copy.copy(module)
    twin._parameters = module._parameters | parameters
    twin._buffers = {name: _on_cpu(buffer) for name, buffer in module._buffers.items()}
    twin.training = training
    return twin.forward(x.clone())


def _on_cpu(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """A copy; zeros where it has no memory."""
    if buffer is None:
        return None
    if buffer.is_meta:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return buffer.detach().to("cpu", copy=True)


def normalized_input(module: torch.nn.Module) -> str:
    """The input whose size does not change the output, as for a norm: "rows" or "images".

    Images are [N, C, H, W]. "" for a module that is no such norm. Without parameters its output
    must be about that of a norm.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    own = parameters_of(module)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    if not own:
        with torch.device("cpu"):
            return "rows" if _returns_x_hat(module, 8 * random(4, 24)) else ""
    shapes = {tuple(each.shape) for each in own.values() if each.ndim}
    num_cols = max((each.numel() for each in own.values()), default=0)
    places = {(4, *shape): "rows" for shape in shapes} | {(3, 2, num_cols): "rows"}
    places[2, num_cols, 5, 5] = "images"
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        parameters = {
            name: random(*each.shape)
            if each.numel() != 1
            else torch.full(each.shape, 1e-3)  # it may be an eps
            for name, each in own.items()
        }
        for place, kind in places.items():
            # Large enough for any eps, and small enough for most limits.
            x, other = (8 * random(*place) for _ in range(2))
            with contextlib.suppress(Exception):  # any forward may raise anything
                y, *others = (
                    _output(module, each, parameters, False).double() for each in (x, 8 * x, other)
                )
                allowed = 1e-2 * float(y.abs().max())
                is_near = [float((each - y).abs().max()) < allowed for each in others]
                if y.shape == x.shape and is_near == [True, False]:
                    return kind
    return ""


def _returns_x_hat(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether a module without parameters or buffers normalises rows, with any ordinary eps."""
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
        if module._buffers or len(inspect.signature(module.forward).parameters) != 1:
            return False
        y = _output(module, x, {}, False).double()
        for norm in (layer_norm, rms_norm):
            x_hat = norm(x.double(), x.shape[1])
            if y.shape == x.shape and float((y - x_hat).abs().max()) < 1e-2:
                return True
    return False


def _agrees(formula: Formula, output: torch.Tensor, sample: _Sample) -> bool:
    """Whether the output is within four times what gradient_check allows float32.

    Other formulas are off by far more.
    """
    x, parameters, shape = sample
    if output.shape != x.shape:
        return False
    expected, x_hat = formula(x, parameters, shape), formula(x, {}, shape)
    # A bound for weight and 1 + weight alike.
    magnitude = (1 + x_hat.abs()) * (1 + parameters.get("weight", torch.zeros(())).abs())
    magnitude += parameters.get("bias", torch.zeros(())).abs()
    allowed = 4 * 2.0**-24 * (4 + math.sqrt(math.prod(shape))) * magnitude
    near = (output.double() - expected).abs() <= allowed
    return bool((near | (output.isnan() & expected.isnan())).all())


def _why_not_in_training(
    formula: Formula, module: torch.nn.Module, sample: _Sample, own_names: dict[str, str]
) -> str:
    """Why its replacement would train differently, as of a detached variance; "" if it would not.

    A module for inference, which has no gradients, is no reason.
    """
    x, parameters, shape = sample._replace(x=sample.x[0])
    generator = torch.Generator("cpu").manual_seed(2)
    dy = 64 * torch.randn(x.shape, generator=generator)  # large enough for most limits
    leaves = [x.clone(), *(parameters[own].clone() for own in own_names.values())]
    with torch.enable_grad():
        for each in leaves:
            each.requires_grad_()
        given = leaves[0] * 1
        output = _output(module, given, dict(zip(own_names.values(), leaves[1:])), True)
        expected = formula(leaves[0], dict(zip(own_names, leaves[1:])), shape)
    if output.requires_grad:
        found = torch.autograd.grad(output, leaves, dy.to(output.dtype), allow_unused=True)
        for gradient, right in zip(found, torch.autograd.grad(expected, leaves, dy.double())):
            # float32 and float64 are nearer, and other formulas farther.
            allowed = 1e-3 * float(right.abs().max())
            if gradient is None or float((gradient - right).abs().max()) > allowed:
                return "its gradients are not those of the norm that it computes"
    return ""


def _why_not_for_other_input(module: torch.nn.Module, sample: _Sample, output: torch.Tensor) -> str:
    """Why it is no norm of each row by itself, or of other rows too; "" if it may be one.

    output: for the sample. A module may refuse any other input.
    """
    x, parameters, shape = sample
    rows, expected = (each.reshape(-1, *shape).clone() for each in (x, output))
    num_repeats = max(1, _MOST_ELEMENTS // rows.numel())
    views = [lambda of: of[:1], lambda of: of[0], lambda of: of[None, :, None, None]]
    views += [lambda of: torch.cat([of] * num_repeats), lambda of: of]
    for view in views:
        if view is views[-1]:
            rows[1] = expected[1] = math.nan
        with contextlib.suppress(Exception):  # any forward may raise anything
            given, right = view(rows), view(expected)
            y = _output(module, given, parameters, False)
            allowed = 1e-4 * float(right.nan_to_num().abs().max())  # rounding is nearer
            if not torch.allclose(y, right.to(y.dtype), rtol=0, atol=allowed, equal_nan=True):
                what = "a NaN" if view is views[-1] else f"input of shape {tuple(given.shape)}"
                return f"it computes another result for {what}"
    *outer, num_cols = shape
    for extents in ((2, *outer, 2 * num_cols), (2, *shape, 1, 3 if num_cols == 2 else 2)):
        with contextlib.suppress(Exception):
            _output(module, torch.ones(extents), parameters, False)
            allowed = ", ".join(map(str, shape))
            return f"it takes input of shape {extents} too; expected (..., {allowed}) alone"
    return ""


def _differences(
    formula: Formula,
    module: torch.nn.Module,
    sample: _Sample,
    own_names: dict[str, str],
    keep_rounding: bool,
) -> tuple[bool, str]:
    """What bfloat16 input shows: whether a rounding of x_hat is kept, and how y differs."""
    x, parameters, shape = sample._replace(x=sample.x.bfloat16())
    rounded = {name: parameter.bfloat16() for name, parameter in parameters.items()}
    remarks, keeps = [], False
    for norm_operands, what in (
        (rounded, "bfloat16"),
        (parameters, "bfloat16 with float32 weight"),
    ):
        with contextlib.suppress(RuntimeError):  # some modules refuse the first, some the second
            y = _output(module, x, norm_operands, False)
            norm_operands = {name: norm_operands[own] for name, own in own_names.items()}
            if y.dtype != x.dtype:
                remarks.append(f"y of {what} was {name_of(y.dtype)}, now bfloat16")
            elif _share_off(y, formula(x, norm_operands, shape).bfloat16()) > _FEW:
                x_hat = formula(x, {}, shape).bfloat16()
                twice = x_hat * (norm_operands.get("weight", 1) + formula.zero_centered)
                rounds = _share_off(y, twice + norm_operands.get("bias", 0)) <= _FEW
                if rounds and keep_rounding:
                    keeps = True
                else:
                    was = "more than y was rounded"
                    if rounds:
                        was = "x_hat was rounded before the weight"
                    remarks.append(f"{was}, now y alone is")
    return keeps, "; ".join(dict.fromkeys(remarks))


# float32 and float64 round to another bfloat16 about once in 10,000 elements. A second rounding
# changes one in three.
_FEW = 1 / 16


def _share_off(y: torch.Tensor, expected: torch.Tensor) -> float:
    return (y != expected).double().mean().item()
