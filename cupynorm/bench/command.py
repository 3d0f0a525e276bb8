"""`python -m cupynorm bench` and `bench linear`: measure kernel time, host time and first calls."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from ..check.cases import NORMS
from ..command_line import (
    Appended,
    Commands,
    check_folders,
    number,
    positive,
    positives,
    several,
)
from ..dtypes import DTYPES, EIGHT_BITS
from ..norm.plan_command import add_results
from ..plan.problem import SCALINGS
from . import comparison, contestants, decoding, documents, host, linear, measure, plot, report
from .cells import COLS, DIRECTIONS, Cell, cells
from .models import MODELS
from .peers import PEERS
from .runners import options_of

GUARDED = "notebooks/h200.json"
bar = partial(tqdm, leave=False)


class Result(Protocol):
    """What a run returns: a table as a string, and JSON."""

    def to_json(self) -> str: ...


def add_to(commands: Commands) -> None:
    """Adds the parsers of `bench` and `bench linear`."""
    about = "Measure kernel time on a GPU, beside other libraries and a copy of the same bytes."
    help = "measure kernel time on a GPU, beside other libraries and a copy of the same bytes"
    parser = commands.add_parser("bench", help=help, description=about)
    parser.set_defaults(run=run)
    add_cells(parser.add_argument_group("what is measured").add_argument)
    add = parser.add_argument_group("how").add_argument
    add("--runs", type=positive, default=30, help="of each library in each cell (30)")
    add("--seed", type=number, help="of the random data (fresh)")
    jobs = "processes that compile all kernels before the first is timed (1: none)"
    add("--jobs", type=positive, default=1, help=jobs)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write all samples and the environment")
    add("--plot", metavar="FILE", help="draw GB/s over num_cols: .png, .svg")
    readme = "rewrite the tables of ./README.md and ./docs/benchmarks.md"
    add("--readme", action="store_true", help=readme)
    group = parser.add_argument_group("instead")
    add = group.add_mutually_exclusive_group().add_argument
    guard = (
        f"measure cupynorm again in the cells of a --json file ({GUARDED}), and print the cells "
        "that changed by more than the spread; exit code 1 if any became slower"
    )
    add("--guard", metavar="FILE", nargs="?", const=GUARDED, help=guard)
    compare = "compare two --json files, cell by cell, without a GPU; exit code as for --guard"
    add("--compare", metavar=("OLD", "NEW"), nargs=2, help=compare)
    add("--host", action="store_true", help="measure the host time of an eager call")
    first_call = "time the first calls of a fresh process, with an empty cache and a full one"
    add("--first-call", action="store_true", help=first_call)
    layers = parser.add_subparsers(metavar="linear", title="another layer")
    add_linear(layers)


def add_cells(add: Callable) -> None:
    """Adds the options that name cells, peers and tiles."""
    direction = "some of forward,backward,both (forward,backward; for a y of 8 bits, forward)"
    add("--direction", action=Appended, type=several(DIRECTIONS), help=direction)
    add_tensors(add)
    rows = "num_rows, with commas, instead of --elements"
    add("--rows", action=Appended, type=positives, default=(), help=rows)
    models = f"their norms and shapes instead: all, or some of {','.join(MODELS)}"
    add("--models", action=Appended, type=several(tuple(MODELS)), default=(), help=models)
    scale = f"of a y of 8 bits: all, or some of {','.join(SCALINGS)} (given)"
    add("--scale", action=Appended, type=several(SCALINGS), default=(), help=scale)
    add_results(add)
    add("--zero-centered", action="store_true", help="multiply by 1 + weight")
    peers = f"some of {','.join(PEERS)} (all that can run)"
    add("--peers", action=Appended, type=several(tuple(PEERS)), help=peers)
    tile = (
        "a tile to measure beside that of dispatch, in the words of tune and plan: "
        "'block: pack_size 8, threads_per_row 128, ...'"
    )
    kept = {"dest": "tiles", "action": "append", "default": []}
    add("--tile", metavar="TILE", type=tile_in_words, help=tile, **kept)


def add_tensors(add: Callable) -> None:
    """Adds the options of x and the parameters that `tune` has too."""
    listed = {"action": Appended}
    dtypes = "one or more, with commas or given again (bfloat16)"
    add("--dtype", type=several(tuple(DTYPES)), default=("bfloat16",), help=dtypes, **listed)
    norms = "one or more, with commas (layer_norm)"
    add("--norm", type=several(NORMS), default=NORMS[:1], help=norms, **listed)
    cols = "widths, with commas (32,64,...,262144)"
    add("--cols", type=positives, default=COLS, help=cols, **listed)
    elements = "of x, as 2**28; num_rows = elements // num_cols (512 MiB of x)"
    add("--elements", type=positive, help=elements)
    add("--weight-dtype", choices=tuple(DTYPES), help="of weight and bias (that of x)")


def add_linear(layers: Commands) -> None:
    """Adds the parser of `bench linear`."""
    help = (
        "measure a norm and the linear layer after it, beside other libraries and the product alone"
    )
    parser = layers.add_parser("linear", help=help, description=f"{help[0].upper()}{help[1:]}.")
    parser.set_defaults(run=run_linear)
    add = parser.add_argument
    shapes = "rows x in_features x out_features, with commas: 8192x4096x12288"
    listed = {"action": Appended}
    add("--shapes", type=linear_shapes, help=shapes, **listed)
    formats, shown = several(contestants.FORMATS), "some of bfloat16,fp8 (both)"
    add("--format", type=formats, default=contestants.FORMATS, help=shown, **listed)
    passes, shown = several(linear.PASSES), "some of forward,both (both)"
    add("--pass", dest="passes", type=passes, default=linear.PASSES, help=shown, **listed)
    names = tuple(contestants.CONTESTANTS)
    shown = f"some of {','.join(names)} (all that can run)"
    add("--contestants", type=several(names), help=shown, **listed)
    add("--runs", type=positive, default=30, help="of each contestant in each cell (30)")
    add("--seed", type=number, default=0, help="of the random data (0)")
    add("--json", metavar="FILE", help="write all samples and the environment")
    graph = "few rows forward in bfloat16, in a CUDA graph of layers with weights of their own"
    add("--graph", action="store_true", help=graph)


def tile_in_words(text: str) -> str:
    """A strategy and a tile, as tune and plan print them."""
    try:
        options_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def linear_shapes(text: str) -> list[tuple[int, ...]]:
    """ROWSxINxOUT, separated by commas."""
    shapes = [each.lower().split("x") for each in text.split(",")]
    for shape in shapes:
        if len(shape) != 3 or not all(part.strip().isdigit() and int(part) for part in shape):
            raise argparse.ArgumentTypeError(
                f"{'x'.join(shape)!r} is no shape; "
                "expected rows x in_features x out_features, for example 8192x4096x12288"
            )
    return [tuple(map(int, shape)) for shape in shapes]


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if all went well, 1 if cupynorm was wrong, slower or stopped."""
    if arguments.compare:
        compared = comparison.compare(*map(report.read, arguments.compare))
        print(compared)
        return 0 if compared else 1
    check_folders(arguments.json, arguments.plot)
    if arguments.host:
        options = {"norms": arguments.norm, "dtypes": arguments.dtype, "peers": arguments.peers}
        return show(host.host(**options, progress=bar), arguments.json)
    if arguments.first_call:
        return show(host.first_call(), arguments.json)
    if arguments.guard:
        return guard(arguments)
    if arguments.readme and arguments.tiles:
        raise ValueError(
            "--readme and --tile are given; expected one of them: tiles are not in the table"
        )
    if arguments.readme:
        documents.check_documents()
    result = measured(arguments, cells_of(arguments), arguments.peers)
    if arguments.readme and not result:
        print("README.md and docs/benchmarks.md are left as they were")
    elif arguments.readme:
        documents.write_documents(result)
    return 0 if result else 1


