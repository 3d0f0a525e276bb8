"""Machines that run kernels: the CPU, which needs no GPU, and the first GPU."""

from __future__ import annotations

import numpy as np
import pytest
from laid_out import give_numpy_to_kernels
from small_devices import SMALL

from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.norm import cache

MACHINES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=MACHINES)
def where(request):
    """The CPU plans as an H200."""
    return CpuMachine() if request.param == "cpu" else GpuCheckMachine()


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
    request.addfinalizer(cache.forget)
    return np
