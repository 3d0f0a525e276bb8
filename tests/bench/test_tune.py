"""tune with made-up times: which rows are written, measured again, or leave the file."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("torch")
import cupynorm
from cupynorm.bench import tune
from cupynorm.bench.cells import cells
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.measured import key_of, read_rows, write_rows

H200 = DEVICES["H200"]
ROWS = read_rows(Path(cupynorm.__file__).parent / "dispatch" / "h200.csv")
CELLS = cells(cols=[4096], directions=["forward"])


def tuner(times):
    """times(cell, words): microseconds of a tile, None if it is wrong."""
    measured = []

    def measure(cell, launches):
        measured.append((cell, launches))
        found = {each: times(cell, f"{each.strategy}: {each.tile}") for each in launches}
        return {each: time for each, time in found.items() if time}

    made = tune.Tuner(H200, measure)
    made.measured = measured
    return made


@pytest.mark.slow
def test_widths_are_of_the_classes_of_a_row():
    for range_ in tune.ranges_of(ROWS[::23], []):
        found = range_.cells(Random(1), H200)
        assert found, range_
        for cell in found:
            assert range_.row.holds(cell.num_cols)
            problem = cupynorm.bench.measure.plan_of(cell, H200).problem
            assert key_of(problem) in range_.row.keys


def test_a_faster_tile_is_written_with_its_gain_and_used(tmp_path):
    path = tmp_path / "tiles.csv"
    fast = tuner(lambda cell, words: 90.0 if "threads_per_row 256" in words else 100.0)
    text = tune.tune(path, CELLS, tuner=fast)
    assert text.startswith("1 of 1 ranges measured, 1 have a tile 2% or more faster")
    (row,) = read_rows(path)
    assert (row.from_cols, row.to_cols, row.threads_per_row, row.gain) == (4096, 4096, 256, 0.111)
    assert row.date and all(len(tiles) > 1 for _, tiles in fast.measured[:-1])
    cupynorm.use_tiles(path)
    try:
        plan = cupynorm.plan(4096, device="H200")
        assert plan.tile.threads_per_row == 256 and "from tiles.csv" in plan.reason
    finally:
        cupynorm.use_tiles(None)


@pytest.mark.parametrize(
    "times",
    [
        lambda cell, words: 100.0,
        lambda cell, words: 99.0 if "threads_per_row 256" in words else 100.0,  # 1% may be luck
    ],
)
def test_a_row_that_gains_nothing_leaves_the_file(tmp_path, times):
    path = tmp_path / "tiles.csv"
    own = next(row for row in ROWS if row.direction == "backward" and row.kind == "16 bytes")
    write_rows(path, [own])
    assert tune.tune(path, tuner=tuner(times)).endswith("has 0 rows")
    assert read_rows(path) == []


def test_luck_is_not_written(tmp_path):
    """A tile that was fast once, and is not when it is measured again."""
    seen = set()

    def times(cell, words):
        first = words not in seen
        seen.add(words)
        return 80.0 if first and "threads_per_row 256" in words else 100.0

    tune.tune(tmp_path / "tiles.csv", CELLS, tuner=tuner(times))
    assert read_rows(tmp_path / "tiles.csv") == []


def test_wrong_tiles_are_left_out(tmp_path):
    path = tmp_path / "tiles.csv"
    wrong = lambda cell, words: None if "threads_per_row 256" in words else 100.0  # noqa: E731
    tune.tune(path, CELLS, tuner=tuner(wrong))
    assert read_rows(path) == []


def test_a_range_whose_own_tile_is_wrong_or_not_reached_stays_as_it_is(tmp_path):
    path = tmp_path / "tiles.csv"
    rows = [row for row in ROWS if row.direction == "backward" and row.kind == "16 bytes"][:3]
    for options in ({"tuner": tuner(lambda cell, words: None)}, {"seconds": -1}):
        write_rows(path, rows)
        tune.tune(path, **{"tuner": tuner(lambda cell, words: 1.0), **options})
        assert sorted(read_rows(path), key=repr) == sorted(rows, key=repr)


def test_the_row_measured_longest_ago_is_first_and_keeps_its_classes(tmp_path):
    both = next(row for row in ROWS if "|" in row.norm and row.path != "uncached")
    rows = [replace(both, date="2026-11-25"), replace(both, date="", to_cols=both.to_cols - 1)]
    assert [each.row.date for each in tune.ranges_of(rows, [])] == ["", "2026-11-25"]
    path = tmp_path / "tiles.csv"
    write_rows(path, rows[:1])
    model = set()

    def times(cell, words):
        model.add((cell, words)) if cell not in {each for each, _ in model} else None
        return 100.0 if (cell, words) in model else 90.0

    tune.tune(path, tuner=tuner(times))
    (row,) = read_rows(path)
    assert (row.norm, row.dtype) == (both.norm, both.dtype) and row.gain == 0.111


@pytest.mark.gpu
def test_a_small_run(tmp_path):
    path = tmp_path / "tiles.csv"
    text = tune.tune(path, cells(cols=[1000], directions=["forward"]), seconds=60)
    assert text.startswith("1 of 1 ranges measured") and len(read_rows(path)) <= 1
