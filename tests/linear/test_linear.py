"""layer_norm_linear under autograd: values, gradients, memory and autocast."""

from __future__ import annotations

import numpy as np
import pytest
from linear_bounds import assert_right, draw, expected

import cupynorm
from cupynorm.dtypes import DTYPES

torch = pytest.importorskip("torch")
from linear_cases import (  # noqa: E402
    CPU,
    DEVICES,
    NORMS,
    WAYS,
    call,
    leaves,
    problem_of,
    recorded,
    tensor,
)

from cupynorm import LayerNormLinear  # noqa: E402
from cupynorm.norm import calls  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"without": ("norm_bias", "bias")},
        {"zero_centered_weight": True, "norm_dtype": "float32"},
        {"residual": True, "dnormalized": True, "dsum": True},
        {"without": ("norm_weight", "norm_bias"), "num_rows": 1, "in_features": 7},
        {"num_rows": 3, "in_features": 1, "out_features": 1},
    ),
    ids=str,
)
@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_results_and_gradients_are_within_bounds(device, norm_name, dtype, way, options):
    problem = draw(norm_name, dtype, **options)
    absent = tuple(
        name
        for name, there in (("normalized", problem.dnormalized), ("sum", problem.dsum))
        if there is None
    )
    assert_right(problem, recorded(problem, device, **way), absent)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved"))
@pytest.mark.parametrize("norm_name", NORMS)
def test_first_and_second_derivatives_are_numerical_ones(norm_name, way):
    problem = draw(norm_name, "float64", 3, 5, 4, residual=True)
    given = leaves(problem)
    asked = {"return_residual": True, "return_normalized": True}

    def function(*tensors):
        return call(problem, dict(zip(given, tensors)), **asked, **way)

    assert torch.autograd.gradcheck(function, tuple(given.values()))
    assert torch.autograd.gradgradcheck(function, tuple(given.values()))
    if way == {}:
        assert torch.autograd.gradcheck(function, tuple(given.values()), check_batched_grad=True)


@pytest.mark.parametrize("frozen", ("x", "norm_weight", "norm_bias", "weight", "bias"))
def test_only_the_wanted_gradients_are_computed(frozen):
    problem = draw()
    given = leaves(problem)
    given[frozen].requires_grad_(False)
    call(problem, given).backward(tensor(problem.dy, "float32"))
    results = recorded(problem)
    for name, value in given.items():
        if name == frozen:
            assert value.grad is None
        elif value is not None:
            np.testing.assert_array_equal(value.grad.double().numpy(), results[f"d{name}"])


def count_normalizations(monkeypatch) -> list:
    made = []
    plain = calls.prepare_forward

    def prepare_forward(request, purpose):
        made.append(request)
        return plain(request, purpose)

    monkeypatch.setattr(calls, "prepare_forward", prepare_forward)
    return made


def saved_bytes(function) -> tuple[int, object]:
    """The number of bytes that autograd saves besides leaves, and the result of function."""
    seen = {}

    def pack(saved):
        if not saved.is_leaf or not saved.requires_grad:
            seen[saved.data_ptr()] = saved.numel() * saved.element_size()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = function()
    return sum(seen.values()), result


def test_tensors_saved_for_backward(monkeypatch):
    """mean and rstd; with save_normalized also the normalised tensor.

    Where the norm has no gradients, backward normalises x again.
    """
    problem = draw(dtype="bfloat16", num_rows=64, in_features=96)
    for way, frozen, num_bytes, again in (
        ({}, (), 0, 0),
        ({}, ("x", "norm_weight", "norm_bias"), 2 * (64 + 2) * 96, 1),
        ({"save_normalized": True}, (), 2 * 64 * 96, 0),
    ):
        given = leaves(problem)
        for name in frozen:
            given[name].requires_grad_(False)
        found, y = saved_bytes(lambda: call(problem, given, **way))  # noqa: B023
        assert found == num_bytes + 2 * 64 * 4
        made = count_normalizations(monkeypatch)
        y.backward(torch.ones_like(y))
        assert len(made) == again
        monkeypatch.undo()
    given = leaves(problem)
    given["weight"].requires_grad_(False)  # then the normalised tensor is not needed
    y = call(problem, given)
    made = count_normalizations(monkeypatch)
    y.backward(torch.ones_like(y))
    assert not made


