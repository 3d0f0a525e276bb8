"""Which kernel, tile and grid a problem gets: plans made from the table STRATEGIES of cupynorm.strategies.
Pure Python, no GPU needed.

The table is read from top to bottom: the first strategy wins that is wide enough for the row and knows none that is faster; the
last takes any row.
num_rows changes the grid, and how many threads share a row where rows are few, never a bit of a row's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from .bundles import can_bundle, queued_bundles
from .devices import DEVICES, Device
from .dtypes import DTYPES, ELEMENTS, FLOAT8S, compute_dtype
from .problem import SCALINGS, Problem, Tile, ceil_div, cols_of_slice, is_ring, is_staged
from .quantized_registers import fetches_ahead
from .registers import for_few_rows
from .rings import QUEUED_CLUSTER_SIZE, can_ring, queued_ring_bytes
from .strategies import STATISTICS, STRATEGIES, scales_at_once, smem_bytes_of


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel template: the file that holds it and its C++ name expression."""

    source: str
    name_expression: str


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid_size blocks of block_size threads, each with smem_bytes of dynamic shared memory.

    overlaps: whether it may start while the launch before it still runs, for whose end its kernel waits itself. num_first,
    rows_of_first: forward, how many blocks begin with so many rows each; others share what is left (Turns in cuda_src/row.cuh).
    """

    kernel: Kernel
    tile: Tile
    grid_size: int
    block_size: int
    smem_bytes: int
    cluster_size: int = 1
    overlaps: bool = False
    num_first: int = 0
    rows_of_first: int = 0


@dataclass(frozen=True)
class Choice:
    """All of a plan that does not depend on num_rows: the strategy, its tile, its kernel, and why."""

    strategy: str
    tile: Tile
    statistics: str
    kernel: Kernel | None
    smem_bytes: int
    resident: int  # blocks of this kernel that are resident on one multiprocessor, at least
    parameters_tile: Tile | None
    parameters_kernel: Kernel | None
    reason: str
    amax_kernel: Kernel | None = None  # which comes before it, where scales are not found at once
    by_dispatch: bool = False  # whether the tile is neither a caller's nor from a table, so that few rows may get another


def _cpp(name: str | None) -> str:
    return ELEMENTS[name].cpp if name else "void"


def _bool(value: object) -> str:
    return "true" if value else "false"


def _load_x(problem: Problem) -> str:
    if problem.forward or problem.y is None:
        return f"Load<{_cpp(problem.x)}>"
    types = ", ".join(_cpp(name) for name in (problem.y, problem.y_weight, problem.y_bias))
    return f"LoadXHat<{types}, {_bool(problem.zero_centered)}, {_cpp(problem.compute)}>"


def _kernel(problem: Problem, strategy: str, tile: Tile, statistics: str, step: str = "all") -> Kernel:
    zero_centered = _bool(problem.zero_centered)
    factor = f"{_cpp(problem.row_scale)}, {_bool(problem.dropout)}"
    load_x = _load_x(problem)
    if problem.forward:
        if problem.residual:
            load_x = f"ResidualLoad<{_cpp(problem.x)}>"
        if problem.input:
            load_x = f"SumLoad<{_cpp(problem.input)}, {_cpp(problem.residual_dtype)}, {_cpp(problem.x)}, {factor}>"
        rounded = f", {_cpp(problem.round_x_hat)}" if problem.round_x_hat else ""
        store = f"Store<{_cpp(problem.y)}, {_cpp(problem.weight)}, {_cpp(problem.bias)}, {zero_centered}{rounded}>"
        if problem.scaling:
            types = (
                f"{_cpp(problem.y)}, {_cpp(problem.weight)}, {_cpp(problem.bias)}, {zero_centered}, {_cpp(problem.round_x_hat)}"
            )
            store = f"QuantizeStore<{types}, Scaling::{problem.scaling}, Step::{step}>"
        if problem.y1:
            second = f"Store<{_cpp(problem.y1)}, {_cpp(problem.weight1)}, {_cpp(problem.bias1)}, {zero_centered}{rounded}>"
            store = f"TwoStores<{store}, {second}>"
        arguments = f"{load_x}, {store}, {_bool(problem.centered)}, Statistics::{statistics}"
    else:
        store = f"Store<{_cpp(problem.dx or problem.x)}, void, void, false>"
        if problem.dsum:
            store = f"AddStore<{_cpp(problem.dx or problem.x)}, {_cpp(problem.dsum)}>"
        if problem.dresidual or problem.row_scale or problem.dropout:
            store = f"SplitStore<{_cpp(problem.dx)}, {_cpp(problem.dresidual)}, {_cpp(problem.dsum)}, {factor}>"
        if problem.recomputed:
            types = ", ".join(_cpp(name) for name in (problem.recomputed, problem.weight, problem.bias))
            store = f"RecomputingStore<{store}, {types}, {zero_centered}>"
        scale = f"Scale<{_cpp(problem.weight)}, {zero_centered}>"
        sums = strategy != "uncached"
        gradients = (
            f"Gradients{{.dx = {_bool(problem.dx)}, .dweight = {_bool(problem.dweight and sums)}, "
            f".dbias = {_bool(problem.dbias and sums)}}}"
        )
        arguments = f"{load_x}, Load<{_cpp(problem.dy)}>, {scale}, {store}, {gradients}, {_bool(problem.centered)}"
    name = f"{problem.direction}_{strategy}"
    return Kernel(f"{name}.cu", f"{name}<{arguments}, {tile.cpp}>")


def _parameters_kernel(problem: Problem, strategy: str) -> tuple[Tile | None, Kernel | None]:
    if not (problem.dweight or problem.dbias):
        return None, None
    pack_size = min(problem.widest_pack, 4)
    # Partial rows are few: the columns are shared out among as many multiprocessors as they fill, by units of a cache line.
    lanes = 32 if strategy == "uncached" or problem.num_cols >= 16384 else 8
    # Four rows of float64 that are divided at a time need more than the 64 registers that two blocks leave a thread.
    blocks_per_sm = 1 if problem.y and strategy == "uncached" else 2
    tile = Tile(pack_size, lanes, rows_per_block=512 // lanes, blocks_per_sm=blocks_per_sm)
    compute = _cpp(problem.compute)
    if strategy == "uncached":
        rows = f"RowProducts<{_load_x(problem)}, Load<{_cpp(problem.dy)}>, {_bool(problem.centered)}>"
    else:
        rows = f"PartialSums<{compute}>"
    outputs = f"{_cpp(problem.dweight)}, {_cpp(problem.dbias)}"
    return tile, Kernel("backward_parameters.cu", f"backward_parameters<{rows}, {outputs}, {tile.cpp}>")


def _parameters_launch(
    problem: Problem, tile: Tile, kernel: Kernel, *, overlaps: bool = False, most_blocks: int | None = None
) -> Launch:
    grid = ceil_div(problem.num_cols, tile.threads_per_row * tile.pack_size)
    grid = grid if most_blocks is None else min(grid, most_blocks)
    return Launch(kernel, tile, grid, tile.block_size, smem_bytes_of(problem, tile, "parameters"), overlaps=overlaps)


def _check_tile(problem: Problem, strategy: str, tile: Tile, device: Device) -> None:
    """Raise a ValueError that says what does not fit."""

    def power_of_two(value: int) -> bool:
        return value > 0 and value & (value - 1) == 0

    if not power_of_two(tile.pack_size) or tile.pack_size > problem.pack_limit:
        raise ValueError(
            f"tile has pack_size {tile.pack_size}; num_cols {problem.num_cols} and the alignment of the arrays allow a "
            f"power of two up to {problem.pack_limit}"
        )
    if tile.threads_per_row < 1 or tile.rows_per_block < 1 or tile.block_size > 1024 or tile.block_size % 32:
        raise ValueError(
            f"tile has threads_per_row {tile.threads_per_row} and rows_per_block {tile.rows_per_block}; their product "
            "must be a multiple of 32 up to 1024"
        )
    if strategy == "warp" and (tile.threads_per_row > 32 or not power_of_two(tile.threads_per_row)):
        raise ValueError(f"tile has threads_per_row {tile.threads_per_row}; strategy 'warp' takes a power of two up to 32")
    if strategy != "warp" and not tile.stages and tile.rows_per_block != 1:
        raise ValueError(
            f"tile has rows_per_block {tile.rows_per_block}; without stages strategy {strategy!r} works on one row a block"
        )
    if strategy == "cluster":
        if tile.cluster_size not in dict(device.clusters):
            sizes = ", ".join(str(size) for size, _ in device.clusters)
            raise ValueError(f"tile has cluster_size {tile.cluster_size}; {device.name} runs clusters of {sizes}")
    elif tile.cluster_size != 1:
        raise ValueError(f"tile has cluster_size {tile.cluster_size}; strategy {strategy!r} has no clusters, use 1")
    in_registers = strategy == "warp" or (strategy == "block" and not problem.forward)
    in_registers = in_registers or (strategy != "uncached" and tile.packs_per_thread > 0)
    num_cols = cols_of_slice(problem, tile.pack_size, tile.cluster_size)
    if in_registers and tile.cols < num_cols:
        raise ValueError(
            f"tile holds {tile.cols} columns (pack_size {tile.pack_size} x threads_per_row {tile.threads_per_row} x "
            f"packs_per_thread {tile.packs_per_thread}), the row has {num_cols}" + " for each block" * (strategy == "cluster")
        )
    if in_registers and tile.cols - tile.pack_size * tile.threads_per_row >= max(num_cols, 1):
        raise ValueError(
            f"tile has packs_per_thread {tile.packs_per_thread}; the last pack of every thread lies beyond the {num_cols} "
            "columns of its block, use fewer"
        )
    if tile.exact not in (0, 1) or (tile.exact and not (in_registers and tile.cols * tile.cluster_size == problem.num_cols)):
        raise ValueError(
            f"tile has exact {tile.exact}; 1 is for a row that fills the {tile.cols} columns of the registers, else 0"
        )
    if in_registers and tile.pack_size * tile.packs_per_thread > 256:
        raise ValueError(
            f"tile keeps {tile.pack_size * tile.packs_per_thread} elements in each thread, more than its 255 registers"
        )
    if not in_registers and tile.packs_per_thread:
        raise ValueError(f"tile has packs_per_thread {tile.packs_per_thread}; here the row is not kept in registers, use 0")
    if tile.blocks_per_sm < 1 or tile.blocks_per_sm * tile.block_size > device.threads_per_sm:
        raise ValueError(
            f"tile asks for blocks_per_sm {tile.blocks_per_sm} of {tile.block_size} threads; a multiprocessor of "
            f"{device.name} holds {device.threads_per_sm} threads"
        )
    if tile.bundle:
        _check_bundle(problem, strategy, tile, device)
    elif tile.stages and (
        tile.stages < 1 + (tile.rows_per_block > 1)
        or not tile.packs_per_thread
        or strategy not in (("block",) if is_staged(problem, tile) else ("block", "cluster"))
    ):
        raise ValueError(
            f"tile has stages {tile.stages}, rows_per_block {tile.rows_per_block}, packs_per_thread {tile.packs_per_thread}; "
            "a ring has 2 or more stages, or backward 1 for one row a block, and 1 or more packs, and belongs to strategy "
            "'block' or 'cluster'; forward, 1 stage belongs to 'block' and one row a block"
        )
    if is_staged(problem, tile) and (problem.residual or tile.pack_size * DTYPES[problem.x].itemsize < 16):
        raise ValueError(
            f"tile has stages 1 and pack_size {tile.pack_size}; forward, 1 stage takes packs of 16 bytes or more, of x alone"
        )
    if tile.stages and not tile.bundle and not can_ring(replace(problem, pack_limit=tile.pack_size), device):
        raise ValueError(
            f"tile has stages {tile.stages}; a ring needs float32 arithmetic, sm_90 or later for the copy engine, and neither "
            "residual_dtype nor dropout nor row_scale nor memory_efficient"
        )
    smem_bytes = smem_bytes_of(problem, tile, strategy)
    if smem_bytes > device.smem_per_block:
        raise ValueError(f"tile needs {smem_bytes} bytes of shared memory a block, {device.name} has {device.smem_per_block}")


def _check_bundle(problem: Problem, strategy: str, tile: Tile, device: Device) -> None:
    """The same of a tile whose rows come and go in bundles."""
    groups = 32 // min(tile.threads_per_row, 32)
    if tile.bundle < 1 or tile.bundle % groups or tile.stages < 1 or strategy != "warp":
        raise ValueError(
            f"tile has bundle {tile.bundle} and stages {tile.stages}; bundles belong to strategy 'warp', with stages, "
            f"and with threads_per_row {tile.threads_per_row} have a multiple of {groups} rows"
        )
    if not can_bundle(problem, device):
        raise ValueError(
            f"tile has bundle {tile.bundle}; bundles need float32 arithmetic, sm_90 or later for the copy engine, rows without "
            "gaps between them, tensors of one itemsize, and nothing that is fused with the norm"
        )


def quantize_launch(
    num_rows: int, num_cols: int, x: str, y: str, pack_limit: int, *, centered: bool | None = None, weight: str | None = None,
    bias: str | None = None, zero_centered: bool = False, rounded: str | None = None, sums: str | None = None,
    scaling: str = "given",
) -> tuple[Launch, ...]:  # fmt: skip
    """The kernel that makes 8-bit floats of dtype y of a matrix, and transposes them; with sums, the dtype of sums over rows,
    a second one that adds up those of squares.

    x: its dtype, or y where they are only transposed. centered: None, or which norm's y of x is meant. scaling: given, or
    tensor, where x's amax is known."""
    source = f"BytesSource<{_cpp(y)}>" if x == y else f"ScaledSource<{_cpp(x)}, {_cpp(y)}, Scaling::{scaling}>"
    if centered is not None:
        types = (
            f"{_cpp(x)}, {_cpp(weight)}, {_cpp(bias)}, {_bool(centered)}, {_bool(zero_centered)}, {_cpp(rounded)}, {_cpp(y)}"
        )
        source = f"NormalizedSource<{types}>"
    pack_size = min(pack_limit, 16 // ELEMENTS[x].itemsize)
    lanes = 128 // pack_size
    # Of small packs more are in flight, each with an address: too many for the 80 registers that three blocks leave a thread.
    small = pack_size * ELEMENTS[x].itemsize < 16 and (pack_size > 1 or scaling == "tensor")
    blocks_per_sm = 2 if small or x == "float64" else 3
    if centered is not None and pack_size == 8 and {weight, bias} <= {x, None}:
        blocks_per_sm = 4  # H200, bf16, 8192 x 4096: 34.9 us, with three blocks 37.7
    tile = Tile(pack_size, lanes, rows_per_block=256 // lanes, blocks_per_sm=blocks_per_sm)
    squares = ceil_div(num_rows, 128) * ceil_div(num_cols, 128)
    kernel = Kernel("quantize.cu", f"quantize<{source}, {_bool(sums)}, {tile.cpp}>")
    if sums is None:
        return (Launch(kernel, tile, squares, tile.block_size, 128 * 128),)
    smem_bytes = 128 * (128 + tile.rows_per_block * compute_dtype(x).itemsize)
    problem = Problem("backward", False, num_cols, x, dbias=sums, pack_limit=pack_limit)
    last = _parameters_launch(problem, *_parameters_kernel(problem, "block"))
    return Launch(kernel, tile, squares, tile.block_size, smem_bytes), last


# Rows of a slab are as many as give each place of a block this many blocks, one after the other. (H200, bf16, 8192 x 12,288,
# microseconds: sums 61.4, largest magnitude 60.0; two blocks for each place 60.8 and over 61; eight packs in flight a thread on
# three blocks of a multiprocessor 62.3 and 59.8.)
_SURVEYS_OF_PLACE = 4


def survey_launch(
    device: Device, num_rows: int, num_cols: int, x: str, pack_limit: int, sums: str | None = None
) -> tuple[tuple[Launch, ...], int, int]:
    """The kernel that reads a matrix of dtype x for its largest magnitude, or, with sums, for sums over its rows of that dtype,
    and a second one that adds up those of slabs; the number of slabs, and the rows of one."""
    pack_size = min(pack_limit, 16 // DTYPES[x].itemsize)
    tile = Tile(pack_size, 16, 6, 16, blocks_per_sm=4)
    rows_at_once = tile.rows_per_block * tile.packs_per_thread
    across = ceil_div(num_cols, tile.threads_per_row * pack_size)
    wanted = ceil_div(_SURVEYS_OF_PLACE * tile.blocks_per_sm * device.num_sms, max(across, 1))
    rows_of_slab = ceil_div(max(num_rows, 1), wanted * rows_at_once) * rows_at_once
    num_slabs = ceil_div(num_rows, rows_of_slab)
    kernel = Kernel("survey.cu", f"survey<{_cpp(x)}, {_bool(sums)}, {tile.cpp}>")
    smem_bytes = tile.block_size * pack_size * compute_dtype(x).itemsize if sums else 0
    launch = Launch(kernel, tile, num_slabs * across, tile.block_size, smem_bytes)
    if sums is None:
        return (launch,), num_slabs, rows_of_slab
    problem = Problem("backward", False, num_cols, x, dbias=sums, pack_limit=pack_limit)
    overlaps = device.compute_capability >= 90
    last = _parameters_launch(problem, *_parameters_kernel(problem, "block"), overlaps=overlaps)
    return (launch, last), num_slabs, rows_of_slab


def update_scales_launch(num_tensors: int) -> Launch:
    """The kernel that ends a step of delayed scaling: a block for each tensor."""
    tile = Tile(1, 256)
    return Launch(Kernel("update_scales.cu", f"update_scales<{tile.cpp}>"), tile, num_tensors, tile.block_size, 256)


# Asked first where neither strategy nor tile is given: (strategy, tile, where they are from), or None. Of cupynorm.tiles.
tuned: Callable[[Problem, Device], tuple[str, Tile, str] | None] | None = None


@lru_cache(maxsize=4096)
def choose(
    problem: Problem, device: Device, strategy: str | None = None, tile: Tile | None = None, statistics: str | None = None
) -> Choice:
    """The kernel for a problem. A given strategy, tile or statistics is used as it is, or refused with a ValueError."""
    if tuned is not None and strategy is None and tile is None and (found := tuned(problem, device)):
        strategy, tile, reason = found
        return replace(choose(problem, device, strategy, tile, statistics), reason=reason)
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it is one of {', '.join(STRATEGIES)}, or None to let the width decide")
    if statistics is not None and statistics not in STATISTICS:
        raise ValueError(f"statistics is {statistics!r}; it is one of {', '.join(STATISTICS)}, or None")
    if tile is not None and strategy is None:
        raise ValueError("tile is given without strategy; a tile belongs to one strategy, so name it too")

    reason = "as asked for"
    by_dispatch = tile is None
    if strategy is not None:
        row = STRATEGIES[strategy]
        if device.compute_capability < row.first_capability:
            raise ValueError(
                f"strategy {strategy!r} needs compute capability {row.first_capability / 10:.1f} or later; {device.name} has "
                f"{device.compute_capability / 10:.1f}"
            )
        if strategy == "cluster" and not device.clusters:
            raise ValueError(f"strategy 'cluster' needs 2 multiprocessors for a cluster; {device.name} has {device.num_sms}")
        if tile is None:
            tile = row.tile(problem, device)
            if tile is None:
                raise ValueError(
                    f"strategy {strategy!r} is too narrow for {problem.num_cols} columns of {problem.x} on {device.name} "
                    f"({problem.direction}); its widest row has {widest(strategy, problem, device)}"
                )
        else:
            _check_tile(problem, strategy, tile, device)
    else:
        for row in STRATEGIES.values():
            tile = row.tile(problem, device) if device.compute_capability >= row.first_capability else None
            if tile is not None and not row.gives_way(problem, device, tile):
                break
        strategy = row.name
        reason = f"the first strategy that is wide enough and gives way to none; a row waits {row.row_waits}"

    statistics = statistics or ("welford" if strategy == "uncached" else "two_pass")
    smem_bytes = smem_bytes_of(problem, tile, strategy)
    resident = tile.blocks_per_sm if smem_bytes == 0 else min(tile.blocks_per_sm, device.smem_per_sm // (smem_bytes + 1024))
    kernel = amax_kernel = None
    if problem.scaling and not scales_at_once(problem, tile, strategy):
        amax_kernel = _kernel(problem, strategy, tile, statistics, "amax")
        kernel = _kernel(problem, strategy, tile, statistics, "write")
    elif problem.forward or problem.dx or problem.recomputed or strategy != "uncached":
        step = "write" if problem.scaling == "given" and not problem.amax else "all"
        kernel = _kernel(problem, strategy, tile, statistics, step)
    parameters_tile, parameters_kernel = (None, None) if problem.forward else _parameters_kernel(problem, strategy)
    return Choice(
        strategy, tile, statistics, kernel, smem_bytes, max(1, resident), parameters_tile, parameters_kernel, reason,
        amax_kernel, by_dispatch,
    )  # fmt: skip


def widest(strategy: str, problem: Problem, device: Device) -> int | None:
    """The most columns that a strategy takes with a problem's dtypes, or None if it takes any or lacks the device."""
    row = STRATEGIES[strategy]
    if strategy == "uncached" or device.compute_capability < row.first_capability:
        return None

    def fits(num_cols: int) -> bool:
        return row.tile(replace(problem, num_cols=num_cols), device) is not None

    step = problem.widest_pack
    low, high = 0, 1
    while fits(high * step):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


_TENSORS = {
    *("x", "y", "weight", "bias", "dy", "dx", "dweight", "dbias", "dsum"),
    *("input", "residual_dtype", "row_scale", "dresidual", "y1", "weight1", "bias1", "scaling", "recomputed"),
}


@dataclass(frozen=True)
class Plan:
    """How one problem is computed. launches: the kernels in order; bytes_moved: what they read and write in global memory.

    bytes_needed: what any implementation must move, each streamed tensor once: the roofline.
    """

    problem: Problem
    device: Device
    num_rows: int
    strategy: str
    tile: Tile
    statistics: str
    launches: tuple[Launch, ...]
    num_partials: int
    bytes_moved: int
    bytes_needed: int
    reason: str

    def __str__(self) -> str:
        norm = "layer_norm" if self.problem.centered else "rms_norm"
        tensors = ", ".join(f"{name} {value}" for name, value in asdict(self.problem).items() if value and name in _TENSORS)
        lines = [
            ("problem", f"{norm} {self.problem.direction}, {self.num_rows} rows x {self.problem.num_cols} columns"),
            ("tensors", tensors),
            ("device", f"{self.device.name}, {self.device.num_sms} multiprocessors, sm_{self.device.compute_capability}"),
            ("strategy", f"{self.strategy}: {self.reason}"),
            ("tile", str(self.tile)),
            ("statistics", self.statistics if self.problem.forward else "given"),
        ]
        for launch in self.launches:
            shape = f"grid {launch.grid_size} x block {launch.block_size}"
            if launch.cluster_size > 1:
                shape += f" in clusters of {launch.cluster_size}"
            lines.append((launch.kernel.source, f"{shape}, {launch.smem_bytes} bytes of shared memory"))
        if not self.launches:
            lines.append(("launches", "none: there is nothing to compute"))
        ratio = f", {self.bytes_moved / self.bytes_needed:.3f} of what is needed" if self.bytes_needed else ""
        lines.append(("bytes moved", f"{self.bytes_moved:,}{ratio}"))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


# Of y in 8 bits a block has some instructions before its first row, so of many rows it takes a few groups one after the other
# (H200, bf16, 1 x 128 blocks, 1024 columns: four rows a block 0.94 of a copy, one 0.87); then the queue has the next ones.
# Of fewer rows the queue must have this many blocks for each place of one, by scaling, to even out what multiprocessors get
# (H200, bf16, microseconds: scale given, 8192 x 4096 32.2, four rows a block 35.4; 4096 x 8192 32.4 and 36.5; by row, 16,384 x
# 2048 32.3 and 35.7); but fewer than two for each start no queue (given, 1024 x 8192, 1.6: 13.9, one row a block 14.6). Where
# a second launch reads the rows again, resident blocks alone keep to their order, and leave more of them in the L2 cache
# (8192 x 4096 55.9, four rows a block 60.2; 8192 x 8192, 12.4 rows for each place, 98.9 and 102.8; 16,384 x 5120, 15.5 of
# them, 118.3 and 116.7).
_QUANTIZED_GROUPS, _QUEUED_QUANTIZED, _QUEUED_GIVEN, _RESIDENT_TENSOR = 4, 4, 12, 14


def _quantized_blocks(problem: Problem, groups: int, resident: int) -> int:
    """Blocks, or clusters, that write y in 8 bits from registers."""
    few = ceil_div(groups, _QUANTIZED_GROUPS)
    if problem.scaling == "tensor":
        return resident if groups < _RESIDENT_TENSOR * resident else max(resident, few)
    if groups < 2 * resident:
        return resident
    queued = _QUEUED_GIVEN if problem.scaling == "given" else _QUEUED_QUANTIZED
    return max(min(groups, queued * resident), few)


# Blocks that stay on their multiprocessor begin with this share of the rows; then the hardware's queue has blocks of so many,
# which evens out what multiprocessors get of the memory (H200, bf16 to 8 bits: LayerNorm by row, 8192 columns 0.974, all rows
# on resident blocks 0.958; 12,288 columns 0.94 and 0.90; RMSNorm, 16,384 columns 0.995 and 0.97, in a ring 49,152 columns 0.95,
# from the queue alone 0.88). Where one block of LayerNorm has a multiprocessor to itself nothing hides how it starts (32,768
# columns 0.86 and 0.85, in a ring 24,576 columns 0.84 and 0.89).
_SHARE_OF_FIRST, _ROWS_OF_LATER, _FEWEST_ROWS_OF_FIRST = 0.9, 2, 4


def _stays(choice: Choice, problem: Problem) -> bool:
    """Forward, of rows in registers: whether a block stays for the row that it has begun to fetch."""
    tile = choice.tile
    in_registers = choice.strategy == "block" and tile.stages == 0 and tile.packs_per_thread > 0
    return is_staged(problem, tile) or (in_registers and choice.amax_kernel is None and fetches_ahead(problem, tile))


def shares_of_first(choice: Choice, problem: Problem, device: Device, num_rows: int, sm_margin: int) -> tuple[int, int]:
    """num_first and rows_of_first of a Launch; 0 where all blocks are alike."""
    tile = choice.tile
    if is_ring(problem, tile):
        shares_out = problem.scaling is not None and not problem.centered and tile.cluster_size <= QUEUED_CLUSTER_SIZE
    else:
        shares_out = choice.resident > 1 and _stays(choice, problem)
    if not shares_out or sm_margin:
        return 0, 0
    num_first = choice.resident * (dict(device.clusters)[tile.cluster_size] if tile.cluster_size > 1 else device.num_sms)
    rows_of_first = int(_SHARE_OF_FIRST * num_rows / num_first)
    return (num_first, rows_of_first) if rows_of_first >= _FEWEST_ROWS_OF_FIRST else (0, 0)


def grid_size(choice: Choice, problem: Problem, device: Device, num_rows: int, sm_margin: int) -> int:
    """Blocks of the first kernel. Forward takes one block for each group of rows and lets the hardware queue them, unless a
    margin of multiprocessors is to stay free; backward keeps its sums from row to row, so its blocks are all resident."""
    tile = choice.tile
    groups = ceil_div(num_rows, tile.rows_per_block)
    most = (2**31 - 1) // tile.cluster_size
    if tile.cluster_size > 1:
        clusters = dict(device.clusters)[tile.cluster_size]
        left = clusters - ceil_div(sm_margin * clusters, device.num_sms)
        if left < 1:
            raise ValueError(
                f"sm_margin is {sm_margin}; it leaves {device.num_sms - sm_margin} multiprocessors of {device.name}, too few "
                f"for a cluster of {tile.cluster_size}"
            )
        resident = left * choice.resident
    else:
        resident = (device.num_sms - sm_margin) * choice.resident
    if not problem.forward or sm_margin or (tile.cluster_size > 1 and not tile.packs_per_thread):
        return min(groups, resident) * tile.cluster_size  # what waits in shared memory is worth a block that stays
    if tile.bundle:
        rows = tile.bundle * queued_bundles(tile) * tile.block_size // 32
        return min(groups, max(resident, ceil_div(num_rows, rows)), most)
    num_first, rows_of_first = shares_of_first(choice, problem, device, num_rows, sm_margin)
    if num_first:
        later = ceil_div(num_rows - num_first * rows_of_first, _ROWS_OF_LATER)
        return min(num_first + later, most) * tile.cluster_size
    if _stays(choice, problem):
        return min(groups, resident)
    if is_ring(problem, tile):
        queued_bytes = queued_ring_bytes(problem) if tile.cluster_size <= QUEUED_CLUSTER_SIZE else None
        queued = 0  # resident blocks alone
        if queued_bytes:
            rows = max(1, queued_bytes * tile.cluster_size // (problem.num_cols * DTYPES[problem.x].itemsize))
            queued = ceil_div(num_rows, rows)
        return min(groups, max(resident, queued), most) * tile.cluster_size
    if problem.scaling and tile.packs_per_thread:
        return min(groups, _quantized_blocks(problem, groups, resident), most) * tile.cluster_size
    return min(groups, most) * tile.cluster_size


def make_plan(
    problem: Problem,
    device: Device,
    num_rows: int,
    *,
    strategy: str | None = None,
    tile: Tile | None = None,
    statistics: str | None = None,
    sm_margin: int = 0,
) -> Plan:
    """The plan of one problem on one device. ValueError: strategy, tile or statistics unknown or not fitting, or an
    sm_margin that leaves no multiprocessor."""
    choice = choose(problem, device, strategy, tile, statistics)
    if choice.by_dispatch:
        few = for_few_rows(problem, device, choice.strategy, choice.tile, num_rows, choice.statistics)
        if few != choice.tile:
            reason = (
                f"{choice.reason}; as rows are few, {few.threads_per_row} lanes for each and {few.rows_per_block} in a block"
            )
            choice = replace(choose(problem, device, choice.strategy, few, statistics), reason=reason)
    if not 0 <= sm_margin < device.num_sms:
        raise ValueError(
            f"sm_margin is {sm_margin}; {device.name} has {device.num_sms} multiprocessors, so 0 to {device.num_sms - 1} can "
            "be left free"
        )
    launches = []
    num_partials = 0
    needed = moved = num_rows * problem.bytes_per_row
    row_elements = num_rows * problem.num_cols
    if row_elements and choice.kernel is not None:
        grid = grid_size(choice, problem, device, num_rows, sm_margin)
        cluster_size = choice.tile.cluster_size
        num_first, rows_of_first = shares_of_first(choice, problem, device, num_rows, sm_margin)
        for kernel in filter(None, (choice.amax_kernel, choice.kernel)):
            launches.append(
                Launch(
                    kernel, choice.tile, grid, choice.tile.block_size, choice.smem_bytes, cluster_size, num_first=num_first,
                    rows_of_first=rows_of_first,
                )
            )  # fmt: skip
        if choice.parameters_kernel is not None and choice.strategy != "uncached":
            num_partials = grid // cluster_size
    if choice.strategy == "uncached":
        if problem.forward:
            passes = (2 if choice.statistics == "two_pass" and problem.centered else 1) + bool(problem.y)
            passes += problem.scaling == "row"
            moved += (passes - 1) * row_elements * DTYPES[problem.x].itemsize * (1 + problem.residual)
        else:
            x_size, dy_size = DTYPES[problem.x].itemsize, DTYPES[problem.dy].itemsize
            passes = 2 if problem.dx else int(bool(problem.recomputed))
            reads_of_x = passes + bool(problem.dweight)
            reads_of_dy = passes + bool(problem.dweight or problem.dbias)
            moved += row_elements * ((reads_of_x - 1) * x_size + (reads_of_dy - 1) * dy_size)
    if choice.amax_kernel is not None:
        # What is read, once more, and the amaxes there and back.
        moved += moved - num_rows * (problem.num_cols + problem.scale_bytes)
        moved += 8 * (num_rows * problem.num_scales or 1)
    if row_elements and choice.parameters_kernel is not None:
        # Its blocks are in place when the partial sums are written (H200, bf16: 8192 x 128 10.3 to 9.2 us, 512 x 4096 14.9 to
        # 14.0).
        overlaps = num_partials > 0 and device.compute_capability >= 90
        most_blocks = (device.num_sms - sm_margin) * choice.parameters_tile.blocks_per_sm if sm_margin else None
        launches.append(
            _parameters_launch(
                problem, choice.parameters_tile, choice.parameters_kernel, overlaps=overlaps, most_blocks=most_blocks
            )
        )
        wanted = bool(problem.dweight) + bool(problem.dbias)
        moved += 2 * wanted * num_partials * problem.num_cols * DTYPES[problem.compute].itemsize
    parameters = [problem.weight, problem.bias, problem.dweight, problem.dbias]
    parameters += [problem.weight1, problem.bias1, problem.y_weight, problem.y_bias]
    once = problem.num_cols * sum(DTYPES[name].itemsize for name in parameters if name)
    statistics_bytes = num_rows * (1 + problem.centered) * compute_dtype(problem.x).itemsize
    return Plan(
        problem,
        device,
        num_rows,
        choice.strategy,
        choice.tile,
        choice.statistics,
        tuple(launches),
        num_partials,
        moved + once + statistics_bytes,
        needed + once + statistics_bytes,
        choice.reason,
    )


def pack_limit(num_cols: int, layouts: Iterable[tuple[int, int, int]]) -> int:
    """The largest power of two that divides num_cols and keeps every tensor's packs aligned.

    layouts: (address, row stride in elements, itemsize) of each tensor; a pack's address is a multiple of its bytes,
    or of 16 if it has more.
    """
    limit = 16
    while limit > 1 and num_cols % limit:
        limit //= 2
    for address, row_stride, itemsize in layouts:
        while limit > 1 and (address % min(16, limit * itemsize) or row_stride * itemsize % min(16, limit * itemsize)):
            limit //= 2
    return limit


def plan(
    num_cols: int,
    num_rows: int = 4096,
    dtype: str = "bfloat16",
    *,
    norm: str = "layer_norm",
    direction: str = "forward",
    device: str | Device | None = None,
    weight_dtype: str | None = "same",
    bias_dtype: str | None = "same",
    out_dtype: str | None = None,
    scale: str | None = None,
    amax: bool = False,
    residual: bool = False,
    zero_centered_weight: bool = False,
    alignment: int = 256,
    strategy: str | None = None,
    tile: Tile | None = None,
    statistics: str | None = None,
    sm_margin: int = 0,
) -> Plan:
    """Which kernel, tile and grid a problem gets, the bytes it moves, and why. Prints as a short table. Needs no GPU.

    num_cols, num_rows: the problem. dtype: of x; weight_dtype and bias_dtype are the same unless given, None if absent;
    out_dtype: of y; where it is a float of 8 bits, scale: "given", or "tensor", "row", "block" or "mx" as in layer_norm;
    amax: whether that of y is recorded beside a given one. residual: whether x is a sum that forward forms; backward then adds
    what reaches the sum from elsewhere. norm: "layer_norm" or "rms_norm". direction: "forward", or "backward" with all three
    gradients. device: a name of cupynorm.DEVICES or a Device; None is the current GPU. alignment: bytes that every base address
    is a multiple of.
    strategy, tile, statistics, sm_margin: as in layer_norm.
    Returns a Plan. Raises ValueError for unknown names and for what does not fit.
    """
    if norm not in ("layer_norm", "rms_norm"):
        raise ValueError(f"norm is {norm!r}; expected 'layer_norm' or 'rms_norm'")
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction is {direction!r}; expected 'forward' or 'backward'")
    for name, extent in (("num_cols", num_cols), ("num_rows", num_rows)):
        if extent < 0:
            raise ValueError(f"{name} is {extent}; expected 0 or more")
    weight, bias = (dtype if name == "same" else name for name in (weight_dtype, bias_dtype))
    y = out_dtype or dtype
    is_quantized = direction == "forward" and y in FLOAT8S
    for name in filter(None, (dtype, weight, bias, None if is_quantized else y)):
        if name not in DTYPES:
            raise ValueError(f"dtype is {name!r}; expected one of {', '.join(DTYPES)}")
    if scale is not None and (not is_quantized or scale not in SCALINGS):
        raise ValueError(f"scale is {scale!r}; expected one of {', '.join(SCALINGS)}, of a forward whose out_dtype has 8 bits")
    if amax and (not is_quantized or scale not in (None, "given")):
        raise ValueError(f"amax is recorded with scale {scale!r}; expected 'given', of a forward whose out_dtype has 8 bits")
    if device is None:
        from .launch import current_device

        device = current_device()
    elif not isinstance(device, Device):
        if device not in DEVICES:
            raise ValueError(
                f"device is {device!r}; expected one of {', '.join(DEVICES)}, a Device, or None for the current GPU"
            )
        device = DEVICES[device]
    tensors = {"y": y, "bias": bias, "residual": residual, "amax": bool(amax)}
    tensors["scaling"] = (scale or "given") if is_quantized else None
    if direction == "backward":
        tensors = {"dy": y, "dx": dtype, "dweight": weight, "dbias": bias, "dsum": dtype if residual else None}
    limit = pack_limit(num_cols, [(alignment, 0, ELEMENTS[name].itemsize) for name in filter(None, (dtype, y, weight, bias))])
    problem = Problem(
        direction, norm == "layer_norm", num_cols, dtype, weight=weight, zero_centered=zero_centered_weight, pack_limit=limit,
        **tensors,
    )  # fmt: skip
    return make_plan(problem, device, num_rows, strategy=strategy, tile=tile, statistics=statistics, sm_margin=sm_margin)
