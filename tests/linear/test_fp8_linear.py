"""LayerNormLinear inside fp8_autocast: beside products of exactly quantised tensors, beside float64,
and what it keeps from step to step.

Beside exactly quantised tensors only float32's sums and the last rounding may differ. Beside float64 each factor of a product
errs by a half unit in its last place, uniformly: 2^-4 / sqrt(3) of its size for float8_e4m3fn (3 bits behind the point), 2^-3 /
sqrt(3) for float8_e5m2, where no value is small enough to be a denormal. So a product of two, over all elements, errs by at
most (relative to its norm) the root of the sum of the squares of both, which is 5.2% of y and 8.1% of a gradient, and twice as
rarely.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from linear_bounds import draw

import cupynorm
from cupynorm import reference
from cupynorm.gpu import arrays

torch = pytest.importorskip("torch")
from cupynorm import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    LayerNormLinear,
    fp8_autocast,
)
from cupynorm.linear import fp8 as fp8_linear  # noqa: E402
from cupynorm.nn import autocast, fp8, products, quantization, recipes  # noqa: E402

CPU = {"device": "cpu"}
NAME = {recipes.E4M3: "float8_e4m3fn", recipes.E5M2: "float8_e5m2"}
OF_Y = (2 * 2.0**-8 / 3) ** 0.5
OF_GRADIENT = ((2.0**-8 + 2.0**-6) / 3) ** 0.5
RECIPES = (
    DelayedScaling(amax_history_len=4),
    DelayedScaling(margin=1, fp8_format=Format.E4M3, amax_history_len=4),
    CurrentScaling(),
    CurrentScaling(Format.E4M3, power_of_two=True),
    BlockScaling(),
)


def tensor(values, dtype="bfloat16", device="cpu", grad=False):
    return arrays.from_float64(values, dtype, torch.empty(0)).to(device).requires_grad_(grad)


def make(num_rows=40, in_features=200, out_features=72, dtype="bfloat16", device="cpu", **options):
    """A layer, and the problem whose parameters it has."""
    norm_name = "rms_norm" if options.get("normalization") == "RMSNorm" else "layer_norm"
    zero_centered = options.get("zero_centered_gamma", False)
    without = [
        *(("norm_bias",) if norm_name == "rms_norm" else ()),
        *(() if options.get("bias", True) else ("bias",)),
    ]
    problem = draw(
        norm_name,
        dtype,
        num_rows,
        in_features,
        out_features,
        zero_centered_weight=zero_centered,
        without=without,
    )
    module = LayerNormLinear(
        in_features, out_features, params_dtype=getattr(torch, dtype), device=device, **options
    )
    with torch.no_grad():
        for parameter, values in (
            (module.layer_norm_weight, problem.norm_weight),
            (module.layer_norm_bias, problem.norm_bias),
        ):
            if parameter is not None:
                parameter.copy_(tensor(values, dtype))
        for parts, whole in ((module._weights(), problem.weight), (module._biases(), problem.bias)):
            for part, values in zip(
                parts,
                ()
                if whole is None
                else np.split(whole, np.cumsum(module.parameter_split_sizes)[:-1]),
            ):
                part.copy_(tensor(values, dtype))
    return module, problem


def step(module, problem, recipe, first=None, **options) -> dict[str, np.ndarray]:
    """y, normalized and gradients of one forward and backward, the parameters' added up as they are."""
    device = module.layer_norm_weight.device
    x = tensor(problem.x, problem.dtype, device, grad=True)
    with fp8_autocast(recipe=recipe):
        results = module(x, is_first_microbatch=first, **options)
    y, *others = results if isinstance(results, tuple) else (results,)
    y.backward(tensor(problem.dy, problem.dtype, device))
    made = {"y": y, "dx": x.grad, "dnorm_weight": module.layer_norm_weight.grad}
    if all(each.grad is not None for each in module._weights()):
        made["dweight"] = torch.cat([each.grad for each in module._weights()])
    if module.use_bias and not module.return_bias and module._biases()[0].grad is not None:
        made["dbias"] = torch.cat([each.grad for each in module._biases()])
    return {name: value.detach().double().cpu().numpy() for name, value in made.items()}


