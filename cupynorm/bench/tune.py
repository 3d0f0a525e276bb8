"""Which tile is the fastest on this GPU: `python -m cupynorm tune`.

    candidates  cupynorm.plan.candidates: tiles that dispatch accepts, a few dozen a problem. The
                default is the tile that dispatch chooses.
    compiled    all kernels ahead, in several processes; tiles that spill are dropped
    correct     compared with float64: all tensors of a few rows on two multiprocessors, so that
                every block takes several turns, and sampled rows of the full size; wrong tiles are
                dropped
    time        as in the benchmark: all tiles take turns a few times. The fastest few and the
                default are then measured again, because the best of many is partly luck. A tile
                wins if it is ahead of the default by more than the spread of both.

The winners form a table (cupynorm.norm.tiles), which cupynorm.use_tiles reads.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..check import kernels as check_kernels
from ..check.cases import Case, random_problem
from ..check.cases import Problem as CheckProblem
from ..check.results import judge_all
from ..check.run import run_kernels
from ..gpu import launch, nvrtc
from ..norm import tiles
from ..plan.candidates import candidates
from ..plan.devices import Device
from ..plan.instances import Choice, Kernel
from ..plan.problem import Problem
from .cells import COPY, Cell, cells
from .measure import check_runs, fresh_seed, measure_each, plan_of
from .peers import first_line
from .report import is_faster, quartiles
from .runners import prepare_ours
from .tensors import tensors_of
from .timer import Timer, take_turns
from .truth import Truth, verify

_SCREENING_RUNS, _FINALISTS = 5, 3
_LEAST_GAIN = 0.01  # a smaller gain may come from the order of the turns
_CHECKED_ELEMENTS, _CHECKED_ROWS = 2**16, 8  # at least 8 rows: more than a ring has stages


@dataclass(frozen=True)
class TunedCell:
    """One cell. A name is a tile in words.

    choices: name -> Choice, of the default, which comes first, and of the finalists.
    samples: microseconds of each run, for these names and "copy".
    num_measured: how many candidates were timed.
    left_out: name -> why a candidate was not timed.
    off: sentences about candidates with wrong results.
    """

    cell: Cell
    problem: Problem
    choices: Mapping[str, Choice]
    samples: Mapping[str, list[float]]
    num_measured: int
    left_out: Mapping[str, str]
    off: tuple[str, ...] = ()

    def median(self, name: str) -> float:
        """Microseconds."""
        return quartiles(self.samples[name])[1]

    @property
    def default(self) -> str:
        return next(iter(self.choices))

    @property
    def fastest(self) -> str:
        return min(self.choices, key=self.median)

    @property
    def gain(self) -> float:
        """The speedup of the fastest over the default, as a share."""
        return self.median(self.default) / self.median(self.fastest) - 1

    @property
    def wins(self) -> bool:
        return is_faster(self.samples[self.fastest], self.samples[self.default], _LEAST_GAIN)

    def share(self, name: str) -> float:
        """Speed as a share of the copy's."""
        return self.median(COPY) / self.median(name)


