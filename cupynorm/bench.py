"""The benchmark: kernel time of cupynorm and its peers on one GPU, as a share of a copy of the same bytes.

    bytes     what any implementation must move: forward reads x and writes y, backward reads x and dy and writes dx
    copy      a device-to-device copy that reads half of those bytes and writes the other half, timed in the same cell
    time      CUDA events around one call. Before each a buffer larger than the L2 cache is written, and for long enough that
              the host has enqueued the whole call before the GPU reaches it: no host time is in the result. A run in which the
              host was late is thrown away and repeated behind a longer write.
    runs      taken in turns, one of each library after the other: what drifts, drifts for all
    correct   once for each cell and library: outputs are NaN before the call, no NaN may be left, and sampled rows are compared
              with float64 in units of what cupynorm.gradient_check allows

A peer is one entry of PEERS.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import __version__, arrays, dispatch, gradient_check, launch, norm, nvrtc
from .dtypes import DTYPES, decode

COLS = tuple(2**exponent for exponent in range(5, 19))
DIRECTIONS = ("forward", "backward")
EPS = 1e-5
_COPY = "copy"
_OURS = "cupynorm"
_MARKERS = ("<!-- bench -->", "<!-- /bench -->")
_SAMPLED_ROWS = 64
_SAMPLED_ELEMENTS = 2**20  # float64 on the host takes a second for these
_FLUSH_BYTES = 2**28
_MAX_FLUSHES = 256


@dataclass(frozen=True)
class Cell:
    """One problem that is timed: norm, direction, dtype of all tensors, x as [num_rows, num_cols]."""

    norm: str
    direction: str
    dtype: str
    num_rows: int
    num_cols: int

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation must move."""
        return (2 if self.direction == "forward" else 3) * self.num_rows * self.num_cols * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.norm} {self.direction} {self.dtype} {self.num_rows} x {self.num_cols}"


# What is measured, and how it is shown: no GPU needed.


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


@dataclass(frozen=True)
class Measurement:
    """One cell. samples: microseconds of each run, for "copy", "cupynorm" and each peer that ran.

    errors: the worst sampled element of each library, in units of what is allowed. faults: name -> sentence for a library
    that is off, or could not run.
    """

    cell: Cell
    strategy: str
    samples: dict[str, list[float]]
    errors: dict[str, float]
    faults: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Microseconds."""
        return quartiles(self.samples[name])[1]

    def spread(self, name: str) -> float:
        """Distance between the quartiles, as a share of the median."""
        low, middle, high = quartiles(self.samples[name])
        return (high - low) / middle

    def gigabytes_per_second(self, name: str) -> float:
        return self.cell.num_bytes / self.median(name) / 1e3

    def share(self, name: str) -> float:
        """Speed as a share of the copy's."""
        return self.median(_COPY) / self.median(name)

    @property
    def fastest(self) -> frozenset[str]:
        """The fastest right library, and all that are behind it by less than half of both spreads together."""
        names = [name for name in self.samples if name != _COPY and name not in self.faults]
        if not names:
            return frozenset()
        best = min(names, key=self.median)

        def behind(name: str) -> bool:
            margin = (self.spread(name) * self.median(name) + self.spread(best) * self.median(best)) / 2
            return self.median(name) - self.median(best) > margin

        return frozenset(name for name in names if not behind(name))


