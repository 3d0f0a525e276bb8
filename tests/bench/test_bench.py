"""bench: when timing stops, which errors are found, and whole runs on NumPy arrays and a GPU."""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy_as_cupy
import pytest

from cupynorm.bench import measure, peers, runners
from cupynorm.bench.cells import Cell, cells
from cupynorm.bench.report import BenchResult
from cupynorm.bench.tensors import bits, tensors_of
from cupynorm.bench.timer import Runner, Timer, take_turns
from cupynorm.bench.truth import Truth, verify
from cupynorm.check.cases import NORMS
from cupynorm.dtypes import decode
from cupynorm.gpu import arrays, environment, launch, nvrtc
from cupynorm.norm import quantized_tensor
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.problem import Tile


@pytest.fixture
def on_numpy(monkeypatch):
    """The benchmark on NumPy arrays: cupynorm uses its reference, torch the CPU."""
    pytest.importorskip(
        "torch._dynamo"
    )  # before it can see a cupy that has only what the benchmark needs

    def in_clothes(make):
        def dressed(*given):
            made = make(*given)
            return made if arrays.is_torch(made) else numpy_as_cupy.asarray(made)

        return dressed

    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    monkeypatch.setitem(sys.modules, "cupy", numpy_as_cupy)
    monkeypatch.setattr(arrays, "from_float64", in_clothes(arrays.from_float64))
    monkeypatch.setattr(quantized_tensor, "_of_library", in_clothes(quantized_tensor._of_library))
    monkeypatch.setattr(launch, "current_device", lambda: DEVICES["H200"])
    can_run = (peers.OURS, "torch")
    monkeypatch.setattr(
        measure, "missing", lambda name: None if name in can_run else f"no module named {name!r}"
    )


# The timer.


class Clock:
    """A host and a GPU with a queue, so that a test sees which is ahead. Microseconds."""

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
        return Timer(
            self.flush, Event(self), Event(self), lambda start, stop: (stop.time - start.time) / 1e3
        )


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

    runner = Runner(slow_host)
    assert timer.sample(runner) == pytest.approx(8.0)
    needed = timer.num_flushes[slow_host]
    assert needed > 1
    before = clock.flushes
    assert (
        timer.sample(runner) == pytest.approx(8.0) and clock.flushes == before + needed
    )  # remembered
    assert timer.sample(Runner(lambda: clock.enqueue(5.0))) == pytest.approx(5.0)


def test_restoring_inputs_is_not_timed():
    clock = Clock(flush_time=80.0)
    restored = []

    def before():
        restored.append(clock.flushes)
        clock.enqueue(1000.0)

    assert clock.timer().sample(Runner(lambda: clock.enqueue(5.0), before=before)) == pytest.approx(
        5.0
    )
    assert restored == [0]


def test_a_call_that_waits_for_the_gpu_is_refused():
    clock = Clock(flush_time=80.0)

    def waits():
        clock.enqueue(5.0)
        clock.host = clock.gpu

    with pytest.raises(RuntimeError, match="does not run ahead"):
        clock.timer().sample(Runner(waits))


def test_libraries_take_turns():
    clock = Clock(flush_time=80.0)
    order = []

    def library(name, microseconds):
        def call():
            order.append(name)
            clock.enqueue(microseconds)

        return Runner(call)

    samples = take_turns(
        clock.timer(), {"copy": library("copy", 4.0), "cupynorm": library("cupynorm", 5.0)}, 3
    )
    assert order == ["copy", "cupynorm"] * 5  # two rounds to warm up
    assert samples == {"copy": [pytest.approx(4.0)] * 3, "cupynorm": [pytest.approx(5.0)] * 3}


# A run.


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


OPTIONS = [
    {},
    {"weight_dtype": "float64"},
    {"residual": True},
    {"zero_centered": True},
    {"out_dtype": "float16"},
]


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


SCALES = ("given", "tensor", "row", "block", "mx")


