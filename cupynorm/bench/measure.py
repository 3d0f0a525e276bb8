"""The benchmark: kernel time of cupynorm and its peers on one GPU, beside a copy of the same bytes.

bytes     what any implementation must move. Forward reads x and writes y; backward reads x and dy
          and writes dx. A forward by itself has no gradients: a library may or may not write
          statistics.
copy      a device-to-device copy that reads half of those bytes and writes the other half
time      of cupynorm.bench.timer: kernel time, with a cold L2 cache. Libraries take turns, so a
          drift of the clocks affects all
correct   once for each cell and library: outputs are NaN before the call, and sampled rows are
          compared with float64 (cupynorm.bench.truth)
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from ..gpu import launch, nvrtc
from ..gpu.nvrtc import environment, has_gpu
from ..nn import modules
from ..nn.enable import enabled
from ..plans import plan
from .cells import COPY, EPS, OURS, Cell, LinearCell, cells
from .peers import (
    PEERS,
    first_line,
    inputs_of,
    missing,
    prepare,
    prepare_linear,
    verify_linear,
    version,
)
from .report import BenchResult, Measurement
from .timer import Runner, Timer, host_times, take_turns
from .truth import Truth, copy_of, tensors_of, verify

AnyCell = Cell | LinearCell


def bench(
    todo: Sequence[AnyCell] | None = None,
    *,
    runs: int = 30,
    seed: int | None = None,
    peers: Iterable[str] | None = None,
    jobs: int = 1,
    progress: Callable[..., Iterable] | None = None,
    command: str = "cupynorm.bench.measure.bench()",
) -> BenchResult:
    """Measure cupynorm and its peers on the current GPU.

    todo: from cells() and linear_cells(), by default the widths of cells(). runs: samples of each
    library in each cell. seed: of the random data, fresh if None. peers: names of PEERS, by default
    all that can run. jobs: processes that compile all kernels ahead, into caches on disk; 1
    compiles each in its turn. progress: wraps the cells, as tqdm does. command: that made the
    result.

    Returns a BenchResult: prints as tables. After the first cell, an interrupt (Ctrl-C) or a
    failure of cupynorm ends the run. The result then has what was measured, and is not ok.
    Raises ValueError without a GPU and for unknown names, MissingLibraryError without CuPy, and
    what cupynorm raises in the first cell.
    """
    todo = cells() if todo is None else list(todo)
    unknown = [name for name in peers or () if name not in PEERS]
    if unknown:
        raise ValueError(f"peers has {unknown[0]!r}; expected some of {', '.join(PEERS)}")
    check_runs(runs)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    progress = progress or (lambda items, **_: items)
    wanted = dict.fromkeys((OURS, *(PEERS if peers is None else peers)))
    absent = {name: why for name in wanted if (why := missing(name))}
    names = [name for name in wanted if name not in absent]
    if jobs > 1:
        context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
        with concurrent.futures.ProcessPoolExecutor(min(jobs, len(todo)) or 1, context) as pool:
            tried = [pool.submit(_try_once, cell, names, seed) for cell in todo]
            for each in progress(tried, desc="compiling", unit="task"):
                each.exception()  # of a process that died: the measurement meets it again
    timer = Timer.on_gpu()
    versions = {name: version(name) for name in names if name != OURS}
    settings = {"runs": runs, "seed": seed, "eps": EPS, "command": command}
    found: list[Measurement] = []
    try:
        for at, cell in enumerate(progress(todo, desc="measuring", unit="cell")):
            found.append(measure_cell(cell, names, timer, runs, seed + 8 * at))
            timer.num_flushes.clear()
            torch.cuda.empty_cache()
    except (KeyboardInterrupt, Exception) as failure:  # minutes of measurements are kept
        if not found:
            raise
        settings["stopped"] = f"after {len(found)} of {len(todo)} cells: {first_line(failure)}"
    return BenchResult(environment() | {"peers": versions}, settings, found, absent)


def check_runs(runs: int) -> None:
    """Raises ValueError for no runs and without a GPU, MissingLibraryError without CuPy."""
    if runs < 1:
        raise ValueError(f"runs is {runs}; expected 1 or more")
    nvrtc.cupy()
    if not has_gpu():
        raise ValueError(
            "the benchmark measures a GPU and none was found; python -m cupynorm check needs none"
        )


def measure_cell(
    cell: AnyCell, names: Sequence[str], timer: Any, runs: int, seed: int, device: str = "cuda"
) -> Measurement:
    """One cell, by the libraries of these names that have its kind."""
    is_linear, strategy = isinstance(cell, LinearCell), ""
    tensors = (inputs_of if is_linear else tensors_of)(cell, seed, device)
    if not is_linear:
        truth, planned = Truth(cell, tensors, seed), plan_of(cell)
        strategy = planned.strategy

    def prepared(name: str) -> tuple[Runner, tuple[float, str | None]]:
        if is_linear:
            runner = prepare_linear(name, cell, tensors)
            return runner, verify_linear(cell, tensors, runner.call())
        runner = prepare(name, cell, tensors)
        # Kernels of other libraries, and welford's, subtract a rounded mean.
        rounded_mean = name != OURS or planned.statistics == "welford"
        return runner, verify(runner, truth, rounded_mean=rounded_mean)

    runners, errors, faults = {COPY: copy_of(cell.num_bytes, tensors.x)}, {}, {}
    for name in names:
        peer = PEERS[name]
        if not (peer.linear and cell.format in peer.formats if is_linear else peer.norm):
            continue
        try:
            runner, (error, wrong) = prepared(name)
            timer.sample(runner)
        except Exception as failure:  # a failing peer must not end the run
            if name == OURS:
                raise
            faults[name] = f"{name} could not run: {first_line(failure)}"
            continue
        runners[name], errors[name] = runner, error
        if wrong:
            faults[name] = f"{name} is off: {wrong}"
    return Measurement(cell, strategy, take_turns(timer, runners, runs), errors, faults)


def plan_of(cell: Cell, device: Any = None, **options: Any) -> Any:
    """Our Plan of a cell, on the current GPU by default. options: strategy and tile.

    Raises ValueError for a tile that does not fit.
    """
    names = ("norm", "direction", "out_dtype", "scale", "amax", "residual")
    options |= {name: getattr(cell, name) for name in names}
    options |= {"device": device or launch.current_device(), "weight_dtype": cell.parameters}
    options["bias_dtype"] = cell.parameters if cell.norm == "layer_norm" else None
    return plan(cell.num_cols, cell.num_rows, cell.dtype, **options)


def _try_once(cell: AnyCell, names: Sequence[str], seed: int) -> None:
    """Runs each of these libraries once on a cell. Errors are left to the measurement."""
    for name in names:
        with suppress(Exception):
            if not missing(name):
                measure_cell(cell, [name], _Untimed(), 0, seed)


class _Untimed:
    """A timer that only runs a call."""

    def sample(self, runner: Runner) -> float:
        runner.call()
        torch.cuda.synchronize()
        return 0.0


def host(
    norms: Sequence[str] = ("layer_norm",),
    dtypes: Sequence[str] = ("bfloat16",),
    *,
    shapes: Sequence[tuple[int, int]] = ((4, 1024), (128, 4096)),
    rounds: int = 200,
    peers: Iterable[str] | None = None,
    progress: Callable[..., Iterable] | None = None,
    device: str = "cuda",
) -> dict[str, dict[str, float]]:
    """Microseconds of the host in an eager call, by case and library: functions and modules.

    Cases: forward without gradients; forward that autograd records; that and its backward.
    shapes: (num_rows, num_cols), small ones, on which the GPU keeps up. rounds: of 8 calls each.
    peers, progress: as for bench.
    """
    wanted = dict.fromkeys((OURS, *(PEERS if peers is None else peers)))
    names = [name for name in wanted if PEERS[name].norm and not (name != OURS and missing(name))]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found: dict[str, dict[str, float]] = {}
    progress = progress or (lambda items, **_: items)
    cases = list(product(norms, dtypes, shapes, (False, True)))
    for norm, dtype, (num_rows, num_cols), record in progress(cases, desc="timing", unit="case"):
        cell = Cell(norm, "forward", dtype, num_rows, num_cols)
        tensors = tensors_of(cell, 0, device)
        calls = {}
        for name in names:
            with suppress(Exception):  # a peer that fails has no time
                call = prepare(name, cell, tensors, record=record).call
                call()
                calls[name] = call
        kind = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}[norm]
        for library, package in ((OURS, modules), ("nn", torch.nn)):  # as a model calls them
            module = getattr(package, kind)(num_cols, device=device, dtype=tensors.x.dtype)
            x = tensors.x.detach().requires_grad_(record)
            calls[f"{library}.{kind}"] = partial(module.requires_grad_(record), x)
        case = f"{norm} {num_rows} x {num_cols} {dtype}, forward"
        timed = {case + ", recorded" * record: calls}
        if record:
            both = {name: partial(_both, call, tensors.x) for name, call in calls.items()}
            timed[f"{case} and backward"] = both
        for case, calls in timed.items():
            found[case] = host_times(calls, rounds, wait)
            with enabled():  # torch's module, on our kernels
                found[case] |= host_times({"enabled": calls[f"nn.{name}"]}, rounds, wait)
    return found


def _both(call: Callable[[], torch.Tensor], dy: torch.Tensor) -> None:
    """A call and its backward; gradients are added to those of the leaves."""
    call().backward(dy)
