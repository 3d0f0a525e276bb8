"""Times six models with torch's norms and with cupynorm's, and compares losses and gradients.

    python notebooks/models.py [--models MODEL,..] [--runs RUN,..] [--phases PHASE,..]
                               [--steps 30] [--quick] [--device cuda] [--json FILE]
    python notebooks/models.py --docs FILE

Weights and inputs are random. All runs of a model share their weights. Each step has a new input,
on which the runs take turns.

torch       torch.nn.LayerNorm and RMSNorm
cupynorm    cupynorm's, by cupynorm.swap_norms
enabled     as torch, under cupynorm.enable(), which does nothing on a CPU

A step of training is forward and backward: under autocast to bfloat16, or with weights in bfloat16
where such models are trained so. Inference has all weights in bfloat16. A CPU computes in float32.

The distance of a run from the run torch is compared as in train_gpt.py: with that of torch's norms
computed in float64 and rounded once, which roundings alone explain.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models_nets import Batch, Bert, Decoder, Dit, Gpt2, Vit
from tqdm import tqdm
from train_gpt import norms_in_float64

import cupynorm
from cupynorm.bench.report import quartiles, rewrite_table
from cupynorm.command_line import Appended, positive, several
from cupynorm.gpu.nvrtc import environment
from cupynorm.table import as_markdown

DOCUMENT = Path("docs/benchmarks.md")
NUM_COMPARED, NUM_WARM, SEED = 3, 2, 0  # inputs that are compared; steps that are not timed
TORCH, FLOAT64, OURS = "torch", "float64", ("cupynorm", "enabled")
RUNS = (TORCH, *OURS)
PHASES = ("training", "inference")
# A distance comes from roundings, which vary by chance. The norms of a run cause few of them: the
# runs share all other roundings, until the first difference spreads.
CHANCE = 8
NOISE = 2.0**-16  # of bfloat16's roundings, 2^-9, averaged over many elements


class Subject(NamedTuple):
    """A model to measure.

    sizes: its arguments. batch: samples in a step. weights: dtype in training on a GPU; float32 is
    computed under autocast to bfloat16.
    """

    title: str
    about: str
    make: Callable[..., torch.nn.Module]
    sizes: dict[str, Any]
    batch: int
    weights: torch.dtype = torch.float32


# With --quick.
_QUICK = {"num_layers": 2, "width": 64, "context": 32, "num_tokens": 100, "mlp_width": 128}
_QUICK |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
_QUICK |= {"image_size": 32, "patch_size": 8, "num_classes": 10}
_QUICK_BATCH = 2
# Vocabularies are padded to a multiple of 64, as in training: products of odd widths are slow.
MODELS = {
    "gpt2": Subject(
        "GPT-2 124M",
        "32 x 1024 tokens, float32 under autocast",
        Gpt2,
        {"num_layers": 12, "width": 768, "context": 1024, "num_tokens": 50304},
        32,
    ),
    "bert": Subject(
        "BERT-base",
        "64 x 512 tokens, float32 under autocast",
        Bert,
        {"num_layers": 12, "width": 768, "num_heads": 12, "context": 512, "num_tokens": 30528},
        64,
    ),
    "vit": Subject(
        "ViT-L/16",
        "128 images of 224 x 224, float32 under autocast",
        Vit,
        {"num_layers": 24, "width": 1024, "num_heads": 16}
        | {"image_size": 224, "patch_size": 16, "num_classes": 1000},
        128,
    ),
    "llama3": Subject(
        "Llama 3 8B, 2 layers",
        "2 x 4096 tokens, bfloat16, without embedding and head",
        Decoder,
        {"num_layers": 2, "width": 4096, "context": 4096, "base": 5e5, "eps": 1e-5}
        | {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "mlp_width": 14336}
        | {"with_norms": False},
        2,
        torch.bfloat16,
    ),
    "qwen3": Subject(
        "Qwen3 1.7B, 4 layers",
        "4 x 4096 tokens, bfloat16, q and k normalised, without embedding and head",
        Decoder,
        {"num_layers": 4, "width": 2048, "context": 4096, "base": 1e6, "eps": 1e-6}
        | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "mlp_width": 6144}
        | {"with_norms": True},
        4,
        torch.bfloat16,
    ),
    "dit": Subject(
        "DiT-L/2, 1 block",
        "256 images of 256 tokens, float32 under autocast",
        Dit,
        {"num_layers": 1, "width": 1024, "num_heads": 16, "num_tokens": 256},
        256,
    ),
}


# What was measured.


@dataclass
class Phase:
    """Training or inference of one model.

    milliseconds: run -> of each step. distances: run -> quantity -> the largest relative distance
    from the run torch on the same inputs. Quantities are loss and gradients, or outputs.
    """

    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    distances: dict[str, dict[str, float]] = field(default_factory=dict)

    def gain(self, run: str) -> tuple[float, float] | None:
        """By which share a run is faster than torch's in the same turn: median, and half the
        distance between the quartiles. None if one was not measured."""
        ours, theirs = (self.milliseconds.get(each) for each in (run, TORCH))
        if not (ours and theirs):
            return None
        low, middle, high = quartiles([b / a - 1 for a, b in zip(ours, theirs)])
        return middle, (high - low) / 2

    def limit(self, quantity: str) -> float:
        """How far a run may be from torch by roundings alone. Infinite if those are not known."""
        return CHANCE * self.distances.get(FLOAT64, {}).get(quantity, math.inf) + NOISE


@dataclass
class ModelResult:
    """A model: its title, what it is, and its phases."""

    title: str
    about: str
    phases: dict[str, Phase] = field(default_factory=dict)


@dataclass
class Result:
    """All measurements of one run of the program.

    environment: GPU, versions, date. settings: command, steps and others. left_out: sentences that
    say what was not measured, and why.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    models: dict[str, ModelResult] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Result:
        content = json.loads(text)
        for name, each in content["models"].items():
            phases = {
                phase: Phase(found["milliseconds"], found["distances"])
                for phase, found in each["phases"].items()
            }
            content["models"][name] = ModelResult(each["title"], each["about"], phases)
        return cls(**content)

    @property
    def too_far(self) -> list[str]:
        """A sentence for each distance of our runs that roundings do not explain."""
        return [
            f"{model.title}, {phase}: {quantity} of {run} differs from torch's by "
            f"{distance:.1e}; roundings explain {found.limit(quantity):.1e}"
            for model in self.models.values()
            for phase, found in model.phases.items()
            for run, distances in found.distances.items()
            if run in OURS
            for quantity, distance in distances.items()
            if not distance <= found.limit(quantity)
        ]

    def introduction(self) -> str:
        """GPU, versions and date, and how it was measured."""
        found = self.environment
        labels = {"driver": "driver", "cuda_runtime": "CUDA", "torch": "torch"}
        shown = [found.get("gpu") or "CPU"]
        shown += [f"{label} {found[name]}" for name, label in labels.items() if found.get(name)]
        shown += [f"cupynorm {found['cupynorm']}", str(found["date"])[:10]]
        tiny = "Tiny models of the same kinds. " if self.settings["quick"] else ""
        return (
            f"{', '.join(shown)}. {tiny}Milliseconds a step: median of {self.settings['steps']} "
            "steps on fresh random inputs, ± half the distance between the quartiles; the runs "
            "take turns, and a gain is the median over the turns."
        )

    def phases(self) -> dict[str, list[tuple[str, Phase]]]:
        """Phase -> (title, Phase) of each model."""
        return {
            name: [
                (each.title, each.phases[name])
                for each in self.models.values()
                if name in each.phases
            ]
            for name in PHASES
        }

    def runs(self) -> list[str]:
        """Those that were measured in any model."""
        every = [phase for models in self.phases().values() for _, phase in models]
        return [run for run in RUNS if any(run in each.milliseconds for each in every)]

    def times(self, phase: str) -> list[list[str]]:
        """The table of times of a phase. A run of cupynorm is followed by its gain over torch."""
        runs = self.runs()
        rows = [["model"]]
        for run in runs:
            rows[0] += [run, *["gain"] * (run in OURS)]
        for title, found in self.phases()[phase]:
            row = [title]
            for run in runs:
                row.append("-")
                if samples := found.milliseconds.get(run):
                    low, middle, high = quartiles(samples)
                    row[-1] = f"{middle:.2f} ± {(high - low) / 2:.2f}"
                if run in OURS:
                    gain = found.gain(run)
                    row.append("-" if gain is None else f"{gain[0]:+.1%} ± {100 * gain[1]:.1f}")
            rows.append(row)
        return rows

    def gains(self) -> list[str]:
        """A sentence for each of our runs: its least and its greatest gain over torch's."""
        sentences = []
        for run in OURS:
            ranges = []
            for phase, models in self.phases().items():
                gains = [gain[0] for _, found in models if (gain := found.gain(run))]
                if gains:
                    ranges.append(f"{min(gains):+.1%} to {max(gains):+.1%} in {phase}")
            if ranges:
                sentences.append(f"Gain of {run} over {TORCH}: {', '.join(ranges)}.")
        return sentences

    def __str__(self) -> str:
        return "\n".join([self.markdown(), *(f"TOO FAR: {each}" for each in self.too_far)])

    def markdown(self) -> str:
        """The tables of docs/benchmarks.md."""
        lines = [_wrapped(self.introduction()), ""]
        lines += [_wrapped(f"- {model.title}: {model.about}.") for model in self.models.values()]
        for phase, models in self.phases().items():
            if models:
                lines += ["", f"{phase.capitalize()}:", "", *as_markdown(self.times(phase), [0])]
        lines += ["", *(_wrapped(f"- {each}") for each in (*self.gains(), *self.left_out))]
        return "\n".join([*lines, "", f"Made by `{self.settings['command']}`."])


