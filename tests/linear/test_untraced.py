"""Functions that torch.compile runs as they are, while it traces what they call.

It does so with functions that it has failed to trace, for the rest of the process.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from norm_calls import assert_few_roundings  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm import LayerNormLinear, Linear, fp8_autocast  # noqa: E402
from cupynorm.linear import layer_norm_linear, layers  # noqa: E402
from cupynorm.nn import autograd, modes  # noqa: E402
from cupynorm.recipes import CurrentScaling  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def run_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """Has the compiler run functions as they are, until the test ends."""
    from torch._dynamo.eval_frame import skip_code

    def skip(*functions) -> None:
        for each in functions:
            # A copy, which other tests do not use.
            monkeypatch.setattr(each, "__code__", each.__code__.replace())
            skip_code(each.__code__)

    return skip


def assert_compiled_is_right(layer: torch.nn.Module) -> None:
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(0))
    for model in (layer, torch.nn.Sequential(torch.nn.ReLU(), layer)):
        compiled = torch.compile(model, backend="aot_eager")
        for is_recorded in (True, False):
            with torch.set_grad_enabled(is_recorded):
                right = model(x)
                assert_few_roundings([compiled(x)], [right])
                assert right.abs().max() > 0


@pytest.mark.parametrize("kind", (Linear, LayerNormLinear))
def test_products_in_8_bits(kind, run_as_they_are):
    run_as_they_are(modes.run_untraced)
    with fp8_autocast(recipe=CurrentScaling()):
        assert_compiled_is_right(kind(100, 31, device="cpu"))


def test_a_linear_layer(run_as_they_are):
    run_as_they_are(LayerNormLinear.forward, LayerNormLinear._call, layers.LinearLayer._project)
    run_as_they_are(layer_norm_linear.normalize_and_project)
    assert_compiled_is_right(LayerNormLinear(100, 31, device="cpu"))


def test_a_norm(run_as_they_are):
    run_as_they_are(cupynorm.LayerNorm.forward, cupynorm.layer_norm)
    run_as_they_are(autograd.normalize)
    assert_compiled_is_right(cupynorm.LayerNorm(100))
