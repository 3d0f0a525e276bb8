"""The benchmark: kernel time of cupynorm and its peers on one GPU, beside a copy of the same bytes.

bytes     what any implementation must move. Forward reads x and writes y; backward reads x and dy
          and writes dx. A forward by itself has no gradients: a library may or may not write
          statistics.
copy      a device-to-device copy that reads half of those bytes and writes the other half
time      of cupynorm.bench.timer: kernel time, with a cold L2 cache. Libraries take turns, so a
          drift of the clocks affects all
correct   once for each cell and library: outputs are NaN before the call, and sampled rows are
          compared with float64. The whole check is cupynorm.check; here a fast kernel that is
          wrong must not win
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch

from ..dispatch.problem import cols_of_scale
from ..dtypes import DTYPES, EIGHT_BITS, compute_dtype
from ..gpu import launch, nvrtc
from ..gpu.nvrtc import environment, has_gpu
from ..nn import modules
from ..nn.enable import enabled
from ..plans import plan
from ..verify.bounds import expect
from ..verify.cases import Case, Problem
from ..verify.results import judge
from .cells import COPY, EPS, OURS, Cell, LinearCell, cells
from .peers import (
    PEERS,
    Tensors,
    copy_of,
    first_line,
    float64,
    inputs_of,
    missing,
    prepare,
    prepare_linear,
    tensors_of,
    verify_linear,
    version,
)
from .report import BenchResult, Measurement
from .timer import Runner, Timer, host_times, take_turns

AnyCell = Cell | LinearCell
_SAMPLED_ROWS = 64
_SAMPLED_ELEMENTS = 2**18  # float64 on the host takes a tenth of a second for these


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
    wanted = chosen(peers)
    check_runs(runs)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    progress = progress or (lambda items, **_: items)
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


def chosen(peers: Iterable[str] | None) -> list[str]:
    """Names of libraries, cupynorm first; None for all. Raises ValueError for an unknown one."""
    wanted = dict.fromkeys((OURS, *(PEERS if peers is None else peers)))
    for name in wanted:
        if name not in PEERS:
            raise ValueError(f"peers has {name!r}; expected some of {', '.join(PEERS)}")
    return list(wanted)


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
    names = [name for name in chosen(peers) if PEERS[name].norm and not missing(name)]
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
        calls["enabled"] = calls[f"nn.{kind}"]  # on our kernels
        case = f"{norm} {num_rows} x {num_cols} {dtype}, forward"
        timed = {case + ", recorded" * record: calls}
        if record:
            both = {name: partial(_both, call, tensors.x) for name, call in calls.items()}
            timed[f"{case} and backward"] = both
        for case, calls in timed.items():
            found[case] = host_times(calls, rounds, wait, within={"enabled": enabled})
    return found


def _both(call: Callable[[], torch.Tensor], dy: torch.Tensor) -> None:
    """A call and its backward; gradients are added to those of the leaves."""
    call().backward(dy)


# Whether a library is right.


class Truth:
    """float64 results of sampled rows of a cell, and the judgement of a library's outputs."""

    def __init__(self, cell: Cell, tensors: Tensors, seed: int) -> None:
        """seed: of the choice of rows; the first and the last are always taken."""
        self.cell, self.is_given = cell, tensors.scale is not None
        count = max(1, min(_SAMPLED_ROWS, cell.num_rows, _SAMPLED_ELEMENTS // cell.num_cols))
        drawn = np.random.default_rng(seed).choice(cell.num_rows, count, replace=False)
        self.rows = np.unique([0, *drawn[2:], cell.num_rows - 1])
        # A y of 8 bits is judged before it is rounded to them.
        y = compute_dtype(cell.dtype).name if cell.scale else cell.y
        bias = None if tensors.bias is None else cell.parameters
        shape = (cell.norm, len(self.rows), cell.num_cols, cell.dtype)
        case = Case(*shape, y, cell.parameters, bias, residual=cell.residual, eps=EPS)
        x = self._sampled(tensors.x)
        dy, is_forward = self._sampled(tensors.dy), tensors.dy is None
        weight, bias = float64(tensors.weight), float64(tensors.bias)
        self.dsum = self._sampled(tensors.dsum)
        self.problem = Problem(case, x, dy, weight, bias, self._sampled(tensors.residual))
        options = {"forward_only": is_forward}
        self.expected = cache(lambda mean: expect(self.problem, rounded_mean=mean, **options))

    def _sampled(self, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else float64(tensor[torch.from_numpy(self.rows)])

    def judge(self, outputs: Mapping[str, Any], *, rounded_mean: bool) -> tuple[float, str | None]:
        """(largest error in units of what is allowed, a sentence about what is wrong or None).

        rounded_mean: whether the library subtracts a mean that is rounded to float32.
        """
        worst = 0.0
        for name in [each for each in ("y", "sum", "dx") if each in outputs]:
            dtype = self.cell.y if name == "y" else self.cell.dtype
            if outputs[name].dtype != getattr(torch, dtype):
                return np.nan, f"{name} is {outputs[name].dtype}; expected {dtype}"
            expected, allowed = self.expected(rounded_mean)[name]
            got = self._sampled(outputs[name])
            if name == "y" and self.cell.scale:
                got, factors, wrong = self._dequantized(got, outputs["scale_inv"])
                if wrong:
                    return np.nan, wrong
                format = EIGHT_BITS[dtype]
                of_y = (np.abs(expected) + allowed) * format.half_ulp
                allowed = allowed + np.maximum(of_y, factors * (format.smallest / 2))
            if name == "dx" and self.dsum is not None:
                # A library may round dx before it adds dsum, and again after it.
                of_roundings = (np.abs(expected) + np.abs(self.dsum)) * DTYPES[dtype].half_ulp
                expected, allowed = expected + self.dsum, allowed + of_roundings
            found = judge(self.cell, name, got, expected, allowed)
            if not found.ok:
                row, col = found.where
                right = f"expected {found.expected:.6g} within {found.allowed:.2g}"
                where = f"row {self.rows[row]}, col {col}"
                error = np.inf if np.isnan(found.error) else found.error
                return error, f"{name} is {found.got:.6g} at {where}; {right}"
            worst = max(worst, found.error)
        return worst, None

    def _dequantized(self, data: np.ndarray, scales: Any) -> tuple[np.ndarray, Any, str | None]:
        """Values of a y of 8 bits, the scale of each, and what is wrong with them or None."""
        scale, num_cols = self.cell.scale, self.cell.num_cols
        largest = EIGHT_BITS[self.cell.y].largest
        cols = cols_of_scale(scale, num_cols)
        factors = self._sampled(scales) if cols else float64(scales).reshape(1, 1)
        factors = np.repeat(factors, cols or num_cols, axis=1)[:, :num_cols]
        if factors.shape[1] < num_cols:
            return data, 1, f"scale_inv has {scales.shape[-1]} scales of a row; expected more"
        most = np.abs(data).max(axis=1).min()
        if not self.is_given and scale != "tensor" and most < largest:
            return data, 1, f"scale_inv makes {most:.6g} of a largest value; expected {largest}"
        return data * factors, factors, None


def verify(runner: Runner, truth: Truth, *, rounded_mean: bool) -> tuple[float, str | None]:
    """Fills the outputs with NaN, runs once and judges, as Truth.judge does.

    A library that allocates its outputs gets the same memory again from its allocator.
    """

    def run() -> dict[str, torch.Tensor]:
        if runner.before:
            runner.before()
        return runner.outputs(runner.call())

    for output in run().values():
        output.detach().view(torch.uint8).fill_(0xFF)
    output = None  # the allocator can only hand out memory that nobody holds
    return truth.judge(run(), rounded_mean=rounded_mean)
