"""Processes, streams, threads and graphs around the public calls."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from array_libraries import library, loaded_torch

import cupynorm
from cupynorm.verify.bounds import expect
from cupynorm.verify.cases import Case, random_problem

# Processes.


ROOT = Path(__file__).parents[2]


def run_script(script: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )


FORK = """
import os, sys
import numpy as np
import cupynorm
assert not {"torch", "cupy"} & set(sys.modules), "cupynorm imports them by itself"
{imports}
x = np.random.default_rng(0).standard_normal((4, 40)).astype("float32")
child = os.fork()
if child == 0:
    y = {call}
    os._exit(0 if abs(y.std() - 1) < 1e-3 and abs(y.mean()) < 1e-3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
y = {call}
assert abs(y.std() - 1) < 1e-3
print("both")
"""


def test_a_process_may_fork_after_import():
    result = run_script(
        FORK.replace("{imports}", "").replace("{call}", "cupynorm.layer_norm(x, 40)")
    )
    assert (result.returncode, result.stdout) == (0, "both\n"), result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "imports, call",
    [
        ("import cupy", "cupynorm.layer_norm(cupy.asarray(x), 40).get()"),
        ("import torch", "cupynorm.layer_norm(torch.from_numpy(x).cuda(), 40).cpu().numpy()"),
    ],
)
def test_a_process_may_fork_before_its_first_cuda_call(imports, call):
    result = run_script(
        FORK.replace("{imports}", f"{imports}\ncupynorm.layer_norm, cupynorm.plan").replace(
            "{call}", call
        )
    )
    assert (result.returncode, result.stdout) == (0, "both\n"), result.stderr


# Streams, threads, graphs.

SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles);
}
"""


CYCLES = 200_000_000  # a tenth of a second, in which a launch on another stream ends


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_torch_tensors_use_the_current_stream_of_torch(side):
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    x, later, weight = (
        torch.zeros(8, 1000, device="cuda"),
        torch.randn(8, 1000, device="cuda"),
        torch.ones(1000, device="cuda"),
    )
    expected = cupynorm.layer_norm(later, 1000, weight)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    # CuPy's current stream is another one. It must not be used.
    with torch.cuda.stream(stream), cupy.cuda.Stream(non_blocking=True):
        torch.cuda._sleep(CYCLES)
        x.copy_(later, non_blocking=True)
        y = cupynorm.layer_norm(x, 1000, weight)
        assert not stream.query(), "the test ended before its stream: it shows nothing"
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_cupy_arrays_use_the_current_stream_of_cupy(side):
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (1,))
    x, later = (
        cupy.zeros((8, 1000), "float32"),
        cupy.asarray(np.random.default_rng(0).standard_normal((8, 1000)).astype("float32")),
    )
    expected = cupynorm.layer_norm(later, 1000).get()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null
    with stream, torch.cuda.stream(torch.cuda.Stream()):
        spin((1,), (1,), (CYCLES,))
        cupy.copyto(x, later)
        y = cupynorm.layer_norm(x, 1000)
        assert not stream.done, "the test ended before its stream: it shows nothing"
    stream.synchronize()
    assert (y.get() == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [40, 100_004])
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_a_call_may_be_the_first_cuda_call_of_a_thread(name, num_cols):
    # A new thread has no CUDA context. The kernel is loaded, but this number of rows is new and
    # is planned in the thread.
    lib = library(name)
    x = lib.put(np.random.default_rng(0).standard_normal((3, num_cols)), "float32")
    expected = lib.get(cupynorm.layer_norm(x, num_cols))
    first = x[:2]
    found = []

    def work() -> None:
        try:
            found.append(cupynorm.layer_norm(first, num_cols))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not isinstance(found[0], BaseException), found[0]
    assert (lib.get(found[0]) == expected[:2]).all() and np.abs(expected).max() > 1


@pytest.mark.gpu
def test_two_threads_may_call_at_once():
    torch, lib = loaded_torch(), library("torch-cuda")
    wrong = []
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        try:
            # Widths that no other test has, so both threads compile and load at once.
            problem = random_problem(
                Case("layer_norm", 257, 1300 + seed, "float32", bias=None), seed
            )
            with torch.cuda.stream(torch.cuda.Stream()):
                x, weight = lib.put(problem.x, "float32"), lib.put(problem.weight, "float32")
                expected, allowed = (
                    torch.from_numpy(values).cuda() for values in expect(problem)["y"]
                )
                barrier.wait()
                for _ in range(200):
                    y = cupynorm.layer_norm(x, 1300 + seed, weight)
                    if not ((y.double() - expected).abs() <= allowed).all():
                        wrong.append(seed)
        except BaseException as error:
            wrong.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [1001, 100_003])
