"""Norms with y in 8 bits, for every_kernel.py: problems, and how they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import quantized_calls as quantized
from quantized_calls import How

from cupynorm.dispatch.problem import SCALINGS, Tile
from cupynorm.dispatch.strategies import STRATEGIES
from cupynorm.dtypes import FLOAT8S
from cupynorm.verify.cases import Case, random_problem
from cupynorm.verify.kernels import CpuMachine, GpuCheckMachine

E4M3, E5M2 = FLOAT8S
NUM_FEW = 4


def quantized_cases() -> list[tuple[Case, How]]:
    """Those of a given scale come with an amax and without."""
    every = []
    for strategy in STRATEGIES:
        for scaling in SCALINGS:
            # Packs, with a part of a block of columns at the end; single elements.
            every.append(
                (Case("layer_norm", 40, 560, "bfloat16", strategy=strategy), How(E4M3, scaling))
            )
            lone = Case("rms_norm", 5, 255, "float32", weight=None, bias=None, strategy=strategy)
            every.append((lone, How(E5M2, scaling)))
        summed = Case(
            "layer_norm", 7, 504, "float16", weight="float32", strategy=strategy, residual=True
        )
        every += [(summed, How(E4M3, scaling)) for scaling in ("tensor", "row", "block")]
        double = Case("layer_norm", 3, 256, "float64", strategy=strategy, statistics="welford")
        every += [(double, How(E5M2, scaling)) for scaling in ("tensor", "row")]
        # Two blocks of a cluster share a block of 128 columns, and one scale.
        shared = Case("layer_norm", 9, 128, "float64", strategy=strategy)
        every.append((shared, How(E5M2, "block")))
        wide = Case("layer_norm", 9, 512, "bfloat16", strategy=strategy, residual="float32")
        every += [(wide, How(E4M3, scaling)) for scaling in ("given", "tensor", "block")]
        whole = Case("rms_norm", 5, 512, "bfloat16", strategy=strategy)
        every += [
            (whole, How("int8", "row", upper_bound=2.0)),
            (whole, How("int8", "given", divides=True)),
            (whole, How(E4M3, "block64", layout="column")),
            (whole, How(E4M3, "block", power_of_two=True, layout="packed")),
        ]
    # Rows in the shared memory of a block, or a cluster.
    for cluster_size in (1, 2):
        strategy = "block" if cluster_size == 1 else "cluster"
        kept = Case(
            "layer_norm",
            40,
            4160,
            "bfloat16",
            strategy=strategy,
            tile=Tile(8, 64, cluster_size=cluster_size),
        )
        every += [(kept, How(E4M3, scaling)) for scaling in SCALINGS]
    return every + _with_amax(every)


def long_quantized() -> list[tuple[Case, How]]:
    """As quantized_cases, for few_multiprocessors: each block works on several rows."""
    every, margin = [], {"sm_margin": NUM_FEW // 2}
    # Rings, of rows that begin anywhere, too, and of clusters.
    for num_cols, tile in (
        (4096, Tile(8, 256, 2, exact=1, stages=2)),
        (1023, Tile(1, 64, 16, stages=2)),
        (9000, Tile(8, 256, 3, cluster_size=2, stages=2)),
    ):
        strategy = "block" if tile.cluster_size == 1 else "cluster"
        ring = Case(
            "layer_norm", 10, num_cols, "bfloat16", strategy=strategy, tile=tile, **margin
        )  # some turns each
        every += [(ring, How(E4M3, scaling)) for scaling in SCALINGS]
    # Threads as long as their registers hold, and next rows in those of a warp.
    for num_cols, strategy, tile, scalings in (
        (576, "warp", Tile(8, 8, 9, rows_per_block=8, blocks_per_sm=8, exact=1), ("given",)),
        (13000, "block", Tile(8, 128, 13, blocks_per_sm=4), ("given", "tensor")),
        (9000, "block", Tile(8, 96, 12, blocks_per_sm=5), ("given", "tensor")),
        (1024, "block", Tile(8, 32, 4, blocks_per_sm=24, exact=1), ("row", "block")),
        (1000, "block", Tile(8, 32, 4, blocks_per_sm=20), ("row", "block")),
    ):
        # On the multiprocessors that are left.
        places = NUM_FEW // 2 * tile.blocks_per_sm * tile.rows_per_block
        num_rows = places + places // 4
        long = Case(
            "layer_norm", num_rows, num_cols, "bfloat16", strategy=strategy, tile=tile, **margin
        )
        every += [(long, How(E4M3, scaling)) for scaling in scalings]
    return every + _with_amax(every)


def _with_amax(every: list[tuple[Case, How]]) -> list[tuple[Case, How]]:
    return [(case, how._replace(amax=True)) for case, how in every if how.scaling == "given"]


@contextmanager
def few_multiprocessors(where: CpuMachine | GpuCheckMachine) -> Iterator[None]:
    """Plans for a GPU of NUM_FEW multiprocessors and two clusters of each size."""
    whole = where.device
    clusters = tuple((size, 2) for size, _ in whole.clusters)
    where.device = replace(whole, num_sms=NUM_FEW, clusters=clusters)
    try:
        yield
    finally:
        where.device = whole


class Kept:
    """Arrays where kernels run, by name; all that kernels write is poisoned with bits of NaN."""

    def __init__(self, where: CpuMachine | GpuCheckMachine) -> None:
        self.where = where
        self.arrays: dict[str, tuple] = {}

    def put(self, name: str, array: np.ndarray | None) -> int:
        """Its address; 0 of None."""
        if array is None:
            return 0
        there, pointer = self.where.put(array)
        self.arrays[name] = there, pointer
        return pointer

    def poisoned(self, name: str, shape: tuple[int, ...], storage: str | np.dtype) -> int:
        return self.put(
            name,
            np.full((*shape, np.dtype(storage).itemsize), 0xFF, np.uint8).view(storage)[..., 0],
        )

    def get(self, name: str) -> np.ndarray:
        return self.where.get(self.arrays[name][0])


def run_quantized(
    case: Case, quantization: How, where: CpuMachine | GpuCheckMachine
) -> tuple[dict, dict]:
    """Arrays by name of a call with y in 8 bits and of one with y in the compute dtype."""
    return quantized.run_quantized(random_problem(case), quantization, where)
