"""What a kernel can do: which problems rings, bundles and grids take, and when scales are found.
Pure Python, no GPU needed. Each function mirrors a condition of cuda_src.
"""

from __future__ import annotations

from ..dtypes import DTYPES
from .devices import Device
from .problem import SCALINGS, Problem, Tile

# The bytes of y that a thread keeps unpacked, at most, until the scale of an 8-bit row is known:
# the limit in cuda_src/rows/register_row.cuh.
MOST_BYTES_MADE = 320


def streamed(problem: Problem) -> list[int]:
    """Itemsizes of the tensors that the copy engine fetches for each row."""
    of_backward = [problem.x, problem.dy, problem.dsum]
    names = [problem.x] * (1 + problem.residual) if problem.forward else of_backward
    return [DTYPES[name].itemsize for name in names if name]


def can_ring(problem: Problem, device: Device) -> bool:
    """Whether a ring can take the rows: it needs the copy engine, float32 sums and registers."""
    alone = {"input", "load"}
    fused = problem.extras & (alone if problem.forward else alone | {"store"})
    return not fused and problem.compute == "float32" and device.compute_capability >= 90


def can_bundle(problem: Problem, device: Device) -> bool:
    """Whether several rows are contiguous in each tensor, and results can overwrite x."""
    names = [problem.x, problem.y]
    if not problem.forward:
        names = [problem.x, problem.dy, problem.dx, problem.dsum or problem.x]
    sizes = {DTYPES[name].itemsize if name in DTYPES else None for name in names}
    beside = {"residual", "dsum", "wide", "round_x_hat"} | ({"store"} if problem.forward else set())
    plain = len(sizes) == 1 and problem.extras <= beside
    plain = plain and problem.layout.contiguous and problem.compute == "float32"
    return plain and device.compute_capability >= 90


def is_only_quantized(problem: Problem) -> bool:
    """Whether it is forward of 16-bit rows to 8 bits in packs of 16 bytes, with nothing fused."""
    aligned = problem.widest_pack == 8 and problem.itemsize == 2
    return bool(problem.scaling) and aligned and problem.extras <= {*SCALINGS, "amax"}


def scales_at_once(problem: Problem, tile: Tile, strategy: str) -> bool:
    """Whether one launch finds the scales of y and writes it.

    Otherwise one launch finds the amaxes and a second one writes y. For scales of blocks of columns
    one launch is enough if all of y is in registers and lanes of one warp hold each block. No
    slice of a cluster and no warp's part of a ring may end inside a block.
    """
    if problem.scaling not in ("block", "block64"):
        return problem.scaling != "tensor"
    block = problem.cols_of_scale
    if tile.path == "ring":
        return tile.exact == 1 and 32 * tile.pack_size % block == 0
    width = tile.pack_size * tile.threads_per_row
    is_whole = tile.exact == 1 and tile.cols % block == 0
    whole_slices = strategy in ("warp", "block") or (strategy == "cluster" and is_whole)
    bytes_made = tile.elements * DTYPES[problem.compute].itemsize
    by_warps = width % block == 0 and block <= 32 * tile.pack_size
    by_lanes = block % width == 0 and tile.threads_per_row <= 32
    return whole_slices and 0 < bytes_made <= MOST_BYTES_MADE and (by_warps or by_lanes)
