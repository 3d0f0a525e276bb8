"""Kernels of rows whose columns are on several ranks, for every_kernel.py: cases and runs.

All ranks are one after the other in one process: what they would gather or reduce is joined here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from every_quantized import Kept

from cupynorm.check.cases import Case, Problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.dtypes import DTYPES, compute_dtype, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.split_rows import (
    SplitNorm,
    gradients_call,
    normalize_call,
    statistics_call,
    sums_call,
)


class Shared(NamedTuple):
    """A case whose columns num_ranks ranks share."""

    case: Case
    num_ranks: int


def shared_cases() -> list[Shared]:
    """Packs and single elements, registers and neither, equal parts, smaller ones and none."""
    zero_centered = {"zero_centered_weight": True, "y": "float32"}
    return [
        Shared(Case("layer_norm", 40, 512, "bfloat16"), 2),
        Shared(Case("rms_norm", 9, 255, "float16", weight="float32"), 4),
        Shared(Case("layer_norm", 5, 9, "float32", weight=None, bias=None), 4),
        Shared(Case("layer_norm", 3, 100, "float64", **{**zero_centered, "y": "float64"}), 3),
        Shared(Case("layer_norm", 2, 2 * 8 * 6200, "bfloat16", **zero_centered), 2),
    ]


def run_shared(
    problem: Problem, num_ranks: int, where: CpuMachine | GpuCheckMachine
) -> dict[str, np.ndarray]:
    """Results of whole rows, as float64. All ranks must have the same statistics, to the bit."""
    case = problem.case
    norm = SplitNorm(
        case.norm == "layer_norm", case.eps, case.zero_centered_weight, case.num_cols, num_ranks
    )
    ends = np.cumsum(norm.counts)
    ranks = [
        _Rank(problem, norm, slice(end - count, end), where)
        for end, count in zip(ends, norm.counts)
    ]
    parts = np.stack([rank.statistics() for rank in ranks])
    ys, statistics = zip(*(rank.normalize(parts) for rank in ranks))
    for rank, y, each in zip(ranks, ys, statistics):
        if y.size:
            assert np.array_equal(each, statistics[0]) and np.array_equal(y, rank.y_again())
    sums = sum(rank.sums(statistics[0]) for rank in ranks)
    made = [rank.gradients(sums) for rank in ranks]
    results = {"y": np.concatenate(ys, axis=1), "rstd": statistics[0][-1].astype(np.float64)}
    if norm.centered:
        results["mean"] = statistics[0][0].astype(np.float64)
    for name in made[0]:
        results[name] = np.concatenate([each[name] for each in made], axis=-1)
    return results


class _Rank:
    """One rank: its columns of the arrays of a problem, where kernels run."""

    def __init__(
        self, problem: Problem, norm: SplitNorm, columns: slice, where: CpuMachine | GpuCheckMachine
    ) -> None:
        case = problem.case
        self.norm, self.where, self.kept = norm, where, Kept(where)
        self.num_rows, self.num_cols = case.num_rows, columns.stop - columns.start
        self.compute = compute_dtype(case.x).name
        self.dtypes = {"x": case.x, "dx": case.x, "y": case.dtype("y"), "dy": case.dtype("dy")}
        self.dtypes |= {"weight": case.dtype("weight"), "bias": case.dtype("bias")}
        self.dtypes |= {"dweight": case.dtype("weight"), "dbias": case.dtype("bias")}
        self.dtypes = {name: dtype for name, dtype in self.dtypes.items() if dtype}
        self.given = {}
        for name in ("x", "dy", "weight", "bias"):
            values = getattr(problem, name)
            if values is not None:
                part = encode(np.ascontiguousarray(values[..., columns]), self.dtypes[name])
                self.given[name] = self.kept.put(name, part)

    def _run(self, call, addresses: dict[str, int]) -> None:
        for launch, words in zip(call.launches, call.fill(addresses), strict=True):
            self.where.launch(launch, words)

    def _made(self, name: str) -> np.ndarray:
        return decode(self.kept.get(name), self.dtypes[name])

    def _tensors(self, *names: str) -> dict[str, Rows]:
        """Of those that there are. Results are aligned like new arrays."""
        found = {}
        for name in names:
            if name in self.dtypes:
                rows = self.num_rows if name in ("x", "y", "dx", "dy") else 1
                at = self.given.get(name, 0)
                found[name] = Rows(at, rows, self.num_cols, self.num_cols, self.dtypes[name])
        return found

    def _poisoned(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> int:
        return self.kept.poisoned(name, shape, DTYPES[dtype or self.dtypes[name]].storage)

    def statistics(self) -> np.ndarray:
        shape = (3 if self.norm.centered else 1, self.num_rows)
        if not self.num_cols:
            return np.zeros(shape, self.compute)
        part = self._poisoned("part", shape, self.compute)
        self._run(statistics_call(self.norm, self._tensors("x")), {**self.given, "part": part})
        return self.kept.get("part")

    def normalize(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """y and the statistics of whole rows."""
        shape = (self.num_rows, self.num_cols)
        if not self.num_cols:
            return np.zeros(shape), np.zeros(parts.shape[1:])
        addresses = self.given | {
            "parts": self.kept.put("parts", parts),
            "y": self._poisoned("y", shape),
            "statistics": self._poisoned("statistics", parts.shape[1:], self.compute),
        }
        tensors = self._tensors("x", "y", "weight", "bias")
        self._run(normalize_call(self.norm, tensors, combines=True), addresses)
        return self._made("y"), self.kept.get("statistics")

    def y_again(self) -> np.ndarray:
        """y from the statistics that `normalize` saved."""
        addresses = self.given | {"statistics": self.kept.arrays["statistics"][1]}
        addresses["y"] = self._poisoned("y", (self.num_rows, self.num_cols))
        tensors = self._tensors("x", "y", "weight", "bias")
        self._run(normalize_call(self.norm, tensors, combines=False), addresses)
        return self._made("y")

    def sums(self, statistics: np.ndarray) -> np.ndarray:
        shape = (2 if self.norm.centered else 1, self.num_rows)
        if not self.num_cols:
            return np.zeros(shape, self.compute)
        self.given["statistics"] = self.kept.put("statistics", statistics)
        sums = self._poisoned("sums", shape, self.compute)
        tensors = self._tensors("x", "dy", "weight")
        self._run(sums_call(self.norm, tensors), {**self.given, "sums": sums})
        return self.kept.get("sums")

    def gradients(self, sums: np.ndarray) -> dict[str, np.ndarray]:
        names = [name for name in ("dx", "dweight", "dbias") if name in self.dtypes]
        shapes = {"dx": (self.num_rows, self.num_cols)}
        shapes |= dict.fromkeys(("dweight", "dbias"), (self.num_cols,))
        if not self.num_cols:
            return {name: np.zeros(shapes[name]) for name in names}
        wanted = {name: self.dtypes.get(name) for name in ("dweight", "dbias")}
        tensors = self._tensors("x", "dy", "weight", "dx")
        call = gradients_call(self.norm, tensors, self.where.device, **wanted)
        addresses = self.given | {"sums": self.kept.put("sums", sums)}
        addresses |= {name: self._poisoned(name, shapes[name]) for name in names}
        if call.partials_shape:
            partials = self._poisoned("partials", call.partials_shape, self.compute)
            addresses["partials"] = partials
        self._run(call, addresses)
        return {name: self._made(name) for name in names}
