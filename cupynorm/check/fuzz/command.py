"""`python -m cupynorm fuzz`: random calls, each held to float64, until the time is over."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from tqdm import tqdm

from ...command_line import Commands, number, positive
from ...gpu import on_cpu
from .. import kernels
from ..cases import Case
from ..kernels import Machine
from .calls import machine, machines
from .draws import PER_CASE, Draw, draw
from .judge import Complaint, Refused, Started, complaints
from .smaller import as_python, smallest

# Calls that one process makes before it reports.
_BATCH = {"gpu": PER_CASE["gpu"], "cpu": PER_CASE["cpu"] // 16}
_MAX_SHOWN = 5
_SHRINK_SECONDS = 20.0


class Batch(NamedTuple):
    """What became of some calls. failures: the index of a call and what is wrong with it.

    lost: calls of which one made the GPU useless. The last failure is the first of them.
    began: the time of the first call, after libraries were imported. num_late: those judged in the
    second half of all the time, when most libraries have been loaded and kernels compiled.
    """

    num_judged: int
    num_refused: int
    failures: list[tuple[int, list[Complaint]]]
    lost: range = range(0)
    began: float = 0.0
    num_late: int = 0

    def plus(self, other: Batch) -> Batch:
        """Both together. lost: those of the other."""
        judged, refused = self.num_judged + other.num_judged, self.num_refused + other.num_refused
        began, late = min(self.began, other.began), self.num_late + other.num_late
        return Batch(judged, refused, self.failures + other.failures, other.lost, began, late)


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
    jobs = "processes; by default one for each CPU, at most 16"
    add("--jobs", type=positive, default=min(16, os.cpu_count() or 1), help=jobs)
    on = "where the kernels run; by default on a GPU if there is one"
    add("--on", choices=("gpu", "cpu"), help=on)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 if every call was right, else 1."""
    on = kernels.machine(arguments.on).on
    if on == "cpu":
        on_cpu.compiler()  # without one, the error says what to install
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    if arguments.replay is not None:
        if arguments.seed is None:
            raise ValueError("--replay was given without --seed; expected the seed of that call")
        return _replay(seed, arguments.replay, on)
    found = _fuzz(seed, on, arguments.seconds, arguments.jobs)
    seconds = time.time() - found.began
    counts = f"{found.num_judged} calls on the {on.upper()} in {seconds:.0f} s with seed {seed}"
    refused = f"{found.num_refused} more refused, as what they force does not fit"
    if not (found.num_judged or found.failures):
        print(f"OFF: no call was made in {arguments.seconds:.0f} s; expected more --seconds")
        return 1
    if not found.failures:
        rate = f"{120 * found.num_late / arguments.seconds:,.0f} a minute in the second half"
        print(f"OK: {counts}: every element is within what its dtype allows; {refused}; {rate}")
        return 0
    where = machine(on)
    failures = sorted(found.failures)
    for index, wrong in failures[:_MAX_SHOWN]:
        _show(index, draw(seed, index, on), wrong, where)
    for index, wrong in failures[_MAX_SHOWN : 10 * _MAX_SHOWN]:
        print(f"call {index}: {wrong[0].sentence}")
    print(f"OFF: {len(found.failures)} of {counts} are off; {refused}")
    return 1


def _replay(seed: int, index: int, on: str) -> int:
    drawn, where = draw(seed, index, on), machine(on)
    try:
        wrong = complaints(drawn, where)
    except Refused as refusal:
        print(f"refused: {refusal}")
        return 0
    if not wrong:
        print(f"OK: call {index} of seed {seed}: {drawn.case}")
        return 0
    _show(index, drawn, wrong, where)
    return 1


