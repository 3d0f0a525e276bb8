"""Half of the cases of a parametrised test, by turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def by_turns(*factors: Iterable) -> list[tuple]:
    """Every second case of a product, such that each two values of two factors have a case.

    Of three factors or more, each of two values or more.
    """
    factors = [list(each) for each in factors]
    cases = [
        tuple(each[at] for each, at in zip(factors, places))
        for places in itertools.product(*(range(len(each)) for each in factors))
        if sum(places) % 2 == 0
    ]
    for (_, one), (_, other) in itertools.combinations(enumerate(zip(*cases)), 2):
        assert len({*map(str, zip(one, other))}) == len({*map(str, one)}) * len({*map(str, other)})
    return cases
