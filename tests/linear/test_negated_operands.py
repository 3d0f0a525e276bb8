"""Torch views whose elements are those in memory times -1, as operands of linear layers."""

from __future__ import annotations

import pytest

import cupynorm

torch = pytest.importorskip("torch")


from cupynorm.linear.operands import join  # noqa: E402

ROWS, WIDTH, OUT = 3, 64, 32
SHAPES = {
    "input": (ROWS, WIDTH),
    "norm_weight": (WIDTH,),
    "norm_bias": (WIDTH,),
    "weight": (OUT, WIDTH),
    "bias": (OUT,),
    "residual": (ROWS, WIDTH),
}


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same elements whose memory has the opposite ones."""
    view = torch._neg_view(-tensor.detach())
    assert view.is_neg() and torch.equal(view, tensor)
    return view.requires_grad_(tensor.requires_grad)


def each_negated(tensors: dict) -> list[dict]:
    everything = {name: negated(each) for name, each in tensors.items()}
    return [*(tensors | {name: each} for name, each in everything.items()), everything]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("fused", [None, "kernel"])
def test_calls(device, fused, is_recorded):
    """On a GPU another path may compute them, which rounds elsewhere. A wrong sign is off by 1."""
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape, device=device).bfloat16().requires_grad_(is_recorded)
        for name, shape in SHAPES.items()
    }

    def call(input, norm_weight, norm_bias, weight, bias, residual):
        options = {"residual": residual, "return_residual": True, "fused": fused}
        operands = input, norm_weight, norm_bias, weight, bias
        results = cupynorm.layer_norm_linear(*operands, **options)
        if not is_recorded:
            return results
        upstream = [torch.full_like(each, 0.5) for each in results]
        leaves = *operands, residual
        plain = torch.autograd.grad(results, leaves, upstream, retain_graph=True)
        again = torch.autograd.grad(results, leaves, list(map(negated, upstream)))
        assert all(map(torch.equal, plain, again))
        return *results, *plain

    expected = call(**tensors)
    for given in each_negated(tensors):
        for result, right in zip(call(**given), expected, strict=True):
            assert (result - right).float().norm() <= 2**-6 * right.float().norm()


def test_joined_parts():
    memory = torch.arange(1.0, 9.0).view(4, 2)
    first, second = memory.split(2)
    for parts in ((first, torch._neg_view(second)), (torch._neg_view(first), second)):
        assert torch.equal(join(parts), torch.cat(parts))
    both = torch._neg_view(first), torch._neg_view(second)
    assert torch.equal(join(both), -memory) and join(both).data_ptr() == memory.data_ptr()
