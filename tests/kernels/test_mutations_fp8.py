"""As test_mutations.py for 8-bit results: a bug in the sources makes a check fail."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
from every_matrix import STEPS, judge_scales, run_scales
from mutated_machine import ROOT, changes, copy_of_sources, mutate

import cupynorm
from cupynorm import Launch
from cupynorm.check import kernels as check_kernels
from cupynorm.check.kernels import CpuMachine
from cupynorm.gpu import on_cpu
from cupynorm.gpu.on_cpu import OnCpuError
from cupynorm.norm import prepared
from cupynorm.plan.devices import DEVICES

torch = pytest.importorskip("torch")
import float8_bytes as bytes_of  # noqa: E402  (imports torch)
import test_fp8 as of_recipes  # noqa: E402
import test_quantize_options as of_options  # noqa: E402
import test_quantized as of_rows  # noqa: E402
import test_quantized_matrices as of_quantized  # noqa: E402
import test_reduce_matrix as of_matrices  # noqa: E402

IN_REGISTERS = cupynorm.Tile(8, 64, 2, exact=1)
FETCHING_AHEAD = cupynorm.Tile(8, 64, 2, blocks_per_sm=2, exact=1)
IN_A_RING = cupynorm.Tile(8, 64, 2, exact=1, stages=2)


def rows(scaling: str, tile: cupynorm.Tile = IN_REGISTERS, **options) -> None:
    """Seven rows of LayerNorm, one of which is zero, on one multiprocessor."""
    x, weight, bias = (
        bytes_of.random(*shape, 1024, dtype=torch.bfloat16, seed=at)
        for at, shape in enumerate([(7,), (), ()])
    )
    x[3] = 0
    bias[:128] = 0
    options["launch"] = Launch("block", tile, sm_margin=DEVICES["H200"].num_sms - 1)
    bytes_of.assert_exact("layer_norm", x, scaling, weight=weight, bias=bias, **options)


def delayed_scales() -> None:
    for num_steps in STEPS:
        findings = judge_scales(*run_scales(num_steps, CpuMachine()))
        assert all(found.ok for found in findings), findings


CHECKS = {
    "delayed scales": delayed_scales,
    **{scaling: partial(rows, scaling) for scaling in bytes_of.SCALES},
    "scale_inv": partial(of_options.test_scale_inv_divides_y_and_is_returned_to_the_bit, "cpu"),
    "bound": partial(of_options.test_a_bound_clamps_the_amax, "row", "cpu"),
    "packed": partial(of_options.test_layouts_hold_the_same_scales, (6,), "block", 128, "cpu"),
    "int8": partial(of_options.test_int8_rounds_half_to_even_and_saturates, "cpu"),
    "functor": partial(
        of_options.test_scales_are_those_of_what_functors_make, "block", "row", "cpu"
    ),
    "powers of two": partial(rows, "row", power_of_two=True),
    "ring": partial(rows, "row", IN_A_RING),
    "ahead": partial(rows, "row", FETCHING_AHEAD),
    "shared out": partial(
        of_rows.test_bytes_of_rows_left_to_later_blocks, *of_rows.SHARED_OUT["ahead"], "cpu"
    ),
    "matrix": partial(
        of_quantized.test_bytes_of_a_matrix_and_its_transposed_copy,
        (130, 257),
        torch.bfloat16,
        "cpu",
    ),
    "own amax": partial(
        of_recipes.test_a_matrix_by_the_scale_of_its_own_amax,
        torch.bfloat16,
        3.0,
        of_recipes.quantization.Rule(),
        "cpu",
    ),
    "small numbers": partial(
        of_quantized.test_bytes_of_a_matrix_of_denormal_numbers, torch.bfloat16, "cpu"
    ),
    "amax of a matrix": partial(
        of_matrices.test_the_largest_magnitude_is_exact, "bfloat16", (300, 34), "cpu"
    ),
    "sums of a matrix": partial(
        of_matrices.test_sums_over_rows_are_within_bounds_and_repeat,
        "bfloat16",
        "float32",
        (300, 34),
        "cpu",
    ),
    "sums of many rows": partial(
        of_matrices.test_sums_over_rows_are_within_bounds_and_repeat,
        "float32",
        "float32",
        (210_000, 1),
        "cpu",
    ),
    "sums": partial(
        of_quantized.test_sums_over_rows_are_within_bounds_and_leave_the_bytes,
        "bfloat16",
        "bfloat16",
        (300, 34),
        "cpu",
    ),
}

# name | file | who sees it
MUTATIONS = changes(
    r"""
