"""What `bench --readme` writes, from literal measurements."""

import re
from pathlib import Path

import pytest
from cupynorm.bench.documents import (
    CHART,
    SHORT_COLS,
    check_documents,
    first_family,
    rewrite_table,
    short_markdown,
    write_documents,
)
from cupynorm.bench.plot import plot

from cupynorm.bench import style
from cupynorm.bench.cells import Cell
from cupynorm.bench.report import BenchResult, Measurement, read

ROOT = Path(__file__).parents[2]
TEXT = "# title\n\n<!-- bench -->\nold\n<!-- /bench -->\n\nafter\n"


def measurement(num_cols, direction="forward", dtype="bfloat16", faults=None, **samples):
    """1 MiB in 1 us is 1.0 TB/s."""
    cell = Cell("layer_norm", direction, dtype, 2**18 // num_cols, num_cols)
    samples = samples or {"copy": [1.0] * 3, "cupynorm": [1.25] * 3, "torch": [2.0] * 3}
    errors = {name: 0.5 for name in samples if name != "copy"}
    return Measurement(cell, "warp", samples, errors, faults or {})


def result(*measurements):
    environment = {"gpu": "NVIDIA H200", "cupynorm": "0.1.0", "date": "2026-11-20T12:00:00+00:00"}
    return BenchResult(environment, {"runs": 3, "command": "a command"}, list(measurements), {})


def table(*measurements):
    lines = short_markdown(result(*measurements)).splitlines()
    return [line for line in lines if line.startswith("|")]


def test_a_table_is_rewritten_between_its_markers():
    once = rewrite_table(TEXT, "| new |")
    assert once == "# title\n\n<!-- bench -->\n\n| new |\n\n<!-- /bench -->\n\nafter\n"
    assert rewrite_table(once, "| new |\n") == once
    for broken in ("", "<!-- bench -->", TEXT * 2, "<!-- /bench --> <!-- bench -->"):
        with pytest.raises(ValueError, match="need the markers"):
            rewrite_table(broken, "| new |")


def test_the_short_table_has_shares():
    lines = short_markdown(result(measurement(128), measurement(128, "backward"))).splitlines()
    assert (
        "NVIDIA H200, cupynorm 0.1.0, 2026-11-20." in lines[0]
        and lines[-1] == "<pre>a command</pre>"
    )
    assert lines[2].startswith("layer_norm, bfloat16: share of a copy's speed (1.0 to 1.6 TB/s).")
    columns = "{}: cupynorm | torch | best other |"
    assert lines[4] == " ".join(["| num_cols |", *map(columns.format, ("forward", "backward"))])
    assert lines[6] == "| 128 | **0.80** | 0.50 | - | **0.80** | 0.50 | - |"


def test_the_short_table_has_the_first_dtype_and_the_chosen_widths():
    cells = [
        measurement(num_cols, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for num_cols in (64, 128)
    ]
    assert [line.split(" | ")[0] for line in table(*cells)[2:]] == ["| 128"]
    assert [line.split(" | ")[0] for line in table(cells[0], cells[2])[2:]] == ["| 64"]
    assert first_family(result(*cells)).measurements == cells[:2]
    assert 128 in SHORT_COLS and 64 not in SHORT_COLS


def test_the_short_table_names_the_best_of_the_others():
    samples = {"copy": [1.0] * 3, "cupynorm": [1.25] * 3, "liger": [1.6] * 3, "torch": [2.0] * 3}
    samples["quack"] = [1.1] * 3
    assert table(measurement(128, **samples))[2] == "| 128 | 0.80 | 0.50 | quack **0.91** |"
    off = {"quack": "quack is off", "cupynorm": "cupynorm is off"}
    assert (
        table(measurement(128, **samples, faults=off))[2] == "| 128 | - | 0.50 | liger **0.62** |"
    )
    both = (measurement(128), measurement(768, "backward"))
    assert table(*both)[2] == "| 128 | **0.80** | 0.50 | - | - | - | - |"


def test_documents_are_checked_and_written(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    paths = (tmp_path / "README.md", tmp_path / "docs" / "benchmarks.md")
    for path in paths:
        with pytest.raises(ValueError, match=f"there is no .*{path.name}"):
            check_documents()
        path.write_text(TEXT)
    check_documents()
    write_documents(result(measurement(64), measurement(128), measurement(64, dtype="float32")))
    short, whole = (path.read_text() for path in paths)
    assert "| 128 | **0.80** |" in short and "| 64 |" not in short
    assert "| 128 | warp |" in whole and "layer_norm, float32:" in whole
    assert "bfloat16" in CHART.read_text() and "float32" not in CHART.read_text()
    paths[0].write_text("no markers")
    with pytest.raises(ValueError, match="need the markers"):
        check_documents()


def test_the_chart_is_the_same_file_for_the_same_measurements(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot(result(measurement(64), measurement(96)), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def luminance(color: str) -> float:
    """Relative luminance of "#rrggbb", as of WCAG 2.1."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_chart_can_be_read_on_a_dark_page():
    """Colours of lines and text have a contrast of 3 with the background, and so has black text."""
    text = (ROOT / CHART).read_text(encoding="utf-8")
    assert text.count("@media (prefers-color-scheme: dark)") == 1
    drawn = set(re.findall(r'style="[^"]*?(?:fill|stroke): (#[0-9a-f]{6})', text)) - {"#ffffff"}
    drawn -= {"#b0b0b0"}  # the grid is faint on purpose
    assert {"#0072b2", "#666666"} <= drawn
    background = luminance(style.DARK["#ffffff"])
    for color in drawn | {"#000000"}:
        shown = style.DARK.get(color, color)
        assert (luminance(shown) + 0.05) / (background + 0.05) > 3, color
    for light, dark in style.DARK.items():
        assert f'[style*="fill: {light}"] {{fill: {dark} !important}}' in text


def test_the_chart_shows_the_stored_measurements(tmp_path):
    """Titles and numbers of points: versions of matplotlib place them differently."""
    pytest.importorskip("matplotlib")
    stored = read(ROOT / "notebooks" / "h200.json")
    plot(first_family(stored), tmp_path / "chart.svg", panel=(4.9, 2.9))
    found = []
    for path in (ROOT / CHART, tmp_path / "chart.svg"):
        text = path.read_text(encoding="utf-8")
        titles = set(re.findall("<!-- (.*) -->", text))
        found.append((titles, len(re.findall('<use xlink:href="#m[^"]*" x=', text))))
    assert found[0] == found[1] and found[0][1] > 200
    of_all = (ROOT / "notebooks" / "h200.svg").read_text(encoding="utf-8")
    for title in (*stored.tables(), stored.headline(), "cupynorm, odd num_cols"):
        assert f"<!-- {title} -->" in of_all
