"""Layers inside fp8_autocast, one step of them, and the errors of 8-bit products.

Against products of exactly quantised tensors, only the order of float32 sums and the last rounding
differ. Against float64, each factor of a product has a uniform error of half a unit in its last
place: 2^-4 / sqrt(3) of its size for float8_e4m3fn (3 bits behind the point) and 2^-3 / sqrt(3) for
float8_e5m2. No value is small enough to be a denormal. Over all elements, a product of two then
errs relative to its norm by at most the root of the sum of both squares: 5.2% of y and 8.1% of a
gradient.
"""

from __future__ import annotations

import numpy as np
import pytest
from linear_bounds import draw, exact
from linear_cases import set_linear_parameters

from cupynorm import reference
from cupynorm.gpu import arrays

torch = pytest.importorskip("torch")
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
    """A layer, and a problem with the values of its parameters."""
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
    set_linear_parameters(module, problem)
    return module, problem


def step(module, problem, recipe, first=None, **options) -> dict[str, np.ndarray]:
    """y and the gradients of one forward and backward. Gradients of parameters accumulate."""
    device = module.layer_norm_weight.device
    x = tensor(problem.x, problem.dtype, device, grad=True)
    with fp8_autocast(recipe is not None, recipe):
        results = module(x, is_first_microbatch=first, **options)
    y, *others = results if isinstance(results, tuple) else (results,)
    y.backward(tensor(problem.dy, problem.dtype, device))
    made = {"y": y, "dx": x.grad, "dnorm_weight": module.layer_norm_weight.grad}
    if all(each.grad is not None for each in module.weights()):
        made["dweight"] = torch.cat([each.grad for each in module.weights()])
    if module.use_bias and not module.return_bias and module.biases()[0].grad is not None:
        made["dbias"] = torch.cat([each.grad for each in module.biases()])
    return {name: value.detach().double().cpu().numpy() for name, value in made.items()}


def relative(got, expected) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def truth_of(problem) -> dict[str, np.ndarray]:
    made, gradients = exact(problem)
    return {"y": made.y, **gradients._asdict()}


def values(x, recipe, *, is_gradient=False, is_weight=False) -> np.ndarray:
    """x quantised by the reference, in float64. A delayed scale is that of the same tensor."""
    x, name = x.detach().float().numpy(), NAME[recipe.fp8_format.value[is_gradient]]
    if isinstance(recipe, BlockScaling):
        rows = 128 if is_weight else 1
        how = {"block_rows": rows, "power_of_two": recipe.power_of_two}
        made = reference.fp8.quantize_blocks(x, name, **how)
        return reference.fp8.dequantize(made, name, block_rows=rows)
    power_of_two = isinstance(recipe, CurrentScaling) and recipe.power_of_two
    scale = reference.fp8.scale_of(reference.fp8.amax(x), name, power_of_two=power_of_two)
    return reference.fp8.dequantize(reference.fp8.quantize(x, name, scale), name)


def assert_product(got, a, b, added=0.0):
    """got = a b + added in float32, of float64 a and b: only float32 sums and products differ."""
    allowed = (a.shape[1] + 6) * 2.0**-24 * (np.abs(a) @ np.abs(b) + np.abs(added))
    assert (np.abs(got.detach().double().numpy() - (a @ b + added)) <= allowed + 1e-30).all()
