"""python -m cupynorm check --function, --forward, --backward, --norm, --eps and --traps."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm import __main__ as command
from cupynorm.check import entries
from cupynorm.check.command import shapes
from cupynorm.command_line import argparse

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
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs `check` with a module own_norms that can be imported: exit code, stdout, stderr."""
    (tmp_path / "own_norms.py").write_text(MODULE)
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
    assert code == 0
    assert out.splitlines()[-1] == (
        "OK: every element of 24 tensors of own_norms:forward, own_norms:backward is within what "
        "its dtype allows"
    )
    code, out, _ = check("--forward", "own_norms:rms", *OWN, "--norm", "rms_norm", "--eps", 1e-3)
    assert code == 0 and "rms_norm 64 x 768 float32" in out


def test_a_wrong_function_has_its_diagnosis(check):
    code, out, _ = check("--forward", "own_norms:without_bias", *OWN, "--shape", "8x48")
    assert code == 1 and "the bias is missing" in out
    assert out.splitlines()[-1].startswith("OFF: 2 of 2 tensors of own_norms:without_bias are")
    code, out, _ = check("--forward", "own_norms:rms", *OWN, "--shape", "8x48")
    assert code == 1 and "the mean is not subtracted: this is RMSNorm" in out


def test_a_function_is_checked_on_traps(check):
    own = ("--backward", "own_norms:backward", *OWN)
    code, out, _ = check(*own, "--traps", "--shape", "4x16")
    assert code == 0 and int(out.split("OK: every element of ")[1].split()[0]) > 100


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
        (
            ("--forward", "own_norms:rms", "--quick"),
            "--on or --quick is given with your own functions",
        ),
    ],
)
def test_wrong_arguments_are_one_sentence(check, arguments, message):
    code, _, err = check(*arguments)
    assert code == 2 and message in err[0]


def test_shapes_are_read():
    assert shapes("64x768,3x2**4") == [(64, 768), (3, 16)]
    for wrong in ("64", "1x2x3", "0x4", "axb"):
        with pytest.raises(argparse.ArgumentTypeError):
            shapes(wrong)


def test_norm_and_eps_reach_the_cases_of_the_kernels():
    shapes = entries.grid_shapes(_h200(), "cpu")[:2]
    made = entries.random_entries(shapes, ["rms_norm"], ["float16"], eps=1e-3)
    made += entries.trap_entries(["rms_norm"], ["float16"], eps=1e-3)
    cases = [trial.problem.case for entry in made[:2] for trial in entry.make()]
    assert {case.norm for case in cases} == {"rms_norm"} and {case.eps for case in cases} == {1e-3}
    assert {entry.case.norm for entry in made} == {"rms_norm"}
    names = [entry.name for entry in made]
    assert len(names) > 40 and any(name.startswith("T11 misaligned x") for name in names)


def _h200():
    from cupynorm.plan.devices import DEVICES

    return DEVICES["H200"]
