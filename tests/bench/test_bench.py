"""bench: whole runs on NumPy arrays, their inputs, and what ends a run early."""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench_cases import OPTIONS, SCALES
from cupynorm.bench.tensors import tensors_of

from cupynorm.bench import measure, peers, runners
from cupynorm.bench.cells import Cell, cells
from cupynorm.bench.report import BenchResult
from cupynorm.check.cases import NORMS
from cupynorm.gpu import environment
from cupynorm.plan.problem import Tile


def test_arguments_are_checked_first():
    with pytest.raises(ValueError, match="runs is 0"):
        measure.bench(runs=0)
    with pytest.raises(ValueError, match="peers has 'nobody'"):
        measure.bench(peers=["nobody"])
    if not environment.has_gpu():
        with pytest.raises(ValueError, match="none was found"):
            measure.bench()


def test_environment_lists_the_installed_libraries():
    found = environment.environment()
    assert (
        found["numpy"] == np.__version__ and found["cupynorm"] and found["date"].endswith("+00:00")
    )
    json.dumps(found, allow_nan=False)
    code = "import sys, cupynorm.gpu.environment; cupynorm.gpu.environment.environment(); "
    code += "sys.exit('torch' in sys.modules)"
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=variables).returncode == 0


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's, of a weight of another dtype
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_a_run_on_numpy(on_numpy, options):
    """Every direction and both norms agree with float64; torch is measured where it can."""
    todo = cells(NORMS, ["float32"], ["forward", "backward", "both"], [33, 64], 2**10, **options)
    shown = []

    def progress(items, **how):
        shown.append(how["desc"])
        return items

    result = measure.bench(todo, runs=2, seed=3, progress=progress)
    assert [measured.cell for measured in result.measurements] == todo and shown == ["measuring"]
    assert result.missing["quack"] == "no module named 'quack'" and "torch" not in result.missing
    for measured in result.measurements:
        assert 0 < measured.errors["cupynorm"] <= 1 and "cupynorm" not in measured.faults
        assert len(measured.samples["copy"]) == len(measured.samples["cupynorm"]) == 2
        if options.keys() & {"zero_centered", "out_dtype"}:
            assert measured.faults["torch"].endswith(
                f"its {measured.cell.norm} has no {next(iter(options))}"
            )
        elif "weight_dtype" not in options:  # which torch takes in some versions and for some norms
            assert 0 < measured.errors["torch"] <= 1 and not measured.faults
    assert BenchResult.from_json(result.to_json()).measurements == result.measurements
    assert str(result).count("\n* the fastest") == 1 and len(result.tables()) == 6


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_run_of_8_bit_outputs(with_torch_compile, out_dtype, residual):
    """Every scale and both norms at widths with a part of a block; torch.compile is measured."""
    scales = ("given", "row") if out_dtype == "int8" else (*SCALES, "block64")
    todo = cells(
        NORMS,
        ["bfloat16", "float64"],
        ["forward"],
        [33, 256],
        2**10,
        scales=scales,
        out_dtype=out_dtype,
        residual=residual,
    )
    result = measure.bench(todo, runs=1, seed=3, peers=["torch", "torch.compile"])
    assert (
        [measured.cell for measured in result.measurements] == todo
        and len(todo) == 8 * len(scales)
        and result.ok
    )
    for measured in result.measurements:
        assert (
            not measured.faults
            and 0 < measured.errors["cupynorm"] <= 1
            and 0 < measured.errors["torch.compile"] <= 1
        )
        assert (
            measured.errors["cupynorm"] > 0.5
        )  # the rounding to 8 bits is most of what is allowed
    assert BenchResult.from_json(result.to_json()).measurements == result.measurements
    assert f"layer_norm forward, bfloat16, y {out_dtype}, scale {scales[-1]}" in str(result)


