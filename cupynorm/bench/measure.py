"""The benchmark: kernel time of cupynorm and its peers on one GPU, beside a copy of the same bytes.

bytes     what any implementation must move. Forward reads x and writes y; backward reads x and dy
          and writes dx. A forward by itself has no gradients: a library may or may not write
          statistics.
copy      a device-to-device copy that reads half of those bytes and writes the other half
time      of cupynorm.bench.timer: kernel time, with a cold L2 cache
runs      libraries take turns, so a drift of the clocks affects all
correct   once for each cell and library: outputs are NaN before the call, and sampled rows are
          compared with float64 (cupynorm.bench.truth)
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..gpu import launch, nvrtc
from ..gpu.nvrtc import environment, has_gpu
from ..norm.plans import plan
from ..plan.devices import Device
from ..plan.dispatch import Plan
from .cells import COPY, EPS, OURS, Cell, cells
from .peers import PEERS, fault, first_line, missing, version
from .report import BenchResult, Measurement
from .runners import options_of, prepare
from .tensors import tensors_of
from .timer import Timer, take_turns
from .truth import Truth, verify


def bench(
    todo: Sequence[Cell] | None = None,
    *,
    runs: int = 30,
    seed: int | None = None,
    peers: Iterable[str] | None = None,
    tiles: Iterable[str] = (),
    jobs: int = 1,
    progress: Callable[..., Iterable] | None = None,
    command: str = "cupynorm.bench.measure.bench()",
) -> BenchResult:
    """Measure cupynorm and its peers on the current GPU, with weight and, for layer_norm, bias.

    todo: from cupynorm.bench.cells.cells, by default its defaults. runs: samples of each library in
    each cell. seed: of the random data, fresh if None. peers: names of cupynorm.bench.peers.PEERS,
    by default all that can run.
    tiles: of cupynorm, to measure beside that of dispatch: "block: pack_size 8, threads_per_row
    128, packs_per_thread 8". Cells are then of one direction each. A cell that a tile does not fit
    says so.
    jobs: processes that compile all kernels ahead, into caches on disk; 1 compiles each in its
    turn.
    progress: wraps the cells, as tqdm does. command: that made the result, for the README.

    Returns a BenchResult, which prints as tables: microseconds, and GB/s of 10^9 bytes a second.
    After the first cell, an interrupt (Ctrl-C) or a failure of cupynorm ends the run. The result
    then has what was measured, and is not ok.
    Raises ValueError without a GPU and for unknown names, MissingLibraryError without CuPy, and
    what cupynorm raises in the first cell.
    """
    todo = cells() if todo is None else list(todo)
    unknown = [name for name in peers or () if name not in PEERS]
    if unknown:
        raise ValueError(f"peers has {unknown[0]!r}; expected some of {', '.join(PEERS)}")
    tiles = [f"{each['strategy']}: {each['tile']}" for each in map(options_of, tiles)]
    if tiles and any(cell.direction == "both" for cell in todo):
        raise ValueError("a tile belongs to one direction; expected cells of forward or backward")
    check_runs(runs)
    seed = fresh_seed() if seed is None else seed
    progress = progress or (lambda items, **_: items)
    wanted = list(dict.fromkeys((OURS, *(PEERS if peers is None else peers))))
    absent = {name: why for name in wanted if (why := missing(name))}
    names = [name for name in wanted if name not in absent] + list(dict.fromkeys(tiles))
    packages = [
        name for name in names if name in PEERS and name not in (OURS, "torch", "torch.compile")
    ]
    machine = environment() | {"peers": {name: version(name) for name in packages}}
    settings = {"runs": runs, "seed": seed, "eps": EPS, "command": command}
    if jobs > 1:
        compile_ahead(todo, names, seed, jobs, progress)
    timer = Timer.on_gpu()

    def measure(at: int, cell: Cell) -> Measurement:
        return measure_cell(cell, names, timer, runs, seed + 8 * at)

    measurements, stopped = measure_each(todo, measure, timer, progress, "cell")
    settings |= {"stopped": stopped} if stopped else {}
    return BenchResult(machine, settings, measurements, absent)


def measure_each(
    todo: Sequence[Cell], measure: Callable, timer: Timer, progress: Callable, unit: str
) -> tuple[list, str | None]:
    """What measure(at, cell) found of each, and why the run ended early, or None.

    After the first cell an interrupt or an error ends the run: minutes of measurements are kept.
    """
    found = []
    try:
        for at, cell in enumerate(progress(todo, desc="measuring", unit=unit)):
            found.append(measure(at, cell))
            timer.num_flushes.clear()
            free_memory()
    except (KeyboardInterrupt, Exception) as failure:
        if not found:
            raise
        return found, f"after {len(found)} of {len(todo)} {unit}s: {first_line(failure)}"
    return found, None


def check_runs(runs: int) -> None:
    """Raises ValueError for no runs and without a GPU, MissingLibraryError without CuPy."""
    if runs < 1:
        raise ValueError(f"runs is {runs}; expected 1 or more")
    nvrtc.cupy()
    if not has_gpu():
        raise ValueError(
            "the benchmark measures a GPU and none was found; python -m cupynorm check needs none"
        )


def fresh_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def free_memory() -> None:
    """Returns the memory that CuPy and torch keep for later to the GPU."""
    nvrtc.cupy().get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def measure_cell(
    cell: Cell, names: Sequence[str], timer: Timer, runs: int, seed: int
) -> Measurement:
    """One cell, by the libraries and tiles of these names."""
    tensors, copy = tensors_of(cell, seed)
    truth = Truth(cell, tensors, seed)
    plans = [plan_of(cell, direction) for direction in cell.passes]
    runners = {COPY: copy}
    errors: dict[str, float] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            of_ours = plans if name == OURS else []
            if name not in PEERS:
                of_ours = [plan_of(cell, cell.direction, **options_of(name))]
            # Kernels of other libraries, and welford's, subtract a rounded mean.
            rounded_mean = not of_ours or any(plan.statistics == "welford" for plan in of_ours)
            runner = prepare(name, cell, tensors)
            error, wrong = verify(runner, truth, rounded_mean=rounded_mean)
            timer.sample(runner)
        except Exception as failure:  # a failing peer must not end the run
            if name == OURS:
                raise
            faults[name] = fault(name, failure)
            continue
        errors[name], runners[name] = error, runner
        if wrong:
            faults[name] = f"{name} is off: {wrong}"
    strategy = "/".join(dict.fromkeys(plan.strategy for plan in plans))
    return Measurement(cell, strategy, take_turns(timer, runners, runs), errors, faults)


def plan_of(cell: Cell, direction: str, device: Device | None = None, **options: Any) -> Plan:
    """Our plan of a cell, on the current GPU unless a device is given. options: strategy, tile."""
    return plan(
        cell.num_cols,
        cell.num_rows,
        cell.dtype,
        norm=cell.norm,
        direction=direction,
        device=device or launch.current_device(),
        weight_dtype=cell.parameters,
        bias_dtype=cell.parameters if cell.norm == "layer_norm" else None,
        out_dtype=cell.out_dtype,
        scale=cell.scale,
        amax=cell.amax,
        residual=cell.residual,
        zero_centered_weight=cell.zero_centered,
        **options,
    )


def compile_ahead(
    todo: Sequence[Cell], names: Sequence[str], seed: int, jobs: int, progress: Callable
) -> None:
    """Runs every library once on every cell, in several processes, to fill caches on disk."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    shown = {"total": len(todo), "desc": "compiling", "unit": "cell"}
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(todo)), context) as pool:
        tried = [pool.submit(try_once, cell, names, seed) for cell in todo]
        for each in progress(concurrent.futures.as_completed(tried), **shown):
            each.exception()  # a process that died has compiled less; the run will say what fails


def try_once(cell: Cell, names: Sequence[str], seed: int) -> None:
    """Runs each of these libraries once on a cell. Errors are left to the measurement."""
    tensors, _ = tensors_of(cell, seed)
    for name in names:
        try:
            if name not in PEERS or not missing(name):
                runner = prepare(name, cell, tensors)
                runner.call()
                nvrtc.cupy().cuda.runtime.deviceSynchronize()
        except Exception:  # the measurement meets it again and names it
            pass
    del tensors
    free_memory()
