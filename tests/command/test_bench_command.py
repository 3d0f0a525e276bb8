"""python -m cupynorm bench: comparisons, the guard, files that it writes, and what it times."""

from pathlib import Path

import pytest
from command_runs import ROOT, call

from cupynorm.bench import cells as bench_cells
from cupynorm.bench import measure as bench
from cupynorm.bench import report as bench_report


def test_readme_is_looked_at_before_anything_is_measured(refused, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert "there is no README.md" in refused("bench", "--readme")
    (tmp_path / "README.md").write_text("no markers")
    assert "need the markers" in refused("bench", "--readme")
    (tmp_path / "README.md").write_text("<!-- bench --> <!-- /bench -->")
    assert "there is no docs/benchmarks.md" in refused("bench", "--readme")
    assert "there is no folder" in refused("bench", "--json", tmp_path / "none" / "a.json")
    assert "there is no folder" in refused("bench", "--plot", tmp_path / "none" / "a.png")
    for name in ("a.txt", "a"):
        assert "is of no known format" in refused("bench", "--plot", tmp_path / name)


def result_file(path, share):
    """A result of one cell, as the benchmark writes it."""
    samples = {"copy": [1.0] * 3, "cupynorm": [1 / share] * 3}
    cell = bench_cells.Cell("layer_norm", "forward", "bfloat16", 256, 1024)
    measured = bench_report.Measurement(cell, "warp", samples, {"cupynorm": 0.5})
    result = bench_report.BenchResult(
        {"gpu": "NVIDIA H200"}, {"runs": 3, "command": "a test"}, [measured]
    )
    path.write_text(result.to_json())
    return result


def test_compare(capsys, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    result_file(old, 0.9), result_file(new, 0.8)
    code, out, _ = call(capsys, "bench", "--compare", str(old), str(new))
    assert (
        code == 1
        and out.splitlines()[-1] == "1 cells: 1 slower, 0 faster, 0 the same within the spread"
    )
    code, out, _ = call(capsys, "bench", "--compare", str(new), str(old))
    assert code == 0 and "1 faster" in out
    code, out, _ = call(capsys, "bench", "--compare", str(old), str(old))
    assert code == 0 and "1 the same" in out


def empty_documents():
    """The two files of the current folder that `bench --readme` rewrites, with empty tables."""
    Path("docs").mkdir()
    for path in (paths := (Path("README.md"), Path("docs/benchmarks.md"))):
        path.write_text("<!-- bench --> <!-- /bench -->")
    return paths


def test_a_run_that_stopped_leaves_the_readme(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    stopped = result_file(tmp_path / "stopped.json", 0.9)
    stopped.settings["stopped"] = "after 1 of 2 cells: interrupted"
    monkeypatch.setattr(bench, "bench", lambda todo, **options: stopped)
    monkeypatch.chdir(tmp_path)
    documents = empty_documents()
    code, out, _ = call(capsys, "bench", "--readme", "--json", "a.json")
    assert (
        code == 1
        and "stopped after 1 of 2 cells" in out
        and out.endswith("benchmarks.md are left as they were\n")
    )
    assert (
        all(path.read_text() == "<!-- bench --> <!-- /bench -->" for path in documents)
        and len(bench_report.read("a.json").measurements) == 1
    )
    assert (
        call(capsys, "bench", "--guard", "a.json")[0] == 1
    )  # nothing became slower, but not all was measured


@pytest.mark.parametrize("share,code,verdict", [(0.9, 0, "1 the same"), (0.8, 1, "1 slower")])
def test_guard(capsys, monkeypatch, tmp_path, share, code, verdict):
    before = result_file(tmp_path / "before.json", 0.9)
    after = result_file(tmp_path / "after.json", share)
    asked = {}

    def measure(todo, **options):
        asked.update(options, todo=todo)
        return after

    monkeypatch.setattr(bench, "bench", measure)
    found, out, _ = call(capsys, "bench", "--guard", str(tmp_path / "before.json"), "--runs", "7")
    assert found == code and verdict in out.splitlines()[-1]
    assert (
        asked["todo"] == [before.measurements[0].cell]
        and asked["peers"] == ()
        and asked["runs"] == 7
    )


def test_guard_has_a_default(capsys, monkeypatch):
    """Without a file it compares with the committed figures and names slower cells."""
    before = bench_report.read(ROOT / "notebooks" / "h200.json")

    def measure(todo, **options):
        assert todo == [measured.cell for measured in before.measurements]
        slow = before.measurements[0]
        samples = slow.samples | {"cupynorm": [1.5 * each for each in slow.samples["cupynorm"]]}
        slow = bench_report.Measurement(slow.cell, slow.strategy, samples, slow.errors)
        return bench_report.BenchResult(
            before.environment, before.settings, [slow, *before.measurements[1:]]
        )

    monkeypatch.setattr(bench, "bench", measure)
    monkeypatch.chdir(ROOT)
    code, out, _ = call(capsys, "bench", "--guard")
    count = len(before.measurements)
    assert (
        code == 1
        and out.splitlines()[-1]
        == f"{count} cells: 1 slower, 0 faster, {count - 1} the same within the spread"
    )
    (line,) = [line for line in out.splitlines() if line.strip().startswith("slower ")]
    assert line.endswith(str(before.measurements[0].cell))


def test_outcome_of_a_run(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    measured = result_file(tmp_path / "ignored.json", 0.9)
    asked = {}

    def measure(todo, **options):
        asked.update(options, todo=todo)
        return measured

    monkeypatch.setattr(bench, "bench", measure)
    monkeypatch.chdir(tmp_path)
    documents = empty_documents()
    arguments = [
        "bench",
        "--cols",
        "64,1024",
        "--rows",
        "256",
        "--residual",
        "--weight-dtype",
        "float32",
        "--direction",
        "both",
    ]
    code, out, _ = call(
        capsys,
        *arguments,
        "--json",
        "a.json",
        "--plot",
        "a.svg",
        "--readme",
        "--jobs",
        "2",
        "--peers",
        "torch",
    )
    assert asked["tiles"] == []
    assert code == 0 and "layer_norm forward, bfloat16" in out
    assert (
        bench_report.read("a.json").measurements == measured.measurements
        and Path("a.svg").stat().st_size > 1000
    )
    assert all("| 1,024 | " in path.read_text() for path in documents)
    assert "| 1,024 | warp |" in documents[1].read_text()
    assert Path("docs/speed.svg").stat().st_size > 1000
    cells = [
        bench_cells.Cell(
            "layer_norm", "both", "bfloat16", 256, num_cols, weight_dtype="float32", residual=True
        )
        for num_cols in (64, 1024)
    ]
    assert asked["todo"] == cells and asked["peers"] == ["torch"] and asked["jobs"] == 2
    assert asked["command"] == " ".join(
        [
            "python -m cupynorm",
            *arguments,
            *"--json a.json --plot a.svg --readme --jobs 2 --peers torch".split(),
        ]
    )


@pytest.mark.parametrize(
    ("given", "scales"),
    [
        ((), ["given"]),
        (("--scale", "row,block"), ["row", "block"]),
        (("--scale", "all"), ["given", "tensor", "row", "block", "block64"]),
    ],
)
def test_8_bit_outputs_by_scale(capsys, monkeypatch, tmp_path, given, scales):
    """The default direction is forward, because no gradient has 8 bits."""
    measured = result_file(tmp_path / "ignored.json", 0.9)
    asked = []
    monkeypatch.setattr(bench, "bench", lambda todo, **options: asked.extend(todo) or measured)
    code, _, _ = call(
        capsys, "bench", "--cols", "64", "--rows", "256", "--out-dtype", "float8_e4m3fn", *given
    )
    assert code == 0 and asked == [
        bench_cells.Cell(
            "layer_norm", "forward", "bfloat16", 256, 64, out_dtype="float8_e4m3fn", scale=scale
        )
        for scale in scales
    ]
