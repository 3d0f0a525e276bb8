"""LayerNorm and RMSNorm with 8-bit outputs inside fp8_autocast."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference import fp8 as reference

import cupynorm
from cupynorm.norm import prepared

torch = pytest.importorskip("torch")

from fp8_modules import BOTH, make, random, raw  # noqa: E402

from cupynorm import fp8_autocast  # noqa: E402
from cupynorm.recipes import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
)

E4M3 = "float8_e4m3fn"


def exact_y(module, x):
    """y before it is quantised.

    By the tile of the last 8-bit call in the arithmetic's dtype, or by the reference in float64.
    """
    options = {"out_dtype": "float64"}
    last = next(reversed(prepared.forwards.values()), None)
    if last is not None and last.plan is not None:
        plan = last.plan
        options = {
            "out_dtype": "float32",
            "launch": cupynorm.Launch(plan.strategy, plan.tile, plan.statistics),
        }
    call = cupynorm.layer_norm if isinstance(module, cupynorm.LayerNorm) else cupynorm.rms_norm
    bias = {} if getattr(module, "bias", None) is None else {"bias": module.bias}
    with torch.no_grad():
        return call(x, x.shape[-1], module.weight, eps=module.eps, **bias, **options).cpu().numpy()


def of_recipe(y, recipe, scale):
    if isinstance(recipe, DelayedScaling):
        return reference.quantize(y, E4M3, scale)
    if isinstance(recipe, CurrentScaling):
        options = {"power_of_two": recipe.power_of_two, "smallest_amax": recipe.amax_epsilon}
        return reference.quantize(y, E4M3, reference.scale_of(reference.amax(y), E4M3, **options))
    return reference.quantize_blocks(y, E4M3, power_of_two=recipe.power_of_two)


RECIPES = (
    DelayedScaling(amax_history_len=3),
    CurrentScaling(),
    CurrentScaling(Format.E4M3, power_of_two=True),
    CurrentScaling(amax_epsilon=100.0),
    CurrentScaling(amax_epsilon=-0.0),
    BlockScaling(),
    BlockScaling(power_of_two=False),
)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_bytes_and_scales_of_two_steps(recipe, kind, anywhere):
    prepared.forget()
    module = make(kind, device=anywhere)
    scale = np.float32(1)
    for step in range(2):
        x = random(5, 200, seed=step, dtype=torch.bfloat16, device=anywhere)
        with fp8_autocast(recipe=recipe):
            made = module(x, fp8_output=True)
        y = exact_y(module, x)
        truth = of_recipe(y, recipe, scale)
        assert (
            isinstance(made, cupynorm.types.QuantizedTensor)
            and made.format == E4M3
            and made.dtype == torch.bfloat16
        )
        np.testing.assert_array_equal(raw(made.data), truth.data)
        np.testing.assert_array_equal(
            raw(made.scale_inv), truth.scale_inv.reshape(made.scale_inv.shape)
        )
        assert len(np.unique(truth.data)) > 20
        if isinstance(recipe, BlockScaling):
            assert made.transposed is None and made.scale_inv.shape == (5, 2)
        else:
            np.testing.assert_array_equal(raw(made.transposed), truth.data.T)
        scale = np.float32(448) / reference.amax(y)
    assert (module._fp8.scales.get("y") is not None) == isinstance(recipe, DelayedScaling)


def test_nested_regions_and_their_calls_are_one_step():
    module, recipe = make("RMSNorm"), DelayedScaling(amax_history_len=2)
    x = random(5, 200)
    with fp8_autocast(recipe=recipe):
        with fp8_autocast(recipe=recipe):
            module(x, fp8_output=True)
        with torch.no_grad():
            module.weight.mul_(2)
        larger = module(x, fp8_output=True)
        assert module._fp8.scales["y"].scale.item() == 1
    y = exact_y(module, x)
    assert (
        module._fp8.scales["y"].scale.item() == np.float32(448) / reference.amax(y)
        and larger.scale_inv.item() == 1
    )
    with (
        fp8_autocast(recipe=recipe),
        fp8_autocast(enabled=False),
        pytest.raises(ValueError, match="outside of fp8_autocast"),
    ):
        module(x, fp8_output=True)


@BOTH
@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling()), ids=str
)
def test_gradients_are_those_of_the_plain_call(recipe, kind, anywhere):
    """With a residual and dropout. dequantize() passes gradients on unrounded.

    With one scale the tile is that of the plain call, so gradients are equal to the bit. Blocks
    have another tile, whose statistics may differ in the last place of float32.
    """
    module = make(kind, 48, device=anywhere)
    dy, dsum = (random(6, 48, seed=seed, device=anywhere) for seed in (3, 4))
    made = []
    for fp8_output in (True, False):
        x, residual = (random(6, 48, seed=seed, device=anywhere, grad=True) for seed in (1, 2))
        module.zero_grad()
        with fp8_autocast(recipe=recipe):
            options = {"return_residual": True, "fp8_output": fp8_output}
            y, added = module(x, residual, fuse=cupynorm.functors.dropout(0.25, 5), **options)
        if fp8_output:
            y = y.dequantize()
        torch.autograd.backward((y, added), (dy, dsum))
        made.append(
            (added, x.grad, residual.grad, *(parameter.grad for parameter in module.parameters()))
        )
    for one, other in zip(*made):
        allowed = 2.0**-20 * other.abs().max() if isinstance(recipe, BlockScaling) else 0
        assert ((one - other).abs() <= allowed).all() and one.abs().max() > 0


def test_a_frozen_norm_returns_a_transposed_copy_where_gradients_are_enabled():
    module, x = make("RMSNorm").requires_grad_(False), random(5, 200)
    with fp8_autocast(recipe=CurrentScaling()):
        made = module(x, fp8_output=True)
        with torch.no_grad():
            assert module(x, fp8_output=True).transposed is None
    np.testing.assert_array_equal(raw(made.transposed), raw(made.data).T)


def test_wrong_calls_are_refused():
    module, x = make("LayerNorm"), random(5, 200)
    with pytest.raises(
        ValueError,
        match="fp8_output is True outside of fp8_autocast; "
        "expected False, or the call inside of it",
    ):
        module(x, fp8_output=True)
    with fp8_autocast():
        for options, error, sentence in (
            ({"residual": x.char()}, TypeError, "residual is of dtype int8; expected one of"),
        ):
            with pytest.raises(error, match=sentence):
                module(x, fp8_output=True, **options)
        with pytest.raises(
            ValueError, match="memory_efficient was given with out_dtype float8_e4m3fn"
        ):
            make("RMSNorm", memory_efficient=True)(x, fp8_output=True)
        with pytest.raises(TypeError, match="input is an ndarray; expected a torch tensor"):
            module(x.numpy(), fp8_output=True)
        with pytest.raises(ValueError, match="normalized_shape is"):
            module(x[:, :100], fp8_output=True)