@pytest.mark.parametrize("warm", [False, True])
def test_a_torch_graph_replays_forward_and_backward(warm, num_cols):
    torch = loaded_torch()
    # Not warm: the shape is new inside the capture, so kernels are compiled and loaded there.
    # The kernel of the wide rows also sets a function attribute.
    num_cols += warm
    x = torch.randn(5, num_cols, device="cuda", dtype=torch.float16, requires_grad=True)
    weight = torch.randn(num_cols, device="cuda", dtype=torch.float16, requires_grad=True)
    dy = torch.randn_like(x)

    def step():
        y = cupynorm.layer_norm(x, num_cols, weight)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            dy.copy_(torch.randn_like(dy))
        graph.replay()
        for got, right in zip(captured, step()):
            assert torch.equal(got, right) and right.isfinite().all() and right.abs().max() > 1


@pytest.mark.gpu
def test_temporaries_belong_to_the_stream_of_the_call():
    """Memory of copies and partial sums is not given to another stream before the kernels ran."""
    torch = loaded_torch()
    # The rows are not contiguous, so forward and backward make copies.
    x = torch.randn(1000, 600, device="cuda").t()
    dy, weight = torch.randn(1000, 600, device="cuda").t(), torch.randn(1000, device="cuda")

    def gradients():
        forward = cupynorm.layer_norm_forward(x, 1000, weight)
        return forward.y, *cupynorm.layer_norm_backward(
            dy, x, 1000, forward.mean, forward.rstd, weight
        )

    def others_of(shapes):
        return [torch.full(shape, torch.nan, device="cuda") for shape in shapes]

    shapes = [(600, 1000)] * 8 + [(num_rows, 1000) for num_rows in (1, 2, 132, 264, 528)]
    expected, _ = gradients(), others_of(shapes)  # loads both: loading may synchronise
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(2):  # in the second round the stream reuses memory of its own
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4 * CYCLES)  # memory is allocated meanwhile
            got = gradients()
        others = others_of(shapes)
        torch.cuda.current_stream().synchronize()
        assert not stream.query(), "the test ended before its stream: it shows nothing"
        stream.synchronize()
        assert all(map(torch.equal, got, expected)) and expected[0].isfinite().all()
        assert all(other.isnan().all() for other in others)
        del got, others


@pytest.mark.gpu
def test_calls_queued_on_several_streams_keep_their_own_addresses():
    """All are enqueued before the first runs, and share a plan and a buffer of arguments."""
    torch = loaded_torch()
    inputs = [torch.randn(64, 1000, device="cuda", requires_grad=True) for _ in range(6)]
    weight, dy = torch.randn(1000, device="cuda"), torch.randn(64, 1000, device="cuda")

    def call(x):
        y = cupynorm.rms_norm(x, 1000, weight)
        return y, *torch.autograd.grad(y, x, dy)

    expected = [call(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found = []
    for stream, x in zip(streams, inputs):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4 * CYCLES)  # memory is allocated meanwhile
            found.append(call(x))
    assert not any(stream.query() for stream in streams), (
        "a stream ended too early: the test shows nothing"
    )
    torch.cuda.synchronize()
    for got, right in zip(found, expected):
        assert all(map(torch.equal, got, right))


@pytest.mark.gpu
def test_a_cupy_graph_replays_a_forward():
    cupy = pytest.importorskip("cupy")
    generator = np.random.default_rng(0)
    x = cupy.asarray(generator.standard_normal((5, 1003)).astype("float32"))
    out = cupy.zeros_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        # Warms only CuPy's pool, which cannot call cudaMalloc in a capture. The kernel is new.
        kept = [cupy.empty(5, "float32") for _ in range(2)]
        del kept
        stream.begin_capture()
        forward = cupynorm.layer_norm_forward(x, 1003, out=out)
        graph = stream.end_capture()
    for _ in range(2):
        x[...] = cupy.asarray(generator.standard_normal((5, 1003)).astype("float32"))
        out.fill(0)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = cupynorm.layer_norm_forward(x, 1003)
        assert (out.get() == expected.y.get()).all() and (
            forward.rstd.get() == expected.rstd.get()
        ).all()
        assert np.abs(out.get()).max() > 1
