"""A call of a layer that is refused leaves the layer as it was."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from linear_cases import CPU  # noqa: E402

from cupynorm import (  # noqa: E402
    LayerNormLinear,
    Linear,
    fp8_autocast,
)
from cupynorm.nn import scales  # noqa: E402
from cupynorm.recipes import DelayedScaling  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=3)
BOTH = pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
WRONG = (torch.ones(4, 16).double(), torch.ones(4, 8), torch.ones(4, 16, device="meta"))


def make(kind, **options):
    torch.manual_seed(0)
    return kind(16, 32, **CPU, **options)


def main_grads(layer) -> None:
    layer.weight.main_grad = torch.zeros_like(layer.weight)


def step(layer, first, x=None):
    layer(torch.ones(4, 16) if x is None else x, is_first_microbatch=first).sum().backward()


@BOTH
@pytest.mark.parametrize("x", WRONG, ids=("dtype", "shape", "memory"))
@pytest.mark.parametrize("region", [None, {}, {"enabled": False}], ids=str)
def test_a_refused_call_keeps_the_step_of_main_grad(kind, x, region):
    """The second microbatch adds to main_grad, though the refused call was a first one."""
    layer, plain = (make(kind, fuse_wgrad_accumulation=True) for _ in range(2))
    for each in (layer, plain):
        main_grads(each)
        step(each, True)
    if region is None:
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
            layer(x, is_first_microbatch=True)
    else:
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
            with fp8_autocast(recipe=RECIPE, **region):
                layer(x, is_first_microbatch=True)
    with torch.no_grad(), pytest.raises((TypeError, ValueError, RuntimeError)):
        layer(x, is_first_microbatch=True, fp8_output=True)
    assert not layer._gradients.begins_later
    for each in (layer, plain):
        step(each, False)
    assert torch.equal(layer.weight.main_grad, plain.weight.main_grad)
    assert not layer._fp8.scales


@BOTH
def test_a_refused_call_makes_no_scales(kind):
    layer = make(kind, fuse_wgrad_accumulation=True)
    with fp8_autocast(recipe=RECIPE):
        with pytest.raises(RuntimeError, match="weight has no main_grad"):
            layer(torch.ones(4, 16))
        assert not scales.active().used
    assert not layer._fp8.scales
