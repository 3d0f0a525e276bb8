"""`python -m cupynorm check`: the gradient check of all kernels."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from tqdm import tqdm

from .. import __version__
from ..command_line import Commands, finite, number
from ..dispatch.devices import Device
from ..dispatch.instances import Kernel
from ..dispatch.strategies import STRATEGIES
from ..dtypes import DTYPES
from ..gpu import nvrtc, on_cpu
from ..plans import plan
from ..table import as_text
from . import check, kernels
from .cases import DIRECTIONS, NORMS, Case, shipped
from .results import CheckResult, worst_of
from .traps import Trial, default_trials, trap_trials

_OF_FUNCTIONS = ("function", "forward", "backward")  # options that were removed
_QUICK_DTYPES = ("float32", "bfloat16")
# Elements of x in one case, by where the kernels run.
_MOST_ELEMENTS = {"gpu": 2**20, "cpu": 2**16}
_MOST_ROWS = {"gpu": 1021, "cpu": 61}


class Entry(NamedTuple):
    """Trials of one case. name: its line in the table. trials: None draws random ones later."""

    name: str
    case: Case
    trials: list[Trial] | None = None

    def drawn(self, seed: int) -> list[Trial]:
        return default_trials(self.case, seed) if self.trials is None else self.trials


def add_to(commands: Commands) -> None:
    """Adds the parser of `check`."""
    about = (
        "Compare the kernels, forward and backward, with float64 on a GPU, or on the CPU if there "
        "is none. This is what runs without a command."
    )
    help = "compare the kernels, forward and backward, with float64"
    parser = commands.add_parser("check", help=help, description=about)
    add = parser.add_argument
    on = "where the kernels run; by default on a GPU if there is one"
    add("--on", choices=("gpu", "cpu"), help=on)
    seed = "of random tensors, and of the order in which threads run on the CPU (0)"
    add("--seed", type=number, default=0, help=seed)
    quick = "every strategy on a few shapes: seconds on a laptop without a GPU"
    add("--quick", action="store_true", help=quick)
    add("--traps", action="store_true", help="data and layouts on which other norms failed")
    norm = "the norm that is checked; by default both"
    add("--norm", choices=NORMS, help=norm)
    eps = "1e-5, and 1e-12 of the activations that come with the package"
    add("--eps", type=finite, help=eps)
    for name in _OF_FUNCTIONS:
        add(f"--{name}", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if all is within what the dtypes allow, else 1."""
    for name in _OF_FUNCTIONS:
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name} is no option any more; expected cupynorm.check_function(...) in Python"
            )
    options = {} if arguments.eps is None else {"eps": arguments.eps}
    where = kernels.machine(arguments.on, arguments.seed)
    print(describe(where), end="\n\n", flush=True)
    entries = entries_of(arguments, where, options)
    if where.on == "cpu":
        compile_on_cpu(entries, where.device)
    results = [
        (entry, check.check_kernels(entry.drawn(arguments.seed), where))
        for entry in tqdm(entries, desc="checking", unit="case", leave=False, disable=None)
    ]
    print(table(results), end="\n\n")
    result = results[0][1]
    result.findings = [found for _, each in results for found in each.findings]
    result.checked = result.checked.partition(";")[0]  # the shapes are in the table
    print(result)
    return 0 if result else 1


def describe(where: kernels.Machine) -> str:
    """The GPU, the libraries, and where the kernels run."""
    machine = nvrtc.environment()
    named = {"cupy": "CuPy", "cuda_runtime": "CUDA runtime", "nvrtc": "NVRTC", "torch": "torch"}
    libraries = [
        f"{label} {machine[name]}" if machine[name] else f"no {label}"
        for name, label in named.items()
    ]
    gpu = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "no GPU"
    line = f"cupynorm {__version__} found {gpu}, {', '.join(libraries)}"
    ran = f"compiled by {on_cpu.compiler()} and run on the CPU" if where.on == "cpu" else ""
    return line + f"\nThe .cu files are {ran}, planned for an {where.device.name}." * bool(ran)


