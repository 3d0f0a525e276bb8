"""Checks of CUDA graphs and streams on several ranks.

On GPUs steps run on a stream whose inputs arrive late, and with NCCL they are captured and
replayed. Elsewhere the same steps run again.
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

from cupynorm import CurrentScaling, DelayedScaling, fp8_autocast

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


def on_a_late_stream(case: Case, options: dict, recipe, rank: int) -> None:
    """The input and the gradient of y arrive on a side stream, after 20 ms on one of the ranks."""
    steps, twin = (Steps(case, rank, recipe, **options) for _ in range(2))
    for each in (steps, twin):
        each.run()
    for late in range(2):
        right = twin.results(twin.run())
        with torch.no_grad():
            for each in (steps.x, steps.dy):
                each.fill_(float("nan"))
        with side_stream() if ON_GPU else contextlib.nullcontext():
            if ON_GPU and late == rank:
                torch.cuda._sleep(40_000_000)
            steps.give(1.0)
            y = steps.run()
            got = steps.results(y)
        for one, other in zip(got, right, strict=True):
            assert other.abs().max() > 0 and torch.equal(one, other)


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
                for _check in (in_a_graph, on_a_late_stream):
                    _text = f"{_check.__name__}-{_case.name}-{_way}-{_name}"
                    CHECKS[_text] = partial(_check, _case, _options, _recipe)
