"""The table STRATEGIES: where a row waits between its uses, and the tile for a problem. Pure Python, no GPU needed.

Every tuned number stands beside what was measured. cuda_src/tile.cuh has the same Tile for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from .devices import Device
from .dtypes import DTYPES, ELEMENTS, FLOAT8S


@dataclass(frozen=True)
class Tile:
    """The compile-time integers of one kernel, as in cuda_src/tile.cuh.

    pack_size: elements moved by one memory instruction. threads_per_row: threads of one block that share a row.
    packs_per_thread: packs of a row in one thread's registers, 0 where the row waits elsewhere. rows_per_block: rows that
    a block works on at a time. cluster_size: blocks that share a row. blocks_per_sm: blocks that must fit on a
    multiprocessor, which bounds the registers of a thread. exact: 1 if the row fills the registers, so that no pack lies beyond
    it. stages: rows that pass through a block's shared memory at once, fetched by the copy engine; 0 where threads fetch them.
    bundle: rows, one after the other in memory, that make up a stage of each warp; 0 where a stage is one row.
    """

    pack_size: int
    threads_per_row: int
    packs_per_thread: int = 0
    rows_per_block: int = 1
    cluster_size: int = 1
    blocks_per_sm: int = 1
    exact: int = 0
    stages: int = 0
    bundle: int = 0

    @property
    def block_size(self) -> int:
        return self.threads_per_row * self.rows_per_block

    @property
    def cols(self) -> int:
        """Columns that fit the registers of the threads of a block that share a row."""
        return self.pack_size * self.threads_per_row * self.packs_per_thread

    @property
    def cpp(self) -> str:
        return "Tile{" + ", ".join(f".{field.name} = {getattr(self, field.name)}" for field in fields(self)) + "}"

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} {value}" for name, value in shown.items() if value != getattr(Tile, name, None))


# Where the scales of a y of 8 bits come from, as in cuda_src/fp8.cuh.
SCALINGS = ("given", "tensor", "row", "block", "mx")


def cols_of_scale(scaling: str | None, num_cols: int) -> int | None:
    """Columns of a row of num_cols that share a scale, None where it belongs to no part of a row."""
    return {"row": num_cols, "block": 128, "mx": 32}.get(scaling)


@dataclass(frozen=True)
class Problem:
    """What decides the kernel: one direction, one norm, the dtypes, which tensors are there, and how they lie.

    dtypes are names of cupynorm.dtypes.DTYPES, None for a tensor that is absent. dy, dx, dweight, dbias are of the
    backward direction alone (None: not wanted). pack_limit: the largest pack_size that num_cols, addresses and row
    strides allow, a power of two. pitched: whether anything lies between the rows of a streamed tensor.

    x is the row that is normalised. Forward without a y gives its statistics alone. Forward it may be a sum of its own dtype:
    `input` is then the dtype of what is read, residual_dtype that of what is added to it (None: nothing), and row_scale and
    dropout are what multiplies the input first. Backward these two belong to dx, where dresidual (None: not wanted, or the same
    tensor as dx) is the gradient of the sum itself. y1, weight1 and bias1 are of a second output of forward; round_x_hat is the
    dtype that x_hat is rounded to (None: it is not). scaling is where the scales of a y of 8 bits come from, as in
    cuda_src/fp8.cuh: given, tensor, row, block or mx; amax: whether that of y is recorded beside a given one.
    Backward with a y knows x by it alone: x is then the arithmetic's dtype, y_weight and y_bias those of forward. recomputed
    (None: not wanted) is the dtype of a y that backward writes again from x; bias is then forward's.
    """

    direction: str
    centered: bool
    num_cols: int
    x: str
    y: str | None = None
    weight: str | None = None
    bias: str | None = None
    zero_centered: bool = False
    residual: bool = False
    dy: str | None = None
    dx: str | None = None
    dweight: str | None = None
    dbias: str | None = None
    dsum: str | None = None
    pack_limit: int = 16
    pitched: bool = False
    input: str | None = None
    residual_dtype: str | None = None
    row_scale: str | None = None
    dropout: bool = False
    dresidual: str | None = None
    y1: str | None = None
    weight1: str | None = None
    bias1: str | None = None
    round_x_hat: str | None = None
    y_weight: str | None = None
    y_bias: str | None = None
    scaling: str | None = None
    amax: bool = False
    recomputed: str | None = None

    @property
    def compute(self) -> str:
        return DTYPES[self.x].compute

    @property
    def forward(self) -> bool:
        return self.direction == "forward"

    @property
    def widest_pack(self) -> int:
        """16 bytes of the narrowest of the streamed tensors, 8 bits not counted, or what their layout allows."""
        streamed = [self.x, self.y, self.dy, self.dx, self.input, self.residual_dtype, self.dresidual, self.recomputed]
        return min(self.pack_limit, 16 // min(DTYPES[name].itemsize for name in streamed if name and name not in FLOAT8S))

    @property
    def cols_of_scale(self) -> int | None:
        return cols_of_scale(self.scaling, self.num_cols)

    @property
    def num_scales(self) -> int:
        """Scales of each row."""
        return ceil_div(self.num_cols, self.cols_of_scale) if self.cols_of_scale else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of each row."""
        return self.num_scales * (1 if self.scaling == "mx" else 4)

    @property
    def bytes_per_row(self) -> int:
        """Bytes that any implementation must move for a row: each streamed tensor once."""
        streamed = (
            [self.x, self.y, self.y1] if self.forward else [self.y or self.x, self.dy, self.dx, self.dsum, self.dresidual]
        )
        streamed += [self.input, self.residual_dtype, self.recomputed]
        if self.residual:
            streamed += [self.x, self.x]
        return self.num_cols * sum(ELEMENTS[name].itemsize for name in streamed if name) + self.scale_bytes


@dataclass(frozen=True)
class Strategy:
    """One row of the dispatch table: where a row waits between its uses, and the tile for a problem,
    or None if the row does not fit.

    gives_way: whether a later strategy is faster although this one is wide enough.
    """

    name: str
    row_waits: str
    tile: Callable[[Problem, Device], Tile | None]
    first_capability: int = 0
    gives_way: Callable[[Problem, Device, Tile], bool] = lambda problem, device, tile: False


# The shares of a copy beside the numbers below were measured on 2026-11-20 to 22 while these were chosen, by timing
# layer_norm_forward and layer_norm_backward with explicit strategy= and tile= at 2^28 elements (2^27 of float32). `python -m
# cupynorm tune` measures such tiles again, on any GPU.

# Bytes of the widest row that a warp takes, by itemsize. Forward: more would fit, but from there on a block of two warps is as
# fast (H200, bf16: 2048 columns 0.997 of a copy on 64 threads, 0.989 on 32).
_WARP_ROW_BYTES = {"forward": {2: 2560, 4: 2048, 8: 2048}, "backward": {2: 1536, 4: 2048, 8: 2048}}
# Bytes of x that one lane keeps (H200, bf16: backward of 640 columns 0.95 on 16 lanes x 40 elements, 0.88 on 32 x 24).
_WARP_BYTES = {"forward": {2: 80, 4: 64, 8: 64}, "backward": {2: 80, 4: 64, 8: 64}}
# The same for a thread of a block. Forward: 4096 columns 0.98 on 64 threads x 64 elements, 0.76 on 256 x 16 (H200, bf16).
_BLOCK_BYTES = {"forward": {2: 128, 4: 128, 8: 128}, "backward": {2: 48, 4: 64, 8: 64}}
_BLOCK_THREADS = 512
# Where the row waits in shared memory: random words need more than the 128 registers that 512 threads have.
_DROPOUT_THREADS = 256
# Bytes of x in flight on a multiprocessor beyond which more do not help: 4.15 TB/s times the latency of memory, twice over
# (H200: fp32 1024 columns 0.99 with 16 elements a thread and 64 KB in flight, 0.97 with 32 and 96 KB).
_ENOUGH_BYTES, _MOST_BYTES = {2: 55 * 1024, 4: 54 * 1024, 8: 54 * 1024}, 64 * 1024
# In flight in a block that is alone, from which it wants many threads (with a residual; float32, 16,384 columns: 1024 threads
# with 16 elements each 0.98, 512 with 32 0.95).
_MOST_BYTES_OF_BLOCK = 100 * 1024
# Beyond so many columns of float32 forward blocks are counted, not bytes: see _wanted_blocks.
_THREE_BLOCKS_FROM = 5120


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)


def _wanted_blocks(problem: Problem, device: Device) -> int | None:
    """How many blocks of a wide float32 row forward must fit a multiprocessor, or None where their bytes decide.

    Three up to 8191 columns (H200, 6656 columns: 0.98 in three, 0.93 in two of the same tile), from 8193 on two (10,240 columns
    0.99 in two, 0.95 in a ring; 14,336 columns 0.97, 0.95, and 0.85 in one).
    """
    fused = problem.residual or problem.input or problem.scaling or problem.y1 or problem.round_x_hat or problem.dropout
    plain = problem.forward and problem.x == "float32" and problem.widest_pack == 4 and not fused and not problem.row_scale
    if not plain or problem.weight == "float64" or device.compute_capability < 90 or problem.num_cols <= _THREE_BLOCKS_FROM:
        return None
    return 3 if problem.num_cols < 8192 else 2 if problem.num_cols > 8192 else None


