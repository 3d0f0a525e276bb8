"""experiment(): a changed kernel beside the shipped one: right? how fast? how many registers?

Also the CUDA sources in pieces, and changed copies of them.
"""

from __future__ import annotations

import hashlib
import html
import statistics as averages
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.timer import Runner, Timer, take_turns
from ..dispatch.devices import DEVICES
from ..dispatch.dispatch import Plan
from ..dispatch.instances import KernelLaunch
from ..dispatch.problem import Direction, NormName, Tile
from ..dispatch.strategies import StatisticsName, StrategyName
from ..dtypes import decode, encode
from ..gpu import nvrtc
from ..gpu.arrays import type_in_words
from ..gpu.nvrtc import folder_of_process, source_files
from ..gpu.on_cpu import OnCpuError
from ..norm.request import tile_of
from ..options import shown
from ..plans import full_name, plan
from ..table import as_html, as_text
from ..verify import kernels
from ..verify.cases import Case, Problem, random_problem
from ..verify.check import check_seed
from ..verify.kernels import Machine, run_kernels, uses_welford
from ..verify.results import CheckResult
from ..verify.traps import Trial, default_problem

Replacements = Sequence[tuple[str, str]]
Changes = Mapping[str, str | Replacements]

_RUNS = 20
_FEW_ROWS = 8  # that the CPU runs
_NOP = b"\x18\x79"


@dataclass
class Version:
    """What was found of one version of the kernels.

    result: of the check; None where it does not compile or fails while it runs. fault: then why.
    tensors: what the kernels wrote, by name, as float64.
    registers, spilled_bytes, instructions: of each launch; empty without NVRTC. The instructions
    are those of the GPU's machine code.
    microseconds: medians over runs on a GPU; None without one.
    """

    result: CheckResult | None = None
    fault: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    registers: list[int] = field(default_factory=list)
    spilled_bytes: list[int] = field(default_factory=list)
    instructions: list[int] = field(default_factory=list)
    microseconds: float | None = None

    @property
    def ok(self) -> bool:
        return self.result is not None and self.result.ok


