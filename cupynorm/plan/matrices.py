"""Launches of the kernels that take a whole matrix: quantize, reduce_matrix and update_scales.
Pure Python, no GPU needed. docs/experiments.md has the measurements behind the integers.
"""

from __future__ import annotations

from ..dtypes import DTYPES, ELEMENTS, compute_dtype
from .devices import Device
from .grids import parameters_launch
from .instances import Kernel, Launch, cpp_bool, cpp_name, cpp_names, parameters_instance
from .problem import Layout, Problem, Tile, ceil_div


def quantize_launch(
    num_rows: int,
    num_cols: int,
    x: str,
    y: str,
    pack_limit: int,
    *,
    centered: bool | None = None,
    weight: str | None = None,
    bias: str | None = None,
    zero_centered: bool = False,
    sums: str | None = None,
    scaling: str = "given",
) -> tuple[Launch, ...]:
    """The kernel that quantizes a matrix to the 8-bit dtype y and transposes the result.

    x: the dtype of the matrix; equal to y if the kernel only transposes.
    centered: quantizes the output of this norm of x; None quantizes x itself.
    sums: the dtype of sums of x over rows, for which a second kernel adds up those of squares.
    scaling: "given", or "tensor" for a scale from x's known amax.
    """
    source = (
        f"BytesSource<{cpp_name(y)}>"
        if x == y
        else f"ScaledSource<{cpp_name(x)}, {cpp_name(y)}, Scaling::{scaling}>"
    )
    if centered is not None:
        flags = f"{cpp_bool(centered)}, {cpp_bool(zero_centered)}"
        source = f"NormalizedSource<{cpp_names(x, weight, bias)}, {flags}, {cpp_names(None, y)}>"
    pack_size = min(pack_limit, 16 // ELEMENTS[x].itemsize)
    lanes = 128 // pack_size
    # More small packs are in flight, each with an address: too many for the 80 registers a thread
    # has with three blocks.
    small = pack_size * ELEMENTS[x].itemsize < 16 and (pack_size > 1 or scaling == "tensor")
    blocks_per_sm = 2 if small or x == "float64" else 3
    if centered is not None and pack_size == 8 and {weight, bias} <= {x, None}:
        blocks_per_sm = 4
    tile = Tile(pack_size, lanes, rows_per_block=256 // lanes, blocks_per_sm=blocks_per_sm)
    squares = ceil_div(num_rows, 128) * ceil_div(num_cols, 128)
    kernel = Kernel("quantize.cu", f"quantize<{source}, {cpp_bool(sums)}, {tile.cpp}>")
    if sums is None:
        return (Launch(kernel, tile, squares, tile.block_size, 128 * 128),)
    smem_bytes = 128 * (128 + tile.rows_per_block * compute_dtype(x).itemsize)
    last = _sums_launch(num_cols, x, pack_limit, sums)
    return Launch(kernel, tile, squares, tile.block_size, smem_bytes), last


def _sums_launch(
    num_cols: int, x: str, pack_limit: int, sums: str, *, overlaps: bool = False
) -> Launch:
    """The kernel that adds up partial sums over rows: what backward does for dbias."""
    layout = Layout(pack_limit, contiguous=True)
    problem = Problem("backward", False, num_cols, x, layout, dbias=sums)
    instance = parameters_instance(problem, has_partials=True)
    return parameters_launch(problem, *instance, overlaps=overlaps)


# Blocks for each resident block: it sets the rows of a slab.
_BLOCKS_PER_RESIDENT = 4


def reduce_matrix_launch(
    device: Device, num_rows: int, num_cols: int, x: str, pack_limit: int, sums: str | None = None
) -> tuple[tuple[Launch, ...], int, int]:
    """The launches of reduce_matrix for an x of this dtype, and the number and the rows of slabs.

    Without sums, one kernel finds the largest magnitude. With sums, a dtype, it sums over the rows
    of each slab, and a second kernel adds up the slabs.
    """
    pack_size = min(pack_limit, 16 // DTYPES[x].itemsize)
    tile = Tile(pack_size, 16, 6, 16, blocks_per_sm=4)
    rows_at_once = tile.rows_per_block * tile.packs_per_thread
    across = ceil_div(num_cols, tile.threads_per_row * pack_size)
    wanted = ceil_div(_BLOCKS_PER_RESIDENT * tile.blocks_per_sm * device.num_sms, max(across, 1))
    rows_of_slab = ceil_div(max(num_rows, 1), wanted * rows_at_once) * rows_at_once
    num_slabs = ceil_div(num_rows, rows_of_slab)
    kernel = Kernel(
        "reduce_matrix.cu", f"reduce_matrix<{cpp_name(x)}, {cpp_bool(sums)}, {tile.cpp}>"
    )
    smem_bytes = tile.block_size * pack_size * compute_dtype(x).itemsize if sums else 0
    launch = Launch(kernel, tile, num_slabs * across, tile.block_size, smem_bytes)
    if sums is None:
        return (launch,), num_slabs, rows_of_slab
    overlaps = device.compute_capability >= 90
    last = _sums_launch(num_cols, x, pack_limit, sums, overlaps=overlaps)
    return (launch, last), num_slabs, rows_of_slab


def update_scales_launch(num_tensors: int) -> Launch:
    """The kernel that ends a step of delayed scaling, with one block for each tensor."""
    tile = Tile(1, 256)
    return Launch(
        Kernel("update_scales.cu", f"update_scales<{tile.cpp}>"),
        tile,
        num_tensors,
        tile.block_size,
        256,
    )
