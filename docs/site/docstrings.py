"""The reference: docstrings of public names as HTML.

A docstring has at most three opening lines, examples, and entries "name, name: text", whose further
lines are indented. Other indented blocks are shown as they are.
"""

from __future__ import annotations

import ast
import enum
import html
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonConsoleLexer

import cupynorm

# Page -> its title, and the modules (or the folders of modules) whose public names it has.
_PAGES = {
    "norms": ("Norms", ("norm", "gpu", "dispatch.functor_text")),
    "linear": ("Norm and linear layer", ("linear", "parallel")),
    "torch": ("torch modules and recipes", ("nn",)),
    "plans": ("Plans", ("plan",)),
    "check": ("Gradient check", ("check",)),
    "explore": ("Exploring kernels", ("explore",)),
}
_FORMULAS = "reference/formulas.md"
_ENTRY = re.compile(r"^(\*?\w+(?:, \w+)*): (.*)")
# Several entries in a line: "dtype: of x. norm, direction: as for plan."
_NEXT_ENTRY = re.compile(r"(?<=[.)]) (?=[a-z]\w*(?:, \w+)*: )")
_ALIGNED = re.compile(r"\S {2,}\S")
_TITLE = re.compile(r"^[A-Z][^:]*:$")


def pages() -> dict[str, str]:
    """Path of each page and its title."""
    titles = {f"reference/{name}.md": title for name, (title, _) in _PAGES.items()}
    return titles | {_FORMULAS: "Formulas in float64"}


def names_of(page: str) -> list[str]:
    """The public names of a page. A module that no page names belongs to the last page."""
    found = {}
    for name, module in cupynorm._NAMES.items():
        claims = {
            claim: key
            for key, (_, modules) in _PAGES.items()
            for claim in modules
            if f"{module}.".startswith(f"{claim}.")
        }
        found[name] = claims[max(claims, key=len)] if claims else [*_PAGES][-1]
    return [name for name, key in found.items() if f"reference/{key}.md" == page]


