"""Reports of literal measurements: statistics, tables, README, JSON, plots, comparisons."""

import builtins
import json
import math
from pathlib import Path

import numpy as np
import pytest
from cupynorm.bench.comparison import compare
from cupynorm.bench.plot import draw_speeds, plot
from cupynorm.bench.style import look

from cupynorm.bench.cells import Cell
from cupynorm.bench.report import BenchResult, Measurement, quartiles, read
from cupynorm.gpu.nvrtc import MissingLibraryError

H200 = Path(__file__).parents[2] / "notebooks" / "h200.json"


def measurement(
    num_cols=1024,
    direction="forward",
    dtype="bfloat16",
    *,
    faults=None,
    errors=None,
    norm="layer_norm",
    num_rows=None,
    **samples,
):
    """1 MiB in 1 us is 1049 GB/s."""
    cell = Cell(norm, direction, dtype, num_rows or 2**18 // num_cols, num_cols)
    samples = samples or {"copy": [1.0, 1.0, 1.0], "cupynorm": [1.25] * 3, "torch": [2.0] * 3}
    errors = errors or {name: 0.5 for name in samples if name != "copy"}
    return Measurement(cell, "warp", samples, errors, faults or {})


def result(*measurements, missing=None, gpu="NVIDIA H200"):
    found = {"gpu": gpu, "driver": "580.1", "cuda_runtime": "13.0", "cupy": "14.2.0", "torch": None}
    found |= {
        "cupynorm": "0.1.0",
        "date": "2026-11-20T12:00:00+00:00",
        "peers": {"liger": "0.8.5", "tutorial": None},
    }
    settings = {"runs": 3, "seed": 1, "eps": 1e-5, "command": "python -m cupynorm bench --readme"}
    return BenchResult(found, settings, list(measurements), missing or {})


# Statistics.


def test_quartiles():
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    samples = list(np.random.default_rng(0).standard_normal(31))
    assert np.allclose(quartiles(samples), np.quantile(samples, [0.25, 0.5, 0.75]))


def test_speed_and_share():
    forward = measurement()
    assert forward.gigabytes_per_second("copy") == pytest.approx(2**20 / 1e-6 / 1e9)
    assert forward.share("cupynorm") == pytest.approx(0.8) and forward.share("torch") == 0.5
    spread = measurement(copy=[1.0], cupynorm=[1.0, 2.0, 3.0, 4.0, 5.0], torch=[2.0])
    assert spread.spread("cupynorm") == pytest.approx(2 / 3) and spread.spread("torch") == 0


def test_the_fastest_is_marked_and_a_tie_is_a_tie():
    assert measurement().fastest == {"cupynorm"}
    assert measurement(copy=[1.0], cupynorm=[2.0] * 3, torch=[1.5] * 3).fastest == {"torch"}
    noisy = [1.0, 1.9, 2.0, 2.1, 3.0]
    assert measurement(copy=[1.0], cupynorm=noisy, torch=[2.05] * 3).fastest == {
        "cupynorm",
        "torch",
    }
    assert measurement(copy=[1.0], cupynorm=noisy, torch=[2.15] * 3).fastest == {"cupynorm"}


def test_a_wrong_library_never_wins():
    wrong = measurement(faults={"cupynorm": "cupynorm is off: y is 3"})
    assert wrong.fastest == {"torch"} and not result(wrong).ok and not result(measurement(), wrong)
    assert measurement(faults={"cupynorm": "off", "torch": "off"}).fastest == frozenset()
    assert result(measurement(faults={"torch": "torch is off"})).ok


# Output.


def cells_of(text, num_cols):
    """The columns of the line that begins with num_cols."""
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [str(num_cols)]]
    return row


