"""A norm's torch tensors, and whether a library's outputs are right: sampled rows in float64.

The whole check is cupynorm.check; here a fast kernel that is wrong must not win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..dispatch.problem import cols_of_scale
from ..dtypes import DTYPES, EIGHT_BITS, compute_dtype
from ..verify.bounds import expect
from ..verify.cases import Case, Problem
from ..verify.results import judge
from .cells import EPS, Cell
from .timer import Runner

_SAMPLED_ROWS = 64
_SAMPLED_ELEMENTS = 2**18  # float64 on the host takes a tenth of a second for these
_MOST_Y = 64.0  # room that a given scale leaves: y is 6 sigma of x_hat times 5 of weight at most


class Tensors(NamedTuple):
    """A cell's tensors; None for those that it does not have.

    x, dy, residual, dsum: [num_rows, num_cols]. weight, bias: [num_cols]. scale, amax: [1],
    float32.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    dy: torch.Tensor | None = None
    dsum: torch.Tensor | None = None


def normal_values(seed: int, device: str) -> Callable[..., torch.Tensor]:
    """normal(shape, dtype, center, spread): random values, fresh in each call."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: Any, dtype: str, center: float = 0.0, spread: float = 1.0) -> torch.Tensor:
        kind = getattr(torch, dtype)
        values = torch.empty(shape, dtype=kind, device=device)
        return values.normal_(center, spread, generator=generator)

    return normal


def tensors_of(cell: Cell, seed: int, device: str = "cuda") -> Tensors:
    """A cell's random tensors."""
    normal = normal_values(seed, device)
    matrix, vector = (cell.num_rows, cell.num_cols), (cell.num_cols,)
    backward, added = cell.direction == "backward", cell.residual
    scale = amax = None
    if cell.scale == "given":
        scale = torch.full((1,), EIGHT_BITS[cell.y].largest / _MOST_Y, device=device)
        amax = torch.zeros(1, device=device) if cell.amax else None
    return Tensors(
        normal(matrix, cell.dtype, 0.5, 2.0),
        normal(vector, cell.parameters, 1.0, 0.5),
        normal(vector, cell.parameters, 0.0, 0.5) if cell.norm == "layer_norm" else None,
        normal(matrix, cell.dtype) if added else None,
        scale,
        amax,
        normal(matrix, cell.y) if backward else None,
        normal(matrix, cell.dtype) if added and backward else None,
    )


