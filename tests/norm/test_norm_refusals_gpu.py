"""Arguments that the public calls refuse on a GPU, also after a right call that equals them."""

from __future__ import annotations

import numpy as np
import pytest
from array_libraries import library, loaded_torch

import cupynorm
from cupynorm import Launch
from cupynorm.dispatch.problem import Tile
from cupynorm.norm import prepared


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_wrong_arguments_are_refused_on_a_gpu(name):
    lib = library(name)
    x, out = lib.put(np.ones((4, 40)), "float32"), lib.put(np.ones((4, 40)), "float32")
    refused = [
        (ValueError, "tile holds 32 columns", {"launch": Launch("warp", Tile(1, 32, 1, 4))}),
        (ValueError, "tile has pack_size 3", {"launch": Launch("warp", Tile(3, 32, 1, 4))}),
        (ValueError, "sm_margin is 100000", {"launch": Launch(sm_margin=100000)}),
        (ValueError, "weight is a NumPy array, input is a", {"weight": np.ones(40, "float32")}),
        (ValueError, "out shares memory with residual", {"residual": x, "out": x}),
    ]
    for error, sentence, options in refused:
        with pytest.raises(error, match=sentence):
            cupynorm.layer_norm(x, 40, **{"out": out, **options})
        assert (lib.get(out) == 1).all() and (lib.get(x) == 1).all()
    with pytest.raises(ValueError, match="out is a NumPy array, input is a"):
        cupynorm.layer_norm(x, 40, out=np.ones((4, 40), "float32"))
    wide = lib.put(np.ones((2, 100000)), "float32")
    with pytest.raises(ValueError, match="strategy 'warp' is too narrow for 100000 columns"):
        cupynorm.layer_norm(wide, 100000, launch=Launch("warp"))


def test_a_wrong_argument_is_refused_after_a_right_one_that_equals_it(device):
    # 40.0 equals 40 and True equals 1 as keys of a dict. No prepared call may be found that way.
    x, one = (loaded_torch().ones(4, num_cols, device=device) for num_cols in (40, 1))
    pairs = [
        (x, {"normalized_shape": 40}, {"normalized_shape": 40.0}),
        (x, {"normalized_shape": (40,)}, {"normalized_shape": (40.0,)}),
        (x, {"normalized_shape": (4, 40)}, {"normalized_shape": (4, 40.0)}),
        (one, {"normalized_shape": (1,)}, {"normalized_shape": (True,)}),
        (one, {"normalized_shape": 1}, {"normalized_shape": True}),
        (x, {"normalized_shape": 40, "eps": 1}, {"normalized_shape": 40, "eps": True}),
        (x, {"normalized_shape": 40, "eps": 0}, {"normalized_shape": 40, "eps": False}),
    ]
    for array, good, bad in pairs:
        cupynorm.layer_norm(array, **good)
        with pytest.raises((TypeError, ValueError), match="expected"):
            cupynorm.layer_norm(array, **bad)
    # Equal arguments of the same meaning share a prepared call.
    before = len(prepared.forwards)
    for shape in ((40,), [40], 40, np.int64(40)):
        cupynorm.layer_norm(x, shape)
    assert len(prepared.forwards) <= before + 1


@pytest.mark.gpu
def test_mixed_libraries_on_a_gpu_are_refused():
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    x, weight = cupy.ones((4, 40), "float32"), torch.ones(40, device="cuda")
    with pytest.raises(
        ValueError, match="weight is a torch tensor on cuda:0, input is a CuPy array on cuda:0"
    ):
        cupynorm.layer_norm(x, 40, weight)
    with pytest.raises(
        ValueError, match="weight is a torch tensor on cpu, input is a torch tensor on cuda:0"
    ):
        cupynorm.layer_norm(torch.ones(4, 40, device="cuda"), 40, torch.ones(40))


@pytest.mark.multi_gpu
def test_mixed_devices_are_refused():
    torch = loaded_torch()
    with pytest.raises(
        ValueError, match="weight is a torch tensor on cuda:1, input is a torch tensor on cuda:0"
    ):
        cupynorm.layer_norm(torch.ones(4, 40, device="cuda:0"), 40, torch.ones(40, device="cuda:1"))