@dataclass(frozen=True)
class TuneResult:
    """All findings of one run. Prints as a table, two lines a problem.

    True if the run was complete and no candidate was wrong.
    """

    device: Device
    measured: Mapping[str, Any]
    findings: list[TunedCell]
    stopped: str | None = None

    def __bool__(self) -> bool:
        return self.stopped is None and not any(finding.off for finding in self.findings)

    @property
    def table(self) -> tiles.Table:
        """The winners."""
        winners = [
            (each.problem, each.choices[each.fastest]) for each in self.findings if each.wins
        ]
        won = {tiles.key(problem): (best.strategy, best.tile) for problem, best in winners}
        return tiles.Table(self.device, won, self.measured)

    def __str__(self) -> str:
        lines = [
            f"{self.measured['gpu']}, medians of {self.measured['runs']} runs; "
            "share: of the speed of a copy of the same bytes"
        ]
        for kind in dict.fromkeys(finding.cell.kind for finding in self.findings):
            lines += ["", kind, "num_cols  candidates  share    gain  tile"]
            for each in (finding for finding in self.findings if finding.cell.kind == kind):
                count, share = each.num_measured, each.share(each.default)
                lines.append(
                    f"{each.cell.num_cols:>8}  {count:>10}  {share:.3f}          "
                    f"{each.default} (default)"
                )
                if each.fastest != each.default:
                    verdict = "" if each.wins else " (not beyond the spread)"
                    lines.append(
                        f"{'':20}  {each.share(each.fastest):.3f}  {each.gain:>+6.1%}  "
                        f"{each.fastest}{verdict}"
                    )
        left_out = [why for each in self.findings for why in each.left_out.values()]
        reasons = Counter(left_out).items()
        lines += ["", *(f"left out: {count} candidates, {reason}" for reason, count in reasons)]
        lines += [f"OFF: {sentence}" for finding in self.findings for sentence in finding.off]
        num_won = sum(finding.wins for finding in self.findings)
        lines.append(
            f"{num_won} of {len(self.findings)} problems have a tile that is faster than "
            "the default beyond the spread"
        )
        return "\n".join(lines + ([f"stopped {self.stopped}"] if self.stopped else []))


def tune(
    todo: Sequence[Cell] | None = None,
    *,
    runs: int = 30,
    jobs: int = 1,
    seed: int | None = None,
    progress: Callable[..., Iterable] | None = None,
    command: str = "cupynorm.bench.tune.tune()",
) -> TuneResult:
    """Measure the candidates of every cell on the current GPU, beside the choice of dispatch.

    It removes a table that cupynorm.use_tiles has set.

    todo: cells of one direction each, by default those of cupynorm.bench.cells.cells(). runs:
    samples of the default and of each finalist. jobs: processes that compile ahead. seed: of the
    random data, fresh if None. progress: wraps iterables, as tqdm does. command: that made the
    result, recorded in the table.

    Returns a TuneResult; its `table` is what cupynorm.use_tiles reads. After the first cell, an
    interrupt (Ctrl-C) or a failure ends the run, and the result has the findings so far.
    Raises ValueError without a GPU or for cells that tune cannot measure, MissingLibraryError
    without CuPy.
    """
    todo = cells() if todo is None else list(todo)
    progress = progress or (lambda items, **_: items)
    for cell in todo:
        if cell.direction == "both" or cell.extras:
            raise ValueError(
                f"todo has {cell}; tune measures forward or backward, without residual, "
                "out_dtype or zero_centered"
            )
    check_runs(runs)
    seed = fresh_seed() if seed is None else seed
    tiles.use(None)
    device = launch.current_device()
    measured = {**nvrtc.environment(), "runs": runs, "command": command}
    tried = {cell: candidates(plan_of(cell, cell.direction).problem, device) for cell in todo}
    kernels = {choice.kernel for choices in tried.values() for choice in choices}
    faults = compile_all(kernels, jobs, progress)
    timer = Timer.on_gpu()

    def measure(at: int, cell: Cell) -> TunedCell:
        return _measure(cell, tried[cell], faults, timer, runs, seed + 8 * at)

    findings, stopped = measure_each(todo, measure, timer, progress, "problem")
    return TuneResult(device, measured, findings, stopped)


def compile_all(
    kernels: Iterable[Kernel], jobs: int, progress: Callable[..., Iterable]
) -> dict[Kernel, str | None]:
    """kernel -> why it is left out, or None. Compiled kernels stay in CuPy's cache on disk."""
    kernels = sorted(kernels, key=lambda kernel: kernel.name_expression)
    shown = {"total": len(kernels), "desc": "compiling", "unit": "kernel"}
    if jobs == 1 or not kernels:
        return dict(zip(kernels, progress(map(fault_of, kernels), **shown)))
    context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(kernels)), context) as pool:
        return dict(zip(kernels, progress(pool.map(fault_of, kernels), **shown)))


