"""The benchmark's tables in README.md and docs/benchmarks.md, and the chart of the README."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..table import as_markdown
from .cells import COPY, OURS
from .plot import plot, require_matplotlib
from .report import BenchResult, Measurement, by_shape

README, DOCUMENT, CHART = Path("README.md"), Path("docs/benchmarks.md"), Path("docs/speed.svg")
# The widths of the README's table: powers of two, a width of many models, and an odd one.
SHORT_COLS = (128, 768, 1024, 4096, 4097, 8192, 16384, 65536)


def check_documents() -> None:
    """Raises ValueError or MissingLibraryError if `write_documents` would fail here."""
    require_matplotlib()
    for path in (README, DOCUMENT):
        if not path.is_file():
            raise ValueError(f"--readme: there is no {path} in {Path.cwd()}")
        rewrite_table(path.read_text(encoding="utf-8"), "")


def write_documents(result: BenchResult) -> None:
    """Rewrites the tables of both documents in the current folder, and the chart."""
    plot(first_family(result), CHART, panel=(4.9, 2.9))
    for path, table in ((README, short_markdown(result)), (DOCUMENT, result.markdown())):
        text = rewrite_table(path.read_text(encoding="utf-8"), table)
        path.write_text(text, encoding="utf-8")


def rewrite_table(text: str, table: str, name: str = "bench") -> str:
    """`text` with `table` between its markers of a name.

    Raises ValueError unless it has both markers once and in order.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        documents = f"{README} and {DOCUMENT} need" if name == "bench" else f"{DOCUMENT} needs"
        raise ValueError(
            f"{documents} the markers {start} and {end} around the table, "
            "each once and in this order"
        )
    before, after = text.partition(start)[0], text.partition(end)[2]
    return f"{before}{start}\n\n{table.strip()}\n\n{end}{after}"


def first_family(result: BenchResult) -> BenchResult:
    """The measurements of the first norm and dtype."""
    families: dict[tuple[str, str], list[Measurement]] = {}
    for each in result.measurements:
        families.setdefault((each.cell.norm, each.cell.details), []).append(each)
    return replace(result, measurements=next(iter(families.values()), []))


def short_markdown(result: BenchResult) -> str:
    """The README's table: shares of the first norm and dtype.

    It has the widths SHORT_COLS, or all where none of them was measured.
    """
    family = first_family(result).measurements
    family = [each for each in family if each.cell.num_cols in SHORT_COLS] or family
    directions = list(dict.fromkeys(each.cell.direction for each in family))
    rows = [["num_cols"]]
    for direction in directions:
        rows[0] += [f"{direction}: {OURS}", "torch", "best other"]
    for (num_cols, _), measured in by_shape(family).items():
        cells = (text for name in directions for text in _shares(measured.get(name)))
        rows.append([f"{num_cols:,}", *cells])
    copies = [each.gigabytes_per_second(COPY) / 1e3 for each in family]
    title = ", ".join(dict.fromkeys(f"{each.cell.norm}, {each.cell.details}" for each in family))
    speeds = dict.fromkeys(f"{each:.1f}" for each in (min(copies), max(copies))) if copies else {}
    speed = f"{' to '.join(speeds)} TB/s" if speeds else "not measured"
    lines = [f"{result.headline()}.", f"{result.method()}."]
    lines += [
        f"{title}: share of a copy's speed ({speed}). Bold: the fastest, or within its spread."
    ]
    # A block, which is scrolled where the command is wider than the page.
    return "\n".join(
        [*lines, "", *as_markdown(rows), "", f"<pre>{result.settings['command']}</pre>"]
    )


def _shares(measured: Measurement | None) -> list[str]:
    """The shares of this library, torch, and the fastest of the others with its name."""
    if measured is None:
        return ["-"] * 3

    def share(name: str) -> str:
        text = f"{measured.share(name):.2f}"
        return f"**{text}**" if name in measured.fastest else text

    own = [share(name) if name in measured.right else "-" for name in (OURS, "torch")]
    other = measured.best_of([name for name in measured.samples if name not in (OURS, "torch")])
    return [*own, f"{other} {share(other)}" if other else "-"]
