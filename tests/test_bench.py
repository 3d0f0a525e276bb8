"""The benchmark without a GPU: statistics, tables, README, JSON, the timer's rule. With one: a small run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupynorm import bench, gradient_check
from cupynorm.bench import BenchResult, Cell, Measurement, Timer, cells, quartiles, rewrite_readme, take_turns

README = "# title\n\n<!-- bench -->\nold\n<!-- /bench -->\n\nafter\n"


def measurement(num_cols=1024, direction="forward", dtype="bfloat16", faults=None, errors=None, norm="layer_norm", **samples):
    """1 MiB in 1 us is 1049 GB/s."""
    cell = Cell(norm, direction, dtype, 2**18 // num_cols, num_cols)
    samples = samples or {"copy": [1.0, 1.0, 1.0], "cupynorm": [1.25] * 3, "torch": [2.0] * 3}
    errors = errors or {name: 0.5 for name in samples if name != "copy"}
    return Measurement(cell, "warp", samples, errors, faults or {})


def result(*measurements, missing=None):
    found = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda_runtime": "13.0", "cupy": "14.2.0", "torch": None}
    found |= {"cupynorm": "0.1.0", "date": "2026-11-20T12:00:00+00:00"}
    settings = {"runs": 3, "seed": 1, "eps": 1e-5, "elements": None, "command": "python -m cupynorm bench --readme"}
    return BenchResult(found, settings, list(measurements), missing or {})


# -- statistics ------------------------------------------------------------------------------------------


def test_quartiles():
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    samples = list(np.random.default_rng(0).standard_normal(31))
    assert np.allclose(quartiles(samples), np.quantile(samples, [0.25, 0.5, 0.75]))


def test_bytes_speed_and_share():
    forward = measurement()
    assert forward.cell.num_bytes == 2 * 2**18 * 2 and measurement(direction="backward").cell.num_bytes == 3 * 2**18 * 2
    assert measurement(dtype="float64").cell.num_bytes == 2 * 2**18 * 8
    assert forward.gigabytes_per_second("copy") == pytest.approx(2**20 / 1e-6 / 1e9)
    assert forward.share("cupynorm") == pytest.approx(0.8) and forward.share("torch") == 0.5
    spread = measurement(copy=[1.0], cupynorm=[1.0, 2.0, 3.0, 4.0, 5.0], torch=[2.0])
    assert spread.spread("cupynorm") == pytest.approx(2 / 3) and spread.spread("torch") == 0


def test_the_fastest_is_marked_and_a_tie_is_a_tie():
    assert measurement().fastest == {"cupynorm"}
    assert measurement(copy=[1.0], cupynorm=[2.0] * 3, torch=[1.5] * 3).fastest == {"torch"}
    noisy = [1.0, 1.9, 2.0, 2.1, 3.0]
    assert measurement(copy=[1.0], cupynorm=noisy, torch=[2.05] * 3).fastest == {"cupynorm", "torch"}
    assert measurement(copy=[1.0], cupynorm=noisy, torch=[2.15] * 3).fastest == {"cupynorm"}


def test_a_wrong_library_never_wins():
    wrong = measurement(faults={"cupynorm": "cupynorm is off: y is 3"})
    assert wrong.fastest == {"torch"} and not result(wrong).ok and not result(measurement(), wrong)
    assert measurement(faults={"cupynorm": "off", "torch": "off"}).fastest == frozenset()
    assert result(measurement(faults={"torch": "torch is off"})).ok


# -- what is shown ---------------------------------------------------------------------------------------


def test_the_table():
    text = str(result(measurement(), measurement(num_cols=2048, direction="backward"), missing={"torch": "no GPU"}))
    lines = text.splitlines()
    assert (
        "NVIDIA H200, driver 580.1, CUDA 13.0, CuPy 14.2.0, cupynorm 0.1.0, 2026-11-20" in lines[0] and "torch" not in lines[0]
    )
    assert "flushed" in lines[1] and "Medians of 3 runs" in lines[1]
    assert "layer_norm forward, bfloat16" in text and "layer_norm backward, bfloat16" in text
    (row,) = [line.split() for line in lines if line.split()[:1] == ["1024"]]
    assert row == ["1024", "256", "warp", "1.2", "1049", "839*", "0.80", "0.0%", "0.50", "524", "0.50", "0.0%", "0.50"]
    assert "torch was not measured: no GPU" in text


def test_the_table_shows_faults():
    off = measurement(faults={"cupynorm": "cupynorm is off: y is 3 at row 1, col 2"}, errors={"cupynorm": 7.5, "torch": 0.5})
    failed = measurement(num_cols=2048, copy=[1.0], cupynorm=[1.0], faults={"torch": "torch could not run: out of memory"})
    text = str(result(off, failed))
    assert "839OFF" in text and "7.50" in text and "524*" in text
    assert "layer_norm forward bfloat16 256 x 1024: cupynorm is off: y is 3 at row 1, col 2" in text
    assert "128 x 2048: torch could not run: out of memory" in text
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["2048"]]
    assert row[-4:] == ["-"] * 4


def test_markdown_has_one_row_per_num_cols():
    both = [measurement(num_cols, direction) for direction in ("forward", "backward") for num_cols in (64, 65536)]
    lines = result(*both).markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert table[0] == "| num_cols | forward: strategy | cupynorm | torch | backward: strategy | cupynorm | torch |"
    assert table[1].count("---") == 7
    assert table[2] == "| 64 | warp | **839 (0.80)** | 524 (0.50) | warp | **1,258 (0.80)** | 786 (0.50) |"
    assert table[3].startswith("| 65,536 |")
    assert lines[-1] == "Made by `python -m cupynorm bench --readme`."


def test_markdown_of_several_dtypes_and_a_missing_cell():
    text = result(measurement(64), measurement(64, direction="backward"), measurement(32, dtype="float32")).markdown()
    assert "layer_norm, bfloat16:" in text and "layer_norm, float32:" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 32 ")]
    assert row.endswith("|  | - | - |")
    assert text.count("| num_cols |") == 2


def test_readme_is_rewritten_between_its_markers():
    once = rewrite_readme(README, "| new |")
    assert once == "# title\n\n<!-- bench -->\n\n| new |\n\n<!-- /bench -->\n\nafter\n"
    assert rewrite_readme(once, "| new |\n") == once
    for broken in ("", "<!-- bench -->", README * 2, "<!-- /bench --> <!-- bench -->"):
        with pytest.raises(ValueError, match="needs the markers"):
            rewrite_readme(broken, "| new |")


def test_json_holds_every_sample():
    off = measurement(errors={"cupynorm": float("nan"), "torch": 0.5}, faults={"cupynorm": "y holds NaN"})
    content = json.loads(result(measurement(num_cols=64), off, missing={"liger": "not installed"}).to_json())
    assert content["environment"]["gpu"] == "NVIDIA H200" and content["settings"]["runs"] == 3
    first, second = content["cells"]
    assert first["microseconds"] == {"copy": [1.0] * 3, "cupynorm": [1.25] * 3, "torch": [2.0] * 3}
    assert (first["num_rows"], first["num_cols"], first["num_bytes"]) == (4096, 64, 2**20)
    assert second["errors"]["cupynorm"] is None and second["faults"] == {"cupynorm": "y holds NaN"}
    assert content["missing"] == {"liger": "not installed"}


def test_environment_names_what_is_there():
    found = bench.environment()
    assert found["numpy"] == np.__version__ and found["cupynorm"] and found["date"].endswith("+00:00")
    json.dumps(found, allow_nan=False)
    code = "import sys, cupynorm.bench; cupynorm.bench.environment(); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


# -- cells -----------------------------------------------------------------------------------------------


def test_cells():
    made = cells(["layer_norm", "rms_norm"], ["bfloat16", "float32"], ["forward", "backward"], [32, 100], 2**20)
    assert len(made) == len(set(made)) == 16
    assert {(cell.num_rows, cell.num_cols) for cell in made} == {(2**15, 32), (2**20 // 100, 100)}
    assert [
        cell.num_rows * cell.num_cols for cell in cells(["rms_norm"], ["bfloat16", "float32"], ["forward"], [64], None)
    ] == [
        2**28,
        2**27,
    ]


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        ((["batch_norm"], ["float32"], ["forward"], [32], None), "norm is 'batch_norm'"),
        ((["rms_norm"], ["int8"], ["forward"], [32], None), "dtype is 'int8'"),
        ((["rms_norm"], ["float32"], ["sideways"], [32], None), "direction is 'sideways'"),
        ((["rms_norm"], [], ["forward"], [32], None), "no dtype is given"),
        ((["rms_norm"], ["float32"], ["forward"], [], None), "cols is empty"),
        ((["rms_norm"], ["float32"], ["forward"], [0], None), "cols is 0"),
        ((["rms_norm"], ["float32"], ["forward"], [32, 64], 63), "elements is 63, less than one row of 64 columns"),
    ],
)
def test_cells_that_cannot_be(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        cells(*arguments)


def test_arguments_are_checked_first():
    with pytest.raises(ValueError, match="runs is 0"):
        bench.bench(runs=0)
    with pytest.raises(ValueError, match="peers has 'nobody'"):
        bench.bench(peers=["nobody"])
    if not gradient_check.has_gpu():
        with pytest.raises(ValueError, match="none was found"):
            bench.bench()


# -- the timer -------------------------------------------------------------------------------------------


class Clock:
    """A host and a GPU that works through a queue: enough to see who is ahead. Times in microseconds."""

    def __init__(self, flush_time):
        self.host = self.gpu = 0.0
        self.flush_time = flush_time
        self.flushes = 0

    def enqueue(self, gpu_time, host_time=1.0):
        self.host += host_time
        self.gpu = max(self.gpu, self.host) + gpu_time

    def flush(self):
        self.flushes += 1
        self.enqueue(self.flush_time)

    def timer(self):
        return Timer(self.flush, Event(self), Event(self), lambda start, stop: (stop.time - start.time) / 1e3)


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.clock.enqueue(0.0)
        self.time = self.clock.gpu

    @property
    def done(self):
        return self.clock.host >= self.time

    def synchronize(self):
        self.clock.host = max(self.clock.host, self.time)


def test_host_time_stays_out_of_the_result():
    clock = Clock(flush_time=80.0)
    timer = clock.timer()

    def slow_host():
        clock.enqueue(5.0, host_time=60.0)
        clock.enqueue(3.0, host_time=60.0)

    assert timer.sample(slow_host) == pytest.approx(8.0)
    needed = timer.num_flushes[slow_host]
    assert needed > 1
    before = clock.flushes
    assert timer.sample(slow_host) == pytest.approx(8.0) and clock.flushes == before + needed  # remembered
    assert timer.sample(lambda: clock.enqueue(5.0)) == pytest.approx(5.0)


def test_a_call_that_waits_for_the_gpu_is_refused():
    clock = Clock(flush_time=80.0)

    def waits():
        clock.enqueue(5.0)
        clock.host = clock.gpu

    with pytest.raises(RuntimeError, match="does not run ahead"):
        clock.timer().sample(waits)


def test_libraries_take_turns():
    clock = Clock(flush_time=80.0)
    order = []

    def library(name, microseconds):
        def call():
            order.append(name)
            clock.enqueue(microseconds)

        return call

    samples = take_turns(clock.timer(), {"copy": library("copy", 4.0), "cupynorm": library("cupynorm", 5.0)}, 3)
    assert order == ["copy", "cupynorm"] * 5  # two rounds to warm up
    assert samples == {"copy": [pytest.approx(4.0)] * 3, "cupynorm": [pytest.approx(5.0)] * 3}


# -- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("norm", gradient_check.NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_small_run(norm, dtype):
    measured = bench.bench(norms=[norm], dtypes=[dtype], cols=[64, 4096], elements=2**20, runs=3, seed=5)
    assert measured.ok, str(measured)
    assert len(measured.measurements) == 4 and measured.environment["gpu"]
    for each in measured.measurements:
        assert set(each.samples) >= {"copy", "cupynorm"} and not each.faults, each.faults
        assert all(len(samples) == 3 and min(samples) > 0 for samples in each.samples.values())
        assert all(0 < error <= 1 for name, error in each.errors.items() if name == "cupynorm")
        # No kernel moves its bytes several times faster than a copy; a time that is far too short was not measured.
        assert each.share("cupynorm") < 5
    json.loads(measured.to_json())
    rewrite_readme(README, measured.markdown())


@pytest.mark.gpu
def test_random_data_is_normal_and_fresh():
    cell = Cell("layer_norm", "forward", "bfloat16", 1024, 1024)
    x, again, other = (
        gradient_check.decode(bench.bits(bench._tensors(cell, seed).x, "bfloat16").get(), "bfloat16") for seed in (1, 1, 5)
    )
    assert np.array_equal(x, again) and not np.array_equal(x, other)
    assert abs(x.mean() - 0.5) < 0.02 and abs(x.std() - 2) < 0.02 and np.abs(x).max() > 8
    assert abs(((x - 0.5) ** 3).mean()) < 0.2 and abs(((x - 0.5) ** 4).mean() / 16 - 3) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("direction,name", [("forward", "y"), ("backward", "dx")])
def test_a_wrong_or_unwritten_output_is_found(direction, name):
    cell = Cell("layer_norm", direction, "float32", 64, 512)
    tensors = bench._tensors(cell, 3)
    right = bench._prepare_ours(cell, tensors)
    assert bench.verify(cell, tensors, right, 0, rounded_mean=False)[1] is None

    def wrong(result):
        outputs = right.outputs(result)
        outputs[name] *= 1.001
        return outputs

    error, what = bench.verify(cell, tensors, right._replace(outputs=wrong), 0, rounded_mean=False)
    assert error > 1 and f"{name} is" in what
    first = right.call()
    lazy = bench.Runner(lambda: first, right.outputs)
    error, what = bench.verify(cell, tensors, lazy, 0, rounded_mean=False)
    assert np.isnan(error) and "not every element was written" in what
