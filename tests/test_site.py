"""The site of docs/: it builds without warnings and without a network, and what it says is so."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from docstrings import as_html, names_of, pages
from test_readme import block, rows

import cupynorm

ROOT = Path(__file__).parents[1]
INSTALL, ERRORS = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("install.md", "errors.md")
)

# Errors.


def code_of(cell: str) -> str:
    found = re.match(r"^`([^`]+)`", cell)
    assert found, cell
    return found[1]


def raised_texts() -> list[str]:
    """The messages that the package raises, with … for each value in them."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return "".join(map(text, node.values)) if isinstance(node, ast.JoinedStr) else "…"

    return [
        text(node.exc.args[0])
        for path in sorted((ROOT / "cupynorm").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    ]


def test_messages_of_missing_parts_are_in_the_sources():
    texts = raised_texts()
    table = rows(block("errors of machines", ERRORS))
    assert len(texts) > 200 and len(table) >= 5
    for message, *_ in table:
        assert any(text.startswith(code_of(message)) for text in texts), message


CALLS = [
    row
    for name in ("arrays", "options", "torch")
    for row in rows(block(f"errors of {name}", ERRORS))
]


@pytest.mark.parametrize("row", CALLS, ids=lambda row: re.sub(r"\W+", "-", row[0])[1:40])
def test_calls_raise_the_messages_of_the_page(row):
    torch = pytest.importorskip("torch")
    message, call = map(code_of, row[:2])
    if "torch finds no GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    names = {"cupynorm": cupynorm, "np": np, "torch": torch}
    names |= {"x": np.ones((2, 8)), "t": torch.ones(2, 8)}
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
        exec(call, names)
    assert str(raised.value) == message


# Install.


def test_the_extras_of_the_install_page_are_those_of_pyproject():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(
        r"\[([\w,]+)\]\"", "\n".join(row[1] for row in rows(block("extras", INSTALL)))
    )
    assert {name for names in named for name in names.split(",")} == set(extras)


# Rendering.


def test_a_docstring_becomes_html():
    shown = as_html(
        "One line.\n\nExamples:\n    >>> 1 < 2\n    True\n\n"
        "x: of shape (*, n),\n    see layer_norm. y, z: as cupynorm.Plan.\nPlain __text__.\n\n"
        "A title:\n\na:  b\n"
    )
    assert shown.startswith('<div class="docstring"><p>One line.</p><div class="codehilite">')
    assert "&lt;" in shown and "(*, n)" in shown and "__text__" in shown
    assert '<a href="norms.html#layer_norm"><code>layer_norm</code></a>' in shown
    assert '<dt><code>y</code>, <code>z</code></dt><dd>as <a href="plans.html#plan">' in shown
    assert '<p class="title">A title</p>' in shown


def test_every_public_name_is_on_one_page():
    found = [name for page in pages() for name in names_of(page)]
    public = {name for name in dir(cupynorm) if not name.startswith("_")}
    assert sorted(found) == sorted(public - {*cupynorm._MODULES})


# The site.


class Links(HTMLParser):
    """Names of the elements of a page, its links, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.names.add(given.get("id") or "")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given.get("href") or "")
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])


def faults_of(site: Path) -> list[str]:
    """What pages load from other servers, and links that lead nowhere."""
    site = site.resolve()
    found = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    faults = []
    for path, links in found.items():
        faults += [
            f"{path.name} loads {each}" for each in links.loaded if re.match(r"(https?:)?//", each)
        ]
        if path.name == "404.html":
            continue  # its links begin at the root of a server
        for each in links.links + links.loaded:
            if re.match(r"(https?:)?//|mailto:|data:", each):
                continue
            name, _, anchor = unquote(each).partition("#")
            target = (path.parent / name.split("?")[0]).resolve() if name else path
            if not target.exists() or (anchor and anchor not in found[target].names):
                faults.append(f"{path.name} links to {each}")
    remote = re.compile(r"(url\(|@import)\s*[\"']?(https?:)?//")
    sheets = (path for path in site.rglob("*.css") if remote.search(path.read_text("utf-8")))
    return faults + [f"{path.name} loads from a server" for path in sheets]


def test_faults_of_pages_are_found(tmp_path):
    (tmp_path / "sheet.css").write_text('@import "https://fonts.example/a.css";')
    (tmp_path / "page.html").write_text(
        '<h1 id="top">T</h1><a href="#top"><a href="#end"><a href="page.html#top">'
        '<a href="other.html"><script src="https://cdn.example/a.js"></script>'
        '<link href="sheet.css"><a href="https://example.org">'
    )
    assert faults_of(tmp_path) == [
        "page.html loads https://cdn.example/a.js",
        "page.html links to #end",
        "page.html links to other.html",
        "sheet.css loads from a server",
    ]


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml")
    from notebook_pages import with_formulas

    shown = with_formulas("the sum $x_c * 2$, $$y = 1$$ and $5 or 6 $ more")
    assert shown.count("<math") == 2 and "<div><math" in shown and "<span><math" in shown
    assert "$5 or 6 $ more" in shown
    assert "*" not in shown and "_" not in shown  # Markdown would take them for emphasis


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_needs_no_network(tmp_path):
    pytest.importorskip("torch")
    for library in ("mkdocs", "latex2mathml"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    command += ["--config-file", str(ROOT / "docs" / "site" / "mkdocs.yml")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    assert not faults_of(tmp_path)
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert "LayerNorm and RMSNorm for NVIDIA GPUs" in pages["index.html"]
    assert "speed.svg" in pages["index.html"] and (tmp_path / "speed.svg").exists()
    assert "-1.069" in pages["norms.html"] and 'id="layer_norm_backward"' in pages["norms.html"]
    assert "expected the last dimensions of input" in pages["errors.html"]
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        num_pictures = path.read_text(encoding="utf-8").count('"image/')
        shown = pages[f"{path.stem}.html"]
        assert shown.count("<img") + shown.count("<svg") >= num_pictures
        assert "$$" not in shown