def _wrapped(text: str) -> str:
    """Lines of at most 100 columns. A list item is indented from its second line on."""
    return textwrap.fill(text, 100, subsequent_indent="  " if text.startswith("- ") else "")


# How it is measured.


def on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def make(subject: Subject, given: argparse.Namespace) -> torch.nn.Module:
    """A model with random weights, among them those of norms: ones would hide errors in use."""
    torch.manual_seed(SEED)
    with torch.device(given.device), torch.no_grad():
        sizes = subject.sizes
        if given.quick:
            sizes = {name: _QUICK.get(name, size) for name, size in sizes.items()}
        model = subject.make(**sizes)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(subject.weights) if on_gpu(given.device) else model


def variant_of(model: torch.nn.Module, run: str) -> torch.nn.Module:
    """A copy of the model for a run, and `norms`, in whose block it runs. All share parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    model = copy.deepcopy(model, shared)
    model.norms = cupynorm.enabled if run == "enabled" else nullcontext
    if run == FLOAT64:
        norms_in_float64(model)
    if run == "cupynorm":
        swapped = cupynorm.swap_norms(model)
        if swapped.left or not swapped.swapped:
            raise RuntimeError(f"not all norms were swapped:\n{swapped}")
    return model


class Step:
    """Runs the steps of one phase of a model."""

    def __init__(self, phase: str, subject: Subject, given: argparse.Namespace) -> None:
        self.trains, self.on_gpu = phase == "training", on_gpu(given.device)
        self.batch_size = _QUICK_BATCH if given.quick else subject.batch
        self.autocast = self.trains and self.on_gpu and subject.weights is torch.float32
        self.generator = torch.Generator(given.device).manual_seed(SEED)

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
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            output = model(*inputs)
        loss = model.loss(output, target)
        loss.backward()
        return loss.detach()

    def timed(self, model: torch.nn.Module, batch: Batch) -> float:
        """Milliseconds until the GPU is done."""
        wait = torch.cuda.synchronize if self.on_gpu else lambda: None
        with model.norms():
            wait()
            start = time.perf_counter()
            self(model, batch)
            wait()
            return 1e3 * (time.perf_counter() - start)

    def quantities(self, model: torch.nn.Module, batch: Batch) -> dict[str, list[torch.Tensor]]:
        """What is compared after a step: loss and gradients, or outputs."""
        with model.norms() as calls:
            result = self(model, batch)
        if calls is not None and self.on_gpu and (calls.left or not calls.served):
            raise RuntimeError(f"not all norms were served:\n{calls}")
        if not self.trains:
            return {"outputs": [result]}
        return {"loss": [result], "gradients": [each.grad for each in model.parameters()]}


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Of all elements together, relative: the norm of the difference over that of `expected`.

    Raises ArithmeticError if it is not finite.
    """
    differences = [(a.double() - b.double()).norm() for a, b in zip(found, expected)]
    of_expected = torch.stack([each.double().norm() for each in expected]).norm().item()
    of_difference = torch.stack(differences).norm().item()
    if not (math.isfinite(of_difference) and 0 < of_expected < math.inf):
        raise ArithmeticError(f"norms of {of_difference} and {of_expected} are not comparable")
    return of_difference / of_expected


