"""norm_linear.cu and fold_weight.cu, on the CPU and on a GPU, beside float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cupynorm.reference.layer_norm import scale
from mutated_machine import copy_of_sources
from product_cases import EPS, U, draw, excess, fold, multiply, rms_errors, truth

from cupynorm import reference
from cupynorm.dispatch import product_plan as products
from cupynorm.dispatch.devices import DEVICES
from cupynorm.gpu import on_cpu
from cupynorm.gpu.on_cpu import OnCpuError
from cupynorm.verify.bounds import half_ulp

H200 = DEVICES["H200"]
RAGGED = (130, 200, 264)  # no multiple of a tile, nor of a step


def assert_right(problem, machine, **options):
    folded = fold(problem, machine)
    found = multiply(problem, folded, machine, **options)
    over = excess(problem, folded, found)
    assert max(over.values()) <= 1, over
    return found


@pytest.mark.parametrize(
    ("dtype", "centered", "mean"),
    [
        ("bfloat16", True, 0),
        ("bfloat16", True, 64),
        ("bfloat16", True, 1000),
        ("bfloat16", False, 0),
        ("float16", True, 1000),
    ],
    ids=str,
)
def test_ragged_problem(machine, dtype, centered, mean):
    """The error of y is also at most 1.1 times that of a rounded norm and a product after it."""
    problem = draw(RAGGED, dtype, centered=centered, mean=mean)
    found = assert_right(problem, machine)
    off, plain = rms_errors(problem, found.y)
    assert off <= 1.1 * plain or mean == 1000
    exact = truth(problem)
    assert np.allclose(found.rstd, exact.rstd, rtol=1e-5)


@pytest.mark.parametrize("grid_size", (None, 2))
@pytest.mark.parametrize(
    "sizes", ((1, 8, 8), (257, 64, 256), (300, 72, 528), (300, 328, 528)), ids=str
)
def test_sizes(machine, sizes, grid_size):
    """Fewer steps of columns than parts in which results are written, and more."""
    assert_right(draw(sizes, "bfloat16"), machine, grid_size=grid_size)


def test_outliers_and_constant_rows(machine):
    """A constant row is exactly y = bias of the fold, and its mean is exact."""
    problem = draw(RAGGED, "bfloat16")
    problem.x[::3, 3] = 60
    problem.x[1::3, 150] = -500
    for row, value in {5: 3.0, 6: -(2.0**-10), 7: 1000.0, 8: 0.0}.items():
        problem.x[row] = value
    found = assert_right(problem, machine)
    for row in range(5, 9):
        assert found.mean[row] == problem.x[row, 0]
        assert np.float32(found.rstd[row]) == np.float32(EPS) ** np.float32(-0.5)
        np.testing.assert_array_equal(found.y[row], found.y[8])


def test_same_bits_however_the_work_is_shared(machine):
    """Tiles that read statistics, or find them; any order of tiles, any number of blocks."""
    problem = draw((300, 136, 520), "bfloat16", mean=3)
    folded = fold(problem, machine)
    first = multiply(problem, folded, machine)
    for options in (
        {"grid_size": 2, "strips_at_a_time": 2},
        {"grid_size": 4, "strips_at_a_time": 16},
        {"cluster_size": 1, "grid_size": 3},
    ):
        again = multiply(problem, folded, machine, **options)
        for one, other in zip(first, again):
            np.testing.assert_array_equal(one, other, err_msg=str(options))


def test_rows_that_are_not_finite(machine):
    """They make their own results NaN, and no others."""
    problem = draw((40, 64, 24), "bfloat16")
    clean = assert_right(problem, machine).y
    problem.x[3, 40], problem.x[17, 0], problem.x[30, 5] = np.inf, np.nan, -np.inf
    found = multiply(problem, fold(problem, machine), machine)
    bad = [3, 17, 30]
    assert np.isnan(found.y[bad]).all() and not (found.rstd[bad] > 0).any()
    good = np.delete(np.arange(40), bad)
    np.testing.assert_array_equal(found.y[good], clean[good])


@pytest.mark.parametrize(
    ("centered", "zero_centered", "absent"),
    [(True, True, ()), (False, False, ("norm_bias",)), (True, False, ("norm_weight", "bias"))],
    ids=str,
)
def test_fold(machine, centered, zero_centered, absent):
    """A rounding of the exact fold; sums of the rounded rows; the bias."""
    problem = draw((1, 328, 11), "bfloat16", centered=centered)
    problem = replace(problem, zero_centered=zero_centered, **dict.fromkeys(absent))
    folded = fold(problem, machine)
    exact = reference.fold(
        problem.norm_weight,
        problem.norm_bias,
        problem.weight,
        problem.bias,
        centered=centered,
        zero_centered_weight=zero_centered,
    )
    n = problem.weight.shape[1]
    size = np.abs(problem.weight * scale(problem.norm_weight, zero_centered))
    before = 4 * U * size + centered * (n + 2) * U * size.mean(1, keepdims=True)
    allowed = before + half_ulp(np.abs(exact.weight) + before, "bfloat16")
    assert (np.abs(folded.weight - exact.weight) <= allowed).all()
    sums = folded.weight.sum(1) if centered else np.zeros(len(folded.weight))
    assert (np.abs(folded.sums - sums) <= (n + 2) * U * np.abs(folded.weight).sum(1)).all()
    added = 0.0 if problem.norm_bias is None else np.abs(problem.weight) @ np.abs(problem.norm_bias)
    own = 0.0 if problem.bias is None else np.abs(problem.bias)
    assert (np.abs(folded.bias - exact.bias) <= (n + 3) * U * (added + own)).all()


def test_plan_and_kernel_agree_on_shared_memory(tmp_path):
    folder = copy_of_sources(tmp_path / "cuda_src")
    (folder / "says.cu").write_text(
        '#include "product_tiles.cuh"\n'
        "template <int bytes>\n"
        "__global__ void says(const TensorMap) {\n"
        "  static_assert(sizeof(ProductMemory) == bytes);\n"
        "  __syncthreads();\n"
        "}\n"
    )
    on_cpu.kernel("says.cu", f"says<{products.SMEM_BYTES}>", folder=folder)
    assert products.SMEM_BYTES <= H200.smem_per_block
    with pytest.raises(OnCpuError, match="static assertion|static_assert"):
        on_cpu.kernel("says.cu", f"says<{products.SMEM_BYTES + 8}>", folder=folder)