@dataclass(frozen=True)
class BenchResult:
    """All measurements of one run. Prints as tables; true if cupynorm was right in every cell."""

    environment: dict[str, str | None]
    settings: dict[str, Any]
    measurements: list[Measurement]
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not any(_OURS in measurement.faults for measurement in self.measurements)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def libraries(self) -> list[str]:
        """cupynorm first, then the peers that ran in any cell."""
        names = [name for measurement in self.measurements for name in (*measurement.samples, *measurement.faults)]
        return [_OURS, *dict.fromkeys(name for name in names if name not in (_COPY, _OURS))]

    def tables(self) -> dict[tuple[str, str, str], list[Measurement]]:
        """(norm, dtype, direction) -> its measurements."""
        tables: dict[tuple[str, str, str], list[Measurement]] = {}
        for measurement in self.measurements:
            cell = measurement.cell
            tables.setdefault((cell.norm, cell.dtype, cell.direction), []).append(measurement)
        return tables

    def __str__(self) -> str:
        lines = [self.headline(), self.method()]
        for (norm_name, dtype, direction), measurements in self.tables().items():
            header = ["num_cols", "num_rows", "strategy", "us", "copy GB/s"]
            for name in self.libraries:
                header += [f"{name} GB/s", "share", "spread", "error"]
            rows = [header]
            for measured in measurements:
                cell = measured.cell
                row = [str(cell.num_cols), str(cell.num_rows), measured.strategy, f"{measured.median(_OURS):.1f}"]
                row.append(f"{measured.gigabytes_per_second(_COPY):.0f}")
                for name in self.libraries:
                    row += self._cells(measured, name)
                rows.append(row)
            lines += ["", f"{norm_name} {direction}, {dtype}", *_columns(rows)]
        lines += [
            "",
            "* the fastest, or behind it by less than the spread; share: of the copy; error: in units of what is allowed",
        ]
        faults = [f"{measured.cell}: {text}" for measured in self.measurements for text in measured.faults.values()]
        missing = [f"{name} was not measured: {why}" for name, why in self.missing.items()]
        return "\n".join([*lines, *faults, *missing])

    @staticmethod
    def _cells(measured: Measurement, name: str) -> list[str]:
        if name not in measured.samples:
            return ["-", "-", "-", "-"]
        mark = "*" if name in measured.fastest else "OFF" if name in measured.faults else ""
        speed = f"{measured.gigabytes_per_second(name):.0f}{mark}"
        return [speed, f"{measured.share(name):.2f}", f"{measured.spread(name):.1%}", f"{measured.errors[name]:.2f}"]

    def headline(self) -> str:
        """GPU, versions and date in one line."""
        found = self.environment
        shown = [found.get("gpu")]
        for name, label in (("driver", "driver"), ("cuda_runtime", "CUDA"), ("cupy", "CuPy"), ("torch", "torch")):
            if found.get(name):
                shown.append(f"{label} {found[name]}")
        shown += [f"cupynorm {found.get('cupynorm')}", str(found.get("date"))[:10]]
        return ", ".join(filter(None, shown))

    def method(self) -> str:
        """How the numbers came about, in a sentence."""
        return (
            f"Medians of {self.settings['runs']} runs on random data; kernel time by CUDA events, the L2 cache flushed before "
            "each run by a write during which the host enqueues the call"
        )

    def markdown(self) -> str:
        """The README's table: for each norm and dtype one row per num_cols, with GB/s and the share of the copy."""
        lines = [f"{self.headline()}. {self.method()}. GB/s (share of a copy of the same bytes), the fastest in bold."]
        kinds = dict.fromkeys((norm_name, dtype) for norm_name, dtype, _ in self.tables())
        directions = [name for name in DIRECTIONS if any(name == key[2] for key in self.tables())]
        for norm_name, dtype in kinds:
            header = ["num_cols"]
            for direction in directions:
                header += [f"{direction}: strategy", *self.libraries]
            if len(kinds) > 1:
                lines += ["", f"{norm_name}, {dtype}:"]
            lines += [
                "",
                _markdown_row(header),
                _markdown_row(["---:" if name in self.libraries else "---" for name in header]),
            ]
            by_cols: dict[int, dict[str, Measurement]] = {}
            for direction in directions:
                for measured in self.tables().get((norm_name, dtype, direction), []):
                    by_cols.setdefault(measured.cell.num_cols, {})[direction] = measured
            for num_cols, found in by_cols.items():
                row = [f"{num_cols:,}"]
                for direction in directions:
                    measured = found.get(direction)
                    row.append(measured.strategy if measured else "")
                    row += [_markdown_cell(measured, name) for name in self.libraries]
                lines.append(_markdown_row(row))
        lines += [f"\n{name} was not measured: {why}." for name, why in self.missing.items()]
        lines += ["", f"Made by `{self.settings['command']}`."]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything, with all raw samples."""
        measurements = [
            {
                **asdict(measured.cell),
                "num_bytes": measured.cell.num_bytes,
                "strategy": measured.strategy,
                "microseconds": measured.samples,
                "errors": {name: error if np.isfinite(error) else None for name, error in measured.errors.items()},
                "faults": measured.faults,
            }
            for measured in self.measurements
        ]
        content = {"environment": self.environment, "settings": self.settings, "missing": self.missing, "cells": measurements}
        return json.dumps(content, indent=1, allow_nan=False)


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(f"{text:>{width}}" for text, width in zip(row, widths)).rstrip() for row in rows]


def _markdown_row(row: list[str]) -> str:
    return f"| {' | '.join(row)} |"


def _markdown_cell(measured: Measurement | None, name: str) -> str:
    if measured is None or name not in measured.samples:
        return "-"
    if name in measured.faults:
        return "off"
    text = f"{measured.gigabytes_per_second(name):,.0f} ({measured.share(name):.2f})"
    return f"**{text}**" if name in measured.fastest else text


def rewrite_readme(text: str, table: str) -> str:
    """A README's text with what lies between its bench markers replaced. ValueError if it does not have them once, in order."""
    start, end = _MARKERS
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"README.md needs the markers {start} and {end}, each once and in this order, around the table")
    before, after = text.partition(start)[0], text.partition(end)[2]
    return f"{before}{start}\n\n{table.strip()}\n\n{end}{after}"


