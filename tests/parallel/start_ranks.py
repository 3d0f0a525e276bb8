"""Starts one process for each rank, and the checks that each process runs.

A file of checks fills a dict by `check`, and its `main(CHECKS)` is run once for each rank:

    python FILE RANK NUM_RANKS FOLDER [NAME ...]

FOLDER/RANK.json has the outcome of each check: "passed", or a traceback, after which the other
checks are not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(
    file: str, num_ranks: int, folder: Path, names: tuple[str, ...] = (), device: str = "cpu"
) -> list[dict[str, str]]:
    """Runs all checks of a file at once, or those named. Returns the outcomes on each rank.

    device: "cpu" (gloo) or "cuda" (NCCL, a GPU for each rank).
    """
    parts = [ROOT, ROOT / "tests" / "linear", os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(part) for part in parts if part)
    processes = [
        subprocess.Popen(
            [sys.executable, file, str(rank), str(num_ranks), str(folder), *names],
            env=os.environ | {"PYTHONPATH": path, "RANKS_DEVICE": device},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
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


def main(checks: dict[str, Callable[[int], None]]) -> None:
    """What one process runs. Each check takes its rank."""
    import torch
    from torch import distributed

    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    checks = {name: checks[name] for name in sys.argv[4:] or checks}
    torch.set_num_threads(1)
    on_gpus = os.environ.get("RANKS_DEVICE") == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
        # cuBLAS adds the parts of a split sum in float32, as the bounds assume.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    distributed.init_process_group(
        "nccl" if on_gpus else "gloo",
        f"file://{folder}/store",
        timedelta(seconds=60),
        world_size=num_ranks,
        rank=rank,
    )
    became = dict.fromkeys(checks, "not run, because of the one before")
    for name, function in checks.items():
        try:
            function(rank)
            became[name] = "passed"
        except Exception:
            became[name] = traceback.format_exc()
        if became[name] != "passed":
            break
    (folder / f"{rank}.json").write_text(json.dumps(became))
    distributed.destroy_process_group()
