"""Kernels on the CPU: sanitizers, the compiler and the cache of what it compiled."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from on_cpu_calls import KERNELS, ROOT, aligned, block_sums, instance, words

from cupynorm.gpu import on_cpu
from cupynorm.gpu.on_cpu import NoCompilerError, OnCpuError

# Sanitizers.

FAULTS_AND_FIBERS = """
z = np.zeros(16 * 256, np.float32)
v = np.arange(16.0 * 256, dtype=np.float32)
for seed in range(3):
    for name in ("warp_sum<Fault::lane_exited>", "warp_sum<Fault::own_lane_missing>"):
        try:
            instance("warp_calls.cu", name).launch(1, 64, words(v, z), seed=seed)
            raise SystemExit("no fault")
        except on_cpu.OnCpuError:
            pass
    exchange = instance("cluster_exchange.cu", "cluster_exchange<Synchronise::both>")
    exchange.launch(16, 256, words(v, z), smem_bytes=1024, cluster_size=16, seed=seed)
    assert z.sum() == v.sum()
"""
SCALE = 'instance("packs.cu", "scale_packs").launch(1, 64, words(x.ctypes.data{}, y, {}))'
READ = 'instance("packs.cu", "shared_read").launch(1, 32, words(y, {}), smem_bytes=128)'
# What runs, and words of the report that ends the process; none if all is well.
SANITIZED = {
    "fibers and faults": (FAULTS_AND_FIBERS, ()),
    "a global read out of bounds": (
        "y = np.zeros(2048, np.float32)\n" + SCALE.format("", 257),
        ("AddressSanitizer: heap-buffer-overflow", "scale_packs"),
    ),
    "a shared read": (READ.format(0), ()),
    "a shared read out of bounds": (
        READ.format(1),
        ("AddressSanitizer: use-after-poison", "shared_read"),
    ),
    "a misaligned pack": (SCALE.format(" + 4", 200), ("misaligned address", "packs.cu")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers(name):
    body, report = SANITIZED[name]
    try:
        environment = on_cpu.sanitized_environment()
    except NoCompilerError as error:
        pytest.skip(str(error))
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(KERNELS.parent)!r}]
from functools import partial
import on_cpu_calls
from on_cpu_calls import np, on_cpu, words
instance = partial(on_cpu_calls.instance, sanitized=True)
x, y = np.ones(1024, np.float32), np.zeros(1024, np.float32)
{body}
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode != 0) == bool(report), result.stderr
    assert all(each in result.stderr for each in report)


def test_address_sanitizer_without_its_environment():
    with pytest.raises(OnCpuError, match="sanitized_environment"):
        instance("packs.cu", "scale_packs", sanitized=True)


# Compiler and cache.


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        NoCompilerError, match=r"Looked for c\+\+, g\+\+ and clang\+\+ .* Install g\+\+ 11 or newer"
    ):
        instance("packs.cu", "scale_packs")
    monkeypatch.setenv("CXX", "cxx-that-is-not-there")
    with pytest.raises(NoCompilerError, match=r"\$CXX \(cxx-that-is-not-there\)"):
        on_cpu.compiler()


def test_a_compiler_that_is_too_old(monkeypatch, tmp_path):
    old = tmp_path / "g++"
    old.write_text('#!/bin/sh\necho "#define __cplusplus 201709L"\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoCompilerError, match=r"g\+\+ cannot compile C\+\+20"):
        on_cpu.compiler()


def program(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


@pytest.mark.slow
def test_cxx_that_starts_a_compiler(monkeypatch, tmp_path):
    cxx = f"ccache {on_cpu.compiler()}"
    program(tmp_path / "ccache", 'exec "$@"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert on_cpu.compiler() == f"{tmp_path}/{cxx}"
    assert block_sums(True, 0)
    with pytest.raises(OnCpuError, match=rf"does not compile with .*/{re.escape(cxx)}:"):
        instance("tile.cu", "tile_sizes<nonsense>")


def test_a_message_that_is_not_utf_8(monkeypatch, tmp_path):
    says = f'case "$*" in *-dM*) exec {on_cpu.compiler()} "$@";; esac'
    program(tmp_path / "cxx", f"{says}\nprintf 'gr\\374n' >&2\nexit 1")
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    with pytest.raises(OnCpuError, match=r"does not compile with .*cxx:\ngr\\xfcn"):
        instance("tile.cu", "tile_sizes<float, Tile{1, 32}>")


def test_a_kernel_that_does_not_compile():
    with pytest.raises(OnCpuError, match=r"(?s)tile_sizes.*does not compile.*error"):
        instance("tile.cu", "tile_sizes<float, Tile{.pack_sizes = 4}>")
    with pytest.raises(OnCpuError, match=r"there is no missing\.cu"):
        instance("missing.cu", "missing")


def test_a_changed_header_recompiles(tmp_path):
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    x, y = aligned(64), aligned(64)
    x[:] = 1
    for factor in (2, 3, 2):
        (folder / "factor.cuh").write_text(f"constexpr float factor = {factor};\n")
        instance("packs.cu", "scale_packs", folder=folder).launch(1, 32, words(x, y, 16))
        assert (y == factor).all()


def test_only_what_a_source_includes_recompiles(tmp_path, monkeypatch):
    """Neither another file of the folder, nor the same files in another folder."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(KERNELS, first)
    (first / "factor.cuh").write_text('#include "deeper.cuh"\n')
    (first / "deeper.cuh").write_text("constexpr float factor = 5;\n")
    kernel = instance("packs.cu", "scale_packs", folder=first)
    shutil.copytree(first, second)
    (second / "another.cuh").write_text("constexpr int unused = 1;\n")
    with monkeypatch.context() as patch:
        patch.setattr(on_cpu, "_build", lambda *_: pytest.fail("compiled again"))
        assert instance("packs.cu", "scale_packs", folder=second) is kernel
    (second / "deeper.cuh").write_text("constexpr float factor = 6;\n")
    assert instance("packs.cu", "scale_packs", folder=second) is not kernel


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert block_sums(True, 0)
