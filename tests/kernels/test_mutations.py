"""Kernels on the CPU show bugs: for each change of a copy of the sources a check fails."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import few_cases
import kernel_paths
import numpy as np
import product_cases
import pytest
from every_matrix import (
    STEPS,
    Matrix,
    Reduced,
    judge_matrix,
    judge_reduction,
    judge_scales,
    run_matrix,
    run_reduction,
    run_scales,
)
from kernel_paths import PATHS, SMALL, Call
from mutated_machine import SEEDS, MutatedMachine, changes, copy_of_sources, mutate, sees_a_bug
from quantized_calls import How, judge_bytes, run_quantized

from cupynorm.dispatch.problem import Tile
from cupynorm.gpu.on_cpu import OnCpuError
from cupynorm.verify.cases import Case, random_problem
from cupynorm.verify.kernels import CpuMachine
from cupynorm.verify.results import CheckResult

# Lines "name | file | who sees it", then "  old  =>  new". Who: a path of kernel_paths.py, then an
# option of it, then the mean of x; or one of CHECKS. Fences and the order of release and acquire
# have no mutation, because on the CPU every thread sees a store at once.
MUTATIONS = changes(
    r"""
block sums without their barrier | reduce.cuh | block
  __syncthreads();\n      constexpr int width  =>  constexpr int width
block sums with one buffer | reduce.cuh | uncached
  buffers + turn * max_parts * num_warps;\n      turn ^= 1;  =>  buffers;
block sums without the last warp | reduce.cuh | block
  source < num_warps ?  =>  source < num_warps - 1 ?
cluster sums without their barrier | cluster_reduce.cuh | cluster
  cluster_sync();\n    const int source  =>  const int source
a shuffle that names too few lanes | reduce.cuh | lanes
  __shfl_xor_sync(0xffffffffu  =>  __shfl_xor_sync(0x7fffffffu
a cluster that does not wait for its peers to run | forward_cluster.cu | cluster
  if (!peers_run) cluster_sync();  =>
backward that does not wait for its peers to run | backward_smem.cuh | cluster, smem
  cluster_sync();  // a block may write to its peers once they run  =>
a cluster that begins at the first column | register_row.cuh | cluster
  return cols.first_col + register_col<tile>(0)  =>  return register_col<tile>(0)
a pack beyond the row that counts | statistics.cuh | lanes, single elements
  in_row ? squares : Compute(0)  =>  squares
a pack beyond the row that is written | store.cuh | lanes, single elements
  if (present) store_pack  =>  store_pack
a row of shared memory that begins a pack late | smem_row.cuh | block, smem
  f(col, values);  =>  f(col + tile.pack_size, values);
a row offset in columns | store.cuh | lanes, single elements
  y + row * y_stride + col  =>  y + row * (y_stride - 1) + col
a mean that is not corrected | statistics.cuh | block; plain; 1e4
  (value - first) * rstd + shift  =>  (value - first) * rstd
a variance from the mean of squares | statistics.cuh | block; plain; 1e3
  squares_of(centered_values)  =>  squares_of(values) - pack_size * first * first
a weight that is not applied | store.cuh | lanes
  y_values[at] * weights[at] + biases[at]  =>  y_values[at] + biases[at]
dx without the mean of wdy | backward.cuh | lanes
  ((wdy - mean_wdy) - x_hat  =>  (wdy - x_hat
parameter sums without their barrier | parameter_sums.cuh | lanes
    __syncthreads();\n  =>
sums of few rows without their barrier | backward_few_ring.cuh | few rows
    __syncthreads();\n  =>
a bundle that is waited for with one parity | bundle.cuh | bundle, 8 lanes
  slot, round)  =>  slot, 0)
a bundle that is fetched before its lanes have written | bundle.cuh | bundle, 8 lanes
  the slot is free.\n      __syncwarp();  =>  the slot is free.
a bundle without its last rows | bundle.cuh | bundle, 32 lanes
  (part_rows), left)  =>  (part_rows), left - 1)
a bundle that overwrites what is still to read | forward_bundle.cuh | bundle, a lane a row
  __syncwarp();  // all lanes have read what the results overwrite  =>
a residual that is not added | sum_load.cuh | lanes, single elements; float32 sum
  values[at] += added[at];  =>  values[at] += 0;
y again beyond the row | register_gradient.cuh | lanes, single elements; recomputed
  weights, biases, counts  =>  weights, biases, true
ring rows that are not waited for | ring.cuh | ring, a part at the end
  if (num_cols > 0) bulk_wait(barriers + of.slot, of.round);  =>
a ring that never counts its rounds | ring.cuh | cluster ring
  ++round;  =>
a ring that is copied a pack short | ring.cuh | ring, a part at the end
  return aligned ? bytes :  =>  return aligned ? bytes - 16 :
a ring that fills the slot of the next row | forward_ring.cuh | ring, a part at the end
  streams.fetch(written.slot);  =>  streams.fetch(summed.slot);
a ring that stops filling a row early | backward_ring.cuh | cluster ring
  turn + tile.stages < turns.count  =>  turn + tile.stages + 1 < turns.count
three buffers for four turns of sums | exchange.cuh | cluster ring
  num_buffers = 4;  =>  num_buffers = 3;
ring rows that exchange sums in one place | exchange.cuh | ring of 3 rows of a warp
  smem + Shape::group() * group_bytes  =>  smem
ring weights that warps share | backward_ring_inputs.cuh | ring, a part at the end
  (smem) + Shape::thread())  =>  (smem) + Shape::thread() % 32)