@pytest.fixture
def with_torch_compile(on_numpy, monkeypatch):
    """torch.compile as a peer whose functions are not compiled."""
    can_run = (peers.OURS, "torch.compile")
    monkeypatch.setattr(
        measure, "missing", lambda name: None if name in can_run else f"no module named {name!r}"
    )
    monkeypatch.setattr(sys.modules["torch"], "compile", lambda function, dynamic: function)


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_run_of_8_bit_outputs(with_torch_compile, out_dtype, residual):
    """Every scale and both norms at widths with a part of a block; torch.compile is measured."""
    todo = cells(
        NORMS,
        ["bfloat16", "float64"],
        ["forward"],
        [33, 256],
        2**10,
        scales=SCALES,
        out_dtype=out_dtype,
        residual=residual,
    )
    result = measure.bench(todo, runs=1, seed=3, peers=["torch", "torch.compile"])
    assert (
        [measured.cell for measured in result.measurements] == todo
        and len(todo) == 40
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
    assert f"layer_norm forward, bfloat16, y {out_dtype}, scale mx" in str(result)


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
    assert len(result.measurements) == 5 and all(
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


@pytest.mark.parametrize("library", ["cupynorm", "torch.compile"])
def test_a_wrong_amax_is_found(with_torch_compile, library):
    """Twice the scale, half of it, that of an earlier call, and none."""
    cell = Cell(
        "layer_norm",
        "forward",
        "float32",
        8,
        320,
        out_dtype="float8_e5m2",
        scale="given",
        amax=True,
    )
    tensors, _ = tensors_of(cell, 3)
    truth = Truth(cell, tensors, 0)
    right = runners.prepare(library, cell, tensors)
    assert verify(right, truth, rounded_mean=False)[1] is None
    tensors.amax[...] = 1e6
    assert (
        verify(right, truth, rounded_mean=False)[1] is None
    )  # what was there before a call is gone

    def spoilt(factor):
        def outputs(result):
            made = {
                name: numpy_as_cupy.asarray(bits(each))
                for name, each in right.outputs(result).items()
            }
            return made | {"amax": made["amax"] * np.float32(factor)}

        return verify(right._replace(outputs=outputs), truth, rounded_mean=False)[1]

    assert spoilt(1) is None
    assert all(spoilt(factor).startswith("amax is") for factor in (2, 0.5, 0))


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


@pytest.mark.parametrize("library", ["cupynorm", "torch.compile"])
@pytest.mark.parametrize("scale", SCALES)
def test_wrong_8_bit_outputs_are_found(with_torch_compile, scale, library):
    """Wrong scales, wrong values, values that are not written, and missing scales are found."""
    cell = Cell("rms_norm", "forward", "float32", 8, 320, out_dtype="float8_e4m3fn", scale=scale)
    tensors, _ = tensors_of(cell, 3)
    truth = Truth(cell, tensors, 0)
    right = runners.prepare(library, cell, tensors)
    error, wrong = verify(right, truth, rounded_mean=False)
    assert wrong is None and 0.5 < error <= 1

    def spoilt(spoil):
        def outputs(result):
            made = {
                name: numpy_as_cupy.asarray(bits(each))
                for name, each in right.outputs(result).items()
            }
            spoil(made)
            return made

        return verify(right._replace(outputs=outputs), truth, rounded_mean=False)

    def halved(made):
        """The product of values and scale is right, but the range of the format is not used."""
        made["y"][...] -= np.uint8(8) * (
            (made["y"] & 0x7F) > 15
        )  # an exponent less, where there is one
        made["scale_inv"][...] = made["scale_inv"] + 1 if scale == "mx" else made["scale_inv"] * 2

    def other_scale(made):
        made["scale_inv"][-1] = (
            made["scale_inv"][-1] + 1 if scale == "mx" else made["scale_inv"][-1] * 1.25
        )

    def other_byte(made):
        """The largest of each row."""
        for row in made["y"]:
            row[np.argmax(row & 0x7F)] -= 8

    assert "scale_inv is" in spoilt(halved)[1]
    assert spoilt(other_scale)[1] is not None
    assert spoilt(other_byte)[1] is not None
    assert "y holds NaN" in spoilt(lambda made: made["y"][3, 7:8].fill(0xFF))[1]
    assert (
        "scale_inv holds NaN" in spoilt(lambda made: made["scale_inv"].view(np.uint8).fill(0xFF))[1]
    )
    if scale not in ("given", "tensor", "row"):

        def fewer(made):
            made["scale_inv"] = numpy_as_cupy.asarray(
                np.ascontiguousarray(made["scale_inv"][:, :-1])
            )

        assert "scales of a row; expected" in spoilt(fewer)[1]


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


CAUGHT = [
    ("forward", "y", None),
    ("backward", "dx", None),
    ("both", "dx", None),
    ("forward", "y", "residual"),
    ("forward", "sum", "residual"),
]


@pytest.mark.parametrize("direction,name,extra", CAUGHT)
def test_a_wrong_output_is_found(on_numpy, direction, name, extra):
    check_that_wrong_outputs_are_found(
        Cell("layer_norm", direction, "float32", 64, 512, residual=extra is not None), name
    )


def check_that_wrong_outputs_are_found(cell, name):
    tensors, _ = tensors_of(cell, 3)
    truth = Truth(cell, tensors, 0)
    right = runners.prepare("cupynorm", cell, tensors)
    error, wrong = verify(right, truth, rounded_mean=False)
    assert wrong is None and error <= 1

    def spoilt(spoil):
        def outputs(result):
            made = right.outputs(result)
            made[name] = spoil(made[name])
            return made

        return verify(right._replace(outputs=outputs), truth, rounded_mean=False)

    error, wrong = spoilt(lambda output: output * 1.001)
    assert error > 1 and f"{name} is" in wrong and "expected" in wrong
    error, wrong = spoilt(lambda output: output.astype("float64"))
    assert wrong == f"{name} is float64; expected float32"

    first = right.call()
    lazy = Runner(lambda: first, right.outputs)  # nothing is computed: what was poisoned stays
    error, wrong = verify(lazy, truth, rounded_mean=False)
    assert np.isnan(error) and "not every element was written" in wrong


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


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_small_run(norm, dtype):
    todo = cells([norm], [dtype], ["forward", "backward", "both"], [64, 4096], 2**20)
    measured = measure.bench(todo, runs=3, seed=5, peers=["torch", "tutorial"])
    assert measured.ok, str(measured)
    assert len(measured.measurements) == 6 and measured.environment["gpu"]
    for each in measured.measurements:
        assert set(each.samples) >= {"copy", "cupynorm"} and "cupynorm" not in each.faults, (
            each.faults
        )
        assert "torch" not in each.faults or "torch is off" in each.faults["torch"], each.faults
        assert all(len(samples) == 3 and min(samples) > 0 for samples in each.samples.values())
        assert all(0 < error <= 1 for name, error in each.errors.items() if name == "cupynorm")
        # A kernel that is several times faster than a copy was not measured right.
        assert each.share("cupynorm") < 5
    assert BenchResult.from_json(measured.to_json()).measurements == measured.measurements


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: next(iter(options)))
def test_a_small_run_with_other_tensors(options):
    options = {name: "float32" if value == "float64" else value for name, value in options.items()}
    todo = cells(NORMS, ["bfloat16"], ["forward", "backward", "both"], [96], 2**14, **options)
    measured = measure.bench(todo, runs=1, seed=5, peers=[])
    assert measured.ok and len(measured.measurements) == 6, str(measured)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_small_run_of_8_bit_outputs(dtype, out_dtype):
    todo = cells(NORMS, [dtype], ["forward"], [96, 4096], 2**18, scales=SCALES, out_dtype=out_dtype)
    measured = measure.bench(todo, runs=1, seed=5, peers=["torch.compile"])
    assert measured.ok and len(measured.measurements) == 20, str(measured)
    for each in measured.measurements:
        assert 0.5 < each.errors["cupynorm"] <= 1 and not each.faults, each.faults
        assert each.share("cupynorm") < 5


@pytest.mark.gpu
def test_a_small_run_of_tiles():
    """Both compile in other processes first; a tile that dispatch does not choose is right."""
    tile = "block: pack_size 8, threads_per_row 128, packs_per_thread 4, exact 1"
    todo = cells(["layer_norm"], ["bfloat16"], ["forward", "backward"], [4096], 2**18)
    todo += cells(
        ["layer_norm"],
        ["bfloat16"],
        ["forward"],
        [4096],
        2**18,
        scales=SCALES,
        out_dtype="float8_e4m3fn",
    )
    measured = measure.bench(todo, runs=2, seed=5, peers=[], tiles=[tile], jobs=2)
    assert measured.ok and len(measured.measurements) == 7, str(measured)
    for each in measured.measurements:
        assert 0 < each.errors[tile] <= 1 and not each.faults and each.share(tile) < 5, str(
            measured
        )


@pytest.mark.gpu
def test_compiling_ahead():
    measured = measure.bench(cells(cols=[72], elements=2**14), runs=1, peers=[], jobs=2)
    assert measured.ok and len(measured.measurements) == 2


@pytest.mark.gpu
def test_random_data_is_normal_and_fresh():
    cell = Cell("layer_norm", "forward", "bfloat16", 1024, 1024)
    x, again, other = (
        decode(bits(tensors_of(cell, seed)[0].x).get(), "bfloat16") for seed in (1, 1, 5)
    )
    assert np.array_equal(x, again) and not np.array_equal(x, other)
    assert abs(x.mean() - 0.5) < 0.02 and abs(x.std() - 2) < 0.02 and np.abs(x).max() > 8
    assert abs(((x - 0.5) ** 3).mean()) < 0.2 and abs(((x - 0.5) ** 4).mean() / 16 - 3) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("direction,name,extra", CAUGHT)
def test_a_wrong_or_unwritten_output_is_found(direction, name, extra):
    check_that_wrong_outputs_are_found(
        Cell("layer_norm", direction, "float32", 64, 512, residual=extra is not None), name
    )
