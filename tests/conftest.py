"""Skips `gpu` and `multi_gpu` tests without enough GPUs; fixtures that several folders share."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

settings.register_profile("long")  # test_drawn_calls.py: --hypothesis-profile long

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
_MUCH_MEMORY = 2**30

# One thread for the products of torch and NumPy in each process, because pytest -n starts as many
# processes as there are processors. Idle threads of a product would keep a processor busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@cache
def _num_gpus() -> int:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = _num_gpus()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if not item.get_closest_marker("gpu") and needed == 1:
            continue
        if needed > num_gpus:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"needs {needed} GPU{'s' if needed > 1 else ''}, found {num_gpus}"
                )
            )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each reason for which tests were skipped, with their number."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True)
def memory_for_other_processes() -> Iterator[None]:
    """Several processes share a GPU, so none keeps 1 GiB or more of freed memory."""
    yield
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy and _num_gpus() and cupy.get_default_memory_pool().total_bytes() >= _MUCH_MEMORY:
        cupy.get_default_memory_pool().free_all_blocks()
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() >= _MUCH_MEMORY:
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> ModuleType:
    """The program of notebooks/ that a test file is named after (test_train_gpt: train_gpt.py)."""
    name = request.module.__name__.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list:
    """Runs calls with CPU tensors through the kernels, planned for an H200 and run on the CPU.

    Allocated memory is NaN. The value is a list of the launches.
    """
    import torch

    from cupynorm.dispatch.devices import DEVICES
    from cupynorm.gpu import arrays, launch
    from cupynorm.norm import prepared
    from cupynorm.verify.kernels import CpuMachine

    launched = []

    class TensorsOfTheCpu(arrays.TorchLibrary):
        """Has the members of arrays.TorchLibrary; what it allocates is NaN."""

        def __init__(self, device_index: int) -> None:
            self.address = torch.Tensor.data_ptr
            self.exchange_device = lambda index: index
            self.stream = lambda: 0

        @staticmethod
        def view(tensor):
            return arrays.TorchLibrary.view(tensor)._replace(device=0)

        @staticmethod
        def allocator(shape, dtype):
            poison = float("nan") if dtype.is_floating_point else -2 if dtype.is_signed else 0xFE
            return partial(torch.full, shape, poison, dtype=dtype)

    class Loaded:
        def __init__(self, planned, device_index):
            self.planned = planned

        def enqueue(self, stream, words):
            launched.append(self.planned)
            CpuMachine().launch(self.planned, words)

    monkeypatch.setattr(arrays, "library", lambda array: TensorsOfTheCpu)
    monkeypatch.setattr(arrays, "on_host", lambda array: False)
    monkeypatch.setattr(launch, "device", lambda index: DEVICES["H200"])
    monkeypatch.setattr(launch, "load", Loaded)
    prepared.forget()
    yield launched
    prepared.forget()


@pytest.fixture(params=["kernels", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of tensors: the CPU, on which the kernels run, or a GPU."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return "cuda" if request.param == "gpu" else "cpu"


@pytest.fixture(params=["reference", "kernels", pytest.param("gpu", marks=pytest.mark.gpu)])
def anywhere(request: pytest.FixtureRequest) -> str:
    """The device of tensors: the CPU with the reference, the CPU with the kernels, and a GPU."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return "cuda" if request.param == "gpu" else "cpu"


@pytest.fixture
def record_launches(kernels: list, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list]:
    """A function that returns a list of the kernel and the words of each launch, which runs none.

    Its `prepared` counts the calls that a module prepares anew.
    """
    from cupynorm.gpu import launch

    class Launched(list):
        prepared = 0

    launched = Launched()

    class Kernel:
        def __init__(self, planned, device_index):
            self.planned = planned

        def enqueue(self, stream, words):
            launched.append((self.planned, words))

    def counted(plain, *arguments):
        launched.prepared += 1
        return plain(*arguments)

    def record(module: ModuleType) -> list:
        monkeypatch.setattr(launch, "load", Kernel)
        for name in ("prepare_forward", "prepare_backward"):
            monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
        return launched

    return record
