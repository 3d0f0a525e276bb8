"""How kernels are launched: the blocks of each, what few rows get, and kernels of whole matrices.
Pure Python, no GPU needed. docs/experiments.md has the measurements behind the integers.
"""

from __future__ import annotations

from dataclasses import replace

from ..dtypes import DTYPES, ELEMENTS, compute_dtype
from .devices import Device
from .instances import (
    Choice,
    Kernel,
    KernelLaunch,
    cpp_bool,
    cpp_name,
    cpp_names,
    functor_structs,
    parameters_instance,
    row_arguments,
)
from .model import MOST_BYTES_MADE, blocks_that_fit, reduce_bytes, smem_bytes_of
from .problem import Layout, Problem, Tile, ceil_div

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

    It mirrors fetches_ahead in quantized_row.cuh.
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
    """num_first and rows_of_first of the launch; 0 if all blocks take the same number of rows."""
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
        queued_bytes = _QUEUED_RING_BYTES
        if problem.scaling and problem.centered:  # with scales of its own it stays resident
            queued_bytes = 0 if problem.cols_of_scale is not None else _QUEUED_QUANTIZED_BYTES
        queued = 0
        if queued_bytes and tile.cluster_size <= _QUEUED_CLUSTER_SIZE:
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
) -> KernelLaunch:
    """The launch of backward_parameters.cu."""
    grid = ceil_div(problem.num_cols, tile.threads_per_row * tile.pack_size)
    grid = grid if most_blocks is None else min(grid, max(most_blocks, 1))
    smem_bytes = smem_bytes_of(problem, tile, "parameters")
    return KernelLaunch(kernel, tile, grid, tile.block_size, smem_bytes, overlaps=overlaps)


# Backward in one launch: threads of a block, the fewest that are as many as rows; the rows that a
# group of threads adds up, at most; the elements of x, at most, because they are read twice.
_BLOCK_SIZES, _ROWS_OF_GROUP, _ELEMENTS = (128, 256, 512), 16, 2**22
# Forward: the share of a tile's blocks that must stay resident for weight and bias to load early,
# if rows take more than one turn. RMSNorm of rows of so few bytes in the lanes of a warp: the turns
# of rows whose weight loads early, if all packs are inside the row (1), and if not (0).
_EARLY_SHARE, _EARLY_LANES_BYTES = 0.8, 1024
_EARLY_LANES_TURNS = {1: range(3, 9), 0: range(2, 5)}
_FUSED = {"dsum", "dresidual", "wide"}


def for_few_rows(
    problem: Problem, device: Device, strategy: str, tile: Tile, num_rows: int, statistics: str
) -> Tile:
    """The tile, or one that computes the same bits of few rows sooner.

    It has more lanes a row, because PackSums (reduce.cuh) adds in the same order for
    any number of lanes. It has more rows a block, because many small blocks take longer to start.
    It loads weight and bias with the row. Rows are few if all are resident at once, in at most 32
    warps of each multiprocessor.
    """
    in_registers = strategy in ("warp", "block") and tile.path == "registers"
    if not problem.forward or not in_registers or problem.scaling:
        return tile
    few, itemsize = tile, problem.itemsize
    if strategy == "warp":
        few = _more_lanes(problem, device, tile, num_rows, statistics)
    # The turns of resident blocks for which fewer blocks with an early weight are faster.
    alone = not (problem.centered or problem.bias or problem.extras)
    narrow = strategy == "warp" and problem.num_cols * itemsize <= _EARLY_LANES_BYTES
    aligned = few.pack_size * itemsize == 16
    turns = _EARLY_LANES_TURNS[few.exact] if narrow and alone and aligned else range(0)
    return _early(problem, device, few, num_rows, turns)


def _early(problem: Problem, device: Device, tile: Tile, num_rows: int, lanes_turns: range) -> Tile:
    """The tile with weight and bias loaded early, if rows take few turns of resident blocks.

    A thread keeps them beside the row, so fewer blocks fit. Few are 1, lanes_turns, and 2 if as
    many blocks fit, or nearly.
    """
    if not (problem.weight or problem.bias) or problem.store:
        return tile
    early = replace(tile, early=1, blocks_per_sm=1)
    early = replace(
        early, blocks_per_sm=min(blocks_that_fit(problem, device, early), tile.blocks_per_sm)
    )

    def turns(of: Tile) -> int:
        return ceil_div(num_rows, max(1, of.blocks_per_sm) * of.rows_per_block * device.num_sms)

    few = turns(early) in (1, *lanes_turns) or (
        turns(early) <= min(2, turns(tile))
        and early.blocks_per_sm >= _EARLY_SHARE * tile.blocks_per_sm
    )
    return early if few and early.blocks_per_sm else tile


