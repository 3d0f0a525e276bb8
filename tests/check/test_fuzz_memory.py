"""The memory that all tensors of a random call share on a GPU, here in memory of the host."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cupynorm.check.cases import Case
from cupynorm.check.fuzz import Draw, judge, memory
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.placement import WrongWrite, place
from cupynorm.check.quantized import How
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu import launch
from cupynorm.plan.devices import DEVICES

PLAIN = Draw(Case("layer_norm", 5, 96, "float32", weight1="bfloat16", dropout_p=0.1), seed=7)


class There:
    """Memory that has CuPy's methods."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.num_read = memory, 0
        self.data = SimpleNamespace(ptr=memory.ctypes.data)

    def __getitem__(self, part: slice) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: self.read(part))

    def read(self, part: slice) -> np.ndarray:
        self.num_read += 1
        return self.memory[part].copy()


class OnHost(memory.OneCopyMachine):
    """Its memory of the GPU is another one of the host, where kernels for the CPU run."""

    num_filled = 0

    @staticmethod
    def _memories(num_bytes):
        raw = np.zeros(num_bytes + 256, np.uint8)
        first = -raw.ctypes.data % 256
        return There(raw[first : first + num_bytes]), np.zeros(num_bytes, np.uint8)

    def _copy(self, first, end):
        self.num_filled += 1
        ctypes.memmove(self._address + first, self._here[first:].ctypes.data, end - first)


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(launch, "device", lambda index: DEVICES["H200"])
    on_cpu = CpuMachine()
    monkeypatch.setattr(GpuCheckMachine, "launch", lambda self, *given: on_cpu.launch(*given))
    monkeypatch.setattr(GpuCheckMachine, "put", lambda self, array: on_cpu.put(array))
    monkeypatch.setattr(GpuCheckMachine, "get", lambda self, array: on_cpu.get(array))
    return OnHost


@pytest.mark.parametrize("num_bytes, num_filled", [(2**20, 6), (2**12, 2)])
def test_kernels_run_in_one_memory(make, num_bytes, num_filled):
    """For forward and two backwards, and again when the call is repeated. The smaller memory has
    room for the first arrays alone."""
    where = make(num_bytes)
    assert judge.complaints(PLAIN, where) == []
    assert where.num_filled == num_filled and where._there.num_read == 2


def test_kernels_to_8_bits_run_in_one_memory(make):
    drawn = replace(PLAIN, case=replace(PLAIN.case, weight1=None), how=How("float8_e5m2", "row"))
    assert judge.complaints(drawn, make()) == []


def test_a_write_between_two_arrays_is_found(make, monkeypatch):
    where = make()
    right = where.get

    def get(array):
        made = right(array)
        if isinstance(array, memory._Part) and array.first == 0:
            made[0] = 0
        return made

    monkeypatch.setattr(where, "get", get)
    assert "weight was written to" in judge.complaints(PLAIN, where)[0].sentence


class HostTorch(memory.Torch):
    def put(self, memory):
        return self.torch.from_numpy(memory.copy())


class HostCuPy(memory.CuPy):
    """With NumPy's functions of the same names."""

    def __init__(self):
        self.cupy = np

    def put(self, memory):
        return memory.copy()

    def get(self, memory):
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
        operands = memory.Operands({"x": (x, dtype), "dy": (dy, dtype)}, library())
        made = library().float64(operands.arrays)
        for name, raw in values.items():
            np.testing.assert_array_equal(made[name], decode(raw, dtype))
        operands.check()
        operands.arrays["dy"][2, 4] += 1
        with pytest.raises(WrongWrite, match="dy was written to"):
            operands.check()
