"""`python -m cupynorm bench`, `bench linear` and `tune`: they measure a GPU."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..command_line import (
    Appended,
    Commands,
    check_folders,
    linear_shapes,
    number,
    positive,
    positives,
    several,
)
from ..dispatch.problem import DIRECTIONS, NORMS, SCALINGS
from ..dtypes import DTYPES, EIGHT_BITS, ELEMENTS
from ..gpu.nvrtc import MissingLibraryError
from ..table import as_text
from . import report
from .cells import COLS, FORMATS, LINEAR_SHAPES, MODELS, PASSES, cells, linear_cells

GUARDED = "notebooks/h200.json"


def bar(items: Any, **shown: Any) -> Any:
    """A progress bar on a terminal, and none in a file."""
    return tqdm(items, leave=False, disable=None, **shown)


def add_to(commands: Commands, chart: Callable[[report.BenchResult, Path], None]) -> None:
    """Adds the parsers of `bench`, `bench linear` and `tune`. chart: writes that of the README."""
    help = "measure kernel time on a GPU, beside other libraries and a copy of the same bytes"
    parser = commands.add_parser("bench", help=help, description=f"{help[0].upper()}{help[1:]}.")
    parser.set_defaults(run=run_bench, chart=chart)
    add = parser.add_argument
    _add_problems(add)
    rows = "num_rows, with commas (as many as have 512 MiB of x)"
    add("--rows", action=Appended, type=positives, default=(), help=rows)
    models = f"their norms and shapes instead: all, or some of {','.join(MODELS)}"
    add("--models", action=Appended, type=several(tuple(MODELS)), default=(), help=models)
    add("--weight-dtype", choices=tuple(DTYPES), help="of weight and bias (that of x)")
    add("--out-dtype", choices=tuple(ELEMENTS), help="of y and dy (that of x)")
    scale = f"of a y of 8 bits: all, or some of {','.join(SCALINGS)} (given)"
    add("--scale", action=Appended, type=several(SCALINGS), default=(), help=scale)
    add("--amax", action="store_true", help="record the largest |y| with a given scale")
    add("--residual", action="store_true", help="add a residual; backward adds its gradient")
    _add_run(add)
    instead = parser.add_mutually_exclusive_group().add_argument
    guard = (
        f"measure cupynorm again in the cells of a --json file ({GUARDED}), and those that are "
        "slower twice; exit code 1 if a cell is 5%% slower, or a table 0.5%% in the mean"
    )
    instead("--guard", metavar="FILE", nargs="?", const=GUARDED, help=guard)
    readme = f"rewrite the tables and the chart of ./README.md from a --json file ({GUARDED})"
    instead("--readme", metavar="FILE", nargs="?", const=GUARDED, help=readme)
    instead("--host", action="store_true", help="measure the host time of eager calls")
    help = "measure a LayerNorm and the linear layer after it, beside the product alone"
    layers = parser.add_subparsers(metavar="linear", title="another layer")
    parser = layers.add_parser("linear", help=help, description=f"{help}.")
    parser.set_defaults(run=run_linear)
    add = parser.add_argument
    help = "rows x in_features x out_features, with commas: 8192x4096x12288"
    add("--shapes", action=Appended, type=linear_shapes, default=LINEAR_SHAPES, help=help)
    for name, known in (("--format", FORMATS), ("--direction", PASSES)):
        shown = f"some of {','.join(known)} (both)"
        add(name, action=Appended, type=several(known), default=known, help=shown)
    _add_run(add)
    help = "measure which tiles are the fastest on this GPU, and write a file for use_tiles"
    parser = commands.add_parser("tune", help=help, description=f"{help[0].upper()}{help[1:]}.")
    parser.set_defaults(run=run_tune)
    add = parser.add_argument
    _add_problems(add)
    output = "the file; its rows are measured again, and those that gain nothing leave it"
    add("--output", metavar="FILE", default="tiles.csv", help=f"{output} (tiles.csv)")
    add("--seconds", type=positive, default=480, help="then the rest stays as it is (480)")


def _add_problems(add: Callable) -> None:
    dtypes = f"some of {','.join(DTYPES)} (bfloat16)"
    add("--dtype", action=Appended, type=several(tuple(DTYPES)), default=("bfloat16",), help=dtypes)
    norms = f"some of {','.join(NORMS)} (layer_norm)"
    add("--norm", action=Appended, type=several(NORMS), default=NORMS[:1], help=norms)
    directions = "some of forward,backward (both; for a y of 8 bits, forward)"
    add("--direction", action=Appended, type=several(DIRECTIONS), help=directions)
    cols = "widths, with commas (32,64,...,262144)"
    add("--cols", action=Appended, type=positives, default=COLS, help=cols)


def _add_run(add: Callable) -> None:
    peers = "libraries, with commas (all that can run)"
    add("--peers", action=Appended, type=lambda text: text.split(","), help=peers)
    add("--runs", type=positive, default=30, help="of each library in each cell (30)")
    add("--seed", type=number, help="of the random data (fresh)")
    add("--jobs", type=positive, default=1, help="processes that compile ahead (1: none)")
    add("--json", metavar="FILE", help="write all samples and the environment")


def _measure() -> Any:
    try:
        from . import measure
    except ImportError as error:
        raise MissingLibraryError(f"the benchmark needs torch ({error})") from error
    return measure


def _run(arguments: argparse.Namespace, todo: list, **options: Any) -> report.BenchResult:
    """Runs the benchmark."""
    check_folders(arguments.json)
    command = shlex.join(["python", "-m", "cupynorm", *arguments.given])
    options = {"peers": arguments.peers, **options, "command": command, "progress": bar}
    named = {name: getattr(arguments, name) for name in ("runs", "seed", "jobs")}
    return _measure().bench(todo, **named, **options)


def _show(arguments: argparse.Namespace, result: report.BenchResult, text: str = "") -> None:
    """Prints the result and the text, and writes the file that was requested."""
    print(result, text, sep=text and f"\n\n{arguments.guard}, and now:\n")
    if arguments.json:
        Path(arguments.json).write_text(result.to_json() + "\n", encoding="utf-8")


def run_bench(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if all went well, 1 if cupynorm was wrong, slower or stopped."""
    if arguments.host:
        measure = _measure()
        measure.check_runs(arguments.runs)
        peers = arguments.peers
        found = measure.host(arguments.norm, arguments.dtype, peers=peers, progress=bar)
        names = list(dict.fromkeys(name for times in found.values() for name in times))
        rows = [["microseconds of an eager call", *names]]
        for case, times in found.items():
            rows.append([case, *(f"{times[name]:.1f}" if name in times else "-" for name in names)])
        print(as_text(rows))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
        return 0
    if arguments.guard:
        measured = partial(_run, arguments, peers=("gemm",))
        result, text, ok = report.guard(report.read(arguments.guard), measured)
        _show(arguments, result, text)
        return 0 if ok else 1
    if arguments.readme:
        result = report.read(arguments.readme)
        report.rewrite_table(Path("README.md"), result.markdown())
        try:
            arguments.chart(result, Path("docs/speed.svg"))
        except ImportError as error:
            raise MissingLibraryError(f"a chart needs matplotlib ({error})") from error
        return 0
    is_quantized = arguments.out_dtype in EIGHT_BITS
    directions = arguments.direction or DIRECTIONS[: 1 if is_quantized else 2]
    names = ("rows", "models", "weight_dtype", "out_dtype", "amax", "residual")
    options = {name: getattr(arguments, name) for name in names}
    shape = (arguments.norm, arguments.dtype, directions, arguments.cols)
    todo = cells(*shape, scales=arguments.scale, **options)
    return _measured(arguments, todo)


def _measured(arguments: argparse.Namespace, todo: list) -> int:
    result = _run(arguments, todo)
    _show(arguments, result)
    return 0 if result else 1


def run_linear(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if no library was wrong, else 1."""
    todo = linear_cells(arguments.shapes, arguments.format, arguments.direction)
    return _measured(arguments, todo)


def run_tune(arguments: argparse.Namespace) -> int:
    """Measures tiles, and writes the rows that gain to the file."""
    check_folders(arguments.output)
    _measure().check_runs(1)
    from . import tune

    directions = arguments.direction or DIRECTIONS
    todo = cells(arguments.norm, arguments.dtype, directions, arguments.cols)
    print(tune.tune(Path(arguments.output), todo, seconds=arguments.seconds, progress=bar))
    return 0
