"""How many blocks a kernel is launched with, on any path, and how rows are divided among them.
Pure Python, no GPU needed. docs/experiments.md has the measurements behind the integers.
"""

from __future__ import annotations

from ..dtypes import DTYPES
from .abilities import MOST_BYTES_MADE
from .devices import Device
from .instances import Choice, Kernel, Launch
from .problem import Problem, Tile, ceil_div
from .tile_model import smem_bytes_of

# Forward to 8 bits, rows in registers. "Queue" means the hardware's queue: blocks that start when
# a resident block ends.
#
# A block runs a few dozen instructions before its first row. With many rows each block therefore
# takes this many groups of rows.
_QUANTIZED_GROUPS = 4
# With fewer rows, the queue needs this many blocks for each resident one. It then evens out the
# bandwidth that multiprocessors get. With fewer than two blocks for each there is no queue.
_QUEUED_QUANTIZED, _QUEUED_GIVEN = 4, 12  # for scales that the kernel finds, for a given scale
# A tensor's scale takes a second launch, which reads the rows again. Resident blocks alone visit
# rows in order, which leaves more of them in the L2 cache: up to this many groups for each block.
_RESIDENT_TENSOR = 14

# Bytes of x that a block, or a cluster of 2, takes through a ring before it ends and the next one
# in the queue starts. Quantizing blocks take more, because they start more slowly. Larger clusters
# stay resident: they are slow to start.
_QUEUED_RING_BYTES, _QUEUED_QUANTIZED_BYTES, _QUEUED_CLUSTER_SIZE = 256 * 1024, 1024 * 1024, 2

# Turns that a warp with bundles takes before its block ends.
_BUNDLE_TURNS = 4


def queued_ring_bytes(problem: Problem) -> int | None:
    """Forward: bytes of x that a block takes before it ends; None if blocks stay resident."""
    if not problem.scaling or not problem.centered:
        return _QUEUED_RING_BYTES
    return None if problem.cols_of_scale is not None else _QUEUED_QUANTIZED_BYTES


