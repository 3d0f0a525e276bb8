"""nvrtc.py: what the cache's key depends on, two processes, and a machine without CuPy or NVRTC."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from nvrtc_here import WHY_MISSING, needs_nvrtc

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import choose
from cupynorm.dispatch.functor_text import FunctorError, Fused, FusedPart, functor
from cupynorm.dispatch.instances import Kernel
from cupynorm.gpu.nvrtc import compile_for, cuda_src, source, source_files
from cupynorm.plans import plan

REPOSITORY = Path(__file__).parents[2]


@needs_nvrtc
def test_an_error_of_the_compiler_is_passed_on():
    with pytest.raises(RuntimeError, match=r"(?s)forward_warp<nonsense>.*nonsense"):
        compile_for(Kernel("forward_warp.cu", "forward_warp<nonsense>"), 90)
    wrong = functor("wrong", "// a comment\ny = gat;")
    problem = replace(plan(64, device="H200").problem, store=Fused((FusedPart(wrong),)))
    with pytest.raises(FunctorError, match=r'functor wrong\(2\).*"gat" is undefined'):
        compile_for(choose(problem, DEVICES["H200"]).kernel, 90)


# The cache's key.

KERNEL = plan(768, 8, device="H200").launches[0].kernel


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "cuda_src"
    shutil.copytree(cuda_src(), copy)
    return copy


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} no longer has {old!r}"
    path.write_text(text.replace(old, new, 1))


def test_source_is_a_digest_and_one_include(folder):
    lines = source(KERNEL).splitlines()
    assert len(lines) == 2 and lines[1] == '#include "forward_warp.cu"'
    assert lines[0].startswith("// ") and len(bytes.fromhex(lines[0][3:])) == 32
    assert source(KERNEL, folder) == source(KERNEL), (
        "the digest depends on what files hold, not on where they are"
    )


def test_every_source_file_counts_in_the_digest(folder):
    before = source(KERNEL, folder).splitlines()
    assert len(source_files(folder)) == len(source_files()) > 60
    for path in source_files(folder).values():
        text = path.read_text()
        path.write_text(f"{text}// changed\n")
        changed = source(KERNEL, folder).splitlines()
        assert changed[0] != before[0] and changed[1] == before[1], path.name
        path.write_text(text)


@needs_nvrtc
def test_a_changed_header_gives_another_cubin(folder):
    """A copy of the sources gives the same cubin, unless a header that it includes changes."""
    original = compile_for(KERNEL, 90)[0]
    assert compile_for(KERNEL, 90, folder)[0] == original
    edit(
        source_files(folder)["store.cuh"],
        "y_values[at] * weights[at] + biases[at]",
        "y_values[at] * weights[at] - biases[at]",
    )
    assert compile_for(KERNEL, 90, folder)[0] != original
    assert compile_for(KERNEL, 90)[0] == original


@pytest.mark.gpu
def test_two_processes_share_an_empty_cache(tmp_path):
    """CuPy renames whole files into its disk cache, so two processes can compile at once."""
    script = """
import cupy, cupynorm, numpy
x = cupy.arange(24, dtype="float32").reshape(3, 8) ** 2
y = cupynorm.layer_norm(x, 8).get()
expected = cupynorm.layer_norm(x.get(), 8)
print(float(numpy.abs(y - expected).max()))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes |= {"cwd": REPOSITORY, "env": environment(CUPY_CACHE_DIR=str(tmp_path))}
    command = [sys.executable, "-c", script]
    started = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert float(output) < 1e-5
    # Other files are of CuPy's own kernels (arange, power).
    ours = [path for path in tmp_path.glob("*.cubin") if b"forward_warp" in path.read_bytes()]
    assert len(ours) == 1


# Without CuPy, without NVRTC.


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | changes


