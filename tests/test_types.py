"""Type checkers know every public name: mypy, and pyright where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cupynorm

ROOT = Path(__file__).parents[1]
RIGHT = """\
import numpy as np
import torch
import cupynorm

x = torch.randn(8, 64)
y = cupynorm.layer_norm(x, 64, torch.ones(64), torch.zeros(64), eps=1e-6)
y.sum().backward()
cupynorm.layer_norm_linear(x, torch.ones(64), None, torch.ones(8, 64)).sum()
y, s = cupynorm.rms_norm(x, (64,), residual=x, out=(x, x), return_residual=True)
s.sum().backward()
row: np.ndarray = cupynorm.rms_norm(np.ones((2, 8)), 8, launch=cupynorm.Launch("warp"))
quantized = cupynorm.layer_norm(x, 64, out_dtype=cupynorm.Quantize("float8_e4m3fn", "row"))
quantized.dequantize()
_ = cupynorm.rms_norm(x, 64, out_dtype="int8").scale_inv
_ = cupynorm.layer_norm(x, 64, out_dtype="int8", return_residual=True)[0].scale_inv
model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 64), cupynorm.RMSNorm(64))
cupynorm.swap_norms(model).undo()
strategy: str = cupynorm.plan(4096, device=cupynorm.DEVICES["H200"]).strategy
ok: bool = cupynorm.check(shapes=[(3, 33)], on="cpu").ok
statistics = cupynorm.layer_norm_forward(np.ones((2, 8)), 8).mean
"""
# Each line is one mistake.
WRONG = """\
import cupynorm
cupynorm.layer_norm(1, 4, eps="a")
cupynorm.layer_norm(1.5, 4).backward()
cupynorm.rms_norm(1.5, 4, return_residual=True).real
cupynorm.rms_norm(1.5, 4, out_dtype=cupynorm.Quantize("int8", "row")).real
cupynorm.layer_norm(1, 4, strategy="warp")
cupynorm.Launch("wrap")
cupynorm.plan(4096, statistics="one_pass")
cupynorm.layernorm(1, 4)
cupynorm.plan("4096")
cupynorm.plan(4096).stratagem
cupynorm.LayerNorm(64, elementwise_affine=[])
cupynorm.swap_norms(64)
"""
TYPED = [name for name in dir(cupynorm) if name not in cupynorm._MODULES]
TYPED += [f"{module}.{name}" for name, module in cupynorm._MOVED.items()]
NAMES = "import cupynorm\n" + "".join(f"reveal_type(cupynorm.{name})\n" for name in TYPED)


def run(tool: str, folder: Path) -> list[tuple[str, int, str, str]]:
    """(file, line, kind, message) of all that a type checker prints about the three scripts."""
    program = shutil.which(
        tool, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if not program:
        pytest.skip(f"{tool} is not installed: pip install {tool}")
    for name, text in (("right", RIGHT), ("wrong", WRONG), ("names", NAMES)):
        (folder / f"{name}.py").write_text(text)
    files = ["right.py", "wrong.py", "names.py"]
    if tool == "mypy":
        options = [
            "--follow-imports=silent",
            "--python-executable",
            sys.executable,
            "--cache-dir",
            str(folder / "cache"),
        ]
    else:
        (folder / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"]}}')
        options = ["--pythonpath", sys.executable]
        files = []
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    ran = subprocess.run(
        [program, *options, *files], cwd=folder, env=environment, capture_output=True, text=True
    )
    found = re.findall(
        r"(\w+)\.py:(\d+)(?::\d+)?(?: -|:) (error|note|information): (.*)", ran.stdout
    )
    if tool == "pyright" and "informations" not in ran.stdout:
        pytest.skip(f"pyright did not start: {ran.stderr[-300:]}")
    assert found, ran.stdout + ran.stderr
    return [(file, int(line), kind, message) for file, line, kind, message in found]


@pytest.mark.slow
@pytest.mark.parametrize("tool", ("mypy", "pyright"))
def test_type_checkers_know_the_public_names(tool, tmp_path):
    pytest.importorskip("torch")
    found = run(tool, tmp_path)
    errors = [each for each in found if each[2] == "error"]
    assert not [each for each in errors if each[0] != "wrong"]
    assert {line for file, line, _, _ in errors if file == "wrong"} == set(
        range(2, len(WRONG.splitlines()) + 1)
    )
    types = [
        message for file, _, _, message in found if file == "names" and "type" in message.lower()
    ]
    assert len(types) == len(TYPED)
    assert not [
        message for message in types if re.search(r'is "(Any|Unknown|object|Module\(.*)"', message)
    ]