def peak_of(function):
    """The largest number of bytes of CPU tensors that function has allocated at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"
    )
    return int(np.cumsum([0, *(change for _, change in changes)]).max())


@pytest.mark.parametrize("options", ({}, {"save_normalized": True}), ids=str)
def test_peak_memory_of_backward(kernels, options):
    """dx in the memory of d normalized, the normalised tensor, and the gradient of the weight."""
    # Fewer rows have one launch, which reads dy again, so that dx cannot overwrite it.
    num_rows, in_features, out_features = 2048, 128, 512
    layer = cupynorm.LayerNormLinear(in_features, out_features, device="cpu", **options)
    x, dy = (
        torch.randn(num_rows, in_features, requires_grad=True),
        torch.randn(num_rows, out_features),
    )
    y = layer(x)
    peak = peak_of(lambda: torch.autograd.grad(y, (x, *layer.parameters()), dy))
    row_size, weight_size = 4 * num_rows * in_features, 4 * in_features * out_features
    made = 1 if options else 2
    # Gradients of parameters and their partial sums.
    vectors = 4 * 8 * (in_features + out_features)
    assert made * row_size + weight_size <= peak < made * row_size + weight_size + vectors


@pytest.mark.gpu
@pytest.mark.parametrize("in_features", (96, 1024, 8192, 20000, 300000))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_one_backward_kernel_of_each_strategy(dtype, in_features):
    problem = draw("layer_norm", dtype, num_rows=40, in_features=in_features, out_features=24)
    assert_right(problem, recorded(problem, "cuda"), ("normalized", "sum"))


@pytest.mark.parametrize("norm_name", NORMS)
def test_transforms_and_forward_mode(norm_name):
    problem = draw(norm_name, "float64", 3, 5, 4)
    given = leaves(problem)
    x, tangent = given["x"].detach(), torch.randn(3, 5, dtype=torch.float64)

    def function(x):
        return call(problem, given | {"x": x}) ** 2

    plain = torch.func.vmap(lambda row: call(problem, given | {"x": row}))(x)
    torch.testing.assert_close(plain, call(problem, given))
    jacobian = torch.autograd.functional.jacobian(function, x)
    torch.testing.assert_close(torch.func.jacrev(function)(x), jacobian)
    _, pushed = torch.func.jvp(function, (x,), (tangent,))
    torch.testing.assert_close(pushed, torch.einsum("abcd,cd->ab", jacobian, tangent))


@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved"))
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_rounds_the_operands_of_products(device, way):
    """Products are in the autocast dtype. The norm reads float32 and rounds once."""
    problem = draw(num_rows=4)
    given = leaves(problem, device)
    with torch.autocast(device, torch.bfloat16):
        y = call(problem, given, **way)
        with torch.no_grad():
            assert torch.equal(call(problem, given, **way), y)
    assert y.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    assert all(value.grad.dtype == torch.float32 for value in given.values() if value is not None)
    # Both operands of a product and the product are rounded to bfloat16: three times 2^-8 of terms
    # that do not cancel.
    problem.dy = np.ones_like(problem.dy)
    truth = {name: values for name, (values, *_) in expected(problem).items()}
    for name, got in {
        "y": y,
        **{f"d{name}": value.grad for name, value in given.items() if value is not None},
    }.items():
        off = np.abs(got.detach().double().cpu().numpy() - truth[name]).max()
        assert off <= 3 * 2.0**-8 * 24**0.5 * np.abs(truth[name]).max(), name
    with torch.autocast(device, torch.bfloat16), pytest.raises(TypeError, match="dtype"):
        call(problem, given | {"x": torch.ones(4, 24, dtype=torch.int32, device=device)})


@pytest.mark.parametrize("way", ("backward", "delayed", "create_graph", "8 bits"))
@pytest.mark.parametrize("device", DEVICES)
def test_the_bias_gradient_is_rounded_once(device, way):
    """The gradient of y is float16, the bias bfloat16, which would round each element to 1."""
    module = LayerNormLinear(
        24, 16, params_dtype=torch.bfloat16, device=device, delay_wgrad_compute=way == "delayed"
    )
    x = torch.randn(8, 24, dtype=torch.bfloat16, device=device)
    dy = torch.ones(8, 16, dtype=torch.float16, device=device)
    dy[::2] = -1 - 2.0**-9
    for layout in (dy, dy[:, :1].expand(8, 16)):
        module.zero_grad()
        with (
            torch.autocast(device, torch.float16),
            cupynorm.fp8_autocast(way == "8 bits", recipe=cupynorm.recipes.CurrentScaling()),
        ):
            y = module(x)
        y.backward(layout, create_graph=way == "create_graph")
        module.backward_dw()
        assert y.dtype == torch.float16 and (module.bias.grad == -(2.0**-7)).all()


@pytest.mark.parametrize("options", ({}, {"delay_wgrad_compute": True}), ids=str)
def test_backward_inside_autocast(options):
    """The gradients do not depend on the region of the backward."""
    module = LayerNormLinear(24, 16, **options, **CPU)
    problem, made = problem_of(module), []
    for inside in (False, True):
        module.zero_grad()
        x = tensor(problem.x, "float32", grad=True)
        y = module(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y.backward(tensor(problem.dy, "float32"))
            module.backward_dw()
        made.append([x.grad, *(each.grad for each in module.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*made))