def environment() -> dict[str, str | None]:
    """GPU, driver and versions; None for what is not there. No torch is imported for it."""
    found: dict[str, str | None] = dict.fromkeys(
        ("gpu", "driver", "cuda_runtime", "nvrtc", "cupy", "torch"), None
    )  # in this order, whatever is there
    try:
        cupy = nvrtc.cupy()
        found["cupy"] = cupy.__version__
        version = cupy.cuda.runtime.runtimeGetVersion()
        found["cuda_runtime"] = f"{version // 1000}.{version % 1000 // 10}"
        found["nvrtc"] = ".".join(map(str, nvrtc.version()))
    except Exception:  # whichever library is absent or does not load: what was found until then is the answer
        pass
    if gradient_check.has_gpu():
        runtime = nvrtc.cupy().cuda.runtime
        name = runtime.getDeviceProperties(runtime.getDevice())["name"]
        found["gpu"] = name.decode() if isinstance(name, bytes) else name
        found["driver"] = _driver()
    try:
        found["torch"] = getattr(sys.modules.get("torch"), "__version__", None) or importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pass
    found["torch"] = found["torch"] and str(found["torch"])
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {**found, "numpy": np.__version__, "python": platform.python_version(), "cupynorm": __version__, "date": date}


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        return re.search(r"\d+\.\d+(\.\d+)?", text)[0]
    except (OSError, TypeError):  # not Linux, or worded in another way
        version = nvrtc.cupy().cuda.runtime.driverGetVersion()
        return f"for CUDA {version // 1000}.{version % 1000 // 10}"


# Timing.


