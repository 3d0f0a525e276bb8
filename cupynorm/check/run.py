"""Runs the kernels of one case, forward and backward, on a GPU or on the CPU.

Inputs may have layouts of their own. Every tensor then lies between guards: bytes of 0xFF, which no
kernel may change. Read as a float they are NaN, so that a kernel that reads them spoils its result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import DTYPES, compute_dtype, decode, encode
from ..gpu.arrays import Rows
from ..norm.arguments import NO_FUNCTORS, Call, PlacedFunctors, backward_call, forward_call
from ..norm.request import BackwardOptions, ForwardOptions, Launch, Quantization, of_backward
from ..plan.dispatch import Plan
from .cases import Problem
from .kernels import Machine

LAYOUTS = ("contiguous", "gap", "misaligned", "broadcast", "reversed", "transposed")
GUARD_BYTES = 256  # what new arrays are aligned to
_GAP = 16  # elements between two rows
_FILL = 0xFF


class WrongWrite(RuntimeError):
    """A kernel has written outside its outputs, or to an input."""


class Placed(NamedTuple):
    """A tensor in memory of its own.

    memory: one dimension, guards included. first: the index of the first element. strides: of each
    dimension, in elements.
    """

    memory: np.ndarray
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def offset(self) -> int:
        """Of the first element, in bytes."""
        return self.first * self.memory.itemsize

    def view(self) -> np.ndarray:
        """The tensor in its memory."""
        strides = tuple(stride * self.memory.itemsize for stride in self.strides)
        return np.ndarray(self.shape, self.memory.dtype, self.memory, self.offset, strides)

    def taken_from(self, memory: np.ndarray, name: str = "the tensor") -> np.ndarray:
        """The tensor in a copy of its memory, after checking that the rest is untouched.

        Not of layout broadcast, whose rows share memory. Raises WrongWrite.
        """
        values = np.ascontiguousarray(self._replace(memory=memory).view())
        written = [np.count_nonzero(each.view(np.uint8) != _FILL) for each in (memory, values)]
        if written[0] != written[1]:
            raise WrongWrite(f"{name}: {written[0] - written[1]} bytes outside it were written to")
        return values


def empty(shape: tuple[int, ...], dtype: np.dtype, layout: str = "contiguous") -> Placed:
    """Memory for a tensor [num_rows, num_cols] or [n]. misaligned: by one element."""
    dtype = np.dtype(dtype)
    guard = GUARD_BYTES // dtype.itemsize
    num_cols = shape[-1] if shape else 1
    num_rows = num_lines = shape[0] if len(shape) == 2 else 1
    row_stride, col_stride, first = num_cols, 1, guard
    if layout == "gap":
        row_stride += _GAP
    elif layout == "misaligned":
        first += 1
    elif layout == "broadcast":
        row_stride, num_lines = 0, 1
    elif layout == "reversed":
        first += max(0, num_rows - 1) * num_cols
        row_stride = -num_cols
    elif layout == "transposed":
        row_stride, col_stride = 1, num_rows
    size = guard + 1 + num_lines * (num_cols + _GAP) + guard
    memory = np.full(size * dtype.itemsize, _FILL, np.uint8).view(dtype)
    strides = (row_stride, col_stride)[2 - len(shape) :] if shape else ()
    return Placed(memory, first, shape, strides)


def place(values: np.ndarray, layout: str = "contiguous") -> Placed:
    """values in memory of that layout. broadcast: every row is the first one."""
    placed = empty(values.shape, values.dtype, layout)
    if layout == "broadcast":
        values = values[:1]
        placed._replace(shape=values.shape).view()[...] = values
    else:
        placed.view()[...] = values
    return placed


class Tensors:
    """The tensors of one case, where kernels run. Outputs are NaN before they run.

    layouts: of inputs by name. None: contiguous, without guards, in which a sanitizer would see no
    access. rows: name -> where a tensor is. Those that a plan depends on are passed on as a part of
    it.
    """

    def __init__(self, where: Machine, layouts: Mapping[str, str] | None = None) -> None:
        self.where = where
        self.rows: dict[str, Rows] = {}
        self._layouts = layouts
        # name -> array, where the tensor is in it, its dtype, and "input", "output" or "scratch".
        # Arrays must outlive the launches that use their addresses.
        self._kept: dict[str, tuple[Any, Placed | None, str, str]] = {}

    def _add(
        self, name: str, shape: tuple[int, ...], dtype: str, kind: str, values: Any = None
    ) -> None:
        """values: in a storage dtype; None: not written yet."""
        if self._layouts is None:
            made = self.where.empty(shape, dtype) if values is None else self.where.put(values)
            (array, pointer), placed = made, None
        else:
            if len(shape) > 2:  # partial sums
                shape = (math.prod(shape[:-1]), shape[-1])
            layout = self._layouts.get(name, "contiguous")
            storage = DTYPES[dtype].storage if values is None else values.dtype
            placed = empty(shape, storage, layout) if values is None else place(values, layout)
            array, pointer = self.where.put(placed.memory)
            pointer += placed.offset
        self._kept[name] = (array, placed, dtype, kind)
        is_matrix = len(shape) == 2
        row_stride = placed.strides[0] if placed and is_matrix else shape[-1]
        self.rows[name] = Rows(pointer, shape[0] if is_matrix else 1, shape[-1], row_stride, dtype)

    def put(self, name: str, values: np.ndarray | None, dtype: str | None) -> None:
        """An input, if it is there."""
        if values is not None and dtype is not None:
            self._add(name, values.shape, dtype, "input", encode(values, dtype))

    def make(self, name: str, shape: tuple[int, ...], dtype: str, is_result: bool = True) -> None:
        """An output. is_result: whether results() has it."""
        self._add(name, shape, dtype, "output" if is_result else "scratch")

    def write(self, name: str, initial: np.ndarray) -> None:
        """An output that begins with these values, in a storage dtype."""
        self._add(name, initial.shape, initial.dtype.name, "output", initial.copy())

    def put_seed(self, name: str, seed: int) -> None:
        self._add(name, (1,), "int64", "input", np.array([seed]))

    def some(self, *names: str, **renamed: str) -> dict[str, Rows]:
        """Those that are there. renamed: a kernel's name for a tensor -> its name here."""
        named = dict(zip(names, names)) | renamed
        return {name: self.rows[own] for name, own in named.items() if own in self.rows}

    def raw(self) -> dict[str, np.ndarray]:
        """All outputs in their storage dtypes.

        Raises WrongWrite if anything else was written, where there are guards.
        """
        results = {}
        for name, (array, placed, _, kind) in self._kept.items():
            if placed is None:
                if kind == "output":
                    results[name] = self.where.get(array)
                continue
            memory = self.where.get(array)
            if kind == "input":  # its rows may share memory
                if memory.tobytes() != placed.memory.tobytes():
                    raise WrongWrite(f"{name} was written to, or what surrounds it")
                continue
            values = placed.taken_from(memory, name)
            if kind == "output":
                results[name] = values
        return results

    def results(self) -> dict[str, np.ndarray]:
        """All outputs as float64."""
        return {name: decode(each, self._kept[name][2]) for name, each in self.raw().items()}

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
    problem: Problem,
    where: Machine,
    layouts: Mapping[str, str] | None = None,
    *,
    forward_only: bool = False,
) -> dict[str, np.ndarray]:
    """What the kernels compute, as float64: y, mean, rstd, dx, dweight, dbias, and what the case
    has of sum, dresidual and recomputed.

    forward_only: runs no backward, for which a forced strategy may be too narrow.
    layouts: of inputs by name, from LAYOUTS without "transposed". Every tensor then lies
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
    tensors = Tensors(where, layouts)
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
