"""notebooks/train_on_ranks.py learns, and has the same losses on one and on several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 12
STEPS_OF_RANKS = 4


def losses_of(text: str, num_ranks: int) -> list[float]:
    found = re.search(rf"^{num_ranks} ranks: ([\d. ]+)$", text, re.M)
    assert found, text
    return [float(each) for each in found[1].split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, num_ranks", (("cpu", 4), pytest.param("cuda", 2, marks=pytest.mark.multi_gpu))
)
def test_several_ranks_have_the_losses_of_one(example, monkeypatch, capsys, device, num_ranks):
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["train_on_ranks.py", str(STEPS)])
    example.main()
    alone = losses_of(capsys.readouterr().out, 1)
    assert len(alone) == STEPS and alone[0] > 4 and sum(alone[-3:]) / 3 < 3.6
    together = losses_on_ranks(example.__file__, num_ranks)
    assert len(together) == STEPS_OF_RANKS
    # Printed to 4 digits; float32 sums in another order differ in the seventh.
    assert max(abs(one - other) for one, other in zip(alone, together)) < 2e-4


def losses_on_ranks(file: str, num_ranks: int) -> list[float]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
            *("--standalone", file, str(STEPS_OF_RANKS)),
        ],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return losses_of(done.stdout, num_ranks)
