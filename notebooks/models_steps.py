"""How models.py measures: one model, its runs, and their steps."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from models_decoders import Batch
from models_report import COMPILED, FLOAT64, GRAPHED, PHASES, ModelResult, Phase
from tqdm import tqdm
from train_gpt import norms_in_float64

import cupynorm

BACKEND = "inductor"
NUM_COMPARED = 3  # inputs on which the runs are compared
NUM_WARM = 2  # steps of each run after that, not timed
NUM_PROFILED = 3
NUM_SLOWEST = 60  # kernels of a step, which the JSON lists


class Subject(NamedTuple):
    """A model to measure.

    sizes, quick: its arguments, and those of --quick. batch: samples in a step, in full and with
    --quick. weights: dtype in training on a GPU; float32 is computed under autocast to bfloat16.
    """

    title: str
    about: str
    make: Callable[..., torch.nn.Module]
    sizes: dict[str, Any]
    quick: dict[str, Any]
    batch: tuple[int, int]
    weights: torch.dtype


class Backend:
    """torch.compile's backend for one run.

    Code that dynamo compiled for one backend is not used for another.
    """

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.num_graphs += 1
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)


class Variant(NamedTuple):
    """A model as one run has it."""

    run: str
    model: torch.nn.Module
    backend: Backend


Call = Callable[[Batch], torch.Tensor]  # a step of one run


class Settings(NamedTuple):
    """Options that all models share.

    graphs: inference is also timed in CUDA graphs. profile: the time of kernels is measured too.
    whole: models of at most so many layers are compiled as one graph; 0: each block is.
    phases: what is measured.
    """

    runs: tuple[str, ...]
    steps: int
    quick: bool
    device: str
    seed: int
    graphs: bool = False
    profile: bool = False
    whole: int = 0
    phases: tuple[str, ...] = PHASES


def initialize(model: torch.nn.Module) -> None:
    """Random weights, among them those of norms: ones would hide errors in their use."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def variant_of(model: torch.nn.Module, run: str, whole: bool = False) -> Variant:
    """A copy of the model for a run, compiled by blocks or as a whole. All copies share the
    parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    model, backend = copy.deepcopy(model, shared), Backend()
    if run == FLOAT64:
        norms_in_float64(model)
    if run.startswith("cupynorm"):
        swapped = cupynorm.swap_norms(model)
        if swapped.left or not swapped.swapped:
            raise RuntimeError(f"not all norms were swapped:\n{swapped}")
    if run in COMPILED:
        for part in [model] if whole else model.blocks:
            part.compile(backend=backend, fullgraph=True, dynamic=False)
    return Variant(run, model, backend)


def make(subject: Subject, settings: Settings) -> torch.nn.Module:
    torch.manual_seed(settings.seed)
    sizes = subject.quick if settings.quick else subject.sizes
    if settings.whole:
        sizes = sizes | {"num_layers": min(settings.whole, sizes["num_layers"])}
    with torch.device(settings.device):
        model = subject.make(**sizes)
        initialize(model)
    return model.to(subject.weights) if on_gpu(settings.device) else model


def on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


class Step:
    """Runs the steps of one phase of a model."""

    def __init__(self, phase: str, subject: Subject, settings: Settings) -> None:
        self.trains, self.device = phase == "training", settings.device
        self.profiles = settings.profile
        self.batch_size, self.num_timed = subject.batch[settings.quick], settings.steps
        self.autocast = self.trains and on_gpu(self.device) and subject.weights is torch.float32
        self.generator = torch.Generator(self.device).manual_seed(settings.seed)

    def batch(self, model: torch.nn.Module) -> Batch:
        """A new input and target, in the dtype of the weights."""
        dtype = next(model.parameters()).dtype
        inputs, target = model.batch(self.batch_size, self.generator)
        inputs = tuple(
            each.detach().to(dtype).requires_grad_(each.requires_grad and self.trains)
            if each.is_floating_point()
            else each
            for each in inputs
        )
        return inputs, target

    def __call__(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The loss after backward, or in inference the output. Earlier gradients are dropped."""
        inputs, target = batch
        for each in (*model.parameters(), *inputs):
            each.grad = None
        if not self.trains:
            with torch.no_grad():
                return model(*inputs)
        in_bfloat16 = torch.autocast("cuda", torch.bfloat16) if self.autocast else None
        with in_bfloat16 or contextlib.nullcontext():
            output = model(*inputs)
        loss = model.loss(output, target)
        loss.backward()
        return loss.detach()

    def timed(self, call: Call, batch: Batch) -> float:
        """Milliseconds until the GPU is done."""
        self.wait()
        start = time.perf_counter()
        call(batch)
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def profile(self, call: Call, batch: Batch) -> list[Any]:
        """The events of NUM_PROFILED steps, by torch.profiler. Its start lets the clocks of the GPU
        fall, so one step is too few."""
        call(batch)
        self.wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(NUM_PROFILED):
                call(batch)
            self.wait()
        return [each for each in profiled.events() if is_of_gpu(each)]

    def wait(self) -> None:
        if on_gpu(self.device):
            torch.cuda.synchronize(self.device)

    def quantities(self, variant: Variant, batch: Batch) -> dict[str, list[torch.Tensor]]:
        """What is compared after a step: loss and gradients, or outputs."""
        result = self(variant.model, batch)
        if not self.trains:
            return {"outputs": [result]}
        return {"loss": [result], "gradients": [each.grad for each in variant.model.parameters()]}


