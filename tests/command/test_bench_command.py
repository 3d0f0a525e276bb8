"""python -m cupynorm bench: what it measures, the guard, and the files that it writes."""

from pathlib import Path

import pytest
from command_runs import ROOT, call

pytest.importorskip("torch")
from cupynorm.bench import measure, report
from cupynorm.bench.cells import Cell, linear_cells


def result_file(path, share):
    """A result of one cell, as the benchmark writes it."""
    samples = {"copy": [1.0] * 3, "cupynorm": [1 / share] * 3}
    cell = Cell("layer_norm", "forward", "bfloat16", 256, 1024)
    measured = report.Measurement(cell, "warp", samples, {"cupynorm": 0.5})
    settings = {"runs": 3, "command": "a test"}
    result = report.BenchResult({"gpu": "NVIDIA H200"}, settings, [measured])
    path.write_text(result.to_json())
    return result


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """bench() returns `made`, and its arguments are in `asked`."""

    class Fake:
        made, asked = result_file(tmp_path / "made.json", 0.9), {}

    def bench(todo, **options):
        Fake.asked.update(options, todo=todo, times=Fake.asked.get("times", 0) + 1)
        return Fake.made

    monkeypatch.setattr(measure, "bench", bench)
    monkeypatch.chdir(tmp_path)
    return Fake


@pytest.mark.parametrize("share, code, verdict", [(0.9, 0, "0 slower"), (0.8, 1, "1 slower")])
def test_guard(capsys, measured, tmp_path, share, code, verdict):
    """A cell that is slower is measured twice, by the same options."""
    before = result_file(tmp_path / "before.json", 0.9)
    measured.made = result_file(tmp_path / "after.json", share)
    words = ("--guard", "before.json", "--runs", "7", "--jobs", "3", "--json", "now.json")
    found, out, _ = call(capsys, "bench", *words)
    assert found == code and verdict in out.splitlines()[-1] and "before.json, and now:" in out
    assert measured.asked["todo"] == [before.measurements[0].cell]
    assert (measured.asked["runs"], measured.asked["jobs"], measured.asked["times"]) == (
        7,
        3,
        1 + code,
    )
    assert report.read("now.json").measurements == measured.made.measurements


def test_guard_has_a_default(capsys, measured, monkeypatch):
    """Without a file it compares with the committed figures and names slower cells."""
    before = report.read(ROOT / "notebooks" / "h200.json")
    slow = before.measurements[0]
    samples = slow.samples | {"cupynorm": [1.5 * each for each in slow.samples["cupynorm"]]}
    slow = report.Measurement(slow.cell, slow.strategy, samples, slow.errors)
    others = before.measurements[1:]
    measured.made = report.BenchResult(before.environment, before.settings, [slow, *others])
    monkeypatch.chdir(ROOT)
    code, out, _ = call(capsys, "bench", "--guard")
    assert code == 1 and f"{len(others) + 1} cells: 1 slower by more than 5%" in out
    (line,) = [line for line in out.splitlines() if line.startswith("slower   -33")]
    assert line.endswith(str(slow.cell))


def test_cells_of_the_options(capsys, measured):
    words = "--cols 64,1024 --rows 256 --residual --weight-dtype float32 --direction backward"
    words += " --json a.json --jobs 2 --peers torch,quack"
    code, out, _ = call(capsys, "bench", *words.split())
    assert code == 0 and "layer_norm forward, bfloat16" in out and Path("a.json").exists()
    shapes = [("layer_norm", "backward", "bfloat16", 256, num_cols) for num_cols in (64, 1024)]
    expected = [Cell(*each, weight_dtype="float32", residual=True) for each in shapes]
    asked = measured.asked
    assert asked["todo"] == expected and asked["peers"] == ["torch", "quack"] and asked["jobs"] == 2
    assert asked["command"] == f"python -m cupynorm bench {words}"


@pytest.mark.parametrize(
    "words, scales", [("", ["given"]), ("--scale row,block", ["row", "block"])]
)
def test_8_bit_outputs_by_scale(capsys, measured, words, scales):
    """The default direction is forward, because no gradient has 8 bits."""
    given = f"bench --cols 64 --rows 256 --out-dtype float8_e4m3fn {words}".split()
    assert call(capsys, *given)[0] == 0
    shape = ("layer_norm", "forward", "bfloat16", 256, 64)
    expected = [Cell(*shape, out_dtype="float8_e4m3fn", scale=scale) for scale in scales]
    assert measured.asked["todo"] == expected


def test_linear_layers(capsys, measured):
    words = "--shapes 300x8x16,1x8x16 --format fp8 --peers gemm --direction forward,both"
    assert call(capsys, "bench", "linear", *words.split())[0] == 0
    assert measured.asked["todo"] == linear_cells([(300, 8, 16), (1, 8, 16)], ["fp8"])
    assert measured.asked["peers"] == ["gemm"]


def test_the_readme_is_written_from_a_file(capsys, measured):
    pytest.importorskip("matplotlib")
    code, _, err = call(capsys, "bench", "--readme", "made.json")
    assert code == 2 and "there is no README.md" in err
    Path("docs").mkdir()
    Path("README.md").write_text("<!-- bench --> <!-- /bench -->")
    assert call(capsys, "bench", "--readme", "made.json")[0] == 0
    assert "| 1,024 | **0.90** | - | - |" in Path("README.md").read_text()
    assert Path("docs/speed.svg").stat().st_size > 1000


def test_host_times(capsys, measured, monkeypatch):
    found = {"a case": {"cupynorm": 1.25, "torch": 2.0}, "another": {"torch": 3.0}}
    monkeypatch.setattr(measure, "check_runs", lambda runs: None)
    monkeypatch.setattr(measure, "host", lambda *given, **options: found)
    code, out, _ = call(capsys, "bench", "--host", "--json", "host.json")
    assert code == 0 and [line.split()[-2:] for line in out.splitlines()[1:]] == [
        ["1.2", "2.0"],
        ["-", "3.0"],
    ]
    assert '"cupynorm": 1.25' in Path("host.json").read_text()


def test_a_file_gets_no_progress_bar(capsys):
    from cupynorm.bench.bench_command import bar

    assert list(bar(range(3), desc="measuring")) == [0, 1, 2] and capsys.readouterr().err == ""
