"""LayerNormLinear in distributed training, by two processes on the CPU.

training_ranks.py has the checks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
pytest.importorskip("torch.distributed.checkpoint.state_dict")
if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)
import training_ranks  # noqa: E402  (imports torch)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def became(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Runs all checks at once. Returns the outcomes on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, training_ranks.__file__, str(rank), str(folder)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    found = []
    for rank, process in enumerate(processes):
        try:
            said, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        report = folder / f"{rank}.json"
        assert report.exists(), f"rank {rank} did not start:\n{said[-4000:]}"
        found.append(json.loads(report.read_text()))
    return found


@pytest.mark.parametrize("name", training_ranks.CHECKS)
def test_on_two_ranks(became, name):
    assert [report[name] for report in became] == ["passed", "passed"]
