"""Scales of LayerNorm and RMSNorm inside fp8_autocast: states, copies, devices and CUDA graphs."""

from __future__ import annotations

import copy
import functools
import io
import warnings

import numpy as np
import pytest

import cupynorm

torch = pytest.importorskip("torch")

from cuda_graphs import side_stream  # noqa: E402
from fp8_modules import make, random, raw  # noqa: E402

from cupynorm import (  # noqa: E402
    fp8_autocast,
    recipes,
    # noqa: E402,
)
from cupynorm.nn import scales  # noqa: E402
from cupynorm.recipes import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
)


def stepped(kind="LayerNorm", length=4, **options):
    """A module with scales, and their recipe."""
    module, recipe = make(kind, **options), DelayedScaling(amax_history_len=length)
    for seed in range(3):
        with fp8_autocast(recipe=recipe):
            module(random(5, 200, seed=seed) * 2.0**seed, fp8_output=True)
    return module, recipe


def assert_same_scales(one, other):
    assert torch.equal(one.scale, other.scale) and torch.equal(one.amax_history, other.amax_history)
    assert one.scale.item() != 1 and one.amax_history[1:].abs().max() > 0


def test_states_of_other_modules():
    """TransformerEngine's state is ignored without a warning. A linear layer's is refused."""
    module, _ = stepped()
    plain = {name: value for name, value in module.state_dict().items() if name != "_extra_state"}
    for foreign in (
        None,
        torch.empty(0, dtype=torch.uint8),
        torch.tensor([128, 4, 149], dtype=torch.uint8),
        io.BytesIO(b"x"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.load_state_dict(plain | {"_extra_state": foreign}, strict=True)
        assert module._fp8.scales.get("y") is None
    of_linear = scales.pack({"forward": scales.Scales((recipes.E4M3,) * 3, 2, torch.device("cpu"))})
    with pytest.raises(
        ValueError,
        match="the fp8 state has forward of 3 tensors; expected y of 1",
    ):
        module.load_state_dict(plain | {"_extra_state": of_linear})


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "LayerNormLinear"])
def test_training_after_a_first_call_in_inference_mode(kind):
    linear = kind == "LayerNormLinear"
    module = cupynorm.LayerNormLinear(200, 16, device="cpu") if linear else make(kind)
    x, options = random(5, 200), {} if linear else {"fp8_output": True}
    with torch.inference_mode(), fp8_autocast(recipe=DelayedScaling(amax_history_len=3)):
        module(x, **options)
    for length, fp8_format in ((3, Format.HYBRID), (5, Format.E4M3)):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=length, fp8_format=fp8_format)):
            module(x, **options)
    scale, amax_history, _ = scales_of(module)
    assert scale[0] != 1 and len(amax_history) == 5


@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling()), ids=str
)
def test_compiled_with_a_graph_break(recipe):
    module = make("LayerNorm")
    twin = copy.deepcopy(module)

    def run(module, x):
        return module(x * 2, fp8_output=True).dequantize() + 1

    compiled = torch.compile(run, backend="eager")
    for step in range(3):
        x = random(5, 200, seed=step)
        with fp8_autocast(recipe=recipe):
            assert torch.equal(compiled(module, x), run(twin, x))
    if isinstance(recipe, DelayedScaling):
        assert_same_scales(module._fp8.scales["y"], twin._fp8.scales["y"])


def scales_of(module):
    kept = module._fp8.scales.get("y") or module._fp8.scales["forward"]
    return kept.scale, kept.amax_history, kept.largest


@pytest.fixture(params=("RMSNorm", "LayerNormLinear"))
def of_four_steps(request):
    """A layer after four steps of delayed scaling, and a function that calls it."""
    if request.param == "RMSNorm":
        module, options = make("RMSNorm"), {"fp8_output": True}
    else:
        module, options = cupynorm.LayerNormLinear(200, 48, device="cpu"), {}
    for seed in range(4):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=4)):
            module(random(5, 200, seed=seed), **options)
    return module, options


