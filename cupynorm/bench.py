"""The benchmark: kernel time of cupynorm and its peers on one GPU, as a share of a copy of the same bytes.

    bytes     what any implementation must move: forward reads x and writes y, backward reads x and dy and writes dx. A forward
              by itself is the call that nothing is to differentiate: whether it writes statistics is the library's affair
    copy      a device-to-device copy that reads half of those bytes and writes the other half, timed in the same cell
    time      CUDA events around one call. Before each a buffer larger than the L2 cache is written, and for long enough that
              the host has enqueued the whole call before the GPU reaches it: no host time is in the result. A run in which the
              host was late is thrown away and repeated behind a longer write.
    runs      taken in turns, one of each library after the other: what drifts, drifts for all
    correct   once for each cell and library: outputs are NaN before the call, no NaN may be left, and sampled rows are compared
              with float64 in units of what cupynorm.gradient_check allows, and half a step of the format for 8-bit floats;
              their scales must use it up

What is measured: cupynorm.bench_cells; by whom: cupynorm.peers; how it is shown and compared: cupynorm.bench_report.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import importlib.metadata
import multiprocessing
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, arrays, dispatch, gradient_check, launch, nvrtc
from .bench_cells import COPY, EPS, OURS, Cell, cells
from .bench_report import BenchResult, Measurement
from .dtypes import DTYPES, ELEMENTS, FLOAT8S, compute_dtype, decode
from .peers import PEERS, Runner, Tensors, bits, fault, first_line, missing, options_of, prepare, version
from .problem import cols_of_scale
from .reference import fp8

_SAMPLED_ROWS = 64
_SAMPLED_ELEMENTS = 2**18  # float64 on the host takes a tenth of a second for these
_FLUSH_BYTES = 2**28
_MAX_FLUSHES = 256
_MOST_Y = 64.0  # which a scale that is given leaves room for: 6 sigma of x_hat times 5 of weight are 21


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

    def sample(self, runner: Runner) -> float:
        """Microseconds of one call. RuntimeError if the host never runs ahead, as with a call that waits for the GPU."""
        num_flushes = self.num_flushes.get(runner.call, 1)
        while num_flushes <= _MAX_FLUSHES:
            if runner.before:
                runner.before()
            for _ in range(num_flushes):
                self.flush()
            self.start.record()
            runner.call()
            self.stop.record()
            ahead = not self.start.done
            self.stop.synchronize()
            if ahead:
                self.num_flushes[runner.call] = num_flushes
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


def take_turns(timer: Timer, runners: Mapping[str, Runner], runs: int) -> dict[str, list[float]]:
    """name -> microseconds of each run, the libraries taken in turns after two rounds that only warm up."""
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for run in range(runs + 2):
        for name, runner in runners.items():
            microseconds = timer.sample(runner)
            if run >= 2:
                samples[name].append(microseconds)
    return samples


# Tensors on the GPU. An array's bits, in its dtype's storage dtype, serve where CuPy does not compute in that dtype.


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


def _fill(array: Any, seed: int, center: float = 0.0, spread: float = 1.0) -> None:
    """Fills a CuPy array with normal random values."""
    cupy = nvrtc.cupy()
    bfloat16 = arrays.dtype_name(array) == "bfloat16"
    store = _ROUND_TO_BFLOAT16 if bfloat16 else "out = value;"
    kernel = cupy.ElementwiseKernel(
        "uint64 seed, float32 center, float32 spread", "T out", _NORMAL + store, f"cupynorm_bench_normal_{int(bfloat16)}"
    )
    mixed = int(np.random.default_rng(seed).integers(2**63))
    kernel(np.uint64(mixed), np.float32(center), np.float32(spread), bits(array))


def _tensors(cell: Cell, seed: int) -> tuple[Tensors, Runner]:
    """A cell's random inputs, room for y, and the copy of as many bytes.

    All inputs lie in one block of memory and y in another: the copy goes from one to the other, and a cell needs little more
    memory than its own tensors.
    """
    cupy = nvrtc.cupy()
    num_bytes = cell.num_bytes // 2
    shape = (cell.num_rows, cell.num_cols)
    backward = "backward" in cell.passes
    dtypes = {
        "x": cell.dtype,
        "residual": cell.dtype if cell.residual else None,
        "dy": cell.y if backward else None,
        "dsum": cell.dtype if backward and cell.residual else None,
    }
    size = cell.num_rows * cell.num_cols
    sizes = {name: -(-size * DTYPES[dtype].itemsize // 256) * 256 if dtype else 0 for name, dtype in dtypes.items()}
    held = sum(sizes.values())
    source = cupy.empty(max(num_bytes, held), cupy.uint8)
    target = cupy.empty(max(num_bytes, size * ELEMENTS[cell.y].itemsize), cupy.uint8)

    def view(block: Any, first: int, shape: tuple[int, ...], dtype: str) -> Any:
        return cupy.ndarray(shape, arrays.CuPyLibrary.dtype(dtype), memptr=block.data + first)

    made: dict[str, Any] = {"y": None if cell.scale else view(target, 0, shape, cell.y)}
    if cell.scale == "given":
        made["scale"] = cupy.asarray(np.array([FLOAT8S[cell.y].largest / _MOST_Y], np.float32))
    if cell.amax:
        made["amax"] = cupy.asarray(np.zeros(1, np.float32))
    first = 0
    for at, (name, dtype) in enumerate(dtypes.items()):
        made[name] = view(source, first, shape, dtype) if dtype else None
        first += sizes[name]
        if dtype:
            _fill(made[name], seed + at, *((0.5, 2.0) if name == "x" else ()))
    source[held:] = source[: len(source) - held]  # data of the same kind: zeros would cost the memory less power
    names = ("weight", "bias") if cell.norm == "layer_norm" else ("weight",)
    for at, name in enumerate(names):
        made[name] = cupy.ndarray(shape[1:], arrays.CuPyLibrary.dtype(cell.parameters))
        _fill(made[name], seed + 4 + at, float(name == "weight" and not cell.zero_centered), 0.5)

    def copy() -> None:
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, num_bytes, 3, stream)  # 3: device to device

    return Tensors(**{"bias": None, **made}), Runner(copy)


# Correctness.

# Of bits that CuPy does not compute with: those of a magnitude, and what is NaN beyond. uint8: exponents of scales.
_MAGNITUDES = {"bfloat16": (0x7FFF, 0x7F80), "float8_e4m3fn": (0x7F, 0x7E), "float8_e5m2": (0x7F, 0x7C), "uint8": (0xFF, 0xFE)}


def _parts(array: Any) -> Iterable[Any]:
    """A CuPy array a part at a time, to keep temporaries small."""
    flat = array.reshape(-1)
    return (flat[first : first + 2**26] for first in range(0, flat.size, 2**26))


def _has_nan(array: Any, dtype: str) -> bool:
    """Whether any element of a CuPy array of bits is NaN."""
    cupy = nvrtc.cupy()
    mask, last = _MAGNITUDES.get(dtype, (0, 0))
    return any(bool(((part & mask) > last if mask else cupy.isnan(part)).any()) for part in _parts(array))


class Truth:
    """float64 of sampled rows of a cell: made once, and every library's outputs are held against it."""

    def __init__(self, cell: Cell, tensors: Tensors, seed: int) -> None:
        self.cell = cell
        num_sampled = max(1, min(_SAMPLED_ROWS, cell.num_rows, _SAMPLED_ELEMENTS // cell.num_cols))
        generator = np.random.default_rng([seed, cell.num_rows, cell.num_cols])
        self.rows = np.sort(generator.choice(cell.num_rows, num_sampled, replace=False))
        y = compute_dtype(cell.dtype).name if cell.scale else cell.y  # of 8 bits: before it is rounded to them
        case = gradient_check.Case(
            cell.norm, num_sampled, cell.num_cols, cell.dtype, y, cell.parameters,
            None if tensors.bias is None else cell.parameters, zero_centered_weight=cell.zero_centered,
            residual=cell.residual, eps=EPS,
        )  # fmt: skip
        x, dy, residual, self.dsum = (self.sampled(each) for each in (tensors.x, tensors.dy, tensors.residual, tensors.dsum))
        weight, bias = (
            None if each is None else decode(bits(each).get(), cell.parameters) for each in (tensors.weight, tensors.bias)
        )
        self.scale = None if tensors.scale is None else float(tensors.scale.get()[0])
        dy = np.zeros_like(x) if dy is None else dy  # forward alone: its gradients are computed and not looked at
        self._expected: dict[bool, dict] = {}
        self.problem = gradient_check.Problem(case, x, dy, weight, bias, residual)

    def sampled(self, array: Any) -> np.ndarray | None:
        if array is None:
            return None
        raw = bits(array)
        return np.stack([decode(raw[int(row)].get(), arrays.dtype_name(array)) for row in self.rows])

    def expected(self, rounded_mean: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        if rounded_mean not in self._expected:
            self._expected[rounded_mean] = gradient_check.expect(self.problem, rounded_mean=rounded_mean)
        return self._expected[rounded_mean]

    def judge(self, outputs: Mapping[str, Any], *, rounded_mean: bool) -> tuple[float, str | None]:
        """(worst error in units of what is allowed, what is wrong or None)."""
        worst = 0.0
        for name, dtype in (("y", self.cell.y), ("sum", self.cell.dtype), ("dx", self.cell.dtype)):
            if name not in outputs:
                continue
            of_8_bits = name == "y" and self.cell.scale is not None
            if arrays.dtype_name(outputs[name]) not in (dtype, "uint8" if of_8_bits else dtype):
                return float("nan"), f"{name} is {arrays.dtype_name(outputs[name])}; expected {dtype}"
            expected, allowed = self.expected(rounded_mean)[name]
            if of_8_bits:
                got, allowed, wrong = self.dequantized(outputs, expected, allowed)
                if wrong:
                    return float("nan"), wrong
            if name == "dx" and self.dsum is not None:  # a library may round dx, and again after it has added dsum
                allowed = allowed + (np.abs(expected) + np.abs(self.dsum)) * DTYPES[dtype].half_ulp
                expected = expected + self.dsum
            if not of_8_bits:
                got = self.sampled(outputs[name])
            found = gradient_check.judge(self.cell, name, got, expected, allowed, ELEMENTS[dtype].largest)
            if not found.ok:
                where = f"row {self.rows[found.where[0]]}, col {found.where[1]}"
                values = f"{found.got:.6g} at {where}; expected {found.expected:.6g} within {found.allowed:.2g}"
                return found.error, f"{name} is {values}"
            worst = max(worst, found.error)
        return worst, None

    def dequantized(
        self, outputs: Mapping[str, Any], expected: np.ndarray, allowed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, str | None]:
        """Of a y in 8-bit floats: the values of sampled rows, what is allowed of them, and what is wrong with the scales.

        A scale that a call finds is right if it lets the largest of its values be the format's largest, or, as a power of two,
        more than half of that: a smaller scale does not, and a larger one saturates values, which are then off.
        """

        def made_of(scale_inv: float, largest: float) -> str:
            return f"scale_inv is {scale_inv:.6g}, which makes {largest:.6g} of the largest value"

        cell, format = self.cell, FLOAT8S[self.cell.y]
        table = fp8.decode(np.arange(256, dtype=np.uint8), cell.y)
        raw, scale_inv = bits(outputs["y"]), bits(outputs["scale_inv"])
        data = table[np.stack([raw[int(row)].get() for row in self.rows])]
        if cell.scale in ("given", "tensor"):
            factors = scale_inv.get().astype(np.float64).reshape(1, 1)
            part_cols = cell.num_cols
        else:
            factors = np.stack([scale_inv[int(row)].get() for row in self.rows]).astype(np.float64)
            part_cols = cols_of_scale(cell.scale, cell.num_cols)
        if cell.scale == "mx":
            factors = 2.0 ** (factors - 127)
        num_parts = -(-cell.num_cols // part_cols)
        if factors.shape not in ((1, 1), (len(self.rows), num_parts)):
            return data, allowed, f"scale_inv has {factors.shape[1]} scales of a row; expected {num_parts}"
        wrong = None
        if cell.scale == "given":
            if abs(factors[0, 0] * self.scale - 1) > 2.0**-22:
                wrong = f"scale_inv is {factors[0, 0]:.6g}; expected 1 / {self.scale:.6g}"
            elif cell.amax:
                wrong = self._fault_of_amax(float(bits(outputs["amax"]).get().reshape(())), raw)
        elif cell.scale == "tensor":
            used = max(int((part & 0x7F).max()) for part in _parts(raw))
            if table[used] < format.largest:
                wrong = f"{made_of(factors[0, 0], table[used])}; expected {format.largest:.6g}"
        else:
            least = format.largest / (2 if cell.scale == "mx" else 1)
            used = np.maximum.reduceat(np.abs(data), np.arange(0, cell.num_cols, part_cols), axis=1)
            row, part = np.unravel_index(np.argmin(used), used.shape)
            if used[row, part] < least:
                where = f"row {self.rows[row]}, part {part}"
                wrong = f"{made_of(factors[row, part], used[row, part])} at {where}; expected {least:.6g} or more"
        spread = np.repeat(factors, part_cols, axis=1)[:, : cell.num_cols]
        step = np.maximum((np.abs(expected) + allowed) * format.half_ulp, spread * (format.smallest / 2))
        return data * spread, allowed + step, wrong

    def _fault_of_amax(self, amax: float, raw: Any) -> str | None:
        """What is wrong with the recorded amax. Rounding keeps the order of values: the largest magnitude among all bytes is
        amax, scaled and rounded."""
        mask, _ = _MAGNITUDES[self.cell.y]
        used = max(int((part & mask).max()) for part in _parts(raw))
        made = int(fp8.encode(np.array([amax * self.scale], np.float32), self.cell.y)[0])
        if made == used:
            return None
        largest = fp8.decode(np.array([used], np.uint8), self.cell.y)[0] / self.scale
        return f"amax is {amax:.6g}; expected what is rounded to {largest:.6g}, the largest of y"


def verify(runner: Runner, truth: Truth, *, rounded_mean: bool) -> tuple[float, str | None]:
    """Poisons the outputs, runs once, compares. (worst error in units of what is allowed, what is wrong or None).

    A library that allocates its outputs is handed back the poisoned memory by its allocator.
    """
    cupy = nvrtc.cupy()

    def run() -> dict[str, Any]:
        if runner.before:
            runner.before()
        return runner.outputs(runner.call())

    for output in run().values():
        bits(output).view(cupy.uint8).fill(0xFF)
    output = None  # nothing may hold the poisoned memory when it is to be handed back
    outputs = run()
    for name, output in outputs.items():
        dtype = arrays.dtype_name(output)
        if _has_nan(bits(output), truth.cell.y if (name, dtype) == ("y", "uint8") else dtype):
            return float("nan"), f"{name} holds NaN: not every element was written"
    return truth.judge(outputs, rounded_mean=rounded_mean)


# The run.


def bench(
    todo: Sequence[Cell] | None = None,
    *,
    runs: int = 30,
    seed: int | None = None,
    peers: Iterable[str] | None = None,
    tiles: Iterable[str] = (),
    jobs: int = 1,
    progress: Callable[..., Iterable] | None = None,
    command: str = "cupynorm.bench.bench()",
) -> BenchResult:
    """Measure cupynorm and its peers on the current GPU, with weight (and bias for layer_norm), dweight and dbias.

    todo: what cupynorm.bench_cells.cells returns; by default its own defaults. runs: samples of each library in each cell.
    seed: of the random data, fresh if None. peers: names of cupynorm.peers.PEERS, by default all that can run. tiles: of
    cupynorm, to take turns beside the one that dispatch chooses, in the words of tune and plan: "block: pack_size 8,
    threads_per_row 128, packs_per_thread 8"; cells are then of one direction each, and one that a tile does not suit says so.
    jobs: processes that compile all kernels of all libraries ahead, into their caches on disk; 1: none, each is compiled when
    its turn comes. progress: wraps what is done one by one, as tqdm does. command: what made the result, for the README.

    Returns a BenchResult, which prints as tables; microseconds are the GPU's, GB/s are 10^9 bytes a second. After the first
    cell, an interrupt (Ctrl-C) or a failure of cupynorm ends the run and returns what was measured until then, not ok.
    Raises ValueError without a GPU or for what is not known, MissingLibraryError without CuPy, what cupynorm raises in the
    first cell.
    """
    todo = cells() if todo is None else list(todo)
    if runs < 1:
        raise ValueError(f"runs is {runs}; expected 1 or more")
    unknown = [name for name in peers or () if name not in PEERS]
    if unknown:
        raise ValueError(f"peers has {unknown[0]!r}; expected some of {', '.join(PEERS)}")
    tiles = [f"{each['strategy']}: {each['tile']}" for each in map(options_of, tiles)]
    if tiles and any(cell.direction == "both" for cell in todo):
        raise ValueError("tiles are given and direction is both; expected forward or backward, to which a tile belongs")
    nvrtc.cupy()
    if not gradient_check.has_gpu():
        raise ValueError("the benchmark measures a GPU and none was found; python -m cupynorm check runs without one")
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    progress = progress or (lambda items, **_: items)
    wanted = list(dict.fromkeys((OURS, *(PEERS if peers is None else peers))))
    absent = {name: why for name in wanted if (why := missing(name))}
    names = [name for name in wanted if name not in absent] + list(dict.fromkeys(tiles))
    packages = [name for name in names if name in PEERS and name not in (OURS, "torch", "torch.compile")]
    found = environment() | {"peers": {name: version(name) for name in packages}}
    settings = {"runs": runs, "seed": seed, "eps": EPS, "command": command}
    if jobs > 1:
        _compile_ahead(todo, names, seed, jobs, progress)
    timer = Timer.on_gpu()
    measurements: list[Measurement] = []
    try:
        for at, cell in enumerate(progress(todo, desc="measuring", unit="cell")):
            measurements.append(_measure(cell, names, timer, runs, seed + 8 * at))
            timer.num_flushes.clear()
            _free_memory()
    except (KeyboardInterrupt, Exception) as failure:  # minutes of measurements are not thrown away
        if not measurements:
            raise
        settings["stopped"] = f"after {len(measurements)} of {len(todo)} cells: {first_line(failure)}"
    return BenchResult(found, settings, measurements, absent)


def _free_memory() -> None:
    nvrtc.cupy().get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _measure(cell: Cell, names: Sequence[str], timer: Timer, runs: int, seed: int) -> Measurement:
    tensors, copy = _tensors(cell, seed)
    truth = Truth(cell, tensors, seed)
    plans = [_plan(cell, direction) for direction in cell.passes]
    runners = {COPY: copy}
    errors: dict[str, float] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            of_ours = plans if name == OURS else []
            if name not in PEERS:
                of_ours = [_plan(cell, cell.direction, **options_of(name))]
            # Other libraries' kernels, and welford, subtract the mean as it is rounded.
            rounded_mean = not of_ours or any(plan.statistics == "welford" for plan in of_ours)
            runner = prepare(name, cell, tensors)
            error, wrong = verify(runner, truth, rounded_mean=rounded_mean)
            timer.sample(runner)
        except Exception as failure:  # a peer that fails, in whichever way, must not end the run
            if name == OURS:
                raise
            faults[name] = fault(name, failure)
            continue
        errors[name], runners[name] = error, runner
        if wrong:
            faults[name] = f"{name} is off: {wrong}"
    strategy = "/".join(dict.fromkeys(plan.strategy for plan in plans))
    return Measurement(cell, strategy, take_turns(timer, runners, runs), errors, faults)


def _plan(cell: Cell, direction: str, **options: Any) -> dispatch.Plan:
    return dispatch.plan(
        cell.num_cols, cell.num_rows, cell.dtype, norm=cell.norm, direction=direction, device=launch.current_device(),
        weight_dtype=cell.parameters, bias_dtype=cell.parameters if cell.norm == "layer_norm" else None,
        out_dtype=cell.out_dtype, scale=cell.scale, amax=cell.amax, residual=cell.residual,
        zero_centered_weight=cell.zero_centered, **options,
    )  # fmt: skip


def _compile_ahead(todo: Sequence[Cell], names: Sequence[str], seed: int, jobs: int, progress: Callable[..., Iterable]) -> None:
    """Runs every library once on every cell, in several processes: what they compile stays in their caches on disk."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(todo)), context) as pool:
        tried = [pool.submit(_try_once, cell, names, seed) for cell in todo]
        for each in progress(concurrent.futures.as_completed(tried), total=len(todo), desc="compiling", unit="cell"):
            each.exception()  # a process that died has compiled less; the run itself says what fails


def _try_once(cell: Cell, names: Sequence[str], seed: int) -> None:
    tensors, _ = _tensors(cell, seed)
    for name in names:
        try:
            if name not in PEERS or not missing(name):
                runner = prepare(name, cell, tensors)
                runner.call()
                nvrtc.cupy().cuda.runtime.deviceSynchronize()
        except Exception:  # met again, and named, by the run
            pass
    del tensors
    _free_memory()
