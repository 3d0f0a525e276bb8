"""The memory that all tensors of a random call share on a GPU, here in memory of the host."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from cupynorm.check.cases import Case
from cupynorm.check.fuzz import Draw, calls, judge, memory
from cupynorm.check.fuzz.calls import start
from cupynorm.check.fuzz.draws import problem_of
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.placement import GUARD_BYTES, WrongWrite
from cupynorm.check.quantized import How
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import launch
from cupynorm.plan.devices import DEVICES

PLAIN = Draw(Case("layer_norm", 1, 96, "float32"), seed=7)


def aligned(num_bytes: int) -> np.ndarray:
    raw = np.zeros(num_bytes + 256, np.uint8)
    first = -raw.ctypes.data % 256
    return raw[first : first + num_bytes]


class OnHost(memory.OneCallMachine):
    """Its memory of the GPU is another one of the host, where kernels for the CPU run.

    Copies and launches wait until `wait`, as on a GPU that is busy with other calls.
    """

    def __init__(self, num_bytes=2**20):
        self.copies, self.work = [], []
        super().__init__(num_bytes)

    @staticmethod
    def _on_gpu(num_bytes):
        return aligned(num_bytes)

    @staticmethod
    def _pinned(num_bytes):
        return aligned(num_bytes)

    def _enqueue_copy(self, to, source, num_bytes):
        is_there = self._address <= to < self._address + self._before.size
        self.copies.append("to the GPU" if is_there else "to the host")
        self.work.append(lambda: ctypes.memmove(to, source, num_bytes))

    def _enqueue(self, *given):
        self.work.append(lambda: CpuMachine().launch(*given))

    def mark_end(self):
        self._is_open = False

    def wait(self):
        for each in self.work:
            each()
        self.work = []


class OnHostAtOnce(OnHost):
    """Public functions do not wait: all that was enqueued runs before them."""

    def call(self, step):
        super().call(lambda: (self.wait(), step()))


@pytest.fixture
def make(monkeypatch):
    """OnHost. Arrays that it has no room for are not copied, and those who read them wait."""
    monkeypatch.setattr(launch, "device", lambda index: DEVICES["H200"])

    def get(self, array):
        self.wait()
        return array.copy()

    def put(self, array):
        return CpuMachine().put(array.copy())

    monkeypatch.setattr(GpuCheckMachine, "put", put)
    monkeypatch.setattr(GpuCheckMachine, "get", get)
    monkeypatch.setattr(memory.nvrtc, "cupy", lambda: np)
    return OnHost


@pytest.mark.parametrize("num_bytes", [2**20, 2**12])
def test_kernels_run_in_one_memory(make, num_bytes):
    """All arrays reach the GPU and come back at once, each time that the launches run. The smaller
    memory has room for the first arrays alone.
    """
    where = make(num_bytes)
    assert judge.complaints(PLAIN, where) == []
    assert where.copies == ["to the GPU", "to the host"] * 2


def test_several_calls_are_started_before_the_first_is_judged(make):
    draws = [replace(PLAIN, seed=seed, case=replace(PLAIN.case, num_rows=5)) for seed in (1, 2)]
    started = [judge.Started(each, make()) for each in draws]
    assert [call.complaints() for call in started] == [[], []]


def test_a_call_begins_after_the_copies_of_one_that_an_error_ended(make):
    where = make()
    where.put(np.ones(3))
    where.end(repeats=False)
    where.work.pop()
    assert len(where.work) == 1
    where.begin_call()
    assert where.work == []


def test_kernels_to_8_bits_run_in_one_memory(make):
    drawn = replace(PLAIN, how=How("float8_e5m2", "row"))
    assert judge.complaints(drawn, make()) == []


@pytest.mark.parametrize("num_bytes", [2**20, 2**12])
@pytest.mark.parametrize("wrong_time", [0, 1])
def test_a_write_to_an_input_is_found(make, monkeypatch, num_bytes, wrong_time):
    """Also when the launches are repeated."""
    where = make(num_bytes)
    copy_back = where._copy_back

    def spoil_and_copy_back(run, time):
        if time == wrong_time:
            where.work.append(lambda: ctypes.memset(where._address + run.first, 0, 1))
        copy_back(run, time)

    monkeypatch.setattr(where, "_copy_back", spoil_and_copy_back)
    (found,) = judge.complaints(PLAIN, where)
    assert found.sentence == "weight was written to, or what surrounds it"


@pytest.mark.parametrize("num_bytes", [2**20, 2**12])
def test_launches_that_do_not_repeat_are_found(make, monkeypatch, num_bytes):
    where = make(num_bytes)
    put, of_rows = where.put, []

    def put_and_remember(array):
        there, pointer = put(array)
        if array.size == GUARD_BYTES // 4 + 1 + 1 + 16 + GUARD_BYTES // 4:  # mean and rstd, placed
            of_rows.append(there)
        return there, pointer

    def spoil(run):
        for each in of_rows:
            where.get_again(each)[GUARD_BYTES // 4] *= 2
        return is_repeated(run)

    is_repeated = where.is_repeated
    monkeypatch.setattr(where, "put", put_and_remember)
    monkeypatch.setattr(where, "is_repeated", spoil)
    found = [each.sentence for each in judge.complaints(PLAIN, where)]
    assert found == [f"{name} differs when the call is repeated" for name in ("mean", "rstd")]


def public_call(route, case, monkeypatch, **fields):
    """A call whose operands are on the host, and its machine."""
    if route != "cupy":
        pytest.importorskip("torch")
    if route == "cupy" and case.x == "bfloat16":
        pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(calls._PublicCall, "_own_stream", lambda self: nullcontext())
    return Draw(case, route=route, **fields), OnHostAtOnce()


@pytest.mark.parametrize("route", ["torch", "cupy"])
@pytest.mark.parametrize("layout", ["contiguous", "gap", "misaligned", "reversed", "transposed"])
def test_operands_have_their_values_and_are_watched(make, monkeypatch, layout, route):
    if route == "torch":
        layout = layout.replace("reversed", "broadcast")  # it has no negative strides
    for dtype in DTYPES:
        case = Case("layer_norm", 3, 5, dtype)
        drawn, where = public_call(route, case, monkeypatch, layouts={"x": layout}, seed=3)
        problem = problem_of(drawn)
        operands = calls._PublicCall(drawn, problem, where).operands

        def take(self):
            return {"y": self.operands["x"], "dx": self.operands["dy"]}

        def spoil(self):
            self.operands["dy"][2, 4] += 1
            return take(self)

        monkeypatch.setattr(calls._PublicCall, "_explicit", take)
        assert operands["out"].shape == (3, 5)
        (read,) = start(drawn, problem, where)
        where.wait()
        assert read().keys() == {"y", "dx"}
        np.testing.assert_array_equal(read()["y"], problem.x)
        np.testing.assert_array_equal(read()["dx"], problem.dy)
        monkeypatch.setattr(calls._PublicCall, "_explicit", spoil)
        (read,) = start(drawn, problem, where)
        where.wait()
        with pytest.raises(WrongWrite, match="dy was written to"):
            read()


@pytest.mark.parametrize("seed", [12, 5])  # with an output and a stream of the caller's, or none
@pytest.mark.parametrize("route", ["torch", "autograd", "cupy"])
def test_public_calls_are_started_and_judged(make, monkeypatch, route, seed):
    """Here by the float64 reference, on tensors of the host."""
    case = Case("layer_norm", 5, 96, "float32", residual=True, dsum=True)
    drawn, where = public_call(route, case, monkeypatch, seed=seed)
    started = []
    right = calls._PublicCall.run

    def run(self):
        started.append(right(self))

    monkeypatch.setattr(calls._PublicCall, "run", run)
    assert judge.complaints(drawn, where) == []
    assert len(started) == 3  # the call, the same again, one row alone

    def spoil(self):
        right(self)
        self.operands["weight"].data[3] += 1

    monkeypatch.setattr(calls._PublicCall, "run", spoil)
    (found,) = judge.complaints(drawn, where)
    assert found.sentence == "weight was written to, or what surrounds it"


@pytest.mark.parametrize("route", ["torch", "autograd"])
def test_operands_that_negate_their_memory_have_their_values(make, monkeypatch, route):
    case = Case("layer_norm", 5, 96, "bfloat16", residual=True, dsum=True)
    negated = set()
    for seed in range(5, 600, 8):
        drawn, where = public_call(route, case, monkeypatch, seed=seed)
        problem = problem_of(drawn)
        operands = calls._PublicCall(drawn, problem, where).operands
        for name, tensor in operands.items():
            if tensor is not None and name != "out" and tensor.is_neg():
                negated.add(name)
                where.end(repeats=False)
                where.wait()
                np.testing.assert_array_equal(tensor.double().numpy(), getattr(problem, name))
    assert negated == {"x", "weight", "bias", "residual", "dy", "dsum"}


@pytest.mark.parametrize("route", ["torch", "autograd"])
def test_a_wrong_sign_of_what_negates_its_memory_is_found(make, monkeypatch, route):
    """The reference, which runs here, asks torch for the sign of float64 tensors."""
    torch = pytest.importorskip("torch")
    case = Case("rms_norm", 5, 96, "float64")
    drawn, where = public_call(route, case, monkeypatch, seed=5)
    assert "x" in calls._negated(drawn, ("x",))
    assert judge.complaints(drawn, where) == []
    monkeypatch.setattr(torch.Tensor, "resolve_neg", lambda tensor: tensor)
    found = [each.sentence for each in judge.complaints(drawn, where)]
    assert found and found[0].startswith("y: 480 elements are off"), found


@pytest.mark.parametrize("route", ["torch", "cupy"])
def test_public_calls_that_do_not_repeat_are_found(make, monkeypatch, route):
    drawn, where = public_call(route, Case("rms_norm", 1, 8, "float32"), monkeypatch, seed=5)
    right, times = calls._PublicCall._explicit, []

    def change(self):
        made = right(self)
        times.append(made["y"])
        made["y"][0, 0] *= 1 + 2**-23 * (len(times) > 1)
        return made

    monkeypatch.setattr(calls._PublicCall, "_explicit", change)
    (found,) = judge.complaints(drawn, where)
    assert found.sentence == "y differs when the call is repeated"
