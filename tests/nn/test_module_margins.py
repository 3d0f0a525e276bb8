"""sm_margin of modules."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import numpy_as_cupy
import pytest

from cupynorm import Launch
from cupynorm.dispatch.devices import DEVICES
from cupynorm.gpu import arrays, launch, nvrtc
from cupynorm.norm import prepared
from cupynorm.norm.calls import FOR_STATISTICS, FOR_Y, PreparedForward, prepare_backward
from cupynorm.norm.request import (
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
)

torch = pytest.importorskip("torch")
from module_inputs import BOTH, MARGINS, random_input  # noqa: E402


def test_the_margin_of_a_kind_of_call_shrinks_its_grid(monkeypatch):
    """The rows fill an H200 many times over, so the margin decides the grid size."""
    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    monkeypatch.setattr(arrays, "on_host", lambda array: False)
    monkeypatch.setattr(launch, "device", lambda index: DEVICES["H200"])
    monkeypatch.setattr(launch, "load", lambda each, index: each)
    monkeypatch.setattr(arrays, "on_host", lambda array: False)
    x = numpy_as_cupy.ndarray((20000, 1024), np.float32)
    rstd = numpy_as_cupy.ndarray((20000,), np.float32)

    def forward(sm_margin, wants_statistics):
        launch = Launch(sm_margin=sm_margin)
        asked = ForwardOptions(False, (1024,), 1e-5, False, "float32", launch=launch)
        purpose = FOR_STATISTICS if wants_statistics else FOR_Y
        prepared = PreparedForward(ForwardRequest(ForwardOperands(x), asked), purpose)
        return prepared, prepared.on_gpu.steps[0][0].grid_size

    def backward(options):
        asked = options._replace(dx_dtype="float32", dweight_dtype=None, dbias_dtype=None)
        request = BackwardRequest(BackwardOperands(x, x, None, rstd), asked)
        return prepare_backward(request)[0].steps[0][0].grid_size

    prepared, recorded = forward(MARGINS, True)
    assert recorded == forward(32, True)[1]
    assert forward(MARGINS, False)[1] == forward(96, False)[1]
    assert backward(prepared.backward) == backward(forward(64, True)[0].backward)
    assert forward(96, True)[1] < forward(64, True)[1] < recorded < forward(0, True)[1]


@BOTH
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_a_module_passes_on_its_launch(ours, theirs, memory_efficient, kernels, monkeypatch):
    launch = Launch(sm_margin=MARGINS)
    ours(8, launch=launch, memory_efficient=memory_efficient)(random_input(3, 8))
    parts = [part for key in prepared.forwards for part in key]
    assert [part.launch for part in parts if hasattr(part, "launch")] == [launch]


@pytest.mark.slow
def test_a_launch_for_the_cpu_warns_once():
    code = """
import warnings, numpy as np, torch, cupynorm
warnings.simplefilter("always")
launch = cupynorm.Launch("warp", sm_margin=4)
with warnings.catch_warnings(record=True) as caught:
    plain, x = cupynorm.LayerNorm(8), torch.ones(2, 8)
    plain(x).sum().backward()
    cupynorm.LayerNormLinear(8, 8, device="cpu")(x)
    assert not caught, caught[0].message
    for _ in range(2):
        cupynorm.layer_norm(np.ones((2, 8)), 8, launch=launch)
        cupynorm.RMSNorm(8, launch=launch)(x).sum().backward()
print(*[each.message for each in caught], sep="|")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "launch was given for arrays on the CPU, where no kernel runs; it does not apply"
    )
