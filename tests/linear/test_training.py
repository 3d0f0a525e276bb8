"""LayerNormLinear in what training puts around it: in-place operations, checkpoints."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

torch = pytest.importorskip("torch")
from fp8_linear_cases import make, tensor  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    checkpoint,
)

from cupynorm import (  # noqa: E402
    LayerNorm,
    fp8_autocast,
    fp8_checkpoint_contexts,
)
from cupynorm.recipes import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
)

RECIPES = (None, DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling())


# As checkpoint, by the regions and scales of the first run.
by_contexts = partial(checkpoint, use_reentrant=False, context_fn=fp8_checkpoint_contexts)
by_hooks = partial(checkpoint, use_reentrant=False)
by_function = partial(checkpoint, use_reentrant=True)


def at_once(function, x):
    return function(x)


def region(recipe):
    return contextlib.nullcontext() if recipe is None else fp8_autocast(recipe=recipe)


@pytest.mark.parametrize(
    "options",
    ({}, {"return_layernorm_output": True}, {"delay_wgrad_compute": True}),
    ids=str,
)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", ((40, 200), (2, 20, 200)), ids=str)
def test_results_may_be_written_in_place(shape, recipe, options):
    """As torch.nn.ReLU(inplace=True) writes. Gradients are those of the operation out of place."""
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


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=str)
def test_8_bit_results_without_gradients_may_be_written_in_place(recipe):
    """By what is trained behind a frozen layer. torch takes no such write to a view."""
    module, problem = make(return_layernorm_output=True)
    with torch.no_grad(), region(recipe):
        results = module(tensor(problem.x))
    for result in results:
        scale = torch.ones((), requires_grad=True)
        result.mul_(scale).sum().backward()
        assert scale.grad is not None


def train(module, problem, recipe, run=at_once, place="around", steps=3):
    """The results and gradients of each step. run: the checkpoint; place: of the region."""
    made = []

    def inside(x):
        with region(recipe):
            return module(x)

    for at in range(steps):
        module.zero_grad()
        x = tensor((1 + at) * problem.x, grad=True)
        if place == "inside":
            y = run(inside, x)
        else:
            with region(recipe):
                y = run(module, x)
        y.backward(tensor((1 + at) * problem.dy))
        made.append([y, x.grad, *(each.grad for each in module.parameters())])
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize(
    ("place", "run"),
    (
        ("around", by_contexts),
        ("inside", by_contexts),
        ("inside", by_function),
        ("inside", by_hooks),
    ),
    ids=("around", "inside", "inside a reentrant one", "inside a plain one"),
)
def test_a_region_and_a_checkpoint(place, run, recipe):
    """Results, gradients and scales are those without a checkpoint, to the bit."""
    module, problem = make(zero_centered_gamma=True)
    twin, _ = make(zero_centered_gamma=True)
    if isinstance(recipe, DelayedScaling) and run is by_hooks:
        with pytest.raises(NotImplementedError, match="scales of its forward; expected checkpoint"):
            train(twin, problem, recipe, run, place)
        return
    expected = train(module, problem, recipe)
    found = train(twin, problem, recipe, run, place)
    for at, (ones, others) in enumerate(zip(found, expected)):
        assert all(torch.equal(*pair) for pair in zip(ones, others)), at
    assert module._fp8.scales.keys() == twin._fp8.scales.keys()
    for name, state in module._fp8.scales.items():
        assert torch.equal(state.amax_history, twin._fp8.scales[name].amax_history), name
        assert torch.equal(state.scale, twin._fp8.scales[name].scale), name


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=str)
def test_a_reentrant_checkpoint_inside_a_region_is_refused(recipe):
    """It would run the layer again in 16 bits. What only forwards runs is not refused."""
    (module, problem), norm = make(), LayerNorm(200)
    x = tensor(problem.x, grad=True)
    with region(recipe):
        for call in (module, partial(norm, fp8_output=True)):
            with pytest.raises(NotImplementedError, match="context_fn=cupynorm.fp8_checkpoint_c"):
                by_function(call, x)
        with torch.no_grad():
            assert torch.equal(module(x), module(x))
    assert all((each.scale == 1).all() for each in module._fp8.scales.values())


def test_a_function_that_calls_more_layers_again_is_refused():
    """torch sees it itself where the calls are recorded."""
    module, problem = make()

    def twice(x):
        with torch.no_grad():
            module(x)
        return module(x)

    functions = [module, twice]
    with region(RECIPES[1]):
        y = by_contexts(lambda x: functions.pop(0)(x), tensor(problem.x, grad=True))
    with pytest.raises(RuntimeError, match="runs more layers again than it ran at first"):
        y.sum().backward()


@pytest.mark.parametrize("order", ((0, 1, 2), (2, 1, 0), (1, 2, 0)), ids=str)
def test_microbatches_that_are_run_again_in_any_order(order):
    """Each has a region, and so scales, of its own. Without a checkpoint the weight's are kept."""
    recipe, made = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"), []
    for run in (at_once, by_contexts):
        module, problem = make(dtype="float32")
        xs = [tensor(10.0**at * problem.x, "float32", grad=True) for at in range(3)]
        with torch.no_grad():
            scales = [module.weight.clone() * 3.0**at for at in range(3)]
        ys = []
        for x, weight in zip(xs, scales):
            module.weight.data.copy_(weight)
            with region(recipe):
                ys.append(run(module, x + 0))
        module.weight.data.copy_(scales[0])
        for at in order:
            module.weight.data.copy_(scales[at])
            ys[at].backward(tensor(problem.dy, "float32"))
        made.append([*ys, *(x.grad for x in xs), *(each.grad for each in module.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*made))


BETWEEN = ("16 bits", "eval", "8 bits", "8 bits in eval")


@pytest.mark.parametrize("recipe", RECIPES[1:3], ids=str)
@pytest.mark.parametrize("between", BETWEEN)
def test_a_call_without_gradients_between_a_checkpoint_and_its_backward(between, recipe):
    """Such a call is never run again, and must not be taken for the one that is."""
    made = []
    for run in (at_once, by_contexts):
        first, problem = make(40, 72, 72)
        module = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Tanh(), make(40, 72, 72)[0])
        for at in range(3):
            module.zero_grad()
            x = tensor((1 + at) * problem.x, grad=True)
            with region(recipe):
                y = run(module, x)
            module.train("eval" not in between)
            with torch.no_grad(), region(recipe if "8" in between else None):
                module(100 * x)
            module.train()
            y.backward(tensor((1 + at) * problem.dy))
            made.append([y, x.grad, *(each.grad for each in module.parameters())])
    for ones, others in zip(made[:3], made[3:]):
        assert all(torch.equal(*pair) for pair in zip(ones, others))