another largest number | float8.cuh | rows in 8 bits
  largest = 448.0f  =>  largest = 240.0f
no rule for an amax of zero | scales.cuh | blocks in 8 bits
  if (bits < 1u << 23 || bits >= infinity_bits) return 1.0f;  =>
scales in place of their inverses | quantize_store.cuh | blocks in 8 bits
  part, inverse_of(scale))  =>  part, scale)
values that are not scaled | quantize_store.cuh | rows in 8 bits
  value *= factor;  =>
a matrix whose amax nobody finds | quantize_sources.cuh | matrix
  largest.add_pack(values);  =>
sums of a matrix without the last group | reduce.cuh | sums
  from < num_groups; ++from) sum +=  =>  from < num_groups - 1; ++from) sum +=
a history that stays where it is | update_scales.cu | delayed scales
  moves ? history[(at + 1) * step]  =>  moves ? history[at * step]
a stage that is given back before it is multiplied | product_rows.cuh | product
  if (at > 0) release<cluster_size>(memory, (step - 1) %  =>
    if (at > 0) release<cluster_size>(memory, step %
sums of columns that are not there | row_statistics.cuh | product
  if (start + at * step + own < num_cols) row_sums  =>  row_sums
a lane's other row | product_rows.cuh | product
  at % 2 * 2 + col % 2]  =>  (1 - at % 2) * 2 + col % 2]
few rows that are multiplied too early | normalized_rows.cuh | product of few rows
  call); });\n    }\n    __syncthreads();  =>  call); });\n    }
the next output too early | norm_linear_few.cu | product of few rows
        const int output = units.output;\n      units.replace(at);  =>
    units.replace(at);\n      const int output = units.output;
"""
)


def in_8_bits(scaling: str, machine: CpuMachine) -> bool:
    """Seven rows, one of which is zero, on one multiprocessor."""
    how = How("float8_e4m3fn", scaling)
    case = Case("layer_norm", 7, 1024, "bfloat16", tile=Tile(8, 64, 2, exact=1), strategy="block")
    problem = random_problem(replace(case, sm_margin=1))
    problem.x[3], problem.bias[:128] = 0, 0
    return CheckResult(judge_bytes(case, how, *run_quantized(problem, how, machine))).ok


def few_rows(machine: CpuMachine) -> bool:
    case = Case("layer_norm", 3, 4096, "bfloat16")
    return not sees_a_bug(random_problem(case), machine)


def product(problem, run, excess, machine) -> bool:
    return max(excess(problem, *run(problem, machine)).values()) <= 1


def _folded(problem, machine):
    folded = product_cases.fold(problem, machine)
    grid_size = 2 + machine.seed % 2 * 6  # all tiles by one cluster, or the last ones by two
    return folded, product_cases.multiply(problem, folded, machine, grid_size=grid_size)


def _few(problem, machine):
    return (few_cases.run(problem, machine, num_sms=4),)


def right(judge, run, given, machine) -> bool:
    return CheckResult(judge(given, *run(given, machine))).ok


def delayed_scales(machine) -> bool:
    return all(CheckResult(judge_scales(*run_scales(each, machine))).ok for each in STEPS)


LONG = product_cases.draw((272, 840, 520), "bfloat16", mean=4)  # a lane can fall behind
SHORT = product_cases.draw((2, 264, 150), "bfloat16", mean=4)
CHECKS = {
    "rows in 8 bits": partial(in_8_bits, "row"),
    "blocks in 8 bits": partial(in_8_bits, "block"),
    "few rows": few_rows,
    "matrix": partial(
        right, judge_matrix, run_matrix, Matrix(130, 257, "bfloat16", "float8_e4m3fn")
    ),
    "sums": partial(
        right, judge_reduction, run_reduction, Reduced(300, 34, "bfloat16", sums="float32")
    ),
    "delayed scales": delayed_scales,
    "product": partial(product, LONG, _folded, product_cases.excess),
    "product of few rows": partial(product, SHORT, _few, few_cases.excess),
}


def is_right(who: str, machine: MutatedMachine) -> bool:
    """Whether the check, or a call of the contract, finds nothing."""
    if who in CHECKS:
        return CHECKS[who](machine)
    name, option, center = (*who.split("; "), *("plain", "0")[who.count("; ") :])
    case, backward = kernel_paths.case_of(Call(name, option, {}), machine)
    if not (case.tile and case.tile.stages) and case.strategy != "cluster":
        case = replace(case, sm_margin=1)  # of two multiprocessors: blocks work on several rows
    problem = random_problem(case)
    if float(center):  # exact in float32, so that a loss of digits shows
        problem.x = np.float64(np.float32(problem.x + float(center)))
    return not sees_a_bug(problem, machine, backward)


def finds(who: str, folder, seeds) -> bool:
    """Whether some order of threads shows a bug."""
    path = PATHS.get(who.partition(";")[0])
    is_bundle = path is not None and path.kind == "warp bundle"
    for seed in seeds:
        device = SMALL if "product" not in who else kernel_paths.H200
        try:
            if not is_right(who, MutatedMachine(folder, seed, device, apart=is_bundle)):
                return True
        except OnCpuError as error:
            assert "does not compile" not in str(error), error
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_seen(name, tmp_path):
    file, old, new, who = MUTATIONS[name]
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, file, old, new)
    assert finds(who, folder, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("who", sorted({who for *_, who in MUTATIONS.values()}))
def test_unchanged_sources_pass(who, tmp_path):
    assert not finds(who, copy_of_sources(tmp_path / "cuda_src"), range(4))
