"""experiment(): changed kernels are compiled, checked and set beside the shipped ones."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from nvrtc_here import needs_nvrtc

import cupynorm
from cupynorm.explore.experiment import changed_sources
from cupynorm.gpu import nvrtc
from cupynorm.gpu.nvrtc import source_files

TWO_PASS = "centered_values[at] = values[at] - first;"
NO_MEAN = {"statistics.cuh": [(TWO_PASS, "centered_values[at] = values[at];")]}
SAME = {"statistics.cuh": [(TWO_PASS, "centered_values[at] = -first + values[at];")]}
ONE_PASS = {
    "statistics.cuh": [
        (TWO_PASS, "centered_values[at] = values[at];"),
        (
            "corrected<moves_first>(first, {{rest, deviations.part[0]}}, count, eps)",
            """
        corrected(first, {{0, deviations.part[0] - count * first * first}}, count, eps)""",
        ),
    ]
}


def on_cpu(changes, num_cols: int = 256, **options) -> cupynorm.types.Experiment:
    return cupynorm.experiment(changes, num_cols, num_rows=4, on="cpu", **options)


def test_a_change_of_form_is_right():
    found = on_cpu(SAME)
    assert found and found.shipped.ok and found.changed.ok
    assert {each.tensor for each in found.changed.result.findings} == {"y", "mean", "rstd"}
    worst = [max(each.error for each in version.result.findings) for version in versions(found)]
    assert worst[0] == worst[1]


def versions(found: cupynorm.types.Experiment) -> tuple:
    return found.shipped, found.changed


def test_a_folder_that_lost_a_file_is_not_used_again(tmp_path, monkeypatch):
    """A cache may be deleted file by file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    texts = {path.name: path.read_text() for path in changed_sources(SAME).iterdir()}
    for spoil in (Path.unlink, lambda path: path.write_text("other")):
        spoil(changed_sources(SAME) / "statistics.cuh")
        again = changed_sources(SAME)
        assert {path.name: path.read_text() for path in again.iterdir()} == texts


def test_a_wrong_kernel_is_wrong():
    found = on_cpu(NO_MEAN)
    assert not found and found.shipped.ok and not found.changed.ok
    off = {each.tensor for each in found.changed.result.findings if not each.ok}
    assert off == {"y", "rstd"}
    text = str(found)
    assert "WRONG" in text and "right (" in text and "OFF:" in text
    assert repr(found) == text and "OFF:" in found._repr_html_()


@needs_nvrtc
def test_registers_and_instructions_are_those_of_the_compiler():
    found = on_cpu({"statistics.cuh": [(TWO_PASS, TWO_PASS + " centered_values[0] *= 1.0001f;")]})
    (launch,) = found.plan.launches
    cubin, used = nvrtc.compile_for(launch.kernel, 90, found.folder)
    assert found.changed.registers == [used.registers]
    assert len(found.changed.instructions) == 1
    assert 100 < found.shipped.instructions[0] < found.changed.instructions[0] < 10_000
    assert re.search(rf"cu: registers +{found.shipped.registers[0]} +{used.registers}", str(found))


@needs_nvrtc
def test_a_source_that_does_not_compile_is_a_fault():
    found = on_cpu({"statistics.cuh": [(TWO_PASS, "undeclared = 1;")]})
    assert not found and found.changed.result is None and found.shipped.ok
    assert "FAULT" in str(found) and 'identifier "undeclared"' in found.changed.fault


def test_a_kernel_that_hangs_is_a_fault():
    barrier = "__syncthreads();"
    text = source_files()["reduce.cuh"].read_text(encoding="utf-8")
    assert barrier in text
    waits_alone = text.replace(barrier, f"if (threadIdx.x > 0) {barrier}")
    found = on_cpu({"reduce.cuh": waits_alone}, num_cols=4096)
    assert not found and "Deadlock: thread" in found.changed.fault


def test_backward_is_changed_alone():
    """The forward of a check of backward is the shipped one."""
    found = on_cpu(NO_MEAN, direction="backward")
    assert found  # the change is one of forward
    assert {each.tensor for each in found.changed.result.findings} == {"dx", "dweight", "dbias"}


def test_changes_that_do_not_fit_are_refused():
    for changes, message in (
        (
            {"statistics.cuh": [("no such text", "")]},
            "has 'no such text' 0 times; expected it once",
        ),
        (
            {"statistics.cuh": [("Compute", "")]},
            "expected it once: give more of the text around it",
        ),
        ({"other.cuh": [("a", "b")]}, "changes names 'other.cuh', which is not in cuda_src"),
        ({"../other.cuh": "text"}, "changes names '../other.cuh'; expected a .cu or .cuh file"),
        ({}, "leaves every file as it is"),
    ):
        with pytest.raises(ValueError, match=message):
            changed_sources(changes)
    with pytest.raises(TypeError, match="changes is a list; expected a dict from files to texts"):
        changed_sources([])
    with pytest.raises(ValueError, match="on is 'tpu'"):
        cupynorm.experiment(SAME, on="tpu")
    with pytest.raises(ValueError, match="norm is 'batch_norm'"):
        on_cpu(SAME, norm="batch_norm")


@pytest.mark.gpu
def test_a_gpu_also_tells_the_time():
    found = cupynorm.experiment(SAME, 4096)
    assert found and found.shipped.microseconds > 0
    assert abs(found.changed.microseconds / found.shipped.microseconds - 1) < 0.5
    assert not cupynorm.experiment(NO_MEAN, 4096)


def test_an_input_of_ones_own():
    """A one-pass variance is right on rows near zero, and wrong where the mean is large."""
    rows = np.random.default_rng(0).standard_normal((2, 256)) + [[0.0], [30000.0]]
    found = on_cpu(ONE_PASS, input=rows, dtype="float32", strategy="warp")
    assert found.shipped.ok and not found
    rstd = 1 / np.sqrt(np.float32(rows).astype(np.float64).var(axis=1) + 1e-5)
    errors = [np.abs(each.tensors["rstd"] / rstd - 1) for each in versions(found)]
    assert errors[0].max() < 1e-6 and errors[1][0] < 1e-6 < 0.01 < errors[1][1]
    assert set(found.changed.tensors) == {"y", "mean", "rstd"}
    with pytest.raises(
        ValueError, match=r"input has shape \(3,\); expected \(num_rows, num_cols\)"
    ):
        on_cpu(ONE_PASS, input=np.ones(3))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_cols": 0, "on": "cpu"}, "x is 4 x 0; expected at least one element"),
        ({"num_rows": 0, "on": "cpu"}, "x is 0 x 64; expected at least one element"),
        ({"seed": -1, "on": "cpu"}, "seed is -1; expected an int of 0 or more"),
        pytest.param(
            {"on": "gpu"},
            "on is 'gpu', but CuPy finds no GPU",
            marks=pytest.mark.skipif(nvrtc.has_gpu(), reason="there is a GPU"),
        ),
    ],
)
def test_arguments_of_which_nothing_can_be_learnt_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        cupynorm.experiment(SAME, **{"num_cols": 64, "num_rows": 4, **options})
