"""Folders of what is compiled and loaded: no other user can write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_cpu_calls import ROOT, instance

from cupynorm.explore.experiment import changed_sources
from cupynorm.gpu import on_cpu
from cupynorm.gpu.nvrtc import cache_folder

OTHER = 65534
CHANGES = {"another.cuh": "constexpr int another = 1;\n"}
CALL = "import on_cpu_calls; assert on_cpu_calls.block_sums(True, 0)"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    return tmp_path / "cupynorm"


@pytest.fixture
def compiler() -> str:
    try:
        return on_cpu.compiler()
    except on_cpu.NoCompilerError as error:
        pytest.skip(str(error))


def start(script: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, (process.returncode, stderr)


def test_folders_are_private_with_any_umask(cache):
    before = os.umask(0)
    try:
        folders = [cache_folder("on_cpu"), cache, changed_sources(CHANGES)]
    finally:
        os.umask(before)
    assert folders[0].parent == cache
    assert all(each.stat().st_mode & 0o777 == 0o700 for each in folders)


def test_folders_that_others_can_write_are_refused(cache):
    for folder in (cache, cache_folder("on_cpu")):
        folder.chmod(0o777)
        for use in (lambda: cache_folder("on_cpu"), lambda: instance("packs.cu", "scale_packs")):
            with pytest.raises(PermissionError, match=rf"rm -r {folder}, or set XDG_CACHE_HOME"):
                use()
        folder.chmod(0o700)
    assert cache_folder("on_cpu").is_dir()


@needs_root
def test_folders_of_another_user_are_refused(cache):
    cache.mkdir(mode=0o700)
    os.chown(cache, OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"no folder that only user {os.geteuid()} can"):
        cache_folder("on_cpu")


def test_changed_sources_go_with_their_process_alone(tmp_path):
    script = f"""
import os
from cupynorm.explore.experiment import changed_sources
folder = changed_sources({CHANGES!r})
if os.fork() == 0:
    raise SystemExit  # runs what is registered for the exit
os.wait()
assert (folder / "another.cuh").is_file()
"""
    finish(start(script, TMPDIR=str(tmp_path)))
    assert not list(tmp_path.glob("cupynorm-*"))


@pytest.mark.slow
def test_libraries_that_others_can_write_are_built_again(cache, compiler):
    """And deleted ones, while a process runs."""
    finish(start(CALL))
    libraries = sorted((cache / "on_cpu").iterdir())
    assert len(libraries) == 2
    for library in libraries:
        library.write_bytes(b"of another user")
        library.chmod(0o777)
    finish(start(CALL))
    assert all(each.stat().st_mode & 0o777 == 0o700 for each in libraries)
    again = "on_cpu_calls.block_sums"
    delete = f"import shutil; shutil.rmtree({str(cache)!r})"
    finish(start(f"{CALL}; {delete}; assert {again}(True, 1); {again}(False, 1)"))
