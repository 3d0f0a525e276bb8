"""python -m cupynorm check --function, --forward, --backward, --norm, --eps and --traps."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm import __main__ as command
from cupynorm.command_line import argparse, shapes
from cupynorm.verify import kernels
from cupynorm.verify.cases import Case, random_problem
from cupynorm.verify.check_function import Callables, check_callables
from cupynorm.verify.command import entries_of
from cupynorm.verify.traps import Trial

MODULE = """
import numpy as np

number = 3

def forward(x, weight, bias, eps):
    x_hat = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
    return (x_hat * weight + bias).astype(x.dtype)

def without_bias(x, weight, bias, eps):
    return forward(x, weight, 0, eps)

def rms(x, weight, eps):
    return (x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * weight).astype(x.dtype)

def backward(dy, x, mean, rstd, weight):
    x_hat = (x - mean[:, None]) * rstd[:, None]
    wdy = dy * weight
    means = wdy.mean(1, keepdims=True) + x_hat * (wdy * x_hat).mean(1, keepdims=True)
    return rstd[:, None] * (wdy - means), (dy * x_hat).sum(0), dy.sum(0)

def nothing(x):
    return None

def exits(x):
    raise SystemExit(0)

def hangs_up(x):
    raise BrokenPipeError

def wrong_tail(dy, x, mean, rstd, weight):
    dx, dweight, dbias = backward(dy, x, mean, rstd, weight)
    whole = len(dx) // 4 * 4
    dx[whole:] = dx[whole - 1]
    return dx, dweight, dbias

