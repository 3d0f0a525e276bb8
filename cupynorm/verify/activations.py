"""Activations to check kernels on: of a pretrained model, in the package, and of users' files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import DTYPES, decode, encode
from ..gpu import arrays
from ..gpu.nvrtc import MissingLibraryError
from ..table import printable
from .cases import Case, Problem, random_problem

_FIELDS = ("x", "dy", "weight", "bias", "eps")
_SUFFIXES = (".npy", ".npz", ".safetensors", ".pt")
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
    that is left out. No file is unpickled, so reading one runs no code of its author.

    Raises ValueError for a malformed file and one with pickled objects, FileNotFoundError for a
    missing one, MissingLibraryError for .pt without torch and .safetensors without its package.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        ends = f"a name that ends in one of {', '.join(_SUFFIXES)}"
        raise ValueError(f"{printable(path)} is of no known format; expected {ends}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {printable(path)}")
    found: dict[str, tuple[np.ndarray, str]] = {}  # float64 values, and the dtype in the file
    for name, array in _arrays(path).items():
        name = f"{name[:-5]}x" if f"/{name}".endswith("/input") else name
        dtype, is_field = arrays.dtype_name(array), name.rpartition("/")[2] in _FIELDS
        why = "" if dtype in DTYPES else f"dtype {dtype}"
        if not why and not is_field and (not array.shape or 0 in array.shape):
            why = f"shape {tuple(array.shape)} and no row to normalise"
        if why:
            named = printable(name) or "the array"
            note(f"{printable(path.name)}: {named} is left out, it has {printable(why)}")
        else:
            found[name] = arrays.to_float64(array), dtype
    for name, stored in found.items():
        prefix, slash, field = name.rpartition("/")
        prefix += slash
        if field in _FIELDS[1:] and prefix + "x" in found:
            continue  # belongs to the x beside it
        others, label = {}, name
        if field == "x":
            others = {each: found[prefix + each] for each in _FIELDS[1:] if prefix + each in found}
            label = prefix
        if stored[0].size and stored[0].shape:
            yield _together(printable(f"{path.stem}/{label}".rstrip("/")), stored, others)


def _arrays(path: Path) -> dict[str, Any]:
    """The arrays of a file by name, "" for one without a name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if path.suffix == ".pt":
                import torch

                loaded = torch.load(str(path), map_location="cpu", weights_only=True)
                return dict(_leaves("", loaded, torch.Tensor))
            if path.suffix == ".safetensors":
                try:
                    from safetensors.torch import load_file  # it has bfloat16
                except ImportError:
                    from safetensors.numpy import load_file
                return load_file(str(path))
            loaded = np.load(path, allow_pickle=False)
            made = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
            if not all(isinstance(each, np.ndarray) for each in made.values()):
                raise ValueError("a member is no array as numpy.save writes it")
            return made
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        raise MissingLibraryError(
            f"{printable(path)} is read by {name}, which could not be imported ({error}): "
            f"pip install {name}"
        ) from error
    except Exception as error:  # zlib, zipfile, safetensors and torch have errors of their own
        # torch's later lines tell how to unpickle, which is unsafe.
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{printable(path)} is not a readable {path.suffix} file: {printable(why, 300)}"
        ) from error


def _leaves(name: str, loaded: object, tensor: type) -> Iterator[tuple[str, Any]]:
    """Tensors and floats in nested dicts, lists and tuples, each with its keys as a name."""
    if isinstance(loaded, tensor):
        yield name, loaded.detach()
    elif isinstance(loaded, float):
        yield name, np.asarray(loaded)  # an eps, as Python saves it
    elif isinstance(loaded, (dict, list, tuple)):
        for key, value in loaded.items() if isinstance(loaded, dict) else enumerate(loaded):
            yield from _leaves(f"{name}/{key}".lstrip("/"), value, tensor)


def _together(
    name: str, x: tuple[np.ndarray, str], others: dict[str, tuple[np.ndarray, str]]
) -> Activations:
    """One norm's tensors, their shapes checked."""
    shape = x[0].shape
    last = shape[-1:]
    for field, expected in {"dy": shape, "weight": last, "bias": last, "eps": ()}.items():
        found = others[field][0].shape if field in others else expected
        if found != expected:
            raise ValueError(
                f"{name}: {field} has shape {found}, x has {shape}; expected {expected}"
            )
    fields = {field: values for field, (values, _) in others.items()}
    if "dy" in fields:
        fields["dy"] = fields["dy"].reshape(-1, shape[-1])
    if "eps" in fields:
        fields["eps"] = float(fields["eps"])
        if not np.isfinite(fields["eps"]):
            raise ValueError(f"{name}: eps is {fields['eps']}; expected a finite number")
    dtypes = {field: dtype for field, (_, dtype) in {"x": x, **others}.items()}
    return Activations(name, x[0].reshape(-1, shape[-1]), dtypes, **fields)
