"""Layers and norms with weights, hooks and writes that other parts of torch put there."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402

from cupynorm import (  # noqa: E402
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
    fp8_autocast,
)
from cupynorm.recipes import CurrentScaling  # noqa: E402

SIZE = 24


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(name: str, **options):
    """A module, and torch's modules with the same values."""
    if name == "LayerNormLinear":
        ours = LayerNormLinear(SIZE, SIZE, device="cpu", **options)
        theirs = torch.nn.Sequential(torch.nn.LayerNorm(SIZE), torch.nn.Linear(SIZE, SIZE))
    elif name == "Linear":
        ours, theirs = Linear(SIZE, SIZE, **options), torch.nn.Linear(SIZE, SIZE)
    elif name == "LayerNorm":
        ours, theirs = LayerNorm(SIZE, **options), torch.nn.LayerNorm(SIZE)
    else:
        ours, theirs = RMSNorm(SIZE, **options), torch.nn.RMSNorm(SIZE)
    with torch.no_grad():
        for seed, (one, other) in enumerate(zip(ours.parameters(), theirs.parameters())):
            one.copy_(1 + 0.2 * draw(*one.shape, seed=seed))
            other.copy_(one)
    return ours, theirs


def assert_close(got, right):
    """Sums in float32 that cancel, in another order."""
    atol = 2.0**-18 * right.abs().max().item()
    torch.testing.assert_close(got, right, rtol=2.0**-14, atol=atol)


class LowRank(torch.nn.Module):
    """An addition to a weight, which is trained in its place."""

    def __init__(self, weight):
        super().__init__()
        self.a = torch.nn.Parameter(draw(len(weight), 2))
        self.b = torch.nn.Parameter(draw(2, SIZE, seed=1))

    def forward(self, weight):
        return weight + self.a @ self.b


def add_low_rank(layer, name):
    weight = getattr(layer, name)
    parametrize.register_parametrization(layer, name, LowRank(weight))
    layer.parametrizations[name].original.requires_grad_(False)


CHANGES = {
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": torch.nn.utils.weight_norm,
    "low rank": add_low_rank,
    "pruned": partial(prune.l1_unstructured, amount=0.4),
    "frozen": lambda layer, name: getattr(layer, name).requires_grad_(False),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("split", (False, True))
def test_weights_that_are_made_of_others(split, change):
    """Also after conversions, which must not take such a weight for a parameter."""
    options = {"parameters_split": ("q", "k")} if split else {}
    layer = LayerNormLinear(SIZE, SIZE, device="cpu", **options)
    CHANGES[change](layer, f"{'q_' * split}weight")
    for convert in (lambda: layer, lambda: layer.double().float()):
        convert()
        made = []
        for is_ours in (True, False):
            layer.zero_grad()
            x = draw(6, SIZE).requires_grad_()
            y = layer(x)
            if not is_ours:
                norm = layer.layer_norm_weight, layer.layer_norm_bias, layer.eps
                weight, bias = torch.cat(layer.weights()), torch.cat(layer.biases())
                y = functional.linear(functional.layer_norm(x, (SIZE,), *norm), weight, bias)
            y.square().sum().backward()
            gradients = [p.grad.clone() for p in layer.parameters() if p.requires_grad]
            made.append([y.detach(), x.grad, *gradients])
        for got, right in zip(*made, strict=True):
            assert right.abs().max() > 0
            assert_close(got, right)


RESULTS = (
    ("LayerNorm", {}),
    ("RMSNorm", {"memory_efficient": True}),
    ("LayerNormLinear", {"return_layernorm_output": True}),
    ("LayerNormLinear", {"return_layernorm_output": True, "save_normalized": True}),
    ("LayerNormLinear", {"delay_wgrad_compute": True}),
    ("Linear", {"delay_wgrad_compute": True}),
)
WRITTEN = ("input", "weight", "result", "row of a result", "detached result")


@pytest.mark.parametrize("recipe", (None, CurrentScaling()), ids=str)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name, options", RESULTS, ids=str)
def test_writes_before_backward_are_right_or_errors(name, options, written, recipe):
    if recipe is not None and (not name.endswith("Linear")):
        pytest.skip("has no 8-bit products")
    made = []
    for writes in (False, True):
        module, _ = pair(name, **options)
        x = draw(2, 3, SIZE).requires_grad_()
        with fp8_autocast(recipe is not None, recipe):
            given = x * 1
            results = module(given)
        results = list(results) if isinstance(results, tuple) else [results]
        factor = torch.ones_like(results[-1])
        if written == "result":
            factor *= 3
        elif written == "row of a result":
            factor[0] = 3
        if not writes:
            results[-1] = results[-1] * factor
        elif written == "row of a result":
            results[-1][0].mul_(3)
        elif written == "result":
            results[-1].mul_(3)
        else:
            with torch.no_grad():
                {"input": given, "weight": module.weight}.get(written, results[-1].detach()).mul_(3)
        try:
            sum((each * draw(*each.shape)).sum() for each in results).backward()
            if options.get("delay_wgrad_compute"):
                module.backward_dw()
        except RuntimeError as error:
            assert writes, error
            assert "modified by an inplace" in str(error) or "was written to" in str(error)
            return
        made.append([x.grad, *(each.grad for each in module.parameters())])
    for got, right in zip(*made):
        assert right.abs().max() > 0
        assert_close(got, right)


def test_a_weight_shared_with_an_embedding():
    made = []
    for ours, delay in ((False, False), (True, False), (True, True)):
        embedding = torch.nn.Embedding(40, SIZE, _weight=draw(40, SIZE))
        options = {"delay_wgrad_compute": True} if delay else {}
        layer = Linear(SIZE, 40, **options) if ours else torch.nn.Linear(SIZE, 40)
        layer.weight = embedding.weight
        with torch.no_grad():
            layer.bias.zero_()
        layer(embedding(torch.arange(20))).square().mean().backward()
        if delay:
            layer.backward_dw()
        layer.double()
        assert layer.weight is embedding.weight
        made.append(embedding.weight.grad)
    assert_close(made[1], made[0])
    assert_close(made[2], made[0])
