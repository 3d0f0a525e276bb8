"""The activations of a model that come with the package."""

import numpy as np
import pytest

from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.verify.activations import shipped


def test_shipped_activations_have_outliers_and_a_tiny_weight():
    (layer,) = shipped()
    assert layer.x.shape == layer.dy.shape == (1, 384)
    assert layer.weight.shape == layer.bias.shape == (384,) and layer.eps == 1e-12
    deviations = (layer.x - layer.x.mean(1, keepdims=True)) / layer.x.std(1, keepdims=True)
    assert np.abs(deviations).max() > 15  # unlike in random numbers
    assert 0 < np.abs(layer.weight).min() < 1e-32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_problem_is_representable_in_its_dtype(dtype):
    layer = shipped()[0]
    problem = layer.problem("rms_norm", dtype)
    assert (problem.case.norm, problem.case.x, problem.case.eps) == ("rms_norm", dtype, 1e-12)
    limits = {"rtol": DTYPES[dtype].half_ulp, "atol": DTYPES[dtype].smallest}
    for name in ("x", "dy", "weight"):
        values = getattr(problem, name)
        assert np.array_equal(decode(encode(values, dtype), dtype), values)
        assert np.allclose(values, getattr(layer, name), **limits)
