"""The memory that all tensors of a random call share on a GPU, here in memory of the host."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cupynorm.check.cases import Case
from cupynorm.check.fuzz import Draw, calls, judge, memory
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.placement import GUARD_BYTES, WrongWrite, place
from cupynorm.check.quantized import How
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu import launch
from cupynorm.plan.devices import DEVICES

PLAIN = Draw(Case("layer_norm", 5, 96, "float32", weight1="bfloat16", dropout_p=0.1), seed=7)


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
        there = aligned(num_bytes)
        return SimpleNamespace(data=SimpleNamespace(ptr=there.ctypes.data), memory=there)

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
    draws = [replace(PLAIN, seed=seed, case=replace(PLAIN.case, dropout_p=0.0)) for seed in (1, 2)]
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
    drawn = replace(PLAIN, case=replace(PLAIN.case, weight1=None), how=How("float8_e5m2", "row"))
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
        if array.size == GUARD_BYTES // 4 + 1 + 5 + 16 + GUARD_BYTES // 4:  # mean and rstd, placed
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


class HostTorch(memory.Torch):
    def put(self, memory):
        return self.torch.from_numpy(memory.copy())

    def fetch(self, memory):
        return memory.numpy()


class HostCuPy(memory.CuPy):
    """With NumPy's functions of the same names."""

    def __init__(self, where):
        self.cupy = np

    def put(self, memory):
        return memory.copy()

    def fetch(self, memory):
        return memory


@pytest.mark.parametrize("library", [HostTorch, HostCuPy])
@pytest.mark.parametrize("layout", ["contiguous", "gap", "misaligned", "reversed", "transposed"])
def test_operands_have_their_values_and_are_watched(layout, library):
    if library is HostTorch:
        pytest.importorskip("torch")
        layout = layout.replace("reversed", "broadcast")  # it has no negative strides
    generator = np.random.default_rng(0)
    for dtype in DTYPES:
        if library is HostCuPy and dtype == "bfloat16":
            pytest.importorskip("ml_dtypes")
        values = encode(generator.standard_normal((3, 5)), dtype)
        values = {"x": values[[0, 0, 0]] if layout == "broadcast" else values, "dy": values}
        x, dy = place(values["x"], layout), place(values["dy"])
        there = library(None)
        operands = memory.Operands({"x": (x, dtype), "dy": (dy, dtype)}, there)
        made = memory.Made(operands.arrays, there).float64()
        for name, raw in values.items():
            np.testing.assert_array_equal(made[name], decode(raw, dtype))
        operands.fetch()()
        operands.arrays["dy"][2, 4] += 1
        with pytest.raises(WrongWrite, match="dy was written to"):
            operands.fetch()()


@pytest.mark.parametrize("seed", [12, 5])  # with an output and a stream of the caller's, or none
@pytest.mark.parametrize("route", ["torch", "autograd", "cupy"])
def test_public_calls_are_started_and_judged(make, monkeypatch, route, seed):
    """Here by the float64 reference, on tensors of the host."""
    if route != "cupy":
        pytest.importorskip("torch")
    monkeypatch.setattr(calls, "Torch", HostTorch)
    monkeypatch.setattr(calls, "CuPy", HostCuPy)
    monkeypatch.setattr(HostTorch, "stream", lambda self: nullcontext())
    monkeypatch.setattr(HostCuPy, "stream", lambda self: nullcontext())
    case = Case("layer_norm", 5, 96, "float32", residual=True, dsum=True, weight1="float16")
    drawn = Draw(case, route=route, seed=seed)
    started = []
    right = calls._PublicCall.start

    def start(self):
        started.append(right(self))
        return started[-1]

    monkeypatch.setattr(calls._PublicCall, "start", start)
    assert judge.complaints(drawn, make()) == []
    assert len(started) == 3  # the call, the same again, one row alone

    def spoil(self):
        read = right(self)
        self.operands["weight"].data[3] += 1
        return read

    monkeypatch.setattr(calls._PublicCall, "start", spoil)
    (found,) = judge.complaints(drawn, make())
    assert found.sentence == "weight was written to, or what surrounds it"
