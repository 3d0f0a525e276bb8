"""Launches of the kernels for rows whose columns are on several ranks (cuda_src/split_*.cu).
Pure Python, no GPU needed.
"""

from __future__ import annotations

from typing import NamedTuple

from ..dtypes import DTYPES, compute_dtype
from .devices import Device
from .grids import parameters_launch
from .instances import Kernel, Launch, cpp_bool, cpp_name, cpp_names, parameters_instance
from .problem import Layout, Problem, Tile, ceil_div


class Part(NamedTuple):
    """What one rank has of the rows: dtypes, extents, and the widest pack that all tensors allow.

    y: of y or dy. Dtypes of absent tensors are None.
    """

    num_rows: int
    num_cols: int
    pack_limit: int
    centered: bool
    x: str
    y: str | None = None
    weight: str | None = None
    bias: str | None = None
    zero_centered: bool = False

    @property
    def pack_size(self) -> int:
        widest = max(DTYPES[name].itemsize for name in (self.x, self.y) if name)
        return min(self.pack_limit, 16 // widest)

    @property
    def load_weight(self) -> str:
        return f"LoadParameter<{cpp_name(self.weight)}, {cpp_bool(self.zero_centered)}>"


# Threads that share a row, and the most packs and elements of it in each. The first that hold the
# row are chosen. docs/experiments.md has the measurements.
HOLDERS = ((32, 4, 32), (64, 4, 32), (128, 4, 32), (256, 7, 56), (512, 8, 32), (1024, 8, 32))


def row_tile(part: Part) -> Tile:
    """The tile of a kernel in which a block owns a row."""
    pack_size = part.pack_size
    num_packs = ceil_div(part.num_cols, pack_size)
    for threads, most_packs, most_elements in HOLDERS:
        packs = ceil_div(num_packs, threads)
        if packs <= min(most_packs, most_elements // pack_size):
            blocks_per_sm = max(1, 704 // threads)
            return Tile(pack_size, threads, packs, blocks_per_sm=blocks_per_sm, path="registers")
    return Tile(pack_size, 512, blocks_per_sm=2, path="uncached")


def _row_launch(part: Part, name: str, types: str) -> Launch:
    tile = row_tile(part)
    # BlockReduce::smem_bytes of cuda_src/reduce/reduce.cuh.
    smem_bytes = 2 * 3 * (tile.block_size // 32) * compute_dtype(part.x).itemsize
    kernel = Kernel(f"{name}.cu", f"{name}<{types}, {tile.cpp}>")
    return Launch(kernel, tile, part.num_rows, tile.block_size, ceil_div(smem_bytes, 16) * 16)


def statistics_launch(part: Part) -> Launch:
    """The launch of split_statistics.cu."""
    types = f"{cpp_name(part.x)}, {cpp_bool(part.centered)}"
    return _row_launch(part, "split_statistics", types)


def normalize_launch(part: Part, *, combines: bool) -> Launch:
    """combines: the statistics from those of all ranks, else those that an earlier launch saved."""
    outputs = cpp_names(part.y, part.weight, part.bias)
    store = f"Store<{outputs}, {cpp_bool(part.zero_centered)}>"
    flags = f"{cpp_bool(part.centered)}, {cpp_bool(combines)}"
    return _row_launch(part, "split_normalize", f"{cpp_name(part.x)}, {store}, {flags}")


def sums_launch(part: Part) -> Launch:
    """The launch of split_sums.cu."""
    types = f"{cpp_names(part.x, part.y)}, {part.load_weight}, {cpp_bool(part.centered)}"
    return _row_launch(part, "split_sums", types)


# Blocks for each resident block: it sets the rows of a slab.
_BLOCKS_PER_RESIDENT = 4


class Slabs(NamedTuple):
    """Rows that one block adds up, and how many such slabs there are."""

    count: int
    num_rows: int


def gradients_launches(
    part: Part, device: Device, *, dx: bool, dweight: str | None, dbias: str | None
) -> tuple[tuple[Launch, ...], Slabs]:
    """dx: whether it is wanted. dweight, dbias: their dtypes, or None: then there is one launch."""
    pack_size = part.pack_size
    blocks_per_sm = 3 if device.compute_capability < 100 else 2  # sm_100 spills with three
    tile = Tile(pack_size, 32, 2 if pack_size > 1 else 4, 8, blocks_per_sm=blocks_per_sm)
    rows_at_once = tile.rows_per_block * tile.packs_per_thread
    across = ceil_div(part.num_cols, tile.threads_per_row * pack_size)
    wanted = ceil_div(_BLOCKS_PER_RESIDENT * tile.blocks_per_sm * device.num_sms, across)
    rows_of_slab = ceil_div(part.num_rows, wanted * rows_at_once) * rows_at_once
    slabs = Slabs(ceil_div(part.num_rows, rows_of_slab), rows_of_slab)
    gradients = (
        f"Gradients{{.dx = {cpp_bool(dx)}, .dweight = {cpp_bool(dweight)}, "
        f".dbias = {cpp_bool(dbias)}}}"
    )
    types = (
        f"{cpp_names(part.x, part.y)}, {part.load_weight}, {gradients}, {cpp_bool(part.centered)}"
    )
    kernel = Kernel("split_gradients.cu", f"split_gradients<{types}, {tile.cpp}>")
    smem_bytes = tile.block_size * pack_size * compute_dtype(part.x).itemsize
    launch = Launch(kernel, tile, slabs.count * across, tile.block_size, smem_bytes)
    if dweight is None and dbias is None:
        return (launch,), slabs
    layout = Layout(part.pack_limit, contiguous=True)
    problem = Problem(
        "backward", part.centered, part.num_cols, part.x, layout, dweight=dweight, dbias=dbias
    )
    instance = parameters_instance(problem, has_partials=True)
    last = parameters_launch(problem, *instance, overlaps=device.compute_capability >= 90)
    return (launch, last), slabs
