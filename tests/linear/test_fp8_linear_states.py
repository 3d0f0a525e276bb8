"""LayerNormLinear inside fp8_autocast: scales, states and kept weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import cupynorm

torch = pytest.importorskip("torch")
from fp8_linear_cases import make, relative, step, tensor  # noqa: E402

from cupynorm import fp8_autocast, recipes  # noqa: E402
from cupynorm.nn import quantization, scales  # noqa: E402
from cupynorm.recipes import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
)


def test_scales_of_each_step():
    """The amaxes of a step set the scales of the next.

    Forward's change at the end of the region, backward's at the end of the next region.
    """
    module, problem = make()
    recipe = DelayedScaling(amax_history_len=3)
    x, dy = tensor(problem.x, grad=True), tensor(problem.dy)
    normalized = cupynorm.layer_norm(
        x, 200, module.layer_norm_weight, module.layer_norm_bias, out_dtype="float32"
    )
    amaxes = normalized.abs().max(), module.weight.float().abs().max()
    with fp8_autocast(recipe=recipe):
        y = module(x)
        forward, backward = module._fp8.scales["forward"], module._fp8.scales["backward"]
        assert forward.scale.tolist() == [1, 1, 1] and forward.amax_history[0, 0] == amaxes[0]
    assert forward.scale.tolist() == [448 / amaxes[0], 448 / amaxes[1], 1]
    assert forward.amax_history[2].tolist() == [*amaxes, 0]
    y.backward(dy)
    assert backward.scale.tolist() == [1, 1] and backward.amax_history[0, 0] == dy.abs().max()
    with fp8_autocast(recipe=recipe):
        module(x)
    assert backward.scale.tolist() == [57344 / dy.float().abs().max(), 1]
    before = forward.scale.clone(), forward.amax_history.clone()
    with torch.no_grad(), fp8_autocast(recipe=recipe):
        module(x * 100)
    assert torch.equal(forward.scale, before[0]) and torch.equal(forward.amax_history, before[1])
    with fp8_autocast(recipe=DelayedScaling(amax_history_len=5)):
        module(x)
    assert module._fp8.scales["forward"].amax_history.shape == (5, 3)


def test_states_of_other_layers():
    module, problem = make()
    step(module, problem, DelayedScaling(amax_history_len=4))
    state = module.state_dict()
    with pytest.warns(UserWarning, match="is not cupynorm's"):
        module.load_state_dict(state | {"_extra_state": torch.tensor([128], dtype=torch.uint8)})
    assert not module._fp8.scales
    state = scales.pack({"forward": scales.Scales((recipes.E4M3,) * 2, 3, torch.device("cpu"))})
    with pytest.raises(ValueError, match="has forward of 2 tensors; expected forward of 3"):
        module.set_extra_state(state)


def test_scales_keep_their_addresses_and_follow_the_layer_to_a_device():
    """A CUDA graph may hold the addresses."""
    module, problem = make()
    recipe = DelayedScaling(amax_history_len=4)
    step(module, problem, recipe)
    state, states = copy.deepcopy(module.state_dict()), module._fp8.scales
    kept = [each for made in states.values() for each in (made.scale, made.amax_history)]
    expected = [each.clone() for each in kept]
    step(module, problem, recipe)
    assert not torch.equal(kept[1], expected[1])
    module.load_state_dict(state, strict=True)
    states = module._fp8.scales
    again = [each for made in states.values() for each in (made.scale, made.amax_history)]
    assert all(now is before for now, before in zip(again, kept))
    assert len(kept) == 4 and all(map(torch.equal, kept, expected))
    module.to("meta")
    assert not module._fp8.scales


def count_weights(monkeypatch) -> list:
    made = []
    plain = quantization.quantize

    def quantize(x, *arguments, **options):
        made.append(tuple(x.shape))
        return plain(x, *arguments, **options)

    monkeypatch.setattr(quantization, "quantize", quantize)
    return made


def test_microbatches_share_a_quantised_weight(monkeypatch):
    module, problem = make()
    made = count_weights(monkeypatch)
    calls = (
        (None, 1),
        (None, 2),
        (False, 3),
        (False, 3),
        (True, 4),
        (False, 4),
        (False, 4),
        (None, 5),
    )
    for first, times in calls:
        results = step(module, problem, CurrentScaling(), first)
        assert made.count((72, 200)) == times, first
        module.zero_grad()
    with torch.no_grad():
        module.weight.mul_(2)
    kept = step(module, problem, CurrentScaling(), False)
    # is_first_microbatch=False tells the layer that the weight has not changed.
    np.testing.assert_array_equal(kept["y"], results["y"])
    doubled = step(module, problem, CurrentScaling(), True)["y"] - problem.bias
    assert relative(doubled, 2 * (kept["y"] - problem.bias)) < 2.0**-7
    assert module.float()._fp8.weight is None


def test_a_kept_weight_is_not_used_by_another_recipe(monkeypatch):
    """Another recipe quantises it again, also with is_first_microbatch=False."""
    made = count_weights(monkeypatch)
    module, problem = make()
    step(module, problem, BlockScaling(), True)
    results = step(module, problem, CurrentScaling(), False)
    expected = step(make()[0], problem, CurrentScaling())
    np.testing.assert_array_equal(results["y"], expected["y"])
    before = made.count((72, 200))
    step(module, problem, CurrentScaling(), False)
    assert made.count((72, 200)) == before


@pytest.mark.parametrize("recipe", (None, CurrentScaling(), BlockScaling()), ids=str)
def test_a_retained_graph_and_a_layer_used_twice(recipe):
    module, problem = make()
    expected = step(module, problem, recipe)
    module.zero_grad()
    x, dy = tensor(problem.x, grad=True), tensor(problem.dy)
    with fp8_autocast(recipe is not None, recipe):
        y = module(x)
    y.backward(dy, retain_graph=True)
    np.testing.assert_array_equal(x.grad.float().numpy(), expected["dx"])
    y.backward(dy)
    np.testing.assert_array_equal(x.grad.float().numpy(), 2 * expected["dx"])
    np.testing.assert_array_equal(module.weight.grad.float().numpy(), 2 * expected["dweight"])
    module.zero_grad()
    with fp8_autocast(recipe is not None, recipe):
        made = module(x), module(x)
    torch.autograd.backward(made, (dy, dy))
    np.testing.assert_array_equal(module.weight.grad.float().numpy(), 2 * expected["dweight"])


def test_a_step_ended_by_an_exception_leaves_no_trace():
    """A second layer without that step has the same amaxes and scales."""
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    module, problem = make()
    twin, _ = make()
    for layer in (module, twin):
        step(layer, problem, recipe)
    with pytest.raises(KeyError), fp8_autocast(recipe=recipe):
        module(tensor(100 * problem.x))
        raise KeyError
    for layer in (module, twin):
        step(layer, problem, recipe)
    for name, state in module._fp8.scales.items():
        assert torch.equal(state.scale, twin._fp8.scales[name].scale)
        assert torch.equal(state.amax_history, twin._fp8.scales[name].amax_history)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_products_of_blocks_without_power_of_two_scales(device):
    """bfloat16 would round the values, so products and sums are in float32."""
    x, weight = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
        for shape in ((40, 200), (72, 200))
    )
    a = quantization.quantize_blocks(x.to(device), recipes.E4M3, power_of_two=False)
    b = quantization.quantize_blocks(
        weight.to(device), recipes.E4M3, block_rows=128, power_of_two=False
    )
    y = quantization.multiply(a, b, torch.float32, is_exact=False)
    a, b = (each.dequantize().double().cpu() for each in (a, b))
    assert not torch.equal(a, a.bfloat16().double())
    assert (
        (y.double().cpu() - a @ b.T).abs() <= (200 + 6) * 2.0**-24 * (a.abs() @ b.abs().T)
    ).all()
