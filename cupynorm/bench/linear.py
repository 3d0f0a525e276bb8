"""The benchmark of a norm and the linear layer after it: LayerNormLinear beside other libraries.

gemm      the linear layer alone, on an input that is normalised, in fp8 also quantised, already. No
          design that calls a library for its product is faster.
copy      a device-to-device copy of the bytes that the norm must move. Forward reads x and writes
          the normalised tensor. Forward and backward together read x twice and two gradients once,
          and write three tensors.
target    gemm + copy / 0.97; cupynorm/target: the time of the default layer over that
time      as in cupynorm.bench.timer, the contestants in turns
held      memory that is allocated between forward and backward, beyond y; peak: the most during
          both, gradients included
correct   sampled rows of y compared with float64, relative to their norm
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import reference
from ..gpu.nvrtc import environment
from .cells import COPY
from .contestants import CONTESTANTS, EPS, FORMATS, GEMM, Contestant, Inputs, LinearCell
from .measure import check_runs, free_memory
from .peers import fault, not_importable
from .report import aligned
from .timer import Runner, Timer, take_turns

# rows x in_features x out_features: projections of language models, in training and in decoding.
SHAPES = (
    (8192, 4096, 12288),
    (16384, 4096, 6144),
    (4096, 8192, 10240),
    (49152, 1024, 3072),
    (32768, 2048, 6144),
    (1, 4096, 12288),
    (16, 4096, 12288),
    (64, 4096, 12288),
    (256, 4096, 12288),
)
PASSES = ("forward", "both")
TARGET = "target"
READ = "read"  # decoding.py
_OF_TARGET = "cupynorm/target"
_FEW_ROWS = 256  # a decoder's: forward alone
_SAMPLED_ROWS = 16
_MEMORY_RUNS = 4
# Relative to the norm of y: one rounding of each factor and of y; in fp8 what the tests allow.
_ALLOWED = {"bfloat16": 2.0**-7, "fp8": 0.06}
_SHARE_OF_COPY = 0.97


def cells(
    shapes: Iterable[tuple[int, int, int]] = SHAPES,
    formats: Sequence[str] = FORMATS,
    passes: Sequence[str] = PASSES,
) -> list[LinearCell]:
    """Every combination. Few rows run forward alone."""
    shapes = list(shapes)
    return [
        LinearCell(*shape, each, way)
        for each in formats
        for way in passes
        for shape in shapes
        if way == "forward" or shape[0] > _FEW_ROWS
    ]


def inputs_of(cell: LinearCell, device: str, seed: int) -> Inputs:
    """Random tensors. They require gradients where the cell has them."""
    import torch
    from torch.nn import functional

    generator = torch.Generator(device).manual_seed(seed)
    wants_gradients = cell.passes == "both"

    def normal(*shape, center=0.0, spread=1.0):
        values = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values * spread + center

    def parameter(*shape, **options):
        return torch.nn.Parameter(normal(*shape, **options), wants_gradients)

    x = normal(cell.num_rows, cell.in_features, center=0.5, spread=2.0)
    parameters = [parameter(cell.in_features, center=each, spread=0.5) for each in (1, 0)]
    spread = cell.in_features**-0.5
    weight = parameter(cell.out_features, cell.in_features, spread=spread)
    bias = parameter(cell.out_features)
    with torch.no_grad():
        normalized = functional.layer_norm(x, x.shape[-1:], *parameters, EPS)
    dy = normal(cell.num_rows, cell.out_features)
    x, normalized = (each.requires_grad_(wants_gradients) for each in (x, normalized))
    return Inputs(x, normalized, dy, *parameters, weight, bias)


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
    rows = np.unique(
        np.linspace(0, cell.num_rows - 1, min(_SAMPLED_ROWS, cell.num_rows)).astype(int)
    )
    x, *parameters, got = (
        each.detach()[rows] if at in (0, 5) else each.detach()
        for at, each in enumerate((inputs.x, *inputs[3:], y))
    )
    truth = reference.norm_linear(
        *(each.double().cpu().numpy() for each in (x, *parameters)), EPS
    ).y
    got = got.double().cpu().numpy()
    return float(np.linalg.norm(got - truth) / np.linalg.norm(truth))


def check_error(
    cell: LinearCell, inputs: Inputs, name: str, y: Any, faults: dict[str, str]
) -> float:
    """The error of y. One that is too large is noted in faults, by the contestant's name."""
    error, most = off_by(cell, inputs, y), _ALLOWED[cell.format]
    if not error <= most:
        faults[name] = f"{name} is off: y by {error:.3g} of its norm; expected {most:.3g} at most"
    return error


