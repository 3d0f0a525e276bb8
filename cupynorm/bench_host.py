"""What the host pays: the time of one eager call, and of the first call in a fresh process.

call        microseconds until a call returns, nothing waited for: forward without gradients, forward that records them, and
            that one followed by torch.autograd.grad. On torch tensors, each library in turns, a burst of calls at a time;
            between bursts the GPU is waited for, so that its queue never fills and no call has to wait for room in it.
module      the same of LayerNorm and RMSNorm beside torch.nn's, called as a model calls them: what calling a module adds.
first call  milliseconds of the first forward and backward in a process of its own, on CuPy arrays, the result waited for:
            with an empty cache (cold) and again with what that left on disk (warm); then of another width, whose
            kernels are new to the process too. And of `import cupynorm` where NumPy is imported already.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import gradient_check, nvrtc
from .bench import environment
from .bench_cells import OURS, Cell
from .bench_report import aligned
from .peers import PEERS, Tensors, fault, missing, prepare_torch

SHAPES = ((4, 1024), (128, 4096))
# label -> (direction of its cell, whether autograd records it)
CALLS = {"forward": ("forward", False), "forward, recorded": ("forward", True), "forward and backward": ("both", True)}
_BURST = 8


@dataclass(frozen=True)
class HostResult:
    """Medians by case ("layer_norm 4 x 1024 bfloat16, forward") and library, microseconds. Prints as a table."""

    environment: dict[str, Any]
    microseconds: dict[str, dict[str, float]]
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for found in self.microseconds.values() for name in found))
        rows = [["microseconds of one eager call", *names]]
        for case, found in self.microseconds.items():
            least = min(found.values())
            shown = [f"{found[name]:.1f}{'*' * (found[name] == least)}" if name in found else "-" for name in names]
            rows.append([case, *shown])
        return "\n".join([*aligned(rows), "", "* the least; medians, nothing waited for", *self.faults])

    def to_json(self) -> str:
        content = {"environment": self.environment, "microseconds": self.microseconds, "faults": self.faults}
        return json.dumps(content, indent=1)


def time_calls(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    wait: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, float]:
    """name -> median microseconds of one call, over rounds in each of which every library makes a burst of calls.

    wait: until the GPU is idle; before each burst, not timed. clock: nanoseconds.
    """
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for call in calls.values():  # what is made at the first calls is not of interest here
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
    return {name: statistics.median(found) / 1e3 for name, found in samples.items()}


def module_calls(norm: str, label: str, tensors: Tensors) -> dict[str, Callable[[], Any]]:
    """By library, one of CALLS by a module that holds the tensors' weight and bias: ours, and torch.nn's."""
    import torch

    from . import modules

    direction, record = CALLS[label]
    name = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}[norm]
    calls = {}
    for library, package in ((OURS, modules), ("torch", torch.nn)):
        module = getattr(package, name)(tensors.weight.shape, device="meta")
        module.weight = torch.nn.Parameter(tensors.weight.detach(), record)
        if tensors.bias is not None:
            module.bias = torch.nn.Parameter(tensors.bias.detach(), record)
        x = tensors.x.detach().requires_grad_(record)
        forward = partial(module, x)
        calls[library] = (
            forward if direction == "forward" else partial(_gradients, forward, (x, *module.parameters()), tensors.dy)
        )
    return calls


def _gradients(forward: Callable[[], Any], inputs: tuple, dy: Any) -> tuple:
    return sys.modules["torch"].autograd.grad(forward(), inputs, dy)


def host(
    *,
    norms: Sequence[str] = gradient_check.NORMS[:1],
    dtypes: Sequence[str] = ("bfloat16",),
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rounds: int = 200,
    peers: Iterable[str] | None = None,
    progress: Callable[..., Iterable] | None = None,
) -> HostResult:
    """Time the eager calls of cupynorm and its peers on torch tensors on the current GPU.

    shapes: (num_rows, num_cols), small ones, where the GPU keeps up. rounds: of 8 calls each. peers: names of
    cupynorm.peers.PEERS, by default all that can run. progress: wraps the cases, as tqdm does.
    Modules are timed beside torch.nn's whatever the peers. Returns a HostResult. Raises ValueError without a GPU,
    MissingLibraryError without CuPy or torch.
    """
    nvrtc.cupy()
    try:
        import torch
    except ImportError as error:
        raise nvrtc.MissingLibraryError(
            f"torch could not be imported ({error}); eager calls are timed on its tensors"
        ) from error
    if not torch.cuda.is_available():
        raise ValueError(f"eager calls are timed with a GPU and torch {torch.__version__} finds none")
    names = [name for name in dict.fromkeys((OURS, *(PEERS if peers is None else peers))) if not missing(name)]
    found: dict[str, dict[str, float]] = {}
    faults = []
    cases = [(norm, dtype, shape, call) for norm in norms for dtype in dtypes for shape in shapes for call in CALLS]
    for norm, dtype, (num_rows, num_cols), label in (progress or (lambda items, **_: items))(cases, desc="timing", unit="case"):
        direction, record = CALLS[label]
        cell = Cell(norm, direction, dtype, num_rows, num_cols)
        make = partial(torch.randn, dtype=getattr(torch, dtype), device="cuda")
        x, dy = make(num_rows, num_cols), make(num_rows, num_cols)
        tensors = Tensors(x, dy, None, make(num_cols), make(num_cols) if norm == "layer_norm" else None, None, None)
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
        found[f"{case}, {label}"] = time_calls(calls, rounds, torch.cuda.synchronize)
        calls = module_calls(norm, label, tensors)
        found[f"{case}, module, {label}"] = time_calls(calls, rounds, torch.cuda.synchronize)
    return HostResult(environment(), found, faults)


# The first call.

# In a process of its own: prints JSON. Arrays are made and the context is there before the clock starts.
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
    made = timed(which + "forward", lambda: cupynorm.layer_norm_forward(x, weight, bias))
    timed(which + "backward", lambda: cupynorm.layer_norm_backward(dy, x, made.mean, made.rstd, weight))
    timed(which + "forward again", lambda: cupynorm.layer_norm_forward(x, weight, bias))
print(json.dumps({name: 1e3 * seconds for name, seconds in found.items()}))
"""


