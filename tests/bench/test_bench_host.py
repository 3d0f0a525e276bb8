"""The host's time of a call: timing, output, and real calls with a GPU."""

import json

import pytest
from cupynorm.bench.host import FirstCallResult, HostResult, first_call, host, time_calls
from cupynorm.bench.tensors import Tensors

from cupynorm.bench import host as bench_host
from cupynorm.check.cases import NORMS
from cupynorm.gpu import environment


class Clock:
    """A clock in nanoseconds that a test advances."""

    def __init__(self):
        self.now, self.events = 0, []

    def __call__(self):
        return self.now

    def library(self, name, nanoseconds):
        lasts = iter(nanoseconds)

        def call():
            self.events.append(name)
            self.now += next(lasts)

        return call

    def wait(self):
        self.events.append("wait")
        self.now += 10**9


def test_calls_are_timed_in_bursts_and_the_wait_is_not():
    clock = Clock()
    burst = bench_host._BURST
    slow_first = [5000] * burst + [9000] + [3000] * (2 * burst - 1)  # the warm-up, then two bursts
    calls = {
        "cupynorm": clock.library("cupynorm", slow_first),
        "torch": clock.library("torch", [7000] * 3 * burst),
    }
    assert time_calls(calls, 2, clock.wait, clock) == {"cupynorm": 3.0, "torch": 7.0}
    warm_up, rest = clock.events[: 2 * burst], clock.events[2 * burst :]
    assert warm_up == ["cupynorm"] * burst + ["torch"] * burst
    assert rest == [*["wait", *["cupynorm"] * burst, "wait", *["torch"] * burst] * 2, "wait"]


def test_the_least_is_marked():
    found = {
        "layer_norm 4 x 1024 bfloat16, forward": {"cupynorm": 7.04, "torch": 9.5},
        "forward and backward": {"cupynorm": 30.0},
    }
    result = HostResult({"gpu": "H200"}, found, ["a cell: quack could not run: no kernel"])
    lines = [line.split() for line in str(result).splitlines()]
    assert (
        lines[0][-2:] == ["cupynorm", "torch"]
        and lines[1][-2:] == ["7.0*", "9.5"]
        and lines[2][-2:] == ["30.0*", "-"]
    )
    assert "quack could not run: no kernel" in str(result)
    assert json.loads(result.to_json())["microseconds"] == found


def test_first_calls_are_shown_cold_and_warm():
    result = FirstCallResult(
        {"gpu": "H200"},
        {"import cupynorm": 3.21, "forward": 210.0},
        {"import cupynorm": 3.0, "forward": 8.5},
    )
    lines = [line.split() for line in str(result).splitlines()]
    assert lines[1] == ["import", "cupynorm", "3.21", "3.00"] and lines[2] == [
        "forward",
        "210.00",
        "8.50",
    ]
    assert json.loads(result.to_json())["warm"]["forward"] == 8.5


@pytest.mark.parametrize("norm", NORMS)
def test_modules_are_called_as_models_call_them(norm):
    """Both libraries do the same work: the same results, recorded or not, and all gradients."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    x, dy, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((4, 8), (4, 8), (8,), (8,))
    )
    tensors = Tensors(x, dy, None, weight, bias if norm == "layer_norm" else None, None, None)
    for label, (direction, record) in bench_host.CALLS.items():
        calls = bench_host.module_calls(norm, label, tensors)
        assert list(calls) == ["cupynorm", "torch"]
        assert [
            type(call.func if direction == "forward" else call.args[0].func).__module__
            for call in calls.values()
        ] == ["cupynorm.nn.modules", "torch.nn.modules.normalization"]
        ours, torchs = (call() for call in calls.values())
        if direction == "forward":
            assert ours.requires_grad == torchs.requires_grad == record
        else:
            assert len(ours) == (3 if norm == "layer_norm" else 2)
        torch.testing.assert_close(ours, torchs)
        assert not (x.requires_grad or weight.requires_grad)


@pytest.mark.skipif(environment.has_gpu(), reason="there is a GPU")
def test_error_without_a_gpu():
    pytest.importorskip("cupy")
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="eager calls are timed with a GPU"):
        host()
    with pytest.raises(ValueError, match="first calls are timed on a GPU"):
        first_call()


@pytest.mark.gpu
def test_eager_calls():
    pytest.importorskip("torch")
    result = host(norms=NORMS, shapes=[(4, 256)], rounds=5, peers=["torch", "tutorial"])
    assert len(result.microseconds) == 12
    assert sum(", module, " in case for case in result.microseconds) == 6
    for case, found in result.microseconds.items():
        assert set(found) >= {"cupynorm", "torch"} and all(
            0.1 < each < 10**5 for each in found.values()
        ), case
    assert all("tutorial" in fault for fault in result.faults)


@pytest.mark.gpu
def test_first_calls():
    result = first_call([72, 4096])
    assert (
        list(result.cold) == list(result.warm)
        and len(result.cold) == 7
        and result.cold["import cupynorm"] < 1000
    )
    # Compiling is slower than the cache on disk, which is slower than a second call.
    assert (
        result.cold["another width: forward"]
        > result.warm["another width: forward"]
        > result.warm["another width: forward again"]
        > 0
    )
