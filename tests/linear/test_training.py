"""LayerNormLinear in what training puts around it: in-place operations after it."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")
from fp8_linear_cases import make, tensor  # noqa: E402

from cupynorm import BlockScaling, CurrentScaling, DelayedScaling, fp8_autocast  # noqa: E402

RECIPES = (None, DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling())


def region(recipe):
    return contextlib.nullcontext() if recipe is None else fp8_autocast(recipe=recipe)


@pytest.mark.parametrize(
    "options",
    ({}, {"return_layernorm_output": True}, {"delay_wgrad_compute": True}, {"fused": "fold"}),
    ids=str,
)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", ((40, 200), (2, 20, 200)), ids=str)
def test_results_may_be_written_in_place(shape, recipe, options):
    """As torch.nn.ReLU(inplace=True) writes. Gradients are those of the operation out of place."""
    if recipe is not None and "fused" in options:
        pytest.skip("fused='fold' has no 8-bit products")
    made = []
    for relu in (torch.relu, torch.relu_):
        module, problem = make(**options)
        x = tensor(problem.x.reshape(shape), grad=True)
        with region(recipe):
            results = module(x)
        results = results if isinstance(results, tuple) else (results,)
        sum(relu(each).float().square().sum() for each in results).backward()
        module.backward_dw()
        made.append([x.grad, *(each.grad for each in module.parameters())])
    assert made[0][1].abs().max() > 0
    assert all(torch.equal(*pair) for pair in zip(*made))