class Timer:
    """Times calls on the GPU. flush(): enqueues one write of more than the L2 cache. start, stop: CUDA events, as CuPy's.

    elapsed(start, stop): milliseconds between two events.
    """

    def __init__(self, flush: Callable[[], None], start: Any, stop: Any, elapsed: Callable[[Any, Any], float]) -> None:
        self.flush, self.start, self.stop, self.elapsed = flush, start, stop, elapsed
        self.num_flushes: dict[Callable, int] = {}  # how many each call needs for the host to stay ahead

    def sample(self, call: Callable[[], Any]) -> float:
        """Microseconds of one call. RuntimeError if the host never runs ahead, as with a call that waits for the GPU."""
        num_flushes = self.num_flushes.get(call, 1)
        while num_flushes <= _MAX_FLUSHES:
            for _ in range(num_flushes):
                self.flush()
            self.start.record()
            call()
            self.stop.record()
            ahead = not self.start.done
            self.stop.synchronize()
            if ahead:
                self.num_flushes[call] = num_flushes
                return self.elapsed(self.start, self.stop) * 1e3
            num_flushes *= 2
        raise RuntimeError("the host does not run ahead of the GPU: the call waits for it, so its kernel time is not measured")

    @classmethod
    def on_gpu(cls) -> Timer:
        cupy = nvrtc.cupy()
        runtime = cupy.cuda.runtime
        l2_bytes = runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
        buffer = cupy.empty(max(_FLUSH_BYTES, 4 * l2_bytes), cupy.uint8)

        def flush() -> None:
            runtime.memsetAsync(buffer.data.ptr, 0, buffer.nbytes, cupy.cuda.get_current_stream().ptr)

        return cls(flush, cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.get_elapsed_time)


