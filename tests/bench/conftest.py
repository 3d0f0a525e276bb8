"""The benchmark on NumPy arrays."""

import sys

import numpy_as_cupy
import pytest

from cupynorm.bench import measure, peers
from cupynorm.gpu import arrays, launch, nvrtc
from cupynorm.norm import quantized
from cupynorm.plan.devices import DEVICES


@pytest.fixture
def on_numpy(monkeypatch):
    """The benchmark on NumPy arrays: cupynorm uses its reference, torch the CPU."""
    pytest.importorskip(
        "torch._dynamo"
    )  # before it can see a cupy that has only what the benchmark needs

    def in_clothes(make):
        def dressed(*given):
            made = make(*given)
            return made if arrays.is_torch(made) else numpy_as_cupy.asarray(made)

        return dressed

    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    monkeypatch.setitem(sys.modules, "cupy", numpy_as_cupy)
    monkeypatch.setattr(arrays, "from_float64", in_clothes(arrays.from_float64))
    monkeypatch.setattr(quantized, "_of_library", in_clothes(quantized._of_library))
    monkeypatch.setattr(launch, "current_device", lambda: DEVICES["H200"])
    can_run = (peers.OURS, "torch")
    monkeypatch.setattr(
        measure, "missing", lambda name: None if name in can_run else f"no module named {name!r}"
    )


@pytest.fixture
def with_torch_compile(on_numpy, monkeypatch):
    """torch.compile as a peer whose functions are not compiled."""
    can_run = (peers.OURS, "torch.compile")
    monkeypatch.setattr(
        measure, "missing", lambda name: None if name in can_run else f"no module named {name!r}"
    )
    monkeypatch.setattr(sys.modules["torch"], "compile", lambda function, dynamic: function)