class Experiment:
    """What experiment() found. Prints as a table; true if the changed kernel is right.

    Examples:
        >>> no_mean = {"statistics.cuh": [("= values[at] - first;", "= values[at];")]}
        >>> found = cupynorm.experiment(no_mean, 64, strategy="warp", on="cpu")
        >>> bool(found)
        False
        >>> [each.tensor for each in found.changed.result.findings if not each.ok]
        ['y', 'rstd']

    plan: of the call. shipped, changed: a Version each. folder: of the changed sources.
    """

    def __init__(self, plan: Plan, shipped: Version, changed: Version, folder: Path) -> None:
        self.plan, self.shipped, self.changed, self.folder = plan, shipped, changed, folder

    def __bool__(self) -> bool:
        return self.changed.ok

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("", "shipped", "changed")]
        versions = (self.shipped, self.changed)
        rows.append(("result", *(_verdict(each) for each in versions)))
        for at, launch in enumerate(self.plan.launches):
            source = launch.kernel.source
            for name in ("registers", "spilled_bytes", "instructions"):
                values = [getattr(each, name) for each in versions]
                if any(values):
                    cells = (str(each[at]) if each else "-" for each in values)
                    rows.append((f"{source}: {name.replace('_', ' ')}", *cells))
        times = [each.microseconds for each in versions]
        if any(times):
            rows.append(("µs", *("-" if each is None else f"{each:.1f}" for each in times)))
        return rows

    def _rest(self) -> list[str]:
        """What is wrong with the changed kernels, and what the table has no rows for."""
        parts = [self.changed.fault] * bool(self.changed.fault)
        if self.changed.result is not None and not self.changed.ok:
            parts.append(str(self.changed.result))
        if not self.shipped.registers:
            parts.append(
                "With NVRTC (pip install nvidia-cuda-nvrtc) there are rows of registers, spilled "
                "bytes and instructions."
            )
        return parts

    def __str__(self) -> str:
        return "\n\n".join([as_text(self._rows()), *self._rest()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rest = "".join(f"<pre>{html.escape(each)}</pre>" for each in self._rest())
        return as_html(self._rows()) + rest


def _verdict(version: Version) -> str:
    if version.result is None:
        return "FAULT"
    worst = max(finding.error for finding in version.result.findings)
    return f"right ({worst:.2f} of what is allowed)" if version.ok else "WRONG"


def experiment(
    changes: Changes,
    num_cols: int = 1024,
    num_rows: int = 4096,
    dtype: str = "bfloat16",
    *,
    input: np.ndarray | None = None,
    norm: NormName = "layer_norm",
    direction: Direction = "forward",
    residual: bool = False,
    strategy: StrategyName | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: StatisticsName | None = None,
    on: str | None = None,
    seed: int = 0,
) -> Experiment:
    """Compiles changed sources, checks them against float64, and puts the shipped ones beside them.

    Examples:
        >>> no_mean = {"statistics.cuh": [("= values[at] - first;", "= values[at];")]}
        >>> found = cupynorm.experiment(no_mean, 64, strategy="warp", on="cpu")
        >>> found.shipped.ok, found.changed.ok
        (True, False)

    changes: a dict from names of files of cuda_src to the whole new text, or to pairs (old, new),
        each old text once in the file.
    num_cols, num_rows: the extents of x. On the CPU a few rows are run.
    input: x [num_rows, num_cols], rounded to dtype, which replaces random values and the extents.
    dtype: of all tensors. norm, direction, residual, strategy, tile, statistics: as for plan().
    on: "gpu", "cpu", or None for a GPU if there is one. Kernels are timed on a GPU alone.
    seed: of the values, and of the order in which threads run on the CPU.

    Returns an Experiment: true if the changed kernels are right; prints as a table. Raises
    ValueError for changes that do not fit, for unknown names, for a strategy or tile that does not
    fit and for an input that is not a matrix.
    """
    dtype = full_name(dtype)
    check_seed(seed)
    where = kernels.machine(on)
    on_gpu = where.on == "gpu"
    folder = changed_sources(changes)
    tile = tile_of(tile)
    options = {"strategy": strategy, "statistics": statistics}
    device = where.device if on_gpu else DEVICES["H200"]
    if input is not None:
        try:
            input = np.asarray(input, dtype=np.float64)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            given = shown(input)
            raise TypeError(f"input is {given}; expected an array of numbers: {error}") from error
        if input.ndim != 2 or not input.size:
            raise ValueError(f"input has shape {input.shape}; expected (num_rows, num_cols)")
        num_rows, num_cols = input.shape
    elif not on_gpu:
        num_rows = min(num_rows, _FEW_ROWS)
    if num_rows < 1 or num_cols < 1:
        raise ValueError(f"x is {num_rows} x {num_cols}; expected at least one element")
    more = {"norm": norm, "direction": direction, "residual": residual, "tile": tile}
    planned = plan(num_cols, num_rows, dtype, device=device, **more, **options)
    options |= {"residual": residual, "tile": tile if direction == "forward" else None}
    case = Case(norm, num_rows, num_cols, dtype, dsum=residual, **options)
    if input is None:
        problem = default_problem(case, seed)
    else:
        problem = random_problem(case, seed)
        problem.x = decode(encode(input, dtype), dtype)
    versions = []
    for source_folder in (None, folder):
        version = Version()
        machine = _Remembers(kernels.machine(on, seed), direction, source_folder)
        _inspect(version, planned, source_folder)
        _check(version, problem, machine, direction)
        versions.append((version, machine))
    if on_gpu and all(version.ok for version, _ in versions):
        runners = {name: Runner(machine.run_again) for name, (_, machine) in zip("sc", versions)}
        samples = take_turns(Timer.on_gpu(), runners, _RUNS)
        for (version, _), each in zip(versions, samples.values()):
            version.microseconds = averages.median(each)
    return Experiment(planned, versions[0][0], versions[1][0], folder)


class _Remembers:
    """A machine that runs the sources of a folder, and remembers the launches, in one direction."""

    def __init__(self, machine: Machine, direction: str, folder: Path | None) -> None:
        self._machine, self._direction, self._folder = machine, direction, folder
        self._launches: list[tuple[KernelLaunch, tuple]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)  # all else is the machine's

    def launch(self, kernel_launch: KernelLaunch, words: tuple) -> None:
        is_own = kernel_launch.kernel.source.startswith(self._direction)
        if is_own:
            self._launches.append((kernel_launch, words))
        self._machine.folder = self._folder if is_own else None
        self._machine.launch(kernel_launch, words)

    def run_again(self) -> None:
        """Enqueues the launches once more, with the same tensors."""
        self._machine.folder = self._folder
        for each in self._launches:
            self._machine.launch(*each)


def _check(version: Version, problem: Problem, machine: _Remembers, direction: str) -> None:
    try:
        got = run_kernels(problem, machine, forward_only=direction == "forward")
    except (OnCpuError, RuntimeError) as error:
        version.fault = version.fault or str(error)
        return
    of_direction = ("y", "mean", "rstd", "sum") if direction == "forward" else ("dx", "dw", "db")
    got = {name: values for name, values in got.items() if name.startswith(of_direction)}
    version.tensors = got
    rounded = uses_welford(problem.case, machine.device)
    version.result = CheckResult(Trial(problem).judged(got, rounded_mean=rounded))


def _inspect(version: Version, planned: Plan, folder: Path | None) -> None:
    """What the compiler for the GPU says, where it is installed."""
    for each in planned.launches:
        try:
            cubin, used = nvrtc.compile_for(each.kernel, planned.device.compute_capability, folder)
        except nvrtc.MissingLibraryError:
            return
        except RuntimeError as error:
            version.fault = str(error)
            return
        version.registers.append(used.registers)
        version.spilled_bytes.append(used.spill_store_bytes)
        version.instructions.append(sum(instructions_of(cubin).values()))


def instructions_of(cubin: bytes) -> dict[str, int]:
    """Machine instructions of each kernel of a cubin, without the padding at its end.

    A cubin is an ELF file of 64 bits. The code of a kernel is in section .text.NAME; since sm_70 an
    instruction has 16 bytes, and NOP begins with 0x7918.
    """
    (first,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, first + size * at) for at in range(count)]
    names, found = sections[names_at][4], {}
    for name, _, _, _, code, num_bytes in sections:
        start = names + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            while num_bytes and cubin.startswith(_NOP, code + num_bytes - 16):
                num_bytes -= 16
            found[text.removeprefix(".text.")] = num_bytes // 16
    return found


# The sources.


def changed_sources(changes: Changes) -> Path:
    """The folder of a copy of the sources with the changes. The same changes have one folder.

    changes: by file name the whole new text, or pairs (old, new), each old text once in the file. A
        name that does not exist is a new file.

    Raises ValueError for changes that do not fit.
    """
    if not isinstance(changes, Mapping):
        kind = type_in_words(changes)
        raise TypeError(f"changes is {kind}; expected a dict from files to texts or replacements")
    texts = {name: path.read_text(encoding="utf-8") for name, path in source_files().items()}
    before = dict(texts)
    for name, change in changes.items():
        texts[name] = change if isinstance(change, str) else _replace(texts, name, change)
    for name in texts:
        if Path(name).name != name or Path(name).suffix not in (".cu", ".cuh"):
            raise ValueError(f"changes names {name!r}; expected a .cu or .cuh file of cuda_src")
    if texts == before:
        raise ValueError("changes leaves every file as it is; expected a change")
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = folder_of_process("sources") / digest
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return folder


def _replace(texts: dict[str, str], name: str, pairs: Replacements) -> str:
    if name not in texts:
        raise ValueError(f"changes names {name!r}, which is not in cuda_src; expected a file of it")
    text = texts[name]
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(
                f"{name} has {old!r} {text.count(old)} times; expected it once: "
                "give more of the text around it"
            )
        text = text.replace(old, new)
    return text


def piece(name: str, first: str, last: str | None = None) -> str:
    """The lines of a file of cuda_src from one text to another, numbered.

    first, last: texts that the first and the last line contain; the last is searched for from the
        first on. None: the first line alone.

    Raises ValueError for a file or a text that is not there.
    """
    path = source_files().get(name)
    if path is None:
        raise ValueError(f"name is {name!r}, which is not in cuda_src; expected a file of it")
    lines = path.read_text(encoding="utf-8").splitlines()

    def find(text: str, start: int) -> int:
        for at in range(start, len(lines)):
            if text in lines[at]:
                return at
        raise ValueError(f"{name} has no line with {text!r} from line {start + 1} on; expected one")

    begin = find(first, 0)
    end = begin if last is None else find(last, begin)
    return "\n".join(f"{at + 1:>4}  {lines[at]}".rstrip() for at in range(begin, end + 1))
