"""Problems, devices and a tile of the tests of tile_model.py."""

from __future__ import annotations

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.problem import Layout, Problem, Tile

H200, A100, RTX_4090, RTX_5090 = (
    DEVICES[name] for name in ("H200", "A100", "RTX 4090", "RTX 5090")
)


def forward(num_cols: int = 1024, x: str = "bfloat16", **changes: object) -> Problem:
    named = {"y": x, "weight": x, "bias": x, "layout": Layout.of_new_arrays(num_cols), **changes}
    return Problem("forward", **{"centered": True, "num_cols": num_cols, "x": x} | named)


def backward(num_cols: int = 1024, x: str = "bfloat16", **changes: object) -> Problem:
    named = dict.fromkeys(("weight", "dy", "dx", "dweight", "dbias"), x)
    named |= {"layout": Layout.of_new_arrays(num_cols), **changes}
    return Problem("backward", **{"centered": True, "num_cols": num_cols, "x": x} | named)


RING = Tile(8, 96, 2, stages=3, path="ring")
QUANTIZED = {"y": "float8_e4m3fn", "scaling": "row"}
