"""Checks of row-parallel layers whose statistics come from our kernels, run on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest  # noqa: E402
import layer_ranks  # noqa: E402
import start_ranks  # noqa: E402

LAUNCHED = []
NAMES = (
    "row-layer_norm-float32",
    "row-rms_norm-bfloat16",
    "row-sequence-layer_norm-float32-CurrentScaling",
    "row-sequence-layer_norm-float32-BlockScaling",
    "kept_normalized_and_zero_centered_weight_without_bias-row-layer_norm-float32",
    "the_normalised_tensor_and_its_gradient-row-layer_norm-float32",
    "no_rows_and_inference_mode-row-layer_norm-float32",
)
CHECKS = {name: layer_ranks.CHECKS[name] for name in NAMES}


def they_ran_the_kernels(rank: int) -> None:
    sources = {launch.kernel.source for each in LAUNCHED for launch in each}
    assert "forward_warp.cu" in sources, sources


CHECKS["they_ran_the_kernels"] = they_ran_the_kernels

if __name__ == "__main__":
    # What the fixture does in one test, until this process ends.
    fixture = conftest.kernels.__wrapped__(pytest.MonkeyPatch())
    LAUNCHED.append(next(fixture))
    start_ranks.main(CHECKS)
