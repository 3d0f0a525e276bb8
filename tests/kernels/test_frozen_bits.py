"""Kernels write the bits of tests/data/frozen_bits.csv, on the CPU."""

from __future__ import annotations

import csv

import frozen_calls
import numpy as np
import pytest

FAMILIES_OF_A_TEST = 10


def frozen() -> list[tuple[str, str]]:
    with frozen_calls.FILE.open(newline="", encoding="utf-8") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, frozen_calls.NUM_FAMILIES, FAMILIES_OF_A_TEST))
def test_drawn_calls_write_the_bits_of_before(first):
    per_family = frozen_calls.CALLS_OF_A_FAMILY
    expected = frozen()[first * per_family : (first + FAMILIES_OF_A_TEST) * per_family]
    got = [
        row
        for number in range(first, first + FAMILIES_OF_A_TEST)
        for row in frozen_calls.digests_of_family(number)
    ]
    assert len(got) == FAMILIES_OF_A_TEST * per_family
    changed = [line for (line, digest), old in zip(got, expected) if (line, digest) != old]
    assert not changed, "\n".join([f"{len(changed)} of {len(got)} calls differ", *changed])


def test_one_bit_changes_the_digest():
    results = {"y": np.zeros((2, 3), np.uint16)}
    before = frozen_calls.digest(results)
    results["y"][1, 2] = 1
    assert frozen_calls.digest(results) != before
