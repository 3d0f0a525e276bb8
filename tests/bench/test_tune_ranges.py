"""tune_ranges.py with made-up times: which rows are kept, merged or left alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

import cupynorm
from cupynorm.bench.tune_ranges import Range, best_of, merged, part_of, ranges_of, tune_ranges
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.measured import read_rows

H200 = DEVICES["H200"]
ROWS = read_rows(Path(cupynorm.__file__).parent / "plan" / "h200.csv")


def test_parts_are_all_ranges_once():
    ranges = ranges_of(ROWS)
    parts = [part_of(ranges, (at, 7)) for at in range(1, 8)]
    assert sum(map(len, parts)) == len(ranges) and {each for part in parts for each in part} == set(
        ranges
    )
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_widths_are_of_the_class():
    for each in ranges_of(ROWS)[::37]:
        for num_cols in each.widths(Random(1)):
            assert each.from_cols <= num_cols <= each.to_cols and num_cols % each.step == 0
            pack = int(each.words[0]) // (4 if each.key[2] == "float32" else 2)
            assert num_cols % pack == 0 and (int(each.words[0]) == 16 or num_cols % (2 * pack))


def test_two_percent_over_the_model_are_kept():
    first, second = ROWS[:2]
    assert best_of(
        [first, second], [[99.0, 99.0], [97.0, 97.0]], [100.0, 100.0]
    ).gain == pytest.approx(0.031)
    assert best_of([first, second], [[99.0, 99.0], [90.0, 110.0]], [100.0, 100.0]) is None
    assert best_of([first], [[float("inf"), 1.0]], [100.0, 100.0]) is None


def test_a_range_whose_own_tile_is_wrong_stays_as_it_is():
    """Its rows are kept, because nothing was measured beside them."""
    rows = [row for row in ROWS if row.direction == "backward" and row.kind == "16 bytes"][:6]
    wrong = lambda cell, tiles: [float("inf"), *(1.0 for _ in tiles[1:])]  # noqa: E731
    found, done = tune_ranges(rows, H200, part=(1, 12), seconds=60, measure=wrong)
    assert found == [] and done == []
    assert merged(rows, found, done) == merged(rows, [], [])


def test_faster_tiles_replace_rows_and_others_stay():
    """Tiles of 5 stages or one more block are faster, so they replace the measured rows."""

    def measure(cell, tiles):
        return [90.0 if tile.stages == 4 else 100.0 for _, tile in tiles]

    rows = [row for row in ROWS if row.direction == "backward" and row.kind == "16 bytes"][:6]
    found, done = tune_ranges(rows, H200, part=(1, 12), seconds=60, measure=measure)
    assert done and all(row.gain >= 0.02 and row.date and row.stages == 4 for row in found)
    after = merged(rows, found, done)
    measured = {(each.key, each.from_cols, each.to_cols) for each in done}
    for row in rows:
        for key in row.keys:
            if (key, row.from_cols, row.to_cols) not in measured:
                assert any(
                    key in each.keys
                    and each.from_cols <= row.from_cols <= row.to_cols <= each.to_cols
                    for each in after
                )


def test_nothing_is_measured_after_its_time():
    found, done = tune_ranges(
        ROWS, H200, seconds=-1, measure=lambda cell, tiles: pytest.fail("too late")
    )
    assert (found, done) == ([], [])


def test_neighbours_with_one_tile_become_one_row():
    row = next(row for row in ROWS if row.step == 1 and "|" not in row.norm + row.dtype)
    wide = row.__class__(
        **vars(row) | {"from_cols": 100, "to_cols": 200, "gain": 0.03, "date": "2026-11-24"}
    )
    next_one = row.__class__(**vars(wide) | {"from_cols": 201, "to_cols": 300, "gain": 0.05})
    (one,) = merged([], [wide, next_one], [])
    assert (one.from_cols, one.to_cols, one.gain) == (100, 300, 0.03)


def test_a_residual_is_not_measured():
    assert not Range(
        ("forward", "layer_norm", "bfloat16", "16 bytes residual"), 8, 80, 1
    ).is_measured