def relative(got, expected) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def truth_of(problem) -> dict[str, np.ndarray]:
    made = reference.norm_linear(
        problem.x, problem.norm_weight, problem.norm_bias, problem.weight, problem.bias, centered=problem.centered,
        zero_centered_weight=problem.zero_centered_weight,
    )  # fmt: skip
    gradients = reference.norm_linear_backward(
        problem.dy, problem.x, made.mean, made.rstd, problem.norm_weight, problem.norm_bias, problem.weight,
        zero_centered_weight=problem.zero_centered_weight,
    )  # fmt: skip
    return {"y": made.y, **gradients._asdict()}


# Every code path: norms, dtypes, what is saved and returned, rows and columns that are no multiples of 16, splits.
LAYERS = (
    {},
    {"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False},
    {"parameters_split": {"q": 40, "k": 32}, "save_normalized": True},
    {"num_rows": 37, "in_features": 100, "out_features": 31},
    {"in_features": 128, "out_features": 160},
    {"dtype": "float32"},
    {"dtype": "float16", "num_rows": 1},
    {"normalization": "RMSNorm", "dtype": "float16", "save_normalized": True, "num_rows": 33},
    {
        "dtype": "float32",
        "zero_centered_gamma": True,
        "return_layernorm_output": True,
        "out_features": 31,
    },
)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_within_what_the_formats_allow(anywhere, options, recipe):
    module, problem = make(device=anywhere, **options)
    if isinstance(recipe, DelayedScaling):
        step(module, problem, recipe)  # the first step has scale 1
        module.zero_grad()
    made, truth = step(module, problem, recipe), truth_of(problem)
    bounds = {"y": OF_Y, "dbias": 2.0**-8}
    for name, got in made.items():
        assert relative(got, truth[name]) <= bounds.get(name, OF_GRADIENT), name
    # And it is in 8 bits: no 16-bit product is as far off as a fourth of that.
    assert relative(made["y"], truth["y"]) > OF_Y / 4


@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=2), CurrentScaling(power_of_two=True)), ids=str
)
@pytest.mark.parametrize(
    "options", ({}, {"normalization": "RMSNorm", "save_normalized": True}), ids=str
)
def test_by_the_kernels(options, recipe, kernels):
    """What a GPU does but for its products: the norm's kernel writes 8 bits, and one kernel each makes the other tensors."""
    module, problem = make(32, 48, 16, **options)
    step(module, problem, recipe)
    module.zero_grad()
    del kernels[:]
    made, truth = step(module, problem, recipe), truth_of(problem)
    for name, got in made.items():
        assert relative(got, truth[name]) <= {"y": OF_Y, "dbias": 2.0**-8}.get(name, OF_GRADIENT), (
            name
        )
    sources = [each.kernel.source for each in kernels]
    # The weight, the norm (current scaling: twice), with save_normalized its transposed copy, dy, the norm's gradients, and,
    # unless it was kept, the normalised tensor again.
    assert sources.count("quantize.cu") == 3
    # dy is summed up where it is quantised: of its sums and of the norm's gradients the last part.
    assert sources.count("backward_parameters.cu") == 2
    assert sources.count("update_scales.cu") == (2 if isinstance(recipe, DelayedScaling) else 0)
    assert sources.count("forward_warp.cu") == (2 if isinstance(recipe, CurrentScaling) else 1)
    if isinstance(recipe, DelayedScaling):
        assert (
            module._fp8_states["forward"].amax_history[-1, :2] > 0
        ).all() and module._fp8_states["forward"].scale[0] != 1


