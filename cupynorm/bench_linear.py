"""The benchmark of a norm and the linear layer after it: LayerNormLinear beside torch, torch.compile,
TransformerEngine and the product alone.

gemm      the linear layer alone, on an input that is normalised already (in fp8: quantised already): no design that calls a
          library for its product is faster
copy      a device-to-device copy of the bytes that the norm must move: forward reads x and writes the normalised tensor,
          forward and backward together read x twice and two gradients once, and write three
target    gemm + copy / 0.97; cupynorm/target: the default layer's time over that
time      as in cupynorm.bench: kernel time by CUDA events behind a flush of the L2 cache, the contestants in turns
held      what is allocated between forward and backward, beyond what was before and y; peak: the most in between,
          gradients included
correct   sampled rows of y beside float64, relative to their norm
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import gradient_check, nvrtc, reference
from .bench import Timer, environment, take_turns
from .bench_report import aligned
from .peers import Runner, first_line

# rows x in_features x out_features: projections of language models, and what a decoder sends through them.
SHAPES = (
    (8192, 4096, 12288), (16384, 4096, 6144), (4096, 8192, 10240), (49152, 1024, 3072), (32768, 2048, 6144),
    (1, 4096, 12288), (16, 4096, 12288), (64, 4096, 12288), (256, 4096, 12288),
)  # fmt: skip
FORMATS = ("bfloat16", "fp8")
PASSES = ("forward", "both")
EPS = 1e-5
COPY, GEMM, TARGET = "copy", "gemm", "target"
_OF_TARGET = "cupynorm/target"
_FEW_ROWS = 256  # up to here a decoder's: forward alone
_SAMPLED_ROWS = 16
_MEMORY_RUNS = 4
# Relative to the norm of y: one rounding of each factor and of y; in fp8 what cupynorm's own tests allow.
_ALLOWED = {"bfloat16": 2.0**-7, "fp8": 0.06}
_SHARE_OF_COPY = 0.97


class LinearCell(NamedTuple):
    """One case: its shape, "bfloat16" or "fp8", and "forward" or "both"."""

    num_rows: int
    in_features: int
    out_features: int
    format: str
    passes: str

    def __str__(self) -> str:
        what = "forward" if self.passes == "forward" else "forward and backward"
        return f"{self.num_rows} x {self.in_features} x {self.out_features} {self.format}, {what}"

    @property
    def norm_bytes(self) -> int:
        """What the norm alone must move."""
        of_element = (4 if self.format == "bfloat16" else 3) + (0 if self.passes == "forward" else 6)
        return self.num_rows * self.in_features * of_element


class Inputs(NamedTuple):
    """torch tensors in bfloat16: x, normalized [num_rows, in_features], dy, and the parameters."""

    x: Any
    normalized: Any
    dy: Any
    norm_weight: Any
    norm_bias: Any
    weight: Any
    bias: Any


class Contestant(NamedTuple):
    """formats: in which it runs. make(cell, inputs): forward(), which returns y; and what y is differentiated for.
    needs: a module."""

    formats: tuple[str, ...]
    make: Callable[[LinearCell, Inputs], tuple[Callable[[], Any], Sequence[Any]]]
    needs: str | None = None


def cells(
    shapes: Iterable[tuple[int, int, int]] = SHAPES, formats: Sequence[str] = FORMATS, passes: Sequence[str] = PASSES
) -> list[LinearCell]:
    """Every combination, but for few rows forward alone."""
    return [
        LinearCell(*shape, each, way) for each in formats for way in passes for shape in shapes
        if way == "forward" or shape[0] > _FEW_ROWS
    ]  # fmt: skip


# Contestants.


def _gemm(cell, inputs):
    from torch.nn import functional

    if cell.format == "bfloat16":
        tensors = (inputs.normalized, inputs.weight, inputs.bias)
        return partial(functional.linear, *tensors), tensors
    return _fp8_products(cell, inputs), ()


def _fp8_products(cell, inputs):
    """Products of tensors that are quantised already, those of the gradients after that of y."""
    from . import fp8

    def quantized(x, dtype=fp8.E4M3):
        return fp8.quantize(x.detach(), fp8.scale_of(fp8.amax_of(x.detach()), dtype), dtype, transpose=cell.passes == "both")

    x, weight = quantized(inputs.normalized), quantized(inputs.weight)
    dy = quantized(inputs.dy, fp8.E5M2) if cell.passes == "both" else None
    bias, dtype = inputs.bias.detach(), inputs.x.dtype

    def run():
        y = fp8.multiply(x.data, x.scale_inv, weight.data, weight.scale_inv, dtype, bias=bias, fast=True)
        if dy is not None:
            fp8.multiply(dy.data, dy.scale_inv, weight.transposed, weight.scale_inv, dtype)
            fp8.multiply(dy.transposed, dy.scale_inv, x.transposed, x.scale_inv, dtype)
            inputs.dy.detach().sum(0)
        return y

    return run


def _torch_layers(inputs):
    from torch.nn import functional

    def forward(x, norm_weight, norm_bias, weight, bias):
        normalized = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, EPS)
        return functional.linear(normalized, weight, bias)

    return forward, (inputs.x, *inputs[3:])


def _torch(cell, inputs):
    forward, tensors = _torch_layers(inputs)
    return partial(forward, *tensors), tensors


def _torch_compile(cell, inputs):
    import torch

    torch.compiler.reset()  # each cell is compiled for its own shape
    forward, tensors = _torch_layers(inputs)
    return partial(torch.compile(forward, dynamic=False), *tensors), tensors


def _layer(cell, inputs, make, **options):
    module = make(cell.in_features, cell.out_features, EPS, params_dtype=inputs.weight.dtype, device=inputs.x.device, **options)
    module.layer_norm_weight, module.layer_norm_bias, module.weight, module.bias = inputs[3:]
    return module


def _cupynorm(cell, inputs, recipe=None, **options):
    from . import fp8
    from .linear import LayerNormLinear

    module, differentiated = _layer(cell, inputs, LayerNormLinear, **options), (inputs.x, *inputs[3:])
    if cell.format == "bfloat16":
        return partial(module, inputs.x), differentiated  # inference folds once, and finds that out in each call
    recipe = recipe or fp8.DelayedScaling()
    return _in_fp8(cell, inputs, module, lambda: fp8.fp8_autocast(recipe=recipe)), differentiated


def _cupynorm_current(cell, inputs):
    from . import fp8

    return _cupynorm(cell, inputs, fp8.CurrentScaling())


def _in_fp8(cell, inputs, module, region):
    """Forward alone reads a weight that is quantised already, as inference does; with gradients it is quantised each time."""
    cached = cell.passes == "forward"

    def forward(first=False if cached else None):
        with region():
            return module(inputs.x, is_first_microbatch=first)

    if cached:
        forward(True)
    return forward


def _transformer_engine(cell, inputs):
    from transformer_engine import pytorch as engine

    module, differentiated = _layer(cell, inputs, engine.LayerNormLinear), (inputs.x, *inputs[3:])
    if cell.format == "bfloat16":
        return partial(module, inputs.x), differentiated
    return _in_fp8(cell, inputs, module, partial(engine.fp8_autocast, enabled=True)), differentiated


CONTESTANTS = {
    GEMM: Contestant(FORMATS, _gemm),
    "cupynorm": Contestant(FORMATS, _cupynorm),
    "cupynorm-saved": Contestant(FORMATS, partial(_cupynorm, save_normalized=True)),
    "cupynorm-fold": Contestant(("bfloat16",), partial(_cupynorm, fused="fold")),
    "cupynorm-current": Contestant(("fp8",), _cupynorm_current),
    "torch": Contestant(("bfloat16",), _torch),
    "torch.compile": Contestant(("bfloat16",), _torch_compile, "triton"),
    "transformer_engine": Contestant(FORMATS, _transformer_engine, "transformer_engine.pytorch"),
}


# One cell.


def inputs_of(cell: LinearCell, device: str, seed: int) -> Inputs:
    """Random tensors; those that have a gradient ask for it where the cell does."""
    import torch
    from torch.nn import functional

    generator = torch.Generator(device).manual_seed(seed)
    wants_gradients = cell.passes == "both"

    def normal(*shape, center=0.0, spread=1.0):
        made = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * spread + center
        return made.requires_grad_(wants_gradients)

    x = normal(cell.num_rows, cell.in_features, center=0.5, spread=2.0)
    parameters = [
        torch.nn.Parameter(normal(cell.in_features, center=each, spread=0.5).detach(), wants_gradients) for each in (1, 0)
    ]
    weight = torch.nn.Parameter(
        normal(cell.out_features, cell.in_features, spread=cell.in_features**-0.5).detach(), wants_gradients
    )
    bias = torch.nn.Parameter(normal(cell.out_features).detach(), wants_gradients)
    with torch.no_grad():
        normalized = functional.layer_norm(x, x.shape[-1:], *parameters, EPS)
    dy = normal(cell.num_rows, cell.out_features).detach()
    return Inputs(x, normalized.requires_grad_(wants_gradients), dy, *parameters, weight, bias)


def runner_of(cell: LinearCell, inputs: Inputs, contestant: Contestant) -> Runner:
    """What is timed: a call that returns y."""
    import torch

    forward, differentiated = contestant.make(cell, inputs)
    if cell.passes == "forward":

        def call():
            with torch.no_grad():
                return forward()

        return Runner(call)

    def both():
        y = forward()
        if differentiated:
            torch.autograd.grad(y, differentiated, inputs.dy)
        return y

    return Runner(both)


def off_by(cell: LinearCell, inputs: Inputs, y: Any) -> float:
    """The error of sampled rows of y beside float64, relative to their norm."""
    rows = np.unique(np.linspace(0, cell.num_rows - 1, min(_SAMPLED_ROWS, cell.num_rows)).astype(int))
    x, *parameters, got = (
        each.detach()[rows] if at in (0, 5) else each.detach() for at, each in enumerate((inputs.x, *inputs[3:], y))
    )
    truth = reference.norm_linear(*(each.double().cpu().numpy() for each in (x, *parameters)), EPS).y
    got = got.double().cpu().numpy()
    return float(np.linalg.norm(got - truth) / np.linalg.norm(truth))


def memory_of(cell: LinearCell, inputs: Inputs, contestant: Contestant) -> tuple[int, int]:
    """(held, peak) bytes of one forward and backward on a GPU, the most of some: what a former one has not given back yet when
    it begins, it seems not to need."""
    import torch

    forward, differentiated = contestant.make(cell, inputs)
    forward()  # what is allocated once

    def once() -> tuple[int, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = forward()
        held = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        if differentiated:
            torch.autograd.grad(y, differentiated, inputs.dy)
        return held, torch.cuda.max_memory_allocated() - before

    found = [once() for _ in range(_MEMORY_RUNS)]
    return max(held for held, _ in found), max(peak for _, peak in found)


@dataclass(frozen=True)
class LinearMeasurement:
    """One cell. microseconds: samples by name, COPY among them. errors: by name. memory: name -> (held, peak).
    faults: in words."""

    cell: LinearCell
    microseconds: dict[str, list[float]]
    errors: dict[str, float]
    memory: dict[str, tuple[int, int]]
    faults: dict[str, str]

    def median(self, name: str) -> float:
        if name == TARGET:
            return self.median(GEMM) + self.median(COPY) / _SHARE_OF_COPY
        return statistics.median(self.microseconds[name])


@dataclass
class LinearResult:
    """All cells. True if nothing was wrong. Prints as tables."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    measurements: list[LinearMeasurement]
    absent: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.measurements) and not any(each.faults for each in self.measurements)

    def __str__(self) -> str:
        names = [name for name in CONTESTANTS if any(name in each.microseconds for each in self.measurements)]
        rows = [["microseconds", *names, TARGET, _OF_TARGET]]
        memory = [["MiB between forward and backward / at most", *names]]
        for each in self.measurements:
            shown = [f"{each.median(name):.1f}" if name in each.microseconds else "-" for name in names]
            has_target = GEMM in each.microseconds and COPY in each.microseconds
            target = each.median(TARGET) if has_target else None
            of_target = has_target and "cupynorm" in each.microseconds
            rows.append(
                [
                    str(each.cell),
                    *shown,
                    f"{target:.1f}" if has_target else "-",
                    f"{each.median('cupynorm') / target:.3f}" if of_target else "-",
                ]
            )
            if each.memory:
                sizes = [each.memory.get(name) for name in names]
                memory.append(
                    [
                        str(each.cell),
                        *("-" if size is None else f"{size[0] / 2**20:.0f} / {size[1] / 2**20:.0f}" for size in sizes),
                    ]
                )
        lines = [
            *aligned(rows),
            "",
            f"medians; target: gemm + a copy of the norm's bytes / 0.97; {_OF_TARGET}: of the default layer",
        ]
        if len(memory) > 1:
            lines += ["", *aligned(memory)]
        lines += [f"{each.cell}: {why}" for each in self.measurements for why in each.faults.values()]
        lines += [f"{name} was left out: {why}" for name, why in self.absent.items()]
        return "\n".join(lines)

    def to_json(self) -> str:
        content = {
            "environment": self.environment, "settings": self.settings, "absent": self.absent,
            "measurements": [asdict(each) | {"cell": each.cell._asdict()} for each in self.measurements],
        }  # fmt: skip
        return json.dumps(content, indent=1)


