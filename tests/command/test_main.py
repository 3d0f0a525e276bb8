"""python -m cupynorm: its output, its exit codes, and a check that fails for a wrong kernel."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm import __main__ as command
from cupynorm.arguments import number, positives
from cupynorm.bench import cells as bench_cells
from cupynorm.bench import measure as bench
from cupynorm.bench import report as bench_report
from cupynorm.bench.models import MODELS
from cupynorm.check import command as check_command
from cupynorm.check.activations import shipped
from cupynorm.check.cases import DIRECTIONS, NORMS
from cupynorm.check.entries import Wanted, grid_shapes, plan_of, random_entries
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import environment, launch, on_cpu
from cupynorm.norm import plans
from cupynorm.plan import dispatch
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]

try:
    on_cpu.compiler()
    no_compiler = ""
except on_cpu.NoCompilerError as error:
    no_compiler = str(error)
needs_compiler = pytest.mark.skipif(bool(no_compiler), reason=no_compiler)


def run(*arguments, cwd=None, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "cupynorm", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
    )


@pytest.fixture
def refused(capsys):
    """Runs a command that is refused, in this process, and returns the last line on stderr."""

    def refused(*arguments):
        try:
            code = command.main([str(each) for each in arguments])
        except SystemExit as end:  # of argparse
            code = end.code
        assert code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    return refused


def call(capsys, *arguments):
    """The command in this process: exit code, stdout, stderr."""
    code = command.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# Check.


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "arguments", [("--quick", "--on", "cpu"), ("check", "--quick", "--on", "cpu", "--seed", "7")]
)
def test_quick_check(arguments):
    result = run(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert (
        lines[0].startswith(f"cupynorm {cupynorm.__version__} found")
        and "run on the CPU" in lines[1]
    )
    assert lines[-1].startswith("OK: every element of ")
    for word in ("layer5_output, 1 x 384", "bfloat16", "float32", "rms_norm", *STRATEGIES):
        assert word in result.stdout
    assert max(map(len, lines)) < 170 and len(lines) < 60


@needs_compiler
@pytest.mark.slow
def test_a_seed_decides_the_output():
    first, again, other = (
        run("--quick", "--on", "cpu", "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.gpu
def test_quick_check_on_a_gpu():
    result = run("--quick", "--on", "gpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        result.stdout.splitlines()[-1].startswith("OK: ") and "run on the CPU" not in result.stdout
    )


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("tensor", ["y", "rstd", "dx", "dweight"])
def test_a_wrong_kernel_fails(monkeypatch, capsys, tensor):
    run_kernels = check_command.run_kernels

    def wrong(problem, where, layouts=None):
        results = run_kernels(problem, where, layouts)
        if problem.case.norm == "rms_norm" and problem.case.x == "float32" and tensor in results:
            flat = results[tensor].reshape(-1)
            flat[np.abs(flat).argmax()] *= 1 + 1e-4
        return results

    monkeypatch.setattr(check_command, "run_kernels", wrong)
    code, out, _ = call(capsys, "check", "--quick", "--on", "cpu")
    assert code == 1
    assert out.splitlines()[-1].startswith("OFF: 1 of ") and " in 1 of " in out.splitlines()[-1]
    for line in out.splitlines():
        if line.startswith("layer_norm") and "2 x 384" in line:
            assert "OFF" not in line
    assert sum(f"OFF: {tensor} " in line for line in out.splitlines()) == 1


@needs_compiler
def test_a_result_left_unwritten_fails(monkeypatch, capsys):
    run_kernels = check_command.run_kernels

    def forgetful(problem, where, layouts=None):
        results = run_kernels(problem, where, layouts)
        results["dx"][0, 0] = np.nan
        return results

    monkeypatch.setattr(check_command, "run_kernels", forgetful)
    code, out, _ = call(capsys, "--quick", "--on", "cpu")
    assert code == 1 and "OFF: dx nan" in out


@needs_compiler
def test_a_kernel_that_fails_is_one_sentence(monkeypatch, capsys):
    def fails(problem, where, layouts=None):
        raise on_cpu.OnCpuError("a thread never reached the barrier")

    monkeypatch.setattr(check_command, "run_kernels", fails)
    code, _, err = call(capsys, "--quick", "--on", "cpu")
    assert code == 1 and err.strip().splitlines()[-1].endswith(
        "cupynorm: a kernel failed: a thread never reached the barrier"
    )


@needs_compiler
def test_interrupted(monkeypatch, capsys):
    def interrupt(problem, where, layouts=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(check_command, "run_kernels", interrupt)
    code, _, err = call(capsys, "--quick", "--on", "cpu")
    assert code == 130 and err.strip().endswith("cupynorm: interrupted")


@needs_compiler
@pytest.mark.slow
def test_files(tmp_path):
    torch = pytest.importorskip("torch")
    layer = shipped()[0]
    tensors = {
        name: getattr(layer, name)[..., :384].astype(np.float32)
        for name in ("x", "dy", "weight", "bias")
    }
    np.save(tmp_path / "one.npy", tensors["x"][:1])
    np.savez(tmp_path / "two.npz", **tensors, ids=np.arange(3))
    torch.save({"three": torch.from_numpy(tensors["x"][:1]).bfloat16()}, tmp_path / "three.pt")
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"x": tensors["x"][:1].astype(np.float16)}, tmp_path / "four.safetensors")
    result = run("check", *sorted(tmp_path.iterdir()), "--on", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("one, 1 x 384", "two, 1 x 384", "three/three, 1 x 384", "four, 1 x 384"):
        assert result.stdout.count(name) == 2  # both norms
    assert "two.npz: ids is left out" in result.stdout and "layer5_output" not in result.stdout
    for dtype in ("float16", "bfloat16", "float32"):
        assert dtype in result.stdout
    assert run(tmp_path / "one.npy", "--on", "cpu").returncode == 0  # "check" may be left out


@needs_compiler
def test_large_files_are_sampled(tmp_path):
    np.save(
        tmp_path / "large.npy",
        np.random.default_rng(0).standard_normal((3000, 768)).astype(np.float32),
    )
    result = run(tmp_path / "large.npy", "--on", "cpu")
    assert result.returncode == 0 and "large, 1365 of 3000 x 768" in result.stdout


@needs_compiler
def test_files_that_cannot_be_read(refused, tmp_path):
    assert "there is no file" in refused(tmp_path / "none.npy", "--on", "cpu")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    assert "pickled objects, which are not read" in refused(tmp_path / "objects.npy", "--on", "cpu")
    np.save(tmp_path / "ids.npy", np.arange(4))
    assert "no floating-point array was found" in refused(tmp_path / "ids.npy", "--on", "cpu")
    (tmp_path / "weights.bin").write_bytes(b"")
    assert "ends in one of .npy" in refused(tmp_path / "weights.bin", "--on", "cpu")


def test_without_a_compiler(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert "needs a C++20 compiler" in refused("--quick", "--on", "cpu")


def test_without_a_gpu(refused, monkeypatch, tmp_path):
    if environment.has_gpu():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    assert "finds no GPU" in refused("--on", "gpu")
    assert "none was found" in refused("bench")
    assert "none was found" in refused("tune", "--cols", "64")


def test_a_refusal_is_a_sentence_and_an_exit_code():
    """The message and the exit code, in another process."""
    result = run("plan", "4096", "--device", "H9000")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch("cupynorm: --device is H9000; expected one of A100, .*\\n", result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", "gpu"])
@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_the_grid_reaches_every_strategy(device, on):
    entries = random_entries(grid_shapes(device, on), list(DTYPES), Wanted(on))
    expected = {
        name
        for name, row in STRATEGIES.items()
        if device.compute_capability >= row.first_capability
    }
    for norm in NORMS:
        for dtype in DTYPES:
            for direction in DIRECTIONS:
                cases = [
                    entry.case
                    for entry in entries
                    if (entry.case.norm, entry.case.x) == (norm, dtype)
                ]
                reached = {plan_of(case, device, direction).strategy for case in cases}
                assert reached == expected, (norm, dtype, direction)
    elements = [entry.case.num_rows * entry.case.num_cols for entry in entries]
    assert max(elements) <= (2**20 if on == "cpu" else 2**22)


# Plan.


def test_plan(capsys):
    code, out, _ = call(
        capsys, "plan", "4096", "--rows", "8192", "--device", "h200", "--dtype", "float32"
    )
    expected = [
        str(plans.plan(4096, 8192, "float32", device="H200", direction=direction))
        for direction in ("forward", "backward")
    ]
    assert code == 0 and out.strip() == "\n\n".join(expected)


def test_plan_options(capsys):
    code, out, _ = call(
        capsys,
        "plan",
        "5000",
        "--device",
        "H200",
        "--norm",
        "rms_norm",
        "--direction",
        "backward",
        "--strategy",
        "uncached",
        "--sm-margin",
        "32",
    )
    plan = plans.plan(
        5000,
        device="H200",
        norm="rms_norm",
        direction="backward",
        strategy="uncached",
        sm_margin=32,
        bias_dtype=None,
    )
    assert code == 0 and out.strip() == str(plan) and "dbias" not in out


def test_plan_of_8_bit_outputs(capsys):
    options = ("plan", "1024", "--device", "H200", "--out-dtype", "float8_e5m2")
    for given, arguments in (
        ({"amax": True, "residual": True}, ("--amax", "--residual")),
        ({"scale": "block"}, ("--scale", "block")),
    ):
        code, out, _ = call(capsys, *options, *arguments)
        plan = plans.plan(1024, device="H200", out_dtype="float8_e5m2", **given)
        assert code == 0 and out.strip() == str(plan)
        assert (plan.problem.scaling, plan.problem.amax) == (
            given.get("scale", "given"),
            given.get("amax", False),
        )


def test_plan_of_a_residual(capsys):
    code, out, _ = call(
        capsys, "plan", "1024", "--device", "H200", "--residual", "--direction", "backward"
    )
    plan = plans.plan(1024, device="H200", direction="backward", residual=True)
    assert code == 0 and out.strip() == str(plan) and plan.problem.dsum == "bfloat16"


@pytest.mark.parametrize("device", ["A100", "H200", "RTX 4090"])
def test_plan_table(capsys, device):
    code, out, _ = call(capsys, "plan", "--table", "--device", device)
    assert code == 0 and out.startswith(device)
    for dtype in DTYPES:
        for direction in DIRECTIONS:
            problem = plans.plan(4096, dtype=dtype, device=device, direction=direction).problem
            (line,) = [line for line in out.splitlines() if line.split()[:2] == [dtype, direction]]
            shown = line.split()[2:]
            for name, text in zip(STRATEGIES, shown):
                widest = dispatch.widest(name, problem, DEVICES[device])
                assert text == (
                    "any" if name == "uncached" else "-" if widest is None else f"{widest:,}"
                )
    for row in STRATEGIES.values():
        assert row.kept_in in out


def test_the_table_marks_changes_of_strategy():
    for device in ("A100", "H200"):
        for direction in DIRECTIONS:
            problem = plans.plan(4096, device=device, direction=direction).problem
            for name in STRATEGIES:
                widest = dispatch.widest(name, problem, DEVICES[device])
                if widest is not None:
                    at, beyond = (
                        plans.plan(cols, device=device, direction=direction)
                        for cols in (widest, widest + 8)
                    )
                    # A later one may be faster before the row is too wide.
                    assert (
                        list(STRATEGIES).index(at.strategy) >= list(STRATEGIES).index(name)
                        and beyond.strategy != name
                    )


# Usage.


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        (("plan", "4096", "--device", "H9000"), "expected one of A100"),
        (("plan", "--device", "H200"), "plan needs a number of columns"),
        (("plan", "many", "--device", "H200"), "'many' is not a whole number"),
        (("plan", "-5", "--device", "H200"), "-5"),
        (
            ("plan", "90000", "--device", "H200", "--strategy", "warp"),
            "--strategy warp takes at most 1280 columns of bfloat16 on H200 (forward); "
            "the row has 90000",
        ),
        (
            ("plan", "64", "--device", "H200", "--sm-margin", "132"),
            "--sm-margin is 132; H200 has 132 multiprocessors, so at most 131",
        ),
        (
            ("plan", "64", "--device", "A100", "--strategy", "cluster"),
            "--strategy cluster needs compute capability 9.0 or later; A100 has 8.0",
        ),
        (("plan", "64", "--device", "H200", "--strategy", "fast"), "invalid choice: 'fast'"),
        (("bench", "--dtype", "float8"), "'float8' is unknown"),
        (
            ("bench", "--scale", "column"),
            "'column' is unknown; expected some of given,tensor,row,block,mx",
        ),
        (
            ("plan", "64", "--device", "H200", "--scale", "row"),
            "--scale is for a y of 8 bits; add --out-dtype float8_e4m3fn or float8_e5m2",
        ),
        (
            ("plan", "64", "--device", "H200", "--amax"),
            "--amax is for a y of 8 bits; add --out-dtype float8_e4m3fn or",
        ),
        (
            (
                "plan",
                "64",
                "--device",
                "H200",
                "--out-dtype",
                "float8_e5m2",
                "--amax",
                "--scale",
                "row",
            ),
            "--amax records the largest |y| with --scale given; --scale is row",
        ),
        (
            ("plan", "64", "--device", "H200", "--out-dtype", "float8_e5m2", "--direction", "both"),
            "--direction is both and --out-dtype float8_e5m2; no gradient has 8 bits, "
            "use --direction forward",
        ),
        (
            ("bench", "--amax"),
            "--amax is for a y of 8 bits; add --out-dtype float8_e4m3fn or float8_e5m2",
        ),
        (
            ("bench", "--amax", "--out-dtype", "float8_e5m2", "--scale", "given,row"),
            "--amax records the largest |y| with --scale given; --scale is given,row",
        ),
        (
            ("bench", "--scale", "row"),
            "--scale is for a y of 8 bits; add --out-dtype float8_e4m3fn or float8_e5m2",
        ),
        (
            ("bench", "--out-dtype", "float8_e5m2", "--direction", "both"),
            "--direction is both and --out-dtype float8_e5m2; no gradient has 8 bits, "
            "use --direction forward",
        ),
        (("bench", "--cols", "0"), "expected 1 or more"),
        (("bench", "--cols", "64,,"), "not a whole number"),
        (("bench", "--elements", "2**"), "not a whole number"),
        (("bench", "--direction", "up"), "'up' is unknown; expected some of forward,backward,both"),
        (("bench", "--models", "gpt9"), "'gpt9' is unknown"),
        (
            ("bench", "--tile", "fast: pack_size 8"),
            "tile is 'fast: pack_size 8'; expected one of warp, block, cluster, uncached",
        ),
        (
            ("bench", "--direction", "both", "--tile", "warp: pack_size 8, threads_per_row 32"),
            "--tile and --direction both are given; a tile belongs to one direction",
        ),
        (
            ("bench", "--readme", "--tile", "warp: pack_size 8, threads_per_row 32"),
            "the README's table is of libraries",
        ),
        (("bench", "--peers", "nobody"), "'nobody' is unknown; expected some of cupynorm,torch,"),
        (("bench", "--host", "--first-call"), "not allowed with argument"),
        (
            ("bench", "--elements", "8", "--cols", "16"),
            "--elements is 8, less than one row of 16 columns",
        ),
        (("bench", "--guard", str(ROOT / "README.md")), "README.md is no result of the benchmark"),
        (("bench", "--compare", "none.json", "none.json"), "none.json: No such file or directory"),
        (("tune", "--direction", "both"), "'both' is unknown; expected some of forward,backward"),
        (
            ("tune", "--cols", "16", "--elements", "8"),
            "--elements is 8, less than one row of 16 columns",
        ),
        (("tune", "--output", "none/tiles.json"), "none/tiles.json: there is no folder"),
        (("bench", "linear", "--json", "none/linear.json"), "none/linear.json: there is no folder"),
        (("--on", "tpu"), "invalid choice: 'tpu'"),
        (("plna", "12288"), "'plna' is no command; expected one of check, fuzz, plan, bench, tune"),
        (("--fast",), "unrecognized arguments: --fast"),
    ],
)
def test_bad_usage(refused, arguments, sentence):
    assert sentence in refused(*arguments)


@pytest.mark.parametrize("arguments", [("12288",), ("--table",)])
def test_a_plan_without_a_gpu_is_for_an_h200(capsys, monkeypatch, arguments):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    code, out, err = call(capsys, "plan", *arguments)
    line, _, rest = out.partition("\n\n")
    assert (code, err) == (0, "")
    assert line == "No GPU was found: planned for an H200. --device names another."
    assert rest == call(capsys, "plan", *arguments, "--device", "H200")[1]


def test_a_plan_without_a_device_is_of_the_gpu(capsys, monkeypatch):
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(launch, "current_device", lambda: DEVICES["A100"])
    code, out, _ = call(capsys, "plan", "12288")
    assert code == 0 and out == call(capsys, "plan", "12288", "--device", "a100")[1]


def test_a_newcomer_without_a_gpu_sees_a_plan():
    """Runs the command of the README in another process."""
    result = run("plan", "12288")
    assert (result.returncode, result.stderr) == (0, "") and "12288" in result.stdout


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


def test_names_may_be_all(capsys):
    parsed = command.parser().parse_args(
        ["bench", "--models", "all", "--direction", "all", "--peers", "torch,torch"]
    )
    assert parsed.models == list(MODELS) and parsed.direction == list(bench_cells.DIRECTIONS)
    assert parsed.peers == ["torch"] and parsed.cols == bench_cells.COLS and parsed.jobs == 1


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
        (("--scale", "row,mx"), ["row", "mx"]),
        (("--scale", "all"), ["given", "tensor", "row", "block", "mx"]),
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


def test_numbers():
    assert [number(text) for text in ("0", "28", "2**28", "2^10")] == [0, 28, 2**28, 1024]
    assert positives("64,32,2**6") == [64, 32]


def test_version_and_help():
    assert run("--version").stdout == f"cupynorm {cupynorm.__version__}\n"
    shown = run("--help").stdout
    assert all(name in shown for name in command.COMMANDS)


def test_a_reader_that_stops_early():
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "cupynorm", "plan", "--table", "--device", "H200"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(writing)
    assert result.returncode == 0 and result.stderr == ""
