"""Checks of CUDA graphs on several ranks, with NCCL."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from cuda_graphs import side_stream
from layer_cases import MAIN, Shares, inputs, make_layer, problem_of
from start_ranks import Checks, main

from cupynorm import fp8_autocast
from cupynorm.recipes import CurrentScaling, DelayedScaling

RECIPES = {
    "plain": None,
    "DelayedScaling": DelayedScaling(amax_history_len=2),
    "CurrentScaling": CurrentScaling(),
}


def in_a_graph(case, recipe, rank: int) -> None:
    """Replays with other inputs have the bits of a twin that no graph has captured."""
    problem, own = problem_of(case), Shares(case, rank)
    layer, twin = (make_layer(case, problem, own, delay_wgrad_compute=True) for _ in range(2))
    x, dy = inputs(problem, own)
    values = x.detach().clone(), dy.clone()

    def run(layer):
        layer.zero_grad(set_to_none=False)
        x.grad = None
        with contextlib.nullcontext() if recipe is None else fp8_autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
        layer.backward_dw()
        return y

    with side_stream():
        for _ in range(4):  # in some of the first steps ranks compare their layers
            run(layer), run(twin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = run(layer)
    dx = x.grad
    for size in (1.0, 4.0, 0.5):
        with torch.no_grad():
            x.copy_(values[0] * size)
            dy.copy_(values[1] * size)
        graph.replay()
        made = [each.clone() for each in (y, dx, *(p.grad for p in layer.parameters()))]
        expected = [run(twin), x.grad, *(p.grad for p in twin.parameters())]
        for got, right in zip(made, expected, strict=True):
            assert right.abs().max() > 0 and torch.equal(got, right)


CHECKS = Checks()
for _case in MAIN:
    for _name, _recipe in RECIPES.items():
        CHECKS[f"in_a_graph-{_case.name}-{_name}"] = partial(in_a_graph, _case, _recipe)

if __name__ == "__main__":
    main(CHECKS)
