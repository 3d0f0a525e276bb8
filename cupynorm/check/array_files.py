"""Arrays of .npy, .npz, .safetensors and .pt files, which may be damaged or made by strangers.

No file is unpickled, so reading one runs no code of its author. What a header claims is compared
with the size of its file, and with the memory that arrays may take, before any memory is taken.
"""

from __future__ import annotations

import io
import json
import math
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..dtypes import DTYPES
from ..gpu.nvrtc import MissingLibraryError
from ..table import printable

# name -> (array in its storage dtype, name of the dtype); no array of a dtype without kernels.
Arrays = dict[str, tuple[np.ndarray | None, str]]

_SAFETENSORS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_OLDEST_TORCH = (2, 6)  # torch.load of former versions may run a file's code
_MOST_BYTES = 2**34
_MOST_NPY_HEADER = 10_000  # as in NumPy
_MOST_JSON = 100_000_000  # as in the safetensors package
_MOST_VALUES, _MOST_LEVELS, _LONGEST_NAME = 1_000_000, 100, 250


def read_arrays(path: Path) -> Arrays:
    """The arrays of a file by name, "" for one without a name.

    Raises ValueError for a file that is damaged, encrypted or too large, and for one with pickled
    objects, MissingLibraryError for .pt without torch.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return READERS[path.suffix](path)
    except MissingLibraryError:
        raise
    except Exception as error:  # zlib, struct, zipfile, json and torch have errors of their own
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{printable(path)} is not a readable {path.suffix} file: {printable(why, 300)}"
        ) from error


def _num_elements(shape: Iterable[object], named: str) -> int:
    """Raises ValueError for a shape that has more than plain numbers of 0 or more."""
    shape = list(shape)
    if not _are_whole(shape):
        raise ValueError(f"{named} has shape {shape}; expected whole numbers of 0 or more")
    return math.prod(shape)


def _are_whole(numbers: list[object]) -> bool:
    return all(type(each) is int and 0 <= each < 2**63 for each in numbers)


def _check_memory(num_elements: int) -> None:
    """Raises ValueError for more elements than are read."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min(_MOST_BYTES, memory // 4)
    if 8 * num_elements > most:
        raise ValueError(
            f"as float64 its arrays take more than {most / 2**30:.3g} GiB; expected at most a "
            "quarter of this machine's memory, and at most 16 GiB"
        )


# .npy and .npz


def _read_numpy(path: Path) -> Arrays:
    with path.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    if not is_zip:
        return _of_members({"": (path.stat().st_size, partial(path.open, "rb"))})
    with zipfile.ZipFile(path) as archive:
        return _of_members(
            {
                each.filename.removesuffix(".npy"): (each.file_size, partial(archive.open, each))
                for each in archive.infolist()
            }
        )


def _of_members(members: dict[str, tuple[int, Callable[[], IO[bytes]]]]) -> Arrays:
    """members: the size of each, and a function that opens it."""
    arrays: Arrays = {}
    wanted: dict[str, int] = {}
    for name, (size, opened) in members.items():
        with opened() as stream:
            shape, dtype = _npy_header(stream, size, name)
        arrays[name] = None, dtype.name
        if dtype.kind == "f" and dtype.name in DTYPES:
            wanted[name] = math.prod(shape)
    _check_memory(sum(wanted.values()))
    for name in wanted:
        with members[name][1]() as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
        arrays[name] = array, array.dtype.name
    return arrays


