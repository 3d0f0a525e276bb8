"""Layers made inside fp8_model_init, whose weights are kept in 8-bit floats alone."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from fp8_linear_cases import values  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    LayerNormLinear,
    Linear,
    fp8_autocast,
    fp8_model_init,
)
from cupynorm.linear.quantized_weight import QuantizedWeight  # noqa: E402

IN, OUT, NUM_ROWS = 100, 31, 9
RECIPES = (CurrentScaling(), BlockScaling())


def make(kind=Linear, recipe=None, *, in_8_bits=True, keep=False, **options):
    torch.manual_seed(0)
    with fp8_model_init(in_8_bits, recipe, keep):
        return kind(IN, OUT, device=options.pop("device", "cpu"), **options)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(weight) -> list[torch.Tensor]:
    names, _ = weight.__tensor_flatten__()
    return [getattr(weight, name).reshape(-1).view(torch.uint8).clone() for name in names]


def assert_same_bits(a, b):
    assert all(torch.equal(*pair) for pair in zip(bits(a), bits(b), strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("kind", (Linear, LayerNormLinear))
def test_a_step_is_that_of_a_plain_weight(kind, recipe, monkeypatch):
    """The same bits, which are not quantised again; and products of values outside a region."""
    layer, plain = make(kind, recipe, keep=True), make(kind, recipe, in_8_bits=False)
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None
    assert isinstance(layer.weight, torch.nn.Parameter) and isinstance(layer.weight, torch.Tensor)
    truth = values(plain.weight, recipe, is_weight=True).astype("float32")
    np.testing.assert_array_equal(layer.weight.dequantize().detach().numpy(), truth)
    made, quantised = [], []
    for each in (plain, layer):
        x = draw(NUM_ROWS, IN).requires_grad_()
        with fp8_autocast(recipe=recipe):
            y = each(x)
        y.backward(draw(NUM_ROWS, OUT, seed=1))
        made.append((y, x.grad, each.weight.grad, each.bias.grad))
        with torch.no_grad(), fp8_autocast(recipe=recipe), monkeypatch.context() as patch:
            of = type(layer).quantizers

            def quantizers(self, *given, of=of, **options):
                found = of(self, *given, **options)
                plainly = found.quantize
                found.quantize = lambda name, *rest, **more: (
                    quantised.append(name) or plainly(name, *rest, **more)
                )
                return found

            patch.setattr(type(layer), "quantizers", quantizers)
            assert torch.equal(each(x), y)
    assert all(map(torch.equal, *made)) and type(layer.weight.grad) is torch.Tensor
    assert quantised.count("weight") == 1 and "input" in quantised
    x = draw(NUM_ROWS, IN)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
    assert torch.equal(layer(x), plain(x))


def test_memory():
    """A byte an element, and a scale."""
    sizes = [sum(each.numel() for each in bits(make(recipe=recipe).weight)) for recipe in RECIPES]
    assert sizes[:2] == [IN * OUT + 4, IN * OUT + 4]
    assert sizes[2] == 2 * IN * OUT + OUT * 4 + IN * 1


def assert_nearest(weight, exact, recipe):
    """The values are as near to float64's as those that the reference quantises."""
    got = weight.dequantize(torch.float32).detach().double().numpy()
    best = values(torch.from_numpy(exact), recipe, is_weight=True)
    assert (np.abs(got - exact) <= np.abs(best - exact) + 2.0**-20 * np.abs(exact)).all()


@pytest.mark.parametrize("foreach", (False, True))
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_steps_of_optimizers_are_quantised(recipe, foreach):
    """Judged by the steps in float64 from the values of the weight."""
    layer, rate, decay = make(recipe=recipe), 0.03, 0.1
    before = layer.weight.dequantize().detach().double().numpy()
    gradient = draw(OUT, IN, seed=2)
    layer.weight.grad, layer.bias.grad = gradient, torch.zeros(OUT)
    of = {"lr": rate, "foreach": foreach}
    torch.optim.SGD(layer.parameters(), momentum=0.9, **of).step()
    assert_nearest(layer.weight, before - rate * gradient.double().numpy(), recipe)
    before = layer.weight.dequantize().detach().double().numpy()
    adam = torch.optim.AdamW(layer.parameters(), weight_decay=decay, **of)
    adam.step()
    # It writes twice, and both are quantised: the decay, and a step of the rate's size.
    decayed = values(torch.from_numpy(before * (1 - rate * decay)), recipe, is_weight=True)
    step = gradient.double() / (gradient.double().abs() + 1e-8)
    assert_nearest(layer.weight, decayed - rate * step.numpy(), recipe)
    assert type(adam.state[layer.weight]["exp_avg"]) is torch.Tensor


