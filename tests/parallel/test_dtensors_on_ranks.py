"""LayerNormLinear with DTensors, by two processes, on the CPU and on two GPUs.

dtensor_ranks.py has the checks.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed.tensor.parallel")
pytest.importorskip("torch.distributed.tensor.experimental")
import dtensor_ranks  # noqa: E402  (imports torch)
import start_ranks  # noqa: E402

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_on_two_ranks(device, tmp_path):
    reports = start_ranks.start(dtensor_ranks.__file__, 2, tmp_path, device=device)
    assert reports == [dict.fromkeys(dtensor_ranks.CHECKS, "passed")] * 2
