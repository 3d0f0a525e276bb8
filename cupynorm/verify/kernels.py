"""The machines that run the kernels: a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..dispatch import dispatch
from ..dispatch.devices import DEVICES, Device
from ..dispatch.instances import Kernel, Launch
from ..dispatch.problem import Layout
from ..dispatch.problem import Problem as PlanProblem
from ..dtypes import DTYPES
from ..gpu import launch, nvrtc, on_cpu
from .cases import Case


class Machine:
    """Runs kernels of a folder of sources, and has memory for their arrays.

    on: "cpu" or "gpu". device: for which kernels are planned.
    """

    on: str
    device: Device

    def name_tensors(self, addresses: Mapping[str, int]) -> None:
        """Is told the addresses of all tensors before the launches of a call."""


class CpuMachine(Machine):
    """Runs the kernels on the CPU, planned for `device`. Arrays are NumPy's, in storage dtypes.

    seed: of the order in which threads run. sanitize: as for gpu.on_cpu.kernel.
    folder: of the sources, None for the installed ones. Arrays that are allocated hold NaN.
    """

    on = "cpu"

    def __init__(
        self,
        device: Device = DEVICES["H200"],
        seed: int = 0,
        sanitize: tuple[str, ...] = (),
        folder: Path | None = None,
    ) -> None:
        self.device = device
        self.seed = seed
        self.sanitize = sanitize
        self.folder = folder

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, int]:
        array = np.empty(shape, DTYPES[dtype].storage)
        array.view(np.uint8).reshape(-1)[...] = 0xFF if array.size else 0
        return array, array.ctypes.data

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        array = np.ascontiguousarray(array)
        return array, array.ctypes.data

    def get(self, array: np.ndarray) -> np.ndarray:
        return array

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        self.run(cpu_kernel(kernel_launch.kernel, self.sanitize, self.folder), kernel_launch, words)

    def run(self, instance: on_cpu.CpuKernel, kernel_launch: Launch, words: tuple) -> None:
        """Runs the kernel of a launch."""
        instance.launch(
            kernel_launch.grid_size,
            kernel_launch.block_size,
            launch.pack(words),
            smem_bytes=kernel_launch.smem_bytes,
            cluster_size=kernel_launch.cluster_size,
            seed=self.seed,
        )


@cache
def cpu_kernel(
    kernel: Kernel, sanitize: tuple[str, ...], folder: Path | None = None
) -> on_cpu.CpuKernel:
    """A kernel compiled for the CPU, loaded once."""
    return on_cpu.kernel(
        kernel.source,
        kernel.name_expression,
        sanitize=sanitize,
        folder=folder,
        functors=kernel.functors,
    )


class GpuCheckMachine(Machine):
    """Runs the kernels on a GPU. Arrays are CuPy's, in storage dtypes; allocated ones hold NaN.

    folder: of the sources, None for the installed ones.
    """

    on = "gpu"

    def __init__(self, device_index: int = 0, folder: Path | None = None) -> None:
        self.device_index = device_index
        self.device = launch.device(device_index)
        self.folder = folder

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        cupy = nvrtc.cupy()
        with cupy.cuda.Device(self.device_index):
            array = cupy.empty(shape, DTYPES[dtype].storage)
            if array.size:
                array.view(cupy.uint8).fill(0xFF)
        return array, array.data.ptr

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        cupy = nvrtc.cupy()
        with cupy.cuda.Device(self.device_index):
            there = cupy.asarray(array)
        return there, there.data.ptr

    def get(self, array: Any) -> np.ndarray:
        return array.get()

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        cupy = nvrtc.cupy()
        with cupy.cuda.Device(self.device_index):
            stream = cupy.cuda.get_current_stream().ptr
        launch.run(kernel_launch, self.device_index, stream, words, self.folder)


def machine(on: str | None = None, seed: int = 0) -> Machine:
    """Where to run the kernels. on: "gpu", "cpu", or None for a GPU if there is one.

    seed: of the order in which threads run on the CPU.
    Raises ValueError for another word and where there is no GPU, MissingLibraryError without CuPy.
    """
    if on not in (None, "gpu", "cpu"):
        raise ValueError(f"on is {on!r}; expected 'gpu', 'cpu' or None for a GPU if there is one")
    if on == "cpu" or (on is None and not nvrtc.has_gpu()):
        return CpuMachine(seed=seed)
    nvrtc.cupy()  # without CuPy, the error says what to install
    if not nvrtc.has_gpu():
        raise ValueError(
            "on is 'gpu', but CuPy finds no GPU; use on='cpu' to run the same kernels on the CPU"
        )
    return GpuCheckMachine()


def uses_welford(case: Case, device: Device) -> bool:
    """Whether forward uses Welford's algorithm for the statistics, the default of `uncached`."""
    return _uses_welford(replace(case, num_rows=1, sm_margin=0, eps=0.0), device)


@lru_cache(maxsize=1024)
def _uses_welford(case: Case, device: Device) -> bool:
    own_sum = {}
    if case.has_own_sum:
        own_sum = {"input": case.x, "residual_dtype": case.added}
    problem = PlanProblem(
        "forward",
        case.norm == "layer_norm",
        case.num_cols,
        case.sum,
        y=case.dtype("y"),
        weight=case.dtype("weight"),
        bias=case.dtype("bias"),
        residual=bool(case.residual) and not case.has_own_sum,
        layout=Layout.of_new_arrays(case.num_cols),
        **own_sum,
    )
    chosen = dispatch.choose(problem, device, case.strategy, case.tile, case.statistics)
    return chosen.statistics == "welford"
