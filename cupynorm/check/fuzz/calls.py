"""Starts a draw: by the kernels' argument structs, or by the public functions on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...dtypes import DTYPES, encode
from ...norm import api
from ...norm import backward as backwards
from ..cases import Case, Problem
from ..kernels import CpuMachine
from ..placement import Placed, WrongWrite, empty, place
from ..quantized import launch_8_bits
from ..run import Tensors, launch_kernels
from .draws import Draw
from .memory import CuPy, Library, Made, OneCallMachine, Operands, Torch

Machine = CpuMachine | OneCallMachine
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
    if drawn.route != "kernels":
        call = _PublicCall(drawn, problem, where)
        started = [call.start() for _ in range(times)]
        return _reads(started[0].read, started[-1].is_like(started[0]), started[-1].read)[:times]
    given = (problem, where, drawn.layouts)
    if drawn.how is None:
        return _start(where, times, "results", lambda: launch_kernels(*given))
    return _start(where, times, "raw", lambda: launch_8_bits(problem, drawn.how, *given[1:])[0])


def _start(where: Machine, times: int, read: str, launch: Callable[[], Tensors]) -> list[Read]:
    """read: the method of Tensors that reads the outputs."""
    if where.on == "cpu":
        return [getattr(launch(), read) for _ in range(times)]
    read_with = getattr(launch(), read)
    run = where.end(repeats=times == 2)
    is_repeated, again = partial(where.is_repeated, run), partial(read_with, where.get_again)
    return _reads(read_with, is_repeated, again)[:times]


def _reads(first: Read, is_repeated: Callable[[], bool], again: Read) -> list[Read]:
    """again is not read where it has the same bytes as first."""
    first = cache(first)
    return [first, lambda: first() if is_repeated() else again()]


class _Out:
    """An array for y between guards."""

    def __init__(self, case: Case, library: Library) -> None:
        dtype, self._library = case.dtype("y"), library
        self._placed = empty((case.num_rows, case.num_cols), DTYPES[dtype].storage)
        self._memory = library.put(self._placed.memory.view(np.uint8))
        self.array = library.view(self._memory, 0, self._placed, dtype)

    def fetch(self) -> Callable[[], None]:
        """Reads it. Returns a check, which raises WrongWrite if its guards have changed."""
        after = self._library.fetch(self._memory)

        def check() -> None:
            try:
                self._placed.taken_from(after.view(self._placed.memory.dtype))
            except WrongWrite as error:
                raise WrongWrite(f"out: {error}") from None

        return check


class _Made(NamedTuple):
    """What a public call has made, after where.wait(). checks: they raise WrongWrite."""

    outputs: Made
    checks: list[Callable[[], None]]

    def check(self) -> None:
        for each in self.checks:
            each()

    def read(self) -> Results:
        self.check()
        return self.outputs.float64()

    def is_like(self, first: _Made) -> Callable[[], bool]:
        """Whether the bytes of the outputs are those of `first`. It raises WrongWrite."""

        def is_like() -> bool:
            self.check()
            return self.outputs.has_bytes_of(first.outputs)

        return is_like


class _PublicCall:
    """A forward and a backward by the public functions."""

    def __init__(self, drawn: Draw, problem: Problem, where: OneCallMachine) -> None:
        self.drawn, self.problem, self.case = drawn, problem, problem.case
        self.library = CuPy(where) if drawn.route == "cupy" else Torch(where)
        case = self.case
        y = case.dtype("y")
        dtypes = {
            "x": case.x,
            "weight": case.dtype("weight"),
            "bias": case.dtype("bias"),
            "residual": case.added,
            "row_scale": case.row_scale,
            "weight1": case.weight1,
            "bias1": case.bias1,
            "dy": case.dtype("dy"),
            "dy1": y,
            "dsum": case.sum,
        }
        self.dtypes = dtypes
        placed = {name: (self._placed(name, dtype), dtype) for name, dtype in dtypes.items()}
        there = {name: each for name, each in placed.items() if each[0] is not None}
        self._memory = Operands(there, self.library)
        self.operands = dict.fromkeys(dtypes) | self._memory.arrays
        self.is_layer_norm = case.norm == "layer_norm"

    def _placed(self, name: str, dtype: str | None) -> Placed | None:
        values = getattr(self.problem, name)
        if values is None or dtype is None:
            return None
        return place(encode(values, dtype), self.drawn.layouts.get(name, "contiguous"))

    def start(self) -> _Made:
        """Runs it without waiting for outputs."""
        is_recorded = self.drawn.route == "autograd"
        out = (
            _Out(self.case, self.library) if self.drawn.seed % 3 == 0 and not is_recorded else None
        )
        has_own_stream = self.drawn.seed % 4 == 0
        with self.library.stream() if has_own_stream else nullcontext():
            made = self._recorded() if is_recorded else self._explicit(out)
        there = {name: array for name, array in made.items() if array is not None}
        outputs, checks = Made(there, self.library), [self._memory.fetch()]
        if out is not None:
            checks.append(out.fetch())
        return _Made(outputs, checks)

    def _launch_options(self) -> dict[str, Any]:
        case = self.case
        return {"strategy": case.strategy, "tile": case.tile, "sm_margin": case.sm_margin}

    def _forward_options(self) -> dict[str, Any]:
        case, operands = self.case, self.operands
        return {
            "residual": operands["residual"],
            "zero_centered_weight": case.zero_centered_weight,
            "out_dtype": case.y,
            "residual_dtype": case.residual_dtype,
            "row_scale": operands["row_scale"],
            "dropout_p": case.dropout_p,
            "dropout_seed": self.problem.dropout_seed if case.dropout_p else None,
            "weight1": operands["weight1"],
            "bias1": operands["bias1"],
            "round_x_hat": case.round_x_hat,
            "statistics": case.statistics,
            **self._launch_options(),
        }

    def _explicit(self, out: _Out | None) -> dict[str, Any]:
        """By layer_norm_forward and layer_norm_backward, or those of rms_norm."""
        case, operands = self.case, self.operands
        options = self._forward_options()
        if out is not None:
            options["out"] = out.array
        forward = api.layer_norm_forward if self.is_layer_norm else api.rms_norm_forward
        made = forward(operands["x"], operands["weight"], operands["bias"], case.eps, **options)
        results = {name: getattr(made, name) for name in ("y", "mean", "rstd")}
        if case.has_own_sum or operands["residual"] is not None:
            results["sum"] = made.sum
        if case.has_second:
            results["y1"] = made.y1
        return results | self._explicit_backward(made)

    def _explicit_backward(self, made: Any) -> dict[str, Any]:
        case, operands, dtypes = self.case, self.operands, self.dtypes
        names = ["dx", *(f"d{name}" for name in ("weight", "bias") if operands[name] is not None)]
        if case.has_own_sum and operands["residual"] is not None:
            names.append("dresidual")
        names += [f"d{name}" for name in ("weight1", "bias1") if operands[name] is not None]
        options = {
            "zero_centered_weight": case.zero_centered_weight,
            "dsum": operands["dsum"],
            "gradients": tuple(names),
            "dbias_dtype": dtypes["bias"],
            "row_scale": operands["row_scale"],
            "dropout_p": case.dropout_p,
            "dropout_seed": getattr(made, "dropout_seed", None),
            **self._launch_options(),
            "tile": None,
        }
        if case.has_own_sum or case.memory_efficient:
            options |= {"dx_dtype": case.x, "dresidual_dtype": case.added}
        if case.has_second:
            options |= {"dy1": operands["dy1"], "weight1": operands["weight1"]}
            options["dbias1_dtype"] = dtypes["bias1"]
        x = made.sum
        if case.memory_efficient:
            x = made.y
            options |= {"memory_efficient": True, "bias": operands["bias"]}
        statistics = (made.mean, made.rstd) if self.is_layer_norm else (made.rstd,)
        backward = (
            backwards.layer_norm_backward if self.is_layer_norm else backwards.rms_norm_backward
        )
        found = backward(operands["dy"], x, *statistics, operands["weight"], **options)
        return {name: getattr(found, name) for name in names}

    def _recorded(self) -> dict[str, Any]:
        """By layer_norm or rms_norm and torch's autograd."""
        case, operands, torch = self.case, self.operands, self.library.torch
        given = ("x", "weight", "bias", "residual", "weight1", "bias1")
        leaves = {
            name: operands[name].detach().requires_grad_()
            for name in given
            if operands[name] is not None
        }
        options = self._forward_options() | leaves | {"return_residual": True}
        x, weight, bias = options.pop("x"), options.pop("weight", None), options.pop("bias", None)
        options["memory_efficient"] = case.memory_efficient
        norm = api.layer_norm
        if not self.is_layer_norm:
            norm, options["bias"] = api.rms_norm, bias
        affine = (weight, bias) if self.is_layer_norm else (weight,)
        made = norm(x, (case.num_cols,), *affine, eps=case.eps, **options)
        results = dict(zip(("y", "y1", "sum") if case.has_second else ("y", "sum"), made))
        upstream = {name: operands[f"d{name}"] for name in results}
        upstream["y1"] = operands["dy1"]
        there = [name for name in results if upstream[name] is not None]
        gradients = torch.autograd.grad(
            [results[name] for name in there], list(leaves.values()), [upstream[n] for n in there]
        )
        if operands["residual"] is None and not case.has_own_sum:
            del results["sum"]  # it is x
        results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients)}
        if not case.has_own_sum:
            results.pop("dresidual", None)  # it is dx
        return {name: array.detach() for name, array in results.items()}
