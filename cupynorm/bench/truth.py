"""Whether a library's outputs are right: sampled rows of a cell compared with float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..check.bounds import Expected, expect
from ..check.cases import Case, Problem
from ..check.results import judge
from ..dtypes import DTYPES, EIGHT_BITS, compute_dtype, decode
from ..gpu import arrays, nvrtc
from ..plan.problem import cols_of_scale
from ..reference import fp8
from .cells import EPS, Cell
from .tensors import Tensors, bits
from .timer import Runner

_SAMPLED_ROWS = 64
_SAMPLED_ELEMENTS = 2**18  # float64 on the host takes a tenth of a second for these
# By dtype: the bits of a magnitude, and the largest that is not NaN. CuPy does not compute in these
# dtypes.
_MAGNITUDES = {
    "bfloat16": (0x7FFF, 0x7F80),
    "float8_e4m3fn": (0x7F, 0x7E),
    "float8_e5m2": (0x7F, 0x7C),
}


def _parts(array: Any) -> Iterable[Any]:
    """A CuPy array in parts, to keep temporaries small."""
    flat = array.reshape(-1)
    return (flat[first : first + 2**26] for first in range(0, flat.size, 2**26))


def _has_nan(array: Any, dtype: str) -> bool:
    """Whether any element of a CuPy array in a storage dtype is NaN."""
    cupy = nvrtc.cupy()
    mask, last = _MAGNITUDES.get(dtype, (0, 0))
    if dtype == "int8":
        return False
    are_nan = ((part & mask) > last if mask else cupy.isnan(part) for part in _parts(array))
    return any(bool(each.any()) for each in are_nan)


def _largest(array: Any, mask: int) -> int:
    """The largest magnitude of 8-bit patterns."""
    return max(int((part & mask).max()) for part in _parts(array))


class Truth:
    """float64 results of sampled rows of a cell, and the judgement of a library's outputs."""

    def __init__(self, cell: Cell, tensors: Tensors, seed: int) -> None:
        """tensors: CuPy arrays. seed: of the choice of rows."""
        self.cell = cell
        most_rows = _SAMPLED_ELEMENTS // cell.num_cols
        num_sampled = max(1, min(_SAMPLED_ROWS, cell.num_rows, most_rows))
        generator = np.random.default_rng([seed, cell.num_rows, cell.num_cols])
        self.rows = np.sort(generator.choice(cell.num_rows, num_sampled, replace=False))
        case = Case(
            cell.norm,
            num_sampled,
            cell.num_cols,
            cell.dtype,
            # A y of 8 bits is judged before it is rounded to them.
            compute_dtype(cell.dtype).name if cell.scale else cell.y,
            cell.parameters,
            None if tensors.bias is None else cell.parameters,
            zero_centered_weight=cell.zero_centered,
            residual=cell.residual,
            eps=EPS,
        )

        def parameter(array: Any) -> np.ndarray | None:
            return None if array is None else decode(bits(array).get(), cell.parameters)

        x, dy = self.sampled(tensors.x), self.sampled(tensors.dy)
        self.dsum = self.sampled(tensors.dsum)
        self.scale = None if tensors.scale is None else float(tensors.scale.get()[0])
        dy = np.zeros_like(x) if dy is None else dy  # a forward: its gradients are ignored
        weight, bias = parameter(tensors.weight), parameter(tensors.bias)
        self.problem = Problem(case, x, dy, weight, bias, self.sampled(tensors.residual))
        self._expected: dict[bool, Expected] = {}

    def sampled(self, array: Any) -> np.ndarray | None:
        if array is None:
            return None
        raw = bits(array)
        return decode(self._rows_of(raw), arrays.dtype_name(array))

    def _rows_of(self, array: Any) -> np.ndarray:
        """The sampled rows of a CuPy array."""
        return np.stack([array[int(row)].get() for row in self.rows])

    def expected(self, rounded_mean: bool) -> Expected:
        if rounded_mean not in self._expected:
            self._expected[rounded_mean] = expect(self.problem, rounded_mean=rounded_mean)
        return self._expected[rounded_mean]

    def judge(self, outputs: Mapping[str, Any], *, rounded_mean: bool) -> tuple[float, str | None]:
        """(largest error in units of what is allowed, a sentence about what is wrong or None)."""
        worst, dtype_of_x = 0.0, self.cell.dtype
        for name, dtype in (("y", self.cell.y), ("sum", dtype_of_x), ("dx", dtype_of_x)):
            if name not in outputs:
                continue
            of_8_bits = name == "y" and self.cell.scale is not None
            got_dtype = arrays.dtype_name(outputs[name])
            if got_dtype not in (dtype, "uint8" if of_8_bits else dtype):
                return float("nan"), f"{name} is {got_dtype}; expected {dtype}"
            expected, allowed = self.expected(rounded_mean)[name]
            if of_8_bits:
                got, allowed, wrong = self._dequantized(outputs, expected, allowed)
                if wrong:
                    return float("nan"), wrong
            else:
                got = self.sampled(outputs[name])
            if name == "dx" and self.dsum is not None:
                # A library may round dx before it adds dsum, and again after it.
                of_roundings = (np.abs(expected) + np.abs(self.dsum)) * DTYPES[dtype].half_ulp
                expected, allowed = expected + self.dsum, allowed + of_roundings
            finding = judge(self.cell, name, got, expected, allowed, None if of_8_bits else dtype)
            if not finding.ok:
                where = f"row {self.rows[finding.where[0]]}, col {finding.where[1]}"
                right = f"{finding.expected:.6g} within {finding.allowed:.2g}"
                return finding.error, f"{name} is {finding.got:.6g} at {where}; expected {right}"
            worst = max(worst, finding.error)
        return worst, None

    def _dequantized(
        self, outputs: Mapping[str, Any], expected: np.ndarray, allowed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, str | None]:
        """(values, allowed error, fault of the scales or None) of sampled rows of a y of 8 bits."""
        cell, format = self.cell, EIGHT_BITS[self.cell.y]
        raw, scale_inv = bits(outputs["y"]), bits(outputs["scale_inv"])
        data = fp8.decode(self._rows_of(raw), cell.y)
        if cell.scale in ("given", "tensor"):
            factors = scale_inv.get().astype(np.float64).reshape(1, 1)
            part_cols = cell.num_cols
        else:
            factors = self._rows_of(scale_inv).astype(np.float64)
            part_cols = cols_of_scale(cell.scale, cell.num_cols)
        num_parts = -(-cell.num_cols // part_cols)
        if factors.shape not in ((1, 1), (len(self.rows), num_parts)):
            wrong = f"scale_inv has {factors.shape[1]} scales of a row; expected {num_parts}"
            return data, allowed, wrong
        if cell.scale == "given":
            wrong = self._fault_of_given_scale(factors[0, 0], raw, outputs)
        elif cell.scale == "tensor":
            wrong = self._fault_of_found_scale(
                factors[0, 0], float(fp8.decode(np.uint8(_largest(raw, 0x7F)), cell.y))
            )
        else:
            firsts = np.arange(0, cell.num_cols, part_cols)
            used = np.maximum.reduceat(np.abs(data), firsts, axis=1)
            row, part = np.unravel_index(np.argmin(used), used.shape)
            where = f" at row {self.rows[row]}, part {part}"
            wrong = self._fault_of_found_scale(factors[row, part], used[row, part], where)
        spread = np.repeat(factors, part_cols, axis=1)[:, : cell.num_cols]
        of_step = (np.abs(expected) + allowed) * format.half_ulp
        step = np.maximum(of_step, spread * (format.smallest / 2))
        return data * spread, allowed + step, wrong

    def _fault_of_found_scale(self, scale_inv: float, used: float, where: str = "") -> str | None:
        """What is wrong with a scale that a call finds. used: the largest |value| that it makes.

        It has to be the largest of the format. A larger scale saturates values, which are then off
        themselves.
        """
        least = EIGHT_BITS[self.cell.y].largest
        if used >= least:
            return None
        fault = f"scale_inv is {scale_inv:.6g}, which makes {used:.6g} of the largest value{where}"
        return f"{fault}; expected {least:.6g}" + (" or more" if where else "")

    def _fault_of_given_scale(
        self, scale_inv: float, raw: Any, outputs: Mapping[str, Any]
    ) -> str | None:
        """What is wrong with scale_inv or the amax of a given scale. raw: all bytes of y."""
        if abs(scale_inv * self.scale - 1) > 2.0**-22:
            return f"scale_inv is {scale_inv:.6g}; expected 1 / {self.scale:.6g}"
        if not self.cell.amax:
            return None
        # Rounding keeps the order of values: amax, scaled and rounded, is the largest of all bytes.
        amax = float(bits(outputs["amax"]).get().reshape(()))
        mask, _ = _MAGNITUDES[self.cell.y]
        used = _largest(raw, mask)
        byte = int(fp8.encode(np.array([amax * self.scale], np.float32), self.cell.y)[0])
        if byte == used:
            return None
        largest = fp8.decode(np.array([used], np.uint8), self.cell.y)[0] / self.scale
        return f"amax is {amax:.6g}; expected what is rounded to {largest:.6g}, the largest of y"


def verify(runner: Runner, truth: Truth, *, rounded_mean: bool) -> tuple[float, str | None]:
    """Fills the outputs with NaN, runs once and judges, as Truth.judge does.

    A library that allocates its outputs gets the same memory again from its allocator.
    """
    cupy = nvrtc.cupy()

    def run() -> dict[str, Any]:
        if runner.before:
            runner.before()
        return runner.outputs(runner.call())

    for output in run().values():
        bits(output).view(cupy.uint8).fill(0xFF)
    output = None  # the allocator can only hand out memory that nobody holds
    outputs = run()
    for name, output in outputs.items():
        dtype = arrays.dtype_name(output)
        if _has_nan(bits(output), truth.cell.y if (name, dtype) == ("y", "uint8") else dtype):
            return float("nan"), f"{name} holds NaN: not every element was written"
    return truth.judge(outputs, rounded_mean=rounded_mean)
