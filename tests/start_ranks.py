"""Starts one process for each rank, and the checks that each process runs.

A file of checks fills Checks, and its `main(CHECKS)` is run once for each rank:

    python FILE RANK NUM_RANKS FOLDER [NAME ...]

FOLDER/RANK.json has the outcome of each check: "passed", or a traceback. After a check that fails
on some ranks alone the others are not run, because the ranks are no longer at one place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 300
NOT_FINISHED = "not finished"
# Not every machine has NVLink multicast, and no check needs it.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


# What the tensors of this process's checks are made on.
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")


class Checks(dict):
    """name -> check, of one file."""

    def add(self, function: Callable) -> Callable:
        """A decorator."""
        self[function.__name__] = function
        return function


def start(
    file: str, num_ranks: int, folder: Path, names: Sequence[str] = (), device: str = "cpu"
) -> list[dict[str, str]]:
    """Runs all checks of a file at once, or those named. Returns the outcomes on each rank.

    device: "cpu" (gloo) or "cuda" (NCCL, a GPU for each rank; gloo where there are fewer).
    """
    parts = [ROOT, ROOT / "tests", ROOT / "tests" / "linear"]
    parts.append(os.environ.get("PYTHONPATH"))
    variables = os.environ | WITHOUT_MULTICAST
    variables |= {
        "PYTHONPATH": os.pathsep.join(str(part) for part in parts if part),
        "RANKS_DEVICE": device,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes, said = [], [folder / f"{rank}.txt" for rank in range(num_ranks)]
    for rank, path in enumerate(said):
        command = [sys.executable, file, str(rank), str(num_ranks), str(folder), *names]
        with path.open("w") as out:
            processes.append(subprocess.Popen(command, env=variables, stdout=out, stderr=out))
    end = time.monotonic() + SECONDS
    for process in processes:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [_report(folder / f"{rank}.json", path) for rank, path in enumerate(said)]


def _report(path: Path, said: Path) -> dict[str, str]:
    text = said.read_text()[-4000:]
    assert path.exists(), f"{path.stem} did not start:\n{text}"
    became = json.loads(path.read_text())
    return {
        name: f"{each}\n{text}" if each == NOT_FINISHED else each for name, each in became.items()
    }


def main(
    checks: Mapping[str, Callable[[Any], None]], make: Callable[[int], Any] | None = None
) -> None:
    """What one process runs. Each check takes its rank, or what `make` makes of it."""
    import torch
    from torch import distributed

    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    checks = {name: checks[name] for name in sys.argv[4:] or checks}
    torch.set_num_threads(1)
    backend = "gloo"
    if DEVICE == "cuda":
        num_gpus = torch.cuda.device_count()
        backend = "nccl" if num_gpus >= num_ranks else "gloo"
        torch.cuda.set_device(rank % num_gpus)
        # cuBLAS adds the parts of a split sum in float32, as the bounds assume.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    store, limit = distributed.FileStore(f"{folder}/store", num_ranks), timedelta(seconds=60)
    distributed.init_process_group(
        backend, None, limit, world_size=num_ranks, rank=rank, store=store
    )
    store.set_timeout(limit)
    given = rank if make is None else make(rank)
    became = dict.fromkeys(checks, "not run, because of the one before")
    report = folder / f"{rank}.json"
    for name, function in checks.items():
        became[name] = NOT_FINISHED
        report.write_text(json.dumps(became))
        try:
            function(given)
            became[name] = "passed"
        except Exception:
            became[name] = traceback.format_exc()
        report.write_text(json.dumps(became))
        passed = became[name] == "passed"
        store.set(f"{name} on {rank}", str(passed))
        if not passed and _passes_elsewhere(store, name, num_ranks):
            break
    distributed.destroy_process_group()


def _passes_elsewhere(store: Any, name: str, num_ranks: int) -> bool:
    """Whether another rank has passed a check, or does not come to its end."""
    try:
        return any(store.get(f"{name} on {rank}") == b"True" for rank in range(num_ranks))
    except Exception:
        return True
