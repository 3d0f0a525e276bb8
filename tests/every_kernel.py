"""Runs every kernel once on small problems, for tools that check a whole process:

    compute-sanitizer --tool memcheck python tests/every_kernel.py

The other tools are racecheck, initcheck and synccheck. Exits with 1 if a result is wrong.
sanitize.py runs it in several processes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from every_matrix import (
    STEPS,
    Matrix,
    Reduced,
    judge_matrix,
    judge_reduction,
    judge_scales,
    matrices,
    reductions,
    run_matrix,
    run_reduction,
    run_scales,
)
from every_product import Product, judge_product, products, run_product
from every_quantized import NUM_FEW, few_multiprocessors, long_quantized, quantized_cases
from quantized_calls import How, judge_values, run_8_bits

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine, uses_welford
from cupynorm.check.results import CheckResult, Finding, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import nvrtc
from cupynorm.plan.plans import plan
from cupynorm.plan.problem import Tile
from cupynorm.plan.strategies import STRATEGIES


def cases() -> list[Case]:
    every = []
    for strategy in STRATEGIES:
        for norm in ("layer_norm", "rms_norm"):
            # Whole packs, then lone elements and mixed dtypes.
            every.append(Case(norm, 300, 512, "bfloat16", strategy=strategy))
            every.append(Case(norm, 5, 255, "float32", weight="float64", strategy=strategy))
        every.append(
            Case(
                "layer_norm", 7, 504, "float16", weight="float32", strategy=strategy, residual=True
            )
        )
        every.append(Case("layer_norm", 3, 256, "float64", strategy=strategy, statistics="welford"))
        every.append(
            Case(
                "layer_norm",
                9,
                500,
                "bfloat16",
                y="float32",
                strategy=strategy,
                zero_centered_weight=True,
            )
        )
        # Sums of another dtype, in packs and single elements.
        options = {
            "residual": "float32",
            "dsum": True,
        }
        every.append(Case("layer_norm", 300, 512, "bfloat16", strategy=strategy, **options))
        every.append(Case("rms_norm", 7, 255, "float16", strategy=strategy, residual="float32"))
        every.append(Case("rms_norm", 9, 500, "bfloat16", strategy=strategy, round_x_hat=True))
        every.append(Case("layer_norm", 300, 512, "bfloat16", strategy=strategy, recompute=True))
        every.append(
            Case("rms_norm", 7, 255, "float32", strategy=strategy, bias="bfloat16", recompute=True)
        )
    # Rows at any address: in bundles of one and of several images, and in rings.
    for num_cols in (33, 127, 511):
        every += [
            Case(norm, 300, num_cols, dtype)
            for norm, dtype in (("layer_norm", "bfloat16"), ("rms_norm", "float32"))
        ]
    # With a residual, and what reaches its sum from elsewhere; the last through a ring.
    for norm, num_cols, dtype in (
        ("layer_norm", 127, "bfloat16"),
        ("rms_norm", 333, "float32"),
        ("layer_norm", 512, "bfloat16"),
    ):
        every.append(Case(norm, 300, num_cols, dtype, residual=True, dsum=True, sm_margin=1))
    # Few rows, whose backward is one launch: in the lanes of a warp, in a block, as in rings.
    every += [
        Case("layer_norm", 9, num_cols, dtype)
        for num_cols, dtype in ((128, "float16"), (1000, "float64"), (4096, "bfloat16"))
    ]
    every += [
        Case("rms_norm", 9, num_cols, "bfloat16", residual=True, dsum=True)
        for num_cols in (2049, 9216)
    ]
    # Rows in the registers of clusters of 2 to 16 blocks; 200001 and 262144 backward are wider.
    every += [
        Case("layer_norm", 2, num_cols, "bfloat16")
        for num_cols in (20000, 40000, 66000, 131072, 200001, 262144)
    ]
    # Rows that are too long for a cluster are read again: uncached.
    return every + [
        Case("layer_norm", 5, 2**18 + 8, "float32"),
        Case("rms_norm", 5, 2**19, "bfloat16"),
    ]


def long_cases() -> list[Case]:
    """Cases that few_multiprocessors take: each block works on several rows."""
    margin = {"sm_margin": NUM_FEW // 2}
    every = [
        Case("layer_norm", num_rows, num_cols, "bfloat16", **margin)
        for num_rows, num_cols in ((20, 2049), (3, 33333))
    ]
    every += [
        Case("layer_norm", num_rows, num_cols, "bfloat16", recompute=True, **margin)
        for num_rows, num_cols in ((40, 1023), (40, 1024), (6, 12288))
    ]
    every += [
        Case("layer_norm", 3, num_cols, "float32", **margin) for num_cols in (200_000, 230_001)
    ]  # one row fills a ring
    for strategy, sizes in (("block", (1,)), ("cluster", (2, 16))):
        for cluster_size in sizes:
            options = {"strategy": strategy, **margin}
            # Forward rows in shared memory: other devices and wider rows get them.
            tile = Tile(8, 64, cluster_size=cluster_size)
            every.append(Case("layer_norm", 40, 4096, "bfloat16", tile=tile, **options))
            # Rings: forward of few packs, so that several rounds of them are quick;
            # backward of the narrowest rows that get one.
            for dtype, pack_size in (("bfloat16", 8), ("float32", 4)):
                num_cols = narrowest_ring(dtype, cluster_size)
                packs_per_thread = max(1, -(-num_cols // (cluster_size * pack_size * 256)))
                tile = Tile(pack_size, 256, packs_per_thread, cluster_size=cluster_size, stages=2)
                num_rows = {1: 20, 2: 5, 16: 3}[cluster_size]
                every.append(Case("layer_norm", num_rows, num_cols, dtype, tile=tile, **options))
    return every


def narrowest_ring(dtype: str, cluster_size: int) -> int:
    """The fewest columns, a multiple of 1000, whose backward is a ring of such clusters."""
    for num_cols in range(1000, 200_000, 1000):
        tile = plan(num_cols, dtype=dtype, direction="backward", device="H200").tile
        if tile.stages and tile.cluster_size == cluster_size:
            return num_cols
    raise ValueError(f"no backward of {dtype} is a ring of clusters of {cluster_size}")


class WholeUnits(GpuCheckMachine):
    """Arrays in units of 16 bytes that are zero, for initcheck.

    The copy engine reads whole units, also those that an array shares with others.
    """

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        storage = DTYPES[dtype].storage
        num_bytes = int(np.prod(shape)) * storage.itemsize
        units = nvrtc.cupy().zeros(-(-num_bytes // 16) * 16, np.uint8)
        array = units[:num_bytes].view(storage).reshape(shape)
        array.view(np.uint8).fill(0xFF)
        return array, array.data.ptr

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        units = nvrtc.cupy().zeros(-(-array.nbytes // 16) * 16, np.uint8)
        there = units[: array.nbytes].view(array.dtype).reshape(array.shape)
        there[...] = nvrtc.cupy().asarray(array)
        return there, there.data.ptr


class Step(NamedTuple):
    """Some kernels and what judges them. cost: elements, and what loading the kernels costs."""

    name: str
    cost: int
    run: Callable[[GpuCheckMachine], list[Finding]]


_COST_OF_LOADING = 2**19  # elements that a sanitizer watches in the time


def steps() -> list[Step]:
    """Everything that is run, in a fixed order."""
    every = [_step(_run_case, case, case.num_rows * case.num_cols) for case in cases()]
    every += [
        _step(_run_quantized, (case, how), case.num_rows * case.num_cols)
        for case, how in quantized_cases()
    ]
    every += [_step(_run_long, case, case.num_rows * case.num_cols) for case in long_cases()]
    every += [
        _step(_run_long_quantized, (case, how), case.num_rows * case.num_cols)
        for case, how in long_quantized()
    ]
    every += [_step(_run_product, each, each.num_products) for each in products()]
    every += [
        _step(_run_matrix, matrix, matrix.num_rows * matrix.num_cols) for matrix in matrices()
    ]
    every += [_step(_run_reduction, each, each.num_rows * each.num_cols) for each in reductions()]
    return every + [_step(_run_scales, num_steps, 0) for num_steps in STEPS]


def chosen(only: str) -> list[Step]:
    """Those whose names have this text, the smallest first."""
    return sorted((step for step in steps() if only in step.name), key=lambda step: step.cost)


def _step(run: Callable, problem: Any, num_elements: int) -> Step:
    name = f"{run.__name__} {problem}"
    return Step(name, _COST_OF_LOADING + num_elements, partial(run, problem))


def _run_case(case: Case, where: GpuCheckMachine) -> list[Finding]:
    problem = random_problem(case)
    welford = uses_welford(case, where.device)
    return judge_all(problem, run_kernels(problem, where), rounded_mean=welford)


def _run_quantized(quantized: tuple[Case, How], where: GpuCheckMachine) -> list[Finding]:
    case, how = quantized
    problem = random_problem(case)
    made, _ = run_8_bits(problem, how, where)
    return judge_values(problem, how, made, rounded_mean=uses_welford(case, where.device))


def _run_long(case: Case, where: GpuCheckMachine) -> list[Finding]:
    with few_multiprocessors(where):
        return _run_case(case, where)


def _run_long_quantized(quantized: tuple[Case, How], where: GpuCheckMachine) -> list[Finding]:
    with few_multiprocessors(where):
        return _run_quantized(quantized, where)


def _run_product(product: Product, where: GpuCheckMachine) -> list[Finding]:
    if not product.kind.startswith("few") and where.device.compute_capability != 90:
        return []  # norm_linear.cu is for that alone
    return judge_product(product, *run_product(product, where))


def _run_matrix(matrix: Matrix, where: GpuCheckMachine) -> list[Finding]:
    return judge_matrix(matrix, *run_matrix(matrix, where))


def _run_reduction(reduction: Reduced, where: GpuCheckMachine) -> list[Finding]:
    return judge_reduction(reduction, *run_reduction(reduction, where))


def _run_scales(num_steps: int, where: GpuCheckMachine) -> list[Finding]:
    return judge_scales(*run_scales(num_steps, where))


def is_mine(claims: Path | None, number: int) -> bool:
    """Whether no other process has claimed this step in the folder that they share."""
    if claims is None:
        return True
    try:
        (claims / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="steps whose names have this text")
    parser.add_argument("--claims", type=Path, help="a folder of processes that share the steps")
    parser.add_argument(
        "--until", type=float, default=math.inf, help="no other step begins after it"
    )
    asked = parser.parse_args(arguments)
    where = WholeUnits() if nvrtc.has_gpu() else CpuMachine()
    result, num_steps = CheckResult(), 0
    for number, step in enumerate(chosen(asked.only)):
        is_time = time.time() < asked.until or not num_steps
        if is_time and is_mine(asked.claims, number):
            print(f"begin {number}", flush=True)
            found = step.run(where)
            print(f"end {number}", *(each for each in found if not each.ok), flush=True)
            result.findings += found
            num_steps += 1
    if num_steps:
        print(result)
    print(f"{num_steps} steps ran")
    return 0 if result.num_off == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
