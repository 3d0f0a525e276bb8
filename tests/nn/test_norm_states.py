"""8-bit outputs of LayerNorm and RMSNorm in checkpoints: of activations, and of models."""

from __future__ import annotations

import pytest

import cupynorm
from cupynorm.recipes import BlockScaling, CurrentScaling, DelayedScaling

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
from module_inputs import random_input  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

RECIPES = (DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling())
NORMS = (cupynorm.LayerNorm, cupynorm.RMSNorm)


def train(norm, recipe, *, checkpoints):
    """y and the gradients of three steps."""

    def call(x):
        return norm(x * 1.0, fp8_output=True).dequantize(torch.float32)

    made = []
    for at in range(3):
        norm.zero_grad()
        x = ((3 - at) * random_input(5, 128, seed=at)).requires_grad_()
        with cupynorm.fp8_autocast(recipe=recipe):
            if checkpoints:
                contexts = cupynorm.fp8_checkpoint_contexts
                y = checkpoint(call, x, use_reentrant=False, context_fn=contexts)
            else:
                y = call(x)
            with torch.no_grad():
                norm.eval()(100 * x, fp8_output=True)
                norm.train()
        y.square().sum().backward()
        made += [y, x.grad, *(each.grad for each in norm.parameters())]
    return made


@pytest.mark.parametrize("norm_class", NORMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_norm_in_a_checkpoint_with_the_region_around(recipe, norm_class):
    norm, twin = norm_class(128), norm_class(128)
    results = train(norm, recipe, checkpoints=True), train(twin, recipe, checkpoints=False)
    assert all(map(torch.equal, *results))
    if isinstance(recipe, DelayedScaling):
        one, other = norm._fp8.scales["y"], twin._fp8.scales["y"]
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.amax_history, other.amax_history)


def test_a_norm_outside_of_a_region_is_still_refused():
    norm = cupynorm.LayerNorm(128)
    train(norm, CurrentScaling(), checkpoints=True)
    with pytest.raises(ValueError, match="fp8_output is True outside of fp8_autocast"):
        norm(random_input(5, 128), fp8_output=True)
