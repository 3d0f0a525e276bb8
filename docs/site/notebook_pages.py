"""Notebooks as Markdown: their text, their code, and their stored outputs. Nothing is run."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from latex2mathml.converter import convert

_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^\s$](?:[^$]*[^\s$\\])?)\$", re.DOTALL)
_ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def title(path: Path) -> str:
    """The first heading, with the number that the name of the file begins with."""
    first = next(cell for cell in _cells(path) if cell["cell_type"] == "markdown")
    heading = "".join(first["source"]).splitlines()[0].lstrip("# ")
    number = re.match(r"\d+", path.stem)
    return f"{number[0]} {heading}" if number and not heading[0].isdigit() else heading


def markdown(path: Path) -> str:
    parts = []
    for cell in _cells(path):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(with_formulas(source))
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"```python\n{source}\n```")
            parts += [_output(each) for each in cell["outputs"]]
    download = (
        f"<p class='source'>From <code>notebooks/{path.name}</code>, with stored outputs.</p>"
    )
    return "\n\n".join([*parts, download]) + "\n"


def _cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def with_formulas(text: str) -> str:
    """Formulas between dollars as MathML, which browsers show without a script."""

    def formula(match: re.Match[str]) -> str:
        display = "block" if match[1] else "inline"
        math = convert(match[1] or match[2], display=display)
        # Markdown would take these for emphasis.
        math = math.replace("_", "&#95;").replace("*", "&#42;").replace("\n", " ")
        # Markdown takes a line that begins with <math> for a block.
        tag = "div" if match[1] else "span"
        return f"<{tag}>{math}</{tag}>"

    return _FORMULA.sub(formula, text)


def _output(output: dict[str, Any]) -> str:
    """The richest form of an output that a page without scripts can show."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "text/html" in data:
        shown = data["text/html"]
    elif "image/svg+xml" in data:
        shown = data["image/svg+xml"]
        if "currentColor" not in shown:  # a plot: its names must not meet those of other plots
            shown = _image("image/svg+xml;utf8", quote(shown))
    elif "image/png" in data:
        shown = _image("image/png;base64", data["image/png"].replace("\n", ""))
    else:
        text = data.get("text/plain", "".join(output.get("text", "")))
        shown = f"<pre>{html.escape(_ANSI_COLOURS.sub('', text))}</pre>"
    return f'<div class="output">{shown}</div>'


def _image(kind: str, content: str) -> str:
    return f'<img alt="output of the cell above" src="data:{kind},{content}">'
