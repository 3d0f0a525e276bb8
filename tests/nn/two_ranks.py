"""Checks by two processes: DTensor, DistributedDataParallel and fully_shard: see start_ranks.py.

All checks but those of dtypes are in float64, so that the order of additions matters little.
"""

from __future__ import annotations

import os

import dtensor_norm_ranks  # noqa: F401  (adds to CHECKS)
import model_ranks  # noqa: F401  (adds to CHECKS)
from rank_checks import CHECKS, Ranks
from start_ranks import main
from torch.distributed.device_mesh import init_device_mesh


def make(rank: int) -> Ranks:
    device = os.environ["RANKS_DEVICE"]
    return Ranks(rank, device, init_device_mesh(device, (2,)))


if __name__ == "__main__":
    main(CHECKS, make)
