"""Plots for notebooks show the data that they are given, in the one style."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from cupynorm.bench.report import read
from cupynorm.explore import plots
from cupynorm.explore.experiment import piece
from cupynorm.gpu.nvrtc import cuda_src

H200 = Path(__file__).parents[2] / "notebooks" / "h200.json"
XS, YS = (1.0, 2.0, 4.0), (1.0, 4.0, 16.0)


def data(line) -> tuple[list, list]:
    return tuple(list(map(float, each)) for each in line.get_data())


def test_lines_have_the_points_and_the_look_of_their_name():
    plot = plots.lines(
        {"a": {"first": (XS, YS), "limit": (XS, XS)}, "b": {"second": (XS, XS)}},
        xlabel="x",
        ylabel="y",
        log="xy",
        guides=("limit",),
    )
    left, right = plot.axes
    assert [axes.get_title() for axes in plot.axes] == ["a", "b"]
    assert [data(line) for line in left.lines] == [(list(XS), list(YS)), (list(XS), list(XS))]
    assert left.lines[0].get_color() == plots.look(0)["color"] and left.lines[0].get_marker() == "o"
    assert (
        left.lines[1].get_color() == plots.GUIDE["color"] and left.lines[1].get_marker() == "None"
    )
    assert (
        right.lines[0].get_color() == plots.look(1)["color"]
    )  # a name keeps its look in all panels
    assert left.get_xscale() == left.get_yscale() == "log" and left.get_ylabel() == "y"
    (legend,) = plot.legends
    assert [text.get_text() for text in legend.get_texts()] == ["first", "limit", "second"]
    alone = plots.lines({"": {"first": (XS, YS)}}, joined=False)
    assert alone.axes[0].lines[0].get_linestyle() == "None" and not alone.legends


def test_speeds_are_those_of_the_file():
    result = read(H200)
    plot = plots.speeds(result, "float16")
    assert [axes.get_title() for axes in plot.axes] == [
        f"layer_norm {direction}, float16" for direction in ("forward", "backward")
    ]
    points = {point for line in plot.axes[0].lines for point in zip(*data(line))}
    cells = [each for each in result.measurements if each.cell.dtype == "float16"]
    for each in cells:
        if each.cell.direction == "forward":
            assert (each.cell.num_cols, each.gigabytes_per_second("torch")) in points
    with pytest.raises(
        ValueError, match="dtype is 'int8'; expected one of the benchmark's, bfloat16"
    ):
        plots.speeds(result, "int8")


def test_the_chart_says_which_line_is_ours(tmp_path):
    result = read(H200)
    names = ("a.svg", "b.svg")
    for name in names:
        plots.chart(result, tmp_path / name)
    texts = [(tmp_path / name).read_text() for name in names]
    assert texts[0] == texts[1] and "<!-- cupynorm, this library -->" in texts[0]
    assert "<!-- layer_norm backward, bfloat16 -->" in texts[0] and "float32" not in texts[0]
    figure = plots.speeds(result)
    widths = {line.get_label(): line.get_linewidth() for line in figure.axes[0].lines}
    assert sorted(widths.values())[-1] == 2.2
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["cupynorm, this library", "torch", "liger", "quack", "copy"]
    ours = [line for line in figure.axes[0].lines if line.get_linewidth() == 2.2]
    odd, even = ([int(x) % 2 for x in data(line)[0]] for line in ours)
    assert set(odd) == {1} and set(even) == {0} and ours[0].get_linestyle() == "None"


def test_the_roof_is_the_lower_of_memory_and_arithmetic():
    plot = plots.roofline((4.0, 40.0), {"kernel": (2.0, 6.0)}, copy=3.0)
    sheet, copy, kernel = plot.axes[0].lines
    xs, ys = map(np.array, data(sheet))
    assert np.allclose(ys, np.minimum(4 * xs, 40)) and max(data(copy)[1]) == 40
    assert np.allclose(data(copy)[1], np.minimum(3 * xs, 40)) and data(kernel) == ([2.0], [6.0])


def test_a_plot_is_the_same_svg_each_time_and_names_a_font_that_all_have():
    made = [plots.lines({"a < b": {"first": (XS, YS)}}, log="x")._repr_svg_() for _ in range(2)]
    assert made[0] == made[1] and "a &lt; b" in made[0] and "<metadata>" not in made[0]
    assert made[0].count("'DejaVu Sans'") == made[0].count("'DejaVu Sans', sans-serif") > 0
    xml.etree.ElementTree.fromstring(made[0])


def test_a_piece_of_a_source_has_its_numbers():
    text = piece("forward_warp.cu", "const long long step", "const bool present")
    lines = (cuda_src() / "forward_warp.cu").read_text().splitlines()
    for line in text.splitlines():
        number, _, rest = line.strip().partition("  ")
        assert lines[int(number) - 1].strip() == rest.strip()
    assert (
        len(text.splitlines()) > 5 and len(piece("tile.cuh", "enum class Path").splitlines()) == 1
    )
    with pytest.raises(ValueError, match="which is not in cuda_src"):
        piece("no.cu", "x")
    with pytest.raises(ValueError, match="tile.cuh has no line with 'nowhere' from line 1 on"):
        piece("tile.cuh", "nowhere")
