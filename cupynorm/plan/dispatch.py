"""Which kernel, tile and grid a problem gets. Pure Python, no GPU needed.

The table STRATEGIES (cupynorm.plan.strategies) is read from top to bottom. The first strategy wins
that is wide enough for the row and that no later one beats; the last takes any row.
num_rows changes the grid, and for few rows how many threads share a row. It never changes a bit of
a row's results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from ..dtypes import DTYPES, compute_dtype
from ..table import as_text, pairs_as_html
from .devices import Device
from .few_rows import for_few_rows, in_one_launch
from .grids import blocks_of_groups, grid_size, parameters_launch, shares_of_first
from .instances import Choice, Launch, parameters_instance, row_instance
from .paths import is_deep, uncached_tile
from .problem import Problem, Tile
from .strategies import STATISTICS, STRATEGIES
from .tables import measured_tile
from .tile_checks import check_path, check_tile
from .tile_model import (
    RESERVED_BYTES,
    keeps_sums,
    scales_at_once,
    smem_bytes_of,
)

# Set by cupynorm.norm.tiles. choose() calls it first if neither strategy nor tile is given. It
# returns (strategy, tile, reason), or None.
tuned: Callable[[Problem, Device], tuple[str, Tile, str] | None] | None = None


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
    if (
        tuned is not None
        and strategy is None
        and tile is None
        and (tuned_choice := tuned(problem, device))
    ):
        strategy, tile, reason = tuned_choice
        return replace(choose(problem, device, strategy, tile, statistics), reason=reason)
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(
            f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)}, "
            "or None to choose by width"
        )
    if statistics is not None and statistics not in STATISTICS:
        raise ValueError(
            f"statistics is {statistics!r}; expected one of {', '.join(STATISTICS)}, or None"
        )
    if tile is not None and strategy is None:
        raise ValueError(
            "tile is given without strategy; expected the strategy that it belongs to as well"
        )

    reason = "as asked for"
    by_dispatch, asked_strategy = tile is None, strategy
    if tile is not None:
        tile = tile.of_strategy(strategy, problem.forward)
    if strategy is not None:
        row = STRATEGIES[strategy]
        if device.compute_capability < row.first_capability:
            raise ValueError(
                f"strategy {strategy!r} needs compute capability {row.first_capability / 10:.1f} "
                f"or later; {device.name} has {device.compute_capability / 10:.1f}"
            )
        if strategy == "cluster" and not device.clusters:
            raise ValueError(
                "strategy 'cluster' needs 2 multiprocessors for a cluster; "
                f"{device.name} has {device.num_sms}"
            )
        if tile is None:
            tile = row.tile(problem, device)
            if tile is None:
                raise ValueError(
                    f"strategy {strategy!r} is too narrow for {problem.num_cols} columns of "
                    f"{problem.x} on {device.name} ({problem.direction}); "
                    f"its widest row has {widest(strategy, problem, device)}"
                )
        else:
            check_tile(problem, strategy, tile, device)
    else:
        strategy, tile, reason = _best_tile(problem, device)

    if tile.path == "grid" and statistics == "two_pass":
        if not by_dispatch or asked_strategy is not None:
            raise ValueError(
                "statistics is 'two_pass'; expected 'welford' or None, because all blocks share "
                "these rows and exchange sums once"
            )
        strategy, tile = "uncached", uncached_tile(problem, device)
    one_pass = tile.path in ("grid", "uncached")
    statistics = statistics or ("welford" if one_pass else "two_pass")
    smem_bytes = smem_bytes_of(problem, tile, strategy)
    resident = (
        tile.blocks_per_sm
        if smem_bytes == 0
        else min(tile.blocks_per_sm, device.smem_per_sm // (smem_bytes + RESERVED_BYTES))
    )
    kernel = amax_kernel = None
    if problem.scaling and not scales_at_once(problem, tile, strategy):
        amax_kernel = row_instance(problem, strategy, tile, statistics, "amax")
        kernel = row_instance(problem, strategy, tile, statistics, "write")
    elif problem.forward or problem.dx or problem.recomputed or strategy != "uncached":
        step = "write" if problem.scaling == "given" and not problem.amax else "all"
        kernel = row_instance(problem, strategy, tile, statistics, step)
    parameters_tile, parameters_kernel = (
        (None, None) if problem.forward else parameters_instance(problem, keeps_sums(problem, tile))
    )
    return Choice(
        strategy,
        tile,
        statistics,
        kernel,
        smem_bytes,
        max(1, resident),
        parameters_tile,
        parameters_kernel,
        reason,
        amax_kernel,
        by_dispatch,
    )


def _best_tile(problem: Problem, device: Device) -> tuple[str, Tile, str]:
    """Strategy, tile and reason: from the data file, or from the model if the file has no row.

    A row of the file covers a range of widths. Backward, the model's ring is better for those
    widths of the range that fill it exactly.
    """
    measured = measured_tile(problem, device)
    if measured is not None and (problem.forward or measured[1].path != "ring"):
        return measured
    for row in STRATEGIES.values():
        is_available = device.compute_capability >= row.first_capability
        tile = row.tile(problem, device) if is_available else None
        if tile is not None and not row.gives_way(problem, device, tile):
            break
    if measured is not None and not _is_fuller(problem, tile, measured[1]):
        return measured
    return row.name, tile, "the first strategy that is wide enough and that no later one beats"


def _is_fuller(problem: Problem, tile: Tile, than: Tile) -> bool:
    """Whether a row fills the ring of a tile, but not the other ring, or not so deep a one."""
    enough = 4 if DTYPES[problem.x].itemsize > 2 else 2  # stages
    fills = tile.path == "ring" and tile.exact
    return fills and (is_deep(problem, tile) or (not than.exact and tile.stages >= enough))


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


_TENSORS = {
    *("x", "y", "weight", "bias", "dy", "dx", "dweight", "dbias", "dsum"),
    *(
        "input",
        "residual_dtype",
        "row_scale",
        "dresidual",
        "y1",
        "weight1",
        "bias1",
        "scaling",
        "recomputed",
    ),
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
    launches: tuple[Launch, ...]
    num_partials: int
    bytes_moved: int
    bytes_needed: int
    reason: str

    def _facts(self) -> list[tuple[str, str]]:
        norm = "layer_norm" if self.problem.centered else "rms_norm"
        tensors = ", ".join(
            f"{name} {value}"
            for name, value in asdict(self.problem).items()
            if value and name in _TENSORS
        )
        lines = [
            (
                "problem",
                f"{norm} {self.problem.direction}, "
                f"{self.num_rows} rows x {self.problem.num_cols} columns",
            ),
            ("tensors", tensors),
            (
                "device",
                f"{self.device.name}, {self.device.num_sms} multiprocessors, "
                f"sm_{self.device.compute_capability}",
            ),
            ("strategy", f"{self.strategy}: {self.reason}"),
            ("path", self.tile.path_in_words),
            ("tile", str(replace(self.tile, path=None))),
            ("statistics", self.statistics if self.problem.forward else "given"),
        ]
        functors = (("load", self.problem.load), ("store", self.problem.store))
        lines += [(role, f"functor {each}") for role, each in functors if each]
        for launch in self.launches:
            shape = f"grid {launch.grid_size} x block {launch.block_size}"
            if launch.tile.hardware_cluster_size > 1:
                shape += f" in clusters of {launch.cluster_size}"
            lines.append(
                (launch.kernel.source, f"{shape}, {launch.smem_bytes} bytes of shared memory")
            )
        if not self.launches:
            lines.append(("launches", "none: there is nothing to compute"))
        ratio = (
            f", {self.bytes_moved / self.bytes_needed:.3f} of what is needed"
            if self.bytes_needed
            else ""
        )
        return [*lines, ("bytes moved", f"{self.bytes_moved:,}{ratio}")]

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
        check_path(strategy, tile.of_strategy(strategy, problem.forward))
    choice = choose(problem, device, strategy, tile, statistics)
    shared = strategy is None and choice.tile.path == "grid"
    if shared and not blocks_of_groups(choice.tile, device, sm_margin):
        left, blocks = device.num_sms - sm_margin, choice.tile.cluster_size
        reason = f"{left} multiprocessors are too few for groups of {blocks} blocks"
        choice = replace(choose(problem, device, "uncached", None, statistics), reason=reason)
    if choice.by_dispatch:
        few = for_few_rows(
            problem, device, choice.strategy, choice.tile, num_rows, choice.statistics
        )
        if few != choice.tile:
            shape = f"{few.threads_per_row} lanes for each and {few.rows_per_block} in a block"
            reason = f"{choice.reason}; as rows are few, {shape}"
            choice = replace(
                choose(problem, device, choice.strategy, few, statistics), reason=reason
            )
    if not 0 <= sm_margin < device.num_sms:
        raise ValueError(
            f"sm_margin is {sm_margin}; expected 0 to {device.num_sms - 1} of the "
            f"{device.num_sms} multiprocessors of {device.name}"
        )
    launches = []
    num_partials = 0
    one = None
    if choice.by_dispatch and strategy is None and not (problem.forward or sm_margin):
        one = in_one_launch(choice, problem, device, num_rows)
    needed = moved = num_rows * problem.bytes_per_row
    row_elements = num_rows * problem.num_cols
    if row_elements and one is not None:
        launches.append(one)
    elif row_elements and choice.kernel is not None:
        grid = grid_size(choice, problem, device, num_rows, sm_margin)
        cluster_size = choice.tile.cluster_size
        num_first, rows_of_first = shares_of_first(choice, problem, device, num_rows, sm_margin)
        for kernel in filter(None, (choice.amax_kernel, choice.kernel)):
            launches.append(
                Launch(
                    kernel,
                    choice.tile,
                    grid,
                    choice.tile.block_size,
                    choice.smem_bytes,
                    cluster_size,
                    num_first=num_first,
                    rows_of_first=rows_of_first,
                )
            )
        if choice.parameters_kernel is not None and keeps_sums(problem, choice.tile):
            num_partials = grid // cluster_size
    if choice.strategy == "uncached":
        if problem.forward:
            passes = (2 if choice.statistics == "two_pass" and problem.centered else 1) + bool(
                problem.y
            )
            passes += problem.scaling == "row"
            moved += (
                (passes - 1) * row_elements * DTYPES[problem.x].itemsize * (1 + problem.residual)
            )
        else:
            x_size, dy_size = DTYPES[problem.x].itemsize, DTYPES[problem.dy].itemsize
            passes = 2 if problem.dx else int(bool(problem.recomputed))
            moved += (passes - 1) * row_elements * (x_size + dy_size)
    if not (problem.forward or keeps_sums(problem, choice.tile)):
        x_bytes = DTYPES[problem.x].itemsize * bool(problem.dweight)
        dy_bytes = DTYPES[problem.dy].itemsize * bool(problem.dweight or problem.dbias)
        moved += row_elements * (x_bytes + dy_bytes)
    if choice.amax_kernel is not None:
        # The second launch reads the inputs again. The amaxes are written and read.
        moved += moved - num_rows * (problem.num_cols + problem.scale_bytes)
        moved += 8 * (num_rows * problem.num_scales or 1)
    if row_elements and choice.parameters_kernel is not None and one is None:
        # Its blocks start while the partial sums are written, which hides the launch.
        overlaps = (
            num_partials > 0 and choice.tile.path != "grid" and device.compute_capability >= 90
        )
        most_blocks = (
            (device.num_sms - sm_margin) * choice.parameters_tile.blocks_per_sm
            if sm_margin
            else None
        )
        launches.append(
            parameters_launch(
                problem,
                choice.parameters_tile,
                choice.parameters_kernel,
                overlaps=overlaps,
                most_blocks=most_blocks,
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
