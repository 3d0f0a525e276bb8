"""Checks of CUDA graphs on several ranks.

With NCCL steps are captured and replayed. Elsewhere the same steps run again.
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from cuda_graphs import side_stream
from layer_cases import (
    CHECKS,
    DEVICE,
    MAIN,
    Case,
    Shares,
    inputs,
    make_layer,
    problem_of,
)
from torch import distributed

from cupynorm import fp8_autocast
from cupynorm.recipes import CurrentScaling, DelayedScaling

ON_GPU = DEVICE == "cuda"
RECIPES = {
    "plain": None,
    "DelayedScaling": DelayedScaling(amax_history_len=2),
    "CurrentScaling": CurrentScaling(),
}


class Steps:
    """Steps of a layer whose input, gradient and results stay at one place in memory."""

    def __init__(self, case: Case, rank: int, recipe, **options) -> None:
        problem, own = problem_of(case), Shares(case, rank)
        self.layer = make_layer(case, problem, own, **options)
        self.recipe, self.delays = recipe, bool(options.get("delay_wgrad_compute"))
        self.x, self.dy = inputs(problem, own)
        self.values = self.x.detach().clone(), self.dy.clone()
        if options.get("fuse_wgrad_accumulation"):
            self.layer.weight.main_grad = torch.zeros_like(self.layer.weight)

    def run(self) -> torch.Tensor:
        self.layer.zero_grad(set_to_none=False)
        self.x.grad = None
        in_fp8 = (
            contextlib.nullcontext() if self.recipe is None else fp8_autocast(recipe=self.recipe)
        )
        with in_fp8:
            y = self.layer(self.x)
        y.backward(self.dy)
        if self.delays:
            self.layer.backward_dw()
        return y

    def give(self, size: float) -> None:
        with torch.no_grad():
            self.x.copy_(self.values[0] * size)
            self.dy.copy_(self.values[1] * size)

    def results(self, y: torch.Tensor) -> list[torch.Tensor]:
        of_layer = [
            getattr(each, "main_grad", None) if each.grad is None else each.grad
            for each in self.layer.parameters()
        ]
        return [each.detach().clone() for each in (y, self.x.grad, *of_layer)]


def captures() -> bool:
    return distributed.get_backend() == "nccl"


def captured(steps: Steps):
    """A function that runs a step, in a CUDA graph where there can be one, and returns y."""
    with side_stream() if ON_GPU else contextlib.nullcontext():
        for _ in range(4):  # in some of the first steps ranks compare their layers
            steps.run()
    if not captures():
        return steps.run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = steps.run()

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    return replay


def in_a_graph(case: Case, options: dict, recipe, rank: int) -> None:
    """Replays with other inputs have the bits of a twin that no graph has captured."""
    steps, twin = (Steps(case, rank, recipe, **options) for _ in range(2))
    for _ in range(5):
        twin.run()
    replay = captured(steps)  # runs four steps; a capture computes nothing
    replay()
    for size in (1.0, 4.0, 0.5):
        made = []
        for each, run in ((steps, replay), (twin, twin.run)):
            each.give(size)
            made.append(each.results(run()))
        for got, right in zip(*made, strict=True):
            assert right.abs().max() > 0 and torch.equal(got, right)


DELAYED = {"delay_wgrad_compute": True}
for _case in MAIN:
    _ways = {
        "": {},
        "delayed": DELAYED,
        "delayed-main_grad": DELAYED | {"fuse_wgrad_accumulation": True},
    }
    for _way, _options in _ways.items():
        for _name, _recipe in RECIPES.items():
            if _recipe is None or not _way:
                _text = f"in_a_graph-{_case.name}-{_way}-{_name}"
                CHECKS[_text] = partial(in_a_graph, _case, _options, _recipe)
