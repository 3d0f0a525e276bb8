"""Kernel time of a call on one GPU, by CUDA events, and the host's time of a call.

Before each call a buffer larger than the L2 cache is written. The write also lasts until the host
has enqueued the whole call, so kernel time holds no host time. A run in which the host was late is
repeated behind a longer write.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from ..gpu import nvrtc

_FLUSH_BYTES = 2**28
_MAX_FLUSHES = 1024  # about as many as a stream's queue holds: more would make the host wait
_BURST = 8


class Runner(NamedTuple):
    """What is timed: one library on one problem.

    call: enqueues the work on the current stream and returns the library's own result.
    outputs: of that result, arrays by the names of tensors. before: restores what a call
    overwrites; it runs before each call, untimed.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], dict[str, Any]] = dict
    before: Callable[[], Any] | None = None


class Timer:
    """Times calls on the GPU.

    flush(): enqueues one write of more than the L2 cache. start, stop: CUDA events, as CuPy's.
    elapsed(start, stop): milliseconds between two events.
    """

    def __init__(self, flush: Callable, start: Any, stop: Any, elapsed: Callable) -> None:
        self.flush, self.start, self.stop, self.elapsed = flush, start, stop, elapsed
        self.num_flushes: dict[Callable, int] = {}  # that each call needs to hide its host time

    def sample(self, runner: Runner) -> float:
        """Microseconds of one call. RuntimeError if the GPU is always done before the host."""
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
        raise RuntimeError(
            "the host does not run ahead of the GPU, so the call's kernel time is not measured: "
            "the call waits for the GPU, or other processes keep the host busy"
        )

    @classmethod
    def on_gpu(cls) -> Timer:
        cupy = nvrtc.cupy()
        runtime = cupy.cuda.runtime
        l2_bytes = runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
        buffer = cupy.empty(max(_FLUSH_BYTES, 4 * l2_bytes), cupy.uint8)

        def flush() -> None:
            stream = cupy.cuda.get_current_stream().ptr
            runtime.memsetAsync(buffer.data.ptr, 0, buffer.nbytes, stream)

        return cls(flush, cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.get_elapsed_time)


def take_turns(timer: Timer, runners: Mapping[str, Runner], runs: int) -> dict[str, list[float]]:
    """name -> microseconds of each run. Libraries take turns, after two rounds of warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for run in range(runs + 2):
        for name, runner in runners.items():
            microseconds = timer.sample(runner)
            if run >= 2:
                samples[name].append(microseconds)
    return samples


def host_times(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    wait: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
    within: Mapping[str, Callable[[], AbstractContextManager]] | None = None,
) -> dict[str, float]:
    """name -> median microseconds until a call returns. In each round each makes a burst of calls.

    wait: returns when the GPU is idle, so that no call waits for room in its queue; called before
    each burst, untimed. clock: nanoseconds. within: makes a context for each burst of a name.
    """
    contexts = within or {}
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for round in range(rounds + 1):  # the first warms up
        for name, call in calls.items():
            with contexts.get(name, nullcontext)():
                wait()
                for _ in range(_BURST):
                    start = clock()
                    call()
                    if round:
                        samples[name].append(clock() - start)
    wait()
    return {name: statistics.median(times) / 1e3 for name, times in samples.items()}
