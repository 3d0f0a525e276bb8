"""Constant rows on every path of every strategy: y is exactly the bias, whatever the value."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import decode, encode
from cupynorm.plan.plans import plan
from cupynorm.plan.problem import Tile
from cupynorm.plan.strategies import STATISTICS

# strategy, path, columns, dtype, and the tile where dispatch does not choose that path. In those of
# 3515 and 7003 columns the sum of equal values is rounded most.
CASES = [
    ("warp", "registers", 500, "float32", None),
    ("warp", "bundle", 511, "bfloat16", None),
    ("block", "registers", 1001, "float32", None),
    ("block", "registers", 3515, "float32", Tile(1, 224, 16, blocks_per_sm=2)),
    ("block", "ring", 1023, "bfloat16", None),
    ("block", "smem", 4096, "bfloat16", Tile(8, 64)),
    ("block", "smem", 7003, "float32", Tile(1, 64)),
    ("cluster", "registers", 1000, "float64", None),
    ("cluster", "ring", 1000, "float32", None),
    ("cluster", "smem", 7003, "float32", Tile(1, 64, cluster_size=2)),
    ("uncached", "uncached", 1001, "float32", None),
]


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy, path, num_cols, dtype, tile", CASES)
def test_y_is_the_bias_on_each_path(strategy, path, num_cols, dtype, tile, statistics):
    options = {"strategy": strategy, "tile": tile, "statistics": statistics}
    case = Case("layer_norm", 24, num_cols, dtype, **options)
    of_path = plan(num_cols, dtype=dtype, device="H200", **options).tile
    assert of_path.of_strategy(strategy).path == path
    generator = np.random.default_rng(0)
    constants = generator.uniform(-1, 1, (24, 1)) * 10 ** generator.uniform(-4, 12, (24, 1))
    constants[0] = 1e9
    problem = random_problem(case)
    problem.x = decode(encode(np.broadcast_to(constants, problem.x.shape), dtype), dtype)
    problem.bias[::2] = 0.0  # where the last digits of an x_hat that is not 0 would show
    results = run_kernels(problem, CpuMachine())
    np.testing.assert_array_equal(results["y"], np.broadcast_to(problem.bias, problem.x.shape))
    np.testing.assert_array_equal(results["mean"], problem.x[:, 0])
    np.testing.assert_allclose(results["rstd"], case.eps**-0.5, rtol=2.0**-21)
    assert (results["dweight"] == 0).all() and np.isfinite(results["dx"]).all()