def test_the_table():
    text = str(
        result(
            measurement(),
            measurement(num_cols=2048, direction="backward"),
            missing={"quack": "no module"},
        )
    )
    first, second = text.splitlines()[:2]
    assert (
        first == "NVIDIA H200, driver 580.1, CUDA 13.0, CuPy 14.2.0, liger 0.8.5, cupynorm 0.1.0, "
        "2026-11-20"
    )
    assert "flushed" in second and "Medians of 3 runs" in second
    assert "layer_norm forward, bfloat16" in text and "layer_norm backward, bfloat16" in text
    assert cells_of(text, 1024) == [
        "1024",
        "256",
        "warp",
        "1049",
        "1.2*",
        "839",
        "0.80",
        "0.0%",
        "0.50",
        "2.0",
        "0.50",
    ]
    assert (
        "cupynorm is among the fastest in 2 of 2 cells" in text
        and "quack was not measured: no module" in text
    )


def test_the_table_names_wrong_results_and_failures():
    off = measurement(
        faults={"cupynorm": "cupynorm is off: y is 3 at row 1, col 2"},
        errors={"cupynorm": 7.5, "torch": 0.5},
    )
    unable = {"torch": "torch could not run: out of memory"}
    failed = [
        measurement(num_cols, copy=[1.0], cupynorm=[1.0], faults=unable)
        for num_cols in (2048, 4096)
    ]
    text = str(result(off, *failed))
    assert "1.2OFF" in text and "7.50" in text and "2.0*" in text
    assert text.endswith("OFF: cupynorm is beyond what its dtypes allow in 1 cells")
    assert (
        "layer_norm forward, bfloat16, 256 x 1024: cupynorm is off: y is 3 at row 1, col 2" in text
    )
    assert (
        "layer_norm forward, bfloat16, 128 x 2048, 64 x 4096: torch could not run: out of memory"
        in text
    )
    assert cells_of(text, 2048)[-2:] == ["-", "-"]
    assert "cupynorm is among the fastest in 2 of 3 cells" in text


def test_markdown_has_one_row_per_num_cols():
    both = [
        measurement(num_cols, direction)
        for direction in ("forward", "backward")
        for num_cols in (64, 65536)
    ]
    lines = result(*both, missing={"quack": "no module"}).markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert (
        table[0] == "| num_cols | forward: strategy | cupynorm | torch "
        "| backward: strategy | cupynorm | torch |"
    )
    assert table[1].count("---") == 7
    assert (
        table[2]
        == "| 64 | warp | **839 (0.80)** | 524 (0.50) | warp | **1,258 (0.80)** | 786 (0.50) |"
    )
    assert table[3].startswith("| 65,536 |")
    assert lines[-1] == "Made by `python -m cupynorm bench --readme`." and "quack" not in "".join(
        lines
    )
    assert "\ntorch was not measured: no GPU." in result(missing={"torch": "no GPU"}).markdown()


def test_markdown_of_many_peers_shows_torch_and_the_best_of_the_others():
    samples = {
        "copy": [1.0] * 3,
        "cupynorm": [1.25] * 3,
        "liger": [1.6] * 3,
        "torch": [2.0] * 3,
        "quack": [1.1] * 3,
    }
    off = {"quack": "quack is off", "liger": "liger is off"}
    lines = (
        result(measurement(64, **samples), measurement(128, **samples, faults=off))
        .markdown()
        .splitlines()
    )
    assert "| num_cols | forward: strategy | cupynorm | torch | best other |" in lines
    assert "| 64 | warp | 839 (0.80) | 524 (0.50) | quack **953 (0.91)** |" in lines
    assert "| 128 | warp | **839 (0.80)** | 524 (0.50) | - |" in lines


def test_markdown_of_several_dtypes_and_a_missing_cell():
    text = result(
        measurement(64), measurement(64, direction="backward"), measurement(32, dtype="float32")
    ).markdown()
    assert "layer_norm, bfloat16:" in text and "layer_norm, float32:" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 32 ")]
    assert row.endswith("|  | - | - |")
    assert text.count("| num_cols |") == 2 and "num_rows" not in text