def test_few_tensors_are_there_at_a_time(kernels):
    """In backward, besides dy the other way round in 8 bits: what reaches the norm goes before the weight's gradient is made,
    and dy's own 8 bits when they have been multiplied."""
    num_rows, in_features, out_features = 1024, 128, 2048
    layer = LayerNormLinear(in_features, out_features, params_dtype=torch.float32, device="cpu")
    x, dy = (
        torch.randn(num_rows, in_features, requires_grad=True),
        torch.randn(num_rows, out_features),
    )
    with fp8_autocast(recipe=DelayedScaling()):
        y = layer(x)
    held = []

    def multiply(a, *others, **options):
        there = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        of_dy = {each.data_ptr() for each in there if each.dtype == recipes.E5M2}
        like_x = {
            each.data_ptr() for each in there if each.dtype == x.dtype and each.shape == x.shape
        }
        held.append((len(of_dy), len(like_x)))
        return multiplied(a, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        multiplied = fp8_linear.multiply
        patch.setattr(fp8_linear, "multiply", multiply)
        torch.autograd.grad(y, (x, *layer.parameters()), dy)
    assert held == [(2, 1), (1, 2)]  # x; x and dx, which is where what reached the norm was


PRODUCTS = (
    CurrentScaling(),
    CurrentScaling(Format.E4M3),
    BlockScaling(),
    BlockScaling(power_of_two=False),
    DelayedScaling(),
)


def exactly_quantised(problem, recipe) -> dict[str, np.ndarray]:
    """y, dweight and the gradient of the normalised tensor of tensors that the reference has quantised,
    and the products' sizes."""
    forward, backward = (NAME[dtype] for dtype in recipe.fp8_format.value)
    made = reference.norm_linear(
        problem.x, problem.norm_weight, problem.norm_bias, problem.weight, problem.bias
    )
    normalized, weight, dy = (
        each.astype(np.float32) for each in (made.normalized, problem.weight, problem.dy)
    )

    def values(x, name, block_rows=1):
        if isinstance(recipe, BlockScaling):
            x = np.ascontiguousarray(x)
            quantized = reference.fp8.quantize_blocks(
                x, name, block_rows=block_rows, power_of_two=recipe.power_of_two
            )
            return reference.fp8.dequantize(quantized, name, block_rows=block_rows)
        scale = reference.fp8.scale_of(reference.fp8.amax(x), name)
        return reference.fp8.dequantize(reference.fp8.quantize(x, name, scale), name)

    q_weight = values(weight, forward, 128)
    q_normalized, q_dy = values(normalized, forward), values(dy, backward)
    of_columns = (values(normalized.T, forward).T, values(dy.T, backward).T)
    return {
        "y": (
            q_normalized @ q_weight.T + problem.bias,
            np.abs(q_normalized) @ np.abs(q_weight).T + np.abs(problem.bias),
        ),
        "dweight": (
            of_columns[1].T @ of_columns[0],
            np.abs(of_columns[1]).T @ np.abs(of_columns[0]),
        ),
        "reaches": (q_dy @ q_weight, np.abs(q_dy) @ np.abs(q_weight)),
    }


@pytest.mark.parametrize("recipe", PRODUCTS, ids=str)
@pytest.mark.parametrize("save_normalized", (False, True))
def test_products_of_exactly_quantised_tensors(recipe, save_normalized):
    """float32 parameters, so that nothing but the quantisation and float32's sums stands between this and the reference."""
    module, problem = make(
        dtype="float32", save_normalized=save_normalized, return_layernorm_output=True
    )
    if isinstance(
        recipe, DelayedScaling
    ):  # one step: from then on its scales are those of the same tensors' amaxes
        step(module, problem, recipe)
        module.zero_grad()
    made = step(module, problem, recipe)
    expected = exactly_quantised(problem, recipe)
    for name, depth in (("y", 200), ("dweight", 40)):
        values, sizes = expected[name]
        assert (
            np.abs(made[name] - values)
            <= (depth + 6) * 2.0**-24 * sizes + 2.0**-23 * np.abs(values)
        ).all(), name
    reaches, sizes = expected["reaches"]
    forward = reference.layer_norm(problem.x, problem.norm_weight, problem.norm_bias)
    dx = reference.layer_norm_backward(
        reaches, problem.x, forward.mean, forward.rstd, problem.norm_weight
    ).dx
    # What enters the norm errs by float32's sums of 72 products, and leaves it multiplied by no more than 4 |w| rstd.
    allowed = (
        4
        * forward.rstd[:, None]
        * np.abs(problem.norm_weight).max()
        * (72 + 6)
        * 2.0**-24
        * sizes.max(axis=1, keepdims=True)
    )
    assert (np.abs(made["dx"] - dx) <= allowed + 2.0**-20 * np.abs(dx).max()).all()


def test_what_is_returned():
    module, problem = make(return_bias=True, return_layernorm_output=True)
    x = tensor(problem.x)
    with fp8_autocast(recipe=CurrentScaling()):
        y, bias, normalized = module(x)
        with torch.no_grad():
            same, _, _ = module(x)
    assert y.shape == (40, 72) and torch.equal(bias, module.bias) and torch.equal(same, y)
    assert torch.equal(
        normalized, cupynorm.layer_norm(x, 200, module.layer_norm_weight, module.layer_norm_bias)
    )
    shaped = LayerNormLinear(200, 72, params_dtype=torch.bfloat16, **CPU)
    with fp8_autocast(recipe=CurrentScaling()):
        assert (
            shaped(x.reshape(4, 10, 200)).shape == (4, 10, 72)
            and shaped(x[0]).shape == (72,)
            and shaped(x[:0]).shape == (0, 72)
        )
    outside = module(x)
    assert not torch.equal(outside[0], y)
    with fp8_autocast(recipe=CurrentScaling()), fp8_autocast(enabled=False):
        assert torch.equal(module(x)[0], outside[0])


def test_the_gradient_of_the_normalised_tensor_counts():
    module, problem = make(return_layernorm_output=True, dtype="float32")
    made = []
    for factor in (0.0, 1.0):
        x = tensor(problem.x, "float32", grad=True)
        with fp8_autocast(recipe=CurrentScaling()):
            y, normalized = module(x)
        (y * tensor(problem.dy, "float32")).sum().add(
            (normalized**3).sum(), alpha=factor
        ).backward()
        made.append(x.grad.double().numpy())
    forward = reference.layer_norm(problem.x, problem.norm_weight, problem.norm_bias)
    alone = reference.layer_norm_backward(
        3 * forward.y**2, problem.x, forward.mean, forward.rstd, problem.norm_weight
    ).dx
    assert relative(made[1] - made[0], alone) < 2.0**-18


def test_inside_of_autocast():
    """Parameters of float32, products of 8-bit floats, results of 16 bits."""
    module, problem = make(dtype="float32", bias=False)
    x, dy = tensor(problem.x, "float32", grad=True), tensor(problem.dy)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast(recipe=CurrentScaling()):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    with fp8_autocast(recipe=CurrentScaling()):
        wide = module(x)
    assert torch.equal(wide.bfloat16(), y)
    truth = truth_of(problem)
    for name, gradient in (("dx", x.grad), ("dweight", module.weight.grad)):
        assert (
            gradient.dtype == torch.float32
            and relative(gradient.double().numpy(), truth[name]) <= OF_GRADIENT
        )


def test_zero_rows():
    module, problem = make(num_rows=0)
    for recipe in RECIPES:
        module.zero_grad()
        made = step(module, problem, recipe)
        assert (
            made["y"].shape == (0, 72)
            and made["dx"].shape == (0, 200)
            and not made["dweight"].any()
            and not made["dbias"].any()
        )


# -- what is kept ----------------------------------------------------------------------------------------


def test_scales_of_each_step():
    """This step's amaxes make the next step's scales, forward at the end of the region, backward after the backward."""
    module, problem = make()
    recipe = DelayedScaling(amax_history_len=3)
    x, dy = tensor(problem.x, grad=True), tensor(problem.dy)
    normalized = cupynorm.layer_norm(
        x, 200, module.layer_norm_weight, module.layer_norm_bias, out_dtype="float32"
    )
    with fp8_autocast(recipe=recipe):
        y = module(x)
        forward, backward = module._fp8_states["forward"], module._fp8_states["backward"]
        assert (
            forward.scale.tolist() == [1, 1, 1]
            and forward.amax_history[0, 0] == normalized.abs().max()
        )
    assert forward.scale.tolist() == [
        448 / normalized.abs().max(),
        448 / module.weight.float().abs().max(),
        1,
    ]
    assert forward.amax_history[2].tolist() == [
        normalized.abs().max(),
        module.weight.float().abs().max(),
        0,
    ]
    y.backward(dy)
    assert backward.scale.tolist() == [57344 / dy.float().abs().max(), 1]
    before = forward.scale.clone(), forward.amax_history.clone()
    with torch.no_grad(), fp8_autocast(recipe=recipe):
        module(x * 100)
    assert torch.equal(forward.scale, before[0]) and torch.equal(forward.amax_history, before[1])
    with fp8_autocast(recipe=DelayedScaling(amax_history_len=5)):
        module(x)
    assert forward.amax_history.shape == (5, 3)


def test_state_dicts_carry_the_scales():
    module, problem = make()
    recipe = DelayedScaling(amax_history_len=4)
    assert module.state_dict()["_extra_state"].numel() == 0
    for _ in range(2):
        step(module, problem, recipe)
    state = copy.deepcopy(module.state_dict())
    assert state["_extra_state"].dtype == torch.uint8
    other, _ = make()
    other.load_state_dict(state, strict=True)
    model = torch.nn.Sequential(torch.nn.Identity(), make()[0])
    model.load_state_dict({f"1.{name}": value for name, value in state.items()}, strict=True)
    for each in (module, other, model[1], copy.deepcopy(module)):
        each.zero_grad()
    expected = step(module, problem, recipe)
    for each in (other, model[1]):
        for name, value in step(each, problem, recipe).items():
            np.testing.assert_array_equal(value, expected[name])
    # Without one, or with another library's, strictly.
    del state["_extra_state"]
    other.load_state_dict(state, strict=True)
    assert not other._fp8_states
    with pytest.warns(UserWarning, match="is not cupynorm's"):
        other.load_state_dict(
            state | {"_extra_state": torch.tensor([128, 4], dtype=torch.uint8)}, strict=True
        )
    with pytest.raises(
        ValueError, match="the fp8 state has forward of 2 tensors; expected forward of 3"
    ):
        other.set_extra_state(
            fp8.pack({"forward": fp8.Scales((recipes.E4M3,) * 2, 3, torch.device("cpu"))})
        )


def test_scales_stay_where_they_are_and_go_where_the_layer_goes():
    """A CUDA graph holds their addresses."""
    module, problem = make()
    recipe = DelayedScaling(amax_history_len=4)
    step(module, problem, recipe)
    state = copy.deepcopy(module.state_dict())
    kept = [
        tensor for each in module._fp8_states.values() for tensor in (each.scale, each.amax_history)
    ]
    expected = [each.clone() for each in kept]
    step(module, problem, recipe)
    assert not torch.equal(kept[1], expected[1])
    module.load_state_dict(state, strict=True)
    again = [
        tensor for each in module._fp8_states.values() for tensor in (each.scale, each.amax_history)
    ]
    assert all(now is before for now, before in zip(again, kept)) and all(
        map(torch.equal, kept, expected)
    )
    module.half()
    assert {each.scale.dtype for each in module._fp8_states.values()} == {torch.float32} and len(
        module._fp8_states
    ) == 2
    module.to("meta")
    assert not module._fp8_states


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
    for first, times in (
        (None, 1),
        (None, 2),
        (False, 3),
        (False, 3),
        (True, 4),
        (False, 4),
        (False, 4),
        (None, 5),
    ):
        results = step(module, problem, CurrentScaling(), first)
        assert made.count((72, 200)) == times, first
        module.zero_grad()
    with torch.no_grad():
        module.weight.mul_(2)
    kept = step(module, problem, CurrentScaling(), False)
    np.testing.assert_array_equal(
        kept["y"], results["y"]
    )  # that is what False says: the weight has not changed
    assert (
        relative(
            step(module, problem, CurrentScaling(), True)["y"] - problem.bias,
            2 * (kept["y"] - problem.bias),
        )
        < 2.0**-7
    )
    assert module.float()._fp8_weight is None


def test_a_kept_weight_is_of_its_recipe(monkeypatch):
    """Another recipe quantises it anew, whatever is_first_microbatch says."""
    made = count_weights(monkeypatch)
    module, problem = make()
    step(module, problem, BlockScaling(), True)
    results = step(module, problem, CurrentScaling(), False)
    expected = step(make()[0], problem, CurrentScaling())
    np.testing.assert_array_equal(results["y"], expected["y"])
    before = made.count((72, 200))
    step(module, problem, CurrentScaling(), False)
    assert made.count((72, 200)) == before


@pytest.mark.parametrize("recipe", (CurrentScaling(), BlockScaling()), ids=str)
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpointing_around_the_region(use_reentrant, recipe):
    """The region is inside of what is run again."""
    module, problem = make()
    expected = step(module, problem, recipe)
    module.zero_grad()

    def run(x):
        with fp8_autocast(recipe=recipe):
            return module(x)

    x = tensor(problem.x, grad=True)
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=use_reentrant).backward(
        tensor(problem.dy)
    )
    np.testing.assert_array_equal(module.weight.grad.float().numpy(), expected["dweight"])
    np.testing.assert_array_equal(x.grad.float().numpy(), expected["dx"])


