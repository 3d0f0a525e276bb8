"""trace(): what every thread of a kernel reads, writes and waits for, recorded on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..check.cases import NORMS, Case, random_problem
from ..check.check_functor import Given, random_functor_problem, run_with_functor, with_kinds
from ..check.run import run_kernels
from ..norm.checks import names_what_was_removed
from ..norm.plans import full_name, plan
from ..norm.request import tile_of
from ..plan.devices import Device
from ..plan.problem import Direction, NormName, Tile
from ..plan.strategies import StatisticsName, StrategyName
from ..svg import Picture
from ..table import as_html, as_text
from . import pictures
from .changes import Changes, changed_sources
from .recording import BULK, KINDS, Recorder, Recording
from .requests import Site, requests_of, sectors_of, sites_of, turns_of

_WRITES = [KINDS.index(kind) for kind in ("write", "send")]


class Requests(NamedTuple):
    """Requests of one place: how many, and their sums.

    tensor: of global memory, or "shared memory". is_write: whether they write.
    num_bytes: that lanes asked for. num_sectors: of 32 bytes that were moved (global memory).
    num_turns: how often the banks were needed (shared memory; 1 a request is the least).
    least: the sectors, or turns, that so many bytes need at least.
    """

    launch: int
    site: Site
    tensor: str
    is_write: bool
    num_requests: int
    num_bytes: int
    num_sectors: int
    num_turns: int
    least: int


class Trace(Recording):
    """What trace() recorded. Prints as a table; in Jupyter also as pictures.

    Examples:
        >>> found = cupynorm.trace(64, num_rows=2, strategy="uncached")
        >>> reads = [each for each in found.requests if each.tensor == "x"]
        >>> [(each.num_requests, each.num_sectors) for each in reads]
        [(2, 8), (2, 8)]

    plan: of the call. tensors: by name. launches: their kernels, in order.
    """

    @functools.cached_property
    def bytes(self) -> dict[str, tuple[int, int]]:
        """By tensor: bytes that threads asked for, and different bytes of each launch."""
        totals: dict[str, tuple[int, int]] = {}
        for launch in range(len(self._recorded)):
            accesses = self.accesses(launch)
            for index, (name, address, array) in enumerate(self.tensors.values()):
                own = accesses[accesses["tensor"] == index]
                if len(own):
                    touched = np.zeros(array.nbytes + 1, np.int64)
                    first = (own["address"] - np.uint64(address)).astype(np.int64)
                    np.add.at(touched, first, 1)
                    # A copy of whole 16 bytes may end behind the tensor.
                    np.add.at(touched, np.minimum(first + own["num_bytes"], array.nbytes), -1)
                    different = int((np.cumsum(touched) > 0).sum())
                    before = totals.get(name, (0, 0))
                    requested = before[0] + int(own["num_bytes"].sum())
                    totals[name] = requested, before[1] + different
        return totals

    @functools.cached_property
    def requests(self) -> list[Requests]:
        """By place in the code: what warps asked of global and of shared memory."""
        all_requests = []
        for launch, recorded in enumerate(self._recorded):
            accesses = self.accesses(launch)
            names = [*self.tensors, "shared memory"]
            request = requests_of(accesses)
            keys = np.stack([accesses["site"], accesses["tensor"] % len(names)], axis=1)
            places, place = np.unique(keys, axis=0, return_inverse=True)
            sites = sites_of(recorded.kernel, places[:, 0])
            place = place.reshape(-1)
            for index, (_, tensor) in enumerate(places):
                own = place == index
                part = accesses[own]
                is_shared = int(tensor) == len(names) - 1
                count = turns_of if is_shared else sectors_of
                moved, least = count(part, request[own])
                all_requests.append(
                    Requests(
                        launch,
                        sites[index],
                        names[int(tensor)],
                        bool(np.isin(part["kind"][0], _WRITES))
                        or (is_shared and part["kind"][0] == BULK[0]),
                        len(np.unique(request[own])),
                        int(part["num_bytes"].sum()),
                        0 if is_shared else moved,
                        moved if is_shared else 0,
                        least,
                    )
                )
        return sorted(all_requests, key=lambda each: (each.launch, each.tensor, str(each.site)))

    def __str__(self) -> str:
        rows = [("tensor", "bytes asked for", "different bytes", "asked / different")]
        for name, (requested, different) in self.bytes.items():
            rows.append((name, f"{requested:,}", f"{different:,}", f"{requested / different:.2f}"))
        return f"{as_text(rows)}\n\n{as_text(self._request_rows())}"

    def _request_rows(self) -> list[tuple[str, ...]]:
        """The requests of one line of the kernel together."""
        sums: dict[tuple[str, ...], np.ndarray] = {}
        for each in self.requests:
            kernel = self.launches[each.launch].kernel.source
            way = "write" if each.is_write else "read"
            key = (kernel, each.site.of_kernel, each.tensor, way)
            moved = each.num_sectors or each.num_turns
            counts = np.array([each.num_requests, each.num_bytes, moved, each.least])
            sums[key] = sums.get(key, 0) + counts
        rows = [("line", "memory", "", "requests", "bytes", "sectors or turns", "least")]
        rows += [(*key[1:], *(f"{number:,}" for number in counts)) for key, counts in sums.items()]
        return rows

    def owners(self, tensor: str = "x", launch: int = 0) -> Picture:
        """A picture of which warp and lane touches which columns of a tensor."""
        return pictures.owners(self, tensor, launch)

    def lanes(self, tensor: str = "x", launch: int = 0) -> Picture:
        """A picture of one request of a warp, and of the sectors that serve it."""
        return pictures.lanes(self, tensor, launch)

    def waits(self, launch: int = 0, block: int = 0) -> Picture:
        """A picture of what the warps of a block wait for."""
        return pictures.timeline(self, launch, block)

    def _repr_html_(self) -> str:
        return f"{self.owners()}<br>{self.waits()}{as_html(self._request_rows())}"


@names_what_was_removed
def trace(
    num_cols: int,
    num_rows: int = 4,
    dtype: str = "bfloat16",
    *,
    norm: NormName = "layer_norm",
    direction: Direction = "forward",
    device: str | Device = "H200",
    residual: bool = False,
    strategy: StrategyName | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: StatisticsName | None = None,
    fuse: Given | None = None,
    changes: Changes | None = None,
    seed: int = 0,
) -> Trace:
    """Runs a kernel on the CPU and records what every thread reads, writes and waits for.

    Examples:
        >>> cupynorm.trace(64, num_rows=2, strategy="uncached").bytes["x"]
        (512, 256)

    num_cols, num_rows: the extents of x. A few rows are enough: every access is recorded.
    dtype: of all tensors. norm, direction, residual, strategy, tile, statistics: as for plan().
    device: a name of cupynorm.DEVICES or a Device, for which the kernel is chosen.
    fuse: a functor, with numbers and kinds of arrays as for check(). The bytes of the plan do not
        include its arrays.
    changes: of the sources, as for experiment().
    seed: of the values, and of the order in which threads run.

    Returns a Trace. Raises ValueError for unknown names and for changes, a strategy or a tile that
    do not fit, NoCompilerError without a C++ compiler, OnCpuError where too much happened.
    """
    dtype = full_name(dtype)
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; expected {' or '.join(NORMS)}")
    chosen = {"strategy": strategy, "tile": tile_of(tile), "statistics": statistics}
    options = {"norm": norm, "direction": direction, "residual": residual, **chosen}
    planned = plan(num_cols, num_rows, dtype, device=device, **options)
    if num_rows < 1 or num_cols < 1:
        raise ValueError(f"x is {num_rows} x {num_cols}; expected at least one element")
    in_forward = chosen if direction == "forward" else {"strategy": strategy}
    case = Case(norm, num_rows, num_cols, dtype, residual=residual, dsum=residual, **in_forward)
    folder = None if changes is None else changed_sources(changes)
    if fuse is not None and residual:
        raise ValueError("fuse and residual are given; expected one of them")
    recorder = Recorder(planned.device, direction, seed, folder)
    if fuse is None:
        run_kernels(random_problem(case, seed), recorder, forward_only=direction == "forward")
        return Trace(planned, recorder.tensors, recorder.recorded)
    bound = with_kinds(fuse)
    if direction == "backward" and bound.functor.backward is None:
        raise ValueError(
            f"functor {bound.functor.name} has no backward lines; expected direction 'forward'"
        )
    ran = run_with_functor(random_functor_problem(bound, case, seed), recorder)
    return Trace(ran.plans[direction], recorder.tensors, recorder.recorded)
