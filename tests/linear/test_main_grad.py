"""Gradients of LayerNormLinear's weights in main_grad, and delayed to backward_dw."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
from linear_bounds import expected

import cupynorm
from cupynorm.dtypes import decode, encode

torch = pytest.importorskip("torch")
from linear_cases import CPU, DEVICES, SPLIT, as_float64, problem_of, tensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cupynorm import LayerNormLinear  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")


def main_grads(module, dtype=torch.float32, value=0.0):
    for weight in module.weights():
        weight.main_grad = torch.full(weight.shape, value, dtype=dtype, device=weight.device)


def whole(module, name) -> torch.Tensor:
    return torch.cat([getattr(each, name) for each in module.weights()])


def step(module, problem, first=None, dtype="float32", device="cpu"):
    x = tensor(problem.x, dtype, device, grad=True)
    y = module(x, is_first_microbatch=first)
    y.backward(tensor(problem.dy, dtype, device))
    return x.grad


@pytest.mark.parametrize("main_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "float64"))
@pytest.mark.parametrize("split", (None, SPLIT))
@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_are_added_to_main_grad(device, split, dtype, main_dtype):
    options = {"parameters_split": split, "params_dtype": getattr(torch, dtype), "device": device}
    module, plain = (
        LayerNormLinear(24, 16, fuse_wgrad_accumulation=True, **options),
        LayerNormLinear(24, 16, **options),
    )
    problem = problem_of(module, dtype=dtype)
    plain.load_state_dict(module.state_dict())
    main_grads(module, main_dtype, 3.0)
    dx = step(module, problem, dtype=dtype, device=device)
    assert torch.equal(dx, step(plain, problem, dtype=dtype, device=device))
    assert all(each.grad is None for each in module.weights())
    for one, other in zip(
        (*module.biases(), module.layer_norm_weight), (*plain.biases(), plain.layer_norm_weight)
    ):
        assert torch.equal(one.grad, other.grad)
    values, allowed, _ = expected(problem)["dweight"]
    # One more rounding, of the sum with 3 in main_grad's dtype.
    half_ulp = 2.0**-8 if main_dtype == torch.bfloat16 else 2.0**-24
    got = whole(module, "main_grad").double().cpu().numpy()
    assert (np.abs(got - (values + 3)) <= allowed + 2 * half_ulp * (np.abs(values) + 3)).all()
    if dtype == "bfloat16" and main_dtype == torch.float32:
        # The product is not rounded to bfloat16 before the sum, so the error is below bfloat16's.
        rounded = np.abs(decode(encode(values, "bfloat16"), "bfloat16") - values)
        exact = np.abs(got - 3 - as_float64({"dweight": whole_product(module, problem)})["dweight"])
        assert exact.max() <= 2.0**-20 * (np.abs(values).max() + 3) < rounded.max()


def whole_product(module, problem) -> torch.Tensor:
    """dy^T normalized in float64, of the rounded normalised tensor."""
    given = (problem.x, problem.norm_weight, problem.norm_bias)
    x, *parameters = (tensor(each, problem.dtype) for each in given)
    normalized = cupynorm.layer_norm(x, x.shape[-1], *parameters)
    return tensor(problem.dy).t() @ normalized.double()


def after_a_step():
    """A module of float64 with main_grad, a problem, and main_grad after one step."""
    module = LayerNormLinear(
        24, 16, fuse_wgrad_accumulation=True, params_dtype=torch.float64, **CPU
    )
    problem = problem_of(module, dtype="float64")
    main_grads(module, torch.float64)
    step(module, problem, dtype="float64")
    return module, problem, module.weight.main_grad.clone()


def assert_times(module, problem, once, times):
    """Checks that main_grad is the sum of that many steps, with errors by each addition."""
    x, dy = tensor(problem.x), tensor(problem.dy)
    with torch.no_grad():
        y = torch.nn.functional.layer_norm(
            x, x.shape[-1:], module.layer_norm_weight, module.layer_norm_bias, module.eps
        )
    sizes = times * (dy.abs().flatten(0, -2).T @ y.abs().flatten(0, -2))
    num_terms = times * dy.numel() // dy.shape[-1]
    off = (module.weight.main_grad - times * once).abs()
    assert (off <= num_terms * 2.0**-53 * sizes).all()


def test_the_first_microbatch_overwrites_main_grad():
    module, problem, once = after_a_step()
    for first, expected_times in (
        (None, 2),
        (False, 3),
        (True, 1),
        (False, 2),
        (None, 3),
        (True, 1),
        (True, 1),
    ):
        step(module, problem, first, "float64")
        assert_times(module, problem, once, expected_times)
    module.weight.overwrite_main_grad = True
    step(module, problem, False, "float64")
    assert torch.equal(module.weight.main_grad, once)


def test_microbatches_with_backwards_in_another_order():
    """Two forwards with the last backward first, and a layer used twice in one forward."""
    module, problem, once = after_a_step()
    x, dy = tensor(problem.x), tensor(problem.dy)
    for flags in ((True, False), (True, True), (True, None)):
        made = [module(x, is_first_microbatch=first) for first in flags]
        for y in reversed(made):
            y.backward(dy)
        assert_times(module, problem, once, 2)
    with torch.no_grad():
        module(x, is_first_microbatch=True)  # records no gradients, so begins no step
    step(module, problem, False, "float64")
    assert_times(module, problem, once, 3)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_microbatches_of_main_grad_under_checkpointing(use_reentrant):
    """A forward that backward runs again begins no step.

    With use_reentrant=True the first run is not recorded, so the second one begins the step, once.
    """
    module, problem, once = after_a_step()
    dy = tensor(problem.dy)

    def run(first):
        x = tensor(problem.x, grad=True)
        return checkpoint(
            lambda x: module(x, is_first_microbatch=first), x, use_reentrant=use_reentrant
        )

    for _ in range(2):
        made = [run(True), run(False)]
        for y in reversed(made):
            y.backward(dy)
        assert_times(module, problem, once, 2)
        run(False).backward(dy)
        assert_times(module, problem, once, 3)
    for first, expected_times in (
        (True, 1),
        (False, 2),
        (None, 3),
        (True, 1),
    ):  # each backward after its forward
        run(first).backward(dy)
        assert_times(module, problem, once, expected_times)


def test_marks_of_other_libraries_on_a_weight_are_honoured():
    module = LayerNormLinear(
        24, 16, fuse_wgrad_accumulation=True, parameters_split=("a", "b"), **CPU
    )
    problem = problem_of(module)
    main_grads(module)
    module.a_weight.grad_added_to_main_grad, module.a_weight.zero_out_wgrad = False, True
    fired = []
    module.a_weight.register_hook(lambda gradient: fired.append(gradient))
    step(module, problem)
    assert module.a_weight.grad_added_to_main_grad is True and len(fired) == 1
    assert fired[0].shape == module.a_weight.shape and not fired[0].any()
    assert module.b_weight.grad is None and not hasattr(module.b_weight, "grad_added_to_main_grad")
    asked = []
    module.b_weight.__fsdp_param__ = True
    kept = module.b_weight.main_grad
    del module.b_weight.main_grad
    module.b_weight.get_main_grad = lambda: asked.append(1) or kept
    before = kept.clone()
    step(module, problem)
    assert asked == [1]
    torch.testing.assert_close(kept, 2 * before, rtol=2.0**-22, atol=0)


def test_a_missing_or_wrong_main_grad_is_refused():
    module = LayerNormLinear(24, 16, fuse_wgrad_accumulation=True, **CPU)
    x = torch.ones(3, 24)
    module.weight.main_grad = torch.zeros(24 * 16)
    with pytest.raises(ValueError, match=r"main_grad has shape \(384,\); expected \(16, 24\)"):
        module(x)
    del module.weight.main_grad
    with pytest.raises(
        RuntimeError,
        match="weight has no main_grad, to which fuse_wgrad_accumulation=True adds its gradient",
    ):
        module(x)
    with torch.no_grad():
        module(x)
    module.weight.requires_grad_(False)
    module(x.requires_grad_()).sum().backward()


def test_what_surrounds_backward_dw():
    module, plain = (LayerNormLinear(24, 16, delay_wgrad_compute=d, **CPU) for d in (True, False))
    assert module.need_backward_dw() and not plain.need_backward_dw()
    problem, ran = problem_of(module), []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    for _ in range(2):
        step(module, problem)
    for count in (1, 2):
        module.backward_dw()
        assert len(ran) == count
    with pytest.raises(RuntimeError, match="no backward has left a weight gradient"):
        module.backward_dw()
    assert all(each.skip_backward_post_hook for each in (module.weight, module.bias))
    plain.backward_dw()  # does nothing
    step(module, problem)
    assert not copy.deepcopy(module)._gradients.queue and len(module._gradients.queue) == 1


LAYERS = (
    (LayerNormLinear, {}),
    (LayerNormLinear, {"parameters_split": {"q": 20, "k": 11}, "save_normalized": True}),
    (LayerNormLinear, {"bias": False}),
    (cupynorm.Linear, {}),
)


@pytest.mark.parametrize("fuse, delay", ((True, False), (False, True), (True, True)))
@pytest.mark.parametrize("recipe", (None, cupynorm.recipes.CurrentScaling()), ids=str)
@pytest.mark.parametrize("kind, options", LAYERS)
def test_each_layer_has_the_gradients_of_a_plain_one(kind, options, recipe, fuse, delay):
    """Accumulated over two microbatches. Sums in float32, in another order."""
    torch.manual_seed(0)
    own = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
    module, plain, made = (
        kind(100, 31, **options, **own, **CPU),
        kind(100, 31, **options, **CPU),
        [],
    )
    plain.load_state_dict(module.state_dict())
    main_grads(module, value=1.0)
    for each in (module, plain):
        torch.manual_seed(1)
        x = torch.randn(37, 100, requires_grad=True)
        for factor in (1.0, 2.0):
            with cupynorm.fp8_autocast(recipe is not None, recipe):
                y = each(factor * x)
            y.backward(torch.randn(37, 31))
        if delay and each is module:
            assert all(part.grad is None for part in (*each.weights(), *each.biases()))
        for _ in range(2):
            each.backward_dw()
        dweight = whole(module, "main_grad") - 1 if fuse and each is module else whole(each, "grad")
        made.append([x.grad, dweight, *(bias.grad for bias in each.biases())])
    assert not fuse or all(weight.grad is None for weight in module.weights())
    for got, right in zip(*made, strict=True):
        assert (got - right).abs().max() <= 2.0**-18 * right.abs().max()


@pytest.mark.parametrize(
    "written", ("the gradient of y", "the normalised tensor", "the input", "the norm's weight")
)
def test_a_tensor_written_before_backward_dw_is_refused(written):
    """As autograd refuses saved tensors that were written."""
    module = LayerNormLinear(
        24, 16, delay_wgrad_compute=True, return_layernorm_output=True, save_normalized=True, **CPU
    )
    if written in ("the input", "the norm's weight"):
        module = LayerNormLinear(24, 16, delay_wgrad_compute=True, **CPU)
        module.layer_norm_weight.requires_grad_(False), module.layer_norm_bias.requires_grad_(False)
    x, dy = torch.randn(3, 24), torch.randn(3, 16)
    made = module(x)
    y, normalized = made if isinstance(made, tuple) else (made, None)
    y.backward(dy)
    with torch.no_grad():
        {
            "the gradient of y": dy,
            "the normalised tensor": normalized,
            "the input": x,
            "the norm's weight": module.layer_norm_weight,
        }[written].mul_(2)
    with pytest.raises(
        RuntimeError, match=f"{written} was written to between a backward and its backward_dw"
    ):
        module.backward_dw()
    assert module.weight.grad is None


def test_a_backward_without_a_gradient_of_y_counts_for_backward_dw():
    module = LayerNormLinear(24, 16, delay_wgrad_compute=True, return_layernorm_output=True, **CPU)
    x = torch.randn(3, 24)
    for recipe in (None, cupynorm.recipes.CurrentScaling()):
        with cupynorm.fp8_autocast(recipe is not None, recipe):
            normalized = module(x)[1]
        normalized.square().sum().backward()
        module.backward_dw()
        assert module.weight.grad is None and not module._gradients.queue


@pytest.mark.parametrize("recipe", (None, cupynorm.recipes.CurrentScaling()), ids=str)
@pytest.mark.parametrize("return_bias", (False, True))
def test_splits_in_autocast_of_the_other_16_bit_dtype(return_bias, recipe):
    """torch's cat fails for float16 inside autocast of bfloat16."""
    module = LayerNormLinear(
        32,
        16,
        params_dtype=torch.float16,
        parameters_split=("a", "b"),
        return_bias=return_bias,
        **CPU,
    )
    x = torch.randn(4, 32, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), cupynorm.fp8_autocast(recipe is not None, recipe):
        made = module(x)
        results = made if return_bias else (made,)
        assert all(each.dtype == torch.bfloat16 for each in results)
        sum(each.float().square().sum() for each in results).backward()
    assert x.grad.abs().sum() > 0 and all(
        each.grad.dtype == torch.float16 for each in module.weights()
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected, mapped = (run(x) for run in (module, torch.func.vmap(module)))
    expected, mapped = (made[0] if return_bias else made for made in (expected, mapped))
    torch.testing.assert_close(mapped, expected, rtol=2.0**-7, atol=2.0**-7)


def test_a_delayed_8_bit_weight_gradient_frees_the_input():
    layer = LayerNormLinear(64, 32, delay_wgrad_compute=True, **CPU)
    x = torch.ones(1000, 64) + 0
    address = x.data_ptr()
    with cupynorm.fp8_autocast(recipe=cupynorm.recipes.CurrentScaling()):
        y = layer(x)
    del x
    y.sum().backward()
    del y
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    assert not any(each.data_ptr() == address for each in held)


@pytest.mark.parametrize("recipe", (None, cupynorm.recipes.CurrentScaling()), ids=str)
def test_each_backward_has_its_backward_dw_where_only_a_returned_bias_is_trained(recipe):
    module = LayerNormLinear(32, 16, return_bias=True, delay_wgrad_compute=True, **CPU)
    module.weight.requires_grad_(False)
    with cupynorm.fp8_autocast(recipe is not None, recipe):
        y, bias = module(torch.ones(4, 32, requires_grad=True))
    (y.sum() + bias.sum()).backward()
    module.backward_dw()
    assert torch.equal(module.bias.grad, torch.ones(16))


def test_create_graph_is_refused_for_delayed_gradients():
    module = LayerNormLinear(24, 16, delay_wgrad_compute=True, **CPU)
    x = torch.randn(3, 24, requires_grad=True)
    with pytest.raises(RuntimeError, match="expected create_graph=False"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("delay", (False, True))
@pytest.mark.parametrize("recipe", (None, cupynorm.recipes.CurrentScaling()), ids=str)
@pytest.mark.parametrize("layer", (LayerNormLinear, cupynorm.Linear))
def test_a_backward_of_the_input_alone_leaves_no_weight_gradient(layer, recipe, delay):
    """As adversarial training and saliency maps take it, before a step."""
    options = {"delay_wgrad_compute": True} if delay else {"fuse_wgrad_accumulation": True}
    module, x = layer(32, 16, **options, **CPU), torch.randn(4, 32, requires_grad=True)
    module.weight.main_grad = torch.zeros(16, 32)

    def y():
        with cupynorm.fp8_autocast(recipe is not None, recipe):
            return module(x).square().sum()

    (dx,) = torch.autograd.grad(y(), x)
    y().backward(inputs=[x])
    assert torch.equal(x.grad, dx) and dx.any()
    assert not module._gradients.queue and not module.weight.main_grad.any()
    y().backward(inputs=[x, module.weight])
    if delay:
        module.backward_dw()
    assert not module._gradients.queue
    gradient = module.weight.grad if delay else module.weight.main_grad
    assert gradient.any() and module.bias.grad is None
    before = gradient.clone()
    y().backward(inputs=[module.bias])
    if delay:
        module.backward_dw()
    assert module.bias.grad.any() and torch.equal(gradient, before)