@pytest.mark.parametrize("recipe", (CurrentScaling(), BlockScaling()), ids=str)
def test_a_graph_that_is_kept_and_a_layer_that_is_used_twice(recipe):
    module, problem = make()
    expected = step(module, problem, recipe)
    module.zero_grad()
    x, dy = tensor(problem.x, grad=True), tensor(problem.dy)
    with fp8_autocast(recipe=recipe):
        y = module(x)
    y.backward(dy, retain_graph=True)
    np.testing.assert_array_equal(x.grad.float().numpy(), expected["dx"])
    y.backward(dy)
    np.testing.assert_array_equal(x.grad.float().numpy(), 2 * expected["dx"])
    np.testing.assert_array_equal(module.weight.grad.float().numpy(), 2 * expected["dweight"])
    module.zero_grad()
    with fp8_autocast(recipe=recipe):
        made = module(x), module(x)
    torch.autograd.backward(made, (dy, dy))
    np.testing.assert_array_equal(module.weight.grad.float().numpy(), 2 * expected["dweight"])


def test_a_step_that_an_exception_ends_did_not_begin():
    """Neither its amaxes nor its scales are left: a plain layer has the same state after the steps that were whole."""
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
    for name in ("forward", "backward"):
        assert torch.equal(module._fp8_states[name].scale, twin._fp8_states[name].scale)
        assert torch.equal(
            module._fp8_states[name].amax_history, twin._fp8_states[name].amax_history
        )


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_products_of_blocks_whose_scales_are_no_powers_of_two(device):
    """Of values that bfloat16 would round: float32 sums of float32 products, which round once each."""
    x, weight = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
        for shape in ((40, 200), (72, 200))
    )
    a = quantization.quantize_blocks(x.to(device), recipes.E4M3, power_of_two=False)
    b = quantization.quantize_blocks(
        weight.to(device), recipes.E4M3, block_rows=128, power_of_two=False
    )
    y = products.multiply(a, b, torch.float32, is_exact=False)
    a, b = (each.dequantize().double().cpu() for each in (a, b))
    assert not torch.equal(a, a.bfloat16().double())
    assert (
        (y.double().cpu() - a @ b.T).abs() <= (200 + 6) * 2.0**-24 * (a.abs() @ b.abs().T)
    ).all()