def test_a_backward_in_two_parts_is_one_step():
    """As in zero-bubble pipelines: the gradient of the input first, that of the weights later."""
    recipe, made = DelayedScaling(amax_history_len=4), []
    for parts in (1, 2):
        module, problem = make()
        weights = [*module.parameters()]
        for at in range(3):
            x, dy = tensor(problem.x, grad=True), tensor((1 + at) * problem.dy)
            with region(recipe):
                y = module(x)
            if parts == 1:
                found = torch.autograd.grad(y, [x, *weights], dy)
            else:
                found = torch.autograd.grad(y, x, dy, retain_graph=True)
                found += torch.autograd.grad(y, weights, dy)
            made.append(found)
        state = module._fp8.scales["backward"]
        made.append([state.scale, state.amax_history])
    for ones, others in zip(made[:4], made[4:]):
        assert all(torch.equal(*pair) for pair in zip(ones, others))


def test_delayed_gradients_run_hooks_and_refuse_what_they_cannot_reach():
    module, problem = make(delay_wgrad_compute=True)
    seen = []

    def hook(parameter):
        if parameter.grad is not None:  # torch runs it without a gradient too
            seen.append(parameter)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    module(tensor(problem.x)).backward(tensor(problem.dy))
    assert {*map(id, seen)} == {id(module.layer_norm_weight), id(module.layer_norm_bias)}
    module.backward_dw()
    assert {*map(id, seen)} == {*map(id, module.parameters())} and len(seen) == 4
    torch.nn.utils.parametrizations.weight_norm(module)
    with pytest.raises(RuntimeError, match="weight is made of other tensors .* expected a param"):
        module(tensor(problem.x))
