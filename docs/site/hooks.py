"""MkDocs: pages that are made of other files, and links between the two.

index.md is README.md, reference/ comes from docstrings, notebooks/ from stored notebooks.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the docstrings of this checkout

import docstrings  # noqa: E402
import notebook_pages  # noqa: E402

# Page -> the file of the repository that it shows. docs/*.md are pages by themselves.
COPIES = {
    "index.md": "README.md",
    "notebooks/overview.md": "notebooks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_MARKER = re.compile(r"^<!-- /?[\w-]+ -->$", re.MULTILINE)  # for the tests of the documents
_LINK = re.compile(r"(?<=\]\()(?!https?:)([\w./-]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = {title: name for name, title in docstrings.pages().items()}
    _section(config, "Reference", pages)
    notebooks = {notebook_pages.title(path): _page(path) for path in NOTEBOOKS}
    _section(config, "Notebooks", {"All notebooks": "notebooks/overview.md"} | notebooks)
    return config


def _section(config: MkDocsConfig, name: str, pages: dict[str, str]) -> None:
    section = next(each for each in config.nav if name in each)
    section[name] = [{title: page} for title, page in pages.items()]


def _page(notebook: Path) -> str:
    return f"notebooks/{notebook.stem}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    texts = {page: (ROOT / name).read_text(encoding="utf-8") for page, name in COPIES.items()}
    texts |= {name: docstrings.page(name) for name in docstrings.pages()}
    texts |= {_page(path): notebook_pages.markdown(path) for path in NOTEBOOKS}
    texts["site/code.css"] = _colours_of_code()
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def _colours_of_code() -> str:
    light, dark = HtmlFormatter(style="default"), HtmlFormatter(style="github-dark")
    rules = light.get_style_defs(".codehilite")
    return rules + "\n" + dark.get_style_defs("[data-bs-theme=dark] .codehilite")


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository become links to their pages."""
    name = page.file.src_uri
    notebooks = {f"notebooks/{path.name}": _page(path) for path in NOTEBOOKS}
    is_notebook = name in notebooks.values()
    folder = posixpath.dirname(name if is_notebook else COPIES.get(name, f"docs/{name}"))
    pages = {shown: copy for copy, shown in COPIES.items()} | notebooks

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target not in pages and not target.startswith("docs/"):
            if is_notebook:
                return match[1]  # brackets of the code
            raise PluginError(f"{name} links to {target}, which the site does not have")
        return posixpath.relpath(
            pages.get(target, target.removeprefix("docs/")), posixpath.dirname(name) or "."
        )

    if name.startswith("reference/"):
        return text
    return _LINK.sub(link, _MARKER.sub("", text))
