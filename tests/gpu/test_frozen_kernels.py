"""Kernels need the registers and instructions of tests/data/frozen_kernels.csv."""

from __future__ import annotations

import os

import frozen_kernels
import pytest
from nvrtc_here import needs_nvrtc

STEP = 1 if os.cpu_count() >= 8 else 16  # of the batches that are compiled


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("compute_capability", frozen_kernels.GPUS)
def test_kernels_compile_to_what_they_were(compute_capability):
    version, frozen = frozen_kernels.read()
    if version != frozen_kernels.version_of_nvrtc():
        pytest.skip(f"the figures are those of NVRTC {version}")
    named = frozen_kernels.kernels(compute_capability)
    of_gpu = f"{frozen_kernels.GPUS[compute_capability]} "
    missing = {name for name in frozen if name.startswith(of_gpu)} ^ set(named)
    assert not missing, "\n".join(sorted(missing))
    changed = []
    for batch in frozen_kernels.batches(named)[compute_capability % STEP :: STEP]:
        found = frozen_kernels.figures(list(batch.values()), compute_capability)
        changed += [
            f"{name}: {frozen[name]} before, {each} now"
            for name, each in zip(batch, found)
            if frozen[name] != each
        ]
    assert not changed, "\n".join(changed)
