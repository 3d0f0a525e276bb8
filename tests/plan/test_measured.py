"""Data files of measured tiles: what is in them is valid, regular, and used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import cupynorm
from cupynorm.norm.plans import plan
from cupynorm.plan import measured
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.dispatch import choose
from cupynorm.plan.measured import (
    FILES,
    class_of,
    key_of,
    measured_tile,
    read_rows,
    tile_of,
    write_rows,
)
from cupynorm.plan.problem import PATHS_OF_STRATEGY, Layout, Problem

FOLDER = Path(cupynorm.__file__).parent / "plan"
E4M3 = "float8_e4m3fn"


def problem_of(row: measured.Row, norm: str, dtype: str, num_cols: int) -> Problem:
    """A problem of a row's class, as large as possible: with all parameters."""
    first, _, *words = row.kind.split()
    size = 2 if dtype in ("bfloat16", "float16") else 4
    layout = Layout(int(first) // size, contiguous=True)
    wide = "float32" if "wide" in words else dtype
    bias = wide if norm == "layer_norm" else None
    scaling = next((word for word in words if word in ("given", "tensor", "row", "block")), None)
    if row.direction == "forward":
        return Problem(
            "forward",
            norm == "layer_norm",
            num_cols,
            dtype,
            layout,
            y=E4M3 if scaling else dtype,
            weight=wide,
            bias=bias,
            residual="residual" in words,
            scaling=scaling,
            amax="amax" in words,
        )
    return Problem(
        "backward",
        norm == "layer_norm",
        num_cols,
        dtype,
        layout,
        dy=dtype,
        dx=dtype,
        weight=wide,
        dweight=wide,
        dbias=bias,
        dsum=dtype if "dsum" in words else None,
    )


def widths_of(row: measured.Row) -> list[int]:
    """Widths of a row's class at its ends and between them."""
    size = 2 if row.dtype.split("|")[0] in ("bfloat16", "float16") else 4
    step = max(row.step, int(row.kind.split()[0]) // size)
    first, last = -(-row.from_cols // step) * step, row.to_cols // step * step
    return sorted({first, last, (first + last) // 2 // step * step, min(first + step, last)} - {0})


@pytest.mark.parametrize("name", FILES)
def test_every_row_holds_tiles_that_fit(name):
    rows = read_rows(FOLDER / name)
    assert rows
    for row in rows:
        assert row.path in PATHS_OF_STRATEGY[row.strategy]
        for _, norm, dtype, kind in row.keys:
            for num_cols in widths_of(row):
                problem = problem_of(row, norm, dtype, num_cols)
                assert class_of(problem) == kind and row.holds(num_cols), (row, num_cols)
                for device in FILES[name]:
                    choose(
                        problem, DEVICES[device], row.strategy, row.tile(problem)
                    )  # raises where it does not fit


@pytest.mark.parametrize("name", FILES)
def test_rows_are_ranges_and_no_single_widths(name):
    for row in read_rows(FOLDER / name):
        assert row.from_cols < row.to_cols and row.step >= 1, row


@pytest.mark.parametrize("name", FILES)
def test_every_row_decides_something(name):
    """Each row is the first that holds one of its widths."""
    rows = read_rows(FOLDER / name)
    by_key = measured.by_key(rows)
    for row in rows:
        size = 2 if row.dtype.split("|")[0] in ("bfloat16", "float16") else 4
        step = max(row.step, int(row.kind.split()[0]) // size)
        widths = range(-(-row.from_cols // step) * step, row.to_cols + 1, step)
        firsts = (
            next(each for each in by_key[key] if each.holds(num_cols))
            for key in row.keys
            for num_cols in widths
        )
        assert any(first == row for first in firsts), row


def test_rows_are_written_as_they_are_read(tmp_path):
    for name in FILES:
        write_rows(tmp_path / name, read_rows(FOLDER / name))
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_reason_of_a_plan_names_the_table():
    (name,) = FILES
    rows = [row for row in read_rows(FOLDER / name) if row.direction == "forward"]
    for row in rows[:50]:
        (_, norm, dtype, _), num_cols = row.keys[0], widths_of(row)[0]
        problem = problem_of(row, norm, dtype, num_cols)
        reason = choose(problem, DEVICES["H200"]).reason
        assert reason == f"measured, in {name}"
        assert not choose(problem, DEVICES["B200"]).reason.startswith("measured")


def test_a_row_that_fills_a_ring_is_not_of_its_range():
    """Backward, 24,576 columns fill deep rings of clusters of 8 blocks; 24,584 columns do not."""
    tiles = {
        num_cols: plan(num_cols, 1 << 16, direction="backward", device="H200").tile
        for num_cols in (24576, 24584)
    }
    assert (tiles[24576].exact, tiles[24576].cluster_size, tiles[24576].stages) == (1, 8, 4)
    assert (tiles[24584].exact, tiles[24584].cluster_size) == (0, 2)


def test_classes():
    made = plan(1024, device="H200").problem
    assert class_of(made) == "16 bytes" and key_of(made) == (
        "forward",
        "layer_norm",
        "bfloat16",
        "16 bytes",
    )
    for changes, expected in (
        ({"residual": True}, "16 bytes residual"),
        ({"weight": "float32"}, "16 bytes wide"),
        ({"weight": None, "bias": None}, "16 bytes"),
        ({"y": E4M3, "scaling": "given", "amax": True}, "16 bytes given amax"),
        ({"layout": Layout(2, contiguous=True)}, "4 bytes"),
        ({"y": "float32"}, None),
        ({"input": "float16"}, None),
    ):
        assert class_of(replace(made, **changes)) == expected, changes
    backward = plan(1024, device="H200", direction="backward").problem
    assert class_of(replace(backward, dsum="bfloat16")) == "16 bytes dsum"
    assert class_of(replace(backward, dx=None)) == "16 bytes"
    assert class_of(replace(backward, recomputed="bfloat16")) is None


def test_rows_with_gaps_take_no_bundle_of_a_file():
    row = next(row for row in read_rows(FOLDER / "h200.csv") if row.path == "bundle")
    problem = problem_of(row, *row.keys[0][1:3], widths_of(row)[0])
    apart = replace(problem, layout=replace(problem.layout, contiguous=False))
    assert tile_of([row], problem, DEVICES["H200"]) and not tile_of([row], apart, DEVICES["H200"])


def test_long_threads_want_all_parameters():
    rows = [
        row
        for row in read_rows(FOLDER / "h200.csv")
        if row.direction == "forward" and row.path == "registers"
    ]
    found = 0
    for row in rows:
        problem = problem_of(row, *row.keys[0][1:3], widths_of(row)[0])
        bare = replace(problem, weight=None, bias=None)
        long = row.tile(problem).elements > 64
        found += long
        assert (tile_of([row], bare, DEVICES["H200"]) is None) == long
    assert found


def test_other_devices_have_no_rows():
    problem = plan(1024, device="H200").problem
    assert all(
        measured_tile(problem, DEVICES[name]) is None
        for name in DEVICES
        if name not in FILES["h200.csv"]
    )


@pytest.mark.parametrize("changes", ({"clusters": ((2, 66),)}, {"smem_per_block": 101376}), ids=str)
def test_a_device_of_the_same_name_that_can_do_less_has_no_rows(changes):
    """A tile of the file may have clusters, or shared memory, that the device has not."""
    less = replace(DEVICES["H200"], **changes)
    for direction in ("forward", "backward"):
        for num_cols in (1000, 9008, 12288, 51204, 131072):
            made = plan(num_cols, device=less, direction=direction)
            renamed = plan(num_cols, device=replace(less, name="other"), direction=direction)
            assert made.launches == renamed.launches
    fewer = replace(DEVICES["H200"], num_sms=114)
    assert plan(9008, device=fewer).reason == plan(9008, device="H200").reason
