"""Problems and devices of the tests of plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cupynorm.dispatch.devices import DEVICES, Device
from cupynorm.dispatch.measured import Row
from cupynorm.dispatch.problem import SCALINGS, Layout, Problem, Tile
from cupynorm.dispatch.strategies import STRATEGIES
from cupynorm.dtypes import DTYPES

CUDA_SRC = Path(__file__).parents[2] / "cuda_src"
TABLE = tuple(STRATEGIES)
H200 = DEVICES["H200"]
GPUS = ("A100", "RTX 4090", "H100", "H200", "B200")
DIRECTIONS = ("forward", "backward")
RING = Tile(8, 96, 2, stages=3, path="ring")
QUANTIZED = {"y": "float8_e4m3fn", "scaling": "row"}


def problem_of(
    num_cols: int, dtype: str = "bfloat16", direction: str = "forward", **changes: object
) -> Problem:
    tensors: dict = {"y": dtype, "weight": dtype, "bias": dtype}
    if direction == "backward":
        tensors = {"weight": dtype, "dy": dtype, "dx": dtype, "dweight": dtype, "dbias": dtype}
    tensors["layout"] = Layout.of_new_arrays(num_cols)
    return Problem(
        direction, num_cols=num_cols, x=dtype, **({"centered": True} | tensors | changes)
    )


def forward(num_cols: int = 1024, x: str = "bfloat16", **changes: object) -> Problem:
    return problem_of(num_cols, x, "forward", **changes)


def backward(num_cols: int = 1024, x: str = "bfloat16", **changes: object) -> Problem:
    return problem_of(num_cols, x, "backward", **changes)


def problem_of_row(row: Row, norm: str, dtype: str, num_cols: int) -> Problem:
    """A problem of the class of a row of a data file, as large as possible: with all parameters."""
    first, *words = row.kind.split()
    layout = Layout(int(first) // DTYPES[dtype].itemsize, contiguous=True)
    wide = "float32" if "wide" in words else dtype
    bias = wide if norm == "layer_norm" else None
    named = {"weight": wide}
    if row.direction == "forward":
        scaling = next((word for word in words if word in SCALINGS), None)
        named |= {"y": "float8_e4m3fn" if scaling else dtype, "bias": bias, "scaling": scaling}
        named |= {"residual": "residual" in words, "amax": "amax" in words}
    else:
        named |= {"dy": dtype, "dx": dtype, "dweight": wide, "dbias": bias}
        named["dsum"] = dtype if "dsum" in words else None
    return Problem(row.direction, norm == "layer_norm", num_cols, dtype, layout, **named)


def widths_of_row(row: Row) -> list[int]:
    """Widths of a row's class at its ends and between them."""
    step = max(row.step, int(row.kind.split()[0]) // DTYPES[row.dtype.split("|")[0]].itemsize)
    first, last = -(-row.from_cols // step) * step, row.to_cols // step * step
    return sorted({first, last, (first + last) // 2 // step * step, min(first + step, last)} - {0})


def without_file(name: str) -> Device:
    """The device by another name, which no data file is for: the model decides."""
    return replace(DEVICES[name], name=f"{name} by the model")


def slice_of(num_cols: int, tile: Tile) -> int:
    """Columns of the widest slice of a cluster, in steps of 8 packs."""
    if tile.cluster_size == 1:
        return num_cols
    return -(-num_cols // (8 * tile.pack_size * tile.cluster_size)) * 8 * tile.pack_size


def pack_limit(num_cols: int, operands: list[tuple[int, int, int]]) -> int:
    """Of tensors of several rows: address, row stride, itemsize."""
    if not operands:
        return Layout.of_new_arrays(num_cols).pack_limit
    return Layout.of(num_cols, [(*each, 9) for each in operands]).pack_limit
