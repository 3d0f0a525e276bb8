"""DTensors, DistributedDataParallel and fully_shard on two ranks, on the CPU and on two GPUs.

two_ranks.py runs the checks of dtensor_norm_ranks.py and model_ranks.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
import two_ranks  # noqa: E402  (imports torch)

from cupynorm.nn import dtensor as parallel  # noqa: E402

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def became(tmp_path_factory: pytest.TempPathFactory):
    """Runs all checks of a backend at once. Returns the outcome of each check on both ranks."""
    found: dict[str, dict[str, list[str]]] = {}

    def of(backend: str) -> dict[str, list[str]]:
        if backend not in found:
            found[backend] = run(backend, tmp_path_factory.mktemp(backend))
        return found[backend]

    return of


def run(backend: str, folder: Path) -> dict[str, list[str]]:
    # Tensors this small need no NVLink multicast, which not every machine has.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"NCCL_NVLS_ENABLE": "0", "PYTHONPATH": path}
    errors = [folder / f"{rank}.txt" for rank in (0, 1)]
    processes = []
    for rank, error in enumerate(errors):
        with error.open("w") as file:
            command = [
                sys.executable,
                str(Path(two_ranks.__file__)),
                backend,
                str(rank),
                str(folder),
            ]
            processes.append(subprocess.Popen(command, env=variables, stdout=file, stderr=file))
    for process in processes:
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    reports = []
    for rank, error in enumerate(errors):
        report = folder / f"{rank}.json"
        assert report.exists(), f"rank {rank} did not start:\n{error.read_text()[-4000:]}"
        ended = f"\n{error.read_text()[-4000:]}" if processes[rank].returncode else ""
        reports.append(
            {
                name: text + ended * (text == "not finished")
                for name, text in json.loads(report.read_text()).items()
            }
        )
    return {name: [report[name] for report in reports] for name in two_ranks.CHECKS}


@pytest.mark.slow
@pytest.mark.parametrize("name", two_ranks.CHECKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_two_ranks(became, backend, name):
    for rank, text in enumerate(became(backend)[name]):
        assert text == "passed", f"rank {rank}: {text}"


def test_the_error_names_a_torch_without_sharding_rules(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor.experimental", None)
    sentence = (
        f"torch {re.escape(torch.__version__)} has no .*register_sharding; expected a later torch"
    )
    with pytest.raises(NotImplementedError, match=sentence):
        parallel._register_once.__wrapped__()


def test_dtensors_are_not_imported_for_plain_tensors():
    """The import takes seconds."""
    script = (
        "import sys, torch, cupynorm\n"
        "before = set(sys.modules)\n"
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "cupynorm.LayerNorm(8)(x).sum().backward()\n"
        "cupynorm.rms_norm(torch.nn.Buffer(x.detach()) if hasattr(torch.nn, 'Buffer') else x, 8)\n"
        "brought = set(sys.modules) - before\n"
        "assert 'cupynorm.nn.dtensor' in brought, brought\n"
        "assert not [name for name in brought if name.startswith('torch.distributed')], brought\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
