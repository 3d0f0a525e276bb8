"""Reductions of a matrix: sums over rows against float64, and largest magnitudes to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.grids import reduce_matrix_launch
from cupynorm.dtypes import DTYPES

torch = pytest.importorskip("torch")
from float8_bytes import assert_sums, numpy, random  # noqa: E402

from cupynorm.linear import operands  # noqa: E402
from cupynorm.nn import quantization  # noqa: E402
from cupynorm.norm import quantized  # noqa: E402

SHAPES = [(1, 1), (128, 128), (130, 257), (1000, 72), (300, 34), (210_000, 1), (0, 8), (5, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype, sums",
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_sums_over_rows_are_within_bounds_and_repeat(dtype, sums, shape, device):
    """They repeat to the bit, and err by their additions and one rounding."""
    x = random(*shape, dtype=getattr(torch, dtype), device=device) + 0.25
    made = quantized.sum_rows(x, sums)
    assert made.dtype == getattr(torch, sums) and tuple(made.shape) == shape[1:]
    assert torch.equal(made, quantized.sum_rows(x, sums))
    _, num_slabs, rows_of_slab = reduce_matrix_launch(DEVICES["H200"], *shape, dtype, 8, sums)
    assert_sums(x, made, min(rows_of_slab, shape[0]) + num_slabs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_largest_magnitude_is_exact(dtype, shape, device):
    x = random(*shape, dtype=getattr(torch, dtype), device=device)
    for value in (None, -7.0, 2.0**-140, float("-inf"), float("nan")):
        if value is not None and x.numel():
            x[-1, -1] = value
        found, expected = (
            quantized.amax(x),
            x.abs().amax().float() if x.numel() else torch.zeros(()),
        )
        assert found.dtype == torch.float32 and found.shape == (1,)
        assert np.array_equal(numpy(found)[0], numpy(expected), equal_nan=True)


def test_the_largest_magnitude_of_denormal_numbers_is_exact(device):
    """The kernels flush denormals where they compare floats."""
    x = (random(40, 136, dtype=torch.float64) * 2e-39).to(torch.bfloat16)
    assert 0 < quantized.amax(x.to(device)).item() == x.abs().max().item() < 2.0**-126


def test_views_give_the_results_of_contiguous_matrices(device):
    """Rows with gaps are read in place. A transposed matrix is copied or left to torch."""
    x = random(70, 48, dtype=torch.float32, device=device)
    for view in (x[:, :40], x[::2], x[:, 1:34], x.t(), x[0].expand(50, 48)):
        expected = view.double().sum(0)
        allowed = len(view) * 2.0**-24 * view.double().abs().sum(0)  # each addition rounds
        for made in (quantized.sum_rows(view, "float32"), operands.sum_rows(view, torch.float32)):
            assert made.dtype == torch.float32
            assert ((made.double() - expected).abs() <= allowed).all()
        assert quantized.amax(view).item() == view.abs().max().item()


def test_amax_of_a_matrix_is_one_launch_and_amax_of_rows_is_torch_s(kernels):
    x = random(30, 40, dtype=torch.bfloat16)
    kernels.clear()
    assert (
        quantization.amax_of(x).shape == ()
        and quantization.amax_of(x).item() == x.abs().max().item()
    )
    assert [launch.kernel.source for launch in kernels] == ["reduce_matrix.cu"] * 2
    assert torch.equal(quantization.amax_of(x, 1), x.abs().amax(1).float()) and len(kernels) == 2
