"""`python -m cupynorm fuzz`: random calls, each held to float64, until the time is over."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from tqdm import tqdm

from ...arguments import Commands, number, positive
from ...gpu import environment
from .. import kernels
from ..kernels import CpuMachine
from .calls import Machine
from .draws import PER_CASE, Draw, draw
from .judge import Refused, complaints
from .smaller import as_python, smallest

_BATCH = {"gpu": 4 * PER_CASE, "cpu": PER_CASE}  # calls that one process makes before it reports
_MAX_SHOWN = 5
_SHRINK_SECONDS = 20.0


class Batch(NamedTuple):
    """What became of some calls. failures: the index of a call and what is wrong with it."""

    num_judged: int
    num_refused: int
    failures: list[tuple[int, list[str]]]


def add_to(commands: Commands) -> None:
    """Adds the parser of `fuzz`."""
    help = "make random calls and compare each with float64, until the time is over"
    about = (
        "Draw widths, dtypes, layouts, options and values at random, run forward and backward, and "
        "compare every element with float64. On a GPU by the public functions with CuPy and torch "
        "too; without one, by the kernels on the CPU. A failure is printed as three lines of "
        "Python."
    )
    parser = commands.add_parser("fuzz", help=help, description=about)
    add = parser.add_argument
    add("--seconds", type=positive, default=60, help="how long to draw new calls (60)")
    add("--seed", type=number, help="of all that is drawn; by default a new one, which is printed")
    add("--replay", type=number, metavar="INDEX", help="make one call of --seed again")
    jobs = "processes; by default one for each CPU, at most 14"
    add("--jobs", type=positive, default=min(14, os.cpu_count() or 1), help=jobs)
    on = "where the kernels run; by default on a GPU if there is one"
    add("--on", choices=("gpu", "cpu"), help=on)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if every call was right, else 1."""
    kernels.machine(arguments.on)  # refuses a GPU that is not there
    on = arguments.on or ("gpu" if environment.has_gpu() else "cpu")
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    if arguments.replay is not None:
        if arguments.seed is None:
            raise ValueError("--replay was given without --seed; expected the seed of that call")
        return _replay(seed, arguments.replay, on)
    found = _fuzz(seed, on, arguments.seconds, arguments.jobs)
    counts = f"{found.num_judged} calls on the {on.upper()} with seed {seed}"
    refused = f"{found.num_refused} more refused, as what they force does not fit"
    if not found.failures:
        print(f"OK: {counts}: every element is within what its dtype allows; {refused}")
        return 0
    where = _machine(on)
    for index, lines in sorted(found.failures)[:_MAX_SHOWN]:
        _show(index, draw(seed, index, on), lines, where)
    print(f"OFF: {len(found.failures)} of {counts} are off; {refused}")
    return 1


def _replay(seed: int, index: int, on: str) -> int:
    drawn, where = draw(seed, index, on), _machine(on)
    try:
        lines = complaints(drawn, where)
    except Refused as refusal:
        print(f"refused: {refusal}")
        return 0
    if not lines:
        print(f"OK: call {index} of seed {seed}: {drawn.case}")
        return 0
    _show(index, drawn, lines, where)
    return 1


def _show(index: int, drawn: Draw, lines: list[str], where: Machine) -> None:
    """Prints what is wrong, and the smallest call in which the same is wrong."""
    print(f"call {index}: {drawn.case}", *lines, sep="\n  ")

    def fails(simpler: Draw) -> bool:
        try:
            return _kinds(complaints(simpler, where)) >= _kinds(lines[:1])
        except Exception:
            return False

    print(as_python(smallest(drawn, fails, _SHRINK_SECONDS), _name(where)), end="\n\n")


def _kinds(lines: list[str]) -> set[str]:
    """What is wrong, without its numbers: the tensor, or the class of the error."""
    return {line.partition(":")[0].partition(" differs")[0] for line in lines}


def _machine(on: str) -> Machine:
    return kernels.machine(on)


def _name(where: Machine) -> str:
    return "cpu" if isinstance(where, CpuMachine) else "gpu"


def _fuzz(seed: int, on: str, seconds: float, jobs: int) -> Batch:
    """Calls 0, 1, 2, ... of a seed, by several processes, until the time is over."""
    deadline = time.monotonic() + seconds
    judged = refused = first = 0
    failures: list[tuple[int, list[str]]] = []
    size = _BATCH[on]
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
        tqdm(desc="fuzzing", unit="call", leave=False) as bar,
    ):
        running: dict[Future, int] = {}
        while running or time.monotonic() < deadline:
            while len(running) < jobs and time.monotonic() < deadline:
                running[pool.submit(batch, seed, first, size, on)] = first
                first += size
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                begin = running.pop(future)
                try:
                    made = future.result()
                except BrokenProcessPool:
                    died = f"a process ended in one of the calls {begin} to {begin + size - 1}"
                    return Batch(judged, refused, [*failures, (begin, [died])])
                judged, refused = judged + made.num_judged, refused + made.num_refused
                failures += made.failures
                bar.update(made.num_judged)
    return Batch(judged, refused, failures)


def batch(seed: int, first: int, size: int, on: str) -> Batch:
    """Makes some calls in this process."""
    where = _machine(on)
    judged, refused, failures = 0, 0, []
    for index in range(first, first + size):
        drawn = draw(seed, index, on)
        if isinstance(where, CpuMachine):
            where.seed = drawn.seed
        try:
            lines = complaints(drawn, where)
        except Refused:
            refused += 1
            continue
        except Exception as error:  # whatever a call raises is what is looked for
            lines = [f"{type(error).__name__}: {error}"]
        judged += 1
        if lines:
            failures.append((index, lines))
    return Batch(judged, refused, failures)
