"""Activations to check kernels on: of a pretrained model, in the package, and of users' files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..dtypes import DTYPES, decode, encode
from ..gpu import arrays
from ..table import printable
from .cases import Case, Problem, random_problem

_FIELDS = ("x", "dy", "weight", "bias", "eps")
_SHIPPED = Path(__file__).parents[1] / "data" / "minilm_layer_norms.npz"


@dataclass(frozen=True)
class Activations:
    """The tensors of one norm, as float64 values.

    x: [num_rows, num_cols]. dtypes: in which x, weight and bias were stored. dy: as x, or None for
    random values. weight, bias: [num_cols] or None.
    """

    name: str
    x: np.ndarray
    dtypes: dict[str, str]
    dy: np.ndarray | None = None
    weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    eps: float = 1e-5

    def problem(
        self, norm: str, dtype: str | None = None, *, max_elements: int | None = None, seed: int = 0
    ) -> Problem:
        """A problem of the gradient check for norm, "layer_norm" or "rms_norm".

        dtype: that all tensors are rounded to; None keeps the stored dtypes. max_elements: of x;
        a larger x is sampled by evenly spaced rows, at least one. seed: of the random dy.
        """
        num_rows, num_cols = self.x.shape
        at = slice(None)
        if max_elements is not None and num_rows * num_cols > max_elements:
            at = np.linspace(0, num_rows - 1, max(1, max_elements // num_cols)).astype(int)
        dtypes = {name: dtype or stored for name, stored in self.dtypes.items()}

        def rounded(values: np.ndarray | None, to: str | None) -> np.ndarray | None:
            return None if values is None else decode(encode(values, to), to)

        x = rounded(self.x[at], dtypes["x"])
        weight, bias = (rounded(getattr(self, each), dtypes.get(each)) for each in _FIELDS[2:4])
        of_affine = {name: dtypes.get(name) for name in ("weight", "bias")}
        case = Case(norm, *x.shape, dtypes["x"], **of_affine, eps=self.eps)
        given_dy = None if self.dy is None else rounded(self.dy[at], dtypes["x"])
        dy = random_problem(case, seed).dy if given_dy is None else given_dy
        return Problem(case, x, dy, weight, bias)


def shipped() -> list[Activations]:
    """One row of a LayerNorm of a pretrained sentence encoder, with its gradient and weights.

    384 columns, float32. Unlike random numbers it has an outlier of 16 standard deviations, a
    weight of 5e-33 and an eps of 1e-12.
    """
    return list(read(_SHIPPED))


def read(path: str | Path) -> Iterator[Activations]:
    """The norms of a .npz file, or the x of a .npy file, each over its last dimension.

    Arrays named prefix/x or prefix/input, prefix/dy, prefix/weight, prefix/bias and prefix/eps
    belong together, and so do x, dy, ... without a prefix. Every other array of floats is an x of
    its own. No file is unpickled, so reading one runs no code of its author.
    Raises ValueError for a malformed file, FileNotFoundError for a missing one.
    """
    path, norms = Path(path), {}
    if path.suffix not in (".npy", ".npz"):
        raise ValueError(f"{printable(path)} is of no known format; expected a .npy or .npz file")
    try:
        loaded = np.load(path, allow_pickle=False)
        found = {"x": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        for name, array in found.items():
            prefix, _, field = name.rpartition("/")
            field = "x" if field == "input" else field
            key, own = (prefix, field) if field in _FIELDS else (name, "x")
            if arrays.dtype_name(array) in DTYPES and array.size and (array.ndim or own == field):
                norms.setdefault(key, {})[own] = array
    except FileNotFoundError:
        raise
    except Exception as error:  # of zlib, zipfile and numpy
        why = printable(str(error) or type(error).__name__, 300)
        raise ValueError(
            f"{printable(path)} is not a readable {path.suffix} file: {why}"
        ) from error
    for prefix, norm in norms.items():
        yield _checked(printable(f"{path.stem}/{prefix}".rstrip("/")), norm)


def _checked(name: str, norm: dict[str, np.ndarray]) -> Activations:
    """The arrays of one norm, by field."""
    shape = norm["x"].shape if "x" in norm else ()
    if not shape:
        raise ValueError(f"{name} has {', '.join(norm)}; expected an x of at least one dimension")
    last = shape[-1:]
    for field, expected in {"dy": shape, "weight": last, "bias": last, "eps": ()}.items():
        if field in norm and norm[field].shape != expected:
            raise ValueError(
                f"{name}: {field} has shape {norm[field].shape}, x has {shape}; expected {expected}"
            )
    values = {field: arrays.to_float64(array) for field, array in norm.items()}
    values |= {field: values[field].reshape(-1, *last) for field in ("x", "dy") if field in norm}
    values["eps"] = float(values.get("eps", 1e-5))
    if not np.isfinite(values["eps"]):
        raise ValueError(f"{name}: eps is {values['eps']}; expected a finite number")
    dtypes = {field: arrays.dtype_name(array) for field, array in norm.items()}
    return Activations(name, dtypes=dtypes, **values)
