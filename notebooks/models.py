"""Times six models with torch's norms and with cupynorm's, and compares losses and gradients.

    python notebooks/models.py [--models MODEL,..] [--runs RUN,..] [--steps 30] [--quick]
                               [--jobs N] [--device cuda] [--json FILE] [--plot FILE] [--docs]
    python notebooks/models.py --from FILE [--plot FILE] [--docs]

Weights and inputs are random. All runs of a model share their weights. Each step has a new input,
on which the runs take turns.

run                 norms                                         torch.compile
torch               torch.nn.LayerNorm and RMSNorm                no
cupynorm            cupynorm's, by cupynorm.swap_norms            no
torch-compiled      as torch                                      each block
cupynorm-compiled   as cupynorm                                   each block
passes-compiled     as torch, replaced by cupynorm's graph passes each block

A step of training is forward and backward: under autocast to bfloat16, or with weights in bfloat16
where such models are trained so. Inference has all weights in bfloat16. A CPU computes in float32
and compiles only the runs that --runs names.

The distance of a run from the run torch is compared as in train_gpt.py: with that of torch's norms
computed in float64 and rounded once, which roundings alone explain.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import math
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models_decoders import Batch, Decoder, Gpt2
from models_encoders import Bert, Dit, Vit
from models_report import COMPILED, FLOAT64, PASSES, PHASES, RUNS, ModelResult, Phase, Result, plot
from tqdm import tqdm
from train_gpt import norms_in_float64

import cupynorm
from cupynorm.bench.documents import DOCUMENT, rewrite_table
from cupynorm.gpu.environment import environment

BACKEND = "inductor"
NUM_COMPARED = 3  # inputs on which the runs are compared
NUM_WARM = 2  # steps of each run after that, not timed
BLOCK = "steps"  # the markers in the document


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


_TINY = {"num_layers": 2, "width": 64}
_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
MODELS = {
    "gpt2": Subject(
        "GPT-2 124M",
        "16 x 1024 tokens, float32 under autocast",
        Gpt2,
        {"num_layers": 12, "width": 768, "context": 1024, "num_tokens": 50257},
        _TINY | {"context": 32, "num_tokens": 100},
        (16, 2),
        torch.float32,
    ),
    "bert": Subject(
        "BERT-base",
        "32 x 512 tokens, float32 under autocast",
        Bert,
        {"num_layers": 12, "width": 768, "num_heads": 12, "context": 512, "num_tokens": 30522},
        _TINY | {"num_heads": 2, "context": 32, "num_tokens": 100},
        (32, 2),
        torch.float32,
    ),
    "vit": Subject(
        "ViT-L/16",
        "64 images of 224 x 224, float32 under autocast",
        Vit,
        {"num_layers": 24, "width": 1024, "num_heads": 16}
        | {"image_size": 224, "patch_size": 16, "num_classes": 1000},
        _TINY | {"num_heads": 2, "image_size": 32, "patch_size": 8, "num_classes": 10},
        (64, 2),
        torch.float32,
    ),
    "llama3": Subject(
        "Llama 3 8B, 2 layers",
        "2 x 4096 tokens, bfloat16, without embedding and head",
        Decoder,
        {"num_layers": 2, "width": 4096, "context": 4096, "base": 5e5, "eps": 1e-5}
        | {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "mlp_width": 14336}
        | {"with_norms": False},
        _TINY
        | _HEADS
        | {"context": 32, "base": 5e5, "eps": 1e-5, "mlp_width": 128, "with_norms": False},
        (2, 2),
        torch.bfloat16,
    ),
    "qwen3": Subject(
        "Qwen3 1.7B, 4 layers",
        "4 x 4096 tokens, bfloat16, q and k normalised, without embedding and head",
        Decoder,
        {"num_layers": 4, "width": 2048, "context": 4096, "base": 1e6, "eps": 1e-6}
        | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "mlp_width": 6144}
        | {"with_norms": True},
        _TINY
        | _HEADS
        | {"context": 32, "base": 1e6, "eps": 1e-6, "mlp_width": 128, "with_norms": True},
        (4, 2),
        torch.bfloat16,
    ),
    "dit": Subject(
        "DiT-L/2, 1 block",
        "256 images of 256 tokens, float32 under autocast",
        Dit,
        {"num_layers": 1, "width": 1024, "num_heads": 16, "num_tokens": 256},
        {"num_layers": 1, "width": 64, "num_heads": 2, "num_tokens": 16},
        (256, 2),
        torch.float32,
    ),
}


class Backend:
    """torch.compile's backend for one run.

    Code that dynamo compiled for one backend is not used for another. A run with graph passes has
    the same modules as one without.
    """

    def __init__(self) -> None:
        self.num_graphs = 0
        self._compile = torch._dynamo.lookup_backend(BACKEND)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.num_graphs += 1
        return self._compile(graph, inputs)


class Variant(NamedTuple):
    """A model as one run has it."""

    run: str
    model: torch.nn.Module
    backend: Backend


class Settings(NamedTuple):
    """Options that all models share."""

    runs: tuple[str, ...]
    steps: int
    quick: bool
    device: str
    seed: int


@contextlib.contextmanager
def graph_passes(run: str) -> Iterator[None]:
    """Inside, torch.compile runs cupynorm's graph passes, if the run wants them."""
    if run != PASSES:
        yield
        return
    passes = cupynorm.compile_passes()
    try:
        yield
    finally:
        passes.undo()


