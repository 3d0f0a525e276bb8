"""Data files of measured tiles: what is in them is valid, worth its lines, and used."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from plan_problems import DIRECTIONS, problem_of_row, widths_of_row

import cupynorm
from cupynorm import plans
from cupynorm.dispatch import measured
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import choose
from cupynorm.dispatch.measured import (
    FILES,
    class_of,
    read_rows,
    row_for,
    tile_of,
    write_rows,
)
from cupynorm.dispatch.model import check_tile
from cupynorm.dispatch.problem import PATHS_OF_STRATEGY, Tile
from cupynorm.norm import prepared
from cupynorm.plans import plan

FOLDER = Path(cupynorm.__file__).parent / "dispatch"
E4M3 = "float8_e4m3fn"


ROWS = read_rows(FOLDER / "h200.csv")


def test_every_row_is_a_range_that_is_worth_its_line_and_fits():
    """At most 400 rows, each with a gain of 2% or more and a tile that all its devices run."""
    assert 0 < len(ROWS) <= 400
    for row in ROWS:
        assert row.from_cols < row.to_cols and row.gain >= 0.02 and row.date, row
        assert row.path in PATHS_OF_STRATEGY[row.strategy]
        for _, norm, dtype, kind in row.keys:
            for num_cols in widths_of_row(row):
                problem = problem_of_row(row, norm, dtype, num_cols)
                assert class_of(problem) == kind and row.holds(num_cols), (row, num_cols)
                for device in FILES["h200.csv"]:
                    # raises where it does not fit
                    choose(problem, DEVICES[device], row.strategy, row.tile(problem))


def test_every_row_decides_something():
    """Each row is the first that holds one of its widths."""
    by_key = measured.by_key(ROWS)
    for row in ROWS:
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
    write_rows(tmp_path / "h200.csv", ROWS)
    assert (tmp_path / "h200.csv").read_text() == (FOLDER / "h200.csv").read_text()
    first = ROWS[0]
    problem = problem_of_row(first, *first.keys[0][1:3], widths_of_row(first)[0])
    found = {"step": first.step, "gain": first.gain, "date": first.date}
    ends = first.from_cols, first.to_cols
    made = row_for(problem, first.strategy, first.tile(problem), *ends, **found)
    assert made == replace(first, norm=made.norm, dtype=made.dtype)


def test_reason_of_a_plan_names_the_table():
    for row in [row for row in ROWS if row.direction == "forward"][:50]:
        problem = problem_of_row(row, *row.keys[0][1:3], widths_of_row(row)[0])
        assert choose(problem, DEVICES["H200"]).reason == "measured, in h200.csv"
        assert not choose(problem, DEVICES["B200"]).reason.startswith("measured")


def test_classes_that_have_no_rows():
    made = {each: plan(1024, device="H200", direction=each).problem for each in DIRECTIONS}
    assert all(map(class_of, made.values()))
    for direction, changes in (
        ("forward", {"y": "float32"}),
        ("forward", {"input": "float16"}),
        ("backward", {"recomputed": "bfloat16"}),
    ):
        assert class_of(replace(made[direction], **changes)) is None


def test_long_threads_want_all_parameters():
    rows = [row for row in ROWS if row.direction == "forward" and row.path == "registers"]
    found = 0
    for row in rows:
        problem = problem_of_row(row, *row.keys[0][1:3], widths_of_row(row)[0])
        bare = replace(problem, weight=None, bias=None)
        long = row.tile(problem).elements > 64
        found += long
        assert (tile_of([row], bare, DEVICES["H200"]) is None) == long
    assert found


@pytest.mark.parametrize("changes", ({"clusters": ((2, 66),)}, {"smem_per_block": 101376}), ids=str)
def test_a_device_of_the_same_name_that_can_do_less_has_rows_that_fit(changes):
    """A tile of the file may have clusters, or shared memory, that the device has not."""
    less = replace(DEVICES["H200"], **changes)
    differ = 0
    for direction, num_cols in product(DIRECTIONS, (1000, 9008, 12288, 51204, 131072)):
        made = plan(num_cols, device=less, direction=direction)
        check_tile(made.problem, made.strategy, made.tile, less)
        whole = plan(num_cols, device="H200", direction=direction)
        differ += whole.tile != made.tile
    assert differ
    fewer = replace(DEVICES["H200"], num_sms=114)
    assert plan(9008, device=fewer).reason == plan(9008, device="H200").reason


# use_tiles.

H200 = DEVICES["H200"]
HEADER = (FOLDER / "h200.csv").read_text(encoding="utf-8").partition("\n")[0]
DISPATCH = (FOLDER.parents[1] / "docs" / "dispatch.md").read_text(encoding="utf-8")
DOCUMENTED = next(line for line in DISPATCH.splitlines() if line.startswith("forward,layer_norm|"))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A data file with the row that docs/dispatch.md shows; the GPU here is an H200."""
    monkeypatch.setattr(plans, "present", lambda: [H200])
    path = tmp_path / "own.csv"
    path.write_text(f"{HEADER}\n{DOCUMENTED}\n", encoding="utf-8")
    yield path
    cupynorm.use_tiles(None)


