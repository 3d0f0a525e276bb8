"""python -m cupynorm [check | plan | bench | tune]: the gradient check, dispatch plans, the benchmark, tiles for this GPU.

Exit codes: 0 all is well; 1 a kernel is off, failed, or became slower;
2 what was asked for is not possible, with a sentence on stderr.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from . import (
    __version__,
    activations,
    bench,
    bench_cells,
    bench_host,
    bench_linear,
    bench_report,
    dispatch,
    gradient_check,
    launch,
    on_cpu,
)
from . import tune as tuning
from .devices import DEVICES, Device
from .dispatch import Plan
from .dtypes import DTYPES, ELEMENTS, FLOAT8S
from .gradient_check import NORMS, Case, CheckResult, CpuMachine, Finding, Problem
from .nvrtc import MissingLibraryError
from .peers import PEERS
from .problem import SCALINGS
from .strategies import STRATEGIES

COMMANDS = ("check", "plan", "bench", "tune")
DIRECTIONS = ("forward", "backward")
# Elements of x in one case. A grid case costs its float64 reference on the host, and on the CPU its kernels, most of its time.
_GRID_ELEMENTS = {"gpu": 2**20, "cpu": 2**16}
_GRID_ROWS = {"gpu": 1021, "cpu": 61}
_FILE_ELEMENTS = {"gpu": 2**24, "cpu": 2**20}
_WIDEST_ON_CPU = 2**19
_SHOWN_OFF = 12
bar = partial(tqdm, leave=False)


# check


class Entry(NamedTuple):
    """One case of the check. name: its line of the table. make: its tensors, made when its turn comes."""

    name: str
    case: Case
    make: Callable[[], Problem]


def given_entries(
    given: Iterable[activations.Activations], dtypes: Sequence[str | None], max_elements: int, seed: int
) -> list[Entry]:
    """Activations in each norm and dtype (None: as stored)."""
    entries = []
    for norm in NORMS:
        for each in given:
            for dtype in dtypes:
                problem = each.problem(norm, dtype, max_elements=max_elements, seed=seed)
                taken = f"{problem.case.num_rows} of " if problem.case.num_rows < len(each.x) else ""
                name = f"{each.name.rpartition('layer_norms/')[2]}, {taken}{len(each.x)} x {each.x.shape[1]}"
                entries.append(Entry(name, problem.case, lambda problem=problem: problem))
    return entries


def grid_shapes(device: Device, on: str) -> list[tuple[int, int, str | None]]:
    """(num_rows, num_cols, strategy) that reach every strategy of a device in both directions; None: the width decides.

    A few narrow and odd widths; then for each strategy and direction the first width beyond it in all dtypes. Where that is
    too wide for the CPU, the strategy that it would reach is forced on a narrower row.
    """
    widths = {1, 33, 768, 4095}
    forced = set()
    names = [name for name, row in STRATEGIES.items() if device.compute_capability >= row.first_capability]
    for direction in DIRECTIONS:
        problems = [dispatch.plan(4096, dtype=dtype, device=device, direction=direction).problem for dtype in DTYPES]
        for name, following in zip(names, names[1:]):
            widest = max(dispatch.widest(name, problem, device) for problem in problems)
            beyond = (widest // 16 + 1) * 16  # whole packs in every dtype
            if on == "cpu" and beyond > _WIDEST_ON_CPU:
                forced.add(following)
            else:
                widths.add(beyond)
    shapes = []
    for num_cols in sorted(widths):
        num_rows = min(_GRID_ROWS[on], max(_GRID_ELEMENTS[on] // num_cols, 1 if num_cols >= 2**20 else 2))
        shapes.append((num_rows, num_cols, None))
    return shapes + [(3, 4096, name) for name in names if name in forced]


def quick_shapes(device: Device) -> list[tuple[int, int, str | None]]:
    """Every strategy of a device once, the wide ones forced on narrower rows."""
    wide = [name for name, row in STRATEGIES.items() if name != "warp" and device.compute_capability >= row.first_capability]
    return [(61, 33, None), *((3, 4096, name) for name in wide)]


def grid_entries(shapes: Iterable[tuple[int, int, str | None]], dtypes: Sequence[str], seed: int) -> list[Entry]:
    """Random tensors of these shapes in each norm and dtype."""
    shapes = list(shapes)
    entries = []
    for norm in NORMS:
        for num_rows, num_cols, strategy in shapes:
            for dtype in dtypes:
                case = Case(norm, num_rows, num_cols, dtype, strategy=strategy)
                name = f"random, {num_rows} x {num_cols}" + (f", {strategy} forced" if strategy else "")
                entries.append(Entry(name, case, lambda case=case: gradient_check.random_problem(case, seed)))
    return entries


def plan_of(case: Case, device: Device, direction: str) -> Plan:
    return dispatch.plan(
        case.num_cols, case.num_rows, case.x, norm=case.norm, direction=direction, device=device,
        weight_dtype=case.dtype("weight"), bias_dtype=case.dtype("bias"), strategy=case.strategy,
    )  # fmt: skip


def compile_on_cpu(entries: Iterable[Entry], device: Device) -> None:
    """Compiles all that the entries will run, on all CPUs at once: a kernel takes a compiler a third of a second."""
    launches = [launch for entry in entries for way in DIRECTIONS for launch in plan_of(entry.case, device, way).launches]
    instances = list(dict.fromkeys((launch.kernel.source, launch.kernel.name_expression) for launch in launches))
    batch = 4 * (os.cpu_count() or 1)
    with tqdm(total=len(instances), desc="compiling", unit="kernel", leave=False) as bar:
        for first in range(0, len(instances), batch):
            on_cpu.compile_many(instances[first : first + batch])
            bar.update(len(instances[first : first + batch]))


def table(results: Sequence[tuple[Entry, list[Finding]]], device: Device) -> str:
    """One line for each problem, one column for each dtype: the worst error and whose it is."""
    dtypes = [dtype for dtype in DTYPES if any(entry.case.x == dtype for entry, _ in results)]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    strategies: dict[tuple[str, str], dict[str, list[str]]] = {}
    for entry, findings in results:
        key = (entry.case.norm, entry.name)
        worst = worst_of(findings)
        verdict = f"{worst.error:.2f} {worst.tensor}" if worst.ok else f"OFF: {worst.tensor} {worst.error:.3g}"
        lines.setdefault(key, {})[entry.case.x] = verdict
        for direction in DIRECTIONS:
            found = strategies.setdefault(key, {name: [] for name in DIRECTIONS})[direction]
            strategy = plan_of(entry.case, device, direction).strategy
            if strategy not in found:
                found.append(strategy)
    rows = [["norm", "rows x columns", *DIRECTIONS, *dtypes]]
    for (norm, name), verdicts in lines.items():
        used = ["/".join(strategies[norm, name][direction]) for direction in DIRECTIONS]
        rows.append([norm, name, *used, *(verdicts.get(dtype, "-") for dtype in dtypes)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(f"{text:<{width}}" for text, width in zip(row, widths)).rstrip() for row in rows)


def worst_of(findings: Iterable[Finding]) -> Finding:
    return max(findings, key=lambda found: (not found.ok, found.error))


def describe(on: str, device: Device) -> str:
    """What was found: the GPU and the libraries, and where the kernels run."""
    found = bench.environment()
    libraries = [
        f"{label} {found[name]}" if found[name] else f"no {label}"
        for name, label in (("cupy", "CuPy"), ("cuda_runtime", "CUDA runtime"), ("nvrtc", "NVRTC"), ("torch", "torch"))
    ]
    gpu = f"{found['gpu']}, driver {found['driver']}" if found["gpu"] else "no GPU"
    lines = [f"cupynorm {__version__} found {gpu}, {', '.join(libraries)}"]
    if on == "cpu":
        lines.append(
            f"the same .cu files, planned for an {device.name}, are compiled by {on_cpu.compiler()} and run on the CPU: slow, "
            "but every index and every sum is the real one"
        )
    return "\n".join(lines)


def check(arguments: argparse.Namespace) -> int:
    on = arguments.on or ("gpu" if gradient_check.has_gpu() else "cpu")
    if on == "gpu" and not gradient_check.has_gpu():
        raise ValueError("--on gpu: CuPy finds no GPU (or is not installed); --on cpu runs the same kernels on the CPU")
    seed = arguments.seed
    where = gradient_check.machine("gpu") if on == "gpu" else CpuMachine(seed=seed)
    print(describe(on, where.device), end="\n\n", flush=True)

    if arguments.files:
        given = [each for path in arguments.files for each in activations.read(path, print)]
        if not given:
            raise ValueError(f"{', '.join(arguments.files)}: no floating-point array was found")
        entries = given_entries(given, [None], _FILE_ELEMENTS[on], seed)
    elif arguments.quick:
        entries = given_entries(activations.shipped(), ["float32", "bfloat16"], _FILE_ELEMENTS[on], seed)
        entries += grid_entries(quick_shapes(where.device), ["bfloat16"], seed)
    else:
        entries = given_entries(activations.shipped(), list(DTYPES), _FILE_ELEMENTS[on], seed)
        entries += grid_entries(grid_shapes(where.device, on), list(DTYPES), seed)
    if on == "cpu":
        compile_on_cpu(entries, where.device)

    results = []
    for entry in tqdm(entries, desc="checking", unit="case", leave=False):
        problem = entry.make()
        welford = gradient_check.uses_welford(problem.case, where.device)
        got = gradient_check.run_kernels(problem, where)
        results.append((entry, gradient_check.judge_all(problem, got, rounded_mean=welford)))

    print(table(results, where.device), end="\n\n")
    findings = [found for _, each in results for found in each]
    print(CheckResult(findings).summary(), end="\n\n")
    off = [found for found in findings if not found.ok]
    if not off:
        print(f"OK: every element of {len(findings)} tensors in {len(results)} cases is within what its dtype allows")
        return 0
    print(CheckResult(off[:_SHOWN_OFF]), end="\n\n")
    num_cases = sum(not all(found.ok for found in each) for _, each in results)
    print(
        f"OFF: {len(off)} of {len(findings)} tensors in {num_cases} of {len(results)} cases are beyond what their dtypes allow"
    )
    return 1


# plan


def find_device(name: str | None) -> Device:
    if name is None:
        return launch.current_device()
    known = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in known:
        raise ValueError(f"--device is {name!r}; expected one of {', '.join(DEVICES)}")
    return known[name.lower()]


def plan(arguments: argparse.Namespace) -> int:
    try:
        device = find_device(arguments.device)
    except MissingLibraryError as error:
        raise ValueError(f"no GPU was found ({error}); name a device, for example --device H200") from error
    if arguments.table:
        print(strategy_table(device))
        return 0
    if arguments.num_cols is None:
        raise ValueError("plan needs a number of columns, or --table")
    # No gradient has 8 bits.
    direction = arguments.direction or ("forward" if arguments.out_dtype in FLOAT8S else "both")
    directions = DIRECTIONS if direction == "both" else (direction,)
    plans = [
        dispatch.plan(
            arguments.num_cols, arguments.rows, arguments.dtype, norm=arguments.norm, direction=direction, device=device,
            out_dtype=arguments.out_dtype, scale=arguments.scale, amax=arguments.amax, residual=arguments.residual,
            strategy=arguments.strategy, sm_margin=arguments.sm_margin,
            bias_dtype="same" if arguments.norm == "layer_norm" else None,
        )
        for direction in directions
    ]  # fmt: skip
    print("\n\n".join(map(str, plans)))
    return 0


def strategy_table(device: Device) -> str:
    """The dispatch table of a device: the widest row of each strategy, by dtype and direction."""
    rows = [["dtype", "direction", *STRATEGIES]]
    for dtype in DTYPES:
        for direction in DIRECTIONS:
            problem = dispatch.plan(4096, dtype=dtype, device=device, direction=direction).problem
            widest = [dispatch.widest(name, problem, device) for name in STRATEGIES]
            last = list(STRATEGIES)[-1]
            shown = ["any" if name == last else "-" if cols is None else f"{cols:,}" for name, cols in zip(STRATEGIES, widest)]
            rows.append([dtype, direction, *shown])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        f"{device.name}, {device.num_sms} multiprocessors, sm_{device.compute_capability}: the most columns that a row may have"
    ]
    for row in rows:
        names = [f"{text:<{width}}" for text, width in zip(row[:2], widths)]
        numbers = [f"{text:>{width}}" for text, width in zip(row[2:], widths[2:])]
        lines.append("  ".join([*names, *numbers]))
    lines.append("the first strategy wins that is wide enough and that no later one beats; a row waits")
    name_width = max(map(len, STRATEGIES))
    lines += [f"  {row.name:<{name_width}}  {row.row_waits}" for row in STRATEGIES.values()]
    return "\n".join(lines)


# bench


def check_folders(*paths: str | Path | None) -> None:
    """All that can be refused is, before any time is spent."""
    for path in filter(None, paths):
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise ValueError(f"{path}: there is no folder {folder}")


def run_bench(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        comparison = bench_report.compare(*map(bench_report.read, arguments.compare))
        print(comparison)
        return 0 if comparison else 1
    check_folders(arguments.json, arguments.plot)
    if arguments.host:
        return show(
            bench_host.host(norms=arguments.norm, dtypes=arguments.dtype, peers=arguments.peers, progress=bar), arguments
        )
    if arguments.first_call:
        return show(bench_host.first_call(), arguments)

    readme = Path("README.md")
    if arguments.readme:
        if arguments.tiles:
            raise ValueError("--readme and --tile are given; the README's table is of libraries")
        if not readme.is_file():
            raise ValueError(f"--readme: there is no README.md in {Path.cwd()}")
        bench_report.rewrite_readme(readme.read_text(encoding="utf-8"), "")
    if arguments.plot:
        bench_report.require_matplotlib()
    guarded = bench_report.read(arguments.guard) if arguments.guard else None
    if guarded:
        todo, peers = [measured.cell for measured in guarded.measurements], ()
    else:
        todo = bench_cells.cells(
            arguments.norm, arguments.dtype,
            arguments.direction or bench_cells.DIRECTIONS[: 1 if arguments.out_dtype in FLOAT8S else 2],
            arguments.cols, arguments.elements, rows=arguments.rows, models=arguments.models, scales=arguments.scale,
            weight_dtype=arguments.weight_dtype,
            out_dtype=arguments.out_dtype, amax=arguments.amax, residual=arguments.residual,
            zero_centered=arguments.zero_centered,
        )  # fmt: skip
        peers = arguments.peers
    result = bench.bench(
        todo,
        runs=arguments.runs,
        seed=arguments.seed,
        peers=peers,
        tiles=arguments.tiles,
        jobs=arguments.jobs,
        progress=bar,
        command=shlex.join(["python", "-m", "cupynorm", *arguments.given]),
    )
    print(result)
    if arguments.json:
        Path(arguments.json).write_text(result.to_json() + "\n", encoding="utf-8")
    if arguments.plot:
        bench_report.plot(result, arguments.plot)
    if guarded:
        comparison = bench_report.compare(guarded, result)
        print(f"\n{arguments.guard}, and now:\n{comparison}")
        return 0 if result and comparison else 1
    if arguments.readme and not result:
        print("README.md is left as it was")
    elif arguments.readme:
        text = bench_report.rewrite_readme(readme.read_text(encoding="utf-8"), result.markdown())
        readme.write_text(text, encoding="utf-8")
    return 0 if result else 1


def show(result: bench_host.HostResult | bench_host.FirstCallResult, arguments: argparse.Namespace) -> int:
    print(result)
    if arguments.json:
        Path(arguments.json).write_text(result.to_json() + "\n", encoding="utf-8")
    return 0


def run_bench_linear(arguments: argparse.Namespace) -> int:
    check_folders(arguments.json)
    result = bench_linear.bench_linear(
        bench_linear.cells(arguments.shapes, arguments.format, arguments.passes),
        runs=arguments.runs,
        seed=arguments.seed,
        contestants=arguments.contestants,
        progress=bar,
        command=shlex.join(["python", "-m", "cupynorm", *arguments.given]),
    )
    print(result)
    if arguments.json:
        Path(arguments.json).write_text(result.to_json() + "\n", encoding="utf-8")
    return 0 if result else 1


# tune


def tune(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output)
    check_folders(output)
    todo = bench_cells.cells(
        arguments.norm,
        arguments.dtype,
        arguments.direction,
        arguments.cols,
        arguments.elements,
        weight_dtype=arguments.weight_dtype,
    )
    result = tuning.tune(
        todo,
        runs=arguments.runs,
        jobs=arguments.jobs,
        seed=arguments.seed,
        progress=bar,
        command=shlex.join(["python", "-m", "cupynorm", *arguments.given]),
    )
    print(result)
    output.write_text(result.table.to_json() + "\n", encoding="utf-8")
    print(f"{output} holds them; a program uses them after cupynorm.use_tiles({str(output)!r})")
    return 0 if result else 1


# The command line.


def number(text: str) -> int:
    """An integer, or a power as 2**28 or 2^28."""
    base, power, exponent = text.replace("^", "**").partition("**")
    try:
        value = int(base) ** int(exponent) if power and 0 <= int(exponent) <= 64 else int(base if not power else "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, or a power such as 2**28") from error
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative; expected 0 or more")
    return value


def positive(text: str) -> int:
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too few; expected 1 or more")
    return value


def several(names: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = list(names) if text == "all" else text.split(",")
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; expected some of {','.join(names)}")
        return list(dict.fromkeys(found))

    return parse


def numbers(text: str) -> list[int]:
    return list(dict.fromkeys(positive(each) for each in text.split(",")))


def shapes(text: str) -> list[tuple[int, int, int]]:
    try:
        return [bench_linear.shape_of(each) for each in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m cupynorm", description="LayerNorm and RMSNorm kernels: check them, see which is chosen, measure them."
    )
    top.add_argument("--version", action="version", version=f"cupynorm {__version__}")
    commands = top.add_subparsers(dest="command", metavar="{check,plan,bench,tune}")

    about = "compare the kernels, forward and backward, with float64 (this is what runs without a command)"
    one = commands.add_parser("check", help=about, description=about)
    one.add_argument(
        "files", metavar="FILE", nargs="*", help=".npy, .npz, .safetensors or .pt: check on its arrays, in their own dtypes"
    )
    one.add_argument("--on", choices=("gpu", "cpu"), help="where the kernels run; by default a GPU if there is one")
    one.add_argument("--seed", type=number, default=0, help="of random tensors, and of the order of threads on the CPU")
    one.add_argument("--quick", action="store_true", help="fewer dtypes and widths")
    one.set_defaults(run=check)

    about = "show which kernel, tile and grid a problem gets, and why"
    one = commands.add_parser("plan", help=about, description=about)
    one.add_argument("num_cols", metavar="NUM_COLS", type=number, nargs="?")
    one.add_argument("--rows", type=number, default=4096, help="num_rows (4096)")
    one.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of all tensors (bfloat16)")
    one.add_argument("--device", help=f"one of {', '.join(DEVICES)}; by default the GPU that is there")
    one.add_argument("--norm", choices=NORMS, default=NORMS[0])
    one.add_argument("--direction", choices=(*DIRECTIONS, "both"), help="(both; of 8-bit y forward)")
    one.add_argument("--out-dtype", choices=tuple(ELEMENTS), help="of y and dy (that of x)")
    one.add_argument("--scale", choices=SCALINGS, help="of an 8-bit y (given)")
    one.add_argument("--amax", action="store_true", help="record the largest |y| beside a given scale")
    one.add_argument("--residual", action="store_true", help="add a residual; backward adds the sum's gradient")
    one.add_argument("--strategy", choices=tuple(STRATEGIES), help="by default the width of a row decides")
    one.add_argument("--sm-margin", type=number, default=0, help="multiprocessors to leave free (0)")
    one.add_argument("--table", action="store_true", help="the widest row of each strategy instead")
    one.set_defaults(run=plan)

    about = "measure kernel time on a GPU, beside other libraries and a copy of the same bytes"
    one = commands.add_parser("bench", help=about, description=about)
    add = one.add_argument_group("what is measured").add_argument
    directions, models, shown_models = bench_cells.DIRECTIONS, tuple(bench_cells.MODELS), ",".join(bench_cells.MODELS)
    add("--direction", type=several(directions), help="some of forward,backward,both (forward,backward; of 8-bit y forward)")
    add("--dtype", type=several(tuple(DTYPES)), default=("bfloat16",), help="one or more, with commas (bfloat16)")
    add("--norm", type=several(NORMS), default=NORMS[:1], help="one or more, with commas (layer_norm)")
    add("--cols", type=numbers, default=bench_cells.COLS, help="widths, with commas (32,64,...,262144)")
    add("--rows", type=numbers, default=(), help="num_rows, with commas, in place of --elements")
    add("--elements", type=positive, help="of x, as 2**28; num_rows = elements // num_cols (512 MiB of x)")
    add("--models", type=several(models), default=(), help=f"their norms and shapes instead: all, or some of {shown_models}")
    add("--weight-dtype", choices=tuple(DTYPES), help="of weight and bias (that of x)")
    add("--out-dtype", choices=tuple(ELEMENTS), help="of y and dy (that of x)")
    add("--scale", type=several(SCALINGS), default=(), help=f"of an 8-bit y: all, or some of {','.join(SCALINGS)} (given)")
    add("--amax", action="store_true", help="record the largest |y| beside a given scale, as delayed scaling does")
    add("--residual", action="store_true", help="add a residual and return the sum; backward adds the sum's gradient")
    add("--zero-centered", action="store_true", help="multiply by 1 + weight")
    add("--peers", type=several(tuple(PEERS)), help=f"some of {','.join(PEERS)} (all that can run)")
    about = "a tile beside what dispatch chooses, as tune and plan word it: 'block: pack_size 8, threads_per_row 128, ...'"
    add("--tile", dest="tiles", metavar="TILE", action="append", default=[], help=about)
    add = one.add_argument_group("how").add_argument
    add("--runs", type=positive, default=30, help="of each library in each cell (30)")
    add("--seed", type=number, help="of the random data (fresh)")
    add("--jobs", type=positive, default=1, help="processes that compile all kernels before the first is timed (1: none)")
    add = one.add_argument_group("what becomes of it").add_argument
    add("--json", metavar="FILE", help="write all samples and the environment")
    add("--plot", metavar="FILE", help="draw GB/s over num_cols: .png, .svg")
    add("--readme", action="store_true", help="rewrite the table between the bench markers of ./README.md")
    add = one.add_argument_group("instead").add_mutually_exclusive_group().add_argument
    add("--guard", metavar="FILE", help="measure cupynorm in the cells of a --json file; exit code 1 if any became slower")
    add(
        "--compare", metavar=("OLD", "NEW"), nargs=2, help="two --json files, cell by cell, without a GPU; exit code 1 likewise"
    )
    add("--host", action="store_true", help="time what the host pays for an eager call")
    add("--first-call", action="store_true", help="time the first calls of a fresh process, with an empty cache and a full one")
    one.set_defaults(run=run_bench)

    about = "measure a norm and the linear layer after it, beside torch, torch.compile, TransformerEngine and the product alone"
    layers = one.add_subparsers(metavar="linear", title="another layer")
    one = layers.add_parser("linear", help=about, description=about)
    add = one.add_argument
    add(
        "--shapes",
        type=shapes,
        default=bench_linear.SHAPES,
        help="rows x in_features x out_features, with commas: 8192x4096x12288",
    )
    add("--format", type=several(bench_linear.FORMATS), default=bench_linear.FORMATS, help="some of bfloat16,fp8 (both)")
    add(
        "--pass",
        dest="passes",
        type=several(bench_linear.PASSES),
        default=bench_linear.PASSES,
        help="some of forward,both (both)",
    )
    names = tuple(bench_linear.CONTESTANTS)
    add("--contestants", type=several(names), help=f"some of {','.join(names)} (all that can run)")
    add("--runs", type=positive, default=30, help="of each contestant in each cell (30)")
    add("--seed", type=number, default=0, help="of the random data (0)")
    add("--json", metavar="FILE", help="write all samples and the environment")
    one.set_defaults(run=run_bench_linear)

    about = "measure which tiles are the fastest on this GPU, and write a table that cupynorm.use_tiles reads"
    one = commands.add_parser("tune", help=about, description=about)
    add = one.add_argument
    add("--cols", type=numbers, default=bench_cells.COLS, help="widths, with commas (32,64,...,262144)")
    add("--dtype", type=several(tuple(DTYPES)), default=("bfloat16",), help="one or more, with commas (bfloat16)")
    add("--norm", type=several(NORMS), default=NORMS[:1], help="one or more, with commas (layer_norm)")
    add("--direction", type=several(DIRECTIONS), default=DIRECTIONS, help="some of forward,backward (both)")
    add("--weight-dtype", choices=tuple(DTYPES), help="of weight and bias (that of x)")
    add("--elements", type=positive, help="of x, as 2**28; num_rows = elements // num_cols (512 MiB of x)")
    add("--runs", type=positive, default=30, help="of the default and of each finalist (30)")
    add("--seed", type=number, help="of the random data (fresh)")
    add(
        "--jobs", type=positive, default=1, help="processes that compile all candidates before the first is timed (1: this one)"
    )
    add("--output", metavar="FILE", default="tiles.json", help="the table, replaced if it is there (tiles.json)")
    one.set_defaults(run=tune)
    return top


def kernel_errors() -> tuple[type[Exception], ...]:
    """What compiling, launching or running a kernel raises. CUDA's errors are RuntimeErrors, CuPy's compiler's are not."""
    compiler = sys.modules.get("cupy.cuda.compiler")
    return (RuntimeError, compiler.CompileException) if compiler else (RuntimeError,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in COMMANDS and given[0] not in ("-h", "--help", "--version")):
        given = ["check", *given]
    parsed = parser().parse_args(given)
    parsed.given = given
    try:
        code = parsed.run(parsed)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("cupynorm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; nothing more can be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MissingLibraryError, on_cpu.NoCompilerError, ValueError, OSError) as error:
        print(f"cupynorm: {error}", file=sys.stderr)
        return 2
    except kernel_errors() as error:
        print(f"cupynorm: a kernel failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
