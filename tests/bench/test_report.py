"""Reports of literal measurements: statistics, tables, README, JSON, charts, comparisons."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cupynorm.bench import report
from cupynorm.bench.cells import Cell, LinearCell
from cupynorm.bench.report import BenchResult, Measurement, guard, quartiles, read

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
    assert str(shipped) and all(each.median("copy") > 0 for each in shipped.measurements)


# One run against another.


def guarded(first, again=(), before=1.0, **more):
    """report.guard of fake times: by cell number, of the first measurement and of the second."""
    cells = [
        measurement(64 * (at + 1), num_rows=8, copy=[1.0], cupynorm=[before]) for at in range(8)
    ]
    asked = []

    def measure(todo):
        asked.append([each.num_cols // 64 - 1 for each in todo])
        times = first if len(asked) == 1 else again
        made = [
            measurement(64 * (at + 1), num_rows=8, copy=[1.0], cupynorm=[before * times[at]])
            for at in asked[-1]
        ]
        return result(*made, **more)

    run, text, ok = guard(result(*cells), measure)
    return run, text.splitlines(), ok, asked


def test_the_same_times_are_measured_once():
    _, lines, ok, asked = guarded([1.0, 1.04, 0.96, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert ok and asked == [[*range(8)]]
    assert lines == [
        "same  +0.04% in the mean  layer_norm forward, bfloat16",
        "8 cells: 0 slower by more than 5%; 1 tables: 0 slower by more than 0.5% in the mean",
    ]


def test_a_cell_that_is_above_is_named_and_measured_again():
    slow = [1.08, 0.92] + 6 * [0.99]
    run, lines, ok, asked = guarded(slow, {0: 1.01})
    assert ok and asked == [[*range(8)], [0]] and run.measurements[0].median("cupynorm") == 1.01
    cell = "layer_norm forward bfloat16 8 x 64".split()
    assert [*map(str.split, lines[:2])] == [
        ["verdict", "change", "again", "cell"],
        ["same", "-7.4%", "-1.0%", *cell],
    ]
    _, lines, ok, asked = guarded(slow, {0: 1.07})
    assert not ok and lines[1].split()[:3] == ["slower", "-7.4%", "-6.5%"]
    assert lines[-1].startswith("8 cells: 1 slower by more than 5%; 1 tables: 0 slower")


def test_a_table_that_is_slower_in_the_mean_is_measured_again():
    everything = dict.fromkeys(range(8), 1.0)
    _, lines, ok, asked = guarded([1.01] * 8, everything)
    assert ok and asked == [[*range(8)]] * 2 and len(lines) == 12
    _, lines, ok, _ = guarded([1.01] * 8, dict.fromkeys(range(8), 1.006))
    assert not ok and lines[-2] == "slower  -0.60% in the mean  layer_norm forward, bfloat16"
    assert guarded([1.01] * 8, dict.fromkeys(range(8), 1.004))[2]


def test_what_the_guard_does_not_take_for_speed():
    """Another clock; and a wrong result, a run that stopped and another GPU are named."""
    fast = result(measurement(copy=[2.0], cupynorm=[2.5]))
    before = result(measurement(copy=[1.0], cupynorm=[1.25]))
    assert guard(before, lambda todo: fast)[2]
    assert not guard(before, lambda todo: result(measurement(copy=[0.8], cupynorm=[1.25])))[2]
    off = measurement(copy=[1.0], cupynorm=[0.5], faults={"cupynorm": "cupynorm is off: y is 3"})
    assert not guard(before, lambda todo: result(off))[2]
    stopped = replace(fast, settings=fast.settings | {"stopped": "after 1 of 2 cells"})
    assert not guard(before, lambda todo: stopped)[2]
    other = replace(before, environment=before.environment | {"gpu": "NVIDIA B200"})
    assert (
        "the GPUs differ: NVIDIA H200 before, NVIDIA B200 after"
        in guard(before, lambda _: other)[1]
    )
    layer = [{"copy": [9.0], "gemm": [4.0], "cupynorm": [each]} for each in (5.0, 5.2, 6.0)]
    layers = [result(Measurement(LinearCell(1, 2, 3), "", each, {})) for each in layer]
    assert report.change(*(each.measurements[0] for each in layers[:2])) == pytest.approx(
        -0.2 / 5.2
    )
    with pytest.raises(ValueError, match="has no time of cupynorm"):
        guard(result(measurement(copy=[1.0], torch=[1.0])), lambda todo: fast)