def test_markdown_of_several_num_rows():
    text = result(
        measurement(64, num_rows=8), measurement(64, num_rows=4096), measurement(128)
    ).markdown()
    assert "| num_cols | num_rows | forward: strategy |" in text
    assert (
        "| 64 | 8 | warp |" in text
        and "| 64 | 4,096 | warp |" in text
        and "| 128 | 2,048 | warp |" in text
    )


def test_json_holds_every_sample():
    off = measurement(
        errors={"cupynorm": float("nan"), "torch": 0.5}, faults={"cupynorm": "y holds NaN"}
    )
    content = json.loads(
        result(measurement(num_cols=64), off, missing={"liger": "not installed"}).to_json()
    )
    assert content["environment"]["gpu"] == "NVIDIA H200" and content["settings"]["runs"] == 3
    first, second = content["cells"]
    assert first["microseconds"] == {"copy": [1.0] * 3, "cupynorm": [1.25] * 3, "torch": [2.0] * 3}
    assert (first["num_rows"], first["num_cols"], first["num_bytes"]) == (4096, 64, 2**20)
    assert second["errors"]["cupynorm"] is None and second["faults"] == {"cupynorm": "y holds NaN"}
    assert content["missing"] == {"liger": "not installed"}


def test_json_comes_back():
    written = result(
        measurement(errors={"cupynorm": float("nan"), "torch": 0.5}, faults={"cupynorm": "off"}),
        Measurement(
            Cell("rms_norm", "both", "bfloat16", 3, 8, "float32", "float16", True, True),
            "block",
            {"copy": [1.0]},
            {},
        ),
        missing={"liger": "not installed"},
    )
    again = BenchResult.from_json(written.to_json())
    assert math.isnan(again.measurements[0].errors["cupynorm"])
    assert again.to_json() == written.to_json() and again.measurements[1] == written.measurements[1]


