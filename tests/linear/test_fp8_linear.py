"""LayerNormLinear inside fp8_autocast: values, gradients and memory."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from turns import by_turns

import cupynorm
from cupynorm import reference

torch = pytest.importorskip("torch")
from fp8_linear_cases import (  # noqa: E402
    CPU,
    OF_GRADIENT,
    OF_Y,
    RECIPES,
    assert_product,
    make,
    relative,
    step,
    tensor,
    truth_of,
    values,
)

from cupynorm import (  # noqa: E402
    LayerNormLinear,
    fp8_autocast,
    recipes,  # noqa: E402
)
from cupynorm.recipes import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
)

# Each code path: norms, dtypes, saved and returned tensors, splits, and extents that are not
# multiples of 16.
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


PLACES = by_turns(LAYERS, RECIPES, ("reference", "kernels"))
PLACES += [pytest.param(*each, "gpu", marks=pytest.mark.gpu) for each in product(LAYERS, RECIPES)]


@pytest.mark.slow
@pytest.mark.parametrize("options, recipe, anywhere", PLACES, indirect=["anywhere"], ids=str)
def test_results_are_within_the_errors_of_the_formats(anywhere, options, recipe):
    module, problem = make(device=anywhere, **options)
    if isinstance(recipe, DelayedScaling):
        step(module, problem, recipe)  # the first step has a scale of 1
        module.zero_grad()
    made, truth = step(module, problem, recipe), truth_of(problem)
    bounds = {"y": OF_Y, "dbias": 2.0**-8}
    for name, got in made.items():
        assert relative(got, truth[name]) <= bounds.get(name, OF_GRADIENT), name
    # The products are in 8 bits: those in 16 bits err by less than a fourth of that.
    assert relative(made["y"], truth["y"]) > OF_Y / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=2), CurrentScaling(power_of_two=True)), ids=str
)
@pytest.mark.parametrize(
    "options", ({}, {"normalization": "RMSNorm", "save_normalized": True}), ids=str
)
def test_launches_of_the_kernels(options, recipe, kernels):
    """The norm's kernel writes 8 bits. One kernel quantises each of the other tensors."""
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
    # Of the weight, of dy, and of the normalised tensor: its transposed copy with save_normalized,
    # else the tensor again in backward.
    assert sources.count("quantize.cu") == 3
    # The last part of the sums of dy. The norm's gradients are one launch: the rows are few.
    assert sources.count("backward_parameters.cu") == sources.count("backward_few.cu") == 1
    assert sources.count("update_scales.cu") == (2 if isinstance(recipe, DelayedScaling) else 0)
    assert sources.count("forward_warp.cu") == (2 if isinstance(recipe, CurrentScaling) else 1)
    if isinstance(recipe, DelayedScaling):
        assert (
            module._fp8.scales["forward"].amax_history[-1, :2] > 0
        ).all() and module._fp8.scales["forward"].scale[0] != 1


PRODUCTS = (
    CurrentScaling(),
    CurrentScaling(Format.E4M3),
    BlockScaling(),
    BlockScaling(power_of_two=False),
    DelayedScaling(),
)


@pytest.mark.parametrize("recipe", PRODUCTS, ids=str)
@pytest.mark.parametrize("save_normalized", (False, True))
def test_products_of_exactly_quantised_tensors(recipe, save_normalized):
    """In float32, so that only the order of float32 sums differs from the reference."""
    module, problem = make(
        dtype="float32", save_normalized=save_normalized, return_layernorm_output=True
    )
    # After one step, the scales are those of the amaxes of the same tensors.
    if isinstance(recipe, DelayedScaling):
        step(module, problem, recipe)
        module.zero_grad()
    made = step(module, problem, recipe)
    parts = problem.x, problem.norm_weight, problem.norm_bias
    normalized = reference.norm_linear(*parts, problem.weight, None).normalized
    normalized, weight, dy = (
        torch.tensor(each, dtype=torch.float32) for each in (normalized, problem.weight, problem.dy)
    )
    of_weight = values(weight, recipe, is_weight=True)
    of_dy = values(dy, recipe, is_gradient=True)
    y, dweight = (torch.from_numpy(made[name]) for name in ("y", "dweight"))
    assert_product(y, values(normalized, recipe), of_weight.T, problem.bias)
    of_columns = values(dy.t().contiguous(), recipe, is_gradient=True)
    assert_product(dweight, of_columns, values(normalized.t().contiguous(), recipe).T)
    reaches, sizes = of_dy @ of_weight, np.abs(of_dy) @ np.abs(of_weight)
    forward = reference.layer_norm(problem.x, problem.norm_weight, problem.norm_bias)
    dx = reference.layer_norm_backward(
        reaches, problem.x, forward.mean, forward.rstd, problem.norm_weight
    ).dx
    # d normalized errs by float32 sums of 72 products. The norm multiplies it by at most
    # 4 |w| rstd.
    allowed = (
        4
        * forward.rstd[:, None]
        * np.abs(problem.norm_weight).max()
        * (72 + 6)
        * 2.0**-24
        * sizes.max(axis=1, keepdims=True)
    )
    assert (np.abs(made["dx"] - dx) <= allowed + 2.0**-20 * np.abs(dx).max()).all()


