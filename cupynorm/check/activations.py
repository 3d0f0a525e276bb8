"""Activations to check kernels on: from a pretrained model, in the package, and from users' files.

Files are never unpickled, so reading one runs no code of its author.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, decode, encode
from ..gpu.nvrtc import MissingLibraryError
from .cases import Case, Problem, random_problem

_FIELDS = ("x", "dy", "weight", "bias", "eps")
_SHIPPED = Path(__file__).parents[1] / "data" / "minilm_layer_norms.npz"
_SAFETENSORS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


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

    Raises ValueError for a malformed file or one with pickled objects, FileNotFoundError for a
    missing one, MissingLibraryError for .pt without torch.
    """
    path = Path(path)
    if path.suffix not in _READERS:
        known = ", ".join(_READERS)
        raise ValueError(
            f"{path} is of no known format; expected a name that ends in one of {known}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")

    def leave_out(name: str, why: str) -> None:
        note(f"{path.name}: {name or 'the array'} is left out, it has {why}")

    found: dict[str, Stored] = {}
    for name, (array, dtype) in _READERS[path.suffix](path).items():
        if dtype not in DTYPES:
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
        yield _together(f"{path.stem}/{label}".rstrip("/"), stored, others)


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


# Readers: name -> (array in its storage dtype, name of the dtype); None for an unknown dtype.


def _read_numpy(path: Path) -> dict[str, tuple[np.ndarray | None, str]]:
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"": loaded}
        if not isinstance(loaded, np.ndarray):
            arrays = {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        if "allow_pickle" in str(error):
            raise ValueError(
                f"{path} holds pickled objects, which are not read; save plain numeric arrays"
            ) from error
        raise ValueError(f"{path} is not a readable {path.suffix} file: {error}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(
                f"{path} is not a readable {path.suffix} file: its member {name} is no array"
            )
    return {name: (array, array.dtype.name) for name, array in arrays.items()}


def _read_safetensors(path: Path) -> dict[str, tuple[np.ndarray | None, str]]:
    """8 bytes of header length, a JSON header of dtype, shape and data_offsets, then the data.

    The safetensors package would be one more dependency, and has no bfloat16 for NumPy.
    """
    raw = path.read_bytes()
    try:
        length = int.from_bytes(raw[:8], "little")
        if len(raw) < 8 or length > len(raw) - 8:
            raise ValueError(
                f"the header should have {length} bytes, the file has {max(0, len(raw) - 8)} left"
            )
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        data = memoryview(raw)[8 + length :]
        arrays = {}
        for name, entry in header.items():
            dtype = _SAFETENSORS.get(entry["dtype"])
            if dtype is None:
                arrays[name] = (None, entry["dtype"])
                continue
            first, last = entry["data_offsets"]
            if not isinstance(entry["shape"], list):
                raise ValueError(f"{name} has shape {entry['shape']}")
            if not 0 <= first <= last <= len(data):
                raise ValueError(f"{name} is at bytes {first} to {last} of {len(data)}")
            storage = DTYPES[dtype].storage
            values = np.frombuffer(data[first:last], storage.newbyteorder("<"))
            arrays[name] = values.astype(storage, copy=False).reshape(entry["shape"]), dtype
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable .safetensors file: {error}") from error
    return arrays


def _read_torch(path: Path) -> dict[str, tuple[np.ndarray | None, str]]:
    try:
        import torch
    except ImportError as error:
        raise MissingLibraryError(
            f"{path} is read by torch, which could not be imported ({error}): pip install torch"
        ) from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types; later lines tell how to unpickle, which is unsafe
        first = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{path} is not a .pt file of tensors alone, and pickled objects are not read: {first}"
        ) from error

    arrays = {}

    def collect(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if value.layout is not torch.strided:
                dtype = f"{dtype} in layout {value.layout}"
            if dtype not in DTYPES:
                arrays[name] = None, dtype
                return
            value = value.detach().cpu().contiguous()
            value = value.view(torch.int16) if dtype == "bfloat16" else value
            arrays[name] = value.numpy(), dtype
        elif isinstance(value, float):
            arrays[name] = (np.asarray(value), "float64")  # an eps, as Python saves it
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                collect(item, f"{name}/{key}".lstrip("/"))

    collect(loaded, "")
    return arrays


_READERS = {
    ".npy": _read_numpy,
    ".npz": _read_numpy,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
}
