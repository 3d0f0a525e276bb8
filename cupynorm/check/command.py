"""`python -m cupynorm check`: the gradient check of all kernels, or on the arrays of files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from tqdm import tqdm

from .. import __version__
from ..command_line import Commands, number, positive, several
from ..dtypes import DTYPES
from ..gpu import environment, on_cpu
from ..plan.devices import Device
from . import activations, kernels
from .callables import Callables, imported
from .cases import DIRECTIONS, NORMS
from .entries import (
    Entry,
    Wanted,
    file_entries,
    grid_shapes,
    plan_of,
    quick_shapes,
    random_entries,
    trap_entries,
)
from .gradient_check import check
from .libraries import LIBRARIES
from .results import CheckResult, Finding, worst_of
from .run import run_kernels
from .trials import Trial

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
    files = (
        ".npy, .npz, .safetensors or .pt: check on its arrays, in their own dtypes. x or input, "
        "weight, bias, dy and eps belong together, with or without a prefix such as layer1/; "
        "every other array is an x of its own"
    )
    add("files", metavar="FILE", nargs="*", help=files)
    on = "where the kernels run; by default on a GPU if there is one"
    add("--on", choices=("gpu", "cpu"), help=on)
    seed = "of random tensors, and of the order in which threads run on the CPU (0)"
    add("--seed", type=number, default=0, help=seed)
    quick = "every strategy on a few shapes: seconds on a laptop without a GPU"
    add("--quick", action="store_true", help=quick)
    add("--traps", action="store_true", help="data and layouts on which other norms failed")
    norm = "the norm that is checked; by default both, of functions layer_norm"
    add("--norm", choices=NORMS, help=norm)
    add("--eps", type=float, metavar="EPS", help="by default that of a file, else 1e-5")
    own = parser.add_argument_group(
        "your own functions",
        "They are checked in place of the kernels, on random data or on files. Their parameters "
        "may have the names x or input, normalized_shape, weight, bias, eps, dy, mean and rstd; "
        "parameters of other names get what is left, in the order shown.",
    )
    add = own.add_argument
    signatures = {
        "function": "(input, normalized_shape, weight, bias, eps) -> y, differentiated by torch",
        "forward": "(x, weight, bias, eps) -> y, or (y, mean, rstd); RMSNorm: (y, rstd)",
        "backward": "(dy, x, mean, rstd, weight) -> dx, or (dx, dweight, dbias)",
    }
    for name, signature in signatures.items():
        add(f"--{name}", metavar="MODULE:NAME", help=signature)
    library = "of the arrays that they get; by default torch if it is installed, else numpy"
    add("--library", choices=LIBRARIES, help=library)
    add("--dtype", type=several(list(DTYPES)), help="of random data, separated by commas (float32)")
    add("--shape", type=shapes, help="of random data, as 64x768, separated by commas (64x768)")
    parser.set_defaults(run=run)


def shapes(text: str) -> list[tuple[int, int]]:
    """The type of an argument such as 64x768,3x33."""
    extents = []
    for each in text.split(","):
        parts = each.split("x")
        if len(parts) != 2:
            sentence = f"{each!r} is no shape; expected rows x columns, such as 64x768"
            raise argparse.ArgumentTypeError(sentence)
        extents.append((positive(parts[0]), positive(parts[1])))
    return extents


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if all is within what the dtypes allow, else 1."""
    labels = ("function", "forward", "backward")
    named = {label: getattr(arguments, label) for label in labels}
    if any(named.values()):
        return run_functions(arguments, named)
    for name in ("library", "dtype", "shape"):
        if getattr(arguments, name):
            raise ValueError(
                f"--{name} is given without --function, --forward or --backward; expected one"
            )
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
            got = run_kernels(trial.problem, where, trial.layouts or None)
            findings += trial.judged(got, rounded_mean=rounded_mean)
        results.append((entry, findings))
    return report(results, where.device)


def _arrays_of(files: Sequence[str]) -> list[activations.Activations]:
    recorded = [each for path in files for each in activations.read(path, print)]
    if not recorded:
        raise ValueError(f"{', '.join(files)} have no array of floats; expected at least one")
    return recorded


