"""Activations to check kernels on: of a pretrained model, in the package, and of users' files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..dtypes import decode, encode
from ..table import printable
from .array_files import READERS, read_arrays
from .cases import Case, Problem, random_problem

_FIELDS = ("x", "dy", "weight", "bias", "eps")
_SHIPPED = Path(__file__).parents[1] / "data" / "minilm_layer_norms.npz"


@dataclass(frozen=True)
class Activations:
    """The tensors of one norm, as float64 values.

    x: [num_rows, num_cols]. dy: the same, or None for random values. weight, bias: [num_cols] or
    None. dtypes: the dtypes in which x, weight and bias were stored, by name.
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

        def rounded(values: np.ndarray | None, name: str) -> np.ndarray | None:
            to = dtype or self.dtypes.get(name)
            return None if values is None else decode(encode(values, to), to)

        x = rounded(self.x[at], "x")
        dtypes = {
            name: None if getattr(self, name) is None else dtype or self.dtypes.get(name)
            for name in ("weight", "bias")
        }
        case = Case(norm, *x.shape, dtype or self.dtypes["x"], **dtypes, eps=self.eps)
        dy = random_problem(case, seed).dy if self.dy is None else rounded(self.dy[at], "x")
        return Problem(case, x, dy, rounded(self.weight, "weight"), rounded(self.bias, "bias"))


def shipped() -> list[Activations]:
    """One row of a LayerNorm of a pretrained sentence encoder, with its gradient and weights.

    384 columns, float32. Unlike random numbers it has an outlier of 16 standard deviations, a
    weight of 5e-33 and an eps of 1e-12.
    """
    return list(read(_SHIPPED))


def read(
    path: str | Path, note: Callable[[str], None] = lambda line: None
) -> Iterator[Activations]:
    """The floating-point arrays of a .npy, .npz, .safetensors or .pt file.

    Each is normalised over its last dimension. Arrays named prefix/x, prefix/dy, prefix/weight,
    prefix/bias and prefix/eps belong together, and so do x, dy, ... without a prefix. x may be
    called input. Every other array is an x of its own. note: called with one line for each array
    that is left out.

    Raises ValueError for a malformed file, one with pickled objects or one that takes too much
    memory, FileNotFoundError for a missing one, MissingLibraryError for .pt without torch.
    """
    path = Path(path)
    if path.suffix not in READERS:
        known = ", ".join(READERS)
        raise ValueError(
            f"{printable(path)} is of no known format; expected a name that ends in one of {known}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {printable(path)}")

    def leave_out(name: str, why: str) -> None:
        named = printable(name) or "the array"
        note(f"{printable(path.name)}: {named} is left out, it has {printable(why)}")

    found: dict[str, Stored] = {}
    for name, (array, dtype) in read_arrays(path).items():
        if array is None:
            leave_out(name, f"dtype {dtype}")
        elif array.size or name.rpartition("/")[2] in (*_FIELDS, "input"):
            found[name] = Stored(decode(array, dtype), dtype)
        else:
            leave_out(name, "no elements")
    for name in [each for each in found if each.rpartition("/")[2] == "input"]:
        x = name.removesuffix("input") + "x"
        if x not in found:
            found[x] = found.pop(name)
    for name, stored in found.items():
        prefix, slash, field = name.rpartition("/")
        prefix += slash
        if field in _FIELDS and field != "x" and prefix + "x" in found:
            continue  # belongs to the x beside it
        shape = stored.values.shape
        if not shape or 0 in shape:
            leave_out(name, f"shape {shape} and no row to normalise")
            continue
        others, label = {}, name
        if field == "x":
            others = {each: found[prefix + each] for each in _FIELDS[1:] if prefix + each in found}
            label = prefix
        name = printable(f"{path.stem}/{label}".rstrip("/"))
        yield _together(name, stored, others)


class Stored(NamedTuple):
    """An array of a file as float64, and its dtype there."""

    values: np.ndarray
    dtype: str


def _together(name: str, x: Stored, others: dict[str, Stored]) -> Activations:
    """One norm's tensors, their shapes checked."""
    shape = x.values.shape
    last = shape[-1:]
    for field, expected in {"dy": shape, "weight": last, "bias": last, "eps": ()}.items():
        found = others[field].values.shape if field in others else expected
        if found != expected:
            raise ValueError(
                f"{name}: {field} has shape {found}, x has {shape}; expected {expected}"
            )
    fields = {field: each.values for field, each in others.items()}
    if "dy" in fields:
        fields["dy"] = fields["dy"].reshape(-1, shape[-1])
    if "eps" in fields:
        fields["eps"] = float(fields["eps"])
        if not np.isfinite(fields["eps"]):
            raise ValueError(f"{name}: eps is {fields['eps']}; expected a finite number")
    dtypes = {field: each.dtype for field, each in {"x": x, **others}.items()}
    return Activations(name, x.values.reshape(-1, shape[-1]), dtypes, **fields)
