"""python -m cupynorm: its check, which fails for a wrong kernel, its output and its exit codes."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from command_runs import ROOT, call, run

import cupynorm
from cupynorm import __main__ as command
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.strategies import STRATEGIES
from cupynorm.gpu import nvrtc, on_cpu
from cupynorm.verify import check as gradient_check
from cupynorm.verify import kernels
from cupynorm.verify.command import entries_of, random_shapes

try:
    on_cpu.compiler()
    no_compiler = ""
except on_cpu.NoCompilerError as error:
    no_compiler = str(error)
needs_compiler = pytest.mark.skipif(bool(no_compiler), reason=no_compiler)


@pytest.mark.slow
@needs_compiler
def test_quick_check():
    """The check of a bare command is that of `check`. A seed decides the output."""
    quick = ("--quick", "--on", "cpu")
    every = (quick, (*quick, "--seed", 7), ("check", *quick, "--seed", 7))
    plain, seeded, again = (run(*arguments) for arguments in every)
    assert seeded.stdout == again.stdout != plain.stdout
    for result in (plain, seeded):
        assert result.returncode == 0, result.stdout + result.stderr
        lines = result.stdout.splitlines()
        assert lines[0].startswith(f"cupynorm {cupynorm.__version__} found")
        assert "run on the CPU" in lines[1] and any(line.startswith("OK: ") for line in lines)
        words = ("layer5_output, 1 x 384", "bfloat16", "rms_norm", "cluster", "uncached")
        assert all(word in result.stdout for word in words)
        assert max(map(len, lines)) < 170 and len(lines) < 70


@pytest.mark.gpu
def test_quick_check_on_a_gpu():
    result = run("--quick", "--on", "gpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\nOK: " in result.stdout and "run on the CPU" not in result.stdout


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("tensor, factor", [("y", 1.0001), ("rstd", 1.0001), ("dx", np.nan)])
def test_a_wrong_kernel_fails(monkeypatch, capsys, tensor, factor):
    run_kernels = gradient_check.run_kernels

    def wrong(problem, where):
        results = run_kernels(problem, where)
        if problem.case.norm == "rms_norm" and problem.case.x == "float32" and tensor in results:
            flat = results[tensor].reshape(-1)
            flat[np.abs(flat).argmax()] *= factor
        return results

    monkeypatch.setattr(gradient_check, "run_kernels", wrong)
    code, out, _ = call(capsys, "check", "--quick", "--on", "cpu")
    assert code == 1 and "\nOFF: 1 of " in out and ("OFF: dx nan" in out) == (tensor == "dx")
    for line in out.splitlines():
        if line.startswith("layer_norm") and "2 x 384" in line:
            assert "OFF" not in line
    assert sum(f"OFF: {tensor} " in line for line in out.splitlines()) == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "error, code, sentence",
    [
        (on_cpu.OnCpuError("a deadlock"), 1, "cupynorm: a kernel failed: a deadlock"),
        (KeyboardInterrupt(), 130, "cupynorm: interrupted"),
    ],
)
def test_a_run_that_ends_early_is_one_sentence(monkeypatch, capsys, error, code, sentence):
    def fails(problem, where):
        raise error

    monkeypatch.setattr(gradient_check, "run_kernels", fails)
    found, _, err = call(capsys, "--quick", "--on", "cpu")
    assert found == code and err.strip().splitlines()[-1].endswith(sentence)


def test_without_a_compiler(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert "needs a C++20 compiler" in refused("--quick", "--on", "cpu")


def test_without_a_gpu(refused, monkeypatch, tmp_path):
    if nvrtc.has_gpu():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    assert "finds no GPU" in refused("--on", "gpu")
    assert "none was found" in refused("bench")
    assert "none was found" in refused("tune", "--cols", "64")


def test_a_refusal_is_a_sentence_and_an_exit_code():
    """The message and the exit code, in another process."""
    result = run("plan", "4096", "--device", "H9000")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch("cupynorm: --device is 'H9000'; expected one of A100, .*\\n", result.stderr)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_the_check_reaches_every_strategy(device, quick):
    reached = {
        cupynorm.plan(num_cols, num_rows, device=device, strategy=strategy).strategy
        for num_rows, num_cols, strategy in random_shapes(device, "cpu", quick)
    }
    expected = [
        name
        for name, row in STRATEGIES.items()
        if device.compute_capability >= row.first_capability
    ]
    assert reached == set(expected)


def test_norm_and_eps_reach_the_cases_of_the_kernels():
    for words in (["--quick"], ["--traps"]):
        given = ["check", *words, "--norm", "rms_norm", "--eps", "1e-3", "--on", "cpu"]
        made = entries_of(command.parser().parse_args(given), kernels.machine("cpu"), {"eps": 1e-3})
        assert len(made) > 8 and {entry.case.norm for entry in made} == {"rms_norm"}
        cases = [trial.problem.case for entry in made[:30] for trial in entry.drawn(0)]
        assert {case.eps for case in cases} <= {1e-3, 0.0, -0.05, -1e-3}


def test_version_and_help():
    assert run("--version").stdout == f"cupynorm {cupynorm.__version__}\n"
    shown = run("--help").stdout
    assert all(name in shown for name in command.COMMANDS)


@pytest.mark.slow
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
