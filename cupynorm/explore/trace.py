"""trace(): what every thread of a kernel reads, writes and waits for, recorded on the CPU.

The accesses of a warp's lanes to the same place of the code, the same time round, are one request,
as on a GPU. Global memory is moved in sectors of 32 bytes; shared memory has 32 banks of 4 bytes.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.recfunctions import append_fields

from ..dispatch.devices import Device
from ..dispatch.dispatch import Plan
from ..dispatch.instances import KernelLaunch
from ..dispatch.problem import Direction, NormName, Tile
from ..dispatch.strategies import StatisticsName, StrategyName
from ..gpu import on_cpu
from ..norm.checks import names_what_was_removed
from ..norm.request import tile_of
from ..plans import full_name, plan
from ..table import as_html, as_text
from ..verify.cases import Case, random_problem
from ..verify.check import check_seed
from ..verify.check_functor import Given, random_functor_problem, run_with_functor, with_kinds
from ..verify.kernels import CpuMachine, run_kernels
from .experiment import Changes, changed_sources

# trace::Event of cuda_src/on_cpu/cuda_on_cpu_trace.h.
EVENT = np.dtype(
    [
        ("block", "u4"),
        ("thread", "u4"),
        ("kind", "u1"),
        ("space", "u1"),
        ("what", "u1"),
        ("call", "u1"),
        ("num_bytes", "u4"),
        ("address", "u8"),
        ("site", "u8"),
        ("target_block", "u4"),
        ("clock", "u4"),
    ]
)
assert EVENT.itemsize == on_cpu.EVENT_BYTES
KINDS = ("read", "write", "bulk_load", "send", "wait", "go_on", "arrive", "finish")
SPACES = ("none", "global", "shared")
WHATS = ("none", "warp", "block", "cluster", "mbarrier")
CALLS = ("syncwarp", "shfl", "shfl_xor", "ballot")
SECTOR_BYTES, NUM_BANKS = 32, 32
_ALIGNMENT = 256  # of what GPUs allocate
_ACCESSES = [KINDS.index(kind) for kind in ("read", "write", "bulk_load", "send")]
BULK = [KINDS.index("bulk_load")]
_WRITES = [KINDS.index(kind) for kind in ("write", "send")]
_GLOBAL, _SHARED = SPACES.index("global"), SPACES.index("shared")


class Tensor(NamedTuple):
    """A tensor of the call. address: of its first byte."""

    name: str
    address: int
    array: np.ndarray


class Recorded(NamedTuple):
    """One launch: its events, and the file and address from which its code was loaded."""

    launch: KernelLaunch
    events: np.ndarray
    path: str
    address: int


class Site(NamedTuple):
    """A place in the sources. lines: file:line of the access, and of the calls that led to it."""

    lines: tuple[str, ...]

    @property
    def of_kernel(self) -> str:
        """The line of the kernel itself, or else the outermost one."""
        in_kernel = [line for line in self.lines if ".cu:" in line]
        return in_kernel[-1] if in_kernel else (self.lines or ("?",))[-1]

    def __str__(self) -> str:
        return " < ".join(self.lines) or "?"


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


class Trace:
    """What trace() recorded. Prints as a table; in Jupyter also as pictures.

    Examples:
        >>> found = cupynorm.trace(64, num_rows=2, strategy="uncached")
        >>> reads = [each for each in found.requests if each.tensor == "x"]
        >>> [(each.num_requests, each.num_sectors) for each in reads]
        [(2, 8), (2, 8)]

    plan: of the call. tensors: by name. launches: their kernels, in order.
    """

    SECTOR_BYTES, BULK = SECTOR_BYTES, BULK

    def __init__(self, plan: Plan, tensors: dict[str, Tensor], recorded: list[Recorded]) -> None:
        self.plan, self.tensors, self._recorded = plan, tensors, recorded
        self.launches = [each.launch for each in recorded]

    def events(self, launch: int = 0) -> np.ndarray:
        """All events of a launch in the order in which they happened (EVENT)."""
        return self._recorded[launch].events

    def accesses(self, launch: int = 0) -> np.ndarray:
        """Accesses to tensors and to shared memory, with the index of the tensor in `tensor`.

        tensor: -1 for shared memory. A bulk copy has two: one of each memory.
        """
        events = self._recorded[launch].events
        events = events[np.isin(events["kind"], _ACCESSES)]
        tensor = self._tensor_of(events)
        known = (tensor >= 0) | (events["space"] == _SHARED)
        return append_fields(events[known], "tensor", tensor[known], "i4", usemask=False)

    def _tensor_of(self, events: np.ndarray) -> np.ndarray:
        tensor = np.full(len(events), -1)
        for index, (_, address, array) in enumerate(self.tensors.values()):
            inside = (events["address"] >= address) & (events["address"] < address + array.nbytes)
            tensor[inside & (events["space"] == _GLOBAL)] = index
        return tensor

    def first_request(self, tensor: str, launch: int = 0) -> np.ndarray:
        """The accesses of the first request of warp 0 to a tensor, by thread."""
        accesses = self.accesses(launch)
        own = accesses[accesses["tensor"] == list(self.tensors).index(tensor)]
        request = requests_of(own)
        one = own[request == request[0]]
        return one[np.argsort(one["thread"], kind="stable")]

    def timeline(self, launch: int = 0, block: int = 0) -> list[tuple[int, str, int, int]]:
        """What the warps of a block wait for: (warp, what, first step, last step).

        Steps are switches between threads in the order that this run drew, not nanoseconds.
        what: "block", "cluster", "mbarrier", or a call of the warp such as shfl_xor.
        """
        events = self._recorded[launch].events
        events = events[events["block"] == block]
        waits: dict[tuple, list[list[int]]] = {}
        for event in events[np.isin(events["kind"], [KINDS.index("wait"), KINDS.index("go_on")])]:
            what = WHATS[event["what"]]
            what = CALLS[event["call"]] if what == "warp" else what
            own = waits.setdefault((int(event["thread"]), what), [])
            if KINDS[event["kind"]] == "wait":
                own.append([int(event["clock"])] * 2)
            else:
                own[-1][1] = int(event["clock"])
        # The nth wait of a warp begins with its first lane and ends with its last.
        spans: dict[tuple[int, str, int], tuple[int, int]] = {}
        for (thread, what), each in waits.items():
            for ordinal, (first, last) in enumerate(each):
                key = (thread // 32, what, ordinal)
                before = spans.get(key, (first, last))
                spans[key] = (min(before[0], first), max(before[1], last))
        return sorted((warp, what, *span) for (warp, what, _), span in spans.items())

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
            sites = sites_of(recorded, places[:, 0])
            place = place.reshape(-1)
            for index, (_, tensor) in enumerate(places):
                part, asked = accesses[place == index], request[place == index]
                is_shared, kind = int(tensor) == len(names) - 1, part["kind"][0]
                moved, least = (turns_of if is_shared else sectors_of)(part, asked)
                all_requests.append(
                    Requests(
                        launch,
                        sites[index],
                        names[int(tensor)],
                        kind in _WRITES or (is_shared and kind in BULK),
                        len(np.unique(asked)),
                        int(part["num_bytes"].sum()),
                        *((0, moved) if is_shared else (moved, 0)),
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

    __repr__ = __str__

    def owners(self, tensor: str = "x", launch: int = 0) -> Any:
        """A plot of which warp and lane touches which columns of a tensor."""
        return _plots().owners(self, tensor, launch)

    def lanes(self, tensor: str = "x", launch: int = 0) -> Any:
        """A plot of one request of a warp, and of the sectors that serve it."""
        return _plots().lanes(self, tensor, launch)

    def waits(self, launch: int = 0, block: int = 0) -> Any:
        """A plot of what the warps of a block wait for."""
        return _plots().waits(self, launch, block)

    def _repr_html_(self) -> str:
        return f"{drawn(self.owners)}<br>{drawn(self.waits)}{as_html(self._request_rows())}"


def _plots() -> Any:
    from . import plots  # needs matplotlib

    return plots


def drawn(plot: Callable[[], Any]) -> str:
    """A plot as SVG for a page, or what it takes to see it."""
    try:
        svg = plot()._repr_svg_()
        return svg[svg.index("<svg") :]
    except ImportError:
        return "<p>With matplotlib there is a picture here: pip install matplotlib</p>"


def requests_of(accesses: np.ndarray) -> np.ndarray:
    """The number of each access's request. A bulk copy is a request of its own."""
    fields = ("block", "thread", "site", "space")
    order = np.lexsort([accesses[name] for name in fields])
    ordered = accesses[order]
    changes = np.zeros(len(accesses), bool)
    for name in fields:
        changes[1:] |= ordered[name][1:] != ordered[name][:-1]
    places = np.arange(len(accesses))
    first = np.maximum.accumulate(np.where(changes, places, 0))
    ordinal = np.empty(len(accesses), np.int64)
    ordinal[order] = places - first
    thread = accesses["thread"].astype(np.int64)
    lane = np.where(np.isin(accesses["kind"], BULK), thread, thread // 32)
    keys = [accesses["block"], lane, accesses["site"], accesses["space"], ordinal]
    keys = np.stack([np.asarray(key).astype(np.uint64) for key in keys], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def sectors_of(accesses: np.ndarray, request: np.ndarray) -> tuple[int, int]:
    """Sectors that the requests move, and the fewest for so many different bytes."""
    moved = least = 0
    for own in _by_request(accesses, request):
        moved += len(_units(own, SECTOR_BYTES))
        least += -(-len(_units(own, 1)) // SECTOR_BYTES)
    return moved, least


def turns_of(accesses: np.ndarray, request: np.ndarray) -> tuple[int, int]:
    """Turns in which the banks serve the requests, and the fewest for so many different words.

    Lanes that read one word share it. A request of more than 128 bytes takes several turns.
    """
    moved = least = 0
    for own in _by_request(accesses, request):
        words = _units(own, 4)
        if np.isin(own["kind"][0], BULK):
            moved += -(-len(words) // NUM_BANKS)
        else:
            moved += int(np.bincount((words % NUM_BANKS).astype(np.int64)).max())
        least += -(-len(words) // NUM_BANKS)
    return moved, least


def _by_request(accesses: np.ndarray, request: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(request, kind="stable")
    cuts = np.flatnonzero(np.diff(request[order])) + 1
    return np.split(accesses[order], cuts)


def _units(accesses: np.ndarray, size: int) -> np.ndarray:
    """The different units of so many bytes that the accesses touch."""
    first = accesses["address"] // np.uint64(size)
    last = (accesses["address"] + accesses["num_bytes"] - np.uint64(1)) // np.uint64(size)
    most = int((last - first).max()) + 1
    units = first[:, None] + np.arange(most, dtype=np.uint64)
    return np.unique(units[units <= last[:, None]])


def sites_of(recorded: Recorded, addresses: np.ndarray) -> list[Site]:
    """The lines of addresses in the kernel's code, as binutils' addr2line reports them."""
    # An address is where the call returns to: the byte before belongs to the call.
    offsets = [hex(int(address) - recorded.address - 1) for address in addresses]
    try:
        command = ["addr2line", "-e", recorded.path, "-i", "-a"]
        ran = subprocess.run(command, input="\n".join(offsets), capture_output=True, text=True)
    except FileNotFoundError:
        return [Site(()) for _ in addresses]
    sites: list[list[str]] = []
    for line in ran.stdout.splitlines():
        if line.startswith("0x"):
            sites.append([])
        elif not line.startswith("?"):
            path, _, number = line.partition(" ")[0].rpartition(":")
            sites[-1].append(f"{path.rpartition('/')[2]}:{number}")
    return [Site(tuple(lines)) for lines in sites]


class Recorder(CpuMachine):
    """Records the launches of one direction. Tensors are aligned as a GPU aligns them."""

    def __init__(
        self, device: Device, direction: str, seed: int = 0, folder: Path | None = None
    ) -> None:
        super().__init__(device, seed, folder=folder)
        self.direction = direction
        self.recorded: list[Recorded] = []
        self.tensors: dict[str, Tensor] = {}
        self._named: dict[str, Tensor] = {}  # of the call that comes next
        self._arrays: dict[int, np.ndarray] = {}  # by their addresses

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        mine = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        mine[...] = array
        self._arrays[mine.ctypes.data] = mine
        return mine, mine.ctypes.data

    def name_tensors(self, addresses: Mapping[str, int]) -> None:
        there = {name: address for name, address in addresses.items() if address in self._arrays}
        self._named = {name: Tensor(name, at, self._arrays[at]) for name, at in there.items()}

    def launch(self, kernel_launch: KernelLaunch, words: tuple) -> None:
        kernel = kernel_launch.kernel
        if not kernel.source.startswith(self.direction):
            super().launch(kernel_launch, words)
            return
        self.tensors |= self._named
        names = (kernel.source, kernel.name_expression)
        instance = on_cpu.kernel(*names, folder=self.folder, traced=True, functors=kernel.functors)
        self.run(instance, kernel_launch, words)
        events = np.frombuffer(instance.take_trace(), EVENT)
        path, address = str(instance.path), instance.first_address()
        self.recorded.append(Recorded(kernel_launch, events, path, address))


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
    check_seed(seed)
    dtype = full_name(dtype)
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
