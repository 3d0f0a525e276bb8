"""Runs the kernels of one case, forward and backward, on a GPU or on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..dispatch import dispatch
from ..dispatch.devices import DEVICES, Device
from ..dispatch.dispatch import Plan
from ..dispatch.instances import Kernel, KernelLaunch
from ..dispatch.problem import Layout
from ..dispatch.problem import Problem as PlanProblem
from ..dtypes import DTYPES, compute_dtype, decode, encode
from ..gpu import launch, nvrtc, on_cpu
from ..gpu.arrays import Rows
from ..norm.arguments import NO_FUNCTORS, Call, PlacedFunctors, backward_call, forward_call
from ..norm.request import BackwardOptions, ForwardOptions, Launch, Quantization, of_backward
from ..options import check_choice
from .cases import Case, Problem


class Machine:
    """Runs kernels of a folder of sources, and has memory for their arrays.

    on: "cpu" or "gpu". device: for which kernels are planned.
    """

    on: str
    device: Device

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        """An array that holds NaN, and its address."""
        storage = np.dtype(DTYPES[dtype].storage)
        raw = np.full((*shape, storage.itemsize), 0xFF, np.uint8)
        return self.put(raw.view(storage).reshape(shape))

    def name_tensors(self, addresses: Mapping[str, int]) -> None:
        """Is told the addresses of all tensors before the launches of a call."""


class CpuMachine(Machine):
    """Runs the kernels on the CPU, planned for `device`. Arrays are NumPy's, in storage dtypes.

    seed: of the order in which threads run. sanitized: as for gpu.on_cpu.kernel.
    folder: of the sources, None for the installed ones.
    """

    on = "cpu"

    def __init__(
        self,
        device: Device = DEVICES["H200"],
        seed: int = 0,
        sanitized: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.device = device
        self.seed = seed
        self.sanitized = sanitized
        self.folder = folder

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        array = np.ascontiguousarray(array)
        return array, array.ctypes.data

    def get(self, array: np.ndarray) -> np.ndarray:
        return array

    def launch(self, kernel_launch: KernelLaunch, words: tuple) -> None:
        self.run(
            cpu_kernel(kernel_launch.kernel, self.sanitized, self.folder), kernel_launch, words
        )

    def run(self, instance: on_cpu.CpuKernel, kernel_launch: KernelLaunch, words: tuple) -> None:
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
def cpu_kernel(kernel: Kernel, sanitized: bool, folder: Path | None = None) -> on_cpu.CpuKernel:
    """A kernel compiled for the CPU, loaded once."""
    options = {"sanitized": sanitized, "folder": folder, "functors": kernel.functors}
    return on_cpu.kernel(kernel.source, kernel.name_expression, **options)


class GpuCheckMachine(Machine):
    """Runs the kernels on CuPy's current GPU. Arrays are CuPy's, in storage dtypes."""

    on = "gpu"
    folder: Path | None = None  # of the sources, None for the installed ones

    def __init__(self) -> None:
        self.device = launch.current_device()

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        there = nvrtc.cupy().asarray(array)
        return there, there.data.ptr

    def get(self, array: Any) -> np.ndarray:
        return array.get()

    def launch(self, kernel_launch: KernelLaunch, words: tuple) -> None:
        cuda = nvrtc.cupy().cuda
        loaded = launch.LoadedKernel(kernel_launch, cuda.runtime.getDevice(), self.folder)
        loaded.enqueue(cuda.get_current_stream().ptr, words)


def machine(on: str | None = None, seed: int = 0) -> Machine:
    """Where to run the kernels. on: "gpu", "cpu", or None for a GPU if there is one.

    seed: of the order in which threads run on the CPU. Raises ValueError for another word and where
    there is no GPU, MissingLibraryError without CuPy.
    """
    check_choice("on", on, ("gpu", "cpu", None), " for a GPU if there is one")
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
    own_sum = {}
    if case.has_own_sum:
        own_sum = {"input": case.x, "residual_dtype": case.added}
    shape = ("forward", case.norm == "layer_norm", case.num_cols, case.sum)
    dtypes = {name: case.dtype(name) for name in ("y", "weight", "bias")}
    residual = bool(case.residual) and not case.has_own_sum
    layout = Layout.of_new_arrays(case.num_cols)
    problem = PlanProblem(*shape, **dtypes, residual=residual, layout=layout, **own_sum)
    chosen = dispatch.choose(problem, device, case.strategy, case.tile, case.statistics)
    return chosen.statistics == "welford"


class Tensors:
    """The tensors of one case, where kernels run. Outputs are NaN before they run.

    rows: name -> where a tensor is. Those that a plan depends on are passed on as a part of it.
    """

    def __init__(self, where: Machine) -> None:
        self.where = where
        self.rows: dict[str, Rows] = {}
        self._outputs: dict[str, tuple[Any, str]] = {}
        self._kept: list[Any] = []  # arrays must outlive the launches that use their addresses

    def _add(self, name: str, made: tuple[Any, int], shape: tuple[int, ...], dtype: str) -> None:
        array, pointer = made
        self._kept.append(array)
        num_rows = shape[0] if len(shape) == 2 else 1
        self.rows[name] = Rows(pointer, num_rows, shape[-1], shape[-1], dtype)

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        """An input, if it is there. An int64 is a seed."""
        if values is not None and dtype is not None:
            values = values if dtype == "int64" else encode(values, dtype)
            self._add(name, self.where.put(values), values.shape, dtype)

    def make(self, name: str, shape: tuple[int, ...], dtype: str, is_result: bool = True) -> None:
        """An output. is_result: whether results() has it."""
        made = self.where.empty(shape, dtype)
        self._add(name, made, shape, dtype)
        if is_result:
            self._outputs[name] = (made[0], dtype)

    def write(self, name: str, initial: np.ndarray) -> None:
        """An output that begins with these values, in a storage dtype."""
        made = self.where.put(initial.copy())
        self._add(name, made, initial.shape, initial.dtype.name)
        self._outputs[name] = (made[0], initial.dtype.name)

    def some(self, *names: str, **renamed: str) -> dict[str, Rows]:
        """Those that are there. renamed: a kernel's name for a tensor -> its name here."""
        named = dict(zip(names, names)) | renamed
        return {name: self.rows[own] for name, own in named.items() if own in self.rows}

    def raw(self) -> dict[str, np.ndarray]:
        """All outputs in their storage dtypes."""
        return {name: self.where.get(array) for name, (array, _) in self._outputs.items()}

    def results(self) -> dict[str, np.ndarray]:
        """All outputs as float64."""
        return {name: decode(each, self._outputs[name][1]) for name, each in self.raw().items()}

    def launch(self, call: Call, operands: Mapping[str, Rows]) -> None:
        """operands: by the names of the kernels."""
        if call.partials_shape:
            self.make("partials", call.partials_shape, call.plan.problem.compute, False)
        operands = {**operands, **self.some("partials")}
        addresses = {name: each.pointer for name, each in operands.items()}
        self.where.name_tensors(addresses)
        for planned, words in zip(call.launches, call.fill(addresses)):
            self.where.launch(planned, words)


