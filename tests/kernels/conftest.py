"""Machines that run kernels: the CPU, which needs no GPU, and the first GPU."""

from __future__ import annotations

import os
from collections import Counter
from zlib import crc32

import numpy as np
import pytest
from kernel_paths import SMALL
from laid_out import give_numpy_to_kernels

from cupynorm.norm import prepared
from cupynorm.verify.kernels import CpuMachine, GpuCheckMachine

# With fewer than 4 cores, a slow test of that many cases runs about every second of them, so that
# all tests take under 15 minutes on two slow cores. pytest counts what is left out as deselected.
_LARGE = 24


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (os.cpu_count() or 1) >= 4:
        return

    def test_of(item: pytest.Item) -> str:
        return item.nodeid.partition("[")[0]

    grids = [
        item
        for item in items
        if item.nodeid.startswith("tests/kernels/")
        and item.get_closest_marker("slow")
        and not item.get_closest_marker("gpu")
        and "mutation" not in item.name  # each shows that a check can fail
    ]
    sizes = Counter(map(test_of, grids))
    left_out = {
        item for item in grids if sizes[test_of(item)] >= _LARGE and crc32(item.nodeid.encode()) % 2
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


MACHINES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=MACHINES)
def where(request):
    """The CPU plans as an H200."""
    return CpuMachine() if request.param == "cpu" else GpuCheckMachine()


@pytest.fixture
def machine(where):
    """As `where`, for kernels of compute capability 9.0."""
    if where.device.compute_capability != 90:
        pytest.skip(f"the kernel is for compute capability 9.0, not for {where.device.name}")
    return where


@pytest.fixture(params=MACHINES)
def small(request):
    """The CPU plans as a GPU of two multiprocessors, so that a few rows reuse every buffer."""
    return CpuMachine(SMALL) if request.param == "cpu" else GpuCheckMachine()


@pytest.fixture(params=MACHINES)
def library(request, monkeypatch):
    """numpy, whose arrays are given to the kernels on the CPU, or cupy."""
    if request.param == "gpu":
        return pytest.importorskip("cupy")
    # Two multiprocessors: every block takes several rows, and a warp bundles of several.
    give_numpy_to_kernels(monkeypatch, SMALL)
    request.addfinalizer(prepared.forget)
    return np
