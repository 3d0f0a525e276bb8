"""layer_norm_linear: what it returns, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from linear_bounds import assert_right, draw

import cupynorm

torch = pytest.importorskip("torch")
from linear_cases import call, leaves, recorded, tensor  # noqa: E402


def test_an_error_of_5_percent_exceeds_the_bounds():
    problem = draw(dtype="bfloat16", dnormalized=True)
    results = recorded(problem)
    assert_right(problem, results, ("sum",))
    for name in ("y", "dx", "dweight", "dbias", "dnorm_weight", "dnorm_bias", "normalized"):
        wrong = results[name].copy()
        wrong.flat[np.argmax(np.abs(wrong))] *= 1.05
        with pytest.raises(AssertionError, match="OFF: 1 of"):
            assert_right(problem, results | {name: wrong}, ("sum",))


def test_returned_tensors():
    problem = draw(residual=True)
    given = leaves(problem)
    y, normalized, added = call(problem, given, return_normalized=True, return_residual=True)
    assert torch.equal(added, given["x"] + given["residual"])
    norm = given["norm_weight"], given["norm_bias"]
    assert torch.equal(normalized, cupynorm.layer_norm(added, 24, *norm))
    assert torch.equal(y, call(problem, given))
    x, *parameters = (given[name] for name in ("x", "norm_weight", "norm_bias", "weight", "bias"))
    assert cupynorm.layer_norm_linear(x, *parameters, return_residual=True)[1] is x
    shaped = cupynorm.layer_norm_linear(x.reshape(1, 5, 24), *parameters)
    assert shaped.shape == (1, 5, 16)
    assert torch.equal(shaped[0], cupynorm.layer_norm_linear(x, *parameters))
    assert cupynorm.layer_norm_linear(x[0], *parameters).shape == (16,)


def test_no_rows_give_empty_results_and_zero_gradients():
    results = recorded(draw(num_rows=0))
    assert results["y"].shape == (0, 16) and results["dx"].shape == (0, 24)
    for name in ("dweight", "dbias", "dnorm_weight", "dnorm_bias"):
        assert results[name].size and not results[name].any()


def test_wrong_arguments_are_refused():
    problem = draw()
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    right = {name: tensor(getattr(problem, name), "float32") for name in names}
    ones = torch.ones
    for wrong, sentence in (
        ({"weight": ones(16, 23)}, r"weight has shape \(16, 23\), input \(5, 24\); expected \(out"),
        ({"weight": ones(24)}, r"weight has shape \(24,\)"),
        ({"bias": ones(24)}, r"bias has shape \(24,\); expected \(16,\)"),
        ({"norm_weight": ones(16)}, r"norm_weight has shape \(16,\); expected \(24,\)"),
        ({"norm_bias": ones(1, 24)}, r"norm_bias has shape \(1, 24\); expected \(24,\)"),
        ({"weight": ones(16, 24).half()}, "weight is of dtype float16, input of float32; expected"),
        ({"weight": None}, "weight is None; expected a"),
        ({"bias": 1.0}, "bias is a float; expected a"),
        ({"bias": ones(16).bfloat16()}, "bias is of dtype bfloat16, input of float32"),
        ({"x": ones(())}, "input has no dimension to normalise over"),
        ({"x": None}, "input is None; expected a torch tensor"),
        ({"norm_weight": ones(24).bool()}, "norm_weight is of dtype bool; expected one of float16"),
    ):
        given = right | wrong
        with pytest.raises((ValueError, TypeError), match=sentence):
            cupynorm.layer_norm_linear(*(given[name] for name in names))
    given = [right[name] for name in names]
    with pytest.raises(ValueError, match="no normalised tensor exists"):
        cupynorm.layer_norm_linear(*given, fused="kernel", return_normalized=True)
    with pytest.raises(ValueError, match="sm_margin is -1"):
        cupynorm.layer_norm_linear(*given, sm_margin=-1)
    for name in names[1:]:
        wrong = right | {name: getattr(problem, name)}
        with pytest.raises(
            ValueError, match=f"{name} is a .*, input is a .*; expected the library and"
        ):
            cupynorm.layer_norm_linear(*(wrong[each] for each in names))