def _more_lanes(
    problem: Problem, device: Device, tile: Tile, num_rows: int, statistics: str
) -> Tile:
    most_lanes = min(32, 32 * 32 * device.num_sms // max(num_rows, 1))
    few = tile
    if tile.pack_size > 1 and (statistics == "two_pass" or not problem.centered):
        while few.packs_per_thread % 2 == 0 and 2 * few.threads_per_row <= most_lanes:
            lanes, packs = 2 * few.threads_per_row, few.packs_per_thread // 2
            few = replace(few, threads_per_row=lanes, packs_per_thread=packs)
    for block_size in (256, 128, tile.block_size):
        rows = block_size // few.threads_per_row
        fitting = replace(few, rows_per_block=rows, blocks_per_sm=1)
        fitting = replace(fitting, blocks_per_sm=blocks_that_fit(problem, device, fitting))
        blocks = ceil_div(num_rows, rows)
        if 2 * device.num_sms <= blocks <= fitting.blocks_per_sm * device.num_sms:
            return fitting
    return fitting if fitting.blocks_per_sm and few != tile else tile


def in_one_launch(choice: Choice, problem: Problem, num_rows: int) -> KernelLaunch | None:
    """backward_few.cu, where it is faster than a kernel of the strategy and one of the sums."""
    tile = choice.tile
    # Without a weight, the compiler fuses other operations where it sums dweight beside dx.
    whole = problem.dx and problem.weight and choice.parameters_kernel
    if not whole or problem.extras - _FUSED:
        return None
    if tile.path not in ("registers", "ring") or num_rows * problem.num_cols > _ELEMENTS:
        return None
    of_row = tile.threads_per_row * tile.cluster_size
    in_registers = tile.path == "registers"
    if of_row > (512 if tile.elements > 16 else 1024) or (in_registers and tile.cluster_size > 1):
        return None
    wanted = next((size for size in _BLOCK_SIZES if size >= num_rows), _BLOCK_SIZES[-1])
    together = 1 if in_registers and of_row > 32 else ceil_div(wanted, of_row)
    block_size = of_row * together
    lanes = 32 if num_rows <= block_size // 32 else 8
    sums = Tile(min(problem.widest_pack, 4), lanes, rows_per_block=block_size // lanes)
    if num_rows > _ROWS_OF_GROUP * sums.rows_per_block:
        return None
    few = replace(tile, rows_per_block=together, blocks_per_sm=1)
    # Shared memory of a block that has rows, or columns: the larger of the two.
    of_rows = 0
    if tile.path == "ring":
        of_rows = 2 * 4 * few.block_size * few.cluster_size // 32
    elif few.threads_per_row > 32:
        of_rows = reduce_bytes(problem, few.threads_per_row)
    of_cols = smem_bytes_of(problem, sums, "parameters")
    outputs, centered = cpp_names(problem.dweight, problem.dbias), cpp_bool(problem.centered)
    arguments = f"{row_arguments(problem)}, {outputs}, {centered}, {few.cpp}, {sums.cpp}"
    kernel = Kernel("backward_few.cu", f"backward_few<{arguments}>", functor_structs(problem))
    row_blocks = ceil_div(num_rows, together)
    blocks = row_blocks + ceil_div(problem.num_cols, sums.pack_size * sums.threads_per_row)
    smem_bytes = max(of_rows, of_cols)
    return KernelLaunch(kernel, few, blocks, block_size, smem_bytes, num_row_blocks=row_blocks)


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
) -> tuple[KernelLaunch, ...]:
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
        return (KernelLaunch(kernel, tile, squares, tile.block_size, 128 * 128),)
    smem_bytes = 128 * (128 + tile.rows_per_block * compute_dtype(x).itemsize)
    last = _sums_launch(num_cols, x, pack_limit, sums)
    return KernelLaunch(kernel, tile, squares, tile.block_size, smem_bytes), last


def _sums_launch(
    num_cols: int, x: str, pack_limit: int, sums: str, *, overlaps: bool = False
) -> KernelLaunch:
    """The kernel that adds up partial sums over rows: what backward does for dbias."""
    layout = Layout(pack_limit, contiguous=True)
    problem = Problem("backward", False, num_cols, x, layout, dbias=sums)
    instance = parameters_instance(problem, has_partials=True)
    return parameters_launch(problem, *instance, overlaps=overlaps)


# Blocks for each resident block: it sets the rows of a slab.
_BLOCKS_PER_RESIDENT = 4


def reduce_matrix_launch(
    device: Device, num_rows: int, num_cols: int, x: str, pack_limit: int, sums: str | None = None
) -> tuple[tuple[KernelLaunch, ...], int, int]:
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
    instance = f"reduce_matrix<{cpp_name(x)}, {cpp_bool(sums)}, {tile.cpp}>"
    kernel = Kernel("reduce_matrix.cu", instance)
    smem_bytes = tile.block_size * pack_size * compute_dtype(x).itemsize if sums else 0
    launch = KernelLaunch(kernel, tile, num_slabs * across, tile.block_size, smem_bytes)
    if sums is None:
        return (launch,), num_slabs, rows_of_slab
    overlaps = device.compute_capability >= 90
    last = _sums_launch(num_cols, x, pack_limit, sums, overlaps=overlaps)
    return (launch, last), num_slabs, rows_of_slab


def update_scales_launch(num_tensors: int) -> KernelLaunch:
    """The kernel that ends a step of delayed scaling, with one block for each tensor."""
    tile = Tile(1, 256)
    kernel = Kernel("update_scales.cu", f"update_scales<{tile.cpp}>")
    return KernelLaunch(kernel, tile, num_tensors, tile.block_size, 256)
