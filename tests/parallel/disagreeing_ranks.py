"""Checks of ranks that make different calls of one layer, by two processes: see start_ranks.py.

TORCH_DISTRIBUTED_DEBUG=DETAIL is set, by which torch compares collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
from start_ranks import Checks, main
from torch import distributed

from cupynorm import LayerNormLinear, fp8_autocast
from cupynorm.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
)

CHECKS = Checks()
check = CHECKS.add
nothing = contextlib.nullcontext
DELAYED = DelayedScaling()
autocast = partial(torch.autocast, "cpu")


def in_fp8(recipe, **options):
    return partial(fp8_autocast, recipe=recipe, **options)


# The surroundings of the call on rank 0 and on rank 1, and what is said of them.
DIFFERENCES = {
    "recipe": (
        in_fp8(DELAYED),
        in_fp8(BlockScaling()),
        r"recipe of fp8_autocast is BlockScaling\(.* on rank 1 of tp_group and DelayedScaling\(",
    ),
    "format": (
        in_fp8(CurrentScaling()),
        in_fp8(CurrentScaling(Format.E4M3)),
        "fp8_format=E4M3, .* on rank 1 of tp_group and .*fp8_format=HYBRID, .* on rank 0; expected",
    ),
    "margin": (
        in_fp8(DELAYED),
        in_fp8(DelayedScaling(margin=2)),
        "margin=2, .* on rank 1 of tp_group and .*margin=0, .* on rank 0",
    ),
    "region": (in_fp8(DELAYED), nothing, "recipe of fp8_autocast is none on rank 1 of tp_group"),
    "switched off": (in_fp8(DELAYED, enabled=False), in_fp8(DELAYED), "and none on rank 0"),
    "autocast": (
        partial(autocast, torch.bfloat16),
        nothing,
        "which torch.autocast sets, is torch.float32 on rank 1 of tp_group and torch.bfloat16 on",
    ),
    "autocast dtype": (
        partial(autocast, torch.bfloat16),
        partial(autocast, torch.float16),
        "which torch.autocast sets, is torch.float16 on rank 1 of tp_group and torch.bfloat16 on",
    ),
    "gradients": (
        nothing,
        torch.no_grad,
        "recorded for is nothing on rank 1 of tp_group and layer_norm_weight, layer_norm_bias, w",
    ),
}


def make_layer(mode: str, **options) -> LayerNormLinear:
    options = {"sequence_parallel": True, "device": "cpu", "parallel_mode": mode} | options
    return LayerNormLinear(32, 32, tp_group=distributed.group.WORLD, **options)


def refuse(layer, x, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        layer(x)


def differ(mode: str, rank: int) -> None:
    for name, (*surroundings, sentence) in DIFFERENCES.items():
        layer = make_layer(mode)
        x = torch.ones(4, layer.in_features)
        with pytest.raises(ValueError, match=sentence), surroundings[rank]():
            layer(x)
        assert layer(x).isfinite().all(), name


CHECKS |= {f"{mode}_layers_that_differ": partial(differ, mode) for mode in ("column", "row")}


@check
def modules_that_differ(rank):
    layer, x = make_layer("column"), torch.ones(4, 32)
    layer.train(rank == 0)
    refuse(layer, x, "training is False on rank 1 of tp_group and True on rank 0")
    layer.train()
    layer.weight.requires_grad_(rank == 0)
    refuse(layer, x, "recorded for is layer_norm_weight, layer_norm_bias on rank 1 of tp_group")
    for name, value in (("reduce_norm_gradients", True), ("eps", 1e-3)):
        layer = make_layer("column", **{name: value} if rank else {})
        refuse(layer, x, f"{name} is {value} on rank 1 of tp_group and ")


@check
def groups_of_amaxes_that_differ(rank):
    same, alone = distributed.new_group([0, 1]), [distributed.new_group([each]) for each in (0, 1)]
    for group, words in ((same, r".* of ranks \[0, 1\]"), (alone[1], r".* of ranks \[1\]")):
        sentence = (
            f"the group of fp8_autocast is {words} on rank 1 .* and '0' of ranks .* on rank 0"
        )
        with pytest.raises(ValueError, match=sentence):
            with in_fp8(DELAYED, group=group if rank else None)():
                make_layer("column")(torch.ones(4, 32))


@check
def layers_that_differ(rank):
    """Each rank calls one that it has called before, with a shape that is new to both."""
    layers = [make_layer("row") for _ in range(2)]
    for layer in layers:
        layer(torch.ones(4, 16))
    refuse(layers[rank], torch.ones(6, 16), "number in the order of first calls is .* on rank 1 of")
    for layer in layers:
        assert layer(torch.ones(6, 16)).isfinite().all()


@check
def callables_that_each_step_makes_anew(rank):
    """They are one kind: known calls of it are not compared again."""
    layer = make_layer("column")
    for _ in range(3):
        recipe = dataclasses.replace(DELAYED, amax_compute_algo=lambda history: history[0])
        with in_fp8(recipe)():
            layer(torch.ones(4, 32))
    assert len(layer._ranks.known) == 1


@check
def known_kinds_that_differ(rank):
    """Not compared here. It runs last: torch ends the group's use."""
    layer = make_layer("column")
    calls = torch.ones(4, 32), torch.ones(6, 32)
    for x in calls:
        layer(x)
    with pytest.raises(RuntimeError, match="[Dd]etected mismatch between collectives on ranks"):
        layer(calls[rank])


if __name__ == "__main__":
    main(CHECKS)
