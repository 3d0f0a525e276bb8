"""A wheel works outside the repository: sources, reference and data inside, and small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*", "tests", "docs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of a copy: two processes that build in one folder disturb each other.
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, source, ignore=LEFT_OUT, dirs_exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--wheel-dir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("no network: setuptools, which builds the wheel, cannot be fetched")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("cupynorm-*.whl"))


@pytest.mark.slow
def test_it_holds_all_sources_and_is_small(wheel: Path):
    packed = zipfile.ZipFile(wheel).infolist()
    assert wheel.stat().st_size <= 535_000  # to become 450,000
    suffixes = {Path(each.filename).suffix for each in packed if ".dist-info/" not in each.filename}
    assert suffixes <= {".py", ".cu", ".cuh", ".cpp", ".h", ".npz", ".csv", ".typed"}, suffixes
    held = {each.filename for each in packed}
    assert "cupynorm/py.typed" in held
    for folder, pattern, inside in (
        ("cuda_src", "**/*.cu*", "cupynorm/cuda_src"),
        ("cuda_src/on_cpu", "*", "cupynorm/cuda_src/on_cpu"),
        ("reference", "*.py", "cupynorm/reference"),
        ("cupynorm", "**/*.py", "cupynorm"),
        ("cupynorm/data", "*.npz", "cupynorm/data"),
    ):
        paths = list((ROOT / folder).glob(pattern))
        assert paths, folder
        for path in filter(Path.is_file, paths):
            assert f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" in held, path


@pytest.mark.slow
def test_it_works_outside_the_repository(wheel: Path, tmp_path: Path):
    """Unpacked outside the repository it computes, plans and checks kernels on the CPU."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import numpy, cupynorm, cupynorm.reference, pathlib\n"
        "for module in (cupynorm, cupynorm.reference):\n"
        "    assert pathlib.Path(module.__file__).is_relative_to(pathlib.Path.cwd()), module\n"
        "y = cupynorm.layer_norm(numpy.array([[1.0, 3.0]]), 2, eps=0.0)\n"
        "assert abs(y - [[-1, 1]]).max() < 1e-15\n"
        "result = cupynorm.check(shapes=[(3, 33)], on='cpu')\n"
        "assert result.ok and len(result.findings) == 6 + 4\n"
        "print('works')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "site",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip().endswith("works"), ran.stderr


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path):
    """pyright and mypy read a path in a .pth file, and do not run an import hook."""
    pytest.importorskip("setuptools")
    shutil.copytree(ROOT, tmp_path / "source", ignore=LEFT_OUT)
    code = "from setuptools import build_meta; build_meta.build_editable('wheel')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "source" / "wheel").glob("*.whl")
    with zipfile.ZipFile(path) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".pth"))
        assert packed.read(name).decode().split() == [str(tmp_path / "source")]
