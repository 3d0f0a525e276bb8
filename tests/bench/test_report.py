"""Reports of literal measurements: statistics, tables, README, JSON, charts, comparisons."""

import math
from pathlib import Path

import numpy as np
import pytest

from cupynorm.bench import report
from cupynorm.bench.cells import Cell, LinearCell
from cupynorm.bench.report import BenchResult, Measurement, compare, quartiles, read

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def measurement(num_cols=1024, direction="forward", *, faults=None, num_rows=None, **samples):
    """1 MiB in 1 us is 1049 GB/s."""
    cell = Cell("layer_norm", direction, "bfloat16", num_rows or 2**18 // num_cols, num_cols)
    samples = samples or {"copy": [1.0] * 3, "cupynorm": [1.25] * 3, "torch": [2.0] * 3}
    errors = {name: 0.5 for name in samples if name != "copy"}
    return Measurement(cell, "warp", samples, errors, faults or {})


def result(*measurements, gpu="NVIDIA H200", **more):
    found = {"gpu": gpu, "driver": "580.1", "cuda_runtime": "13.0", "torch": None}
    found |= {"cupynorm": "0.1.0", "date": "2026-11-20T12:00", "peers": {"liger": "0.8.5"}}
    return BenchResult(found, {"runs": 3, "command": "the command"}, list(measurements), **more)


def test_quartiles_speed_and_share():
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    samples = list(np.random.default_rng(0).standard_normal(31))
    assert np.allclose(quartiles(samples), np.quantile(samples, [0.25, 0.5, 0.75]))
    forward = measurement()
    assert forward.gigabytes_per_second("copy") == pytest.approx(2**20 / 1e-6 / 1e9)
    assert forward.share("cupynorm") == pytest.approx(0.8) and forward.share("torch") == 0.5
    spread = measurement(copy=[1.0], cupynorm=[1.0, 2.0, 3.0, 4.0, 5.0])
    assert spread.spread("cupynorm") == pytest.approx(2 / 3)


def test_the_share_of_a_linear_layer_is_that_of_its_product_and_a_copy():
    samples = {"copy": [0.97], "cupynorm": [4.0], "gemm": [1.0]}
    measured = Measurement(LinearCell(1, 2, 3), "", samples, {"cupynorm": 0.1})
    assert measured.share("cupynorm") == pytest.approx(0.5) and measured.right == ["cupynorm"]
    alone = Measurement(LinearCell(1, 2, 3), "", {"copy": [1.0], "cupynorm": [1.0]}, {})
    assert math.isnan(alone.share("cupynorm"))


def test_the_fastest_is_marked_and_a_tie_is_a_tie():
    assert measurement().fastest == {"cupynorm"}
    assert measurement(copy=[1.0], cupynorm=[2.0], torch=[1.5]).fastest == {"torch"}
    noisy = [1.0, 1.9, 2.0, 2.1, 3.0]
    tie = measurement(copy=[1.0], cupynorm=noisy, torch=[2.05])
    assert tie.fastest == {"cupynorm", "torch"}
    assert measurement(copy=[1.0], cupynorm=noisy, torch=[2.15]).fastest == {"cupynorm"}


def test_a_wrong_library_never_wins():
    wrong = measurement(faults={"cupynorm": "cupynorm is off: y is 3"})
    assert wrong.fastest == {"torch"} and not result(measurement(), wrong)
    assert measurement(faults={"cupynorm": "off", "torch": "off"}).fastest == set()
    assert result(measurement(faults={"torch": "torch is off"}))


def test_the_tables():
    off = measurement(2048, "backward", faults={"cupynorm": "cupynorm is off: y is 3"})
    unable = {"torch": "torch could not run: out of memory"}
    failed = [measurement(each, copy=[1.0], cupynorm=[1.0], faults=unable) for each in (64, 128)]
    text = str(result(measurement(), *failed, off, missing={"quack": "no module"}))
    headline, method = text.splitlines()[:2]
    assert (
        headline == "NVIDIA H200, driver 580.1, CUDA 13.0, liger 0.8.5, cupynorm 0.1.0, 2026-11-20"
    )
    assert "flushed" in method and "Medians of 3 runs" in method
    rows = [line.split() for line in text.splitlines() if " x " in line]
    shown = ["256", "x", "1024", "warp", "1.0", "1.2*", "0.80", "0.0%", "0.50", "2.0", "0.50"]
    assert shown in rows and [*rows[2][:3], *rows[2][-2:]] == ["4096", "x", "64", "-", "-"]
    assert "1.2OFF" in text and "2.0*" in text and "quack was not measured: no module" in text
    assert "layer_norm forward, bfloat16, 4096 x 64, 2048 x 128: torch could not run" in text
    assert text.endswith("OFF: cupynorm is beyond what its dtypes allow in 1 cells")


def test_the_readme_has_some_widths_of_the_first_dtype():
    samples = {"copy": [1.0], "cupynorm": [1.25], "liger": [1.6], "torch": [2.0], "quack": [1.1]}
    off = {"quack": "quack is off", "liger": "liger is off"}
    cells = [measurement(each, way) for way in ("forward", "backward") for each in (100, 4096)]
    more = [measurement(128, **samples), measurement(768, **samples, faults=off)]
    lines = result(*cells, *more).markdown().splitlines()
    assert lines[2].startswith("layer_norm, bfloat16: share of a copy's speed (1.0 to 1.6 TB/s).")
    assert [line for line in lines if line.startswith("| ")] == [
        "| num_cols | forward: cupynorm | torch | best other "
        "| backward: cupynorm | torch | best other |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 4,096 | **0.80** | 0.50 | - | **0.80** | 0.50 | - |",
        "| 128 | 0.80 | 0.50 | quack **0.91** | - | - | - |",
        "| 768 | **0.80** | 0.50 | - | - | - | - |",
    ]
    assert lines[-1] == "<pre>the command</pre>"
    several = result(measurement(64, num_rows=8), measurement(64)).markdown()
    assert "| num_cols | num_rows |" in several and "| 64 | 4,096 |" in several


def test_a_table_is_put_between_its_markers(tmp_path):
    path = tmp_path / "README.md"
    with pytest.raises(ValueError, match="there is no .*README.md"):
        report.rewrite_table(path, "table")
    for text in ("no markers", "<!-- /bench --> <!-- bench -->", "<!-- bench -->" * 2):
        path.write_text(text)
        with pytest.raises(ValueError, match="needs the markers <!-- bench --> and <!-- /bench"):
            report.rewrite_table(path, "table")
        assert path.read_text() == text
    path.write_text("before <!-- bench --> old <!-- /bench --> after")
    report.rewrite_table(path, "new\n")
    assert path.read_text() == "before <!-- bench -->\nnew\n<!-- /bench --> after"


def test_json_comes_back(tmp_path):
    path = tmp_path / "a.json"
    odd = Cell("rms_norm", "forward", "bfloat16", 3, 8, "float32", "float16", True, True)
    linear = Measurement(LinearCell(1, 2, 3, "fp8"), "", {"copy": [1.0]}, {"cupynorm": math.nan})
    written = result(measurement(), Measurement(odd, "block", {"copy": [1.0]}, {}), linear)
    path.write_text(written.to_json())
    again = read(path)
    assert math.isnan(again.measurements[2].errors["cupynorm"])
    assert again.to_json() == written.to_json()
    assert again.measurements[:2] == written.measurements[:2]
    for text in ("", "[]", '{"cells": [{}]}', '{"cells": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="a.json is no result of the benchmark"):
            read(path)
    with pytest.raises(OSError):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("h200*.json")), ids=lambda path: path.stem)