def test_a_data_file_is_used_for_its_widths(own):
    """On the GPU of this machine, where neither strategy nor tile is asked for; until None."""
    before = plan(4096, device=H200)
    cupynorm.use_tiles(own)
    tile = Tile(8, 256, 2, blocks_per_sm=4, exact=1)
    for norm in ("layer_norm", "rms_norm"):
        found = plan(4096, 1 << 20, device=H200, norm=norm)
        assert (found.strategy, found.tile, found.reason) == ("block", tile, "from own.csv")
    for other in (
        {"num_cols": 4104},
        {"dtype": "float16"},
        {"residual": True},
        {"alignment": 4},
        {"strategy": "uncached"},
        {"device": "B200"},
        {"direction": "backward"},
    ):
        assert "own.csv" not in plan(**({"num_cols": 4096, "device": H200} | other)).reason
    cupynorm.use_tiles(None)
    assert plan(4096, device=H200) == before


def test_prepared_calls_are_forgotten(own, monkeypatch):
    forgotten = []
    monkeypatch.setattr(plans, "forget", lambda: forgotten.append(True))
    cupynorm.use_tiles(own)
    assert forgotten and callable(prepared.forget)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("forward,", "froward,", "direction is 'froward'; expected one of forward, backward"),
        ("layer_norm|", "layernorm|", "norm is 'layernorm|rms_norm'; expected one of layer_norm"),
        (",registers,", ",register,", "path is 'register'; expected one of registers, smem"),
        ("4096,4096", "4096,all", "invalid literal"),
        (",strategy,", ",", "KeyError: 'strategy'"),
        (",8,8,256,", ",0,8,256,", "step is 0; expected 1 or more"),
        (",8,8,256,", ",8,0,256,", "pack_size is 0; expected 1 or more"),
        (",0,0,,", "", "a row has fewer cells than the first line"),
        ("forward,layer_norm", None, "own.csv has no rows; expected those that tune"),
    ],
)
def test_a_wrong_data_file_is_refused(own, old, new, message):
    """The file in use stays."""
    cupynorm.use_tiles(own)
    text = own.read_text(encoding="utf-8")
    text = text.partition(old)[0] if new is None else text.replace(old, new, 1)
    own.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        cupynorm.use_tiles(own)
    assert plan(4096, device=H200).reason.startswith("from own.csv")


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="none.csv.*; expected one"):
        cupynorm.use_tiles(tmp_path / "none.csv")


def test_without_a_gpu_a_data_file_is_for_any_device(own, monkeypatch):
    """Tiles that a device cannot run are left out."""
    monkeypatch.setattr(plans, "present", list)
    cupynorm.use_tiles(FOLDER / "h200.csv")
    row = next(row for row in ROWS if row.path == "ring" and row.direction == "forward")
    problem = problem_of_row(row, *row.keys[0][1:3], widths_of_row(row)[0])
    found = choose(problem, DEVICES["B200"])
    assert (found.tile, found.reason) == (row.tile(problem), "from h200.csv")
    assert not choose(problem, DEVICES["A100"]).reason.startswith("from")
