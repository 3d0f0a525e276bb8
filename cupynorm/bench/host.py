"""Host time of one eager call, and of the first call in a fresh process.

call        microseconds until a call returns, without waiting for the GPU: forward without
            gradients, forward recorded by autograd, and that followed by torch.autograd.grad. On
            torch tensors. Libraries take turns, a burst of calls at a time. Between bursts the GPU
            becomes idle, so no call waits for room in its queue.
module      the same of LayerNorm and RMSNorm, and of torch.nn's, called as a model calls them
first call  milliseconds of the first forward and backward in a process of its own, on CuPy arrays,
            until the result is there: with an empty cache on disk (cold) and a full one (warm);
            then of another width, whose kernels are new to the process. Also `import cupynorm`
            after NumPy is imported.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..check.cases import NORMS
from ..gpu import nvrtc
from ..gpu.nvrtc import environment, has_gpu
from .cells import OURS, Cell
from .peers import PEERS, fault, missing
from .report import aligned
from .runners import prepare_torch
from .tensors import Tensors

SHAPES = ((4, 1024), (128, 4096))
# label -> (direction of its cell, whether autograd records it)
CALLS = {
    "forward": ("forward", False),
    "forward, recorded": ("forward", True),
    "forward and backward": ("both", True),
}
_BURST = 8


@dataclass(frozen=True)
class HostResult:
    """Median microseconds by case ("layer_norm 4 x 1024 bfloat16, forward") and library."""

    environment: dict[str, Any]
    microseconds: dict[str, dict[str, float]]
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for times in self.microseconds.values() for name in times))
        rows = [["microseconds of one eager call", *names]]
        for case, times in self.microseconds.items():
            least = min(times.values())
            shown = [
                f"{times[name]:.1f}{'*' * (times[name] == least)}" if name in times else "-"
                for name in names
            ]
            rows.append([case, *shown])
        about = "* the least; medians, without waiting for the GPU"
        return "\n".join([*aligned(rows), "", about, *self.faults])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def time_calls(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    wait: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, float]:
    """name -> median microseconds of one call. In each round every library makes a burst of calls.

    wait: returns when the GPU is idle; called before each burst, untimed. clock: nanoseconds.
    """
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for call in calls.values():  # warm-up
        for _ in range(_BURST):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            for _ in range(_BURST):
                start = clock()
                call()
                samples[name].append(clock() - start)
    wait()
    return {name: statistics.median(times) / 1e3 for name, times in samples.items()}


def module_calls(norm: str, label: str, tensors: Tensors) -> dict[str, Callable[[], Any]]:
    """One of CALLS by a module of ours and of torch.nn, with the tensors' weight and bias."""
    import torch

    from ..nn import modules

    direction, record = CALLS[label]
    name = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}[norm]
    calls = {}
    for library, package in ((OURS, modules), ("torch", torch.nn)):
        module = getattr(package, name)(tensors.weight.shape, device="meta")
        module.weight = torch.nn.Parameter(tensors.weight.detach(), record)
        if tensors.bias is not None:
            module.bias = torch.nn.Parameter(tensors.bias.detach(), record)
        x = tensors.x.detach().requires_grad_(record)
        calls[library] = forward = partial(module, x)
        if direction == "both":
            inputs = (x, *module.parameters())
            calls[library] = partial(_gradients, forward, inputs, tensors.dy)
    return calls


def _gradients(forward: Callable[[], Any], inputs: tuple, dy: Any) -> tuple:
    return sys.modules["torch"].autograd.grad(forward(), inputs, dy)


