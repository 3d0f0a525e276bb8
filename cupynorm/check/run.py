"""Runs the kernels of one case, forward and backward, on a GPU or on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..dtypes import DTYPES, compute_dtype, decode, encode
from ..gpu.arrays import Rows
from ..norm.arguments import Call, backward_call, forward_call
from ..norm.request import BackwardOptions, ForwardOptions, Options, Quantization
from ..plan.dispatch import Plan
from .cases import Case, Problem
from .kernels import CpuMachine, GpuCheckMachine
from .placement import Placed, WrongWrite, empty, place

Get = Callable[[Any], np.ndarray]


class Tensors:
    """The tensors of one case, where kernels run. Outputs are NaN before they run."""

    def __init__(self, where: CpuMachine | GpuCheckMachine, case: Case) -> None:
        self.where, self.shape = where, (case.num_rows, case.num_cols)
        self.addresses: dict[str, int] = {}
        self.rows: dict[str, Rows] = {}  # those that a plan depends on
        self.outputs: dict[str, tuple[Any, str]] = {}
        self._kept: list[Any] = []  # arrays must outlive the launches that use their addresses

    def record(
        self,
        name: str,
        pointer: int,
        shape: tuple[int, ...],
        dtype: str,
        row_stride: int | None = None,
    ) -> None:
        num_rows = shape[0] if len(shape) == 2 else 1
        row_stride = shape[-1] if row_stride is None else row_stride
        self.addresses[name] = pointer
        self.rows[name] = Rows(pointer, num_rows, shape[-1], row_stride, dtype)

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        if values is not None and dtype is not None:
            array, pointer = self.where.put(encode(values, dtype))
            self._kept.append(array)
            self.record(name, pointer, values.shape, dtype)

    def make(
        self, name: str, shape: tuple[int, ...], dtype: str, result: str | None = None
    ) -> None:
        """result: its name among the results if that is another; "" if it is none of them."""
        array, pointer = self.where.empty(shape, dtype)
        self._kept.append(array)
        if result != "":
            self.outputs[result or name] = (array, dtype)
        self.record(name, pointer, shape, dtype)

    def write(self, name: str, initial: np.ndarray) -> None:
        """An output that begins with these values, in a storage dtype."""
        array, pointer = self.where.put(initial.copy())
        self.outputs[name] = (array, initial.dtype.name)
        self.record(name, pointer, initial.shape, initial.dtype.name)

    def put_seed(self, seed: int) -> None:
        array, self.addresses["dropout_seed"] = self.where.put(np.array([seed]))
        self._kept.append(array)

    def only(self, *names: str) -> dict[str, Rows]:
        return {name: self.rows[name] for name in names if name in self.rows}

    def rename(self, old: str, new: str) -> None:
        for of in (self.addresses, self.rows):
            of[new] = of[old]

    def take_out(self, *names: str) -> dict[str, tuple[Rows, int]]:
        """These, which are then absent; put_back has them again."""
        there = [name for name in names if name in self.rows]
        return {name: (self.rows.pop(name), self.addresses.pop(name)) for name in there}

    def put_back(self, removed: dict[str, tuple[Rows, int]]) -> None:
        for name, (rows, address) in removed.items():
            self.rows[name], self.addresses[name] = rows, address

    def scratch(self, shape: tuple[int, ...], dtype: str) -> int:
        """The address of memory for one launch."""
        array, pointer = self.where.empty(shape, dtype)
        self._kept.append(array)
        return pointer

    def raw(self, get: Get | None = None) -> dict[str, np.ndarray]:
        """All outputs in their storage dtypes. get: what fetches an array, where.get if None."""
        get = get or self.where.get
        return {name: get(array) for name, (array, _) in self.outputs.items()}

    def results(self, get: Get | None = None) -> dict[str, np.ndarray]:
        """All outputs as float64. get: as for raw."""
        return {name: decode(each, self.outputs[name][1]) for name, each in self.raw(get).items()}

    def launch(self, call: Call, seed: int = 0) -> None:
        addresses = dict(self.addresses)
        if call.partials_shape:
            compute = call.plan.problem.compute
            addresses["partials"] = self.scratch(call.partials_shape, compute)
        self.where.name_tensors(addresses)
        for planned, words in zip(call.launches, call.fill(addresses, seed)):
            self.where.launch(planned, words)


class _GuardedTensors(Tensors):
    """Tensors between guards (placement.py), inputs in layouts of their own.

    It is not the usual kind: a sanitizer cannot see an access to a guard.
    """

    def __init__(
        self, where: CpuMachine | GpuCheckMachine, case: Case, layouts: Mapping[str, str]
    ) -> None:
        super().__init__(where, case)
        where.begin()
        self._layouts = layouts
        self._placed: list[tuple[str, Any, Placed, str | None]] = []

    def _put(self, name: str, placed: Placed, dtype: str | None = None) -> int:
        """The address of the first element. dtype: of an output, None for an input."""
        array, pointer = self.where.put(placed.memory)
        self._placed.append((name, array, placed, dtype))
        return pointer + placed.offset

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        if values is not None and dtype is not None:
            placed = place(encode(values, dtype), self._layouts.get(name, "contiguous"))
            pointer = self._put(name, placed)
            row_stride = placed.strides[0] if values.ndim == 2 else None
            self.record(name, pointer, values.shape, dtype, row_stride)

    def make(
        self, name: str, shape: tuple[int, ...], dtype: str, result: str | None = None
    ) -> None:
        label = name if result is None else result
        placed = empty(shape, DTYPES[dtype].storage, self._layouts.get(name, "contiguous"))
        pointer = self._put(label, placed, dtype)
        if label:
            self.outputs[label] = (None, dtype)
        self.record(name, pointer, shape, dtype, placed.strides[0] if len(shape) == 2 else None)

    def write(self, name: str, initial: np.ndarray) -> None:
        dtype = initial.dtype.name
        pointer = self._put(name, place(initial), dtype)
        self.outputs[name] = (None, dtype)
        self.record(name, pointer, initial.shape, dtype)

    def scratch(self, shape: tuple[int, ...], dtype: str) -> int:
        size = (int(np.prod(shape)),)
        return self._put("scratch memory", empty(size, DTYPES[dtype].storage), dtype)

    def raw(self, get: Get | None = None) -> dict[str, np.ndarray]:
        """All outputs in their storage dtypes. Raises WrongWrite if anything else was written."""
        results, get = {}, get or self.where.get
        for name, array, placed, dtype in self._placed:
            memory = get(array)
            if dtype is None:  # an input, whose rows may share memory
                if memory.tobytes() != placed.memory.tobytes():
                    raise WrongWrite(f"{name} was written to, or what surrounds it")
                continue
            try:
                values = placed.taken_from(memory)
            except WrongWrite as error:
                raise WrongWrite(f"{name}: {error}") from None
            if name in self.outputs:
                results[name] = values
        return results


def tensors_of(
    where: CpuMachine | GpuCheckMachine, case: Case, layouts: Mapping[str, str] | None = None
) -> Tensors:
    """layouts: as for run_kernels."""
    return Tensors(where, case) if layouts is None else _GuardedTensors(where, case, layouts)


def run_kernels(
    problem: Problem,
    where: CpuMachine | GpuCheckMachine,
    layouts: Mapping[str, str] | None = None,
    *,
    forward_only: bool = False,
) -> dict[str, np.ndarray]:
    """What the kernels compute, as float64: y, mean, rstd, dx, dweight, dbias, and what the case
    has of sum, y1, dresidual, dweight1, dbias1 and recomputed.

    forward_only: runs no backward, for which a forced strategy may be too narrow.
    layouts: of inputs by name, from placement.LAYOUTS without "transposed". Every tensor then lies
    between guards, and WrongWrite is raised if anything but the outputs was written to.
    """
    return launch_kernels(problem, where, layouts, forward_only=forward_only).results()


def launch_kernels(
    problem: Problem,
    where: CpuMachine | GpuCheckMachine,
    layouts: Mapping[str, str] | None = None,
    *,
    forward_only: bool = False,
) -> Tensors:
    """As run_kernels, without waiting for results."""
    case = problem.case
    tensors = tensors_of(where, case, layouts)
    launch_options = Options(case.strategy, case.tile, case.statistics, case.sm_margin)
    run_forward(problem, tensors, launch_options)
    if not forward_only:
        _run_backward(problem, tensors, launch_options._replace(tile=None))
    return tensors


def run_forward(
    problem: Problem,
    tensors: Tensors,
    launch_options: Options,
    quantization: Quantization | None = None,
    *,
    y_dtype: str | None = None,
    amax: bool = False,
) -> Plan:
    """Its outputs are then in tensors.

    quantization: of y, whose scale, scale_inv and amax tensors has. amax: whether the amax is
    recorded beside a given scale. y_dtype: in the place of the case's.
    """
    case, shape = problem.case, tensors.shape
    y_dtype, compute = y_dtype or case.dtype("y"), compute_dtype(case.sum).name
    for name in ("weight", "bias"):
        tensors.put(name, getattr(problem, name), case.dtype(name))
    tensors.put("x", problem.x, case.x)
    tensors.put("residual", problem.residual, case.added)
    if problem.residual is not None or case.has_own_sum:
        tensors.make("sum", shape, case.sum)
    for name in ("row_scale", "weight1", "bias1"):
        tensors.put(name, getattr(problem, name), getattr(case, name))
    if case.has_second:
        tensors.make("y1", shape, y_dtype)
    elif case.y1:
        tensors.make("y1", shape, case.y1)
    if case.dropout_p:  # forward reads the seed from memory, backward is given its value
        tensors.put_seed(problem.dropout_seed)
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
        dropout_p=case.dropout_p,
        round_x_hat=case.round_x_hat,
        quantization=quantization,
        launch=launch_options,
    )
    read = ("x", "weight", "bias", "residual", "row_scale", "weight1", "bias1")
    there = tensors.only(*read, "sum", "y", "y1", *["amax"] * amax)
    call = forward_call(tensors.where.device, there, options, "forward")
    tensors.launch(call)
    return call.plan


def _run_backward(problem: Problem, tensors: Tensors, launch_options: Options) -> None:
    case, shape = problem.case, tensors.shape
    y_dtype, compute = case.dtype("y"), compute_dtype(case.sum).name
    # What backward reads of the row: y, or the sum, or x.
    tensors.take_out("dropout_seed")
    tensors.addresses.pop("dropout_seed", None)
    if case.memory_efficient:
        tensors.rename("y", "x")
        for name in ("weight", "bias"):
            if name in tensors.rows:
                tensors.rename(name, f"y_{name}")
    elif "sum" in tensors.rows:
        tensors.rename("sum", "x")
    tensors.take_out("y")
    options = BackwardOptions(
        case.norm == "layer_norm",
        shape[1:],
        case.zero_centered_weight,
        x_is_y=case.memory_efficient,
        launch=launch_options,
    )
    tensors.put("dsum", problem.dsum, case.sum)
    if case.has_second:
        # The part of y1 comes first. Its dx is the dsum of what follows.
        _run_second(problem, tensors, options)
    tensors.put("dy", problem.dy, case.dtype("dy"))
    if case.y1:
        tensors.put("dy1", problem.dy1, case.y1)
    tensors.make("dx", shape, case.x)
    for name in ("weight", "bias"):
        if name in tensors.rows:
            tensors.make(f"d{name}", shape[1:], case.dtype(name))
    if "residual" in tensors.rows and case.has_own_sum:
        tensors.make("dresidual", shape, case.added)
    if case.dx_sum:
        tensors.make("dx_sum", shape[1:], case.dx_sum)
    options = options._replace(dropout_p=case.dropout_p, recompute=case.recompute)
    names = ("x", "dsum", "y_weight", "y_bias", "dy", "weight", "row_scale")
    names += ("dx", "dweight", "dbias", "dresidual", *["dy1"] * (case.y1 is not None))
    names += ("dx_sum",) * (case.dx_sum is not None)
    if case.recompute:
        tensors.make("y", shape, y_dtype, "recomputed")
        names += ("y", "bias")
    call = backward_call(tensors.where.device, tensors.only(*names), options, compute)
    tensors.launch(call, problem.dropout_seed if case.dropout_p else 0)


def _run_second(problem: Problem, tensors: Tensors, options: BackwardOptions) -> None:
    """The backward of y1, whose dx becomes dsum."""
    case, shape = problem.case, tensors.shape
    compute = compute_dtype(case.sum).name
    removed = tensors.take_out("weight")
    tensors.put("dy1", problem.dy1, case.dtype("y"))
    tensors.rename("dy1", "dy")
    tensors.make("dx", shape, compute, "")
    for name in ("weight", "bias"):
        if f"{name}1" in tensors.rows:
            tensors.make(f"d{name}", shape[1:], getattr(case, f"{name}1"), f"d{name}1")
    if "weight1" in tensors.rows:
        tensors.rename("weight1", "weight")
    names = ("x", "dsum", "y_weight", "y_bias", "dy", "weight", "dx", "dweight", "dbias")
    tensors.launch(backward_call(tensors.where.device, tensors.only(*names), options, compute))
    tensors.rename("dx", "dsum")
    tensors.take_out("dy", "dx", "weight", "dweight", "dbias")
    tensors.put_back(removed)