def guard(arguments: argparse.Namespace) -> int:
    """Measures the cells of a file again and compares: 1 if any became slower or is off."""
    if arguments.readme:
        raise ValueError(
            "--readme and --guard are given; expected one of them: --readme writes a new table"
        )
    before = report.read(arguments.guard)
    after = measured(arguments, [each.cell for each in before.measurements], ())
    compared = comparison.compare(before, after)
    print(f"\n{arguments.guard}, and now:\n{compared}")
    return 0 if after and compared else 1


def measured(
    arguments: argparse.Namespace, todo: Sequence[Cell], peers: Sequence[str] | None
) -> report.BenchResult:
    """Runs the benchmark, prints the result and writes the files that were requested."""
    if arguments.plot:
        plot.check_format(arguments.plot)
    result = measure.bench(
        todo,
        runs=arguments.runs,
        seed=arguments.seed,
        peers=peers,
        tiles=arguments.tiles,
        jobs=arguments.jobs,
        progress=bar,
        command=command_of(arguments),
    )
    show(result, arguments.json)
    if arguments.plot:
        plot.plot(result, arguments.plot)
    return result


def show(result: Result, path: str | None) -> int:
    """Prints a result and writes its JSON to a file, if there is one."""
    print(result)
    if path:
        Path(path).write_text(result.to_json() + "\n", encoding="utf-8")
    return 0


def command_of(arguments: argparse.Namespace) -> str:
    """The command as it was typed."""
    return shlex.join(["python", "-m", "cupynorm", *arguments.given])


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that the options name."""
    is_quantized = arguments.out_dtype in EIGHT_BITS
    return cells(
        arguments.norm,
        arguments.dtype,
        arguments.direction or DIRECTIONS[: 1 if is_quantized else 2],
        arguments.cols,
        arguments.elements,
        rows=arguments.rows,
        models=arguments.models,
        scales=arguments.scale,
        weight_dtype=arguments.weight_dtype,
        out_dtype=arguments.out_dtype,
        amax=arguments.amax,
        residual=arguments.residual,
        zero_centered=arguments.zero_centered,
    )


def run_linear(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if no contestant was wrong, else 1."""
    check_folders(arguments.json)
    options = {}
    if arguments.graph:
        todo = linear.cells(arguments.shapes or decoding.SHAPES, ("bfloat16",), ("forward",))
        options = {"names": decoding.NAMES, "measure": decoding.measure}
    else:
        todo = linear.cells(arguments.shapes or linear.SHAPES, arguments.format, arguments.passes)
    result = linear.bench_linear(
        todo,
        runs=arguments.runs,
        seed=arguments.seed,
        contestants=arguments.contestants,
        progress=bar,
        command=command_of(arguments),
        **options,
    )
    show(result, arguments.json)
    return 0 if result else 1
