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


# What users are told to install.

OF_PYPI = (
    r"(?<![\w./-])cupynorm\[[a-z]",
    r"\b(pip3?|pipx|uv|conda|poetry)\b[^`|&;#]* (install|add)\b[^`|&;#]*(?<![\w./-])cupynorm\b",
)


def of_pypi(text: str) -> list[str]:
    """The lines that have an installer look for cupynorm outside of a checkout."""
    joined = re.sub(r'"\s*\n\s*f?"', "", text)  # a message over several lines
    lines = [line for line in joined.splitlines() if "--no-index" not in line]
    return [line for line in lines if any(re.search(each, line) for each in OF_PYPI)]


def test_no_text_has_users_install_a_name_that_anybody_may_take():
    """cupynorm is not on PyPI. pip takes pyproject's own extras from the project that it builds."""
    suffixes = (".py", ".md", ".ipynb", ".cu", ".cuh", ".h", ".cpp", ".yml", ".html", ".cff", "")
    folders = ("cupynorm", "cuda_src", "reference", "docs", "notebooks", ".ci")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    paths = [path for path in (*paths, *REPOSITORY.iterdir()) if path.suffix in suffixes]
    texts = {path: path.read_text() for path in paths if path.is_file() and path.name != ".git"}
    assert len(texts) > 200
    assert not {str(path): found for path, text in texts.items() if (found := of_pypi(text))}


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("pip install cupynorm", True),
        ("python -m pip install -U 'cupynorm[cuda12]'", True),
        ('f"needs it: "\n    "pip install "\n    "cupynorm"', True),
        ("uv add torch cupynorm", True),
        ("the extra `cupynorm[cuda13]` brings it", True),
        ('pip install ".[cuda12]"  # in a checkout of cupynorm', False),
        ('pip install --no-index --find-links wheels "cupynorm[cuda12]"', False),
        ('pip install "/cupynorm[cuda12]"', False),
        ("pip install . && python -m cupynorm check", False),
    ],
)
def test_texts_of_installers_are_told_apart(text, is_found):
    assert bool(of_pypi(text)) == is_found


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
