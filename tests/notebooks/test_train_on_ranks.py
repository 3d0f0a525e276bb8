"""notebooks/train_on_ranks.py learns, and has the same losses on one and on several processes;
notebooks/time_on_ranks.py prints a time of each way."""

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
    printed = printed_on_ranks(num_ranks, example.__file__, str(STEPS_OF_RANKS))
    together = losses_of(printed, num_ranks)
    assert len(together) == STEPS_OF_RANKS
    # Printed to 4 digits; float32 sums in another order differ in the seventh.
    assert max(abs(one - other) for one, other in zip(alone, together)) < 2e-4


def printed_on_ranks(num_ranks: int, file: str, *arguments: str, **variables: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
            *("--standalone", file, *arguments),
        ],
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_times_of_each_way_are_printed():
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    printed = printed_on_ranks(2, str(ROOT / "notebooks" / "time_on_ranks.py"), **variables)
    number = r"(\d+\.\d+)"
    ways = f": one rank's part {number}, {number}; the layer {number}, {number}$"
    found = re.findall(ways, printed, re.M)
    assert len(found) == 3, printed
    assert all(float(each) > 0 for line in found for each in line)
    calls = re.findall(r"rows: (\d+) on the host, (\d+) in all$", printed, re.M)
    assert len(calls) == 4 and all(int(host) > 0 for host, _ in calls), printed