def docstring_of(name: str) -> str:
    """The docstring of a public name. That of a constant follows it in its module."""
    value = getattr(cupynorm, name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        return inspect.cleandoc(value.__doc__ or "")
    module = importlib.import_module(f"cupynorm.{cupynorm._NAMES[name]}")
    return text_after(name, inspect.getsource(module))


def text_after(name: str, source: str) -> str:
    """The text that follows the assignment to a name."""
    body = ast.parse(source).body
    for node, following in zip(body, body[1:]):
        if any(getattr(target, "id", "") == name for target in getattr(node, "targets", ())):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            return inspect.cleandoc(str(following.value.value)) if is_text else ""
    return ""


# Pages.


def page(path: str) -> str:
    """A page as Markdown: headings, and HTML between them."""
    if path == _FORMULAS:
        return "\n\n".join(_formulas())
    parts = [f"# {pages()[path]}"]
    parts.append("The examples begin with `import cupynorm, numpy as np, torch`.")
    for name in names_of(path):
        value = getattr(cupynorm, name)
        parts += [f"## {name}", _signature(f"cupynorm.{name}", value), as_html(docstring_of(name))]
        parts += _members(value) if inspect.isclass(value) else []
        module = cupynorm._NAMES[name].replace(".", "/")
        parts.append(f'<p class="source">Defined in <code>cupynorm/{module}.py</code>.</p>')
    return "\n\n".join(parts)


def _formulas() -> Iterator[str]:
    yield "# Formulas in float64"
    yield "Modules of `cupynorm.reference`, and those of the gradient check that state rules."
    for name in _MODULES:
        text = inspect.cleandoc(importlib.import_module(name).__doc__ or "")
        yield f"## {name}"
        yield f"<pre>{html.escape(text)}</pre>"


def _members(value: type) -> Iterator[str]:
    """Public methods and properties that this library defines and documents."""
    for name, member in inspect.getmembers(value):
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        is_own = str(getattr(function, "__module__", "")).startswith("cupynorm.")
        if name.startswith("_") or not is_own or not inspect.isroutine(function):
            continue
        if not function.__doc__:
            continue
        heading = f".{name}"
        if member is function or inspect.ismethod(member):
            heading = f".{name}{_parameters(function, skip_self=True)}"
        text = as_html(inspect.cleandoc(function.__doc__))
        yield f'<div class="member"><p><code>{html.escape(heading)}</code></p>{text}</div>'


# Signatures.


def _signature(name: str, value: Any) -> str:
    """Nothing for constants, enumerations and exceptions."""
    is_class = inspect.isclass(value)
    if not callable(value) or (is_class and issubclass(value, enum.Enum | BaseException)):
        return ""
    function = value.__init__ if is_class and inspect.isfunction(value.__init__) else value
    text = name + _parameters(function, skip_self=is_class)
    return f'<pre class="signature">{html.escape(text)}</pre>'


def _parameters(function: Any, skip_self: bool = False) -> str:
    """In one line, or with a line for each parameter."""
    signature = inspect.signature(function)
    shown, before = [], None
    for parameter in signature.parameters.values():
        if skip_self and parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and before is not parameter.KEYWORD_ONLY:
            shown.append("*")
        before = parameter.kind
        shown.append(_parameter(parameter))
    result = signature.return_annotation
    arrow = f" -> {result}" if isinstance(result, str) and result != "None" else ""
    line = f"({', '.join(shown)}){arrow}"
    if len(line) <= 70:
        return line
    return "(\n" + "".join(f"    {each},\n" for each in shown) + f"){arrow}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    annotation, default = parameter.annotation, parameter.default
    if annotation is not parameter.empty:
        name = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        text += f": {name}"
    if default is parameter.empty:
        return text
    shown = str(default) if isinstance(default, enum.Enum) else repr(default)
    if shown.startswith("<"):  # the default of a dataclass that is made anew for each object
        shown = "..."
    return f"{text} = {shown}" if annotation is not parameter.empty else f"{text}={shown}"


# Text.


def as_html(docstring: str) -> str:
    """Paragraphs, titles, entries, examples and blocks of a docstring."""
    parts: list[str] = []
    entries: list[tuple[str, list[str]]] = []

    def close() -> None:
        if entries:
            lines = [f"{names}: {' '.join(text)}" for names, text in entries]
            pairs = [each.split(": ", 1) for line in lines for each in _NEXT_ENTRY.split(line)]
            items = (f"<dt>{_code(names)}</dt><dd>{_words(text)}</dd>" for names, text in pairs)
            parts.append(f"<dl>{''.join(items)}</dl>")
            entries.clear()

    for block in _blocks(docstring):
        if block[0] == "Examples:":
            close()
            parts.append(_example(textwrap.dedent("\n".join(block[1:]))))
        elif all(line.startswith("    ") for line in block):
            close()
            text = textwrap.dedent("\n".join(block))
            is_table = _ALIGNED.search(text)
            parts.append(
                f"<pre>{html.escape(text)}</pre>" if is_table else f"<p>{_words(text)}</p>"
            )
        elif len(block) == 1 and _TITLE.match(block[0]):
            close()
            parts.append(f'<p class="title">{_words(block[0].rstrip(":"))}</p>')
        elif any(line.startswith("- ") for line in block):
            close()
            parts += _bullets(block)
        else:
            plain: list[str] = []
            for line in block:
                entry = _ENTRY.match(line)
                if entry:
                    if plain:
                        close()
                        parts.append(f"<p>{_words(' '.join(plain))}</p>")
                        plain = []
                    entries.append((entry[1], [entry[2]]))
                elif line.startswith("    ") and entries and not plain:
                    entries[-1][1].append(line.strip())
                else:
                    close()
                    plain.append(line.strip())
            if plain:
                close()
                parts.append(f"<p>{_words(' '.join(plain))}</p>")
    close()
    return f'<div class="docstring">{"".join(parts)}</div>'


def _blocks(text: str) -> Iterator[list[str]]:
    """Lines between empty lines."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        yield block.split("\n")


def _bullets(block: list[str]) -> Iterator[str]:
    first = next(at for at, line in enumerate(block) if line.startswith("- "))
    if first:
        yield f"<p>{_words(' '.join(block[:first]))}</p>"
    items = re.split(r"(?:^|\n)- ", "\n".join(block[first:]))[1:]
    shown = "".join(f"<li>{_words(' '.join(item.split()))}</li>" for item in items)
    yield f"<ul>{shown}</ul>"


def _example(code: str) -> str:
    return highlight(code, PythonConsoleLexer(), HtmlFormatter(cssclass="codehilite"))


def _code(names: str) -> str:
    return re.sub(r"\w+", r"<code>\g<0></code>", html.escape(names))


def _words(text: str) -> str:
    """Text with code in backticks, and links to the public names that it has."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return _MODULE.sub(_link_to_formulas, _NAME.sub(_link, text))


def _link_to_formulas(match: re.Match[str]) -> str:
    anchor = match[0].replace(".", "")
    return f'<a href="formulas.html#{anchor}"><code>{match[0]}</code></a>'


def _link(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    page = next(page for page in pages() if name in names_of(page))
    file = page.removeprefix("reference/").removesuffix(".md")
    return f'<a href="{file}.html#{name.lower()}"><code>{match[0]}</code></a>'


def _is_unmistakable(name: str) -> bool:
    """Others, such as plan and Backward, are English words too and need the prefix."""
    return "_" in name or sum(map(str.isupper, name)) > 1


_ALL = "|".join(cupynorm._NAMES)
_UNMISTAKABLE = "|".join(filter(_is_unmistakable, cupynorm._NAMES))
_NAME = re.compile(rf"(?<![\w.])(?:cupynorm\.({_ALL})|({_UNMISTAKABLE}))(?!\.?\w)")
_FOLDER = Path(cupynorm.__path__[-1]) / "reference"  # in a checkout
_MODULES = [f"cupynorm.reference.{path.stem}" for path in sorted(_FOLDER.glob("[!_]*.py"))]
_MODULES += [f"cupynorm.check.{name}" for name in ("bounds", "check_function", "traps")]
_MODULE = re.compile("(?:" + "|".join(map(re.escape, _MODULES)) + r")(?!\.?\w)")
