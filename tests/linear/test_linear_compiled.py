"""layer_norm_linear and LayerNormLinear under torch.compile and torch.export."""

from __future__ import annotations

import numpy as np
import pytest
from linear_bounds import assert_right, draw

import cupynorm

torch = pytest.importorskip("torch")

from linear_cases import (  # noqa: E402
    CPU,
    DEVICES,
    NORMS,
    SPLIT,
    WAYS,
    as_float64,
    call,
    leaves,
    recorded,
)
from norm_calls import assert_few_roundings  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from cupynorm import LayerNormLinear  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved"))
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_graph_break(device, norm_name, way):
    """The normalised tensor is rounded and multiplied, whatever the way of an eager call."""
    problem = draw(norm_name, "float32", residual=True, dnormalized=True, dsum=True)
    torch._dynamo.reset()
    compiled = torch.compile(
        call, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor"
    )
    traced = recorded(problem, device, run=compiled, **way)
    assert set(traced) == set(recorded(problem, device, **way))
    assert_right(problem, traced)
    with torch.no_grad():
        made = as_float64({"y": compiled(problem, leaves(problem, device), **way)})
    assert_near(made["y"], traced["y"], 2.0**-20)


def assert_near(got, expected, unit):
    """Compares results that are a few roundings of the largest one apart."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=unit * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved"))
def test_autocast_inside_and_outside_a_compiled_function(way):
    torch._dynamo.reset()
    problem = draw(num_rows=4)

    def inside(problem, given, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return call(problem, given, **options)

    eager = recorded(problem, run=lambda *a, **o: inside(*a, **o).float(), **way)
    for function in (
        torch.compile(inside, fullgraph=True, backend="aot_eager"),
        torch.compile(call, fullgraph=True, backend="aot_eager"),
    ):

        def run(problem, given, **options):
            with torch.autocast("cpu", torch.bfloat16):
                return function(problem, given, **options).float()  # noqa: B023

        for name, value in recorded(problem, run=run, **way).items():
            assert_near(value, eager[name], 4 * 2.0**-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ({}, {"parameters_split": SPLIT}, {"return_bias": True}), ids=str
)
def test_the_module_compiles_without_a_graph_break(options):
    torch._dynamo.reset()
    module = LayerNormLinear(24, 16, **options, **CPU)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    made = []
    for run in (module, compiled):
        module.zero_grad()
        x = torch.arange(72.0).reshape(3, 24).sin().requires_grad_()
        results = run(x)
        results = results if isinstance(results, tuple) else (results,)
        sum((each**2).sum() for each in results).backward()
        made.append([*results, x.grad, *(each.grad for each in module.parameters())])
    for eager, traced in zip(*made):
        # The compiler may add the 48 squares in another order.
        torch.testing.assert_close(
            traced, eager, rtol=2.0**-18, atol=2.0**-18 * eager.abs().max().item()
        )


@pytest.mark.slow
@pytest.mark.parametrize("layer", [LayerNormLinear, cupynorm.Linear])
def test_a_dynamic_number_of_rows_stays_dynamic(layer):
    torch._dynamo.reset()
    module, backend = layer(32, 16, **CPU), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for num_rows in (3, 5):
        x = torch.ones(num_rows, 32, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)  # raises if something makes a constant of it
        compiled(x).sum().backward()
    assert backend.frame_count == 1


def test_a_layer_with_delayed_gradients_breaks_the_graph():
    torch._dynamo.reset()
    x = torch.arange(96.0).reshape(4, 24).sin()
    for options, recipe in (
        ({"delay_wgrad_compute": True}, recipe)
        for recipe in (None, cupynorm.recipes.CurrentScaling())
    ):
        module = LayerNormLinear(24, 16, **options, **CPU)
        compiled = torch.compile(module, backend="aot_eager")
        made = []
        for run in (module, compiled):
            module.zero_grad()
            with cupynorm.fp8_autocast(recipe is not None, recipe):
                y = run(x)
            y.square().sum().backward()
            module.backward_dw()
            made.append((y, module.weight.grad, module.bias.grad))
        assert all(torch.equal(*pair) for pair in zip(*made))


def test_export_and_functional_calls_give_the_eager_results():
    module = LayerNormLinear(24, 16, **CPU)
    x = torch.arange(96.0).reshape(4, 24).sin()
    exported = torch.export.export(module, (x,))
    assert not any("cupynorm" in str(node.target) for node in exported.graph.nodes)
    assert_few_roundings([exported.module()(x)], [module(x)])
    parameters = dict(module.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    loss(parameters).backward()
    for name, gradient in torch.func.grad(loss)(parameters).items():
        # float32 sums of 4 rows, in another order.
        torch.testing.assert_close(
            gradient,
            parameters[name].grad,
            rtol=2.0**-18,
            atol=2.0**-18 * gradient.abs().max().item(),
        )
