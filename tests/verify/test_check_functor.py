"""The check of a functor against its float64 reference: the shipped ones, and wrong ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cupynorm
from cupynorm import functors


def in_halves(num_rows, num_cols):
    return np.tile(np.linspace(-1, 1, num_rows * num_cols // 2).reshape(num_rows, -1), 2)


def in_pairs(num_rows, num_cols):
    angles = np.linspace(-1, 1, num_rows * num_cols // 2).reshape(num_rows, -1)
    return np.repeat(angles, 2, axis=1)


SHIPPED = {
    "silu_gate": {},
    "bias_gelu": {"bias": "cols"},
    "ada_ln": {"scale": "rows", "shift": "cols"},
    "rotary": {"cos": in_halves, "sin": in_halves},
    "rotary_interleaved": {"cos": in_pairs, "sin": in_pairs},
    "layer_scale": {"scale": "cols"},
    "clamp": {"low": -0.5, "high": 0.75},
    "row_scale": {},
    "dropout": {"p": 0.3},
}


def test_every_shipped_functor_is_checked():
    found = {
        name
        for name, each in vars(functors).items()
        if isinstance(each, cupynorm.types.Functor) or name == "dropout"
    }
    assert found - {"_drop"} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_shipped_functors(name, on):
    arrays = SHIPPED[name]
    functor = getattr(functors, name)
    norm = "layer_norm" if len(name) % 2 else "rms_norm"
    given = functor(**arrays) if arrays else functor
    result = cupynorm.check_functor(given, norm=norm, shapes=[(3, 40)], on=on)
    assert result.ok, f"\n{result}"
    tensors = {found.tensor for found in result.findings}
    names = functor.arrays if isinstance(functor, cupynorm.types.Functor) else ()
    assert {"y", "dx", *(f"d{array}" for array in names)} <= tensors


def shifted(x, s, seed):
    return x * s + seed % 7


def test_seeds_and_arrays_per_row():
    """In kernels that have the seed, and in a reference that is given it too."""
    own = cupynorm.functor(
        "shifted",
        "x = x * s + C(seed % 7);",
        arrays=("s",),
        per_row=("s",),
        seeds=("seed",),
        backward="ds = dx * x; dx = dx * s;",
        reference=shifted,
    )
    for given in (own, own("rows", 2**40 + 3)):
        result = cupynorm.check_functor(given, shapes=[(3, 16)], on="cpu")
        assert result.ok, f"\n{result}"
    wrong = replace(own, reference=lambda x, s, seed: shifted(x, s, seed + 1))
    assert "mean" in off(wrong)
    with pytest.raises(
        ValueError, match="shifted.s is 'cols'; expected one of rows, or a function"
    ):
        cupynorm.check_functor(own("cols", 3), on="cpu")


def test_a_result_that_overflows_its_dtype_is_right():
    functor = cupynorm.functor("large", "y = y * C(1e5);", reference=lambda y: y * 1e5)
    result = cupynorm.check_functor(functor, shapes=[(3, 8)], dtypes=["float16"], on="cpu")
    assert any(np.isinf(found.got) for found in result.findings) or result.ok
    assert result.ok, f"\n{result}"


def off(functor):
    """The tensors that are off, and why."""
    result = cupynorm.check_functor(functor, shapes=[(3, 8)], on="cpu")
    return {found.tensor: found.diagnosis.cause for found in result.findings if not found.ok}


def changed(functor, old, new, part="backward"):
    text = getattr(functor, part)
    assert old in text
    return replace(functor, **{part: text.replace(old, new)})


UNKNOWN = "no mistake that is tried explains the numbers"


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("gate * (C(1) - s", "C(1.001) * gate * (C(1) - s", UNKNOWN),
        ("dgate = dy * y * s", "dgate = y * s", "the factor dy is missing"),
        ("dgate = dy", "dgate = -dy", "it has the wrong sign"),
        ("dgate = dy", "const C unused = dy", "the backward lines do not set dgate"),
        (
            "dgate = dy",
            "dy = dy * gate * sigmoid; dgate = dy",
            "dy was overwritten before dgate was computed",
        ),
    ],
)
def test_a_wrong_gradient_of_an_array_is_named(old, new, cause):
    assert off(changed(functors.silu_gate, old, new))["dgate"] == cause


def test_other_wrong_lines_are_named():
    gate, scale = functors.silu_gate, functors.layer_scale
    assert off(changed(gate, "C(1)", "C(1.0001)", "lines")) == {"y": UNKNOWN}
    unchanged = off(changed(gate, "dy = dy * gate * sigmoid;", ""))
    assert unchanged.keys() == {"dx", "dweight", "dbias"}
    assert set(unchanged.values()) == {"the lines do not change dy: the derivative by y is missing"}
    assert off(changed(gate, "y = y", "const C unused = y", "lines")) == {
        "y": "it is that of the norm alone: the lines do not change y"
    }
    assert off(changed(scale, "dx = dx * scale;", "")) == {
        "dx": "the lines do not change dx: the derivative by x is missing"
    }
    early = changed(scale, "dscale = dx * x;", "")
    early = changed(early, "dx = dx * scale;", "dx = dx * scale; dscale = dx * x;")
    assert off(early) == {"dscale": "dx was overwritten before dscale was computed"}


NUMBER = cupynorm.functor(
    "number", "y = y * a * b;", arrays=("a",), numbers=("b",), reference=lambda y, a, b: y * a * b
)


@pytest.mark.parametrize(
    ("functor", "sentence"),
    [
        (
            replace(functors.silu_gate, reference=None),
            "silu_gate has no reference; expected a Python function",
        ),
        (NUMBER, r'numbers b; expected it .* as number\(a="full", b=0.5\)'),
        (
            NUMBER(a="columns", b=1),
            "number.a is 'columns'; expected one of full, cols, rows, one, or a function",
        ),
        (functors.layer_scale(scale=np.ones(8)), "layer_scale.scale is of type ndarray"),
        (
            functors.layer_scale(scale=lambda num_rows, num_cols: np.ones(3)),
            r"has shape \(3,\); expected \(3, 16\), or 1",
        ),
        (3, "a int is no functor; expected one of cupynorm.functor"),
    ],
)
def test_refusals(functor, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        cupynorm.check_functor(functor, shapes=[(3, 16)], on="cpu")


def test_a_shape_whose_derivatives_take_too_much_memory_is_refused():
    with pytest.raises(ValueError, match="shapes has 64 x 768; a functor is differentiated"):
        cupynorm.check_functor(functors.silu_gate, shapes=[(64, 768)], on="cpu")


def test_a_number_without_backward_in_each_strategy():
    launch = [cupynorm.Launch("warp"), cupynorm.Launch("uncached")]
    options = {"shapes": [(3, 16)], "launch": launch, "on": "cpu"}
    result = cupynorm.check_functor(NUMBER(a="rows", b=0.5), **options)
    assert result.ok and [found.tensor for found in result.findings] == ["y", "mean", "rstd"] * 2
    assert "uncached" in result.findings[-1].case
    assert result.not_covered == ["gradients: the functor has no backward lines", "a GPU"]