def take_turns(timer: Timer, calls: Mapping[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    """name -> microseconds of each run, the calls taken in turns after two that only warm up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 2):
        for name, call in calls.items():
            microseconds = timer.sample(call)
            if run >= 2:
                samples[name].append(microseconds)
    return samples


# Tensors on the GPU. An array's bits, in its dtype's storage dtype, serve where CuPy does not compute in that dtype.


class Tensors(NamedTuple):
    """A cell's CuPy arrays. x, dy, y: [num_rows, num_cols]; weight, bias: [num_cols], bias None for rms_norm."""

    x: Any
    dy: Any
    y: Any
    weight: Any
    bias: Any


def bits(array: Any, dtype: str) -> Any:
    """The CuPy array in storage dtype that shares the memory of a CuPy array or torch tensor."""
    cupy = nvrtc.cupy()
    if arrays.is_torch(array):
        torch = sys.modules["torch"]
        array = array.detach()
        array = cupy.from_dlpack(array.view(torch.int16) if dtype == "bfloat16" else array)
    if not array.flags.c_contiguous:
        raise ValueError(f"an output has strides {array.strides} for shape {array.shape}; expected it to be contiguous")
    return cupy.ndarray(array.shape, DTYPES[dtype].storage, memptr=array.data)


# splitmix64 and Box-Muller: numbers that depend on the seed and the index alone, and no cuRAND needed.
_NORMAL = """
    unsigned long long z = seed + 0x9E3779B97F4A7C15ULL * (unsigned long long)(i + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    float radius = sqrtf(-2.0f * logf(((float)(z >> 40) + 0.5f) * 5.9604645e-8f));
    float value = center + spread * radius * cospif((float)(z & 0xFFFFFF) * 1.1920929e-7f);
"""
_ROUND_TO_BFLOAT16 = "unsigned int u = __float_as_uint(value); out = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;"


def _fill(array: Any, dtype: str, seed: int, center: float = 0.0, spread: float = 1.0) -> None:
    """Fills a CuPy array with normal random values."""
    cupy = nvrtc.cupy()
    bfloat16 = dtype == "bfloat16"
    store = _ROUND_TO_BFLOAT16 if bfloat16 else "out = value;"
    kernel = cupy.ElementwiseKernel(
        "uint64 seed, float32 center, float32 spread", "T out", _NORMAL + store, f"cupynorm_bench_normal_{int(bfloat16)}"
    )
    mixed = int(np.random.default_rng(seed).integers(2**63))
    kernel(np.uint64(mixed), np.float32(center), np.float32(spread), bits(array, dtype))


def _tensors(cell: Cell, seed: int) -> Tensors:
    device = nvrtc.cupy().cuda.Device().id

    def make(shape: tuple[int, ...]) -> Any:
        return arrays.CuPyLibrary.empty(shape, cell.dtype, device)

    shape = (cell.num_rows, cell.num_cols)
    tensors = Tensors(
        make(shape), make(shape), make(shape), make(shape[1:]), make(shape[1:]) if cell.norm == "layer_norm" else None
    )
    _fill(tensors.x, cell.dtype, seed, 0.5, 2.0)
    _fill(tensors.dy, cell.dtype, seed + 1)
    _fill(tensors.weight, cell.dtype, seed + 2, 1.0, 0.5)
    if tensors.bias is not None:
        _fill(tensors.bias, cell.dtype, seed + 3)
    return tensors


def _copy(cell: Cell, tensors: Tensors) -> Callable[[], None]:
    """A copy that reads and writes num_bytes together, of the same random data."""
    cupy = nvrtc.cupy()
    num_bytes = cell.num_bytes // 2
    source, target = cupy.empty(num_bytes, cupy.uint8), cupy.empty(num_bytes, cupy.uint8)
    x, dy = (bits(array, cell.dtype).view(cupy.uint8).reshape(-1) for array in (tensors.x, tensors.dy))
    source[: x.size] = x[:num_bytes]
    source[x.size :] = dy[: max(0, num_bytes - x.size)]

    def call() -> None:
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, num_bytes, 3, stream)  # 3: device to device

    return call


# The libraries.


class Runner(NamedTuple):
    """One library on one cell. call: enqueues the work on the current stream and returns the library's own result.

    outputs: what a call returned, as a dict of arrays: y, or dx, dweight and dbias (those that there are).
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """A library to measure. missing: why it cannot run here, or None. prepare: its Runner for a cell and its tensors."""

    missing: Callable[[], str | None]
    prepare: Callable[[Cell, Tensors], Runner]


def _prepare_ours(cell: Cell, tensors: Tensors) -> Runner:
    x, dy, y, weight, bias = tensors
    centered = cell.norm == "layer_norm"
    forward = norm.layer_norm_forward if centered else norm.rms_norm_forward
    if cell.direction == "forward":
        return Runner(lambda: forward(x, weight, bias, EPS, out=y), lambda result: {"y": result.y})
    saved = forward(x, weight, bias, EPS, out=y)
    gradients = ("dx", "dweight", "dbias") if centered else ("dx", "dweight")

    def backward() -> norm.Backward:
        if centered:
            return norm.layer_norm_backward(dy, x, saved.mean, saved.rstd, weight, gradients=gradients)
        return norm.rms_norm_backward(dy, x, saved.rstd, weight, gradients=gradients)

    return Runner(backward, lambda result: {name: getattr(result, name) for name in gradients})


def _torch_missing() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch could not be imported ({error})"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def _prepare_torch(cell: Cell, tensors: Tensors) -> Runner:
    import torch

    def tensor(array: Any) -> Any:
        if array is None:
            return None
        raw = bits(array, cell.dtype)
        if cell.dtype == "bfloat16":
            return torch.from_dlpack(raw.view("int16")).view(torch.bfloat16)
        return torch.from_dlpack(raw)

    x, dy, weight, bias = (tensor(array) for array in (tensors.x, tensors.dy, tensors.weight, tensors.bias))
    shape = [cell.num_cols]
    centered = cell.norm == "layer_norm"
    if cell.direction == "forward":
        if centered:
            return Runner(lambda: torch.nn.functional.layer_norm(x, shape, weight, bias, EPS), lambda y: {"y": y})
        return Runner(lambda: torch.nn.functional.rms_norm(x, shape, weight, EPS), lambda y: {"y": y})
    if centered:
        _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, EPS)
        backward = torch.ops.aten.native_layer_norm_backward
        names = ("dx", "dweight", "dbias")
        return Runner(
            lambda: backward(dy, x, shape, mean, rstd, weight, bias, [True, True, True]),
            lambda result: dict(zip(names, result)),
        )
    x.requires_grad_(True)
    weight.requires_grad_(True)
    y = torch.nn.functional.rms_norm(x, shape, weight, EPS)
    return Runner(
        lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True), lambda result: dict(zip(("dx", "dweight"), result))
    )


PEERS = {
    _OURS: Peer(lambda: None, _prepare_ours),
    "torch": Peer(_torch_missing, _prepare_torch),
}


# Correctness.


def _has_nan(array: Any, dtype: str) -> bool:
    """Whether any element of a CuPy array of bits is NaN, a part at a time to keep temporaries small."""
    cupy = nvrtc.cupy()
    flat = array.reshape(-1)
    for first in range(0, flat.size, 2**26):
        part = flat[first : first + 2**26]
        found = (part & 0x7FFF) > 0x7F80 if dtype == "bfloat16" else cupy.isnan(part)
        if bool(found.any()):
            return True
    return False


def verify(cell: Cell, tensors: Tensors, runner: Runner, seed: int, *, rounded_mean: bool) -> tuple[float, str | None]:
    """Poisons the outputs, runs once, compares. (worst error in units of what is allowed, what is wrong or None).

    A library that allocates its outputs is handed back the poisoned memory by its allocator.
    """
    cupy = nvrtc.cupy()
    result = runner.call()
    for output in runner.outputs(result).values():
        bits(output, cell.dtype).view(cupy.uint8).fill(0xFF)
    output = None
    del result
    result = runner.call()
    outputs = {name: bits(output, cell.dtype) for name, output in runner.outputs(result).items()}
    for name, output in outputs.items():
        if _has_nan(output, cell.dtype):
            return float("nan"), f"{name} holds NaN: not every element was written"

    num_sampled = max(1, min(_SAMPLED_ROWS, cell.num_rows, _SAMPLED_ELEMENTS // cell.num_cols))
    generator = np.random.default_rng([seed, cell.num_rows, cell.num_cols])
    chosen = np.sort(generator.choice(cell.num_rows, num_sampled, replace=False))

    def sampled(array: Any) -> np.ndarray:
        return np.stack([decode(bits(array, cell.dtype)[int(row)].get(), cell.dtype) for row in chosen])

    def whole(array: Any) -> np.ndarray | None:
        return None if array is None else decode(bits(array, cell.dtype).get(), cell.dtype)

    bias_dtype = None if tensors.bias is None else "same"
    case = gradient_check.Case(cell.norm, num_sampled, cell.num_cols, cell.dtype, bias=bias_dtype, eps=EPS)
    problem = gradient_check.Problem(case, sampled(tensors.x), sampled(tensors.dy), whole(tensors.weight), whole(tensors.bias))
    name = "y" if cell.direction == "forward" else "dx"
    (finding,) = gradient_check.judge_all(problem, {name: sampled(outputs[name])}, rounded_mean=rounded_mean)
    where = f"row {chosen[finding.where[0]]}, col {finding.where[1]}"
    wrong = f"{name} is {finding.got:.6g} at {where}; expected {finding.expected:.6g} within {finding.allowed:.2g}"
    return finding.error, None if finding.ok else wrong


# The run.


def cells(
    norms: Sequence[str], dtypes: Sequence[str], directions: Sequence[str], cols: Sequence[int], elements: int | None
) -> list[Cell]:
    """All cells, in the order in which they are shown. elements None: 512 MiB of x."""
    for label, names, known in (
        ("norm", norms, gradient_check.NORMS),
        ("dtype", dtypes, tuple(DTYPES)),
        ("direction", directions, DIRECTIONS),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{label} is {name!r}; expected {' or '.join(known)}")
        if not names:
            raise ValueError(f"no {label} is given; expected {' or '.join(known)}")
    if not cols or min(cols) < 1:
        raise ValueError(f"cols is {', '.join(map(str, cols)) or 'empty'}; expected widths of 1 or more")
    made = []
    for norm_name in norms:
        for dtype in dtypes:
            total = elements or 2**29 // DTYPES[dtype].itemsize
            if total < max(cols):
                raise ValueError(f"elements is {total}, less than one row of {max(cols)} columns; expected at least that many")
            made += [
                Cell(norm_name, direction, dtype, total // num_cols, num_cols) for direction in directions for num_cols in cols
            ]
    return made


def bench(
    *,
    norms: Sequence[str] = ("layer_norm",),
    dtypes: Sequence[str] = ("bfloat16",),
    directions: Sequence[str] = DIRECTIONS,
    cols: Sequence[int] = COLS,
    elements: int | None = None,
    runs: int = 30,
    seed: int | None = None,
    peers: Iterable[str] | None = None,
    progress: Callable[[Iterable], Iterable] | None = None,
    command: str = "cupynorm.bench.bench()",
) -> BenchResult:
    """Measure cupynorm and its peers on the current GPU, with weight (and bias for layer_norm), dweight and dbias.

    norms, dtypes, directions, cols: every combination is a cell. elements: of x, by default 2^28 (2^27 in float32, 2^26 in
    float64); num_rows = elements // num_cols. runs: samples of each library in each cell. seed: of the random data, fresh
    if None. peers: names of PEERS, by default all that can run. progress: wraps the cells, as tqdm does. command: what made
    the result, for the README.

    Returns a BenchResult, which prints as tables; microseconds are the GPU's, GB/s are 10^9 bytes a second.
    Raises ValueError without a GPU or for what is not known, MissingLibraryError without CuPy.
    """
    todo = cells(norms, dtypes, directions, cols, elements)
    if runs < 1:
        raise ValueError(f"runs is {runs}; expected 1 or more")
    unknown = [name for name in peers or () if name not in PEERS]
    if unknown:
        raise ValueError(f"peers has {unknown[0]!r}; expected some of {', '.join(PEERS)}")
    cupy = nvrtc.cupy()
    if not gradient_check.has_gpu():
        raise ValueError("the benchmark measures a GPU and none was found; python -m cupynorm check runs without one")
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    chosen = {name: PEERS[name] for name in (_OURS, *(peers if peers is not None else PEERS))}
    missing = {name: why for name, peer in chosen.items() if (why := peer.missing())}
    chosen = {name: peer for name, peer in chosen.items() if name not in missing}
    found = environment()
    timer = Timer.on_gpu()
    measurements = []
    for at, cell in enumerate(progress(todo) if progress else todo):
        measurements.append(_measure(cell, chosen, timer, runs, seed + 4 * at))
        timer.num_flushes.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
    settings = {"runs": runs, "seed": seed, "eps": EPS, "elements": elements, "command": command}
    return BenchResult(found, settings, measurements, missing)


def _measure(cell: Cell, peers: Mapping[str, Peer], timer: Timer, runs: int, seed: int) -> Measurement:
    tensors = _tensors(cell, seed)
    device = launch.current_device()
    bias_dtype = None if tensors.bias is None else "same"
    plan = dispatch.plan(
        cell.num_cols, cell.num_rows, cell.dtype, norm=cell.norm, direction=cell.direction, device=device, bias_dtype=bias_dtype
    )  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {_COPY: _copy(cell, tensors)}
    errors: dict[str, float] = {}
    faults: dict[str, str] = {}
    for name, peer in peers.items():
        # Other libraries' kernels, and welford, subtract the mean as it is rounded.
        rounded_mean = name != _OURS or plan.statistics == "welford"
        try:
            runner = peer.prepare(cell, tensors)
            errors[name], wrong = verify(cell, tensors, runner, seed, rounded_mean=rounded_mean)
            timer.sample(runner.call)
        except Exception as error:  # a peer that fails, in whichever way, must not end the run
            if name == _OURS:
                raise
            faults[name] = f"{name} could not run: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
            errors.pop(name, None)
            continue
        if wrong:
            faults[name] = f"{name} is off: {wrong}"
        calls[name] = runner.call
    return Measurement(cell, plan.strategy, take_turns(timer, calls, runs), errors, faults)
