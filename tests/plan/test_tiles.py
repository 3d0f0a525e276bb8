"""A tuned table is used where it applies, refused elsewhere, and changes only the tile."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.results import judge_all
from cupynorm.check.run import run_kernels
from cupynorm.gpu import on_cpu
from cupynorm.norm import prepared, tiles
from cupynorm.plan import dispatch
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.plans import plan
from cupynorm.plan.problem import Tile

H200 = DEVICES["H200"]
FORWARD = ("block", Tile(8, 64, 2, exact=1, blocks_per_sm=4))
BACKWARD = ("warp", Tile(8, 32, 4, rows_per_block=2, exact=1, blocks_per_sm=2))
RING = ("block", Tile(8, 64, 2, rows_per_block=2, exact=1, stages=2))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(tiles, "present", lambda: [H200])
    yield
    tiles.use_tiles(None)


def problem(direction="forward", num_cols=1024, **options):
    return plan(num_cols, direction=direction, device=H200, **options).problem


def table(backward=BACKWARD):
    found = {tiles.key(problem()): FORWARD, tiles.key(problem("backward")): backward}
    return tiles.Table(H200, found, {"gpu": "NVIDIA H200", "runs": 30})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text(table().to_json())
    return path


def test_a_table_comes_back_as_it_was_written(file):
    assert tiles.read(file) == table()
    assert "num_rows" not in file.read_text()


def changed(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


def set_tile(field, value):
    return lambda content: content["tiles"][0]["tile"].update({field: value})


@pytest.mark.slow
@pytest.mark.parametrize(
    "change,sentence",
    [
        (lambda content: content.pop("device"), "is no table of tiles: KeyError: 'device'"),
        (
            lambda content: content["tiles"][0]["problem"].update(rows=7),
            "is no table of tiles: TypeError",
        ),
        (lambda content: content.update(sources="0"), "was measured with other sources"),
        (
            lambda content: content.update(cupynorm="0.0.9"),
            r"other sources \(cupynorm 0.0.9; this is .*Measure again",
        ),
        (
            lambda content: content["device"].update(num_sms=78),
            "was measured on H200 .*78 multi.*; here is H200 .*132 multi",
        ),
        (
            lambda content: content["device"].update(name="B200", compute_capability=100),
            "on B200 .*10.0.*Measure here",
        ),
        (
            set_tile("packs_per_thread", 1),
            "has a wrong tile for 1024 columns: tile holds 512 columns",
        ),
        (set_tile("pack_size", "8}> f; //"), "fields that are no integers"),
        (set_tile("pack_size", True), "fields that are no integers"),
        (
            lambda content: content["tiles"][0].update(strategy="fast"),
            "has a wrong tile for 1024 columns: strategy is 'fast'",
        ),
        (
            lambda content: content["tiles"][0]["problem"].update(x="float8"),
            "has a wrong tile for 1024 columns",
        ),
        (
            lambda content: content["tiles"][0]["problem"].update(num_cols=None),
            "has a wrong tile for None columns",
        ),
    ],
)
def test_a_table_that_does_not_belong_here_is_refused(file, change, sentence):
    before = str(plan(1024, device=H200))
    with pytest.raises(ValueError, match=sentence) as refusal:
        cupynorm.use_tiles(changed(file, change))
    assert str(refusal.value).startswith(str(file))
    assert dispatch.tuned is None and str(plan(1024, device=H200)) == before


def test_comments_and_docstrings_decide_no_tile():
    text = '"""A module."""\nclass A:\n    """A class."""\n'
    text += 'def f(x):  # why\n    """Docs."""\n    return x + 1\n'
    same = "class A: pass\n\ndef f(x):\n    # another reason\n    return (x +\n            1)\n"
    assert tiles.code(text) == tiles.code(same)
    assert tiles.code(text) != tiles.code(same.replace("1)", "2)"))
    assert tiles.code("x = 'text'") != tiles.code("x = 'another'")


def test_the_sources_are_all_that_decide_a_tile():
    """_DECIDING lists every module that dispatch imports, directly or not, but dtypes."""
    folder = Path(cupynorm.__file__).parent / "plan"
    found, unread = set(), ["dispatch"]
    while unread:
        found.add(name := unread.pop())
        for node in ast.parse((folder / f"{name}.py").read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                unread += {node.module} - found
    assert set(tiles._DECIDING) == found - {"dtypes"}


def test_files_that_are_no_table(tmp_path):
    with pytest.raises(OSError, match="none.json"):
        cupynorm.use_tiles(tmp_path / "none.json")
    for text in ("", "[]", "7", "{}"):
        (tmp_path / "some.json").write_text(text)
        with pytest.raises(ValueError, match="is no table of tiles"):
            cupynorm.use_tiles(tmp_path / "some.json")


def test_a_refusal_leaves_the_table_in_use(file, tmp_path):
    cupynorm.use_tiles(file)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError):
        cupynorm.use_tiles(tmp_path / "other.json")
    assert plan(1024, device=H200).tile == FORWARD[1]


def test_plans_follow_the_table_and_return(file):
    plans = {
        direction: plan(1024, direction=direction, device=H200)
        for direction in ("forward", "backward")
    }
    cupynorm.use_tiles(file)
    for direction, (strategy, tile) in (("forward", FORWARD), ("backward", BACKWARD)):
        for num_rows in (1, 7, 4096, 1 << 20):
            found = plan(1024, num_rows, direction=direction, device=H200)
            assert (
                (found.strategy, found.tile)
                == (strategy, tile)
                != (plans[direction].strategy, plans[direction].tile)
            )
        assert f"{strategy}: from tiles.json, measured on H200" in str(found)
        assert found.launches[0].kernel.name_expression.count(found.tile.cpp) == 1
        assert plan(1024, direction=direction, device=H200, zero_centered_weight=True).tile == tile
        # The table does not apply to other problems or to a strategy that is asked for.
        for options in (
            {"device": "H100"},
            {"norm": "rms_norm"},
            {"weight_dtype": None},
            {"alignment": 4},
            {"strategy": "uncached"},
        ):
            assert (
                "from tiles"
                not in plan(1024, direction=direction, **{"device": H200, **options}).reason
            )
        assert "from tiles" not in plan(2048, direction=direction, device=H200).reason
    assert "from tiles" not in plan(1024, device=H200, residual=True).reason
    cupynorm.use_tiles(None)
    assert plans == {direction: plan(1024, direction=direction, device=H200) for direction in plans}


def test_prepared_calls_are_forgotten(file, monkeypatch):
    monkeypatch.setattr(prepared, "forwards", {"a call": "with its plan"})
    monkeypatch.setattr(prepared, "backwards", {"a call": "with its plan"})
    cupynorm.use_tiles(file)
    assert not prepared.forwards and not prepared.backwards


def test_without_a_gpu_every_table_is_taken(file, monkeypatch):
    monkeypatch.setattr(tiles, "present", list)
    cupynorm.use_tiles(changed(file, lambda content: content["device"].update(name="another")))
    assert plan(1024, device=replace(H200, name="another")).tile == FORWARD[1]
    assert "from tiles" not in plan(1024, device=H200).reason


FOLDER = Path(cupynorm.__file__).parent
DISPATCH = (FOLDER.parent / "docs" / "dispatch.md").read_text(encoding="utf-8")


@pytest.fixture
def ranges(tmp_path):
    """A data file with the row that docs/dispatch.md shows."""
    header = (FOLDER / "plan" / "h200.csv").read_text(encoding="utf-8").partition("\n")[0]
    row = next(line for line in DISPATCH.splitlines() if line.startswith("forward,layer_norm|"))
    path = tmp_path / "own.csv"
    path.write_text(f"{header}\n{row}\n", encoding="utf-8")
    return path


def test_a_data_file_is_used_for_its_widths(ranges):
    cupynorm.use_tiles(ranges)
    tile = Tile(8, 256, 2, blocks_per_sm=4, exact=1)
    for norm in ("layer_norm", "rms_norm"):
        found = plan(4096, device=H200, norm=norm)
        assert (found.strategy, found.tile, found.reason) == ("block", tile, "from own.csv")
    for other in ({"num_cols": 4104}, {"num_cols": 4096, "dtype": "float16"}):
        assert "own.csv" not in plan(**other, device=H200).reason


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("forward,", "froward,", "direction is 'froward'; expected one of forward, backward"),
        ("layer_norm|", "layernorm|", "norm is 'layernorm|rms_norm'; expected one of layer_norm"),
        (",registers,", ",register,", "path is 'register'; expected one of registers, smem"),
        ("4096,4096", "4096,all", "invalid literal"),
        (",strategy,", ",", "KeyError: 'strategy'"),
        ("forward,layer_norm", None, "own.csv has no rows; expected those that tune"),
    ],
)
def test_a_wrong_data_file_is_refused(ranges, old, new, message):
    text = ranges.read_text(encoding="utf-8")
    text = text.partition(old)[0] if new is None else text.replace(old, new, 1)
    ranges.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        cupynorm.use_tiles(ranges)


def _no_compiler() -> str:
    try:
        on_cpu.compiler()
    except on_cpu.NoCompilerError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(_no_compiler()), reason=_no_compiler() or "there is a compiler")
@pytest.mark.parametrize("backward", [BACKWARD, RING], ids=["registers", "ring"])
def test_results_under_a_table(backward):
    """Right, with the same bits for any order of threads, alone and in a batch."""
    tiles.use(table(backward), "from a test")
    whole = random_problem(Case("layer_norm", 19, 1024, "bfloat16"))

    def rows(chosen):
        case = replace(whole.case, num_rows=len(whole.x[chosen]))
        return replace(whole, case=case, x=whole.x[chosen], dy=whole.dy[chosen])

    got, again = (run_kernels(whole, CpuMachine(seed=seed)) for seed in (1, 2))
    assert all(found.ok for found in judge_all(whole, got))
    assert all(np.array_equal(got[name], again[name]) for name in got)
    for chosen in (slice(7, 8), slice(3, 9)):
        part = run_kernels(rows(chosen), CpuMachine())
        assert all(
            np.array_equal(part[name], got[name][chosen]) for name in ("y", "mean", "rstd", "dx")
        )


@pytest.mark.gpu
def test_calls_on_a_gpu_follow_the_table(tmp_path, monkeypatch):
    monkeypatch.undo()
    from cupynorm.gpu import launch, nvrtc

    device = launch.current_device()
    found = {
        tiles.key(plan(1024, dtype="float32", device=device).problem): (
            "block",
            Tile(4, 64, 4, exact=1),
        )
    }
    (tmp_path / "here.json").write_text(tiles.Table(device, found).to_json())
    cupy = nvrtc.cupy()
    x, weight, bias = (
        cupy.linspace(-1, 2, size, dtype="float32") for size in (64 * 1024, 1024, 1024)
    )
    x = x.reshape(64, 1024)

    def strategies():
        made = cupynorm.layer_norm(x, (1024,), weight, bias)
        return made, [each.plan.reason for each in prepared.forwards.values()]

    plain, _ = strategies()
    cupynorm.use_tiles(tmp_path / "here.json")
    tuned, reasons = strategies()
    assert reasons == [f"from here.json, measured on {device.name}"]
    assert float(abs(tuned - plain).max()) < 1e-3
    cupynorm.use_tiles(None)
    assert bool((strategies()[0] == plain).all())
    (tmp_path / "there.json").write_text(tiles.Table(replace(device, num_sms=1), found).to_json())
    with pytest.raises(ValueError, match="was measured on"):
        cupynorm.use_tiles(tmp_path / "there.json")


def test_a_data_file_of_ranges_is_used_for_any_device_without_a_gpu(tmp_path, monkeypatch):
    """A user may use the file of an H200 for a B200."""
    monkeypatch.setattr(tiles, "present", lambda: [])
    own = Path(cupynorm.__file__).parent / "plan" / "h200.csv"
    before = plan(12296, device="B200")
    cupynorm.use_tiles(own)
    try:
        after = plan(12296, device="B200")
        assert (
            after.tile == plan(12296, device="H200").tile != before.tile
            and after.reason == "from h200.csv"
        )
        for name in DEVICES:  # tiles of the file that a device cannot run are left out
            for num_cols in (1024, 12288, 20000):
                assert plan(num_cols, device=name, direction="backward").launches
    finally:
        cupynorm.use_tiles(None)
    assert plan(12296, device="B200").tile == before.tile
    header, row = own.read_text().splitlines()[:2]
    assert row.count(",1,8,128,1,4,1,5,0,") == 1  # step, pack_size, threads_per_row, ..
    for wrong in (
        "direction,norm\nforward,layer_norm",
        f"{header}\nforward,layer_norm",
        f"{header}\n{row.replace(',1,8,128,', ',0,8,128,')}",
        f"{header}\n{row.replace(',1,8,128,', ',1,0,128,')}",
    ):
        (tmp_path / "wrong.csv").write_text(wrong + "\n")
        with pytest.raises(ValueError, match="wrong.csv is no data file of tiles"):
            cupynorm.use_tiles(tmp_path / "wrong.csv")