def is_norm(kernel: str) -> bool:
    """Whether a kernel of eager calls computes norms alone: torch's, or ours."""
    name = kernel.removeprefix("void ")
    return name.startswith(("forward_", "backward_")) or any(
        part in name for part in ("layer_norm", "LayerNorm", "GammaBeta", "RowwiseMoments")
    )


def is_of_gpu(event: Any) -> bool:
    """Whether an event of torch.profiler is on the GPU and no range that a program has named."""
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation


def busy(events: Iterable[Any]) -> float:
    """Milliseconds of a step in which one kernel or more is on the GPU.

    A kernel that is launched to overlap the one before it starts early and waits, so times of
    kernels do not add up.
    """
    ranges = sorted((each.time_range.start, each.time_range.end) for each in events)
    total, done = 0.0, -math.inf
    for start, end in ranges:
        total += max(0.0, end - max(start, done))
        done = max(done, end)
    return total / NUM_PROFILED / 1e3


def slowest(events: Iterable[Any]) -> dict[str, list[float]]:
    """name -> launches and milliseconds of a step, of the kernels that take longest together."""
    found: dict[str, tuple[float, float]] = {}
    for each in events:
        name = each.name[:240]
        number, time = found.get(name, (0.0, 0.0))
        time += (each.time_range.end - each.time_range.start) / NUM_PROFILED / 1e3
        found[name] = number + 1 / NUM_PROFILED, time
    first = sorted(found.items(), key=lambda item: -item[1][1])[:NUM_SLOWEST]
    return {name: [round(number, 1), round(time, 4)] for name, (number, time) in first}


