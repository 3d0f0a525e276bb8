"""Runs the kernels of one case, forward and backward, on a GPU or on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dtypes import DTYPES, compute_dtype, decode, encode
from ..gpu.arrays import Rows
from ..norm.arguments import NO_FUNCTORS, Call, PlacedFunctors, backward_call, forward_call
from ..norm.request import BackwardOptions, ForwardOptions, Launch, Quantization, of_backward
from ..plan.dispatch import Plan
from .cases import Problem
from .kernels import Machine
from .placement import Placed, WrongWrite, empty, place


class Tensors:
    """The tensors of one case, where kernels run. Outputs are NaN before they run.

    rows: name -> where a tensor is. Those that a plan depends on are passed on as a part of it.
    """

    def __init__(self, where: Machine) -> None:
        self.where = where
        self.rows: dict[str, Rows] = {}
        self._outputs: dict[str, tuple[Any, str]] = {}
        self._kept: list[Any] = []  # arrays must outlive the launches that use their addresses

    def record(
        self, name: str, pointer: int, shape: tuple[int, ...], dtype: str, strides: tuple = ()
    ) -> None:
        """strides: in elements, of an array that is not contiguous."""
        is_matrix = len(shape) == 2
        row_stride = strides[0] if strides and is_matrix else shape[-1]
        self.rows[name] = Rows(pointer, shape[0] if is_matrix else 1, shape[-1], row_stride, dtype)

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        """An input, if it is there."""
        if values is not None and dtype is not None:
            array, pointer = self.where.put(encode(values, dtype))
            self._kept.append(array)
            self.record(name, pointer, values.shape, dtype)

    def make(self, name: str, shape: tuple[int, ...], dtype: str, is_result: bool = True) -> None:
        """An output. is_result: whether results() has it."""
        array, pointer = self.where.empty(shape, dtype)
        self._kept.append(array)
        if is_result:
            self._outputs[name] = (array, dtype)
        self.record(name, pointer, shape, dtype)

    def write(self, name: str, initial: np.ndarray) -> None:
        """An output that begins with these values, in a storage dtype."""
        array, pointer = self.where.put(initial.copy())
        self._outputs[name] = (array, initial.dtype.name)
        self.record(name, pointer, initial.shape, initial.dtype.name)

    def put_seed(self, name: str, seed: int) -> None:
        array, pointer = self.where.put(np.array([seed]))
        self._kept.append(array)
        self.record(name, pointer, (1,), array.dtype.name)

    def some(self, *names: str, **renamed: str) -> dict[str, Rows]:
        """Those that are there. renamed: a kernel's name for a tensor -> its name here."""
        named = dict(zip(names, names)) | renamed
        return {name: self.rows[own] for name, own in named.items() if own in self.rows}

    def raw(self, again: bool = False) -> dict[str, np.ndarray]:
        """All outputs in their storage dtypes. again: of launches that a machine repeated."""
        get = self.where.get_again if again else self.where.get
        return {name: get(array) for name, (array, _) in self._outputs.items()}

    def results(self, again: bool = False) -> dict[str, np.ndarray]:
        """All outputs as float64. again: as for raw."""
        raw = self.raw(again)
        return {name: decode(each, self._outputs[name][1]) for name, each in raw.items()}

    def launch(self, call: Call, operands: Mapping[str, Rows]) -> None:
        """operands: by the names of the kernels."""
        if call.partials_shape:
            self.make("partials", call.partials_shape, call.plan.problem.compute, False)
        operands = {**operands, **self.some("partials")}
        addresses = {name: each.pointer for name, each in operands.items()}
        self.where.name_tensors(addresses)
        for planned, words in zip(call.launches, call.fill(addresses)):
            self.where.launch(planned, words)