def test_what_waits_for_backward():
    """x in 16 bits, the weight transposed, statistics, two scales; with save_normalized one byte an element more."""
    for save, extra in ((False, 0), (True, 64 * 96)):
        module, problem = make(64, 96, 32, save_normalized=save)
        seen = {}

        def pack(saved):
            if not saved.is_leaf or not saved.requires_grad:
                seen[saved.data_ptr()] = saved.numel() * saved.element_size()  # noqa: B023
            return saved

        x = tensor(problem.x, grad=True)
        with (
            fp8_autocast(recipe=CurrentScaling()),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved),
        ):
            module(x)
        assert sum(seen.values()) == 96 * 32 + 2 * 64 * 4 + 2 * 4 + extra


@pytest.mark.parametrize("fuse", (False, True))
@pytest.mark.parametrize("delay", (False, True))
def test_weight_gradients_that_go_elsewhere(delay, fuse):
    options = {"parameters_split": {"q": 40, "k": 32}}
    module, problem = make(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, **options)
    plain, _ = make(**options)
    for weight in module._weights():
        weight.main_grad = torch.ones(weight.shape)
    for _ in range(2):
        expected = step(plain, problem, CurrentScaling())
        step(module, problem, CurrentScaling())
    for _ in range(2 * delay):
        assert (module.q_weight.main_grad == 1).all() or not delay or fuse
        module.backward_dw()
    name = "main_grad" if fuse else "grad"
    got = torch.cat(
        [getattr(weight, name) for weight in module._weights()]
    ).double().numpy() - float(fuse)
    # plain adds up twice in bfloat16, main_grad in float32.
    assert relative(got, expected["dweight"]) < 2.0**-8
    assert torch.equal(
        torch.cat([each.grad for each in module._biases()]),
        torch.cat([each.grad for each in plain._biases()]),
    )


