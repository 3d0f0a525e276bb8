"""Which kernel, tile and grid a problem gets. Pure Python, no GPU needed.

The table STRATEGIES (strategies.py) is read from top to bottom. The first strategy wins that is
wide enough for the row, unless a later one is faster; the last takes any row.
num_rows changes the grid, and for few rows how many threads share a row. It never changes a bit of
a row's results.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from ..dtypes import DTYPES, compute_dtype
from ..table import as_text, pairs_as_html
from .devices import Device
from .grids import (
    for_few_rows,
    grid_size,
    in_one_launch,
    parameters_launch,
    shares_of_first,
)
from .instances import Choice, Kernel, KernelLaunch, parameters_instance, row_instance
from .measured import measured_tile, tile_in_use
from .model import RESERVED_BYTES, check_path, check_tile, keeps_sums, scales_at_once, smem_bytes_of
from .problem import Problem, Tile
from .strategies import STRATEGIES, check_strategy


@lru_cache(maxsize=4096)
def choose(
    problem: Problem,
    device: Device,
    strategy: str | None = None,
    tile: Tile | None = None,
    statistics: str | None = None,
) -> Choice:
    """The kernel for a problem. Raises ValueError if a given strategy, tile or statistics does not
    fit."""
    check_strategy(strategy, statistics, tile)
    if strategy is None:
        name, chosen, reason = _best_tile(problem, device)
    else:
        name, reason = strategy, "as asked for"
        chosen = _forced_tile(problem, device, strategy, tile)
    statistics = statistics or ("welford" if chosen.path == "uncached" else "two_pass")
    smem_bytes = smem_bytes_of(problem, chosen, name)
    resident = chosen.blocks_per_sm
    if smem_bytes:
        resident = min(resident, device.smem_per_sm // (smem_bytes + RESERVED_BYTES))
    amax_kernel, kernel = _row_kernels(problem, name, chosen, statistics)
    of_parameters = (None, None)
    if not problem.forward:
        of_parameters = parameters_instance(problem, keeps_sums(chosen))
    of_rows = (name, chosen, statistics, kernel, smem_bytes, max(1, resident))
    return Choice(*of_rows, *of_parameters, reason, amax_kernel, by_dispatch=tile is None)


def _forced_tile(problem: Problem, device: Device, strategy: str, tile: Tile | None) -> Tile:
    """The tile of a strategy that the caller names, and perhaps its tile. Raises ValueError if the
    device cannot run the strategy, or if the row or the tile does not fit."""
    row = STRATEGIES[strategy]
    if device.compute_capability < row.first_capability:
        raise ValueError(
            f"strategy {strategy!r} needs compute capability {row.first_capability / 10:.1f} "
            f"or later; {device.name} has {device.compute_capability / 10:.1f}"
        )
    if tile is not None:
        tile = tile.of_strategy(strategy)
        check_tile(problem, strategy, tile, device)
        return tile
    tile = row.tile(problem, device)
    if tile is None:
        raise ValueError(
            f"strategy {strategy!r} is too narrow for {problem.num_cols} columns of "
            f"{problem.x} on {device.name} ({problem.direction}); "
            f"its widest row has {widest(strategy, problem, device)}"
        )
    return tile


def _row_kernels(
    problem: Problem, strategy: str, tile: Tile, statistics: str
) -> tuple[Kernel | None, Kernel | None]:
    """The kernel that first finds amaxes, if one launch cannot; and the kernel of rows.

    Backward `uncached` without dx and y has none: the sums of dweight and dbias read x and dy.
    """
    if problem.scaling and not scales_at_once(problem, tile, strategy):
        row = (problem, strategy, tile, statistics)
        return row_instance(*row, "amax"), row_instance(*row, "write")
    if problem.forward or problem.dx or problem.recomputed or strategy != "uncached":
        step = "write" if problem.scaling == "given" and not problem.amax else "all"
        return None, row_instance(problem, strategy, tile, statistics, step)
    return None, None


def _best_tile(problem: Problem, device: Device) -> tuple[str, Tile, str]:
    """Strategy, tile and reason: from the rows of use_tiles, the data file, or the model.

    A row of the file covers a range of widths. Backward, the model's ring is better for those
    widths of the range that fill it exactly.
    """
    if in_use := tile_in_use(problem, device):
        return in_use
    measured = measured_tile(problem, device)
    if measured is not None and (problem.forward or measured[1].path != "ring"):
        return measured
    for row in STRATEGIES.values():
        is_available = device.compute_capability >= row.first_capability
        tile = row.tile(problem, device) if is_available else None
        if tile is not None and not row.later_is_faster(problem, device, tile):
            break
    # Whether a row fills the model's ring, but not the other one.
    enough = 4 if problem.itemsize > 2 else 2  # stages
    is_fuller = tile.path == "ring" and tile.exact and tile.stages >= enough
    if measured is not None and not (is_fuller and not measured[1].exact):
        return measured
    return row.name, tile, "the first strategy that is wide enough, and no later one is faster"


def widest(strategy: str, problem: Problem, device: Device) -> int | None:
    """The most columns that a strategy takes with a problem's dtypes.

    None if it takes any number, or if the device is too old for it.
    """
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


# Fields of a Problem that a plan prints in the line "tensors".
_TENSORS = {
    *("x", "y", "weight", "bias", "dy", "dx", "dweight", "dbias", "dsum", "input", "scaling"),
    *("residual_dtype", "dresidual", "recomputed"),
}


@dataclass(frozen=True, repr=False)
class Plan:
    """How one problem is computed. Prints as a short table.

    Examples:
        >>> plan = cupynorm.plan(12288, device="H200", direction="backward")
        >>> [launch.kernel.source for launch in plan.launches]
        ['backward_cluster.cu', 'backward_parameters.cu']
        >>> plan.strategy, plan.tile.path
        ('cluster', 'ring')

    problem, device, num_rows: what was planned.
    strategy, tile: of the kernel that works on rows. statistics: "two_pass" or "welford".
    reason: why this strategy and tile, in words.
    launches: the kernels in order.
    num_partials: partial rows of dweight and dbias.
    bytes_moved: what the kernels read and write in global memory.
    bytes_needed: what every implementation must move, each streamed tensor once: the roofline.
    """

    problem: Problem
    device: Device
    num_rows: int
    strategy: str
    tile: Tile
    statistics: str
    launches: tuple[KernelLaunch, ...]
    num_partials: int
    bytes_moved: int
    bytes_needed: int
    reason: str

    def _facts(self) -> list[tuple[str, str]]:
        norm = "layer_norm" if self.problem.centered else "rms_norm"
        problem, device = self.problem, self.device
        named = ((name, value) for name, value in asdict(problem).items() if name in _TENSORS)
        size = f"{self.num_rows} rows x {problem.num_cols} columns"
        of_device = f"{device.num_sms} multiprocessors, sm_{device.compute_capability}"
        lines = [
            ("problem", f"{norm} {problem.direction}, {size}"),
            ("tensors", ", ".join(f"{name} {value}" for name, value in named if value)),
            ("device", f"{device.name}, {of_device}"),
            ("strategy", f"{self.strategy}: {self.reason}"),
            ("path", self.tile.path_in_words),
            ("tile", str(replace(self.tile, path=None))),
            ("statistics", self.statistics if problem.forward else "given"),
        ]
        functors = (("x", problem.load), ("y", problem.store))
        lines += [(f"fused, on {value}", str(each)) for value, each in functors if each]
        for launch in self.launches:
            shape = f"grid {launch.grid_size} x block {launch.block_size}"
            if launch.cluster_size > 1:
                shape += f" in clusters of {launch.cluster_size}"
            shape += f", {launch.smem_bytes} bytes of shared memory"
            lines.append((launch.kernel.source, shape))
        if not self.launches:
            lines.append(("launches", "none: there is nothing to compute"))
        moved = f"{self.bytes_moved:,}"
        if self.bytes_needed:
            moved += f", {self.bytes_moved / self.bytes_needed:.3f} of what is needed"
        return [*lines, ("bytes moved", moved)]

    def __str__(self) -> str:
        return as_text(self._facts())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return pairs_as_html(self._facts())


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
    """The plan of one problem on one device.

    Raises ValueError if strategy, tile or statistics is unknown or does not fit, or if sm_margin
    leaves no multiprocessor.
    """
    if tile is not None and strategy in STRATEGIES:
        check_path(strategy, tile.of_strategy(strategy))
    choice = choose(problem, device, strategy, tile, statistics)
    if choice.by_dispatch:  # few rows may have more threads each
        at = (problem, device, choice.strategy)
        few = for_few_rows(*at, choice.tile, num_rows, choice.statistics)
        if few != choice.tile:
            shape = f"{few.threads_per_row} lanes for each and {few.rows_per_block} in a block"
            reason = f"{choice.reason}; as rows are few, {shape}"
            choice = replace(choose(*at, few, statistics), reason=reason)
    if not 0 <= sm_margin < device.num_sms:
        raise ValueError(
            f"sm_margin is {sm_margin}; expected 0 to {device.num_sms - 1} of the "
            f"{device.num_sms} multiprocessors of {device.name}"
        )
    launches, num_partials = (), 0
    if num_rows and problem.num_cols:
        one = None
        if choice.by_dispatch and strategy is None and not (problem.forward or sm_margin):
            one = in_one_launch(choice, problem, num_rows)
        launches = (one,) if one else _launches(choice, problem, device, num_rows, sm_margin)
        if one is None and choice.parameters_kernel and keeps_sums(choice.tile):
            num_partials = launches[0].grid_size // choice.tile.cluster_size
    once = _bytes_once(problem, num_rows)
    moved = once + _bytes_moved(choice, problem, num_rows, num_partials)
    needed = once + num_rows * problem.bytes_per_row
    made = (choice.strategy, choice.tile, choice.statistics, launches, num_partials, moved, needed)
    return Plan(problem, device, num_rows, *made, choice.reason)


def _launches(
    choice: Choice, problem: Problem, device: Device, num_rows: int, sm_margin: int
) -> tuple[KernelLaunch, ...]:
    """The kernels of rows, if there are any, then the sums of dweight and dbias."""
    launches = []
    if choice.kernel is not None:
        tile, where = choice.tile, (choice, problem, device, num_rows, sm_margin)
        shape = (tile, grid_size(*where), tile.block_size, choice.smem_bytes, tile.cluster_size)
        shares = dict(zip(("num_first", "rows_of_first"), shares_of_first(*where)))
        kernels = filter(None, (choice.amax_kernel, choice.kernel))
        launches = [KernelLaunch(kernel, *shape, **shares) for kernel in kernels]
    if choice.parameters_kernel is not None:
        # Its blocks start while the partial sums are written, which hides the launch.
        overlaps = keeps_sums(choice.tile) and device.compute_capability >= 90
        most_blocks = None
        if sm_margin:
            most_blocks = (device.num_sms - sm_margin) * choice.parameters_tile.blocks_per_sm
        launches.append(
            parameters_launch(
                problem,
                choice.parameters_tile,
                choice.parameters_kernel,
                overlaps=overlaps,
                most_blocks=most_blocks,
            )
        )
    return tuple(launches)


# Bytes.


def _bytes_once(problem: Problem, num_rows: int) -> int:
    """What is read or written once: parameters, their gradients, and the statistics of rows."""
    parameters = [problem.weight, problem.bias, problem.dweight, problem.dbias]
    of_parameters = problem.num_cols * sum(DTYPES[name].itemsize for name in parameters if name)
    return of_parameters + num_rows * (1 + problem.centered) * compute_dtype(problem.x).itemsize


def _bytes_moved(choice: Choice, problem: Problem, num_rows: int, num_partials: int) -> int:
    """What the kernels move besides _bytes_once: rows in each pass, partial sums, amaxes."""
    row_elements = num_rows * problem.num_cols
    x_bytes = problem.itemsize
    dy_bytes = DTYPES[problem.dy].itemsize if problem.dy else 0
    moved = num_rows * problem.bytes_per_row
    if choice.strategy == "uncached":
        if problem.forward:
            again = 1 + (choice.statistics == "two_pass" and problem.centered)
            again += problem.scaling == "row"
            moved += again * row_elements * x_bytes * (1 + problem.residual)
        else:
            again = 1 if problem.dx else bool(problem.recomputed) - 1
            moved += again * row_elements * (x_bytes + dy_bytes)
    if not (problem.forward or keeps_sums(choice.tile)):
        reads_dy = problem.dweight or problem.dbias
        moved += row_elements * (x_bytes * bool(problem.dweight) + dy_bytes * bool(reads_dy))
    if choice.amax_kernel is not None:
        # The second launch reads the inputs again. The amaxes are written and read.
        moved += moved - num_rows * (problem.num_cols + problem.scale_bytes)
        moved += 8 * (num_rows * problem.num_scales or 1)
    wanted = problem.num_sums
    partial_bytes = problem.num_cols * DTYPES[problem.compute].itemsize
    return moved + 2 * wanted * num_partials * partial_bytes
