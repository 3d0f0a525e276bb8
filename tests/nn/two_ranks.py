"""Checks by two processes: DTensor, DistributedDataParallel and fully_shard.

test_dtensor.py starts it once for each rank:

    python tests/nn/two_ranks.py gloo|nccl RANK FOLDER

gloo runs on the CPU, nccl on GPUs 0 and 1. All checks but those of dtypes are in float64, so that
the order of additions matters little. FOLDER/RANK.json has the outcome of each check: "passed", or
a traceback, after which the other checks are not run.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import dtensor_norm_ranks  # noqa: F401  (adds to CHECKS)
import model_ranks  # noqa: F401  (adds to CHECKS)
import torch
from rank_checks import CHECKS, HAS_SHARDING, Ranks
from torch import distributed

if HAS_SHARDING:
    from torch.distributed.device_mesh import init_device_mesh


def main(backend: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    device = {"gloo": "cpu", "nccl": "cuda"}[backend]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend,
        f"file://{folder}/store",
        timedelta(seconds=60),
        world_size=2,
        rank=rank,
        device_id=torch.device(device, rank) if device == "cuda" else None,
    )
    ranks = Ranks(rank, device, init_device_mesh(device, (2,)) if HAS_SHARDING else None)
    became = dict.fromkeys(CHECKS, "not run, because of the one before")
    for name, function in CHECKS.items():
        became[name] = "not finished"
        (folder / f"{rank}.json").write_text(json.dumps(became))
        try:
            function(ranks)
            became[name] = "passed"
        except Exception:
            became[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(became))
        if became[name] != "passed":
            break
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
