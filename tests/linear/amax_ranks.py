"""Checks of how ranks reduce the amaxes of delayed scaling. They run before other layers exist."""

from __future__ import annotations

from torch import distributed
from training_cases import check, gathered, make_layers, random

from cupynorm import fp8_autocast
from cupynorm.recipes import DelayedScaling


@check
def amaxes_are_reduced_once_a_step(rank: int) -> None:
    """Six layers of which each rank skips others, and takes the rest in another order."""
    asked, plain = [], distributed.all_reduce

    def all_reduce(tensor, *arguments, **options):
        asked.append(len(tensor))
        return plain(tensor, *arguments, **options)

    layers, recipe = make_layers(6), DelayedScaling(amax_history_len=3)
    distributed.all_reduce = all_reduce
    order = ((0, 1, 2, 3, 5), (5, 4, 3, 2, 1))[rank]
    largest = {}
    try:
        for step in range(3):
            with fp8_autocast(recipe=recipe):
                y = sum(layers[at](random(8, 16, seed=10 * rank + at)) * (1 + rank) for at in order)
            y.square().sum().backward()
            if step == 0:
                rows = {at: layers[at]._fp8.scales["backward"].amax_history[0, 0] for at in order}
                largest = {at: row.item() for at, row in rows.items()}
    finally:
        distributed.all_reduce = plain
    assert len(asked) == 3 and len(set(asked)) == 1, asked
    states = {
        at: {
            name: (state.scale.tolist(), state.amax_history[1:].tolist())
            for name, state in layers[at]._fp8.scales.items()
        }
        for at in order
    }
    (one, other), (first, second) = gathered(states), gathered(largest)
    shared = one.keys() & other.keys()
    assert shared == {1, 2, 3, 5}
    for at in shared:
        assert one[at] == other[at], (at, one[at], other[at])
        # The amax of the first backward: the larger of both.
        assert first[at] != second[at]
        assert one[at]["backward"][1][0][0] == max(first[at], second[at])


@check
def amaxes_of_a_recipe_without_reduction_stay_those_of_the_rank(rank: int) -> None:
    (layer,), recipe = make_layers(1), DelayedScaling(amax_history_len=3, reduce_amax=False)
    with fp8_autocast(recipe=recipe):
        layer((1 + rank) * random(8, 16, seed=rank))
    one, other = gathered(layer._fp8.scales["forward"].scale.tolist())
    assert one[0] != other[0] and one[1] == other[1]


@check
def a_rank_that_uses_no_layer_takes_part(rank: int) -> None:
    (layer,), recipe = make_layers(1), DelayedScaling(amax_history_len=3)
    with fp8_autocast(recipe=recipe):
        if rank == 0:
            layer(random(8, 16))
    assert not layer._fp8.scales or layer._fp8.scales["forward"].scale[0] != 1
    assert gathered(bool(layer._fp8.scales)) == [True, False]
