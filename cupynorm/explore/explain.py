"""explain(): one call, from the choice of its kernel to the roofline."""

from __future__ import annotations

import functools
import html
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..dispatch.devices import Device
from ..dispatch.dispatch import Plan, widest
from ..dispatch.instances import KernelLaunch
from ..dispatch.problem import Direction, NormName, Tile
from ..dispatch.strategies import STRATEGIES, StatisticsName, StrategyName
from ..dtypes import DTYPES, ELEMENTS
from ..gpu import nvrtc, on_cpu
from ..gpu.nvrtc import cuda_src
from ..plans import device_of, full_name, plan
from ..table import as_html, as_text
from .trace import Trace, drawn, trace

# Bytes and float32 operations a second, from NVIDIA's data sheets (SXM where there are several).
_PEAKS = {
    "A100": (2.04e12, 19.5e12),
    "A10": (0.60e12, 31.2e12),
    "RTX 3090": (0.94e12, 35.6e12),
    "RTX 4090": (1.01e12, 82.6e12),
    "L40S": (0.86e12, 91.6e12),
    "H100": (3.35e12, 67e12),
    "H200": (4.80e12, 67e12),
    "B200": (8.00e12, 75e12),
}
# Additions and multiplications for an element: the formulas of reference/layer_norm.py.
_OPERATIONS = {"forward": 8, "backward": 15}
_WARP, _REGISTER_UNIT = 32, 256  # registers are handed to a warp in units of 256
# What a path is for, and its file forward and backward, as in docs/sources.md.
PATHS = {
    "registers": ("threads keep the row", "register_row.cuh", "register_gradient.cuh"),
    "bundle": ("several rows move as one piece", "forward_bundle.cuh", "backward_bundle.cuh"),
    "smem": ("registers do not hold the row", "smem_row.cuh", "backward_smem.cuh"),
    "ring": ("the next rows arrive while one is written", "forward_ring.cuh", "backward_ring.cuh"),
    "uncached": ("nothing keeps the row", "uncached_row.cuh", "backward_uncached.cu"),
}


class Occupancy(NamedTuple):
    """Blocks that a multiprocessor holds at once, and what allows no more.

    warps: in these blocks. most_warps: that a multiprocessor can hold.
    registers: of a thread; None where NVRTC is not installed.
    """

    blocks: int
    limit: str
    warps: int
    most_warps: int
    registers: int | None
    spilled_bytes: int


