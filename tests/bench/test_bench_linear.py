"""bench of LayerNormLinear: whole cells on the CPU and a GPU, output, refused arguments."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy_as_cupy
import pytest
from cupynorm.bench.contestants import CONTESTANTS, GEMM, Contestant, LinearCell
from cupynorm.bench.linear import LinearMeasurement, LinearResult

from cupynorm.__main__ import main
from cupynorm.bench import decoding
from cupynorm.bench import linear as bench_linear
from cupynorm.bench.cells import COPY
from cupynorm.bench.timer import Timer
from cupynorm.gpu import environment

torch = pytest.importorskip("torch")
HERE = (
    "gemm",
    "cupynorm",
    "cupynorm-saved",
    "cupynorm-kernel",
    "cupynorm-plain",
    "cupynorm-current",
    "torch",
)


def host_timer() -> Timer:
    return Timer(
        lambda: None,
        numpy_as_cupy.Event(),
        numpy_as_cupy.Event(),
        numpy_as_cupy.cuda.get_elapsed_time,
    )


@pytest.mark.parametrize("passes", bench_linear.PASSES)
@pytest.mark.parametrize("each", bench_linear.FORMATS)
def test_a_cell_on_the_cpu(each, passes):
    cell = LinearCell(48, 64, 32, each, passes)
    found = bench_linear.measure_in_turns(host_timer(), cell, HERE, 2, 0, "cpu")
    assert not found.faults and not found.memory
    expected = [name for name in HERE if each in CONTESTANTS[name].formats]
    assert list(found.microseconds) == [COPY, *expected] and list(found.errors) == expected
    assert all(len(samples) == 2 and min(samples) > 0 for samples in found.microseconds.values())
    allowed = bench_linear._ALLOWED[each]
    assert all(0 < error <= allowed for error in found.errors.values())
    assert (max(found.errors.values()) > 2.0**-7) == (each == "fp8")


def test_wrong_results_and_failures_are_reported(monkeypatch):
    def wrong(cell, inputs):
        return lambda: torch.nn.functional.linear(
            inputs.normalized * 1.1, inputs.weight, inputs.bias
        ), ()

    def broken(cell, inputs):
        raise KeyError("no kernel")

    monkeypatch.setitem(CONTESTANTS, "wrong", Contestant(("bfloat16",), wrong))
    monkeypatch.setitem(CONTESTANTS, "broken", Contestant(("bfloat16",), broken))
    cell = LinearCell(48, 64, 32, "bfloat16", "forward")
    names = ("wrong", "broken", "torch")
    found = bench_linear.measure_in_turns(host_timer(), cell, names, 1, 0, "cpu")
    assert (
        list(found.faults) == ["wrong", "broken"]
        and "expected 0.00781 at most" in found.faults["wrong"]
    )
    assert "no kernel" in found.faults["broken"] and set(found.microseconds) == {
        COPY,
        "wrong",
        "torch",
    }
    result = LinearResult({}, {}, [found])
    assert not result and "broken could not run" in str(result)


def recorder(counts):
    """Replays that call all layers and take the number of their call in microseconds."""

    def record(calls):
        counts.append(len(calls))

        def replay():
            for call in calls:
                call()
            counts[0] += 1
            return float(counts[0])

        return replay

    return record


def test_layers_of_a_decoder_on_the_cpu(monkeypatch):
    monkeypatch.setattr(decoding, "_WEIGHT_BYTES", 10 * 64 * 32 * 2 - 1)
    counts, cell = [0], LinearCell(3, 64, 32, "bfloat16", "forward")
    found = decoding.measure(cell, decoding.NAMES, 2, 0, recorder(counts), "cpu")
    assert not found.faults, found.faults
    assert list(found.microseconds) == [decoding.READ, *decoding.NAMES]
    assert counts[1:] == [10] * 5  # layers of each contestant
    assert found.microseconds["torch"] == [15.0, 20.0]  # two turns of warm-up, five each
    assert all(0 < error <= 2.0**-7 for error in found.errors.values())
    result = LinearResult({}, {}, [found])
    lines = str(result).splitlines()
    assert lines[0].split()[1:] == [decoding.READ, *decoding.NAMES] and result
    assert lines[1].split()[-5:] == ["13.5", "14.5", "15.5", "16.5", "17.5"]


def test_each_layer_of_a_decoder_has_its_weight(monkeypatch):
    monkeypatch.setattr(decoding, "_WEIGHT_BYTES", 1)
    cell = LinearCell(1, 8, 16, "bfloat16", "forward")
    inputs = bench_linear.inputs_of(cell, "cpu", 0)
    layers = decoding.layers_of(cell, inputs)
    assert len({layer.weight.data_ptr() for layer in layers}) == len(layers) == 3
    assert all(torch.equal(layer.weight, inputs.weight) for layer in layers)


def test_a_decoder_that_is_wrong(monkeypatch):
    def wrong(cell, inputs):
        return lambda: inputs.normalized @ inputs.weight.t() * 1.1, ()

    def broken(cell, inputs):
        raise KeyError("no kernel")

    monkeypatch.setattr(decoding, "_WEIGHT_BYTES", 1)
    monkeypatch.setitem(CONTESTANTS, "wrong", Contestant(("bfloat16",), wrong))
    monkeypatch.setitem(CONTESTANTS, "broken", Contestant(("bfloat16",), broken))
    cell = LinearCell(3, 64, 32, "bfloat16", "forward")
    found = decoding.measure(cell, ("wrong", "broken"), 1, 0, recorder([0]), "cpu")
    result = LinearResult({}, {}, [found])
    assert not result and "wrong is off" in str(result) and "broken could not run" in str(result)


def test_cells():
    every = bench_linear.cells()
    assert len(every) == 2 * (9 + 5) and not any(
        cell.passes == "both" and cell.num_rows <= 256 for cell in every
    )
    assert [LinearCell(4, 8, 2, "bfloat16", each).norm_bytes for each in bench_linear.PASSES] == [
        4 * 8 * 4,
        4 * 8 * 10,
    ]
    assert [LinearCell(4, 8, 2, "fp8", each).norm_bytes for each in bench_linear.PASSES] == [
        4 * 8 * 3,
        4 * 8 * 9,
    ]
    assert str(every[-1]) == "32768 x 2048 x 6144 fp8, forward and backward"


def test_tables_and_json():
    cell = LinearCell(4096, 1024, 512, "bfloat16", "both")
    samples = {COPY: [97.0, 97.0], GEMM: [100.0, 102.0], "cupynorm": [150.0]}
    found = LinearMeasurement(cell, samples, {}, {"cupynorm": (2**20, 3 * 2**20)}, {})
    result = LinearResult(
        {"gpu": "H200"}, {"runs": 2}, [found], {"transformer_engine": "no module"}
    )
    lines = str(result).splitlines()
    assert lines[0].split() == ["microseconds", "gemm", "cupynorm", "target", "cupynorm/target"]
    assert lines[1].split()[-4:] == ["101.0", "150.0", "201.0", "0.746"]
    without = LinearMeasurement(cell, {GEMM: [100.0]}, {}, {}, {})
    assert str(LinearResult({}, {}, [without])).splitlines()[1].split()[-3:] == ["100.0", "-", "-"]
    assert any(line.split()[-4:] == ["-", "1", "/", "3"] for line in lines)
    assert lines[-1] == "transformer_engine was left out: no module" and result
    content = json.loads(result.to_json())
    assert content["measurements"][0]["cell"]["in_features"] == 1024
    assert content["measurements"][0]["microseconds"]["gemm"] == samples[GEMM]
    assert not LinearResult({}, {}, [])


def test_the_command(monkeypatch, capsys, tmp_path):
    seen = {}

    def run(todo, **options):
        seen.update(options, todo=todo)
        return LinearResult(
            {}, {}, [LinearMeasurement(todo[0], {COPY: [1.0], GEMM: [2.0]}, {}, {}, {})]
        )

    monkeypatch.setattr(bench_linear, "bench_linear", run)
    file = tmp_path / "a.json"
    arguments = [
        "--shapes",
        "4x8x2,512x8x2",
        "--format",
        "fp8",
        "--runs",
        "3",
        "--contestants",
        "gemm,cupynorm-saved",
        "--json",
        str(file),
    ]
    assert main(["bench", "linear", *arguments]) == 0
    assert seen["todo"] == [
        LinearCell(4, 8, 2, "fp8", "forward"),
        LinearCell(512, 8, 2, "fp8", "forward"),
        LinearCell(512, 8, 2, "fp8", "both"),
    ]
    assert (
        seen["runs"] == 3
        and seen["contestants"] == ["gemm", "cupynorm-saved"]
        and seen["command"].startswith("python -m cupynorm bench linear")
    )
    assert (
        "microseconds" in capsys.readouterr().out and json.loads(file.read_text())["measurements"]
    )
    assert main(["bench", "linear"]) == 0 and len(seen["todo"]) == 28
    assert main(["bench", "linear", "--graph"]) == 0 and len(seen["todo"]) == 40
    assert {(each.format, each.passes) for each in seen["todo"]} == {("bfloat16", "forward")}
    assert main(["bench", "linear", "--json", str(tmp_path / "none" / "a.json")]) == 2
    for wrong in (["--shapes", "4x8"], ["--contestants", "nobody"], ["--format", "int8"]):
        with pytest.raises(SystemExit):
            main(["bench", "linear", *wrong])
    assert "'4x8' is no shape" in capsys.readouterr().err


def test_refused_arguments():
    with pytest.raises(ValueError, match="runs is 0"):
        bench_linear.bench_linear(runs=0)
    with pytest.raises(
        ValueError, match="contestants has 'nobody'; expected some of gemm, cupynorm"
    ):
        bench_linear.bench_linear(contestants=["nobody"])
    if not environment.has_gpu():
        with pytest.raises(ValueError, match="none was found"):
            bench_linear.bench_linear()
    assert "transformer_engine.pytorch could not be imported" in (
        bench_linear.missing("transformer_engine")
        or "transformer_engine.pytorch could not be imported"
    )
    assert bench_linear.missing("torch") is None


def test_the_table_of_few_rows_is_that_of_its_samples():
    repository = Path(__file__).parents[2]
    samples = json.loads((repository / "notebooks" / "h200_decoding.json").read_text())
    page = (repository / "docs" / "linear.md").read_text()
    text = page.partition("\n1 and 2 rows in bfloat16")[2]
    table = text.partition("| copy of as many bytes |")[2].partition("\n\n")[0].splitlines()[2:]
    names = (decoding.READ, GEMM, "cupynorm-kernel", "cupynorm-plain", "torch")
    expected = {}
    for measured in samples["measurements"]:
        cell, times = measured["cell"], measured["microseconds"]
        shape = " x ".join(str(cell[name]) for name in ("num_rows", "in_features", "out_features"))
        if cell["num_rows"] <= 2:
            expected[shape] = [f"{np.median(times[name]):.1f}" for name in names]
    shown = [[part.strip() for part in line.strip("| ").split("|")] for line in table]
    assert {first: rest for first, *rest in shown} == expected and len(expected) == 16


@pytest.mark.gpu
def test_layers_of_a_decoder_on_a_gpu():
    """Half of the weight is copied in less time than the layer takes."""
    cell = LinearCell(16, 2048, 2048, "bfloat16", "forward")
    result = bench_linear.bench_linear(
        [cell], runs=3, names=decoding.NAMES, measure=decoding.measure
    )
    assert result, str(result)
    (found,) = result.measurements
    assert 0 < found.median(decoding.READ) < found.median("torch") < 1000


@pytest.mark.gpu
def test_cells_on_a_gpu():
    # Of fewer rows, dx is not written over dy.
    todo = bench_linear.cells([(2048, 256, 384), (16, 256, 384)])
    names = [name for name in HERE if name != "torch.compile"]
    result = bench_linear.bench_linear(todo, runs=3, contestants=names)
    assert result, str(result)
    for measured in result.measurements:
        assert np.isfinite(measured.median("cupynorm")) and measured.median(
            "target"
        ) > measured.median(GEMM)
        if measured.cell == LinearCell(2048, 256, 384, "bfloat16", "both"):
            held, saved, by_torch = (
                measured.memory[name][0] for name in ("cupynorm", "cupynorm-saved", "torch")
            )
            # The normalised tensor, to the allocator's 512 bytes.
            assert (
                saved - held == pytest.approx(2 * 2048 * 256, abs=2048) and by_torch >= saved - 2048
            )
