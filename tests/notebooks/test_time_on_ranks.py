"""notebooks/time_on_ranks.py prints a time of each way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_on_two_processes():
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--standalone", "notebooks/time_on_ranks.py"),
        ],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    number = r"(\d+\.\d+)"
    names = ("one rank's part", "the layer")
    ways = "; ".join(rf"{way} {number}, {number}" for way in names)
    found = [re.search(rf": {ways}$", line) for line in done.stdout.splitlines()]
    found = [each.groups() for each in found if each]
    assert len(found) == 3, done.stdout
    assert all(float(each) > 0 for line in found for each in line)
    calls = re.findall(r"rows: (\d+) on the host, (\d+) in all$", done.stdout, re.M)
    assert len(calls) == 4 and all(int(host) > 0 for host, _ in calls), done.stdout
