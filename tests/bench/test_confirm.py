"""confirm.py with made-up times: rows of a data file are compared with the model."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from random import Random

import pytest

import cupynorm
from cupynorm.bench.confirm import confirm, is_worth_a_row, pairs_of, shares
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.measured import FILES, by_key, read_rows

H200 = DEVICES["H200"]
WHOLE = read_rows(Path(cupynorm.__file__).parent / "plan" / next(iter(FILES)))
SOME = WHOLE[::97]
# A row stays where another one would hold its widths, so each of these has widths of its own.
ROWS = [row for row in SOME if not shares(row, by_key(each for each in SOME if each != row))]


def faster_by(share: float):
    return lambda cell, of_model, of_row: (100.0 * (1 + share), 100.0)


def test_pairs_are_of_the_classes_and_the_range_of_their_row():
    for row in ROWS:
        pairs = pairs_of(row, H200, Random(0))
        assert len(pairs) <= 2
        for pair in pairs:
            assert row.holds(pair.cell.num_cols)
            assert pair.cell.norm in row.norm and pair.cell.dtype in row.dtype
            assert pair.of_model.tile != pair.of_row.tile
            assert pair.of_row.tile.threads_per_row == row.threads_per_row
        classes = {(pair.cell.norm, pair.cell.dtype) for pair in pairs}
        assert len(classes) == min(len(pairs), len(row.keys))
    assert any(len(row.keys) > 1 for row in ROWS)


def test_a_row_that_gains_stays_with_its_gain_and_the_date():
    kept, num_measured, num_left = confirm(ROWS, H200, measure=faster_by(0.034))
    generator = Random(0)  # that of confirm
    same = sum(not pairs_of(row, H200, generator) for row in ROWS)
    assert (num_measured, num_left) == (len(ROWS), same)
    assert {(row.gain, row.date) for row in kept} == {(0.034, str(date.today()))}


def test_one_class_that_gains_is_enough():
    row = next(row for row in ROWS if "|" in row.norm and pairs_of(row, H200, Random(0)))

    def measure(cell, of_model, of_row):
        return faster_by(0.1 if cell.norm == "rms_norm" else 0.0)(cell, of_model, of_row)

    (kept,) = confirm([row], H200, measure=measure)[0]
    assert 0 < kept.gain < 0.1


def test_a_class_that_loses_counts_against_one_that_gains():
    row = next(row for row in ROWS if "|" in row.norm and pairs_of(row, H200, Random(0)))

    def measure(cell, of_model, of_row):
        return faster_by(0.1 if cell.norm == "rms_norm" else -0.1)(cell, of_model, of_row)

    assert confirm([row], H200, measure=measure)[0] == []


@pytest.mark.parametrize("share, times", [(-0.1, 1), (0.1, 2)])
def test_a_row_that_is_slower_is_measured_once(share, times):
    row = next(row for row in ROWS if len(pairs_of(row, H200, Random(0))) == 2)
    cells = []

    def measure(cell, of_model, of_row):
        cells.append(cell)
        return faster_by(share)(cell, of_model, of_row)

    confirm([row], H200, measure=measure)
    assert len(cells) == times


def test_a_row_that_gains_too_little_leaves():
    assert confirm(ROWS, H200, measure=faster_by(0.009))[0] == []


def test_a_narrow_row_needs_a_larger_gain():
    row = next(row for row in ROWS if pairs_of(row, H200, Random(0)))
    narrow = replace(row, to_cols=min(row.to_cols, row.from_cols + row.from_cols // 16))
    wide = replace(row, to_cols=max(row.to_cols, 2 * row.from_cols))
    assert is_worth_a_row(replace(wide, gain=0.01))
    assert not is_worth_a_row(replace(wide, gain=0.009))
    assert not is_worth_a_row(replace(narrow, gain=0.019))
    assert is_worth_a_row(replace(narrow, gain=0.02))
    assert confirm([narrow], H200, measure=faster_by(0.019))[0] == []


def test_measured_rows_of_the_file_are_worth_their_rows():
    measured = [row for row in WHOLE if row.gain is not None]
    few = [row for row in measured if not is_worth_a_row(row)]
    assert len(measured) > 500
    for row in few:
        others = by_key(each for each in WHOLE if each != row)
        assert shares(row, others), row


def test_rows_whose_kernel_spills_are_dropped():
    kept, _, _ = confirm(
        ROWS,
        H200,
        compile_ahead=lambda kernels: dict.fromkeys(kernels, "spills registers"),
        measure=faster_by(0.1),
    )
    assert kept == []


def test_rows_of_other_parts_and_those_without_time_stay_as_they_were():
    kept, num_measured, _ = confirm(ROWS, H200, part=(1, 2), measure=faster_by(0.0))
    assert num_measured == len(ROWS[::2]) and kept == ROWS[1::2]
    assert confirm(ROWS, H200, seconds=-1) == (ROWS, 0, 0)


def test_rows_measured_longest_ago_come_first():
    """They are of classes that no other row here has."""
    of_class = {row.keys[0]: row for row in ROWS if pairs_of(row, H200, Random(0))}
    dates = ["2026-02-01", "", "2026-01-01"]
    rows = [replace(row, date=date) for row, date in zip(of_class.values(), dates)]
    measured = []

    def measure(cell, of_model, of_row):
        measured.append((cell.direction, cell.num_cols))
        return 100.0, 100.0

    confirm(rows, H200, measure=measure)
    at = [
        next(at for at, row in enumerate(rows) if row.direction == direction and row.holds(cols))
        for direction, cols in measured
    ]
    assert [dates[each] for each in dict.fromkeys(at)] == sorted(dates)


def test_a_family_stays_where_another_row_would_hold_its_widths():
    family = next(row for row in ROWS if row.step > 1 and pairs_of(row, H200, Random(0)))
    around = replace(family, step=1, to_cols=family.to_cols + 100)

    def measure(cell, of_model, of_row):
        return faster_by(0.1 if cell.num_cols % family.step else 0.0)(cell, of_model, of_row)

    assert confirm([family], H200, measure=measure)[0] == []
    assert [row.step for row in confirm([family, around], H200, measure=measure)[0]] == [
        family.step,
        1,
    ]
