"""When timing stops, what it leaves out, the turns that libraries take, and the host's time."""

from contextlib import contextmanager

import pytest

from cupynorm.bench import timer as timers
from cupynorm.bench.timer import Runner, Timer, host_times, take_turns


class Clock:
    """A host and a GPU with a queue, so that a test sees which is ahead. Microseconds."""

    def __init__(self, flush_time):
        self.host = self.gpu = 0.0
        self.flush_time = flush_time
        self.flushes = 0

    def enqueue(self, gpu_time, host_time=1.0):
        self.host += host_time
        self.gpu = max(self.gpu, self.host) + gpu_time

    def flush(self):
        self.flushes += 1
        self.enqueue(self.flush_time)

    def timer(self):
        elapsed = lambda start, stop: (stop.time - start.time) / 1e3  # noqa: E731
        return Timer(self.flush, Event(self), Event(self), elapsed)


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.clock.enqueue(0.0)
        self.time = self.clock.gpu

    @property
    def done(self):
        return self.clock.host >= self.time

    def synchronize(self):
        self.clock.host = max(self.clock.host, self.time)


def test_host_time_stays_out_of_the_result():
    clock = Clock(flush_time=80.0)
    timer = clock.timer()

    def slow_host():
        clock.enqueue(5.0, host_time=60.0)
        clock.enqueue(3.0, host_time=60.0)

    runner = Runner(slow_host)
    assert timer.sample(runner) == pytest.approx(8.0)
    needed = timer.num_flushes[slow_host]
    assert needed > 1
    before = clock.flushes
    assert timer.sample(runner) == pytest.approx(8.0)
    assert clock.flushes == before + needed  # remembered
    assert timer.sample(Runner(lambda: clock.enqueue(5.0))) == pytest.approx(5.0)


def test_restoring_inputs_is_not_timed():
    clock = Clock(flush_time=80.0)
    restored = []

    def before():
        restored.append(clock.flushes)
        clock.enqueue(1000.0)

    runner = Runner(lambda: clock.enqueue(5.0), before=before)
    assert clock.timer().sample(runner) == pytest.approx(5.0) and restored == [0]


def test_a_call_that_waits_for_the_gpu_is_refused():
    clock = Clock(flush_time=80.0)

    def waits():
        clock.enqueue(5.0)
        clock.host = clock.gpu

    with pytest.raises(RuntimeError, match="does not run ahead"):
        clock.timer().sample(Runner(waits))


def test_libraries_take_turns():
    clock = Clock(flush_time=80.0)
    order = []

    def library(name, microseconds):
        def call():
            order.append(name)
            clock.enqueue(microseconds)

        return Runner(call)

    runners = {"copy": library("copy", 4.0), "cupynorm": library("cupynorm", 5.0)}
    samples = take_turns(clock.timer(), runners, 3)
    assert order == ["copy", "cupynorm"] * 5  # two rounds to warm up
    assert samples == {"copy": [pytest.approx(4.0)] * 3, "cupynorm": [pytest.approx(5.0)] * 3}


def test_the_host_is_timed_in_bursts_and_the_wait_is_not():
    now, events = [0], []

    def library(name, nanoseconds):
        lasts = iter(nanoseconds)

        def call():
            events.append(name)
            now[0] += next(lasts)

        return call

    def wait():
        events.append("wait")
        now[0] += 10**9

    burst = timers._BURST
    slow_first = [5000] * burst + [9000] + [3000] * (2 * burst - 1)  # the warm-up, then two bursts
    calls = {"ours": library("ours", slow_first), "torch": library("torch", [7000] * 3 * burst)}

    @contextmanager
    def context():
        events.append("in")
        yield
        events.append("out")

    times = host_times(calls, 2, wait, lambda: now[0], {"torch": context})
    assert times == {"ours": 3.0, "torch": 7.0}
    ours, theirs = ["wait", *["ours"] * burst], ["in", "wait", *["torch"] * burst, "out"]
    assert events == [*[*ours, *theirs] * 3, "wait"]