def host(
    *,
    norms: Sequence[str] = NORMS[:1],
    dtypes: Sequence[str] = ("bfloat16",),
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rounds: int = 200,
    peers: Iterable[str] | None = None,
    progress: Callable[..., Iterable] | None = None,
) -> HostResult:
    """Time the eager calls of cupynorm and its peers on torch tensors on the current GPU.

    shapes: (num_rows, num_cols), small ones, on which the GPU keeps up. rounds: of 8 calls each.
    peers: names of cupynorm.bench.peers.PEERS, by default all that can run. Modules are always
    compared with torch.nn's. progress: wraps the cases, as tqdm does.
    Returns a HostResult. Raises ValueError without a GPU, MissingLibraryError without CuPy or
    torch.
    """
    nvrtc.cupy()
    try:
        import torch
    except ImportError as error:
        raise nvrtc.MissingLibraryError(
            f"torch could not be imported ({error}); eager calls are timed on its tensors"
        ) from error
    if not torch.cuda.is_available():
        raise ValueError(
            f"eager calls are timed with a GPU and torch {torch.__version__} finds none"
        )
    wanted = dict.fromkeys((OURS, *(PEERS if peers is None else peers)))
    names = [name for name in wanted if not missing(name)]
    microseconds: dict[str, dict[str, float]] = {}
    faults = []
    progress = progress or (lambda items, **_: items)
    cases = list(product(norms, dtypes, shapes, CALLS))
    for norm, dtype, (num_rows, num_cols), label in progress(cases, desc="timing", unit="case"):
        direction, record = CALLS[label]
        cell = Cell(norm, direction, dtype, num_rows, num_cols)
        make = partial(torch.randn, dtype=getattr(torch, dtype), device="cuda")
        x, dy, weight = make(num_rows, num_cols), make(num_rows, num_cols), make(num_cols)
        bias = make(num_cols) if norm == "layer_norm" else None
        tensors = Tensors(x, dy, None, weight, bias, None, None)
        calls = {}
        for name in names:
            try:
                call = prepare_torch(name, cell, tensors, record=record).call
                call()
                calls[name] = call
            except Exception as error:  # a peer that fails must not end the run
                if name == OURS:
                    raise
                faults.append(f"{cell}: {fault(name, error)}")
        case = f"{norm} {num_rows} x {num_cols} {dtype}"
        of_modules = module_calls(norm, label, tensors)
        for kind, each in (("", calls), (" module,", of_modules)):
            times = time_calls(each, rounds, torch.cuda.synchronize)
            microseconds[f"{case},{kind} {label}"] = times
    return HostResult(environment(), microseconds, faults)


# Prints JSON. Arrays are allocated, and the context is created, before the clock starts.
_FIRST_CALLS = """
import json, sys, time
import numpy
start = time.perf_counter()
import cupynorm
found = {"import cupynorm": time.perf_counter() - start}
import cupy, ml_dtypes

def timed(name, call):
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    result = call()
    cupy.cuda.runtime.deviceSynchronize()
    found[name] = time.perf_counter() - start
    return result

for at, num_cols in enumerate(map(int, sys.argv[1:])):
    which = "another width: " if at else ""
    x, dy = (cupy.ndarray((512, num_cols), ml_dtypes.bfloat16) for _ in range(2))
    weight, bias = (cupy.ndarray((num_cols,), ml_dtypes.bfloat16) for _ in range(2))
    for array in (x, dy, weight, bias):
        array.data.memset(0, array.nbytes)
    made = timed(which + "forward", lambda: cupynorm.layer_norm_forward(x, num_cols, weight, bias))
    saved = num_cols, made.mean, made.rstd
    timed(which + "backward", lambda: cupynorm.layer_norm_backward(dy, x, *saved, weight))
    timed(which + "forward again", lambda: cupynorm.layer_norm_forward(x, num_cols, weight, bias))
print(json.dumps({name: 1e3 * seconds for name, seconds in found.items()}))
"""


@dataclass(frozen=True)
class FirstCallResult:
    """Milliseconds by call, with an empty cache on disk (cold) and a full one (warm)."""

    environment: dict[str, Any]
    cold: dict[str, float]
    warm: dict[str, float]

    def __str__(self) -> str:
        rows = [["milliseconds of the first call", "cold", "warm"]]
        rows += [[name, f"{self.cold[name]:.2f}", f"{self.warm[name]:.2f}"] for name in self.cold]
        about = "cold: CuPy's cache on disk is empty; warm: it has the kernels, the process is new"
        return "\n".join([*aligned(rows), "", about])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def first_call(cols: Sequence[int] = (4096, 1024)) -> FirstCallResult:
    """Time the first calls of two fresh processes, of which the second has the cache of the first.

    cols: widths of rows of bfloat16.
    Returns a FirstCallResult. Raises ValueError without a GPU, MissingLibraryError without CuPy,
    RuntimeError if a process fails.
    """
    nvrtc.cupy()
    if not has_gpu():
        raise ValueError("first calls are timed on a GPU and none was found")
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (_run_first_calls(cols, folder) for _ in range(2))
    return FirstCallResult(environment(), cold, warm)


def _run_first_calls(cols: Sequence[int], cache: str) -> dict[str, float]:
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    variables = os.environ | {"CUPY_CACHE_DIR": cache, "PYTHONPATH": path}
    command = [sys.executable, "-c", _FIRST_CALLS, *map(str, cols)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        raise RuntimeError(f"a process that times its first calls failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])