def wrong_last_columns(x, weight, bias, eps):
    y = forward(x, weight, bias, eps)
    y[:, x.shape[1] // 4 * 4 :] = 0
    return y

def too_wide(x, weight, bias, eps):
    y = forward(x, weight, bias, eps)
    y[:, 8192:] = 0
    return y
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs `check` with a module own_norms that can be imported: exit code, stdout, stderr."""
    (tmp_path / "own_norms.py").write_text(MODULE)
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(0)")
    (tmp_path / "no_python.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)

    def run(*arguments):
        code = command.main(["check", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.strip().splitlines()[-1:]

    yield run
    __import__("sys").modules.pop("own_norms", None)


OWN = ("--library", "numpy")


def test_functions_of_a_module_are_checked(check):
    both = ("--forward", "own_norms:forward", "--backward", "own_norms:backward")
    code, out, _ = check(*both, *OWN, "--shape", "8x48,3x33", "--dtype", "float32,float64")
    assert code == 0 and out.startswith("OK: 24 tensors checked, ")
    assert "checked: forward and backward on NumPy arrays; 8 x 48, 3 x 33" in out
    code, out, _ = check("--forward", "own_norms:rms", *OWN, "--norm", "rms_norm", "--eps", 1e-3)
    assert code == 0 and "rms_norm 64 x 768 float32" in out


def test_a_wrong_function_has_its_diagnosis(check):
    code, out, _ = check("--forward", "own_norms:without_bias", *OWN, "--shape", "8x48")
    assert code == 1 and "the bias is missing" in out
    assert out.startswith("OFF: 2 of 2 tensors are beyond")
    code, out, _ = check("--forward", "own_norms:rms", *OWN, "--shape", "8x48")
    assert code == 1 and "the mean is not subtracted: this is RMSNorm" in out


def test_a_function_is_checked_on_traps(check):
    own = ("--backward", "own_norms:backward", *OWN)
    code, out, _ = check(*own, "--traps", "--shape", "4x16")
    assert code == 0 and int(out.split()[1]) > 100


def test_a_function_is_checked_on_a_file(check, tmp_path):
    generator = np.random.default_rng(0)
    arrays = {name: generator.standard_normal(8).astype("f4") for name in ("weight", "bias")}
    x = generator.standard_normal((3, 8)).astype("f4")
    np.savez(tmp_path / "a.npz", input=x, eps=1e-3, **arrays)
    code, out, _ = check("--forward", "own_norms:forward", *OWN, tmp_path / "a.npz")
    assert code == 0 and "layer_norm 3 x 8 float32, a" in out
    code, out, _ = check(
        "--forward", "own_norms:rms", *OWN, "--norm", "rms_norm", tmp_path / "a.npz"
    )
    assert code == 0
    code, _, err = check("--forward", "own_norms:forward", *OWN, "--traps", tmp_path / "a.npz")
    assert code == 2 and "is given with files; expected none of them" in err[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--function", "own_norms"), "--function is 'own_norms'; expected MODULE:NAME, such as"),
        (("--function", "no_norms:f"), "no_norms could not be imported: No module named"),
        (("--backward", "own_norms:g"), "--backward own_norms:g: there is no g in own_norms"),
        (("--forward", "own_norms:number"), "own_norms:number is of type int; expected a function"),
        (("--forward", "own_norms:nothing"), "forward returned None; expected y, or (y, mean"),
        (("--dtype", "float32"), "--dtype is given without --function, --forward or --backward"),
        (("--function", "own_norms:exits"), "function called sys.exit, so nothing is checked"),
        (("--forward", "own_norms:hangs_up"), "forward raised BrokenPipeError, so nothing"),
        (("--forward", "exits_at_import:f"), "exits_at_import called sys.exit, so nothing is"),
        (("--forward", "no_python:f"), "no_python could not be imported: SyntaxError: "),
        (("--forward", "own_norms:\x1b[2J\n"), "there is no \\x1b[2J\\n in own_norms"),
        (
            ("--forward", "own_norms:rms", "--quick"),
            "--on or --quick is given with your own functions",
        ),
    ],
)
def test_wrong_arguments_are_one_sentence(check, arguments, message):
    code, _, err = check(*arguments)
    assert code == 2 and message in err[0]


@pytest.mark.parametrize(
    "function, case",
    [
        ("--backward=own_norms:wrong_tail", "61 x 769"),
        ("--forward=own_norms:wrong_last_columns", "61 x 769"),
        ("--forward=own_norms:too_wide", "7 x 8195"),
    ],
)
def test_tails_of_rows_and_columns_show_by_default(check, function, case):
    code, out, _ = check(function, *OWN)
    assert code == 1 and f"of layer_norm {case} float32: " in out
    assert check(function, *OWN, "--shape", "64x768")[0] == 0


def test_options_of_lists_add_up(check):
    right = ("--forward", "own_norms:forward", *OWN, "--shape", "5x7", "--shape", "4x8,5x7")
    code, out, _ = check(*right, "--dtype", "float64", "--dtype", "float32")
    assert code == 0 and "OK: 8 tensors checked" in out
    wrong = ("--backward", "own_norms:wrong_tail", *OWN)
    assert check(*wrong, "--shape", "5x8", "--shape", "4x8")[0] == 1


def test_a_call_that_ends_the_process_is_a_finding_of_a_trap():
    def exits(x):
        raise SystemExit(0)

    trial = Trial(random_problem(Case("layer_norm", 4, 8, "float32")), "T3 one column")
    result = check_callables([trial], Callables(forward=exits, library="numpy"), traps=True)
    assert not result.ok and "forward called sys.exit" in result.diagnoses[0]


def test_a_command_that_is_left_by_sys_exit_fails(monkeypatch, capsys):
    def leave(*arguments):
        raise SystemExit(0)

    monkeypatch.setattr(kernels, "machine", leave)
    assert command.main(["check"]) == 2
    assert "sys.exit was called before the end of the command" in capsys.readouterr().err


def test_shapes_are_read():
    read = shapes("rows x columns", "64x768")
    assert read("64x768,3x2**4") == [(64, 768), (3, 16)]
    for wrong in ("64", "1x2x3", "0x4", "axb"):
        with pytest.raises(argparse.ArgumentTypeError):
            read(wrong)


def test_norm_and_eps_reach_the_cases_of_the_kernels():
    for words in (["--quick"], ["--traps"]):
        given = ["check", *words, "--norm", "rms_norm", "--eps", "1e-3", "--on", "cpu"]
        made = entries_of(command.parser().parse_args(given), kernels.machine("cpu"), {"eps": 1e-3})
        assert len(made) > 8 and {entry.case.norm for entry in made} == {"rms_norm"}
        cases = [trial.problem.case for entry in made[:30] for trial in entry.drawn(0)]
        assert {case.eps for case in cases} <= {1e-3, 0.0, -0.05, -1e-3}