WIDE = "block: pack_size 8, threads_per_row 32, packs_per_thread 1"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tiles_are_timed_in_turns_with_the_chosen_one(on_numpy, monkeypatch, direction):
    """A tile holds 256 columns. For 512 its cell has an error, and the others are measured."""
    forced = []

    def prepared(cell, tensors, **options):
        forced.append((cell.num_cols, options))
        return prepare_ours(cell, tensors, **options)

    prepare_ours = runners.prepare_ours
    monkeypatch.setattr(runners, "prepare_ours", prepared)
    todo = cells(NORMS, ["bfloat16"], [direction], [256, 512], 2**12)
    result = measure.bench(todo, runs=2, seed=3, peers=[], tiles=[WIDE, WIDE.replace(", ", ",  ")])
    tile = {"strategy": "block", "tile": Tile(8, 32, 1)}
    assert forced == [(256, {}), (256, tile), (512, {})] * 2
    for measured in result.measurements:
        if measured.cell.num_cols == 256:
            assert (
                0 < measured.errors[WIDE] <= 1
                and len(measured.samples[WIDE]) == 2
                and not measured.faults
            )
        else:
            assert (
                WIDE not in measured.samples and "tile holds 256 columns" in measured.faults[WIDE]
            )
    shown = str(result)
    assert (
        result.ok
        and f"\ntile 1: {WIDE}\n" in shown
        and "  tile 1 us  share" in shown
        and "tile 2" not in shown
    )
    assert BenchResult.from_json(result.to_json()).measurements == result.measurements


def test_a_tile_of_8_bit_outputs(on_numpy):
    todo = cells(
        ["layer_norm"],
        ["bfloat16"],
        ["forward"],
        [256],
        2**12,
        scales=SCALES,
        out_dtype="float8_e4m3fn",
    )
    result = measure.bench(todo, runs=1, seed=3, peers=[], tiles=[WIDE])
    assert len(result.measurements) == 4 and all(
        0 < each.errors[WIDE] <= 1 for each in result.measurements
    )


