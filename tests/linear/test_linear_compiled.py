"""layer_norm_linear and LayerNormLinear under torch.compile and torch.export."""

from __future__ import annotations

import numpy as np
import pytest
from linear_bounds import assert_right, draw

import cupynorm

torch = pytest.importorskip("torch")

from fp8_linear_cases import RECIPES  # noqa: E402
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
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from cupynorm import LayerNormLinear, fp8_autocast  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_graph_break(device, norm_name, way):
    problem = draw(norm_name, "float32", residual=True, dnormalized=way != WAYS[2], dsum=True)
    if way == WAYS[2]:
        problem.dnormalized = None
    torch._dynamo.reset()
    compiled = torch.compile(
        call, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor"
    )
    eager, traced = (recorded(problem, device, run=run, **way) for run in (call, compiled))
    assert set(eager) == set(traced)
    if way != WAYS[2]:
        assert_right(problem, traced, () if problem.dnormalized is not None else ("normalized",))
    for name, value in traced.items():
        if device == "cpu":
            np.testing.assert_array_equal(value, eager[name], err_msg=name)
    with torch.no_grad():
        given = leaves(problem, device)
        np.testing.assert_array_equal(
            as_float64({"y": compiled(problem, given, **way)})["y"],
            as_float64({"y": call(problem, given, **way)})["y"],
        )


@pytest.mark.parametrize("save_normalized, num_kept", ((False, 1), (True, 2)))
def test_tensors_saved_in_a_compiled_graph(save_normalized, num_kept):
    """As in eager mode: x, and with save_normalized the normalised tensor."""
    from functorch.compile import min_cut_rematerialization_partition, nop
    from torch._functorch.aot_autograd import aot_module_simplified

    handed = []

    def backend(module, inputs):
        def backward(graph, tensors):
            handed.extend(
                each.meta["val"] for each in graph.graph.nodes if each.op == "placeholder"
            )
            return nop(graph, tensors)

        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=nop,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
        )

    problem = draw(dtype="bfloat16", num_rows=64, in_features=96)
    torch._dynamo.reset()
    given = leaves(problem)
    call_it = torch.compile(
        lambda given: call(problem, given, save_normalized=save_normalized),
        backend=backend,
        fullgraph=True,
    )
    call_it(given).sum().backward()
    whole = [
        each for each in handed if isinstance(each, torch.Tensor) and tuple(each.shape) == (64, 96)
    ]
    assert len(whole) == num_kept


@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
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
            np.testing.assert_array_equal(value, eager[name], err_msg=name)


@pytest.mark.parametrize(
    "options", ({}, {"parameters_split": SPLIT}, {"return_bias": True}, {"fused": "fold"}), ids=str
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
def test_one_graph_for_any_number_of_rows():
    torch._dynamo.reset()
    module = LayerNormLinear(24, 16, parameters_split=SPLIT, **CPU)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend=backend)
    for num_rows in (3, 5, 0, 1, 7, 9):
        made = []
        for run in (module, compiled):
            module.zero_grad()
            x = torch.arange(24.0 * num_rows).reshape(num_rows, 24).sin().requires_grad_()
            y = run(x)
            y.sum().backward()
            made.append((y, x.grad, module.q_weight.grad, module.k_bias.grad))
        assert all(torch.equal(*pair) for pair in zip(*made)), num_rows
    assert backend.frame_count <= 4  # the compiler may specialise 0, 1 and the first number


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
@pytest.mark.parametrize("layer", [LayerNormLinear, cupynorm.Linear])
def test_a_dynamic_number_of_rows_stays_dynamic(layer, recipe):
    torch._dynamo.reset()
    module, backend = layer(32, 16, **CPU), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for num_rows in (3, 5):
        x = torch.ones(num_rows, 32, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)  # raises if something makes a constant of it
        with fp8_autocast(enabled=recipe is not None, recipe=recipe):
            compiled(x).sum().backward()
    assert backend.frame_count == 1


def test_the_compiler_refuses_the_arguments_that_eager_mode_refuses():
    compiled = torch.compile(cupynorm.layer_norm_linear, backend="aot_eager")
    x, one, weight = torch.ones(3, 24), torch.ones(24), torch.ones(16, 24)
    for given in (
        (x, one, one, weight[:, 1:]),
        (x, one, one[1:], weight),
        (x, one, one, weight, one),
        (x, one, one, weight.half()),
    ):
        torch._dynamo.reset()
        for run in (cupynorm.layer_norm_linear, compiled):
            with pytest.raises(
                (ValueError, TypeError, RuntimeError),
                match="has shape .* expected|is of dtype .* expected",
            ):
                run(*given)


def test_a_layer_with_delayed_gradients_breaks_the_graph():
    torch._dynamo.reset()
    x = torch.arange(96.0).reshape(4, 24).sin()
    for options, recipe in (
        ({"delay_wgrad_compute": True}, recipe) for recipe in (None, cupynorm.CurrentScaling())
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


def test_products_are_torch_s_with_their_precision():
    """float32 factors are passed to torch's products, so torch's switches decide on TF32."""
    module = LayerNormLinear(24, 16, params_dtype=torch.float32, **CPU)
    x = torch.arange(96.0).reshape(4, 24).sin().requires_grad_()
    switches = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    with torch.autograd.profiler.profile() as profile:
        module(x).sum().backward()
    names = [event.name for event in profile.function_events]
    assert sum(name in ("aten::mm", "aten::addmm") for name in names) == 3  # y, dx, dweight
    assert switches == (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())


def test_export_and_functional_calls_give_the_eager_results():
    module = LayerNormLinear(24, 16, **CPU)
    x = torch.arange(96.0).reshape(4, 24).sin()
    exported = torch.export.export(module, (x,))
    assert sum("norm_linear" in str(node.target) for node in exported.graph.nodes) == 1
    assert torch.equal(exported.module()(x), module(x))
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
