"""LayerNormLinear inside fp8_autocast under torch.compile."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from linear_bounds import draw

torch = pytest.importorskip("torch")
from fp8_linear_cases import RECIPES, make, step, tensor  # noqa: E402

from cupynorm import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    fp8_autocast,
)
from cupynorm.nn import autocast  # noqa: E402

pytestmark = pytest.mark.slow

COMPILED = (
    {},
    {"save_normalized": True, "normalization": "RMSNorm"},
    {"return_layernorm_output": True, "parameters_split": {"q": 40, "k": 32}, "bias": False},
    {"return_bias": True},
)


@pytest.mark.parametrize("options", COMPILED, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_compiled_layer_has_no_graph_break(recipe, options):
    """Results and scales are the eager ones, with and without gradients, and outside a region."""
    torch._dynamo.reset()
    module, problem = make(**options)
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)

    def results(y):
        return y if isinstance(y, tuple) else (y,)

    for size in (1, 20, 3):
        made = []
        for run, layer in ((module, module), (compiled, twin)):
            layer.zero_grad()
            x = tensor(size * problem.x, grad=True)
            with fp8_autocast(recipe=copy.copy(recipe)):
                ys = results(run(x))
            sum(y.float().square().sum() for y in ys).backward()
            gradients = [each.grad for each in layer.parameters() if each.grad is not None]
            made.append([*ys, x.grad, *gradients])
        assert len(made[0]) == len(made[1]) and all(torch.equal(*pair) for pair in zip(*made))
    assert module._fp8_states.keys() == twin._fp8_states.keys()
    for name, state in module._fp8_states.items():
        assert torch.equal(state.scale, twin._fp8_states[name].scale)
        assert torch.equal(state.amax_history, twin._fp8_states[name].amax_history)
    x = tensor(problem.x)
    with torch.no_grad(), fp8_autocast(recipe=recipe):
        assert all(torch.equal(*pair) for pair in zip(results(module(x)), results(compiled(x))))
    assert all(torch.equal(*pair) for pair in zip(results(module(x)), results(compiled(x))))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling()), ids=str
)
def test_compiled_by_inductor_on_a_gpu(recipe, mode):
    """Each step has its own scales, also where torch makes CUDA graphs."""
    torch._dynamo.reset()
    module, problem = make(64, 256, 128, device="cuda")
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, mode=mode, fullgraph=True)
    for size in (1.0, 20.0, 0.1, 3.0):  # warm-up, capture, replays
        torch.compiler.cudagraph_mark_step_begin()
        made = []
        for run, layer in ((module, module), (compiled, twin)):
            layer.zero_grad()
            x = tensor(size * problem.x, device="cuda", grad=True)
            with fp8_autocast(recipe=recipe):
                y = run(x)
            y.backward(tensor(problem.dy, device="cuda"))
            made.append((y, x.grad, *(each.grad for each in layer.parameters())))
        assert all(torch.equal(*pair) for pair in zip(*made)), size


@pytest.mark.parametrize("recipe", (DelayedScaling(), CurrentScaling(), BlockScaling()), ids=str)
def test_a_compiled_layer_takes_any_number_of_rows(recipe):
    torch._dynamo.reset()
    module, _ = make(dtype="float32", save_normalized=True)
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for num_rows in (3, 5, 200, 130, 0, 7):
        x, made = torch.randn(num_rows, 200, generator=torch.Generator().manual_seed(num_rows)), []
        x = x.t().contiguous().t() if num_rows == 7 else x
        for run, layer in ((module, module), (compiled, twin)):
            layer.zero_grad()
            of_run = x.clone(memory_format=torch.preserve_format).requires_grad_()
            with (
                fp8_autocast(recipe=recipe),
                torch.autocast("cpu", torch.bfloat16, enabled=num_rows == 130),
            ):
                y = run(of_run)
            y.float().sum().backward()
            made.append((y, of_run.grad, layer.weight.grad))
        assert all(torch.equal(*pair) for pair in zip(*made)), num_rows


def test_a_layer_with_main_grad_compiles_into_one_graph_without_gradients():
    torch._dynamo.reset()
    module, problem = make(fuse_wgrad_accumulation=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), fp8_autocast(recipe=CurrentScaling()):
        assert torch.equal(compiled(tensor(problem.x)), module(tensor(problem.x)))


def test_microbatches_of_a_compiled_layer():
    """They share a quantised weight, which is not among the tensors saved for backward."""
    torch._dynamo.reset()
    module, problem = make()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for first in (True, False, False):
        made = []
        for run, layer in ((module, module), (compiled, twin)):
            layer.zero_grad()
            with fp8_autocast(recipe=CurrentScaling()):
                y = run(tensor(problem.x), is_first_microbatch=first)
            if run is compiled:
                waiting = {each.data_ptr() for each in y.grad_fn.saved_tensors}
                assert (
                    len(waiting) > 5 and layer._fp8_weight[-1].transposed.data_ptr() not in waiting
                )
            y.backward(tensor(problem.dy))
            made.append((y, layer.weight.grad))
        assert all(torch.equal(*pair) for pair in zip(*made)), first


def test_layers_compiled_one_by_one_share_compiled_code():
    """There are more layers than torch's limit of recompilations of a function."""
    torch._dynamo.reset()
    layers = [make(4, 32, 32)[0] for _ in range(12)]
    x = tensor(draw("layer_norm", "bfloat16", 4, 32, 32).x)
    expected = made = x
    with fp8_autocast(recipe=CurrentScaling()):
        for layer in layers:
            expected, made = (
                layer(expected),
                torch.compile(layer, backend="aot_eager", fullgraph=True)(made),
            )
    assert torch.equal(made, expected)


