"""torch tensors: subclasses, autocast, and autograd's hooks."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from norm_calls import DEVICES, NORMS, assert_few_roundings, leaves, random  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.nn import autograd  # noqa: E402

# Subclasses.


class Meters(torch.Tensor):
    """A subclass of torch.Tensor."""


def test_results_of_a_tensor_subclass_are_of_that_subclass():
    x = random(3, 40, dtype=torch.float32)
    y = cupynorm.layer_norm(x.as_subclass(Meters), 40)
    assert type(y) is Meters
    assert_few_roundings([y.as_subclass(torch.Tensor)], [cupynorm.layer_norm(x, 40)])
    assert type(cupynorm.layer_norm(torch.nn.Parameter(x), 40)) is torch.Tensor
    with pytest.raises(ValueError, match="weight is a NumPy array"):
        cupynorm.layer_norm(x.as_subclass(Meters), 40, torch.ones(40).numpy())


# Autocast.


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_autocast_gives_the_dtype_that_torch_gives(norm_name, device, dtype, autocast):
    x, weight = leaves((4, 40), (40,), dtype=dtype, device=device)
    wide = random(40, dtype=torch.float32, device=device).requires_grad_()
    with torch.autocast(device, autocast):
        expected = functional.layer_norm(x, (40,), weight).dtype
        for each in (weight, wide):
            y = getattr(cupynorm, norm_name)(x, 40, each)
            assert y.dtype == expected
            gradients = torch.autograd.grad(y.sum(), (x, each))
            assert [gradient.dtype for gradient in gradients] == [x.dtype, each.dtype]
        assert getattr(cupynorm, norm_name)(x, 40, out_dtype=dtype).dtype == dtype
        _, added = getattr(cupynorm, norm_name)(x, 40, residual=x, return_residual=True)
        assert added.dtype == (x + x).dtype
        out = torch.empty(4, 40, dtype=dtype, device=device)
        with torch.no_grad():
            assert getattr(cupynorm, norm_name)(x, 40, out=out) is out
    assert getattr(cupynorm, norm_name)(x, 40, wide).dtype == dtype


def test_autocast_of_cuda_does_not_change_calls_on_the_cpu():
    x = random(3, 40, dtype=torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert cupynorm.layer_norm(x, 40).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)


# Autograd's hooks.


def recorded(dtype=torch.float32, **options):
    x, weight, bias = leaves((6, 40), (40,), (40,), dtype=dtype)
    return (x, weight, bias), cupynorm.layer_norm(x, 40, weight, bias, **options)


def test_a_retained_graph_gives_the_same_gradients_twice():
    tensors, y = recorded()
    first, second = (torch.autograd.grad(y.sum(), tensors, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    torch.autograd.grad(y.sum(), tensors)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), tensors)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(use_reentrant):
    tensors, y = recorded()
    expected = torch.autograd.grad(y.sum(), tensors)
    again = checkpoint(
        cupynorm.layer_norm, tensors[0], 40, *tensors[1:], use_reentrant=use_reentrant
    )
    again.sum().backward()
    assert torch.equal(again, y)
    assert all(torch.equal(tensor.grad, right) for tensor, right in zip(tensors, expected))


@pytest.mark.parametrize("create_graph", [False, True])
def test_saved_tensors_may_be_packed(create_graph):
    tensors, y = recorded()
    expected = torch.autograd.grad(y.sum(), tensors, create_graph=create_graph)
    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy
        ),
        torch.autograd.graph.save_on_cpu(),
    ):
        with hooks:
            others, packed = recorded()
        got = torch.autograd.grad(packed.sum(), others, create_graph=create_graph)
        assert all(map(torch.equal, got, expected))


def test_only_the_wanted_gradients_are_computed(monkeypatch):
    asked = []
    plain = autograd.prepare_backward

    def prepare_backward(request):
        asked.append(list(request.options.gradients))
        return plain(request)

    monkeypatch.setattr(autograd, "prepare_backward", prepare_backward)
    for wanted in itertools.product((False, True), repeat=3):
        tensors = [
            tensor.requires_grad_(is_wanted)
            for tensor, is_wanted in zip(leaves((6, 40), (40,), (40,)), wanted)
        ]
        if any(wanted):
            cupynorm.layer_norm(tensors[0], 40, *tensors[1:]).sum().backward()
            assert asked.pop() == [
                name for name, each in zip(("dx", "dweight", "dbias"), wanted) if each
            ]
        assert [tensor.grad is not None for tensor in tensors] == list(wanted)
    assert not asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inputs_are_not_written(dtype):
    tensors = [
        tensor.requires_grad_()
        for tensor in (random(6, 40, dtype=dtype), random(40, dtype=dtype), random(40, dtype=dtype))
    ]
    residual, dy = random(6, 40, dtype=dtype, seed=1), random(6, 40, dtype=dtype, seed=2)
    held = [*tensors, residual, dy]
    before = [tensor.detach().clone().view(torch.uint8) for tensor in held]
    y = cupynorm.layer_norm(tensors[0], 40, *tensors[1:], residual=residual)
    first = torch.autograd.grad(y, tensors, dy, create_graph=True)
    torch.autograd.grad(sum(gradient.sum() for gradient in first), tensors[:2])
    for tensor, bits in zip(held, before):
        assert torch.equal(tensor.detach().view(torch.uint8), bits)
        assert tensor.untyped_storage().resizable()  # fully_shard frees weights that way