@pytest.mark.parametrize(
    ("tile", "sentence"),
    [
        (
            "fast: pack_size 8",
            "tile is 'fast: pack_size 8'; expected one of warp, block, cluster, uncached, a colon",
        ),
        ("block", "tile is 'block'; expected one of warp"),
        (
            "block: pack_size 8",
            "tile is ' pack_size 8'; expected pairs as 'pack_size 8, threads_per_row 128'",
        ),
        ("block: pack_size 8, threads_per_row many", "expected pairs as"),
        (
            "block: pack_size 8, threads_per_row 32, lanes 4",
            "and others of pack_size, threads_per_row, packs_per_thread, rows",
        ),
        ("cupynorm", "tile is 'cupynorm'; expected one of warp"),
        ("torch", "tile is 'torch'; expected one of warp"),
    ],
)
def test_text_that_is_no_tile_is_refused_first(tile, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        measure.bench(cells(cols=[64], directions=["forward"]), tiles=[tile])


def test_a_tile_belongs_to_one_direction():
    with pytest.raises(ValueError, match="belongs to one direction; expected cells of forward or"):
        measure.bench(cells(cols=[64], directions=["both"]), tiles=[WIDE])


def test_a_run_that_records_amaxes(with_torch_compile):
    todo = cells(
        NORMS,
        ["bfloat16", "float32"],
        ["forward"],
        [33, 256],
        2**10,
        out_dtype="float8_e4m3fn",
        amax=True,
    )
    result = measure.bench(todo, runs=1, seed=3, peers=["torch", "torch.compile"])
    assert (
        all(cell.scale == "given" and cell.amax for cell in todo) and len(todo) == 8 and result.ok
    )
    assert all(not measured.faults.keys() - {"torch"} for measured in result.measurements)
    assert "layer_norm forward, bfloat16, y float8_e4m3fn, scale given, amax" in str(result)
    assert BenchResult.from_json(result.to_json()).measurements == result.measurements


def test_torch_has_no_8_bit_outputs(on_numpy):
    todo = cells(
        dtypes=["float32"],
        directions=["forward"],
        cols=[64],
        elements=2**10,
        out_dtype="float8_e5m2",
    )
    (measured,) = measure.bench(todo, runs=1, seed=3, peers=["torch"]).measurements
    assert measured.faults["torch"].endswith("its layer_norm has no out_dtype")


def test_inputs_are_those_that_are_named(on_numpy):
    cell = Cell(
        "layer_norm",
        "both",
        "float32",
        100,
        33,
        zero_centered=True,
        residual=True,
        out_dtype="float16",
    )
    tensors, copy = tensors_of(cell, 5)
    assert [name for name, each in zip(tensors._fields, tensors) if each is None] == [
        "scale",
        "amax",
    ]
    assert [str(each.dtype) for each in tensors[:-2]] == [
        "float32",
        "float16",
        "float16",
        "float32",
        "float32",
        "float32",
        "float32",
    ]
    assert (
        abs(tensors.x.mean() - 0.5) < 0.2
        and abs(tensors.x.std() - 2) < 0.2
        and abs(tensors.weight.mean()) < 0.5
    )
    copies = [np.array(each) for each in tensors[:-2]]
    tensors.y[...] = np.nan
    copy.call()
    assert np.isfinite(tensors.y.view(np.uint16)).all()
    for before, after in zip(
        copies[:2], tensors[:2]
    ):  # the copy reads what the cell reads, and leaves it
        assert np.array_equal(before, after)
    again, _ = tensors_of(cell, 5)
    other, _ = tensors_of(cell, 6)
    assert np.array_equal(again.x, tensors.x) and not np.array_equal(other.x, tensors.x)
    forward, _ = tensors_of(Cell("rms_norm", "forward", "float32", 4, 8), 5)
    assert [name for name, each in zip(forward._fields, forward) if each is None] == [
        "dy",
        "bias",
        "residual",
        "dsum",
        "scale",
        "amax",
    ]
    quantized, _ = tensors_of(
        Cell("rms_norm", "forward", "float32", 4, 8, out_dtype="float8_e5m2", scale="given"), 5
    )
    assert (
        quantized.y is None and quantized.scale.shape == (1,) and quantized.scale[0] == 57344 / 64
    )


def test_a_peer_that_fails_or_is_off_does_not_end_the_run(on_numpy, monkeypatch):
    monkeypatch.setattr(
        measure,
        "missing",
        lambda name: None if name in ("cupynorm", "torch", "apex", "quack") else "absent",
    )

    def fails(cell, tensors):
        raise RuntimeError(f"no kernel for {cell.num_cols} columns\nand a second line")

    def is_off(cell, tensors):
        return lambda: tensors.x * 2

    monkeypatch.setitem(peers.PEERS, "apex", peers.Peer("apex", fails))
    monkeypatch.setitem(peers.PEERS, "quack", peers.Peer("quack-kernels", is_off))
    result = measure.bench(
        cells(dtypes=["float32"], directions=["forward"], cols=[64], elements=2**10), runs=1, seed=1
    )
    (measured,) = result.measurements
    assert (
        measured.faults["apex"] == "apex could not run: no kernel for 64 columns"
        and "apex" not in measured.samples
    )
    assert (
        measured.faults["quack"].startswith("quack is off: y is ") and measured.errors["quack"] > 1
    )
    assert "quack" not in measured.fastest and len(measured.samples["quack"]) == 1 and result.ok


def test_an_interrupt_keeps_the_measurements(on_numpy):
    todo = cells(dtypes=["float32"], cols=[64], elements=2**10)

    def interrupted(items, **how):
        yield items[0]
        raise KeyboardInterrupt

    def at_once(items, **how):
        raise KeyboardInterrupt

    result = measure.bench(todo, runs=1, peers=[], progress=interrupted)
    assert [measured.cell for measured in result.measurements] == todo[:1] and len(todo) == 2
    assert not result and str(result).endswith("stopped after 1 of 2 cells: KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        measure.bench(todo, runs=1, peers=[], progress=at_once)


def test_a_failure_of_cupynorm_keeps_the_measurements(on_numpy, monkeypatch):
    prepare = measure.prepare

    def fails(name, cell, tensors):
        if name == "cupynorm" and cell.direction == "backward":
            raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")
        return prepare(name, cell, tensors)

    monkeypatch.setattr(measure, "prepare", fails)
    result = measure.bench(cells(dtypes=["float32"], cols=[64], elements=2**10), runs=1, peers=[])
    assert len(result.measurements) == 1 and not result
    assert str(result).endswith("stopped after 1 of 2 cells: CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):
        measure.bench(
            cells(dtypes=["float32"], directions=["backward"], cols=[64], elements=2**10),
            runs=1,
            peers=[],
        )


def test_every_cell_is_tried_ahead(on_numpy, monkeypatch):
    tried = []
    try_once = measure.try_once

    def counted(cell, names, seed):
        tried.append((cell, tuple(names)))
        try_once(cell, names, seed)

    monkeypatch.setattr(measure, "try_once", counted)
    monkeypatch.setattr(
        concurrent.futures,
        "ProcessPoolExecutor",
        lambda jobs, context: concurrent.futures.ThreadPoolExecutor(1),
    )
    todo = cells(dtypes=["float32"], cols=[64], elements=2**10)
    result = measure.bench(todo, runs=1, peers=[], jobs=4)
    assert tried == [(cell, ("cupynorm",)) for cell in todo] and len(result.measurements) == 2
