"""LayerNormLinear in distributed training, by two processes, on the CPU and on GPUs.

training_ranks.py has the checks.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
pytest.importorskip("torch.distributed.checkpoint.state_dict")
if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)
import start_ranks  # noqa: E402
import training_ranks  # noqa: E402  (imports torch)

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu))


@pytest.fixture(scope="module", params=DEVICES)
def became(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """Runs all checks at once. Returns the outcomes on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    return start_ranks.start(training_ranks.__file__, 2, folder, device=request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", training_ranks.CHECKS)
def test_on_two_ranks(became, name):
    assert [report[name] for report in became] == ["passed", "passed"]