REFUSE = """
import importlib.abc, json, sys

class Refuse(importlib.abc.MetaPathFinder):
    def __init__(self, *names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if any(name == refused or name.startswith(refused + ".") for refused in self.names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def outcome(call):
    try:
        return ["returned", repr(call())]
    except Exception as error:
        return [type(error).__module__ + "." + type(error).__name__, str(error)]
"""


def run_script(script: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", REFUSE + script],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_cupy():
    """NumPy input works. Calls that need a GPU name the package to install; the import does not."""
    found = run_script("""
sys.meta_path.insert(0, Refuse("cupy", "cupy_backends"))
import numpy
import cupynorm
from cupynorm.gpu.nvrtc import compile_for

class Exporter:
    shape, dtype = (2, 4), numpy.dtype("float32")
    def __dlpack__(self, **options):
        raise AssertionError("never asked")
    def __dlpack_device__(self):
        return 2, 0

x = numpy.array([[1.0, 2.0, 3.0, 6.0]])
forward = cupynorm.layer_norm_forward(x, 4, eps=0.0)
backward = cupynorm.layer_norm_backward(x, x, 4, forward.mean, forward.rstd)
kernel = cupynorm.plan(768, 8, device="H200").launches[0].kernel
print(json.dumps({
    "y": cupynorm.layer_norm(x, 4, eps=0.0).tolist(), "dbias": backward.dbias.tolist(),
    "layer_norm": outcome(lambda: cupynorm.layer_norm(Exporter(), 4)),
    "rms_norm_forward": outcome(lambda: cupynorm.rms_norm_forward(Exporter(), 4)),
    "backward": outcome(
        lambda: cupynorm.rms_norm_backward(Exporter(), Exporter(), 4, Exporter())
    ),
    "plan": outcome(lambda: cupynorm.plan(768)),
    "compile_for": outcome(lambda: compile_for(kernel, 90)),
    "is ImportError": issubclass(cupynorm.MissingLibraryError, ImportError),
    "cupy": "cupy" in sys.modules,
}))
""")
    assert found["cupy"] is False and found["is ImportError"] is True
    # mean 3, deviations -2 -1 0 3, variance 14 / 4
    assert found["y"] == [
        pytest.approx([value / 3.5**0.5 for value in (-2, -1, 0, 3)], rel=1e-15, abs=0)
    ]
    assert found["dbias"] == [1.0, 2.0, 3.0, 6.0]
    assert found["plan"][0] == "returned"  # it is for an H200
    for call in ("layer_norm", "rms_norm_forward", "backward", "compile_for"):
        kind, message = found[call]
        assert kind == "cupynorm.gpu.nvrtc.MissingLibraryError", (call, kind, message)
        assert (
            "pip install '.[cuda12]'" in message
            and "CuPy" in message
            and "No module named 'cupy'" in message
        )


@pytest.mark.skipif("CuPy could not" in WHY_MISSING, reason="CuPy is needed to take NVRTC from it")
def test_without_nvrtc():
    """CuPy does not find the library: compile_for names the package to install."""
    found = run_script("""
import cupy, numpy
class Missing:
    def __getattr__(self, name):
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")
import cupy_backends.cuda.libs
sys.modules["cupy_backends.cuda.libs.nvrtc"] = cupy_backends.cuda.libs.nvrtc = Missing()
import cupynorm
from cupynorm.gpu.nvrtc import compile_for
kernel = cupynorm.plan(768, 8, device="H200").launches[0].kernel
print(json.dumps({
    "compile_for": outcome(lambda: compile_for(kernel, 90)),
    "y": cupynorm.rms_norm(numpy.array([[3.0, 4.0]]), 2, eps=0.0).tolist(),
}))
""")
    kind, message = found["compile_for"]
    assert kind == "cupynorm.gpu.nvrtc.MissingLibraryError", message
    assert message.startswith("NVRTC could not be loaded (CuPy failed to load libnvrtc.so.12)")
    assert "pip install '.[cuda12]'" in message
    assert found["y"] == [pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5], rel=1e-15, abs=0)]
