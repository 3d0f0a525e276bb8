"""What the compiler makes of the kernels of plain, residual, fused and 8-bit rows: registers, bytes
of spills and instructions, for three architectures. A change that should not touch them shows here.

After an intended change write tests/data/frozen_kernels.csv again, which takes some minutes:
PYTHONPATH=.:tests/gpu:tests/dispatch python tests/gpu/frozen_kernels.py

The figures are those of one version of NVRTC, which is in the first line of the file. A kernel is
named by the problem that it is planned for, and not by its template arguments, which may change.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import kernel_grid as grid

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.instances import Kernel
from cupynorm.explore.experiment import instructions_of
from cupynorm.gpu import nvrtc

FILE = Path(__file__).parents[1] / "data" / "frozen_kernels.csv"
GPUS = {80: "A100", 90: "H200", 100: "B200"}
NUM_ROWS = (16, 4096)


class Figures(NamedTuple):
    registers: int
    spilled_bytes: int
    instructions: int


def problems(compute_capability: int) -> Iterator[tuple[dict, int]]:
    """Pairs of a problem and a width."""
    plain = grid.PROBLEMS if compute_capability == 90 else grid.FEWER_PROBLEMS
    some = [
        (plain, grid.FEWER_WIDTHS[1::3]),
        (grid.FUSED_PROBLEMS, grid.FEWER_FUSED_WIDTHS[:1]),
        (grid.QUANTIZED_PROBLEMS, grid.FEWER_QUANTIZED_WIDTHS[1:2]),
    ]
    if compute_capability == 90:
        some += [
            (grid.RING_PROBLEMS, grid.FEWER_RING_WIDTHS[::2]),
            (grid.BUNDLE_PROBLEMS, grid.BUNDLE_WIDTHS[::4]),
        ]
        yield from grid.problems_of_rows()[::20]
    for pairs in some:
        yield from itertools.product(*pairs)


def kernels(compute_capability: int) -> dict[str, Kernel]:
    """By problem; of problems with the same kernel the first alone."""
    device, found, seen = DEVICES[GPUS[compute_capability]], {}, set()
    for at, (problem, num_cols) in enumerate(problems(compute_capability)):
        num_rows = NUM_ROWS[at % 2]
        made = grid.plan_of(problem, num_cols, num_rows, device)
        words = " ".join(f"{name}={value}" for name, value in problem.items())
        for launch in made.launches:
            if launch.kernel not in seen:
                seen.add(launch.kernel)
                name = f"{device.name} {num_rows} x {num_cols} {words} {launch.kernel.source}"
                found[name] = launch.kernel
    return found


def figures(batch: list[Kernel], compute_capability: int) -> list[Figures]:
    cubin, found = nvrtc.compile_together(batch, compute_capability)
    counts = instructions_of(cubin)
    return [
        Figures(used.registers, used.spill_store_bytes, counts[name])
        for name, used in found.values()
    ]


def batches(named: dict[str, Kernel]) -> list[dict[str, Kernel]]:
    """Those that are compiled together, by name."""
    name_of = {kernel: name for name, kernel in named.items()}
    return [{name_of[each]: each for each in batch} for batch in grid.batches(name_of)]


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