@pytest.mark.parametrize("length", (1, 4, 1024))
def test_calls_without_gradients_do_not_change_the_history(of_four_steps, length):
    """Its values, length and addresses, which a CUDA graph may hold."""
    module, options = of_four_steps
    kept, values = scales_of(module), [each.clone() for each in scales_of(module)]
    assert values[1].count_nonzero() >= 3
    with (
        torch.no_grad(),
        fp8_autocast(recipe=DelayedScaling(amax_history_len=length, fp8_format=Format.E4M3)),
    ):
        module(random(5, 200), **options)
    assert all(after is before for after, before in zip(scales_of(module), kept))
    assert all(torch.equal(after, before) for after, before in zip(kept, values))


REFUSED = ({"residual": torch.ones(5, 100)}, {"fuse": cupynorm.functors.row_scale(torch.ones(4))})


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: next(iter(options)))
def test_a_refused_call_changes_no_state(options):
    """Not of a new module, and not of one with scales, whose recipe is another now."""
    recipe = DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3)
    new, used = make("LayerNorm", fp8_state=True), make("LayerNorm")
    with fp8_autocast(recipe=DelayedScaling(amax_history_len=4)):
        used(random(5, 200, seed=3), fp8_output=True)
    for module in (new, used):
        kept = module._fp8.scales.get("y")
        state = {name: value.clone() for name, value in module.state_dict().items()}
        fields = {} if kept is None else dict(vars(kept))
        with fp8_autocast(recipe=recipe):
            with pytest.raises((TypeError, ValueError)):
                module(random(5, 200), fp8_output=True, **options)
            with pytest.raises((TypeError, ValueError)):  # as a checkpoint keeps calls
                call = functools.partial(module, fp8_output=True, **options)
                torch.utils.checkpoint.checkpoint(
                    call, random(5, 200, grad=True), use_reentrant=False
                )
            assert not scales.active().used
        assert module._fp8.scales.get("y") is kept
        assert all(vars(kept)[name] is value for name, value in fields.items())
        after = module.state_dict()
        assert all(torch.equal(after[name], value) for name, value in state.items())


def test_scales_cannot_be_made_in_a_capture(monkeypatch):
    """Each replay would reset them. Scales made before the capture may be used in it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError,
        match="scales of DelayedScaling were to be made while a CUDA graph is captured",
    ):
        scales.scales_for(
            None, (recipes.E4M3,), DelayedScaling(), torch.device("cuda:0"), keeps_amaxes=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling()), ids=str
)
def test_steps_in_a_cuda_graph_are_the_eager_ones(recipe):
    module = make("LayerNorm", 768, device="cuda")
    twin, first = copy.deepcopy(module), copy.deepcopy(module)
    x, dy = random(64, 768, device="cuda", grad=True), random(64, 768, seed=1, device="cuda")

    def run(module):
        module.zero_grad(set_to_none=False)
        with fp8_autocast(recipe=recipe):
            made = module(x, fp8_output=True)
        made.dequantize().backward(dy)
        return made

    with side_stream():
        for _ in range(3):
            run(module), run(twin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(module)
    for size in (1.0, 20.0, 0.1):
        with torch.no_grad():
            x.copy_(random(64, 768, seed=2, device="cuda") * size)
            for each in (module, twin):
                each.bias.fill_(size)
        graph.replay()
        expected = run(twin)
        np.testing.assert_array_equal(raw(made.data), raw(expected.data))
        assert torch.equal(made.scale_inv, expected.scale_inv) and torch.equal(
            module.weight.grad, twin.weight.grad
        )
        if isinstance(recipe, DelayedScaling):
            assert_same_scales(module._fp8.scales["y"], twin._fp8.scales["y"])
            np.testing.assert_array_equal(raw(made.transposed), raw(expected.transposed))
    if isinstance(recipe, DelayedScaling):
        with (
            pytest.raises(RuntimeError, match="expected one call with this recipe"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            run(first)
