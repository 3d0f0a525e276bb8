"""Layers inside fp8_autocast under torch.compile: they break the graph and run as eager ones."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from fp8_linear_cases import RECIPES, make, step, tensor  # noqa: E402

from cupynorm import fp8_autocast  # noqa: E402
from cupynorm.recipes import CurrentScaling, DelayedScaling  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_values_and_scales_are_the_eager_ones(recipe):
    torch._dynamo.reset()
    module, problem = make(save_normalized=True)
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager")
    for size in (1.0, 20.0, 0.1):
        made = []
        for run, layer in ((module, module), (compiled, twin)):
            layer.zero_grad()
            x = tensor(size * problem.x, grad=True)
            with fp8_autocast(recipe=copy.copy(recipe)):
                y = run(x)
            y.backward(tensor(problem.dy))
            made.append((y, x.grad, *(each.grad for each in layer.parameters())))
        assert all(torch.equal(*pair) for pair in zip(*made, strict=True)), size
    assert module._fp8.scales.keys() == twin._fp8.scales.keys()
    for name, state in module._fp8.scales.items():
        assert torch.equal(state.scale, twin._fp8.scales[name].scale)
        assert torch.equal(state.amax_history, twin._fp8.scales[name].amax_history)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", (DelayedScaling(), CurrentScaling()), ids=str)
def test_a_region_inside_a_compiled_function(recipe):
    torch._dynamo.reset()
    module, problem = make()
    expected, x = step(copy.deepcopy(module), problem, recipe), tensor(problem.x, grad=True)

    @torch.compile(backend="aot_eager")
    def run(x):
        with fp8_autocast(recipe=recipe):
            return module(x)

    run(x).backward(tensor(problem.dy))
    assert (module.weight.grad.float().numpy() == expected["dweight"]).all()
    assert (x.grad.float().numpy() == expected["dx"]).all()


@pytest.mark.parametrize("recipe", (DelayedScaling(), CurrentScaling()), ids=str)
def test_one_graph_is_refused_in_a_sentence(recipe):
    torch._dynamo.reset()
    module, problem = make()
    said = "cupynorm keeps scales or gradients of this call in Python, so the graph breaks here"
    with fp8_autocast(recipe=recipe), pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        torch.compile(module, backend="aot_eager", fullgraph=True)(tensor(problem.x))
