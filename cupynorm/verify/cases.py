"""What the gradient check is run on: cases, with random values, a user's own or a model's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.problem import DIRECTIONS as DIRECTIONS
from ..dispatch.problem import NORMS as NORMS
from ..dispatch.problem import Tile
from ..dtypes import DTYPES, decode, encode
from ..gpu import arrays


@dataclass(frozen=True)
class Case:
    """One problem to check, without its values.

    x, y, weight, bias: dtypes; weight and bias None if absent, "same" for that of x.
    strategy, tile, statistics: None leaves the choice to dispatch.
    residual: False, True for one in x's dtype, or its dtype, which is the sum's.
    dy: its dtype, None for that of y. dsum: whether backward adds a gradient of the sum.
    recompute: whether backward writes y again.
    round_x_hat, zero_centered_weight, eps, sm_margin: as in layer_norm.
    """

    norm: str
    num_rows: int
    num_cols: int
    x: str
    y: str | None = None
    weight: str | None = "same"
    bias: str | None = "same"
    strategy: str | None = None
    tile: Tile | None = None
    statistics: str | None = None
    zero_centered_weight: bool = False
    residual: bool | str = False
    eps: float = 1e-5
    sm_margin: int = 0
    dsum: bool = False
    round_x_hat: bool = False
    recompute: bool = False
    dy: str | None = None

    def dtype(self, name: str) -> str | None:
        """The dtype of "y", "dy", "weight", "bias" or another field, None if it is absent."""
        value = getattr(self, name)
        if name == "dy" and value is None:
            return self.dtype("y")
        return self.x if value == "same" or (name == "y" and value is None) else value

    @property
    def sum(self) -> str:
        """The dtype of the rows that are normalised."""
        return self.added or self.x

    @property
    def added(self) -> str | None:
        """The dtype of the residual, None if there is none."""
        if isinstance(self.residual, str):
            return self.residual
        return self.x if self.residual else None

    @property
    def has_own_sum(self) -> bool:
        """Whether the normalised row is more than x, or x plus a residual of its dtype."""
        return self.sum != self.x

    def __str__(self) -> str:
        y = self.dtype("y")
        extras = [y if y != self.x else "", self.strategy or "", self.statistics or ""]
        extras.append(f"residual {self.added}" if self.residual else "")
        extras.append("1 + weight" if self.zero_centered_weight else "")
        extras.append("dsum" if self.dsum else "")
        extras.append(f"dy {self.dy}" if self.dy else "")
        extras.append("recomputed" if self.recompute else "")
        named = [self.norm, f"{self.num_rows} x {self.num_cols}", self.x, *extras]
        return " ".join(filter(None, named))


@dataclass
class Problem:
    """A case and its float64 values, each exactly representable in its dtype.

    x, residual, dy, dsum: [num_rows, num_cols]; weight, bias: [num_cols]. None for what the case
    does not have.
    """

    case: Case
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray | None
    bias: np.ndarray | None
    residual: np.ndarray | None = None
    dsum: np.ndarray | None = None


def random_problem(case: Case, seed: int = 0, *, generator: Any = None) -> Problem:
    """A problem of random values. Rows have different means and spreads.

    generator: has standard_normal and uniform of np.random.Generator; if None, one of this seed.
    """
    if generator is None:
        generator = np.random.default_rng([seed, case.num_rows, case.num_cols])

    def draw(
        shape: tuple[int, ...], dtype: str | None, center: object = 0.0, spread: object = 1.0
    ) -> np.ndarray | None:
        if dtype is None:
            return None
        return decode(encode(generator.standard_normal(shape) * spread + center, dtype), dtype)

    shape = (case.num_rows, case.num_cols)
    centers = generator.uniform(-2, 2, (case.num_rows, 1))
    spreads = generator.uniform(0.25, 4, (case.num_rows, 1))
    weight_center = 0.0 if case.zero_centered_weight else 1.0
    x = draw(shape, case.x, centers, spreads)
    dy = draw(shape, case.dtype("dy"))
    weight = draw(shape[1:], case.dtype("weight"), weight_center, 0.5)
    bias = draw(shape[1:], case.dtype("bias"))
    problem = Problem(case, x, dy, weight, bias)
    problem.residual = draw(shape, case.added)
    problem.dsum = draw(shape, case.sum if case.dsum else None)
    return problem


def given_problem(
    input: Any,
    weight: Any = None,
    bias: Any = None,
    dy: Any = None,
    *,
    seed: int = 0,
    **fields: Any,
) -> Problem:
    """A problem of a user's own arrays, of any library.

    input: [..., num_cols]. weight, bias: [num_cols] or None. dy: of input's size, or None for
    random values. fields: other fields of the Case, norm among them.
    Raises ValueError for a wrong shape, TypeError for a dtype that the kernels do not have.
    """
    x, x_dtype = _on_host(input, "input")
    if x.ndim < 1:
        raise ValueError("input has no dimension to normalise over; expected at least one")
    num_cols = x.shape[-1]
    if not x.size:
        raise ValueError(f"input has shape {x.shape}; expected at least one element")
    x = x.reshape(-1, num_cols)
    parameters = {"weight": _on_host(weight, "weight"), "bias": _on_host(bias, "bias")}
    for label, (values, _) in parameters.items():
        if values is not None and values.shape != (num_cols,):
            raise ValueError(f"{label} has shape {values.shape}; expected ({num_cols},)")
    dtypes = {label: dtype for label, (_, dtype) in parameters.items()}
    case = Case(num_rows=len(x), num_cols=num_cols, x=x_dtype, **dtypes, **fields)
    values, dy_dtype = _on_host(dy, "dy")
    if values is None:
        values = random_problem(case, seed).dy
    elif values.size != x.size:
        raise ValueError(f"dy has shape {values.shape}; expected the input's, {tuple(input.shape)}")
    elif dy_dtype != x_dtype:
        values = decode(encode(values, x_dtype), x_dtype)
    return Problem(case, x, values.reshape(x.shape), parameters["weight"][0], parameters["bias"][0])


def _on_host(array: Any, label: str) -> tuple[np.ndarray | None, str | None]:
    """(float64 values, name of the dtype) of an array of any library; (None, None) for None."""
    if array is None:
        return None, None
    array = arrays.take(array, label)
    arrays.check_addresses(**{label: array})
    dtype = arrays.dtype_name(array)
    if dtype not in DTYPES:
        raise TypeError(f"{label} is of dtype {dtype}; expected one of {', '.join(DTYPES)}")
    return arrays.to_float64(array), dtype


class Activations(NamedTuple):
    """The float64 values of a norm. x, dy: [num_rows, num_cols]. weight, bias: [num_cols]."""

    name: str
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    eps: float

    def problem(self, norm: str, dtype: str) -> Problem:
        """A problem of the gradient check for norm, "layer_norm" or "rms_norm".

        dtype: that all tensors are rounded to.
        """
        case = Case(norm, *self.x.shape, dtype, eps=self.eps)
        return Problem(case, *(decode(encode(values, dtype), dtype) for values in self[1:5]))


def shipped() -> list[Activations]:
    """One row of a LayerNorm of a pretrained sentence encoder, with its gradient and weights.

    384 columns, float32. Unlike random numbers it has an outlier of 16 standard deviations, a
    weight of 5e-33 and an eps of 1e-12.
    """
    loaded = np.load(Path(__file__).parents[1] / "data" / "minilm_layer_norms.npz")
    arrays = {name.partition("/")[2]: values.astype(np.float64) for name, values in loaded.items()}
    return [Activations("layer5_output", **arrays | {"eps": float(arrays["eps"])})]