def _show(index: int, drawn: Draw, wrong: list[Complaint], where: Machine) -> None:
    """Prints what is wrong, and the smallest call that fails in the same way, with its complaints.

    After an error that makes a GPU useless every call fails, so that no smaller one is looked for.
    """
    print(f"call {index}: {drawn.case}", *(each.sentence for each in wrong), sep="\n  ")
    small = smallest(drawn, lambda simpler: _fails(simpler, wrong[0], where), _SHRINK_SECONDS)
    if small != drawn:
        if _is_useless(where):
            small = drawn
        else:
            print("smaller:", *(each.sentence for each in complaints(small, where)), sep="\n  ")
    print(as_python(small, where.on), end="\n\n")


def _fails(drawn: Draw, how: Complaint, where: Machine) -> bool:
    try:
        return how.kind in [each.kind for each in complaints(drawn, where)]
    except Refused:
        return False


def _is_useless(where: Machine) -> bool:
    return complaints(Draw(Case("layer_norm", 1, 8, "float32")), where) != []


def _fuzz(seed: int, on: str, seconds: float, jobs: int) -> Batch:
    """Calls 0, 1, 2, ... of a seed, by several processes, until the time is over."""
    deadline = time.time() + seconds  # a clock that all processes share
    found, first, size = Batch(0, 0, [], began=deadline), 0, _BATCH[on]
    with (
        ProcessPoolExecutor(jobs, mp_context=_context()) as pool,
        tqdm(desc="fuzzing", unit="call", leave=False, disable=None) as bar,
    ):
        running: dict[Future, int] = {}
        while running or time.time() < deadline:
            while len(running) < jobs and time.time() < deadline:
                timing = (deadline, deadline - seconds / 2)
                running[pool.submit(batch, seed, range(first, first + size), on, *timing)] = first
                first += size
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                begin = running.pop(future)
                try:
                    made = future.result()
                except BrokenProcessPool:
                    last = begin + size - 1
                    died = Complaint.of(f"a process ended in one of the calls {begin} to {last}")
                    return found._replace(failures=[*found.failures, (begin, [died])])
                found = found.plus(made)
                bar.update(made.num_judged)
                if made.lost:
                    culprit = _culprit(seed, made.lost, on) or found.failures[-1]
                    return found._replace(failures=[*found.failures[:-1], culprit])
    return found


def _context() -> multiprocessing.context.BaseContext:
    """How processes start: from one that has imported torch, where there is such a way.

    torch takes seconds to import, and so does what its first torch.autograd.grad imports. No import
    uses the GPU, which cannot be inherited.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.fx.experimental.symbolic_shapes", __name__])
    return context


def _culprit(seed: int, lost: range, on: str) -> tuple[int, list[Complaint]] | None:
    """The first of these calls that fails alone, in a process whose GPU is not useless yet."""
    with ProcessPoolExecutor(1, mp_context=_context()) as pool:
        for index in lost:
            made = pool.submit(batch, seed, range(index, index + 1), on).result()
            if made.failures:
                return made.failures[0]
    return None


def batch(
    seed: int, indices: range, on: str, deadline: float = math.inf, half: float = math.inf
) -> Batch:
    """Makes calls in this process, as long as time.time() is below the deadline.

    half: the time from which they are late. Several are started before the first is judged. Returns
    early, with `lost`, after an error that makes a GPU useless.
    """
    free, started = deque(machines(on)), deque()
    began = time.time()
    judged, refused, late, failures = 0, 0, 0, []
    indices = iter(indices)
    while True:
        index = next(indices, None) if free and time.time() < deadline else None
        if index is not None:
            where = free.popleft()
            started.append((index, where, Started(draw(seed, index, on), where)))
            continue
        if not started:
            return Batch(judged, refused, failures, began=began, num_late=late)
        index, where, call = started.popleft()
        free.append(where)
        try:
            wrong = call.complaints()
        except Refused:
            refused += 1
            continue
        judged += 1
        late += time.time() >= half
        if wrong:
            failures.append((index, wrong))
            if on == "gpu" and _is_useless(where):
                last = started[-1][0] if started else index
                return Batch(judged, refused, failures, range(index, last + 1), began)
