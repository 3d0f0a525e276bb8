"""Kernels of changed sources, on the CPU: what runs them, and whether a check sees the bug."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
from kernel_checks import run
from kernel_paths import SMALL

from cupynorm.dispatch.devices import Device
from cupynorm.dispatch.problem import Tile
from cupynorm.dtypes import DTYPES
from cupynorm.gpu.nvrtc import cuda_src, source_files
from cupynorm.verify.cases import Problem
from cupynorm.verify.kernels import CpuMachine, uses_welford
from cupynorm.verify.results import CheckResult, judge_all

ROOT = Path(__file__).parents[2]
SEEDS = range(20)
_GUARD = 1 << 16  # bytes: more than all rows of a block that a wrong bound may add


class MutatedMachine(CpuMachine):
    """Runs the kernels of a folder. Guards around arrays catch writes to wrong addresses.

    apart: each array begins at another offset within 16 bytes.
    """

    def __init__(
        self, folder: Path, seed: int = 0, device: Device = SMALL, apart: bool = False
    ) -> None:
        super().__init__(device, seed, folder=folder)
        self.apart = apart
        self.guarded = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, int]:
        return self._placed(shape, DTYPES[dtype].storage)

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        copy, pointer = self._placed(array.shape, array.dtype)
        copy[...] = array
        return copy, pointer

    def _placed(self, shape: tuple[int, ...], storage: np.dtype) -> tuple[np.ndarray, int]:
        size = int(np.prod(shape)) * storage.itemsize
        around = np.full(size + 2 * _GUARD + 16, 0xFF, np.uint8)
        start = _GUARD + -(around.ctypes.data + _GUARD) % 16
        if self.apart:
            start += len(self.guarded) * storage.itemsize % 16
        self.guarded.append((around, start, start + size))
        array = around[start : start + size].view(storage).reshape(shape)
        return array, array.ctypes.data

    def guards_are_whole(self) -> bool:
        return all(
            (around[:start] == 0xFF).all() and (around[end:] == 0xFF).all()
            for around, start, end in self.guarded
        )


def sees_a_bug(problem: Problem, machine: MutatedMachine, backward: Tile | None = None) -> bool:
    welford = problem.case.statistics == "welford" or uses_welford(problem.case, machine.device)
    results = run(problem, machine, backward)
    is_right = CheckResult(judge_all(problem, results, rounded_mean=welford)).ok
    return not is_right or not machine.guards_are_whole()


def changes(table: str) -> dict[str, tuple[str, ...]]:
    r"""Mutations by name: (file, old, new, ...) of lines "name | file | ..." and "  old  =>  new".

    \n in a text is the end of a line.
    """
    found = {}
    for entry in re.split(r"\n(?! )", table.strip()):
        head, change = entry.split("\n", 1)
        name, file, *more = head.split(" | ")
        old, new = (each.replace("\\n", "\n") for each in re.split(r"  =>\s*", change[2:]))
        found[name] = (file, old, new, *more)
    return found


def copy_of_sources(folder: Path) -> Path:
    # Without on_cpu, so that the scheduler is compiled once for all copies.
    shutil.copytree(cuda_src(), folder, ignore=shutil.ignore_patterns("on_cpu"))
    return folder


def mutate(folder: Path, file: str, old: str, new: str) -> None:
    path = source_files(folder)[file]
    text = path.read_text()
    assert old in text, f"{file} has no {old!r}: the mutation follows the source"
    path.write_text(text.replace(old, new))