class Explanation:
    """What explain() found out. Prints as text; in Jupyter also as pictures.

    Examples:
        >>> explanation = cupynorm.explain(4096, device="H200")
        >>> round(explanation.operations_per_byte(), 1)
        2.0

    plan: of the call.
    """

    def __init__(self, plan: Plan, options: dict) -> None:
        self.plan, self._options = plan, options

    @functools.cached_property
    def occupancies(self) -> list[Occupancy]:
        """Of each launch."""
        return [occupancy_of(each, self.plan.device) for each in self.plan.launches]

    @functools.cached_property
    def trace(self) -> Trace:
        """A trace of a few rows (cupynorm.trace). Needs a C++ compiler."""
        num_rows = max(1, min(self.plan.num_rows, 4))
        return trace(self.plan.problem.num_cols, num_rows, **self._options)

    @property
    def source(self) -> str:
        """The text of the kernel's file."""
        return (cuda_src() / self.plan.launches[0].kernel.source).read_text(encoding="utf-8")

    @property
    def header(self) -> str:
        """The comment at the head of the kernel's file: the formula, who owns what, its limits."""
        lines = []
        for line in self.source.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.removeprefix("//").removeprefix(" "))
        return "\n".join(lines)

    def least_microseconds(self) -> float | None:
        """What moving the bytes takes at the memory's full speed. None for an unknown device."""
        peaks = _PEAKS.get(self.plan.device.name)
        return None if peaks is None else self.plan.bytes_moved / peaks[0] * 1e6

    def operations_per_byte(self) -> float:
        """Floating-point operations of the norm for each byte that its kernels move."""
        operations = _OPERATIONS[self.plan.problem.direction]
        return operations * self.plan.num_rows * self.plan.problem.num_cols / self.plan.bytes_moved

    # Parts.

    def choice(self) -> list[tuple[str, ...]]:
        """A table: every strategy, its widest row, and whether it was chosen."""
        problem, device = self.plan.problem, self.plan.device
        rows = [("strategy", "widest row", "this row")]
        for name in STRATEGIES:
            most = widest(name, problem, device)
            if device.compute_capability < STRATEGIES[name].first_capability:
                verdict = "needs a newer GPU"
            elif name == self.plan.strategy:
                verdict = f"chosen: {self.plan.reason}"
            elif most is not None and problem.num_cols > most:
                verdict = "too wide"
            else:
                verdict = "would fit"
            rows.append((name, "any" if most is None else f"{most:,}", verdict))
        return rows

    def path(self) -> str:
        """A sentence: how the row travels, in which file, and what that is for."""
        problem, tile = self.plan.problem, self.plan.tile
        purpose, forward, backward = PATHS[tile.path]
        aligned_to = problem.widest_pack * DTYPES[problem.x].itemsize
        if tile.path == "bundle" and aligned_to < 16:
            purpose += f", because rows begin on {aligned_to} bytes and the copy engine needs 16"
        return f"{tile.path_in_words}, in {forward if problem.forward else backward}: {purpose}"

    def traffic(self) -> list[tuple[str, ...]]:
        """A table: the bytes of each tensor that a launch must move."""
        problem, num_rows = self.plan.problem, self.plan.num_rows
        compute, x = problem.compute, problem.x
        matrices = {name: getattr(problem, name) for name in ("x", "y", "dy", "dx", "dsum")}
        if problem.residual:
            matrices |= {"residual": x, "sum": x}
        vectors = {name: getattr(problem, name) for name in ("weight", "bias", "dweight", "dbias")}
        moved = [(name, dtype, num_rows, problem.num_cols) for name, dtype in matrices.items()]
        moved += [(name, dtype, 1, problem.num_cols) for name, dtype in vectors.items()]
        moved += [("mean", compute if problem.centered else None, num_rows, 1)]
        moved += [("rstd", compute, num_rows, 1)]
        for name in ("dweight", "dbias"):  # written by one kernel, read by the next
            partial = compute if vectors[name] and self.plan.num_partials else None
            of_kernels = (f"partial sums of {name}", partial, self.plan.num_partials)
            moved += [(*of_kernels, problem.num_cols)] * 2
        rows, total = [("tensor", "dtype", "shape", "bytes")], 0
        for name, dtype, height, width in moved:
            if dtype is not None:
                num_bytes = height * width * ELEMENTS[dtype].itemsize
                total += num_bytes
                shape = f"{height} x {width}" if height > 1 and width > 1 else f"{height * width}"
                rows.append((name, dtype, shape, f"{num_bytes:,}"))
        if total < self.plan.bytes_moved:
            rows.append(("read in further passes", "", "", f"{self.plan.bytes_moved - total:,}"))
        return [*rows, ("all that is moved", "", "", f"{self.plan.bytes_moved:,}")]

    def kernels(self) -> list[tuple[str, ...]]:
        """A table: grid, registers, shared memory and occupancy of each launch."""
        rows = [("kernel", "grid x block", "registers", "shared memory", "warps resident", "limit")]
        for each, occupancy in zip(self.plan.launches, self.occupancies):
            registers = "?" if occupancy.registers is None else str(occupancy.registers)
            if occupancy.spilled_bytes:
                registers += f", {occupancy.spilled_bytes} bytes spilled"
            resident = f"{occupancy.warps} of {occupancy.most_warps}"
            shape = f"{each.grid_size} x {each.block_size}"
            smem = f"{each.smem_bytes:,}"
            rows.append((each.kernel.source, shape, registers, smem, resident, occupancy.limit))
        return rows

    def speed(self) -> str:
        """A sentence: what limits this kernel, and the least time."""
        least, device = self.least_microseconds(), self.plan.device.name
        intensity = self.operations_per_byte()
        if least is None:
            return f"{intensity:.1f} operations for each byte. The peaks of {device} are not known."
        bandwidth, operations = _PEAKS[device]
        digits = 1 if least >= 1 else 3
        return (
            f"{intensity:.1f} operations for each byte, where {device} can do "
            f"{operations / bandwidth:.0f}: memory is the limit. {self.plan.bytes_moved:,} bytes "
            f"at {bandwidth / 1e12:.2f} TB/s take at least {least:.{digits}f} µs."
        )

    def roofline(self) -> Any:
        """A plot: the most operations a second over operations for each byte."""
        from . import plots

        peaks, least = _PEAKS[self.plan.device.name], self.operations_per_byte()
        reached = min(peaks[1], least * peaks[0])
        return plots.roofline(peaks, {"this kernel": (least, reached)})

    def __str__(self) -> str:
        rows = f"{self.plan.num_rows} x {self.plan.problem.num_cols}"
        norm = "layer_norm" if self.plan.problem.centered else "rms_norm"
        title = f"{norm} {self.plan.problem.direction} of {rows} on {self.plan.device.name}"
        if not self.plan.launches:
            return f"{title}\n\nNothing is launched: there is nothing to compute."
        parts = [title, as_text(self.choice()), f"path: {self.path()}"]
        parts += [as_text(self.kernels()), *self._without_nvrtc(), as_text(self.traffic())]
        return "\n\n".join([*parts, self.speed(), self.header])

    __repr__ = __str__

    def _without_nvrtc(self) -> list[str]:
        """What is not known without the compiler for the GPU."""
        if all(each.registers is not None for each in self.occupancies):
            return []
        install = "With NVRTC (pip install nvidia-cuda-nvrtc) registers and spills are shown; "
        return [f"{install}without it they do not count in warps resident and limit."]

    def _repr_html_(self) -> str:
        if not self.plan.launches:
            return f"<p>{self}</p>"
        parts = [as_html(self.choice()), as_html(self.kernels()), as_html(self.traffic())]
        parts += [f"<p>{each}</p>" for each in (*self._without_nvrtc(), self.speed())]
        if self.plan.device.name in _PEAKS:
            parts.append(drawn(self.roofline))
        try:
            parts.append(drawn(self.trace.owners))
        except on_cpu.NoCompilerError:
            parts.append("<p>With a C++ compiler a picture shows who owns which element.</p>")
        return "".join([*parts, f"<pre>{html.escape(self.header)}</pre>"])