class GuardedTensors(Tensors):
    """Tensors between guards (placement.py), inputs in layouts of their own.

    It is not the usual kind: a sanitizer cannot see an access to a guard.
    placed: the name of each, its array, where it is in that, and whether it is an input.
    """

    def __init__(self, where: Machine, layouts: Mapping[str, str]) -> None:
        super().__init__(where)
        where.begin()
        self._layouts = layouts
        self.placed: list[tuple[str, Any, Placed, bool]] = []

    def _add(self, name: str, placed: Placed, dtype: str, is_input: bool) -> None:
        array, pointer = self.where.put(placed.memory)
        self.placed.append((name, array, placed, is_input))
        self.record(name, pointer + placed.offset, placed.shape, dtype, placed.strides)

    def _layout(self, name: str) -> str:
        return self._layouts.get(name, "contiguous")

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        if values is not None and dtype is not None:
            placed = place(encode(values, dtype), self._layout(name))
            self._add(name, placed, dtype, is_input=True)

    def make(self, name: str, shape: tuple[int, ...], dtype: str, is_result: bool = True) -> None:
        if len(shape) > 2:  # partial sums
            shape = (math.prod(shape[:-1]), shape[-1])
        placed = empty(shape, DTYPES[dtype].storage, self._layout(name))
        self._add(name, placed, dtype, is_input=False)
        if is_result:
            self._outputs[name] = (None, dtype)

    def write(self, name: str, initial: np.ndarray) -> None:
        self._add(name, place(initial), initial.dtype.name, is_input=False)
        self._outputs[name] = (None, initial.dtype.name)

    def raw(self, again: bool = False) -> dict[str, np.ndarray]:
        """All outputs in their storage dtypes. Raises WrongWrite if anything else was written."""
        results, get = {}, self.where.get_again if again else self.where.get
        for name, array, placed, is_input in self.placed:
            memory = get(array)
            if is_input:  # its rows may share memory
                if memory.tobytes() != placed.memory.tobytes():
                    raise WrongWrite(f"{name} was written to, or what surrounds it")
                continue
            try:
                values = placed.taken_from(memory)
            except WrongWrite as error:
                raise WrongWrite(f"{name}: {error}") from None
            if name in self._outputs:
                results[name] = values
        return results


def tensors_of(where: Machine, layouts: Mapping[str, str] | None = None) -> Tensors:
    """layouts: as for run_kernels."""
    return Tensors(where) if layouts is None else GuardedTensors(where, layouts)


def run_kernels(
    problem: Problem,
    where: Machine,
    layouts: Mapping[str, str] | None = None,
    *,
    forward_only: bool = False,
) -> dict[str, np.ndarray]:
    """What the kernels compute, as float64: y, mean, rstd, dx, dweight, dbias, and what the case
    has of sum, dresidual and recomputed.

    forward_only: runs no backward, for which a forced strategy may be too narrow.
    layouts: of inputs by name, from placement.LAYOUTS without "transposed". Every tensor then lies
    between guards, and WrongWrite is raised if anything but the outputs was written to.
    """
    return launch_kernels(problem, where, layouts, forward_only=forward_only).results()


def launch_kernels(
    problem: Problem,
    where: Machine,
    layouts: Mapping[str, str] | None = None,
    *,
    forward_only: bool = False,
) -> Tensors:
    """As run_kernels, without waiting for results."""
    case = problem.case
    tensors = tensors_of(where, layouts)
    launch = Launch(case.strategy, case.tile, case.statistics, case.sm_margin)
    run_forward(problem, tensors, launch)
    if not forward_only:
        run_backward(problem, tensors, of_backward(launch))
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
) -> Plan:
    """Its outputs are then in tensors.

    quantization: of y, whose scale, scale_inv and amax tensors has. amax: whether the amax is
    recorded beside a given scale. y_dtype: in the place of the case's. functors: tensors has their
    arrays and seeds.
    """
    case, shape = problem.case, problem.x.shape
    y_dtype, compute = y_dtype or case.dtype("y"), compute_dtype(case.sum).name
    for name in ("weight", "bias", "x"):
        tensors.put(name, getattr(problem, name), case.dtype(name))
    tensors.put("residual", problem.residual, case.added)
    if problem.residual is not None or functors.load:
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
) -> None:
    """After run_forward, with the same functors."""
    case, shape = problem.case, problem.x.shape
    compute = compute_dtype(case.sum).name
    options = BackwardOptions(
        case.norm == "layer_norm",
        shape[1:],
        case.zero_centered_weight,
        launch=launch,
    )
    statistics = tensors.some("mean", "rstd")
    operands = tensors.some(x="sum" if "sum" in tensors.rows else "x")
    tensors.put("dsum", problem.dsum, case.sum)
    operands |= tensors.some("dsum")
    tensors.put("dy", problem.dy, case.dtype("dy"))
    tensors.make("dx", shape, case.x)
    for name in ("weight", "bias"):
        if name in tensors.rows:
            tensors.make(f"d{name}", shape[1:], case.dtype(name))
    if case.has_own_sum or (functors.load and case.added):
        tensors.make("dresidual", shape, case.added)
    operands |= tensors.some("dy", "weight", "dx", "dweight", "dbias", "dresidual")
    if any(each.functor.reads_argument for each in functors.load):
        operands |= tensors.some(input="x")
    if case.recompute:
        tensors.make("recomputed", shape, case.dtype("y"))
        operands |= tensors.some("bias", y="recomputed")
    options = options._replace(recompute=case.recompute)
    call = backward_call(tensors.where.device, operands, options, compute, functors)
    tensors.launch(call, tensors.rows | operands | statistics)
