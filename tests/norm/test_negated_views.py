"""Torch tensors whose elements are not those in memory, as operands: views whose elements are those
times -1, such as x.conj().imag, and zeros that have no memory."""

from __future__ import annotations

import pytest

import cupynorm

torch = pytest.importorskip("torch")
from float8_bytes import random  # noqa: E402

ROWS, COLS = 6, 40


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same elements and strides whose memory has the opposite ones."""
    options = {"dtype": tensor.dtype, "device": tensor.device}
    memory = torch.empty_strided(tensor.shape, tensor.stride(), **options)
    view = torch._neg_view(memory.copy_(tensor.detach()).neg_())
    assert view.is_neg() and torch.equal(view, tensor) and view.stride() == tensor.stride()
    return view.requires_grad_(tensor.requires_grad)


def draw(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    return random(*shape, dtype=dtype, seed=seed).to(device)


def as_list(results) -> list:
    results = results if isinstance(results, tuple) else (results,)
    return [each for each in results if each is not None]


def assert_same(call, tensors: dict) -> None:
    """call(**tensors) gives the same bits where any of the tensors is negated, or all of them."""
    expected = as_list(call(**tensors))
    assert expected and not any(each.isnan().any() for each in expected)
    everything = {name: negated(each) for name, each in tensors.items()}
    some = [tensors | {name: each} for name, each in everything.items()]
    for given in (*some, everything, tensors):
        results = as_list(call(**given))
        assert len(results) == len(expected)
        names = [name for name, each in given.items() if each.is_neg()]
        for result, right in zip(results, expected):
            assert torch.equal(result, right), names


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("num_cols, adds", [(COLS, True), (COLS, False), (1, False)])
def test_calls_of_negated_operands(device, norm, is_recorded, num_cols, adds):
    shapes = {"x": (ROWS, num_cols), "weight": (num_cols,), "bias": (num_cols,)}
    shapes |= {"residual": (ROWS, num_cols)} if adds else {}
    tensors = {key: draw(device, *shape, seed=at) for at, (key, shape) in enumerate(shapes.items())}
    for each in tensors.values():
        each.requires_grad_(is_recorded)

    def call(x, weight, bias, **others):
        results = getattr(cupynorm, norm)(x, num_cols, weight, bias=bias, **others)
        if not is_recorded:
            return results
        results = as_list(results)
        leaves = [each for each in (x, weight, bias, *others.values()) if each.requires_grad]
        upstream = [draw(device, *each.shape, dtype=each.dtype, seed=9) for each in results]
        plain = torch.autograd.grad(results, leaves, upstream, retain_graph=True)
        again = torch.autograd.grad(results, leaves, list(map(negated, upstream)))
        assert all(map(torch.equal, plain, again))
        return *(each.detach() for each in results), *plain

    assert_same(call, tensors)


@pytest.mark.parametrize("scale", ["given", "tensor", "row", "block"])
def test_fp8_calls_of_negated_operands(device, scale):
    tensors = {"x": draw(device, ROWS, COLS), "weight": draw(device, COLS)}
    if scale == "given":
        tensors["scale"] = torch.tensor([0.5], device=device)

    def call(x, weight, scale=scale):
        transpose = not isinstance(scale, str)
        how = cupynorm.Quantize("float8_e4m3fn", scale, transpose=transpose)
        y = cupynorm.layer_norm(x, COLS, weight, out_dtype=how)
        return (
            y.data.float(),
            y.scale_inv,
            *([] if y.transposed is None else [y.transposed.float()]),
        )

    assert_same(call, tensors)


def test_a_negated_dropout_seed(device):
    def call(x, seed):
        x = x.detach().requires_grad_()
        y = cupynorm.rms_norm(x, COLS, fuse=cupynorm.functors.dropout(0.5, seed))
        return y.detach(), *torch.autograd.grad(y.sum(), x)

    seed = torch.tensor([77], device=device)
    assert_same(call, {"x": draw(device, ROWS, COLS), "seed": seed})


@pytest.mark.parametrize("is_recorded", [False, True])
def test_functors_with_negated_arrays(device, is_recorded):
    def call(x, gate):
        given = {"fuse": cupynorm.functors.silu_gate(gate=gate)}
        with torch.set_grad_enabled(is_recorded):
            y = cupynorm.layer_norm(x, COLS, **given)
        return y.detach(), *(torch.autograd.grad(y.sum(), (x, gate)) if is_recorded else ())

    tensors = {"x": draw(device, ROWS, COLS), "gate": draw(device, ROWS, COLS, seed=1)}
    assert_same(call, {name: each.requires_grad_() for name, each in tensors.items()})


# Zeros that have no memory.


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros like a tensor, at an address that is an offset."""
    shape = (len(tensor) + 1, *tensor.shape[1:])
    zeros = torch._efficientzerotensor(shape, dtype=tensor.dtype, device=tensor.device)[1:]
    assert zeros._is_zerotensor() and zeros.is_contiguous()
    return zeros.requires_grad_(tensor.requires_grad)


def assert_same_of_zeros(call, tensors: dict) -> None:
    """call(**tensors) takes zeros without memory as any of the tensors, also behind others."""
    for name, tensor in tensors.items():
        zeros = torch.zeros_like(tensor).requires_grad_(tensor.requires_grad)
        expected = as_list(call(**(tensors | {name: zeros})))
        results = as_list(call(**(tensors | {name: without_memory(tensor)})))
        assert all(map(torch.equal, results, expected)) and len(results) == len(expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_without_memory(anywhere, dtype):
    shapes = {"x": (ROWS, COLS), "weight": (COLS,), "bias": (COLS,), "residual": (ROWS, COLS)}
    shapes |= {"dy": (ROWS, COLS), "scale": (ROWS,)}
    tensors = {
        name: draw(anywhere, *shape, dtype=dtype, seed=at).requires_grad_(name in ("x", "weight"))
        for at, (name, shape) in enumerate(shapes.items())
    }

    def call(x, weight, bias, residual, dy, scale):
        y = cupynorm.layer_norm(x, COLS, weight, bias, residual=residual)
        own = cupynorm.functors.row_scale(scale)
        scaled = cupynorm.rms_norm(x, COLS, weight, residual=residual, fuse=own)
        gradients = torch.autograd.grad(y, (x, weight), dy)
        return y.detach(), scaled.detach(), *gradients

    assert_same_of_zeros(call, tensors)


def test_what_a_kernel_writes_is_not_negated(device):
    x = draw(device, ROWS, COLS)
    sentence = "is a view that negates its memory"
    with pytest.raises(ValueError, match=f"out {sentence}"):
        cupynorm.layer_norm(x, COLS, out=torch._neg_view(torch.empty_like(x)))
    with pytest.raises(ValueError, match="or zeros without memory"):
        cupynorm.layer_norm(x, COLS, out=without_memory(x))
    amax = torch._neg_view(torch.zeros(1, device=device))
    with pytest.raises(ValueError, match=f"amax {sentence}"):
        cupynorm.layer_norm(x, COLS, out_dtype=cupynorm.Quantize("float8_e4m3fn", amax=amax))


def test_a_negated_out_on_the_cpu():
    x = random(ROWS, COLS, dtype=torch.float32)
    out = torch._neg_view(torch.empty_like(x))
    assert torch.equal(cupynorm.layer_norm(x, COLS, out=out), cupynorm.layer_norm(x, COLS))
