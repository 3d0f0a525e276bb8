"""`python -m cupynorm check`: the gradient check of all kernels, or on the arrays of files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from tqdm import tqdm

from .. import __version__
from ..command_line import Appended, Commands, finite, number, positive, several
from ..dtypes import DTYPES
from ..gpu import environment, on_cpu
from ..plan.devices import Device
from ..table import as_text, printable
from . import activations, kernels
from .cases import DIRECTIONS, NORMS
from .check import check, check_callables, check_kernels
from .check_function import Callables, imported
from .entries import (
    Entry,
    file_entries,
    grid_shapes,
    plan_of,
    quick_shapes,
    random_entries,
    trap_entries,
)
from .libraries import LIBRARIES
from .results import CheckResult, Finding, worst_of
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
    add("--eps", type=finite, metavar="EPS", help="by default that of a file, else 1e-5")
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
    dtypes = "of random data, with commas or given again (float32)"
    add("--dtype", action=Appended, type=several(list(DTYPES)), help=dtypes)
    several_shapes = "of random data, with commas or given again (64x768,61x769,7x8195)"
    add("--shape", action=Appended, type=shapes, help=several_shapes)
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
    named = {label: getattr(arguments, label) for label in labels if getattr(arguments, label)}
    if named:
        return run_functions(arguments, named)
    for name in ("library", "dtype", "shape"):
        if getattr(arguments, name):
            raise ValueError(
                f"--{name} is given without --function, --forward or --backward; expected one"
            )
    where = kernels.machine(arguments.on, arguments.seed)
    print(describe(where), end="\n\n", flush=True)
    entries = entries_of(arguments, where)
    if where.on == "cpu":
        compile_on_cpu(entries, where.device)
    results = [
        (entry, check_kernels(entry.make(), where).findings)
        for entry in tqdm(entries, desc="checking", unit="case", leave=False)
    ]
    print(table(results, where.device), end="\n\n")
    off = sum(not all(finding.ok for finding in each) for _, each in results)
    cases = f"in {off} of {len(results)} cases" if off else f"in {len(results)} cases"
    return report([finding for _, each in results for finding in each], cases)


def run_functions(arguments: argparse.Namespace, named: dict[str, str]) -> int:
    """Checks functions, MODULE:NAME by label, and returns the exit code."""
    if arguments.on or arguments.quick:
        raise ValueError("--on or --quick is given with your own functions; expected neither")
    functions = {label: imported(text, f"--{label}") for label, text in named.items()}
    norm = arguments.norm or NORMS[0]
    if arguments.files:
        if arguments.traps or arguments.dtype or arguments.shape:
            raise ValueError(
                "--traps, --dtype or --shape is given with files; expected none of them"
            )
        own = Callables(**functions, library=arguments.library)
        recorded = [replace(each, **own.absent(norm)) for each in _arrays_of(arguments)]
        trials = [Trial(each.problem(norm), each.name) for each in recorded]
        result = check_callables(trials, own)
    else:
        result = check(
            **functions,
            norm=norm,
            **_eps_of(arguments),
            library=arguments.library,
            traps=arguments.traps,
            shapes=arguments.shape,
            dtypes=arguments.dtype or ["float32"],
            seed=arguments.seed,
            progress=partial(tqdm, desc="checking", unit="case", leave=False),
        )
    return report(result.findings, f"of {printable(', '.join(named.values()))}")


def _arrays_of(arguments: argparse.Namespace) -> list[activations.Activations]:
    """Those of the files, or the shipped ones, with the eps that is given."""
    recorded = [each for path in arguments.files for each in activations.read(path, print)]
    if arguments.files and not recorded:
        names = printable(", ".join(arguments.files))
        raise ValueError(f"{names} have no array of floats; expected at least one")
    return [replace(each, **_eps_of(arguments)) for each in recorded or activations.shipped()]


def _eps_of(arguments: argparse.Namespace) -> dict[str, float]:
    return {} if arguments.eps is None else {"eps": arguments.eps}


def report(findings: Sequence[Finding], checked: str) -> int:
    """Prints the worst of each tensor, what is off and a last line. Returns the exit code.

    Raises ValueError if nothing was checked.
    """
    if not findings:
        raise ValueError(f"no tensor {checked} was checked; expected at least one result")
    print(CheckResult(findings).summary(), end="\n\n")
    off = [finding for finding in findings if not finding.ok]
    if not off:
        print(
            f"OK: every element of {len(findings)} tensors {checked} is within what its dtype "
            "allows"
        )
        return 0
    print(CheckResult(off[:_MAX_SHOWN]), end="\n\n")
    print(
        f"OFF: {len(off)} of {len(findings)} tensors {checked} are beyond what their dtypes allow"
    )
    return 1


def describe(where: kernels.Machine) -> str:
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
    if where.on == "cpu":
        lines.append(
            f"The .cu files are compiled by {on_cpu.compiler()} and run on the CPU, planned for an "
            f"{where.device.name}."
        )
    return "\n".join(lines)


def entries_of(arguments: argparse.Namespace, where: kernels.Machine) -> list[Entry]:
    """What the arguments ask to check."""
    norms, seed, eps = (
        (arguments.norm,) if arguments.norm else NORMS,
        arguments.seed,
        _eps_of(arguments),
    )
    dtypes = _QUICK_DTYPES if arguments.quick else list(DTYPES)
    if arguments.files:
        return file_entries(_arrays_of(arguments), norms, [None], where.on, seed)
    if arguments.traps:
        return trap_entries(norms, dtypes, seed, **eps)
    entries = file_entries(_arrays_of(arguments), norms, dtypes, where.on, seed)
    if arguments.quick:
        shapes, dtypes = quick_shapes(where.device), dtypes[1:]
    else:
        shapes = grid_shapes(where.device, where.on)
    return entries + random_entries(shapes, norms, dtypes, seed, **eps)


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
    return as_text(rows)
