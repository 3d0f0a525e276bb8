"""What a tile needs of a multiprocessor: registers, shared memory and warps.
Pure Python, no GPU needed.

Shared memory is exact: each function mirrors a struct of cuda_src. Registers are upper bounds,
from the values that a thread keeps for each element. Tests compile the chosen tiles and check that
they do not spill.
"""

from __future__ import annotations

from ..dtypes import DTYPES, FLOAT8S
from .devices import Device
from .problem import Problem, Tile, ceil_div, cols_of_slice

# The hardware reserves 1024 bytes of shared memory for each block.
RESERVED_BYTES = 1024

# The bytes of y that a thread keeps unpacked, at most, until the scale of an 8-bit row is known:
# the limit in cuda_src/register_budget.cuh.
MOST_BYTES_MADE = 320


# What a kernel can do.


def streamed(problem: Problem) -> list[int]:
    """Itemsizes of the tensors that the copy engine fetches for each row."""
    names = [problem.x, problem.dy, problem.dsum]
    names = [problem.x] * (1 + problem.residual) if problem.forward else names
    return [DTYPES[name].itemsize for name in names if name]


def can_ring(problem: Problem, device: Device) -> bool:
    """Whether a ring can take the problem's rows.

    It needs the copy engine and float32 sums. It has no registers left for random words or for
    an input of another dtype.
    """
    plain = problem.input is None and not problem.dropout and problem.row_scale is None
    plain = plain and problem.load is None
    plain = plain and (problem.forward or (problem.y is None and problem.store is None))
    return plain and problem.compute == "float32" and device.compute_capability >= 90


def can_bundle(problem: Problem, device: Device) -> bool:
    """Whether several rows are contiguous in each tensor, and results can overwrite x."""
    names = (
        [problem.x, problem.y]
        if problem.forward
        else [problem.x, problem.dy, problem.dx, problem.dsum or problem.x]
    )
    sizes = {DTYPES[name].itemsize if name and name not in FLOAT8S else None for name in names}
    fused = [
        problem.input,
        problem.row_scale,
        problem.dropout,
        problem.y1,
        problem.dresidual,
        problem.recomputed,
    ]
    fused += [problem.load, None if problem.forward else problem.y or problem.store]
    plain = len(sizes) == 1 and not any(fused) and problem.layout.contiguous
    return plain and problem.compute == "float32" and device.compute_capability >= 90


def fetches_ahead(problem: Problem, tile: Tile) -> bool:
    """Whether a block that finds the scales of a row in registers prefetches the next row.

    It mirrors fetches_ahead in cuda_src/quantized_write.cuh.
    """
    plain = not (problem.residual or problem.input) and not problem.has_wide_parameters
    registers = 512 // ceil_div(tile.block_size * tile.blocks_per_sm, 128) // 8 * 8
    elements = tile.elements
    keeps_y = (
        problem.cols_of_scale is not None
        and elements * DTYPES[problem.compute].itemsize <= MOST_BYTES_MADE
    )
    fits = registers >= elements + elements // 2 + 32 + 8 * (not tile.exact)
    return plain and keeps_y and fits and tile.pack_size == 8 and DTYPES[problem.x].itemsize == 2


def scales_at_once(problem: Problem, tile: Tile, strategy: str) -> bool:
    """Whether one launch finds the scales of y and writes it.

    Otherwise one launch finds the amaxes and a second one writes y. For scales of blocks of columns
    one launch is enough if all of y is in registers and lanes of one warp hold each block. No
    slice of a cluster and no warp's part of a ring may end inside a block.
    """
    if problem.scaling not in ("block", "mx"):
        return problem.scaling != "tensor"
    block = problem.cols_of_scale
    if tile.path == "ring":
        return tile.exact == 1 and 32 * tile.pack_size % block == 0
    width = tile.pack_size * tile.threads_per_row
    whole_slices = strategy in ("warp", "block")
    if strategy == "cluster":
        whole_slices = tile.exact == 1 and tile.cols % block == 0
    bytes_made = tile.elements * DTYPES[problem.compute].itemsize
    by_warps = width % block == 0 and block <= 32 * tile.pack_size
    by_lanes = block % width == 0 and tile.threads_per_row <= 32
    return whole_slices and 0 < bytes_made <= MOST_BYTES_MADE and (by_warps or by_lanes)


