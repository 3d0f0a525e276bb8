"""Path `bundle`: several rows at a time pass through the shared memory of a warp."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_checks import (
    CALL_OPTIONS,
    H200,
    assert_dsum_is_added,
    assert_rows_are_the_same_alone,
    check,
    identical,
)
from kernel_rings import rows_of_tiles
from small_devices import SMALL

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.run import run_kernels
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import forward_call
from cupynorm.norm.request import ForwardOptions
from cupynorm.plan import dispatch

# (norm, dtype, num_cols, tile) for every number of lanes. Some tiles hold more columns than a row.
BUNDLES = rows_of_tiles(
    """
a lane a row | layer_norm bfloat16 33 | 1 1 33 64, exact 1, stages 2, bundle 32
one element a row | rms_norm float32 1 | 1 1 1 32, exact 1, stages 3, bundle 96
2 lanes, pairs | layer_norm float16 50 | 2 2 13 32, stages 2, bundle 32
4 lanes | rms_norm bfloat16 27 | 1 4 7 8, stages 1, bundle 8
8 lanes | layer_norm bfloat16 127 | 1 8 16 8, stages 2, bundle 12
8 lanes, packs of 4 | rms_norm float16 100 | 4 8 4 4, stages 2, bundle 8
a lane a row, packs of 4 | layer_norm bfloat16 24 | 4 1 6 64, exact 1, stages 2, bundle 96
4 lanes, packs of 8 | rms_norm bfloat16 72 | 8 4 3 16, stages 2, bundle 24
8 lanes, pairs, 12 warps | layer_norm bfloat16 72 | 2 8 5 48, stages 2, bundle 16
16 lanes | layer_norm float32 255 | 1 16 16 4, stages 3, bundle 4
32 lanes | layer_norm bfloat16 511 | 1 32 16 2, stages 2, bundle 3
32 lanes of which some have nothing | layer_norm bfloat16 29 | 1 32 1 1, stages 2, bundle 2
32 lanes, an odd number of packs | layer_norm float16 223 | 1 32 7 2, exact 0, stages 2, bundle 1
"""
)


BUNDLE_OPTIONS = {name: options for name, options in CALL_OPTIONS.items() if "y" not in options}


BUNDLE_OPTIONS |= {"rounded": {"round_x_hat": True}}


class MisalignedMachine(CpuMachine):
    """Puts each array at another offset within 16 bytes, between bytes that are NaN."""

    def _placed(self, array):
        self.placed = getattr(self, "placed", 0) + 1
        room = np.full(array.nbytes + 64, 0xFF, np.uint8)
        offset = -room.ctypes.data % 16 + self.placed % (16 // array.itemsize) * array.itemsize + 16
        placed = room[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed, placed.ctypes.data

    def empty(self, shape, dtype):
        return self._placed(super().empty(shape, dtype)[0])

    def put(self, array):
        return self._placed(array)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 4, 37, 201])
@pytest.mark.parametrize("bundle", BUNDLES)
def test_bundle(bundle, num_rows, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    plans = tile_of_backward(tile)
    case = Case(norm, num_rows, num_cols, dtype, strategy="warp", tile=tile)
    results = check(case, small)
    assert [plan.tile for plan in plans] == [tile, tile]
    if isinstance(small, CpuMachine):
        for seed in range(2):
            assert identical(
                results, run_kernels(random_problem(case), CpuMachine(SMALL, seed=seed))
            ), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bundle", BUNDLES)
def test_bundles_at_any_address(bundle, residual, tile_of_backward):
    """Each tensor at another offset within 16 bytes gives the bits of aligned tensors."""
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    if tile.pack_size > 1:
        pytest.skip("packs begin on multiples of their size")
    plans = tile_of_backward(tile)
    case = Case(norm, 201, num_cols, dtype, strategy="warp", tile=tile, residual=residual)
    aligned, problem = check(case, CpuMachine(SMALL)), random_problem(case)
    for _ in range(3):
        assert identical(aligned, run_kernels(problem, MisalignedMachine(SMALL)))
    assert {plan.tile for plan in plans} == {tile}


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["8 lanes", "32 lanes"])
@pytest.mark.parametrize("options", BUNDLE_OPTIONS)
def test_options_of_bundles(options, bundle, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    tile_of_backward(tile)
    check(
        Case(norm, 101, num_cols, dtype, strategy="warp", tile=tile, **BUNDLE_OPTIONS[options]),
        small,
    )


@pytest.mark.slow
@pytest.mark.parametrize("bundle", BUNDLES)
def test_residual_of_bundles(bundle, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    tile_of_backward(tile)
    problem = random_problem(
        Case(norm, 101, num_cols, dtype, strategy="warp", tile=tile, residual=True)
    )
    fused = check(problem.case, small)
    alone = replace(
        problem, case=replace(problem.case, residual=False), x=fused["sum"], residual=None
    )
    assert run_kernels(alone, small)["y"].tobytes() == fused["y"].tobytes()
    assert_dsum_is_added(alone, small, tile)


@pytest.mark.parametrize("bundle", BUNDLES)
def test_row_of_a_bundle_is_the_same_alone_and_in_a_batch(bundle, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    tile_of_backward(tile)
    problem = random_problem(Case(norm, 201, num_cols, dtype, strategy="warp", tile=tile))
    assert_rows_are_the_same_alone(problem, small, {0, 100, 200})


def test_rows_with_gaps_are_not_bundled():
    pointers = {"x": Rows(0, 9, 127, 129, "bfloat16"), "y": Rows(0, 9, 127, 127, "bfloat16")}
    tile = BUNDLES["8 lanes"][3]
    for rows, contiguous in (
        (pointers["x"], False),
        (pointers["x"]._replace(num_rows=1), True),
        (pointers["y"], True),
    ):
        tensors = {"x": rows, "y": pointers["y"]._replace(num_rows=rows.num_rows)}
        call = forward_call(H200, tensors, ForwardOptions(True, (127,), 1e-5), "forward")
        assert (
            call.plan.problem.layout.contiguous == contiguous == (call.plan.tile.path == "bundle")
        )
        if not contiguous:
            with pytest.raises(ValueError, match="bundles need .* rows without gaps"):
                dispatch.choose(call.plan.problem, H200, "warp", tile)