def fault_of(kernel: Kernel) -> str | None:
    """Why a kernel is left out: it does not compile, or it spills; else None."""
    try:
        if nvrtc.module(kernel).get_function(kernel.name_expression).local_size_bytes == 0:
            return None
        # Local memory holds spilled registers or the stack of a float64 division. Only the
        # compiler's report tells which.
        used = nvrtc.compile_for(kernel, launch.current_device().compute_capability)[1]
    except Exception as error:
        return f"does not compile ({first_line(error)})"
    return "spills registers" if used.spill_store_bytes or used.spill_load_bytes else None


def _measure(
    cell: Cell, choices: list[Choice], faults: Mapping, timer: Timer, runs: int, seed: int
) -> TunedCell:
    named = {f"{choice.strategy}: {choice.tile}": choice for choice in choices}
    default = next(iter(named))
    problem = plan_of(cell, cell.direction).problem
    small = random_problem(_few_rows(cell), seed)
    where = check_kernels.GpuCheckMachine(nvrtc.cupy().cuda.runtime.getDevice())
    left_out = {name: faults[choice.kernel] for name, choice in named.items()}
    left_out = {name: why for name, why in left_out.items() if why and name != default}
    off: list[str] = []

    def without_wrong(names: Iterable[str], find_wrong: Callable[[str], str | None]) -> list[str]:
        for name in names:
            try:
                if wrong := find_wrong(name):
                    off.append(f"{cell}, {name}: {wrong}")
            except Exception as failure:  # a tile that fails to launch must not end the run
                wrong = f"fails ({first_line(failure)})"
            if wrong and name == default:
                raise RuntimeError(f"{cell}, {name}, which is the default: {wrong}")
            if wrong:
                left_out[name] = wrong
        return [name for name in names if name not in left_out]

    names = [name for name in named if name not in left_out]
    names = without_wrong(names, lambda name: what_is_wrong(problem, named[name], small, where))
    tensors, copy = tensors_of(cell, seed)
    truth = Truth(cell, tensors, seed)
    runners = {
        name: prepare_ours(cell, tensors, strategy=named[name].strategy, tile=named[name].tile)
        for name in names
    }

    def wrong_rows(name: str) -> str | None:
        return verify(runners[name], truth, rounded_mean=named[name].statistics == "welford")[1]

    names = without_wrong(names, wrong_rows)
    screened = take_turns(timer, {name: runners[name] for name in names}, _SCREENING_RUNS)
    finalists = sorted(screened, key=lambda name: quartiles(screened[name])[1])[:_FINALISTS]
    timed = {name: runners[name] for name in dict.fromkeys((default, *finalists))}
    samples = take_turns(timer, {COPY: copy} | timed, runs)
    chosen = {name: named[name] for name in timed}
    return TunedCell(cell, problem, chosen, samples, len(names), left_out, tuple(off))


def _few_rows(cell: Cell) -> Case:
    num_rows = max(_CHECKED_ROWS, _CHECKED_ELEMENTS // cell.num_cols)
    bias = cell.parameters if cell.norm == "layer_norm" else None
    return Case(cell.norm, num_rows, cell.num_cols, cell.dtype, weight=cell.parameters, bias=bias)


def what_is_wrong(problem: Problem, choice: Choice, small: CheckProblem, where: Any) -> str | None:
    """A sentence about a candidate's first wrong tensor, or None if all are right.

    The check plans for two multiprocessors, so that every block takes several turns.
    """
    device = where.device
    where.device = replace(
        device, num_sms=2, clusters=tuple((size, 1) for size, _ in device.clusters)
    )
    tiles.use(tiles.Table(where.device, {tiles.key(problem): (choice.strategy, choice.tile)}))
    try:
        welford = check_kernels.uses_welford(small.case, where.device)
        results = run_kernels(small, where)
    finally:
        tiles.use(None)
        where.device = device
    for result in judge_all(small, results, rounded_mean=welford):
        if not result.ok:
            expected = f"expected {result.expected:.6g} within {result.allowed:.2g}"
            return f"{result.tensor} is {result.got:.6g} at {result.where}; {expected}"
    return None