def memory_of(cell: LinearCell, inputs: Inputs, contestant: Contestant) -> tuple[int, int]:
    """(held, peak) bytes of one forward and backward on a GPU.

    The most of several runs: memory that an earlier run still holds hides what the next one needs.
    """
    import torch

    forward, differentiated = contestant.make(cell, inputs)
    forward()  # allocates what stays

    def once() -> tuple[int, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = forward()
        held = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        if differentiated:
            torch.autograd.grad(y, differentiated, inputs.dy)
        return held, torch.cuda.max_memory_allocated() - before

    held_and_peak = [once() for _ in range(_MEMORY_RUNS)]
    return max(held for held, _ in held_and_peak), max(peak for _, peak in held_and_peak)


@dataclass(frozen=True)
class LinearMeasurement:
    """One cell.

    microseconds: samples by name, "copy" among them. errors: by name. memory: name -> (held, peak)
    bytes. faults: name -> sentence.
    """

    cell: LinearCell
    microseconds: dict[str, list[float]]
    errors: dict[str, float]
    memory: dict[str, tuple[int, int]]
    faults: dict[str, str]

    def median(self, name: str) -> float:
        """Microseconds; of _OF_TARGET a ratio. KeyError: it was not measured."""
        if name == TARGET:
            return self.median(GEMM) + self.median(COPY) / _SHARE_OF_COPY
        if name == _OF_TARGET:
            return self.median("cupynorm") / self.median(TARGET)
        return statistics.median(self.microseconds[name])

    def in_words(self, name: str) -> str:
        try:
            return f"{self.median(name):.{3 if name == _OF_TARGET else 1}f}"
        except KeyError:
            return "-"


@dataclass
class LinearResult:
    """All cells, printed as tables. True if nothing was wrong."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    measurements: list[LinearMeasurement]
    absent: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.measurements) and not any(each.faults for each in self.measurements)

    def names(self) -> list[str]:
        """The contestants that were measured, in their order."""
        found = {name for each in self.measurements for name in each.microseconds}
        return [name for name in CONTESTANTS if name in found]

    def complaints(self) -> list[str]:
        """What was wrong, and who is absent."""
        lines = [
            f"{each.cell}: {why}" for each in self.measurements for why in each.faults.values()
        ]
        return lines + [f"{name} was left out: {why}" for name, why in self.absent.items()]

    def __str__(self) -> str:
        names = self.names()
        with_read = any(READ in each.microseconds for each in self.measurements)
        shown = [READ, *names] if with_read else [*names, TARGET, _OF_TARGET]
        rows = [["microseconds", *shown]]
        memory = [["MiB between forward and backward / at most", *names]]
        for each in self.measurements:
            rows.append([str(each.cell), *map(each.in_words, shown)])
            if each.memory:
                sizes = [each.memory.get(name) for name in names]
                memory.append([str(each.cell), *map(_mebibytes, sizes)])
        about = (
            f"medians; target: gemm + a copy of the norm's bytes / {_SHARE_OF_COPY}; "
            f"{_OF_TARGET}: of the default layer"
        )
        if with_read:
            about = "medians of replays of a CUDA graph; read: a copy of half of the weight"
        lines = [*aligned(rows), "", about]
        if len(memory) > 1:
            lines += ["", *aligned(memory)]
        return "\n".join([*lines, *self.complaints()])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def _mebibytes(size: tuple[int, int] | None) -> str:
    return "-" if size is None else f"{size[0] / 2**20:.0f} / {size[1] / 2**20:.0f}"


def measure_in_turns(
    timer: Timer, cell: LinearCell, names: Sequence[str], runs: int, seed: int, device: str = "cuda"
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
            errors[name] = check_error(cell, inputs, name, runner.call(), faults)
            timer.sample(runner)
            if cell.passes == "both" and device == "cuda":
                memory[name] = memory_of(cell, inputs, contestant)
        except Exception as failure:  # a failing contestant must not end the run
            faults[name] = fault(name, failure)
            continue
        runners[name] = runner
    samples = take_turns(timer, runners, runs)
    timer.num_flushes.clear()
    return LinearMeasurement(cell, samples, errors, memory, faults)


def missing(name: str) -> str | None:
    """Why a contestant cannot run here, or None."""
    return not_importable(filter(None, ("torch", CONTESTANTS[name].needs)))


def bench_linear(
    todo: Sequence[LinearCell] | None = None,
    *,
    runs: int = 30,
    seed: int = 0,
    contestants: Sequence[str] | None = None,
    progress: Callable[..., Iterable] | None = None,
    command: str = "cupynorm.bench.linear.bench_linear()",
    names: Sequence[str] = tuple(CONTESTANTS),
    measure: Callable[[LinearCell, Sequence[str], int, int], LinearMeasurement] | None = None,
) -> LinearResult:
    """Measure todo, by default all of `cells()`, on the current GPU.

    contestants: some of CONTESTANTS, by default those of names that can run. runs, seed, progress,
    command: as in cupynorm.bench.measure.bench.
    measure: of a cell, the contestants, runs and a seed; by default measure_in_turns.
    Returns a LinearResult. Raises ValueError without a GPU and for unknown names,
    MissingLibraryError without CuPy.
    """
    todo = cells() if todo is None else list(todo)
    wanted = names if contestants is None else contestants
    unknown = [name for name in wanted if name not in CONTESTANTS]
    if unknown:
        raise ValueError(
            f"contestants has {unknown[0]!r}; expected some of {', '.join(CONTESTANTS)}"
        )
    check_runs(runs)
    absent = {name: why for name in wanted if (why := missing(name))}
    able = [name for name in wanted if name not in absent]
    measure = measure or partial(measure_in_turns, Timer.on_gpu())
    progress = progress or (lambda items, **_: items)
    measurements = []
    for at, cell in enumerate(progress(todo, desc="measuring", unit="cell")):
        measurements.append(measure(cell, able, runs, seed + at))
        free_memory()
    settings = {"runs": runs, "seed": seed, "command": command}
    return LinearResult(environment(), settings, measurements, absent)