def initialize(model: torch.nn.Module) -> None:
    """Random weights, among them those of norms: ones would hide errors in their use."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def variant_of(model: torch.nn.Module, run: str) -> Variant:
    """A copy of the model for a run. All copies share the parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    model, backend = copy.deepcopy(model, shared), Backend()
    if run == FLOAT64:
        norms_in_float64(model)
    if run.startswith("cupynorm"):
        swapped = cupynorm.swap_norms(model)
        if swapped.left or not swapped.swapped:
            raise RuntimeError(f"not all norms were swapped:\n{swapped}")
    if run in COMPILED:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True, dynamic=False)
    return Variant(run, model, backend)


def make(subject: Subject, settings: Settings) -> torch.nn.Module:
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = subject.make(**(subject.quick if settings.quick else subject.sizes))
        initialize(model)
    return model.to(subject.weights) if on_gpu(settings.device) else model


def on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


class Step:
    """Runs the steps of one phase of a model."""

    def __init__(self, phase: str, subject: Subject, settings: Settings) -> None:
        self.trains, self.device = phase == "training", settings.device
        self.batch_size = subject.batch[settings.quick]
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
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=self.autocast)
        with autocast if self.autocast else contextlib.nullcontext():
            output = model(*inputs)
        loss = model.loss(output, target)
        loss.backward()
        return loss.detach()

    def timed(self, model: torch.nn.Module, batch: Batch) -> float:
        """Milliseconds until the GPU is done."""
        self.wait()
        start = time.perf_counter()
        self(model, batch)
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def wait(self) -> None:
        if on_gpu(self.device):
            torch.cuda.synchronize(self.device)

    def quantities(self, variant: Variant, batch: Batch) -> dict[str, list[torch.Tensor]]:
        """What is compared after a step: loss and gradients, or outputs."""
        with graph_passes(variant.run):  # the first step compiles
            result = self(variant.model, batch)
        if not self.trains:
            return {"outputs": [result]}
        return {"loss": [result], "gradients": [each.grad for each in variant.model.parameters()]}


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


def compare(step: Step, variants: list[Variant], phase: Phase, left_out: list[str]) -> list[str]:
    """Compares all variants on a few inputs, which also compiles. Returns the runs that failed."""
    failed: list[str] = []
    first, *others = variants
    for _ in range(NUM_COMPARED):
        batch = step.batch(first.model)
        expected = step.quantities(first, batch)
        for variant in others:
            if variant.run in failed:
                continue
            try:
                found = step.quantities(variant, batch)
                distances = {name: distance(found[name], expected[name]) for name in found}
            except Exception as error:  # keep the other runs
                failed.append(variant.run)
                line = str(error).strip().partition("\n")[0]
                left_out.append(f"{variant.run} failed: {type(error).__name__}: {line}")
                continue
            largest = phase.distances.setdefault(variant.run, {})
            for name, each in distances.items():
                largest[name] = max(each, largest.get(name, 0.0))
    return failed


def measure(name: str, settings: Settings, bar: tqdm) -> tuple[ModelResult, list[str]]:
    """One model, and sentences about what failed."""
    subject = MODELS[name]
    result, left_out = ModelResult(subject.title, subject.about), []
    model = make(subject, settings)
    variants = [variant_of(model, run) for run in ("torch", FLOAT64, *settings.runs[1:])]
    for phase in PHASES:
        step, found = Step(phase, subject, settings), Phase()
        if phase == "inference" and on_gpu(settings.device):
            for variant in variants:
                variant.model.to(torch.bfloat16)
        bar.set_description(f"{name} {phase}")
        before = {variant.run: variant.backend.num_graphs for variant in variants}
        failures: list[str] = []
        failed = compare(step, variants, found, failures)
        left_out += [f"{subject.title}, {phase}: {each}" for each in failures]
        timed = [each for each in variants if each.run != FLOAT64 and each.run not in failed]
        for variant in timed:
            if variant.run in COMPILED and variant.backend.num_graphs == before[variant.run]:
                raise RuntimeError(f"{name}: {variant.run} was not compiled for {phase}")
        for at in range(NUM_WARM + settings.steps):
            batch = step.batch(model)
            # Each run is first, second, ... equally often.
            turn = at % len(timed)
            for variant in timed[turn:] + timed[:turn]:
                milliseconds = step.timed(variant.model, batch)
                if at >= NUM_WARM:
                    taken = found.milliseconds.setdefault(variant.run, [])
                    taken.append(round(milliseconds, 4))
            bar.update()
        result.phases[phase] = found
    return result, left_out