def test_a_recipe_with_a_callable_breaks_the_graph():
    """A callable has no text by which another step could find it. Results are the eager ones."""
    torch._dynamo.reset()
    module, problem = make()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager")
    for _ in range(2):
        recipe = DelayedScaling(
            amax_history_len=3, amax_compute_algo=lambda history: history.amax(0)
        )
        before = len(autocast._recipes)
        made = []
        for run in (module, compiled):
            with fp8_autocast(recipe=recipe):
                made.append(run(tensor(problem.x)))
        assert torch.equal(*made) and len(autocast._recipes) == before
    assert torch.equal(module._fp8_states["forward"].scale, twin._fp8_states["forward"].scale)


class OfWrittenWeight(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.clamp_(-0.01, 0.01)
        return self.layer(x)


@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling()), ids=str
)
def test_a_compiled_layer_multiplies_by_the_current_weight(recipe):
    """A weight that the graph writes, and a weight given by functional_call."""
    torch._dynamo.reset()
    module, problem = make()
    x, made = tensor(problem.x), []
    for compiles in (False, True):
        net = OfWrittenWeight(copy.deepcopy(module))
        run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiles else net
        with torch.no_grad(), fp8_autocast(recipe=recipe):
            made.append(run(x))
    assert torch.equal(*made) and made[0].abs().max() > 0
    other, made = {"weight": module.weight.detach() * 2}, []
    for compiles in (False, True):
        twin = copy.deepcopy(module)

        def call(x, twin=twin):
            return torch.func.functional_call(twin, other, (x,))

        run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiles else call
        with torch.no_grad(), fp8_autocast(recipe=recipe):
            made.append(run(x))
    assert torch.equal(*made)


def test_compiled_where_only_the_normalised_tensor_is_used():
    torch._dynamo.reset()
    module, problem = make(return_layernorm_output=True)
    made = []
    for compiles in (False, True):
        twin = copy.deepcopy(module)

        def call(x, twin=twin):
            return twin(x)[1]

        run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiles else call
        x = tensor(problem.x, grad=True)
        with fp8_autocast(recipe=CurrentScaling()):
            normalized = run(x)
        normalized.square().sum().backward()
        # The gradient of the weight is zero or None.
        assert twin.weight.grad is None or not twin.weight.grad.any()
        made.append((normalized, x.grad, twin.layer_norm_weight.grad, twin.layer_norm_bias.grad))
    assert all(torch.equal(*pair) for pair in zip(*made))


def test_a_compiled_layer_deleted_before_its_backward_is_an_error():
    torch._dynamo.reset()
    module, problem = make()
    x = tensor(problem.x, grad=True)
    with fp8_autocast(recipe=CurrentScaling()):
        y = torch.compile(module, backend="aot_eager")(x)
    del module
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(RuntimeError, match="a compiled layer was deleted before its backward"):
        y.sum().backward()


def test_transforms_are_refused():
    module, problem = make()
    with (
        fp8_autocast(recipe=CurrentScaling()),
        pytest.raises(NotImplementedError, match="torch.func or forward mode was asked"),
    ):
        torch.func.vmap(module)(tensor(problem.x)[None])


def test_code_cached_on_the_disk_depends_on_the_recipe(tmp_path):
    """torch finds cached code by the text of its graph, which contains the recipe."""
    script = """
import torch, cupynorm  # noqa: E402
x = torch.ones(64, 256, dtype=torch.bfloat16)
for recipe in ("BlockScaling", "CurrentScaling", "BlockScaling"):
    torch._dynamo.reset()  # as in a new process
    layer = cupynorm.LayerNormLinear(256, 128, params_dtype=torch.bfloat16, device="cpu")
    made = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad()
        with cupynorm.fp8_autocast(recipe=getattr(cupynorm, recipe)()):
            y = run(x)
        y.sum().backward()
        made.append((y, layer.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*made))
    print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["0", "0", "1"]


@pytest.mark.parametrize("recipe", (DelayedScaling(), CurrentScaling()), ids=str)
def test_a_region_inside_a_compiled_function_breaks_the_graph(recipe):
    """It breaks the graph. Results and scales are the eager ones."""
    torch._dynamo.reset()
    module, problem = make()
    twin = copy.deepcopy(module)

    def step_of(layer, x):
        with fp8_autocast(recipe=recipe):
            return layer(x)

    for size in (1.0, 20.0, 0.1):
        made = []
        for run, layer in ((step_of, module), (torch.compile(step_of, backend="aot_eager"), twin)):
            layer.zero_grad()
            y = run(layer, tensor(size * problem.x))
            y.backward(tensor(problem.dy))
            made.append((y, layer.weight.grad))
        assert all(torch.equal(*pair) for pair in zip(*made)), size
    for name, state in module._fp8_states.items():
        assert torch.equal(state.scale, twin._fp8_states[name].scale)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step_of, backend="aot_eager", fullgraph=True)(twin, tensor(problem.x))


def test_a_compiled_and_checkpointed_layer_gives_the_eager_results():
    """The layer is run again outside the region, with the same results."""
    torch._dynamo.reset()
    module, problem = make()
    expected = step(module, problem, CurrentScaling())
    module.zero_grad()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x):
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    x = tensor(problem.x, grad=True)
    with fp8_autocast(recipe=CurrentScaling()):
        y = run(x)
    y.backward(tensor(problem.dy))
    np.testing.assert_array_equal(module.weight.grad.float().numpy(), expected["dweight"])
    np.testing.assert_array_equal(x.grad.float().numpy(), expected["dx"])