def test_fp8_output_and_gradient():
    module, problem = make()
    x = tensor(problem.x)
    recipe = CurrentScaling()
    with fp8_autocast(recipe=recipe), torch.no_grad():
        y, quantised = module(x), module(x, fp8_output=True)
    assert isinstance(quantised, cupynorm.QuantizedTensor) and quantised.data.dtype == recipes.E4M3
    expected = reference.fp8.quantize(
        y.float().numpy(),
        "float8_e4m3fn",
        reference.fp8.scale_of(y.float().abs().max().numpy(), "float8_e4m3fn"),
    )
    np.testing.assert_array_equal(quantised.data.view(torch.uint8).numpy(), expected.data)
    with (
        fp8_autocast(recipe=recipe),
        pytest.raises(ValueError, match="fp8_output is True where gradients are recorded"),
    ):
        module(x, fp8_output=True)
    # With DelayedScaling as well: no step has recorded an amax of it. What is quantised is y by the scales of this moment.
    for _ in range(2):
        step(module, problem, DelayedScaling())
    with fp8_autocast(), torch.no_grad():
        y, quantised = module(x), module(x, fp8_output=True)
    scale = reference.fp8.scale_of(y.float().abs().max().numpy(), "float8_e4m3fn")
    expected = reference.fp8.quantize(y.float().numpy(), "float8_e4m3fn", scale)
    np.testing.assert_array_equal(quantised.data.view(torch.uint8).numpy(), expected.data)
    module.zero_grad()
    plain = step(module, problem, recipe)
    module.zero_grad()
    rounded = step(module, problem, recipe, fp8_grad=True)
    np.testing.assert_array_equal(rounded["dweight"], plain["dweight"])
    off = relative(rounded["dx"], plain["dx"])
    assert 2.0**-3 / 3**0.5 / 4 < off <= 2.0**-3 / 3**0.5


