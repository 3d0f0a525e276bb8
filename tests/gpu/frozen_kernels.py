"""What the compiler makes of the kernels of plain, residual, fused and 8-bit rows: registers, bytes
of spills and instructions, for three architectures. A change that should not touch them shows here.

After an intended change write tests/data/frozen_kernels.csv again, which takes some minutes:
PYTHONPATH=.:tests/gpu python tests/gpu/frozen_kernels.py

The figures are those of one version of NVRTC, which is in the first line of the file. A kernel is
named by the problem that it is planned for, and not by its template arguments, which may change.
"""

from __future__ import annotations

import csv
import itertools
import struct
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import kernel_grid as grid

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import make_plan
from cupynorm.dispatch.instances import Kernel
from cupynorm.dispatch.problem import Layout, Problem
from cupynorm.gpu import nvrtc
from cupynorm.plans import plan

FILE = Path(__file__).parents[1] / "data" / "frozen_kernels.csv"
GPUS = {80: "A100", 90: "H200", 100: "B200"}
NUM_ROWS = (16, 4096)
BATCH = 12
# Those of kernel_grid.py that stay: no y that is normalised again, no rows beyond 300,000 columns.
_GOING = ("recomputed",)


class Figures(NamedTuple):
    registers: int
    spilled_bytes: int
    instructions: int


def _stays(problem: dict) -> bool:
    return not any(name in problem for name in _GOING)


def problems(compute_capability: int) -> Iterator[tuple[dict, int]]:
    """Pairs of a problem and a width."""
    some = [
        (grid.PROBLEMS, grid.WIDTHS if compute_capability == 90 else grid.FEWER_WIDTHS),
        (grid.FUSED_PROBLEMS, grid.FUSED_WIDTHS),
        (grid.QUANTIZED_PROBLEMS, grid.FEWER_QUANTIZED_WIDTHS),
    ]
    if compute_capability == 90:
        some += [
            (grid.RING_PROBLEMS, grid.RING_WIDTHS),
            (grid.BUNDLE_PROBLEMS, grid.BUNDLE_WIDTHS[::2]),
            (grid.TUNED_PROBLEMS, grid.TUNED_WIDTHS[::2]),
            (grid.TUNED_QUANTIZED_PROBLEMS, grid.TUNED_QUANTIZED_WIDTHS[::3]),
        ]
    for of_kind, widths in some:
        for problem, num_cols in itertools.product(filter(_stays, of_kind), widths):
            if num_cols <= 262144:
                yield problem, num_cols


def kernels(compute_capability: int) -> dict[str, Kernel]:
    """By problem; of problems with the same kernel the first alone."""
    device, found, seen = DEVICES[GPUS[compute_capability]], {}, set()
    for (problem, num_cols), num_rows in itertools.product(problems(compute_capability), NUM_ROWS):
        if "x" in problem:
            fields = {"centered": True, "layout": Layout.of_new_arrays(num_cols), **problem}
            made = make_plan(Problem(num_cols=num_cols, **fields), device, num_rows)
        else:
            made = plan(num_cols, num_rows, device=device, **problem)
        words = " ".join(f"{name}={value}" for name, value in problem.items())
        for launch in made.launches:
            if launch.kernel not in seen:
                seen.add(launch.kernel)
                name = f"{device.name} {num_rows} x {num_cols} {words} {launch.kernel.source}"
                found[name] = launch.kernel
    return found


def figures(batch: list[Kernel], compute_capability: int) -> list[Figures]:
    """Of kernels of one source, which are compiled together."""
    from cupy.cuda import get_cuda_path
    from cupy_backends.cuda.libs import nvrtc as library

    flags = [*nvrtc.options(), "-ftz=true", f"-arch=sm_{compute_capability}", "-Xptxas=-v"]
    flags += ["-no-cache"] if nvrtc.version() >= (12, 9) else []
    program = library.createProgram(nvrtc.source(batch[0]), "instances.cu", (), ())
    try:
        for kernel in batch:
            library.addNameExpression(program, kernel.name_expression)
        library.compileProgram(program, [*flags, *nvrtc._include_options(get_cuda_path())])
        counts = instructions_by_name(library.getCUBIN(program))
        reports = library.getProgramLog(program).split("Compiling entry function '")[1:]
        used = {each.partition("'")[0]: nvrtc._resources(each) for each in reports}
        names = [library.getLoweredName(program, kernel.name_expression) for kernel in batch]
        return [
            Figures(used[name].registers, used[name].spill_store_bytes, counts[name])
            for name in names
        ]
    finally:
        library.destroyProgram(program)


def instructions_by_name(cubin: bytes) -> dict[str, int]:
    """Machine instructions of each kernel of a cubin, without the NOPs at its end.

    A cubin is an ELF file of 64 bits. The code of a kernel is in section .text.NAME; an instruction
    has 16 bytes, and NOP begins with 0x7918.
    """
    (first,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, first + size * at) for at in range(count)]
    names, found = sections[names_at][4], {}
    for name, _, _, _, code, num_bytes in sections:
        start = names + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            while num_bytes and cubin.startswith(b"\x18\x79", code + num_bytes - 16):
                num_bytes -= 16
            found[text.removeprefix(".text.")] = num_bytes // 16
    return found


def batches(named: dict[str, Kernel]) -> list[dict[str, Kernel]]:
    """Kernels of one source text each, at most BATCH together."""
    by_source: dict[str, list[str]] = {}
    for name, kernel in named.items():
        by_source.setdefault(nvrtc.source(kernel), []).append(name)
    return [
        {name: named[name] for name in names[at : at + BATCH]}
        for names in by_source.values()
        for at in range(0, len(names), BATCH)
    ]


def _rows(work: tuple[dict[str, Kernel], int]) -> list[tuple]:
    batch, compute_capability = work
    found = figures(list(batch.values()), compute_capability)
    return [(name, *each) for name, each in zip(batch, found)]


def read() -> tuple[str, dict[str, Figures]]:
    """The version of NVRTC, and the figures by name."""
    with FILE.open(newline="", encoding="utf-8") as file:
        (version, *_), _, *rows = csv.reader(file)
    return version, {name: Figures(*map(int, numbers)) for name, *numbers in rows}


def main() -> None:
    work = [(batch, each) for each in GPUS for batch in batches(kernels(each))]
    print(sum(len(batch) for batch, _ in work), "kernels", flush=True)
    with ProcessPoolExecutor() as pool:
        rows = [row for found in pool.map(_rows, work) for row in found]
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([version_of_nvrtc()])
        writer.writerow(["kernel", *Figures._fields])
        writer.writerows(rows)


def version_of_nvrtc() -> str:
    return ".".join(map(str, nvrtc.version()))


if __name__ == "__main__":
    main()
