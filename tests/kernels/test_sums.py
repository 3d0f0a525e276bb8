"""Kernels that normalize a sum with a residual."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import check, forward_problem, norm_and_cols
from kernel_rings import rows_of_turns

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.plan import dispatch
from cupynorm.plan.problem import Layout, Tile
from cupynorm.plan.strategies import STRATEGIES


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_residual(strategy, dtype, where):
    # Packs or single elements and one of the norms by turns.
    turn = (list(STRATEGIES).index(strategy) + list(DTYPES).index(dtype)) % 2
    name, num_cols = (("layer_norm", 120), ("rms_norm", 77))[turn]
    case = Case(name, 4, num_cols, dtype, strategy=strategy, residual=True)
    problem = random_problem(case)
    fused = check(case, where)
    # The same bits as normalizing the sum that it returns.
    tile = dispatch.choose(forward_problem(case), where.device, strategy).tile
    alone = replace(
        problem, case=replace(case, residual=False, tile=tile), x=fused["sum"], residual=None
    )
    assert run_kernels(alone, where)["y"].tobytes() == fused["y"].tobytes()


# The sum has its own dtype.
SUMS = {
    "float32 stream": ("bfloat16", {"residual": "float32", "dsum": True}),
    "narrower stream": ("float32", {"residual": "bfloat16", "dsum": True}),
    "float64 stream": ("float32", {"residual": "float64", "weight": "float32"}),
    "input of float64": ("float64", {"residual": "float32"}),
    "everything": (
        "bfloat16",
        {
            "residual": "float32",
            "dsum": True,
            "weight": "float32",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", SUMS)
def test_sum_of_another_dtype(what, strategy, where):
    dtype, options = SUMS[what]
    name, num_cols = norm_and_cols(SUMS, what, strategy)
    results = check(Case(name, 4, num_cols, dtype, strategy=strategy, **options), where)
    assert "sum" in results and ("dresidual" in results) == ("residual" in options)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["float32 stream", "everything"])
@pytest.mark.parametrize(
    "strategy, num_cols, tile",
    [
        ("warp", 64, Tile(2, 4, packs_per_thread=8, rows_per_block=8)),
        ("block", 1000, Tile(8, 64, packs_per_thread=2)),
        ("cluster", 1000, Tile(8, 32, cluster_size=4)),
        ("cluster", 999, Tile(1, 96, cluster_size=2)),
        ("uncached", 1000, Tile(2, 96)),
    ],
)
def test_sum_of_another_dtype_with_explicit_tiles(
    strategy, num_cols, tile, what, where, tile_of_backward
):
    dtype, options = SUMS[what]
    plans = tile_of_backward(tile)
    results = check(
        Case("layer_norm", 9, num_cols, dtype, strategy=strategy, tile=tile, **options), where
    )
    assert plans[-1].tile == tile and np.isfinite(results["dresidual"]).all()


def test_sum_of_another_dtype_in_the_shared_memory_of_a_block(where):
    dtype, options = SUMS["everything"]
    for num_cols, tile in ((1000, Tile(8, 128)), (1001, Tile(1, 96))):
        check(Case("layer_norm", 4, num_cols, dtype, strategy="block", tile=tile, **options), where)


@pytest.mark.parametrize(
    "num_cols, tile",
    [(1000, Tile(4, 64, 4, stages=2)), (1000, Tile(4, 32, 4, cluster_size=2, stages=3))],
)
def test_ring_splits_the_gradient_of_a_sum(num_cols, tile, small, tile_of_backward):
    """A ring fetches x and dsum as float32 beside dy. It refuses an input of another dtype."""
    plans = tile_of_backward(tile)
    dtype, options = SUMS["float32 stream"]
    strategy = "cluster" if tile.cluster_size > 1 else "block"
    check(
        Case(
            "layer_norm",
            rows_of_turns(small, tile, 4),
            num_cols,
            dtype,
            strategy=strategy,
            **options,
        ),
        small,
    )
    assert plans[-1].tile == tile and "SplitStore" in plans[-1].launches[0].kernel.name_expression
    for problem in (replace(plans[0].problem, layout=Layout(4, contiguous=True)),):
        with pytest.raises(
            ValueError,
            match="a ring needs .* no residual of another dtype, and no functor that acts on x",
        ):
            dispatch.choose(problem, small.device, strategy, tile)
