"""Runs the kernels of one case, forward and backward, on a GPU or on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dispatch.dispatch import Plan
from ..dtypes import compute_dtype, decode, encode
from ..gpu.arrays import Rows
from ..norm.arguments import NO_FUNCTORS, Call, PlacedFunctors, backward_call, forward_call
from ..norm.request import BackwardOptions, ForwardOptions, Launch, Quantization, of_backward
from .cases import Problem
from .kernels import Machine


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
        """An input, if it is there."""
        if values is not None and dtype is not None:
            self._add(name, self.where.put(encode(values, dtype)), values.shape, dtype)

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

    def put_seed(self, name: str, seed: int) -> None:
        self._add(name, self.where.put(np.array([seed])), (1,), "int64")

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
