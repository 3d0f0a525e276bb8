"""Tables, as text for terminals, HTML for notebooks and Markdown for documents."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

Rows = Sequence[Sequence[str]]  # the first row has the headings

# No colours: those of the page hold, light or dark.
_STYLE = "border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0"
_CELL = "padding: 1px 10px 1px 0; text-align"


def printable(text: object, longest: int = 120) -> str:
    """A stranger's text in one line: escapes for what is not printable, and the middle cut out of
    what is longer."""
    line = str(text)
    if len(line) > 2 * longest:  # before each character is looked at
        line = line[:longest] + line[-longest:]
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)
    return line if len(line) <= longest else f"{line[: longest // 2]}...{line[-longest // 2 :]}"


def as_text(rows: Rows) -> str:
    """Columns as wide as their widest cell, two spaces apart. The first row has the headings."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def as_markdown(rows: Rows, words: Collection[int] = ()) -> list[str]:
    """Lines. words: columns that hold words. The others are aligned to the right, as numbers."""
    heading, *body = rows
    rule = ["---" if at in words else "---:" for at in range(len(heading))]
    return [f"| {' | '.join(row)} |" for row in (heading, rule, *body)]


def pairs_as_html(pairs: Rows) -> str:
    """Names and values, one pair a line."""
    lines = [f'<table style="{_STYLE}"><tbody>']
    for name, value in pairs:
        cells = f"<th style='{_CELL}: left; vertical-align: top'>{html.escape(name)}</th>"
        cells += f"<td style='{_CELL}: left; white-space: pre-wrap'>{html.escape(value)}</td>"
        lines.append(f"<tr>{cells}</tr>")
    return "".join([*lines, "</tbody></table>"])


def as_html(rows: Rows) -> str:
    """The same as a table of HTML. Cells that look like numbers are aligned to the right."""
    heading, *body = rows
    lines = [f'<table style="{_STYLE}"><thead><tr>']
    lines += [f"<th style='{_CELL}: left'>{html.escape(cell)}</th>" for cell in heading]
    lines.append("</tr></thead><tbody>")
    for row in body:
        cells = []
        for cell in row:
            side = "right" if cell[:1].isdigit() or cell[:1] == "-" else "left"
            cells.append(f"<td style='{_CELL}: {side}'>{html.escape(cell)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*lines, "</tbody></table>"])