def compare(step: Step, variants: dict[str, torch.nn.Module], phase: Phase) -> dict[str, str]:
    """Compares all variants on a few inputs. Returns run -> why it failed."""
    failed: dict[str, str] = {}
    first = variants[TORCH]
    for _ in range(NUM_COMPARED):
        batch = step.batch(first)
        expected = step.quantities(first, batch)
        for run, model in variants.items():
            if run == TORCH or run in failed:
                continue
            try:
                found = step.quantities(model, batch)
                distances = {name: distance(found[name], expected[name]) for name in found}
            except Exception as error:  # keep the other runs
                failed[run] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                continue
            largest = phase.distances.setdefault(run, {})
            for name, each in distances.items():
                largest[name] = max(each, largest.get(name, 0.0))
    return failed


def measure(
    subject: Subject, given: argparse.Namespace, bar: tqdm
) -> tuple[ModelResult, list[str]]:
    """One model, and sentences about what failed. The runs take turns in every order."""
    result = ModelResult(subject.title, "tiny" if given.quick else subject.about)
    left_out, model = [], make(subject, given)
    variants = {run: variant_of(model, run) for run in (TORCH, FLOAT64, *given.runs[1:])}
    for name in filter(given.phases.__contains__, PHASES):  # inference changes the weights
        step, phase = Step(name, subject, given), Phase()
        if name == "inference" and step.on_gpu:
            for variant in variants.values():
                variant.to(torch.bfloat16)
        bar.set_description(f"{subject.title}, {name}")
        failed = compare(step, variants, phase)
        left_out += [f"{subject.title}, {name}: {run} failed: {why}" for run, why in failed.items()]
        runs = [run for run in given.runs if run not in failed]
        orders = [*itertools.permutations(runs)]
        for at in range(NUM_WARM + given.steps):
            batch = step.batch(model)
            for run in orders[at % len(orders)]:
                milliseconds = step.timed(variants[run], batch)
                if at >= NUM_WARM:
                    phase.milliseconds.setdefault(run, []).append(round(milliseconds, 4))
            bar.update()
        result.phases[name] = phase
    return result, left_out