def test_what_is_refused():
    module, problem = make(dtype="float64", num_rows=2)
    with (
        fp8_autocast(),
        pytest.raises(TypeError, match="input is of dtype float64 inside fp8_autocast"),
    ):
        module(tensor(problem.x, "float64"))
    folded, problem = make(fused="fold")
    with (
        fp8_autocast(),
        pytest.raises(ValueError, match="fused is 'fold' inside fp8_autocast; expected None"),
    ):
        folded(tensor(problem.x))
    module, _ = make()
    x = tensor(problem.x, grad=True)
    with fp8_autocast():
        y = module(x)
    with pytest.raises(RuntimeError, match="inside fp8_autocast; expected create_graph=False"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_gpu_computes_what_the_cpu_does(recipe):
    made = []
    for device in ("cpu", "cuda"):
        module, problem = make(37, 200, 72, device=device)
        for _ in range(3):
            module.zero_grad()
            results = step(module, problem, recipe)
        made.append(results)
    for name, value in made[0].items():
        # bfloat16's last place, fast accumulation, and values that stand at a tie between two 8-bit floats.
        assert relative(made[1][name], value) < 2.0**-7, name


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", (DelayedScaling(amax_history_len=4), CurrentScaling()), ids=str)
def test_steps_in_a_cuda_graph(recipe):
    module, problem = make(64, 256, 128, device="cuda")
    twin = copy.deepcopy(module)
    x, dy = tensor(problem.x, device="cuda", grad=True), tensor(problem.dy, device="cuda")

    def run(module):
        module.zero_grad(set_to_none=False)
        with fp8_autocast(recipe=recipe):
            y = module(x)
        y.backward(dy)
        return y

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run(module), run(twin)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(module)
    for size in (1.0, 20.0, 0.1):
        with torch.no_grad():
            x.copy_(tensor(problem.x * size, device="cuda"))
        graph.replay()
        assert torch.equal(y, run(twin)) and torch.equal(module.weight.grad, twin.weight.grad)


COMPILED = (
    {},
    {"save_normalized": True, "normalization": "RMSNorm"},
    {"return_layernorm_output": True, "parameters_split": {"q": 40, "k": 32}, "bias": False},
    {"return_bias": True},
)


@pytest.mark.parametrize("options", COMPILED, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_what_torch_compiles_has_no_break(recipe, options):
    """One graph, results and scales of what is not compiled, over steps; another without gradients, and outside of a region."""
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
    """Whatever torch puts into CUDA graphs, every step has scales of its own."""
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
def test_what_is_compiled_takes_any_number_of_rows(recipe):
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


def test_microbatches_of_what_is_compiled():
    """They share a quantised weight, of which nothing that waits for backward is a part."""
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
                    len(waiting) > 5 and layer._fp8_weight[1].transposed.data_ptr() not in waiting
                )
            y.backward(tensor(problem.dy))
            made.append((y, layer.weight.grad))
        assert all(torch.equal(*pair) for pair in zip(*made)), first


def test_layers_that_are_compiled_one_by_one_share_what_is_compiled():
    """More of them than torch compiles one function for."""
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


def test_a_recipe_with_a_callable_is_compiled_around():
    """Its text would be of an object that another step may not have; results are those of what is not compiled."""
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
def test_what_is_compiled_multiplies_by_the_weight_of_the_graph(recipe):
    """A graph writes to a parameter at its end, and a call may be given others in its place."""
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


def test_what_is_compiled_and_only_the_normalised_tensor_used():
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
        # Zeros, or none, of what it does not depend on.
        assert twin.weight.grad is None or not twin.weight.grad.any()
        made.append((normalized, x.grad, twin.layer_norm_weight.grad, twin.layer_norm_bias.grad))
    assert all(torch.equal(*pair) for pair in zip(*made))


def test_a_compiled_layer_that_is_gone_before_its_backward():
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
        pytest.raises(NotImplementedError, match="torch.func was asked to transform"),
    ):
        torch.func.vmap(module)(tensor(problem.x)[None])


