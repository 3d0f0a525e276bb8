"""The tutorial's algorithm, on the CPU by Triton's interpreter and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from cupynorm.bench import triton_tutorial as tutorial

device = sys.argv[1]
torch.manual_seed(0)
for num_rows, num_cols in ((300, 33), (5, 2000), (1, 1)):
    x, dy = (torch.randn(num_rows, num_cols, device=device) for _ in range(2))
    weight, bias = (torch.randn(num_cols, device=device) for _ in range(2))
    inputs = [each.requires_grad_() for each in (x, weight, bias)]
    y = tutorial.layer_norm(x, weight, bias, 1e-5)
    got = [y, *torch.autograd.grad(y, inputs, dy)]
    doubles = [each.detach().double().requires_grad_() for each in inputs]
    expected = torch.nn.functional.layer_norm(doubles[0], (num_cols,), doubles[1], doubles[2], 1e-5)
    expected = [expected, *torch.autograd.grad(expected, doubles, dy.double())]
    for name, one, other in zip(("y", "dx", "dweight", "dbias"), got, expected):
        error = float((one.double() - other).abs().max())
        assert error < 1e-4, (name, num_rows, num_cols, error)
        print(name, "is right")
try:
    tutorial.layer_norm(torch.zeros(1, 16385, device=device), weight, bias, 1e-5)
except ValueError as error:
    print(error)
"""


def run(device, **variables):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, device], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_forward_and_backward(device):
    done = run(device, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:-1] == ["y is right", "dx is right", "dweight is right", "dbias is right"] * 3
    assert lines[-1] == "x has 16385 columns; a row of torch.float32 has at most 16384 (64 KiB)"