def run(given: argparse.Namespace, arguments: Sequence[str]) -> Result:
    """Measures, and writes the JSON after each model."""
    if given.quick and not on_gpu(given.device):
        torch.set_num_threads(1)  # more threads than free cores wait for each other
    found = environment() | ({} if on_gpu(given.device) else {"gpu": None, "driver": None})
    names = {str(given.json): given.json.name} if given.json else {}
    command = ["python", "notebooks/models.py", *(names.get(each, each) for each in arguments)]
    noted = {name: getattr(given, name) for name in ("runs", "steps", "quick", "device")}
    result = Result(found, {"command": shlex.join(command), **noted})
    total = len(given.models) * len(given.phases) * (NUM_WARM + given.steps)
    with tqdm(total=total, unit="step", leave=False, disable=None) as bar:
        for name in given.models:
            try:
                result.models[name], failures = measure(MODELS[name], given, bar)
            except Exception as error:  # keep the other models
                failures = [f"{MODELS[name].title} failed: {type(error).__name__}: {error}"]
            result.left_out += failures
            if given.json:
                given.json.write_text(result.to_json() + "\n", encoding="utf-8")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a run failed or differs by more than roundings explain."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, listed = parser.add_argument, {"action": Appended}
    names = several(tuple(MODELS))
    add("--models", type=names, default=(*MODELS,), help=f"some of {','.join(MODELS)}", **listed)
    add("--runs", type=several(RUNS), default=RUNS, help=f"some of {','.join(RUNS)}", **listed)
    add("--phases", type=several(PHASES), default=PHASES, help="training,inference", **listed)
    add("--steps", type=positive, help="timed steps of each run (30; 3 with --quick)")
    add("--quick", action="store_true", help="tiny models, to try the program on a CPU")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default, help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="writes all times and distances")
    add("--docs", type=Path, metavar="FILE", help=f"puts a --json file into ./{DOCUMENT}")
    given = parser.parse_args(arguments)
    if given.docs:
        result = Result.from_json(given.docs.read_text(encoding="utf-8"))
        rewrite_table(DOCUMENT, result.markdown(), "steps")
    else:
        given.steps = given.steps or (3 if given.quick else 30)
        given.runs = (TORCH, *(each for each in given.runs if each != TORCH))
        result = run(given, arguments)
    print(result)
    return 1 if result.left_out or result.too_far else 0


if __name__ == "__main__":
    raise SystemExit(main())
