"""Bugs in the kernels of rows that ranks share are seen by the checks of every_split.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from every_split import Shared, run_shared
from mutated_machine import changes, copy_of_sources, mutate

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.gpu.on_cpu import OnCpuError

SMALL = Shared(Case("layer_norm", 10, 10, "float32"), 4)

MUTATIONS = changes(
    r"""
means of ranks that are not compared | split_normalize.cu
  count_of(rank) * apart * apart  =>  0
a mean without the digits that rounding left out | split_normalize.cu
  part(rank, 0, row) - origin + part(rank, 1, row)  =>  part(rank, 0, row) - origin
ranks that count alike | split_normalize.cu
  max(min(cols_of_row - rank * cols_of_rank, cols_of_rank), 0LL)  =>  cols_of_rank
statistics saved without the rest | split_rows.cuh
  of_rows[num_rows + row] = rest  =>  of_rows[num_rows + row] = 0
sums of packs beyond the row | split_sums.cu
  in_row ? rounded_product(dys[at], weights[at]) : Compute(0)  =>
    rounded_product(dys[at], weights[at])
a slab without its last row | split_gradients.cu
  own >= slab.end_row  =>  own + 1 >= slab.end_row
means over one rank's columns | split_gradients.cu
  static_cast<Compute>(cols_of_row)  =>  static_cast<Compute>(num_cols)
sums that are overwritten before they are read | split_gradients.cu
  __syncthreads();  // before of_groups is used again  =>
"""
)


def check(folder: Path) -> None:
    """Raises AssertionError for a wrong result. Rows have a mean of 1000 deviations."""
    problem = random_problem(SMALL.case)
    problem.x[:] = (problem.x + 1000.0).astype("float32")
    for seed in range(4):  # orders of threads
        results = run_shared(problem, SMALL.num_ranks, CpuMachine(seed=seed, folder=folder))
        found = CheckResult(judge_all(problem, results))
        assert found, found


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_seen(name, tmp_path):
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, *MUTATIONS[name])
    with pytest.raises((AssertionError, OnCpuError)) as seen:
        check(folder)
    assert "does not compile" not in str(seen.value)


def test_unchanged_sources_pass(tmp_path):
    check(copy_of_sources(tmp_path / "cuda_src"))
