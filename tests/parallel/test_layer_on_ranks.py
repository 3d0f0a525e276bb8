"""LayerNormLinear on several processes, on the CPU and on GPUs. layer_ranks.py runs the checks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
import failing_ranks  # noqa: E402  (imports torch)
import layer_graph_ranks  # noqa: E402  (imports torch)
import layer_kernel_ranks  # noqa: E402  (imports torch)
import layer_ranks  # noqa: E402  (imports torch)
import start_ranks  # noqa: E402

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu))


@pytest.fixture(scope="module", params=DEVICES)
def became(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    return start_ranks.start(layer_ranks.__file__, 2, folder, device=request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", layer_ranks.CHECKS)
def test_on_two_ranks(became, name):
    assert [report[name] for report in became] == ["passed", "passed"]


ON_FOUR = tuple(case.name for case in layer_ranks.MAIN)


@pytest.mark.slow
def test_on_four_ranks(tmp_path):
    reports = start_ranks.start(layer_ranks.__file__, 4, tmp_path, ON_FOUR)
    assert reports == [dict.fromkeys(ON_FOUR, "passed")] * 4


@pytest.mark.slow
def test_row_parallel_layers_by_the_kernels(tmp_path):
    """Not by torch's operators, which tensors on the CPU take otherwise."""
    reports = start_ranks.start(layer_kernel_ranks.__file__, 2, tmp_path)
    assert reports == [dict.fromkeys(layer_kernel_ranks.CHECKS, "passed")] * 2


@pytest.mark.slow
@pytest.mark.multi_gpu
def test_cuda_graphs(tmp_path):
    reports = start_ranks.start(layer_graph_ranks.__file__, 2, tmp_path, device="cuda")
    assert reports == [dict.fromkeys(layer_graph_ranks.CHECKS, "passed")] * 2


@pytest.mark.slow
def test_ranks_that_fail(tmp_path):
    """By gloo. With NCCL a timeout ends the process."""
    reports = start_ranks.start(failing_ranks.__file__, 2, tmp_path)
    *others, last = failing_ranks.CHECKS
    assert reports[0] == dict.fromkeys(failing_ranks.CHECKS, "passed")
    assert [reports[1][name] for name in others] == ["passed"] * len(others)
    assert reports[1][last].startswith(start_ranks.NOT_FINISHED)