def _npy_header(stream: IO[bytes], size: int, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype. size: of the file or member. Raises ValueError if they do not fit it."""
    named = f"its member {name}" if name else "it"
    start = stream.read(12)
    if start[:1] == b"\x80":
        raise ValueError(f"{named} holds pickled objects, which are not read")
    if start[:6] != np.lib.format.MAGIC_PREFIX or len(start) < 12:
        raise ValueError(f"{named} is no array as numpy.save writes it")
    is_short = start[6] == 1
    length = 10 + int.from_bytes(start[8:10], "little")
    if not is_short:
        length = 12 + int.from_bytes(start[8:12], "little")
    if length > _MOST_NPY_HEADER:
        raise ValueError(f"{named} has a header of {length} bytes")
    header = io.BytesIO(start + stream.read(max(0, length - 12)))
    np.lib.format.read_magic(header)
    formats = np.lib.format
    read = formats.read_array_header_1_0 if is_short else formats.read_array_header_2_0
    shape, _, dtype = read(header)
    if dtype.hasobject:
        raise ValueError(f"{named} holds pickled objects, which are not read; save plain numbers")
    num_bytes = _num_elements(shape, named) * dtype.itemsize
    if num_bytes > size - length:
        raise ValueError(
            f"{named} has shape {shape} and dtype {dtype}, and {max(0, size - length)} bytes of "
            f"data; expected {num_bytes}"
        )
    return shape, dtype


# .safetensors


def _read_safetensors(path: Path) -> Arrays:
    """8 bytes of header length, a JSON header of dtype, shape and data_offsets, then the data.

    The safetensors package would be one more dependency, and has no bfloat16 for NumPy.
    """
    with path.open("rb") as stream:
        size = path.stat().st_size - 8
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size, _MOST_JSON):
            raise ValueError(f"the header should have {length} bytes, the file has {max(0, size)}")
        header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no object of JSON")
        header.pop("__metadata__", None)
        sizes = {name: _checked_entry(name, entry, size - length) for name, entry in header.items()}
        _check_memory(sum(sizes.values()))
        arrays: Arrays = {}
        for name, entry in header.items():
            dtype = _SAFETENSORS.get(entry["dtype"])
            if dtype is None:
                arrays[name] = None, entry["dtype"]
                continue
            stream.seek(8 + length + entry["data_offsets"][0])
            storage = DTYPES[dtype].storage
            raw = stream.read(sizes[name] * storage.itemsize)
            values = np.frombuffer(raw, storage.newbyteorder("<")).astype(storage, copy=False)
            arrays[name] = values.reshape(entry["shape"]), dtype
        return arrays


def _checked_entry(name: str, entry: Any, num_bytes: int) -> int:
    """The elements of an entry of the header, 0 of a dtype that is not read.

    num_bytes: of the data of all. Raises ValueError for bytes that do not fit them or the shape.
    """
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError(f"{name} has dtype {dtype} and shape {shape}; expected a name and a list")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_whole(offsets):
        raise ValueError(f"{name} has data_offsets {offsets}; expected two numbers")
    if dtype not in _SAFETENSORS:
        return 0
    num_elements = _num_elements(shape, name)
    expected = num_elements * DTYPES[_SAFETENSORS[dtype]].storage.itemsize
    first, last = offsets
    if last - first != expected or last > num_bytes:
        raise ValueError(
            f"{name} has shape {shape}, dtype {dtype} and bytes {first} to {last} of {num_bytes}; "
            f"expected {expected} bytes"
        )
    return num_elements


# .pt


def _read_torch(path: Path) -> Arrays:
    try:
        import torch
    except ImportError as error:
        raise MissingLibraryError(
            f"{printable(path)} is read by torch, which could not be imported ({error}): "
            "pip install torch"
        ) from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        raise ValueError(
            f"torch {torch.__version__} may run code of the file; expected torch 2.6 or later"
        )
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    is_packed = any(each.compress_type != zipfile.ZIP_STORED for each in members)
    if is_packed or sum(each.file_size for each in members) > path.stat().st_size:
        raise ValueError("its members are compressed or overlap; expected them as torch.save does")
    try:
        # With mmap storages are parts of the file. What they claim to hold takes no memory.
        loaded = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many types; later lines tell how to unpickle, which is unsafe
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"pickled objects are not read, only tensors: {first}") from error

    found = dict(_leaves(loaded, torch.Tensor))
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
    _check_memory(sum(math.prod(each.shape) for each in tensors.values() if _dtype(each) in DTYPES))
    arrays: Arrays = {}
    for name, value in found.items():
        if name not in tensors:
            arrays[name] = np.asarray(value), "float64"  # an eps, as Python saves it
            continue
        dtype = _dtype(value)
        arrays[name] = None, dtype
        if dtype in DTYPES:
            value = value.detach().resolve_neg().contiguous()
            value = value.view(torch.int16) if dtype == "bfloat16" else value
            arrays[name] = value.numpy(), dtype
    return arrays


def _dtype(tensor: Any) -> str:
    """The name of its dtype, with what else keeps it from being read."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        return f"{dtype} in layout {tensor.layout}"
    return dtype if tensor.device.type == "cpu" else f"{dtype} on {tensor.device}"


def _leaves(loaded: object, tensor: type) -> Iterator[tuple[str, Any]]:
    """Tensors and floats in nested dicts, lists and tuples, each with its keys as a name.

    Raises ValueError for more of them, or more levels, than a file of activations has: a dict may
    be in itself, and few bytes may stand for very many values.
    """
    levels, num_values = [iter([("", loaded)])], 0
    while levels:
        name, value = next(levels[-1], (None, None))
        if name is None:
            levels.pop()
            continue
        num_values += 1
        if num_values > _MOST_VALUES or len(levels) > _MOST_LEVELS or len(name) > _LONGEST_NAME:
            raise ValueError(
                f"it has more than {_MOST_VALUES} values or {_MOST_LEVELS} levels, or a name of "
                f"more than {_LONGEST_NAME} characters"
            )
        if isinstance(value, (tensor, float)):
            yield name, value
        elif isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            levels.append(_named(name, items))


def _named(above: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    for key, value in items:
        key = key if isinstance(key, (str, int)) else type(key).__name__
        yield f"{above}/{key}".lstrip("/"), value


READERS = {
    ".npy": _read_numpy,
    ".npz": _read_numpy,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
}