def run_kernels(
    problem: Problem, where: Machine, *, forward_only: bool = False
) -> dict[str, np.ndarray]:
    """What the kernels compute, as float64: y, mean, rstd, dx, dweight, dbias, and what the case
    has of sum, dresidual and recomputed.

    forward_only: runs no backward, for which a forced strategy may be too narrow.
    """
    return launch_kernels(problem, where, forward_only=forward_only).results()


def launch_kernels(problem: Problem, where: Machine, *, forward_only: bool = False) -> Tensors:
    """As run_kernels, without waiting for results."""
    case, tensors = problem.case, Tensors(where)
    options = Launch(case.strategy, case.tile, case.statistics, case.sm_margin)
    run_forward(problem, tensors, options)
    if not forward_only:
        run_backward(problem, tensors, of_backward(options))
    return tensors


def run_forward(
    problem: Problem,
    tensors: Tensors,
    launch: Launch,
    quantization: Quantization | None = None,
    *,
    y_dtype: str | None = None,
    amax: bool = False,
    functors: PlacedFunctors = NO_FUNCTORS,
    applies_load: bool = False,
) -> Plan:
    """Its outputs are then in tensors.

    quantization: of y, whose scale, scale_inv and amax tensors has. amax: whether the amax is
    recorded beside a given scale. y_dtype: in the place of the case's. functors: tensors has their
    arrays and seeds. applies_load: what a functor makes of x is not kept, and made again in
    backward.
    """
    case, shape = problem.case, problem.x.shape
    y_dtype, compute = y_dtype or case.dtype("y"), compute_dtype(case.sum).name
    for name in ("weight", "bias", "x"):
        tensors.put(name, getattr(problem, name), case.dtype(name))
    tensors.put("residual", problem.residual, case.added)
    if problem.residual is not None or (functors.load and not applies_load):
        tensors.make("sum", shape, case.sum)
    if quantization is None:
        tensors.make("y", shape, y_dtype)
    else:
        tensors.write("y", np.full(shape, 0xFF, np.uint8))
        tensors.rows["y"] = tensors.rows["y"]._replace(dtype=quantization.dtype)
    if case.norm == "layer_norm":
        tensors.make("mean", shape[:1], compute)
    tensors.make("rstd", shape[:1], compute)
    options = ForwardOptions(
        case.norm == "layer_norm",
        shape[1:],
        case.eps,
        case.zero_centered_weight,
        round_x_hat=case.round_x_hat,
        quantization=quantization,
        launch=launch,
    )
    planned = tensors.some("x", "weight", "bias", "residual", "sum", "y", *["amax"] * amax)
    call = forward_call(tensors.where.device, planned, options, "forward", functors)
    tensors.launch(call, tensors.rows)
    return call.plan


def run_backward(
    problem: Problem, tensors: Tensors, launch: Launch, functors: PlacedFunctors = NO_FUNCTORS
) -> Plan:
    """After run_forward, with the same functors."""
    case, shape = problem.case, problem.x.shape
    compute, has_sum = compute_dtype(case.sum).name, "sum" in tensors.rows
    tensors.put("dsum", problem.dsum, case.sum)
    tensors.put("dy", problem.dy, case.dtype("dy"))
    tensors.make("dx", shape, case.x)
    for name in ("weight", "bias"):
        if name in tensors.rows:
            tensors.make(f"d{name}", shape[1:], case.dtype(name))
    if case.has_own_sum or (functors.load and case.added):
        tensors.make("dresidual", shape, case.added)
    operands = tensors.some(x="sum" if has_sum else "x")
    operands |= tensors.some("dsum", "dy", "weight", "dx", "dweight", "dbias", "dresidual")
    if has_sum and any(each.functor.reads_argument for each in functors.load):
        operands |= tensors.some(input="x")
    if functors.store:
        operands |= tensors.some("bias")
    if case.recompute:
        tensors.make("recomputed", shape, case.dtype("y"))
        operands |= tensors.some("bias", y="recomputed")
    options = BackwardOptions(
        case.norm == "layer_norm",
        shape[1:],
        case.zero_centered_weight,
        recompute=case.recompute,
        applies_load=bool(functors.load) and not has_sum,
        launch=launch,
    )
    call = backward_call(tensors.where.device, operands, options, compute, functors)
    tensors.launch(call, tensors.rows | operands | tensors.some("mean", "rstd"))
    return call.plan
