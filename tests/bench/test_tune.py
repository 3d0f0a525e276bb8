"""tune.py: which tile wins, which are left out, and whole runs on NumPy arrays and a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy_as_cupy
import pytest
from cupynorm.plan.candidates import candidates

import cupynorm
from cupynorm import __main__ as command
from cupynorm.bench import measure, tune
from cupynorm.bench.cells import COPY, Cell, cells
from cupynorm.bench.measure import plan_of
from cupynorm.check import kernels as check_kernels
from cupynorm.check.cases import NORMS, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.gpu import arrays, launch, nvrtc, on_cpu
from cupynorm.norm import tiles
from cupynorm.plan import dispatch
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.dispatch import choose
from cupynorm.plan.plans import plan
from cupynorm.plan.problem import Tile

H200 = DEVICES["H200"]
CELL = Cell("layer_norm", "forward", "bfloat16", 16, 256)


def _no_compiler() -> str:
    try:
        on_cpu.compiler()
    except on_cpu.NoCompilerError as error:
        return str(error)
    return ""


needs_compiler = pytest.mark.skipif(
    bool(_no_compiler()), reason=_no_compiler() or "there is a compiler"
)

# The winner.


@pytest.mark.parametrize(
    "samples,than,faster",
    [
        ([90, 90, 90], [100, 100, 100], True),
        ([100, 100, 100], [100, 100, 100], False),
        ([110, 110, 110], [100, 100, 100], False),
        ([99.5, 99.5, 99.5], [100, 100, 100], False),  # half a percent may be luck
        ([98.5, 98.5, 98.5], [100, 100, 100], True),
        (
            [85, 95, 105],
            [95, 100, 105],
            False,
        ),  # quartiles 10 and 5 apart: half of both is more than 5
        ([94, 95, 96], [99, 100, 101], True),
        (
            [94, 95, 96, 200, 94],
            [99, 100, 101, 10, 102],
            True,
        ),  # one run of five is none of the quartiles
    ],
)
def test_a_winner_is_ahead_by_more_than_the_spread(samples, than, faster):
    assert tune.is_faster(samples, than, tune._LEAST_GAIN) is faster


def finding(default, best, left_out=(), off=()):
    problem = plan(256, device=H200).problem
    made = [
        choose(problem, H200),
        choose(problem, H200, "warp", Tile(8, 8, 4, rows_per_block=16, exact=1, blocks_per_sm=2)),
    ]
    choices = dict(zip(("the default", "another"), made))
    samples = {COPY: [9.0] * 3, "the default": default, "another": best}
    return tune.TunedCell(CELL, problem, choices, samples, 7, dict(left_out), tuple(off))


def result(*findings, **options):
    return tune.TuneResult(H200, {"gpu": "NVIDIA H200", "runs": 3}, list(findings), **options)


def test_only_winners_enter_the_table():
    won, lost = finding([10.0] * 3, [9.0] * 3), finding([10.0] * 3, [9.95] * 3)
    assert (
        won.fastest == lost.fastest == "another"
        and won.gain == pytest.approx(1 / 9)
        and won.share("another") == 1
    )
    assert result(lost).table.tiles == {}
    assert result(won).table.tiles == {
        tiles.key(won.problem): ("warp", won.choices["another"].tile)
    }
    text = str(result(won, lost))
    assert "+11.1%  another\n" in text and "+0.5%  another (not beyond the spread)" in text
    assert "1 of 2 problems have a tile that is faster" in text.splitlines()[-1]


def test_candidates_that_are_left_out_are_reported():
    found = result(
        finding([10.0] * 3, [9.0] * 3, {"a": "spills registers", "b": "spills registers"})
    )
    assert found and "left out: 2 candidates, spills registers" in str(found)
    off = result(finding([10.0] * 3, [9.0] * 3, off=["y is 3; expected 2"]))
    assert not off and "OFF: y is 3; expected 2" in str(off)
    stopped = result(
        finding([10.0] * 3, [9.0] * 3), stopped="after 1 of 2 problems: KeyboardInterrupt"
    )
    assert not stopped and str(stopped).endswith("stopped after 1 of 2 problems: KeyboardInterrupt")


# The check.


class Recording(CpuMachine):
    """The kernels that run; `spoil` changes what they made."""

    def __init__(self, spoil=None):
        super().__init__()
        self.launched, self.made, self.spoil = [], [], spoil

    def empty(self, shape, dtype):
        array, pointer = super().empty(shape, dtype)
        self.made.append(array)
        return array, pointer

    def launch(self, kernel_launch, words):
        super().launch(kernel_launch, words)
        self.launched.append(kernel_launch)
        if self.spoil and kernel_launch.kernel.source.startswith(self.spoil):
            self.made[0 if self.spoil == "forward" else 3].reshape(-1)[5] += (
                3  # y, dx or dweight: bits or values
            )


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_check_runs_the_candidate(norm, direction):
    cell = Cell(norm, direction, "bfloat16", 16, 1024, weight_dtype="float32")
    bias = "float32" if norm == "layer_norm" else None
    problem = plan(
        1024, norm=norm, direction=direction, device=H200, weight_dtype="float32", bias_dtype=bias
    ).problem
    small = random_problem(tune._few_rows(cell))
    found = candidates(problem, H200)
    for choice in (found[0], next(each for each in found[1:] if each.tile.stages), found[-1]):
        where = Recording()
        assert tune.what_is_wrong(problem, choice, small, where) is None
        (run,) = (each for each in where.launched if each.kernel == choice.kernel)
        turns = small.case.num_rows / (
            run.grid_size / run.cluster_size * choice.tile.rows_per_block
        )
        # A warp works on two bundles forward and ends; a ring reuses its stages.
        assert turns > (1 if choice.tile.bundle else 2) or (
            direction == "forward" and not choice.tile.stages
        )
        assert dispatch.tuned is None and where.device == H200
    wrong = tune.what_is_wrong(problem, found[-1], small, Recording(spoil=direction))
    assert wrong and " is " in wrong and "expected" in wrong


def test_no_kernels_are_compiled_by_no_processes():
    """As in the second turn of --confirm, if every row was slower in the first."""
    assert tune.compile_all(set(), 4, lambda items, **_: items) == {}


# A run.


@pytest.fixture
def on_numpy(monkeypatch):
    """tune on NumPy arrays: calls use the reference, checks the kernels on the CPU."""
    pytest.importorskip(
        "torch._dynamo"
    )  # before it can see a cupy that has only what the benchmark needs
    from_float64 = arrays.from_float64
    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    monkeypatch.setitem(sys.modules, "cupy", numpy_as_cupy)
    monkeypatch.setattr(
        arrays,
        "from_float64",
        lambda values, dtype, like: numpy_as_cupy.asarray(from_float64(values, dtype, like)),
    )
    monkeypatch.setattr(launch, "current_device", lambda: H200)
    monkeypatch.setattr(check_kernels, "GpuCheckMachine", lambda index: CpuMachine())
    monkeypatch.setattr(
        tune, "candidates", lambda problem, device: candidates(problem, device)[::6]
    )
    monkeypatch.setattr(tune, "compile_all", lambda kernels, jobs, progress: dict.fromkeys(kernels))


TODO = cells(dtypes=["float32"], cols=[64], elements=2**12)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_run(on_numpy, norm):
    todo = cells([norm], ["float32"], cols=[64], elements=2**12, weight_dtype="float16")
    found = tune.tune(todo, runs=3, seed=1)
    assert found and [each.cell for each in found.findings] == todo
    for each in found.findings:
        assert each.num_measured > 2 and not each.left_out
        assert set(each.samples) == {COPY, *each.choices} and {
            len(samples) for samples in each.samples.values()
        } == {3}
        assert f"{each.default} (default)" in str(found)
    assert found.measured["runs"] == 3 and found.measured["gpu"] == "a host"


@needs_compiler
def test_candidates_that_spill_fail_or_are_off_are_left_out(on_numpy, monkeypatch):
    what_is_wrong = tune.what_is_wrong

    def compiled(kernels, jobs, progress):
        default, second = (
            each.kernel for each in tune.candidates(plan_of(TODO[0], "forward").problem, H200)[:2]
        )
        return dict.fromkeys(kernels) | {
            second: "spills registers",
            default: "spills, and is measured all the same",
        }

    def judged(problem, choice, small, where):
        at = [(each.strategy, each.tile) for each in tune.candidates(problem, H200)].index(
            (choice.strategy, choice.tile)
        )
        if at == 2:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        return "y is 3; expected 2" if at == 3 else what_is_wrong(problem, choice, small, where)

    monkeypatch.setattr(tune, "candidates", lambda problem, device: candidates(problem, device)[:5])
    monkeypatch.setattr(tune, "compile_all", compiled)
    monkeypatch.setattr(tune, "what_is_wrong", judged)
    found = tune.tune(TODO[:1], runs=1)
    (each,) = found.findings
    assert sorted(each.left_out.values()) == [
        "fails (CUDA_ERROR_INVALID_VALUE: invalid argument)",
        "spills registers",
        "y is 3; expected 2",
    ]
    assert each.default not in each.left_out and each.num_measured == 2
    (sentence,) = each.off
    assert (
        sentence.startswith(f"{TODO[0]}, warp: ") and not found and f"OFF: {sentence}" in str(found)
    )


def test_a_default_that_is_off_ends_the_run(on_numpy, monkeypatch):
    monkeypatch.setattr(tune, "what_is_wrong", lambda *arguments: "y is 3; expected 2")
    with pytest.raises(RuntimeError, match="which is the default: y is 3; expected 2"):
        tune.tune(TODO, runs=1)


def test_an_interrupt_keeps_the_findings(on_numpy, monkeypatch):
    monkeypatch.setattr(tune, "what_is_wrong", lambda *arguments: None)

    def interrupted(items, **how):
        yield items[0]
        raise KeyboardInterrupt

    found = tune.tune(TODO, runs=1, progress=interrupted)
    assert [each.cell for each in found.findings] == TODO[:1] and not found
    assert found.stopped == "after 1 of 2 problems: KeyboardInterrupt"


def test_problems_that_cannot_be_measured_are_refused(on_numpy):
    with pytest.raises(ValueError, match="runs is 0"):
        tune.tune(runs=0)
    for options in (
        {"directions": ["both"]},
        {"residual": True},
        {"zero_centered": True},
        {"out_dtype": "float32"},
    ):
        with pytest.raises(ValueError, match="tune measures forward or backward, without residual"):
            tune.tune(cells(cols=[64], elements=2**12, **options))


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(measure, "has_gpu", lambda: False)
    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    with pytest.raises(ValueError, match="measures a GPU and none was found"):
        tune.tune()


# The command.


def test_the_command_writes_a_table_for_use_tiles(monkeypatch, tmp_path, capsys):
    asked = {}

    def measure(todo, **options):
        asked.update(options, todo=todo)
        return result(finding([10.0] * 3, [9.0] * 3))

    monkeypatch.setattr(tune, "tune", measure)
    monkeypatch.setattr(tiles, "present", lambda: [H200])
    monkeypatch.chdir(tmp_path)
    arguments = [
        "tune",
        "--cols",
        "256",
        "--dtype",
        "bfloat16",
        "--direction",
        "forward",
        "--jobs",
        "3",
    ]
    before = plan(256, device=H200)
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "+11.1%  another" in out and out.endswith("after cupynorm.use_tiles('tiles.json')\n")
    assert (
        asked["jobs"] == 3
        and asked["runs"] == 30
        and asked["todo"] == cells(directions=["forward"], cols=[256])
    )
    assert asked["command"] == "python -m cupynorm " + " ".join(arguments)
    assert plan(256, device=H200) == before  # written, not used
    try:
        cupynorm.use_tiles("tiles.json")
        assert (
            plan(256, device=H200).tile
            == Tile(8, 8, 4, rows_per_block=16, exact=1, blocks_per_sm=2)
            != before.tile
        )
    finally:
        cupynorm.use_tiles(None)


def test_the_command_refuses_first(tmp_path, capsys):
    assert command.main(["tune", "--output", str(tmp_path / "none" / "tiles.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["tune", "--direction", "both"])
    assert "'both' is unknown; expected some of forward,backward" in capsys.readouterr().err


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_small_run_on_a_gpu(monkeypatch, tmp_path, jobs):
    monkeypatch.setattr(
        tune, "candidates", lambda problem, device: candidates(problem, device)[::5]
    )
    todo = cells(
        ["rms_norm" if jobs > 1 else "layer_norm"], ["bfloat16"], cols=[1024, 4096], elements=2**22
    )
    found = tune.tune(todo, runs=5, jobs=jobs)
    assert found and len(found.findings) == 4, str(found)
    for each in found.findings:
        assert each.num_measured > 2 and min(map(min, each.samples.values())) > 0
        assert 0.05 < each.share(each.default) <= each.share(each.fastest) < 5
    path = Path(tmp_path / "tiles.json")
    path.write_text(found.table.to_json())
    cupynorm.use_tiles(path)
    try:
        for each in found.findings:
            now = plan_of(each.cell, each.cell.direction)
            chosen = each.choices[each.fastest if each.wins else each.default]
            assert (now.strategy, now.tile) == (chosen.strategy, chosen.tile)
            assert now.reason.startswith("from tiles.json") == each.wins
        assert cupynorm.check(
            shapes=[(64, 1024), (64, 4096)], dtypes=["bfloat16"], norm=NORMS, on="gpu"
        )
    finally:
        cupynorm.use_tiles(None)
    assert np.isfinite([each.gain for each in found.findings]).all()
