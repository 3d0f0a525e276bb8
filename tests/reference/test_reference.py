"""The reference against the textbook formula and central differences.

Kernels are checked against the reference, so it is not compared with the package or with another
library.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cupynorm import reference

REPOSITORY = Path(__file__).parents[2]
NORMS = ("layer_norm", "rms_norm")
SHAPES = ((1, 1), (1, 2), (3, 7), (5, 33), (2, 128))
EPS = 1e-5


def forward(norm, x, weight, bias, **options):
    return getattr(reference, norm)(x, weight, bias, EPS, **options)


def backward(norm, dy, result, weight, **options):
    if norm == "layer_norm":
        return reference.layer_norm_backward(
            dy, result.sum, result.mean, result.rstd, weight, **options
        )
    return reference.rms_norm_backward(dy, result.sum, result.rstd, weight, **options)


def textbook(norm, x, weight, bias, eps):
    """One row at a time in Python floats, with exact sums (math.fsum)."""
    rows = []
    for row in x.tolist():
        mean = math.fsum(row) / len(row) if norm == "layer_norm" else 0.0
        var = math.fsum((value - mean) ** 2 for value in row) / len(row)
        rstd = 1 / math.sqrt(var + eps)
        rows.append(([(v - mean) * rstd * w + b for v, w, b in zip(row, weight, bias)], mean, rstd))
    return tuple(np.array(part) for part in zip(*rows))


def draw(shape, seed=0):
    """x, dy, weight and bias, whose means and spreads make every term of a formula count."""
    generator = np.random.default_rng([seed, *shape])
    x, dy = 3 * generator.standard_normal(shape) + 1.5, generator.standard_normal(shape)
    return x, dy, generator.uniform(0.5, 2, shape[1]), generator.standard_normal(shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_forward_is_the_textbook_formula(norm, shape):
    x, _, weight, bias = draw(shape)
    result = forward(norm, x, weight, bias)
    y, mean, rstd = textbook(norm, x, weight, bias, EPS)
    # Sums of at most 128 terms err by less than 128 * 2^-53 = 1.4e-14 of the terms, about 10 here.
    np.testing.assert_allclose(result.y, y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.rstd, rstd, rtol=1e-12)
    np.testing.assert_array_equal(result.sum, x)
    if norm == "layer_norm":
        np.testing.assert_allclose(result.mean, mean, rtol=1e-12)
    else:
        assert result.mean is None


@pytest.mark.parametrize("norm", NORMS)
def test_options_of_forward_are_those_of_the_formula(norm):
    """No weight is 1, no bias is 0, a zero-centred weight multiplies by 1 + weight."""
    shape = (4, 9)
    x, residual, weight, bias = draw(shape)
    ones, zeros = np.ones(9), np.zeros(9)
    for given, formula in (
        ({"weight": None, "bias": None}, (x, ones, zeros)),
        ({"weight": weight, "bias": None}, (x, weight, zeros)),
        ({"weight": None, "bias": bias}, (x, ones, bias)),
        ({"weight": weight, "bias": bias, "zero_centered_weight": True}, (x, 1 + weight, bias)),
        ({"weight": None, "bias": bias, "zero_centered_weight": True}, (x, ones, bias)),
        ({"weight": weight, "bias": bias, "residual": residual}, (x + residual, weight, bias)),
    ):
        result = forward(norm, x, **given)
        np.testing.assert_allclose(
            result.y, textbook(norm, *formula, EPS)[0], rtol=1e-12, atol=1e-12
        )
        np.testing.assert_array_equal(result.sum, formula[0])


def test_layer_norm_of_a_large_mean_is_accurate():
    """x = 2^27 + small is exact in float64. E[x^2] - E[x]^2 would lose all digits of small."""
    small = np.round(np.random.default_rng(1).standard_normal((3, 64)) * 2**20) / 2**20
    far = small + 2.0**27
    np.testing.assert_array_equal(far - 2.0**27, small)
    result = reference.layer_norm(far, None, None, EPS)
    expected, mean, rstd = textbook("layer_norm", small, np.ones(64), np.zeros(64), EPS)
    np.testing.assert_allclose(result.y, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.rstd, rstd, rtol=1e-12)
    np.testing.assert_allclose(result.mean, 2.0**27 + mean, rtol=2.0**-52)


@pytest.mark.parametrize("norm", NORMS)
def test_rows_that_cannot_be_normalised_are_nan_and_only_those(norm):
    """A constant row, a row of NaN, a row of infinity, and a variance below -eps.

    They do not change other rows.
    """
    x = np.array(
        [
            [2.0, 2.0, 2.0, 2.0],
            [1.0, np.nan, 2.0, 3.0],
            [1.0, np.inf, 2.0, 3.0],
            [1.0, 2.0, 3.0, 5.0],
        ]
    )
    result = forward(norm, x, None, None)
    assert np.isnan(result.y[1]).all()
    assert (
        np.isnan(result.y[2]).all()
        if norm == "layer_norm"
        else np.isnan(result.y[2, 1]) and not result.y[2, [0, 2, 3]].any()
    )
    np.testing.assert_array_equal(result.y[3], forward(norm, x[3:], None, None).y[0])
    constant = 0.0 if norm == "layer_norm" else 2 / math.sqrt(4 + EPS)
    np.testing.assert_allclose(result.y[0], constant, rtol=1e-15, atol=0)
    assert np.isnan(getattr(reference, norm)(x[3:], eps=-1e3).rstd).all()
    assert np.isinf(getattr(reference, norm)(np.zeros((1, 3)), eps=0.0).rstd).all()


def central_differences(function, at):
    """The gradient of a scalar function of an array, to about 1e-9 of the function's values.

    The fourth-order stencil errs by h^4 f^(5) / 30, and by eps64 * |f| / h from rounding. With
    h = 1e-3 both are about 1e-13 for functions whose fifth derivative is of order 1 to 1e3, as for
    rows of a spread of 0.5 or more.
    """
    h = 1e-3
    gradient = np.empty_like(at)
    for index in np.ndindex(at.shape):
        values = []
        for step in (-2, -1, 1, 2):
            moved = at.copy()
            moved[index] += step * h
            values.append(function(moved))
        gradient[index] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
    return gradient


def relative_error(got, expected):
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-300)


# An order above the error of central_differences, 1e-9, and seven below that of a wrong term.
BOUND = 1e-8


@pytest.mark.parametrize("zero_centered", (False, True), ids=("weight", "1+weight"))
@pytest.mark.parametrize("shape", ((3, 7), (2, 3), (4, 33), (1, 16)), ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_central_differences(norm, shape, zero_centered):
    """Of loss = sum(dy * y) + sum(dsum * (x + residual))."""
    x, dy, weight, bias = draw(shape)
    residual, dsum, *_ = draw(shape, seed=1)

    def loss(x=x, residual=residual, weight=weight, bias=bias):
        result = forward(
            norm, x, weight, bias, residual=residual, zero_centered_weight=zero_centered
        )
        return float((dy * result.y).sum() + (dsum * result.sum).sum())

    result = forward(norm, x, weight, bias, residual=residual, zero_centered_weight=zero_centered)
    gradients = backward(norm, dy, result, weight, zero_centered_weight=zero_centered, dsum=dsum)
    for name, got in (
        ("x", gradients.dx),
        ("residual", gradients.dx),
        ("weight", gradients.dweight),
        ("bias", gradients.dbias),
    ):
        at = {"x": x, "residual": residual, "weight": weight, "bias": bias}[name]
        expected = central_differences(lambda moved: loss(**{name: moved}), at)  # noqa: B023
        assert got.shape == at.shape
        assert relative_error(got, expected) < BOUND, name


@pytest.mark.parametrize("norm", NORMS)
def test_x_hat_is_rounded_before_the_weight(norm):
    x, _, weight, bias = draw((3, 7))
    exact = forward(norm, x, None, None).y
    result = forward(norm, x, weight, bias, round_x_hat=lambda x_hat: np.round(x_hat, 1))
    np.testing.assert_array_equal(result.y, np.round(exact, 1) * weight + bias)


# Counter, key and words: the known answers of Random123's tests for philox4x32 with 10 rounds.
ANSWERS = (
    ((0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**64 - 1, 2**64 - 1), 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x85A308D3243F6A88, 0x0370734413198A2E),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize("counter, key, words", ANSWERS)
def test_random_words_are_those_of_philox(counter, key, words):
    from cupynorm.reference.dropout import philox

    assert philox(key, *map(np.uint64, counter)).tolist() == list(words)
    # Only 64 bits of the key count.
    assert philox(key - 2**64, *map(np.uint64, counter)).tolist() == list(words)


def test_a_mask_keeps_the_expected_number_of_elements():
    """Within 5 standard deviations of a binomial, in total and in each column.

    Another seed gives another mask. A mask of longer rows begins with that of shorter ones.
    """
    for p in (0.1, 0.5, 0.9):
        kept = reference.dropout_mask(400, 250, p, 11)
        assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.size)
        assert (abs(kept.mean(axis=0) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / 400)).all()
        assert (kept != reference.dropout_mask(400, 250, p, 12)).mean() > p * (1 - p)
        np.testing.assert_array_equal(reference.dropout_mask(7, 999, p, 11)[:, :250], kept[:7])
    assert (
        reference.dropout_mask(3, 5, 0.0, 1).all()
        and not reference.dropout_mask(3, 5, 1.0, 1).any()
    )


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_without_weight_are_central_differences(norm):
    """dx and dweight are those of a weight of ones."""
    x, dy, _, _ = draw((3, 7))
    result = forward(norm, x, None, None)
    got = backward(norm, dy, result, None)
    expected = central_differences(
        lambda moved: float((dy * forward(norm, moved, None, None).y).sum()), x
    )
    assert relative_error(got.dx, expected) < BOUND
    expected = central_differences(
        lambda moved: float((dy * forward(norm, x, moved, None).y).sum()), np.ones(7)
    )
    assert relative_error(got.dweight, expected) < BOUND
    np.testing.assert_array_equal(got.dbias, dy.sum(axis=0))


@pytest.mark.parametrize("norm", NORMS)
def test_wrong_gradients_exceed_the_bound(norm):
    """Without a term, with a wrong weight, and with another eps."""
    x, dy, weight, bias = draw((3, 7))
    result = forward(norm, x, weight, bias)
    expected = central_differences(
        lambda moved: float((dy * forward(norm, moved, weight, bias).y).sum()), x
    )
    assert relative_error(backward(norm, dy, result, weight).dx, expected) < BOUND
    wdy = dy * weight
    assert relative_error(result.rstd[:, None] * wdy, expected) > 1e3 * BOUND
    assert (
        relative_error(backward(norm, dy, result, weight, zero_centered_weight=True).dx, expected)
        > 1e3 * BOUND
    )
    other = getattr(reference, norm)(x, weight, bias, 1e-3)
    assert relative_error(backward(norm, dy, other, weight).dx, expected) > 1e3 * BOUND


# The linear layer after a norm.


def draw_linear(shape=(3, 7), out_features=4):
    x, _, norm_weight, norm_bias = draw(shape)
    generator = np.random.default_rng(2)
    sizes = {
        "weight": (out_features, shape[1]),
        "bias": (out_features,),
        "dy": (shape[0], out_features),
    }
    others = {name: generator.standard_normal(size) for name, size in sizes.items()}
    return {"x": x, "norm_weight": norm_weight, "norm_bias": norm_bias, **others}


@pytest.mark.parametrize("norm", NORMS)
def test_norm_linear_is_the_norm_and_a_product(norm):
    given = draw_linear()
    dy, centered = given.pop("dy"), norm == "layer_norm"
    made = reference.norm_linear(**given, eps=EPS, centered=centered)
    normalized, mean, rstd = textbook(
        norm, given["x"], given["norm_weight"], given["norm_bias"], EPS
    )
    for row, of_row in enumerate(normalized.tolist()):
        for col, (weights, bias) in enumerate(
            zip(given["weight"].tolist(), given["bias"].tolist())
        ):
            expected = math.fsum([one * other for one, other in zip(of_row, weights)] + [bias])
            assert math.isclose(made.y[row, col], expected, rel_tol=1e-12, abs_tol=1e-12)
    np.testing.assert_allclose(made.normalized, normalized, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(made.rstd, rstd, rtol=1e-12)
    assert centered == (made.mean is not None) and dy.shape == made.y.shape


@pytest.mark.parametrize("zero_centered", (False, True), ids=("weight", "1+weight"))
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_norm_linear_are_central_differences(norm, zero_centered):
    """Of loss = sum(dy * y) + sum(dnormalized * normalized) + sum(dsum * (x + residual))."""
    given = draw_linear()
    dy = given.pop("dy")
    given["residual"], dnormalized, *_ = draw((3, 7), seed=1)
    dsum = draw((3, 7), seed=2)[0]
    options = {"centered": norm == "layer_norm", "zero_centered_weight": zero_centered, "eps": EPS}

    def loss(**moved):
        made = reference.norm_linear(**(given | moved), **options)
        return float(
            (dy * made.y).sum() + (dnormalized * made.normalized).sum() + (dsum * made.sum).sum()
        )

    made = reference.norm_linear(**given, **options)
    parameters, weight = (given["norm_weight"], given["norm_bias"]), given["weight"]
    gradients = reference.norm_linear_backward(
        dy,
        made.sum,
        made.mean,
        made.rstd,
        *parameters,
        weight=weight,
        zero_centered_weight=zero_centered,
        dnormalized=dnormalized,
        dsum=dsum,
    )
    for name, at in given.items():
        got = gradients.dx if name == "residual" else getattr(gradients, f"d{name}")
        expected = central_differences(lambda moved: loss(**{name: moved}), at)  # noqa: B023
        assert got.shape == at.shape
        assert relative_error(got, expected) < BOUND, name
    without = reference.norm_linear_backward(
        dy, made.sum, made.mean, made.rstd, *parameters, weight=weight, dsum=dsum
    )
    assert relative_error(without.dx, gradients.dx) > 1e3 * BOUND


@pytest.mark.parametrize("norm", NORMS)
def test_norm_linear_without_parameters_is_that_of_ones_and_zeros(norm):
    given = draw_linear()
    dy, centered = given.pop("dy"), norm == "layer_norm"
    absent = dict.fromkeys(("norm_weight", "norm_bias", "bias"))
    ones, zeros = np.ones(7), np.zeros(7)
    present = {"norm_weight": ones, "norm_bias": zeros, "bias": np.zeros(4)}
    made, same = (
        reference.norm_linear(**(given | each), centered=centered) for each in (absent, present)
    )
    for got, expected in zip(made, same):
        assert (got is None and expected is None) or np.array_equal(got, expected)
    one, other = (
        reference.norm_linear_backward(
            dy, made.sum, made.mean, made.rstd, *each, weight=given["weight"]
        )
        for each in ((None, None), (ones, zeros))
    )
    for got, expected in zip(one, other):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("zero_centered", (False, True), ids=("weight", "1+weight"))
@pytest.mark.parametrize("norm", NORMS)
def test_a_folded_layer_is_the_same_function(norm, zero_centered):
    given = draw_linear((5, 33))
    given.pop("dy")
    options = {"centered": norm == "layer_norm", "zero_centered_weight": zero_centered}
    made = reference.norm_linear(**given, **options)
    x = given.pop("x")
    folded = reference.fold(**given, **options)
    np.testing.assert_allclose(
        made.rstd[:, None] * (x @ folded.weight.T) + folded.bias, made.y, rtol=0, atol=1e-12
    )
    if norm == "layer_norm":
        np.testing.assert_allclose(folded.weight.sum(axis=1), 0, atol=1e-13)
    without = reference.fold(given["norm_weight"], None, given["weight"], **options)
    np.testing.assert_array_equal(without.weight, folded.weight)
    assert without.bias.shape == (4,) and not without.bias.any()
