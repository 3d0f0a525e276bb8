"""`python -m cupynorm tune`: measure tiles on this GPU and write a table of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..check.cases import DIRECTIONS
from ..command_line import Appended, Commands, check_folders, number, positive, several
from ..gpu import launch
from ..plan import measured
from . import confirm, tune, tune_ranges
from .cells import cells
from .command import add_tensors, bar, command_of
from .measure import check_runs


def add_to(commands: Commands) -> None:
    """Adds the parser of `tune`."""
    help = "measure which tiles are the fastest on this GPU, and write a table for use_tiles"
    about = "Measure which tiles are the fastest on this GPU, and write a table for use_tiles."
    parser = commands.add_parser("tune", help=help, description=about)
    parser.set_defaults(run=run)
    add = parser.add_argument
    add_tensors(add)
    directions = "some of forward,backward (both)"
    names = several(DIRECTIONS)
    add("--direction", action=Appended, type=names, default=DIRECTIONS, help=directions)
    add("--runs", type=positive, default=30, help="of the default and of each finalist (30)")
    add("--seed", type=number, help="of the random data (fresh)")
    jobs = "processes that compile all candidates before the first is timed (1: this one)"
    add("--jobs", type=positive, default=1, help=jobs)
    output = "the table, overwritten if it exists (tiles.json)"
    add("--output", metavar="FILE", default="tiles.json", help=output)
    device_file = "measure ranges of widths, and update this data file of a device (h200.csv)"
    add("--device-file", metavar="FILE", help=device_file)
    confirm = "with --device-file: measure its rows alone, and leave out those that gain nothing"
    add("--confirm", action="store_true", help=confirm)
    part = "with --device-file: which share of its ranges, as 3/8 (1/1)"
    add("--part", type=part_of, default=(1, 1), help=part)
    seconds = "with --device-file: measure for this long; other ranges are left as they are (480)"
    add("--seconds", type=positive, default=480, help=seconds)


def part_of(text: str) -> tuple[int, int]:
    """A share of the ranges, from 1/8 to 8/8, as two ints."""
    at, _, count = text.partition("/")
    if not (at.isdigit() and count.isdigit() and 1 <= int(at) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; expected one as 3/8")
    return int(at), int(count)


def run_device_file(arguments: argparse.Namespace) -> int:
    """Measures a part of a device's data file, and updates the file."""
    path = Path(arguments.device_file)
    check_folders(path)
    rows = measured.read_rows(path) if path.exists() else []
    check_runs(arguments.runs)

    def compile_ahead(kernels: set) -> object:
        return tune.compile_all(kernels, arguments.jobs, bar)

    timing = {"part": arguments.part, "seconds": arguments.seconds, "seed": arguments.seed or 0}
    device = launch.current_device()
    if arguments.confirm:
        kept, num_measured, num_left = confirm.confirm(
            rows, device, **timing, compile_ahead=compile_ahead
        )
        measured.write_rows(path, kept)
        print(f"{num_measured} rows measured, {num_left} of them left out; {path} has the others")
        return 0
    winners, done = tune_ranges.tune_ranges(rows, device, **timing, compile_ahead=compile_ahead)
    measured.write_rows(path, tune_ranges.merged(rows, winners, done))
    faster = f"{len(winners)} of them have a tile 2% or more faster than the model's"
    print(f"{len(done)} ranges measured, {faster}; {path} has them")
    return 0


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if all problems were measured and no candidate was wrong, else 1."""
    if arguments.device_file:
        return run_device_file(arguments)
    output = Path(arguments.output)
    check_folders(output)
    todo = cells(
        arguments.norm,
        arguments.dtype,
        arguments.direction,
        arguments.cols,
        arguments.elements,
        weight_dtype=arguments.weight_dtype,
    )
    result = tune.tune(
        todo,
        runs=arguments.runs,
        jobs=arguments.jobs,
        seed=arguments.seed,
        progress=bar,
        command=command_of(arguments),
    )
    print(result)
    output.write_text(result.table.to_json() + "\n", encoding="utf-8")
    print(f"{output} has the tiles; a program uses them after cupynorm.use_tiles({str(output)!r})")
    return 0 if result else 1