def test_a_file_that_is_something_else(tmp_path):
    path = tmp_path / "a.json"
    for text in ("", "[]", '{"cells": [{}]}', '{"cells": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="a.json is no result of the benchmark"):
            read(path)
    with pytest.raises(OSError):
        read(tmp_path / "none.json")


def test_the_file_in_the_notebooks_folder_is_read():
    shipped = read(H200)
    assert (
        shipped.environment["gpu"] == "NVIDIA H200"
        and len(shipped.measurements) >= 28
        and shipped.ok
    )
    assert all(0.1 < measured.share("cupynorm") < 1.2 for measured in shipped.measurements)


# Plots.


@pytest.mark.slow
@pytest.mark.parametrize("suffix,beginning", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_written(tmp_path, suffix, beginning):
    pytest.importorskip("matplotlib")
    shapes = [(64, 64), (128, 64), (64, 4096), (128, 4096)]
    drawn = [
        measurement(num_cols, direction, num_rows=num_rows)
        for direction in ("forward", "both")
        for num_cols, num_rows in shapes
    ]
    path = tmp_path / f"plot.{suffix}"
    plot(result(*drawn, measurement(dtype="float32", copy=[1.0], cupynorm=[2.0])), path)
    content = path.read_bytes()
    assert content.startswith(beginning) and len(content) > 10_000
    if suffix == "svg":
        for text in (
            b"layer_norm forward, bfloat16, 64 rows",
            b"layer_norm both, bfloat16, 4096 rows",
            b"torch",
            b"copy",
        ):
            assert b"<!-- " + text + b" -->" in content


def test_odd_widths_are_a_line_of_their_own():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    odd = {"copy": [1.0], "cupynorm": [2.0]}
    cells = [measurement(64), measurement(127, **odd), measurement(128), measurement(255, **odd)]
    axes = Figure().add_subplot()
    drawn = draw_speeds(axes, cells, ["cupynorm", "torch"])
    assert list(drawn) == ["copy", "cupynorm", "cupynorm, odd num_cols", "torch"]
    points = {name: line.get_xydata().tolist() for name, line in drawn.items()}
    speeds = {each.cell.num_cols: each.gigabytes_per_second("cupynorm") for each in cells}
    assert points["cupynorm"] == [[64, speeds[64]], [128, speeds[128]]]
    assert points["cupynorm, odd num_cols"] == [[127, speeds[127]], [255, speeds[255]]]
    assert [x for x, _ in points["copy"]] == [64, 127, 128, 255]
    both = [drawn[name] for name in ("cupynorm", "cupynorm, odd num_cols")]
    assert both[0].get_color() == both[1].get_color() != drawn["torch"].get_color()
    assert both[1].get_markerfacecolor() == "white" != both[0].get_markerfacecolor()
    assert len(axes.lines) == 4


def test_lines_differ_in_grey_too():
    looks = [look(at) for at in range(6)]
    for name in ("color", "marker", "linestyle"):
        assert len({str(each[name]) for each in looks}) == 6
    assert look(6) == look(0)


def test_error_of_a_plot_without_matplotlib(monkeypatch, tmp_path):
    imported = builtins.__import__

    def without(name, *arguments):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingLibraryError, match="pip install matplotlib"):
        plot(result(measurement()), tmp_path / "plot.png")


# One run against another.


def test_changes_beyond_the_spread():
    cells = (64, 128, 256, 512)
    before = result(*(measurement(each, copy=[1.0] * 3, cupynorm=[1.25] * 3) for each in cells))
    times = {
        64: [1.26] * 3,
        128: [1.4] * 3,
        256: [1.0] * 3,
        512: [1.1, 1.35, 1.7],
    }  # 512: slower by less than its spread
    after = result(*(measurement(each, copy=[1.0] * 3, cupynorm=times[each]) for each in cells))
    found = compare(before, after)
    assert [change.verdict for change in found.changes] == ["same", "slower", "faster", "same"]
    assert not found and found.changes[1].relative == pytest.approx(1.25 / 1.4 - 1)
    lines = str(found).splitlines()
    assert lines[1].split() == [
        "slower",
        "0.800",
        "0.714",
        "-10.7%",
        "2.0%",
        *"layer_norm forward bfloat16 2048 x 128".split(),
    ]
    assert (
        lines[2].split()[:2] == ["faster", "0.800"]
        and lines[-1] == "4 cells: 1 slower, 1 faster, 2 the same within the spread"
    )
    assert compare(after, before).ok is False and compare(before, before)


def test_another_clock_is_no_change():
    before = measurement(copy=[1.0] * 3, cupynorm=[1.25] * 3)
    after = measurement(copy=[2.0] * 3, cupynorm=[2.5] * 3)
    assert compare(result(before), result(after)).changes[0].relative == pytest.approx(0)
    faster_copy = measurement(copy=[0.8] * 3, cupynorm=[1.25] * 3)
    assert compare(result(before), result(faster_copy)).changes[0].verdict == "slower"


def test_a_wrong_result_is_never_an_improvement():
    fast = measurement(
        copy=[1.0] * 3, cupynorm=[0.5] * 3, faults={"cupynorm": "cupynorm is off: y is 3"}
    )
    found = compare(result(measurement()), result(fast))
    assert not found and "256 x 1024: cupynorm is off: y is 3" in str(found)


def test_other_cells_and_other_gpus_are_named():
    before = result(measurement(64), measurement(128), measurement(256))
    after = result(measurement(64), measurement(512), gpu="NVIDIA B200")
    text = str(compare(before, after))
    assert "the GPUs differ, NVIDIA H200 before and NVIDIA B200 after" in text
    assert "cells measured before only: 2" in text and "cells measured after only: 1" in text
    with pytest.raises(ValueError, match="no cell in common"):
        compare(before, result(measurement(512)))
