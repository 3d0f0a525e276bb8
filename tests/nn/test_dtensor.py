"""DTensors, DistributedDataParallel and fully_shard on two ranks, on the CPU and on two GPUs.

two_ranks.py runs the checks of dtensor_norm_ranks.py and model_ranks.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
import start_ranks  # noqa: E402
import two_ranks  # noqa: E402  (imports torch)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def became(tmp_path_factory: pytest.TempPathFactory):
    """Runs all checks on a device at once. Returns the outcome of each check on both ranks."""
    found: dict[str, dict[str, list[str]]] = {}

    def of(device: str) -> dict[str, list[str]]:
        if device not in found:
            folder = tmp_path_factory.mktemp(device)
            reports = start_ranks.start(two_ranks.__file__, 2, folder, device=device)
            found[device] = {
                name: [report[name] for report in reports] for name in two_ranks.CHECKS
            }
        return found[device]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", two_ranks.CHECKS)
@pytest.mark.parametrize("device", DEVICES)
def test_on_two_ranks(became, device, name):
    for rank, text in enumerate(became(device)[name]):
        assert text == "passed", f"rank {rank}: {text}"


@pytest.mark.slow
def test_neither_dtensors_nor_the_compiler_are_imported_for_plain_tensors():
    """The imports take seconds."""
    script = (
        "import sys, torch, cupynorm\n"
        "before = set(sys.modules)\n"
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "cupynorm.LayerNorm(8)(x).sum().backward()\n"
        "cupynorm.rms_norm(torch.nn.Buffer(x.detach()), 8)\n"
        "cupynorm.LayerNormLinear(8, 8, device='cpu')(x).sum().backward()\n"
        "brought = set(sys.modules) - before\n"
        "assert 'cupynorm.nn.by_torch' in brought, brought\n"
        "slow = 'torch.distributed', 'torch._dynamo'\n"
        "assert not [name for name in brought if name.startswith(slow)], brought\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
