"""Runs every kernel once on small problems, for tools that check a whole process:

    compute-sanitizer --tool memcheck python tests/every_kernel.py

The other tools are racecheck, initcheck and synccheck. Exits with 1 if a result is wrong.
--part shares the steps out to several processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
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
from every_quantized import few_multiprocessors, long_quantized, quantized_cases
from kernel_checks import run
from kernel_paths import PATHS, Call, calls, case_of
from quantized_calls import How, judge_values, run_8_bits

from cupynorm.dtypes import DTYPES
from cupynorm.gpu import nvrtc
from cupynorm.verify.cases import Case, Problem, random_problem
from cupynorm.verify.kernels import CpuMachine, GpuCheckMachine, run_kernels, uses_welford
from cupynorm.verify.results import CheckResult, Finding, judge_all

# Few rows, whose backward is one launch, and rows beyond those of kernel_paths.py.
WIDE = [
    *(Case("layer_norm", 9, num_cols, "bfloat16") for num_cols in (128, 4096)),
    Case("rms_norm", 9, 2049, "bfloat16", residual=True, dsum=True),
    Case("rms_norm", 9, 9216, "bfloat16", residual=True, dsum=True),
    *(Case("layer_norm", 2, num_cols, "bfloat16") for num_cols in (66000, 131072, 200001, 262144)),
    Case("layer_norm", 5, 2**18 + 8, "float32"),
    Case("rms_norm", 5, 2**19, "bfloat16"),
]


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
    every = [
        _step(_run_call, Call(path, option, {}), PATHS[path].num_cols * 64)
        for (path, option, _), _ in calls()
    ]
    every += [_step(_run_case, case, case.num_cols) for case in WIDE]
    every += [
        _step(_run_quantized, (case, how), case.num_rows * case.num_cols)
        for case, how in quantized_cases()
    ]
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


def _run_call(call: Call, where: GpuCheckMachine) -> list[Finding]:
    with few_multiprocessors(where):
        case, backward = case_of(call, where)
        problem = random_problem(case)
        return _judged(problem, run(problem, where, backward), where)


def _run_case(case: Case, where: GpuCheckMachine) -> list[Finding]:
    problem = random_problem(case)
    return _judged(problem, run_kernels(problem, where), where)


def _judged(problem: Problem, results: dict, where: GpuCheckMachine) -> list[Finding]:
    welford = problem.case.statistics == "welford" or uses_welford(problem.case, where.device)
    return judge_all(problem, results, rounded_mean=welford)


def _run_quantized(quantized: tuple[Case, How], where: GpuCheckMachine) -> list[Finding]:
    case, how = quantized
    problem = random_problem(case)
    made, _ = run_8_bits(problem, how, where)
    return judge_values(problem, how, made, rounded_mean=uses_welford(case, where.device))


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="steps whose names have this text")
    parser.add_argument(
        "--part", default="1/1", help="of the steps, as 3/16: for several processes"
    )
    asked = parser.parse_args(arguments)
    part, num_parts = map(int, asked.part.split("/"))
    where = WholeUnits() if nvrtc.has_gpu() else CpuMachine()
    result, own = CheckResult(), chosen(asked.only)[part - 1 :: num_parts]
    for number, step in enumerate(own, 1):
        print(f"{number} of {len(own)}: {step.name}", flush=True)
        result.findings += step.run(where)
    print(result)
    return 0 if own and result.num_off == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
