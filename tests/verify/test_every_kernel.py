"""every_kernel.py, which runs under compute-sanitizer: it covers all kernels and finds errors."""

from __future__ import annotations

import numpy as np
import pytest
from every_kernel import steps
from every_matrix import (
    STEPS,
    judge_matrix,
    judge_reduction,
    judge_scales,
    matrices,
    reductions,
    run_matrix,
    run_reduction,
    run_scales,
)
from every_product import judge_product, products, run_product
from every_quantized import E4M3, quantized_cases, run_quantized
from quantized_calls import How, judge_bytes, judge_values, run_8_bits
from repository_files import KERNELS

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.problem import SCALINGS
from cupynorm.verify.cases import Case, random_problem
from cupynorm.verify.kernels import CpuMachine


@pytest.mark.slow
@pytest.mark.parametrize("num_cols", [128, 256, 640])
def test_no_block_of_a_scale_is_split_within_a_cluster(num_cols):
    """A float64 row whose slices are whole and end inside a block of 128 columns."""
    case = Case("rms_norm", 5, num_cols, "float64", strategy="cluster")
    for seed in (1, 2, 3):  # the order of threads decides which of two scales is left
        got, plain = run_quantized(case, How(E4M3, "block"), CpuMachine(seed=seed))
        findings = judge_bytes(case, How(E4M3, "block"), got, plain)
        assert len(findings) == 3 and all(found.ok for found in findings), findings


def spoilt(got: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The results with a bit of the last byte of one of them changed."""
    got = {key: each.copy() for key, each in got.items()}
    got[name].view(np.uint8).reshape(-1)[-1] ^= 8
    return got


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_wrong_byte_of_8_bits_is_found(scaling):
    is_given = scaling == "given"
    case, quantization = next(
        each
        for each in quantized_cases()
        if each[1][1] == scaling and bool(each[1].amax) == is_given
    )
    got, plain = run_quantized(case, quantization, CpuMachine())
    findings = judge_bytes(case, quantization, got, plain)
    names = [found.tensor for found in findings]
    assert names == ["y", "scale_inv", "mean", "rstd"] + ["amax"] * is_given
    problem = random_problem(case)
    roughly = judge_values(problem, quantization, got)
    assert {found.tensor for found in roughly} == set(names)
    assert all(found.ok for found in (*findings, *roughly))
    for name in names:
        wrong = spoilt(got, name)
        (off,) = (each for each in judge_bytes(case, quantization, wrong, plain) if not each.ok)
        assert (off.tensor, off.num_off, off.error) == (name, 1, float("inf"))
        assert off.where == tuple(extent - 1 for extent in got[name].shape)
        off = [each for each in judge_values(problem, quantization, wrong) if not each.ok]
        assert name in [each.tensor for each in off]


@pytest.mark.parametrize("how", [How("float8_e5m2", "row"), How(E4M3, "block"), How(E4M3, "given")])
def test_what_is_next_to_a_right_byte_is_wrong(how):
    """NaN is right where float64 has it, and the largest number where a given scale makes it too
    large."""
    problem = random_problem(Case("rms_norm", 4, 96, "float32"))
    problem.weight[3:6] *= 512.0
    problem.x[1, 7], problem.x[2, 5] = np.nan, np.inf
    problem.x[3] *= 2.0**-30  # its mean square is far below eps
    got, _ = run_8_bits(problem, how, CpuMachine())
    (y,) = [found for found in judge_values(problem, how, got) if found.tensor == "y"]
    assert y.ok
    for step in (-1, 1):
        off = got | {"y": (got["y"].view(np.int8) + step).view(np.uint8)}
        (y,) = [found for found in judge_values(problem, how, off) if found.tensor == "y"]
        # Beside a NaN may be another. A row has one, and so has the element of infinity.
        assert y.num_off > 0.98 * (got["y"].size - 97)


@pytest.mark.parametrize(
    "matrix",
    [
        matrices()[4],
        matrices()[-4],
        matrices()[-1],
        *(each for each in matrices() if each.scaling == "tensor" or each.x == each.y),
    ],
    ids=str,
)
def test_a_wrong_byte_of_a_matrix_is_found(matrix):
    got, given = run_matrix(matrix, CpuMachine())
    findings = judge_matrix(matrix, got, given)
    assert findings and all(found.ok for found in findings)
    for name in got:
        if name != "amax" or not matrix.norm:
            assert not all(found.ok for found in judge_matrix(matrix, spoilt(got, name), given)), (
                name
            )


@pytest.mark.parametrize("reduction", reductions(), ids=str)
def test_a_wrong_reduction_is_found(reduction):
    got, given = run_reduction(reduction, CpuMachine())
    assert all(found.ok for found in judge_reduction(reduction, got, given))
    for name in got:
        off = {name: np.full_like(got[name], 3e4)}
        assert not all(found.ok for found in judge_reduction(reduction, off, given))


@pytest.mark.parametrize("num_steps", STEPS)
def test_a_wrong_scale_is_found(num_steps):
    got, given = run_scales(num_steps, CpuMachine())
    assert all(found.ok for found in judge_scales(got, given))
    assert (got["scale"] != given["scale"]).sum() >= 2 and (
        got["scale"] == given["scale"]
    ).sum() >= 2
    for name in got:
        assert not all(found.ok for found in judge_scales(spoilt(got, name), given)), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folded", "few", "few, residual"])
def test_a_wrong_product_is_found(kind):
    product = next(each for each in products() if each.kind == kind)
    problem, folded, found = run_product(product, CpuMachine())
    assert all(each.ok for each in judge_product(product, problem, folded, found))
    for name in found._fields:
        off = found._replace(**{name: 0.5 * getattr(found, name)})
        assert not all(each.ok for each in judge_product(product, problem, folded, off)), name


@pytest.mark.slow
def test_every_source_is_run():
    """Those of functors are a user's own."""

    reached = set()

    class Recorder(CpuMachine):
        runs = True

        def launch(self, launch, words) -> None:
            reached.add(launch.kernel.source)
            if self.runs:
                super().launch(launch, words)

    recorder = Recorder(DEVICES["H200"])
    for step in steps():
        # Some steps compare with what was computed.
        recorder.runs = any(each in step.name for each in ("_run_shared", "few, res"))
        step.run(recorder)
    assert reached == {path.name for path in KERNELS} - {"apply_functor.cu"}