another largest number | float8.cuh | row
  largest = 448.0f  =>  largest = 240.0f
a sign that counts | amax.cuh | row
  negative & 0x7fffffffu  =>  negative
positive values that are not compared | amax.cuh | row
  positive = max(positive, __float_as_int(values[at]));  =>
no rule for an amax of zero | scales.cuh | block
  if (bits < 1u << 23 || bits >= infinity_bits) return 1.0f;  =>
scales that are no powers of two | scales.cuh | powers of two
  power_of_two ? scale & infinity_bits : scale  =>  scale
an amax that is not raised | amax.cuh | given
  magnitude > __ldcg(amax)  =>  false
lanes that keep the wrong half | row_scales.cuh | block
  values[at].add(upper ? others : mine);  =>  values[at].add(mine);
scales of the wrong lane | row_scales.cuh | block
  index / own * holders, lanes)  =>  0, lanes)
scales in place of their inverses | quantize_scales.cuh | block
  part, inverse_of(scale))  =>  part, scale)
a scale_inv that multiplies | scales.cuh | scale_inv
  divides ? quick_inverse_of(*given) : *given  =>  *given
a bound that bounds nothing | scales.cuh | bound
  min(max(amax_bits, static_cast<unsigned>(smallest)), static_cast<unsigned>(upper))  =>  amax_bits
exponents beyond the last block that are not written | scales.cuh | packed
  if (part + 1 == parts)  =>  if (false)
integers that wrap | float8.cuh | int8
  min(max(integer_of(values[at]), -128), 127)  =>  integer_of(values[at])
a functor that is left out | forward.cuh | functor
  if (present) store.functor.apply  =>  if (false) store.functor.apply
values that are not scaled | quantize_store.cuh | row
  value *= factor;  =>
no scale of the tensor | quantize_scales.cuh | tensor
  carried.factor = rule.scale_of(*amax, largest_finite);  =>
the largest of a lane, not of its warp | forward_ring_scaled.cuh | ring
  warp_reduce<32>(kept_row.scales.largest())  =>  kept_row.scales.largest()
y left in the next row's place | forward_ring_scaled.cuh | ring
  write_previous(turn - 1, row - turns.step)  =>  write_previous(turn - 1, row)
largest magnitudes that are not waited for | forward_ring_scaled.cuh | ring
  largests.wait(turn, Shape::thread() == 0);  =>
the same row fetched again | forward_block.cu | ahead
  min(row + turns.step, call.num_rows - 1)  =>  0
a next row that another block has | forward_block.cu | ahead
  row + turns.step, call.num_rows  =>  row + 1, call.num_rows
a last row that first blocks leave out | tile.cuh | shared out
  min(shared_out, num_rows)  =>  min(shared_out - 1, num_rows)
later blocks that begin a row late | tile.cuh | shared out
  (is_first ? 0 : shared_out)  =>  (is_first ? 0 : shared_out + 1)
later blocks that leave rows out | tile.cuh | shared out
  num_blocks - num_first)  =>  num_blocks)
numbers below 2^-126 that are flushed | quantize_sources.cuh | small numbers
  times_large(values[at], factor)  =>  values[at] * factor * 0.0f
a matrix whose amax nobody finds | quantize_sources.cuh | matrix
  largest.add_pack(values);  =>
a matrix whose own amax makes no scale | quantize_sources.cuh | own amax
  rule.scale_of(*amax, FormatOf<Y>::largest)  =>  1.0f
sums that leave the last group of threads out | reduce.cuh | sums
  from < num_groups; ++from) sum +=  =>  from < num_groups - 1; ++from) sum +=
a tensor whose step ends though it was not used | update_scales.cu | delayed scales
  if ((latest & 0x7fffffffu) == 0) return;  =>
an amax of NaN that counts | update_scales.cu | delayed scales
  if (bits <= infinity_bits) amax  =>  amax
an infinite amax that makes a scale | update_scales.cu | delayed scales
  recent > 0 && recent < infinity_bits  =>  recent > 0
a margin that is forgotten | update_scales.cu | delayed scales
  (call.largest[blockIdx.x]) * call.factor  =>  (call.largest[blockIdx.x])
a history that stays where it is | update_scales.cu | delayed scales
  moves ? history[(at + 1) * step]  =>  moves ? history[at * step]
