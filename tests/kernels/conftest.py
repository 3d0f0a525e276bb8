"""Machines that run kernels: the CPU, which needs no GPU, and the first GPU."""

from __future__ import annotations

import pytest
from small_devices import SMALL

from cupynorm.check.kernels import CpuMachine, GpuCheckMachine

MACHINES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=MACHINES)
def where(request):
    """The CPU plans as an H200."""
    return CpuMachine() if request.param == "cpu" else GpuCheckMachine()


@pytest.fixture(params=MACHINES)
def small(request):
    """The CPU plans as a GPU of two multiprocessors, so that a few rows reuse every buffer."""
    return CpuMachine(SMALL) if request.param == "cpu" else GpuCheckMachine()
