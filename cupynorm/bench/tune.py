"""Which tile is the fastest on this GPU: `python -m cupynorm tune`. What dispatch chooses is measured beside every candidate.

    candidates  cupynorm.plan.candidates: tiles that dispatch accepts, a few dozen a problem
    compiled    all ahead, in several processes; one that spills is left out
    correct     each against float64: all tensors on few rows and two multiprocessors, so that every block takes several turns,
                and sampled rows of those that are measured; one that is off is left out
    time        as in the benchmark: all take turns a few times. The fastest and the default meet again, with fresh samples,
                since the best of many owes something to luck; it wins if it is ahead by more than
                the spread of both

What is found becomes a table (cupynorm.norm.tiles) that cupynorm.use_tiles reads where a user asks for
it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..check import kernels as check_kernels
from ..check.cases import Case, random_problem
from ..check.cases import Problem as CheckProblem
from ..check.results import judge_all
from ..check.run import run_kernels
from ..gpu import environment, launch, nvrtc
from ..norm import tiles
from ..plan.candidates import candidates
from ..plan.devices import Device
from ..plan.instances import Choice, Kernel
from ..plan.problem import Problem
from .cells import COPY, Cell, cells
from .measure import free_memory, plan_of
from .peers import first_line
from .report import quartiles
from .runners import prepare_ours
from .tensors import tensors_of
from .timer import Timer, take_turns
from .truth import Truth, verify

_SCREENING_RUNS, _FINALISTS = 5, 3
_LEAST_GAIN = 0.01  # a tile may owe less than this to whose turn came before its own
_CHECKED_ELEMENTS, _CHECKED_ROWS = 2**16, 8  # at least so many rows: more than a ring has stages


@dataclass(frozen=True)
class Finding:
    """One cell. choices: name -> Choice of what dispatch chooses, which comes first, and of the finalists;
    a name is the tile in words.

    samples: microseconds of each run, for these names and "copy". num_measured: candidates that
    took turns. left_out: name -> why a candidate did not. off: sentences about those of them whose
    results were wrong.
    """

    cell: Cell
    problem: Problem
    choices: Mapping[str, Choice]
    samples: Mapping[str, list[float]]
    num_measured: int
    left_out: Mapping[str, str]
    off: tuple[str, ...] = ()

    @property
    def default(self) -> str:
        return next(iter(self.choices))

    @property
    def fastest(self) -> str:
        return min(self.choices, key=lambda name: quartiles(self.samples[name])[1])

    @property
    def gain(self) -> float:
        """What the fastest does more than the default in the same time, as a share."""
        return (
            quartiles(self.samples[self.default])[1] / quartiles(self.samples[self.fastest])[1] - 1
        )

    @property
    def wins(self) -> bool:
        return is_faster(self.samples[self.fastest], self.samples[self.default])

    def share(self, name: str) -> float:
        """Speed as a share of the copy's."""
        return quartiles(self.samples[COPY])[1] / quartiles(self.samples[name])[1]


def is_faster(samples: Sequence[float], than: Sequence[float]) -> bool:
    """Whether the medians are further apart than half of both spreads (between the quartiles) together,
    and than _LEAST_GAIN."""
    (low, median, high), (other_low, other_median, other_high) = quartiles(samples), quartiles(than)
    spread = (high - low + other_high - other_low) / 2
    return other_median - median > max(spread, _LEAST_GAIN * other_median)