an amax that is not cleared | update_scales.cu | delayed scales
  at == 0 ? 0 : next  =>  next
the first steps of a long history alone | update_scales.cu | delayed scales
  first < num_steps; first += tile.block_size()  =>  first < min(num_steps, 1ll); first += num_steps
rows that are left out | reduce_matrix.cu | sums of many rows
  row += Rows::step  =>  row += 9 * Rows::num_groups
rows of the next slab, too | reduce_matrix.cu | sums of a matrix
  first_row + rows_of_slab  =>  first_row + 2 * rows_of_slab
a matrix without its last slab | reduce_matrix.cu | amax of a matrix
  row < slab.end_row; row  =>  row < slab.end_row && slab.end_row < call.num_rows; row
"""
)


@pytest.fixture
def with_sources(kernels, monkeypatch):
    """Runs a check by kernels of a folder."""

    def run(folder, check) -> None:
        def compiled(kernel, sanitize, _):
            names = kernel.source, kernel.name_expression
            return on_cpu.kernel(*names, functors=kernel.functors, folder=folder)

        monkeypatch.setattr(check_kernels, "cpu_kernel", compiled)
        prepared.forget()
        try:
            check()
        finally:
            prepared.forget()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_seen(name, tmp_path, with_sources):
    file, old, new, check = MUTATIONS[name]
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, file, old, new)
    with pytest.raises((AssertionError, OnCpuError)) as seen:
        with_sources(folder, CHECKS[check])
    assert "does not compile" not in str(seen.value)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_unchanged_sources_pass(check, tmp_path, with_sources):
    with_sources(copy_of_sources(tmp_path / "cuda_src"), CHECKS[check])


# Sanitizers: every fourth case, every tenth where cores are few, because each one is compiled.

STEP = 4 if os.cpu_count() >= 8 else 10
SANITIZED = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "tests")]!r}
import numpy as np
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.quantized import QuantizeOptions, quantize_call
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.results import CheckResult
from every_matrix import (
    judge_matrix, judge_scales, judge_reduction, matrices, reductions,
    run_matrix, run_scales, run_reduction,
)
from quantized_calls import judge_bytes
from every_quantized import E4M3, Kept, quantized_cases, run_quantized

machine = CpuMachine(sanitize=("address", "undefined"))
findings = []
by_kernel = {{
    (case.strategy, case.tile, how.scaling): (case, how) for case, how in quantized_cases()
}}
for case, how in [by_kernel[each] for each in sorted(by_kernel, key=str)][::{STEP}]:
    findings += judge_bytes(case, how, *run_quantized(case, how, machine))
for matrix in matrices()[::{STEP}]:
    findings += judge_matrix(matrix, *run_matrix(matrix, machine))
for reduction in reductions()[::{STEP}]:
    findings += judge_reduction(reduction, *run_reduction(reduction, machine))
findings += judge_scales(*run_scales(2, machine))
# largest / amax, beyond what a float's exponent holds.
for amax in (2e-38, 3e38):
    kept = Kept(machine)
    x = kept.put("x", np.full((4, 64), amax, np.float32))
    of_amax = kept.put("amax", np.full(1, amax, np.float32))
    scale_inv = kept.poisoned("scale_inv", (1,), "float32")
    data = kept.poisoned("data", (4, 64), "uint8")
    transposed = kept.poisoned("transposed", (64, 4), "uint8")
    options = QuantizeOptions(E4M3, rule=(0.0, False))
    call = quantize_call({{"x": Rows(x, 4, 64, 64, "float32")}}, options)
    given = {{"x": x, "data": data, "transposed": transposed}}
    given |= {{"scale_inv": scale_inv, "amax": of_amax}}
    for launch, words in zip(call.launches, call.fill(given)):
        machine.launch(launch, words)
    largest = np.float32(448) / np.float32(amax) if amax > 1e-30 else np.finfo(np.float32).max
    assert kept.get("scale_inv")[0] == np.float32(1 / np.float64(largest)), kept.get("scale_inv")
assert CheckResult(findings).ok, CheckResult(findings)
print(len(findings) > 20)
"""


@pytest.mark.slow
def test_kernels_of_8_bits_pass_the_sanitizers():
    try:
        environment = on_cpu.sanitized_environment()
    except on_cpu.NoCompilerError as error:
        pytest.skip(str(error))
    result = subprocess.run(
        [sys.executable, "-c", SANITIZED], env=environment, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr[-4000:]