def explain(
    num_cols: int,
    num_rows: int = 4096,
    dtype: str = "bfloat16",
    *,
    norm: NormName = "layer_norm",
    direction: Direction = "forward",
    device: str | Device | None = None,
    residual: bool = False,
    strategy: StrategyName | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: StatisticsName | None = None,
) -> Explanation:
    """Explains which kernel a call gets and why, which threads own what, and what limits it.

    Examples:
        >>> explanation = cupynorm.explain(4096, 8192, device="H200")
        >>> round(explanation.least_microseconds(), 1), explanation.plan.strategy
        (28.0, 'block')

    num_cols, num_rows: the extents of x. dtype: of all tensors.
    norm, direction, residual, strategy, tile, statistics: as for plan().
    device: as for plan().

    Returns an Explanation: prints as text, in Jupyter with pictures; its parts are its methods.
    Raises ValueError for unknown names and for a strategy or tile that does not fit.
    """
    options = {"norm": norm, "direction": direction, "device": device_of(device)}
    options |= {"residual": residual, "strategy": strategy, "tile": tile, "statistics": statistics}
    dtype = full_name(dtype)
    return Explanation(plan(num_cols, num_rows, dtype, **options), {"dtype": dtype, **options})


def occupancy_of(planned: KernelLaunch, device: Device) -> Occupancy:
    """How many blocks of a launch a multiprocessor holds."""
    warps = -(-planned.block_size // _WARP)
    limits = {"threads": device.threads_per_sm // planned.block_size}
    # CUDA C++ Programming Guide, "Technical Specifications"
    limits["blocks"] = 16 if device.compute_capability == 86 else 32
    if planned.smem_bytes:
        limits["shared memory"] = device.smem_per_sm // (planned.smem_bytes + 1024)
    registers, spilled = None, 0
    try:
        _, used = nvrtc.compile_for(planned.kernel, device.compute_capability)
    except nvrtc.MissingLibraryError:
        pass
    else:
        registers, spilled = used.registers, used.spill_store_bytes
        of_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        limits["registers"] = device.registers_per_sm // (of_warp * warps)
    limit = min(limits, key=lambda name: limits[name])
    most_warps = device.threads_per_sm // _WARP
    blocks = limits[limit]
    return Occupancy(blocks, limit, blocks * warps, most_warps, registers, spilled)