def compile_ahead(name: str, run: str, settings: Settings) -> None:
    """Compiles one run of a model, in a process of its own, into the caches on disk."""
    subject = MODELS[name]
    variant = variant_of(make(subject, settings), run)
    for phase in PHASES:
        if phase == "inference" and on_gpu(settings.device):
            variant.model.to(torch.bfloat16)
        step = Step(phase, subject, settings)
        step.quantities(variant, step.batch(variant.model))


def compile_in_processes(names: Sequence[str], settings: Settings, jobs: int) -> None:
    """Runs compile_ahead for every model and every compiled run."""
    todo = [(name, run) for name in names for run in settings.runs if run in COMPILED]
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        started = [pool.submit(compile_ahead, *each, settings) for each in todo]
        done = concurrent.futures.as_completed(started)
        for each in tqdm(done, desc="compiling", total=len(todo), leave=False):
            each.exception()  # a process that failed has compiled less; the run will say what fails


def write_document(result: Result) -> None:
    """Rewrites the tables of ./docs/benchmarks.md. Raises ValueError if it lacks the markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(rewrite_table(text, result.markdown(), BLOCK), encoding="utf-8")


def some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A type of an option: names with commas, in the order of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is unknown; expected some of {', '.join(known)}"
                )
        return tuple(name for name in known if name in names)

    return parse


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "Times six models with torch's norms and with cupynorm's, and compares the results."
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    everything = ",".join(MODELS)
    add("--models", type=some_of([*MODELS]), default=(*MODELS,), help=f"default: {everything}")
    shown = f"some of {','.join(RUNS)}; always torch (default: all; on a CPU those not compiled)"
    add("--runs", type=some_of(RUNS), help=shown)
    add("--steps", type=positive, default=30, help="timed steps of each run (30)")
    add("--quick", action="store_true", help="tiny models, to try the program on a CPU")
    add("--jobs", type=positive, default=1, help="processes that compile ahead (1: none)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of weights and inputs (0)")
    add("--from", dest="source", type=Path, metavar="FILE", help="shows a --json file again")
    add("--json", type=Path, metavar="FILE", help="writes all times and distances")
    add("--plot", type=Path, metavar="FILE", help="draws the speeds: .svg, .png")
    add("--docs", action="store_true", help=f"rewrites the tables of ./{DOCUMENT.as_posix()}")
    given = parser.parse_args(arguments)
    if given.runs is None:
        given.runs = RUNS if on_gpu(given.device) else RUNS[:2]
    given.runs = ("torch", *(run for run in given.runs if run != "torch"))
    return given


def run(given: argparse.Namespace, arguments: Sequence[str]) -> Result:
    """Measures, and writes the JSON after each model."""
    runs, left_out = given.runs, []
    if PASSES in runs and not hasattr(cupynorm, "compile_passes"):
        runs = tuple(each for each in runs if each != PASSES)
        left_out.append(f"{PASSES} was left out: this cupynorm has no compile_passes.")
    settings = Settings(runs, given.steps, given.quick, given.device, given.seed)
    # One backend more for each run, and each phase is compiled again.
    torch._dynamo.config.cache_size_limit = 64
    if given.jobs > 1:
        compile_in_processes(given.models, settings, given.jobs)
    command = shlex.join(["python", "notebooks/models.py", *arguments])
    found = environment() | ({} if on_gpu(given.device) else {"gpu": None, "driver": None})
    noted = {"command": command, **settings._asdict(), "runs": [*runs]}
    result = Result(found, noted, {}, left_out)
    num_steps = len(given.models) * len(PHASES) * (NUM_WARM + given.steps)
    with tqdm(total=num_steps, unit="step", leave=False) as bar:
        for name in given.models:
            measured, failures = measure(name, settings, bar)
            result.models[name] = measured
            result.left_out += failures
            if given.json:
                given.json.write_text(result.to_json() + "\n", encoding="utf-8")
            if on_gpu(given.device):
                torch.cuda.empty_cache()
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a run failed or differs by more than roundings explain."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parse(arguments)
    result = (
        Result.from_json(given.source.read_text(encoding="utf-8"))
        if given.source
        else run(given, arguments)
    )
    print(result)
    if given.plot:
        plot(result, given.plot)
    if given.docs:
        write_document(result)
    failed = [each for each in result.left_out if not each.startswith(PASSES)]
    return 1 if failed or result.too_far else 0


if __name__ == "__main__":
    raise SystemExit(main())