class Replay:
    """A step of inference in a CUDA graph: each call copies its inputs into those of the graph."""

    def __init__(self, step: Step, model: torch.nn.Module, batch: Batch) -> None:
        self.inputs = tuple(each.clone() for each in batch[0])
        captured = self.inputs, batch[1]
        step(model, captured)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = step(model, captured)

    def __call__(self, batch: Batch) -> torch.Tensor:
        for own, each in zip(self.inputs, batch[0]):
            own.copy_(each)
        self.graph.replay()
        return self.output


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Of all elements together, relative: the norm of the difference over that of `expected`.

    Raises ArithmeticError if it is not finite.
    """
    of_difference, of_expected = (
        torch.stack(norms).norm().item()
        for norms in (
            [(a.double() - b.double()).norm() for a, b in zip(found, expected)],
            [each.double().norm() for each in expected],
        )
    )
    if not (math.isfinite(of_difference) and 0 < of_expected < math.inf):
        raise ArithmeticError(f"norms of {of_difference} and {of_expected} are not comparable")
    return of_difference / of_expected


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def compare(step: Step, variants: list[Variant], phase: Phase) -> dict[str, str]:
    """Compares all variants on a few inputs, which also compiles. Returns run -> why it failed."""
    failed: dict[str, str] = {}
    first, *others = variants
    for _ in range(NUM_COMPARED):
        batch = step.batch(first.model)
        expected = step.quantities(first, batch)
        for variant in (each for each in others if each.run not in failed):
            try:
                found = step.quantities(variant, batch)
                distances = {name: distance(found[name], expected[name]) for name in found}
            except Exception as error:  # keep the other runs
                failed[variant.run] = _first_line(error)
                continue
            largest = phase.distances.setdefault(variant.run, {})
            for name, each in distances.items():
                largest[name] = max(each, largest.get(name, 0.0))
    return failed


def measure(subject: Subject, settings: Settings, bar: tqdm) -> tuple[ModelResult, list[str]]:
    """One model, and sentences about what failed."""
    about = "tiny" if settings.quick else subject.about
    result, left_out = ModelResult(subject.title, about), []
    model, whole = make(subject, settings), bool(settings.whole)
    if whole:
        result.about += f"; layers: {len(model.blocks)}"
    variants = [variant_of(model, run, whole) for run in ("torch", FLOAT64, *settings.runs[1:])]
    for phase in settings.phases:
        step, found = Step(phase, subject, settings), Phase()
        if phase == "inference" and on_gpu(settings.device):
            for variant in variants:
                variant.model.to(torch.bfloat16)
        bar.set_description(f"{subject.title}, {phase}")
        before = {variant.run: variant.backend.num_graphs for variant in variants}
        failed = compare(step, variants, found)
        left_out += [
            f"{subject.title}, {phase}: {run} failed: {why}" for run, why in failed.items()
        ]
        timed = [each for each in variants if each.run != FLOAT64 and each.run not in failed]
        for variant in timed:
            if variant.run in COMPILED and variant.backend.num_graphs == before[variant.run]:
                raise RuntimeError(f"{variant.run} was not compiled for {phase}")
        calls = {each.run: functools.partial(step, each.model) for each in timed}
        time_in_turns(step, calls, model, found, bar)
        result.phases[phase] = found
    if settings.graphs:
        bar.set_description(f"{subject.title}, {GRAPHED}")
        alike = [each for each in variants if each.run not in failed]
        result.phases[GRAPHED], failed = measure_graphs(step, alike, bar)
        left_out += [
            f"{subject.title}, {GRAPHED}: {run} failed: {why}" for run, why in failed.items()
        ]
    return result, left_out


def measure_graphs(step: Step, variants: list[Variant], bar: tqdm) -> tuple[Phase, dict[str, str]]:
    """Inference in CUDA graphs, and run -> why it failed.

    Outputs are compared with those of the first variant without a graph. What roundings explain is
    found without a graph too.
    """
    found, failed, calls = Phase(), {}, {}
    model = variants[0].model
    for variant in variants:
        try:
            if variant.run == FLOAT64:
                replay = functools.partial(step, variant.model)
            else:
                replay = calls[variant.run] = Replay(step, variant.model, step.batch(model))
            for _ in range(NUM_COMPARED):
                batch = step.batch(model)
                each = distance([replay(batch)], [step(model, batch)])
                largest = found.distances.setdefault(variant.run, {"outputs": 0.0})
                largest["outputs"] = max(each, largest["outputs"])
        except Exception as error:  # keep the other runs
            failed[variant.run] = _first_line(error)
            calls.pop(variant.run, None)
    time_in_turns(step, calls, model, found, bar)
    return found, failed


def time_in_turns(
    step: Step, calls: dict[str, Call], model: torch.nn.Module, found: Phase, bar: tqdm
) -> None:
    """Times all runs on the same inputs.

    Each is first, second, ... equally often, and after each neighbour equally often.
    """
    runs = [*calls]
    for at in range(NUM_WARM + step.num_timed):
        batch = step.batch(model)
        turn = at % max(1, len(runs))
        for run in (runs[turn:] + runs[:turn])[:: -1 if at % 2 else 1]:
            milliseconds = step.timed(calls[run], batch)
            if at >= NUM_WARM:
                found.milliseconds.setdefault(run, []).append(round(milliseconds, 4))
        bar.update()
    if step.profiles:
        batch = step.batch(model)
        for run, call in calls.items():
            events = step.profile(call, batch)
            found.kernels[run], found.slowest[run] = busy(events), slowest(events)
            if run not in COMPILED:
                found.norms[run] = busy(each for each in events if is_norm(each.name))


def compile_ahead(subject: Subject, run: str, settings: Settings) -> None:
    """Compiles one run of a model, in a process of its own, into the caches on disk.

    Of blocks that are compiled one by one, one is enough, for all have the same code.
    """
    torch._inductor.config.compile_threads = 1  # there are many processes already
    if not settings.whole:
        subject = subject._replace(
            sizes=subject.sizes | {"num_layers": 1}, quick=subject.quick | {"num_layers": 1}
        )
    variant = variant_of(make(subject, settings), run, bool(settings.whole))
    for phase in settings.phases:
        if phase == "inference" and on_gpu(settings.device):
            variant.model.to(torch.bfloat16)
        step = Step(phase, subject, settings)
        step.quantities(variant, step.batch(variant.model))


def compile_in_processes(subjects: Sequence[Subject], settings: Settings, jobs: int) -> None:
    """Runs compile_ahead for every model and every compiled run."""
    todo = [(each, run) for each in subjects for run in settings.runs if run in COMPILED]
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        started = [pool.submit(compile_ahead, *each, settings) for each in todo]
        done = concurrent.futures.as_completed(started)
        for each in tqdm(done, desc="compiling", total=len(todo), leave=False):
            each.exception()  # a process that failed has compiled less; the run will say what fails
