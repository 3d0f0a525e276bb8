"""Kernels of changed sources, on the CPU: what runs them, and whether a check sees the bug."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from kernel_paths import H200, SMALL

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.gpu.on_cpu import OnCpuError
from cupynorm.gpu.source_files import cuda_src, source_files

ROOT = Path(__file__).parents[2]
SEEDS = range(20)
_GUARD = 1 << 16  # bytes: more than all rows of a block that a wrong bound may add


class MutatedMachine(CpuMachine):
    """Runs the kernels of a folder. Guards around arrays catch writes to wrong addresses.

    apart: each array begins at another offset within 16 bytes.
    """

    def __init__(self, folder: Path, seed: int = 0, apart: bool = False) -> None:
        super().__init__(SMALL, seed, folder=folder)
        self.apart = apart
        self.guarded = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, int]:
        storage = DTYPES[dtype].storage
        size = int(np.prod(shape)) * storage.itemsize
        around = np.full(size + 2 * _GUARD + 16, 0xFF, np.uint8)
        start = _GUARD + -(around.ctypes.data + _GUARD) % 16
        if self.apart:
            start += len(self.guarded) * storage.itemsize % 16
        self.guarded.append((around, start, start + size))
        array = around[start : start + size].view(storage).reshape(shape)
        return array, array.ctypes.data

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        if array.dtype == np.int64:  # a seed
            return super().put(array)
        name = next(name for name, dtype in DTYPES.items() if dtype.storage == array.dtype)
        copy, pointer = self.empty(array.shape, name)
        copy[...] = array
        return copy, pointer

    def guards_are_whole(self) -> bool:
        return all(
            (around[:start] == 0xFF).all() and (around[end:] == 0xFF).all()
            for around, start, end in self.guarded
        )


def sees_a_bug(folder: Path, case: Case, center: float, seeds: Iterable[int] = SEEDS) -> bool:
    problem = random_problem(case)
    if center:
        # Values near a large mean, exact in float32, show a loss of digits.
        problem = replace(problem, x=np.float64(np.float32(problem.x + center)))
    welford = case.statistics == "welford" or uses_welford(case, SMALL)
    for seed in seeds:
        machine = MutatedMachine(folder, seed, apart=bool(case.tile and case.tile.bundle))
        try:
            results = run_kernels(problem, machine)
        except OnCpuError as error:
            assert "does not compile" not in str(error), error
            return True
        if (
            not CheckResult(judge_all(problem, results, rounded_mean=welford)).ok
            or not machine.guards_are_whole()
        ):
            return True
    return False


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


def assert_bug_is_seen(folder: Path, error: Callable[[CpuMachine, int], float]) -> None:
    """error(machine, seed) of some order of threads is over 1, or the kernel fails."""
    for seed in SEEDS:
        try:
            if not error(CpuMachine(H200, seed, folder=folder), seed) <= 1:
                return
        except OnCpuError as failure:
            assert "does not compile" not in str(failure), failure
            return
    raise AssertionError("no run shows the bug")


def copy_of_sources(folder: Path) -> Path:
    # Without on_cpu, so that the scheduler is compiled once for all copies.
    shutil.copytree(cuda_src(), folder, ignore=shutil.ignore_patterns("on_cpu"))
    return folder


def mutate(folder: Path, file: str, old: str, new: str) -> None:
    path = source_files(folder)[file]
    text = path.read_text()
    assert old in text, f"{file} has no {old!r}: the mutation follows the source"
    path.write_text(text.replace(old, new))
