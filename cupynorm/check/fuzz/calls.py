"""Starts a draw: by the kernels' argument structs, or by the public functions on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from ... import functional
from ...dtypes import DTYPES, decode
from ...gpu import arrays, nvrtc
from ...gpu.arrays import CuPyLibrary
from ...norm.request import Launch
from ..cases import Problem
from ..kernels import CpuMachine, Machine
from ..placement import Placed
from ..quantized import launch_8_bits
from ..run import GuardedTensors, launch_kernels
from .draws import Draw
from .memory import OneCallMachine

Results = dict[str, np.ndarray]
Read = Callable[[], Results]
_NUM_STARTED = 8  # calls of a process that a GPU has at a time


@cache
def machines(on: str) -> list[Machine]:
    """Where the kernels of calls run, a machine for each call that is started before the results of
    an earlier one are awaited. on: "gpu" or "cpu".
    """
    if on == "cpu":
        return [CpuMachine()]
    return [OneCallMachine() for _ in range(_NUM_STARTED)]


def machine(on: str) -> Machine:
    """Where one call after another runs. on: "gpu" or "cpu"."""
    return machines(on)[0]


def start(drawn: Draw, problem: Problem, where: Machine, times: int = 1) -> list[Read]:
    """Starts a call, and starts it again. times: 1 or 2.

    Returns for each time what reads the outputs after where.wait(): as float64, and those of 8-bit
    calls in their storage dtypes. That raises WrongWrite. start raises what the call raises.
    """

    def launched() -> Callable[..., Results]:
        if drawn.route != "kernels":
            return _PublicCall(drawn, problem, where).results
        if drawn.how is None:
            return launch_kernels(problem, where, drawn.layouts).results
        return launch_8_bits(problem, drawn.how, where, drawn.layouts)[0].raw

    if where.on == "cpu":
        return [launched() for _ in range(times)]
    read = launched()
    run = where.end(repeats=times == 2)
    first = cache(read)
    # What has the same bytes is not read again.
    return [first, lambda: first() if where.is_repeated(run) else read(again=True)][:times]


def _as_cupy(memory: Any, placed: Placed, dtype: str) -> Any:
    """The array that is placed in these bytes, a CuPy array."""
    elements = memory.view(CuPyLibrary.dtype(dtype))[placed.first :]
    strides = tuple(stride * elements.itemsize for stride in placed.strides)
    return nvrtc.cupy().lib.stride_tricks.as_strided(elements, placed.shape, strides)


def _as_torch(memory: Any, placed: Placed, dtype: str) -> Any:
    """The tensor that is placed in these bytes, a CuPy array."""
    torch = sys.modules["torch"]
    elements = torch.from_dlpack(memory).view(getattr(torch, dtype))
    first = elements.storage_offset() + placed.first
    return elements.as_strided(placed.shape, placed.strides, first)


def _negated(drawn: Draw, names: tuple[str, ...]) -> set[str]:
    """Of one call of tensors in eight, those that are views that negate their memory."""
    if drawn.route == "cupy" or drawn.seed % 8 != 5:
        return set()
    return {name for at, name in enumerate(names) if (drawn.seed >> (3 + at)) % 3 == 0}


class _PublicCall:
    """A forward and a backward by the public functions, which where.end() starts."""

    def __init__(self, drawn: Draw, problem: Problem, where: OneCallMachine) -> None:
        case = problem.case
        self.drawn, self.problem, self.case, self._where = drawn, problem, case, where
        self.is_layer_norm = case.norm == "layer_norm"
        y = case.dtype("y")
        self.dtypes = {
            "x": case.x,
            "weight": case.dtype("weight"),
            "bias": case.dtype("bias"),
            "residual": case.added,
            "dy": case.dtype("dy"),
            "dsum": case.sum,
        }
        self._tensors = GuardedTensors(where, drawn.layouts)
        negated = _negated(drawn, tuple(self.dtypes))
        for name, dtype in self.dtypes.items():
            values = getattr(problem, name)
            values = -values if values is not None and name in negated else values
            self._tensors.put(name, values, dtype)
        if drawn.seed % 3 == 0 and drawn.route != "autograd":
            self._tensors.make("out", problem.x.shape, y, is_result=False)
        if drawn.route != "cupy":
            import torch  # noqa: F401
        view = _as_cupy if drawn.route == "cupy" else _as_torch
        self.operands: dict[str, Any] = dict.fromkeys((*self.dtypes, "out")) | {
            name: view(where.there(array), placed, self._tensors.rows[name].dtype)
            for name, array, placed, _ in self._tensors.placed
        }
        for name in negated:
            if self.operands[name] is not None:
                self.operands[name] = sys.modules["torch"]._neg_view(self.operands[name])
        # Of each time: the outputs, and their shapes, dtypes and bytes by name.
        self._made: list[tuple[dict, dict[str, tuple[tuple[int, ...], str, np.ndarray]]]] = []
        where.call(self.run)

    def run(self) -> None:
        """Makes the call without waiting for outputs."""
        with self._own_stream() if self.drawn.seed % 4 == 0 else nullcontext():
            made = self._recorded() if self.drawn.route == "autograd" else self._explicit()
        fetched = {}
        for name, array in made.items():
            if array is not None:
                is_torch = arrays.is_torch(array)
                made[name] = array = (
                    array.contiguous() if is_torch else nvrtc.cupy().ascontiguousarray(array)
                )
                kind = (tuple(array.shape), arrays.dtype_name(array))
                fetched[name] = (*kind, self._where.fetch(array))
        self._made.append((made, fetched))  # outputs are kept until they are copied

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """A stream of its own, which begins after all earlier work and ends before later work."""
        own, current = self._where.own_stream, nvrtc.cupy().cuda.get_current_stream()
        own.wait_event(current.record())
        cuda = None if self.drawn.route == "cupy" else sys.modules["torch"].cuda
        with own if cuda is None else cuda.stream(cuda.ExternalStream(own.ptr)):
            yield
        current.wait_event(own.record())

    def results(self, again: bool = False) -> Results:
        """The outputs as float64. Raises WrongWrite if inputs or guards have changed."""
        self._tensors.raw(again)
        _, fetched = self._made[again]
        return {
            name: decode(memory.view(DTYPES[dtype].storage).reshape(shape), dtype)
            for name, (shape, dtype, memory) in fetched.items()
        }

    def _forward_options(self) -> dict[str, Any]:
        case, operands = self.case, self.operands
        return {
            "residual": operands["residual"],
            "zero_centered_weight": case.zero_centered_weight,
            "out_dtype": case.y,
            "round_x_hat": case.round_x_hat,
            "launch": Launch(case.strategy, case.tile, case.statistics, case.sm_margin),
        }

    def _explicit(self) -> dict[str, Any]:
        """By layer_norm_forward and layer_norm_backward, or those of rms_norm."""
        case, operands = self.case, self.operands
        options = self._forward_options() | {"out": operands["out"]}
        forward = (
            functional.layer_norm_forward if self.is_layer_norm else functional.rms_norm_forward
        )
        options |= {"weight": operands["weight"], "bias": operands["bias"], "eps": case.eps}
        made = forward(operands["x"], case.num_cols, **options)
        results = {name: getattr(made, name) for name in ("y", "mean", "rstd")}
        if operands["residual"] is not None:
            results["sum"] = made.sum
        return results | self._explicit_backward(made)

    def _explicit_backward(self, made: Any) -> dict[str, Any]:
        case, operands, dtypes = self.case, self.operands, self.dtypes
        names = ["dx", *(f"d{name}" for name in ("weight", "bias") if operands[name] is not None)]
        if case.has_own_sum:
            names.append("dresidual")
        options = {
            "zero_centered_weight": case.zero_centered_weight,
            "dsum": operands["dsum"],
            "gradients": tuple(names),
            "dbias_dtype": dtypes["bias"],
            "launch": Launch(case.strategy, sm_margin=case.sm_margin),
        }
        if case.has_own_sum:
            options |= {"dx_dtype": case.x, "dresidual_dtype": case.added}
        statistics = (made.mean, made.rstd) if self.is_layer_norm else (made.rstd,)
        backward = (
            functional.layer_norm_backward if self.is_layer_norm else functional.rms_norm_backward
        )
        rows = operands["dy"], made.sum, case.num_cols, *statistics
        found = backward(*rows, operands["weight"], **options)
        return {name: getattr(found, name) for name in names}

    def _recorded(self) -> dict[str, Any]:
        """By layer_norm or rms_norm and torch's autograd."""
        case, operands, torch = self.case, self.operands, sys.modules["torch"]
        given = ("x", "weight", "bias", "residual")
        leaves = {
            name: operands[name].detach().requires_grad_()
            for name in given
            if operands[name] is not None
        }
        options = self._forward_options() | leaves | {"return_residual": True}
        x, weight, bias = options.pop("x"), options.pop("weight", None), options.pop("bias", None)
        norm = functional.layer_norm
        if not self.is_layer_norm:
            norm, options["bias"] = functional.rms_norm, bias
        affine = (weight, bias) if self.is_layer_norm else (weight,)
        made = norm(x, (case.num_cols,), *affine, eps=case.eps, **options)
        results = dict(zip(("y", "sum"), made))
        upstream = {name: operands[f"d{name}"] for name in results}
        there = [name for name in results if upstream[name] is not None]
        gradients = torch.autograd.grad(
            [results[name] for name in there], list(leaves.values()), [upstream[n] for n in there]
        )
        if operands["residual"] is None:
            del results["sum"]  # it is x
        results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients)}
        if not case.has_own_sum:
            results.pop("dresidual", None)  # it is dx
        return {name: array.detach() for name, array in results.items()}