def test_returned_tensors():
    module, problem = make(return_bias=True, return_layernorm_output=True)
    x, norm = tensor(problem.x), (module.layer_norm_weight, module.layer_norm_bias)
    with fp8_autocast(recipe=CurrentScaling()):
        y, bias, normalized = module(x)
        with torch.no_grad():
            same, _, _ = module(x)
        assert module(x.reshape(4, 10, 200))[0].shape == (4, 10, 72)
        assert module(x[0])[0].shape == (72,) and module(x[:0])[0].shape == (0, 72)
        with fp8_autocast(enabled=False):
            outside, _, _ = module(x)
    assert y.shape == (40, 72) and torch.equal(bias, module.bias) and torch.equal(same, y)
    assert torch.equal(normalized, cupynorm.layer_norm(x, 200, *norm))
    assert torch.equal(outside, module(x)[0]) and not torch.equal(outside, y)


def test_the_gradient_of_the_normalised_tensor_is_added():
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


def test_no_rows_give_empty_results_and_zero_gradients():
    module, problem = make(num_rows=0)
    for recipe in RECIPES:
        module.zero_grad()
        made = step(module, problem, recipe)
        assert made["y"].shape == (0, 72) and made["dx"].shape == (0, 200)
        assert not made["dweight"].any() and not made["dbias"].any()


def test_tensors_saved_for_backward():
    """The transposed weight, statistics and two scales; with save_normalized a byte per element."""
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


def test_fp8_output_and_gradient():
    module, problem = make()
    x, name = tensor(problem.x), "float8_e4m3fn"
    for recipe in (CurrentScaling(), DelayedScaling()):
        # No step has recorded an amax of y, which has its current scale.
        for _ in range(2):
            step(module, problem, recipe)
        with fp8_autocast(recipe=recipe), torch.no_grad():
            y, quantised = module(x), module(x, fp8_output=True)
        assert isinstance(quantised, cupynorm.types.QuantizedTensor)
        assert quantised.data.dtype == recipes.E4M3
        y = y.float().numpy()
        scale = reference.fp8.scale_of(reference.fp8.amax(y), name)
        expected = reference.fp8.quantize(y, name, scale)
        np.testing.assert_array_equal(quantised.data.view(torch.uint8).numpy(), expected.data)
        with fp8_autocast(recipe=recipe):
            with pytest.raises(ValueError, match="fp8_output is True where gradients are recorded"):
                module(x, fp8_output=True)
    made = []
    for options in ({}, {"fp8_grad": True}):
        module.zero_grad()
        made.append(step(module, problem, CurrentScaling(), **options))
    plain, rounded = made
    np.testing.assert_array_equal(rounded["dweight"], plain["dweight"])
    off = relative(rounded["dx"], plain["dx"])
    assert 2.0**-3 / 3**0.5 / 4 < off <= 2.0**-3 / 3**0.5


def test_wrong_calls_are_refused():
    module, problem = make(dtype="float64", num_rows=2)
    with (
        fp8_autocast(),
        pytest.raises(TypeError, match="input is of dtype float64 inside fp8_autocast"),
    ):
        module(tensor(problem.x, "float64"))
    folded, problem = make(fused="kernel")
    with (
        fp8_autocast(),
        pytest.raises(ValueError, match="fused is 'kernel' inside fp8_autocast; expected None"),
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
def test_results_on_a_gpu_are_those_of_the_cpu(recipe):
    made = []
    for device in ("cpu", "cuda"):
        module, problem = make(37, 200, 72, device=device)
        for _ in range(3):
            module.zero_grad()
            results = step(module, problem, recipe)
        made.append(results)
    for name, value in made[0].items():
        # bfloat16's last place, fast accumulation, and values halfway between two 8-bit floats.
        assert relative(made[1][name], value) < 2.0**-7, name


@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling()), ids=str
)
@pytest.mark.parametrize("save_normalized", (False, True))
def test_a_delayed_gradient_is_of_the_input_of_its_call(recipe, save_normalized):
    """The input's buffer is written again, and so are the norm's parameters."""
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


def test_gradients_of_a_tiny_normalised_tensor():
    """float32 overflows in the inverse of its scale_inv."""
    made = []
    for save_normalized in (False, True):
        torch.manual_seed(0)
        options = {"normalization": "RMSNorm", "save_normalized": save_normalized}
        module, x = LayerNormLinear(64, 16, **options, **CPU), torch.randn(32, 64)
        torch.nn.init.constant_(module.layer_norm_weight, 1e-37)
        x[:, 3] = 0
        with fp8_autocast(recipe=CurrentScaling()):
            y = module(x)
        y.sum().backward()
        made.append(module.weight.grad)
    assert torch.equal(*made) and made[0].abs().max() > 1e-37 and not made[0][:, 3].any()