def copy_of(num_bytes: int, x: torch.Tensor) -> Runner:
    """A device-to-device copy that reads half of so many bytes and writes the other half.

    x: random data to copy, over and over. Zeros would cost the memory less power.
    """
    data = x.detach().reshape(-1).view(torch.uint8)
    source = data.repeat(-(-num_bytes // 2 // len(data)))[: num_bytes // 2]
    target = torch.empty_like(source)
    return Runner(lambda: target.copy_(source))


class Truth:
    """float64 results of sampled rows of a cell, and the judgement of a library's outputs."""

    def __init__(self, cell: Cell, tensors: Tensors, seed: int) -> None:
        """seed: of the choice of rows; the first and the last are always taken."""
        self.cell, self.is_given = cell, tensors.scale is not None
        count = max(1, min(_SAMPLED_ROWS, cell.num_rows, _SAMPLED_ELEMENTS // cell.num_cols))
        drawn = np.random.default_rng(seed).choice(cell.num_rows, count, replace=False)
        self.rows = np.unique([0, *drawn[2:], cell.num_rows - 1])
        # A y of 8 bits is judged before it is rounded to them.
        y = compute_dtype(cell.dtype).name if cell.scale else cell.y
        bias = None if tensors.bias is None else cell.parameters
        shape = (cell.norm, len(self.rows), cell.num_cols, cell.dtype)
        case = Case(*shape, y, cell.parameters, bias, residual=cell.residual, eps=EPS)
        x = self._sampled(tensors.x)
        # A forward has no dy: its gradients are ignored.
        dy = np.zeros_like(x) if tensors.dy is None else self._sampled(tensors.dy)
        weight, bias = float64(tensors.weight), float64(tensors.bias)
        self.dsum = self._sampled(tensors.dsum)
        self.problem = Problem(case, x, dy, weight, bias, self._sampled(tensors.residual))
        self.expected = cache(lambda rounded: expect(self.problem, rounded_mean=rounded))

    def _sampled(self, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else float64(tensor[torch.from_numpy(self.rows)])

    def judge(self, outputs: Mapping[str, Any], *, rounded_mean: bool) -> tuple[float, str | None]:
        """(largest error in units of what is allowed, a sentence about what is wrong or None).

        rounded_mean: whether the library subtracts a mean that is rounded to float32.
        """
        worst = 0.0
        for name in [each for each in ("y", "sum", "dx") if each in outputs]:
            dtype = self.cell.y if name == "y" else self.cell.dtype
            if outputs[name].dtype != getattr(torch, dtype):
                return np.nan, f"{name} is {outputs[name].dtype}; expected {dtype}"
            expected, allowed = self.expected(rounded_mean)[name]
            got = self._sampled(outputs[name])
            if name == "y" and self.cell.scale:
                got, factors, wrong = self._dequantized(got, outputs["scale_inv"])
                if wrong:
                    return np.nan, wrong
                format = EIGHT_BITS[dtype]
                of_y = (np.abs(expected) + allowed) * format.half_ulp
                allowed = allowed + np.maximum(of_y, factors * (format.smallest / 2))
            if name == "dx" and self.dsum is not None:
                # A library may round dx before it adds dsum, and again after it.
                of_roundings = (np.abs(expected) + np.abs(self.dsum)) * DTYPES[dtype].half_ulp
                expected, allowed = expected + self.dsum, allowed + of_roundings
            found = judge(self.cell, name, got, expected, allowed)
            if not found.ok:
                row, col = found.where
                right = f"expected {found.expected:.6g} within {found.allowed:.2g}"
                where = f"row {self.rows[row]}, col {col}"
                error = np.inf if np.isnan(found.error) else found.error
                return error, f"{name} is {found.got:.6g} at {where}; {right}"
            worst = max(worst, found.error)
        return worst, None

    def _dequantized(self, data: np.ndarray, scales: Any) -> tuple[np.ndarray, Any, str | None]:
        """Values of a y of 8 bits, the scale of each, and what is wrong with them or None."""
        scale, num_cols, largest = (
            self.cell.scale,
            self.cell.num_cols,
            EIGHT_BITS[self.cell.y].largest,
        )
        cols = cols_of_scale(scale, num_cols)
        factors = self._sampled(scales) if cols else float64(scales).reshape(1, 1)
        factors = np.repeat(factors, cols or num_cols, axis=1)[:, :num_cols]
        if factors.shape[1] < num_cols:
            return data, 1, f"scale_inv has {scales.shape[-1]} scales of a row; expected more"
        most = np.abs(data).max(axis=1).min()
        if not self.is_given and scale != "tensor" and most < largest:
            return data, 1, f"scale_inv makes {most:.6g} of a largest value; expected {largest}"
        return data * factors, factors, None


def float64(tensor: torch.Tensor | None) -> Any:
    """The values of a tensor on the host; None for None."""
    return None if tensor is None else tensor.detach().double().cpu().numpy()


def verify(runner: Runner, truth: Truth, *, rounded_mean: bool) -> tuple[float, str | None]:
    """Fills the outputs with NaN, runs once and judges, as Truth.judge does.

    A library that allocates its outputs gets the same memory again from its allocator.
    """

    def run() -> dict[str, torch.Tensor]:
        if runner.before:
            runner.before()
        return runner.outputs(runner.call())

    for output in run().values():
        output.detach().view(torch.uint8).fill_(0xFF)
    output = None  # the allocator can only hand out memory that nobody holds
    return truth.judge(run(), rounded_mean=rounded_mean)
