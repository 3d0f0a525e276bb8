"""sm_margin of modules."""

from __future__ import annotations

import numpy as np
import numpy_as_cupy
import pytest
from repository_files import MODULES

import cupynorm
from cupynorm.gpu import launch, nvrtc
from cupynorm.norm import api, arguments, cache
from cupynorm.norm.options import launch_options
from cupynorm.norm.prepared import FOR_STATISTICS, FOR_Y, PreparedBackward, PreparedForward
from cupynorm.norm.request import (
    DEFAULTS,
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Margins,
)
from cupynorm.plan.devices import DEVICES

torch = pytest.importorskip("torch")
from module_inputs import BOTH, MARGINS, random_input  # noqa: E402


@BOTH
def test_wrong_margins_are_refused(ours, theirs):
    for wrong, sentence in (
        (-1, "sm_margin is -1; expected a number of multiprocessors"),
        ({"forward": True}, "sm_margin is True; expected a number"),
        ({"backward": 1.0}, r"sm_margin is 1\.0; expected a number"),
        ({"forward": {"forward": 1}}, r"sm_margin is \{'forward': 1\}; expected a number"),
        ({"fwd": 1}, "sm_margin has fwd; expected some of forward, backward, inference"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ours(8, sm_margin=wrong)
        with pytest.raises(ValueError, match=sentence):
            cupynorm.layer_norm(np.ones((2, 8), "float32"), 8, sm_margin=wrong)


@BOTH
def test_margins_of_transformer_engines_environment_are_not_read(ours, theirs, monkeypatch):
    """They would change every model of a process; docs/calls.md says what to pass."""
    for kind in ("FWD", "BWD", "INF"):
        monkeypatch.setenv(f"NVTE_{kind}_LAYERNORM_SM_MARGIN", "8")
    assert ours(8, device="cpu").sm_margin == 0
    assert launch_options(None, None, None, 0).sm_margin == 0
    readers = [path.name for path in MODULES.values() if "NVTE_" in path.read_text()]
    assert readers == []


def test_each_kind_of_call_has_its_own_margin():
    options = launch_options(None, None, None, {"backward": 2, "inference": 3})
    assert hash(options) and options.sm_margin == (0, 2, 3)
    assert [options.of(kind).sm_margin for kind in Margins._fields] == [0, 2, 3]
    one = launch_options("warp", None, None, 5)
    assert all(one.of(kind) is one for kind in Margins._fields)


def test_the_margin_of_a_kind_of_call_shrinks_its_grid(monkeypatch):
    """The rows fill an H200 many times over, so the margin decides the grid size."""
    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    monkeypatch.setattr(launch, "device", lambda index: DEVICES["H200"])
    monkeypatch.setattr(launch, "load", lambda each, index: each)
    x = numpy_as_cupy.ndarray((20000, 1024), np.float32)
    rstd = numpy_as_cupy.ndarray((20000,), np.float32)

    def forward(sm_margin, wants_statistics):
        options = launch_options(None, None, None, sm_margin)
        asked = ForwardOptions(False, (1024,), 1e-5, False, "float32", launch=options)
        purpose = FOR_STATISTICS if wants_statistics else FOR_Y
        prepared = PreparedForward(ForwardRequest(ForwardOperands(x), asked), purpose)
        return prepared, prepared.steps[0][0].grid_size

    def backward(options):
        asked = options._replace(dx_dtype="float32", dweight_dtype=None, dbias_dtype=None)
        request = BackwardRequest(BackwardOperands(x, x, None, rstd), asked)
        return PreparedBackward(request).steps[0][0].grid_size

    prepared, recorded = forward(MARGINS, True)
    assert recorded == forward(32, True)[1]
    assert forward(MARGINS, False)[1] == forward(96, False)[1]
    assert backward(prepared.backward) == backward(forward(64, True)[0].backward)
    assert forward(96, True)[1] < forward(64, True)[1] < recorded < forward(0, True)[1]


@BOTH
def test_a_module_passes_on_its_margins(ours, theirs, monkeypatch):
    seen = []
    monkeypatch.setattr(api, "launch_options", lambda *given: seen.append(given) or DEFAULTS)
    ours(8, sm_margin=MARGINS)(random_input(3, 8))
    assert seen == [(None, None, None, MARGINS)]


@pytest.mark.gpu
@BOTH
def test_margins_reach_the_plans(ours, theirs, monkeypatch):
    plain, seen = arguments.make_plan, []

    def make_plan(problem, device, num_rows, **options):
        seen.append(("forward" if problem.forward else "backward", options["sm_margin"]))
        return plain(problem, device, num_rows, **options)

    monkeypatch.setattr(arguments, "make_plan", make_plan)
    cache.forget()
    module = ours(1024, device="cuda", sm_margin={"forward": 1, "backward": 2, "inference": 3})
    x = random_input(600, 1024).cuda().requires_grad_()
    y = module(x)
    y.backward(torch.ones_like(y))
    with torch.no_grad():
        assert torch.equal(module(x), y)  # the grid changes, no bit of the result
    assert seen == [("forward", 1), ("backward", 2), ("forward", 3)]
    cache.forget()
