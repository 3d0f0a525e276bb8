"""The sharded layer of the reference against the unsharded one, and its combined statistics."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from cupynorm.reference.parallel import (
    Shards,
    column_linear,
    column_linear_backward,
    combine,
    row_linear,
    row_linear_backward,
)

from cupynorm import reference

ROWS, IN, OUT = 12, 24, 36
NAMES = ("dx", "dnorm_weight", "dnorm_bias", "dweight", "dbias")


def close(got, expected):
    """Sums of at most 36 terms near 1, in two orders."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=2.0**-53 * 2**8 * np.abs(expected).max())


def problem(centered, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((ROWS, IN)) + 0.5
    norm_weight, norm_bias = 1 + generator.standard_normal((2, IN))
    weight = generator.standard_normal((OUT, IN))
    bias, dy = generator.standard_normal(OUT), generator.standard_normal((ROWS, OUT))
    return x, norm_weight, norm_bias if centered else None, weight, bias, dy


def split(array, num_ranks, axis=0):
    return [None] * num_ranks if array is None else np.split(array, num_ranks, axis)


@pytest.mark.parametrize("num_ranks", (1, 2, 4))
@pytest.mark.parametrize("sequence_parallel", (False, True))
@pytest.mark.parametrize("zero_centered_weight", (False, True))
@pytest.mark.parametrize("centered", (True, False))
def test_column(centered, zero_centered_weight, sequence_parallel, num_ranks):
    x, norm_weight, norm_bias, weight, bias, dy = problem(centered)
    options = {"zero_centered_weight": zero_centered_weight}
    whole = reference.norm_linear(
        x, norm_weight, norm_bias, weight, bias, centered=centered, **options
    )
    dgathered = np.random.default_rng(1).standard_normal((num_ranks, ROWS, IN))
    elsewhere = dgathered.sum(axis=0) if sequence_parallel else None
    right = reference.norm_linear_backward(
        dy,
        x,
        whole.mean,
        whole.rstd,
        norm_weight,
        norm_bias,
        weight=weight,
        dnormalized=elsewhere,
        **options,
    )
    same = [norm_weight] * num_ranks, [norm_bias] * num_ranks
    shards = Shards(*same, split(weight, num_ranks), split(bias, num_ranks))
    own = split(x, num_ranks) if sequence_parallel else [x] * num_ranks
    options["sequence_parallel"] = sequence_parallel
    made = column_linear(own, shards, centered=centered, **options)
    close(np.concatenate([each.y for each in made], 1), whole.y)
    got = column_linear_backward(
        split(dy, num_ranks, 1),
        made,
        shards,
        dgathered=dgathered if sequence_parallel else None,
        **options,
    )
    close(np.concatenate([each.dweight for each in got]), right.dweight)
    close(np.concatenate([each.dbias for each in got]), right.dbias)
    if sequence_parallel:
        close(np.concatenate([each.dx for each in got]), right.dx)
        close(sum(each.dnorm_weight for each in got), right.dnorm_weight)
        close(sum(each.dnorm_bias for each in got), right.dnorm_bias)
    else:
        for name in NAMES[:3]:
            for each in got:
                close(getattr(each, name), getattr(right, name))


@pytest.mark.parametrize("num_ranks", (1, 2, 4))
@pytest.mark.parametrize("sequence_parallel", (False, True))
@pytest.mark.parametrize("zero_centered_weight", (False, True))
@pytest.mark.parametrize("centered", (True, False))
def test_row(centered, zero_centered_weight, sequence_parallel, num_ranks):
    x, norm_weight, norm_bias, weight, bias, dy = problem(centered)
    options = {"zero_centered_weight": zero_centered_weight}
    whole = reference.norm_linear(
        x, norm_weight, norm_bias, weight, bias, centered=centered, **options
    )
    dnormalized = np.random.default_rng(1).standard_normal((ROWS, IN))
    right = reference.norm_linear_backward(
        dy,
        x,
        whole.mean,
        whole.rstd,
        norm_weight,
        norm_bias,
        weight=weight,
        dnormalized=dnormalized,
        **options,
    )
    shards = Shards(
        split(norm_weight, num_ranks),
        split(norm_bias, num_ranks),
        split(weight, num_ranks, 1),
        [bias] * num_ranks,
    )
    options["sequence_parallel"] = sequence_parallel
    made = row_linear(split(x, num_ranks, 1), shards, centered=centered, **options)
    for rank, each in enumerate(made):
        close(each.y, split(whole.y, num_ranks)[rank] if sequence_parallel else whole.y)
        close(each.rstd, whole.rstd)
    close(np.concatenate([each.normalized for each in made], 1), whole.normalized)
    got = row_linear_backward(
        split(dy, num_ranks) if sequence_parallel else [dy] * num_ranks,
        made,
        shards,
        dnormalized=split(dnormalized, num_ranks, 1),
        **options,
    )
    for name, axis in zip(NAMES, (1, 0, 0, 1)):
        close(np.concatenate([getattr(each, name) for each in got], axis), getattr(right, name))
    for each in got:
        close(each.dbias, right.dbias)


@pytest.mark.parametrize("counts", ((1, 1), (7, 17), (3, 3, 18)), ids=str)
def test_combined_statistics_are_those_of_the_row(counts):
    """With a mean of 2^20 standard deviations, where a difference of squares has no right digit."""
    x = np.random.default_rng(0).standard_normal((5, sum(counts))) + 2.0**20
    parts = np.split(x, np.cumsum(counts)[:-1], 1)
    means = [part.mean(axis=1) for part in parts]
    squares = [((part - m[:, None]) ** 2).sum(axis=1) for part, m in zip(parts, means)]
    mean, var = combine(counts, means, squares)
    for row, got_mean, got_var in zip(x, mean, var):
        exact = list(map(Fraction, row.tolist()))
        right = sum(exact) / len(exact)
        assert math.isclose(got_mean, right, rel_tol=2.0**-51)
        spread = sum((each - right) ** 2 for each in exact) / len(exact)
        # The means are off by 2^-53 * 2^20, in standard deviations.
        assert math.isclose(got_var, spread, rel_tol=2.0**-30)
    from_squares = (x**2).mean(axis=1) - x.mean(axis=1) ** 2
    assert np.abs(from_squares / x.var(axis=1) - 1).max() > 2.0**-16
