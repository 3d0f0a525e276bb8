"""Rules of the whole repository: names of files, words and formatting."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository_files import DEVICE_SOURCES, PYTHON, REPOSITORY, SOURCES


def test_no_module_has_a_catch_all_name():
    for path in REPOSITORY.rglob("*"):
        inside = path.relative_to(REPOSITORY).parts
        if path.suffix in (".py", ".cu", ".cuh", ".h") and not inside[0].startswith("."):
            assert path.stem.lower() not in (
                "utils",
                "util",
                "common",
                "helpers",
                "helper",
                "core",
                "misc",
            ), path


# Words.

NEVER = r"hidden_size|gamma|beta|grad_output|invvar|rsigma|epsilon|ctas?|nblks|is_rms_norm"
NEVER += r"|smem_size|qscale|prologue|epilogue"


def test_words_that_are_not_used():
    """No word of NEVER in kernels and reference. Strings may have PTX's spellings."""
    for path in [*DEVICE_SOURCES, *(REPOSITORY / "reference").glob("*.py")]:
        text = re.sub(r"\"[^\"\n]*\"", "", path.read_text())
        assert not re.findall(rf"\b({NEVER})\b", text, re.I), path.name


# Formatting.


def tool(name: str) -> str:
    found = shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if not found:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return found


def complaint(*command: str) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return (
        ""
        if done.returncode == 0
        else (done.stdout + done.stderr)[-4000:] or f"exit {done.returncode}"
    )


def test_cuda_sources_are_formatted():
    assert len(SOURCES) > 10
    assert not complaint(tool("clang-format"), "--dry-run", "-Werror", *map(str, SOURCES))


def test_clang_format_finds_wrong_format(tmp_path):
    path = tmp_path / "sample.cu"
    path.write_text("int  main( ){return 0 ;}\n")
    assert "code should be clang-formatted" in complaint(
        tool("clang-format"), "--dry-run", "-Werror", str(path)
    )


@pytest.mark.parametrize("command", (("format", "--check"), ("check",)), ids=" ".join)
def test_python_sources_are_formatted_and_linted(command):
    assert len(PYTHON) > 10
    assert not complaint(tool("ruff"), *command, "--no-cache", *map(str, PYTHON))


def test_ruff_finds_errors(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        "import os\nx = [ 1,2 ]\n# " + 15 * "too long " + "\nprint(x, \nx)  # fmt: skip\n"
    )
    config = ("--no-cache", "--config", str(REPOSITORY / "pyproject.toml"), str(path))
    complained = complaint(tool("ruff"), "check", *config)
    # An unused import, a line that is too long, a blank at the end of a line.
    assert "F401" in complained and "E501" in complained and "W291" in complained
    assert "1 file would be reformatted" in complaint(tool("ruff"), "format", "--check", *config)
    path.write_text("x = [1, 2]\n")
    assert not complaint(tool("ruff"), "check", *config) and not complaint(
        tool("ruff"), "format", "--check", *config
    )