def compile_on_cpu(entries: Iterable[Entry], device: Device) -> None:
    """Compiles all kernels of the entries ahead, with as many compilers at once as CPUs."""
    instances: dict[Kernel, None] = {}
    for case, direction in product((entry.case for entry in entries), DIRECTIONS):
        dtypes = {name: case.dtype(name[:-6]) for name in ("weight_dtype", "bias_dtype")}
        options = {"norm": case.norm, "strategy": case.strategy, **dtypes}
        shape = (case.num_cols, case.num_rows, case.x)
        planned = plan(*shape, direction=direction, device=device, **options)
        instances |= dict.fromkeys(launch.kernel for launch in planned.launches)
    compiled, shown = on_cpu.compile_many(instances), {"total": len(instances), "leave": False}
    for _ in tqdm(compiled, desc="compiling", disable=None, **shown):
        pass


def table(results: Sequence[tuple[Entry, CheckResult]]) -> str:
    """One line for each problem, one column for each dtype: the tensor with the largest error."""
    dtypes = [dtype for dtype in DTYPES if any(entry.case.x == dtype for entry, _ in results)]
    lines: dict[tuple[str, str], dict[str, list]] = {}
    for entry, result in results:  # traps of one kind share a name
        line = lines.setdefault((entry.case.norm, entry.name), {})
        line.setdefault(entry.case.x, []).extend(result.findings)
    rows = [["norm", "rows x columns", *dtypes]]
    rows += [[*key, *(_worst(line.get(each)) for each in dtypes)] for key, line in lines.items()]
    return as_text(rows)


def _worst(findings: list | None) -> str:
    if not findings:
        return "-"
    worst = worst_of(findings)
    words = f"{worst.error:.2f} {worst.tensor}"
    return words if worst.ok else f"OFF: {worst.tensor} {worst.error:.3g}"


# What is checked.


def entries_of(
    arguments: argparse.Namespace, where: kernels.Machine, options: dict[str, float]
) -> list[Entry]:
    """What the arguments ask to check."""
    norms = (arguments.norm,) if arguments.norm else NORMS
    dtypes = _QUICK_DTYPES if arguments.quick else list(DTYPES)
    if arguments.traps:
        return [
            Entry(f"{trial.name}, {_shape(trial.problem.case)}", trial.problem.case, [trial])
            for norm, dtype in product(norms, dtypes)
            for trial in trap_trials(Case(norm, 0, 0, dtype, **options), seed=arguments.seed)
        ]
    entries = []
    for norm, each, dtype in product(norms, shipped(), dtypes):
        problem = each._replace(**options).problem(norm, dtype)
        name = f"{each.name}, {_shape(problem.case)}"
        entries.append(Entry(name, problem.case, [Trial(problem)]))
    shapes = random_shapes(where.device, where.on, arguments.quick)
    for norm, (num_rows, num_cols, strategy), dtype in product(
        norms, shapes, dtypes[arguments.quick :]
    ):
        case = Case(norm, num_rows, num_cols, dtype, strategy=strategy, **options)
        forced = f", {strategy} forced" if strategy else ""
        entries.append(Entry(f"random, {_shape(case)}{forced}", case))
    return entries


def _shape(case: Case) -> str:
    return f"{case.num_rows} x {case.num_cols}"


def random_shapes(device: Device, on: str, quick: bool) -> list[tuple[int, int, str | None]]:
    """(num_rows, num_cols, strategy that is forced or None): every strategy of a device.

    Each is forced on whole packs and on an odd number of columns; dispatch chooses for the others.
    """
    forced = [
        (3, num_cols, name)
        for name, row in STRATEGIES.items()
        for num_cols in (4095, 4096)
        if name != "warp" and device.compute_capability >= row.first_capability
    ]
    if quick:
        return [(61, 33, None), (16, 768, None), *forced]
    widths = (1, 33, 768, 4095, 16384, 100003)
    most, rows = _MOST_ELEMENTS[on], _MOST_ROWS[on]
    return [(min(rows, max(2, most // each)), each, None) for each in widths] + forced
