"""`python -m cupynorm check`: the gradient check of all kernels, or on the arrays of files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence

from tqdm import tqdm

from .. import __version__
from ..arguments import Commands, number
from ..dtypes import DTYPES
from ..gpu import environment, on_cpu
from ..plan.devices import Device
from . import activations, kernels
from .cases import DIRECTIONS
from .entries import (
    Entry,
    file_entries,
    grid_shapes,
    plan_of,
    quick_shapes,
    random_entries,
)
from .results import CheckResult, Finding, worst_of
from .run import run_kernels

_MAX_SHOWN = 12  # findings that are off
_QUICK_DTYPES = ("float32", "bfloat16")


def add_to(commands: Commands) -> None:
    """Adds the parser of `check`."""
    about = (
        "Compare the kernels, forward and backward, with float64 on a GPU, or on the CPU if there "
        "is none. This is what runs without a command."
    )
    help = "compare the kernels, forward and backward, with float64"
    parser = commands.add_parser("check", help=help, description=about)
    add = parser.add_argument
    files = ".npy, .npz, .safetensors or .pt: check on its arrays, in their own dtypes"
    add("files", metavar="FILE", nargs="*", help=files)
    on = "where the kernels run; by default on a GPU if there is one"
    add("--on", choices=("gpu", "cpu"), help=on)
    seed = "of random tensors, and of the order in which threads run on the CPU (0)"
    add("--seed", type=number, default=0, help=seed)
    quick = "every strategy on a few shapes: seconds on a laptop without a GPU"
    add("--quick", action="store_true", help=quick)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if all is within what the dtypes allow, else 1."""
    on = arguments.on or ("gpu" if environment.has_gpu() else "cpu")
    if on == "gpu" and not environment.has_gpu():
        raise ValueError(
            "--on gpu: CuPy finds no GPU (or is not installed); "
            "--on cpu runs the same kernels on the CPU"
        )
    where = kernels.machine("gpu") if on == "gpu" else kernels.CpuMachine(seed=arguments.seed)
    print(describe(on, where.device), end="\n\n", flush=True)
    entries = entries_of(arguments, on, where.device)
    if on == "cpu":
        compile_on_cpu(entries, where.device)
    results = []
    for entry in tqdm(entries, desc="checking", unit="case", leave=False):
        findings = []
        rounded_mean = kernels.uses_welford(entry.case, where.device)
        for trial in entry.make():
            got = run_kernels(trial.problem, where)
            findings += trial.judged(got, rounded_mean=rounded_mean)
        results.append((entry, findings))
    return report(results, where.device)


def describe(on: str, device: Device) -> str:
    """The GPU, the libraries, and where the kernels run."""
    found = environment.environment()
    named = (
        ("cupy", "CuPy"),
        ("cuda_runtime", "CUDA runtime"),
        ("nvrtc", "NVRTC"),
        ("torch", "torch"),
    )
    libraries = [
        f"{label} {found[name]}" if found[name] else f"no {label}" for name, label in named
    ]
    gpu = f"{found['gpu']}, driver {found['driver']}" if found["gpu"] else "no GPU"
    lines = [f"cupynorm {__version__} found {gpu}, {', '.join(libraries)}"]
    if on == "cpu":
        lines.append(
            f"The .cu files are compiled by {on_cpu.compiler()} and run on the CPU, planned for an "
            f"{device.name}."
        )
    return "\n".join(lines)


def entries_of(arguments: argparse.Namespace, on: str, device: Device) -> list[Entry]:
    """What the arguments ask to check."""
    seed = arguments.seed
    if arguments.files:
        given = [each for path in arguments.files for each in activations.read(path, print)]
        if not given:
            raise ValueError(f"{', '.join(arguments.files)}: no floating-point array was found")
        return file_entries(given, [None], on, seed)
    if arguments.quick:
        entries = file_entries(activations.shipped(), _QUICK_DTYPES, on, seed)
        return entries + random_entries(quick_shapes(device), _QUICK_DTYPES[1:], seed)
    entries = file_entries(activations.shipped(), list(DTYPES), on, seed)
    return entries + random_entries(grid_shapes(device, on), list(DTYPES), seed)


def compile_on_cpu(entries: Iterable[Entry], device: Device) -> None:
    """Compiles all kernels of the entries ahead, with as many compilers at once as CPUs."""
    plans = [plan_of(entry.case, device, way) for entry in entries for way in DIRECTIONS]
    wanted = [launch.kernel for plan in plans for launch in plan.launches]
    instances = list(dict.fromkeys((each.source, each.name_expression) for each in wanted))
    batch = 4 * (os.cpu_count() or 1)
    with tqdm(total=len(instances), desc="compiling", unit="kernel", leave=False) as bar:
        for first in range(0, len(instances), batch):
            part = instances[first : first + batch]
            on_cpu.compile_many(part)
            bar.update(len(part))


def report(results: Sequence[tuple[Entry, list[Finding]]], device: Device) -> int:
    """Prints the tables and a last line, and returns the exit code."""
    print(table(results, device), end="\n\n")
    findings = [found for _, each in results for found in each]
    print(CheckResult(findings).summary(), end="\n\n")
    off = [found for found in findings if not found.ok]
    cases = f"{len(results)} cases"
    if not off:
        print(
            f"OK: every element of {len(findings)} tensors in {cases} is within what its dtype "
            "allows"
        )
        return 0
    print(CheckResult(off[:_MAX_SHOWN]), end="\n\n")
    num_cases = sum(not all(found.ok for found in each) for _, each in results)
    print(
        f"OFF: {len(off)} of {len(findings)} tensors in {num_cases} of {cases} are beyond what "
        "their dtypes allow"
    )
    return 1


def table(results: Sequence[tuple[Entry, list[Finding]]], device: Device) -> str:
    """One line for each problem, one column for each dtype: the tensor with the largest error."""
    dtypes = [dtype for dtype in DTYPES if any(entry.case.x == dtype for entry, _ in results)]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    strategies: dict[tuple[str, str], dict[str, list[str]]] = {}
    for entry, findings in results:
        key = (entry.case.norm, entry.name)
        worst = worst_of(findings)
        off = f"OFF: {worst.tensor} {worst.error:.3g}"
        verdict = f"{worst.error:.2f} {worst.tensor}" if worst.ok else off
        lines.setdefault(key, {})[entry.case.x] = verdict
        used = strategies.setdefault(key, {name: [] for name in DIRECTIONS})
        for direction in DIRECTIONS:
            used[direction].append(plan_of(entry.case, device, direction).strategy)
    rows = [["norm", "rows x columns", *DIRECTIONS, *dtypes]]
    for (norm, name), verdicts in lines.items():
        used = strategies[norm, name]
        names = ["/".join(dict.fromkeys(used[direction])) for direction in DIRECTIONS]
        rows.append([norm, name, *names, *(verdicts.get(dtype, "-") for dtype in dtypes)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths)).rstrip() for row in rows
    )