def test_small_steps_need_a_master_copy():
    """Beside an 8, the 8-bit numbers next to 1 are 1/14 apart, above 8/7 twice that."""
    layer, lost = make(), make()
    first = torch.ones(OUT, IN)
    first[0] = 8.0
    with torch.no_grad():
        layer.weight.copy_(first)
        lost.weight.copy_(first)
        before = lost.weight.dequantize()
        master = layer.weight.dequantize(torch.float32)
        for _ in range(200):
            master[1:] += 0.001
            layer.weight.copy_(master)
            lost.weight.add_((first == 1) * 0.001)
    assert torch.equal(lost.weight.dequantize(), before)
    assert_nearest(layer.weight, master.double().numpy(), CurrentScaling())
    assert (layer.weight.dequantize()[1:] - 1.2).abs().max() < 1 / 14


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_state_dicts_hold_values_and_parameters_hold_8_bits(recipe):
    layer, other = make(LayerNormLinear, recipe), make(LayerNormLinear, recipe)
    with torch.no_grad():
        layer.weight.copy_(draw(OUT, IN))
        layer.bias.fill_(1.0)
    state = layer.state_dict()
    assert {type(state[name]) for name in ("weight", "bias")} == {torch.Tensor}
    assert torch.equal(state["weight"], layer.weight.dequantize())
    plain = make(LayerNormLinear, in_8_bits=False)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, state["weight"])
    other.load_state_dict(state)
    off = (other.weight.dequantize() - state["weight"]).abs()  # a scale's last bit
    assert (off <= 2.0**-22 * state["weight"].abs()).all()
    for device in ("cpu", "meta"):
        assigned = make(LayerNormLinear, recipe, device=device)
        assigned.load_state_dict(state, assign=True)
        assert_same_bits(assigned.weight, other.weight)
        assert assigned.weight.requires_grad and assigned.weight.tensor_model_parallel
    # In 8 bits, and without code in the file.
    file = io.BytesIO()
    torch.save(dict(layer.named_parameters()), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    third = make(LayerNormLinear, recipe)
    third.load_state_dict(saved)
    assert_same_bits(third.weight, layer.weight)
    plain.load_state_dict(saved)
    assert torch.equal(plain.weight, state["weight"])
    for copied in (
        copy.deepcopy(layer),
        torch.load(_saved(layer), weights_only=False),
        pickle.loads(pickle.dumps(layer)),
    ):
        assert_same_bits(copied.weight, layer.weight)
        with torch.no_grad():
            copied.weight.zero_()
        assert layer.weight.dequantize().abs().max() > 0
        assert copied.weight.requires_grad and isinstance(copied.weight, torch.nn.Parameter)


def test_shared_memory():
    """torch's own share_memory_() ends the process."""
    layer = make()
    assert not layer.weight.is_shared()
    before = bits(layer.weight)
    layer.share_memory()
    assert layer.weight.is_shared() and layer.bias.is_shared()
    assert all(map(torch.equal, before, bits(layer.weight)))


def _saved(layer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_conversions_keep_8_bits_and_meta_layers_get_memory(recipe):
    layer = make(recipe=recipe)
    weight, before = layer.weight, bits(layer.weight)
    layer.to(torch.bfloat16)
    assert layer.weight is weight and weight.dtype == torch.bfloat16
    layer.to("cpu").float()
    assert layer.weight is weight and all(map(torch.equal, bits(weight), before))
    assert type(weight.detach().half()) is torch.Tensor
    meta = make(recipe=recipe, device="meta")
    assert [each.shape for each in bits(meta.weight)] == [each.shape for each in before]
    meta.to_empty(device="cpu")
    torch.manual_seed(0)
    meta.reset_parameters()
    assert_same_bits(meta.weight, layer.weight)


def test_a_copy_has_memory_of_its_own():
    weight = make().weight.detach()
    before = bits(weight)
    for copied in (weight.to(weight.dtype, copy=True), weight.to("cpu", copy=True)):
        assert_same_bits(copied, weight)
        copied.zero_()
        assert all(map(torch.equal, bits(weight), before))


def test_threads_share_no_conversion_and_no_fp8_model_init():
    """What one thread begins and another one ends later must not last."""
    layer, others = make(), [make(), make()]
    a_began, b_began, a_ended = (threading.Event() for _ in range(3))

    def convert(other, began, ended):
        def function(tensor):
            began.set()
            assert ended.wait(60)
            return tensor

        other._apply(function)

    a = threading.Thread(target=convert, args=(others[0], a_began, b_began))
    b = threading.Thread(target=convert, args=(others[1], b_began, a_ended))
    for thread, began in ((a, a_began), (b, b_began)):
        thread.start()
        assert began.wait(60)
    a.join()
    assert type(layer.weight.detach().half()) is torch.Tensor
    a_ended.set()
    b.join()
    assert type(layer.weight.detach().half()) is torch.Tensor
    with contextlib.ExitStack() as outer:
        inner = fp8_model_init(recipe=BlockScaling())
        outer.enter_context(fp8_model_init(recipe=CurrentScaling()))
        inner.__enter__()
        outer.close()
        assert Linear(8, 4).weight.recipe == BlockScaling()
        inner.__exit__(None, None, None)
    assert not isinstance(Linear(8, 4).weight, QuantizedWeight)
    weight = make().weight
    for given, options in ((weight, vars(weight)), (weight.dequantize(), {})):  # as accelerate
        with pytest.raises(NotImplementedError, match="not made inside fp8_model_init"):
            type(weight)(given, requires_grad=True, **options)


def test_views_are_read_only():
    weight = make().weight.detach()
    values = weight.dequantize()
    assert torch.equal(weight[3:5] + 0, values[3:5]) and torch.equal(weight.t() + 0, values.t())
    for write in (
        lambda: weight[0].zero_(),
        lambda: weight.view(-1).add_(1),
        lambda: weight.t().copy_(values.t()),
    ):
        with pytest.raises(RuntimeError, match="writes to a view of a weight .* weight.copy_"):
            write()
    assert torch.equal(weight.dequantize(), values)
    weight.data = 2 * values
    assert torch.equal(weight.dequantize(), 2 * values)
    with pytest.raises(ValueError, match=r"data has shape \(1,\), the weight .* \(31, 100\)"):
        weight.data = values[0, :1]


def test_weight_gradients_in_main_grad_and_delayed():
    for kind in (Linear, LayerNormLinear):
        for recipe in (None, CurrentScaling()):
            layer = make(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
            plain = make(kind)
            layer.weight.main_grad = torch.zeros(OUT, IN)
            for each in (layer, plain):
                with fp8_autocast(recipe is not None, recipe):
                    y = each(draw(NUM_ROWS, IN))
                y.sum().backward()
            layer.backward_dw()
            off = (layer.weight.main_grad - plain.weight.grad).abs().max()
            assert off <= 2.0**-20 * plain.weight.grad.abs().max() and layer.weight.grad is None


@pytest.mark.slow
def test_torch_compile_runs_such_a_layer_outside_of_the_graph():
    for kind in (Linear, LayerNormLinear):
        layer, x = make(kind), draw(NUM_ROWS, IN)
        model = torch.nn.Sequential(torch.nn.ReLU(), layer)
        compiled = torch.compile(model, backend="aot_eager")
        assert torch.equal(compiled(x), model(x))
        with fp8_autocast(recipe=CurrentScaling()):
            assert torch.equal(compiled(x), model(x))


def test_what_does_not_fit_is_refused():
    x = draw(NUM_ROWS, IN)
    with fp8_autocast(recipe=BlockScaling()):
        with pytest.raises(ValueError, match="with one scale, and the recipe .* BlockScaling"):
            make()(x)
    with fp8_autocast(recipe=DelayedScaling()):
        assert make(recipe=CurrentScaling())(x).shape == (NUM_ROWS, OUT)
    with pytest.raises(
        NotImplementedError, match="torch.func was asked to transform a layer whose"
    ):
        torch.func.vmap(make())(x)
    with fp8_model_init():
        with pytest.raises(NotImplementedError, match="parameters_split is given inside fp8_model"):
            LayerNormLinear(8, 4, parameters_split=("q", "k"), device="cpu")
        with pytest.raises(TypeError, match="weight is of dtype float64 inside fp8_model_init"):
            Linear(8, 4, dtype=torch.float64)
        with fp8_model_init(enabled=False):
            assert not isinstance(Linear(8, 4).weight, QuantizedWeight)
    for options, sentence in (
        ({"enabled": None}, "enabled is None; expected True or False"),
        ({"recipe": "mx"}, "recipe is a str; expected DelayedScaling"),
    ):
        with pytest.raises(TypeError, match=sentence):
            fp8_model_init(**options).__enter__()
    assert not isinstance(Linear(8, 4).weight, QuantizedWeight)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_on_a_gpu(recipe):
    made = []
    for device in ("cpu", "cuda"):
        layer = make(recipe=recipe).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(2):
            with fp8_autocast(recipe=recipe):
                y = layer(cupynorm.rms_norm(draw(NUM_ROWS, IN).to(device), IN))
            optimizer.zero_grad()
            y.backward(draw(NUM_ROWS, OUT, seed=1).to(device))
            optimizer.step()
        assert isinstance(layer.weight, QuantizedWeight)
        made.append((y.detach().cpu(), layer.weight.detach().dequantize().cpu()))
    for expected, got in zip(*made):
        assert (got - expected).norm() <= 2.0**-5 * expected.norm()
