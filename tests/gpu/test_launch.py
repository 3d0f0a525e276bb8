"""The launch of a kernel that starts while the one before still runs."""

import ctypes

import numpy as np
import pytest

from cupynorm import functional
from cupynorm.gpu import launch
from cupynorm.plans import plan


def test_only_the_sum_over_partial_rows_overlaps_the_kernel_before():
    """From sm_90 on, if its kernel waits for another; not if it reads x and dy itself."""
    for device, expected in (
        ("H200", [False, True]),
        ("B200", [False, True]),
        ("A100", [False, False]),
    ):
        assert [
            each.overlaps for each in plan(1024, direction="backward", device=device).launches
        ] == expected, device
    uncached = plan(1024, direction="backward", strategy="uncached", device="H200")
    assert [each.overlaps for each in uncached.launches] == [False, False]
    assert not any(each.overlaps for each in plan(1024, device="H200").launches)


def test_attribute_and_configuration_have_the_layout_of_cuda_h():
    assert [launch._Attribute.value.offset, ctypes.sizeof(launch._Attribute)] == [8, 72]
    offsets = [
        launch._Config.stream.offset,
        launch._Config.attributes.offset,
        launch._Config.num_attributes.offset,
    ]
    assert [*offsets, ctypes.sizeof(launch._Config)] == [32, 40, 48, 56]


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", (128, 1000, 4096, 16384))
def test_sums_over_partial_rows_wait_for_them(num_cols):
    """Consecutive backwards that share the memory of partial sums give the bits of single ones."""
    import cupy

    x = cupy.random.standard_normal((512, num_cols), dtype=np.float32)
    dys = [x * scale for scale in (1.0, -3.0, 0.5)]
    made = functional.layer_norm_forward(x, num_cols)
    alone = []
    for dy in dys:
        cupy.cuda.runtime.deviceSynchronize()
        alone.append(functional.layer_norm_backward(dy, x, num_cols, made.mean, made.rstd))
        cupy.cuda.runtime.deviceSynchronize()
    saved = num_cols, made.mean, made.rstd
    close = [functional.layer_norm_backward(dys[turn % 3], x, *saved) for turn in range(60)]
    for turn, gradients in enumerate(close):
        for name, found, expected in zip(gradients._fields, gradients, alone[turn % 3]):
            assert bool((found == expected).all()), f"turn {turn}: {name}"