@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling()), ids=str
)
@pytest.mark.parametrize("save_normalized", (False, True))
def test_what_is_delayed_is_of_the_input_as_it_was(recipe, save_normalized):
    """In one buffer, as that of a captured step; and of the norm's parameters, to which an optimizer may write."""
    module, problem = make(delay_wgrad_compute=True, save_normalized=save_normalized)
    plain, _ = make(save_normalized=save_normalized)
    buffer = torch.empty_like(tensor(problem.x))
    for layer in (module, plain):
        for size in (1.0, 3.0):
            buffer.copy_(tensor(size * problem.x))
            with fp8_autocast(recipe=recipe):
                y = layer(buffer)
            y.backward(tensor(problem.dy))
    with torch.no_grad():
        module.layer_norm_weight.mul_(2)
    for _ in range(2):
        module.backward_dw()
    assert torch.equal(module.weight.grad, plain.weight.grad) and torch.equal(
        module.bias.grad, plain.bias.grad
    )


def test_gradients_of_a_normalised_tensor_that_hardly_is_one():
    """The inverse of its current scale's inverse is no float32."""
    made = []
    for save_normalized in (False, True):
        module = LayerNormLinear(
            64,
            16,
            device="cpu",
            params_dtype=torch.float32,
            normalization="RMSNorm",
            save_normalized=save_normalized,
        )
        with torch.no_grad():
            module.layer_norm_weight.fill_(1e-37)
            module.weight.copy_(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        x[:, 3] = 0
        with fp8_autocast(recipe=CurrentScaling()):
            y = module(x)
        y.sum().backward()
        made.append(module.weight.grad)
    assert torch.equal(*made) and made[0].abs().max() > 1e-37 and not made[0][:, 3].any()


_COMPILED_FOR_A_RECIPE = """
import sys, torch, cupynorm  # noqa: E402
layer = cupynorm.LayerNormLinear(256, 128, params_dtype=torch.bfloat16, device="cpu")
compiled = torch.compile(layer, fullgraph=True)
x = torch.ones(64, 256, dtype=torch.bfloat16)
made = []
for run in (layer, compiled):
    layer.zero_grad()
    with cupynorm.fp8_autocast(recipe=getattr(cupynorm, sys.argv[1])()):
        y = run(x)
    y.sum().backward()
    made.append((y, layer.weight.grad))
assert all(torch.equal(*pair) for pair in zip(*made))
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_what_torch_keeps_for_other_processes_is_of_its_recipe(tmp_path):
    """torch finds compiled code again by what it was compiled of, in which the recipe must be written."""
    hits = []
    for recipe in ("BlockScaling", "CurrentScaling", "BlockScaling"):
        done = subprocess.run(
            [sys.executable, "-c", _COMPILED_FOR_A_RECIPE, recipe],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        hits.append(int(done.stdout))
    assert hits == [0, 0, 1]


@pytest.mark.parametrize("recipe", (DelayedScaling(), CurrentScaling()), ids=str)
def test_a_region_inside_of_what_is_compiled(recipe):
    """It breaks the graph: results and scales are those of what is not compiled."""
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


def test_what_is_compiled_and_checkpointed():
    """Run again when the region has been left: the same numbers, and no other step of the scales."""
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
