"""Traps t10 and t11: strides and addresses on which other libraries failed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from array_libraries import LIBRARIES, TORCH, api, library, loaded_torch
from trap_checks import assert_right, run_call

import cupynorm
from cupynorm import Launch
from cupynorm.check.bounds import expect
from cupynorm.check.cases import NORMS, Case, Problem, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.results import judge
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import backward_call, forward_call
from cupynorm.norm.request import BackwardOptions, ForwardOptions
from cupynorm.plan.strategies import STRATEGIES


def layouts(lib, values: np.ndarray):
    """Pairs of a name and the same values in that layout; libraries differ in what they allow."""
    num_rows, num_cols = values.shape
    wide = np.repeat(values, 2, axis=1)
    wide[:, 1::2] = 777.0
    yield "every other column", lib.put(wide, "float32")[:, ::2]
    yield "transposed", lib.put(np.ascontiguousarray(values.T), "float32").T
    fused = np.full((num_rows, 3 * num_cols), 777.0)
    fused[:, num_cols : 2 * num_cols] = values
    yield "a part of a fused row", lib.put(fused, "float32")[:, num_cols : 2 * num_cols]
    yield "every other row", lib.put(np.repeat(values, 2, axis=0), "float32")[::2]
    if not lib.is_torch:
        yield "rows in reverse", lib.put(np.ascontiguousarray(values[::-1]), "float32")[::-1]
        yield (
            "columns in reverse",
            lib.put(np.ascontiguousarray(values[:, ::-1]), "float32")[:, ::-1],
        )
    else:
        column = lib.put(values, "float32").as_strided(
            (1, num_rows, 1, num_cols), (12345, num_cols, 777, 1)
        )
        yield "extents of 1 with strides that mean nothing", column.reshape(num_rows, num_cols)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t10_strided_arrays(norm_name, name):
    """Elsewhere strided, transposed, expanded or reversed arrays were read as contiguous.

    Here every layout gives the results of a contiguous copy, and inputs keep their values.
    """
    lib = library(name)
    problem = random_problem(Case(norm_name, 6, 40, "float32"))
    weight, bias = lib.put(problem.weight, "float32"), lib.put(problem.bias, "float32")

    def results(x, dy) -> dict[str, np.ndarray]:
        forward = api(norm_name, "forward")(x, 40, weight, bias=bias, eps=problem.case.eps)
        statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
        backward = api(norm_name, "backward")(dy, x, 40, *statistics, weight)
        found = {"y": forward.y, "mean": forward.mean, "rstd": forward.rstd} | backward._asdict()
        return {key: lib.get(value) for key, value in found.items() if value is not None}

    expected = results(lib.put(problem.x, "float32"), lib.put(problem.dy, "float32"))
    assert len(expected) == 5 + (norm_name == "layer_norm")
    seen = 0
    for (label, x), (_, dy) in zip(layouts(lib, problem.x), layouts(lib, problem.dy)):
        assert (lib.get(x) == problem.x).all(), label
        found = results(x, dy)
        assert_right(problem, found)
        # On a GPU narrower packs add up in another order; on the host nothing changes.
        assert not lib.on_host or all((found[key] == expected[key]).all() for key in expected), (
            label
        )
        assert (lib.get(x) == problem.x).all() and (lib.get(dy) == problem.dy).all(), label
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("name", TORCH)
def test_t10_expanded_gradient_of_a_sum(name):
    """Elsewhere the gradient of sum(), whose strides are 0, was read past its end.

    Here dx and dweight agree with torch in float64.
    """
    torch, lib = loaded_torch(), library(name)
    x = lib.put(np.random.default_rng(0).standard_normal((6, 40)), "float32").requires_grad_()
    weight = lib.put(np.linspace(-1, 2, 40), "float32").requires_grad_()
    cupynorm.layer_norm(x, 40, weight).sum().backward()
    x64, weight64 = (each.detach().double().cpu().requires_grad_() for each in (x, weight))
    torch.nn.functional.layer_norm(x64, (40,), weight64).sum().backward()
    problem = Problem(
        Case("layer_norm", 6, 40, "float32", bias=None),
        lib.get(x),
        np.ones((6, 40)),
        lib.get(weight),
        None,
    )
    bounds = expect(problem)
    for tensor, got, right in (("dx", x.grad, x64.grad), ("dweight", weight.grad, weight64.grad)):
        assert judge("sum", tensor, lib.get(got), right.numpy(), bounds[tensor][1]).ok


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t10_row_strides_in_the_kernels(strategy):
    """Elsewhere kernels used num_cols as the row stride.

    Here rows with gaps, a repeated row (stride 0) and reversed rows give the same results, and
    gaps are not written.
    """
    machine = CpuMachine()
    case = Case("layer_norm", 5, 48, "float32", strategy=strategy)
    problem = random_problem(case)
    right = run_kernels(problem, machine)
    launch = Launch(strategy)

    def apart(values: np.ndarray | None, stride: int) -> tuple[np.ndarray, Rows]:
        buffer = np.full((5, stride), np.nan, np.float32)
        if values is not None:
            buffer[:, :48] = values
        return buffer, Rows(buffer.ctypes.data, 5, 48, stride, "float32")

    parameters = [
        (encode(values, "float32"), "float32") for values in (problem.weight, problem.bias)
    ]
    weight, bias = (Rows(array.ctypes.data, 1, 48, 48, dtype) for array, dtype in parameters)
    kept_x, x = apart(problem.x, 64)
    kept_dy, dy = apart(problem.dy, 52)
    kept_y, y = apart(None, 80)
    kept_dx, dx = apart(None, 56)
    mean, rstd = (np.full(5, np.nan, np.float32) for _ in range(2))
    dweight, dbias = (np.full(48, np.nan, np.float32) for _ in range(2))

    def run(x, y, dy, dx):
        statistics = {"mean": mean.ctypes.data, "rstd": rstd.ctypes.data}
        sums = {
            f"d{name}": Rows(array.ctypes.data, 1, 48, 48, "float32")
            for name, array in (("weight", dweight), ("bias", dbias))
        }
        forward = ForwardOptions(True, (48,), 1e-5, launch=launch)
        tensors = {"x": x, "y": y, "weight": weight, "bias": bias}
        run_call(
            machine, forward_call(machine.device, tensors, forward, "forward"), tensors, statistics
        )
        tensors = {"x": x, "dy": dy, "weight": weight, "dx": dx, **sums}
        backward = BackwardOptions(True, (48,), launch=launch)
        run_call(
            machine,
            backward_call(machine.device, tensors, backward, "float32"),
            tensors,
            statistics,
        )

    run(x, y, dy, dx)
    for tensor, got in (
        ("y", kept_y[:, :48]),
        ("dx", kept_dx[:, :48]),
        ("dweight", dweight),
        ("dbias", dbias),
        ("mean", mean),
    ):
        assert (got == right[tensor]).all(), tensor
    assert np.isnan(kept_y[:, 48:]).all() and np.isnan(kept_dx[:, 48:]).all()
    assert (kept_x[:, :48] == problem.x).all() and (kept_dy[:, :48] == problem.dy).all()

    def reverse(rows: Rows) -> Rows:
        return rows._replace(
            pointer=rows.pointer + 4 * 4 * rows.row_stride, row_stride=-rows.row_stride
        )

    run(reverse(x), reverse(y), reverse(dy), reverse(dx))
    assert (
        (kept_y[:, :48] == right["y"]).all()
        and (kept_dx[:, :48] == right["dx"]).all()
        and (mean == right["mean"][::-1]).all()
    )

    run(x._replace(row_stride=0), y, dy._replace(row_stride=0), dx)
    assert (kept_y[:, :48] == right["y"][0]).all() and (kept_dx[:, :48] == right["dx"][0]).all()
    # Five equal terms: four additions, each rounded.
    assert judge(
        "repeated",
        "dbias",
        np.float64(dbias),
        5 * problem.dy[0],
        5 * np.abs(problem.dy[0]) * 2.0**-22 + 1e-30,
    ).ok


class Displaced:
    """A machine that puts one tensor `offset` elements after an aligned address."""

    puts = ("weight", "bias", "x", "residual", "dy")
    empties = ("sum", "y", "mean", "rstd", "dx", "dweight", "dbias")

    def __init__(self, machine, tensor: str, offset: int) -> None:
        self.machine, self.tensor, self.offset = machine, tensor, offset
        self.device = machine.device
        self.get, self.launch = machine.get, machine.launch
        self.name_tensors = machine.name_tensors
        self.counts = {"put": 0, "empty": 0}
        self.displaced = 0

    def _place(self, kind: str, names: tuple[str, ...], array, pointer: int, shape, fill=None):
        at = self.counts[kind]
        self.counts[kind] += 1
        if at >= len(names) or names[at] != self.tensor:
            return array, pointer
        size = int(np.prod(shape))
        # The last `size` of a buffer that starts aligned and is `offset` longer.
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        buffer, start = self.machine.empty((size + self.offset,), dtype)
        placed = buffer[self.offset :].reshape(shape)
        if fill is not None:
            placed[...] = array
        self.displaced += 1
        return placed, start + self.offset * array.dtype.itemsize

    def put(self, values: np.ndarray):
        array, pointer = self.machine.put(values)
        return self._place("put", self.puts, array, pointer, values.shape, fill=True)

    def empty(self, shape: tuple[int, ...], dtype: str):
        array, pointer = self.machine.empty(shape, dtype)
        return self._place("empty", self.empties, array, pointer, shape)


@pytest.mark.slow
@pytest.mark.parametrize("of_tensor, tensor", [*enumerate((*Displaced.puts, *Displaced.empties))])
@pytest.mark.parametrize("of_dtype, dtype", [*enumerate(("float16", "float32", "float64"))])
def test_t11_unaligned_base_address(of_dtype, dtype, of_tensor, tensor, where):
    """Elsewhere a vector load from an unaligned address faulted.

    Here each tensor may begin at any element, as views do.
    """
    case = Case("layer_norm", 3, 64, dtype, residual=True)
    problem = random_problem(case)
    for offset in (1, 2, 3, 4, 8):
        machine = Displaced(where, tensor, offset)
        assert_right(problem, run_kernels(problem, machine), where.device)
        assert machine.displaced == 1
    # Half of the strategies by turns.
    for strategy in list(STRATEGIES)[(of_tensor + of_dtype) % 2 :: 2]:
        machine = Displaced(where, tensor, 1)
        forced = replace(problem, case=replace(case, strategy=strategy))
        assert_right(forced, run_kernels(forced, machine), where.device)
        assert machine.displaced == 1
