"""out that is the input, and a sum that is the residual, on every path of forward: the bits of a
call with memory of its own, and no stray writes."""

from __future__ import annotations

import numpy as np
import pytest
from laid_out import as_numpy, lay_out

import cupynorm
from cupynorm import Launch, Tile
from cupynorm.norm import prepared
from cupynorm.plan.strategies import STRATEGIES

NUM_ROWS = 70
# num_cols, dtype, how it is launched, and the path that it takes.
PATHS = {
    "bundle of a lane": (3, "float16", None, "bundle"),
    "bundle of two lanes": (65, "float32", None, "bundle"),
    "bundle of eight lanes": (127, "float16", None, "bundle"),
    "bundle of a warp": (641, "float16", None, "bundle"),
    "lanes": (40, "float32", Launch("warp", Tile(4, 4, 3, 16)), "registers"),
    "warp": (500, "float32", Launch("warp", Tile(4, 32, 4, 8)), "registers"),
    "warp of single elements": (127, "float16", Launch("warp", Tile(1, 32, 4, 3)), "registers"),
    "block": (1000, "float32", Launch("block", Tile(4, 96, 3)), "registers"),
    "block, smem": (1000, "float16", Launch("block", Tile(8, 64)), "smem"),
    "block, ring": (
        1000,
        "float32",
        Launch("block", Tile(4, 64, 4, stages=2)),
        "ring",
    ),
    "block, ring of single elements": (
        513,
        "float16",
        Launch("block", Tile(1, 64, 9, stages=3)),
        "ring",
    ),
    "block, ring of rows": (
        440,
        "float32",
        Launch("block", Tile(4, 64, 2, rows_per_block=3, stages=2)),
        "ring",
    ),
    "cluster": (1000, "float32", Launch("cluster", Tile(4, 32, 2, cluster_size=4)), "registers"),
    "cluster, smem": (264, "float32", Launch("cluster", Tile(4, 32, cluster_size=4)), "smem"),
    "cluster, ring": (
        840,
        "float32",
        Launch("cluster", Tile(4, 64, 1, cluster_size=4, stages=3)),
        "ring",
    ),
    "uncached": (515, "float16", Launch("uncached"), "uncached"),
    "uncached, three passes": (
        516,
        "float32",
        Launch("uncached", statistics="two_pass"),
        "uncached",
    ),
}


@pytest.mark.parametrize("added", ["nothing", "residual", "residual alone", "input alone"])
@pytest.mark.parametrize("name", PATHS)
def test_a_call_in_place_has_the_bits_of_a_call_that_is_not(name, added, library):
    """residual alone: only the sum is in place; input alone: only y is, beside a new sum."""
    num_cols, dtype, launch, path = PATHS[name]
    is_aligned = launch is None or launch.tile is None or launch.tile.pack_size == 1
    generator = np.random.default_rng(num_cols)
    rows = generator.standard_normal((2, NUM_ROWS, num_cols)).astype(dtype)
    weight, bias = map(library.asarray, generator.standard_normal((2, num_cols)).astype(dtype))
    options = {"launch": launch, "return_residual": added != "nothing"}
    for layout in ("contiguous", "gap", *["misaligned", "reversed"] * is_aligned):
        x, residual, right, right_sum = (
            lay_out(library, each, layout) for each in (*rows, *rows * np.nan)
        )
        operands, outs, own = {"weight": weight, "bias": bias}, x, right
        if added != "nothing":
            operands["residual"] = residual
            outs = {"residual": (x, residual), "residual alone": (None, residual)}.get(added, x)
            own = (right, right_sum)
        prepared.forwards.clear()
        cupynorm.layer_norm(x, num_cols, **operands, out=own, **options)
        assert (
            next(reversed(prepared.forwards.values())).plan.tile.path == path
            or layout != "contiguous"
        )
        made = cupynorm.layer_norm(x, num_cols, **operands, out=outs, **options)
        y, added_up = made if added != "nothing" else (made, None)
        assert (y is x) == (added != "residual alone")
        np.testing.assert_array_equal(as_numpy(y), as_numpy(right))
        if added_up is not None:
            assert (added_up is residual) == (added in ("residual", "residual alone"))
            np.testing.assert_array_equal(as_numpy(added_up), as_numpy(right_sum))
            assert np.isfinite(as_numpy(right_sum).astype("float32")).all()
        assert as_numpy(right).astype("float32").std() > 0.5
        for each, values in ((x, None if outs is x or outs[0] is x else rows[0]), (residual, None)):
            if values is not None:
                np.testing.assert_array_equal(as_numpy(each), values)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_cols", [200, 201])
def test_a_stream_in_float32_is_updated_in_place(num_cols, strategy, library):
    """input + residual has the residual's dtype, and is written over it."""
    generator, launch = np.random.default_rng(num_cols), Launch(strategy)
    x, residual = (
        library.asarray(generator.standard_normal((NUM_ROWS, num_cols)).astype(dtype))
        for dtype in ("float16", "float32")
    )
    options = {"residual": residual, "return_residual": True, "launch": launch}
    right = cupynorm.rms_norm(x, num_cols, **options)
    made = cupynorm.rms_norm(x, num_cols, **options, out=(x, residual))
    assert made[0] is x and made[1] is residual
    for one, other in zip(made, right):
        np.testing.assert_array_equal(as_numpy(one), as_numpy(other))


def test_what_lies_between_rows_is_not_written_in_place(library):
    x = lay_out(library, np.ones((NUM_ROWS, 127), "float16"), "gap")
    cupynorm.layer_norm(x, 127, out=x)
    memory = x
    while getattr(memory, "base", None) is not None:
        memory = memory.base
    assert int((~np.isnan(np.float32(as_numpy(memory)))).sum()) == x.size