# Shared memory.


def reduce_bytes(problem: Problem, threads_per_row: int, cluster_size: int = 1) -> int:
    """BlockReduce (cluster_size 1) or ClusterReduce, as in reduce.cuh and cluster_reduce.cuh."""
    itemsize = DTYPES[problem.compute].itemsize
    parts = [threads_per_row // 32] + ([cluster_size] if cluster_size > 1 else [])
    return sum(ceil_div(2 * 3 * values * itemsize, 16) * 16 for values in parts)


def _ring_bytes(problem: Problem, tile: Tile) -> int:
    """WarpRing, Exchange, Broadcast and RingParameters, as in the headers of these names."""
    num_warps = tile.threads_per_row // 32
    # A part that does not begin on 16 bytes is fetched in the aligned units that contain it.
    row_bytes = sum(
        tile.cols * size + (tile.pack_size * size < 16) * 32 * num_warps
        for size in streamed(problem)
    )
    rings = tile.rows_per_block * tile.stages * (row_bytes + 8 * num_warps)
    values = 3 if problem.forward and problem.centered else 2
    exchanged = [values] + [1] * (problem.scaling == "row")
    exchange = (
        tile.rows_per_block
        * 4
        * sum(8 + 4 * each * num_warps * tile.cluster_size for each in exchanged)
    )
    if problem.forward:
        rings, exchange = ceil_div(rings, 16) * 16, exchange + 48 * tile.rows_per_block
    parameters = 0
    if not problem.forward and tile.elements > 16:
        for name in filter(
            None, (problem.weight if problem.dx or problem.recomputed else None, problem.bias)
        ):
            itemsize = DTYPES[name].itemsize
            parameters += (
                (tile.packs_per_thread - (itemsize == 2))
                * tile.pack_size
                * tile.threads_per_row
                * itemsize
            )
    return ceil_div(rings + exchange, 16) * 16 + parameters


def _bundle_bytes(problem: Problem, tile: Tile) -> int:
    """Bundles and BundleStream, as in cuda_src, or the sums that overwrite them at the end."""
    names = [problem.x] * (1 + problem.residual) if problem.forward else [problem.x, problem.dy]
    names += [problem.dsum] if problem.dsum else []
    rows = [problem.num_cols * DTYPES[name].itemsize for name in names] + [4, 4] * (
        not problem.forward
    )
    parts = 32 // tile.threads_per_row if tile.threads_per_row >= 8 else 1
    images = [ceil_div(tile.bundle // parts * row, 16) * 16 + 32 for row in rows]
    if parts > 1:  # each part has its own bank offset
        images = [image + (128 // parts - image) % 128 for image in images]
    num_warps = tile.block_size // 32
    sums = 0 if problem.forward or num_warps == 1 else 2 * num_warps * problem.num_cols * 4
    return max(num_warps * tile.stages * (parts * sum(images) + 8), sums)


def smem_bytes_of(problem: Problem, tile: Tile, strategy: str) -> int:
    """Dynamic shared memory of one block."""
    itemsize, compute_bytes = DTYPES[problem.x].itemsize, DTYPES[problem.compute].itemsize
    if tile.path == "bundle":
        return _bundle_bytes(problem, tile)
    if tile.path == "ring":
        return _ring_bytes(problem, tile)
    if strategy == "parameters":
        return 2 * tile.pack_size * tile.threads_per_row * tile.block_size // 32 * compute_bytes
    if strategy == "warp":
        num_warps = tile.block_size // 32
        return (
            0
            if problem.forward or num_warps == 1
            else 2 * num_warps * problem.num_cols * compute_bytes
        )
    scratch = reduce_bytes(problem, tile.threads_per_row, tile.cluster_size)
    if tile.path == "staged":  # StagedRow in cuda_src/staged_row.cuh
        return scratch + ceil_div(tile.cols * itemsize, 16) * 16 + 16
    if tile.path != "smem" or (strategy == "block" and not problem.forward):
        return scratch
    slice_cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size)
    kept = [itemsize]
    if not problem.forward:
        kept += [DTYPES[problem.dy].itemsize] + [compute_bytes] * (
            bool(problem.dweight) + bool(problem.dbias)
        )
    return scratch + sum(ceil_div(slice_cols * size, 16) * 16 for size in kept)


# Registers.


def is_common_quantized(problem: Problem, device: Device) -> bool:
    """Whether it is forward of 16-bit rows to 8 bits in packs of 16 bytes, unfused, on sm_90.

    For these, the register counts come from compiling every number of elements.
    """
    other = [
        problem.residual,
        problem.input,
        problem.round_x_hat,
        problem.dropout,
        problem.row_scale,
        problem.y1,
    ]
    other += [
        problem.has_wide_parameters,
        problem.widest_pack != 8,
        DTYPES[problem.x].itemsize != 2,
    ]
    return problem.scaling is not None and device.compute_capability == 90 and not any(other)


def registers_of_thread(problem: Problem, device: Device, tile: Tile) -> int:
    """An upper bound of the registers that a thread needs without spills."""
    if tile.path == "bundle":
        return int(_bundle_registers(problem, device, tile))
    if tile.path == "ring":
        return int(_ring_registers(problem, device, tile))
    if problem.forward:
        return int(_forward_registers(problem, device, tile))
    return int(_backward_registers(problem, device, tile))


def _wide_weight(problem: Problem) -> bool:
    return (
        problem.weight is not None and DTYPES[problem.weight].itemsize > DTYPES[problem.x].itemsize
    )


def _fused_registers(problem: Problem, device: Device, tile: Tile) -> float:
    """Registers of what is fused with the norm: random words, addresses of further tensors."""
    words, elements = DTYPES[problem.compute].itemsize // 4, tile.elements
    needed = (
        24 * words * problem.dropout
        + 16 * (problem.dropout and elements > 48)
        + 8 * bool(problem.row_scale)
    )
    needed += 16 * bool(problem.input or problem.dresidual) + 24 * bool(
        problem.y and not problem.forward
    )
    if problem.y1:  # a second pair of parameters, and an address for each single element
        needed += 32 + 0.75 * elements + (2.5 * elements if tile.pack_size == 1 else 0)
    # A user's functor may read other columns; its gradient computes y again.
    needed += 24 * words * bool(problem.load)
    needed += (40 if problem.forward else 72) * words * bool(problem.store)
    if problem.recomputed:
        needed += 8 + 40 * (device.compute_capability >= 120 and elements >= 32)
    return needed


def _is_bare(problem: Problem) -> bool:
    """Whether forward is only a norm: no sum, second output, scales or wide parameters."""
    other = [problem.residual, problem.input, problem.round_x_hat, problem.dropout]
    other += [problem.row_scale, problem.y1, problem.scaling, problem.has_wide_parameters]
    other += [problem.load, problem.store]
    return not any(other)


def _forward_registers(problem: Problem, device: Device, tile: Tile) -> float:
    """A thread keeps up to 40 16-bit elements unpacked, more of them packed.

    Addresses, sums and counters take 40 registers.
    """
    words, elements, itemsize = (
        DTYPES[problem.compute].itemsize // 4,
        tile.elements,
        DTYPES[problem.x].itemsize,
    )
    wide, single_elements = _wide_weight(problem), tile.pack_size == 1
    if tile.exact and device.compute_capability >= 90 and _is_bare(problem):
        # No pack is beyond the row's end, so there are no bounds to check.
        if itemsize == 2 and 32 < tile.threads_per_row <= 512 and 32 <= elements <= 48:
            return 32 + elements
        if itemsize == 2 and tile.threads_per_row <= 4 and elements == 16:
            return 40
    if elements <= 64 and tile.cluster_size == 1 and is_common_quantized(problem, device):
        # With scales of blocks of columns, lanes also find the amax of each block.
        in_blocks = problem.scaling in ("block", "mx") and tile.rows_per_block > 1
        if elements <= 32 or (tile.exact and elements <= 48 and not in_blocks):
            # With a known scale the compiler moves more loads ahead.
            known = elements > 32 and problem.cols_of_scale is None
            return 42 + 0.8 * elements + 8 * in_blocks + 16 * (not tile.exact or known)
        return 48 + (2.0 if in_blocks else 1.25) * elements
    needed = 40 + words * elements * (1.25 if itemsize > 2 else 1.15 if elements > 40 else 1.0)
    needed += _fused_registers(problem, device, tile) + 8 * wide
    needed += problem.residual * (8 + 8 * (elements > 24))  # both packs of a sum
    if tile.rows_per_block > 1 and elements > 32:
        needed += 14 + 2 * tile.packs_per_thread * (tile.pack_size < 8)
    if single_elements:  # an address for each element
        needed += 1.5 * elements + 8
    elif tile.pack_size * itemsize < 16:
        needed += 6 + elements * wide + 2 * max(0, elements - 32)
    if device.compute_capability < 90:
        needed += 8 * (wide or elements >= 32 or (problem.residual and single_elements))
    if problem.scaling and problem.scaling != "given":
        # The amaxes of blocks of columns. Long threads also keep y or weights until the scale is
        # known.
        needed += 24 if problem.scaling != "row" else 16 + elements / (2 if itemsize > 2 else 4)
        needed += 32 * (elements > 40) + 8 * (device.compute_capability >= 100)
        if problem.cols_of_scale is not None:
            needed += (
                elements / 2 * (elements > (40 if wide else 80))
                + (24 + 32 * problem.residual) * single_elements
            )
            needed += 32 * (problem.residual and wide)
    elif problem.scaling:
        needed += elements / 4 * (elements > 80)
    return needed


def _backward_registers(problem: Problem, device: Device, tile: Tile) -> float:
    """x_hat, the weighted dy and two sums of each element, unpacked.

    Unpacking float16 takes more registers than bfloat16.
    """
    words, elements, itemsize = (
        DTYPES[problem.compute].itemsize // 4,
        tile.elements,
        DTYPES[problem.x].itemsize,
    )
    each = 5.25 * words + 0.35 * (problem.x == "float16") + 0.3 * _wide_weight(problem)
    each += 0.35 * (device.compute_capability != 90) + 1.1 * (problem.weight == "float64")
    each += 1.8 * (1 < tile.pack_size < 16 // itemsize)
    if problem.dsum:
        each += 0.5 * (itemsize > 2)
    needed = 36 + each * elements + _fused_registers(problem, device, tile)
    needed += bool(problem.dsum) * (8 + 16 * (elements >= 40))
    return needed + (1.5 * elements + 8) * (tile.pack_size == 1)


def _ring_registers(problem: Problem, device: Device, tile: Tile) -> float:
    """Forward keeps weights and biases of its columns.

    Backward keeps the sums of their gradients, two registers for each column.
    """
    elements = tile.elements
    if not problem.forward:
        addresses = 0.75 * elements if problem.widest_pack == 1 else 0
        wide_bias = (
            problem.bias is not None and DTYPES[problem.bias].itemsize > DTYPES[problem.x].itemsize
        )
        return 60 + 3.375 * min(elements, 57) + addresses + 8 * wide_bias
    fewest = 4 if problem.widest_pack == 1 else 0  # a single element takes a whole register
    names = (problem.weight, problem.bias, problem.weight1, problem.bias1)
    kept = sum(max(DTYPES[name].itemsize, fewest) for name in names if name)
    # y is kept while the next row is summed.
    kept_y = elements if problem.scaling == "row" else 0
    tight = (24 if "float64" in names else 8) * (device.compute_capability >= 120)
    if problem.cols_of_scale is not None:
        tight += 24 * problem.residual + 16 + 8 * (problem.scaling == "row")
    tight += 32 * bool(problem.store)
    needed = max(104, 40 + kept_y) + elements * kept / 4 + tight
    # Two parameters and x of a single element of 2 bytes take a register each.
    return max(needed, 46 + 3 * elements + kept_y) if fewest and kept == 8 else needed


def _bundle_registers(problem: Problem, device: Device, tile: Tile) -> float:
    elements, lanes, small_packs = tile.elements, tile.threads_per_row, tile.pack_size < 4
    kept = [
        name
        for name in ((problem.weight, problem.bias) if problem.forward else (problem.weight,))
        if name
    ]
    wide = sum(max(DTYPES[name].itemsize - 2, 0) for name in kept)
    tight = 16 if device.compute_capability >= 120 else 8 * (device.compute_capability >= 100)
    if not problem.forward:
        each = (5.2 if problem.x == "float16" else 4.7) + 0.5 * wide
        return tight + 4 * wide * (device.compute_capability >= 120) + 37 + each * elements
    if problem.residual:  # a thread keeps both packs of each sum
        tight += 36 if lanes == 1 else 8 * (wide > 0) + max(16, elements - 12 * (not small_packs))
    # Rows that do not begin at the first lane of a warp, and single elements, have own addresses.
    apart = lanes < 8 or (small_packs and lanes < 32)
    if lanes == 1:
        addresses = elements / 4
    else:
        addresses = (31 if wide and small_packs else 12 if wide else 7) * apart
    addresses += 4 * (wide > 0 and not apart) + elements / 10 * (
        problem.x == "float16" and not small_packs
    )
    each = 1.86 + 0.27 * wide + 0.16 * max(0, wide - 4)
    return tight + max(
        62, 35 - wide / 2 + each * elements + 0.2 * max(0, elements - 33) + addresses
    )


def warps_that_fit(device: Device, registers: int) -> int:
    """Warps that fit if each thread has this many registers.

    Each of the four parts of a multiprocessor holds whole warps.
    """
    registers = ceil_div(registers, 8) * 8
    return 0 if registers > 256 else 4 * (device.registers_per_sm // 4 // 32 // registers)


def blocks_that_fit(problem: Problem, device: Device, tile: Tile) -> int:
    """Blocks whose registers and threads fit a multiprocessor, 0 if not even one does."""
    warps = warps_that_fit(device, registers_of_thread(problem, device, tile))
    return min(warps * 32 // tile.block_size, device.threads_per_sm // tile.block_size, 32)


def fits_smem(device: Device, smem_bytes: int, blocks_per_sm: int) -> bool:
    return (
        smem_bytes <= device.smem_per_block
        and blocks_per_sm * (smem_bytes + RESERVED_BYTES) <= device.smem_per_sm
    )


def shaped(
    problem: Problem, pack_size: int, threads_per_row: int, cluster_size: int = 1, **counts: object
) -> Tile:
    """The tile with these threads, and as many packs as a row, or a block's slice of it, needs."""
    width = pack_size * threads_per_row
    packs = max(1, ceil_div(cols_of_slice(problem, pack_size, cluster_size), width))
    exact = int(width * packs * cluster_size == problem.num_cols)
    counts = {"path": "registers", **counts}
    return Tile(pack_size, threads_per_row, packs, cluster_size=cluster_size, exact=exact, **counts)