@dataclass(frozen=True)
class TuneResult:
    """What was found. Prints as a table, two lines a problem; true if it came to its end and no candidate was wrong."""

    device: Device
    measured: Mapping[str, Any]
    findings: list[Finding]
    stopped: str | None = None

    def __bool__(self) -> bool:
        return self.stopped is None and not any(finding.off for finding in self.findings)

    @property
    def table(self) -> tiles.Table:
        """The winners."""
        won = {
            tiles.key(each.problem): (
                each.choices[each.fastest].strategy,
                each.choices[each.fastest].tile,
            )
            for each in self.findings
            if each.wins
        }
        return tiles.Table(self.device, won, self.measured)

    def __str__(self) -> str:
        lines = [
            f"{self.measured['gpu']}, medians of {self.measured['runs']} runs; share: of the speed of a copy of the same bytes"
        ]
        for kind in dict.fromkeys(finding.cell.kind for finding in self.findings):
            lines += ["", kind, "num_cols  candidates  share    gain  tile"]
            for each in (finding for finding in self.findings if finding.cell.kind == kind):
                count, share = each.num_measured, each.share(each.default)
                lines.append(
                    f"{each.cell.num_cols:>8}  {count:>10}  {share:.3f}          {each.default} (default)"
                )
                if each.fastest != each.default:
                    verdict = "" if each.wins else " (not beyond the spread)"
                    lines.append(
                        f"{'':20}  {each.share(each.fastest):.3f}  {each.gain:>+6.1%}  {each.fastest}{verdict}"
                    )
        reasons = Counter(
            reason for finding in self.findings for reason in finding.left_out.values()
        )
        lines += [
            "",
            *(f"left out: {count} candidates, {reason}" for reason, count in reasons.items()),
        ]
        lines += [f"OFF: {sentence}" for finding in self.findings for sentence in finding.off]
        num_won = sum(finding.wins for finding in self.findings)
        lines.append(
            f"{num_won} of {len(self.findings)} problems have a tile that is faster than the default beyond the spread"
        )
        return "\n".join(lines + ([f"stopped {self.stopped}"] if self.stopped else []))


def tune(
    todo: Sequence[Cell] | None = None,
    *,
    runs: int = 30,
    jobs: int = 1,
    seed: int | None = None,
    progress: Callable[..., Iterable] | None = None,
    command: str = "cupynorm.tune.tune()",
) -> TuneResult:
    """Measure the candidates of every cell on the current GPU, beside what dispatch chooses; tables in use are laid aside.

    todo: cells of one direction each, by default those of cupynorm.bench.cells.cells(). runs:
    samples of the default and of each finalist. jobs: processes that compile ahead. seed: of the
    random data, fresh if None. progress: wraps what is done one by one, as tqdm does. command: what
    made the result, for the table's reader.

    Returns a TuneResult; its `table` is what cupynorm.use_tiles reads. After the first cell, an
    interrupt (Ctrl-C) or a failure ends the run and returns what was found until then. Raises
    ValueError without a GPU or for what is not known, MissingLibraryError without CuPy.
    """
    todo = cells() if todo is None else list(todo)
    progress = progress or (lambda items, **_: items)
    if runs < 1:
        raise ValueError(f"runs is {runs}; expected 1 or more")
    for cell in todo:
        if cell.direction == "both" or cell.extras:
            raise ValueError(
                f"{cell} is asked for; tune measures forward or backward, without residual, out_dtype or zero_centered"
            )
    nvrtc.cupy()
    if not environment.has_gpu():
        raise ValueError(
            "tune measures a GPU and none was found; python -m cupynorm plan shows what is chosen without one"
        )
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    tiles.use(None)
    device = launch.current_device()
    measured = {**environment.environment(), "runs": runs, "command": command}
    tried = {cell: candidates(plan_of(cell, cell.direction).problem, device) for cell in todo}
    faults = compile_all(
        {choice.kernel for choices in tried.values() for choice in choices}, jobs, progress
    )
    timer = Timer.on_gpu()
    findings: list[Finding] = []
    try:
        for at, cell in enumerate(progress(todo, desc="measuring", unit="problem")):
            findings.append(_measure(cell, tried[cell], faults, timer, runs, seed + 8 * at))
            timer.num_flushes.clear()
            free_memory()
    except (KeyboardInterrupt, Exception) as failure:  # minutes of measurements are not thrown away
        if not findings:
            raise
        return TuneResult(
            device,
            measured,
            findings,
            f"after {len(findings)} of {len(todo)} problems: {first_line(failure)}",
        )
    return TuneResult(device, measured, findings)