def queued_bundles(tile: Tile) -> int:
    """Forward: bundles that a warp takes before its block ends."""
    return max(2, ceil_div(_BUNDLE_TURNS * 32 // tile.threads_per_row, tile.bundle))


def _quantized_blocks(problem: Problem, groups: int, resident: int) -> int:
    """The number of blocks, or clusters, that write y in 8 bits from registers."""
    few = ceil_div(groups, _QUANTIZED_GROUPS)
    if problem.scaling == "tensor":
        return resident if groups < _RESIDENT_TENSOR * resident else max(resident, few)
    if groups < 2 * resident:
        return resident
    queued = _QUEUED_GIVEN if problem.scaling == "given" else _QUEUED_QUANTIZED
    return max(min(groups, queued * resident), few)


# Resident blocks take this share of the rows. Blocks from the queue take the rest, a few rows each,
# which evens out the bandwidth that multiprocessors get. One block of LayerNorm alone on a
# multiprocessor takes all its rows at once: nothing would hide the start of the next block.
_SHARE_OF_FIRST, _ROWS_OF_LATER, _FEWEST_ROWS_OF_FIRST = 0.9, 2, 4


def fetches_ahead(problem: Problem, tile: Tile) -> bool:
    """Whether a block that finds the scales of a row in registers prefetches the next row.

    It mirrors fetches_ahead in cuda_src/fp8/quantize_store.cuh.
    """
    plain = not problem.extras & {"residual", "input", "wide"}
    registers = 512 // ceil_div(tile.block_size * tile.blocks_per_sm, 128) // 8 * 8
    elements = tile.elements
    bytes_made = elements * DTYPES[problem.compute].itemsize
    keeps_y = problem.cols_of_scale is not None and bytes_made <= MOST_BYTES_MADE
    fits = registers >= elements + elements // 2 + 32 + 8 * (not tile.exact)
    return plain and keeps_y and fits and tile.pack_size == 8 and problem.itemsize == 2


def _stays(choice: Choice, problem: Problem) -> bool:
    """Forward, rows in registers: whether blocks stay resident because they prefetch a row."""
    tile = choice.tile
    in_block = choice.strategy == "block" and tile.path == "registers"
    return in_block and choice.amax_kernel is None and fetches_ahead(problem, tile)


def shares_of_first(
    choice: Choice, problem: Problem, device: Device, num_rows: int, sm_margin: int
) -> tuple[int, int]:
    """num_first and rows_of_first of a Launch; 0 if all blocks take the same number of rows."""
    tile = choice.tile
    if tile.path == "ring":
        small = tile.cluster_size <= _QUEUED_CLUSTER_SIZE
        divides = problem.scaling is not None and not problem.centered and small
    else:
        divides = choice.resident > 1 and _stays(choice, problem)
    if not divides or sm_margin:
        return 0, 0
    places = dict(device.clusters)[tile.cluster_size] if tile.cluster_size > 1 else device.num_sms
    num_first = choice.resident * places
    rows_of_first = int(_SHARE_OF_FIRST * num_rows / num_first)
    return (num_first, rows_of_first) if rows_of_first >= _FEWEST_ROWS_OF_FIRST else (0, 0)


def grid_size(
    choice: Choice, problem: Problem, device: Device, num_rows: int, sm_margin: int
) -> int:
    """The number of blocks of the first kernel.

    Forward usually launches one block for each group of rows, and the hardware queues them. With
    an sm_margin, and backward, all blocks are resident. Backward keeps its sums from row to row.
    """
    tile = choice.tile
    groups = ceil_div(num_rows, tile.rows_per_block)
    most = (2**31 - 1) // tile.cluster_size
    if tile.cluster_size > 1:
        clusters = dict(device.clusters)[tile.cluster_size]
        left = clusters - ceil_div(sm_margin * clusters, device.num_sms)
        if left < 1:
            raise ValueError(
                f"sm_margin is {sm_margin}; it leaves {device.num_sms - sm_margin} "
                f"multiprocessors of {device.name}, too few for a cluster of {tile.cluster_size}"
            )
        resident = left * choice.resident
    else:
        resident = (device.num_sms - sm_margin) * choice.resident
    if not problem.forward or sm_margin or (tile.cluster_size > 1 and tile.path == "smem"):
        # Resident blocks: what they keep in shared memory is reused from row to row.
        return min(groups, resident) * tile.cluster_size
    if tile.path == "bundle":
        rows = tile.bundle * queued_bundles(tile) * tile.block_size // 32
        return min(groups, max(resident, ceil_div(num_rows, rows)), most)
    num_first, rows_of_first = shares_of_first(choice, problem, device, num_rows, sm_margin)
    if num_first:
        later = ceil_div(num_rows - num_first * rows_of_first, _ROWS_OF_LATER)
        return min(num_first + later, most) * tile.cluster_size
    if _stays(choice, problem):
        return min(groups, resident)
    if tile.path == "ring":
        small = tile.cluster_size <= _QUEUED_CLUSTER_SIZE
        queued = 0  # only resident blocks
        if small and (queued_bytes := queued_ring_bytes(problem)):
            row_bytes = problem.num_cols * problem.itemsize
            queued = ceil_div(num_rows, max(1, queued_bytes * tile.cluster_size // row_bytes))
        return min(groups, max(resident, queued), most) * tile.cluster_size
    if problem.scaling and tile.path == "registers":
        return min(groups, _quantized_blocks(problem, groups, resident), most) * tile.cluster_size
    return min(groups, most) * tile.cluster_size


def parameters_launch(
    problem: Problem,
    tile: Tile,
    kernel: Kernel,
    *,
    overlaps: bool = False,
    most_blocks: int | None = None,
) -> Launch:
    """The launch of backward_parameters.cu."""
    grid = ceil_div(problem.num_cols, tile.threads_per_row * tile.pack_size)
    grid = grid if most_blocks is None else min(grid, max(most_blocks, 1))
    return Launch(
        kernel,
        tile,
        grid,
        tile.block_size,
        smem_bytes_of(problem, tile, "parameters"),
        overlaps=overlaps,
    )