def run_functions(arguments: argparse.Namespace, named: dict[str, str | None]) -> int:
    """Checks functions, given as MODULE:NAME or None by label, and returns the exit code."""
    if arguments.on or arguments.quick:
        raise ValueError("--on or --quick is given with your own functions; expected neither")
    functions = {label: imported(text, f"--{label}") for label, text in named.items() if text}
    norm = arguments.norm or NORMS[0]
    if arguments.files:
        if arguments.traps or arguments.dtype or arguments.shape:
            raise ValueError(
                "--traps, --dtype or --shape is given with files; expected none of them"
            )
        own = Callables(**functions, library=arguments.library)
        result = CheckResult()
        for each in _arrays_of(arguments.files):
            each = each if arguments.eps is None else replace(each, eps=arguments.eps)
            absent = {"weight", "bias"} - own.takes(norm)
            trial = Trial(replace(each, **dict.fromkeys(absent)).problem(norm), each.name)
            result.findings += trial.judged(own.run(trial.problem), rounded_mean=True)
    else:
        result = check(
            **functions,
            norm=norm,
            eps=1e-5 if arguments.eps is None else arguments.eps,
            library=arguments.library,
            traps=arguments.traps,
            shapes=arguments.shape or [(64, 768)],
            dtypes=arguments.dtype or ["float32"],
            seed=arguments.seed,
            progress=partial(tqdm, desc="checking", unit="case", leave=False),
        )
    print(result.summary(), end="\n\n")
    off = [finding for finding in result.findings if not finding.ok]
    if off:
        print(CheckResult(off[:_MAX_SHOWN]), end="\n\n")
    checked = f"{len(result.findings)} tensors of {', '.join(filter(None, named.values()))}"
    if not off:
        print(f"OK: every element of {checked} is within what its dtype allows")
        return 0
    print(f"OFF: {len(off)} of {checked} are beyond what their dtypes allow")
    return 1


def describe(on: str, device: Device) -> str:
    """The GPU, the libraries, and where the kernels run."""
    machine = environment.environment()
    named = (
        ("cupy", "CuPy"),
        ("cuda_runtime", "CUDA runtime"),
        ("nvrtc", "NVRTC"),
        ("torch", "torch"),
    )
    libraries = [
        f"{label} {machine[name]}" if machine[name] else f"no {label}" for name, label in named
    ]
    gpu = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "no GPU"
    lines = [f"cupynorm {__version__} found {gpu}, {', '.join(libraries)}"]
    if on == "cpu":
        lines.append(
            f"The .cu files are compiled by {on_cpu.compiler()} and run on the CPU, planned for an "
            f"{device.name}."
        )
    return "\n".join(lines)


def entries_of(arguments: argparse.Namespace, on: str, device: Device) -> list[Entry]:
    """What the arguments ask to check."""
    norms = (arguments.norm,) if arguments.norm else NORMS
    wanted = Wanted(on, norms, arguments.eps, arguments.seed)
    if arguments.files:
        return file_entries(_arrays_of(arguments.files), [None], wanted)
    if arguments.traps:
        return trap_entries(_QUICK_DTYPES if arguments.quick else list(DTYPES), wanted)
    if arguments.quick:
        entries = file_entries(activations.shipped(), _QUICK_DTYPES, wanted)
        return entries + random_entries(quick_shapes(device), _QUICK_DTYPES[1:], wanted)
    entries = file_entries(activations.shipped(), list(DTYPES), wanted)
    return entries + random_entries(grid_shapes(device, on), list(DTYPES), wanted)


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
    findings = [finding for _, each in results for finding in each]
    print(CheckResult(findings).summary(), end="\n\n")
    off = [finding for finding in findings if not finding.ok]
    cases = f"{len(results)} cases"
    if not off:
        print(
            f"OK: every element of {len(findings)} tensors in {cases} is within what its dtype "
            "allows"
        )
        return 0
    print(CheckResult(off[:_MAX_SHOWN]), end="\n\n")
    num_cases = sum(not all(finding.ok for finding in each) for _, each in results)
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