def _registers(problem: Problem, device: Device, tile: Tile) -> int:
    """Registers of a thread that keeps its part of a row, with no spills: fitted to what ptxas reports, which tests hold.

    Forward keeps a 16-bit row unpacked up to 32 elements and packed beyond; backward keeps x_hat, wdy and two sums of each.
    """
    words = DTYPES[problem.compute].itemsize // 4
    elements = tile.pack_size * tile.packs_per_thread
    lone = 3 * elements // 2 + 8 if tile.pack_size == 1 else 0  # each lone element has an address of its own
    wide_weight = int(problem.weight is not None and DTYPES[problem.weight].itemsize > DTYPES[problem.x].itemsize)
    # Small packs of 16-bit rows: many addresses, of which those of x and wide weights differ.
    small = tile.pack_size > 1 and tile.pack_size * DTYPES[problem.x].itemsize < 16
    # Random words take the registers of 8 elements while a mask is made; of two loads, or two stores, each has its addresses.
    fused = 24 * words * problem.dropout + 8 * bool(problem.row_scale) + 16 * bool(problem.input or problem.dresidual)
    fused += 8 * (problem.recomputed is not None and words * elements > (16 if device.compute_capability == 90 else 7))
    fused += 40 * (problem.recomputed is not None and elements >= 32 and device.compute_capability >= 120)
    fused += 16 * (problem.dropout and elements > 48)
    if problem.y and not problem.forward:
        fused += 24
    if problem.y1:
        fused += 32 + 3 * elements // 4 + (5 * elements // 2 if tile.pack_size == 1 else 0)
    if problem.scaling:
        wide = DTYPES[problem.x].itemsize > 2
        row = 16 + elements // (2 if wide else 4)
        fused += {"given": 0, "tensor": 8 + 16 * wide, "row": row}.get(problem.scaling, 24)
        # Long threads keep weights until there is a scale.
        found_in_row = problem.cols_of_scale is not None
        fused += 32 * (elements > (40 if found_in_row or wide_weight else 48) and problem.scaling != "given")
        if found_in_row:
            fused += elements // 2 * (elements > (40 if wide_weight else 80))
            fused += (24 + 32 * problem.residual) * (tile.pack_size == 1)
            fused += 32 * (problem.residual and wide_weight)
        elif elements > 80:
            fused += elements // 4
    if (common := _common_quantized_registers(problem, device, tile)) is not None:
        return common
    if problem.forward:
        newer = device.compute_capability >= 90
        # Of 16 bits, 32 elements fit 64 registers where warps share a row and fill it, so that 60 KB are in flight on 32 warps,
        # and 48 fit 80 (H200, bf16, 12,288 columns: three blocks of 256 threads x 48 elements 0.97 of a copy, 128 x 96 0.94).
        fills = newer and tile.exact and 32 < tile.threads_per_row <= 512 and DTYPES[problem.x].itemsize == 2
        fills = fills and problem.round_x_hat is None and not fused and not wide_weight and not problem.residual
        fits = fills and 32 <= elements <= 48
        if fits_wide := _wide_weight_registers(problem, device, tile):
            return fits_wide
        per_element = 1.25 if DTYPES[problem.x].itemsize > 2 else 1.15 if elements > 40 and not fills else 1.0
        extra = 8 * (problem.residual + wide_weight) + fused
        # Both packs of a residual's sum wait, those of 32 bits unpacked.
        extra += 8 * (problem.residual and elements > 24 and (DTYPES[problem.x].itemsize > 2 or problem.weight == "float64"))
        fixed = 32 if fits else 40
        if _wanted_blocks(problem, device):
            return max(48, 24 + 5 * elements // 4)
        if tile.rows_per_block > 1 and elements > 32:
            fixed = 54 + (2 * tile.packs_per_thread if tile.pack_size < 8 else 0)
        extra += 8 * (not newer and (wide_weight or (elements >= 32 and not tile.exact) or (problem.residual and lone)))
        extra += small * (6 + elements * wide_weight + 2 * max(0, elements - 32))
        return int(fixed + per_element * words * elements + extra + lone)
    # float16 takes more instructions to unpack than bfloat16, and the compiler keeps more for sm_100 and sm_120. Three blocks
    # of 24 elements fit sm_90 all the same (H200, float16, 768 columns: 0.94 of a copy, with two blocks 0.86), and two of 40
    # (320 columns: 0.95, of 24 elements 0.89).
    fits = device.compute_capability == 90 and (tile.exact or problem.centered or elements == 40)
    tight = (0.1 if fits else 0.35) * (problem.x == "float16") + 0.35 * (device.compute_capability >= 100)
    tight += 0.35 * (device.compute_capability < 90 and elements > 24)
    # On sm_90 three blocks of 24 elements also hold a weight of 32 bits (H200, 384 columns: 0.96, two blocks 0.86), or what is
    # added to dx (0.99, 0.95), but not both. What is added waits packed.
    three = device.compute_capability == 90 and elements <= 24 and DTYPES[problem.x].itemsize == 2
    added = bool(problem.dsum) * (8 * (not three or wide_weight) + 16 * (elements >= 40))
    added += bool(problem.dsum) * elements // 2 * (DTYPES[problem.x].itemsize > 2)
    fits_wide = three and problem.weight == "float32"
    extra = fused + added + ((0.15 if fits_wide else 0.3) * wide_weight + tight + 1.8 * small) * elements
    return int(36 + 5.25 * words * elements + extra + lone)


def _wide_weight_registers(problem: Problem, device: Device, tile: Tile) -> int | None:
    """The same of forward of 16-bit rows with weights of 32 bits on a GPU of sm_90, None for anything else: the next pack's are
    on their way while one is written. What fits was found by compiling (H200, 3072 columns: 0.99 with 12 blocks of 64 threads x
    48 elements, 0.92 with 8; 6144 columns 0.99 with 6 of 128, 0.95 with 5)."""
    elements = tile.pack_size * tile.packs_per_thread
    plain = not (problem.residual or problem.input or problem.round_x_hat or problem.dropout or problem.row_scale or problem.y1)
    suits = device.compute_capability == 90 and tile.pack_size == 8 and tile.threads_per_row > 16
    if not (plain and suits and problem.weight == "float32" and problem.scaling is None) or tile.cluster_size > 1:
        return None
    in_a_warp = tile.threads_per_row == 32
    if elements <= 24:
        return 48 + elements
    if not tile.exact and in_a_warp:
        return 96
    if not tile.exact:
        return {48: 80, 56: 112, 64: 128, 72: 128}.get(elements, 40 + elements if elements < 48 else 168)
    if elements <= 48:
        return 96 if in_a_warp and elements == 48 else 40 + min(elements, 40)
    if elements == 96 and problem.centered and tile.threads_per_row == 128:
        return 128
    return {56: 96 if in_a_warp else 128, 64: 128, 72: 96, 80: 176, 88: 176}.get(elements, 168)


def _common_quantized_registers(problem: Problem, device: Device, tile: Tile) -> int | None:
    """The same where y has 8 bits and all else is as in most models on a GPU of sm_90, None for anything else: bytes leave
    sooner than 16-bit results, so the formula above would say too much."""
    elements = tile.pack_size * tile.packs_per_thread
    plain = not (problem.residual or problem.input or problem.round_x_hat or problem.dropout or problem.row_scale)
    weights = {name for name in (problem.weight, problem.bias) if name is not None}
    as_usual = plain and weights <= {problem.x} and tile.exact and tile.pack_size == 8
    as_usual = as_usual and (tile.cluster_size == 1 or problem.scaling == "row")
    if problem.scaling is None or device.compute_capability != 90 or DTYPES[problem.x].itemsize != 2 or not as_usual:
        return None
    half, in_a_warp = problem.x == "float16", tile.threads_per_row <= 32
    if problem.scaling == "row" and in_a_warp and elements == 80:
        return 168
    most = 64 if problem.cols_of_scale else 80 if in_a_warp else 96
    if not 16 <= elements <= most or (in_a_warp and elements > 48 and problem.cols_of_scale):
        return None
    if problem.scaling == "row":
        fewest = 48 - 16 * (elements == 32 and not in_a_warp)  # 5120 columns: 6 blocks of 160 x 32 0.71, 4 of 128 x 40 0.62
        return 104 + 32 * half * (elements > 48) if elements >= 40 else fewest + elements + 8 * half
    if elements > 64 and not in_a_warp:
        return 168
    return int((40 if in_a_warp else 32) + min(elements, 48) + max(0, min(elements, 64) - 48) / 2 + 1.5 * max(0, elements - 64))


def cols_of_slice(problem: Problem, pack_size: int, cluster_size: int) -> int:
    """The most columns that one block of a cluster owns, as slice() in cuda_src/row.cuh divides them."""
    step = 8 if cluster_size > 1 else 1
    return ceil_div(ceil_div(problem.num_cols, pack_size), cluster_size * step) * step * pack_size


def _blocks_per_sm(problem: Problem, device: Device, tile: Tile) -> int:
    """Blocks whose registers fit a multiprocessor, 0 if not even one does: each of its four parts holds whole warps."""
    registers = ceil_div(_registers(problem, device, tile), 8) * 8
    if registers > 255 + 1:
        return 0
    warps = 4 * (device.registers_per_sm // 4 // 32 // registers)
    return min(warps * 32 // tile.block_size, device.threads_per_sm // tile.block_size, 32)


def _register_tile(
    problem: Problem,
    device: Device,
    threads: Iterable[int],
    max_bytes: int,
    block_size: int,
    cluster_size: int = 1,
) -> Tile | None:
    """Of the given threads_per_row, those that keep most of x in flight on a multiprocessor.

    A row that fills its threads is preferred: packs beyond the row cost their instructions all the same.
    """
    pack_size = problem.widest_pack
    itemsize = DTYPES[problem.x].itemsize
    # A lone element needs an address of its own, and fills a register of 32 bits if it has 16.
    lone = pack_size == 1 and problem.forward and itemsize == 2
    if pack_size > 1:
        max_elements = max_bytes // itemsize
    elif itemsize == 2:
        max_elements = 16 if problem.forward else 6
    else:
        max_elements = max_bytes // (2 * itemsize)
    may_be_long = problem.forward and itemsize == 2 and pack_size > 1 and cluster_size == 1
    num_cols = cols_of_slice(problem, pack_size, cluster_size)
    best, best_score = None, None
    for threads_per_row in threads:
        packs_per_thread = max(1, ceil_div(num_cols, pack_size * threads_per_row))
        elements = pack_size * packs_per_thread
        rows_per_block = max(1, block_size // threads_per_row)
        tile = Tile(pack_size, threads_per_row, packs_per_thread, rows_per_block, cluster_size)
        tile = replace(tile, exact=int(tile.cols * cluster_size == problem.num_cols))
        blocks_per_sm = _blocks_per_sm(problem, device, tile)
        long = elements > max(max_elements, pack_size)
        if blocks_per_sm == 0 or (
            long and not (may_be_long and _may_keep_more(tile, problem.scaling, _has_wide_parameters(problem)))
        ):
            continue
        if wanted := _wanted_blocks(problem, device) if cluster_size == 1 else None:
            if blocks_per_sm < wanted:
                continue
            blocks_per_sm = wanted  # more are slower (9216 columns, 384 threads: 0.99 in two, 0.98 in three)
        tile = replace(tile, blocks_per_sm=blocks_per_sm)
        in_flight = blocks_per_sm * rows_per_block * num_cols * itemsize * (1 + problem.residual)
        enough = in_flight >= _ENOUGH_BYTES[itemsize]
        # Blocks of a cluster wait for one another: for them more is better without end.
        counted = in_flight if cluster_size > 1 else min(in_flight, _ENOUGH_BYTES[itemsize])
        fit = 1.0 if tile.exact else 0.9 * num_cols / tile.cols
        if problem.forward and itemsize == 2:
            # A little more still helps blocks (H200, bf16: 4608 columns 0.98 with 73 KB, 0.95 with 55 KB), but not threads as
            # long as that (4088 columns 0.97 on 64 x 64 elements, 0.99 on 128 x 32).
            if block_size == 1 and cluster_size == 1:
                counted += 0.1 * (min(in_flight, _MOST_BYTES) - counted)
            # Packs beyond the row cost as much as others (H200, bf16: 520 columns 0.78 on 32 x 24 elements, 0.87 on 16 x 40),
            # and those in the row no more than in an exact tile.
            fit = 1.0 if tile.exact else 0.995 * num_cols / tile.cols
            fit *= 0.95 if long and (elements > 72 or threads_per_row <= 32) else 0.98 if elements > 48 else 1.0
        if problem.scaling in ("given", "tensor", "row"):
            # Bound by instructions, of which a row's own are fewer where threads are long (H200, bf16 to 8 bits: 8192 columns
            # 0.92 on 128 threads x 64 elements, 0.84 on 256 x 32; 768 columns 0.94 on 16 x 48, 0.89 on 32 x 24).
            fit = 1.0 if tile.exact else 0.995 * num_cols / tile.cols
        # Of equals, most threads; but forward with too little in flight, or one block alone, wants long threads: 48 elements
        # were best (H200, bf16, 12288 columns: 24, 32, 48 and 64 elements gave 0.82, 0.84, 0.86 and 0.81 of a copy).
        many_threads = not problem.forward or (enough and not lone and (blocks_per_sm > 1 or in_flight >= _MOST_BYTES_OF_BLOCK))
        if problem.scaling in ("given", "tensor") or (problem.scaling == "row" and enough):
            score = (counted * fit, -abs(elements - 64))
        elif _wide_weight_registers(problem, device, tile) and problem.num_cols > 8192:
            # Rows wait for their weights: long threads, and more in flight (9216 columns: 128 x 72 0.99, 192 x 48 0.97).
            score = (min(in_flight, 96 * 1024), -abs(threads_per_row - 128))
        else:
            score = (counted * fit, threads_per_row if many_threads else -abs(elements - 48))
        if best_score is None or score > best_score:
            best, best_score = tile, score
    return best


def _may_keep_more(tile: Tile, scaling: str | None, is_wide: bool) -> bool:
    """Whether 16-bit rows forward may have threads longer than others: those they fill, and few of them. is_wide: whether their
    weights are wider.

    H200, bf16: 1152 columns 0.94 on 16 lanes x 72 elements, 0.93 on 32 x 40; 8960 columns 0.97 on 128 x 72, 0.92 on 224 x 40;
    13,312 columns 0.93 on 128 x 104, in a ring 0.86. To 8 bits: 2560 columns 0.98 on 32 x 80, 0.93 on 64 x 40.
    """
    elements = tile.pack_size * tile.packs_per_thread
    if is_wide and tile.threads_per_row == 32:
        return elements <= 56
    if tile.exact and tile.threads_per_row == 32 and scaling in ("given", "tensor", "row"):
        return elements <= 80
    if tile.exact and tile.threads_per_row > 32:
        return elements <= 104 and tile.threads_per_row <= 160
    return elements <= 72 and (tile.exact or 32 < tile.threads_per_row <= 160)


# Bundles (cuda_src/bundle.cuh): several rows at a time, of rows that do not begin on 16 bytes, and of others of 16-bit elements
# that do not fill registers well: there a warp's loads and stores are whole lines whatever the width.
# Shares of a copy are of an H200, bf16, measured as above on 2026-11-22.
#
# The most elements of a thread, by the lanes that share a row: the first that suits wins. Lanes that have a row each do not
# meet at the banks of shared memory, and long threads are better (forward, 63 columns: 0.89 on one lane, 0.80 on 8; 383 columns
# 0.93 on 16 x 24, 0.89 on 32 x 12); backward short ones, of which there are more (255 columns 0.92 on 32 x 8, 0.87 on 16 x 16).
# Beyond the last, rings: backward of 1023 columns is 0.86 in both.
_BUNDLE_ELEMENTS = {
    "forward": {2: {1: 67, 2: 28, 4: 28, 8: 20, 16: 32, 32: 80}, 4: {1: 41, 8: 20, 16: 16, 32: 64}},
    "backward": {2: {1: 41, 2: 28, 8: 12, 16: 14, 32: 28}, 4: {1: 33, 8: 10, 16: 10, 32: 28}},
}
# The same of rows that begin on 16 bytes, or forward on 8, in packs of 4 elements, backward of 2.
_WIDE_BUNDLE_PACK = {"forward": 4, "backward": 2}
_WIDE_BUNDLE_ELEMENTS = {
    "forward": {1: 24, 2: 28, 4: 36, 8: 28, 16: 28, 32: 64},
    "backward": {1: 41, 2: 28, 8: 14, 16: 14, 32: 28},
}
# Up to which share of its registers a row that begins on 16 bytes fills bundles are faster (forward: 392 columns fill 0.77 of
# their registers, 0.90 there and 0.95 in bundles; 136 columns 0.85, 0.90 and 0.93; 456 columns 0.89, 0.98 and 0.97; backward:
# 392 columns 0.83 and 0.93; 648 columns 0.84, 0.88 and 0.86).
# With dsum, which takes room in bundles: 576 columns fill 0.75 of their registers, 0.94 there and 0.88 in bundles; 264 columns
# 0.69, and 0.94 in bundles.
_BUNDLE_BELOW, _ADDING_BUNDLE_BELOW = {"forward": 0.88, "backward": 0.82}, 0.7
# Warps of a block. Backward they are all that a multiprocessor has, and leave one partial row: the first count that registers
# allow (333 columns on threads of 11 elements: 12 warps 0.93, 8 warps 0.84), but of single elements, up to how many a thread
# (639 columns on 20: 12 warps 0.88, 8 warps 0.92).
_BUNDLE_WARPS, _MANY_WARPS_ELEMENTS = {"forward": (4,), "backward": (12, 8)}, 16
# Bytes of the rows of a warp's bundle, at the most, unless one row of each group of lanes has more; by the warps of a block,
# and forward where lanes share one image. Less and the copy engine reads too many lines twice, for two bundles (forward, 1025
# columns: one row 0.90, two 0.94; 333 columns: 4 rows 0.89, 6 rows 0.95; backward, 127 columns: 10 rows 0.88, 12 rows 0.90);
# more is worse backward (392 columns: 3 rows 0.93, 5 rows 0.89).
_BUNDLE_BYTES, _SHARED_IMAGE_BYTES = {2: {4: 4800, 8: 8192, 12: 6656}, 4: {4: 4800, 8: 8704}}, 3600
# The same with dsum, on 8 warps (127 columns: 12 rows 0.89, 10 rows 0.83; 333 columns: 4 rows 0.95, 5 rows 0.91).
_ADDING_BUNDLE_BYTES = 9500
# Backward on 8 warps, from how many bytes of a row a third stage is faster (777 columns 0.91, with two 0.90).
_THREE_BUNDLES_FROM = 1000
# Forward, turns after which a warp makes room for the next block, as blocks of rings do (383 columns: 6 turns 0.93, 24 0.85;
# 2047 columns: 4 turns 0.88, 2 0.83).
_BUNDLE_TURNS = 4


def can_bundle(problem: Problem, device: Device) -> bool:
    """Whether several rows are one piece of each tensor, for the copy engine to fetch, and results fit in x's place."""
    streamed = [problem.x, problem.y] if problem.forward else [problem.x, problem.dy, problem.dx, problem.dsum or problem.x]
    sizes = {DTYPES[name].itemsize if name and name not in FLOAT8S else None for name in streamed}
    fused = [problem.input, problem.row_scale, problem.dropout, problem.y1, problem.dresidual]
    fused += [problem.recomputed, None if problem.forward else problem.y]
    fits = len(sizes) == 1 and not any(fused) and not problem.pitched
    return fits and problem.compute == "float32" and device.compute_capability >= 90


def _bundle_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory of Bundles, as in cuda_src/bundle.cuh, and of the sums that take their place at the end."""
    names = [problem.x] * (1 + problem.residual) if problem.forward else [problem.x, problem.dy]
    names += [problem.dsum] if problem.dsum else []
    rows = [problem.num_cols * DTYPES[name].itemsize for name in names] + [4, 4] * (not problem.forward)
    parts = 32 // tile.threads_per_row if tile.threads_per_row >= 8 else 1
    images = [ceil_div(tile.bundle // parts * row, 16) * 16 + 32 for row in rows]
    if parts > 1:  # each part at its own banks
        images = [image + (128 // parts - image) % 128 for image in images]
    slot_bytes = parts * sum(images)
    num_warps = tile.block_size // 32
    sums = 0 if problem.forward or num_warps == 1 else 2 * num_warps * problem.num_cols * 4
    return max(num_warps * tile.stages * (slot_bytes + 8), sums)


def queued_bundles(tile: Tile) -> int:
    """Bundles that a warp takes forward before its block ends."""
    return max(2, ceil_div(_BUNDLE_TURNS * 32 // tile.threads_per_row, tile.bundle))


def _bundle_registers(problem: Problem, device: Device, tile: Tile) -> int:
    """Registers of a thread of a bundle's warp, with no spills, as _registers."""
    elements, lanes, lone = tile.pack_size * tile.packs_per_thread, tile.threads_per_row, tile.pack_size < 4
    kept = [name for name in ((problem.weight, problem.bias) if problem.forward else (problem.weight,)) if name]
    wide = sum(max(DTYPES[name].itemsize - 2, 0) for name in kept)
    tight = 16 if device.compute_capability >= 120 else 8 * (device.compute_capability >= 100)
    if problem.forward:
        # Each row that lanes begin in the middle of, and each single element, has addresses of its own.
        apart = lanes < 8 or (lone and lanes < 32)
        if problem.residual:  # both packs of an element wait
            tight += 36 if lanes == 1 else 8 * (wide > 0) + max(16, elements - 12 * (not lone))
        addresses = elements // 4 if lanes == 1 else (31 if wide and lone else 12 if wide else 7) * apart
        addresses += 4 * (wide > 0 and 8 <= lanes < 32 and not apart) + elements // 10 * (problem.x == "float16" and not lone)
        each = 1.86 + 0.27 * wide + 0.16 * max(0, wide - 4)
        needed = max(62, 34 - wide // 2 + each * elements + 0.2 * max(0, elements - 33) + addresses)
        # A row in each lane is tight beyond 60 elements and fits three blocks all the same (65 columns: two 0.83, three 0.92).
        return int(min(needed, 168) if lanes == 1 and elements <= 67 and not wide else needed + 0.99) + tight
    tight += 4 * wide * (device.compute_capability >= 120)
    return tight + int(36 + ((5.2 if problem.x == "float16" else 4.7) + 0.5 * wide) * elements)


def _bundle_tile(problem: Problem, device: Device) -> Tile | None:
    if not can_bundle(problem, device):
        return None
    itemsize, pack_bytes = DTYPES[problem.x].itemsize, problem.widest_pack * DTYPES[problem.x].itemsize
    elements = _BUNDLE_ELEMENTS[problem.direction][itemsize]
    if pack_bytes <= 4 or (pack_bytes == 8 and itemsize == 2 and not problem.forward):
        pack_size = problem.widest_pack if problem.forward else 1  # pairs: 300 columns 0.89, single elements 0.92
        return _tile_of_bundles(problem, device, pack_size, elements)
    registers = _lanes_tile(problem, device)
    if itemsize > 2 or (registers is None and pack_bytes > 8):
        return None
    # Lanes that have a row each move 16 bytes here and there (24 columns 0.73, in bundles 0.93).
    apart = pack_bytes == 8 or (problem.forward and registers.threads_per_row == 1 < registers.packs_per_thread)
    below = _ADDING_BUNDLE_BELOW if problem.dsum else _BUNDLE_BELOW[problem.direction]
    if not apart and problem.num_cols >= below * registers.cols:
        return None
    pack_size = _WIDE_BUNDLE_PACK[problem.direction]
    return _tile_of_bundles(problem, device, pack_size, _WIDE_BUNDLE_ELEMENTS[problem.direction])


def _tile_of_bundles(problem: Problem, device: Device, pack_size: int, elements: dict[int, int]) -> Tile | None:
    """elements: the most of a thread, by the lanes that share a row."""
    tiles = []
    for lanes, most in elements.items():
        packs_per_thread = ceil_div(problem.num_cols, pack_size * lanes)
        meets = problem.forward and pack_size == 1 and lanes in (2, 4)
        if pack_size * packs_per_thread > most or meets or (packs_per_thread - 1) * pack_size * lanes >= problem.num_cols:
            continue
        tile = Tile(pack_size, lanes, packs_per_thread)
        tile = _with_bundles(problem, device, replace(tile, exact=int(tile.cols == problem.num_cols)))
        if tile is not None:
            if problem.num_cols >= 0.9 * tile.cols:
                return tile
            tiles.append(tile)
    return min(tiles, key=lambda tile: tile.cols, default=None)


def _with_bundles(problem: Problem, device: Device, tile: Tile) -> Tile | None:
    """The tile with rows for its block and its bundles, stages, and as many blocks as fit, or None if one does not."""
    itemsize = DTYPES[problem.x].itemsize
    registers = ceil_div(_bundle_registers(problem, device, tile), 8) * 8
    if registers > 255 + 1:
        return None
    short = tile.pack_size > 1 or tile.packs_per_thread <= _MANY_WARPS_ELEMENTS
    # With dsum 12 warps have too few rows each, unless rows are narrow (333 columns: 0.91, 8 warps 0.95; 65: 0.88, 0.85).
    many = problem.forward or (itemsize == 2 and short and (not problem.dsum or tile.threads_per_row <= 8))
    for num_warps in _BUNDLE_WARPS[problem.direction][0 if many else 1 :]:
        of_block = replace(tile, rows_per_block=num_warps * 32 // tile.threads_per_row)
        fitting = 4 * (device.registers_per_sm // 4 // 32 // registers) // num_warps
        fitting = min(fitting, device.threads_per_sm // of_block.block_size)
        third = num_warps == 8 and itemsize == 2 and problem.num_cols * itemsize >= _THREE_BUNDLES_FROM
        for smaller in (1, 2, 4, 8):
            most_bytes = _ADDING_BUNDLE_BYTES if problem.dsum and num_warps == 8 else _BUNDLE_BYTES[itemsize][num_warps]
            bundle = _rows_of_bundle(problem, tile.threads_per_row, most_bytes // smaller)
            for stages in (3, 2) if third else (2,):
                staged = replace(of_block, stages=stages, bundle=bundle)
                smem_bytes = _bundle_bytes(problem, staged)
                blocks_per_sm = min(fitting, device.smem_per_sm // (smem_bytes + 1024), 32 if problem.forward else 1)
                if smem_bytes <= device.smem_per_block and blocks_per_sm > 0:
                    return replace(staged, blocks_per_sm=blocks_per_sm)
    return None


def _rows_of_bundle(problem: Problem, lanes: int, most_bytes: int) -> int:
    """About as many as have most_bytes, the same number in each image.

    Images that all begin on 32 bytes, and not all on 64, are slower, and backward those that begin on 16 are the fastest
    (forward, 500 columns: 3 rows 0.96, 4 rows, of 4000 bytes, 0.92; 808 columns: 3 rows 0.95, 2 rows 0.92; backward, 440
    columns: 3 rows, of 2640 bytes of x, 0.90, 4 rows 0.87, 2 rows 0.85).
    """
    row_bytes, groups = problem.num_cols * DTYPES[problem.x].itemsize, 32 // lanes
    if problem.forward:
        most_bytes = most_bytes if lanes >= 8 else min(most_bytes, _SHARED_IMAGE_BYTES)
    bytes_of_group = row_bytes if problem.forward else (3 if problem.dsum else 2) * row_bytes + 8
    rows = max(1, most_bytes // max(1, groups * bytes_of_group))

    def rank(rows: int) -> int:
        image_bytes = rows * row_bytes if lanes >= 8 else rows * groups * row_bytes
        return 0 if image_bytes % 64 == 32 else 1 if problem.forward or image_bytes % 32 == 0 else 2

    other = rows + 1 if problem.forward and rows < 3 else rows - 1
    matters = rank(rows) == 0 or rows <= 4  # one of many rows less only makes a bundle smaller
    return (other if matters and other > 0 and rank(other) > rank(rows) else rows) * groups


def _warp_tile(problem: Problem, device: Device) -> Tile | None:
    return _bundle_tile(problem, device) or _lanes_tile(problem, device)


def _lanes_tile(problem: Problem, device: Device) -> Tile | None:
    """Of rows that lanes of a warp load by themselves."""
    itemsize = DTYPES[problem.x].itemsize
    pack_bytes = problem.widest_pack * itemsize
    row_bytes = problem.num_cols * itemsize
    if row_bytes > _WARP_ROW_BYTES[problem.direction][itemsize] * (1.6 if problem.scaling in ("given", "tensor") else 1):
        return None
    # The lanes of a row move at least 64 bytes of it together, or half the row if it is shorter (H200, bf16: 64 columns 0.88 of
    # a copy on 4 lanes, 0.84 on 2); of 16-bit rows 32 bytes where that fills them (48 columns 0.96 on 2 lanes, 0.77 on 4).
    fewest = min(64, row_bytes // 2, 32 * pack_bytes) // pack_bytes
    if itemsize == 2 and fewest == 3 and row_bytes == 6 * pack_bytes:
        fewest = 2
    # Lone elements: a quarter of the row (127 columns 0.48 on 16 lanes, 0.36 on 32, 0.38 on 8).
    if problem.forward and pack_bytes == 2:
        fewest = min(32, row_bytes // 4) // pack_bytes
    if problem.scaling in ("block", "mx"):  # so that neighbouring lanes hold what shares a scale
        fewest = min(32, max(fewest, problem.cols_of_scale // problem.widest_pack))
    lanes = [lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= fewest]
    # Blocks of two warps forward: a place is free again sooner (H200, bf16: 64 to 1024 columns 0.3 to 1% faster than four; fp32
    # 1 to 2%).
    block_size = 64 if problem.forward and fewest > 2 else 128
    max_bytes = _WARP_BYTES[problem.direction][itemsize]
    return _register_tile(problem, device, lanes, max_bytes, block_size)


def _warp_gives_way(problem: Problem, device: Device, tile: Tile) -> bool:
    return not tile.bundle and _wants_ring(problem, tile) and _ring_tile(problem, device, (1,)) is not None


def for_few_rows(problem: Problem, device: Device, strategy: str, tile: Tile, num_rows: int, statistics: str) -> Tile:
    """The tile, or one that gives few rows the same bits sooner: more lanes a row, whose sums the kernels form in one order
    (PackSums in cuda_src/statistics.cuh), and more rows a block, as blocks of few threads only take longer to start.

    Few: all are on the multiprocessors at once, in 32 warps of each at most. H200, bf16, RMSNorm: 8192 x 128 5.3 us on 8 or 16
    lanes in blocks of 256 threads, 6.4 on 4 lanes in blocks of 64; 4096 x 512 6.2 on 32 lanes and 256 threads, 7.4 on 16, 64.
    """
    if not problem.forward or strategy != "warp" or tile.stages or problem.scaling:
        return tile
    most_lanes = min(32, 32 * 32 * device.num_sms // max(num_rows, 1))
    few = tile
    if tile.pack_size > 1 and (statistics == "two_pass" or not problem.centered):
        while few.packs_per_thread % 2 == 0 and 2 * few.threads_per_row <= most_lanes:
            few = replace(few, threads_per_row=2 * few.threads_per_row, packs_per_thread=few.packs_per_thread // 2)
    for block_size in (256, 128, tile.block_size):
        rows = block_size // few.threads_per_row
        fitting = replace(few, rows_per_block=rows, blocks_per_sm=1)
        fitting = replace(fitting, blocks_per_sm=_blocks_per_sm(problem, device, fitting))
        blocks = ceil_div(num_rows, rows)
        if 2 * device.num_sms <= blocks <= fitting.blocks_per_sm * device.num_sms:
            return fitting
    return fitting if fitting.blocks_per_sm and few != tile else tile


def reduce_bytes(problem: Problem, threads_per_row: int, cluster_size: int = 1) -> int:
    """Shared memory of BlockReduce (cluster_size 1) or ClusterReduce, as in cuda_src/reduce.cuh."""
    itemsize = DTYPES[problem.compute].itemsize
    parts = [threads_per_row // 32] + ([cluster_size] if cluster_size > 1 else [])
    return sum(ceil_div(2 * 3 * values * itemsize, 16) * 16 for values in parts)


def _ring_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory of WarpRing, Exchange and RingWeights, as in cuda_src/ring.cuh and backward_ring.cuh."""
    num_warps = tile.threads_per_row // 32
    # A part that does not begin on 16 bytes is fetched with what surrounds it.
    row_bytes = sum(tile.cols * size + (tile.pack_size * size < 16) * 32 * num_warps for size in _streamed(problem))
    rings = tile.rows_per_block * tile.stages * (row_bytes + 8 * num_warps)
    values = 3 if problem.forward and problem.centered else 2
    exchange = tile.rows_per_block * 4 * (8 + 4 * values * num_warps * tile.cluster_size)
    kept = [problem.weight if problem.dx or problem.recomputed else None, problem.bias]
    parameters = 0
    for itemsize in (DTYPES[name].itemsize for name in kept if name and not problem.forward):
        if tile.pack_size * tile.packs_per_thread > 16:
            parameters += (tile.packs_per_thread - (itemsize == 2)) * tile.pack_size * tile.threads_per_row * itemsize
    return ceil_div(rings + exchange, 16) * 16 + parameters


def smem_bytes_of(problem: Problem, tile: Tile, strategy: str) -> int:
    """Dynamic shared memory of one block."""
    compute_bytes = DTYPES[problem.compute].itemsize
    if tile.bundle:
        return _bundle_bytes(problem, tile)
    if tile.stages:
        return _ring_bytes(problem, tile)
    if strategy == "parameters":
        return 2 * tile.pack_size * tile.threads_per_row * tile.block_size // 32 * compute_bytes
    if strategy == "warp":
        num_warps = tile.block_size // 32
        return 0 if problem.forward or num_warps == 1 else 2 * num_warps * problem.num_cols * compute_bytes
    if strategy == "uncached" or (strategy == "block" and not problem.forward):
        return reduce_bytes(problem, tile.threads_per_row)
    scratch = reduce_bytes(problem, tile.threads_per_row, tile.cluster_size)
    if tile.packs_per_thread:
        return scratch
    slice_cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size)
    kept = [DTYPES[problem.x].itemsize]
    if not problem.forward:
        kept += [DTYPES[problem.dy].itemsize]
        kept += [compute_bytes] * (bool(problem.dweight) + bool(problem.dbias))
    return scratch + sum(ceil_div(slice_cols * itemsize, 16) * 16 for itemsize in kept)


# The ring (cuda_src/ring.cuh): rows that pass through shared memory.
# Shares of a copy are of an H200, bf16 unless said otherwise.
#
# From how many columns it beats registers, by direction and itemsize of x (backward, 2048 columns: 0.97, in registers 0.94; 648
# columns 0.93 and 0.88; float32, 1024 columns 1.00 and 0.96; 448 columns 0.99 and 0.98).
_RING_FROM = {"forward": {2: 10241, 4: 8193}, "backward": {2: 640, 4: 440}}
# The same, backward with other tensors than x, dy, dx and what is added to it (896 columns: 0.94, in registers 0.88).
_FUSED_RING_FROM = {2: 800, 4: 4097}
# The same, backward of 16-bit rows that also writes y again, for which registers hold a block less (float16, 768 columns in
# registers: three blocks 0.94, two 0.86).
_RECOMPUTING_RING_FROM = 700
# The same, forward, for rows that do not fill the registers of their threads (8200 columns: 0.89, in registers 0.84; 6000 0.91
# and 0.97).
_UNEVEN_RING_FROM = 8193
# The same for rows that do not begin on 16 bytes (forward, 4097 columns: 0.81, in registers 0.48).
_LONE_RING_FROM = {"forward": {2: 500, 4: 2048}, "backward": {2: 512, 4: 512}}
# The same, forward to 8 bits, where the row fills a ring (12,288 columns: 0.94, in registers 0.89; 16,384 0.87 and 0.82; 32,768
# 0.90 and 0.74; with the tensor's scale 12,288 columns 0.45 and 0.48, 16,384 0.42 and 0.43, 32,768 0.42 and 0.38).
_QUANTIZED_RING_FROM = {"given": 11000, "tensor": 20000}
# The same, forward of 16-bit rows with weights of 32 bits.
_WIDE_WEIGHT_RING_FROM = 7000
# The same, backward with the gradient of a residual's sum, of rows that fill whole warps (512 columns: 1.01, in registers 0.99;
# float32, 256 columns 1.02 and 0.99).
_ADDING_RING_FROM = {2: 500, 4: 250}
# Threads of all blocks of a multiprocessor: more have too few registers each for 64 elements forward, 32 backward.
_RING_THREADS = 384
# Elements of a thread. Forward it keeps their weights and biases.
# Backward it keeps their sums of dweight and dbias, two registers
# each: 64 are for rows that no cluster holds otherwise (262,144 columns 0.91).
_RING_ELEMENTS, _MOST_RING_ELEMENTS = {"forward": 64, "backward": 56}, 64
# Bytes on their way to a multiprocessor, the rows in use included, by itemsize of x: backward of float32, 65,536 columns 0.99
# with 128 KB, 0.98 with 192 KB. Of 16 bits the most, in 3 to 5 stages: 4096 columns 0.97 with 3 stages of 32 KB and 1.00 with
# 4, 7168 0.96 with 3 of 28 KB and 1.01 with 5, but 8960 0.98 with 3 of 35 KB and 0.96 with 4. Of lone elements, and on clusters
# of 2 and 16, more are slower (1023 columns 0.92 with 3, 0.88 with 4; 16,384 0.971 and 0.967; 131,072 0.91 and 0.88).
_RING_BYTES = {"forward": {2: 96 * 1024, 4: 160 * 1024}, "backward": {2: 140 * 1024, 4: 128 * 1024}}
# Rows of 16-bit elements are bound by instructions unless the four parts of a multiprocessor have as many warps each. The rate
# of a tile counts elements in the time of one element, where a row costs a thread as much as 10 elements beside its own, more
# in a cluster. Backward, 6 warps of 32 elements 0.84, 9 of 24 0.79, 7 of 32 0.94, 8 of 24 or 32 and 4 of 56 0.98; forward, 11
# of 32 0.87, 12 of 64 0.98.
_RING_ROW_COST = 10
_RING_RATE = {"forward": 3.2, "backward": 2.8}
# Fewer bytes of x and dy in the rows of one turn leave a multiprocessor waiting, in a cluster the sooner (24 KB: 6144 columns
# on one block 0.97, 24,576 on clusters of 4 0.88; with four stages 30 KB: 12,288 columns on clusters of 8 0.88, 36 KB 0.98).
_FEWEST_RING_BYTES, _FEWEST_CLUSTER_BYTES, _FEWEST_DEEP_BYTES = 20 * 1024, 28 * 1024, 32 * 1024
# Forward, bytes of x that a block, or a cluster of 2, takes before the next one takes its place. The hardware gives the place
# to whoever is free, which evens out what neighbours get of the memory (16,384 columns: 8 rows a block 0.95, all rows on
# resident blocks 0.92). Larger clusters are slow to start: they stay.
QUEUED_RING_BYTES, QUEUED_CLUSTER_SIZE = 256 * 1024, 2


def scales_at_once(problem: Problem, tile: Tile, strategy: str) -> bool:
    """Whether one launch finds the scales of y and writes it; else one finds the amaxes and a second writes.

    Blocks are found by neighbouring lanes, and must not lie in two slices of a cluster.
    """
    if problem.scaling not in ("block", "mx"):
        return problem.scaling != "tensor"
    block, width = problem.cols_of_scale, tile.pack_size * tile.threads_per_row
    in_registers = strategy in ("warp", "block") and tile.packs_per_thread > 0 and not tile.stages
    return in_registers and width % block == 0 and 32 * tile.pack_size >= block


def can_ring(problem: Problem, device: Device) -> bool:
    """Whether there is a copy engine to fetch the rows. Sums cross as floats.

    A ring fetches what makes up a row forward as tensors of one type, and has no registers left for random words. It writes a
    row when it meets it: there is no scale yet of a part of it.
    """
    fits = (
        problem.input is None and not problem.dropout and problem.row_scale is None and (problem.forward or problem.y is None)
    )
    fits = fits and problem.cols_of_scale is None
    return fits and problem.compute == "float32" and device.compute_capability >= 90


def _streamed(problem: Problem) -> list[int]:
    """Itemsizes of what passes through a ring."""
    names = [problem.x] * (1 + problem.residual) if problem.forward else [problem.x, problem.dy, problem.dsum]
    return [DTYPES[name].itemsize for name in names if name]


def _wants_ring(problem: Problem, registers: Tile | None) -> bool:
    """Whether a ring, if there is one, beats the tile of registers."""
    if problem.compute != "float32":
        return False
    if problem.scaling and registers is not None:
        return problem.num_cols >= _QUANTIZED_RING_FROM.get(problem.scaling, 1 << 31)
    itemsize = DTYPES[problem.x].itemsize
    aligned = all(problem.widest_pack * size >= 16 for size in _streamed(problem))
    first = (_RING_FROM if aligned else _LONE_RING_FROM)[problem.direction][itemsize]
    if aligned and not problem.forward and not _is_plain_backward(problem):
        first = _FUSED_RING_FROM[itemsize]
    if problem.forward and aligned and not (registers and registers.exact):
        first = min(first, _UNEVEN_RING_FROM)
    # Blocks with enough in flight (bf16: 8960 columns 0.97, in a ring 0.93; 13,312 columns 0.93 and 0.86; two blocks: 16,384
    # columns 0.95 and 0.94, 18,432 columns 0.99 and 0.98).
    # With a residual twice as much is (4096 columns: 0.97, in a ring 0.91; one block: 20,480 columns 0.98 and 0.94).
    fewest = 1 if problem.residual else 2 if registers and (registers.exact or itemsize > 2) else 3
    if problem.forward and registers and registers.blocks_per_sm >= fewest:
        in_flight = registers.blocks_per_sm * registers.rows_per_block * problem.num_cols * itemsize * (1 + problem.residual)
        # Weights of 32 bits come from afar for each row (7168 columns: 0.93, in a ring 0.96; 16,384 0.86 and 0.94), unless
        # enough is in flight meanwhile (9216 columns 0.99, 12,288 0.94).
        wide = itemsize == 2 and _has_wide_parameters(problem)
        enough = 60 if problem.num_cols <= 12288 else 70
        if wide and problem.num_cols >= _WIDE_WEIGHT_RING_FROM and in_flight < enough * 1024 and not problem.residual:
            return True
        if in_flight >= 60 * 1024 and problem.num_cols >= 0.95 * registers.cols:
            return False
    if problem.dsum and _is_plain_backward(problem) and aligned:
        if problem.num_cols % (32 * problem.widest_pack) == 0:
            first = min(first, _ADDING_RING_FROM[itemsize])
        elif itemsize > 2 and problem.num_cols < 1024 and not _least_turn_bytes(problem):
            return False
    if problem.recomputed and itemsize == 2:
        first = min(first, _RECOMPUTING_RING_FROM)
    if _least_turn_bytes(problem) == _NARROW_TURN_BYTES and problem.num_cols in _NARROW_IN_REGISTERS:
        return False
    return problem.num_cols >= first


def _has_wide_parameters(problem: Problem) -> bool:
    return any(name and DTYPES[name].itemsize > DTYPES[problem.x].itemsize for name in (problem.weight, problem.bias))


def _ring_registers(problem: Problem, device: Device, elements: int) -> int:
    """Registers of a thread of a ring, with no spills, as _registers."""
    if problem.forward:
        tight = (24 if "float64" in (problem.weight, problem.bias) else 8) * (device.compute_capability >= 120)
        fewest = 4 if problem.widest_pack == 1 else 0  # a register holds one lone element
        parameters = (problem.weight, problem.bias, problem.weight1, problem.bias1)
        kept = sum(max(DTYPES[name].itemsize, fewest) for name in parameters if name)
        return 104 + elements * kept // 4 + tight
    lone = 3 * elements // 4 if problem.widest_pack == 1 else 0
    wide_bias = 8 * (problem.bias is not None and DTYPES[problem.bias].itemsize > DTYPES[problem.x].itemsize)
    return 60 + 27 * min(elements, 57) // 8 + lone + wide_bias


@lru_cache(maxsize=4096)
def _ring_tile(problem: Problem, device: Device, cluster_sizes: tuple[int, ...]) -> Tile | None:
    """The best of the tiles whose ring fits registers and shared memory."""
    if not can_ring(problem, device):
        return None
    tile = _best_ring(problem, device, cluster_sizes, _RING_ELEMENTS[problem.direction])
    largest = [size for size in cluster_sizes if size >= 16]
    tile = tile or _best_ring(problem, device, largest, _MOST_RING_ELEMENTS)
    # Backward, one row that fills the shared memory (float32, 262,144 columns: 0.76, read again from memory 0.42).
    return tile or (None if problem.forward else _best_ring(problem, device, largest, _MOST_RING_ELEMENTS, stages=1))


def _best_ring(
    problem: Problem, device: Device, cluster_sizes: Iterable[int], most_elements: int, stages: int | None = None
) -> Tile | None:
    """stages: None, or how many there are to be."""
    score_of = _forward_ring_score if problem.forward else _backward_ring_score
    pack_size = problem.widest_pack
    best, best_score = None, None
    for cluster_size in cluster_sizes:
        slice_cols = cols_of_slice(problem, pack_size, cluster_size)
        for threads_per_row in range(32, _RING_THREADS + 1, 32):
            packs_per_thread = max(1, ceil_div(slice_cols, pack_size * threads_per_row))
            elements = pack_size * packs_per_thread
            # Half-empty threads are no better than fewer full ones.
            if elements > most_elements or (packs_per_thread > 1 and 2 * slice_cols < elements * threads_per_row):
                continue
            # Lone elements of a row in one warp (1023 columns 0.61, on two warps 0.71; 1279 0.63 and 0.77; 1535 0.84 and 0.81).
            if problem.forward and pack_size == 1 and threads_per_row == 32 and 24 < elements < 48:
                continue
            exact = int(elements * threads_per_row * cluster_size == problem.num_cols)
            registers = _ring_registers(problem, device, elements)
            for rows in range(1, min(12, _RING_THREADS // threads_per_row) + 1):
                if registers > min(255, device.registers_per_sm // (ceil_div(threads_per_row * rows, 128) * 128) // 8 * 8):
                    break
                # Rows that a multiprocessor works on at a time: forward in a block each, backward in one,
                # which leaves one partial row.
                rows_per_block, blocks_per_sm = (1, rows) if problem.forward else (rows, 1)
                tile = Tile(pack_size, threads_per_row, packs_per_thread, rows_per_block, cluster_size, blocks_per_sm, exact)
                tile = _with_stages(problem, device, tile, rows, stages)
                score = score_of(problem, tile) if tile else None
                if tile and (best is None or score > best_score):
                    best, best_score = tile, score
    return best


def _with_stages(problem: Problem, device: Device, tile: Tile, rows: int, stages: int | None) -> Tile | None:
    """The tile with as many stages as are wanted and fit, or None if 2 do not; or with those that are given, if they fit."""
    itemsize = DTYPES[problem.x].itemsize
    slot_bytes = tile.cols * sum(_streamed(problem))
    most_bytes = min(device.smem_per_block, device.smem_per_sm // tile.blocks_per_sm - 1024)
    if stages is not None:
        staged = replace(tile, stages=stages)
        return staged if rows == 1 and _ring_bytes(problem, staged) <= most_bytes else None
    wanted, turn_bytes = _RING_BYTES[problem.direction][itemsize], slot_bytes * rows
    if problem.forward:
        used_bytes = cols_of_slice(problem, tile.pack_size, tile.cluster_size) * sum(_streamed(problem)) * rows
        deep = itemsize == 2 and tile.pack_size > 1 and tile.cluster_size in (4, 8) and used_bytes <= _DEEP_RING_BYTES
        stages = min(ceil_div(wanted, turn_bytes), 4 if deep else 3)
    elif itemsize > 2 and _least_turn_bytes(problem):
        stages = min(wanted // turn_bytes, 4)
    elif itemsize == 2:
        deep = turn_bytes <= _DEEP_TURN_BYTES.get(tile.cluster_size, 0) and tile.pack_size > 1
        short = _has_short_threads(tile)
        if tile.cluster_size == 2:
            stages = 4 if deep and short else 3
        else:
            stages = min(wanted // turn_bytes, 5) if deep else 3
        if _least_turn_bytes(problem) or (deep and short and tile.cluster_size in (4, 8)):
            stages = max(stages, 4)
    else:
        stages = min(ceil_div(wanted, turn_bytes), 4)
    stages = max(stages, 3 if itemsize == 2 else 2)
    stages = min(stages, most_bytes // (slot_bytes * tile.rows_per_block))  # before the smaller parts of a ring
    fitting = (replace(tile, stages=count) for count in range(stages, 1, -1))
    return next((staged for staged in fitting if _ring_bytes(problem, staged) <= most_bytes), None)


# Bytes of one turn forward on clusters of 4 and 8 up to which four stages are better than three.
_DEEP_RING_BYTES = 27 * 1024
# Backward of float32: rows of up to so many columns pass through a ring in the smallest turns of at least so many bytes of x
# and dy (1024 columns: 3 rows 1.00, 4 rows 0.99, 8 rows 0.97, in registers 0.96; 2560 columns: one row, of 20 KB, 0.96, two
# 0.99, in registers 0.98), but for those that threads of two or three packs hold as well (768 columns 0.99 in both).
_NARROW_FLOAT32, _NARROW_TURN_BYTES, _NARROW_IN_REGISTERS = 4096, 22000, range(641, 880)


# The same with the gradient of a residual's sum, which is part of them: of float32 below 1024 columns, of others that fill
# short threads in turns of that size (512 columns: 10 rows 1.01, 8 rows 0.95; 2048 columns: 3 rows x 16 elements 1.02, 4 x 32
# 0.98; 5120 columns: 16 elements 1.02, 40 0.98; float32, 1024 columns: 3 rows x 8 elements 1.03, 8 x 32 0.99).
_ADDING_TURN_BYTES = {2: 28000, 4: 27500}
# Backward of 16 bits, by the size of a cluster: bytes in one turn up to which four or five stages are better than three, in a
# cluster of threads that have few elements (one block: 4096 columns, 32 KB, 1.00 and 0.98; 8960, 35 KB, 0.96 and 0.98; clusters
# of 2: 14,336 columns, 28 KB, 0.97 and 0.95; 16,384, 32 KB, 0.97 with both, on clusters of 4 0.99 and 0.96; 40,960 columns on
# clusters of 8 0.97 and 0.96, on clusters of 4 with 40 elements 0.89 and 0.93).
_DEEP_TURN_BYTES = {1: 34 * 1024, 2: 30 * 1024, 4: 40 * 1024, 8: 40 * 1024}


def _has_short_threads(tile: Tile) -> bool:
    """On clusters of 8 they may be longer (10,240 columns on 40 elements: clusters of 8 0.96, of 4 0.94)."""
    return tile.pack_size * tile.packs_per_thread <= (40 if tile.cluster_size == 8 and tile.rows_per_block >= 4 else 32)


def _is_plain_backward(problem: Problem) -> bool:
    """Of x, dy, dx and what is added to it alone: more tensors to write take registers."""
    return not (problem.forward or problem.dresidual or problem.recomputed)


def _fills_short_threads(problem: Problem, least_bytes: int, filled: float) -> bool:
    """Whether some number of whole rows is a turn of that size, and not much more, on threads of 24 elements at the most that
    a row fills to that share."""
    row_bytes = problem.num_cols * sum(_streamed(problem))
    rows = ceil_div(least_bytes, row_bytes)
    for threads in range(32, _RING_THREADS // rows + 1, 32):
        elements = ceil_div(problem.num_cols, threads * problem.widest_pack) * problem.widest_pack
        if elements <= 24 and problem.num_cols >= filled * elements * threads and rows * threads >= 192:
            return rows * row_bytes <= 1.5 * least_bytes
    return False


def _least_turn_bytes(problem: Problem) -> int | None:
    """Backward, where the smallest turns of at least so many bytes are the best; None where larger ones are no worse."""
    itemsize, num_cols, aligned = (
        DTYPES[problem.x].itemsize,
        problem.num_cols,
        problem.widest_pack * DTYPES[problem.x].itemsize >= 16,
    )
    if not _is_plain_backward(problem) or problem.compute != "float32" or not aligned:
        return None
    if problem.dsum:
        filled = 0.8 if itemsize > 2 and num_cols < 1024 else 1.0
        return _ADDING_TURN_BYTES[itemsize] if _fills_short_threads(problem, _ADDING_TURN_BYTES[itemsize], filled) else None
    return _NARROW_TURN_BYTES if itemsize > 2 and num_cols <= _NARROW_FLOAT32 else None


# Backward: columns of one turn on a multiprocessor beyond which more are worse: a cluster takes over (12,288 columns on
# clusters of 2 1.07 times as fast as on one block).
_MOST_BACKWARD_COLS = 11264
# Columns of a row that one block takes (16 bits, 9216 columns: clusters of 4 0.98, one block 0.94; 8960: one block 0.98).
_MOST_COLS_OF_BLOCK = {2: 9000, 4: 11264}


def _ring_share(problem: Problem, tile: Tile) -> float:
    """About the share of what memory allows that the instructions of a tile allow."""
    elements = tile.pack_size * tile.packs_per_thread
    warps = tile.block_size * tile.blocks_per_sm // 32
    used = cols_of_slice(problem, tile.pack_size, tile.cluster_size) / tile.cols  # packs beyond the row cost as much as others
    row_cost = _RING_ROW_COST + 2 * (tile.cluster_size.bit_length() - 1)
    turns = ceil_div(warps, 4)
    if warps > 4:  # a little less where one part has a warp less (backward of 200,000 columns: 7 warps filled 0.91, 8 not 0.87)
        turns = 0.75 * turns + 0.25 * warps / 4
    rate = used * warps * elements / (turns * (elements + row_cost))
    return min(1.0, rate * DTYPES[problem.x].itemsize / 2 / _RING_RATE[problem.direction])


def _suits_turn(tile: Tile, turn_bytes: int, itemsize: int) -> bool:
    """Whether clusters forward have the right number of bytes in one turn on a multiprocessor.

    16-bit rows are faster in two blocks if clusters of 8 are enough (32,768 columns: clusters of 4 with two blocks 0.97, of 2
    with one 0.95; 73,728: clusters of 8 with two blocks 0.91, of 16 with three 0.81; float32, 20,480: 0.99 on one block of
    clusters of 2). One block of a large cluster wants more (81,920: 0.80 with 20 KB; 163,840: 0.91 with 40 KB, 0.74 with 20 KB
    on clusters of 16), two of a small one less (40,960: 0.87 with 40 KB, 0.91 with 30 KB in three blocks of clusters of 8).
    """
    fewest, most = 20, 40
    if itemsize == 2 and tile.blocks_per_sm == 1:
        fewest, most = (26 if tile.cluster_size >= 8 else 20), 48
    elif itemsize == 2 and (tile.cluster_size <= 4 or (tile.cluster_size == 8 and tile.blocks_per_sm > 2)):
        most = 39 if tile.blocks_per_sm == 2 else 32
    elif itemsize == 4:
        most = 50
    return fewest * 1024 <= turn_bytes <= most * 1024


def _fills_quantized_ring(problem: Problem, tile: Tile) -> bool:
    """Whether a ring is the one for rows of 16 bits to 8 bits at one scale: 12 warps of long threads that the row fills."""
    long = tile.pack_size * tile.packs_per_thread >= 56 and tile.block_size * tile.blocks_per_sm == 384
    return long and tile.exact == 1 and problem.scaling in ("given", "tensor") and DTYPES[problem.x].itemsize == 2


def _forward_ring_score(problem: Problem, tile: Tile) -> tuple:
    """One block if it will do, or the smallest clusters that suit. Then the instructions, then the most columns at a time."""
    itemsize = DTYPES[problem.x].itemsize
    cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size) * tile.blocks_per_sm
    lone = tile.cluster_size == 1
    suits = lone or _suits_turn(tile, cols * itemsize, itemsize)
    two_blocks = not lone and itemsize == 2 and tile.blocks_per_sm > 1 and tile.cluster_size <= 8
    share = round(_ring_share(problem, tile), 2)
    # To 8 bits: 32,768 columns on 3 blocks of clusters of 4 0.90, on 2 0.79; 98,304 on 2 of 8 0.86, on 4 of 16 0.82.
    full = (_fills_quantized_ring(problem, tile), tile.cluster_size < 16, min(tile.blocks_per_sm, 3)) if problem.scaling else ()
    # With a residual a row takes twice the room: of the same bytes, deeper rings (8192 columns: 2 blocks of 3 stages 0.92, 3 of
    # 2 0.90).
    bytes_first = (cols * tile.stages, tile.stages) if problem.residual else (cols,)
    return *full, lone, suits, two_blocks, -tile.cluster_size, share, tile.exact, *bytes_first, tile.threads_per_row


def _backward_ring_score(problem: Problem, tile: Tile) -> tuple:
    """About the share of a copy that the tile reaches; of equals, few threads."""
    cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size) * tile.rows_per_block
    warps, elements, itemsize = tile.block_size // 32, tile.pack_size * tile.packs_per_thread, DTYPES[problem.x].itemsize
    bytes_per_col = sum(_streamed(problem))
    if least_bytes := _least_turn_bytes(problem):
        turn_bytes, filled = cols * bytes_per_col, problem.num_cols >= 0.8 * tile.cols
        return turn_bytes >= least_bytes, filled and warps >= 6, -turn_bytes, tile.exact, tile.block_size
    # Deep rings of short threads hide what blocks of a cluster wait for (12,288 columns: clusters of 8, 6 rows 0.98, of 4, 3
    # rows 0.96, of 2 with 48 elements 0.94), but not that one part has a third warp (24,576 columns: 9 warps 0.87, 12 0.98).
    deep = itemsize == 2 and tile.stages >= 4 and tile.exact and _has_short_threads(tile)
    deep = deep and (tile.cluster_size == 2 or (tile.cluster_size in (4, 8) and warps in (8, 10, 12)))
    fewest = (
        _FEWEST_RING_BYTES
        if tile.cluster_size == 1
        else _FEWEST_DEEP_BYTES
        if deep and tile.cluster_size > 2
        else _FEWEST_CLUSTER_BYTES
    )
    share = max(_ring_share(problem, tile), 0.94 * deep) * min(1.0, cols * bytes_per_col / fewest)
    share -= 0.01 * (warps < 8) + 0.02 * (cols > _MOST_BACKWARD_COLS) + 0.06 * (not tile.exact)
    # Narrow rows want more warps, others fewer (640 columns: 12 0.97, 8 0.85; 800: 0.99, 0.88; 904: 0.93, 0.95).
    narrow = problem.num_cols <= 820 and tile.threads_per_row == 32 and _is_plain_backward(problem)
    if narrow:
        share += 0.02 * (warps == 12)
    else:
        share += 0.06 + 0.02 * min(tile.rows_per_block - 1, 3) if deep else -0.03 * (warps > 8)
    share -= 0.001 * max(0, elements - 32)
    share -= 0.01 * (tile.cluster_size.bit_length() - 1) + 0.05 * (tile.cluster_size == 16)
    return round(share, 3), -tile.block_size


def _smem_threads(problem: Problem) -> int:
    return _DROPOUT_THREADS if problem.dropout else _BLOCK_THREADS


def _beats_registers(problem: Problem, ring: Tile, registers: Tile | None) -> bool:
    return registers is None or not problem.scaling or _fills_quantized_ring(problem, ring)


def _block_tile(problem: Problem, device: Device) -> Tile | None:
    tile = _register_tile(
        problem,
        device,
        range(32, 1024 + 1, 32),
        _BLOCK_BYTES[problem.direction][DTYPES[problem.x].itemsize],
        1,
    )
    ring = _ring_tile(problem, device, (1,)) if _wants_ring(problem, tile) else None
    if ring is not None and _beats_registers(problem, ring, tile):
        return ring
    if tile is not None or not problem.forward:
        return tile
    if device.clusters:
        return None  # a cluster's registers are faster than one block's shared memory (H200, bf16: 65536 columns 0.61, 0.54)
    tile = Tile(problem.widest_pack, _smem_threads(problem))
    return tile if smem_bytes_of(problem, tile, "block") <= device.smem_per_block else None


def _block_gives_way(problem: Problem, device: Device, tile: Tile) -> bool:
    if tile.stages and (problem.forward or problem.num_cols <= _MOST_COLS_OF_BLOCK[DTYPES[problem.x].itemsize]):
        return False
    if not (tile.stages or _wants_ring(problem, tile)):
        return False
    ring = _ring_tile(problem, device, tuple(size for size, _ in device.clusters))
    return ring is not None and (tile.stages > 0 or _beats_registers(problem, ring, tile))


def _cluster_tile(problem: Problem, device: Device) -> Tile | None:
    ring = _ring_tile(problem, device, tuple(size for size, _ in device.clusters))
    if ring is not None:
        return ring
    itemsize = DTYPES[problem.x].itemsize
    max_bytes = _BLOCK_BYTES[problem.direction][itemsize]
    # The most bytes in flight; where clusters of several sizes have as many, this order. Backward of 16-bit rows spends so
    # little time on a row's bytes that several small blocks a multiprocessor are needed to hide the exchange (H200, bf16: 16384
    # columns 0.73 of a copy on clusters of 8, 0.69 on 2; fp32: 0.79 and 0.86).
    order = (8, 4, 2, 16) if itemsize == 2 and not problem.forward else (2, 4, 8, 16)
    best, best_score = None, (0, False)
    # To find the scale of a row its blocks wait for each other once more: the smallest clusters (65,536 columns: clusters of 2
    # 0.43, of 16 0.26).
    smallest = problem.cols_of_scale is not None and problem.compute == "float32"
    for cluster_size in (size for size in order if size in dict(device.clusters)):
        tile = _register_tile(problem, device, range(32, 512 + 1, 32), max_bytes, 1, cluster_size)
        if tile is not None and smallest:
            return tile
        if tile is not None:
            in_flight = cols_of_slice(problem, tile.pack_size, cluster_size) * tile.blocks_per_sm * (10 if tile.exact else 9)
            score = (in_flight, order[0] == 8 and tile.blocks_per_sm > 1)
            if score > best_score:
                best, best_score = tile, score
    if best is not None:
        return best
    for cluster_size, _ in device.clusters:
        tile = Tile(problem.widest_pack, _smem_threads(problem), cluster_size=cluster_size)
        if smem_bytes_of(problem, tile, "cluster") <= device.smem_per_block:
            return tile
    return None


def _uncached_tile(problem: Problem, device: Device) -> Tile:
    return Tile(problem.widest_pack, 512, blocks_per_sm=1 if problem.y1 else 2)  # two outputs need more than 64 registers


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("warp", "in the registers of a warp, or of part of one", _warp_tile, gives_way=_warp_gives_way),
        Strategy("block", "in one block's registers or shared memory", _block_tile, gives_way=_block_gives_way),
        Strategy("cluster", "in the registers or shared memory of a thread-block cluster", _cluster_tile, first_capability=90),
        Strategy("uncached", "nowhere: it is read again", _uncached_tile),
    )
}
STATISTICS = ("two_pass", "welford")
