"""python -m cupynorm plan: it prints the plans of cupynorm.plan and the table of strategies."""

import pytest
from command_runs import call

from cupynorm import __main__ as command
from cupynorm import plans
from cupynorm.dispatch import dispatch
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.strategies import STRATEGIES
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import launch
from cupynorm.verify.cases import DIRECTIONS


def test_plan(capsys):
    words = ("plan", "4096", "--rows", "8192", "--device", "h200", "--dtype", "float32")
    code, out, _ = call(capsys, *words)
    expected = [
        str(plans.plan(4096, 8192, "float32", device="H200", direction=direction))
        for direction in ("forward", "backward")
    ]
    assert code == 0 and out.strip() == "\n\n".join(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("1024", "--rows", "65536"), "one kernel, because norm_linear.cu, with a fold in each"),
        (
            ("1024", "--rows", "65536", "--sm-margin", "8"),
            "a norm and a product after it, because the",
        ),
    ],
    ids=" ".join,
)
def test_plan_with_a_linear_layer(capsys, arguments, expected):
    code, out, _ = call(capsys, "plan", *arguments, "--device", "H200", "--linear", "4096")
    assert code == 0
    assert out.splitlines()[-1].startswith(f"with a linear layer of 4096 outputs: {expected}")


def test_plan_options(capsys):
    words = "plan 5000 --device H200 --norm rms_norm --direction backward --strategy uncached"
    code, out, _ = call(capsys, *words.split(), "--sm-margin", "32")
    options = {"norm": "rms_norm", "direction": "backward", "strategy": "uncached"}
    plan = plans.plan(5000, device="H200", **options, sm_margin=32, bias_dtype=None)
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
