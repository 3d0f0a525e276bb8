"""Modules in CUDA graphs."""

from __future__ import annotations

import copy

import pytest

import cupynorm

torch = pytest.importorskip("torch")
from cuda_graphs import side_stream  # noqa: E402
from module_inputs import random_input  # noqa: E402


class Normed(torch.nn.Module):
    """Two norms, one with a residual. The torch operations between them repeat to the bit."""

    def __init__(self, num_cols: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.LayerNorm(num_cols), torch.nn.RMSNorm(num_cols)

    def forward(self, x):
        return self.last(x + 2 * self.first(x))


def normed(num_cols: int, dtype: torch.dtype) -> torch.nn.Module:
    model = Normed(num_cols)
    assert len(cupynorm.swap_norms(model).swapped) == 2
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = random_input(num_cols, seed=seed)
    return model.to("cuda", dtype)


def eager_step(model: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and the gradients of the parameters, by a copy of the model."""
    model = copy.deepcopy(model)
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *model.parameters()), dy)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_cols", [768, 20_000])
def test_a_training_step_in_a_graph(num_cols, dtype):
    """Forward and backward() of modules, replayed on other data, are the eager ones to the bit.

    All memory is the graph's own, and a replay allocates nothing.
    """
    model = normed(num_cols, dtype)
    x, dy = (torch.randn(64, num_cols, device="cuda", dtype=dtype) for _ in range(2))
    x.requires_grad_()

    def step():
        y = model(x)
        y.backward(dy)
        return y

    def forget():
        x.grad = None
        model.zero_grad(set_to_none=True)

    with side_stream():
        for _ in range(2):
            forget()
            step()
    forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    made = [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    # These would reuse a temporary of the capture that is not in the graph's pool.
    sizes = (1, 2, 64, 132, 264, 528)
    others = [torch.full((size, num_cols), 7.0, device="cuda") for size in sizes]
    for seed in range(3):
        with torch.no_grad():
            x.copy_(random_input(64, num_cols, seed=seed))
            dy.copy_(random_input(64, num_cols, seed=seed + 10))
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        right = eager_step(model, x, dy)
        assert len(right) == len(made) == 5
        for got, expected in zip(made, right):
            assert torch.equal(got, expected) and 1 < expected.abs().max() < torch.inf
    assert all((other == 7).all() for other in others)