@dataclass(frozen=True)
class FirstCallResult:
    """Milliseconds by call, with an empty cache on disk (cold) and with a full one (warm). Prints as a table."""

    environment: dict[str, Any]
    cold: dict[str, float]
    warm: dict[str, float]

    def __str__(self) -> str:
        rows = [["milliseconds of the first call", "cold", "warm"]]
        rows += [[name, f"{self.cold[name]:.2f}", f"{self.warm[name]:.2f}"] for name in self.cold]
        return "\n".join(
            [*aligned(rows), "", "cold: nothing is in CuPy's cache on disk; warm: the kernels are, the process is new"]
        )

    def to_json(self) -> str:
        return json.dumps({"environment": self.environment, "cold": self.cold, "warm": self.warm}, indent=1)


def first_call(cols: Sequence[int] = (4096, 1024)) -> FirstCallResult:
    """Time the first calls of two fresh processes, bfloat16 rows of these widths, the second with what the first one cached.

    Returns a FirstCallResult. Raises ValueError without a GPU, MissingLibraryError without CuPy,
    RuntimeError if a process fails.
    """
    nvrtc.cupy()
    if not gradient_check.has_gpu():
        raise ValueError("first calls are timed on a GPU and none was found")
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (_run_first_calls(cols, folder) for _ in range(2))
    return FirstCallResult(environment(), cold, warm)


def _run_first_calls(cols: Sequence[int], cache: str) -> dict[str, float]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"CUPY_CACHE_DIR": cache, "PYTHONPATH": path}
    command = [sys.executable, "-c", _FIRST_CALLS, *map(str, cols)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a process that times its first calls failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