def test_stored_measurements_are_read(path):
    shipped = read(path)
    assert shipped.environment["gpu"] == "NVIDIA H200" and len(shipped.measurements) >= 22
    ours = next(
        name
        for name in shipped.libraries
        if any(name in each.samples for each in shipped.measurements)
    )
    assert str(shipped) and all(each.median("copy") > 0 for each in shipped.measurements), ours


def test_the_chart_says_which_line_is_ours(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from cupynorm.bench.report import chart, draw_speeds

    odd = {"copy": [1.0], "cupynorm": [2.0]}
    cells = [measurement(64), measurement(127, **odd), measurement(128), measurement(255, **odd)]
    axes = Figure().add_subplot()
    drawn = draw_speeds(axes, cells, ["cupynorm", "torch"])
    assert list(drawn) == ["copy", "this library", "this library, odd widths", "torch"]
    points = {name: line.get_xydata().tolist() for name, line in drawn.items()}
    speeds = {each.cell.num_cols: each.gigabytes_per_second("cupynorm") for each in cells}
    assert points["this library"] == [[64, speeds[64]], [128, speeds[128]]]
    assert points["this library, odd widths"] == [[127, speeds[127]], [255, speeds[255]]]
    assert drawn["this library"].get_linewidth() > drawn["torch"].get_linewidth()
    chart(result(*cells, measurement(64, "backward")), tmp_path / "a.svg")
    chart(result(*cells, measurement(64, "backward")), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "<!-- cupynorm, this library -->" in text
    assert "<!-- layer_norm backward, bfloat16 -->" in text
    assert text == (tmp_path / "b.svg").read_text()


# One run against another.


def test_changes_beyond_the_spread():
    widths = (64, 128, 256, 512)
    before = result(*(measurement(each, copy=[1.0], cupynorm=[1.25]) for each in widths))
    # 512: slower by less than its spread
    times = {64: [1.26], 128: [1.4], 256: [1.0], 512: [1.1, 1.35, 1.7]}
    after = result(*(measurement(each, copy=[1.0], cupynorm=times[each]) for each in widths))
    text, ok = compare(before, after)
    lines = text.splitlines()
    cell = "layer_norm forward bfloat16 2048 x 128".split()
    assert lines[1].split() == ["slower", "0.800", "0.714", "-10.7%", "2.0%", *cell]
    assert lines[2].split()[:2] == ["faster", "0.800"] and not ok
    assert lines[-1] == "4 cells: 1 slower, 1 faster, 2 the same within the spread"
    assert not compare(after, before)[1] and compare(before, before)[1]


def test_another_clock_is_no_change_and_a_wrong_result_no_improvement():
    before = result(measurement(copy=[1.0], cupynorm=[1.25]))
    assert (
        "0 slower, 0 faster" in compare(before, result(measurement(copy=[2.0], cupynorm=[2.5])))[0]
    )
    assert "1 slower" in compare(before, result(measurement(copy=[0.8], cupynorm=[1.25])))[0]
    off = measurement(copy=[1.0], cupynorm=[0.5], faults={"cupynorm": "cupynorm is off: y is 3"})
    text, ok = compare(before, result(off))
    assert not ok and "256 x 1024: cupynorm is off: y is 3" in text


def test_other_cells_and_other_gpus_are_named():
    before = result(measurement(64), measurement(128), measurement(256))
    text, _ = compare(before, result(measurement(64), measurement(512), gpu="NVIDIA B200"))
    assert "the GPUs differ: NVIDIA H200 before, NVIDIA B200 after" in text
    assert "cells measured before only: 2" in text and "cells measured after only: 1" in text
    with pytest.raises(ValueError, match="no cell in common"):
        compare(before, result(measurement(512)))