def compile_all(
    kernels: Iterable[Kernel], jobs: int, progress: Callable[..., Iterable]
) -> dict[Kernel, str | None]:
    """kernel -> why it is left out, or None. What is compiled stays in CuPy's cache on disk."""
    kernels = sorted(kernels, key=lambda kernel: kernel.name_expression)
    shown = {"total": len(kernels), "desc": "compiling", "unit": "kernel"}
    if jobs == 1:
        return dict(zip(kernels, progress(map(fault_of, kernels), **shown)))
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(kernels)), context) as pool:
        return dict(zip(kernels, progress(pool.map(fault_of, kernels), **shown)))


def fault_of(kernel: Kernel) -> str | None:
    try:
        if nvrtc.module(kernel).get_function(kernel.name_expression).local_size_bytes == 0:
            return None
        # A stack: of spilled registers, or of float64's division, which only the compiler's report
        # tells apart.
        used = nvrtc.compile_for(kernel, launch.current_device().compute_capability)[1]
    except Exception as error:
        return f"does not compile ({first_line(error)})"
    return "spills registers" if used.spill_store_bytes or used.spill_load_bytes else None


def _measure(
    cell: Cell, choices: list[Choice], faults: Mapping, timer: Timer, runs: int, seed: int
) -> Finding:
    named = {f"{choice.strategy}: {choice.tile}": choice for choice in choices}
    default = next(iter(named))
    problem = plan_of(cell, cell.direction).problem
    small = random_problem(_few_rows(cell), seed)
    where = check_kernels.GpuCheckMachine(nvrtc.cupy().cuda.runtime.getDevice())
    left_out = {
        name: faults[choice.kernel]
        for name, choice in named.items()
        if name != default and faults[choice.kernel]
    }
    off: list[str] = []

    def right(names: Iterable[str], is_wrong: Callable[[str], str | None]) -> list[str]:
        for name in names:
            try:
                if wrong := is_wrong(name):
                    off.append(f"{cell}, {name}: {wrong}")
            except Exception as failure:  # a tile that cannot be launched must not end the run
                wrong = f"fails ({first_line(failure)})"
            if wrong and name == default:
                raise RuntimeError(f"{cell}, {name}, which is the default: {wrong}")
            if wrong:
                left_out[name] = wrong
        return [name for name in names if name not in left_out]

    names = [name for name in named if name not in left_out]
    names = right(names, lambda name: what_is_wrong(problem, named[name], small, where))
    tensors, copy = tensors_of(cell, seed)
    truth = Truth(cell, tensors, seed)
    runners = {
        name: prepare_ours(cell, tensors, strategy=named[name].strategy, tile=named[name].tile)
        for name in names
    }
    names = right(
        names,
        lambda name: verify(runners[name], truth, rounded_mean=named[name].statistics == "welford")[
            1
        ],
    )
    screened = take_turns(timer, {name: runners[name] for name in names}, _SCREENING_RUNS)
    finalists = sorted(screened, key=lambda name: quartiles(screened[name])[1])[:_FINALISTS]
    met = {name: runners[name] for name in dict.fromkeys((default, *finalists))}
    samples = take_turns(timer, {COPY: copy} | met, runs)
    return Finding(
        cell,
        problem,
        {name: named[name] for name in met},
        samples,
        len(names),
        left_out,
        tuple(off),
    )


def _few_rows(cell: Cell) -> Case:
    num_rows = max(_CHECKED_ROWS, _CHECKED_ELEMENTS // cell.num_cols)
    bias = cell.parameters if cell.norm == "layer_norm" else None
    return Case(cell.norm, num_rows, cell.num_cols, cell.dtype, weight=cell.parameters, bias=bias)


def what_is_wrong(problem: Problem, choice: Choice, small: CheckProblem, where: Any) -> str | None:
    """The gradient check of a candidate, planned for two multiprocessors: a sentence,
    or None if all of its tensors are right."""
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
    for found in judge_all(small, results, rounded_mean=welford):
        if not found.ok:
            expected = f"expected {found.expected:.6g} within {found.allowed:.2g}"
            return f"{found.tensor} is {found.got:.6g} at {found.where}; {expected}"
    return None
