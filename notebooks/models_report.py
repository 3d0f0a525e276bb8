"""What models.py measured: JSON, tables for the terminal and for docs, and a plot."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cupynorm.bench.report import quartiles
from cupynorm.table import as_markdown, as_text

RUNS = ("torch", "cupynorm", "torch-compiled", "cupynorm-compiled")
COMPILED = RUNS[2:]
# Of a run with torch's norms -> the runs that are compared with it.
PAIRS = {"torch": ("cupynorm",), "torch-compiled": ("cupynorm-compiled",)}
TITLES = {
    "torch": "torch",
    "cupynorm": "cupynorm",
    "torch-compiled": "torch compiled",
    "cupynorm-compiled": "cupynorm compiled",
}
PHASES = ("training", "inference")
GRAPHED = "inference in a CUDA graph"  # with --graphs
SHOWN = (*PHASES, GRAPHED)
FLOAT64 = "float64"
OF_NORMS = "Kernels of eager steps, and those of norms among them"
# A distance comes from roundings, which vary by chance. The norms of a run cause few of them: the
# runs share all other roundings, until the first difference spreads.
CHANCE = 8
NOISE = 2.0**-16  # of bfloat16's roundings, 2^-9, averaged over many elements


@dataclass
class Phase:
    """Training or inference of one model.

    milliseconds: run -> of each step. distances: run -> quantity -> the largest relative distance
    from the run torch on the same inputs. Quantities are loss and gradients, or outputs.
    kernels: run -> milliseconds of a step in which kernels are on the GPU. norms: of these, those
    in which kernels of norms are, of eager runs. slowest: run -> kernel -> launches and
    milliseconds of a step.
    """

    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    distances: dict[str, dict[str, float]] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    slowest: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def median(self, run: str) -> float:
        """Milliseconds."""
        return quartiles(self.milliseconds[run])[1]

    def gain(self, run: str, other: str) -> tuple[float, float] | None:
        """By which share `run` is faster than `other` in the same turn: median, and half the
        distance between the quartiles. None if one was not measured."""
        if not (self.milliseconds.get(run) and self.milliseconds.get(other)):
            return None
        turns = zip(self.milliseconds[other], self.milliseconds[run])
        low, middle, high = quartiles([theirs / ours - 1 for theirs, ours in turns])
        return middle, (high - low) / 2

    def bound(self, run: str) -> float | None:
        """By which share `run` would be faster if its norms took no time of the GPU. None if that
        was not measured."""
        if not self.norms.get(run):
            return None
        return self.kernels[run] / (self.kernels[run] - self.norms[run]) - 1

    def limit(self, run: str, quantity: str) -> float:
        """How far a run may be from torch by roundings alone.

        Compiled code rounds in other places, so torch's own compiled run is its measure. Without
        that run nothing is known: the limit is infinite.
        """
        like = [FLOAT64, *(["torch-compiled"] if run in COMPILED else [])]
        found = [self.distances.get(each, {}).get(quantity, math.inf) for each in like]
        return CHANCE * max(found) + NOISE


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
        models = {
            name: ModelResult(
                each["title"],
                each["about"],
                {phase: Phase(**found) for phase, found in each["phases"].items()},
            )
            for name, each in content.pop("models").items()
        }
        return cls(models=models, **content)

    def missing(self, name: str, phases: Sequence[str]) -> tuple[str, ...]:
        """Those of the phases that are not measured of a model."""
        measured = self.models[name].phases if name in self.models else {}
        return tuple(phase for phase in phases if phase not in measured)

    def add(self, name: str, model: ModelResult, order: Sequence[str]) -> None:
        """Adds a model, or more of its phases. order: of all models."""
        before = self.models[name].phases if name in self.models else {}
        phases = before | model.phases
        model.phases = {phase: phases[phase] for phase in SHOWN if phase in phases}
        models = self.models | {name: model}
        self.models = {each: models[each] for each in order if each in models}

    @property
    def too_far(self) -> list[str]:
        """A sentence for each distance of our runs that roundings do not explain."""
        return [
            f"{model.title}, {phase}: {quantity} of {run} differs from torch's by "
            f"{distance:.1e}; roundings explain {found.limit(run, quantity):.1e}"
            for model in self.models.values()
            for phase, found in model.phases.items()
            for run, distances in found.distances.items()
            if run not in (FLOAT64, "torch-compiled")
            for quantity, distance in distances.items()
            if not distance <= found.limit(run, quantity)
        ]

    def headline(self) -> str:
        """GPU, versions and date."""
        found = self.environment
        labels = {"driver": "driver", "cuda_runtime": "CUDA", "torch": "torch"}
        shown = [found.get("gpu") or "CPU"]
        shown += [f"{label} {found[name]}" for name, label in labels.items() if found.get(name)]
        return ", ".join([*shown, f"cupynorm {found['cupynorm']}", str(found["date"])[:10]])

    def method(self) -> str:
        """How it was measured, in a sentence."""
        tiny = "Tiny models of the same kinds. " if self.settings["quick"] else ""
        whole = "Each model is compiled as one graph. " if self.settings.get("whole") else ""
        return (
            f"{tiny}{whole}Milliseconds a step: median of {self.settings['steps']} steps on fresh "
            "random inputs, ± half the distance between the quartiles; the runs take turns, and a "
            "gain is the median over the turns"
        )

    def runs(self) -> list[str]:
        """Those that were measured in any model."""
        measured = {
            run
            for model in self.models.values()
            for phase in model.phases.values()
            for run in phase.milliseconds
        }
        return [run for run in RUNS if run in measured]

    def phases(self) -> list[str]:
        """Those that were measured of any model."""
        found = [model.phases for model in self.models.values()]
        return [phase for phase in SHOWN if any(phase in each for each in found)]

    def times(self, phase: str) -> list[list[str]]:
        """The table of times of a phase. A run of cupynorm is followed by its gain over torch."""
        runs = self.runs()
        others = {run: other for other, each in PAIRS.items() for run in each}
        rows = [["model"]]
        for run in runs:
            rows[0] += [TITLES[run], *(["gain"] if others.get(run) in runs else [])]
        for model in self.models.values():
            found = model.phases.get(phase, Phase())
            row = [model.title]
            for run in runs:
                row.append(_time(found.milliseconds.get(run)))
                if others.get(run) in runs:
                    gain = found.gain(run, others[run])
                    row.append("-" if gain is None else f"{gain[0]:+.1%} ± {100 * gain[1]:.1f}")
            rows.append(row)
        return rows

    def distances(self) -> list[list[str]]:
        """The table of relative distances from the run torch."""
        runs = [run for run in self.runs() if run != "torch"]
        rows = [["model", "distance of", "roundings", *(TITLES[run] for run in runs)]]
        for model in self.models.values():
            for name, phase in model.phases.items():
                for quantity in phase.distances.get(FLOAT64, ()):
                    what = f"{quantity} in a CUDA graph" if name == GRAPHED else quantity
                    found = (phase.distances.get(run, {}).get(quantity) for run in (FLOAT64, *runs))
                    shown = ["-" if each is None else f"{each:.0e}" for each in found]
                    rows.append([model.title, what, *shown])
        return rows

    def kernels(self) -> list[list[str]]:
        """The table of the times in which kernels run; only a heading without a GPU."""
        runs = self.runs()
        rows = [["model", "phase", *(TITLES[run] for run in runs)]]
        for model in self.models.values():
            for name, phase in model.phases.items():
                if phase.kernels:
                    found = (phase.kernels.get(run) for run in runs)
                    shown = ["-" if each is None else f"{each:.2f}" for each in found]
                    rows.append([model.title, name, *shown])
        return rows

    def norms(self) -> list[list[str]]:
        """The table of the times of norms in eager runs; only a heading without a GPU."""
        rows = [["model", "phase", "kernels", "norms", "norms of cupynorm", "gain without norms"]]
        for model in self.models.values():
            for name, phase in model.phases.items():
                bound = phase.bound("torch")
                if bound is not None:
                    ours = phase.norms.get("cupynorm")
                    found = (phase.kernels["torch"], phase.norms["torch"], ours)
                    shown = ["-" if each is None else f"{each:.2f}" for each in found]
                    rows.append([model.title, name, *shown, f"{bound:+.1%}"])
        return rows

    def gains(self) -> list[str]:
        """A sentence for each of our runs: its least and its greatest gain over torch's run."""
        sentences = []
        for other, ours in PAIRS.items():
            for run in ours:
                ranges = []
                for phase in SHOWN:
                    found = (model.phases.get(phase, Phase()) for model in self.models.values())
                    gains = [gain[0] for each in found if (gain := each.gain(run, other))]
                    if gains:
                        ranges.append(f"{min(gains):+.1%} to {max(gains):+.1%} in {phase}")
                if ranges:
                    what = f"Gain of {TITLES[run]} over {TITLES[other]}"
                    sentences.append(f"{what}: {', '.join(ranges)}.")
        return sentences

    def __str__(self) -> str:
        lines = [self.headline(), self.method()]
        lines += [f"{model.title}: {model.about}" for model in self.models.values()]
        for phase in self.phases():
            lines += ["", phase, as_text(self.times(phase))]
        kernels = self.kernels()
        if len(kernels) > 1:
            lines += [
                "",
                "milliseconds of a step in which kernels are on the GPU",
                as_text(kernels),
            ]
        norms = self.norms()
        if len(norms) > 1:
            lines += ["", f"{OF_NORMS}, milliseconds of a step", as_text(norms)]
        lines += ["", "relative distance from torch", as_text(self.distances())]
        lines += ["", *self.gains(), *self.left_out, *(f"TOO FAR: {each}" for each in self.too_far)]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The tables of docs/benchmarks.md."""
        lines = [_wrapped(f"{self.headline()}. {self.method()}."), ""]
        lines += [_wrapped(f"- {model.title}: {model.about}.") for model in self.models.values()]
        for phase in self.phases():
            title = phase[:1].upper() + phase[1:]
            lines += ["", f"{title}:", "", *as_markdown(self.times(phase), range(1))]
        kernels = self.kernels()
        if len(kernels) > 1:
            lines += ["", "Milliseconds of a step in which kernels are on the GPU:", ""]
            lines += as_markdown(kernels, range(2))
        norms = self.norms()
        if len(norms) > 1:
            shown = f"{OF_NORMS}, milliseconds of a step, and what torch's eager step would gain "
            lines += [
                "",
                _wrapped(f"{shown} if its norms took no time:"),
                "",
                *as_markdown(norms, range(2)),
            ]
        lines += ["", "Relative distance from torch's eager run, the largest of all inputs:"]
        lines += ["", *as_markdown(self.distances(), range(2))]
        lines += ["", *(_wrapped(f"- {each}") for each in (*self.gains(), *self.left_out))]
        return "\n".join([*lines, "", f"Made by `{self.settings['command']}`."])


def _time(samples: list[float] | None) -> str:
    if not samples:
        return "-"
    low, middle, high = quartiles(samples)
    return f"{middle:.2f} ± {(high - low) / 2:.2f}"


def _wrapped(text: str) -> str:
    """Lines of at most 100 columns. A list item is indented from its second line on."""
    return textwrap.fill(text, 100, subsequent_indent="  " if text.startswith("- ") else "")


def plot(result: Result, path: Path) -> None:
    """Draws how much faster each run is than torch's eager run, with the quartiles of its times.

    Raises MissingLibraryError without matplotlib.
    """
    from cupynorm.bench.plot import require_matplotlib

    from cupynorm.bench import style

    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = [run for run in result.runs() if run != "torch"]
    models = [*result.models.values()]
    with rc_context(style.settings()):
        figure = Figure(figsize=(8, 1.6 + 0.55 * len(models)), layout="constrained")
        for axes, phase in zip(figure.subplots(1, 2, sharey=True), PHASES):
            for at, run in enumerate(runs):
                places, middles, errors = [], [], ([], [])
                for place, model in enumerate(models):
                    found = model.phases.get(phase, Phase())
                    if not (found.milliseconds.get(run) and found.milliseconds.get("torch")):
                        continue
                    eager = found.median("torch")
                    low, middle, high = (
                        eager / each for each in quartiles(found.milliseconds[run])
                    )
                    places.append(place + 0.15 * (at - (len(runs) - 1) / 2))
                    middles.append(middle)
                    errors[0].append(middle - high)
                    errors[1].append(low - middle)
                look = style.look(at) | {"linestyle": "none"}
                axes.errorbar(middles, places, xerr=errors, label=TITLES[run], **look)
            axes.axvline(1, **style.GUIDE)
            axes.set(title=phase, xlabel="speed, torch eager = 1")
            axes.set_yticks(range(len(models)), [model.title for model in models])
        axes.invert_yaxis()
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.suptitle(result.headline(), fontsize=8)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)