def measure(
    cell: LinearCell, names: Sequence[str], timer: Timer, runs: int, seed: int, device: str = "cuda"
) -> LinearMeasurement:
    """One cell on a device: the contestants of `names` that run in its format."""
    import torch

    inputs = inputs_of(cell, device, seed)
    source = torch.empty(max(1, cell.norm_bytes // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runners = {COPY: Runner(lambda: target.copy_(source))}
    errors: dict[str, float] = {}
    memory: dict[str, tuple[int, int]] = {}
    faults: dict[str, str] = {}
    for name in names:
        contestant = CONTESTANTS[name]
        if cell.format not in contestant.formats:
            continue
        try:
            runner = runner_of(cell, inputs, contestant)
            runner.call()  # delayed scales are right from the second step on
            errors[name] = off_by(cell, inputs, runner.call())
            timer.sample(runner)
            if cell.passes == "both" and device == "cuda":
                memory[name] = memory_of(cell, inputs, contestant)
        except Exception as failure:  # a contestant that fails, in whichever way, must not end the run
            faults[name] = f"{name} could not run: {first_line(failure)}"
            continue
        runners[name] = runner
        if not errors[name] <= _ALLOWED[cell.format]:
            faults[name] = f"{name} is off: y by {errors[name]:.3g} of its norm; expected {_ALLOWED[cell.format]:.3g} at most"
    return LinearMeasurement(cell, take_turns(timer, runners, runs), errors, memory, faults)


def missing(name: str) -> str | None:
    """Why a contestant cannot run here, or None."""
    import importlib

    for module in filter(None, ("torch", CONTESTANTS[name].needs)):
        try:
            importlib.import_module(module)
        except Exception as error:  # a library built for another torch or CUDA fails in its own way
            return f"{module} could not be imported ({first_line(error)})"
    return None


def bench_linear(
    todo: Sequence[LinearCell] | None = None,
    *,
    runs: int = 30,
    seed: int = 0,
    contestants: Sequence[str] | None = None,
    progress: Callable[..., Iterable] | None = None,
    command: str = "cupynorm.bench_linear.bench_linear()",
) -> LinearResult:
    """Measure todo (by default all of `cells()`) on the current GPU.
    contestants: names of CONTESTANTS, by default all that can run.

    Returns a LinearResult. Raises ValueError without a GPU or for what is not known, MissingLibraryError without CuPy.
    """
    todo = cells() if todo is None else list(todo)
    if runs < 1:
        raise ValueError(f"runs is {runs}; expected 1 or more")
    names = list(CONTESTANTS if contestants is None else contestants)
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise ValueError(f"contestants has {unknown[0]!r}; expected some of {', '.join(CONTESTANTS)}")
    nvrtc.cupy()
    if not gradient_check.has_gpu():
        raise ValueError("the benchmark measures a GPU and none was found; python -m cupynorm check runs without one")
    absent = {name: why for name in names if (why := missing(name))}
    names = [name for name in names if name not in absent]
    timer, measurements = Timer.on_gpu(), []
    for at, cell in enumerate((progress or (lambda items, **_: items))(todo, desc="measuring", unit="cell")):
        measurements.append(measure(cell, names, timer, runs, seed + at))
        timer.num_flushes.clear()
        sys.modules["torch"].cuda.empty_cache()
    return LinearResult(environment(), {"runs": runs, "seed": seed, "command": command}, measurements, absent)


def shape_of(text: str) -> tuple[int, int, int]:
    """ROWSxINxOUT as three numbers. ValueError for anything else."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ValueError(f"{text!r} is no shape; expected rows x in_features x out_features, for example 8192x4096x12288")
    return int(parts[0]), int(parts[1]), int(parts[2])
