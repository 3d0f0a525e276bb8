"""The site builds without a warning: links, docstrings, notebooks."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupynorm

ROOT = Path(__file__).parents[1]


def test_every_public_name_has_a_place_in_the_reference():
    pages = (path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    placed = re.findall(r"^::: cupynorm\.([\w.]+)$", "\n".join(pages), re.MULTILINE)
    moved = [f"{module}.{name}" for name, module in cupynorm._MOVED.items()]
    assert sorted(placed) == sorted([*cupynorm._NAMES, *moved, "functors"])


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    for module in ("material", "mkdocstrings", "mkdocs_jupyter"):
        pytest.importorskip(module, reason='pip install -e ".[docs]" brings it')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert list(tmp_path.rglob(notebook.name)), f"{notebook.name} cannot be downloaded"
    pages = "".join(path.read_text() for path in (tmp_path / "reference").glob("*.html"))
    shown = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", pages)).split())
    for name in ("check", "layer_norm", "LayerNormLinear"):
        *_, last = (getattr(cupynorm, name).__doc__ or "").strip().split("\n\n")
        assert " ".join(last.split()) in shown, f"the docstring of {name} is not whole"
